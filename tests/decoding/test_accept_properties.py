"""Both acceptance rules on drawn rounds, broken and tied logits included."""

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
  """Gumbel noise [B, V] of the target's own draws."""
  keys = sampling.row_keys(seed, position[:, None], sampling.Purpose.EMIT)[:, 0]
  return jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,)))(keys)


@st.composite
def rounds(draw):
  """A round: any drafted tokens, draft rows that may be broken, any settings."""
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
  return (
    base.Proposal(jnp.asarray(tokens), jnp.asarray(draft)),
    base.Verification(jnp.asarray(target)),
    settings,
    position,
  )


def law(logits, settings, row):
  """The distributions that decide, [n, V], by the oracle."""
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
  """What is wrong with a round by the rejection rule, "" if nothing."""
  proposal, verification, settings, position = jax.device_get(one_round)
  draws = uniform(one_round[2].seed, one_round[3][:, None] + jnp.arange(K)[None])
  for row in range(ROWS):
    target = law(verification.logits, settings, row)
    with np.errstate(invalid="ignore"):
      draft = law(proposal.logits, settings, row)
    if not settings.temperature.any():  # the draft's logits are not read at all
      draft = np.eye(VOCAB)[proposal.tokens[row]]
    count, weights = oracle(proposal.tokens[row], target, draft, np.asarray(draws[row]))
    tokens = np.asarray(found.tokens[row])
    if int(found.accepted[row]) != count:
      return f"row {row} accepts {found.accepted[row]}, expected {count}"
    if (tokens[:count] != proposal.tokens[row, :count]).any():
      return f"row {row} emits {tokens}, accepted {proposal.tokens[row, :count]}"
    added = tokens[count]
    # No residual is left where the laws are equal and what was drafted is impossible.
    possible = weights[added] > 0 or weights.sum() < 1e-6
    if not (target[count, added] > 0 and possible):
      return f"row {row} adds {added}, whose weight is 0"
  return ""


@EXAMPLES
@hypothesis.given(one_round=rounds())
def test_rejection_equals_the_oracle(one_round):
  assert not rejection_faults(one_round, accept(*one_round, rule="rejection"))


@EXAMPLES
@hypothesis.given(one_round=rounds())
def test_coupling_is_the_targets_own_draw_whatever_was_drafted(one_round):
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
    count = K if agrees.all() else int(np.argmin(agrees))
    assert found.accepted[row] == count
    assert found.tokens[row, : count + 1].tolist() == choice[row, : count + 1].tolist()


@pytest.mark.parametrize("rule", sorted(accept_lib.RULES))
@EXAMPLES
@hypothesis.given(one_round=rounds(), order=st.permutations(range(ROWS)))
def test_batch_mates_change_no_row(rule, one_round, order):
  found = accept(*one_round, rule=rule)
  moved = accept(*harness.take(one_round, order), rule=rule)
  for new, old in enumerate(order):
    count = int(found.accepted[old])
    assert int(moved.accepted[new]) == count
    np.testing.assert_array_equal(
      moved.tokens[new, : count + 1], found.tokens[old, : count + 1]
    )


def _generous(drafted, target, draft, uniforms):
  """A fault: a token that a broken draft row holds impossible is not turned down."""
  draft = np.where(draft.sum(-1, keepdims=True) == 0, 1e-9, draft)
  return oracles.accept(drafted, target, draft, uniforms)


def _wrong_sign(drafted, target, draft, uniforms):
  """A fault: the recovered token is drawn from what the draft has too much of."""
  count, weights = oracles.accept(drafted, target, draft, uniforms)
  if count < len(drafted):
    weights = np.maximum(draft[count] - target[count], 0)
  return count, weights


def _last_row(drafted, target, draft, uniforms):
  """A fault: drafted tokens are judged by the row before their own."""
  return oracles.accept(drafted, np.roll(target, 1, axis=0), draft, uniforms)


@pytest.mark.parametrize("fault", [_generous, _wrong_sign, _last_row])
def test_a_faulty_rule_is_told_apart(fault):
  """Negative control: the same rounds tell a wrong oracle from the right one."""

  def differs(one_round):
    found = accept(*one_round, rule="rejection")
    return bool(rejection_faults(one_round, found, fault))

  hypothesis.find(
    rounds(), differs, settings=hypothesis.settings(EXAMPLES, max_examples=300)
  )
