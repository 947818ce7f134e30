"""When an update is due: every I finished requests, paused while overlap is flat.

Host logic in plain Python. It reads nothing but the overlaps it is shown, in finish
order, and never a clock, so a run repeats exactly. Overlap of one request is noisy
(standard deviation about .15), hence means over windows and bands around them:

  active -> paused   for `pause_after_flat` requests in a row, the trailing window is
                     neither better than the window before by `flat_tolerance` nor
                     worse by `drift_drop`; or at once if its mean is `enough`
  paused -> active   the mean of the last `resume_window` requests lies `resume_drop`
                     below the level at pausing (a shift), or the mean of the last
                     `drift_window` lies `drift_drop` below it (a slow drift)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

from osd_jax import base


@runtime_checkable
class Schedule(Protocol):
  """When updates happen; `ScheduleConfig` is one. Its states are dataclasses of JSON.

  A state has a field `paused`: whether updates are paused.
  """

  @property
  def update_interval(self) -> int:
    """Requests from the launch of an update to its swap."""
    ...

  def initial(self) -> Any:
    """The state before the first request."""
    ...

  def restored(self, fields: Mapping[str, Any]) -> Any:
    """The state that `dataclasses.asdict` made `fields` of."""
    ...

  def observe(self, state: Any, overlap: float) -> Any:
    """The state after one more request, of that overlap."""
    ...

  def is_due(self, state: Any) -> bool:
    """Whether an update should start now."""
    ...

  def launched(self, state: Any) -> Any:
    """The state after an update was started."""
    ...


@runtime_checkable
class Sparing(Protocol):
  """A `Schedule` whose updates are shorter where less is to be gained."""

  def share(self, state: Any) -> float:
    """Share of its slices that an update launched now shall take, in 0..1."""
    ...


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(base.Config):
  """The rhythm of updates. All windows are counted in finished requests.

  The defaults fit noise of .15 a request: fewer than one false toggle in 1,000
  requests, a drop of .3 seen within 8 requests. Calmer overlaps allow less.

  Attributes:
    update_interval: I, requests from one update to the next.
    pause: whether updates ever pause.
    window: length of the two windows whose means are compared.
    flat_tolerance: improvement between the windows that still counts as flat.
    pause_after_flat: requests in a row that must look flat before a pause.
    enough: mean overlap of a window that leaves too little to gain; 1 never.
    resume_window: length of the short mean that sees a sharp drop.
    resume_drop: how far the short mean falls below the level at pausing.
    drift_window: length of the long mean that sees a slow drop.
    drift_drop: how far the long mean falls below the level at pausing.
    much_to_gain: overlap that the last `resume_window` requests lack for an update to
      take all its slices; where they lack less it takes as much less, one at least.
      0 takes all always.
  """

  update_interval: base.Count = 8
  pause: bool = True
  window: base.Count = 25
  flat_tolerance: base.Share = 0.02
  pause_after_flat: base.Count = 25
  enough: base.Share = 1.0
  resume_window: base.Count = 8
  resume_drop: Annotated[float, base.Above(0), base.AtMost(1)] = 0.2
  drift_window: base.Count = 100
  drift_drop: Annotated[float, base.Above(0), base.AtMost(1)] = 0.075
  much_to_gain: base.Share = 0.0

  def initial(self) -> "ScheduleState":
    """Before the first request."""
    return ScheduleState()

  def restored(self, fields: Mapping[str, Any]) -> "ScheduleState":
    """The state that `dataclasses.asdict` made `fields` of."""
    return ScheduleState(**fields)

  def observe(self, state: "ScheduleState", overlap: float) -> "ScheduleState":
    """See `observe`."""
    return observe(self, state, overlap)

  def is_due(self, state: "ScheduleState") -> bool:
    """See `update_due`."""
    return update_due(self, state)

  def launched(self, state: "ScheduleState") -> "ScheduleState":
    """See `updated`."""
    return updated(self, state)

  def share(self, state: "ScheduleState") -> float:
    """See `Sparing`."""
    recent = state.recent[-self.resume_window :]
    if not self.much_to_gain or not recent:
      return 1.0
    return min(1.0, (1.0 - _mean(recent)) / self.much_to_gain)

  @property
  def history(self) -> int:
    """How many overlaps the state keeps."""
    return max(2 * self.window, self.resume_window, self.drift_window)


@dataclasses.dataclass(frozen=True)
class ScheduleState:
  """What the schedule carries; `ScheduleState(**json)` restores `asdict(state)`.

  Attributes:
    finished: requests seen.
    last_update: `finished` at the last update.
    updates: updates made.
    recent: overlaps of the last requests, oldest first, at most `history` of them.
    flat: requests in a row that looked flat.
    paused: whether updates are paused.
    level: mean overlap at the last pause (of both windows, or of the one that had
      enough); None before any.
    changed: `finished` at the last pause or resumption.
    pauses: pauses so far.
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
    object.__setattr__(self, "recent", tuple(self.recent))  # JSON knows lists only


def observe(
  config: ScheduleConfig, state: ScheduleState, overlap: float
) -> ScheduleState:
  """Takes in one finished request.

  Args:
    config: the rhythm.
    state: state before.
    overlap: the request's mean distribution overlap, 0..1, measured before the draft
      trained on it.

  Returns:
    The state, paused or resumed where that is due.

  Raises:
    InputError: the overlap is no number in 0..1.
  """
  overlap = checked_overlap(state.finished, overlap)
  recent = (*state.recent, overlap)[-config.history :]
  state = dataclasses.replace(state, finished=state.finished + 1, recent=recent)
  if not config.pause:
    return state
  return _maybe_resume(config, state) if state.paused else _maybe_pause(config, state)


def checked_overlap(request: int, overlap: float) -> float:
  """The overlap of a request, a number in 0..1.

  Raises:
    InputError: it is none.
  """
  overlap = float(overlap)
  if not 0.0 <= overlap <= 1.0 + 1e-3:
    raise base.InputError(
      f"Schedule.observe: overlap of request {request} is {overlap!r}, expected a"
      " number in 0..1; pass the mean over its emitted positions."
    )
  return overlap


def update_due(config: ScheduleConfig, state: ScheduleState) -> bool:
  """Whether an update should start now.

  Args:
    config: the rhythm.
    state: after `observe` of the newest finished request.

  Returns:
    True if updates are not paused and I requests have finished since the last one.
  """
  waited = state.finished - state.last_update
  return not state.paused and waited >= config.update_interval


def updated(config: ScheduleConfig, state: ScheduleState) -> ScheduleState:
  """Notes that an update was started.

  Args:
    config: the rhythm.
    state: state before.

  Returns:
    The state; the next update is due I requests from now.
  """
  del config  # the three verbs are called alike
  return dataclasses.replace(
    state, last_update=state.finished, updates=state.updates + 1
  )


def _maybe_pause(config: ScheduleConfig, state: ScheduleState) -> ScheduleState:
  """Pauses where there is enough, or after so many flat requests in a row."""
  size = config.window
  newer, older = state.recent[-size:], state.recent[-2 * size : -size]
  full = len(newer) == size and state.finished - state.changed >= size
  if full and config.enough < 1 and _mean(newer) >= config.enough:
    return _paused(state, _mean(newer))
  if len(older) < size:
    return state
  gain = _mean(newer) - _mean(older)
  flat = state.flat + 1 if -config.drift_drop < gain < config.flat_tolerance else 0
  if flat < config.pause_after_flat:
    return dataclasses.replace(state, flat=flat)
  # Both windows: their mean says nothing of their difference, by which we chose.
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


def _maybe_resume(config: ScheduleConfig, state: ScheduleState) -> ScheduleState:
  """Resumes where overlap has dropped, sharply or slowly."""
  assumed = state.level if state.level is not None else 0.0
  since_pause = state.finished - state.changed
  short = _mean(state.recent[-config.resume_window :])
  sharp = short < assumed - config.resume_drop
  long = _mean(state.recent[-config.drift_window :])
  slow = since_pause >= config.drift_window and long < assumed - config.drift_drop
  if not (sharp or slow):
    return state
  return dataclasses.replace(state, paused=False, flat=0, changed=state.finished)


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)
