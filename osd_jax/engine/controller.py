"""Chooses how many tokens to draft next: costs and acceptance in, K out.

    drafting   K > 0, chosen by the fewest milliseconds per token
       | plain decoding is faster by the margin, even if the draft has been unlucky
       v
    plain      K = 0; the draft falls behind, and its acceptance is not observed
       | enough time has been saved for a probe: PROBE_SHARE of plain decoding's time
       v
    probing    one call with the smallest K > 0, then drafting or plain again

A fixed K is a controller with one candidate: it needs no costs and always returns it.
An n-gram cache alone needs no choice either, because a round that drafts no token takes
as long as a plain step. Its prices are learned (`costs.measure`). A new draft model
that is mixed with it rests until an update has trained it.

Some drafters know the probability that a token survives, and stop by themselves (see
`decoding.mixed`). Then the controller has two candidates, plain decoding and drafting.
If a draft model is mixed with the n-gram cache, the first candidate is not plain
decoding but the cache alone. What a token takes then is observed, and so that it stays
known, drafting is interrupted by short probes of this candidate.
The controller tells the drafter what each further token costs, in tokens that could be
emitted in that time (`costs.table.prices`):

    price of the i-th token = (round of i tokens - round of i - 1 tokens) / ms per token

The choice is a pure function of the decoded tokens and of a table of costs, so a run
with the same table repeats. Outputs do not depend on K: greedy and coupled outputs are
the same tokens, sampled outputs of the rejection and block rules have the same law.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from osd_jax import base
from osd_jax.costs.measure import TIMED_ROUNDS, LearnedCosts
from osd_jax.costs.table import RoundCosts, expected_tokens, prices
from osd_jax.engine.requests import DecodingConfig

ROUNDS_PER_CALL = 8  # rounds between two choices
MEMORY = 200.0  # drafted tokens over which acceptance is averaged
MARGIN = 0.01  # share by which plain decoding must be faster to replace drafting
PROBE_SHARE = 0.015  # share of plain decoding's time that is spent on probes
POOLED = 32.0  # weight of the acceptance of all rows in that of each, in judged tokens
KEPT = 8.0  # weight that old evidence of all rows never falls below, in judged tokens
START = 0.8  # acceptance assumed at the start: high, because drafting corrects it
DOUBT = 1.0  # standard errors granted to the draft before it is given up
CALL_SHARE = 0.005  # share of a call's time that its fixed cost may take
DEBT = 512  # plain steps after which any loss of drafting is forgiven
MOST_ROUNDS = 64  # of a call whose prices are learned
LENGTH_MEMORY = 64.0  # rounds over which the number of drafted tokens is averaged


@dataclasses.dataclass(frozen=True)
class ControllerState:
  """The state of the choice, in plain numbers, so that a checkpoint keeps it as JSON.

  Attributes:
    accepted: [B] decayed count of accepted tokens of each row's present request.
    judged: [B] decayed count of its drafted tokens that were judged.
    pool_accepted: decayed count of accepted tokens over all rows and requests.
    pool_judged: decayed count of judged tokens over all rows and requests.
    requests: decayed count of finished requests.
    tokens: decayed count of their tokens.
    saved_ms: time available for a probe; negative if drafting has cost more than plain
      decoding would have.
    num_draft_tokens: K of the next call.
    probing: whether that call is a probe: of drafting, or if K = 0 of the cache alone.
    undrafted: rows whose requests must not draft.
    drafted: running mean of the tokens that a round drafts, if the drafter decides.
    drafting_ms: time of drafting since the cache alone was last tried.
    cache_ms: decayed time of the cache alone.
    cache_tokens: decayed count of tokens that a row emitted in this time.
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
  undrafted: tuple[int, ...] = ()
  drafted: float = 3.0
  drafting_ms: float = 0.0
  cache_ms: float = 0.0
  cache_tokens: float = 0.0

  @property
  def is_drafting(self) -> bool:
    """Whether calls draft, apart from probes."""
    return (self.num_draft_tokens > 0) != self.probing


class CallCosts(NamedTuple):
  """Milliseconds of the candidates of one call.

  Attributes:
    candidates: the Ks that may be chosen, 0 first.
    num_draft_tokens: tokens that a round of each drafts: K, or a mean.
    round_ms: a round of each.
    chunk_ms, prefill_ms, call_ms: see `RoundCosts`.
    cache_ms: a round of the n-gram cache alone, which takes the place of plain
      decoding; None if there is no such cache.
  """

  candidates: tuple[int, ...]
  num_draft_tokens: tuple[int, ...]
  round_ms: tuple[float, ...]
  chunk_ms: float = 0.0
  prefill_ms: float = 0.0
  call_ms: float = 0.0
  cache_ms: float | None = None

  def of(self, state: ControllerState) -> float:
    """Time of a round with the state's K, or of a token while the draft rests."""
    k = state.num_draft_tokens
    return self.round_ms[self.candidates.index(k)] if k else self.resting_ms(state)

  def resting_ms(self, state: ControllerState) -> float:
    """Time of a token while the draft rests."""
    plain = self.round_ms[0]
    if self.cache_ms is None:
      return plain
    # Until the cache alone has been observed, it counts like a plain step.
    return (KEPT * plain + state.cache_ms) / (KEPT + state.cache_tokens)


@dataclasses.dataclass(frozen=True)
class RoundResult:
  """Results of the rounds of one compiled call, by row; 0 in rows that did not run.

  Attributes:
    rounds: number of rounds.
    emitted: [B] tokens.
    judged: [B] drafted tokens.
    accepted: [B] accepted tokens.
    milliseconds: wall time of the call, without compiling.
    catch_up_ms: cost of preparing the draft before the call, by the table.
  """

  rounds: int
  emitted: tuple[int, ...]
  judged: tuple[int, ...]
  accepted: tuple[int, ...]
  milliseconds: float = dataclasses.field(default=0.0, compare=False)
  catch_up_ms: float = 0.0


class Choice(NamedTuple):
  """How the next call drafts.

  Attributes:
    num_draft_tokens: K.
    max_rounds: number of rounds; None: no limit.
    prices: [K] float32, see `ModelDrafter.propose`; None: every round drafts K tokens.
    by_cache: whether the n-gram cache of a mixture drafts alone.
  """

  num_draft_tokens: int
  max_rounds: int | None = None
  prices: np.ndarray | None = None
  by_cache: bool = False


class Controller:
  """Chooses K before every call of an engine.

  Attributes:
    candidates: every K that may be chosen, ascending.
    costs: tables by bucket, given or measured.
    state: state of the choice.
    rests: whether the draft of a mixture waits until it is trained.
  """

  def __init__(
    self,
    decoding: DecodingConfig,
    has_draft: bool,
    by_survival: bool = False,
    is_cache: bool = False,
  ):
    """Reads the tables of the config, without measuring any.

    Args:
      decoding: rows, K and the tables.
      has_draft: whether there is anything to draft with.
      by_survival: whether the drafter decides in each round how much to draft.
      is_cache: whether the drafter is the n-gram cache alone.
    """
    self.costs: dict[int, RoundCosts] = {}
    self.candidates: tuple[int, ...] = (decoding.num_draft_tokens if has_draft else 0,)
    self._rows, self._by_survival = decoding.rows, by_survival
    if has_draft and decoding.adaptive is not None:
      config = decoding.adaptive.up_to(decoding.num_draft_tokens)
      self.candidates = config.candidates
      self.costs = dict(zip(decoding.source_lengths, config.costs, strict=False))
    self._learned: dict[Any, LearnedCosts] | None = None
    self.rests, self._is_cache = False, is_cache
    if by_survival and not self.costs:
      new = functools.partial(LearnedCosts, self.candidates)
      self._learned = collections.defaultdict(new)
    # The Ks that `choose` returns.
    ends = (0, self.candidates[-1])
    self._choices = ends if by_survival else self.candidates
    self.reset()

  def reset(self) -> None:
    """Forgets acceptance, but not costs."""
    self.state = initial(self._choices, self._rows)
    if self.rests:
      self.state = dataclasses.replace(self.state, num_draft_tokens=0)
    self._spent_ms = 0.0  # on the draft since the last call
    # No row of the call may draft, which says nothing about the draft.
    self._is_mute = False

  @property
  def is_fixed(self) -> bool:
    """Whether K is the same in every call, and the draft never rests."""
    return len(self.candidates) == 1 or (self._is_cache and self.learns)

  @property
  def learns(self) -> bool:
    """Whether the n-gram cache drafts alone, and its prices are learned."""
    return self._learned is not None and (self._is_cache or self.rests)

  def rest(self) -> None:
    """Lets the draft of a mixture wait, while the n-gram cache drafts alone."""
    self.rests = self._learned is not None and not self._is_cache
    self.reset()

  def charge_prefill(self, bucket: int) -> None:
    """Accounts for the draft's prefill of an arriving prompt."""
    if not self.is_fixed:
      self._spent_ms += self.costs[bucket].prefill_ms

  def choose(
    self,
    bucket: int,
    is_sampled: bool,
    rows: Sequence[int],
    chunks: int,
    prefills: int,
    undrafted: Sequence[int] = (),
  ) -> Choice:
    """Returns how the next call drafts.

    Args:
      bucket: source length of the rows.
      is_sampled: whether any of the rows is sampled.
      rows: the rows that hold requests.
      chunks: chunks of missed tokens that the draft needs before it can draft.
      prefills: prefill calls that it needs.
      undrafted: those of the rows whose requests must not draft.
    """
    if self._learned is not None and self.learns:
      self._kind = bucket, is_sampled, len(rows)
      learned = self._learned[self._kind]
      self._is_mute = len(undrafted) == len(rows)
      max_rounds = TIMED_ROUNDS if learned.is_short else MOST_ROUNDS
      token_prices = learned.prices(len(rows))
      if self._is_mute:
        token_prices, max_rounds = np.full_like(token_prices, np.inf), MOST_ROUNDS
      return Choice(self.candidates[-1], max_rounds, token_prices, self.rests)
    if self.is_fixed:  # a round that verifies K tokens would take longer
      return Choice(0 if len(undrafted) == len(rows) else self.candidates[0])
    self.state = dataclasses.replace(self.state, undrafted=tuple(undrafted))
    self._table = self.costs[bucket]
    self._round_ms = self._table.rounds(is_sampled, len(rows))
    costs = self._call_costs(self.state.drafted)
    self._is_mute = len(undrafted) == len(rows) and not self.candidates[0]
    if self._is_mute:
      plain = dataclasses.replace(self.state, num_draft_tokens=0, probing=False)
      return Choice(0, rounds(costs, plain))
    missing_ms = chunks * costs.chunk_ms + prefills * costs.prefill_ms
    self.state = choose(costs, self.state, rows, missing_ms)
    max_rounds = rounds(costs, self.state)
    num_draft_tokens = self.state.num_draft_tokens
    by_cache = not num_draft_tokens and costs.cache_ms is not None
    if not (num_draft_tokens or by_cache):
      return Choice(0, max_rounds)
    if not by_cache:
      self._spent_ms += missing_ms
    token_prices = None
    if self._by_survival:
      row_ms = min(token_ms(costs, self.state, rows))
      source_ms = self._round_ms[int(by_cache)]
      token_prices = prices(self.candidates, source_ms, row_ms / len(rows))
    k = num_draft_tokens or self._choices[-1]
    return Choice(k, max_rounds, token_prices, by_cache)

  def mute(self) -> None:
    """Says that the next call does not draft after all; its result is ignored."""
    self._is_mute = True

  def observe(self, result: RoundResult) -> None:
    """Updates the state after a call with the chosen K."""
    if self._learned is not None and self.learns:
      if not self._is_mute:
        tokens = sum(result.emitted)
        self._learned[self._kind].observe(result.rounds, tokens, result.milliseconds)
    elif not self.is_fixed and not self._is_mute:
      result = dataclasses.replace(result, catch_up_ms=self._spent_ms)
      # A round takes as long as its longest proposal.
      longest = max(result.judged) / max(result.rounds, 1)
      state = observe(self._call_costs(longest), self.state, result)
      if self._by_survival and state.num_draft_tokens:
        weight = (1 - 1 / LENGTH_MEMORY) ** result.rounds
        mean = weight * state.drafted + (1 - weight) * longest
        state = dataclasses.replace(state, drafted=mean)
      self.state = state
    self._spent_ms = 0.0

  def _call_costs(self, drafted: float) -> CallCosts:
    """Costs of the candidates, if a round of the drafter drafts this many tokens."""
    table, lengths = self._table, self.candidates
    if self._by_survival:
      lengths = (0, max(round(drafted), 1))
    round_ms, *alone_ms = self._round_ms
    return CallCosts(
      self._choices,
      lengths,
      tuple(np.interp(lengths, self.candidates, round_ms).tolist()),
      table.chunk_ms,
      table.prefill_ms,
      table.call_ms,
      *(np.interp(drafted, self.candidates, ms).item() for ms in alone_ms),
    )

  def release(self, row: int, tokens: int) -> None:
    """Updates the state after a row's request ended with this many tokens."""
    if not self.is_fixed:
      self.state = release(self.state, row, tokens)

  def to_json(self) -> dict[str, Any]:
    """Returns the state that a checkpoint stores."""
    return {
      "state": dataclasses.asdict(self.state),
      "costs": [[key, dataclasses.asdict(table)] for key, table in self.costs.items()],
      "spent_ms": self._spent_ms,
    }

  def from_json(self, saved: dict[str, Any]) -> None:
    """Continues from `to_json`."""
    self.state = base.from_json(saved["state"], ControllerState)
    costs = base.from_json(saved["costs"], tuple[tuple[int, RoundCosts], ...])
    self.costs = dict(costs)
    self._spent_ms = saved["spent_ms"]


def initial(candidates: Sequence[int], rows: int) -> ControllerState:
  """Drafts with the smallest K > 0 at first, to observe its acceptance."""
  zeros = (0.0,) * rows
  return ControllerState(
    zeros, zeros, num_draft_tokens=next(filter(None, candidates), 0)
  )


def acceptance(state: ControllerState, row: int) -> float:
  """Returns the running acceptance of a row, shrunk towards that of all rows.

  It is 0 for a row that must not draft: the row emits one token per round.
  """
  if row in state.undrafted:
    return 0.0
  # A row's own evidence is a few dozen tokens. Until it has more than `POOLED`, the
  # acceptance of all rows decides.
  pooled = POOLED * state.pool_accepted / state.pool_judged
  return (state.accepted[row] + pooled) / (state.judged[row] + POOLED)


def token_ms(
  costs: CallCosts,
  state: ControllerState,
  rows: Sequence[int],
  doubt: float = 0.0,
) -> list[float]:
  """Expected milliseconds in which every row emits one token, for each candidate.

  Drafting also pays the draft's prefill of every request, spread over its tokens.

  Args:
    costs: costs of the candidates, for this number of rows and bucket.
    state: holds the running acceptance of every row.
    rows: the rows that hold requests.
    doubt: standard errors of the pooled acceptance that are added to each row's.
  """
  pooled = min(state.pool_accepted / state.pool_judged, 1.0)
  more = doubt * math.sqrt(pooled * (1 - pooled) / state.pool_judged)
  rates = [
    min(acceptance(state, row) + more * (row not in state.undrafted), 1.0)
    for row in rows
  ]
  prefill = costs.prefill_ms * len(rows) * state.requests / state.tokens
  times = [costs.resting_ms(state)]
  lengths = zip(costs.num_draft_tokens[1:], costs.round_ms[1:], strict=True)
  for num_draft_tokens, ms in lengths:
    tokens = sum(expected_tokens(rate, num_draft_tokens) for rate in rates)
    times.append(ms * len(rates) / tokens + prefill)
  return times


def choose(
  costs: CallCosts,
  state: ControllerState,
  rows: Sequence[int],
  catch_up_ms: float = 0.0,
) -> ControllerState:
  """Returns the state with K of the next call.

  Args:
    costs: costs of the candidates, for this number of rows and bucket.
    state: the state after the last call.
    rows: the rows that hold requests, at least one.
    catch_up_ms: cost of preparing the draft before it can draft again.
  """
  plain, *drafting = token_ms(costs, state, rows)
  best_ms, best = min(zip(drafting, costs.candidates[1:], strict=True))
  if state.is_drafting:
    # The way back is a probe, which has to be saved for. So drafting is given up only
    # if it loses at an acceptance one standard error above the observed one.
    hoped = min(token_ms(costs, state, rows, DOUBT)[1:])
    if plain * (1 + MARGIN) < hoped:
      return dataclasses.replace(state, num_draft_tokens=0, probing=False)
    if costs.cache_ms is not None:
      # Afterwards the draft has to read what was emitted, about two chunks.
      spent = costs.call_ms + 2 * costs.chunk_ms
      spent += ROUNDS_PER_CALL * max(plain - best_ms, 0.0)
      if PROBE_SHARE * state.drafting_ms >= spent:
        return dataclasses.replace(
          state, num_draft_tokens=0, probing=True, drafting_ms=0.0
        )
    return dataclasses.replace(state, num_draft_tokens=best, probing=False)
  # The margin in both directions is hysteresis: without it noise would switch between
  # the modes, and each switch lets the draft catch up.
  if state.probing and best_ms * (1 + MARGIN) < plain:
    return dataclasses.replace(state, num_draft_tokens=best, probing=False)
  # A probe must be affordable even if the draft is as bad as the last evidence says.
  loss = ROUNDS_PER_CALL * _probe_loss(costs, state, rows)
  probes = state.saved_ms >= catch_up_ms + costs.call_ms + loss
  return dataclasses.replace(
    state, num_draft_tokens=costs.candidates[1] if probes else 0, probing=probes
  )


def rounds(costs: CallCosts, state: ControllerState) -> int:
  """Returns the number of rounds of the next call; probes are short."""
  if state.probing:
    return ROUNDS_PER_CALL
  # If rounds are very short, more of them share the fixed cost of a call.
  worthwhile = math.ceil(costs.call_ms / (CALL_SHARE * costs.of(state)))
  return max(ROUNDS_PER_CALL, worthwhile)


def observe(
  costs: CallCosts, state: ControllerState, result: RoundResult
) -> ControllerState:
  """Returns the state after a call with its K."""
  decay, judged, accepted = 1 - 1 / MEMORY, result.judged, result.accepted
  if state.num_draft_tokens:
    weights = [decay**count for count in judged]
    pool = decay ** sum(judged)
  else:
    # Evidence about the draft grows old while it does not draft.
    weights = [decay**result.rounds] * len(judged)
    pool = max(decay**result.rounds, min(1.0, KEPT / state.pool_judged))
    judged = accepted = (0,) * len(judged)  # those of a cache say nothing about it
    state = _observe_cache(costs, state, result)
  spent = 0.0  # drafting since the cache alone was last tried
  if state.is_drafting and not state.probing:
    spent = state.drafting_ms + result.rounds * costs.of(state) + result.catch_up_ms
  return dataclasses.replace(
    state,
    accepted=_decayed(state.accepted, weights, accepted),
    judged=_decayed(state.judged, weights, judged),
    pool_accepted=pool * state.pool_accepted + sum(accepted),
    pool_judged=pool * state.pool_judged + sum(judged),
    saved_ms=_saved(costs, state, result),
    drafting_ms=spent,
  )


def _observe_cache(
  costs: CallCosts, state: ControllerState, result: RoundResult
) -> ControllerState:
  """Counts the time and the tokens of a call in which the cache drafted alone."""
  if costs.cache_ms is None:
    return state
  tokens = _tokens_per_row(result)
  weight = (1 - 1 / MEMORY) ** tokens
  return dataclasses.replace(
    state,
    cache_ms=weight * state.cache_ms + result.rounds * costs.cache_ms,
    cache_tokens=weight * state.cache_tokens + tokens,
  )


def release(state: ControllerState, row: int, tokens: int) -> ControllerState:
  """Returns the state after a row's request ended with this many tokens."""
  decay = 1 - 1 / MEMORY
  return dataclasses.replace(
    state,
    accepted=_without(state.accepted, row),
    judged=_without(state.judged, row),
    requests=decay * state.requests + 1,
    # The initial 1.0 only avoids a division by 0 before the first request.
    tokens=(decay * state.tokens if state.requests else 0.0) + tokens,
  )


def _probe_loss(costs: CallCosts, state: ControllerState, rows: Sequence[int]) -> float:
  """Lower bound on the time that a round of a probe wastes."""
  tokens = sum(expected_tokens(acceptance(state, row), 1) for row in rows) / len(rows)
  return max(costs.round_ms[1] - tokens * costs.resting_ms(state), 0.0)


def _saved(costs: CallCosts, state: ControllerState, result: RoundResult) -> float:
  """Savings after a call: gains only repay debt, and do not pay for later losses."""
  resting_ms = costs.resting_ms(state)
  plain_ms = resting_ms * _tokens_per_row(result)
  if not state.num_draft_tokens:
    return state.saved_ms + (0.0 if state.probing else PROBE_SHARE * plain_ms)
  spent = result.rounds * costs.of(state) + result.catch_up_ms
  spent += costs.call_ms if state.probing else 0.0
  change = (1 + PROBE_SHARE) * plain_ms - spent
  # If gains could be saved, a long good phase would pay for a long bad one later.
  if change > 0:
    return max(state.saved_ms, min(state.saved_ms + change, 0.0))
  # Bounded debt: one expensive stretch must not prevent probes for ever.
  floor = -DEBT * PROBE_SHARE * resting_ms
  return max(state.saved_ms + change, floor)


def _tokens_per_row(result: RoundResult) -> float:
  """Mean number of tokens that the rows in use emitted."""
  running = sum(emitted > 0 for emitted in result.emitted)
  return sum(result.emitted) / max(running, 1)


def _decayed(
  counts: Sequence[float], weights: Sequence[float], new: Sequence[int]
) -> tuple[float, ...]:
  return tuple(c * w + n for c, w, n in zip(counts, weights, new, strict=True))


def _without(counts: Sequence[float], row: int) -> tuple[float, ...]:
  return tuple(0.0 if place == row else count for place, count in enumerate(counts))
