"""Supervised batches of (prompt, reference), for pretraining and offline runs.

An epoch holds as many rows as the tasks have together, split among them by
`weights`. The row at any place of the endless sequence is a function of the
place, so batches resume from one number.
"""

import dataclasses
import functools
from typing import Annotated, Any

import numpy as np

from osd_jax import base
from osd_jax.data import rows
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class BatchConfig(base.Config):
  """What the batches hold.

  Attributes:
    tasks: of different names; `task_id` is the place in this tuple.
    batch_size: R, rows of a batch.
    source_length: S in tokens; longer prompts are cut, see `Vocabulary.cut_prompt`.
    target_length: T in tokens; longer references are cut, without
      end-of-sequence, since they do not end there.
    seed: of the order, and of which rows `limit_rows` keeps.
    reader: "plain", or "seqio" to read through the registered Task; same batches.
    limit_rows: rows kept of each task (one number for all, or one a task),
      drawn with the seed; None keeps all.
    weights: share of each task; None mixes by size, so that every row comes once
      an epoch.
  """

  tasks: tuple[TaskConfig, ...]
  batch_size: base.Count = 32
  source_length: Annotated[int, base.AtLeast(2)] = 64
  target_length: base.Count = 96
  seed: base.CountOrZero = 0
  reader: Annotated[str, base.OneOf(*rows.READERS)] = "plain"
  limit_rows: base.Count | tuple[base.Count | None, ...] | None = None
  weights: tuple[float, ...] | None = None

  def checks(self):
    every, limits = len(self.tasks), self.limits()
    return {
      "tasks": (
        every > 0 and len(rows.unique(self.tasks)) == every,
        "at least one TaskConfig, every one once",
      ),
      "limit_rows": (len(limits) == every, "one limit for all tasks or one per task"),
      "weights": (
        self.weights is None or rows.are_shares(self.weights, every),
        "None or one positive number per task",
      ),
    }

  def limits(self) -> tuple[int | None, ...]:
    """Returns the limit of every task."""
    if isinstance(self.limit_rows, tuple):
      return self.limit_rows
    return (self.limit_rows,) * len(self.tasks)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """Padded rows.

  Attributes:
    source: [R, S] int32; prompts, then padding.
    target: [R, T] int32; ends in end-of-sequence unless cut, then padding.
    task_id: [R] int32; place of the task in the config.
  """

  source: np.ndarray
  target: np.ndarray
  task_id: np.ndarray


class BatchStream:
  """Shuffled batches without end: `stream[step]`, whatever was read before."""

  def __init__(
    self,
    config: BatchConfig,
    vocabulary: Vocabulary,
    require_reference: bool = True,
  ):
    """Reads every task.

    Args:
      config: what the batches hold.
      vocabulary: writes the ids.
      require_reference: leave out rows that have no reference.

    Raises:
      MissingExtraError: reader "seqio" without the extra `data`.
      InputError: missing files, or a task without usable rows.
    """
    self.config, self._require_reference = config, require_reference
    self._vocabulary = vocabulary
    self._held = [rows.read(task, vocabulary, config.reader) for task in config.tasks]
    self._rows = [
      self._kept(held, limit)
      for held, limit in zip(self._held, config.limits(), strict=True)
    ]
    sizes = [len(kept) for kept in self._rows]
    self._quotas = _quotas(sizes, config.weights)

  @property
  def pad_id(self) -> int:
    """What rows are filled up with."""
    return self._vocabulary.pad_id

  @property
  def rows_per_epoch(self) -> int:
    """Rows of one pass, over all tasks."""
    return int(self._quotas.sum())

  def __getitem__(self, step: int) -> Batch:
    """Returns the batch of a step."""
    config = self.config
    source = np.full((config.batch_size, config.source_length), self.pad_id, np.int32)
    target = np.full((config.batch_size, config.target_length), self.pad_id, np.int32)
    task_id = np.zeros(config.batch_size, np.int32)
    for at in range(config.batch_size):
      task_id[at], number = self._number_at(step * config.batch_size + at)
      row = self._rows[task_id[at]][number]
      prompt = self._vocabulary.cut_prompt(row.source, config.source_length)
      reference = row.target[: config.target_length]
      source[at, : len(prompt)] = prompt
      target[at, : len(reference)] = reference
    return Batch(source, target, task_id)

  def report(self) -> dict[str, dict[str, Any]]:
    """Returns what was read and what happened to it, json-able.

    Returns:
      For every task's name what `rows.report` says: `rows` read, `skipped`,
      `without_reference` (left out), `cut_prompts` and `cut_references` of the `kept`.
    """
    return {
      held.task.name: {
        **rows.report(
          held.task.label,
          len(held.rows),
          skipped=held.skipped,
          without_reference=[
            row.location
            for row in held.rows
            if self._require_reference and not row.reference
          ],
          cut_prompts=[
            row.location for row in kept if len(row.source) > self.config.source_length
          ],
          cut_references=[
            row.location for row in kept if len(row.target) > self.config.target_length
          ],
        ),
        "kept": len(kept),
      }
      for held, kept in zip(self._held, self._rows, strict=True)
    }

  def sentences(self) -> list[str]:
    """The report in words: one sentence for each task with something to say."""
    clauses = {
      "without_reference": "{count} without reference left out",
      "cut_prompts": f"{{count}} prompts cut to {self.config.source_length} tokens",
      "cut_references": (
        f"{{count}} references cut to {self.config.target_length} tokens"
      ),
    }
    return rows.sentences(self.report(), clauses)

  def _kept(self, held: rows.TaskRows, limit: int | None) -> tuple[rows.Row, ...]:
    """Leaves out rows without a reference, then keeps a seeded choice."""
    usable = [row for row in held.rows if row.reference or not self._require_reference]
    if not usable:
      raise base.InputError(
        f"BatchConfig.tasks: task {held.task.name!r} has {len(held.rows)} rows and"
        " none with a reference, expected at least one; choose another task."
      )
    if limit is None or limit >= len(usable):
      return tuple(usable)
    chosen = rows.order(held.task, len(usable), self.config.seed, epoch=0)[:limit]
    return tuple(usable[number] for number in sorted(chosen))

  def _number_at(self, place: int) -> tuple[int, int]:
    """Returns the task and the kept row at a place of the endless sequence."""
    epoch, offset = divmod(place, self.rows_per_epoch)
    task_ids, ordinals = self._epoch(epoch)
    task_id = int(task_ids[offset])
    seen = epoch * int(self._quotas[task_id]) + int(ordinals[offset])
    turn, number = divmod(seen, len(self._rows[task_id]))
    return task_id, int(self._order(task_id, turn)[number])

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the task of every place of an epoch, and its count there so far."""
    task_ids = np.repeat(np.arange(len(self._quotas)), self._quotas)
    task_ids = np.random.default_rng([self.config.seed, 1, epoch]).permutation(task_ids)
    return task_ids, rows.ordinals(task_ids)

  @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the run)
  def _order(self, task_id: int, turn: int) -> np.ndarray:
    task, kept = self.config.tasks[task_id], self._rows[task_id]
    return rows.order(task, len(kept), self.config.seed, turn)


def _quotas(sizes: list[int], weights: tuple[float, ...] | None) -> np.ndarray:
  """Splits an epoch's rows among the tasks, at least one each, [tasks] int64."""
  if weights is None:
    return np.asarray(sizes, np.int64)
  shares = np.asarray(weights, np.float64) / sum(weights) * sum(sizes)
  return np.maximum(np.rint(shares), 1).astype(np.int64)
