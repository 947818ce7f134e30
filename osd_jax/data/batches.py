"""Supervised batches of (prompt, reference), for pretraining and offline runs.

An epoch holds as many rows as the tasks have together, split among them by
`weights`. The row at any place of the endless sequence is a function of the
place, so batches resume from one number.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.base import PAD_ID
from osd_jax.data import rows
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """What the batches hold.

  Attributes:
    tasks: of different names; `task_id` is the place in this tuple.
    batch_size: R, rows of a batch.
    source_length: S in tokens; longer prompts are cut, end-of-sequence kept.
    target_length: T in tokens; longer references are cut, without
      end-of-sequence, since they do not end there.
    seed: of the order, and of which rows `limit_rows` keeps.
    reader: "seqio", or "plain" where seqio is not installed; same batches.
    limit_rows: rows kept of each task (one number for all, or one a task),
      drawn with the seed; None keeps all.
    weights: share of each task; None mixes by size, so that every row comes once
      an epoch.
    require_reference: leave out rows that have no reference.
  """

  tasks: tuple[TaskConfig, ...]
  batch_size: int = 32
  source_length: int = 64
  target_length: int = 96
  seed: int = 0
  reader: str = "seqio"
  limit_rows: int | tuple[int, ...] | None = None
  weights: tuple[float, ...] | None = None
  require_reference: bool = True

  def __post_init__(self) -> None:
    rows.check_reader("BatchConfig", self.reader)
    full = isinstance(self.tasks, tuple) and len(self.tasks) > 0
    self._check("tasks", full, "a tuple of at least one TaskConfig")
    different = len(rows.unique(self.tasks)) == len(self.tasks)
    self._check("tasks", different, "every task once")
    self._check("batch_size", self.batch_size >= 1, "an integer >= 1")
    self._check("source_length", self.source_length >= 2, "at least 2 tokens")
    self._check("target_length", self.target_length >= 1, "at least 1 token")
    self._check("seed", self.seed >= 0, "an integer >= 0")
    for field in ("limit_rows", "weights"):
      value = getattr(self, field)
      if isinstance(value, tuple):
        fits = len(value) == len(self.tasks) and min(value) > 0
        self._check(field, fits, "one positive number a task")
    if isinstance(self.limit_rows, int):
      self._check("limit_rows", self.limit_rows >= 1, "None or at least 1")

  def limits(self) -> tuple[int | None, ...]:
    """Returns the limit of every task."""
    if isinstance(self.limit_rows, tuple):
      return self.limit_rows
    return (self.limit_rows,) * len(self.tasks)

  def _check(self, field: str, holds: bool, expected: str) -> None:
    if not holds:
      raise base.InputError(
        f"BatchConfig.{field}: received {getattr(self, field)!r}, expected {expected}."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """Padded rows.

  Attributes:
    source: [R, S] int32; each prompt ends in end-of-sequence, then padding.
    target: [R, T] int32; ends in end-of-sequence unless cut, then padding.
    task_id: [R] int32; place of the task in the config.
  """

  source: np.ndarray
  target: np.ndarray
  task_id: np.ndarray


class BatchStream:
  """Iterates for ever over shuffled batches. Made by `batches`."""

  def __init__(self, config: BatchConfig, vocabulary: Vocabulary):
    """Reads every task; raises as `batches` does."""
    self.config = config
    self._held = [rows.read(task, vocabulary, config.reader) for task in config.tasks]
    self._rows = [
      _kept_rows(held, limit, config)
      for held, limit in zip(self._held, config.limits(), strict=True)
    ]
    sizes = [len(kept) for kept in self._rows]
    self._quotas = _quotas(sizes, config.weights)
    self._step = 0

  @property
  def rows_per_epoch(self) -> int:
    """Rows of one pass, over all tasks."""
    return int(self._quotas.sum())

  def __iter__(self) -> "BatchStream":
    return self

  def __next__(self) -> Batch:
    batch = self[self._step]
    self._step += 1
    return batch

  def __getitem__(self, step: int) -> Batch:
    """Returns the batch of a step, whatever was read before."""
    if step < 0:
      raise IndexError(f"batch {step}: batches are counted from 0")
    size = self.config.batch_size
    return self._pad([self._row_at(step * size + i) for i in range(size)])

  def state(self) -> dict[str, Any]:
    """Returns what `restore` needs, json-able."""
    return {"step": self._step, "fingerprint": self._fingerprint}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues where `state` was taken.

    Args:
      state: from `state()` of batches of the same config over the same data.

    Raises:
      ValueError: the state of other batches.
    """
    step = state.get("step")
    if state.get("fingerprint") != self._fingerprint:
      raise base.InputError(
        "BatchStream.restore: fingerprint: received"
        f" {state.get('fingerprint')!r}, expected {self._fingerprint!r}: the"
        " state is of another config, vocabulary or data. Resume with what the"
        " run began with."
      )
    if not isinstance(step, int) or step < 0:
      raise base.InputError(
        f"BatchStream.restore: step: received {step!r}, expected an integer >= 0."
      )
    self._step = step

  def report(self) -> dict[str, Any]:
    """Returns what was read, skipped and truncated, json-able.

    Returns:
      Totals `rows`, `truncated_source`, `truncated_target` (rows kept that are
      too long), `skipped_empty`, `skipped_malformed`, `skipped_no_reference`,
      and the same for each task under `tasks`.
    """
    per_task = {
      held.task.name: self._task_report(held, kept)
      for held, kept in zip(self._held, self._rows, strict=True)
    }
    counts = (
      "rows",
      "truncated_source",
      "truncated_target",
      "skipped_empty",
      "skipped_malformed",
      "skipped_no_reference",
    )
    totals = {key: sum(task[key] for task in per_task.values()) for key in counts}
    return {**totals, "rows_per_epoch": self.rows_per_epoch, "tasks": per_task}

  def _task_report(
    self, held: rows.TaskRows, kept: tuple[rows.Row, ...]
  ) -> dict[str, Any]:
    config = self.config
    without = sum(not row.reference for row in held.rows)
    return {
      **rows.skip_report(held),
      "rows": len(kept),
      "truncated_source": sum(len(r.source) > config.source_length for r in kept),
      "truncated_target": sum(len(r.target) > config.target_length for r in kept),
      "skipped_no_reference": without if config.require_reference else 0,
    }

  def _row_at(self, place: int) -> tuple[int, rows.Row]:
    """Returns the task and the row at a place of the endless sequence."""
    epoch, offset = divmod(place, self.rows_per_epoch)
    task_ids, ordinals = self._epoch(epoch)
    task_id = int(task_ids[offset])
    seen = epoch * int(self._quotas[task_id]) + int(ordinals[offset])
    kept = self._rows[task_id]
    turn, number = divmod(seen, len(kept))
    return task_id, kept[self._order(task_id, turn)[number]]

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the task of every place of an epoch, and its count there so far."""
    task_ids = np.repeat(np.arange(len(self._quotas)), self._quotas)
    task_ids = np.random.default_rng([self.config.seed, 1, epoch]).permutation(task_ids)
    ordinals = np.zeros(len(task_ids), np.int64)
    for task_id, quota in enumerate(self._quotas):
      ordinals[task_ids == task_id] = np.arange(quota)
    return task_ids, ordinals

  @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the run)
  def _order(self, task_id: int, turn: int) -> np.ndarray:
    task, kept = self.config.tasks[task_id], self._rows[task_id]
    return rows.order(task, len(kept), self.config.seed, turn)

  def _pad(self, found: list[tuple[int, rows.Row]]) -> Batch:
    config = self.config
    source = np.full((len(found), config.source_length), PAD_ID, np.int32)
    target = np.full((len(found), config.target_length), PAD_ID, np.int32)
    for place, (_, row) in enumerate(found):
      prompt = rows.truncate_source(row.source, config.source_length)
      reference = row.target[: config.target_length]
      source[place, : len(prompt)] = prompt
      target[place, : len(reference)] = reference
    return Batch(source, target, np.asarray([i for i, _ in found], np.int32))

  @functools.cached_property
  def _fingerprint(self) -> str:
    held = [(part.task.name, part.fingerprint) for part in self._held]
    decisive = [
      (field.name, getattr(self.config, field.name))
      for field in dataclasses.fields(self.config)
      if field.name not in ("tasks", "reader")  # the rows speak for these
    ]
    return rows.fingerprint((held, decisive))


def batches(config: BatchConfig, vocabulary: Vocabulary) -> BatchStream:
  """Reads the tasks and returns endless batches.

  Args:
    config: what they hold.
    vocabulary: writes the ids.

  Returns:
    An iterator of `Batch` with `state`, `restore` and `report`.

  Raises:
    ImportError: reader "seqio" without the extra `data`.
    ValueError: missing files, or a task without usable rows.
  """
  return BatchStream(config, vocabulary)


def _kept_rows(
  held: rows.TaskRows, limit: int | None, config: BatchConfig
) -> tuple[rows.Row, ...]:
  """Leaves out rows without a reference, then keeps a seeded choice."""
  usable = [row for row in held.rows if row.reference or not config.require_reference]
  if not usable:
    raise base.InputError(
      f"BatchConfig.tasks: task {held.task.name!r} has {len(held.rows)} rows and"
      " none with a reference, expected at least one; choose another task, or set"
      " require_reference=False."
    )
  if limit is None or limit >= len(usable):
    return tuple(usable)
  chosen = rows.order(held.task, len(usable), config.seed, epoch=0)[:limit]
  return tuple(usable[number] for number in sorted(chosen))


def _quotas(sizes: list[int], weights: tuple[float, ...] | None) -> np.ndarray:
  """Splits an epoch's rows among the tasks, at least one each, [tasks] int64."""
  if weights is None:
    return np.asarray(sizes, np.int64)
  shares = np.asarray(weights, np.float64) / sum(weights) * sum(sizes)
  return np.maximum(np.rint(shares), 1).astype(np.int64)
