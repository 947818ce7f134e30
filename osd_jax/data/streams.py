"""Query streams: which task asks next, and what it asks.

The whole schedule is a function of the config (so of its seed), and the n-th
query of a task is a function of n: a query is found from its index alone, and a
stream resumes from one number.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.data import rows
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class StreamConfig:
  """A stream of `requests_per_task * len(tasks)` queries.

  Attributes:
    tasks: in order of appearance; one may come back later in the tuple.
    kind: a key of `SCHEDULES`: "single" (one task), "sharp" (task after task),
      "gradual" (the next task's share rises linearly around each boundary),
      "mixture" (independent draws), "cyclic" (a task for `period` queries, then
      the next, again and again), "bursty" (runs of random length).
    requests_per_task: queries of each task; on average for "mixture" and
      "bursty".
    seed: of the schedule and of the shuffling.
    reader: "seqio", or "plain" where seqio is not installed; same queries.
    source_length: longest prompt in tokens, end-of-sequence included.
    shuffle: seeded order, new in each pass over a task; False keeps the source's.
    gradual_width: queries over which a gradual shift stretches.
    period: queries in a row of one task in "cyclic".
    mean_burst: mean length of a run in "bursty", queries.
    weights: share of each task in "mixture"; None gives equal shares.
  """

  tasks: tuple[TaskConfig, ...]
  kind: str = "sharp"
  requests_per_task: int = 200
  seed: int = 0
  reader: str = "seqio"
  source_length: int = 64
  shuffle: bool = True
  gradual_width: int = 100
  period: int = 50
  mean_burst: float = 8.0
  weights: tuple[float, ...] | None = None

  def __post_init__(self) -> None:
    rows.check_reader("StreamConfig", self.reader)
    self._check("kind", self.kind in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
    full = isinstance(self.tasks, tuple) and len(self.tasks) > 0
    self._check("tasks", full, "a tuple of at least one TaskConfig")
    rows.unique(self.tasks)
    single = self.kind != "single" or len(self.tasks) == 1
    self._check("tasks", single, "exactly one TaskConfig for kind 'single'")
    several = self.kind not in ("cyclic", "bursty") or len(self.tasks) > 1
    self._check("tasks", several, f"two or more for kind {self.kind!r}")
    for field in ("requests_per_task", "gradual_width", "period", "mean_burst"):
      self._check(field, getattr(self, field) >= 1, "a number >= 1")
    self._check("seed", self.seed >= 0, "an integer >= 0")
    self._check("source_length", self.source_length >= 2, "at least 2 tokens")
    narrow = self.kind != "gradual" or self.gradual_width <= self.requests_per_task
    self._check("gradual_width", narrow, "at most requests_per_task")
    if self.weights is not None:
      fits = len(self.weights) == len(self.tasks) and min(self.weights) > 0
      self._check("weights", fits, "None or one positive share a task")

  def _check(self, field: str, holds: bool, expected: str) -> None:
    if not holds:
      raise base.InputError(
        f"StreamConfig.{field}: received {getattr(self, field)!r}, expected {expected}."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Query:
  """One request of a stream.

  Attributes:
    index: its place in the stream, from 0.
    task: label of its task.
    task_id: number of its task, in order of first appearance in the config.
    prompt: text.
    reference: the data's answer, "" if it has none; the target does not see it.
    tokens: [n] int32, n <= source_length, ends in end-of-sequence.
    row_id: the example's own id, or its place in the data.
  """

  index: int
  task: str
  task_id: int
  prompt: str
  reference: str
  tokens: np.ndarray
  row_id: str


def schedule(config: StreamConfig) -> np.ndarray:
  """Returns which entry of `config.tasks` asks at every step, [total] int32."""
  rng = np.random.default_rng([config.seed, 0])
  return SCHEDULES[config.kind](config, rng).astype(np.int32)


class QueryStream:
  """Iterates over the queries of a config.

  `stream[i]` is the query at place i whatever was read before; iterating only
  counts. A task that runs out of rows starts over, in a new order if shuffled.
  """

  def __init__(self, config: StreamConfig, vocabulary: Vocabulary):
    """Reads every task.

    Args:
      config: the stream.
      vocabulary: writes the ids.

    Raises:
      ImportError: reader "seqio" without the extra `data`.
      ValueError: missing files, or a task without a usable line.
    """
    self.config = config
    self._tasks = rows.unique(config.tasks)
    self._rows = [rows.read(task, vocabulary, config.reader) for task in self._tasks]
    numbers = [self._tasks.index(task) for task in config.tasks]
    self._entries = schedule(config)
    self._task_ids = np.asarray(numbers, np.int32)[self._entries]
    self._ordinals = _ordinals(self._task_ids, len(self._tasks))
    self._index = 0

  def __len__(self) -> int:
    return len(self._task_ids)

  def __iter__(self) -> "QueryStream":
    return self

  def __next__(self) -> Query:
    if self._index >= len(self):
      raise StopIteration
    query = self[self._index]
    self._index += 1
    return query

  def __getitem__(self, index: int) -> Query:
    if not 0 <= index < len(self):
      raise IndexError(f"query {index} of a stream of {len(self)}")
    task_id = int(self._task_ids[index])
    held = self._rows[task_id]
    row = held.rows[self._row_number(task_id, int(self._ordinals[index]))]
    return Query(
      index=index,
      task=held.task.label,
      task_id=task_id,
      prompt=row.prompt,
      reference=row.reference,
      tokens=rows.truncate_source(row.source, self.config.source_length),
      row_id=row.row_id,
    )

  @property
  def labels(self) -> tuple[str, ...]:
    """The label of every `task_id`."""
    return tuple(task.label for task in self._tasks)

  def shifts(self) -> list[tuple[int, str]]:
    """Returns (index, label) where a new segment starts, the first included.

    A gradual shift is named at its middle; a mixture is one segment without a
    label of its own.
    """
    if self.config.kind == "mixture":
      return [(0, "mixture")]
    entries = self._entries
    if self.config.kind == "gradual":
      entries = _in_turn(self.config)
    starts = np.flatnonzero(np.diff(entries, prepend=-1))
    return [(int(i), self.config.tasks[entries[i]].label) for i in starts]

  def state(self) -> dict[str, Any]:
    """Returns what `restore` needs, json-able."""
    return {"index": self._index, "fingerprint": self._fingerprint}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues where `state` was taken.

    Args:
      state: from `state()` of a stream of the same config over the same data.

    Raises:
      ValueError: another stream's state, or the data changed.
    """
    index = state.get("index")
    if state.get("fingerprint") != self._fingerprint:
      raise base.InputError(
        "QueryStream.restore: fingerprint: received"
        f" {state.get('fingerprint')!r}, expected {self._fingerprint!r}: the"
        " state is of another stream config, vocabulary or data. Resume with"
        " what the run began with."
      )
    if not isinstance(index, int) or not 0 <= index <= len(self):
      raise base.InputError(
        f"QueryStream.restore: index: received {index!r}, expected an integer in"
        f" 0..{len(self)}."
      )
    self._index = index

  def report(self) -> dict[str, Any]:
    """Returns what was read, skipped, truncated and served, json-able.

    Returns:
      Totals `requests` (served so far), `truncated` (rows whose prompt is longer
      than `source_length`), `skipped_empty`, `skipped_malformed`, and under
      `tasks` the same for each with `served` and `epochs` (passes begun).
    """
    per_task = {
      held.task.name: self._task_report(task_id, held)
      for task_id, held in enumerate(self._rows)
    }
    totals = {
      key: sum(entry[key] for entry in per_task.values())
      for key in ("truncated", "skipped_empty", "skipped_malformed")
    }
    return {"requests": self._index, **totals, "tasks": per_task}

  def _task_report(self, task_id: int, held: rows.TaskRows) -> dict[str, Any]:
    served = int(np.sum(self._task_ids[: self._index] == task_id))
    too_long = sum(len(row.source) > self.config.source_length for row in held.rows)
    epochs = -(-served // len(held.rows))
    return {
      **rows.skip_report(held),
      "truncated": too_long,
      "served": served,
      "epochs": epochs,
    }

  def _row_number(self, task_id: int, ordinal: int) -> int:
    epoch, place = divmod(ordinal, len(self._rows[task_id].rows))
    return int(self._order(task_id, epoch)[place]) if self.config.shuffle else place

  @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the run)
  def _order(self, task_id: int, epoch: int) -> np.ndarray:
    held = self._rows[task_id]
    return rows.order(held.task, len(held.rows), self.config.seed, epoch)

  @functools.cached_property
  def _fingerprint(self) -> str:
    held = [(part.task.name, part.fingerprint) for part in self._rows]
    config = self.config
    return rows.fingerprint(
      (held, self._task_ids.tolist(), config.seed, config.shuffle, config.source_length)
    )


def _ordinals(task_ids: np.ndarray, count: int) -> np.ndarray:
  """Returns for every step how often its task was asked before, [total]."""
  ordinals = np.zeros(len(task_ids), np.int64)
  for task_id in range(count):
    asked = task_ids == task_id
    ordinals[asked] = np.arange(np.sum(asked))
  return ordinals


def _total(config: StreamConfig) -> int:
  return config.requests_per_task * len(config.tasks)


def _in_turn(config: StreamConfig) -> np.ndarray:
  return np.arange(_total(config)) // config.requests_per_task


def _sharp(config: StreamConfig, rng: np.random.Generator) -> np.ndarray:
  del rng  # nothing is random
  return _in_turn(config)


def _gradual(config: StreamConfig, rng: np.random.Generator) -> np.ndarray:
  """Every step looks up to half a width ahead or back: a linear ramp."""
  total = _total(config)
  offset = config.gradual_width * (rng.random(total) - 0.5)
  place = (np.arange(total) + 0.5 + offset) // config.requests_per_task
  return np.clip(place, 0, len(config.tasks) - 1)


def _mixture(config: StreamConfig, rng: np.random.Generator) -> np.ndarray:
  weights = np.asarray(config.weights or (1.0,) * len(config.tasks), np.float64)
  edges = np.cumsum(weights / weights.sum())[:-1]
  return np.searchsorted(edges, rng.random(_total(config)), side="right")


def _cyclic(config: StreamConfig, rng: np.random.Generator) -> np.ndarray:
  del rng  # nothing is random
  return np.arange(_total(config)) // config.period % len(config.tasks)


def _bursty(config: StreamConfig, rng: np.random.Generator) -> np.ndarray:
  """A run ends with probability 1 / mean_burst; another task follows."""
  total, count = _total(config), len(config.tasks)
  ends = rng.random(total) < 1.0 / config.mean_burst
  jumps = 1 + np.floor(rng.random(total) * (count - 1)).astype(np.int64)
  first = int(rng.random() * count)
  ends[0] = False
  return (first + np.cumsum(np.where(ends, jumps, 0))) % count


Schedule = Callable[[StreamConfig, np.random.Generator], np.ndarray]
SCHEDULES: dict[str, Schedule] = {
  "single": _sharp,
  "sharp": _sharp,
  "gradual": _gradual,
  "mixture": _mixture,
  "cyclic": _cyclic,
  "bursty": _bursty,
}
