"""When to update the draft: at a fixed interval, paused while overlap is flat.

A schedule is a pair of functions, as in optax:

    state = schedule.init()
    state, slices = schedule.update(state, Request(overlap, tokens, slices), costs)

`update` is called once per finished request. It returns how many slices the update that
starts now has, 0 for no update. Schedules are plain Python and never read a clock, so
that a run repeats exactly.

The overlap of a single request is noisy (standard deviation about 0.15), so
`ScheduleConfig` compares means over windows:

  active -> paused   for `pause_after_flat` requests in a row, the mean of the last
                     window is neither better than that of the window before by
                     `flat_tolerance` nor worse by `DRIFT_DROP`; or at once if it is
                     at least `enough`
  paused -> active   the mean of the last `RESUME_WINDOW` requests is `RESUME_DROP`
                     below the level at the pause (a shift), or the mean of the last
                     `DRIFT_WINDOW` is `DRIFT_DROP` below it (a drift)
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from osd_jax import base
from osd_jax.costs.table import Costs

# With noise of 0.15 per request, these give less than one false resumption in 1,000
# requests, and notice a drop of 0.3 within 8 requests.
RESUME_WINDOW, RESUME_DROP = 8, 0.2
DRIFT_WINDOW, DRIFT_DROP = 100, 0.075


class Request(NamedTuple):
  """A finished request, as a schedule sees it.

  Attributes:
    overlap: mean distribution overlap, 0..1, measured before the draft trained on it.
    tokens: emitted tokens.
    slices: the most slices that an update may have now; 0 while one is running.
  """

  overlap: float
  tokens: int
  slices: int


@runtime_checkable
class Schedule(Protocol):
  """Decides when updates happen.

  Its state is a dataclass of JSON values, with a field `paused`. A checkpoint stores
  `dataclasses.asdict(state)`, and the class of the state accepts these fields again.
  """

  @property
  def update_interval(self) -> int:
    """Requests from the start of an update until its draft serves."""
    ...

  def init(self) -> Any:
    """Returns the state before the first request."""
    ...

  def update(
    self, state: Any, request: Request, costs: Costs | None
  ) -> tuple[Any, int]:
    """Returns the next state, and the slices of the update that starts now.

    Args:
      state: the state before this request.
      request: the request that has just finished.
      costs: measured costs of this machine, or None if they are unknown.
    """
    ...


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(base.Config):
  """Updates at a fixed interval. All windows are counted in finished requests.

  Attributes:
    update_interval: I, requests from one update to the next.
    pause: whether updates ever pause.
    window: length of the two windows whose means are compared.
    flat_tolerance: improvement between the windows that still counts as flat.
    pause_after_flat: requests in a row that must look flat before a pause.
    enough: mean overlap of a window at which updates pause; 1 for never.
    much_to_gain: gap to an overlap of 1 from which on an update has all its slices.
      A smaller gap shortens it in proportion, to one slice at least. 0 never shortens.
  """

  update_interval: base.Count = 8
  pause: bool = True
  window: base.Count = 25
  flat_tolerance: base.Share = 0.02
  pause_after_flat: base.Count = 25
  enough: base.Share = 1.0
  much_to_gain: base.Share = 0.0

  def init(self) -> "ScheduleState":
    """Returns the state before the first request."""
    return ScheduleState()

  def update(
    self, state: "ScheduleState", request: Request, costs: Costs | None = None
  ) -> tuple["ScheduleState", int]:
    """See `Schedule.update`. Costs are not used."""
    del costs
    overlap = checked_overlap(state.finished, request.overlap)
    recent = (*state.recent, overlap)[-self.history :]
    state = dataclasses.replace(state, finished=state.finished + 1, recent=recent)
    if self.pause:
      state = _resume(state) if state.paused else _pause(self, state)
    waited = state.finished - state.last_update
    if state.paused or not request.slices or waited < self.update_interval:
      return state, 0
    launched = dataclasses.replace(
      state, last_update=state.finished, updates=state.updates + 1
    )
    # Rounding must not turn 8.000000001 slices into 9.
    slices = math.ceil(request.slices * _share(self, state) - 1e-6)
    return launched, max(slices, 1)

  @property
  def history(self) -> int:
    """Number of overlaps that the state keeps."""
    return max(2 * self.window, RESUME_WINDOW, DRIFT_WINDOW)


@dataclasses.dataclass(frozen=True)
class ScheduleState:
  """State of `ScheduleConfig`.

  Attributes:
    finished: requests seen.
    last_update: `finished` when the last update started.
    updates: updates started.
    recent: overlaps of the last requests, oldest first.
    flat: requests in a row that looked flat.
    paused: whether updates are paused.
    level: mean overlap at the last pause; None before the first.
    changed: `finished` at the last pause or resumption.
    pauses: number of pauses.
  """

  finished: int = 0
  last_update: int = 0
  updates: int = 0
  recent: tuple[float, ...] = ()
  flat: int = 0
  paused: bool = False
  level: float | None = None
  changed: int = 0
  pauses: int = 0

  def __post_init__(self):
    object.__setattr__(self, "recent", tuple(self.recent))  # JSON has no tuples


def checked_overlap(request: int, overlap: float) -> float:
  """Returns the overlap of a request as a float.

  Raises:
    InputError: it is not a number in 0..1.
  """
  overlap = float(overlap)
  # The sum over float32 probabilities may exceed 1 by rounding.
  if not 0.0 <= overlap <= 1.0 + 1e-3:
    raise base.InputError(
      f"Schedule.update: overlap of request {request} is {overlap!r}, expected a"
      " number in 0..1; pass the mean over its emitted positions."
    )
  return overlap


def _share(config: ScheduleConfig, state: ScheduleState) -> float:
  """Returns the share of an update's slices that the remaining gap justifies."""
  if not config.much_to_gain:
    return 1.0
  gap = 1.0 - _mean(state.recent[-RESUME_WINDOW:])
  return min(gap / config.much_to_gain, 1.0)


def _pause(config: ScheduleConfig, state: ScheduleState) -> ScheduleState:
  """Pauses if overlap is high enough, or has been flat for long enough."""
  size = config.window
  newer, older = state.recent[-size:], state.recent[-2 * size : -size]
  # After a resumption the window must be full of requests that came since then.
  full = len(newer) == size and state.finished - state.changed >= size
  if full and config.enough < 1 and _mean(newer) >= config.enough:
    return _paused(state, _mean(newer))
  if len(older) < size:
    return state
  # A clear loss is not flat: after a shift the draft has much to learn again.
  gain = _mean(newer) - _mean(older)
  flat = state.flat + 1 if -DRIFT_DROP < gain < config.flat_tolerance else 0
  if flat < config.pause_after_flat:
    return dataclasses.replace(state, flat=flat)
  # The mean of both windows is the level, because it does not depend on their
  # difference, by which this moment was chosen.
  return _paused(state, _mean(older + newer))


def _paused(state: ScheduleState, level: float) -> ScheduleState:
  return dataclasses.replace(
    state,
    flat=0,
    paused=True,
    level=level,
    changed=state.finished,
    pauses=state.pauses + 1,
  )


def _resume(state: ScheduleState) -> ScheduleState:
  """Resumes if overlap has dropped, sharply or slowly."""
  level = state.level if state.level is not None else 0.0
  sharp = _mean(state.recent[-RESUME_WINDOW:]) < level - RESUME_DROP
  # Overlaps from before the pause may be low: the long window must lie after it.
  rested = state.finished - state.changed >= DRIFT_WINDOW
  slow = rested and _mean(state.recent[-DRIFT_WINDOW:]) < level - DRIFT_DROP
  if not (sharp or slow):
    return state
  return dataclasses.replace(state, paused=False, flat=0, changed=state.finished)


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)
