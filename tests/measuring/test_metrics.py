"""Agreement against enumeration in float64; the other figures against closed forms."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from osd_jax import base, testing
from osd_jax.decoding import records
from osd_jax.engine import agreement as agreement_lib
from osd_jax.measuring import metrics

VOCAB, LENGTH = 9, 7
# temperature, top_k, top_p
SETTINGS = (
  (0.0, 0, 1.0),
  (0.7, 0, 1.0),
  (1.0, 0, 1.0),
  (1.0, 3, 1.0),
  (1.0, 0, 0.8),
  (0.7, 4, 0.9),
  (1.6, 2, 0.5),
)
ROWS = len(SETTINGS)


def logits_of(seed, sharpness=2.0):
  rng = np.random.default_rng(seed)
  return rng.normal(0, sharpness, (ROWS, LENGTH, VOCAB)).astype(np.float32)


def settings_of():
  temperature, top_k, top_p = zip(*SETTINGS, strict=True)
  return base.SamplingSettings(
    temperature=jnp.asarray(temperature, jnp.float32),
    top_k=jnp.asarray(top_k, jnp.int32),
    top_p=jnp.asarray(top_p, jnp.float32),
    seed=jnp.zeros(ROWS, jnp.uint32),
    max_length=jnp.full(ROWS, LENGTH, jnp.int32),
  )


def batch_of(target_logits, kept):
  """Rows of 1 to LENGTH emitted tokens."""
  count = 1 + np.arange(ROWS) % LENGTH
  return base.DistillationBatch(
    source=jnp.ones((ROWS, 2), jnp.int32),
    target=jnp.ones((ROWS, LENGTH), jnp.int32),
    mask=jnp.asarray(np.arange(LENGTH) < count[:, None]),
    records=records.from_logits(jnp.asarray(target_logits), kept),
    weight=jnp.ones(ROWS, jnp.float32),
  )


def enumerated(target_logits, draft_logits, batch, processed):
  """Mean over a row's positions of sum_x min(target, draft), in float64."""
  found = np.zeros(ROWS)
  for row, (temperature, top_k, top_p) in enumerate(SETTINGS):
    if not processed:
      temperature, top_k, top_p = 1.0, 0, 1.0
    values = [
      np.minimum(
        oracles.processed_probs(target, temperature, top_k, top_p),
        oracles.processed_probs(draft, temperature, top_k, top_p),
      ).sum()
      for target, draft in zip(target_logits[row], draft_logits[row], strict=True)
    ]
    found[row] = np.mean(np.asarray(values)[np.asarray(batch.mask)[row]])
  return found


def agreement(draft_logits, batch):
  return agreement_lib.agreement_from_logits(
    jnp.asarray(draft_logits), batch, settings_of()
  )


def test_full_rows_equal_enumeration():
  target, draft = logits_of(0), logits_of(1)
  batch = batch_of(target, VOCAB)
  found = agreement(draft, batch)
  overlap = enumerated(target, draft, batch, processed=False)
  np.testing.assert_allclose(found.distribution_overlap, overlap, atol=1e-5)
  np.testing.assert_allclose(found.distribution_overlap_upper, overlap, atol=1e-5)
  accepted = enumerated(target, draft, batch, processed=True)
  np.testing.assert_allclose(found.acceptance_rate, accepted, atol=1e-5)
  assert np.ptp(accepted - overlap) > 0.05  # the two are different figures


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_truncated_rows_bracket_the_overlap(kept):
  target, draft = logits_of(2, 1.0), logits_of(3, 1.0)
  batch = batch_of(target, kept)
  found = agreement(draft, batch)
  overlap = enumerated(target, draft, batch, processed=False)
  assert (np.asarray(found.distribution_overlap) <= overlap + 1e-6).all()
  assert (np.asarray(found.distribution_overlap_upper) >= overlap - 1e-6).all()
  width = found.distribution_overlap_upper - found.distribution_overlap
  assert (np.asarray(width) > 1e-3).all()


def test_truncated_rows_are_exact_where_the_request_keeps_no_more():
  """A draft whose own top-k lies outside the kept tokens must not look good."""
  target, draft = logits_of(4), logits_of(5)
  draft[0] = -target[0]
  draft[3] = -target[3]
  batch = batch_of(target, 4)
  accepted = enumerated(target, draft, batch, processed=True)
  exact = [0, 3, 5, 6]  # greedy, or top_k <= 4
  np.testing.assert_allclose(
    np.asarray(agreement(draft, batch).acceptance_rate)[exact],
    accepted[exact],
    atol=1e-5,
  )
  assert accepted[3] < 0.1


@pytest.mark.parametrize("kept", [4, VOCAB])
def test_a_draft_equal_to_the_target_agrees(kept):
  target = logits_of(6)
  found = agreement(target, batch_of(target, kept))
  np.testing.assert_allclose(found.distribution_overlap_upper, 1, atol=1e-5)
  exact = slice(None) if kept == VOCAB else [0, 3, 5, 6]
  np.testing.assert_allclose(np.asarray(found.acceptance_rate)[exact], 1, atol=1e-5)


def test_positions_after_the_end_do_not_count():
  target, draft = logits_of(7), logits_of(8)
  batch = batch_of(target, VOCAB)
  spoilt = np.where(np.asarray(batch.mask)[..., None], draft, np.nan)
  np.testing.assert_array_equal(
    agreement(spoilt, batch).distribution_overlap,
    agreement(draft, batch).distribution_overlap,
  )


def test_agreement_reads_the_draft_teacher_forced():
  model = testing.tabular_model(VOCAB)
  table = testing.random_table(VOCAB, 0)
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, VOCAB, (ROWS, LENGTH))
  target = logits_of(9)
  batch = batch_of(target, VOCAB).replace(target=jnp.asarray(tokens, jnp.int32))
  fed = np.pad(tokens, ((0, 0), (2, 0)))
  draft = table[fed[:, :LENGTH], fed[:, 1 : LENGTH + 1]]
  found = agreement_lib.agreement(model, jnp.asarray(table), batch, settings_of())
  np.testing.assert_allclose(
    found.distribution_overlap, enumerated(target, draft, batch, False), atol=1e-5
  )


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.85, 1.0])
def test_expected_tokens_per_call_is_the_sum_of_survivals(acceptance, num_draft_tokens):
  survivals = sum(acceptance**i for i in range(num_draft_tokens + 1))
  found = metrics.expected_tokens_per_target_call(acceptance, num_draft_tokens)
  assert found == pytest.approx(survivals)


def test_ratios():
  assert metrics.draft_acceptance_rate(3, 4) == 0.75
  assert metrics.draft_acceptance_rate(0, 0) is None
  assert metrics.tokens_per_target_call(12, 4) == 3
  assert metrics.tokens_per_target_call(0, 0) is None
  assert metrics.predicted_speed_up(3.0, 5, 0.1) == pytest.approx(2.0)
  assert metrics.predicted_speed_up(3.0, 5, 0.1, 1.5) == pytest.approx(1.5)


def test_recovery_is_the_first_window_at_the_level():
  overlaps = [0.0] * 20 + [1.0] * 40
  # 23 of 25 good ones are needed for .9 x 1; the 43rd request is the 23rd good one.
  assert metrics.recovery_requests(overlaps, level=1.0) == 43
  assert metrics.recovery_requests(overlaps, level=1.1) is not None
  assert metrics.recovery_requests(overlaps, level=1.2) is None
  assert metrics.recovery_requests([1.0] * 40, level=1.0) == 12
  assert metrics.recovery_requests([1.0] * 11, level=1.0) is None


def test_segments_are_summed_up_at_their_edges():
  rows = [
    {
      "overlap": float(i),
      "floor_overlap": 0.5,
      "tokens_per_target_call": 2.0,
      "draft_acceptance_rate": None if i == 0 else 1.0,
    }
    for i in range(10)
  ]
  found = metrics.segment_summary(rows, edge=4)
  assert found["requests"] == 10
  assert found["overlap_first"] == 1.5 and found["overlap_last"] == 7.5
  assert found["overlap_mean"] == 4.5 and found["floor_overlap_last"] == 0.5
  assert found["draft_acceptance_first"] == 1.0  # what was not measured is left out
  del rows[3]["floor_overlap"]
  assert metrics.segment_summary(rows, edge=4)["floor_overlap_first"] == 0.5
  assert np.isnan(metrics.segment_summary([], 4)["overlap_first"])
