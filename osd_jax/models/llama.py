"""Llama, Vicuna, Mistral, Qwen and Gemma: layers, stack and the whole model.

    output slots   p3 t0 t1 d0 d1 .  .   keys written at the row's own length
    prompt slots   p0 p1 p2 [p3] .  .    keys written by prefill, never changed

The last token of a prompt (p3) is the first input of decoding, as the start token is
for a T5 decoder. Its key is written to the first output slot, so its slot among the
prompt's keys is masked, like padding. The prompt's slots come last, because they are
padded at their end when a longer prompt joins the batch.

Sources: Touvron et al., 2023 (arXiv 2302.13971); grouped-query attention: Ainslie et
al., 2023 (arXiv 2305.13245); rotary positions: Su et al., 2021 (arXiv 2104.09864) in
the layout of transformers, where the first half of a head's components is rotated
against the second; the scaling is Llama 3.1's. Gemma 2: arXiv 2408.00118; Gemma 3:
arXiv 2503.19786. Parameters carry t5x's names.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, native
from osd_jax import cache as cache_lib
from osd_jax.models import layers, served
from osd_jax.models.shapes import LlamaConfig, RopeScaling

CHUNK = 512  # longer prompts are prefilled in chunks of this many tokens

Rotation = tuple[jax.Array, jax.Array]  # cosines and sines, [B, n, D / 2] float32


def rotations(config: LlamaConfig, positions: jax.Array) -> dict[int, Rotation]:
  """Cosines and sines at positions [B, n] int32, per size of window."""
  wide = positions[..., None].astype(jnp.float32)
  angles = {
    window: wide * frequencies(config, window)[None, None]
    for window in set(config.windows)
  }
  return {window: (jnp.cos(turn), jnp.sin(turn)) for window, turn in angles.items()}


def rotated(x: jax.Array, by: Rotation) -> jax.Array:
  """Rotates the heads of x [B, H, n, D], in float32 or more."""
  cosines, sines = (part[:, None] for part in by)
  first, second = jnp.split(x.astype(layers.at_least_float32(x.dtype)), 2, axis=-1)
  turned = (first * cosines - second * sines, second * cosines + first * sines)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies(config: LlamaConfig, window: int = 0) -> np.ndarray:
  """Angle per position of each pair of components, [D / 2] float32, in radians.

  `window` is that of the layer.
  """
  is_local = bool(window and config.local_rope_theta)
  theta = config.local_rope_theta if is_local else config.rope_theta
  exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
  plain = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
  if is_local:
    return plain
  plain = plain / np.float32(config.rope_factor)
  if config.rope_scaling is None:
    return plain
  return _stretched(plain, config.rope_scaling).astype(np.float32)


def _stretched(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  """Divides low frequencies by `factor`, keeps high ones and interpolates between."""
  turns = scaling.original_positions * plain / (2 * np.pi)  # in the original context
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  share = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return share * plain + (1 - share) * plain / scaling.factor


class Memory(NamedTuple):
  """Keys and values that queries attend to."""

  keys: jax.Array  # [B, KV heads, T, D]
  values: jax.Array  # like keys
  bias: jax.Array  # [B or 1, 1, n or 1, T] float32, very negative where masked


def norm(config: LlamaConfig, axis: str = "embed") -> layers.RMSNorm:
  """One norm of a model."""
  return layers.RMSNorm(
    jnp.dtype(config.dtype), config.norm_epsilon, axis, config.unit_offset_norms
  )


class Attention(nn.Module):
  """Grouped-query attention with rotary positions, or without for a `by` of None."""

  config: LlamaConfig
  layout: base.Layout  # layout of the kernels
  # Layout of the key and value kernels, if it is another.
  memory_layout: base.Layout | None = None
  inputs: int = 1  # number of vectors of the model's width in each input

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)

    def inward(heads, layout):
      shape = (self.inputs * config.width, heads * config.head_dim)
      axes, bias = ("embed", "joined_kv"), config.attention_bias
      return layers.Projection(shape, axes, dtype, layout, bias=bias)

    if self._is_packed:
      heads = config.num_heads + 2 * config.num_kv_heads
      self.query_key_value = inward(heads, self.layout)
    else:
      memory_layout = self.memory_layout or self.layout
      self.query = inward(config.num_heads, self.layout)
      self.key = inward(config.num_kv_heads, memory_layout)
      self.value = inward(config.num_kv_heads, memory_layout)
    self.out = layers.HeadsProjection(
      (config.num_heads * config.head_dim, config.width),
      ("joined_kv", "embed"),
      dtype,
      self.layout,
      bias=config.output_bias,
    )
    has_norms = config.query_key_norm
    self.query_norm = norm(config, "kv") if has_norms else None
    self.key_norm = norm(config, "kv") if has_norms else None

  @property
  def _is_packed(self) -> bool:
    return self.layout is base.Layout.PACKED and self.memory_layout is None

  def keys_values(self, x: jax.Array, by: Rotation | None):
    """Rotated keys, and values, [B, KV heads, n, D] of x [B, n, E]."""
    # Keys are cached after the rotation, since their positions never change.
    keys = self._rotated(self._split(self.key(x)), self.key_norm, by)
    return keys, self._split(self.value(x))

  def queries(self, x: jax.Array, by: Rotation | None) -> jax.Array:
    """Rotated and scaled queries [B, H, n, D] of x [B, n, E]."""
    query = self._rotated(self._split(self.query(x)), self.query_norm, by)
    # Scaling the queries is cheaper than scaling the logits of every key.
    return query * self.config.query_scale

  def query_keys_values(self, x: jax.Array, by: Rotation | None):
    """Queries, keys and values of the same x."""
    if not self._is_packed:
      return self.queries(x, by), *self.keys_values(x, by)
    config = self.config
    ends = np.cumsum([config.num_heads, config.num_kv_heads])
    heads = self._split(self.query_key_value(x))
    # Queries and keys are normalized in one reduction.
    normed = layers.normalized(heads, config.norm_epsilon)
    query, key, _ = jnp.split(normed if self.query_norm else heads, ends, axis=1)
    query = self._rotated(query, self.query_norm, by, is_normalized=True)
    keys = self._rotated(key, self.key_norm, by, is_normalized=True)
    return query * config.query_scale, keys, heads[:, ends[1] :]

  def __call__(self, query: jax.Array, memory: Memory) -> jax.Array:
    """Attends with queries [B, H, n, D] to a memory; returns [B, n, E]."""
    # Query heads that share keys are consecutive: [B, KV heads, sharing, n, D].
    shared = (self.config.num_kv_heads, self.config.queries_per_head)
    query = query.reshape(query.shape[0], *shared, *query.shape[2:])
    cap = self.config.attention_cap
    served = self.layout is not base.Layout.TRAINED
    if served and not cap and _attends(query, memory):  # the C++ code has no caps
      return self.out(_native(query, memory))
    attended = functools.partial(_attended, cap=cap)

    def attend(query, bias):
      return layers.never_alone(attended, query, memory._replace(bias=bias))

    context = layers.in_blocks(attend, query, memory.bias)
    return self.out(context.reshape(context.shape[0], -1, *context.shape[3:]))

  def _rotated(self, heads, head_norm, by, is_normalized=False):
    """Normalized and rotated queries or keys [B, H, n, D]."""
    if head_norm is not None:
      heads = head_norm(heads, is_normalized)
    return heads if by is None else rotated(heads, by)

  def _split(self, x: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:2], -1, self.config.head_dim)
    return heads.transpose(0, 2, 1, 3)


def _attended(query: jax.Array, memory: Memory, cap: float) -> jax.Array:
  """Context [B, KV heads, sharing, n, D] of queries of the same shape."""
  dtype, (keys, values, bias) = query.dtype, memory
  precision = layers.precision_of(dtype)
  logits = (
    layers.soft_capped(layers.attention_logits(query, keys), cap) + bias[:, :, None]
  )
  weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
  context = jnp.einsum("bhgnt,bhtd->bhgnd", weights, values, precision=precision)
  # A query that may attend to nothing stands for no token; see `Decoder.step`.
  sees = jnp.any(bias > layers.MASKED / 2, axis=-1)
  return jnp.where(sees[:, :, None, :, None], context, 0)


def _attends(query: jax.Array, memory: Memory) -> bool:
  rows, _, sharing, count, _ = query.shape
  flat = query.reshape(rows, count * sharing, -1)  # the shape that `_native` passes on
  return native.attends(flat, memory.keys)


def _native(query: jax.Array, memory: Memory) -> jax.Array:
  """Context [B, n, H * D] from the `native` attention of a CPU.

  That attention has one query head per key head. The query heads that share keys become
  additional query positions instead.
  """
  rows, heads, sharing, count, size = query.shape
  folded = query.transpose(0, 3, 2, 1, 4).reshape(rows, count * sharing, heads * size)
  keys, values, bias = memory
  bias = jnp.broadcast_to(bias, (bias.shape[0], 1, count, bias.shape[3]))
  bias = jnp.repeat(bias, sharing, axis=2)
  context = native.attention(folded, keys, values, bias)
  context = context.reshape(rows, count, sharing, heads, size)
  return context.transpose(0, 1, 3, 2, 4).reshape(rows, count, -1)


class Layer(nn.Module):
  """Pre-norm attention and feed-forward block; a Gemma has norms after both, too."""

  config: LlamaConfig
  layout: base.Layout
  attention_inputs: ClassVar[int] = 1  # `Attention.inputs`

  def setup(self):
    config, inputs = self.config, self.attention_inputs
    self.pre_self_attention_layer_norm = norm(config)
    self.self_attention = Attention(config, self.layout, inputs=inputs)
    self.pre_mlp_layer_norm = norm(config)
    self.mlp = layers.Mlp(config, self.layout)
    if config.post_norms:
      self.post_self_attention_layer_norm = norm(config)
      self.post_mlp_layer_norm = norm(config)

  def __call__(self, x, by, bias, past=None, slots=None, earlier=()):
    """Applies the layer to n positions.

    Args:
      x: [B, n, E], the output of the layer below.
      by: rotation at the positions.
      bias: [B, 1, n, T] float32, causal mask and padding.
      past: (keys, values, start), to which the new entries are added before attending:
        [B, KV heads, T, D], and the slot of the first one, [B] or [] for all rows. None
        if x holds all positions.
      slots: number of leading slots of `past` that may be written; None for all.
      earlier: keys and values of other calls, which come first in `bias`.

    Returns:
      [B, n, E], and the keys and values with the new ones, without `earlier`.
    """
    x, entries = self.attended(x, by, bias, past, slots, earlier)
    return self.fed_forward(x), entries

  def attended(self, x, by, bias, past=None, slots=None, earlier=()):
    """The first half of `__call__`, with the same arguments and results."""
    h, x = self.inputs_of(x)
    query, keys, values = self.self_attention.query_keys_values(h, by)
    entries = keys, values
    if past is not None:
      *buffers, start = past
      entries = tuple(
        _added(old, new, start, slots) for old, new in zip(buffers, entries)
      )
    every = entries
    if earlier:
      every = [jnp.concatenate(part, axis=2) for part in zip(*earlier, entries)]
    result = self.self_attention(query, Memory(*every, bias))
    if self.config.post_norms:
      result = self.post_self_attention_layer_norm(result)
    return x + result, entries

  def inputs_of(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inputs of the attention, and the vectors that its results are added to."""
    return self.pre_self_attention_layer_norm(x), x

  def fed_forward(self, x: jax.Array) -> jax.Array:
    """The second half of `__call__`, for x [B, n, E]."""
    result = self.mlp(self.pre_mlp_layer_norm(x))
    if self.config.post_norms:
      result = self.post_mlp_layer_norm(result)
    return x + result


def _added(
  stored: jax.Array, new: jax.Array, start: jax.Array, slots: int | None
) -> jax.Array:
  if start.ndim:
    return cache_lib.write(stored, new, start, slots)
  # One start for all rows needs no scatter.
  new = new.astype(stored.dtype)
  return jax.lax.dynamic_update_slice_in_dim(stored, new, start, axis=2)


def biases(
  config: LlamaConfig, mask: jax.Array, queries: jax.Array, keys: jax.Array
) -> dict[int, jax.Array]:
  """Biases [B, 1, n, T] float32, per size of window.

  `mask` [B, n or 1, T] bool are the keys that a query may attend to without a window.
  The positions are `queries` [B, n] and `keys` [B or 1, T] int32.
  """
  by_window = {}
  for window in set(config.windows):
    # A window of w tokens includes the query's own: distances of 0 to w - 1.
    near = keys[:, None] > queries[..., None] - window
    by_window[window] = layers.mask_bias(mask & near if window else mask)[:, None]
  return by_window


def through(
  stack, config: LlamaConfig, x, by, bias, pasts=None, slots=None, sources=()
):
  """Applies consecutive layers, each with the rotation and the bias of its window.

  `pasts` and `slots` are those of `Layer`, `sources` those of T5Gemma's, one for each
  layer. Returns, per layer, its output [B, n, E], and its keys and values.
  """
  states, entries_of = [], []
  for index, layer in enumerate(stack):
    window = config.window_of(index)
    past, source = pasts and pasts[index], sources[index : index + 1]
    arguments = (x, by[window], bias[window], past, *source)
    x, entries = layers.traced_once(
      layer, type(layer).__call__, *arguments, slots=slots
    )
    states.append(x)
    entries_of.append(entries)
  return states, entries_of


class Decoder(nn.Module):
  """All layers, the final norm, and the output head of untied models."""

  config: LlamaConfig
  layout: base.Layout
  own_head: bool
  taps: tuple[int, ...] = ()  # see `served.LanguageModel.taps`
  layer_type: ClassVar[type[Layer]] = Layer

  def setup(self):
    config, make = self.config, self.layer_type
    self.layers = [make(config, self.layout) for _ in range(config.num_layers)]
    self.decoder_norm = norm(config)
    if self.own_head:
      self.logits_dense = layers.output_head(config, self.layout)

  def over(self, x, mask, positions, depth: int = 0, sources=()):
    """Applies the first `depth` layers, or all, to x [B, n, E], with a causal mask.

    `mask` [B, n] bool are slots that may be attended to; `positions` [B, n] int32 are
    for the rotation; `sources` are those of `through`.
    Returns, per layer, its output [B, n, E] before the final norm, and its keys and
    values.
    """
    config = self.config
    by = rotations(config, positions)
    causal = jnp.tril(jnp.ones((mask.shape[1],) * 2, bool))
    visible = mask[:, None] & mask[..., None] & causal[None]
    bias = biases(config, visible, positions, positions)
    stack = self.layers[: depth or None]
    return through(stack, config, x, by, bias, sources=sources)

  def prefill(self, x: jax.Array, mask: jax.Array):
    """Computes the keys and values of a prompt, in chunks if it is long.

    Takes embedded tokens x [B, S, E]; `mask` [B, S] bool. Returns the keys and values
    of every layer, [B, KV heads, S, D], and the target states [B, S, E] of
    `LlamaConfig.state_layer`, or those of `taps`.
    """
    length = x.shape[1]
    if length <= CHUNK:
      states, entries = self.over(x, mask, prompt_positions(mask))
      return entries, self.tapped(x, states)
    spare = -length % CHUNK  # padding at the end, masked like any other
    x = jnp.pad(x, ((0, 0), (0, spare), (0, 0)))
    entries, states = self._by_chunks(x, jnp.pad(mask, ((0, 0), (0, spare))))
    return jax.tree.map(lambda leaf: leaf[:, :, :length], entries), states[:, :length]

  def _by_chunks(self, x, mask):
    """`prefill` as a scan over chunks, which keeps the attention logits small."""
    config, (rows, length) = self.config, mask.shape

    def one_more(caches, start):
      part = jax.lax.dynamic_slice_in_dim(x, start, CHUNK, axis=1)
      return self.chunk(part, mask, start, caches)

    shape = (rows, config.num_kv_heads, length, config.head_dim)
    empty = jnp.zeros(shape, jnp.dtype(config.dtype))
    caches = [(empty, empty)] * config.num_layers
    starts = jnp.arange(0, length, CHUNK)
    caches, states = jax.lax.scan(one_more, caches, starts)
    return caches, states.swapaxes(0, 1).reshape(rows, length, -1)

  def chunk(self, x, mask, start, caches, slots: int = 0):
    """Applies all layers to a chunk x [B, n, E] of prompts, from place `start` [] on.

    `mask` [B, S] bool are the tokens of the whole prompts. `caches` are, per layer,
    keys and values [B, KV heads, slots + S, D], which hold the chunks before this one.
    Returns them with this chunk, and its target states [B, n, E].
    """
    config, count = self.config, x.shape[1]
    of_chunk = functools.partial(
      jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=count, axis=1
    )
    positions = prompt_positions(mask)
    at = of_chunk(positions)
    # One shape serves all chunks, so each attends to all S slots and masks later ones.
    places = jnp.arange(mask.shape[1])
    seen = places[None] <= start + jnp.arange(count)[:, None]
    visible = mask[:, None] & of_chunk(mask)[..., None] & seen[None]
    # The slots of output come first, and are empty.
    visible = jnp.pad(visible, ((0, 0), (0, 0), (slots, 0)))
    bias = biases(config, visible, at, jnp.pad(positions, ((0, 0), (slots, 0))))
    pasts = [(*entries, slots + start) for entries in caches]
    stack, by = self.layers, rotations(config, at)
    states, caches = through(stack, config, x, by, bias, pasts)
    return caches, self.tapped(x, states)

  def tapped(self, x: jax.Array, states: Sequence[jax.Array]) -> jax.Array:
    """The states for an attached draft: [B, n, E], or all `taps` in one vector.

    Takes the input x [B, n, E] of the first layer, and the output of every layer.
    """
    if not self.taps:
      return states[self.config.last_state_layer - 1]
    after = (x, *states)
    return jnp.concatenate([after[count] for count in self.taps], axis=-1)

  def step(self, x: jax.Array, cache: cache_lib.KVCache, is_token: jax.Array):
    """Applies all layers to n new tokens x [B, n, E] of the rows of a cache.

    Inputs that are no token (`is_token` [B, n] bool) must be zeros. They attend to
    nothing, so they stay zeros in every layer, and the native products skip them.

    Returns x after the final norm, and the cache with `length` advanced by n.
    """
    slot, slots = self._slots(x, cache), cache.slots
    own = self._own_bias(slot, slots, is_token)
    at, prompt = self.prompt_bias(slot, cache.cross_mask, is_token)
    bias = {
      window: jnp.concatenate([own[window], prompt[window]], axis=-1) for window in own
    }
    return self._advanced(x, at, bias, cache, slots=slots)

  def _advanced(self, x, at, bias, cache, **memories):
    """`step` at positions [B, n]; `memories` are those of `through`."""
    pasts = [(*kept, cache.length) for kept in zip(cache.self_keys, cache.self_values)]
    by = rotations(self.config, at)
    states, entries = through(self.layers, self.config, x, by, bias, pasts, **memories)
    if self.taps:
      cache = cache.with_token_states(self.tapped(x, states))
    return self.decoder_norm(states[-1]), cache.advanced(entries, x.shape[1])

  def _slots(self, x: jax.Array, cache: cache_lib.KVCache) -> jax.Array:
    """The output slots [B, n] of new tokens x [B, n, E]."""
    return cache.length[:, None] + jnp.arange(x.shape[1])[None]

  def _own_bias(self, slot: jax.Array, slots: int, is_token: jax.Array):
    """Biases [B, 1, n, slots] of inputs at slots [B, n] to the output slots."""
    keys = jnp.arange(slots)[None]
    visible = (keys[:, None] <= slot[:, :, None]) & is_token[..., None]
    return biases(self.config, visible, slot, keys)

  def prompt_bias(self, slot: jax.Array, mask: jax.Array, is_token: jax.Array):
    """The positions [B, n] of inputs at slots [B, n], and their biases to the prompt.

    `mask` [B, S] are the prompt's tokens that may be attended to, and `is_token`
    [B, n] the inputs that attend. The biases are [B, 1, n, S], per size of window.
    """
    # `mask` excludes the prompt's last token, because that token is fed to output slot
    # 0. Its position is the number of tokens before it.
    at = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None] + slot
    visible = mask[:, None] & is_token[..., None]
    return at, biases(self.config, visible, at, prompt_positions(mask))


class Llama(served.LanguageModel):
  """The whole model; see `served.LanguageModel` for its attributes."""

  config: LlamaConfig
  is_decoder_only: ClassVar[bool] = True

  def setup(self):
    super().setup()
    own_head, taps = self._has_own_head, self.taps
    self.decoder = Decoder(self.config, self._layout, own_head, taps)

  def read(self, source, mask):
    """See `served.LanguageModel.read`; decoding feeds the last token once more."""
    entries, states = self.decoder.prefill(self._embedded(source, mask), mask)
    return entries, without_last(mask), states

  def extend(self, source, mask, cache: cache_lib.KVCache, start, count: int):
    """See `base.Model.extend`."""
    of_chunk = functools.partial(
      jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=count, axis=1
    )
    x = self._embedded(of_chunk(source), of_chunk(mask))
    caches = list(zip(cache.self_keys, cache.self_values))
    caches, states = self.decoder.chunk(x, mask, start, caches, cache.slots)
    if (old := cache.target_states) is not None:
      states = layers.as_target_states(states)
      states = jax.lax.dynamic_update_slice_in_dim(old, states, start, axis=1)
      cache = cache.replace(target_states=states)
    return cache.advanced(caches, 0).replace(cross_mask=without_last(mask))

  def _embedded(self, source, mask):
    return jnp.where(mask[..., None], self.token_embedder(source), 0)

  def encode_for_draft(self, source, mask):
    """See `base.Model.encode_for_draft`."""
    x, positions = self.token_embedder(source), prompt_positions(mask)
    # Layers above the states are not computed.
    depth = max(self.taps, default=self.config.last_state_layer)
    states, _ = self.decoder.over(x, mask, positions, depth)
    return layers.as_target_states(self.decoder.tapped(x, states))

  def forced(self, source, mask, target, positions=None):
    """See `served.LanguageModel.forced`."""
    x = self._forced(source, mask, target)[1][-1]
    if positions is not None:
      x = jnp.take_along_axis(x, positions[..., None], axis=1)
    return self.decoder.decoder_norm(x)

  def score_with_states(self, source, mask, target):
    """See `base.Model.score_with_states`."""
    if not self.taps:
      return super().score_with_states(source, mask, target)
    x, states = self._forced(source, mask, target)
    logits = self._logits(self.decoder.decoder_norm(states[-1]))
    return logits, layers.as_target_states(self.decoder.tapped(x, states))

  def _forced(self, source, mask, target):
    """Embedded inputs [B, T, E] of texts, and the output of every layer."""
    inputs = layers.inputs_of(target, last_token(source, mask))
    before_last = without_last(mask)
    before = jnp.sum(before_last, axis=1, dtype=jnp.int32)[:, None]
    after = before + jnp.arange(target.shape[1])[None]
    x = self.token_embedder(jnp.concatenate([source, inputs], axis=1))
    states, _ = self.decoder.over(
      x,
      jnp.concatenate([before_last, jnp.ones(inputs.shape, bool)], axis=1),
      jnp.concatenate([prompt_positions(mask), after], axis=1),
    )
    # The outputs at prompt slots predict no token of the target text.
    return x[:, source.shape[1] :], [one[:, source.shape[1] :] for one in states]

  @staticmethod
  def model_fields(config: LlamaConfig) -> dict[str, Any]:
    """See `served.LanguageModel.model_fields`."""
    return {
      "pad_id": base.NO_TOKEN,
      "start": last_token,
      "max_positions": config.max_positions,
    }

  @staticmethod
  def encoder_params(config: LlamaConfig, params: base.Params) -> base.Params:
    """See `families.encoder_params`."""
    names = [f"layers_{index}" for index in range(config.last_state_layer)]
    decoder = {name: params["decoder"][name] for name in names}
    return {"token_embedder": params["token_embedder"], "decoder": decoder}


def last_token(source: jax.Array, mask: jax.Array) -> jax.Array:
  """[B] int32; the last token of prompts [B, S], which may be padded on either side."""
  # `argmax` returns the first True, so the mask is searched from its end.
  at = source.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
  return jnp.take_along_axis(source, at[:, None], axis=1)[:, 0]


def without_last(mask: jax.Array) -> jax.Array:
  """[B, S] bool; all tokens of prompts but the last one of each."""
  count = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # tokens from here to the end
  return mask & (count > 1)


def without_first(mask: jax.Array) -> jax.Array:
  """[B, S] bool; all tokens of prompts but the first one of each."""
  return mask & (jnp.cumsum(mask, axis=1) > 1)


def prompt_positions(mask: jax.Array) -> jax.Array:
  """[B, S] int32; the position of every token of prompts with mask [B, S]."""
  return jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
