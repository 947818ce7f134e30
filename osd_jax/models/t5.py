"""T5 1.0, T5 1.1 and Flan-T5: the layers, both stacks and the whole model.

Source: Raffel et al., 2020 (arXiv 1910.10683) and t5x's `minimal` examples, whose
parameter tree and logical axis names are kept, so that checkpoints map one to one.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, native
from osd_jax import cache as cache_lib
from osd_jax.models import layers, served
from osd_jax.models.shapes import T5Config


class RelativePositionBias(nn.Module):
  """T5's bucketed relative position bias, shared by all layers of a stack."""

  config: T5Config
  bidirectional: bool  # True in the encoder, where keys may follow the query

  @nn.compact
  def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Bias [B or 1, H, n, T] float32 of queries towards keys.

    `query` [B or 1, n] and `key` [T] int32 are absolute positions.
    """
    init = nn.with_logical_partitioning(
      nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      ("heads", "relpos_buckets"),
    )
    count = self.config.relative_buckets
    table = self.param("rel_embedding", init, (self.config.num_heads, count))
    relative = key[None, None, :] - query[:, :, None]
    farthest = self.config.relative_max_distance
    buckets = relative_position_bucket(relative, self.bidirectional, count, farthest)
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


class LongBias(NamedTuple):
  """Bias of a long prompt, whose position bias [H, S, S] would take gigabytes."""

  by_distance: jax.Array  # [H, 2 S - 1] float32, of keys S - 1 before to S - 1 after
  mask: jax.Array  # [B, 1, 1, S] float32


class Attention(nn.Module):
  """Multi-head attention with unscaled logits; T5 folds the scale into the init."""

  config: T5Config
  layout: base.Layout = base.Layout.TRAINED  # layout of the query and output kernels
  # Layout of the key and value kernels.
  memory_layout: base.Layout = base.Layout.TRAINED
  memory_width: int = 0  # input width of the key and value kernels; 0 means E

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    joined = config.num_heads * config.head_dim

    def inward(width, layout, init_scale=1.0):
      axes = ("embed", "joined_kv")
      return layers.Projection((width, joined), axes, dtype, layout, init_scale)

    if self.is_packed:
      shape, axes = (config.width, 3 * joined), ("embed", "joined_kv")
      self.query_key_value = layers.Projection(shape, axes, dtype, self.layout)
    else:
      self.query = inward(config.width, self.layout, config.head_dim**-0.5)
      memory_width = self.memory_width or config.width
      self.key = inward(memory_width, self.memory_layout)
      self.value = inward(memory_width, self.memory_layout)
    self.out = layers.HeadsProjection(
      (joined, config.width), ("joined_kv", "embed"), dtype, self.layout
    )

  @property
  def is_packed(self) -> bool:
    """Whether one kernel computes queries, keys and values."""
    return self.memory_layout is base.Layout.PACKED

  def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, H, n, D] of x [B, n, memory width]."""
    return self._split(self.key(x)), self._split(self.value(x))

  def query_keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, n, H * D], and keys and values, of the same x [B, n, E]."""
    if not self.is_packed:
      return self.query(x), *self.keys_values(x)
    query, key, value = jnp.split(self.query_key_value(x), 3, axis=-1)
    return query, self._split(key), self._split(value)

  def __call__(
    self,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    bias: jax.Array | LongBias,
  ) -> jax.Array:
    """Attends with queries [B, n, H * D] to keys and values [B, H, T, D]: [B, n, E].

    `bias` [B or 1, H or 1, n or 1, T] float32 is the position bias plus the mask.
    """
    if isinstance(bias, LongBias):
      return self.out(self._of_long(self._split(query), keys, values, bias))
    # Only served copies may use the native attention, which has no gradient.
    if self.layout is not base.Layout.TRAINED and native.attends(query, keys):
      return self.out(native.attention(query, keys, values, bias))
    query = self._split(query)
    return self.out(layers.never_alone(_attended, query, keys, values, bias))

  def _of_long(self, query, keys, values, bias: LongBias) -> jax.Array:
    """Context [B, H, S, D] of the queries of a long prompt, block by block."""
    length = keys.shape[2]

    def attend(query, position):
      # A key at 0 is S - 1 - position after the first entry of `by_distance`.
      of_query = functools.partial(
        jax.lax.dynamic_slice_in_dim, bias.by_distance, slice_size=length, axis=1
      )
      near = jax.vmap(of_query, out_axes=1)(length - 1 - position[:, 0])
      return _attended(query, keys, values, near[None] + bias.mask)

    return layers.in_blocks(attend, query, jnp.arange(length)[:, None])

  def _split(self, x: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:2], self.config.num_heads, self.config.head_dim)
    return jnp.transpose(heads, (0, 2, 1, 3))


def _attended(query, keys, values, bias):
  precision = layers.precision_of(query.dtype)
  # The softmax needs float32 also in a bfloat16 model, whose logits have 8 bits.
  logits = layers.attention_logits(query[:, :, None], keys)[:, :, 0] + bias
  weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
  return jnp.einsum("bhnt,bhtd->bhnd", weights, values, precision=precision)


class EncoderLayer(nn.Module):
  """Pre-norm self-attention and feed-forward block."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, bias: jax.Array | LongBias) -> jax.Array:
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    attention = Attention(config, name="attention")
    h = layers.RMSNorm(dtype, name="pre_attention_layer_norm")(x)
    x = x + attention(*attention.query_keys_values(h), bias)
    h = layers.RMSNorm(dtype, name="pre_mlp_layer_norm")(x)
    return x + layers.Mlp(config, name="mlp")(h)


class Encoder(nn.Module):
  """The encoder stack."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Encodes embedded tokens x [B, S, E] under mask [B, S] as [B, S, E]."""
    config = self.config
    length, bias = x.shape[1], layers.mask_bias(mask)[:, None, None, :]
    # T5 shares one position bias among all layers of a stack.
    position_bias = RelativePositionBias(config, True, name="relpos_bias")
    if length <= layers.BLOCK:
      positions = jnp.arange(length)
      bias = position_bias(positions[None], positions) + bias
    else:
      every = position_bias(jnp.full((1, 1), length - 1), jnp.arange(2 * length - 1))
      bias = LongBias(every[0, :, 0], bias)
    for index in range(config.num_encoder_layers):
      layer = EncoderLayer(config, name=f"layers_{index}")
      x = layers.traced_once(layer, EncoderLayer.__call__, x, bias)
    return layers.RMSNorm(jnp.dtype(config.dtype), name="encoder_norm")(x)


class DecoderLayer(nn.Module):
  """Pre-norm self-attention, cross-attention and feed-forward block."""

  config: T5Config
  # Layout of the kernels that a decoding step reads. The key and value kernels of the
  # cross-attention are read by prefill only and always stay as trained.
  layout: base.Layout
  memory_width: int = 0  # width of the encoded source; 0 means the width of the layer

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.pre_self_attention_layer_norm = layers.RMSNorm(dtype)
    self.self_attention = Attention(config, self.layout, self.layout)
    self.pre_cross_attention_layer_norm = layers.RMSNorm(dtype)
    self.encoder_decoder_attention = Attention(
      config, self.layout, memory_width=self.memory_width
    )
    self.pre_mlp_layer_norm = layers.RMSNorm(dtype)
    self.mlp = layers.Mlp(config, self.layout)

  def cross_keys_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(
    self, x, self_bias, cross, cross_bias, past=None, positions=None, earlier=()
  ):
    """Applies the layer to n positions.

    Args:
      x: [B, n, E], the output of the layer below.
      self_bias: [B or 1, H, n or P, T] float32, position bias and causal mask; T covers
        `earlier` first.
      cross: keys and values [B, H, S, D] of the encoded source.
      cross_bias: [B, 1, 1, S] float32, mask of the source's padding.
      past: (keys, values, length) of the self cache; the new entries are written at
        `length` before attending. None for teacher forcing: x holds all positions.
      positions: [B, P] int32, positions in x to return; None means all.
      earlier: more self keys and values, from other calls, that are attended to.

    Returns:
      [B, n or P, E], and the self keys and values of x, or of the whole cache.
    """
    h = self.pre_self_attention_layer_norm(x)
    attention = self.self_attention
    if positions is None:
      chosen = lambda a: a
    else:
      # Keys and values need every position; from here on only P are computed.
      chosen = lambda a: jnp.take_along_axis(a, positions[..., None], axis=1)
    if positions is None or attention.is_packed:
      query, keys, values = attention.query_keys_values(h)
      query = chosen(query)
    else:
      keys, values = attention.keys_values(h)
      query = attention.query(chosen(h))
    x = chosen(x)
    if past is not None:
      past_keys, past_values, length = past
      keys = cache_lib.write(past_keys, keys, length)
      values = cache_lib.write(past_values, values, length)
    every = [jnp.concatenate(part, axis=2) for part in zip(*earlier, (keys, values))]
    x = x + attention(query, *every, self_bias)
    h = self.pre_cross_attention_layer_norm(x)
    attention = self.encoder_decoder_attention
    x = x + attention(attention.query(h), *cross, cross_bias)
    return x + self.mlp(self.pre_mlp_layer_norm(x)), (keys, values)


class Decoder(nn.Module):
  """The decoder stack, with the output head of untied models."""

  config: T5Config
  layout: base.Layout  # layout of the kernels that a decoding step reads
  own_head: bool  # whether the stack has an output head
  memory_width: int = 0  # width of the encoded source; 0 means the width of the stack

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.relpos_bias = RelativePositionBias(config, bidirectional=False)
    self.layers = [
      DecoderLayer(config, self.layout, self.memory_width)
      for _ in range(config.num_decoder_layers)
    ]
    self.decoder_norm = layers.RMSNorm(dtype)
    if self.own_head:
      self.logits_dense = layers.output_head(config, self.layout)

  def cross_keys_values(self, encoded: jax.Array):
    """Cross-attention keys and values [B, H, S, D] of every layer."""
    return [
      layers.traced_once(layer, type(layer).cross_keys_values, encoded)
      for layer in self.layers
    ]

  def at(self, x, cross, cross_mask, positions=None):
    """Teacher forcing at some positions; the last layer computes no others.

    Takes embedded tokens x [B, T, E], keys and values [B, H, S, D] of every layer, and
    their mask [B, S]. Returns [B, P, E] after the final norm at `positions` [B, P];
    None means all.
    """
    return self.after(x, cross, cross_mask, [], positions)[0]

  def after(self, x, cross, cross_mask, earlier, positions=None):
    """`at`, where the last inputs of every position come from a draft's own steps.

    In step s, position t attends to keys up to t - s of step 0, whose inputs are
    verified, and to its draft's own inputs after them:

        step 2, t = 5      position   0  1  2  3  4  5
                           step 0     x  x  x  x
                           step 1                 x
                           step 2                    x

    `earlier` is what this method returned as second value in each step before: the keys
    and values of every layer.
    """
    length, entries = x.shape[1], []
    # Every row starts at 0, so one row of biases is enough for all.
    everywhere = jnp.arange(length)[None]
    cross_bias = layers.mask_bias(cross_mask)[:, None, None, :]
    for index, layer in enumerate(self.layers):
      # Layers before the last need every position, because later ones attend to them.
      places = positions if index == len(self.layers) - 1 else None
      query = everywhere if places is None else places
      self_bias = self._step_bias(query, length, len(earlier))
      before = [step[index] for step in earlier]
      arguments = (x, self_bias, cross[index], cross_bias, None, places, before)
      x, own = layers.traced_once(layer, DecoderLayer.__call__, *arguments)
      entries.append(own)
    return self.decoder_norm(x), entries

  def step(self, x: jax.Array, cache: cache_lib.KVCache, is_token: jax.Array):
    """Applies all layers to n new tokens x [B, n, E]; see `llama.Decoder.step`."""
    count = x.shape[1]
    query = cache.length[:, None] + jnp.arange(count)[None]
    # The whole buffer is read at any length, so all steps are one program.
    self_bias = self._self_bias(query, cache.self_keys[0].shape[2])
    self_bias = self_bias + layers.mask_bias(is_token)[:, None, :, None]
    visible = cache.cross_mask[:, None] & is_token[..., None]
    cross_bias = layers.mask_bias(visible)[:, None]
    new_entries = []
    for index, layer in enumerate(self.layers):
      cross = cache.cross_keys[index], cache.cross_values[index]
      past = cache.self_keys[index], cache.self_values[index], cache.length
      arguments = (x, self_bias, cross, cross_bias, past)
      x, entries = layers.traced_once(layer, DecoderLayer.__call__, *arguments)
      new_entries.append(entries)
    return self.decoder_norm(x), cache.advanced(new_entries, count)

  def _step_bias(self, query, length, step):
    """Bias [B or 1, H, n, (step + 1) T] of the keys that `after` describes."""
    key = jnp.arange(length)[None, None]
    ago = query[:, :, None] - key
    visible = [ago == step - own for own in range(1, step + 1)]
    visible = jnp.concatenate([ago >= step, *visible], axis=-1)
    bias = self.relpos_bias(query, jnp.arange(length))
    return jnp.tile(bias, step + 1) + layers.mask_bias(visible)[:, None]

  def _self_bias(self, query, key_length):
    """Position bias plus causal mask [B or 1, H, n, T] of queries [B or 1, n]."""
    key = jnp.arange(key_length)
    causal = key[None, None, :] <= query[:, :, None]
    return self.relpos_bias(query, key) + layers.mask_bias(causal)[:, None]


class T5(served.LanguageModel):
  """The whole model; see `served.LanguageModel` for its attributes."""

  config: T5Config

  def setup(self):
    super().setup()
    self.encoder = Encoder(self.config)
    self.decoder = Decoder(self.config, self._layout, self._has_own_head)

  def read(self, source, mask):
    """See `served.LanguageModel.read`."""
    encoded = self._encode(source, mask)
    return self.decoder.cross_keys_values(encoded), mask, encoded

  def encode_for_draft(self, source, mask):
    """See `base.Model.encode_for_draft`."""
    return layers.as_target_states(self._encode(source, mask))

  def forced(self, source, mask, target, positions=None):
    """See `served.LanguageModel.forced`."""
    cross = self.decoder.cross_keys_values(self._encode(source, mask))
    x = self.token_embedder(layers.inputs_of(target, self._start_id))
    return self.decoder.at(x, cross, mask, positions)

  @property
  def _start_id(self) -> int:
    return base.PAD_ID

  def _encode(self, source, mask):
    return self.encoder(self.token_embedder(source), mask)

  @staticmethod
  def encoder_params(config: T5Config, params: base.Params) -> base.Params:
    """See `families.encoder_params`."""
    del config  # the same for every T5
    return {name: params[name] for name in ("token_embedder", "encoder")}
