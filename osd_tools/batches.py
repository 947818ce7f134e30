"""Padded batches of (prompt, reference) for supervised training."""

import dataclasses
import functools

import numpy as np

from osd_jax.data.batches import BatchConfig, read_corpus
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


class BatchStream:
  """Shuffled batches without end: `stream[step]`, for steps in any order.

  Attributes:
    corpus: the examples of one epoch, all of them with a reference.
    pad_id: the id that fills the end of a row.
  """

  def __init__(self, config: BatchConfig, vocabulary: Vocabulary):
    """Reads every task; examples without a reference are left out.

    Raises:
      InputError: missing files, or a task without usable examples.
      MissingExtraError: a source that needs an extra which is not installed.
    """
    self.corpus = read_corpus(config, vocabulary, require_reference=True)
    self.pad_id, self._config = vocabulary.pad_id, config

  def __getitem__(self, step: int) -> Batch:
    """Returns the batch of a step."""
    config = self._config
    # One shape for every batch, so that a training step is compiled once.
    source = np.full((config.batch_size, config.source_length), self.pad_id, np.int32)
    target = np.full((config.batch_size, config.target_length), self.pad_id, np.int32)
    task_ids = np.zeros(config.batch_size, np.int32)
    for row in range(config.batch_size):
      # A function of the step: a resumed run continues without reading what came
      # before.
      epoch, place = divmod(step * config.batch_size + row, len(self.corpus))
      example = self.corpus[self._order(epoch)[place]]
      source[row, : len(example.tokens)] = example.tokens
      target[row, : len(example.reference)] = example.reference
      task_ids[row] = example.task_id
    return Batch(source, target, task_ids)

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _order(self, epoch: int) -> np.ndarray:
    return np.random.default_rng([self._config.seed, epoch]).permutation(
      len(self.corpus)
    )
