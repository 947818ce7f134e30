"""Layers of the models with t5x's parameter names and logical axes.

Parameters are t5x's: kernels `[in, out]`. The served copy (`base.Model.prepare`)
holds kernels in another `Layout`, which the modules are told.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import native

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "relu": jax.nn.relu,
  "gelu": functools.partial(jax.nn.gelu, approximate=True),
  "silu": jax.nn.silu,
  "linear": lambda x: x,
}

_MASKED = -1e9  # added to attention logits that must get no weight


class Layout(enum.Enum):
  """How kernels are stored; see `matmul`, `served_matmul` and `int8_matmul`."""

  TRAINED = "[in, out]"
  SERVED = "[out, in]"
  INT8 = "[out, in] of int8, and a float32 scale for each output"


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x times a kernel `[in, out]`: the layout of training.

  Float32 operands are multiplied in full float32 on every backend; GPUs and
  TPUs would otherwise silently use fewer bits.
  """
  return jnp.matmul(x, kernel, precision=precision_of(x.dtype))


def served_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x times a kernel `[out, in]`: the layout of decoding.

  A step multiplies few columns (B * n) by large kernels: on a CPU with `native`
  products, which read a kernel once but have no gradient.

  Args:
    x: [..., in].
    kernel: [out, in].

  Returns:
    [..., out]
  """
  columns = x.reshape(-1, x.shape[-1])
  if native.covers(columns, kernel):
    return native.product(columns, kernel).reshape(*x.shape[:-1], kernel.shape[0])
  return kernel_first_matmul(x, kernel)


def kernel_first_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """`served_matmul` in XLA alone.

  XLA CPU comes nearest to the memory bound if the kernel is the left operand and the
  columns come in fours; the barrier keeps it from folding the transpose back into the
  product. Elsewhere it is left to choose.
  """
  if not native.forms():
    contracted = ((x.ndim - 1,), (1,)), ((), ())
    return jax.lax.dot_general(x, kernel, contracted, precision=precision_of(x.dtype))
  columns = x.reshape(-1, x.shape[-1])
  count = columns.shape[0]
  if count > 1:
    columns = jnp.pad(columns, ((0, -count % 4), (0, 0)))
  product = jax.lax.dot_general(
    kernel, columns, (((1,), (1,)), ((), ())), precision=precision_of(x.dtype)
  )
  product = jax.lax.optimization_barrier(product).T[:count]
  return product.reshape(*x.shape[:-1], kernel.shape[0])


def int8_matmul(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
  """x times a quantised kernel: a fraction of a float32 product's time on a CPU.

  x is quantised too, with one scale a column, so that the product is one of integers,
  a `native` one where it can be; XLA CPU likes the columns on the left. Good enough to
  draft with; never for the target, whose tokens it would change.

  Args:
    x: [..., in].
    kernel: [out, in] int8.
    scale: [out] float32.

  Returns:
    [..., out] float32
  """
  columns = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  if native.covers(columns, kernel):
    product = native.int8_product(columns, kernel, scale)
    return product.reshape(*x.shape[:-1], kernel.shape[0])
  count = columns.shape[0]
  if native.forms():  # a single one is not vectorised
    columns = jnp.pad(columns, ((0, count % 2), (0, 0)))
  step = jnp.max(jnp.abs(columns), axis=-1, keepdims=True) / 127
  step = jnp.where(step == 0, 1.0, step)
  product = jax.lax.dot_general(
    jnp.round(columns / step).astype(jnp.int8),
    kernel,
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.int32,
  )
  product = (product * step * scale[None])[:count]
  return product.reshape(*x.shape[:-1], kernel.shape[0])


@jax.jit
def transposed(kernel: jax.Array) -> dict[str, jax.Array]:
  """The parameters of a `Layout.SERVED` projection from a kernel [in, out]."""
  return {"kernel": kernel.T}


@jax.jit
def quantized(kernel: jax.Array) -> dict[str, jax.Array]:
  """The parameters of a `Layout.INT8` projection from a kernel [in, out]."""
  scale = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=0) / 127
  scale = jnp.where(scale == 0, 1.0, scale)
  rounded = jnp.round(kernel / scale[None]).astype(jnp.int8)
  return {"kernel": rounded.T, "scale": scale}


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
  """float32 for bfloat16; float64 stays what it is."""
  return jnp.promote_types(dtype, jnp.float32)


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision:
  """How many bits products of a type keep; see `matmul`."""
  if dtype == jnp.float32:
    return jax.lax.Precision.HIGHEST
  return jax.lax.Precision.DEFAULT


class Projection(nn.Module):
  """A linear map.

  Attributes:
    shape: (in, out).
    axes: logical names of both axes.
    dtype: compute type.
    layout: how the kernel is stored.
    init_scale: standard deviation of the initial kernel times sqrt(in).
    bias: adds one to every output.
  """

  shape: tuple[int, int]
  axes: tuple[str, str]
  dtype: jnp.dtype
  layout: Layout = Layout.TRAINED
  init_scale: float = 1.0
  bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, outputs: jax.Array | None = None) -> jax.Array:
    """Maps x [..., in] to [..., out], or to some of the outputs of a trained kernel."""
    product = self._product(x, outputs)
    if not self.bias:
      return product
    init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:])
    bias = self.param("bias", init, self.shape[1:])
    return product + jnp.broadcast_to(bias.astype(self.dtype), product.shape)

  def _product(self, x: jax.Array, outputs: jax.Array | None) -> jax.Array:
    kernel = self._kernel()
    if self.layout is Layout.INT8:
      scale = self.param("scale", nn.initializers.ones, self.shape[1:])
      return int8_matmul(x, kernel, scale).astype(self.dtype)
    if outputs is not None:
      kernel = kernel[:, outputs]
    product = matmul if self.layout is Layout.TRAINED else served_matmul
    return product(x.astype(self.dtype), kernel.astype(self.dtype))

  def _kernel(self) -> jax.Array:
    shape, axes = self.shape, self.axes
    if self.layout is not Layout.TRAINED:
      shape, axes = shape[::-1], axes[::-1]
    init = nn.initializers.normal(self.init_scale / np.sqrt(self.shape[0]))
    return jnp.asarray(
      self.param("kernel", nn.with_logical_partitioning(init, axes), shape)
    )


class HeadsProjection(Projection):
  """A linear map of what heads have gathered, whose inputs are theirs side by side.

  Of [B, H, n, D] it sums over heads and their components where they are: to bring those
  of a position together first is two copies a layer of a TPU's step.
  """

  def _product(self, x: jax.Array, outputs: jax.Array | None) -> jax.Array:
    """Maps x, [B, H, n, D] to [B, n, out]; or what stands side by side already."""
    if x.ndim == 3:
      return super()._product(x, outputs)
    rows, heads, count, size = x.shape
    if native.forms() or self.layout is not Layout.TRAINED:
      joined = jnp.transpose(x, (0, 2, 1, 3)).reshape(rows, count, heads * size)
      return super()._product(joined, outputs)
    kernel = self._kernel() if outputs is None else self._kernel()[:, outputs]
    kernel = kernel.astype(self.dtype).reshape(heads, size, -1)
    precision = precision_of(self.dtype)
    return jnp.einsum(
      "bhnd,hde->bne", x.astype(self.dtype), kernel, precision=precision
    )


def normalized(x: jax.Array) -> jax.Array:
  """x [..., E] over its root mean square; computed in float32 at least."""
  wide = x.astype(at_least_float32(x.dtype))
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)


class RMSNorm(nn.Module):
  """A norm without mean and bias; computed in float32 at least.

  Attributes:
    dtype: type of the result.
    epsilon: added to the mean square; T5's by custom.
    axis: logical name of what is normalised.
  """

  dtype: jnp.dtype
  epsilon: float = 1e-6
  axis: str = "embed"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
    scale = self.param("scale", init, (x.shape[-1],))
    x = x.astype(at_least_float32(x.dtype))
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    normed = (x * jax.lax.rsqrt(mean_square + self.epsilon)).astype(self.dtype)
    return normed * jnp.broadcast_to(scale.astype(self.dtype), x.shape)


class Attention(nn.Module):
  """Multi-head attention without scaling of the logits (T5 folds it into init).

  Attributes:
    width: E.
    num_heads: H.
    head_dim: D.
    dtype: compute type.
    layout: of the kernels of query and output.
    memory_layout: of the kernels of keys and values.
    memory_width: width of what keys and values are made of; 0: E.
  """

  width: int
  num_heads: int
  head_dim: int
  dtype: jnp.dtype
  layout: Layout = Layout.TRAINED
  memory_layout: Layout = Layout.TRAINED
  memory_width: int = 0

  def setup(self):
    joined = self.num_heads * self.head_dim

    def inward(width, layout, init_scale=1.0):
      axes = ("embed", "joined_kv")
      return Projection((width, joined), axes, self.dtype, layout, init_scale)

    memory_width = self.memory_width or self.width
    self.query = inward(self.width, self.layout, self.head_dim**-0.5)
    self.key = inward(memory_width, self.memory_layout)
    self.value = inward(memory_width, self.memory_layout)
    self.out = HeadsProjection(
      (joined, self.width), ("joined_kv", "embed"), self.dtype, self.layout
    )

  def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, H, n, D] of x [B, n, memory width]."""
    return self._split(self.key(x)), self._split(self.value(x))

  def __call__(
    self, x: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array
  ) -> jax.Array:
    """Attends from x to keys and values.

    Args:
      x: [B, n, E].
      keys: [B, H, T, D].
      values: [B, H, T, D].
      bias: [B or 1, H or 1, n or 1, T] float32; position bias plus mask.

    Returns:
      [B, n, E]
    """
    query = self.query(x)
    if self.layout is not Layout.TRAINED and native.attends(query, keys):
      return self.out(native.attention(query, keys, values, bias))
    return self.out(never_alone(_attended, self._split(query), keys, values, bias))

  def _split(self, x: jax.Array) -> jax.Array:
    rows, count, _ = x.shape
    heads = x.reshape(rows, count, self.num_heads, self.head_dim)
    return jnp.transpose(heads, (0, 2, 1, 3))


def _attended(query, keys, values, bias):
  precision = precision_of(query.dtype)
  logits = jnp.einsum("bhnd,bhtd->bhnt", query, keys, precision=precision)
  logits = logits.astype(at_least_float32(logits.dtype)) + bias
  weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
  return jnp.einsum("bhnt,bhtd->bhnd", weights, values, precision=precision)


def never_alone(
  attend: Callable[..., jax.Array], query: jax.Array, *memory: Any
) -> jax.Array:
  """What `attend` gives; a TPU is asked for a single query as if there were two.

  The product of one query and a row's keys becomes sums on a TPU's vector unit, which
  its compiler holds for four times as long as a product of two.

  Args:
    attend: (query, *memory) -> [..., n, D]; a query at a time.
    query: [..., n, D].
    memory: pytrees that it attends to.
  """
  if native.forms() or query.shape[-2] > 1:
    return attend(query, *memory)

  def of_two(query, *memory):
    twice = jnp.concatenate([query, query], axis=-2)
    return attend(jax.lax.optimization_barrier(twice), *memory)[..., :1, :]

  return jax.lax.platform_dependent(query, *memory, tpu=of_two, default=attend)


class Mlp(nn.Module):
  """Feed-forward block: `wi` -> activation -> `wo`, gated if two activations.

  Attributes:
    width: E.
    hidden: inner width.
    activations: ("relu",) for T5 1.0, ("gelu", "linear") for T5 1.1 and Flan, ("silu",
      "linear") for Llama.
    dtype: compute type.
    layout: of the kernels.
  """

  width: int
  hidden: int
  activations: Sequence[str]
  dtype: jnp.dtype
  layout: Layout = Layout.TRAINED

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    gated = len(self.activations) > 1
    branches = []
    for index, activation in enumerate(self.activations):
      name = f"wi_{index}" if gated else "wi"
      inward = Projection(
        (self.width, self.hidden),
        ("embed", "mlp"),
        self.dtype,
        self.layout,
        name=name,
      )
      branches.append(ACTIVATIONS[activation](inward(x)))
    hidden = functools.reduce(jnp.multiply, branches)
    return Projection(
      (self.hidden, self.width), ("mlp", "embed"), self.dtype, self.layout, name="wo"
    )(hidden)


def mask_bias(mask: jax.Array) -> jax.Array:
  """Additive float32 bias: 0 where `mask` allows, very negative elsewhere."""
  return jnp.where(mask, 0.0, _MASKED).astype(jnp.float32)
