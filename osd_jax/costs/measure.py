"""Times several calls in turn, with one estimator, within a budget or while they serve.

The engine supplies the calls, so this module imports no model. Calls are run in turn,
so that other work of the machine slows all of them alike.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from osd_jax.costs.table import prices

LEAST, MOST = 16, 60  # fewest and most turns
ENOUGH = 1.5  # seconds after which `LEAST` turns are enough
REPEATS = 7  # of an update during serving, at most

# Of costs that are learned from the calls that serve:
TIMED_ROUNDS = 2  # of a call that is timed
FIRST_GAP, LONGEST_GAP = 64, 1024  # tokens between two times that calls are timed
SAMPLES = 8  # newest times of a width that count
PRIOR = 0.25  # assumed cost of a drafted token, in plain steps
MARGIN = 1.15  # on prices, because times and survival are noisy
MEMORY = 200.0  # tokens over which the time per token is averaged


def typical(times: Sequence[float]) -> float:
  """Mean of the faster half.

  Other work of the machine only adds to a time. Ratios of these means to that of plain
  steps vary a quarter less than ratios of medians.
  """
  ordered = np.sort(np.asarray(times, float))
  return float(np.mean(ordered[: (len(ordered) + 1) // 2]))


def interleaved(
  calls: Mapping[Any, Callable[[], float]],
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, float]:
  """Returns the typical milliseconds of each call.

  Args:
    calls: name -> function that runs the call once and returns its milliseconds.
      Everything must be compiled.
    seconds: the budget. A turn runs every call once. A first turn always happens, and
      no turn begins that would end after the budget.
    clock: returns seconds; tests replace it with a fake.
  """
  times: dict[Any, list[float]] = {name: [] for name in calls}
  started = clock()
  # In turn and not one after another: a machine that slows down for a second then slows
  # all calls alike.
  for turn in range(1, MOST + 1):
    began = clock()
    for name, call in calls.items():
      times[name].append(call())
    now = clock()
    enough = turn >= LEAST and now - started >= ENOUGH
    if enough or (now - started) + (now - began) > seconds:
      break
  return {name: typical(samples) for name, samples in times.items()}


def lost_ms(
  update: Callable[[Callable[[], bool]], object],
  serve: Callable[[], object],
  steps_until_due: int,
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> float:
  """Milliseconds that serving loses to one update.

  The same steps of serving are timed with an update and without one. The difference is
  the loss, whatever causes it: shared cores, calls that queue behind a slice, or
  serving that waits at the end because the update is due.

  Args:
    update: runs an update; calls its argument while the update runs, until that returns
      False, and then waits for the update.
    serve: runs one step of serving with a request in flight.
    steps_until_due: steps after which serving waits for the update.
    seconds: the budget; one measurement always happens.
    clock: returns seconds; tests replace it with a fake.
  """
  losses, started = [], clock()
  for _ in range(REPEATS):
    began, steps = clock(), 0

    def step() -> bool:
      nonlocal steps
      serve()
      steps += 1
      return steps < steps_until_due

    update(step)
    both = clock() - began
    began_alone = clock()
    # The same steps again without an update; their number came from the first part.
    for _ in range(steps):
      serve()
    now = clock()
    losses.append(both - (now - began_alone))
    if (now - started) + (now - began) > seconds:
      break
  # Differences are noisy in both directions, so that the faster half would be biased.
  return max(float(np.median(losses)) * 1e3, 0.0)


# --- Costs of rounds, learned while serving -------------------------------------------


class LearnedCosts:
  """Costs of rounds that are learned from the calls that serve.

  They are those of one kind of call: a bucket, greedy or sampled, and a number of rows.
  A drafter that decides in each round how much to draft has one compiled call, which
  prices make draft an exact number of tokens. Now and then a short call of each number
  is timed: at first after 64 tokens, then at doubling distances. Until all have been
  timed, tokens have a cautious price.

  Attributes:
    timed: number of tokens that every round of the next call drafts, because it is
      timed; None lets the rounds decide.
  """

  def __init__(self, widths: Sequence[int]):
    """Starts without times; `widths` are the numbers of tokens of a round, 0 first."""
    self.timed: int | None = None
    self._widths = tuple(widths)
    self._times = {k: collections.deque[float](maxlen=SAMPLES) for k in widths}
    self._waiting: list[int] = []  # widths to time next
    self._is_new = True  # the first call may compile
    self._tokens, self._due = 0, 0
    self._rate = 0.0, 0.0  # decayed milliseconds and tokens of calls that decide

  @property
  def is_short(self) -> bool:
    """Whether the next call should be short."""
    return self._is_new or self.timed is not None

  def prices(self, rows: int) -> np.ndarray:
    """Returns the prices of the next call, see `ModelDrafter.propose`."""
    if self.timed is not None:
      is_drafted = np.arange(self._widths[-1]) < self.timed
      return np.where(is_drafted, 0.0, np.inf).astype(np.float32)
    if not all(self._times.values()):
      return prices(self._widths, [1 + PRIOR * k for k in self._widths], 1 / rows)
    times = np.maximum.accumulate([typical(self._times[k]) for k in self._widths])
    ms, tokens = self._rate
    token_ms = min(times[0] / rows, ms / tokens if tokens else np.inf)
    return MARGIN * prices(self._widths, times.tolist(), token_ms)

  def observe(self, rounds: int, tokens: int, ms: float) -> None:
    """Takes the time of a call, and chooses whether the next one is timed."""
    self._tokens += tokens
    if not self._is_new and rounds:
      if self.timed is not None:
        self._times[self.timed].append(ms / rounds)
        self._waiting.remove(self.timed)
      else:
        decay = (1 - 1 / MEMORY) ** tokens
        self._rate = decay * self._rate[0] + ms, decay * self._rate[1] + tokens
    self._is_new = False
    if not self._waiting and self._tokens >= self._due:
      self._waiting = list(self._widths)
      gap = min(max(self._tokens, FIRST_GAP), LONGEST_GAP)
      self._due = self._tokens + gap
    self.timed = self._waiting[0] if self._waiting else None


# --- Time of compiling ----------------------------------------------------------------


class _Compiling(threading.local):
  """Seconds in which a thread traced and compiled, without counting any twice."""

  total = 0.0

  def __init__(self):
    self.spans: list[tuple[float, float]] = []  # start and seconds, in order

  def note(self, event: str, duration_secs: float, **_: Any) -> None:
    """Adds an event of JAX that has just ended."""
    if not event.startswith("/jax/core/compile/"):
      return
    start = time.perf_counter() - duration_secs
    # A function that is traced inside another one ends first.
    while self.spans and self.spans[-1][0] >= start:
      self.total -= self.spans.pop()[1]
    self.spans.append((start, duration_secs))
    self.total += duration_secs


_compiling = _Compiling()
jax.monitoring.register_event_duration_secs_listener(_compiling.note)


def compiling_ms() -> float:
  """Returns the milliseconds that this thread has spent on tracing and compiling."""
  return _compiling.total * 1e3


class Stopwatch:
  """Measures time, except that of compiling."""

  def __init__(self):
    """Starts."""
    self._started, self._compiled = time.perf_counter(), compiling_ms()

  @property
  def ms(self) -> float:
    """Milliseconds since the start."""
    spent = (time.perf_counter() - self._started) * 1e3
    return max(spent - (compiling_ms() - self._compiled), 0.0)
