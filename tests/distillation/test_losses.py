"""Losses: closed forms, float64 references, data-processing inequality, gradients."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import oracles
import pytest
from distillation.rows import batch_of, records_of
from hypothesis.extra import numpy as hnp

from osd_jax.distillation import losses

NAMES = sorted(losses.DIVERGENCES)
ROWS, LENGTH, VOCAB = 2, 3, 11
TOP_K, BETA = 4, 0.3
EXAMPLES = hypothesis.settings(
  max_examples=30, deadline=None, derandomize=True, database=None
)
# These values give ties, nearly one-hot rows and masses down to 1e-11.
LOGITS = hnp.arrays(
  np.float32,
  (ROWS, LENGTH, VOCAB),
  elements=st.sampled_from([0.0, 0.0, 0.5, -1.25, 3.0, -9.0, 14.0]),
)
FLAGS = hnp.arrays(bool, (ROWS, LENGTH))
WEIGHTS = hnp.arrays(np.float32, ROWS, elements=st.sampled_from([0.0, 1.0, 0.25, 3.0]))


def draft_log_probs(records, logits):
  return losses._normalized(losses._draft_buckets(records, jnp.asarray(logits)))


def random_logits(seed, shape=(ROWS, LENGTH, VOCAB), scale=2.0):
  return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def config_of(name, **fields):
  return losses.LossConfig(name, BETA, **{"num_positions": 0, "num_tokens": 0} | fields)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(config, logits, batch):
  return jax.value_and_grad(losses.distillation_loss, argnums=1)(config, logits, batch)


@jax.jit
def all_losses(logits, batch):
  return {
    name: losses.distillation_loss(config_of(name), logits, batch) for name in NAMES
  }


def test_divergences_of_two_tokens_equal_their_closed_forms():
  target, draft = np.log([0.75, 0.25]), np.log([0.5, 0.5])
  kl = lambda a, b: sum(x * np.log(x / y) for x, y in zip(a, b, strict=True))
  mixture = [0.2 * 0.75 + 0.8 * 0.5, 0.2 * 0.25 + 0.8 * 0.5]
  expected = {
    "forward_kl": 0.75 * np.log(1.5) + 0.25 * np.log(0.5),
    "reverse_kl": 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25),
    "jsd": 0.2 * kl([0.75, 0.25], mixture) + 0.8 * kl([0.5, 0.5], mixture),
    "total_variation": 0.25,
  }
  for name, value in expected.items():
    config = losses.LossConfig(divergence=name, jsd_beta=0.2)
    got = losses.divergence(config)(jnp.asarray(target), jnp.asarray(draft))
    np.testing.assert_allclose(got, value, rtol=1e-5)


def test_jsd_of_disjoint_distributions_is_the_entropy_of_beta():
  beta = 0.3
  got = losses.jsd(jnp.array([0.0, -80.0]), jnp.array([-80.0, 0.0]), beta)
  entropy = -beta * np.log(beta) - (1 - beta) * np.log(1 - beta)
  # Computed without the mixture, as a weighted sum of KLs, the value would be 80.
  np.testing.assert_allclose(got, entropy, rtol=1e-5)


@pytest.mark.parametrize(
  ("k", "dtype"),
  [(1, jnp.float32), (4, jnp.float32), (4, jnp.bfloat16), (VOCAB, jnp.float32)],
)
def test_losses_equal_the_float64_reference(k, dtype):
  target_logits = random_logits(0)
  draft_logits = jnp.asarray(random_logits(1), dtype)
  records = records_of(target_logits, k)
  ids = np.asarray(records.ids)
  target = oracles.bucket(oracles.softmax(target_logits), ids)
  draft = oracles.bucket(oracles.softmax(np.asarray(draft_logits, np.float64)), ids)
  for name, loss in all_losses(draft_logits, batch_of(records)).items():
    expected = oracles.divergence(name, target, draft, beta=BETA).mean()
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=1e-6, err_msg=name)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 2.0, 15.0]))
def test_fewer_buckets_never_increase_a_divergence(seed, scale):
  target = random_logits(seed, scale=scale)
  draft = jnp.asarray(random_logits(seed + 1, scale=scale))
  by_k = [all_losses(draft, batch_of(records_of(target, k))) for k in (1, 4, VOCAB)]
  for name in NAMES:
    values = [float(one[name]) for one in by_k]
    slack = 1e-5 * (1 + abs(values[-1]))
    assert values[0] <= values[1] + slack and values[1] <= values[2] + slack, name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [4, VOCAB])
def test_gradient_agrees_with_finite_differences(name, k):
  batch = batch_of(records_of(random_logits(7, scale=1.0), k))
  # `check_grads` passes numpy arrays, which only a jitted function accepts here.
  loss = jax.jit(
    functools.partial(losses.distillation_loss, config_of(name), batch=batch)
  )
  draft = jnp.asarray(random_logits(8, scale=1.0))
  jax.test_util.check_grads(
    loss, (draft,), order=1, modes=["rev"], atol=2e-3, rtol=2e-2
  )


def degenerate_cases():
  one_hot = np.full((ROWS, LENGTH, VOCAB), -200.0, np.float32)
  one_hot[..., 3] = 200.0
  base_records = records_of(random_logits(11), 4)
  minus_infinity = base_records.log_probs.at[..., 2:].set(-jnp.inf)
  return {
    "tail of exactly 0 with k < V": (base_records.replace(tail=base_records.tail * 0)),
    "tiny tail": base_records.replace(tail=jnp.full_like(base_records.tail, 1e-37)),
    "k = V": records_of(random_logits(11), VOCAB),
    "one-hot target": records_of(one_hot, 4),
    "one-hot target, k = V": records_of(one_hot, VOCAB),
    "target entries of -inf": base_records.replace(log_probs=minus_infinity),
  }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", sorted(degenerate_cases()))
def test_loss_and_gradient_are_finite_in_degenerate_cases(name, case):
  batch = batch_of(degenerate_cases()[case])
  extreme = np.full((ROWS, LENGTH, VOCAB), -300.0, np.float32)
  extreme[..., 0] = 300.0
  blocked = random_logits(12)
  blocked[..., -1] = -np.inf
  for draft in (random_logits(12), extreme, np.zeros_like(extreme), blocked):
    loss, gradient = value_and_grad(config_of(name), jnp.asarray(draft), batch)
    assert np.isfinite(loss), (name, case)
    assert np.isfinite(gradient).all(), (name, case)


def test_tail_below_float32_resolution_is_accurate():
  logits = np.array([[0.0, -1.0, -40.0, -41.0]], np.float32)
  records = records_of(logits, 2)
  got = draft_log_probs(records, logits)[0, -1]
  expected = np.log(oracles.softmax(logits)[0, 2:].sum())
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  top = np.exp(np.asarray(draft_log_probs(records, logits))[0, :2])
  # Negative control: the difference to 1 is lost in float32.
  assert np.float32(1.0) - top.sum(dtype=np.float32) <= 1e-7


def test_uint16_ids_above_32767_select_their_logits():
  logits = np.zeros((1, 1, 40_000), np.float32)
  logits[..., 39_999] = 12.0
  records = records_of(logits, 1)
  assert records.ids.dtype == jnp.uint16 and int(records.ids[0, 0, 0]) == 39_999
  got = draft_log_probs(records, logits)[0, 0, 0]
  np.testing.assert_allclose(np.exp(got), oracles.softmax(logits)[0, 0, 39_999], 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_nan_outside_mask_and_weight_has_no_effect(name):
  mask = np.array([[True, True, False], [True, False, False]])
  weight = [1.0, 0.0]
  records, draft = records_of(random_logits(15), 4), random_logits(16)
  inside = mask & (np.array(weight) > 0)[:, None]
  with_nan = records.replace(
    log_probs=jnp.where(inside[..., None], records.log_probs, jnp.nan),
    tail=jnp.where(inside, records.tail, jnp.nan),
    error=jnp.ones_like(records.error),
  )
  config, batch = config_of(name), batch_of(records, mask=mask, weight=weight)
  clean = value_and_grad(config, jnp.asarray(draft), batch)
  dirty = value_and_grad(
    config,
    jnp.where(inside[..., None], draft, jnp.nan),
    batch.replace(records=with_nan),
  )
  assert np.array_equal(clean[0], dirty[0]) and np.array_equal(clean[1], dirty[1])
  assert not np.asarray(clean[1])[~inside].any()


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_zero_without_positions(name):
  records, draft = records_of(random_logits(17), 4), jnp.asarray(random_logits(18))
  nothing = batch_of(records, weight=[0.0, 0.0])
  for config, batch in (
    (config_of(name), nothing),
    (config_of(name, positions="error"), batch_of(records)),
  ):
    loss, gradient = value_and_grad(config, draft, batch)
    assert loss == 0.0 and not np.asarray(gradient).any()


def drawn_batch(target, mask, error, weight):
  records = records_of(target, TOP_K).replace(error=error)
  return jax.tree.map(np.asarray, batch_of(records, mask=mask, weight=weight))


def expected_loss(config, draft_logits, batch):
  """Computes the loss in float64: the mean divergence over the chosen positions."""
  ids = np.asarray(batch.records.ids, int)
  target = np.concatenate(
    [np.exp(np.float64(batch.records.log_probs)), batch.records.tail[..., None]], -1
  )
  draft = oracles.bucket(oracles.softmax(draft_logits), ids)
  values = oracles.divergence(config.divergence, target, draft, config.jsd_beta)
  positions = batch.mask & (batch.weight > 0)[:, None]
  if config.positions == "error":
    positions = positions & batch.records.error
  weights = positions * np.float64(batch.weight)[:, None]
  return float((weights * values).sum() / weights.sum()) if weights.sum() else 0.0


@pytest.mark.parametrize("positions", losses.POSITIONS)
@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@hypothesis.given(target=LOGITS, draft=LOGITS, mask=FLAGS, error=FLAGS, weight=WEIGHTS)
def test_mean_over_chosen_positions_equals_the_float64_reference(
  name, positions, target, draft, mask, error, weight
):
  config = config_of(name, positions=positions)
  batch = drawn_batch(target, mask, error, weight)
  value, _ = value_and_grad(config, draft, batch)
  expected = expected_loss(config, np.float64(draft), batch)
  np.testing.assert_allclose(value, expected, rtol=3e-5, atol=3e-6)


def _mean_of_all(config, draft_logits, batch):
  """A faulty loss in which masked positions count too."""
  everywhere = batch.replace(mask=np.ones((ROWS, LENGTH), bool))
  return expected_loss(config, draft_logits, everywhere)


def _no_tail(config, draft_logits, batch):
  """A faulty loss without the target's tail."""
  records = batch.records.replace(tail=0 * batch.records.tail)
  return expected_loss(config, draft_logits, batch.replace(records=records))


@pytest.mark.parametrize("fault", [_mean_of_all, _no_tail])
def test_random_inputs_reveal_a_faulty_loss(fault):
  """Negative controls: the random inputs above would reveal these faults."""
  config = config_of("forward_kl")

  def differs(drawn):
    target, draft, mask = drawn
    batch = drawn_batch(target, mask, mask, np.ones(ROWS, np.float32))
    value, _ = value_and_grad(config, jnp.asarray(draft), batch)
    return abs(float(value) - fault(config, np.float64(draft), batch)) > 1e-2

  hypothesis.find(
    st.tuples(LOGITS, LOGITS, FLAGS),
    differs,
    settings=hypothesis.settings(EXAMPLES, max_examples=300),
  )


def test_logits_with_another_length_or_vocabulary_are_refused():
  batch = batch_of(records_of(random_logits(21), 4))
  for shape in ((ROWS, LENGTH + 1, VOCAB), (ROWS, LENGTH, 3)):
    with pytest.raises(ValueError, match="distillation_loss: draft_logits has shape"):
      losses.distillation_loss(losses.LossConfig(), jnp.zeros(shape), batch)
