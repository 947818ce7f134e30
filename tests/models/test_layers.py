"""Layers equal slow numpy implementations of the same formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import native
from osd_jax.models import layers, t5

F32 = jnp.dtype("float32")


def exact_bucket(relative, bidirectional, num_buckets, max_distance):
  """Computes T5's bucket in integer arithmetic, without logarithms or rounding.

  floor(log(d / e) / log(m / e) * r) >= k  <=>  d^r * e^k >= m^k * e^r
  """
  distance, offset = -relative, 0
  if bidirectional:
    num_buckets //= 2
    if relative > 0:
      distance, offset = relative, num_buckets
  distance = max(distance, 0)
  exact = num_buckets // 2
  if distance < exact:
    return offset + distance
  rest = num_buckets - exact
  steps = 0
  while (
    steps + 1 < rest
    and distance**rest * exact ** (steps + 1)
    >= max_distance ** (steps + 1) * exact**rest
  ):
    steps += 1
  return offset + exact + steps


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets,max_distance", [(32, 128), (8, 10), (16, 40)])
def test_relative_position_bucket_equals_exact_arithmetic(
  bidirectional, num_buckets, max_distance
):
  distances = np.arange(-300, 301)
  got = t5.relative_position_bucket(
    jnp.asarray(distances), bidirectional, num_buckets, max_distance
  )
  want = [
    exact_bucket(int(r), bidirectional, num_buckets, max_distance) for r in distances
  ]
  np.testing.assert_array_equal(got, want)
  assert set(want) >= set(range(num_buckets)) - {num_buckets // 2}


@pytest.mark.parametrize("columns", range(1, 10))
def test_served_matmul_equals_numpy(columns):
  rng = np.random.default_rng(columns)
  x = rng.normal(size=(columns, 12)).astype(np.float32)
  kernel = rng.normal(size=(12, 7)).astype(np.float32)
  got = layers.served_matmul(jnp.asarray(x), jnp.asarray(kernel.T))
  assert got.shape == (columns, 7)
  np.testing.assert_allclose(got, x @ kernel, atol=1e-5)
  np.testing.assert_allclose(got, layers.matmul(x, jnp.asarray(kernel)), atol=1e-5)


def test_norm_of_bfloat16_is_computed_in_float32():
  # 512 * 300^2 is 4.6e7, which a sum in bfloat16 would not reach.
  x = jnp.full((1, 512), 300.0, jnp.bfloat16)
  got = layers.RMSNorm(jnp.dtype("bfloat16")).apply(
    {"params": {"scale": jnp.ones(512)}}, x
  )
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got.astype(F32), np.ones((1, 512)))


@pytest.mark.parametrize("bias", [False, True])
def test_heads_projection_equals_projection_of_joined_heads(forms, bias):
  heads = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32)
  module = layers.HeadsProjection((12, 7), ("joined_kv", "embed"), F32, bias=bias)
  params = jax.jit(module.init)(jax.random.key(0), heads)
  found = module.apply(params, heads)
  joined = heads.transpose(0, 2, 1, 3).reshape(2, 5, 12)
  kernel = np.asarray(params["params"]["kernel"].unbox())
  np.testing.assert_allclose(found, joined @ kernel, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(module.apply(params, joined), found, rtol=1e-5, atol=1e-5)
  # Negative control: a reshape without the transpose mixes heads and positions.
  wrong = heads.reshape(2, 5, 12)
  assert not np.allclose(module.apply(params, wrong), found, atol=1e-2)


def as_on(platform):
  """Replaces `jax.lax.platform_dependent`, which a CPU lets take its default."""
  return lambda *args, default, **own: own.get(platform, default)(*args)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("queries", [1, 6])
def test_code_for_accelerators_multiplies_as_on_a_cpu(monkeypatch, platform, queries):
  """Products of `queries` columns, and logits of three times as many query heads."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
  x, kernel, query, keys = (
    draw(1, queries, 4),
    draw(4, 7),
    draw(2, 3, 3, queries, 4),
    draw(2, 3, 5, 4),
  )
  small = layers.quantized(kernel)
  monkeypatch.setattr(jax.lax, "platform_dependent", as_on(platform))
  with native.portable(is_split=False):
    products = [layers.matmul(x, kernel), layers.served_matmul(x, kernel.T)]
    rounded = layers.int8_matmul(x, small["kernel"], small["scale"])
    logits = layers.attention_logits(query, keys)
  for found in products:
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(kernel), rtol=1e-5)
  np.testing.assert_allclose(rounded, np.asarray(x) @ np.asarray(kernel), atol=0.1)
  expected = np.einsum("bhgnd,bhtd->bhgnt", query, keys)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("queries", [1, 6])
def test_no_attention_logit_is_rounded_to_bfloat16(monkeypatch, platform, queries):
  """Or a verification would differ from plain steps, where a few are sums."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  query, keys = 4 * draw(1, 2, 3, queries, 64), 4 * draw(1, 2, 5, 64)
  monkeypatch.setattr(jax.lax, "platform_dependent", as_on(platform))
  with native.portable(is_split=False):
    logits = layers.attention_logits(query, keys)
  exact = np.einsum("bhgnd,bhtd->bhgnt", *(np.asarray(x, float) for x in (query, keys)))
  np.testing.assert_allclose(logits, exact, rtol=1e-4, atol=1e-3)
  rounded = exact.astype(jnp.bfloat16).astype(float)
  assert np.abs(rounded - exact).max() > 0.1


def test_single_query_is_doubled_on_tpus(monkeypatch):
  """On TPUs one query is computed as two; results and several queries do not change."""
  rng, lengths = np.random.default_rng(0), []
  query, keys = rng.normal(size=(2, 3, 1, 4)), rng.normal(size=(2, 3, 5, 4))

  def attend(query, keys):
    lengths.append(query.shape[-2])
    return jnp.einsum("bhnd,bhtd,bhtd->bhnd", query, keys, keys)

  with native.portable(is_split=False):
    for platform in ("tpu", "cuda"):
      monkeypatch.setattr(jax.lax, "platform_dependent", as_on(platform))
      found = layers.never_alone(attend, jnp.asarray(query), jnp.asarray(keys))
      expected = np.einsum("bhnd,bhtd,bhtd->bhnd", query, keys, keys)
      np.testing.assert_allclose(found, expected, rtol=1e-5)
    layers.never_alone(attend, jnp.ones((2, 3, 6, 4)), jnp.asarray(keys))
  layers.never_alone(attend, jnp.asarray(query), jnp.asarray(keys))  # on a CPU
  # One query on TPU and CUDA, six queries, and one query with native code.
  assert lengths == [2, 1, 6, 1]
