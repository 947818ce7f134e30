"""The replay buffer: equality with a list, distribution of samples, shortlist."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from distillation import rows as rows_lib

from osd_jax import base
from osd_jax.distillation import buffer as replay

SOURCE, LENGTH, TOP_K, VOCAB = 2, 3, 2, 9
CAPACITY, ROWS, NEW, REPLAY = 5, 3, 2, 3
CONFIG = replay.BufferConfig(CAPACITY, recency_half_life=2.0)
EXAMPLES = hypothesis.settings(
  max_examples=40, deadline=None, derandomize=True, database=None
)
append = jax.jit(replay.append)
draw_ages = jax.jit(replay._draw, static_argnums=(2, 3, 4))
sample = jax.jit(replay.sample, static_argnums=(2, 3, 4))

# Rows of weight 0 are padding of a batch; they must not be stored or sampled.
WEIGHTS = st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=ROWS, max_size=ROWS)
HISTORIES = st.lists(WEIGHTS, max_size=9)


def empty(capacity):
  return replay.init(replay.BufferConfig(capacity), SOURCE, LENGTH, TOP_K, VOCAB)


def batch_of(values, weights=None):
  """Returns rows whose fields all derive from one number, to detect mixed rows."""
  values = np.asarray(values)
  rows = len(values)
  positions = np.broadcast_to(values[:, None], (rows, LENGTH))
  entries = np.broadcast_to(values[:, None, None], (rows, LENGTH, TOP_K))
  return base.DistillationBatch(
    source=jnp.asarray(np.broadcast_to(values[:, None], (rows, SOURCE)), jnp.int32),
    target=jnp.asarray(positions, jnp.int32),
    mask=jnp.asarray(positions % 2 == 0),
    records=base.Records(
      log_probs=jnp.asarray(-entries, jnp.float32),
      ids=jnp.asarray(entries % 50_000, jnp.uint16),
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


def play(history, weights_of=lambda weights: weights):
  """Returns ring and oracle after a history, and `added` before each append."""
  ring, oracle, marks = empty(CAPACITY), oracles.ListBuffer(CAPACITY), [0]
  for number, weights in enumerate(history):
    values = [1 + ROWS * number + place for place in range(ROWS)]
    ring = append(ring, batch_of(values, weights_of(weights)))
    oracle.append(values, weights)
    marks.append(oracle.added)
  return ring, oracle, marks


def stored(ring):
  """Returns (value, weight) per row, oldest first; checks that every row is whole."""
  added, filled = int(ring.added), int(ring.filled)
  slots = np.arange(added - filled, added) % CAPACITY
  rows = jax.tree.map(lambda leaf: leaf[slots], jax.device_get(ring.data))
  assert same(rows, batch_of(rows.source[:, 0], rows.weight))
  return list(zip(rows.source[:, 0].tolist(), rows.weight.tolist(), strict=True))


def listed(oracle):
  return [(value, weight) for _, value, weight in oracle.rows]


@EXAMPLES
@hypothesis.given(history=HISTORIES)
def test_ring_holds_the_newest_rows_in_order(history):
  ring, oracle, _ = play(history)
  assert int(ring.added) == oracle.added
  assert stored(ring) == listed(oracle)


@EXAMPLES
@hypothesis.given(history=HISTORIES, data=st.data(), seed=st.integers(0, 2**31))
def test_sample_has_distinct_new_rows_and_distinct_replayed_rows(history, data, seed):
  ring, oracle, marks = play(history)
  since = data.draw(st.sampled_from(marks))
  rows = sample(ring, jax.random.key(seed), NEW, REPLAY, CONFIG, since)
  rows = jax.device_get(rows)
  present = rows.weight > 0
  whole = jax.tree.map(lambda leaf: leaf[present], rows)
  # The fields of each row still belong together.
  assert same(whole, batch_of(whole.source[:, 0], whole.weight))
  parts = (slice(0, NEW), oracle.since(since)), (slice(NEW, None), oracle.since(0))
  for part, allowed in parts:
    sampled = rows.source[part, 0][present[part]].tolist()
    count = part.stop or NEW + REPLAY
    assert len(sampled) == min(count - part.start, len(allowed))
    assert len(set(sampled)) == len(sampled)
    result = set(zip(sampled, rows.weight[part][present[part]].tolist(), strict=True))
    assert result <= {(value, weight) for _, value, weight in allowed}


@pytest.mark.parametrize(
  "fault",
  [
    lambda weights: [1.0] * ROWS,  # stores padding
    lambda weights: [*weights[:-1], 0.0],  # loses the last row
  ],
)
def test_random_histories_reveal_stored_padding_and_lost_rows(fault):
  """Negative controls of the two tests above."""

  def differs(history):
    ring, oracle, _ = play(history, fault)
    return stored(ring) != listed(oracle)

  hypothesis.find(
    HISTORIES, differs, settings=hypothesis.settings(EXAMPLES, max_examples=300)
  )


def replayed_counts(half_life, draws=4000, capacity=6):
  buffer = filled_with(capacity, 9)  # holds 4..9
  config = replay.BufferConfig(capacity, half_life)
  one = lambda key: replay.sample(buffer, key, 0, 1, config, 0).source[0, 0]
  values = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), draws))
  return np.bincount(np.asarray(values), minlength=10)[4:]


def chi_square(counts, probs):
  expected = counts.sum() * probs
  return ((counts - expected) ** 2 / expected).sum()


def test_replay_distribution_follows_the_recency_half_life():
  ages = np.arange(5, -1, -1)
  recent = 2.0 ** (-ages / 1.5)
  recent, uniform = recent / recent.sum(), np.full(6, 1 / 6)
  limit = 30.9  # chi-square with 5 degrees of freedom, p = 1e-5
  assert chi_square(replayed_counts(1.5), recent) < limit
  assert chi_square(replayed_counts(None), uniform) < limit
  # Negative control: each distribution is distinguished from the other.
  assert chi_square(replayed_counts(1.5), uniform) > limit
  assert chi_square(replayed_counts(None), recent) > limit


def without_replacement(weights, count):
  """Returns the probability of every tuple of `count` successive draws."""
  law = {}
  for order in itertools.permutations(range(len(weights)), count):
    rest, law[order] = 1.0, 1.0
    for index in order:
      law[order] *= weights[index] / rest
      rest -= weights[index]
  return law


@pytest.mark.parametrize("half_life", [0.8, 3.0])
def test_replayed_rows_are_drawn_without_replacement(half_life):
  size, count, draws = 6, 4, 40_000
  fading = -np.log(2.0) / half_life
  keys = jax.random.split(jax.random.key(6), draws)
  draw = lambda key: replay._draw(key, jnp.int32(size), size, fading, count)
  ages = jax.jit(jax.vmap(draw))(keys)
  weights = 2.0 ** (-np.arange(size) / half_life)
  law = without_replacement(weights / weights.sum(), count)
  place = {sampled: number for number, sampled in enumerate(law)}
  counts = np.bincount([place[tuple(row)] for row in np.asarray(ages).tolist()])
  counts = np.pad(counts, (0, len(law) - len(counts)))
  result, expected = by_size(counts, np.array(list(law.values())), 20 / draws)
  independent = np.array([np.prod(weights[list(sampled)]) for sampled in law])
  control = by_size(counts, independent / independent.sum(), 20 / draws)
  # Wilson and Hilferty's approximation of the chi-square limit at p = 1e-5.
  degrees = len(result) - 1
  limit = degrees * (1 - 2 / (9 * degrees) + 4.27 * np.sqrt(2 / (9 * degrees))) ** 3
  assert degrees > 30 and chi_square(result, expected) < limit
  # Negative control: independent draws, conditioned on being distinct.
  assert chi_square(*control) > 2 * limit


def by_size(counts, probs, least):
  """Merges cells below `least`, so that the chi-square approximation holds."""
  large = probs >= least
  together = [np.append(part[large], part[~large].sum()) for part in (counts, probs)]
  return together if not large.all() else (counts, probs)


def test_new_and_replayed_rows_use_independent_noise():
  buffer, config = filled_with(6, 6), replay.BufferConfig(6, None)
  sampled = [
    np.asarray(sample(buffer, jax.random.key(seed), 3, 3, config, 0).source[:, 0])
    for seed in range(20)
  ]
  # Both parts are the same by chance in 1 of 120 samples.
  assert sum((rows[:3] == rows[3:]).all() for rows in sampled) <= 4


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  size=st.integers(0, 40),
  half_life=st.sampled_from([None, 0.02, 0.5, 3.0, 200.0, 1e7]),
  seed=st.integers(0, 2**31),
)
def test_drawn_ages_are_distinct_for_any_size_and_half_life(size, half_life, seed):
  fading = 0.0 if half_life is None else -np.log(2.0) / half_life
  ages = np.asarray(draw_ages(jax.random.key(seed), jnp.int32(size), 40, fading, 16))
  present = ages[ages < size]
  assert len(set(present)) == len(present) == min(size, 16)
  assert (ages >= 0).all()
  if half_life == 0.02 and size > 16:  # each age has 2**50 times the next one's weight
    assert set(ages) == set(range(16))


def test_new_rows_are_drawn_uniformly_for_any_half_life():
  buffer = filled_with(6, 9)
  config = replay.BufferConfig(6, 0.5)
  one = lambda key: replay.sample(buffer, key, 1, 0, config, 6).source[0, 0]
  values = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(4), 3000))
  counts = np.bincount(np.asarray(values), minlength=10)
  assert counts[:7].sum() == 0
  assert chi_square(counts[7:], np.full(3, 1 / 3)) < 23.1  # 2 degrees, p = 1e-5


def test_donated_append_writes_in_place():
  def temporaries(capacity, **jit):
    shapes = jax.eval_shape(functools.partial(empty, capacity))
    rows = jax.eval_shape(lambda: batch_of([1, 2]))
    compiled = jax.jit(replay.append, **jit).lower(shapes, rows).compile()
    memory = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + fresh

  small, large = (temporaries(n, donate_argnums=0) for n in (64, 65_536))
  assert large <= small + 1024
  # Negative control: without donation, the ring is copied.
  assert temporaries(65_536) > 100 * small


def test_record_bytes_per_token_equal_the_buffer_size():
  assert replay.record_bytes_per_token(64, 32_128) == 389
  assert replay.record_bytes_per_token(64, 100_000) > 389  # ids need four bytes
  buffer = replay.init(replay.BufferConfig(4), 2, 5, 64, 32_128)
  sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.data.records))
  assert sizes == 4 * 5 * replay.record_bytes_per_token(64, 32_128)


@pytest.mark.parametrize(
  ("call", "named"),
  [
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
def test_invalid_input_is_refused_by_name(call, named):
  with pytest.raises(ValueError, match=named):
    call()


def test_target_states_are_stored_bit_exactly():
  """The ring stores bfloat16 states as integers, which are faster to write."""
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
  sampled = replay.sample(ring, jax.random.key(0), 0, 3, config, 0)
  assert sampled.target_states.dtype == jnp.bfloat16
  order = np.argsort(np.asarray(sampled.target_states)[:, 0, 0].astype(np.float32))
  newest = np.asarray(target_states[2:]).astype(np.float32)
  expected = newest[np.argsort(newest[:, 0, 0])]
  np.testing.assert_array_equal(
    np.asarray(sampled.target_states, np.float32)[order], expected
  )


WORDS, STEPS, RANKS = 24, 5, 3  # vocabulary size, positions and recorded tokens


def recorded(rng, tokens):
  """Returns a buffer with records of ids from `tokens`, and ids, masses and mask."""
  logits = np.full((6, STEPS, WORDS), -np.inf)
  logits[..., tokens] = rng.normal(size=(6, STEPS, len(tokens)))
  records = rows_lib.records_of(logits, RANKS)
  mask = np.arange(STEPS) < rng.integers(1, STEPS + 1, 6)[:, None]
  batch = rows_lib.batch_of(records, np.ones((6, 4)), mask=mask)
  buffer = replay.init(replay.BufferConfig(capacity=8), 4, STEPS, RANKS, WORDS)
  ids, probs = np.asarray(records.ids), np.exp(records.log_probs)
  return replay.append(buffer, batch), ids, probs, mask


def counted(ids, probs, mask):
  """Returns the recorded mass of every token, summed over emitted positions."""
  mass = np.zeros(WORDS)
  for row, column in zip(*np.nonzero(mask), strict=True):
    for rank in range(RANKS):
      mass[ids[row, column, rank]] += probs[row, column, rank]
  return mass


@pytest.mark.parametrize(
  ("seed", "size", "tokens"),
  [
    *((seed, 6, np.arange(5, WORDS)) for seed in range(3)),
    (0, 8, np.array([20, 21, 22])),  # filled with the lowest ids
  ],
)
def test_shortlist_has_the_tokens_with_the_most_mass(seed, size, tokens):
  buffer, ids, probs, mask = recorded(np.random.default_rng(seed), tokens)
  mass = counted(ids, probs, mask)
  mass[base.EOS_ID] = np.inf
  expected = np.argsort(-mass, kind="stable")[:size]
  shortlist = np.asarray(replay.likeliest_tokens(buffer, WORDS, size))
  assert sorted(shortlist.tolist()) == sorted(expected.tolist())


def test_shortlist_has_every_end_of_sequence_token():
  buffer, *_ = recorded(np.random.default_rng(0), np.arange(5, WORDS))
  result = np.asarray(replay.likeliest_tokens(buffer, WORDS, 6, (0, 3)))
  assert {0, 3} <= set(result.tolist()) and base.EOS_ID not in result


def test_shortlist_without_emitted_positions_has_the_first_tokens():
  buffer, *_ = recorded(np.random.default_rng(1), np.arange(5, WORDS))
  blind = buffer.replace(
    data=buffer.data.replace(mask=jnp.zeros_like(buffer.data.mask))
  )
  assert replay.likeliest_tokens(blind, WORDS, 6).tolist() == [0, 1, 2, 3, 4, 5]
