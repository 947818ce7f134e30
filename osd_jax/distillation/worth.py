"""Updates that pay: one is launched where what it should save is more than it costs.

  learning   an update is due where the time that its expected gain saves over the
     |       `horizon` is at least what it takes from serving, and where it can be paid
     v
  paused     the gain is too small, or what was tried has nothing to show
     |       overlap drops, sharply or slowly: at once; else as soon as `probe_share` of
     v       serving's time has paid for a few updates: a try
  learning   with the optimism of who knows nothing yet

What an update gains is the slope of overlap over updates: a line through the last
ones, drawn towards an assumption (`pace`) as long as they say little. What a gain saves
follows from (1 - a^(K + 1)) / (1 - a) tokens a round and from the price of a round.

Updates are paid from a grant that is filled up again whenever overlap has certainly
risen. Learning that gains nothing therefore costs at most one grant and `probe_share`
of the time, however long it goes on.

Host logic in plain Python; costs are constants that it is given once, and it never
reads a clock, so a run with given costs repeats exactly.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from osd_jax import base
from osd_jax.distillation.costs import UpdateCosts
from osd_jax.distillation.schedule import checked_overlap

SHORT, LONG = 8, 48  # requests whose means see a sharp and a slow drop
START, NOW = 16, 32  # requests whose means say what an episode began with, and reached
HOPE = 0.5  # standard errors that the next update may do better than expected
SURE = 2.5  # standard errors by which a rise is certain
TOKENS = 24.0  # of a request, as long as nobody says


@dataclasses.dataclass(frozen=True)
class WorthConfig(base.Config):
  """When updates pay. A `Schedule`: `LearningConfig.schedule = WorthConfig()`.

  The defaults fit noise of .15 a request. Where learning gains nothing, a stream of
  `horizon` tokens or more loses 2.5 % of its time to it, a shorter one up to
  `trial_share` of the horizon's time. A stream that becomes easier by itself while the
  draft learns is taken for a gain.

  Attributes:
    update_interval: I, requests from an update to its swap, and to the next one.
    horizon: tokens that profit from what an update gains.
    costs: of this machine; None takes those that `osd online` measures before its
      first request (`OnlineConfig.prices`). Only given ones make a run repeat.
    pace: share of the gap to overlap 1 that an update is assumed to close as long as
      nothing is known.
    noise: standard deviation of one request's overlap.
    window: updates that the slope is taken over.
    trial_share: the grant, as a share of the time that `horizon` tokens take.
    probe_share: share of serving's time that pays for tries out of a pause.
    probe_updates: updates of such a try.
    sharp_drop: how far the mean of 8 requests falls below those before it at a shift.
    slow_drop: how far the mean of 48 falls below the level at the last pause.
  """

  update_interval: base.Count = 4
  horizon: base.Count = 20_000
  costs: UpdateCosts | None = None
  pace: Annotated[float, base.Above(0), base.AtMost(1)] = 0.02
  noise: Annotated[float, base.Above(0), base.AtMost(1)] = 0.15
  window: Annotated[int, base.AtLeast(3)] = 24
  trial_share: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.015
  probe_share: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.01
  probe_updates: base.Count = 8
  sharp_drop: Annotated[float, base.Above(0), base.AtMost(1)] = 0.2
  slow_drop: Annotated[float, base.Above(0), base.AtMost(1)] = 0.1

  def initial(self) -> "WorthState":
    """Before the first request."""
    return WorthState(costs=self.costs)

  def restored(self, fields: Mapping[str, Any]) -> "WorthState":
    """The state that `dataclasses.asdict` made `fields` of."""
    costs = fields["costs"]
    made = {
      "costs": costs and UpdateCosts(**costs),
      "versions": tuple(map(tuple, fields["versions"])),  # JSON knows lists only
      "recent": tuple(fields["recent"]),
      "start": tuple(fields["start"]),
    }
    return WorthState(**{**fields, **made})

  def priced(self, state: "WorthState", costs: UpdateCosts) -> "WorthState":
    """The state that goes by measured costs, unless the config gives some."""
    return dataclasses.replace(state, costs=self.costs or costs)

  def emitted(self, state: "WorthState", tokens: int) -> "WorthState":
    """The state that knows the length of the request that `observe` takes in next."""
    known = state.tokens
    mean = tokens if known is None else known + (tokens - known) / 20
    return dataclasses.replace(state, tokens=float(mean))

  def observe(self, state: "WorthState", overlap: float) -> "WorthState":
    """See `observe`."""
    return observe(self, state, overlap)

  def is_due(self, state: "WorthState") -> bool:
    """Whether an update should start now; `observe` has weighed it."""
    waited = state.finished - state.last_update
    return not state.paused and waited >= self.update_interval

  def launched(self, state: "WorthState") -> "WorthState":
    """Pays for an update that was started."""
    price = _costs(state).lost_ms
    full = _full_grant_ms(self, state)
    if state.probing:
      paid = {"saved_ms": state.saved_ms - price}
    else:
      paid = {"grant": state.grant - price / full if full else 0.0}
    return dataclasses.replace(
      state,
      last_update=state.finished,
      updates=state.updates + 1,
      spent_ms=state.spent_ms + price,
      versions=(*state.versions, (0, 0.0))[-self.window :],
      **paid,
    )


@dataclasses.dataclass(frozen=True)
class WorthState:
  """What is carried from request to request; plain numbers, a checkpoint's JSON.

  An episode begins with the first request, with every drop and with every try.

  Attributes:
    costs: of this machine; None until they are known.
    finished: requests seen.
    last_update: `finished` at the last launch.
    updates: updates launched.
    tokens: running mean of a request's tokens, None as long as nobody says.
    paused: whether updates are paused.
    probing: whether the episode is a try out of a pause.
    versions: (requests, mean overlap) of each version that served in this episode,
      oldest first, at most `WorthConfig.window` of them.
    recent: overlaps since the last drop, oldest first, at most 64.
    start: (requests, mean overlap) that the episode began with.
    level: overlap at the last pause, None before any and as long as it is not sure.
    changed: `finished` at the last pause or the beginning of the episode.
    grant: share of a grant that may be spent on updates with nothing to show yet.
    saved_ms: what may be spent on a try.
    spent_ms: what all updates took from serving.
    served_ms: what all requests took, as the costs have it.
    drops: drops of overlap that began an episode.
  """

  costs: UpdateCosts | None = None
  finished: int = 0
  last_update: int = 0
  updates: int = 0
  tokens: float | None = None
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


def observe(config: WorthConfig, state: WorthState, overlap: float) -> WorthState:
  """Takes in one finished request.

  Args:
    config: the schedule.
    state: state before, with costs.
    overlap: the request's mean distribution overlap, 0..1, measured before the draft
      trained on it.

  Returns:
    The state, paused or learning as it pays.

  Raises:
    InputError: the overlap is no number in 0..1, or costs are not known.
  """
  overlap = checked_overlap(state.finished, overlap)
  state = _earned(config, _noted(config, state, overlap), overlap)
  if _has_dropped(config, state):
    state = _dropped(config, state)
  if not state.paused:
    return state if _pays(config, state) else _paused(state)
  if state.level is None and len(state.recent) >= NOW:
    state = dataclasses.replace(state, level=_mean(state.recent[-NOW:]))
  return _try(state) if _may_try(config, state) else state


def expected_slope(config: WorthConfig, state: WorthState) -> float:
  """Overlap that the next update is expected to gain."""
  assumed = _assumed(config, state)
  slope, error = slope_of(state.versions, config.noise)
  if math.isinf(error) or not assumed:
    return assumed
  trust = assumed**2 / (assumed**2 + error**2)
  return assumed + trust * (slope - assumed) + HOPE * math.sqrt(trust) * error


def slope_of(
  versions: Sequence[tuple[int, float]], noise: float
) -> tuple[float, float]:
  """(slope, its standard error) of overlap by version; the error may be infinite.

  Args:
    versions: (requests, mean overlap) of each.
    noise: standard deviation of one request's overlap.
  """
  counts = [min(count, NOW) for count, _ in versions]
  total = sum(counts)
  middle = sum(i * n for i, n in enumerate(counts)) / max(total, 1)
  spread = sum(n * (i - middle) ** 2 for i, n in enumerate(counts))
  if not spread:
    return 0.0, math.inf
  together = zip(counts, versions, strict=True)
  rise = sum(n * (i - middle) * mean for i, (n, (_, mean)) in enumerate(together))
  return rise / spread, noise / math.sqrt(spread)


def _noted(config: WorthConfig, state: WorthState, overlap: float) -> WorthState:
  """The request among the evidence: it was served before a pending swap."""
  old = state.finished - state.last_update < config.update_interval
  place = -2 if old and len(state.versions) > 1 else -1
  versions = list(state.versions)
  versions[place] = _with(versions[place], overlap)
  start = state.start if state.start[0] >= START else _with(state.start, overlap)
  return dataclasses.replace(
    state,
    finished=state.finished + 1,
    versions=tuple(versions),
    recent=(*state.recent, overlap)[-64:],
    start=start,
  )


def _earned(config: WorthConfig, state: WorthState, overlap: float) -> WorthState:
  """The purses after one more request."""
  costs = _costs(state)
  tokens = TOKENS if state.tokens is None else state.tokens
  spent = costs.token_ms(overlap) * tokens
  state = dataclasses.replace(state, served_ms=state.served_ms + spent)
  if not state.paused and _has_risen(config, state):
    return dataclasses.replace(state, grant=1.0, probing=False)
  saved = state.saved_ms + config.probe_share * spent
  most = max(_full_grant_ms(config, state), config.probe_updates * costs.lost_ms)
  return dataclasses.replace(state, saved_ms=min(saved, most))


def _has_risen(config: WorthConfig, state: WorthState) -> bool:
  """Whether overlap lies certainly above what the episode began with."""
  first, start = state.start
  behind = state.finished - state.changed - first
  count = min(NOW, behind)
  if count < SHORT:
    return False
  error = config.noise * math.sqrt(1 / count + 1 / first)
  return _mean(state.recent[-count:]) - start > SURE * error


def _has_dropped(config: WorthConfig, state: WorthState) -> bool:
  """Whether overlap fell, sharply at any time, or slowly since the pause."""
  recent = state.recent
  if len(recent) >= 2 * SHORT:
    short, before = _mean(recent[-SHORT:]), _mean(recent[:-SHORT])
    if short < before - config.sharp_drop:
      return True
  if not state.paused or state.level is None:
    return False
  long = _mean(recent[-LONG:])
  rested = state.finished - state.changed >= LONG
  return rested and long < state.level - config.slow_drop


def _pays(config: WorthConfig, state: WorthState) -> bool:
  """Whether the next update should gain more than it takes, and can be paid."""
  price = _costs(state).lost_ms
  full = _full_grant_ms(config, state)
  purse = state.saved_ms if state.probing else state.grant * full
  if purse < price:
    return False
  return _expected_ms(config, state, expected_slope(config, state)) >= price


def _expected_ms(config: WorthConfig, state: WorthState, slope: float) -> float:
  """Milliseconds that a gain of `slope` saves over the horizon."""
  costs, level = _costs(state), _level(state)
  reached = min(max(level + slope, 0.0), 1.0)
  return config.horizon * (costs.token_ms(level) - costs.token_ms(reached))


def _assumed(config: WorthConfig, state: WorthState) -> float:
  """What an update gains as long as nothing is known: a share of the gap."""
  return config.pace * max(1.0 - _level(state), 0.0)


def _paused(state: WorthState) -> WorthState:
  return dataclasses.replace(
    state,
    paused=True,
    probing=False,
    level=_mean(state.recent[-NOW:]) if len(state.recent) >= NOW else None,
    changed=state.finished,
  )


def _dropped(config: WorthConfig, state: WorthState) -> WorthState:
  """Learning anew, nothing known, with all that may be spent."""
  full = _full_grant_ms(config, state)
  more = state.saved_ms / full if full else 0.0
  return dataclasses.replace(
    state,
    paused=False,
    probing=False,
    versions=((0, 0.0),),
    recent=state.recent[-SHORT // 2 :],  # those before may be of the old level
    start=(0, 0.0),
    changed=state.finished,
    grant=min(state.grant + more, 1.0),
    saved_ms=0.0,
    drops=state.drops + 1,
  )


def _may_try(config: WorthConfig, state: WorthState) -> bool:
  """Whether a try out of a pause is paid for, and could be worth it."""
  price = _costs(state).lost_ms
  rested = state.finished - state.changed >= NOW  # else nothing to compare it with
  if not rested or state.saved_ms < config.probe_updates * price:
    return False
  return _expected_ms(config, state, _assumed(config, state)) >= price


def _try(state: WorthState) -> WorthState:
  """A try out of a pause: what was seen meanwhile is what it begins with."""
  seen = state.recent[-NOW:]
  base_version = (len(seen), _mean(seen))
  return dataclasses.replace(
    state,
    paused=False,
    probing=True,
    versions=(base_version,),
    start=base_version,
    changed=state.finished - len(seen),
  )


def _full_grant_ms(config: WorthConfig, state: WorthState) -> float:
  return config.trial_share * config.horizon * _costs(state).token_ms(_level(state))


def _level(state: WorthState) -> float:
  """Overlap at present, as far as its noise lets it be seen."""
  return min(_mean(state.recent[-START:]), 1.0) if state.recent else 0.5


def _costs(state: WorthState) -> UpdateCosts:
  if state.costs is None:
    raise base.InputError(
      "WorthConfig.costs: received None, expected the costs of rounds and updates: give"
      " @UpdateCosts() with measured ones, or let `osd online` measure them"
      " (OnlineConfig.prices = True)."
    )
  return state.costs


def _with(version: tuple[int, float], overlap: float) -> tuple[int, float]:
  count, mean = version
  return count + 1, mean + (overlap - mean) / (count + 1)


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)
