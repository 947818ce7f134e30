"""A learned draft mixed with the cache: prices, scores, and who proposes.

test_equals_plain.py and test_law.py show that its outputs are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import harness, tables
from decoding.tables import CHEAP, DEAR, DRAFT, FAIR, MIXTURE, MODEL, VOCAB, WIDTHS, K
from decoding.tables import TARGET as PARAMS

from osd_jax import base
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import mixed, ngrams, rounds
from osd_jax.engine import steps


def decoded(served, settings, length, k=K, prices=None, drafter=MIXTURE):
  return tables.decoded(drafter, served, settings, length, k=k, prices=prices)


def served_with(draft, answers=0, preferred=None):
  return tables.remembering(MIXTURE, draft, answers, preferred)


def absorbed(memory, state):
  return tables.absorbed(MIXTURE, memory, state)


@functools.cache
def plain(length):
  settings = harness.settings_of(4, max_length=length)
  return harness.outputs(harness.tabular_steps(PARAMS, settings, length))


# --- As many tokens as are worth their price ----------------------------------------


def test_dearer_tokens_are_drafted_less():
  settings = harness.settings_of(1, max_length=40)
  served = served_with(DRAFT, 2)
  drafted = [
    int(decoded(served, settings, 40, prices=prices).counters.drafted[0])
    / int(decoded(served, settings, 40, prices=prices).counters.rounds[0])
    for prices in (CHEAP, FAIR, DEAR)
  ]
  assert drafted[0] > drafted[1] > drafted[2] and drafted[2] <= 1


def test_rows_together_pay_for_a_step():
  """Four rows draft on where one would not."""
  served = served_with(DRAFT, 2)
  judged = []
  for rows in (1, 4):
    settings = harness.settings_of(rows, max_length=40)
    counters = decoded(served, settings, 40, prices=0.7 + 0 * FAIR).counters
    judged.append(int(counters.drafted[0]) / int(counters.rounds[0]))
  assert judged[1] > judged[0]


def test_survival_is_the_product_of_accuracies():
  """Tokens of accuracy .8: .8 ** 3 is worth .6 * mean, .8 ** 4 is not."""
  served = served_with(PARAMS)
  served = served.replace(right=0.8 * served.scored)
  settings = harness.settings_of(1, max_length=40)
  prices = np.full(16, 0.8 * (0.8**3 + 0.8**4) / 2, np.float32)
  counters = decoded(served, settings, 40, prices=prices).counters
  assert int(counters.rounds[0]) == 40 // 5  # four drafted, all right, and one more


@pytest.mark.parametrize("k", [1, 4, 16])
def test_free_tokens_are_drafted_and_priceless_ones_are_not(k):
  """The timed calls of a cost table: exactly K tokens in every round."""
  spec = rounds.DecodeSpec(MODEL, MIXTURE, widths=WIDTHS)
  largest, prices = steps.exactly(spec, k)
  settings = harness.settings_of(1, max_length=40)
  served = served_with(PARAMS)  # all are right, so that each is judged
  counters = decoded(served, settings, 40, prices=prices).counters
  assert largest == 16
  assert int(counters.rounds[0]) == -(-40 // (k + 1))


@pytest.mark.parametrize("kind", ["resting", "alone"])
def test_token_of_the_cache_alone_that_is_not_worth_its_price_is_not_proposed(kind):
  """The price of one token more, in tokens of all rows; each row's survives with .6."""
  drafter, served = MIXTURE.resting(), served_with(DRAFT)
  if kind == "alone":
    drafter = mixed.drafter(ngrams.build(MODEL, 1 << 12), False, MODEL, 0)
    served = drafter.with_memory(None, drafter.memory())
  served = served.replace(right=0.6 * served.scored)
  for rows, price, is_worth in ((1, 0.5, True), (1, 0.7, False), (4, 2.0, True)):
    settings = harness.settings_of(rows, max_length=40)
    prices = np.full(16, price, np.float32)
    final = decoded(served, settings, 40, prices=prices, drafter=drafter)
    assert harness.outputs(final) == plain(40)[:1] * rows
    assert (int(final.counters.drafted[0]) > 0) == is_worth
    if not is_worth:
      assert int(final.counters.rounds[0]) == 40  # plain steps


@pytest.mark.parametrize(
  ("survival", "most"),
  [
    ((0.9, 0, 0, 0, 0, 0, 0), 0),  # one token would have to pay for three
    ((0.9, 0.8, 0.7, 0, 0, 0, 0), 3),
    ((0.9, 0.8, 0.7, 0.2, 0.1, 0, 0), 3),
    ((0.9, 0.9, 0.8, 0.7, 0.7, 0.6, 0.5), 7),
    ((2.7, 0, 0, 0, 0, 0, 0), 3),  # of three rows together
  ],
)
def test_cache_alone_proposes_the_width_that_gains_most(survival, most):
  drafter = mixed.drafter(ngrams.build(MODEL, 1 << 12), False, MODEL, 0, (3, 7))
  prices = jnp.full(7, 0.4)
  assert int(drafter._most(jnp.asarray(survival, jnp.float32), prices)) == most
  # Tokens without a price are proposed whatever their survival, and dear ones never.
  prices = jnp.asarray([0.0] * 3 + [np.inf] * 4)
  assert int(drafter._most(jnp.zeros(7), prices)) == 3


@pytest.mark.parametrize("rule", accept_lib.RULES)
@pytest.mark.parametrize("lengths", [(0, 0), (2, 1), (3, 0), (7, 7), (4, 16)])
def test_only_the_smallest_width_that_holds_all_proposals_is_judged(lengths, rule):
  target, (source, mask) = jnp.asarray(PARAMS), harness.no_sources(2)
  settings = harness.settings_of(2, max_length=40, temperature=1.0)
  state = harness.start(MODEL, target, source, mask, settings, 40, record=4)
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(size=(2, 16, VOCAB)), jnp.float32)
  tokens = jnp.asarray(rng.integers(VOCAB, size=(2, 16)), jnp.int32)
  cut = base.Proposal(tokens, logits, jnp.asarray(lengths, jnp.int32))

  def judged(widths):
    spec = rounds.DecodeSpec(MODEL, MIXTURE, rows=2, rule=rule, widths=widths)
    return rounds.judge(spec, target, state, cut)

  (narrow, cache), (whole, read) = judged(WIDTHS), judged(())
  width = next(width for width in (0, *WIDTHS) if width >= max(lengths))
  assert cache.length.tolist() == [width + 1] * 2 and read.length.tolist() == [17] * 2
  assert narrow.acceptance.tokens.shape == whole.acceptance.tokens.shape
  accepted = np.asarray(whole.acceptance.accepted)
  np.testing.assert_array_equal(narrow.acceptance.accepted, accepted)
  emitted = np.arange(17)[None] <= accepted[:, None]
  for found, expected in zip(
    jax.tree.leaves((narrow.acceptance.tokens, narrow.is_broken, narrow.records)),
    jax.tree.leaves((whole.acceptance.tokens, whole.is_broken, whole.records)),
    strict=True,
  ):
    np.testing.assert_array_equal(found[emitted], expected[emitted])


# --- Scores -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 7])
def test_every_emitted_position_is_scored_once_whoever_proposed(k):
  """The draft is the target, so all its tokens are right; the last two are not fed."""
  memory = MIXTURE.memory()
  settings = harness.settings_of(1, max_length=40)
  final = decoded(served_with(PARAMS), settings, 40, k=k)
  after = absorbed(memory, final)
  scored = np.asarray(after.scored - memory.scored)[: mixed.DRAFT_BINS]
  right = np.asarray(after.right - memory.right)[: mixed.DRAFT_BINS]
  # Decay takes a little of the prior.
  assert scored.sum() == pytest.approx(39, abs=1.5)
  assert right.sum() == pytest.approx(39, abs=1.5)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_is_scored_by_the_tokens_that_were_judged(temperature, k):
  settings = harness.settings_of(1, max_length=40, temperature=temperature)
  served = served_with(DRAFT, preferred="draft")
  final = decoded(served, settings, 40, k=k)
  drawn = np.asarray(final.draft_cache.drawn[0])
  judged = drawn[:40] >= 0
  right = drawn[:40] == np.asarray(final.tokens[0, :40])
  assert judged.sum() == int(final.counters.drafted[0])
  assert (judged & right).sum() == int(final.counters.accepted[0])
  assert (drawn[40:] == -1).all()


@pytest.mark.parametrize("prices", [None, FAIR], ids=["fixed", "priced"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_the_cache_are_those_that_the_draft_did_not_draw(temperature, prices):
  by_cache = []
  for preferred in ("draft", None, "cache"):
    settings = harness.settings_of(1, max_length=40, temperature=temperature)
    served = served_with(DRAFT, 3, preferred=preferred)
    final = decoded(served, settings, 40, prices=prices)
    counters, drawn = final.counters, np.asarray(final.draft_cache.drawn[0])
    judged = int(np.sum(drawn[:40] >= 0))
    right = int(np.sum(drawn[:40] == np.asarray(final.tokens[0, :40])))
    by_cache.append(int(counters.drafted_by_cache[0]))
    assert by_cache[-1] == int(counters.drafted[0]) - judged
    assert int(counters.accepted_by_cache[0]) == int(counters.accepted[0]) - right
  # The negative control: who proposes is seen in the count.
  assert by_cache[0] == 0 < by_cache[-1]


def test_sampled_draft_is_right_where_its_tokens_are_accepted():
  """The draft is the target: all is accepted, though it is often not its arg max."""
  memory = MIXTURE.memory()
  for seed in range(8):
    settings = harness.settings_of(1, max_length=40, temperature=1.0, seed=seed)
    served = MIXTURE.with_memory(jnp.asarray(PARAMS), memory)
    final = decoded(served, settings, 40)
    # The cache, which is certain of every token, does not displace it.
    assert int(final.counters.rounds[0]) == -(-40 // (K + 1))
    memory = absorbed(memory, final)
  sampled = slice(mixed.SAMPLED_BINS, mixed.BINS)
  accuracy = np.asarray(memory.right / memory.scored)[sampled]
  np.testing.assert_allclose(accuracy, 1.0)
  top = np.asarray(memory.top_right / memory.drawn_right)[sampled]
  assert top.min() < 0.8  # control: the arg max would be scored lower


def test_cache_still_displaces_a_poor_draft_in_sampled_rows():
  """A sharp target, so that its tokens repeat although they are sampled."""
  memory, rounds_spent = MIXTURE.memory(), []
  for seed in range(12):
    settings = harness.settings_of(1, max_length=40, temperature=0.1, seed=seed)
    final = decoded(MIXTURE.with_memory(jnp.asarray(DRAFT), memory), settings, 40)
    rounds_spent.append(int(final.counters.rounds[0]))
    memory = absorbed(memory, final)
  assert np.mean(rounds_spent[-4:]) < 0.7 * np.mean(rounds_spent[:2])


def test_cache_takes_over_what_the_draft_does_not_know():
  """The same greedy answer again and again: soon every round emits K + 1 tokens."""
  settings = harness.settings_of(1, max_length=40)
  first = decoded(served_with(DRAFT), settings, 40)
  later = decoded(served_with(DRAFT, 6), settings, 40)
  assert int(later.counters.rounds[0]) == -(-40 // (K + 1))
  assert int(first.counters.rounds[0]) > int(later.counters.rounds[0]) * 1.5
