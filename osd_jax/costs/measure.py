"""Times several calls in turn, with one estimator and within a budget.

The engine supplies the calls, so this module imports no model. Calls are run in turn,
so that other work of the machine slows all of them alike.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

LEAST, MOST = 16, 60  # fewest and most turns
ENOUGH = 1.5  # seconds after which `LEAST` turns are enough
REPEATS = 7  # of an update during serving, at most


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
