"""The prompts of a corpus, each once: what is answered in bulk, not served."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from osd_jax.data import batches
from osd_jax.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
  """One prompt of a corpus.

  Attributes:
    tokens: [n] int32, as the models are given them.
    task_id: place of its task in the config.
    reference: [m] int32 with end-of-sequence unless cut; empty if there is none.
  """

  tokens: np.ndarray
  task_id: int
  reference: np.ndarray


class Corpus(list[Prompt]):
  """Prompts, with what happened to the others.

  Attributes:
    report: what was read, skipped and cut, json-able; see `BatchStream.report`.
    sentences: the same in words.
  """

  def __init__(self, items: Iterable[Prompt], stream: batches.BatchStream):
    super().__init__(items)
    self.report = stream.report()
    self.sentences = stream.sentences()


def prompts(
  config: batches.BatchConfig, vocabulary: Vocabulary, count: int | None = None
) -> Corpus:
  """Reads the prompts of a corpus, each once and in the order of its first epoch.

  Args:
    config: tasks and lengths; batch_size does not matter.
    vocabulary: writes the ids.
    count: how many at most, None for all.
  """
  one = dataclasses.replace(config, batch_size=1)
  stream = batches.BatchStream(one, vocabulary, require_reference=False)
  count = min(stream.rows_per_epoch, count or stream.rows_per_epoch)
  return Corpus((_prompt(stream[index], vocabulary) for index in range(count)), stream)


def _prompt(batch: batches.Batch, vocabulary: Vocabulary) -> Prompt:
  """The only row of a batch."""
  reference = batch.target[0][batch.target[0] != vocabulary.pad_id]
  if len(reference) == 1 and reference[0] in vocabulary.eos_ids:
    reference = reference[:0]  # the data had none
  return Prompt(
    tokens=batch.source[0][batch.source[0] != vocabulary.pad_id],
    task_id=int(batch.task_id[0]),
    reference=reference,
  )
