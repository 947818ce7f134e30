"""T5 1.0, T5 1.1 and Flan-T5: the layers, both stacks and the whole model.

Source: Raffel et al., 2020 (arXiv 1910.10683) and t5x's `minimal` examples, whose
parameter tree and logical axis names are kept, so that checkpoints map one to one.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import layers, served
from osd_jax.models.shapes import DraftServing, T5Config

__all__ = ["T5", "Decoder", "DraftServing", "Encoder", "T5Config"]


class RelativePositionBias(nn.Module):
  """T5's bucketed relative position bias, shared by all layers of a stack.

  Attributes:
    num_heads: H.
    num_buckets: learned entries per head.
    max_distance: all distances of at least this share the last bucket.
    bidirectional: True in the encoder, where keys may follow the query.
  """

  num_heads: int
  num_buckets: int
  max_distance: int
  bidirectional: bool

  @nn.compact
  def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Bias of every query position towards every key position.

    Args:
      query: [B or 1, n] int32, absolute positions of the queries.
      key: [T] int32, absolute positions of the keys.

    Returns:
      [B or 1, H, n, T] float32
    """
    init = nn.with_logical_partitioning(
      nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      ("heads", "relpos_buckets"),
    )
    table = self.param("rel_embedding", init, (self.num_heads, self.num_buckets))
    buckets = relative_position_bucket(
      key[None, None, :] - query[:, :, None],
      self.bidirectional,
      self.num_buckets,
      self.max_distance,
    )
    return jnp.transpose(table.T[buckets], (0, 3, 1, 2)).astype(jnp.float32)


def relative_position_bucket(
  relative: jax.Array, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
  """Bucket of a relative position (Raffel et al., 2020, section 2.1).

  Half of the buckets hold one distance each. The others grow logarithmically up to
  `max_distance`.

  Args:
    relative: [...] int32, key position minus query position.
    bidirectional: keys after the query get half of the buckets.
    num_buckets: number of buckets, for both directions together.
    max_distance: all distances of at least this share the last bucket.

  Returns:
    [...] int32 in 0..num_buckets - 1
  """
  offset = 0
  distance = -relative
  if bidirectional:
    num_buckets //= 2
    # Keys after the query use the upper half of the buckets.
    offset = jnp.where(distance < 0, num_buckets, 0)
    distance = jnp.abs(distance)
  else:
    distance = jnp.maximum(distance, 0)
  exact = num_buckets // 2  # distances below this have a bucket each
  # The maximum keeps log finite at distance 0, which has an exact bucket anyway.
  ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact + 1e-6)
  log_bucket = exact + (
    ratio / np.log(max_distance / exact) * (num_buckets - exact)
  ).astype(jnp.int32)
  log_bucket = jnp.minimum(log_bucket, num_buckets - 1)
  return offset + jnp.where(distance < exact, distance, log_bucket)


class EncoderLayer(nn.Module):
  """Pre-norm self-attention and feed-forward block."""

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
  """The encoder stack."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Encodes embedded tokens x [B, S, E] under mask [B, S] as [B, S, E]."""
    config = self.config
    positions = jnp.arange(x.shape[1])
    # T5 shares one position bias among all layers of a stack.
    bias = _relative_bias(config, bidirectional=True)(positions[None], positions)
    bias = bias + layers.mask_bias(mask)[:, None, None, :]
    for index in range(config.num_encoder_layers):
      layer = EncoderLayer(config, name=f"layers_{index}")
      x = layers.traced_once(layer, EncoderLayer.__call__, x, bias)
    return layers.RMSNorm(jnp.dtype(config.dtype), name="encoder_norm")(x)


class DecoderLayer(nn.Module):
  """Pre-norm self-attention, cross-attention and feed-forward block.

  Attributes:
    config: shape of the model.
    layout: layout of the kernels that a decoding step reads. The key and value kernels
      of the cross-attention are read by prefill only and always stay as trained.
    memory_width: width of the encoded source; 0 means the width of the layer.
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
    """Applies the layer to n new positions.

    Args:
      x: [B, n, E], the output of the layer below.
      self_bias: [B or 1, H, n, T] float32, position bias and causal mask.
      cross: keys and values [B, H, S, D] of the encoded source.
      cross_bias: [B, 1, 1, S] float32, mask of the source's padding.
      past: (keys, values, length) of the self cache; the new entries are written at
        `length` before attending. None for teacher forcing: x holds all positions.

    Returns:
      [B, n, E], and the self keys and values attended to, [B, H, T, D].
    """
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    if past is not None:
      past_keys, past_values, length = past
      keys = cache_lib.write(past_keys, keys, length)
      values = cache_lib.write(past_values, values, length)
    x = self._attend(x, h, keys, values, self_bias, cross, cross_bias)
    return x, (keys, values)

  def at(self, x, positions, self_bias, cross, cross_bias):
    """Applies the layer in teacher forcing and returns some positions only.

    Args:
      x: [B, T, E], the output of the layer below.
      positions: [B, P] int32, the positions to return.
      self_bias: [B, H, P, T] float32, at those positions.
      cross: keys and values [B, H, S, D] of the encoded source.
      cross_bias: [B, 1, 1, S] float32, mask of the source's padding.

    Returns:
      [B, P, E]
    """
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    # Keys and values need every position; from here on only P are computed.
    x, h = (jnp.take_along_axis(a, positions[..., None], axis=1) for a in (x, h))
    return self._attend(x, h, keys, values, self_bias, cross, cross_bias)

  def _attend(self, x, h, keys, values, self_bias, cross, cross_bias):
    x = x + self.self_attention(h, keys, values, self_bias)
    h = self.pre_cross_attention_layer_norm(x)
    x = x + self.encoder_decoder_attention(h, *cross, cross_bias)
    return x + self.mlp(self.pre_mlp_layer_norm(x))


class Decoder(nn.Module):
  """The decoder stack, with the output head of untied models.

  Attributes:
    config: shape of the model.
    layout: layout of the kernels that a decoding step reads.
    own_head: whether the stack has an output head.
    memory_width: width of the encoded source; 0 means the width of the stack.
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
    """Cross-attention keys and values [B, H, S, D] of every layer."""
    return [
      layers.traced_once(layer, DecoderLayer.cross_keys_values, encoded)
      for layer in self.layers
    ]

  def __call__(self, x, cross, cross_mask, key_length, pasts=None, length=None):
    """Applies all layers to n new positions.

    Args:
      x: [B, n, E] embedded tokens.
      cross: per layer, keys and values [B, H, S, D].
      cross_mask: [B, S] bool, True where the source has a token.
      key_length: T, number of self keys to attend over (static).
      pasts: per layer, self keys and values [B, H, T, D], or None.
      length: [B] int32, valid self keys before this call; None means 0.

    Returns:
      [B, n, E] after the final norm, and per layer the self keys and values.
    """
    # Without a cache every row starts at 0, so one row of biases is enough for all.
    start = jnp.zeros((1,), jnp.int32) if length is None else length
    query = start[:, None] + jnp.arange(x.shape[1])[None]
    self_bias = self._self_bias(query, key_length)
    cross_bias = layers.mask_bias(cross_mask)[:, None, None, :]
    written = []
    for index, layer in enumerate(self.layers):
      past = None if pasts is None else (*pasts[index], length)
      x, entries = layers.traced_once(
        layer, DecoderLayer.__call__, x, self_bias, cross[index], cross_bias, past
      )
      written.append(entries)
    return self.decoder_norm(x), written

  def at(self, x, cross, cross_mask, positions):
    """Teacher forcing at some positions; the last layer computes no others.

    Args:
      x: [B, T, E] embedded tokens.
      cross: per layer, keys and values [B, H, S, D].
      cross_mask: [B, S] bool, True where the source has a token.
      positions: [B, P] int32; None means all.

    Returns:
      [B, P, E] after the final norm.
    """
    length = x.shape[1]
    if positions is None:
      return self(x, cross, cross_mask, length)[0]
    cross_bias = layers.mask_bias(cross_mask)[:, None, None, :]
    everywhere = self._self_bias(jnp.arange(length)[None], length)
    # Layers before the last need every position, because later layers attend to them.
    *before, last = self.layers
    for index, layer in enumerate(before):
      x, _ = layer(x, everywhere, cross[index], cross_bias)
    self_bias = self._self_bias(positions, length)
    x = last.at(x, positions, self_bias, cross[-1], cross_bias)
    return self.decoder_norm(x)

  def step(self, x: jax.Array, cache: cache_lib.KVCache):
    """Applies all layers to n new tokens x [B, n, E] of the rows of a cache.

    Returns:
      [B, n, E] after the final norm, and the cache with `length` advanced by n.
    """
    x, written = self(
      x,
      list(zip(cache.cross_keys, cache.cross_values, strict=True)),
      cache.cross_mask,
      # The whole buffer is read at any length, so all steps are one program.
      cache.self_keys[0].shape[2],
      list(zip(cache.self_keys, cache.self_values, strict=True)),
      cache.length,
    )
    return x, layers.advanced_cache(cache, written, x.shape[1])

  def _self_bias(self, query, key_length):
    """Position bias plus causal mask [B or 1, H, n, T] of queries [B or 1, n]."""
    key = jnp.arange(key_length)
    causal = key[None, None, :] <= query[:, :, None]
    return self.relpos_bias(query, key) + layers.mask_bias(causal)[:, None]


class T5(served.LanguageModel):
  """The whole model; see `served.LanguageModel` for its attributes."""

  config: T5Config

  def setup(self):
    self.token_embedder = self._embedder()
    self.encoder = Encoder(self.config)
    self.draft_head = served.draft_head_of(self.config, self.serving)
    self.decoder = Decoder(self.config, self._layout, self._has_own_head)

  def prefill(self, source, mask, cache_length: int) -> cache_lib.KVCache:
    """See `base.Model.prefill`."""
    encoded = self._encode(source, mask)
    cross = self.decoder.cross_keys_values(encoded)
    cache = layers.empty_cache(cross, mask, cache_length)
    if self.return_states:
      cache = cache.replace(target_states=layers.as_target_states(encoded))
    return cache

  def encode_for_draft(self, source, mask):
    """See `base.Model.encode_for_draft`."""
    return layers.as_target_states(self._encode(source, mask))

  def score(self, source, mask, target, positions=None, tokens=None):
    """See `base.Model.score` and `base.Model.score_at`."""
    cross = self.decoder.cross_keys_values(self._encode(source, mask))
    x = self.token_embedder(layers.inputs_of(target))
    return self._logits(self.decoder.at(x, cross, mask, positions), tokens)

  def _encode(self, source, mask):
    return self.encoder(self.token_embedder(source), mask)

  @staticmethod
  def model_fields(config: T5Config) -> dict[str, Any]:
    """Fields of `base.Model` that differ between families."""
    return {"eos_ids": config.eos_ids}

  @staticmethod
  def encoder_params(config: T5Config, params: base.Params) -> base.Params:
    """See `families.encoder_params`."""
    del config  # the same for every T5
    return {name: params[name] for name in ("token_embedder", "encoder")}


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
) -> RelativePositionBias:
  return RelativePositionBias(
    config.num_heads,
    config.relative_buckets,
    config.relative_max_distance,
    bidirectional,
    name=name,
  )
