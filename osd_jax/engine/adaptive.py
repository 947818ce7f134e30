"""How many tokens to draft next: costs and acceptance in, K out; no clock, no arrays.

    drafting   K > 0, chosen by the fewest milliseconds a token
       | plain decoding is faster by the margin, however lucky the draft may be yet
       v
    plain      K = 0; the draft falls behind, nothing is learnt of its acceptance
       | enough has been saved for a probe: `probe_share` of plain decoding's time
       v
    probing    one call with the smallest K > 0, then drafting or plain again

Everything here is a pure function of what was decoded and of a table of costs, so a
run with the same table repeats. Outputs do not depend on K: greedy and coupled ones
are the same tokens, sampled ones of the rejection rule have the same law.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from osd_jax import base
from osd_jax.costs.table import RoundCosts, expected_tokens
from osd_jax.decoding import state as state_lib

POOLED = 32.0  # judged tokens that the acceptance of all rows counts as in each
KEPT = 8.0  # judged tokens that evidence of all rows is worth at least, however old
START = 0.8  # acceptance assumed before any was seen: high, since drafting finds out
DOUBT = 1.0  # standard errors of acceptance in favour of a draft before it is given up
CALL_SHARE = 0.005  # of a call's time, for what it takes beside its rounds
DEBT = 512  # plain steps after which whatever drafting lost is forgiven


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig(base.Config):
  """K chosen between two calls, by measured costs and running acceptance.

  Attributes:
    candidates: the Ks to choose from, 0 (plain decoding) among them; those above
      `DecodingConfig.num_draft_tokens` are left out. One compilation each.
    rounds_per_call: rounds after which K is chosen anew; more where rounds are so
      short that the calls themselves would cost half a per cent.
    memory: drafted tokens over which acceptance is averaged.
    margin: by which share of its time plain decoding has to be faster than drafting
      to replace it (at an acceptance one standard error above the one seen), or the
      reverse.
    probe_share: share of plain decoding's time that is spent on finding out whether
      drafting would be faster, catching up included.
    costs: tables to decide by, one for each of `DecodingConfig.source_lengths`; none
      measures them before the first call, in 16 turns of all calls or more, greedy and
      sampled rounds apart. Only a given table, which counts for both, makes a run
      repeat.
  """

  candidates: tuple[int, ...] = (0, 1, 3, 5, 7)
  rounds_per_call: base.Count = 8
  memory: Annotated[float, base.AtLeast(1)] = 200.0
  margin: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.01
  probe_share: Annotated[float, base.Above(0), base.Below(1)] = 0.015
  costs: tuple[RoundCosts, ...] = ()

  def checks(self):
    largest = state_lib.MAX_DRAFT_TOKENS
    known = sorted(set(self.candidates) & set(range(largest + 1)))
    return {
      "candidates": (
        list(self.candidates) == known and known[:1] == [0] and len(known) > 1,
        f"0 and other integers up to {largest}, ascending",
      ),
      "costs": (
        all(len(table.round_ms) == len(known) for table in self.costs),
        "tables with one entry of round_ms per candidate",
      ),
    }

  def up_to(self, num_draft_tokens: int) -> "AdaptiveConfig":
    """Without candidates above K, and their costs."""
    kept = sum(k <= num_draft_tokens for k in self.candidates)
    costs = tuple(
      dataclasses.replace(table, round_ms=table.round_ms[:kept]) for table in self.costs
    )
    return dataclasses.replace(self, candidates=self.candidates[:kept], costs=costs)


@dataclasses.dataclass(frozen=True)
class AdaptiveState:
  """What the choice depends on; plain numbers, so that a checkpoint keeps it as JSON.

  Attributes:
    accepted: [B] decayed count of accepted tokens of each row's present request.
    judged: [B] decayed count of its drafted tokens that were judged.
    pool_accepted: the same of all rows and requests.
    pool_judged: the same of all rows and requests.
    requests: decayed count of finished requests.
    tokens: decayed count of their tokens.
    saved_ms: what may be spent on a probe; negative where drafting cost more than
      plain decoding would have.
    num_draft_tokens: K of the next call.
    probing: whether that call is a probe.
  """

  accepted: tuple[float, ...]
  judged: tuple[float, ...]
  pool_accepted: float = START * KEPT
  pool_judged: float = KEPT
  requests: float = 0.0
  tokens: float = 1.0
  saved_ms: float = 0.0
  num_draft_tokens: int = 0
  probing: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
  """What one compiled call did, by row; 0 in rows that did not run.

  Attributes:
    rounds: of the call.
    emitted: [B] tokens.
    judged: [B] drafted tokens.
    accepted: [B] of those.
    catch_up_ms: cost of what the draft needed before it, by the table.
  """

  rounds: int
  emitted: tuple[int, ...]
  judged: tuple[int, ...]
  accepted: tuple[int, ...]
  catch_up_ms: float = 0.0


def initial(config: AdaptiveConfig, rows: int) -> AdaptiveState:
  """Before the first call: drafts with the smallest K > 0, to see its acceptance."""
  zeros = (0.0,) * rows
  return AdaptiveState(zeros, zeros, num_draft_tokens=config.candidates[1])


def acceptance(state: AdaptiveState, row: int) -> float:
  """Running acceptance of a row, drawn towards that of all rows."""
  pooled = POOLED * state.pool_accepted / state.pool_judged
  return (state.accepted[row] + pooled) / (state.judged[row] + POOLED)


def token_ms(
  config: AdaptiveConfig,
  costs: RoundCosts,
  state: AdaptiveState,
  rows: Sequence[int],
  doubt: float = 0.0,
) -> list[float]:
  """Expected milliseconds in which every row emits one token, for each candidate.

  Drafting pays the draft's prefill of every request too, spread over its tokens.

  Args:
    config: the candidates.
    costs: of this number of rows and bucket.
    state: running acceptance.
    rows: the rows that hold requests.
    doubt: standard errors of the acceptance of all rows that are added to each.
  """
  pooled = min(state.pool_accepted / state.pool_judged, 1.0)
  more = doubt * math.sqrt(pooled * (1 - pooled) / state.pool_judged)
  rates = [min(acceptance(state, row) + more, 1.0) for row in rows]
  prefill = costs.prefill_ms * len(rows) * state.requests / state.tokens
  found = []
  for num_draft_tokens, ms in zip(config.candidates, costs.round_ms, strict=True):
    tokens = sum(expected_tokens(rate, num_draft_tokens) for rate in rates)
    found.append(ms * len(rates) / tokens + (prefill if num_draft_tokens else 0.0))
  return found


def choose(
  config: AdaptiveConfig,
  costs: RoundCosts,
  state: AdaptiveState,
  rows: Sequence[int],
  catch_up_ms: float = 0.0,
) -> AdaptiveState:
  """The state with K of the next call.

  Args:
    config: the policy.
    costs: of this number of rows and bucket.
    state: after the last call.
    rows: the rows that hold requests, at least one.
    catch_up_ms: cost of what the draft needs before it can draft again.
  """
  plain, *drafting = token_ms(config, costs, state, rows)
  best_ms, best = min(zip(drafting, config.candidates[1:], strict=True))
  if state.num_draft_tokens and not state.probing:
    # The way back is a probe that has to be saved for, so that giving up needs proof.
    hoped = min(token_ms(config, costs, state, rows, DOUBT)[1:])
    chosen = 0 if plain * (1 + config.margin) < hoped else best
    return dataclasses.replace(state, num_draft_tokens=chosen)
  if state.probing and best_ms * (1 + config.margin) < plain:
    return dataclasses.replace(state, num_draft_tokens=best, probing=False)
  loss = config.rounds_per_call * _probe_loss(costs, state, rows)
  probes = state.saved_ms >= catch_up_ms + costs.call_ms + loss
  return dataclasses.replace(
    state, num_draft_tokens=config.candidates[1] if probes else 0, probing=probes
  )


def rounds(config: AdaptiveConfig, costs: RoundCosts, state: AdaptiveState) -> int:
  """Rounds of the next call; a probe is as short as may be."""
  if state.probing:
    return config.rounds_per_call
  round_ms = costs.round_ms[config.candidates.index(state.num_draft_tokens)]
  worthwhile = math.ceil(costs.call_ms / (CALL_SHARE * round_ms))
  return max(config.rounds_per_call, worthwhile)


def observe(
  config: AdaptiveConfig, costs: RoundCosts, state: AdaptiveState, call: Call
) -> AdaptiveState:
  """The state after a call with its K."""
  decay = 1 - 1 / config.memory
  total = sum(call.judged)
  if state.num_draft_tokens:
    kept = [decay**judged for judged in call.judged]
    pool = decay**total
  else:  # what is known of the draft grows old
    kept = [decay**call.rounds] * len(call.judged)
    pool = max(decay**call.rounds, min(1.0, KEPT / state.pool_judged))
  return dataclasses.replace(
    state,
    accepted=_decayed(state.accepted, kept, call.accepted),
    judged=_decayed(state.judged, kept, call.judged),
    pool_accepted=pool * state.pool_accepted + sum(call.accepted),
    pool_judged=pool * state.pool_judged + total,
    saved_ms=_saved(config, costs, state, call),
  )


def release(
  config: AdaptiveConfig, state: AdaptiveState, row: int, tokens: int
) -> AdaptiveState:
  """The state after a row's request has finished.

  Args:
    config: the policy.
    state: after the last call of the request.
    row: that held it.
    tokens: that it emitted.
  """
  decay = 1 - 1 / config.memory
  return dataclasses.replace(
    state,
    accepted=_without(state.accepted, row),
    judged=_without(state.judged, row),
    requests=decay * state.requests + 1,
    tokens=(decay * state.tokens if state.requests else 0.0) + tokens,
  )


def from_json(found: Mapping[str, Any]) -> AdaptiveState:
  """The state that `dataclasses.asdict` made a JSON object of."""
  rows = {name: tuple(found[name]) for name in ("accepted", "judged")}
  return AdaptiveState(**{**found, **rows})


def _probe_loss(costs: RoundCosts, state: AdaptiveState, rows: Sequence[int]) -> float:
  """What a round of a probe costs more than what it emits is worth, at least."""
  tokens = sum(expected_tokens(acceptance(state, row), 1) for row in rows) / len(rows)
  return max(costs.round_ms[1] - tokens * costs.round_ms[0], 0.0)


def _saved(
  config: AdaptiveConfig, costs: RoundCosts, state: AdaptiveState, call: Call
) -> float:
  """Savings after a call: gains only repay debt, so that they buy no later loss."""
  running = sum(emitted > 0 for emitted in call.emitted)
  plain_ms = costs.round_ms[0] * sum(call.emitted) / max(running, 1)
  index = config.candidates.index(state.num_draft_tokens)
  spent = call.rounds * costs.round_ms[index] + call.catch_up_ms
  spent += costs.call_ms if state.probing else 0.0
  change = (1 + config.probe_share) * plain_ms - spent
  if state.num_draft_tokens and change > 0:
    return max(state.saved_ms, min(state.saved_ms + change, 0.0))
  floor = -DEBT * config.probe_share * costs.round_ms[0]
  return max(state.saved_ms + change, floor)


def _decayed(
  counts: Sequence[float], kept: Sequence[float], new: Sequence[int]
) -> tuple[float, ...]:
  return tuple(c * k + n for c, k, n in zip(counts, kept, new, strict=True))


def _without(counts: Sequence[float], row: int) -> tuple[float, ...]:
  return tuple(0.0 if place == row else count for place, count in enumerate(counts))
