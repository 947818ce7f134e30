"""Corpora: the examples of several tasks in one seeded order.

An epoch has as many examples as the tasks have together, divided among them by
`weights`. The example at any position of the endless sequence is a function of the
position alone, so whatever reads it can resume from one number.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np

from osd_jax import base
from osd_jax.data import examples
from osd_jax.data.examples import TaskConfig, TaskExamples
from osd_jax.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class BatchConfig(base.Config):
  """The examples of a corpus, and the shape of its batches.

  Attributes:
    tasks: different tasks; `task_id` is the index in this tuple.
    batch_size: R, examples in a batch.
    source_length: S in tokens; longer prompts are cut, see `Vocabulary.cut_prompt`.
    target_length: T in tokens; longer references are cut and then have no
      end-of-sequence, since they do not end there.
    seed: of the order, and of the choice that `limit_rows` makes.
    limit_rows: examples kept of each task (one number for all, or one for each), drawn
      with the seed; None keeps all.
    weights: share of each task; None mixes by size, so that every example comes once
      per epoch.
  """

  tasks: tuple[TaskConfig, ...]
  batch_size: base.Count = 32
  source_length: Annotated[int, base.AtLeast(2)] = 64
  target_length: base.Count = 96
  seed: base.CountOrZero = 0
  limit_rows: base.Count | tuple[base.Count | None, ...] | None = None
  weights: tuple[float, ...] | None = None

  def checks(self):
    count = len(self.tasks)
    differ = count > 0 and len(examples.unique_tasks(self.tasks)) == count
    return {
      "tasks": (differ, "at least one TaskConfig, each of them once"),
      "limit_rows": (
        len(self.limits()) == count,
        "one limit for all tasks or one per task",
      ),
      "weights": (
        self.weights is None or examples.are_shares(self.weights, count),
        "None or one positive number per task",
      ),
    }

  def limits(self) -> tuple[int | None, ...]:
    """Returns `limit_rows` of every task."""
    if isinstance(self.limit_rows, tuple):
      return self.limit_rows
    return (self.limit_rows,) * len(self.tasks)


class ExampleSequence:
  """The kept examples of a corpus, with a new order in every epoch."""

  def __init__(
    self, config: BatchConfig, vocabulary: Vocabulary, require_reference: bool
  ):
    """Reads every task.

    With `require_reference`, examples without a reference are left out.

    Raises:
      InputError: missing files, or a task without usable examples.
      MissingExtraError: a TFDS or seqio source without the extra `data`.
    """
    self.config, self.vocabulary = config, vocabulary
    self._require_reference = require_reference
    self.tasks = [TaskExamples(task, vocabulary) for task in config.tasks]
    # Ids are computed later, on demand: of a large corpus only the kept examples are
    # tokenised.
    # For every task, the numbers of the kept examples in the order of the source.
    self.kept: list[list[int]] = [
      self._choose(read, limit)
      for read, limit in zip(self.tasks, config.limits(), strict=True)
    ]
    self._quotas = _quotas([len(numbers) for numbers in self.kept], config.weights)

  @property
  def rows_per_epoch(self) -> int:
    """Examples of one epoch, over all tasks."""
    return int(self._quotas.sum())

  def find(self, place: int) -> tuple[int, int]:
    """Returns the task and the index in its `kept` at a place of the sequence."""
    epoch, offset = divmod(place, self.rows_per_epoch)
    # An example's number within its task counts the task's occurrences in all earlier
    # epochs, so a task whose quota differs from its size continues where the last epoch
    # ended instead of starting over.
    task_ids, ordinals = self._epoch(epoch)
    task_id = int(task_ids[offset])
    earlier = epoch * int(self._quotas[task_id]) + int(ordinals[offset])
    turn, index = divmod(earlier, len(self.kept[task_id]))
    return task_id, int(self._order(task_id, turn)[index])

  def tokens(self, task_id: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a kept example, cut to the config's lengths."""
    prompt, reference = self.tasks[task_id].tokens(self.kept[task_id][index])
    return (
      self.vocabulary.cut_prompt(prompt, self.config.source_length),
      reference[: self.config.target_length],
    )

  def report(self) -> dict[str, dict[str, Any]]:
    """Returns `examples.report` by name of the task.

    The counts are `skipped`, `without_reference` (left out), and `cut_prompts` and
    `cut_references` among the `kept` examples.
    """
    limits = (self.config.source_length, self.config.target_length)
    found = {}
    for read, numbers in zip(self.tasks, self.kept, strict=True):
      # Locations of the kept examples whose prompt or reference is too long.
      cut_prompts, cut_references = (
        [
          read.examples[number].location
          for number in numbers
          if len(read.tokens(number)[part]) > limit
        ]
        for part, limit in enumerate(limits)
      )
      account = examples.report(
        read.task.label,
        len(read),
        skipped=read.skipped,
        without_reference=[
          example.location
          for example in read.examples
          if self._require_reference and not example.reference
        ],
        cut_prompts=cut_prompts,
        cut_references=cut_references,
      )
      found[read.task.name] = {**account, "kept": len(numbers)}
    return found

  def sentences(self) -> list[str]:
    """Returns one sentence for each task with skipped, cut or missing texts."""
    source, target = self.config.source_length, self.config.target_length
    clauses = {
      "without_reference": "{count} without reference left out",
      "cut_prompts": f"{{count}} prompts cut to {source} tokens",
      "cut_references": f"{{count}} references cut to {target} tokens",
    }
    return examples.sentences(self.report(), clauses)

  def _choose(self, read: TaskExamples, limit: int | None) -> list[int]:
    """Leaves out examples without reference, then keeps a seeded choice."""
    usable = [
      number
      for number, example in enumerate(read.examples)
      if example.reference or not self._require_reference
    ]
    if not usable:
      raise base.InputError(
        f"BatchConfig.tasks: task {read.task.name!r} has {len(read)} examples and"
        " none with a reference, expected at least one; choose another task."
      )
    if limit is None or limit >= len(usable):
      return usable
    # Sorted, so that the choice depends on the seed but the order of the kept examples
    # is still the source's, as without a limit.
    chosen = examples.order(read.task, len(usable), self.config.seed, epoch=0)[:limit]
    return [usable[place] for place in sorted(chosen)]

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the task at every place of an epoch, and its earlier occurrences."""
    task_ids = np.repeat(np.arange(len(self._quotas)), self._quotas)
    # The 1 keeps this stream of random numbers apart from those of `examples.order`,
    # which start from the same seed.
    task_ids = np.random.default_rng([self.config.seed, 1, epoch]).permutation(task_ids)
    return task_ids, examples.ordinals(task_ids)

  @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the run)
  def _order(self, task_id: int, turn: int) -> np.ndarray:
    task, count = self.config.tasks[task_id], len(self.kept[task_id])
    return examples.order(task, count, self.config.seed, turn)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedExample:
  """One example of a corpus as token ids.

  Attributes:
    tokens: [n] int32, the prompt as the models read it.
    task_id: index of its task in the config.
    reference: [m] int32, with end-of-sequence unless it was cut; empty if there is
      none.
  """

  tokens: np.ndarray
  task_id: int
  reference: np.ndarray


class Corpus(list[EncodedExample]):
  """The examples of a corpus, with a report on skipped and cut texts.

  Attributes:
    report: see `ExampleSequence.report`.
    sentences: the same report as sentences.
  """

  def __init__(self, found: Iterable[EncodedExample], sequence: ExampleSequence):
    super().__init__(found)
    self.report = sequence.report()
    self.sentences = sequence.sentences()


def read_corpus(
  config: BatchConfig, vocabulary: Vocabulary, count: int | None = None
) -> Corpus:
  """Reads every example of a corpus once, in the order of its first epoch.

  `config.batch_size` is ignored. At most `count` examples are read; None reads all.
  """
  sequence = ExampleSequence(config, vocabulary, require_reference=False)
  total = sequence.rows_per_epoch
  found = []
  for place in range(min(total, count or total)):
    task_id, index = sequence.find(place)
    prompt, reference = sequence.tokens(task_id, index)
    if len(reference) == 1 and reference[0] in vocabulary.eos_ids:
      # Only end-of-sequence: the data set has no reference for this prompt. An empty
      # array tells users so, whereas one token would be scored as an answer.
      reference = reference[:0]
    found.append(EncodedExample(prompt, task_id, reference))
  return Corpus(found, sequence)


def _quotas(sizes: list[int], weights: tuple[float, ...] | None) -> np.ndarray:
  """Divides an epoch among the tasks, at least one example each, [tasks] int64."""
  if weights is None:
    return np.asarray(sizes, np.int64)
  shares = np.asarray(weights, np.float64) / sum(weights) * sum(sizes)
  # At least one example each: a task with a quota of 0 would never be read, although
  # its weight is positive.
  return np.maximum(np.rint(shares), 1).astype(np.int64)
