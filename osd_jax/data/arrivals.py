"""Which task asks at every step of a stream: a function of the config and of sizes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from osd_jax import base
from osd_jax.data import rows
from osd_jax.data.sources import TaskConfig

KINDS = ("single", "sharp", "gradual", "mixture", "cyclic", "bursty")


@dataclasses.dataclass(frozen=True)
class StreamConfig(base.Config):
  """A stream of queries: how many each task asks, and in which order.

  >>> StreamConfig(tasks=(TaskConfig(name="ours", pattern="ours.jsonl"),)).kind
  'sharp'

  Attributes:
    tasks: in order of appearance; one may come back later in the tuple.
    kind: a key of `SCHEDULES`: "single" (one task), "sharp" (task after task),
      "gradual" (the next task's share rises linearly around each boundary),
      "mixture" (tasks mixed at random), "cyclic" (a task for `period` queries, then
      the next, again and again), "bursty" (runs of random length).
    requests_per_task: queries of each task, whatever the kind; a task with fewer rows
      starts over, one with more is not served whole. None serves every row of every
      task once.
    seed: of the schedule and of the shuffling.
    reader: "plain", or "seqio" to read through the registered Task; same queries.
    source_length: longest prompt in tokens, end-of-sequence included.
    shuffle: seeded order, new in each pass over a task; False keeps the source's.
    gradual_width: queries over which a gradual shift stretches.
    period: queries in a row of one task in "cyclic".
    mean_burst: mean length of a run in "bursty", queries.
    weights: share of each task in "mixture"; None gives equal shares. Needs
      `requests_per_task`: without it sizes are the shares.
  """

  tasks: tuple[TaskConfig, ...]
  kind: Annotated[str, base.OneOf(*KINDS)] = "sharp"
  requests_per_task: base.Count | None = None
  seed: base.CountOrZero = 0
  reader: Annotated[str, base.OneOf(*rows.READERS)] = "plain"
  source_length: Annotated[int, base.AtLeast(2)] = 64
  shuffle: bool = True
  gradual_width: base.Count = 100
  period: base.Count = 50
  mean_burst: Annotated[float, base.AtLeast(1)] = 8.0
  weights: tuple[float, ...] | None = None

  def checks(self):
    rows.unique(self.tasks)  # raises if two tasks of one name differ
    count, per_task = len(self.tasks), self.requests_per_task
    fits, expected = {
      "single": (count == 1, "exactly one TaskConfig"),
      "cyclic": (count > 1, "two TaskConfigs or more"),
      "bursty": (count > 1, "two TaskConfigs or more"),
    }.get(self.kind, (count > 0, "at least one TaskConfig"))
    return {
      "tasks": (fits, f"{expected} for kind {self.kind!r}"),
      "gradual_width": (
        self.kind != "gradual" or self.gradual_width <= (per_task or np.inf),
        "at most requests_per_task",
      ),
      "weights": (
        self.weights is None
        or self.kind == "mixture"
        and per_task
        and rows.are_shares(self.weights, count),
        'None, or a positive share for each task of a "mixture" whose'
        " requests_per_task is a number",
      ),
    }


def schedule(config: StreamConfig, sizes: Sequence[int]) -> np.ndarray:
  """Returns which entry of `config.tasks` asks at every step, [total] int32.

  Args:
    config: the stream.
    sizes: rows of every entry.

  Raises:
    InputError: a task is too short for `gradual_width`.
  """
  per_task = config.requests_per_task
  counts = np.asarray(sizes if per_task is None else _shares(config, per_task), int)
  rng = np.random.default_rng([config.seed, 0])
  return SCHEDULES[config.kind](config, counts, rng).astype(np.int32)


def _shares(config: StreamConfig, per_task: int) -> np.ndarray:
  """Queries of every entry where their number is asked for, [entries]."""
  count = len(config.tasks)
  if config.kind != "mixture" or config.weights is None:
    return np.full(count, per_task)
  ends = np.cumsum(config.weights) / sum(config.weights) * count * per_task
  return np.diff(np.rint(ends), prepend=0)


def _sharp(config: StreamConfig, counts: np.ndarray, rng: np.random.Generator):
  del config, rng  # nothing is random
  return np.repeat(np.arange(len(counts)), counts)


def _gradual(config: StreamConfig, counts: np.ndarray, rng: np.random.Generator):
  """Every query comes up to half a width earlier or later: a linear ramp."""
  if config.gradual_width > counts.min():
    raise base.InputError(
      f"StreamConfig.gradual_width: received {config.gradual_width}, expected at most"
      f" {counts.min()}, the queries of the shortest task."
    )
  entries = _sharp(config, counts, rng)
  offset = config.gradual_width * (rng.random(len(entries)) - 0.5)
  return entries[np.argsort(np.arange(len(entries)) + offset)]


def _mixture(config: StreamConfig, counts: np.ndarray, rng: np.random.Generator):
  return rng.permutation(_sharp(config, counts, rng))


def _cyclic(config: StreamConfig, counts: np.ndarray, rng: np.random.Generator):
  """By the turn of every query, then by task; one that ran out is passed over."""
  entries = _sharp(config, counts, rng)
  return entries[np.lexsort((entries, rows.ordinals(entries) // config.period))]


def _bursty(config: StreamConfig, counts: np.ndarray, rng: np.random.Generator):
  """A run ends with probability 1 / mean_burst; another task that has rows follows."""
  left, entries = counts.copy(), np.empty(counts.sum(), np.int64)
  ends, draws = rng.random((2, len(entries)))
  current = int(rng.integers(len(counts)))
  for step in range(len(entries)):
    others = [entry for entry in np.flatnonzero(left) if entry != current]
    if left[current] == 0 or others and step and ends[step] < 1 / config.mean_burst:
      current = others[int(draws[step] * len(others))]
    entries[step] = current
    left[current] -= 1
  return entries


SCHEDULES: dict[
  str, Callable[[StreamConfig, np.ndarray, np.random.Generator], np.ndarray]
] = {
  "single": _sharp,
  "sharp": _sharp,
  "gradual": _gradual,
  "mixture": _mixture,
  "cyclic": _cyclic,
  "bursty": _bursty,
}
