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
    states, _ = llama.through(self.layers, self.config, x, by, bias)
    return self.encoder_norm(states[-1])


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

  def __call__(self, x, by, bias, past, source, slots=None):
    """See `llama.Layer`; `source` is a `Memory` for the cross-attention."""
    x, entries = self.attended(x, by, bias, past, slots=slots)
    h = self.pre_cross_attention_layer_norm(x)
    attention = self.encoder_decoder_attention
    context = attention(attention.queries(h, None), source)
    x = x + self.post_cross_attention_layer_norm(context)
    return self.fed_forward(x), entries


class Decoder(llama.Decoder):
  """The decoder stack, with the output head of untied models."""

  config: T5GemmaConfig
  layer_type = DecoderLayer
  cross_keys_values = t5.Decoder.cross_keys_values

  def at(self, x, cross, cross_mask, positions=None):
    """Teacher forcing: [B, P, E] after the final norm; see `t5.Decoder.at`."""
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    everywhere = jnp.ones(places.shape, bool)
    _, bias = self.prompt_bias(places, cross_mask, everywhere)
    sources = [llama.Memory(*entries, bias[0]) for entries in cross]
    states, _ = self.over(x, everywhere, places, sources=sources)
    x = states[-1]
    if positions is not None:
      x = jnp.take_along_axis(x, positions[..., None], axis=1)
    return self.decoder_norm(x)

  def step(self, x: jax.Array, cache: cache_lib.KVCache, is_token: jax.Array):
    """See `llama.Decoder`; the keys of the source are apart."""
    slot = self._slots(x, cache)
    own = self._own_bias(slot, cache.slots, is_token)
    at, bias = self.prompt_bias(slot, cache.cross_mask, is_token)
    sources = [
      llama.Memory(*entries, bias[0])
      for entries in zip(cache.cross_keys, cache.cross_values)
    ]
    return self._advanced(x, at, own, cache, sources=sources)

  def prompt_bias(self, slot: jax.Array, mask: jax.Array, is_token: jax.Array):
    """See `llama.Decoder`; positions start after the prompt, which has no windows."""
    bias = layers.mask_bias(mask[:, None] & is_token[..., None])[:, None]
    return slot, dict.fromkeys((0, *self.config.windows), bias)


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
