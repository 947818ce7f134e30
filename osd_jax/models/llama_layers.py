"""The layers of a decoder-only model, over a prompt and behind it.

    slots      prompt: p0 p1 p2 [p3] . .     |  behind it: p3 t0 t1 d0 d1 . .
    keys       of the prompt, fixed by prefill  written at the row's own length

The last token of a prompt is the first input behind it, as the start token is a T5
decoder's. It is left out among the prompt's keys, where padding is left out, too.
Grouped-query attention: Ainslie et al., 2023 (arXiv 2305.13245).
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import cache as cache_lib
from osd_jax import native
from osd_jax.models import layers, rotary, t5_layers
from osd_jax.models.shapes import LlamaConfig

CHUNK = 512  # tokens of a prompt that are read at once


class Memory(NamedTuple):
  """What queries attend to.

  Attributes:
    keys: [B, heads of keys, T, D].
    values: like keys.
    bias: [B or 1, 1, n or 1, T] float32, very negative where masked.
  """

  keys: jax.Array
  values: jax.Array
  bias: jax.Array


class Attention(nn.Module):
  """Grouped-query attention with rotary positions.

  Attributes:
    config: the shape.
    layout: of the kernels.
  """

  config: LlamaConfig
  layout: layers.Layout

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)

    def inward(heads):
      shape = (config.width, heads * config.head_dim)
      axes, bias = ("embed", "joined_kv"), config.attention_bias
      return layers.Projection(shape, axes, dtype, self.layout, bias=bias)

    self.query = inward(config.num_heads)
    self.key = inward(config.num_kv_heads)
    self.value = inward(config.num_kv_heads)
    self.out = layers.HeadsProjection(
      (config.num_heads * config.head_dim, config.width),
      ("joined_kv", "embed"),
      dtype,
      self.layout,
      bias=config.output_bias,
    )
    if config.query_key_norm:
      norm = (dtype, config.norm_epsilon, "kv")
      self.query_norm, self.key_norm = layers.RMSNorm(*norm), layers.RMSNorm(*norm)

  def keys_values(self, x: jax.Array, by: rotary.Rotation):
    """Keys and values [B, heads, n, D] of x [B, n, E], the keys rotated."""
    keys, values = self._split(self.key(x)), self._split(self.value(x))
    if self.config.query_key_norm:
      keys = self.key_norm(keys)
    return rotary.rotated(keys, by), values

  def __call__(self, x: jax.Array, by: rotary.Rotation, *memories: Memory) -> jax.Array:
    """Attends from x [B, n, E], at the positions of a rotation, to all memories."""
    query = self._split(self.query(x))
    if self.config.query_key_norm:
      query = self.query_norm(query)
    query = rotary.rotated(query, by) * self.config.head_dim**-0.5
    # Heads that share keys stand together: [B, heads of keys, sharing, n, D].
    shared = (self.config.num_kv_heads, self.config.queries_per_head)
    query = query.reshape(x.shape[0], *shared, *query.shape[2:])
    if self.layout is not layers.Layout.TRAINED and _attends(query, memories):
      return self.out(_native(query, memories))
    context = layers.never_alone(_attended, query, memories)
    return self.out(context.reshape(context.shape[0], -1, *context.shape[3:]))

  def _split(self, x: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:2], -1, self.config.head_dim)
    return heads.transpose(0, 2, 1, 3)


def _attended(query: jax.Array, memories: tuple[Memory, ...]) -> jax.Array:
  """Context [B, heads, sharing, n, D]; no memory is copied to stand by another."""
  dtype = query.dtype
  precision = layers.precision_of(dtype)
  logits = []
  for keys, _, bias in memories:
    product = jnp.einsum("bhgnd,bhtd->bhgnt", query, keys, precision=precision)
    logits.append(product.astype(layers.at_least_float32(dtype)) + bias[:, :, None])
  weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1).astype(dtype)
  context, start = jnp.zeros((), dtype), 0
  for _, values, bias in memories:
    part = weights[..., start : start + bias.shape[-1]]
    start += bias.shape[-1]
    context += jnp.einsum("bhgnt,bhtd->bhgnd", part, values, precision=precision)
  return context


def _attends(query: jax.Array, memories: tuple[Memory, ...]) -> bool:
  rows, _, sharing, count, _ = query.shape
  flat = query.reshape(rows, count * sharing, -1)  # as `_native` will fold it
  return native.attends(flat, memories[0].keys)


def _native(query: jax.Array, memories: tuple[Memory, ...]) -> jax.Array:
  """Context [B, n, H * D], on a CPU: queries that share keys are more positions."""
  rows, heads, sharing, count, size = query.shape
  folded = query.transpose(0, 3, 2, 1, 4).reshape(rows, count * sharing, heads * size)
  keys, values = (
    jnp.concatenate([memory[part] for memory in memories], axis=2) for part in (0, 1)
  )
  wide = [
    jnp.broadcast_to(memory.bias, (*memory.bias.shape[:2], count, memory.bias.shape[3]))
    for memory in memories
  ]
  most = max(bias.shape[0] for bias in wide)
  wide = [jnp.broadcast_to(bias, (most, *bias.shape[1:])) for bias in wide]
  bias = jnp.repeat(jnp.concatenate(wide, axis=-1), sharing, axis=2)
  context = native.attention(folded, keys, values, bias)
  context = context.reshape(rows, count, sharing, heads, size)
  return context.transpose(0, 1, 3, 2, 4).reshape(rows, count, -1)


class Layer(nn.Module):
  """Pre-norm attention and feed-forward block."""

  config: LlamaConfig
  layout: layers.Layout

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.pre_self_attention_layer_norm = layers.RMSNorm(dtype, config.norm_epsilon)
    self.self_attention = Attention(config, self.layout)
    self.pre_mlp_layer_norm = layers.RMSNorm(dtype, config.norm_epsilon)
    activations = ("silu", "linear")
    self.mlp = layers.Mlp(config.width, config.mlp_dim, activations, dtype, self.layout)

  def over(self, x: jax.Array, by: rotary.Rotation, bias: jax.Array):
    """All positions of x [B, n, E] at once; also their keys and values."""
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h, by)
    return self._attend(x, h, by, Memory(keys, values, bias)), (keys, values)

  def over_chunk(self, x, by, bias, keys, values, start):
    """A chunk of a prompt, whose keys and values are written at slot `start`.

    Args:
      x: [B, n, E].
      by: rotation of its positions.
      bias: [B, 1, n, S] float32.
      keys: [B, heads, S, D], of the chunks before.
      values: like keys.
      start: [] int32.
    """
    h = self.pre_self_attention_layer_norm(x)
    kept = [
      jax.lax.dynamic_update_slice_in_dim(stored, new.astype(stored.dtype), start, 2)
      for stored, new in zip((keys, values), self.self_attention.keys_values(h, by))
    ]
    return self._attend(x, h, by, Memory(*kept, bias)), tuple(kept)

  def step(self, x, by, prompt: Memory, bias, past):
    """n new positions behind a prompt.

    Args:
      x: [B, n, E].
      by: rotation of its positions.
      prompt: what prefill left.
      bias: [B, 1, n, T] float32, of the positions behind the prompt.
      past: (keys, values, length) of those, written at length before attending.
    """
    h = self.pre_self_attention_layer_norm(x)
    keys, values, length = past
    new_keys, new_values = self.self_attention.keys_values(h, by)
    keys = cache_lib.write(keys, new_keys, length)
    values = cache_lib.write(values, new_values, length)
    x = self._attend(x, h, by, prompt, Memory(keys, values, bias))
    return x, (keys, values)

  def _attend(self, x, h, by, *memories):
    x = x + self.self_attention(h, by, *memories)
    return x + self.mlp(self.pre_mlp_layer_norm(x))


class Decoder(nn.Module):
  """The layers in order, the final norm, and the output head of untied models."""

  config: LlamaConfig
  layout: layers.Layout
  own_head: bool

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.layers = [Layer(config, self.layout) for _ in range(config.num_layers)]
    self.decoder_norm = layers.RMSNorm(dtype, config.norm_epsilon)
    if self.own_head:
      self.logits_dense = layers.Projection(
        (config.width, config.vocab_size), ("embed", "vocab"), dtype, self.layout
      )

  def over(self, x: jax.Array, mask: jax.Array, positions: jax.Array, depth: int = 0):
    """Runs layers over a whole sequence, causally by slot.

    Args:
      x: [B, n, E] embedded tokens.
      mask: [B, n] bool; slots that may be attended to.
      positions: [B, n] int32.
      depth: how many layers; 0: all.

    Returns:
      [B, n, E] before the final norm.
    """
    by, bias = rotary.rotation(self.config, positions), causal_bias(mask, mask.shape[1])
    for layer in self.layers[: depth or None]:
      x, _ = t5_layers.traced_once(layer, Layer.over, x, by, bias)
    return x

  def prefill(self, x: jax.Array, mask: jax.Array):
    """Reads a prompt, in chunks where it is long.

    Args:
      x: [B, S, E] embedded tokens.
      mask: [B, S] bool; its tokens.

    Returns:
      Keys and values of every layer, [B, heads, S, D] each, and what an attached draft
      reads, [B, S, E].
    """
    length = x.shape[1]
    if length <= CHUNK:
      kept, target_states = self._whole(x, mask)
      return kept, target_states
    spare = -length % CHUNK
    x = jnp.pad(x, ((0, 0), (0, spare), (0, 0)))
    kept, target_states = self._by_chunks(x, jnp.pad(mask, ((0, 0), (0, spare))))
    return jax.tree.map(lambda leaf: leaf[:, :, :length], kept), target_states[
      :, :length
    ]

  def _whole(self, x, mask):
    by = rotary.rotation(self.config, prompt_positions(mask))
    bias, kept, target_states = causal_bias(mask, mask.shape[1]), [], x
    for index, layer in enumerate(self.layers):
      x, entries = t5_layers.traced_once(layer, Layer.over, x, by, bias)
      kept.append(entries)
      target_states = x if index + 1 == self.config.last_state_layer else target_states
    return kept, target_states

  def _by_chunks(self, x, mask):
    """`_whole` in a loop over chunks: no program is quadratic in the prompt."""
    config, (rows, length) = self.config, mask.shape
    positions = prompt_positions(mask)
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    empty = jnp.zeros(shape, jnp.dtype(config.dtype))
    layer_variables = [layer.variables for layer in self.layers]
    alike = self.layers[0].clone(parent=None, name=None)

    def read(kept, start):
      chunk = jax.lax.dynamic_slice_in_dim(x, start, CHUNK, axis=1)
      at = jax.lax.dynamic_slice_in_dim(positions, start, CHUNK, axis=1)
      by = rotary.rotation(config, at)
      slots = jnp.arange(length)[None] <= start + jnp.arange(CHUNK)[:, None]
      bias = layers.mask_bias(mask[:, None, None] & slots[None, None])
      after, target_states = [], chunk
      for index, (keys, values) in enumerate(kept):
        chunk, entries = alike.apply(
          layer_variables[index],
          chunk,
          by,
          bias,
          keys,
          values,
          start,
          method=Layer.over_chunk,
        )
        after.append(entries)
        target_states = chunk if index + 1 == config.last_state_layer else target_states
      return after, target_states

    starts = jnp.arange(0, length, CHUNK)
    kept, target_states = jax.lax.scan(
      read, [(empty, empty)] * config.num_layers, starts
    )
    return kept, target_states.swapaxes(0, 1).reshape(rows, length, config.width)

  def step(self, x: jax.Array, cache: cache_lib.KVCache):
    """Runs all layers over n new positions of the rows of a cache.

    Args:
      x: [B, n, E] embedded tokens.
      cache: what the rows remember; `cross_keys` are those of the prompt.

    Returns:
      [B, n, E] after the final norm, and the cache with `length` advanced by n.
    """
    count, slots = x.shape[1], cache.self_keys[0].shape[2]
    behind = cache.length[:, None] + jnp.arange(count)[None]
    # The prompt's last token is behind it, at the position that it had.
    before = jnp.sum(cache.cross_mask, axis=1, dtype=jnp.int32)
    by = rotary.rotation(self.config, before[:, None] + behind)
    prompt_bias = layers.mask_bias(cache.cross_mask)[:, None, None]
    causal = jnp.arange(slots)[None, None] <= behind[:, :, None]
    bias = layers.mask_bias(causal)[:, None]
    written = []
    for index, layer in enumerate(self.layers):
      prompt = Memory(cache.cross_keys[index], cache.cross_values[index], prompt_bias)
      past = (cache.self_keys[index], cache.self_values[index], cache.length)
      x, entries = t5_layers.traced_once(layer, Layer.step, x, by, prompt, bias, past)
      written.append(entries)
    cache = cache.replace(
      self_keys=tuple(keys for keys, _ in written),
      self_values=tuple(values for _, values in written),
      length=cache.length + count,
    )
    return self.decoder_norm(x), cache


def prompt_positions(mask: jax.Array) -> jax.Array:
  """[B, S] int32; the position of every token of prompts, padded wherever."""
  return jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1


def causal_bias(mask: jax.Array, count: int) -> jax.Array:
  """[B, 1, n, n] float32: slots may be attended to from themselves on."""
  causal = jnp.tril(jnp.ones((count, count), bool))
  return layers.mask_bias(mask[:, None, None] & causal[None, None])
