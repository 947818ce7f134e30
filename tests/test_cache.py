"""Cache writes and row replacement against slow oracles."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from osd_jax import cache as cache_lib

HEADS, LENGTH, SIZE = 2, 9, 3
write = jax.jit(cache_lib.write)
insert_row = jax.jit(cache_lib.insert_row)


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
