"""The policy that chooses K, against an oracle that knows acceptance and costs."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import drafters
from osd_jax.engine import controller, requests

KS = (0, 1, 3, 5, 7)
LENGTH, TOKENS, BUCKET = 64, 4000, 8
QUICK = hypothesis.settings(
  max_examples=60, deadline=None, derandomize=True, database=None
)


def costs_of(draft, verify, prefill=1.5):
  """Cost table in plain steps; `draft` is per draft step, `verify` per token."""
  drafting = [k * draft + 0.6 * draft + 1 + k * verify for k in KS[1:]]
  return RoundCosts((1.0, *drafting), 0.27, prefill, num_draft_tokens=KS)


# Arguments: the cost of a draft step and of verifying a token, relative to a plain
# step. Measured values lie within this range.
TABLES = {
  "heavy draft": costs_of(0.36, 0.08),
  "light draft": costs_of(0.1, 0.05),
  "tiny draft": costs_of(0.05, 0.03),
}
BATCHED = {
  "light draft": costs_of(0.2, 0.15, prefill=0.7),
  "costly verification": costs_of(0.02, 0.3, prefill=0.7),
}


def controller_of(costs, rows=1, largest=KS[-1], is_fixed=False, by_survival=False):
  """A controller of K up to `largest`, or of this K alone."""
  adaptive = requests.AdaptiveConfig(costs.num_draft_tokens, (costs,))
  config = requests.DecodingConfig(
    rows=rows,
    num_draft_tokens=max(largest, 1),
    source_lengths=(BUCKET,),
    adaptive=None if is_fixed else adaptive,
  )
  return controller.Controller(config, largest > 0, by_survival)


class Simulation:
  """Decodes simulated requests of LENGTH tokens with independent acceptance.

  Attributes:
    ms: time spent, by the cost table.
    tokens: number of emitted tokens.
    calls: (tokens before, K, whether it was a probe) of every call.
  """

  def __init__(self, costs, rows=1, seed=0, fixed=None):
    """If `fixed` is set, every round uses it as K; otherwise the policy chooses."""
    self.costs, self.ms, self.tokens, self.calls = costs, 0.0, 0, []
    largest = KS[-1] if fixed is None else fixed
    self._controller = controller_of(costs, rows, largest, fixed is not None)
    self._rng = np.random.default_rng(seed)
    self._length, self._fed = np.zeros(rows, int), np.zeros(rows, int)
    self._undrafted = set()
    for row in range(rows):
      self._insert(row)

  def run(self, acceptance, tokens=TOKENS):
    """Decodes `tokens` more tokens; returns itself."""
    end = self.tokens + tokens
    while self.tokens < end:
      self._call(acceptance)
    return self

  @property
  def ms_per_token(self):
    return self.ms / self.tokens

  def _insert(self, row):
    self._length[row] = self._fed[row] = 0
    # As in the engine, requests that arrive during a probe are not prefilled yet.
    if self._controller.state.is_drafting:
      self._controller.charge_prefill(BUCKET)
      self.ms += self.costs.prefill_ms
    else:
      self._undrafted.add(row)

  def _choose(self):
    rows = np.arange(len(self._fed))
    fed = np.where(np.isin(rows, [*self._undrafted]), 0, self._fed)
    chunks = -(-int(np.max(self._length - fed)) // drafters.CHUNK)
    prefills = len(self._undrafted)
    chosen = self._controller.choose(BUCKET, False, rows, chunks, prefills)
    if chosen.num_draft_tokens:
      self.ms += chunks * self.costs.chunk_ms + prefills * self.costs.prefill_ms
      self._undrafted.clear()
    return chosen.num_draft_tokens, chosen.max_rounds or controller.ROUNDS_PER_CALL

  def _call(self, acceptance):
    k, limit = self._choose()
    self.calls.append((self.tokens, k, self._controller.state.probing))
    done = np.zeros((3, len(self._length)), int)  # emitted, judged, accepted
    rounds, round_ms = 0, self.costs.round_ms[KS.index(k)]
    while rounds < limit and (self._length < LENGTH).all():
      rounds += 1
      for row in range(len(self._length)):
        passes = self._rng.random(k) < acceptance
        accepted = k if passes.all() else int(passes.argmin())
        emitted = min(accepted + 1, LENGTH - self._length[row])
        self._length[row] += emitted
        done[:, row] += emitted, min(emitted, k), min(accepted, emitted, k)
    self.ms += rounds * round_ms
    self.tokens += int(done[0].sum())
    if k:
      self._fed[:] = self._length
    figures = (tuple(row.tolist()) for row in done)
    self._controller.observe(controller.RoundResult(rounds, *figures))
    for row in np.flatnonzero(self._length >= LENGTH).tolist():
      self._controller.release(row, LENGTH)
      self._undrafted.discard(row)
      self._insert(row)


def best_fixed(costs, acceptance, rows):
  """Milliseconds per token with the best K (0 included), and with K = 0."""
  times = [
    np.mean(
      [
        Simulation(costs, rows, seed, fixed=k).run(acceptance).ms_per_token
        for seed in range(3)
      ]
    )
    for k in KS
  ]
  return min(times), times[0]


# --- Speed --------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
@pytest.mark.parametrize(
  ("rows", "costs"),
  [(1, table) for table in TABLES.values()]
  + [(8, table) for table in BATCHED.values()],
  ids=[*TABLES, *(f"8 rows, {name}" for name in BATCHED)],
)
def test_policy_is_as_fast_as_the_best_fixed_k(rows, costs, alpha):
  """At least .97 of the best speed, probes included; at .3 plain decoding is best."""
  best, plain = best_fixed(costs, alpha, rows)
  found = np.mean(
    [Simulation(costs, rows, seed).run(alpha).ms_per_token for seed in range(6)]
  )
  assert (plain if alpha == 0.3 else best) / found >= 0.97


def test_useless_draft_costs_at_most_the_share_of_its_probes():
  for costs in TABLES.values():
    found = Simulation(costs).run(0.0, 5 * TOKENS)
    assert found.ms_per_token <= 1 + controller.PROBE_SHARE + 0.002
    assert any(probing for _, _, probing in found.calls)  # some calls are probes


@pytest.mark.parametrize("name", TABLES)
def test_policy_follows_acceptance_up_and_down(name):
  simulation = Simulation(TABLES[name]).run(0.1, 2000)
  if name == "heavy draft":  # the other drafts may pay off even at this acceptance
    assert np.mean([k == 0 for _, k, _ in simulation.calls]) > 0.8
  start = simulation.tokens
  simulation.run(0.9, 2000)
  settled = [k > 1 for tokens, k, _ in simulation.calls if tokens > start + 800]
  assert np.mean(settled) > 0.9
  spent, start = simulation.ms, simulation.tokens
  simulation.run(0.0, 2000)
  assert (simulation.ms - spent) / (simulation.tokens - start) < 1.12
  assert np.mean([k == 0 for at, k, _ in simulation.calls if at > start + 400]) > 0.9


def test_probes_wait_until_the_draft_has_little_to_catch_up():
  """Only the prefill is missing at the start of a request; later also tokens."""
  found = Simulation(costs_of(0.36, 0.08)).run(0.0, 10 * TOKENS)
  places = [tokens % LENGTH for tokens, _, probing in found.calls if probing]
  assert len(places) > 20 and np.mean([place == 0 for place in places]) > 0.9


# --- Parts of the policy ------------------------------------------------------------

RATES = st.floats(0, 1)


def costs(round_ms, *other_ms, **named_ms):
  """Costs of a call that may use all of KS."""
  return controller.CallCosts(KS, KS, tuple(round_ms), *other_ms, **named_ms)


def state_of(rates, judged=1e12, **changes):
  """A state after `judged` drafted tokens in each row; the default leaves no doubt."""
  return controller.ControllerState(
    tuple(judged * rate for rate in rates),
    (judged,) * len(rates),
    pool_accepted=judged * sum(rates),
    pool_judged=judged * len(rates),
    **changes,
  )


TABLE = st.builds(
  lambda ms: costs(np.cumsum(ms).tolist()),
  st.lists(st.floats(0.01, 2), min_size=5, max_size=5),
)


@QUICK
@hypothesis.given(TABLE, st.lists(RATES, min_size=1, max_size=4))
def test_chosen_k_minimizes_milliseconds_per_token(costs, rates):
  state = state_of(rates, num_draft_tokens=3)
  chosen = controller.choose(costs, state, range(len(rates)))
  ms = [
    cost / np.mean([(sum(rate**i for i in range(k + 1))) for rate in rates])
    for k, cost in zip(KS, costs.round_ms, strict=True)
  ]
  best = KS[int(np.argmin(ms))]
  margin = 1 + controller.MARGIN + 1e-6
  found = ms[KS.index(chosen.num_draft_tokens)]
  assert chosen.num_draft_tokens == best or found <= min(ms) * margin


def test_drafting_stops_only_with_enough_evidence():
  """Going back to drafting takes a probe, which must be saved for first."""
  prices = costs((1.0, 1.5, 2.2, 3.2, 4.2))
  for judged, expected in ((20, 1), (20_000, 0)):
    state = state_of([0.45], judged, num_draft_tokens=1)
    plain, *drafting = controller.token_ms(prices, state, [0])
    # By the estimate alone, plain decoding is cheaper.
    assert plain * (1 + controller.MARGIN) < min(drafting)
    assert controller.choose(prices, state, [0]).num_draft_tokens == expected
  hopeless = state_of([0.2], 20, num_draft_tokens=1)
  assert controller.choose(prices, hopeless, [0]).num_draft_tokens == 0


def test_rows_that_must_not_draft_make_drafting_worth_less():
  prices = costs((1.0, 1.5, 2.2, 3.2, 4.2))
  drafted = [
    controller.choose(
      prices, state_of([0.9] * 4, num_draft_tokens=3, undrafted=rows), range(4)
    ).num_draft_tokens
    for rows in ((), (0,), (0, 1, 2))
  ]
  assert drafted[0] >= drafted[1] > drafted[2] == 0


def test_prefill_cost_stops_drafting_for_short_answers():
  """For short answers the prefill outweighs the small gain of this draft."""
  prices = costs((1.0, 1.7, 2.0, 3.0, 4.0), prefill_ms=2.0)
  for tokens, expected in ((8.0, 0), (1000.0, 3)):
    state = state_of([0.6], num_draft_tokens=3, requests=1.0, tokens=tokens)
    chosen = controller.choose(prices, state, [0])
    assert chosen.num_draft_tokens == expected


def test_price_of_a_probe_subtracts_its_expected_tokens():
  """If the expected tokens are worth the rounds, a probe is free."""
  prices = costs((1.0, 1.5, 2.2, 3.2, 4.2))
  for rate, price in ((0.5, 0.0), (0.25, 8 * 0.25), (0.0, 8 * 0.5)):
    for saved, probes in ((price - 0.1, price == 0), (price + 0.1, True)):
      state = state_of([rate], saved_ms=max(saved, 0.0))
      assert controller.choose(prices, state, [0]).probing == probes


def test_debt_is_repaid_after_a_fixed_number_of_plain_steps():
  prices = costs((1.0, 1.5, 2.2, 3.2, 4.2))
  state = state_of([0.1], num_draft_tokens=7, saved_ms=1.0)
  dear = controller.RoundResult(8, (8,), (56,), (0,), catch_up_ms=1e6)
  state = controller.observe(prices, state, dear)
  owed = controller.PROBE_SHARE * controller.DEBT  # plain steps take 1 ms
  assert state.saved_ms == pytest.approx(-owed)
  state = dataclasses.replace(state, num_draft_tokens=0)
  plain = controller.RoundResult(controller.DEBT, (controller.DEBT,), (0,), (0,))
  assert controller.observe(prices, state, plain).saved_ms == pytest.approx(0.0)


def test_calls_get_more_rounds_if_their_overhead_is_large():
  """Calls are so long that their overhead is half a percent; probes stay short."""
  state = state_of([0.5], num_draft_tokens=3)
  for call_ms, expected in ((0.0, 8), (0.01, 8), (1.0, 100)):
    prices = costs((1.0, 1.5, 2.0, 3.0, 4.0), call_ms=call_ms)
    assert controller.rounds(prices, state) == expected
    probe = dataclasses.replace(state, probing=True)
    assert controller.rounds(prices, probe) == controller.ROUNDS_PER_CALL


def test_acceptance_is_estimated_per_row():
  call = controller.RoundResult(8, (20, 10), (30, 30), (27, 3))
  state = controller.observe(
    costs((1.0, 1.5, 2.2, 3.2, 4.2)), state_of([0, 0], num_draft_tokens=3), call
  )
  state = dataclasses.replace(
    state,
    accepted=(27.0, 3.0),
    judged=(30.0, 30.0),
    pool_accepted=30.0,
    pool_judged=60.0,
  )
  assert controller.acceptance(state, 0) > 0.6 > controller.acceptance(state, 1)
  released = controller.release(state, 0, 20)
  pooled = state.pool_accepted / state.pool_judged
  assert controller.acceptance(released, 0) == pytest.approx(pooled)
  assert controller.acceptance(released, 1) == controller.acceptance(state, 1)
  assert released.tokens / released.requests == 20


def test_up_to_drops_larger_candidates_and_their_costs():
  table = RoundCosts((1.0, 2.0, 3.0, 4.0, 5.0))
  cut = requests.AdaptiveConfig(KS, costs=(table,)).up_to(4)
  assert cut.candidates == (0, 1, 3) == cut.costs[0].num_draft_tokens
  assert cut.costs[0].ms.ravel().tolist() == [1, 2, 3]


# --- Drafters that stop by themselves -----------------------------------------------

LARGER = requests.AdaptiveConfig().candidates
LINEAR = RoundCosts(
  tuple(2.0 + 0.25 * k for k in LARGER),
  chunk_ms=0.2,
  prefill_ms=0.5,
  num_draft_tokens=LARGER,
)

# With the n-gram cache alone while the draft rests.
ALONE_MS = tuple(2.0 + 0.05 * k for k in LARGER)
CACHED = dataclasses.replace(
  LINEAR, round_ms=tuple(((ms,),) for ms in (LINEAR.round_ms, ALONE_MS))
)


def stopping(costs=LINEAR, rows=1):
  """A controller of a drafter that decides in every round how much to draft."""
  return controller_of(costs, rows, 16, by_survival=True)


def serve(choosing, accepted, tokens, drafted=None, alone=0):
  """Serves tokens; returns the time per token by the table, and the share of drafting.

  Args:
    choosing: the controller.
    accepted: accepted tokens of a round that drafts.
    tokens: number of tokens.
    drafted: drafted tokens of such a round; None: one more than it accepts.
    alone: accepted tokens of a round of the n-gram cache alone.
  """
  ms, emitted, drafting = 0.0, 0, 0
  while emitted < tokens:
    chosen = choosing.choose(BUCKET, False, [0], 0, 0)
    count, k, right, table = chosen.max_rounds, 0, 0, LINEAR.round_ms
    if chosen.by_cache:
      k, right, table = alone + 1, alone, ALONE_MS
    elif chosen.num_draft_tokens:
      k, right = drafted or accepted + 1, accepted
      drafting += count * (right + 1)
    ms += count * float(np.interp(k, LARGER, table))
    emitted += count * (right + 1)
    figures = (count * (right + 1),), (count * k,), (count * right,)
    choosing.observe(controller.RoundResult(count, *figures))
  return ms / emitted, drafting / emitted


@pytest.mark.parametrize("rows", [1, 4])
def test_price_of_a_token_is_the_number_that_could_be_emitted_in_its_time(rows):
  choosing = stopping(rows=rows)
  chosen = choosing.choose(BUCKET, False, range(rows), 0, 0)
  round_ms = LINEAR.at(3)  # the mean that is assumed at the start
  row_ms = round_ms / sum(controller.START**i for i in range(4))
  assert chosen.num_draft_tokens == 16
  np.testing.assert_allclose(chosen.prices, 0.25 * rows / row_ms, rtol=1e-5)


def test_faster_decoding_makes_tokens_dearer():
  prices = []
  for accepted in (3, 8):
    choosing = stopping()
    serve(choosing, accepted, 400, drafted=8)
    prices.append(choosing.choose(BUCKET, False, [0], 0, 0).prices[0])
  assert prices[1] > 1.5 * prices[0]


@pytest.mark.parametrize("drafted", [1, 4, 16])
def test_drafting_that_never_helps_costs_two_per_cent_at_most(drafted):
  """After the first 500 tokens, in which the controller finds out."""
  choosing = stopping()
  serve(choosing, 0, 500, drafted)
  assert serve(choosing, 0, 4000, drafted)[0] <= 1.02 * 2.0


def test_drafting_that_helps_again_is_resumed():
  choosing = stopping()
  serve(choosing, 0, 1000, drafted=4)
  assert not choosing.state.num_draft_tokens
  assert serve(choosing, 4, 4000, drafted=4)[0] < 0.5 * 2.0


def test_mean_length_follows_the_rounds():
  choosing = stopping()
  serve(choosing, 11, 6000)
  assert choosing.state.drafted == pytest.approx(12, abs=0.5)
  again = stopping()
  again.from_json(json.loads(json.dumps(choosing.to_json())))
  assert again.state == choosing.state and again.costs == choosing.costs


@pytest.mark.parametrize(("rows", "drafts"), [((0,), True), ((0, 1, 2, 3), False)])
def test_drafting_pays_for_one_row_but_not_for_four(rows, drafts):
  """The time of a round depends on how many rows hold a request."""
  costs = RoundCosts((((10.0, 11.0), (10.0, 40.0)),), rows=4, num_draft_tokens=(0, 3))
  choosing, calls = controller_of(costs, 4, 3), []
  for _ in range(40):
    chosen = choosing.choose(BUCKET, False, rows, 0, 0)
    k, count = chosen.num_draft_tokens, chosen.max_rounds
    of_rows = lambda number: tuple(number * (row in rows) for row in range(4))
    emitted = count * (1 + k * 2 // 3)
    figures = of_rows(emitted), of_rows(count * k), of_rows(emitted - count)
    choosing.observe(controller.RoundResult(count, *figures))
    calls.append(k > 0)
  assert (sum(calls[20:]) > 15) == drafts


# --- Mixtures, whose cache goes on alone while the draft rests ----------------------


@pytest.mark.parametrize(
  ("accepted", "alone", "drafts"), [(0, 0, False), (1, 1, False), (2, 0, True)]
)
def test_the_faster_of_draft_and_cache_alone_is_found(accepted, alone, drafts):
  choosing = stopping(CACHED)
  serve(choosing, accepted, 500, alone=alone)
  ms, share = serve(choosing, accepted, 4000, alone=alone)
  best = min(
    np.interp(count + 1, LARGER, table) / (count + 1)
    for count, table in ((accepted, LINEAR.round_ms), (alone, ALONE_MS))
  )
  assert ms < 1.03 * best
  assert share > 0.9 if drafts else share < 0.2


def test_cache_that_fills_is_noticed_while_the_draft_drafts():
  choosing = stopping(CACHED)
  assert serve(choosing, 2, 2000)[1] > 0.9
  serve(choosing, 2, 1500, alone=4)
  assert serve(choosing, 2, 1000, alone=4)[1] < 0.1
  serve(choosing, 4, 1500)  # and the other way round
  assert serve(choosing, 4, 1000)[1] > 0.9


def test_tries_of_the_cache_alone_cost_two_per_cent_at_most():
  choosing = stopping(CACHED)
  serve(choosing, 6, 500)
  ms, share = serve(choosing, 6, 4000)
  assert share < 1  # otherwise nothing was tried
  assert ms < 1.02 * np.interp(7, LARGER, LINEAR.round_ms) / 7


def test_prices_of_the_cache_alone_leave_the_draft_out():
  choosing = stopping(CACHED)
  drafting = choosing.choose(BUCKET, False, [0], 0, 0)
  serve(choosing, 0, 500)
  alone = choosing.choose(BUCKET, False, [0], 0, 0)
  assert alone.by_cache and not drafting.by_cache
  np.testing.assert_allclose(alone.prices, 0.05 / 2.0, rtol=0.1)
  assert (alone.prices < drafting.prices).all()


# --- What an engine reports -----------------------------------------------------------


def test_work_for_the_draft_delays_the_next_probe():
  """Late prefills and chunks are part of what drafting costs."""
  saved = []
  for chunks, prefills in ((0, 0), (1, 0), (0, 1)):
    choosing = stopping()
    choosing.choose(BUCKET, False, [0], chunks, prefills)
    choosing.observe(controller.RoundResult(8, (8,), (8,), (0,)))
    saved.append(choosing.state.saved_ms)
  assert saved[0] - saved[1] == pytest.approx(LINEAR.chunk_ms)
  assert saved[0] - saved[2] == pytest.approx(LINEAR.prefill_ms)


def test_call_whose_rows_must_not_draft_is_plain_and_says_nothing():
  choosing = stopping(rows=2)
  before = choosing.state
  assert before.num_draft_tokens > 0
  assert choosing.choose(BUCKET, False, [0, 1], 1, 1, [0, 1]).num_draft_tokens == 0
  choosing.observe(controller.RoundResult(8, (8, 8), (0, 0), (0, 0)))
  assert dataclasses.replace(choosing.state, undrafted=()) == before
