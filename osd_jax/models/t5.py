"""T5 1.0, T5 1.1 and Flan-T5 as the pure functions of `base.Model`.

Source: Raffel et al., 2020 (arXiv 1910.10683) and t5x's `minimal` examples,
whose parameter tree and logical axis names are kept so that checkpoints map 1:1.
"""

import functools

import flax.linen as nn

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import embedding, functions, layers, served, t5_layers
from osd_jax.models.shapes import DraftServing, T5Config

__all__ = ["T5", "DraftServing", "T5Config", "build"]


class T5(nn.Module):
  """The whole model.

  Attributes:
    config: the shape.
    serving: reads the copy that `prepare` made for it; None reads what is trained.
    return_states: prefill leaves in the cache what was read, for an attached draft.
  """

  config: T5Config
  serving: DraftServing | None = None
  return_states: bool = False

  def setup(self):
    config, serving = self.config, self.serving
    layout = layers.Layout.TRAINED if serving is None else serving.layout
    self.token_embedder = embedding.Embedding(config)
    self.encoder = t5_layers.Encoder(config)
    draft_head = served.draft_head_of(config, serving)
    self.draft_head = draft_head
    own_head = not config.tied_head and draft_head is None
    self.decoder = t5_layers.Decoder(config, layout, own_head)

  def prefill(self, source, mask, cache_length: int) -> cache_lib.KVCache:
    """See `base.Model.prefill`."""
    encoded = self._encode(source, mask)
    cross = self.decoder.cross_keys_values(encoded)
    cache = t5_layers.empty_cache(self.config, cross, mask, cache_length)
    return (
      cache.replace(target_states=embedding.as_target_states(encoded))
      if self.return_states
      else cache
    )

  def encode_for_draft(self, source, mask):
    """See `base.Model.encode_for_draft`."""
    return embedding.as_target_states(self._encode(source, mask))

  def decode(self, tokens, cache: cache_lib.KVCache):
    """See `base.Model.decode`."""
    x, cache = self.decoder.step(self.token_embedder(tokens), cache)
    return self._logits(x), cache

  def score(self, source, mask, target, positions=None, tokens=None):
    """See `base.Model.score` and `base.Model.score_at`."""
    cross = self.decoder.cross_keys_values(self._encode(source, mask))
    x = self.token_embedder(t5_layers.inputs_of(target))
    return self._logits(self.decoder.at(x, cross, mask, positions), tokens)

  def _encode(self, source, mask):
    return self.encoder(self.token_embedder(source), mask)

  def _logits(self, x, tokens=None):
    x = x * self.config.head_scale
    dense = None
    if not self.config.tied_head and self.draft_head is None:
      dense = self.decoder.logits_dense
    trained = self.serving is None
    return embedding.logits_of(
      x, self.token_embedder, dense, self.draft_head, trained, tokens
    )


_WHOLE = DraftServing()  # leaves nothing out


@functools.cache
def build(
  config: T5Config,
  name: str = "t5",
  serving: DraftServing = _WHOLE,
  return_states: bool = False,
) -> base.Model:
  """The functions of `base.Model` for one configuration.

  Cached, so that the same configuration gives the same (static) Model and
  nothing is compiled twice.

  Args:
    config: the shape.
    name: what error texts call it.
    serving: what its served copy leaves out; for drafts only.
    return_states: prefill leaves in the cache what it has read, for an attached draft.
  """
  return functions.of_module(T5, config, name, serving, return_states)


def encoder_params(config: T5Config, params: base.Params) -> base.Params:
  """The part of a model's parameters that `read` needs."""
  del config
  return {name: params[name] for name in ("token_embedder", "encoder")}


def encode_for_draft(config: T5Config, params: base.Params, source, mask):
  """See `base.Model.encode_for_draft`, from `encoder_params`."""
  return T5(config).apply({"params": params}, source, mask, method=T5.encode_for_draft)
