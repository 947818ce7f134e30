"""T5Gemma: an encoder and a decoder with the layers of Gemma 2.

    prompt -> encoder embedding -> layers that see both sides -> keys and values
    tokens -> embedding -> causal layers with cross-attention -> head

Source: Zhang et al., 2025 (arXiv 2504.06225). The layers are those of `llama.py`; in
the decoder, a cross-attention without rotary positions stands between the two blocks.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import layers, llama, served, t5
from osd_jax.models.shapes import T5GemmaConfig


class Encoder(nn.Module):
  """The encoder stack, with an embedding of its own."""

  config: T5GemmaConfig

  def setup(self):
    config = self.config
    self.token_embedder = layers.Embedding(config)
    trained = base.Layout.TRAINED
    self.layers = [
      llama.Layer(config, trained) for _ in range(config.num_encoder_layers)
    ]
    self.encoder_norm = llama.norm(config)

  def __call__(self, source: jax.Array, mask: jax.Array) -> jax.Array:
    """Encodes tokens [B, S] under mask [B, S] as [B, S, E]."""
    positions = llama.prompt_positions(mask)
    by = llama.rotations(self.config, positions)
    x, bias = self.token_embedder(source), {}
    for window in set(self.config.windows):
      # As in transformers, a window of w tokens reaches w tokens to either side.
      distance = jnp.abs(positions[:, None] - positions[..., None])
      near = mask[:, None] & (distance <= window)
      bias[window] = layers.mask_bias(near if window else mask[:, None])[:, None]
    for index, layer in enumerate(self.layers):
      window = self.config.window_of(index)
      arguments = (x, by[window], bias[window])
      x, _ = layers.traced_once(layer, llama.Layer.__call__, *arguments)
    return self.encoder_norm(x)


class DecoderLayer(llama.Layer):
  """A layer of a decoder: with a cross-attention between its two blocks."""

  config: T5GemmaConfig

  def setup(self):
    super().setup()
    self.pre_cross_attention_layer_norm = llama.norm(self.config)
    self.encoder_decoder_attention = llama.Attention(
      self.config, self.layout, base.Layout.TRAINED
    )
    self.post_cross_attention_layer_norm = llama.norm(self.config)

  def cross_keys_values(self, encoded: jax.Array):
    return self.encoder_decoder_attention.keys_values(encoded, None)

  def __call__(self, x, by, bias, past, source):
    """See `llama.Layer`; `source` is a `Memory` for the cross-attention."""
    x, entries = self.attended(x, by, bias, past)
    h = self.pre_cross_attention_layer_norm(x)
    context = self.encoder_decoder_attention(h, None, source)
    x = x + self.post_cross_attention_layer_norm(context)
    return self.fed_forward(x), entries


class Decoder(t5.Decoder):
  """The decoder stack, with the output head of untied models."""

  config: T5GemmaConfig

  def setup(self):
    config = self.config
    self.layers = [DecoderLayer(config, self.layout) for _ in range(config.num_layers)]
    self.decoder_norm = llama.norm(config)
    if self.own_head:
      self.logits_dense = layers.output_head(config, self.layout)

  def at(self, x, cross, cross_mask, positions=None):
    """Teacher forcing: [B, P, E] after the final norm; see `t5.Decoder.at`."""
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    everywhere = jnp.ones(places.shape, bool)
    x, _ = self._applied(x, everywhere, places, places, cross, cross_mask)
    if positions is not None:
      x = jnp.take_along_axis(x, positions[..., None], axis=1)
    return self.decoder_norm(x)

  def step(self, x: jax.Array, cache: cache_lib.KVCache, is_token: jax.Array):
    """See `llama.Decoder.step`."""
    count, slots = x.shape[1], cache.self_keys[0].shape[2]
    places = cache.length[:, None] + jnp.arange(count)[None]
    cross = zip(cache.cross_keys, cache.cross_values, strict=True)
    past = [
      (keys, values, cache.length)
      for keys, values in zip(cache.self_keys, cache.self_values, strict=True)
    ]
    keys = jnp.arange(slots)[None]
    arguments = (is_token, places, keys, cross, cache.cross_mask, past)
    x, new_entries = self._applied(x, *arguments)
    return self.decoder_norm(x), cache.advanced(new_entries, count)

  def _applied(self, x, is_token, queries, keys, cross, cross_mask, past=None):
    """Applies all layers at positions `queries` [B, n] with keys at [B or 1, T]."""
    config = self.config
    by = llama.rotations(config, queries)
    is_token = is_token[..., None]
    visible = (keys[:, None] <= queries[..., None]) & is_token
    bias = llama.biases(config, visible, queries, keys)
    cross_bias = layers.mask_bias(cross_mask[:, None] & is_token)[:, None]
    past, new_entries = past or [None] * config.num_layers, []
    for index, (layer, entries) in enumerate(zip(self.layers, cross, strict=True)):
      window, source = config.window_of(index), llama.Memory(*entries, cross_bias)
      arguments = (x, by[window], bias[window], past[index], source)
      x, entries = layers.traced_once(layer, DecoderLayer.__call__, *arguments)
      new_entries.append(entries)
    return x, new_entries


class T5Gemma(t5.T5):
  """The whole model; see `served.LanguageModel` for its attributes."""

  config: T5GemmaConfig

  def setup(self):
    served.LanguageModel.setup(self)
    self.encoder = Encoder(self.config)
    self.decoder = Decoder(self.config, self._layout, self._has_own_head)

  @property
  def _start_id(self) -> int:
    return self.config.start_id

  def _encode(self, source, mask):
    return self.encoder(source, mask)

  @staticmethod
  def model_fields(config: T5GemmaConfig) -> dict[str, Any]:
    """See `served.LanguageModel.model_fields`."""
    return {
      "pad_id": base.NO_TOKEN,
      "start_id": config.start_id,
      "max_positions": config.max_positions,
    }

  @staticmethod
  def encoder_params(config: T5GemmaConfig, params: base.Params) -> base.Params:
    """See `families.encoder_params`."""
    del config  # the same for every T5Gemma
    return {"encoder": params["encoder"]}
