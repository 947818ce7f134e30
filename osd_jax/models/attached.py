"""A draft attached to its target: it reads what the target has read of the prompt.

    prompt -> target's encoder, or layers -> target states [B, S, E] -----> |
    tokens -> target's embedding -> inward -> decoder layers -> outward -> target's head

A draft of its own has to learn reading, copying and the vocabulary again. This one
takes all three from the target, frozen, and learns what lies between: a fraction of the
parameters, and of the time of an update. Source: this project; EAGLE (arXiv 2401.15077)
takes embedding and head from the target too.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import families, layers, served, t5_layers
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import AttachedConfig, DraftServing

FROZEN = "target"  # the name of what belongs to the target among the parameters
_WHOLE = DraftServing()  # leaves nothing out


class Attached(nn.Module):
  """What lies between the target's embedding, its states and its head.

  Attributes:
    config: the shape.
    target: shape of the target.
    serving: reads the copy that `prepare` made for it; None reads what is trained.
  """

  config: AttachedConfig
  target: ModelConfig
  serving: DraftServing | None = None

  def setup(self):
    inner, width = self.config.decoder(self.target), self.target.width
    layout = layers.Layout.TRAINED if self.serving is None else self.serving.layout
    dtype = jnp.dtype(self.target.dtype)
    project = functools.partial(layers.Projection, dtype=dtype, layout=layout)
    self.inward = project((width, inner.width), ("embed", "embed"))
    self.decoder = t5_layers.Decoder(inner, layout, own_head=False, memory_width=width)
    # Small at first: the target's head is as large as it has grown.
    self.outward = project((inner.width, width), ("embed", "embed"), init_scale=0.3)
    self.draft_head = served.draft_head_of(self.target, self.serving)

  def prefill(self, target_states, mask, cache_length: int) -> cache_lib.KVCache:
    """See `base.Model.prefill`; of what the target has read, [B, S, E]."""
    inner = self.config.decoder(self.target)
    return t5_layers.empty_cache(inner, self._cross(target_states), mask, cache_length)

  def decode(self, frozen, tokens, cache: cache_lib.KVCache):
    """See `base.Model.decode`."""
    x, cache = self.decoder.step(self._embed(frozen, tokens), cache)
    return self._logits(frozen, self.outward(x)), cache

  def score(self, frozen, target_states, mask, inputs, positions=None, tokens=None):
    """See `base.Model.score` and `base.Model.score_at`; inputs are what is fed."""
    x = self._embed(frozen, inputs)
    x = self.decoder.at(x, self._cross(target_states), mask, positions)
    return self._logits(frozen, self.outward(x), tokens)

  def _cross(self, target_states):
    """Keys and values of every layer from what the target has read."""
    dtype = jnp.dtype(self.target.dtype)
    return self.decoder.cross_keys_values(
      layers.normalized(target_states.astype(dtype))
    )

  def _embed(self, frozen, tokens):
    return self.inward(layers.normalized(frozen["embedding"][tokens]))

  def _logits(self, frozen, x, tokens=None):
    x = x * self.target.head_scale
    if self.draft_head is not None:
      logits = self.draft_head(x)
    else:
      head = frozen["head"] if tokens is None else frozen["head"][tokens]
      trained = self.serving is None
      logits = (layers.kernel_first_matmul if trained else layers.served_matmul)(
        x, head.astype(x.dtype)
      )
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def frozen_of(
  target: ModelConfig, params: base.Params, serving: DraftServing = _WHOLE
) -> base.Params:
  """What an attached draft takes from its target: tables, and the way it reads.

  Args:
    target: shape of the target.
    params: as trained.
    serving: what the draft's served copy leaves out.

  Returns:
    embedding [V, E] and head [V, E] in the compute type, what `read` needs, and the
    head in 8 bits where all of it is served so: swaps find it made.
  """
  dtype, embedder = jnp.dtype(target.dtype), params["token_embedder"]
  embedding = jnp.asarray(embedder["embedding"], dtype)
  head = embedding
  if not target.tied_head:
    head = _transposed(jnp.asarray(params["decoder"]["logits_dense"]["kernel"], dtype))
  encoder = families.encoder_params(target, params)
  frozen = {"embedding": embedding, "head": head, "encoder": encoder}
  if serving.int8 and not serving.shortlist:
    frozen["draft_head"] = served.draft_head(target, serving, head, True, None)
  return frozen


_transposed = jax.jit(jnp.transpose)


@functools.cache
def build(
  config: AttachedConfig,
  target: ModelConfig,
  name: str = "attached",
  serving: DraftServing = _WHOLE,
) -> base.Model:
  """The functions of `base.Model`; parameters hold what is the target's as "target".

  Args:
    config: the shape.
    target: shape of the target.
    name: what error texts call it.
    serving: what its served copy leaves out.
  """
  if serving.shortlist >= target.vocab_size:
    serving = dataclasses.replace(serving, shortlist=0)
  training = Attached(config, target)
  decoding = Attached(config, target, serving)
  of_target = families.build(target, "target of a draft")

  def apply(module, params, *arguments, method) -> Any:
    """Runs a module on what is the draft's own."""
    own = {name: part for name, part in params.items() if name != FROZEN}
    return module.apply({"params": own}, *arguments, method=method)

  def prefill(params, target_states, mask, cache_length):
    arguments = (target_states, mask, cache_length)
    return apply(decoding, params, *arguments, method=Attached.prefill)

  def decode(params, tokens, cache):
    arguments = (params[FROZEN], tokens, cache)
    return apply(decoding, params, *arguments, method=Attached.decode)

  def encode_for_draft(params, source, mask):
    return families.encode_for_draft(target, params[FROZEN]["encoder"], source, mask)

  def score(
    params, source, mask, text, positions=None, tokens=None, target_states=None
  ):
    if target_states is None:
      target_states = encode_for_draft(params, source, mask)
    inputs = t5_layers.inputs_of(text, of_target.starts(source))
    arguments = (params[FROZEN], target_states, mask, inputs, positions, tokens)
    return apply(training, params, *arguments, method=Attached.score)

  return base.Model(
    name=name,
    vocab_size=target.vocab_size,
    init=lambda key: nn.unbox(_init_boxed(training, key)),
    prefill=prefill,
    decode=decode,
    score=score,
    prepare=functools.partial(_prepare, target, serving),
    logical_axes=functools.partial(_logical_axes, training),
    shortlist=serving.shortlist,
    score_at=score,
    frozen=FROZEN,
    state_width=target.width,
    encode_for_draft=encode_for_draft,
    head_dim=config.decoder(target).head_dim,
    eos_ids=of_target.eos_ids,
    pad_id=of_target.pad_id,
    start=of_target.start,
    max_positions=of_target.max_positions,
  )


def _init_boxed(module: Attached, key: jax.Array):
  target = module.target
  table = jnp.zeros((2, target.width), jnp.dtype(target.dtype))
  token, target_states = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, target.width))
  frozen = {"embedding": table, "head": table}
  arguments = (frozen, target_states, token == 0, token)
  return module.init(key, *arguments, method=Attached.score)["params"]


def _logical_axes(module: Attached):
  boxed = jax.eval_shape(functools.partial(_init_boxed, module), jax.random.key(0))
  return nn.get_partition_spec(boxed)


def _prepare(
  target: ModelConfig,
  serving: DraftServing,
  params: base.Params,
  shortlist: jax.Array | None = None,
) -> base.Params:
  """The served copy; the target's tables are shared, a short head is made."""
  dtype, frozen = jnp.dtype(target.dtype), params[FROZEN]
  own = {name: part for name, part in params.items() if name != FROZEN}
  own = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), own)
  copy = served.for_steps(own, serving)
  tables = {"embedding": frozen["embedding"]}
  if "draft_head" in frozen:
    copy["draft_head"] = frozen["draft_head"]
  elif served.has_draft_head(target, serving):
    copy["draft_head"] = served.draft_head(
      target, serving, frozen["head"], True, shortlist
    )
  else:
    tables["head"] = frozen["head"]
  return {**copy, FROZEN: tables}
