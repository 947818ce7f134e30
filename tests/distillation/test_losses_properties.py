"""Truncated-row losses and their gradients against float64, on drawn rows."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis.extra import numpy as hnp

from osd_jax import base
from osd_jax.distillation import losses

ROWS, LENGTH, VOCAB, TOP_K, BETA = 2, 2, 5, 2, 0.3
NAMES = sorted(losses.DIVERGENCES)
EXAMPLES = hypothesis.settings(
  max_examples=30, deadline=None, derandomize=True, database=None
)
# Ties, sure rows and rows of masses near 1e-12 alike; float32 must still be right.
LOGITS = hnp.arrays(
  np.float32,
  (ROWS, LENGTH, VOCAB),
  elements=st.sampled_from([0.0, 0.0, 0.5, -1.25, 3.0, -9.0, 14.0]),
)
FLAGS = hnp.arrays(bool, (ROWS, LENGTH))
WEIGHTS = hnp.arrays(np.float32, ROWS, elements=st.sampled_from([0.0, 1.0, 0.25, 3.0]))


def batch_of(target_logits, mask, error, weight, k=TOP_K):
  log_probs, ids, tail = oracles.truncate(target_logits, k)
  positions = np.ones((ROWS, LENGTH), np.int32)
  return base.DistillationBatch(
    source=positions,
    target=positions,
    mask=mask,
    records=base.Records(
      log_probs=np.float32(log_probs),
      ids=ids.astype(np.uint16),
      tail=np.float32(tail),
      error=error,
    ),
    weight=weight,
  )


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(config, logits, batch):
  return jax.value_and_grad(losses.distillation_loss, argnums=1)(config, logits, batch)


def expected_loss(config, draft_logits, batch):
  """The loss in float64: bucket both rows, average over the chosen positions."""
  ids = np.asarray(batch.records.ids, int)
  target = np.concatenate(
    [np.exp(np.float64(batch.records.log_probs)), batch.records.tail[..., None]], -1
  )
  draft = oracles.bucket(oracles.softmax(draft_logits), ids)
  values = oracles.divergence(config.divergence, target, draft, config.jsd_beta)
  chosen = batch.mask & (batch.weight > 0)[:, None]
  if config.positions == "error":
    chosen = chosen & batch.records.error
  weights = chosen * np.float64(batch.weight)[:, None]
  return float((weights * values).sum() / weights.sum()) if weights.sum() else 0.0


def expected_gradient(config, draft_logits, batch, step=1e-5):
  """Central differences of `expected_loss`, entry by entry."""
  gradient = np.zeros(draft_logits.shape)
  for place in np.ndindex(*draft_logits.shape):
    moved = np.zeros(draft_logits.shape)
    moved[place] = step
    ahead = expected_loss(config, draft_logits + moved, batch)
    behind = expected_loss(config, draft_logits - moved, batch)
    gradient[place] = (ahead - behind) / (2 * step)
  return gradient


@pytest.mark.parametrize("positions", losses.POSITIONS)
@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@hypothesis.given(target=LOGITS, draft=LOGITS, mask=FLAGS, error=FLAGS, weight=WEIGHTS)
def test_value_equals_float64(name, positions, target, draft, mask, error, weight):
  config = losses.LossConfig(name, BETA, positions)
  batch = batch_of(target, mask, error, weight)
  found, _ = value_and_grad(config, draft, batch)
  expected = expected_loss(config, np.float64(draft), batch)
  np.testing.assert_allclose(found, expected, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("name", ["forward_kl", "jsd", "reverse_kl"])
@hypothesis.settings(EXAMPLES, max_examples=15)
@hypothesis.given(target=LOGITS, draft=LOGITS, mask=FLAGS)
def test_gradient_equals_differences_in_float64(name, target, draft, mask):
  """Total variation has kinks where masses tie, so it is left out."""
  config = losses.LossConfig(name, BETA)
  batch = batch_of(target, mask, ~mask, np.array([1.0, 0.25], np.float32))
  _, found = value_and_grad(config, draft, batch)
  expected = expected_gradient(config, np.float64(draft), batch)
  np.testing.assert_allclose(found, expected, atol=2e-4)


@EXAMPLES
@hypothesis.given(
  target=LOGITS, draft=LOGITS, shift=st.sampled_from([-30.0, 0.5, 30.0])
)
def test_a_constant_on_all_logits_of_a_row_changes_nothing(target, draft, shift):
  everywhere = np.ones((ROWS, LENGTH), bool)
  batch = batch_of(target, everywhere, everywhere, np.ones(ROWS, np.float32))
  config = losses.LossConfig("jsd", BETA)
  plain, gradient = value_and_grad(config, draft, batch)
  moved, same = value_and_grad(config, draft + np.float32(shift), batch)
  np.testing.assert_allclose(moved, plain, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(same, gradient, atol=1e-5)
  np.testing.assert_allclose(np.sum(gradient, -1), 0, atol=1e-5)


def _mean_of_all(config, draft_logits, batch):
  """A fault: the mean is over all positions, masked ones too."""
  everywhere = batch.replace(mask=np.ones((ROWS, LENGTH), bool))
  return expected_loss(config, draft_logits, everywhere)


def _no_tail(config, draft_logits, batch):
  """A fault: the tail is left out of the target's buckets."""
  records = batch.records.replace(tail=0 * batch.records.tail)
  return expected_loss(config, draft_logits, batch.replace(records=records))


@pytest.mark.parametrize("fault", [_mean_of_all, _no_tail])
def test_a_faulty_loss_is_told_apart(fault):
  """Negative controls: the same rows tell a wrong oracle from the right one."""
  config = losses.LossConfig()

  def differs(drawn):
    target, draft, mask = drawn
    batch = batch_of(target, mask, mask, np.ones(ROWS, np.float32))
    found, _ = value_and_grad(config, jnp.asarray(draft), batch)
    return abs(float(found) - fault(config, np.float64(draft), batch)) > 1e-2

  hypothesis.find(
    st.tuples(LOGITS, LOGITS, FLAGS),
    differs,
    settings=hypothesis.settings(EXAMPLES, max_examples=300),
  )
