"""When to update the draft: at a fixed interval, or where it should pay.

A schedule is a pair of functions, as in optax:

    state = schedule.init()
    state, slices = schedule.update(state, Request(overlap, tokens, slices), costs)

`update` is called once per finished request. It returns how many slices the update that
starts now has, 0 for no update. Schedules are plain Python and never read a clock, so
that a run repeats exactly. The overlap of a single request is noisy, so they compare
means over windows.

`ScheduleConfig` updates at a fixed interval.

`WorthConfig` starts an update where it should save more time than it takes:

  learning   an update starts if the time that its expected gain saves over the
     |       `horizon` is at least what serving loses to it, and if its budget lasts
     v
  paused     the gain is too small, or the budget is spent and nothing was gained
     |       a drop of overlap, sharp or slow, ends the pause at once; otherwise a few
     v       updates are tried as soon as `PROBE_SHARE` of serving's time has paid them
  learning   with the assumption about an update's gain that a new episode starts with

The gain of an update is the slope of overlap over updates: a line through the last
ones, drawn towards an assumption (`PACE`) while there is little evidence. The time that
a gain saves follows from `costs.table.RoundCosts.token_ms`. If an n-gram cache drafts
too, a gain is worth less, because nothing is gained where the cache is right already:
an update that closes a share of the draft's gap to 1 is assumed to close the same share
of the gap that both leave. Updates are paid from a grant, which is filled up again
whenever overlap has certainly risen. If learning gains nothing, it therefore costs at
most one grant and `PROBE_SHARE` of the time, however long the stream is.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from osd_jax import base
from osd_jax.costs.table import Costs

NOISE = 0.15  # standard deviation of the overlap of one request

# All windows are counted in finished requests.
SHORT, SHIFT = 8, 0.2  # requests whose mean shows a shift, and how far it moves
LONG, SLOW_DROP = 48, 0.1  # the same for a slow drop during a pause
START, NOW = 16, 32  # requests whose means are the start of an episode, and its present
HISTORY = 64  # requests that a schedule remembers
VERSIONS = 24  # updates over which the slope is taken
PACE = 0.02  # share of the gap to 1 that an update closes, until evidence replaces it
HOPE = 0.5  # standard errors by which the next update may be better than expected
SURE = 2.5  # standard errors at which a rise of overlap is certain
PROBE_SHARE = 0.01  # share of serving's time that pays for updates during a pause
PROBE_UPDATES = 8  # updates that such a probe must be able to pay


class Request(NamedTuple):
  """A finished request, as a schedule sees it."""

  # Mean distribution overlap, 0..1, measured before the draft trained on it.
  overlap: float
  tokens: int  # emitted tokens
  slices: int  # the most slices that an update may have now; 0 while one is running
  # Share of drafted tokens that were accepted, if a cache drafted too; None if only the
  # draft did, or nothing was drafted.
  mixed: float | None = None


@runtime_checkable
class Schedule(Protocol):
  """Decides when updates happen.

  Its state is a dataclass of JSON values with a member `paused`. A checkpoint stores
  `dataclasses.asdict(state)` and restores it with `base.from_json`.
  """

  @property
  def update_interval(self) -> int:
    """Requests from the start of an update until its draft serves."""
    ...

  @property
  def needs_costs(self) -> bool:
    """Whether `update` must be given costs."""
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
class _State:
  """What both schedules remember."""

  finished: int = 0  # requests seen
  last_update: int = 0  # `finished` when the last update started
  updates: int = 0  # updates started
  recent: tuple[float, ...] = ()  # overlaps of the last requests, oldest first

  def mean(self, count: int) -> float:
    """Mean overlap of the last `count` requests."""
    return _mean(self.recent[-count:])


def shift(overlaps: Sequence[float]) -> float:
  """Returns how far the mean of the last `SHORT` overlaps is from that of the others.

  A difference above `SHIFT` shows a shift of traffic: the noise of single requests
  alone rarely reaches it. 0 if there are fewer than `SHORT` others.
  """
  newer, earlier = overlaps[-SHORT:], overlaps[:-SHORT]
  return _mean(newer) - _mean(earlier) if len(earlier) >= SHORT else 0.0


def _checked(state: _State, overlap: float) -> float:
  """Checks the overlap of the request after `state`, and returns it."""
  # The sum over float32 probabilities may exceed 1 by rounding.
  if not 0.0 <= overlap <= 1.0 + 1e-3:
    raise base.InputError(
      f"Schedule.update: overlap of request {state.finished} is {overlap!r}, expected a"
      " number in 0..1; pass the mean over its emitted positions."
    )
  return float(overlap)


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)


# --- At a fixed interval --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(base.Config):
  """Updates at a fixed interval.

  Attributes:
    update_interval: I, finished requests from one update to the next.
    much_to_gain: gap to an overlap of 1 from which on an update has all its slices.
      A smaller gap shortens it in proportion, to one slice at least. 0 never shortens.
  """

  update_interval: base.Count = 4
  much_to_gain: base.Share = 0.25

  @property
  def needs_costs(self) -> bool:
    """Always False."""
    return False

  def init(self) -> "ScheduleState":
    """Returns the state before the first request."""
    return ScheduleState()

  def update(
    self, state: "ScheduleState", request: Request, costs: Costs | None = None
  ) -> tuple["ScheduleState", int]:
    """See `Schedule.update`. Costs are not used."""
    del costs
    recent = (*state.recent, _checked(state, request.overlap))
    state = dataclasses.replace(
      state, finished=state.finished + 1, recent=recent[-SHORT:]
    )
    is_due = state.finished - state.last_update >= self.update_interval
    if not is_due or not request.slices:
      return state, 0
    gap = 1.0 - state.mean(SHORT)
    share = min(gap / self.much_to_gain, 1.0) if self.much_to_gain else 1.0
    # Rounding must not turn 8.000000001 slices into 9.
    slices = max(math.ceil(request.slices * share - 1e-6), 1)
    launched = dataclasses.replace(
      state, last_update=state.finished, updates=state.updates + 1
    )
    return launched, slices


@dataclasses.dataclass(frozen=True)
class ScheduleState(_State):
  """State of `ScheduleConfig`, which never pauses."""

  paused: ClassVar[bool] = False


# --- Where it pays --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WorthConfig(base.Config):
  """Starts an update only if it should pay: `LearningConfig.schedule = WorthConfig()`.

  If learning gains nothing, a stream of at least `horizon` tokens loses 2.5 % of its
  time to it, a shorter one up to `trial_share` of the horizon's time. A stream that
  becomes easier by itself while the draft learns is mistaken for a gain.

  Attributes:
    update_interval: I, requests from an update until its draft serves, and until the
      next update.
    horizon: number of tokens that profit from the gain of an update.
    costs: costs of this machine; None for those that `osd online` measures before its
      first request. A run repeats exactly only with given costs.
    trial_share: the grant, as a share of the time that `horizon` tokens take.
  """

  update_interval: base.Count = 4
  horizon: base.Count = 20_000
  costs: Costs | None = None
  trial_share: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.015

  @property
  def needs_costs(self) -> bool:
    """Whether the costs are not given here."""
    return self.costs is None

  def init(self) -> "WorthState":
    """Returns the state before the first request."""
    return WorthState()

  def update(
    self, state: "WorthState", request: Request, costs: Costs | None = None
  ) -> tuple["WorthState", int]:
    """See `Schedule.update`.

    Raises:
      InputError: the overlap is not a number in 0..1, or the costs are unknown.
    """
    costs = self.costs or costs
    if costs is None:
      raise base.InputError(
        "WorthConfig.costs: received None, expected the costs of rounds and updates:"
        " give @Costs() with measured ones, or let `osd online` measure them"
        " (OnlineConfig.measure_costs = True)."
      )
    overlap = _checked(state, request.overlap)
    state = _noted(state, overlap, request, self.update_interval)
    state = _earned(self, costs, state, overlap)
    if _has_dropped(state):
      state = _dropped(self, costs, state)
    if not state.paused:
      state = state if _pays(self, costs, state) else _paused(state)
    else:
      if state.level is None and len(state.recent) >= NOW:
        state = dataclasses.replace(state, level=state.mean(NOW))
      state = _probe(state) if _may_probe(self, costs, state) else state
    is_due = state.finished - state.last_update >= self.update_interval
    if not is_due or state.paused or not request.slices:
      return state, 0
    return _launched(self, costs, state), request.slices

  def grant_ms(self, costs: Costs, state: "WorthState") -> float:
    """Milliseconds of a full grant."""
    now = state.accepted(state.now)
    return self.trial_share * self.horizon * costs.online.token_ms(now)

  def saved_ms(self, costs: Costs, state: "WorthState", gain: float) -> float:
    """Milliseconds that a gain of overlap saves over the horizon."""
    reached = min(max(state.now + gain, 0.0), 1.0)
    before, after = (
      costs.online.token_ms(state.accepted(overlap)) for overlap in (state.now, reached)
    )
    return self.horizon * (before - after)


@dataclasses.dataclass(frozen=True)
class WorthState(_State):
  """State of `WorthConfig`.

  An episode begins with the first request, with every drop, and with every probe.
  `recent` holds at most `HISTORY` overlaps since the last drop.
  """

  paused: bool = False  # whether updates are paused
  # Overlap at the last pause; None before any, and until it is certain.
  level: float | None = None
  changed: int = 0  # `finished` at the last pause, drop or probe
  tokens: float = 0.0  # running mean of a request's tokens; 0 before the first
  probing: bool = False  # whether the episode is a probe out of a pause
  # (requests, mean overlap) of each version that served in this episode, oldest first,
  # at most `VERSIONS` of them.
  versions: tuple[tuple[int, float], ...] = ((0, 0.0),)
  # (requests, mean overlap) at the beginning of the episode.
  start: tuple[int, float] = (0, 0.0)
  grant: float = 1.0  # share of the grant that is left for updates without a gain yet
  saved_ms: float = 0.0  # time that may be spent on a probe
  spent_ms: float = 0.0  # time that all updates took from serving
  served_ms: float = 0.0  # time that all requests took, according to the costs
  drops: int = 0  # drops of overlap that began an episode
  mixed: float = 0.0  # running mean of `Request.mixed`; 0 before the first

  @property
  def now(self) -> float:
    """Present overlap, as a mean over the last requests."""
    return min(self.mean(START), 1.0) if self.recent else 0.5

  def accepted(self, overlap: float) -> float:
    """Returns the share of drafted tokens that is accepted at this overlap.

    It is the overlap itself, unless a cache drafts too.
    """
    if self.mixed <= self.now or self.now >= 1:
      return overlap
    # Of the draft's gap, the cache leaves this share open.
    open_share = (1 - self.mixed) / (1 - self.now)
    return max(1 - (1 - overlap) * open_share, 0.0)

  @property
  def assumed_gain(self) -> float:
    """The gain that an update is assumed to have: a share of the gap to 1."""
    return PACE * (1.0 - self.now)


def expected_gain(state: WorthState) -> float:
  """Returns the overlap that the next update is expected to gain."""
  assumed = state.assumed_gain
  slope, error = slope_of(state.versions)
  if math.isinf(error) or not assumed:
    return assumed
  # The weight of a measurement with this error against a prior whose standard deviation
  # is the assumption itself.
  trust = assumed**2 / (assumed**2 + error**2)
  return assumed + trust * (slope - assumed) + HOPE * math.sqrt(trust) * error


def slope_of(
  versions: Sequence[tuple[int, float]], noise: float = NOISE
) -> tuple[float, float]:
  """Fits overlap against the version: (slope, its standard error, maybe infinite)."""
  # A version that served for long says little about the slope: its requests are capped.
  counts = [min(count, NOW) for count, _ in versions]
  total = sum(counts)
  middle = sum(i * n for i, n in enumerate(counts)) / max(total, 1)
  spread = sum(n * (i - middle) ** 2 for i, n in enumerate(counts))
  if not spread:
    return 0.0, math.inf
  together = zip(counts, versions, strict=True)
  rise = sum(n * (i - middle) * mean for i, (n, (_, mean)) in enumerate(together))
  return rise / spread, noise / math.sqrt(spread)


def _noted(
  state: WorthState, overlap: float, request: Request, update_interval: int
) -> WorthState:
  """Adds the request to the evidence of the version that served it."""
  # The last entry of `versions` is the draft of the newest update. Until that draft is
  # swapped in, `update_interval` requests after its start, the one before it serves.
  old = state.finished - state.last_update < update_interval
  place = -2 if old and len(state.versions) > 1 else -1
  versions = list(state.versions)
  versions[place] = _with(versions[place], overlap)
  start = state.start if state.start[0] >= START else _with(state.start, overlap)
  tokens = request.tokens
  mean = state.tokens + (tokens - state.tokens) / 20 if state.finished else tokens
  mixed = state.mixed if request.mixed is None else request.mixed
  if state.mixed:
    mixed = state.mixed + (mixed - state.mixed) / 20
  return dataclasses.replace(
    state,
    finished=state.finished + 1,
    tokens=float(mean),
    mixed=float(mixed),
    versions=tuple(versions),
    recent=(*state.recent, overlap)[-HISTORY:],
    start=start,
  )


def _with(version: tuple[int, float], overlap: float) -> tuple[int, float]:
  count, mean = version
  return count + 1, mean + (overlap - mean) / (count + 1)


def _earned(
  config: WorthConfig, costs: Costs, state: WorthState, overlap: float
) -> WorthState:
  """Adds to the budgets what one more request allows."""
  spent = costs.online.token_ms(state.accepted(overlap)) * state.tokens
  state = dataclasses.replace(state, served_ms=state.served_ms + spent)
  if not state.paused and _has_risen(state):
    return dataclasses.replace(state, grant=1.0, probing=False)
  saved = state.saved_ms + PROBE_SHARE * spent
  # A long pause must not save up for an update burst that would be noticed.
  most = max(config.grant_ms(costs, state), PROBE_UPDATES * costs.lost_ms)
  return dataclasses.replace(state, saved_ms=min(saved, most))


def _has_risen(state: WorthState) -> bool:
  """Returns whether overlap is certainly above the start of the episode."""
  first, start = state.start
  since = state.finished - state.changed - first
  # Only requests after those that made the start; sharing some would hide a rise.
  count = min(NOW, since)
  if count < SHORT:
    return False
  error = NOISE * math.sqrt(1 / count + 1 / first)
  return state.mean(count) - start > SURE * error


def _has_dropped(state: WorthState) -> bool:
  """Returns whether overlap fell: sharply at any time, or slowly since the pause."""
  if shift(state.recent) < -SHIFT:
    return True
  if not state.paused or state.level is None:
    return False
  rested = state.finished - state.changed >= LONG
  return rested and state.mean(LONG) < state.level - SLOW_DROP


def _dropped(config: WorthConfig, costs: Costs, state: WorthState) -> WorthState:
  """Begins an episode after a drop: no evidence, and the whole budget."""
  full = config.grant_ms(costs, state)
  # Time saved for a probe is not needed any more, so it adds to the grant.
  more = state.saved_ms / full if full else 0.0
  return dataclasses.replace(
    state,
    paused=False,
    probing=False,
    versions=((0, 0.0),),
    recent=state.recent[-SHORT // 2 :],  # earlier requests may be of the old level
    start=(0, 0.0),
    changed=state.finished,
    grant=min(state.grant + more, 1.0),
    saved_ms=0.0,
    drops=state.drops + 1,
  )


def _pays(config: WorthConfig, costs: Costs, state: WorthState) -> bool:
  """Returns whether the next update is within budget and should gain enough."""
  full = config.grant_ms(costs, state)
  budget = state.saved_ms if state.probing else state.grant * full
  expected = config.saved_ms(costs, state, expected_gain(state))
  return min(budget, expected) >= costs.lost_ms


def _paused(state: WorthState) -> WorthState:
  return dataclasses.replace(
    state,
    paused=True,
    probing=False,
    level=state.mean(NOW) if len(state.recent) >= NOW else None,
    changed=state.finished,
  )


def _may_probe(config: WorthConfig, costs: Costs, state: WorthState) -> bool:
  """Returns whether a probe out of the pause is paid for, and could pay."""
  # Fewer requests since the pause would give the probe nothing to compare with.
  rested = state.finished - state.changed >= NOW
  if not rested or state.saved_ms < PROBE_UPDATES * costs.lost_ms:
    return False
  return config.saved_ms(costs, state, state.assumed_gain) >= costs.lost_ms


def _probe(state: WorthState) -> WorthState:
  """Begins an episode out of a pause, with the last requests as its start."""
  recent = state.recent[-NOW:]
  served = (len(recent), _mean(recent))
  return dataclasses.replace(
    state,
    paused=False,
    probing=True,
    versions=(served,),
    start=served,
    changed=state.finished - len(recent),
  )


def _launched(config: WorthConfig, costs: Costs, state: WorthState) -> WorthState:
  """Pays for an update that starts now."""
  full = config.grant_ms(costs, state)
  if state.probing:
    paid = {"saved_ms": state.saved_ms - costs.lost_ms}
  else:
    paid = {"grant": state.grant - costs.lost_ms / full if full else 0.0}
  return dataclasses.replace(
    state,
    last_update=state.finished,
    updates=state.updates + 1,
    spent_ms=state.spent_ms + costs.lost_ms,
    versions=(*state.versions, (0, 0.0))[-VERSIONS:],
    **paid,
  )
