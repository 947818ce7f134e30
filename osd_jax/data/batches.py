"""Corpora: the examples of several tasks in one seeded order."""

import dataclasses
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
    batch_size: R, examples in a batch of supervised training.
    source_length: S in tokens; longer prompts are cut, see `Vocabulary.cut_prompt`.
    target_length: T in tokens; longer references are cut and then have no
      end-of-sequence, since they do not end there.
    seed: of the order, and of the choice that `limit_rows` makes.
    limit_rows: examples kept of each task (one number for all, or one for each), drawn
      with the seed; None keeps all.
  """

  tasks: tuple[TaskConfig, ...]
  batch_size: base.Count = 32
  source_length: Annotated[int, base.AtLeast(2)] = 64
  target_length: base.Count = 96
  seed: base.CountOrZero = 0
  limit_rows: base.Count | tuple[base.Count | None, ...] | None = None

  def checks(self):
    count = len(self.tasks)
    differ = count > 0 and len(examples.unique_tasks(self.tasks)) == count
    return {
      "tasks": (differ, "at least one TaskConfig, each of them once"),
      "limit_rows": (
        len(self.limits()) == count,
        "one limit for all tasks or one per task",
      ),
    }

  def limits(self) -> tuple[int | None, ...]:
    """Returns `limit_rows` of every task."""
    if isinstance(self.limit_rows, tuple):
      return self.limit_rows
    return (self.limit_rows,) * len(self.tasks)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedExample:
  """One example of a corpus as token ids."""

  tokens: np.ndarray  # [n] int32, the prompt as the models read it
  task_id: int  # index of its task in the config
  # [m] int32, with end-of-sequence unless it was cut; empty if there is none.
  reference: np.ndarray


class Corpus(list[EncodedExample]):
  """The examples of a corpus in a seeded order. Made by `read_corpus`."""

  # `examples.report` by name of the task. The counts are `skipped`, `without_reference`
  # (left out), and `cut_prompts` and `cut_references` among the `kept` examples.
  report: dict[str, dict[str, Any]]
  sentences: list[str]  # the same report, one sentence for each task with such examples


def read_corpus(
  config: BatchConfig,
  vocabulary: Vocabulary,
  count: int | None = None,
  require_reference: bool = False,
) -> Corpus:
  """Reads every example of a corpus once, at most `count`; `batch_size` is not used.

  With `require_reference`, examples without a reference are left out. Raises as
  `TaskExamples`.
  """
  tasks = [TaskExamples(task, vocabulary) for task in config.tasks]
  # Token ids are computed on demand: of a large corpus only the chosen examples are
  # encoded.
  numbers_of = [
    _choose(read, limit, config.seed, require_reference)
    for read, limit in zip(tasks, config.limits(), strict=True)
  ]
  orders = [
    examples.order(read.task, len(numbers), config.seed, epoch=0)
    for read, numbers in zip(tasks, numbers_of, strict=True)
  ]
  task_ids = np.repeat(
    np.arange(len(numbers_of)), [len(numbers) for numbers in numbers_of]
  )
  # The 1 keeps these random numbers apart from those of `examples.order`, which start
  # from the same seed.
  task_ids = np.random.default_rng([config.seed, 1, 0]).permutation(task_ids)
  places = list(zip(task_ids, examples.ordinals(task_ids), strict=True))[:count]
  corpus = Corpus(
    _encoded(config, vocabulary, tasks[i], numbers_of[i][orders[i][ordinal]], int(i))
    for i, ordinal in places
  )
  corpus.report = {
    read.task.name: _report(config, read, numbers, require_reference)
    for read, numbers in zip(tasks, numbers_of, strict=True)
  }
  clauses = {
    "without_reference": "{count} without reference left out",
    "cut_prompts": f"{{count}} prompt(s) cut to {config.source_length} tokens",
    "cut_references": f"{{count}} reference(s) cut to {config.target_length} tokens",
  }
  corpus.sentences = examples.sentences(corpus.report, clauses)
  return corpus


def _choose(
  read: TaskExamples, limit: int | None, seed: int, require_reference: bool
) -> list[int]:
  """Leaves out examples without reference, then keeps a seeded choice."""
  usable = [
    number
    for number, example in enumerate(read.examples)
    if example.reference or not require_reference
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
  places = examples.order(read.task, len(usable), seed, epoch=0)[:limit]
  return [usable[place] for place in sorted(places)]


def _encoded(
  config: BatchConfig,
  vocabulary: Vocabulary,
  read: TaskExamples,
  number: int,
  task_id: int,
) -> EncodedExample:
  prompt, reference = read.tokens(number)
  if len(reference) == 1:
    # Only end-of-sequence, which would be scored as an answer.
    reference = reference[:0]
  cut = vocabulary.cut_prompt(prompt, config.source_length)
  return EncodedExample(cut, task_id, reference[: config.target_length])


def _report(
  config: BatchConfig, read: TaskExamples, kept: list[int], require_reference: bool
) -> dict[str, Any]:
  missing = [one.location for one in read.examples if not one.reference]
  account = examples.report(
    read.task.label,
    len(read),
    skipped=read.skipped,
    without_reference=missing if require_reference else (),
    cut_prompts=read.longer_than(config.source_length, 0, kept),
    cut_references=read.longer_than(config.target_length, 1, kept),
  )
  return {**account, "kept": len(kept)}
