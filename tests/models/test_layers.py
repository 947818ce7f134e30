"""Layers equal slow numpy implementations of the same formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import native
from osd_jax.models import layers, t5
from osd_jax.models.shapes import T5Config

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


def test_causal_buckets_are_zero_for_later_keys():
  future = jnp.arange(1, 200)
  both = t5.relative_position_bucket(future, True, 32, 128)
  causal = t5.relative_position_bucket(future, False, 32, 128)
  mirrored = t5.relative_position_bucket(-future, True, 32, 128)
  np.testing.assert_array_equal(both, mirrored + 16)
  np.testing.assert_array_equal(causal, np.zeros(199))


@pytest.mark.parametrize("columns", range(1, 10))
def test_served_matmul_equals_numpy(columns):
  rng = np.random.default_rng(columns)
  x = rng.normal(size=(columns, 12)).astype(np.float32)
  kernel = rng.normal(size=(12, 7)).astype(np.float32)
  got = layers.served_matmul(jnp.asarray(x), jnp.asarray(kernel.T))
  assert got.shape == (columns, 7)
  np.testing.assert_allclose(got, x @ kernel, atol=1e-5)
  np.testing.assert_allclose(got, layers.matmul(x, jnp.asarray(kernel)), atol=1e-5)


def test_served_matmul_keeps_leading_axes():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 2, 5)).astype(np.float32)
  kernel = rng.normal(size=(4, 5)).astype(np.float32)
  got = layers.served_matmul(jnp.asarray(x), jnp.asarray(kernel))
  np.testing.assert_allclose(got, np.einsum("bni,oi->bno", x, kernel), atol=1e-5)


def test_norm_divides_by_the_root_mean_square():
  x = np.random.default_rng(0).normal(3, 2, (4, 6)).astype(np.float32)
  scale = np.linspace(0.5, 2, 6).astype(np.float32)
  got = layers.RMSNorm(F32).apply({"params": {"scale": scale}}, x)
  want = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale[None]
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_norm_of_bfloat16_is_computed_in_float32():
  # 512 * 300^2 is 4.6e7, which a sum in bfloat16 would not reach.
  x = jnp.full((1, 512), 300.0, jnp.bfloat16)
  got = layers.RMSNorm(jnp.dtype("bfloat16")).apply(
    {"params": {"scale": jnp.ones(512)}}, x
  )
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got.astype(F32), np.ones((1, 512)))


def _softmax(x):
  weights = np.exp(x - x.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def test_attention_is_unscaled_and_ignores_masked_keys():
  rng = np.random.default_rng(1)
  width, heads, size, rows, new, keys = 6, 3, 2, 2, 2, 4
  kernels = {
    name: rng.normal(size=(width, heads * size)).astype(np.float32)
    for name in ("query", "key", "value")
  }
  kernels["out"] = rng.normal(size=(heads * size, width)).astype(np.float32)
  variables = {"params": {name: {"kernel": k} for name, k in kernels.items()}}
  x = rng.normal(size=(rows, new, width)).astype(np.float32)
  memory = rng.normal(size=(rows, keys, width)).astype(np.float32)
  mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
  position = rng.normal(size=(1, heads, new, keys)).astype(np.float32)
  bias = position + np.asarray(layers.mask_bias(jnp.asarray(mask)))[:, None, None]
  shape = T5Config(width=width, num_heads=heads, head_dim=size)
  attention = t5.Attention(shape)
  entries = attention.apply(variables, memory, method="keys_values")
  got = attention.apply(variables, x, *entries, bias)

  def split(y):
    return y.reshape(rows, -1, heads, size)

  query, key, value = (
    split(y @ kernels[name])
    for y, name in ((x, "query"), (memory, "key"), (memory, "value"))
  )
  want = np.zeros_like(x)
  for row in range(rows):
    kept = np.flatnonzero(mask[row])
    context = np.zeros((new, heads, size), np.float32)
    for head in range(heads):
      logits = query[row, :, head] @ key[row, kept, head].T
      weights = _softmax(logits + position[0, head][:, kept])
      context[:, head] = weights @ value[row, kept, head]
    want[row] = context.reshape(new, -1) @ kernels["out"]
  np.testing.assert_allclose(got, want, atol=1e-4)


def _gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activations", [("relu",), ("gelu", "linear")])
def test_mlp_equals_numpy(activations):
  rng = np.random.default_rng(2)
  inward = rng.normal(size=(len(activations), 5, 7)).astype(np.float32)
  wo = rng.normal(size=(7, 5)).astype(np.float32)
  x = rng.normal(size=(2, 3, 5)).astype(np.float32)
  if len(activations) == 1:
    params = {"wi": {"kernel": inward[0]}}
    hidden = np.maximum(x @ inward[0], 0)
  else:
    params = {f"wi_{i}": {"kernel": inward[i]} for i in range(2)}
    hidden = _gelu(x @ inward[0]) * (x @ inward[1])
  module = layers.Mlp(T5Config(width=5, mlp_dim=7, mlp_activations=activations))
  got = module.apply({"params": {**params, "wo": {"kernel": wo}}}, x)
  np.testing.assert_allclose(got, hidden @ wo, atol=1e-4)


def test_position_bias_uses_the_offset_of_each_row():
  config = T5Config(num_heads=2, relative_buckets=8, relative_max_distance=10)
  module = t5.RelativePositionBias(config, bidirectional=False)
  table = np.random.default_rng(3).normal(size=(2, 8)).astype(np.float32)
  query, key = np.array([[0, 1], [5, 6], [2, 3]]), np.arange(9)
  got = module.apply({"params": {"rel_embedding": table}}, query, key)
  assert got.shape == (3, 2, 2, 9)
  for row, positions in enumerate(query):
    for new, position in enumerate(positions):
      buckets = [exact_bucket(int(k - position), False, 8, 10) for k in key]
      np.testing.assert_array_equal(got[row, :, new], table[:, buckets])


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


def test_single_query_is_doubled_on_tpus(monkeypatch):
  """On TPUs one query is computed as two; results and several queries do not change."""
  rng, lengths = np.random.default_rng(0), []
  query, keys = rng.normal(size=(2, 3, 1, 4)), rng.normal(size=(2, 3, 5, 4))

  def attend(query, keys):
    lengths.append(query.shape[-2])
    return jnp.einsum("bhnd,bhtd,bhtd->bhnd", query, keys, keys)

  def as_on(platform):
    return lambda *args, default, **own: own.get(platform, default)(*args)

  with native.portable():
    for platform in ("tpu", "cuda"):
      monkeypatch.setattr(jax.lax, "platform_dependent", as_on(platform))
      found = layers.never_alone(attend, jnp.asarray(query), jnp.asarray(keys))
      expected = np.einsum("bhnd,bhtd,bhtd->bhnd", query, keys, keys)
      np.testing.assert_allclose(found, expected, rtol=1e-5)
    layers.never_alone(attend, jnp.ones((2, 3, 6, 4)), jnp.asarray(keys))
  layers.never_alone(attend, jnp.asarray(query), jnp.asarray(keys))  # on a CPU
  # One query on TPU and CUDA, six queries, and one query with native code.
  assert lengths == [2, 1, 6, 1]
