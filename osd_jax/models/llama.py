"""Llama 1 to 3, Vicuna, Mistral, Qwen2 and Qwen3 as the functions of `base.Model`.

Source: Touvron et al., 2023 (arXiv 2302.13971), and transformers' implementations.
Parameters carry t5x's names, as those of the T5 do.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import embedding, functions, layers, llama_layers, served, t5_layers
from osd_jax.models.shapes import DraftServing, LlamaConfig


class Llama(nn.Module):
  """The whole model.

  Attributes:
    config: the shape.
    serving: reads the copy that `prepare` made for it; None reads what is trained.
    return_states: prefill leaves in the cache what was read, for an attached draft.
  """

  config: LlamaConfig
  serving: DraftServing | None = None
  return_states: bool = False

  def setup(self):
    config, serving = self.config, self.serving
    layout = layers.Layout.TRAINED if serving is None else serving.layout
    self.token_embedder = embedding.Embedding(config)
    draft_head = served.draft_head_of(config, serving)
    self.draft_head = draft_head
    own_head = not config.tied_head and draft_head is None
    self.decoder = llama_layers.Decoder(config, layout, own_head)

  def prefill(self, source, mask, cache_length: int) -> cache_lib.KVCache:
    """See `base.Model.prefill`; `cross_keys` are those of the prompt but its last."""
    config = self.config
    kept, target_states = self.decoder.prefill(self.token_embedder(source), mask)
    empty = functools.partial(
      cache_lib.empty_self_entries,
      config.num_layers,
      (source.shape[0], config.num_kv_heads, cache_length, config.head_dim),
      jnp.dtype(config.dtype),
    )
    return cache_lib.KVCache(
      self_keys=empty(),
      self_values=empty(),
      cross_keys=tuple(keys for keys, _ in kept),
      cross_values=tuple(values for _, values in kept),
      cross_mask=without_last(mask),
      length=jnp.zeros(source.shape[:1], jnp.int32),
      target_states=embedding.as_target_states(target_states)
      if self.return_states
      else None,
    )

  def encode_for_draft(self, source, mask):
    """See `base.Model.encode_for_draft`."""
    x, positions = self.token_embedder(source), llama_layers.prompt_positions(mask)
    depth = self.config.last_state_layer
    return embedding.as_target_states(self.decoder.over(x, mask, positions, depth))

  def decode(self, tokens, cache: cache_lib.KVCache):
    """See `base.Model.decode`."""
    x, cache = self.decoder.step(self.token_embedder(tokens), cache)
    return self._logits(x), cache

  def score(self, source, mask, target, positions=None, tokens=None):
    """See `base.Model.score` and `base.Model.score_at`."""
    inputs = t5_layers.inputs_of(target, last_token(source, mask))
    kept, length = without_last(mask), source.shape[1]
    before = jnp.sum(kept, axis=1, dtype=jnp.int32)[:, None]
    behind = before + jnp.arange(target.shape[1])[None]
    x = self.decoder.over(
      self.token_embedder(jnp.concatenate([source, inputs], axis=1)),
      jnp.concatenate([kept, jnp.ones(inputs.shape, bool)], axis=1),
      jnp.concatenate([llama_layers.prompt_positions(mask), behind], axis=1),
    )[:, length:]
    if positions is not None:
      x = jnp.take_along_axis(x, positions[..., None], axis=1)
    return self._logits(self.decoder.decoder_norm(x), tokens)

  def _logits(self, x, tokens=None):
    dense = None
    if not self.config.tied_head and self.draft_head is None:
      dense = self.decoder.logits_dense
    trained = self.serving is None
    return embedding.logits_of(
      x, self.token_embedder, dense, self.draft_head, trained, tokens
    )


def last_token(source: jax.Array, mask: jax.Array) -> jax.Array:
  """[B] int32; the last token of prompts [B, S], padded wherever."""
  at = source.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
  return jnp.take_along_axis(source, at[:, None], axis=1)[:, 0]


def without_last(mask: jax.Array) -> jax.Array:
  """[B, S] bool; the tokens of prompts but the last one of each."""
  left = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # tokens from here on
  return mask & (left > 1)


_WHOLE = DraftServing()  # leaves nothing out


@functools.cache
def build(
  config: LlamaConfig,
  name: str = "llama",
  serving: DraftServing = _WHOLE,
  return_states: bool = False,
) -> base.Model:
  """The functions of `base.Model` for one configuration; cached, see `t5.build`.

  Args:
    config: the shape.
    name: what error texts call it.
    serving: what its served copy leaves out; for drafts only.
    return_states: prefill leaves in the cache what it has read, for an attached draft.
  """
  return functions.of_module(
    Llama,
    config,
    name,
    serving,
    return_states,
    eos_ids=config.eos_ids,
    pad_id=base.NO_TOKEN,
    start=last_token,
    max_positions=config.max_positions,
  )


def encoder_params(config: LlamaConfig, params: base.Params) -> base.Params:
  """The part of a model's parameters that `read` needs."""
  names = [f"layers_{index}" for index in range(config.last_state_layer)]
  decoder = {name: params["decoder"][name] for name in names}
  return {"token_embedder": params["token_embedder"], "decoder": decoder}


def encode_for_draft(config: LlamaConfig, params: base.Params, source, mask):
  """See `base.Model.encode_for_draft`, from `encoder_params`."""
  return Llama(config).apply(
    {"params": params}, source, mask, method=Llama.encode_for_draft
  )
