"""Padded batches of (prompt, reference) for supervised training."""

import dataclasses

import numpy as np

from osd_jax.data.batches import BatchConfig, ExampleSequence
from osd_jax.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """Padded examples.

  Attributes:
    source: [R, S] int32; prompts, then padding.
    target: [R, T] int32; ends in end-of-sequence unless it was cut, then padding.
    task_id: [R] int32; index of the task in the config.
  """

  source: np.ndarray
  target: np.ndarray
  task_id: np.ndarray


class BatchStream(ExampleSequence):
  """Shuffled batches without end: `stream[step]`, for steps in any order."""

  def __init__(self, config: BatchConfig, vocabulary: Vocabulary):
    """Reads every task; examples without a reference are left out.

    Raises:
      InputError: missing files, or a task without usable examples.
      MissingExtraError: a TFDS or seqio source without the extra `data`.
    """
    super().__init__(config, vocabulary, require_reference=True)

  @property
  def pad_id(self) -> int:
    """The id that fills the end of a row."""
    return self.vocabulary.pad_id

  def __getitem__(self, step: int) -> Batch:
    """Returns the batch of a step."""
    config = self.config
    # One shape for every batch, so that a training step is compiled once.
    source = np.full((config.batch_size, config.source_length), self.pad_id, np.int32)
    target = np.full((config.batch_size, config.target_length), self.pad_id, np.int32)
    task_ids = np.zeros(config.batch_size, np.int32)
    for row in range(config.batch_size):
      # A function of the step: a resumed run continues without reading what came
      # before.
      task_id, index = self.find(step * config.batch_size + row)
      prompt, reference = self.tokens(task_id, index)
      source[row, : len(prompt)] = prompt
      target[row, : len(reference)] = reference
      task_ids[row] = task_id
    return Batch(source, target, task_ids)
