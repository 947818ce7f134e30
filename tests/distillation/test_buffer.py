"""The replay buffer against a Python list, and the laws of its sampling."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from osd_jax import base
from osd_jax.distillation import buffer as replay

SOURCE, LENGTH, TOP_K, VOCAB = 2, 3, 2, 9

append = jax.jit(replay.append)
drawn_ages = jax.jit(replay._draw, static_argnums=(2, 3))
sample = jax.jit(replay.sample, static_argnames=("num_new", "num_replay", "config"))


def empty(capacity):
  return replay.init(replay.BufferConfig(capacity), SOURCE, LENGTH, TOP_K, VOCAB)


def batch_of(values, weights=None):
  """Rows told apart by a number that every one of their fields is made from."""
  values = np.asarray(values)
  rows = len(values)
  positions = np.broadcast_to(values[:, None], (rows, LENGTH))
  kept = np.broadcast_to(values[:, None, None], (rows, LENGTH, TOP_K))
  return base.DistillationBatch(
    source=jnp.asarray(np.broadcast_to(values[:, None], (rows, SOURCE)), jnp.int32),
    target=jnp.asarray(positions, jnp.int32),
    mask=jnp.asarray(positions % 2 == 0),
    records=base.Records(
      log_probs=jnp.asarray(-kept, jnp.float32),
      ids=jnp.asarray(kept % 50_000, jnp.uint16),
      tail=jnp.asarray(positions / 1e6, jnp.float32),
      error=jnp.asarray(positions % 3 == 0),
    ),
    weight=jnp.ones(rows) if weights is None else jnp.asarray(weights, jnp.float32),
  )


def filled_with(capacity, count):
  buffer = empty(capacity)
  for value in range(1, count + 1):
    buffer = append(buffer, batch_of([value]))
  return buffer


def same(a, b):
  return all(
    np.array_equal(x, y) and x.dtype == y.dtype
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


appends = st.lists(
  st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.5]), min_size=3, max_size=3), max_size=8
)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  capacity=st.sampled_from([3, 4, 7]),
  weights=appends,
  since=st.integers(0, 26),
  seed=st.integers(0, 2**31),
)
def test_ring_and_samples_agree_with_a_list(capacity, weights, since, seed):
  buffer, oracle = empty(capacity), oracles.ListBuffer(capacity)
  for index, row_weights in enumerate(weights):
    values = [10 * index + offset + 1 for offset in range(3)]
    buffer = append(buffer, batch_of(values, row_weights))
    oracle.append(values, row_weights)
  assert int(buffer.added) == oracle.added
  assert int(buffer.filled) == len(oracle.rows)
  for serial, value, weight in oracle.rows:
    slot = jax.tree.map(lambda ring, slot=serial % capacity: ring[slot], buffer.data)
    assert same(slot, jax.tree.map(lambda leaf: leaf[0], batch_of([value], [weight])))

  config = replay.BufferConfig(capacity, recency_half_life=2.0)
  rows = sample(buffer, jax.random.key(seed), 2, 3, config, since)
  drawn = np.where(rows.weight > 0, rows.source[:, 0], -1)
  for part, allowed in (
    (drawn[:2], oracle.since(since)),
    (drawn[2:], oracle.since(0)),
  ):
    present = [value for value in part if value >= 0]
    assert len(present) == len(set(present)) == min(len(part), len(allowed))
    assert set(present) <= {value for _, value, _ in allowed}
  by_value = {value: weight for _, value, weight in oracle.rows}
  for value, weight in zip(drawn, np.asarray(rows.weight), strict=True):
    assert weight == by_value.get(value, 0.0)


def test_every_field_of_a_sampled_row_comes_from_one_row():
  buffer = filled_with(8, 11)
  rows = sample(buffer, jax.random.key(0), 2, 4, replay.BufferConfig(8), 9)
  values = np.asarray(rows.source[:, 0])
  assert same(rows, batch_of(values))
  assert set(values[:2]) == {10, 11} and set(values[2:]) <= set(range(4, 12))


def test_nothing_is_drawn_from_an_empty_buffer_and_padding_fills_no_slot():
  buffer = append(empty(4), batch_of([5, 6], [0.0, 0.0]))
  assert int(buffer.added) == 0 and same(buffer, empty(4))
  rows = sample(buffer, jax.random.key(0), 2, 2, replay.BufferConfig(4), 0)
  assert not np.asarray(rows.weight).any()


def test_sampling_leaves_the_buffer_and_repeats_with_its_key():
  buffer = filled_with(6, 6)
  config = replay.BufferConfig(6)
  draw = lambda seed: sample(buffer, jax.random.key(seed), 1, 3, config, 4)
  before = jax.tree.map(np.array, buffer)
  assert same(draw(1), draw(1))
  assert any(not same(draw(1), draw(seed)) for seed in range(2, 8))
  assert same(before, buffer)


def replayed_counts(half_life, draws=4000, capacity=6):
  buffer = filled_with(capacity, 9)  # holds 4..9
  config = replay.BufferConfig(capacity, half_life)
  one = lambda key: replay.sample(buffer, key, 0, 1, config, 0).source[0, 0]
  values = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), draws))
  return np.bincount(np.asarray(values), minlength=10)[4:]


def chi_square(counts, probs):
  expected = counts.sum() * probs
  return ((counts - expected) ** 2 / expected).sum()


def test_replay_follows_the_recency_law_and_not_the_other_one():
  ages = np.arange(5, -1, -1)
  recent = 2.0 ** (-ages / 1.5)
  recent, uniform = recent / recent.sum(), np.full(6, 1 / 6)
  limit = 30.9  # chi-square with 5 degrees of freedom, p = 1e-5
  assert chi_square(replayed_counts(1.5), recent) < limit
  assert chi_square(replayed_counts(None), uniform) < limit
  assert chi_square(replayed_counts(1.5), uniform) > limit  # the control
  assert chi_square(replayed_counts(None), recent) > limit


def test_two_rows_follow_the_law_of_drawing_without_replacement():
  buffer, capacity = filled_with(4, 4), 4
  config = replay.BufferConfig(capacity, 2.0)
  two = lambda key: replay.sample(buffer, key, 0, 2, config, 0).source[:, 0]
  values = np.asarray(jax.jit(jax.vmap(two))(jax.random.split(jax.random.key(5), 6000)))
  first, second = (4 - values).T  # ages
  counts = np.bincount(first * capacity + second, minlength=capacity**2)
  weights = 2.0 ** (-np.arange(capacity) / 2)
  weights /= weights.sum()
  differ = ~np.eye(capacity, dtype=bool)
  found = counts.reshape(capacity, capacity)[differ]
  control = np.outer(weights, weights)[differ]  # independent draws that differ
  law = (np.outer(weights, weights) / (1 - weights)[:, None])[differ]
  assert found.sum() == len(values)
  limit = 42.0  # chi-square with 11 degrees of freedom, p = 1.6e-5
  assert chi_square(found, law) < limit
  assert chi_square(found, control / control.sum()) > limit


def without_replacement(weights, count):
  """Law of `count` draws one after another: probabilities by tuple of indices."""
  law = {}
  for drawn in itertools.permutations(range(len(weights)), count):
    rest, law[drawn] = 1.0, 1.0
    for index in drawn:
      law[drawn] *= weights[index] / rest
      rest -= weights[index]
  return law


@pytest.mark.parametrize("half_life", [0.8, 3.0])
def test_four_fading_rows_follow_the_law_of_drawing_without_replacement(half_life):
  size, count, draws = 6, 4, 40_000
  fading = -np.log(2.0) / half_life
  keys = jax.random.split(jax.random.key(6), draws)
  draw = lambda key: replay._draw(key, jnp.int32(size), fading, count)
  ages = jax.jit(jax.vmap(draw))(keys)
  weights = 2.0 ** (-np.arange(size) / half_life)
  law = without_replacement(weights / weights.sum(), count)
  place = {drawn: number for number, drawn in enumerate(law)}
  counts = np.bincount([place[tuple(row)] for row in np.asarray(ages).tolist()])
  counts = np.pad(counts, (0, len(law) - len(counts)))
  found, expected = by_size(counts, np.array(list(law.values())), 20 / draws)
  degrees = len(found) - 1  # p below 1e-5: Wilson and Hilferty's approximation
  limit = degrees * (1 - 2 / (9 * degrees) + 4.27 * np.sqrt(2 / (9 * degrees))) ** 3
  assert degrees > 30 and chi_square(found, expected) < limit


def by_size(counts, probs, least):
  """Cells of less than `least` are put together, so that chi-square holds."""
  large = probs >= least
  together = [np.append(part[large], part[~large].sum()) for part in (counts, probs)]
  return together if not large.all() else (counts, probs)


def test_new_and_replayed_rows_are_drawn_with_noise_of_their_own():
  buffer, config = filled_with(6, 6), replay.BufferConfig(6)
  drawn = [
    np.asarray(sample(buffer, jax.random.key(seed), 3, 3, config, 0).source[:, 0])
    for seed in range(20)
  ]
  assert sum((rows[:3] == rows[3:]).all() for rows in drawn) <= 4  # 1 in 120 by chance


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  size=st.one_of(st.integers(0, 20), st.integers(0, 10**6)),
  half_life=st.sampled_from([None, 0.02, 0.5, 3.0, 200.0, 1e7]),
  seed=st.integers(0, 2**31),
)
def test_ages_differ_and_none_is_missing_whatever_the_rounding(size, half_life, seed):
  fading = 0.0 if half_life is None else -np.log(2.0) / half_life
  ages = np.asarray(drawn_ages(jax.random.key(seed), jnp.int32(size), fading, 16))
  present = ages[ages < size]
  assert len(set(present)) == len(present) == min(size, 16)
  assert (ages >= 0).all()
  if half_life == 0.02 and size > 16:  # each age weighs 2**50 times the next
    assert set(ages) == set(range(16))


def test_new_rows_are_drawn_uniformly_whatever_the_half_life():
  buffer = filled_with(6, 9)
  config = replay.BufferConfig(6, 0.5)
  one = lambda key: replay.sample(buffer, key, 1, 0, config, 6).source[0, 0]
  values = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(4), 3000))
  counts = np.bincount(np.asarray(values), minlength=10)
  assert counts[:7].sum() == 0
  assert chi_square(counts[7:], np.full(3, 1 / 3)) < 23.1  # 2 degrees, p = 1e-5


def test_a_donated_append_writes_in_place_whatever_the_capacity():
  def temporaries(capacity, **jit):
    shapes = jax.eval_shape(functools.partial(empty, capacity))
    rows = jax.eval_shape(lambda: batch_of([1, 2]))
    compiled = jax.jit(replay.append, **jit).lower(shapes, rows).compile()
    memory = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + fresh

  small, large = (temporaries(n, donate_argnums=0) for n in (64, 65_536))
  assert large <= small + 1024
  assert temporaries(65_536) > 100 * small  # not donated: a copy of the ring


def test_a_second_append_and_sample_compile_nothing():
  buffer = filled_with(5, 3)
  config = replay.BufferConfig(5)
  sample(buffer, jax.random.key(0), 1, 1, config, 1)
  sizes = append._cache_size(), sample._cache_size()
  for value in range(7):
    buffer = append(buffer, batch_of([value]))
    sample(buffer, jax.random.key(value), 1, 1, config, value)
  assert (append._cache_size(), sample._cache_size()) == sizes


def test_jit_and_no_jit_give_the_same_bits():
  buffer = filled_with(5, 4)
  batch = batch_of([7, 8, 9], [1.0, 0.0, 1.0])
  assert same(append(buffer, batch), replay.append(buffer, batch))
  arguments = (buffer, jax.random.key(2), 1, 3, replay.BufferConfig(5, 3.0), 2)
  assert same(sample(*arguments), replay.sample(*arguments))


def test_a_record_takes_389_bytes_and_what_the_buffer_really_holds():
  assert replay.record_bytes_per_token(64, 32_128) == 389
  assert replay.record_bytes_per_token(64, 100_000) > 389  # ids need four bytes
  buffer = replay.init(replay.BufferConfig(4), 2, 5, 64, 32_128)
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.data.records))
  assert held == 4 * 5 * replay.record_bytes_per_token(64, 32_128)


def test_id_type_and_width_follow_the_vocabulary():
  narrow = replay.init(replay.BufferConfig(2), 2, 2, 64, 16).data.records
  assert narrow.ids.shape == (2, 2, 16) and narrow.ids.dtype == jnp.uint16
  assert base.id_dtype(65_536) == np.uint16 and base.id_dtype(65_537) == np.int32


@pytest.mark.parametrize(
  ("call", "named"),
  [
    (lambda: replay.BufferConfig(0), "BufferConfig.capacity: received 0"),
    (
      lambda: replay.BufferConfig(2, 0.0),
      "BufferConfig.recency_half_life: received 0.0",
    ),
    (lambda: replay.init(replay.BufferConfig(2), 0, 2, 2, 9), "source_length is 0"),
    (lambda: append(empty(2), batch_of([1, 2, 3])), "3 rows, expected at most"),
    (
      lambda: append(
        replay.init(replay.BufferConfig(2), SOURCE, 5, TOP_K, VOCAB), batch_of([1])
      ),
      r"batch\.target has shape \(1, 3\), expected \(1, 5\)",
    ),
    (
      lambda: sample(empty(2), jax.random.key(0), 3, 1, replay.BufferConfig(2), 0),
      "num_new is 3, expected 0 to the capacity 2",
    ),
    (
      lambda: sample(empty(2), jax.random.key(0), 0, 0, replay.BufferConfig(2), 0),
      "num_new and num_replay are both 0",
    ),
  ],
)
def test_bad_input_is_refused_by_name(call, named):
  with pytest.raises(ValueError, match=named):
    call()


def test_target_states_are_stored_bit_for_bit():
  """They are kept as integers, for the sake of the time that writing a row takes."""
  config = replay.BufferConfig(capacity=3)
  ring = replay.init(config, 2, LENGTH, TOP_K, VOCAB, state_width=4)
  noise = np.random.default_rng(0).normal(size=(5, 2, 4))
  target_states = jnp.asarray(noise, jnp.bfloat16)
  for index in range(5):
    row = jax.tree.map(
      lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), ring.data
    )
    row = row.replace(weight=jnp.ones(1), target_states=target_states[index][None])
    ring = jax.jit(replay.append)(ring, row)
  drawn = replay.sample(ring, jax.random.key(0), 0, 3, config, 0)
  assert drawn.target_states.dtype == jnp.bfloat16
  order = np.argsort(np.asarray(drawn.target_states)[:, 0, 0].astype(np.float32))
  kept = np.asarray(target_states[2:]).astype(np.float32)
  expected = kept[np.argsort(kept[:, 0, 0])]
  np.testing.assert_array_equal(
    np.asarray(drawn.target_states, np.float32)[order], expected
  )
