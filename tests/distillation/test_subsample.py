"""Losses on subsampled positions and tokens: unbiased estimates of the whole loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distillation import rows

from osd_jax import base, testing
from osd_jax.decoding import records
from osd_jax.distillation import losses, optimizers, subsample, update
from osd_jax.models import attached, families
from osd_jax.models.shapes import AttachedConfig

ROWS, LENGTH, TOP_K, VOCAB = 3, 8, 5, 40
KEY = jax.random.key(0)
draw = jax.jit(subsample.subsample, static_argnums=(0, 3))


def batch_of(seed=0, lengths=(8, 5, 2)):
  rng = np.random.default_rng(seed)
  logits = rng.normal(0, 2, (ROWS, LENGTH, VOCAB))
  error = rng.random((ROWS, LENGTH)) < 0.5
  return rows.batch_of(
    rows.records_of(logits, TOP_K, error),
    target=rng.integers(2, VOCAB, (ROWS, LENGTH)),
    mask=np.arange(LENGTH)[None] < np.asarray(lengths)[:, None],
  )


def model_of(logits):
  """Returns a model whose `score` returns `logits` for any input."""
  unused = None
  return base.Model(
    "fixed", VOCAB, unused, unused, unused, lambda *_: logits, unused, unused
  )


LOGITS = jnp.asarray(np.random.default_rng(9).normal(0, 2, (ROWS, LENGTH, VOCAB)))


def loss(config, batch, logits=LOGITS, key=KEY):
  sampled = draw(config, batch, key, VOCAB)
  part = subsample.logits_of(model_of(logits), {}, sampled)
  return float(losses.distillation_loss(config, part, sampled.batch))


ANY = functools.partial(losses.LossConfig, num_positions=0, num_tokens=0)


@pytest.mark.parametrize(
  "config", [ANY(), ANY(num_positions=LENGTH), ANY(num_tokens=VOCAB)], ids=str
)
def test_sampling_all_positions_or_tokens_gives_the_whole_loss(config):
  batch = batch_of()
  whole = float(losses.distillation_loss(config, LOGITS, batch))
  assert loss(config, batch) == pytest.approx(whole, rel=1e-6)


def test_records_with_more_entries_than_num_tokens_are_compared_in_full():
  """`record_top_k` may exceed the default of `num_tokens`."""
  batch = batch_of()
  fewer, equal = (loss(ANY(num_tokens=count), batch) for count in (2, TOP_K))
  assert fewer == equal


def test_drawn_positions_are_distinct_and_emitted():
  batch, config = batch_of(), ANY(num_positions=4)
  sampled = draw(config, batch, KEY, VOCAB)
  emitted = [8, 5, 2]
  for row, positions in enumerate(np.asarray(sampled.positions)):
    assert len(set(positions.tolist())) == 4
    within = positions < emitted[row]
    np.testing.assert_array_equal(sampled.batch.mask[row], within)
    assert within.sum() == min(4, emitted[row])
  expected = np.take_along_axis(batch.records.tail, sampled.positions, axis=1)
  np.testing.assert_array_equal(sampled.batch.records.tail, expected)
  np.testing.assert_array_equal(sampled.batch.target, batch.target)


def test_configured_error_positions_are_drawn():
  batch = batch_of(lengths=(8, 8, 8))
  config = ANY(positions="error", num_positions=2)
  sampled = draw(config, batch, KEY, VOCAB)
  judged = losses.chosen_positions(config, sampled.batch)
  assert np.all(np.sum(judged, 1) == np.minimum(2, np.sum(batch.records.error, 1)))


def test_mean_over_slices_estimates_the_whole_loss():
  """Rows have the same length, so every position has the same weight."""
  batch = batch_of(lengths=(8, 8, 8))
  whole = loss(ANY(), batch)
  config = ANY(num_positions=2)
  parts = [loss(config, batch, key=k) for k in jax.random.split(KEY, 300)]
  error = np.std(parts) / np.sqrt(len(parts))
  assert abs(np.mean(parts) - whole) < 4 * error
  assert error < 0.02 * whole  # the limit above is tight enough


def test_tokens_with_the_most_mass_are_drawn():
  batch = batch_of()
  sampled = draw(ANY(num_tokens=6), batch, KEY, VOCAB)
  mass = np.zeros(VOCAB)
  for row, length in enumerate((8, 5, 2)):
    for t in range(length):
      entries = batch.records.ids[row, t], batch.records.log_probs[row, t]
      np.add.at(mass, np.asarray(entries[0]), np.exp(entries[1]))
  assert set(np.asarray(sampled.tokens).tolist()) == set(np.argsort(-mass)[:6])


def test_mass_of_omitted_tokens_moves_to_the_tail():
  batch = batch_of()
  sampled = draw(ANY(num_tokens=6), batch, KEY, VOCAB)
  top = np.asarray(sampled.batch.records.log_probs)
  total = np.exp(top).sum(-1) + sampled.batch.records.tail
  np.testing.assert_allclose(total, 1, atol=1e-5)
  assert np.any(sampled.batch.records.tail > batch.records.tail + 0.05)
  # Ids now index `sampled.tokens`; every remaining one refers to the same token.
  tokens = np.append(sampled.tokens, -1)
  result, expected = tokens[sampled.batch.records.ids], np.asarray(batch.records.ids)
  is_kept = result >= 0
  np.testing.assert_array_equal(result[is_kept], expected[is_kept])
  assert 0 < is_kept.mean() < 1


def test_negatives_estimate_the_draft_mass_on_omitted_tokens():
  batch = batch_of()
  config = ANY(num_tokens=10, num_negatives=8)

  def total(key):
    sampled = draw(config, batch, key, VOCAB)
    part = subsample.logits_of(model_of(LOGITS), {}, sampled)
    return jnp.sum(jnp.exp(part), -1)

  sums = np.stack([total(key) for key in jax.random.split(KEY, 400)])
  expected = np.exp(np.asarray(LOGITS)).sum(-1)
  error = sums.std(0) / np.sqrt(len(sums))
  assert np.all(np.abs(sums.mean(0) - expected) < 5 * error)
  # Negative control: without negatives, the mass of other tokens is missing.
  few = np.asarray(LOGITS)[..., np.asarray(draw(config, batch, KEY, VOCAB).tokens[:10])]
  assert np.mean(np.exp(few).sum(-1) < 0.8 * expected) > 0.5


# ---- A large vocabulary

LARGE = 32_128
SHAPE = dataclasses.replace(testing.TINY_DRAFT, vocab_size=LARGE)


@functools.cache
def large_pair():
  """Returns an attached draft, its frozen parameters and rows to learn from."""
  target = families.build(SHAPE)
  params = jax.jit(target.init)(jax.random.key(0))
  head = params["decoder"]["logits_dense"]
  head["kernel"] = 3 * head["kernel"]  # makes the target's distributions sharper
  draft = attached.build(AttachedConfig(16, 2, 8, 16), SHAPE)
  source, _ = testing.random_sources(6, 8, 200, seed=0)
  tokens = np.random.default_rng(1).integers(2, 200, (6, 10)).astype(np.int32)
  batch = records.teacher_forced(target, params, source, tokens, 16)
  return draft, attached.frozen_of(SHAPE, params), batch


def mass_outside(num_negatives, steps=40):
  """Returns the draft's mass on unrecorded tokens before and after training."""
  draft, frozen, batch = large_pair()
  config = update.UpdateConfig(
    optimizer=optimizers.OptimizerConfig(learning_rate=1e-2),
    loss=ANY(num_tokens=256, num_negatives=num_negatives),
  )
  learner = update.init_learner(config, jax.jit(draft.init)(jax.random.key(2)))
  is_recorded = np.zeros(LARGE, bool)
  is_recorded[np.asarray(batch.records.ids)] = True

  def outside():
    params = draft.join(learner.params, frozen)
    logits = draft.score(
      params, batch.source, batch.source != 0, batch.target, **draft.score_inputs(batch)
    )
    return float(jnp.mean(jax.nn.softmax(logits)[..., ~is_recorded].sum(-1)))

  before = outside()
  for _ in range(steps):
    learner, _ = update.take_slice(draft, config, learner, batch, frozen)
  return before, outside()


def test_training_with_negatives_lowers_mass_on_unrecorded_tokens():
  before, after = mass_outside(num_negatives=128)
  assert after < 0.8 * before
  _, unseen = mass_outside(num_negatives=0)
  assert unseen > after + 0.1  # negative control: the loss without negatives


def test_frozen_tables_are_not_trained_or_stored():
  draft, frozen, batch = large_pair()
  config = update.UpdateConfig(loss=ANY(num_tokens=64, num_negatives=16), ema_decay=0.5)
  learner = update.init_learner(config, jax.jit(draft.init)(jax.random.key(2)))
  table = np.array(frozen["embedding"])
  after, metrics = update.take_slice(draft, config, learner, batch, frozen)
  assert bool(metrics.finite)
  assert max(leaf.size for leaf in jax.tree.leaves(after)) < LARGE
  np.testing.assert_array_equal(frozen["embedding"], table)
  distance = optax.tree.norm(optax.tree.sub(after.params, learner.params))
  assert distance > 0
