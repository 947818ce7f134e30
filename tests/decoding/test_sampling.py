"""Processed distributions equal a slow oracle; draws depend on their key alone."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import native
from osd_jax.decoding import sampling

processed = jax.jit(sampling.processed_probs)
ROWS, POSITIONS, VOCAB = 3, 2, 8


def probs_of(logits, **settings):
  logits = jnp.asarray(logits, jnp.float32)
  return np.asarray(
    processed(logits, harness.settings_of(len(logits), max_length=1, **settings))
  )


@pytest.mark.parametrize("size", [100, 128, 32128])
def test_arg_max_is_the_first_of_tied_entries(forms, size):
  rng = np.random.default_rng(size)
  # Nine values, so most rows have ties for the largest.
  values = rng.integers(0, 9, (6, 3, size)).astype(np.float32)
  values[2, 0] = -np.inf
  values[2, 1, -1] = np.inf
  values[3, 0], values[3, 0, size // 2] = -1.0, -0.0
  got = jax.jit(sampling.arg_max)(values)
  np.testing.assert_array_equal(got, np.argmax(values, axis=-1))
  assert got.dtype == jnp.int32
  values[1] = np.nan
  assert np.all(np.asarray(sampling.arg_max(jnp.asarray(values))) < size)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_search_by_several_bits_filters_as_the_search_by_one(monkeypatch, platform):
  on = lambda *args, default, **own: own.get(platform, default)(*args)
  monkeypatch.setattr(jax.lax, "platform_dependent", on)
  logits = np.random.default_rng(1).normal(scale=3, size=(4, 2, 3000))
  logits = np.round(logits, 1)  # ties
  settings = {"top_k": [0, 1, 40, 40], "top_p": [0.7, 1.0, 1.0, 0.5]}
  one = probs_of(logits, temperature=1.0, **settings)
  with native.portable(is_split=False):
    np.testing.assert_allclose(probs_of(logits, temperature=1.0, **settings), one)
  assert len(set((one > 0).sum(axis=-1)[:, 0])) == 4  # each row has its own filter


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 2)])
@pytest.mark.parametrize("size", [8, 1000, 1536, 32128])
def test_broken_row_has_no_mass_and_does_not_affect_others(
  size, temperature, top_k, broken
):
  logits = np.random.default_rng(0).normal(size=(2, 3, size)).astype(np.float32)
  logits[0, 1, slice(None) if broken == -np.inf else size - 3] = broken
  got = probs_of(logits, temperature=temperature, top_k=top_k)
  assert not np.any(got[0, 1])
  np.testing.assert_allclose(np.delete(got.sum(-1).ravel(), 1), 1, rtol=1e-5)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  # Few distinct values, so most rows have ties.
  logits=st.lists(
    st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 1.0, 2.5]),
    min_size=ROWS * POSITIONS * VOCAB,
    max_size=ROWS * POSITIONS * VOCAB,
  ),
  temperature=st.lists(
    st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=ROWS, max_size=ROWS
  ),
  top_k=st.lists(st.integers(0, VOCAB + 2), min_size=ROWS, max_size=ROWS),
  # None of these is a sum of probabilities that could round either way.
  top_p=st.lists(
    st.sampled_from([0.0001, 0.3137, 0.7191, 0.9973, 1.0]), min_size=ROWS, max_size=ROWS
  ),
  min_p=st.lists(
    st.sampled_from([0.0, 0.0371, 0.4137, 1.0]), min_size=ROWS, max_size=ROWS
  ),
)
def test_processed_probs_equals_the_oracle(logits, temperature, top_k, top_p, min_p):
  logits = np.array(logits).reshape(ROWS, POSITIONS, VOCAB)
  settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
  found = probs_of(logits, temperature=temperature, **settings)
  for row in range(ROWS):
    for position in range(POSITIONS):
      expected = oracles.processed_probs(
        logits[row, position], temperature[row], top_k[row], top_p[row], min_p[row]
      )
      np.testing.assert_allclose(found[row, position], expected, atol=2e-6)
      assert ((found[row, position] > 0) == (expected > 0)).all()


def test_cut_off_treats_zero_and_minus_zero_as_a_tie():
  """At this temperature the second logit vanishes, so it ties with the largest."""
  logits = np.array([[[0.0, -1e-30, -1.0, -2.0]]])
  found = probs_of(logits, temperature=1e20, top_k=1)[0, 0]
  np.testing.assert_allclose(found, [0.5, 0.5, 0, 0])


def test_filters_equal_the_oracle_in_a_large_vocabulary():
  logits = np.random.default_rng(5).normal(0, 4, (4, 1, 32_128)).astype(np.float32)
  settings = [(50, 1.0), (0, 0.9), (200, 0.7), (1, 0.5)]
  top_k, top_p = zip(*settings, strict=True)
  found = probs_of(logits, temperature=0.8, top_k=top_k, top_p=top_p)
  for row, (k, p) in enumerate(settings):
    expected = oracles.processed_probs(logits[row, 0], 0.8, k, p)
    assert ((found[row, 0] > 0) == (expected > 0)).all() and (expected > 0).any()
    np.testing.assert_allclose(found[row, 0], expected, atol=1e-6)


def test_penalty_changes_the_tokens_before_each_position():
  """The text and the drafted tokens before a position; padding and others are kept."""
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 2, (4, 3, VOCAB)).astype(np.float32)
  logits[0, :, 2] = -np.inf
  text = np.array([[2, 5, -1], [-1, -1, -1], [7, 7, 0], [3, 1, 4]])
  drafted = np.array([[1, 6], [0, 0], [-1, 3], [2, 2]])
  penalty = np.array([1.3, 0.4, 5.0, 1.0], np.float32)
  settings = harness.settings_of(4, max_length=1, repetition_penalty=penalty)
  text, drafted = jnp.asarray(text, jnp.int32), jnp.asarray(drafted, jnp.int32)
  penalized = jax.jit(sampling.penalized)
  found = penalized(jnp.asarray(logits), settings, text, drafted)
  expected = logits.copy()
  for row in range(4):
    for position in range(3):
      seen = {*text[row].tolist(), *drafted[row, :position].tolist()} - {-1}
      for token in seen:
        value = logits[row, position, token]
        factor = penalty[row]
        expected[row, position, token] = value / factor if value > 0 else value * factor
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  np.testing.assert_array_equal(found[3], logits[3])
  # An extreme penalty keeps finite logits finite, and keeps broken rows broken.
  logits[1, 0, 0] = np.nan
  settings = settings.replace(repetition_penalty=jnp.full(4, 1e-3))
  found = np.asarray(penalized(jnp.asarray(1e37 * logits), settings, text, drafted))
  np.testing.assert_array_equal(np.isnan(found), np.isnan(logits))
  np.testing.assert_array_equal(np.isinf(found), np.isinf(logits))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1.2e-38])
def test_tiny_temperatures_give_one_hot_distributions(temperature):
  logits = np.random.default_rng(0).normal(0, 30, (2, 1, VOCAB))
  found = probs_of(logits, temperature=temperature)
  np.testing.assert_array_equal(found, np.eye(VOCAB)[logits.argmax(-1)])


@pytest.mark.parametrize("temperature", [1e-4, 1e-6])
def test_low_temperature_still_samples(temperature):
  """Only temperature 0 is greedy: both of two close tokens are drawn."""
  rows = 2000
  settings = harness.settings_of(rows, max_length=1, temperature=temperature)
  logits = jnp.tile(jnp.asarray([0.0, -temperature, -1.0]), (rows, 1))
  probs = np.asarray(processed(logits[:, None], settings))[0, 0]
  np.testing.assert_allclose(probs, [0.7311, 0.2689, 0], atol=1e-4)
  zeros = jnp.zeros((rows,), jnp.int32)
  nothing = jnp.zeros((rows, 0), jnp.int32)
  drawn = sampling.sample(logits, settings, zeros, sampling.Purpose.EMIT, nothing)
  # The second token has a probability of 1 / (1 + e).
  assert np.mean(drawn) == pytest.approx(0.2689, abs=0.05)


def test_row_does_not_depend_on_filters_of_batch_mates():
  """Bit for bit, in a vocabulary whose sums of probabilities round to 1 early."""
  logits = np.random.default_rng(1).normal(0, 6, (40, 1, 2000))
  alone = probs_of(logits, temperature=1.0)
  with_mates = probs_of(logits, temperature=1.0, top_k=np.arange(40) % 2)
  np.testing.assert_array_equal(alone[::2], with_mates[::2])
  assert (alone[1::2] != with_mates[1::2]).any()


def test_draws_depend_on_seed_position_and_purpose_alone():
  """Equal keys give equal draws in any row; changing any part of a key changes them."""
  rows = 400
  probs = jnp.full((rows, 50), 0.02)

  def draws(seed=7, position=3, purpose=sampling.Purpose.DRAFT, step=1):
    seeds = jnp.asarray(seed + np.arange(rows)[::step], jnp.uint32)
    return np.asarray(sampling.draw(probs, seeds, jnp.full((rows,), position), purpose))

  first = draws()
  np.testing.assert_array_equal(first, draws())
  np.testing.assert_array_equal(first, draws(step=-1)[::-1])
  others = [
    draws(seed=7 + rows),
    draws(position=4),
    draws(purpose=sampling.Purpose.ACCEPT),
    draws(purpose=sampling.Purpose.EMIT),
  ]
  for other in others:
    assert (first == other).mean() < 0.1  # 1 in 50 by chance


@pytest.mark.parametrize("purpose", [sampling.Purpose.EMIT, sampling.Purpose.DRAFT])
@pytest.mark.parametrize("size", [4, 128, 300])
def test_token_without_mass_is_never_drawn(size, purpose):
  rows = 2000
  probs = jnp.zeros((rows, size)).at[:, 1].set(1e-30)
  seeds, zeros = jnp.arange(rows, dtype=jnp.uint32), jnp.zeros((rows,), jnp.int32)
  assert (np.asarray(sampling.draw(probs, seeds, zeros, purpose)) == 1).all()
  nothing = sampling.draw(0 * probs, seeds, zeros, purpose)
  assert (np.asarray(nothing) < size).all(), "must be a valid token id"


# Bounds between entries, points between them, and the largest float32 below 1.
SHARES = np.append(np.arange(512) / 512, 1 - 2.0**-24).astype(np.float32)


@pytest.mark.parametrize("size", [1, 5, 128, 131, 1000])
def test_shares_select_entries_in_proportion_to_their_mass(size):
  """Evenly spaced shares select each entry in proportion to its mass."""
  masses = np.random.default_rng(size).integers(0, 3, size).astype(np.float32)
  masses[-1] += 1
  masses *= np.float32(0.1)
  rows = 4000
  share = (np.arange(rows, dtype=np.float32) + 0.5) / rows
  tiled = jnp.tile(jnp.asarray(masses), (rows, 1))
  found = np.asarray(jax.jit(sampling._at_share)(tiled, jnp.asarray(share)))
  counts = np.bincount(found, minlength=size)
  np.testing.assert_allclose(counts, rows * masses / masses.sum(), atol=1.01)
  assert (counts[masses == 0] == 0).all()


@pytest.mark.parametrize("size", [5, 300])
def test_every_share_selects_an_entry_with_mass(size):
  """Despite rounded sums, every share selects an entry, and one with mass."""
  random = np.random.default_rng(3)
  masses = random.exponential(size=(len(SHARES), size)).astype(np.float32)
  masses[random.random(masses.shape) < 0.5] = 0
  masses[:, 2] = np.maximum(masses[:, 2], 1e-20)
  found = np.asarray(sampling._at_share(jnp.asarray(masses), jnp.asarray(SHARES)))
  assert (masses[np.arange(len(SHARES)), found] > 0).all()
