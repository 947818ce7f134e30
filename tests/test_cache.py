"""Cache writes, rewinds and row replacement against slow oracles."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import cache as cache_lib
from osd_jax import testing

HEADS, LENGTH, SIZE = 2, 9, 3
write = jax.jit(cache_lib.write)
insert_row = jax.jit(cache_lib.insert_row)

# Rounds of writes and rewinds; BLOCK is K + 1.
ROWS, LIMIT, BLOCK = 3, 10, 4
EXAMPLES = hypothesis.settings(
  max_examples=40, deadline=None, derandomize=True, database=None
)
# The number of entries that each row keeps of the block it writes, round by round.
KEPT = st.lists(
  st.lists(st.integers(0, BLOCK), min_size=ROWS, max_size=ROWS),
  min_size=1,
  max_size=8,
)


@hypothesis.settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_write_equals_the_oracle(forms, data):
  rows, count = data.draw(st.sampled_from([(1, 1), (1, 4), (3, 1), (3, 4)]))
  offset = st.integers(0, LENGTH - count)
  length = np.array(data.draw(st.lists(offset, min_size=rows, max_size=rows)))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
  stored = rng.normal(size=(rows, HEADS, LENGTH, SIZE)).astype(np.float32)
  new = rng.normal(size=(rows, HEADS, count, SIZE)).astype(np.float32)
  found = write(stored, new, jnp.asarray(length, jnp.int32))
  np.testing.assert_array_equal(found, oracles.write(stored, new, length))


def test_write_keeps_the_dtype_of_the_cache(forms):
  stored = jnp.zeros((2, HEADS, LENGTH, SIZE), jnp.bfloat16)
  new = jnp.ones((2, HEADS, 1, SIZE), jnp.float32)
  assert cache_lib.write(stored, new, jnp.zeros(2, jnp.int32)).dtype == jnp.bfloat16


def test_written_nan_does_not_spread(forms):
  """Multiplying by a mask would spread it over the row, because 0 * nan is nan."""
  stored, new = np.ones((2, HEADS, LENGTH, SIZE)), np.full((2, HEADS, 2, SIZE), np.nan)
  found = write(jnp.asarray(stored), jnp.asarray(new), jnp.array([0, 5]))
  broken = np.isnan(found).all(axis=(1, 3))
  np.testing.assert_array_equal(np.flatnonzero(broken[0]), [0, 1])
  np.testing.assert_array_equal(np.flatnonzero(broken[1]), [5, 6])
  assert np.isnan(found).sum() == new.size


@pytest.mark.parametrize("form", [cache_lib._chosen, cache_lib._summed])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, bool])
def test_both_forms_of_select_write_at_the_start_of_each_row(form, dtype):
  """NaN does not spread, and a row whose start is past the end is not written."""
  rng = np.random.default_rng(0)
  stored = rng.integers(0, 2, (3, LENGTH, SIZE)).astype(dtype)
  new = rng.integers(0, 2, (3, 4, SIZE)).astype(dtype)
  if dtype == np.float32:
    new[0, 1, 2] = np.nan
  start = np.array([0, LENGTH - 4, LENGTH])
  found = form(jnp.asarray(stored), jnp.asarray(new), jnp.asarray(start), axis=1)
  expected = stored.copy()
  expected[0, :4], expected[1, LENGTH - 4 :] = new[0], new[1]
  assert found.dtype == dtype
  np.testing.assert_array_equal(found, expected)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(slot=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_insert_row_replaces_only_that_row(slot, seed):
  rng = np.random.default_rng(seed)

  def tree(rows):
    return {
      "keys": (rng.normal(size=(rows, 2, 3)).astype(np.float32),),
      "tokens": rng.integers(0, 9, (rows, 4)).astype(np.int32),
      "mask": rng.random((rows, 5)) < 0.5,
      "length": rng.integers(0, 9, rows).astype(np.int32),
      "nothing": None,
    }

  batch, row = tree(4), tree(1)
  found = insert_row(batch, row, jnp.asarray([slot]))

  def check(found, many, one):
    expected = np.array(many)
    expected[slot] = one[0]
    assert found.dtype == many.dtype
    np.testing.assert_array_equal(found, expected)

  jax.tree.map(check, found, batch, row)


@pytest.fixture(scope="module")
def models():
  """Both kinds of model: (model, served, source, mask, tolerance)."""
  table = jnp.asarray(testing.random_table(8, 0))
  target = harness.TARGET
  return {
    "tabular": (testing.tabular_model(8), table, *harness.no_sources(3), 0.0),
    "t5": (
      target,
      target.prepare(harness.lively_params(target)),
      *testing.random_sources(3, 6, 64, 0),
      1e-4,
    ),
  }


@pytest.mark.parametrize("name", ["tabular", "t5"])
def test_setting_the_length_rewinds_each_row(models, name):
  """Rows are rewound by different amounts; rejected entries have no effect."""
  model, served, source, mask, tolerance = models[name]
  decode = jax.jit(model.decode)
  rng = np.random.default_rng(1)
  first, rejected, second = (
    rng.integers(2, 8, (3, 3)).astype(np.int32) for _ in range(3)
  )
  empty = harness.prefill(model, served, source, mask, 12)
  _, cache = decode(served, first, empty)
  _, ahead = decode(served, rejected, cache)
  assert (np.asarray(ahead.length) == 6).all()
  kept = np.array([3, 4, 5])  # row r keeps r of the rejected tokens
  found, _ = decode(served, second, ahead.replace(length=jnp.asarray(kept, jnp.int32)))
  for row in range(3):
    fed = np.concatenate([first[row], rejected[row, :row], second[row]])
    fed = np.pad(fed, (0, 9 - len(fed)))
    expected, _ = decode(served, np.tile(fed, (3, 1)), empty)
    np.testing.assert_allclose(
      found[row], expected[row, kept[row] : kept[row] + 3], atol=tolerance
    )
  not_rewound, _ = decode(served, second, ahead)
  assert not np.allclose(not_rewound[0], found[0], atol=1e-2)


def block_of(number):
  """Returns [B, H, n, D] values that are unique over rounds, rows, heads, positions."""
  shape = (ROWS, HEADS, BLOCK, SIZE)
  return (1 + number * np.prod(shape) + np.arange(np.prod(shape))).reshape(shape)


def play(rounds, length, keep=lambda kept: kept):
  """Writes and rewinds; returns (cache, lengths, lists of the expected entries).

  A finished row (length LIMIT) keeps writing, as rows do while others continue.
  """
  stored = jnp.zeros((ROWS, HEADS, length, SIZE), jnp.float32)
  lengths = np.zeros(ROWS, np.int32)
  entries = [[] for _ in range(ROWS)]
  for number, kept in enumerate(rounds):
    block = block_of(number)
    stored = write(stored, jnp.asarray(block, jnp.float32), jnp.asarray(lengths))
    for row in range(ROWS):
      count = min(kept[row], LIMIT - int(lengths[row]))
      entries[row] += [block[row, :, place] for place in range(count)]
      lengths[row] += keep(count)
  return np.asarray(stored), lengths, entries


def agrees(stored, lengths, entries):
  return all(
    len(entries[row]) == lengths[row]
    and all(
      np.array_equal(stored[row, :, place], entry)
      for place, entry in enumerate(entries[row])
    )
    for row in range(ROWS)
  )


@EXAMPLES
@hypothesis.given(rounds=KEPT)
def test_entries_below_the_length_are_the_kept_ones(rounds):
  assert agrees(*play(rounds, LIMIT + BLOCK))


@pytest.mark.parametrize(
  ("length", "keep"),
  [
    (LIMIT, lambda kept: kept),  # no room past the limit: writes are clamped
    (LIMIT + BLOCK, lambda kept: max(kept - 1, 0)),  # the length is one too small
  ],
)
def test_short_cache_or_wrong_length_loses_entries(length, keep):
  """Negative controls."""
  hypothesis.find(
    KEPT,
    lambda rounds: not agrees(*play(rounds, length, keep)),
    settings=hypothesis.settings(EXAMPLES, max_examples=300),
  )
