"""Acceptance rules: one round against slow oracles, limiting cases and controls."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness
from hypothesis.extra import numpy as hnp

from osd_jax import base
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import sampling

ROWS, K, VOCAB = 3, 2, 5
accept = jax.jit(accept_lib.accept, static_argnames="rule")
uniform = jax.jit(accept_lib._uniform)

# Few values, so that ties, impossible tokens and broken rows are common.
LOGITS = st.sampled_from([0.0, 0.0, 1.0, 2.5, -3.0, 40.0, -np.inf])
BROKEN = LOGITS | st.sampled_from([np.nan, np.inf])
TEMPERATURES = st.sampled_from([0.0, 0.31, 1.0, 1.7])
EXAMPLES = hypothesis.settings(
  max_examples=50, deadline=None, derandomize=True, database=None
)


@jax.jit
def noise(seed, position):
  """Gumbel noise [B, V] that the target uses for its own draws."""
  keys = sampling.row_keys(seed, position[:, None], sampling.Purpose.EMIT)[:, 0]
  return jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,)))(keys)


@st.composite
def rounds(draw, lengths=False):
  """Draws a round with any tokens and settings; draft rows may be broken.

  With `lengths`, rows may propose fewer tokens and proposals may have no logits.
  """
  target = draw(hnp.arrays(np.float32, (ROWS, K + 1, VOCAB), elements=LOGITS))
  target[..., 0] = np.where(np.isfinite(target).any(-1), target[..., 0], 0.0)
  draft = draw(hnp.arrays(np.float32, (ROWS, K, VOCAB), elements=BROKEN))
  tokens = draw(hnp.arrays(np.int32, (ROWS, K), elements=st.integers(0, VOCAB - 1)))
  each = lambda values: draw(st.lists(values, min_size=ROWS, max_size=ROWS))
  settings = harness.settings_of(
    ROWS,
    max_length=99,
    temperature=each(TEMPERATURES),
    top_k=each(st.integers(0, VOCAB + 1)),
    top_p=each(st.sampled_from([1.0, 0.6137, 0.0171])),
    seed=each(st.integers(0, 2**32 - 1)),
  )
  position = jnp.asarray(each(st.integers(0, 10_000)), jnp.int32)
  logits, counts = jnp.asarray(draft), None
  if draw(st.booleans()):  # similar distributions, so that tokens are accepted
    logits = jnp.asarray(target[:, :K] + draw(st.sampled_from([0.0, 0.5])))
  if lengths:
    counts = jnp.asarray(each(st.integers(0, K)), jnp.int32)
    logits = draw(st.sampled_from([logits, None]))
  return (
    base.Proposal(jnp.asarray(tokens), logits, counts),
    base.Verification(jnp.asarray(target)),
    settings,
    position,
  )


def law(logits, settings, row):
  """The processed distributions [n, V] of one row, by the oracle."""
  return np.array(
    [
      oracles.processed_probs(
        np.asarray(at),
        float(settings.temperature[row]),
        int(settings.top_k[row]),
        float(settings.top_p[row]),
      )
      for at in logits[row]
    ]
  )


def rejection_faults(one_round, found, oracle=oracles.accept):
  """Describes how a round violates the rejection rule; "" if it does not."""
  proposal, verification, settings, position = jax.device_get(one_round)
  draws = uniform(one_round[2].seed, one_round[3][:, None] + jnp.arange(K)[None])
  for row in range(ROWS):
    target = law(verification.logits, settings, row)
    size = K if proposal.lengths is None else int(proposal.lengths[row])
    drafted = proposal.tokens[row, :size]
    # Greedy rounds do not read the draft's logits; proposals may have none.
    draft = np.eye(VOCAB)[drafted]
    if proposal.logits is not None and settings.temperature.any():
      with np.errstate(invalid="ignore"):
        draft = law(proposal.logits, settings, row)[:size]
    count, weights = oracle(
      drafted, target[: size + 1], draft, np.asarray(draws[row])[:size]
    )
    tokens = np.asarray(found.tokens[row])
    if int(found.accepted[row]) != count:
      return f"row {row} accepts {found.accepted[row]}, expected {count}"
    if (tokens[:count] != proposal.tokens[row, :count]).any():
      return f"row {row} emits {tokens}, accepted {proposal.tokens[row, :count]}"
    added = tokens[count]
    # If both distributions are equal and the drafted token is impossible, the residual
    # is empty and the oracle gives no weights; the target row alone decides.
    possible = weights[added] > 0 or weights.sum() < 1e-6
    if not (target[count, added] > 0 and possible):
      return f"row {row} adds {added}, whose weight is 0"
  return ""


@EXAMPLES
@hypothesis.given(one_round=rounds())
def test_rejection_equals_the_oracle(one_round):
  assert not rejection_faults(one_round, accept(*one_round, rule="rejection"))


@EXAMPLES
@hypothesis.given(one_round=rounds(lengths=True))
def test_rejection_within_row_lengths_equals_the_oracle(one_round):
  found = accept(*one_round, rule="rejection")
  assert (np.asarray(found.accepted) <= np.asarray(one_round[0].lengths)).all()
  assert not rejection_faults(one_round, found)


@EXAMPLES
@hypothesis.given(one_round=rounds() | rounds(lengths=True))
def test_coupling_emits_the_targets_own_draw_for_any_proposal(one_round):
  proposal, verification, settings, position = one_round
  found = jax.device_get(accept(*one_round, rule="coupling"))
  choice = np.zeros((ROWS, K + 1), int)
  for step in range(K + 1):
    gumbel = np.asarray(noise(settings.seed, position + step), np.float64)
    for row in range(ROWS):
      probs = law(np.asarray(verification.logits), settings, row)[step]
      with np.errstate(divide="ignore"):
        choice[row, step] = np.argmax(np.log(probs) + gumbel[row])
  for row in range(ROWS):
    agrees = np.asarray(proposal.tokens[row]) == choice[row, :K]
    size = K if proposal.lengths is None else int(proposal.lengths[row])
    count = size if agrees[:size].all() else int(np.argmin(agrees))
    assert found.accepted[row] == count
    assert found.tokens[row, : count + 1].tolist() == choice[row, : count + 1].tolist()


@pytest.mark.parametrize("rule", sorted(accept_lib.RULES))
@EXAMPLES
@hypothesis.given(one_round=rounds(), order=st.permutations(range(ROWS)))
def test_accepted_tokens_do_not_depend_on_batch_mates(rule, one_round, order):
  found = accept(*one_round, rule=rule)
  moved = accept(*harness.take(one_round, order), rule=rule)
  for new, old in enumerate(order):
    count = int(found.accepted[old])
    assert int(moved.accepted[new]) == count
    np.testing.assert_array_equal(
      moved.tokens[new, : count + 1], found.tokens[old, : count + 1]
    )


def _generous(drafted, target, draft, uniforms):
  """Fault: accepts a token to which a broken draft row gives probability 0."""
  draft = np.where(draft.sum(-1, keepdims=True) == 0, 1e-9, draft)
  return oracles.accept(drafted, target, draft, uniforms)


def _wrong_sign(drafted, target, draft, uniforms):
  """Fault: draws the recovered token from the excess mass of the draft."""
  count, weights = oracles.accept(drafted, target, draft, uniforms)
  if count < len(drafted):
    weights = np.maximum(draft[count] - target[count], 0)
  return count, weights


def _last_row(drafted, target, draft, uniforms):
  """Fault: judges each drafted token by the row before its own."""
  return oracles.accept(drafted, np.roll(target, 1, axis=0), draft, uniforms)


@pytest.mark.parametrize("fault", [_generous, _wrong_sign, _last_row])
def test_faulty_rules_differ_from_the_oracle(fault):
  """Negative control: the same rounds distinguish faulty rules from the right one."""

  def differs(one_round):
    found = accept(*one_round, rule="rejection")
    return bool(rejection_faults(one_round, found, fault))

  hypothesis.find(
    rounds(), differs, settings=hypothesis.settings(EXAMPLES, max_examples=300)
  )


def test_empty_residual_falls_back_to_the_target():
  """Rounding can make both distributions equal although a token was rejected.

  The draft gives token 2 a mass of 5e-14, below the rounding error of the other two.
  The recovered token then follows the target, which is 50:50.
  """
  rows = 4000
  repeat = lambda row: jnp.tile(jnp.asarray(row, jnp.float32), (rows, 1, 1))
  proposal = base.Proposal(
    jnp.full((rows, 1), 2, jnp.int32), repeat([[0.0, 0.0, -30.0]])
  )
  verification = base.Verification(repeat([[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]]))
  settings = harness.settings_of(rows, max_length=9, temperature=1.0)
  found = accept(proposal, verification, settings, jnp.zeros(rows, jnp.int32))
  assert not np.asarray(found.accepted).any()
  counts = np.bincount(np.asarray(found.tokens[:, 0]), minlength=3)
  assert counts[2] == 0 and oracles.chi_square(counts[:2], np.full(2, 0.5)) > 1e-6


def test_uniform_draws_are_uniform_and_independent_across_positions():
  draws = np.asarray(
    uniform(
      jnp.arange(2000, dtype=jnp.uint32), jnp.tile(jnp.arange(4)[None], (2000, 1))
    )
  )
  assert (draws >= 0).all() and (draws < 1).all()
  counts, _ = np.histogram(draws, bins=10, range=(0, 1))
  assert oracles.chi_square(counts, np.full(10, 0.1)) > 1e-6
  assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.1


@pytest.mark.parametrize("rule", accept_lib.RULES)
def test_low_temperature_still_samples(rule):
  """Only temperature 0 is greedy: plain decoding draws both of two close tokens."""
  rows, temperature = 2000, 1e-4
  logits = jnp.tile(jnp.asarray([0.0, -temperature, -1.0]), (rows, 1, 1))
  nothing = base.Proposal(jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0, 3)))
  settings = harness.settings_of(rows, max_length=1, temperature=temperature)
  drawn = accept_lib.accept(
    nothing, base.Verification(logits), settings, jnp.zeros((rows,), jnp.int32), rule
  )
  # The second token has a probability of 1 / (1 + e).
  assert np.mean(drawn.tokens) == pytest.approx(0.2689, abs=0.05)
