"""A schedule that starts an update where it should save more time than it takes.

  learning   an update starts if the time that its expected gain saves over the
     |       `horizon` is at least what serving loses to it, and if its budget lasts
     v
  paused     the gain is too small, or the budget is spent and nothing was gained
     |       a drop of overlap, sharp or slow, ends the pause at once; otherwise a few
     v       updates are tried as soon as `PROBE_SHARE` of serving's time has paid them
  learning   with the assumption about an update's gain that a new episode starts with

The gain of an update is the slope of overlap over updates: a line through the last
ones, drawn towards an assumption (`PACE`) while there is little evidence. The time that
a gain saves follows from `costs.table.RoundCosts.token_ms`.

Updates are paid from a grant, which is filled up again whenever overlap has certainly
risen. If learning gains nothing, it therefore costs at most one grant and `PROBE_SHARE`
of the time, however long the stream is.

This is plain Python that never reads a clock: with given costs a run repeats exactly.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated

from osd_jax import base
from osd_jax.costs.table import Costs
from osd_jax.distillation.schedule import Request, checked_overlap

SHORT, LONG = 8, 48  # requests whose means show a sharp and a slow drop
START, NOW = 16, 32  # requests whose means are the start of an episode, and its present
SHARP_DROP, SLOW_DROP = 0.2, 0.1  # how far those means fall at a drop
NOISE = 0.15  # standard deviation of the overlap of one request
PACE = 0.02  # share of the gap to 1 that an update closes, until evidence replaces it
HOPE = 0.5  # standard errors by which the next update may be better than expected
SURE = 2.5  # standard errors at which a rise of overlap is certain
PROBE_SHARE = 0.01  # share of serving's time that pays for updates during a pause
PROBE_UPDATES = 8  # updates that such a probe must be able to pay


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
    window: updates over which the slope is taken.
    trial_share: the grant, as a share of the time that `horizon` tokens take.
  """

  update_interval: base.Count = 4
  horizon: base.Count = 20_000
  costs: Costs | None = None
  window: Annotated[int, base.AtLeast(3)] = 24
  trial_share: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.015

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
    overlap = checked_overlap(state.finished, request.overlap)
    state = _noted(self, state, overlap, request.tokens)
    state = _earned(self, costs, state, overlap)
    if _has_dropped(state):
      state = _dropped(self, costs, state)
    if not state.paused:
      state = state if _pays(self, costs, state) else _paused(state)
    else:
      if state.level is None and len(state.recent) >= NOW:
        state = dataclasses.replace(state, level=_mean(state.recent[-NOW:]))
      state = _probe(state) if _may_probe(self, costs, state) else state
    waited = state.finished - state.last_update
    if state.paused or not request.slices or waited < self.update_interval:
      return state, 0
    return _launched(self, costs, state), request.slices


@dataclasses.dataclass(frozen=True)
class WorthState:
  """State of `WorthConfig`.

  An episode begins with the first request, with every drop, and with every probe.

  Attributes:
    finished: requests seen.
    last_update: `finished` when the last update started.
    updates: updates started.
    tokens: running mean of a request's tokens; 0 before the first.
    paused: whether updates are paused.
    probing: whether the episode is a probe out of a pause.
    versions: (requests, mean overlap) of each version that served in this episode,
      oldest first, at most `WorthConfig.window` of them.
    recent: overlaps since the last drop, oldest first, at most 64.
    start: (requests, mean overlap) at the beginning of the episode.
    level: overlap at the last pause; None before any, and until it is certain.
    changed: `finished` at the last pause or at the beginning of the episode.
    grant: share of the grant that is left for updates without a gain yet.
    saved_ms: time that may be spent on a probe.
    spent_ms: time that all updates took from serving.
    served_ms: time that all requests took, according to the costs.
    drops: drops of overlap that began an episode.
  """

  finished: int = 0
  last_update: int = 0
  updates: int = 0
  tokens: float = 0.0
  paused: bool = False
  probing: bool = False
  versions: tuple[tuple[int, float], ...] = ((0, 0.0),)
  recent: tuple[float, ...] = ()
  start: tuple[int, float] = (0, 0.0)
  level: float | None = None
  changed: int = 0
  grant: float = 1.0
  saved_ms: float = 0.0
  spent_ms: float = 0.0
  served_ms: float = 0.0
  drops: int = 0

  def __post_init__(self):
    # JSON has no tuples.
    object.__setattr__(self, "versions", tuple(map(tuple, self.versions)))
    object.__setattr__(self, "recent", tuple(self.recent))
    object.__setattr__(self, "start", tuple(self.start))


def expected_slope(config: WorthConfig, state: WorthState) -> float:
  """Returns the overlap that the next update is expected to gain."""
  del config
  assumed = _assumed(state)
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
  """Fits overlap against the version: (slope, its standard error, maybe infinite).

  Args:
    versions: (requests, mean overlap) of each.
    noise: standard deviation of the overlap of one request.
  """
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
  config: WorthConfig, state: WorthState, overlap: float, tokens: int
) -> WorthState:
  """Adds the request to the evidence of the version that served it."""
  # The last entry of `versions` is the draft of the newest update. Until that draft is
  # swapped in, `update_interval` requests after its start, the one before it serves.
  old = state.finished - state.last_update < config.update_interval
  place = -2 if old and len(state.versions) > 1 else -1
  versions = list(state.versions)
  versions[place] = _with(versions[place], overlap)
  start = state.start if state.start[0] >= START else _with(state.start, overlap)
  mean = state.tokens + (tokens - state.tokens) / 20 if state.finished else tokens
  return dataclasses.replace(
    state,
    finished=state.finished + 1,
    tokens=float(mean),
    versions=tuple(versions),
    recent=(*state.recent, overlap)[-64:],
    start=start,
  )


def _earned(
  config: WorthConfig, costs: Costs, state: WorthState, overlap: float
) -> WorthState:
  """Adds to the budgets what one more request allows."""
  spent = costs.online.token_ms(overlap) * state.tokens
  state = dataclasses.replace(state, served_ms=state.served_ms + spent)
  if not state.paused and _has_risen(state):
    return dataclasses.replace(state, grant=1.0, probing=False)
  saved = state.saved_ms + PROBE_SHARE * spent
  # A long pause must not save up for an update burst that would be noticed.
  most = max(_full_grant_ms(config, costs, state), PROBE_UPDATES * costs.lost_ms)
  return dataclasses.replace(state, saved_ms=min(saved, most))


def _launched(config: WorthConfig, costs: Costs, state: WorthState) -> WorthState:
  """Pays for an update that starts now."""
  full = _full_grant_ms(config, costs, state)
  if state.probing:
    paid = {"saved_ms": state.saved_ms - costs.lost_ms}
  else:
    paid = {"grant": state.grant - costs.lost_ms / full if full else 0.0}
  return dataclasses.replace(
    state,
    last_update=state.finished,
    updates=state.updates + 1,
    spent_ms=state.spent_ms + costs.lost_ms,
    versions=(*state.versions, (0, 0.0))[-config.window :],
    **paid,
  )


def _has_risen(state: WorthState) -> bool:
  """Returns whether overlap is certainly above the start of the episode."""
  first, start = state.start
  since = state.finished - state.changed - first
  # Only requests after those that made the start; sharing some would hide a rise.
  count = min(NOW, since)
  if count < SHORT:
    return False
  error = NOISE * math.sqrt(1 / count + 1 / first)
  return _mean(state.recent[-count:]) - start > SURE * error


def _has_dropped(state: WorthState) -> bool:
  """Returns whether overlap fell: sharply at any time, or slowly since the pause."""
  recent = state.recent
  if len(recent) >= 2 * SHORT:
    short, before = _mean(recent[-SHORT:]), _mean(recent[:-SHORT])
    if short < before - SHARP_DROP:
      return True
  if not state.paused or state.level is None:
    return False
  long = _mean(recent[-LONG:])
  rested = state.finished - state.changed >= LONG
  return rested and long < state.level - SLOW_DROP


def _pays(config: WorthConfig, costs: Costs, state: WorthState) -> bool:
  """Returns whether the next update is within budget and should gain enough."""
  full = _full_grant_ms(config, costs, state)
  budget = state.saved_ms if state.probing else state.grant * full
  if budget < costs.lost_ms:
    return False
  slope = expected_slope(config, state)
  return _expected_ms(config, costs, state, slope) >= costs.lost_ms


def _expected_ms(
  config: WorthConfig, costs: Costs, state: WorthState, slope: float
) -> float:
  """Milliseconds that a gain of `slope` saves over the horizon."""
  level = _level(state)
  reached = min(max(level + slope, 0.0), 1.0)
  token_ms = costs.online.token_ms
  return config.horizon * (token_ms(level) - token_ms(reached))


def _assumed(state: WorthState) -> float:
  """Returns the gain that an update is assumed to have: a share of the gap to 1."""
  return PACE * max(1.0 - _level(state), 0.0)


def _paused(state: WorthState) -> WorthState:
  return dataclasses.replace(
    state,
    paused=True,
    probing=False,
    level=_mean(state.recent[-NOW:]) if len(state.recent) >= NOW else None,
    changed=state.finished,
  )


def _dropped(config: WorthConfig, costs: Costs, state: WorthState) -> WorthState:
  """Begins an episode after a drop: no evidence, and the whole budget."""
  full = _full_grant_ms(config, costs, state)
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


def _may_probe(config: WorthConfig, costs: Costs, state: WorthState) -> bool:
  """Returns whether a probe out of the pause is paid for, and could pay."""
  # Fewer requests since the pause would give the probe nothing to compare with.
  rested = state.finished - state.changed >= NOW
  if not rested or state.saved_ms < PROBE_UPDATES * costs.lost_ms:
    return False
  return _expected_ms(config, costs, state, _assumed(state)) >= costs.lost_ms


def _probe(state: WorthState) -> WorthState:
  """Begins an episode out of a pause, with the last requests as its start."""
  seen = state.recent[-NOW:]
  served = (len(seen), _mean(seen))
  return dataclasses.replace(
    state,
    paused=False,
    probing=True,
    versions=(served,),
    start=served,
    changed=state.finished - len(seen),
  )


def _full_grant_ms(config: WorthConfig, costs: Costs, state: WorthState) -> float:
  token_ms = costs.online.token_ms(_level(state))
  return config.trial_share * config.horizon * token_ms


def _level(state: WorthState) -> float:
  """Present overlap, as a mean over the last requests."""
  return min(_mean(state.recent[-START:]), 1.0) if state.recent else 0.5


def _with(version: tuple[int, float], overlap: float) -> tuple[int, float]:
  count, mean = version
  return count + 1, mean + (overlap - mean) / (count + 1)


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)
