"""Layers shared by all models, with t5x's parameter names and logical axes.

Trained kernels are `[in, out]`, as in t5x. The served copy of a model
(`base.Model.prepare`) may store them in another `Layout`.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, native

# Activation functions by the name in a configuration.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "relu": jax.nn.relu,
  "gelu": functools.partial(jax.nn.gelu, approximate=True),
  "silu": jax.nn.silu,
  "linear": lambda x: x,
}

_WIDENED = 2**24  # largest number of weights that are widened at once
_TPU_COLUMNS = 8  # rows of a register of the vector unit
_TILE = 64  # XLA sums the remaining outputs of a product in another order
_FEW_QUERIES = 8  # of a key; a GPU computes so few products as sums
BLOCK = 512  # more queries attend in blocks of this many
MASKED = -1e9  # added to masked attention logits; -inf would give NaN in empty rows


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Multiplies x by a kernel [in, out], the layout of training.

  A kernel that is stored in bfloat16 is widened to the type of x. Float32 operands are
  multiplied in full float32 on every backend. GPUs and TPUs use fewer bits by default.
  """
  kernel = _widened(kernel, x)
  multiply = functools.partial(jnp.matmul, precision=precision_of(x.dtype))
  return _never_one_column(multiply, x, kernel)


def _never_one_column(
  multiply: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, kernel: jax.Array
) -> jax.Array:
  """Calls `multiply(x, kernel)`, with `_TPU_COLUMNS` columns instead of one on TPUs.

  XLA would compute a single column on a TPU's vector unit. Its compiler estimates that
  at three to eight times the time of several columns on the matrix unit.
  """
  if native.forms() or x.size != x.shape[-1]:
    return multiply(x, kernel)

  def of_several(x, kernel):
    several = jnp.broadcast_to(x.reshape(1, -1), (_TPU_COLUMNS, x.shape[-1]))
    # Without the barrier XLA could see that all columns are equal.
    product = multiply(jax.lax.optimization_barrier(several), kernel)
    return product[:1].reshape(*x.shape[:-1], -1)

  return jax.lax.platform_dependent(x, kernel, tpu=of_several, default=multiply)


def _widened(kernel: jax.Array, x: jax.Array) -> jax.Array:
  if native.widens(kernel, x.dtype):
    return native.widened(kernel, x)
  return kernel.astype(x.dtype)


def rows_of(table: jax.Array, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rows [...] of a table [V, E], in `dtype`: [..., E]."""
  if native.widens(table, dtype):
    return native.gathered(table, rows)
  return table[rows].astype(dtype)


def served_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Multiplies x [..., in] by a kernel [out, in], the layout of decoding.

  A decoding step multiplies few columns (B * n) by large kernels, so reading the kernel
  limits its speed. On a CPU the `native` product reads it once, but has no gradient.
  Kernels in bfloat16 are widened to the type of x.
  """
  columns = x.reshape(-1, x.shape[-1])
  if native.covers(columns, kernel):
    return native.product(columns, kernel).reshape(*x.shape[:-1], kernel.shape[0])
  return kernel_first_matmul(x, kernel)


def kernel_first_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """`served_matmul` without the `native` product: differentiable, for any backend."""
  precision = precision_of(x.dtype)
  if not native.forms():
    multiply = functools.partial(jnp.einsum, "...i,oi->...o", precision=precision)
    return _never_one_column(multiply, x, kernel.astype(x.dtype))
  # XLA CPU comes closest to the memory bandwidth when the kernel is the left operand
  # and the number of columns is a multiple of four.
  columns = x.reshape(-1, x.shape[-1])
  count = columns.shape[0]
  if count > 1:
    columns = jnp.pad(columns, ((0, -count % 4), (0, 0)))

  def multiplied(part):
    contracted = ((1,), (1,)), ((), ())
    return jax.lax.dot_general(part, columns, contracted, precision=precision)

  if native.widens(kernel, x.dtype):
    # The head of a large vocabulary takes gigabytes in float32, so it is widened in
    # parts, each after the product of the part before.
    parts, size = [columns], max(_TILE, _WIDENED // kernel.shape[1] // _TILE * _TILE)
    for start in range(0, len(kernel), size):
      part = native.widened(kernel, parts[-1], start, start + size)
      parts.append(multiplied(part))
    product = jnp.concatenate(parts[1:])
  else:
    product = multiplied(kernel.astype(x.dtype))
  # Without the barrier XLA would fold this transpose back into the product.
  product = jax.lax.optimization_barrier(product).T[:count]
  return product.reshape(*x.shape[:-1], kernel.shape[0])


def int8_matmul(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
  """Multiplies x [..., in] by an int8 kernel [out, in] with scales [out]; float32.

  x is quantized too, with one scale per column, so that the product is one of integers.
  Used for drafts only: in a target it would change the emitted tokens.
  """
  columns = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  if native.covers(columns, kernel):
    product = native.int8_product(columns, kernel, scale)
    return product.reshape(*x.shape[:-1], kernel.shape[0])
  count = columns.shape[0]
  if native.forms():  # XLA CPU does not vectorise the product of a single column
    columns = jnp.pad(columns, ((0, count % 2), (0, 0)))
  # Symmetric quantization: the largest component of a column becomes 127.
  step = jnp.max(jnp.abs(columns), axis=-1, keepdims=True) / 127
  step = jnp.where(step == 0, 1.0, step)
  multiply = functools.partial(
    jax.lax.dot_general,
    dimension_numbers=(((1,), (1,)), ((), ())),
    preferred_element_type=jnp.int32,
  )
  rounded = jnp.round(columns / step).astype(jnp.int8)
  product = _never_one_column(multiply, rounded, kernel)
  product = (product * step * scale[None])[:count]
  return product.reshape(*x.shape[:-1], kernel.shape[0])


def stored(leaf: Any, dtype: jnp.dtype) -> jax.Array:
  """A parameter in the type of the computation, or in bfloat16 if it has that already.

  Every layer widens what it reads, which is exact. So the results are those of the
  widened parameters, for half of the memory and of its traffic.
  """
  return jnp.asarray(leaf, None if leaf.dtype == jnp.bfloat16 else dtype)


@jax.jit
def transposed(kernel: jax.Array) -> dict[str, jax.Array]:
  """Parameters of a `base.Layout.SERVED` projection, from a kernel [in, out]."""
  return {"kernel": kernel.T}


@jax.jit
def quantized(kernel: jax.Array) -> dict[str, jax.Array]:
  """Parameters of a `base.Layout.INT8` projection, from a kernel [in, out]."""
  scale = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=0) / 127
  scale = jnp.where(scale == 0, 1.0, scale)  # an output whose weights are all 0
  rounded = jnp.round(kernel / scale[None]).astype(jnp.int8)
  return {"kernel": rounded.T, "scale": scale}


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
  """Returns float32 for bfloat16 and float32, and float64 for float64."""
  return jnp.promote_types(dtype, jnp.float32)


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision:
  """The precision of products of a dtype; see `matmul`."""
  if dtype == jnp.float32:
    return jax.lax.Precision.HIGHEST
  return jax.lax.Precision.DEFAULT


class Projection(nn.Module):
  """A linear map."""

  shape: tuple[int, int]  # (in, out)
  axes: tuple[str, str]  # logical names of both axes
  dtype: jnp.dtype  # type of the product
  layout: base.Layout = base.Layout.TRAINED  # how the kernel is stored
  init_scale: float = 1.0  # standard deviation of the initial kernel, times sqrt(in)
  bias: bool = False  # whether to add a bias

  @nn.compact
  def __call__(self, x: jax.Array, outputs: jax.Array | None = None) -> jax.Array:
    """Maps x [..., in], of any floating-point type, to [..., out].

    If `outputs` [C] are given, only these are computed; not for `base.Layout.INT8`.
    """
    product = self._product(x, outputs)
    if not self.bias:
      return product
    init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:])
    bias = self.param("bias", init, self.shape[1:])
    return product + jnp.broadcast_to(bias.astype(self.dtype), product.shape)

  def _product(self, x: jax.Array, outputs: jax.Array | None) -> jax.Array:
    kernel = self._kernel()
    if self.layout is base.Layout.INT8:
      scale = self.param("scale", nn.initializers.ones, self.shape[1:])
      return int8_matmul(x, kernel, scale).astype(self.dtype)
    if outputs is not None:
      # Selecting columns before the product makes subsampled slices cheap.
      if self.layout is base.Layout.TRAINED:
        kernel = kernel[:, outputs]
      else:
        kernel = rows_of(kernel, outputs, self.dtype)
    product = matmul if self.layout is base.Layout.TRAINED else served_matmul
    return product(x.astype(self.dtype), kernel)

  def _kernel(self) -> jax.Array:
    shape, axes = self.shape, self.axes
    if self.layout is not base.Layout.TRAINED:
      # The logical axes turn with the kernel, so that a mesh splits the same axis.
      shape, axes = shape[::-1], axes[::-1]
    init = nn.initializers.normal(self.init_scale / np.sqrt(self.shape[0]))
    return jnp.asarray(
      self.param("kernel", nn.with_logical_partitioning(init, axes), shape)
    )


def output_head(
  config: Any, layout: base.Layout, covered: int = 0, name: str | None = None
) -> Projection:
  """The projection to the logits of all tokens, or of `covered` chosen ones."""
  shape, dtype = (config.width, covered or config.vocab_size), jnp.dtype(config.dtype)
  return Projection(shape, ("embed", "vocab"), dtype, layout, name=name)


class HeadsProjection(Projection):
  """The output projection of an attention, over heads and their components.

  Except on a CPU, kernels are contracted with [B, H, n, D] directly. Transposing to
  [B, n, H * D] first would cost two copies per layer and step on a TPU.
  """

  def _product(self, x: jax.Array, outputs: jax.Array | None) -> jax.Array:
    """Maps x [B, H, n, D], or [B, n, H * D], to [B, n, out]."""
    if x.ndim == 3:  # the native attention returns joined heads
      return super()._product(x, outputs)
    rows, heads, count, size = x.shape
    by_heads = base.Layout.TRAINED, base.Layout.PACKED
    # The heads of a single position are next to each other already.
    if native.forms() or self.layout not in by_heads or count == 1:
      joined = jnp.transpose(x, (0, 2, 1, 3)).reshape(rows, count, heads * size)
      return super()._product(joined, outputs)
    assert outputs is None  # these are chosen for the output head only
    kernel, axes = self._kernel().astype(self.dtype), "ehd"
    if self.layout is base.Layout.TRAINED:
      kernel, axes = kernel.reshape(heads, size, -1), "hde"
    else:
      kernel = kernel.reshape(-1, heads, size)
    precision = precision_of(self.dtype)
    return jnp.einsum(
      f"bhnd,{axes}->bne", x.astype(self.dtype), kernel, precision=precision
    )


def normalized(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
  """Divides x [..., E] by its root mean square; the result is float32 or wider."""
  # A sum of bfloat16 squares would lose most of its bits.
  x = x.astype(at_least_float32(x.dtype))
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + epsilon)


class RMSNorm(nn.Module):
  """RMS norm with a learned scale, computed in float32 or more."""

  dtype: jnp.dtype  # type of the result
  epsilon: float = 1e-6  # added to the mean square; the default is T5's
  axis: str = "embed"  # logical name of the normalized axis
  # The factor is 1 + scale, and is applied before rounding (Gemma).
  unit_offset: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, is_normalized: bool = False) -> jax.Array:
    """Normalizes and scales x [..., E], or only scales what `normalized` returned."""
    one = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
    init = nn.with_logical_partitioning(one, (self.axis,))
    scale = self.param("scale", init, (x.shape[-1],))
    normed = x if is_normalized else normalized(x, self.epsilon)
    if self.unit_offset:
      factor = jnp.broadcast_to(1 + scale.astype(normed.dtype), x.shape)
      return (normed * factor).astype(self.dtype)
    factor = jnp.broadcast_to(scale.astype(self.dtype), x.shape)
    return normed.astype(self.dtype) * factor


def never_alone(
  attend: Callable[..., jax.Array], query: jax.Array, *memory: Any
) -> jax.Array:
  """Calls `attend(query, *memory)`, doubling a single query on TPUs.

  On a TPU the product of one query with a row's keys becomes sums on the vector unit.
  The TPU compiler estimates them at four times the time of a product of two queries.

  `attend` maps queries [..., n, D] and pytrees to [..., n, D], one query at a time.
  """
  if native.forms() or query.shape[-2] > 1:
    return attend(query, *memory)

  def of_two(query, *memory):
    twice = jnp.concatenate([query, query], axis=-2)
    # Without the barrier XLA could see that both queries are equal and drop one.
    return attend(jax.lax.optimization_barrier(twice), *memory)[..., :1, :]

  return jax.lax.platform_dependent(query, *memory, tpu=of_two, default=attend)


def in_blocks(attend: Callable[..., jax.Array], *by_query: jax.Array) -> jax.Array:
  """Calls `attend(*by_query)`, block by block if there are more than `BLOCK` queries.

  The logits of all queries of a long prompt at once would take gigabytes.

  `attend` maps queries [..., n, D] and other arrays [..., n or 1, T] to [..., n, D].
  """
  query, count = by_query[0], by_query[0].shape[-2]
  if count <= BLOCK:
    return attend(*by_query)

  def one_more(context, start):
    block = [
      array
      if array.shape[-2] == 1
      else jax.lax.dynamic_slice_in_dim(array, start, BLOCK, axis=-2)
      for array in by_query
    ]
    new = attend(*block)
    return jax.lax.dynamic_update_slice_in_dim(context, new, start, axis=-2), None

  # The last block may begin within the one before, so that all have the same size.
  starts = jnp.minimum(jnp.arange(0, count, BLOCK), count - BLOCK)
  return jax.lax.scan(one_more, jnp.zeros_like(query), starts)[0]


def attention_logits(query: jax.Array, keys: jax.Array) -> jax.Array:
  """Products [B, KV heads, sharing, n, T] of queries and keys, in float32 or more.

  None is rounded to bfloat16: a plain step and a verification would differ by that.
  """
  wide = at_least_float32(query.dtype)
  multiply = functools.partial(
    jnp.einsum, precision=precision_of(query.dtype), preferred_element_type=wide
  )

  def product(query, keys):
    return multiply("bhgnd,bhtd->bhgnt", query, keys)

  def of_a_gpu(query, keys):
    # With the queries first, XLA transposes all keys in every step.
    if query.shape[2] * query.shape[3] <= _FEW_QUERIES:
      few = query[..., None, :].astype(wide) * keys[:, :, None, None].astype(wide)
      return jnp.sum(few, axis=-1)
    logits = multiply("bhtd,bhgnd->bhtgn", keys, query)
    logits = jnp.moveaxis(jax.lax.optimization_barrier(logits), 2, -1)
    return jax.lax.optimization_barrier(logits)

  if native.forms():
    return product(query, keys)
  return jax.lax.platform_dependent(query, keys, cuda=of_a_gpu, default=product)


class Mlp(nn.Module):
  """Feed-forward block: `wi`, activation, `wo`; gated if there are two activations."""

  config: Any  # T5Config or LlamaConfig
  layout: base.Layout = base.Layout.TRAINED

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    config = self.config

    def project(x, shape, axes, name):
      dtype = jnp.dtype(config.dtype)
      return Projection(shape, axes, dtype, self.layout, name=name)(x)

    shape, axes = (config.width, config.mlp_dim), ("embed", "mlp")
    count = len(config.mlp_activations)
    if count == 1 or self.layout is base.Layout.PACKED:
      joined = project(x, (config.width, count * config.mlp_dim), axes, "wi")
      branches = jnp.split(joined, count, axis=-1)
    else:
      branches = [project(x, shape, axes, f"wi_{index}") for index in range(count)]
    activated = [
      ACTIVATIONS[name](branch)
      for name, branch in zip(config.mlp_activations, branches)
    ]
    hidden = functools.reduce(jnp.multiply, activated)  # the second gates the first
    return project(hidden, shape[::-1], axes[::-1], "wo")


def soft_capped(logits: jax.Array, cap: float) -> jax.Array:
  """Bounds logits smoothly to -cap..cap; a cap of 0 changes nothing."""
  return cap * jnp.tanh(logits / cap) if cap else logits


def mask_bias(mask: jax.Array) -> jax.Array:
  """Float32 bias for attention logits: 0 where `mask`, very negative elsewhere."""
  return jnp.where(mask, 0.0, MASKED).astype(jnp.float32)


class Embedding(nn.Module):
  """Token embedding, and the output head of tied models."""

  config: Any  # T5Config or LlamaConfig

  def setup(self):
    config = self.config
    init = nn.with_logical_partitioning(
      nn.initializers.normal(config.embedding_std), ("vocab", "embed")
    )
    shape = (config.vocab_size, config.width)
    self.embedding = jnp.asarray(self.param("embedding", init, shape))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Embeds tokens [B, n] as [B, n, E]."""
    x = rows_of(self.embedding, tokens, jnp.dtype(self.config.dtype))
    # Gemma was trained with a scale that is rounded to the type of the embedding.
    return x if self.config.embedding_scale == 1 else x * self.config.embedding_scale

  def attend(self, x: jax.Array, product, tokens=None) -> jax.Array:
    """Logits [B, n, V] of x [B, n, E], or [B, n, C] if `tokens` [C] are given."""
    table = self.embedding
    return product(x, table if tokens is None else rows_of(table, tokens, x.dtype))


def inputs_of(target: jax.Array, start: jax.Array | int) -> jax.Array:
  """Decoder inputs for teacher forcing: the start token, then all targets but the last.

  Takes targets [B, T] and a start token for each row [B], or one for all.
  """
  first = jnp.broadcast_to(start, target.shape[:1])[:, None]
  return jnp.concatenate([first.astype(target.dtype), target[:, :-1]], axis=1)


def as_target_states(states: jax.Array) -> jax.Array:
  """Hidden states as attached drafts take them: [B, S, E] bfloat16.

  The barrier keeps XLA from fusing the rounding into the model, so that serving and
  training see the same bits.
  """
  return jax.lax.optimization_barrier(states).astype(jnp.bfloat16)


def traced_once(layer: nn.Module, method: Callable, *args: Any, **static: Any) -> Any:
  """Calls `method(layer, *args, **static)`; layers of equal shape share one trace.

  Tracing every layer of a stack takes most of the start of a process whose programs are
  in the compilation cache. Layers differ only in their parameters, which are arguments.
  """
  # Parameters are created in the caller's scope, so `init` traces every layer.
  if layer.is_initializing():
    return method(layer, *args, **static)
  # Flax modules compare by value. Without parent and name, layers of equal shape are
  # equal static arguments, and jit finds the trace of the first one.
  anonymous = layer.clone(parent=None, name=None)
  return _call(anonymous, method, tuple(static.items()), layer.variables, *args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(layer: nn.Module, method, static, variables, *args):
  return layer.apply(variables, *args, **dict(static), method=method)
