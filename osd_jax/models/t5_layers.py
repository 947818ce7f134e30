"""The encoder and the decoder of a T5: layers in order, caches in and out.

Source: Raffel et al., 2020 (arXiv 1910.10683) and t5x's `minimal` examples, whose
parameter tree and logical axis names are kept.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import layers, relative
from osd_jax.models.shapes import T5Config


class EncoderLayer(nn.Module):
  """Pre-norm self-attention and feed-forward block of the encoder."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    attention = _attention(config, name="attention")
    h = layers.RMSNorm(dtype, name="pre_attention_layer_norm")(x)
    x = x + attention(h, *attention.keys_values(h), bias)
    h = layers.RMSNorm(dtype, name="pre_mlp_layer_norm")(x)
    return x + _mlp(config, name="mlp")(h)


class Encoder(nn.Module):
  """Encoder stack."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Encodes embedded tokens x [B, S, E] under mask [B, S] to [B, S, E]."""
    config = self.config
    positions = jnp.arange(x.shape[1])
    bias = _relative_bias(config, bidirectional=True)(positions[None], positions)
    bias = bias + layers.mask_bias(mask)[:, None, None, :]
    for index in range(config.num_encoder_layers):
      layer = EncoderLayer(config, name=f"layers_{index}")
      x = traced_once(layer, EncoderLayer.__call__, x, bias)
    return layers.RMSNorm(jnp.dtype(config.dtype), name="encoder_norm")(x)


class DecoderLayer(nn.Module):
  """Pre-norm self-attention, cross-attention and feed-forward block.

  Attributes:
    config: the shape.
    layout: of the kernels that a step reads; those of the cross-attention's keys and
      values are read by prefill alone and stay as trained.
    memory_width: width of the encoded source; 0: that of the layer.
  """

  config: T5Config
  layout: layers.Layout
  memory_width: int = 0

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.pre_self_attention_layer_norm = layers.RMSNorm(dtype)
    self.self_attention = _attention(config, self.layout, self.layout)
    self.pre_cross_attention_layer_norm = layers.RMSNorm(dtype)
    self.encoder_decoder_attention = _attention(
      config, self.layout, memory_width=self.memory_width
    )
    self.pre_mlp_layer_norm = layers.RMSNorm(dtype)
    self.mlp = _mlp(config, self.layout)

  def cross_keys_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(self, x, self_bias, cross, cross_bias, past=None):
    """One layer over n new positions.

    Args:
      x: [B, n, E].
      self_bias: [B or 1, H, n, T] float32.
      cross: keys and values [B, H, S, D] of the encoded source.
      cross_bias: [B, 1, 1, S] float32.
      past: None (x holds all positions: teacher forcing), or (keys, values,
        length) of the self cache, written at length before attending.

    Returns:
      [B, n, E] and the self keys and values attended to, [B, H, T, D].
    """
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    if past is not None:
      past_keys, past_values, length = past
      keys = cache_lib.write(past_keys, keys, length)
      values = cache_lib.write(past_values, values, length)
    return self._attend(x, h, keys, values, self_bias, cross, cross_bias), (
      keys,
      values,
    )

  def at(self, x, positions, self_bias, cross, cross_bias):
    """The layer's output at some positions only, in teacher forcing.

    Args:
      x: [B, T, E].
      positions: [B, P] int32.
      self_bias: [B, H, P, T] float32, of those positions.
      cross: keys and values [B, H, S, D] of the encoded source.
      cross_bias: [B, 1, 1, S] float32.

    Returns:
      [B, P, E]
    """
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    x, h = (jnp.take_along_axis(a, positions[..., None], axis=1) for a in (x, h))
    return self._attend(x, h, keys, values, self_bias, cross, cross_bias)

  def _attend(self, x, h, keys, values, self_bias, cross, cross_bias):
    x = x + self.self_attention(h, keys, values, self_bias)
    h = self.pre_cross_attention_layer_norm(x)
    x = x + self.encoder_decoder_attention(h, *cross, cross_bias)
    return x + self.mlp(self.pre_mlp_layer_norm(x))


class Decoder(nn.Module):
  """Decoder stack with its output head (untied models).

  Attributes:
    config: the shape.
    layout: of the kernels that a step reads.
    own_head: the stack has an output head.
    memory_width: width of the encoded source; 0: that of the stack.
  """

  config: T5Config
  layout: layers.Layout
  own_head: bool
  memory_width: int = 0

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.relpos_bias = _relative_bias(config, bidirectional=False, name=None)
    self.layers = [
      DecoderLayer(config, self.layout, self.memory_width)
      for _ in range(config.num_decoder_layers)
    ]
    self.decoder_norm = layers.RMSNorm(dtype)
    if self.own_head:
      self.logits_dense = layers.Projection(
        (config.width, config.vocab_size), ("embed", "vocab"), dtype, self.layout
      )

  def cross_keys_values(self, encoded: jax.Array):
    """Cross-attention keys and values of every layer, [B, H, S, D] each."""
    return [
      traced_once(layer, DecoderLayer.cross_keys_values, encoded)
      for layer in self.layers
    ]

  def __call__(self, x, cross, cross_mask, key_length, pasts=None, length=None):
    """Runs all layers over n new positions; see `at` for some of them.

    Args:
      x: [B, n, E] embedded tokens.
      cross: per layer, keys and values [B, H, S, D].
      cross_mask: [B, S] bool.
      key_length: number of self keys T that are attended over (static).
      pasts: per layer, self keys and values [B, H, T, D], or None.
      length: [B] int32 valid self keys before this call, or None for 0.

    Returns:
      [B, n, E] after the final norm, and per layer the self keys and values.
    """
    start = jnp.zeros((1,), jnp.int32) if length is None else length
    query = start[:, None] + jnp.arange(x.shape[1])[None]
    self_bias = self._self_bias(query, key_length)
    cross_bias = layers.mask_bias(cross_mask)[:, None, None, :]
    written = []
    for index, layer in enumerate(self.layers):
      past = None if pasts is None else (*pasts[index], length)
      x, entries = traced_once(
        layer, DecoderLayer.__call__, x, self_bias, cross[index], cross_bias, past
      )
      written.append(entries)
    return self.decoder_norm(x), written

  def at(self, x, cross, cross_mask, positions):
    """Teacher forcing, at some positions only: the last layer computes no others.

    Args:
      x: [B, T, E] embedded tokens.
      cross: per layer, keys and values [B, H, S, D].
      cross_mask: [B, S] bool.
      positions: [B, P] int32; None: all.

    Returns:
      [B, P, E] after the final norm.
    """
    length = x.shape[1]
    if positions is None:
      return self(x, cross, cross_mask, length)[0]
    cross_bias = layers.mask_bias(cross_mask)[:, None, None, :]
    everywhere = self._self_bias(jnp.arange(length)[None], length)
    *before, last = self.layers
    for index, layer in enumerate(before):
      x, _ = layer(x, everywhere, cross[index], cross_bias)
    self_bias = self._self_bias(positions, length)
    x = last.at(x, positions, self_bias, cross[-1], cross_bias)
    return self.decoder_norm(x)

  def step(self, x, cache: cache_lib.KVCache):
    """Runs all layers over n new positions of the rows of a cache.

    Args:
      x: [B, n, E] embedded tokens.
      cache: what the rows remember.

    Returns:
      [B, n, E] after the final norm, and the cache with `length` advanced by n.
    """
    x, written = self(
      x,
      list(zip(cache.cross_keys, cache.cross_values, strict=True)),
      cache.cross_mask,
      cache.self_keys[0].shape[2],
      list(zip(cache.self_keys, cache.self_values, strict=True)),
      cache.length,
    )
    cache = cache.replace(
      self_keys=tuple(keys for keys, _ in written),
      self_values=tuple(values for _, values in written),
      length=cache.length + x.shape[1],
    )
    return x, cache

  def _self_bias(self, query, key_length):
    """Position bias plus causal mask, [B or 1, H, n, T], of queries [B or 1, n]."""
    key = jnp.arange(key_length)
    causal = key[None, None, :] <= query[:, :, None]
    return self.relpos_bias(query, key) + layers.mask_bias(causal)[:, None]


def inputs_of(target: jax.Array, start: jax.Array | int = base.PAD_ID) -> jax.Array:
  """What a decoder is fed to judge tokens [B, T]: the start token, then all but one.

  Args:
    target: [B, T] int32.
    start: [B] int32, or one for all.
  """
  first = jnp.broadcast_to(start, target.shape[:1])[:, None]
  return jnp.concatenate([first.astype(target.dtype), target[:, :-1]], axis=1)


def empty_cache(config: T5Config, cross, mask, cache_length: int) -> cache_lib.KVCache:
  """The cache of rows that were prefilled and were fed nothing.

  Args:
    config: shape of the decoder.
    cross: per layer, keys and values [B, H, S, D] of the encoded source.
    mask: [B, S] bool; real source tokens.
    cache_length: slots for fed tokens.
  """
  rows = mask.shape[0]
  empty = functools.partial(
    cache_lib.empty_self_entries,
    config.num_decoder_layers,
    (rows, config.num_heads, cache_length, config.head_dim),
    jnp.dtype(config.dtype),
  )
  return cache_lib.KVCache(
    self_keys=empty(),
    self_values=empty(),
    cross_keys=tuple(keys for keys, _ in cross),
    cross_values=tuple(values for _, values in cross),
    cross_mask=mask,
    length=jnp.zeros((rows,), jnp.int32),
  )


def traced_once(layer: nn.Module, method, *args):
  """What `method(layer, *args)` gives; equal layers share one trace.

  Layers differ in nothing but their parameters, and tracing all of them is most of
  what a process waits for whose programs are compiled already.
  """
  if layer.is_initializing():
    return method(layer, *args)
  alike = layer.clone(parent=None, name=None)
  return _call(alike, method, layer.variables, *args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(layer: nn.Module, method, variables, *args):
  return layer.apply(variables, *args, method=method)


def _attention(
  config: T5Config,
  layout: layers.Layout = layers.Layout.TRAINED,
  memory_layout: layers.Layout = layers.Layout.TRAINED,
  name: str | None = None,
  memory_width: int = 0,
) -> layers.Attention:
  return layers.Attention(
    config.width,
    config.num_heads,
    config.head_dim,
    jnp.dtype(config.dtype),
    layout,
    memory_layout,
    memory_width,
    name=name,
  )


def _mlp(
  config: T5Config,
  layout: layers.Layout = layers.Layout.TRAINED,
  name: str | None = None,
) -> layers.Mlp:
  return layers.Mlp(
    config.width,
    config.mlp_dim,
    config.mlp_activations,
    jnp.dtype(config.dtype),
    layout,
    name=name,
  )


def _relative_bias(
  config: T5Config, bidirectional: bool, name: str | None = "relpos_bias"
) -> relative.RelativePositionBias:
  return relative.RelativePositionBias(
    config.num_heads,
    config.relative_buckets,
    config.relative_max_distance,
    bidirectional,
    name=name,
  )
