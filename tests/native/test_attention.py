"""C++ attention equals numpy and XLA, and does not depend on the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from osd_jax import base, native
from osd_jax.models import families, shapes, t5

MASKED = -1e9
# B, H, n, T, D. The odd sizes are no multiples of the vector length.
SHAPES = [(1, 12, 4, 132, 64), (2, 3, 1, 7, 16), (3, 2, 8, 40, 5), (4, 8, 5, 300, 80)]


def arguments(shape, seed=0):
  """Draws a query [B, n, H D], keys and values [B, H, T, D]."""
  rows, heads, queries, positions, size = shape
  rng = np.random.default_rng((seed, *shape))
  draw = lambda *extents: rng.normal(size=extents).astype(np.float32)
  memory = (rows, heads, positions, size)
  return draw(rows, queries, heads * size), draw(*memory), draw(*memory)


def bias_of(shape, axes, reach, seed=0):
  """Draws a bias over `axes`, masked from `reach` on and at every fifth position."""
  rows, heads, queries, positions, _ = shape
  extents = [n if axis in axes else 1 for axis, n in zip("BHn", shape[:3])]
  rng = np.random.default_rng((seed, *shape))
  bias = rng.normal(size=(*extents, positions)).astype(np.float32)
  bias[..., reach:] += np.float32(MASKED)
  bias[..., 1:reach:5] += np.float32(MASKED)
  return bias


def exact(query, keys, values, bias):
  """Computes attention in float64."""
  rows, queries, _ = query.shape
  _, heads, _, size = keys.shape
  split = query.reshape(rows, queries, heads, size).astype(np.float64)
  scores = np.einsum("bnhd,bhtd->bhnt", split, keys.astype(np.float64)) + bias
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  context = np.einsum("bhnt,bhtd->bnhd", weights, values.astype(np.float64))
  return context.reshape(rows, queries, -1)


@pytest.mark.parametrize("axes", ["", "B", "H", "BHn", "Hn"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_numpy(library, shape, axes):
  given = arguments(shape)
  for reach in (1, shape[3] // 2 + 1, shape[3]):
    bias = bias_of(shape, axes, reach)
    got = np.asarray(library.attention(*given, bias))
    np.testing.assert_allclose(got, exact(*given, bias), atol=1e-5)


def test_extreme_scores_are_exact(library):
  """With scores from -300 to 300, exp underflows for all but a few positions."""
  query, keys, values = arguments((1, 1, 2, 50, 16))
  bias = np.linspace(-300, 300, 50, dtype=np.float32)[None, None, None]
  got = library.attention(query, keys, values, bias)
  np.testing.assert_allclose(got, exact(query, keys, values, bias), atol=1e-5)


def test_query_that_may_attend_to_nothing_gets_zeros(library):
  shape = (2, 2, 3, 20, 8)
  query, keys, values = arguments(shape)
  bias = bias_of(shape, "Bn", 20)
  bias[0, :, 1] = bias[1] = MASKED
  want = exact(query, keys, values, bias)
  want[0, 1] = want[1] = 0
  got = library.attention(query, keys, values, bias)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_nan_propagates_only_from_unmasked_positions(library):
  shape = (2, 1, 2, 20, 8)
  query, keys, values = arguments(shape)
  bias = bias_of(shape, "B", 12)
  keys[0, 0, 15] = values[0, 0, 16] = np.nan
  keys[:, 0, 5] = values[:, 0, 6] = np.nan  # between others
  bias[..., 5:7] = -1e9
  finite = np.asarray(library.attention(query, keys, values, bias))
  assert np.all(np.isfinite(finite))
  query[1, 0, 3] = np.nan
  got = np.asarray(library.attention(query, keys, values, bias))
  assert np.all(np.isnan(got[1, 0]))
  np.testing.assert_array_equal(got[0], finite[0])
  np.testing.assert_array_equal(got[1, 1], finite[1, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_query_do_not_depend_on_other_queries(library, shape):
  """The result is the same alone, in a batch, and with a longer, masked cache."""
  query, keys, values = arguments(shape)
  bias = bias_of(shape, "BHn", shape[3] - 2)
  together = np.asarray(library.attention(query, keys, values, bias))
  for row in range(shape[0]):
    for n in range(shape[2]):
      at, one = slice(row, row + 1), slice(n, n + 1)
      longer = [(0, 0)] * 2 + [(0, 37), (0, 0)]
      alone = library.attention(
        query[at, one],
        np.pad(keys[at], longer, constant_values=3.0),
        np.pad(values[at], longer, constant_values=3.0),
        np.pad(bias[at, :, one], [(0, 0)] * 3 + [(0, 37)], constant_values=MASKED),
      )
      np.testing.assert_array_equal(alone[0, 0], together[row, n])


def test_bits_depend_on_the_order_of_positions():
  """Negative control: the test above would detect another order of summation."""
  query, keys, values = arguments(SHAPES[0])
  bias = bias_of(SHAPES[0], "BHn", 132)
  got = native.attention(query, keys, values, bias)
  reversed_got = native.attention(
    query, keys[:, :, ::-1], values[:, :, ::-1], bias[..., ::-1]
  )
  assert np.any(np.asarray(got) != np.asarray(reversed_got))
  np.testing.assert_allclose(got, reversed_got, atol=1e-5)


def lowered(layout, queries, dtype="float32"):
  config = shapes.T5Config(width=8, num_heads=2, head_dim=4, dtype=dtype)
  attention = t5.Attention(config, layout)
  x = jnp.zeros((1, queries, 8), dtype)
  memory = jnp.zeros((1, 2, 6, 4), dtype)
  given = (x, memory, memory, jnp.zeros((1, 1, 1, 6)))
  params = jax.eval_shape(attention.init, jax.random.key(0), *given)
  return jax.jit(attention.apply).lower(params, *given).as_text()


def test_native_attention_is_used_only_for_few_float32_queries():
  served, trained = base.Layout.SERVED, base.Layout.TRAINED
  assert "osd_jax_attention" in lowered(served, 1)
  assert "osd_jax_attention" in lowered(served, native.MOST_QUERIES)
  assert "osd_jax_attention" not in lowered(served, native.MOST_QUERIES + 1)
  assert "osd_jax_attention" not in lowered(trained, 1)
  assert "osd_jax_attention" not in lowered(served, 1, "bfloat16")
  for parts in ((), ("attention",)):
    with native.off(*parts):
      assert "osd_jax_attention" not in lowered(served, 1)
  with native.off("products"):
    text = lowered(served, 1)
    assert "osd_jax_attention" in text and "osd_jax_product" not in text


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_only_attention_with_caps_is_computed_by_xla(cap):
  model = families.build(dataclasses.replace(tiny.GEMMA, attention_cap=cap))
  served = model.prepare(tiny.random_params(model, 1))
  source = np.array([[5, 6, 7, 8]])
  cache = model.prefill(served, source, source > 0, 8)
  text = jax.jit(model.decode).lower(served, source[:, :1], cache).as_text()
  assert ("osd_jax_attention" in text) == (not cap)
  assert "osd_jax_product" in text
