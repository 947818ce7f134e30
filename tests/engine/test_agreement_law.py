"""Agreement of draft and target equals enumeration in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tabular_pair

from osd_jax import base, corpus, sharding, testing
from osd_jax.decoding import records
from osd_jax.engine import agreement, engine

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


def measured(draft_logits, batch):
  return agreement.agreement_from_logits(
    jnp.asarray(draft_logits), batch, settings_of()
  )


def test_full_rows_equal_enumeration():
  target, draft = logits_of(0), logits_of(1)
  batch = batch_of(target, VOCAB)
  found = measured(draft, batch)
  overlap = enumerated(target, draft, batch, processed=False)
  np.testing.assert_allclose(found.distribution_overlap, overlap, atol=1e-5)
  np.testing.assert_allclose(found.distribution_overlap_upper, overlap, atol=1e-5)
  accepted = enumerated(target, draft, batch, processed=True)
  np.testing.assert_allclose(found.acceptance_rate, accepted, atol=1e-5)
  assert np.ptp(accepted - overlap) > 0.05  # the two figures differ


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_truncated_rows_bracket_the_overlap(kept):
  target, draft = logits_of(2, 1.0), logits_of(3, 1.0)
  batch = batch_of(target, kept)
  found = measured(draft, batch)
  overlap = enumerated(target, draft, batch, processed=False)
  assert (np.asarray(found.distribution_overlap) <= overlap + 1e-6).all()
  assert (np.asarray(found.distribution_overlap_upper) >= overlap - 1e-6).all()
  width = found.distribution_overlap_upper - found.distribution_overlap
  assert (np.asarray(width) > 1e-3).all()


def test_truncated_rows_are_exact_if_top_k_fits_the_records():
  """A draft whose top-k lies outside the kept tokens must not get a high overlap."""
  target, draft = logits_of(4), logits_of(5)
  draft[0] = -target[0]
  draft[3] = -target[3]
  batch = batch_of(target, 4)
  accepted = enumerated(target, draft, batch, processed=True)
  exact = [0, 3, 5, 6]  # greedy, or top_k <= 4
  np.testing.assert_allclose(
    np.asarray(measured(draft, batch).acceptance_rate)[exact],
    accepted[exact],
    atol=1e-5,
  )
  assert accepted[3] < 0.1


@pytest.mark.parametrize("kept", [4, VOCAB])
def test_draft_equal_to_the_target_has_agreement_one(kept):
  target = logits_of(6)
  found = measured(target, batch_of(target, kept))
  np.testing.assert_allclose(found.distribution_overlap_upper, 1, atol=1e-5)
  exact = slice(None) if kept == VOCAB else [0, 3, 5, 6]
  np.testing.assert_allclose(np.asarray(found.acceptance_rate)[exact], 1, atol=1e-5)


def test_positions_after_the_end_do_not_count():
  target, draft = logits_of(7), logits_of(8)
  batch = batch_of(target, VOCAB)
  spoilt = np.where(np.asarray(batch.mask)[..., None], draft, np.nan)
  np.testing.assert_array_equal(
    measured(spoilt, batch).distribution_overlap,
    measured(draft, batch).distribution_overlap,
  )


def test_agreement_scores_the_draft_teacher_forced():
  model = testing.tabular_model(VOCAB)
  table = testing.random_table(VOCAB, 0)
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, VOCAB, (ROWS, LENGTH))
  target = logits_of(9)
  batch = batch_of(target, VOCAB).replace(target=jnp.asarray(tokens, jnp.int32))
  fed = np.pad(tokens, ((0, 0), (2, 0)))
  draft = table[fed[:, :LENGTH], fed[:, 1 : LENGTH + 1]]
  found = agreement.agreement(model, jnp.asarray(table), batch, settings_of())
  np.testing.assert_allclose(
    found.distribution_overlap, enumerated(target, draft, batch, False), atol=1e-5
  )


DECODING = engine.DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def answers(pair):
  server = corpus.plain_server(pair, DECODING, sharding.PartitionConfig())
  sampling = engine.SamplingConfig(temperature=1.0)
  return server.run(corpus.requests(tabular_pair.prompts(7), sampling))


def test_draft_equal_to_the_target_has_mean_agreement_one(pair, answers):
  equal = agreement.mean_agreement(pair.target, pair.target_params, answers)
  other = agreement.mean_agreement(pair.draft, pair.draft_params, answers)
  assert equal.keys() == other.keys() == {0, 1}
  for task in (0, 1):
    assert equal[task]["distribution_overlap"] == pytest.approx(1, abs=1e-5)
    assert other[task]["distribution_overlap"] < 0.9  # negative control
  assert [equal[task]["requests"] for task in (0, 1)] == [4, 3]


def test_mean_agreement_does_not_depend_on_the_batch_size(pair, answers):
  few = agreement.mean_agreement(pair.draft, pair.draft_params, answers, rows=3)
  many = agreement.mean_agreement(pair.draft, pair.draft_params, answers, rows=16)
  for task in few:
    assert few[task] == pytest.approx(many[task], abs=1e-6)


def test_mean_agreement_is_the_mean_overlap_of_requests(pair, answers):
  """Against the formula, written in numpy."""
  overlaps = {0: [], 1: []}
  tables = [
    np.asarray(jax.nn.softmax(table, axis=-1), np.float64)
    for table in (pair.target_params, pair.draft_params)
  ]
  for done in answers:
    fed = [0, *done.tokens.tolist()[:-1]]
    before = [0, *fed[:-1]]
    overlap = np.minimum(tables[0][before, fed], tables[1][before, fed]).sum(-1)
    overlaps[done.request.tag].append(overlap.mean())
  found = agreement.mean_agreement(pair.draft, pair.draft_params, answers)
  for task, values in overlaps.items():
    assert found[task]["distribution_overlap"] == pytest.approx(
      np.mean(values), abs=1e-5
    )
