"""Updates: learning, skipped non-finite steps, versions, cut padding, averages."""

import dataclasses
import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distillation import rows

from osd_jax import base
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import losses, optimizers, update

SOURCE, LENGTH, TOP_K, VOCAB, WIDTH = 3, 4, 3, 12, 8
BUFFER_CONFIG = replay.BufferConfig(capacity=8, recency_half_life=4.0)


def _init(key):
  first, second = jax.random.split(key)
  return {
    "embedder": {"embedding": 0.3 * jax.random.normal(first, (VOCAB, WIDTH))},
    "head": {"kernel": 0.3 * jax.random.normal(second, (WIDTH, VOCAB))},
  }


def _score(params, source, mask, target):
  """Scores a token from the embeddings of the source and of the previous token."""
  table = params["embedder"]["embedding"]
  bag = jnp.sum(jnp.where(mask[..., None], table[source], 0.0), axis=1)
  before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
  return (bag[:, None, :] + table[before]) @ params["head"]["kernel"]


def run_update(config, learner, buffer, key, since):
  batches = update.draw_update(
    config, BUFFER_CONFIG, buffer, key, since, config.steps_per_update
  )
  return update.update(MODEL, config, learner, batches)


def _unused(*_):
  raise AssertionError("distillation only calls score")


def model_with(score):
  return base.Model(
    "bag of words", VOCAB, _init, _unused, _unused, score, _unused, _unused
  )


MODEL = model_with(_score)


def batch_of(seed):
  rng = np.random.default_rng(seed)
  records = rows.records_of(rng.normal(0, 2, (4, LENGTH, VOCAB)), TOP_K)
  source = rng.integers(0, VOCAB, (4, SOURCE))
  return rows.batch_of(records, source, rng.integers(2, VOCAB, (4, LENGTH)))


def with_nan(batch):
  """Puts one NaN into the records, which makes the loss NaN."""
  records = batch.records
  return batch.replace(
    records=records.replace(log_probs=records.log_probs.at[0, 0, 0].set(jnp.nan))
  )


def filled_buffer(batch=None):
  buffer = replay.init(BUFFER_CONFIG, SOURCE, LENGTH, TOP_K, VOCAB)
  return replay.append(buffer, batch_of(0) if batch is None else batch)


ANY_LOSS = losses.LossConfig("forward_kl", num_positions=0, num_tokens=0)
STEADY = {"warmup_steps": 0, "query_multiplier": 1.0, "learning_rate": 1e-3}


def config_of(loss=ANY_LOSS, steps_per_update=2, **optimizer):
  return update.UpdateConfig(
    optimizers.OptimizerConfig(**STEADY | optimizer),
    loss,
    steps_per_update,
    num_new=2,
    num_replay=2,
    length_multiple=0,
    ema_decay=0.0,
  )


def learner_of(config, seed=0):
  return update.init_learner(config, _init(jax.random.key(seed)))


step = jax.jit(update.slice_step, static_argnames=("model", "config"))


def same(a, b):
  return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_every_optimizer_lowers_the_loss(name):
  # With these rates, 60 steps are enough for every optimizer.
  rate = {"adamw": 3e-2, "adafactor": 1e-1, "lion": 1e-2, "sgd": 1.0}[name]
  config = config_of(name=name, learning_rate=rate)
  learner, batch = learner_of(config), batch_of(1)
  first = None
  for _ in range(60):
    learner, metrics = step(MODEL, config, learner, batch)
    first = metrics.loss if first is None else first
  assert metrics.loss < 0.7 * first
  assert int(learner.step) == 60 and int(learner.skipped) == 0


def test_sgd_step_is_the_gradient_of_the_loss():
  config = config_of(name="sgd", learning_rate=0.5, clip_norm=None)
  learner, batch = learner_of(config), batch_of(2)
  loss, gradients = update.loss_and_grad(MODEL, config, learner.params, batch)
  after, metrics = step(MODEL, config, learner, batch)
  expected = jax.tree.map(lambda p, g: p - 0.5 * g, learner.params, gradients)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.params, expected
  )
  np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
  np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(gradients), rtol=1e-5)


def test_source_padding_is_masked():
  batch = batch_of(2)
  results = []

  def score(params, source, mask, target):
    results.append((np.asarray(source), np.asarray(mask)))
    return jnp.zeros((*target.shape, VOCAB))

  params = _init(jax.random.key(0))
  update.loss_and_grad(model_with(score), config_of(), params, batch)
  source, mask = results[0]
  assert (mask == (source != 0)).all() and not mask.all()


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_step_with_a_nan_loss_is_skipped_and_counted(name):
  config = config_of(name=name)
  learner, _ = step(MODEL, config, learner_of(config), batch_of(3))
  after, metrics = step(MODEL, config, learner, with_nan(batch_of(4)))
  assert not bool(metrics.finite) and not np.isfinite(metrics.loss)
  assert int(after.skipped) == 1 and int(after.step) == int(learner.step) == 1
  assert same(after.params, learner.params)
  assert same(after.opt_state, learner.opt_state)
  onwards, _ = step(MODEL, config, after, batch_of(5))
  direct, _ = step(MODEL, config, learner, batch_of(5))
  assert same(onwards.params, direct.params)


def test_step_with_a_nonfinite_gradient_is_skipped():
  def score(params, source, mask, target):
    zero = params["head"]["kernel"][0, 0] * 0.0
    return _score(params, source, mask, target) + jnp.sqrt(zero)

  config = config_of()
  learner = learner_of(config)
  after, metrics = step(model_with(score), config, learner, batch_of(6))
  assert np.isfinite(metrics.loss) and not bool(metrics.finite)
  assert same(after.params, learner.params) and int(after.skipped) == 1


def test_nonfinite_step_with_a_finite_gradient_is_skipped():
  config = config_of(learning_rate=1e38)  # the norm of the step overflows float32
  learner = learner_of(config)
  after, metrics = step(MODEL, config, learner, batch_of(6))
  assert np.isfinite(metrics.grad_norm) and not bool(metrics.finite)
  assert same(after.params, learner.params) and int(after.skipped) == 1


def test_version_increases_unless_all_slices_are_skipped():
  config = config_of()
  run = functools.partial(run_update, config)
  learner, _ = run(learner_of(config), filled_buffer(), jax.random.key(0), 0)
  assert int(learner.version) == 1 and int(learner.step) == 2
  all_nan = jax.tree.map(
    lambda leaf: leaf * jnp.nan if leaf.dtype == jnp.float32 else leaf,
    batch_of(7).records,
  )
  bad = filled_buffer(batch_of(7).replace(records=all_nan))
  after, metrics = run(learner, bad, jax.random.key(1), 0)
  assert int(after.version) == 1 and int(after.skipped) == 2
  assert not np.asarray(metrics.finite).any() and same(after.params, learner.params)


def test_slices_keep_only_the_newest_state_alive():
  """Keeping the parameters and moments of all slices would take much memory."""
  config, buffer = config_of(steps_per_update=4), filled_buffer()
  learner, results = learner_of(config), []
  batches = update.draw_update(config, BUFFER_CONFIG, buffer, jax.random.key(5), 2, 4)
  for state, _ in update.slices(MODEL, config, learner, batches):
    results.append(weakref.ref(state))
    assert [ref() is None for ref in results[:-1]] == [True] * (len(results) - 1)
  assert len(results) == 4


def test_single_slices_equal_the_update_bit_by_bit():
  config, buffer = config_of(steps_per_update=3), filled_buffer()
  learner, key = learner_of(config), jax.random.key(5)
  whole, metrics = run_update(config, learner, buffer, key, 2)
  state = learner
  for index in range(3):
    slice_key = jax.random.fold_in(key, index)
    batch = replay.sample(buffer, slice_key, 2, 2, BUFFER_CONFIG, 2)
    state, report = update.take_slice(MODEL, config, state, batch)
    assert batch.weight.shape == (4,) and report.loss == metrics.loss[index]
  assert int(state.version) == 0
  assert same(update.finish_update(learner, state, [report])[0], whole)
  # Negative control: another key draws other rows.
  other, _ = run_update(config, learner, buffer, jax.random.key(7), 2)
  assert not same(other.params, whole.params)


def test_clipping_limits_only_large_gradients():
  def moved(clip_norm):
    config = config_of(name="sgd", learning_rate=1.0, clip_norm=clip_norm)
    learner = learner_of(config)
    after, metrics = step(MODEL, config, learner, batch_of(10))
    change = jax.tree.map(jnp.subtract, after.params, learner.params)
    return float(optax.tree.norm(change)), float(metrics.grad_norm)

  free, norm = moved(None)
  np.testing.assert_allclose(free, norm, rtol=1e-4)
  np.testing.assert_allclose(moved(0.01 * norm), (0.01 * norm, norm), rtol=1e-3)
  np.testing.assert_allclose(moved(100 * norm)[0], norm, rtol=1e-4)


def shortened(batch, length):
  """Replaces the positions from `length` on by padding."""
  inside = (jnp.arange(LENGTH) < length)[None]
  return batch.replace(
    target=jnp.where(inside, batch.target, base.PAD_ID), mask=batch.mask & inside
  )


@pytest.mark.parametrize(
  ("length", "multiple", "left"), [(3, 2, 4), (2, 2, 2), (3, 0, 4)]
)
def test_cutting_shared_padding_does_not_change_the_step(length, multiple, left):
  config = dataclasses.replace(config_of(name="sgd"), length_multiple=multiple)
  learner, batch = learner_of(config), shortened(batch_of(11), length)
  short = update.cut(config, batch)
  assert short.target.shape == short.mask.shape == (4, left)
  assert {leaf.shape[1] for leaf in jax.tree.leaves(short.records)} == {left}
  whole, metrics = step(MODEL, config, learner, batch)
  after, report = step(MODEL, config, learner, short)
  np.testing.assert_allclose(report.loss, metrics.loss, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.params, whole.params
  )
  # Negative control: cutting one position more changes the step.
  lost, _ = step(MODEL, config, learner, shortened(batch, length - 1))
  assert not same(lost.params, whole.params)


def test_emitted_padding_ids_are_not_cut():
  config = dataclasses.replace(config_of(), length_multiple=1)
  batch = shortened(batch_of(11), 3)
  emitted = batch.replace(target=batch.target.at[:, 1].set(base.PAD_ID))
  assert update.cut(config, emitted).mask.sum() == batch.mask.sum() == 12
  nothing = batch.replace(mask=jnp.zeros_like(batch.mask))
  assert update.cut(config, nothing).target.shape[1] == 1


def test_warm_up_compiles_for_every_length():
  config = dataclasses.replace(config_of(clip_norm=0.9), length_multiple=3)
  learner = learner_of(config)
  update.warm_up(MODEL, config, learner, batch_of(12))
  size = update.take_slice._cache_size()
  batches = [shortened(batch_of(seed), length) for seed, length in enumerate(range(5))]
  learner, _ = update.update(MODEL, config, learner, batches)
  assert update.take_slice._cache_size() == size and int(learner.step) == 5


def test_served_parameters_are_the_moving_average():
  config = dataclasses.replace(config_of(learning_rate=3e-2), ema_decay=0.75)
  learner = learner_of(config)
  expected = learner.params
  for seed in range(4):
    learner, _ = step(MODEL, config, learner, batch_of(seed))
    expected = jax.tree.map(
      lambda old, new: 0.75 * old + 0.25 * new, expected, learner.params
    )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), learner.served, expected
  )
  assert not same(learner.served, learner.params)
  plain = learner_of(config_of())
  assert plain.ema is None and plain.served is plain.params
