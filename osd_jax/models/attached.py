"""A draft attached to its target: it takes the target's hidden states.

    prompt -> target's encoder or layers -> target states [B, S, E] ------> |
    tokens -> target's embedding -> inward -> decoder layers -> outward -> target's head

An independent draft has to learn reading, copying and the vocabulary again. An attached
draft takes all three from the target, frozen, and trains only what lies between. That
is a fraction of the parameters and of the time of an update.

With `AttachedConfig.reads = "tokens"` the draft also reads the last hidden state before
each token: the target's, s, up to the token that the target emitted last, and its own
outputs, e, from there on.

    token          t3   t4   t5   d6   d7        t5 was emitted last
    state before   s2   s3   s4   e5   e6
    output         e3   e4   e5   e6   e7        the head maps e5 to d6

It is trained on its first `STEPS` steps after every position. Sources: this project;
EAGLE (arXiv 2401.15077), which also takes embedding and head from the target; and
EAGLE-3 (arXiv 2503.01840) for training on a draft's own outputs.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import eagle, families, layers, served, t5, weights
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import (
  EXACT_SERVING,
  AttachedConfig,
  DraftServing,
  EagleConfig,
)

FROZEN = "target"  # key of the target's part in the draft's parameters
STEPS = 3  # of a draft that are trained, if it reads the states of tokens


class Attached(nn.Module):
  """The draft's own layers, between the target's embedding, states and head.

  With `serving` it runs the copy that `prepare` made, else the trained parameters.
  """

  config: AttachedConfig
  target: ModelConfig
  serving: DraftServing | None = None

  def setup(self):
    inner, width = self.config.decoder(self.target), self.target.width
    layout = base.Layout.TRAINED if self.serving is None else self.serving.layout
    dtype = jnp.dtype(self.target.dtype)
    project = functools.partial(layers.Projection, dtype=dtype, layout=layout)
    self.inward = project((width, inner.width), ("embed", "embed"))
    if self.config.reads == "tokens":
      self.state_inward = project((width, inner.width), ("embed", "embed"))
    self.decoder = t5.Decoder(inner, layout, own_head=False, memory_width=width)
    # Small at first, because the head is a trained one with large weights.
    self.outward = project((inner.width, width), ("embed", "embed"), init_scale=0.3)
    self.draft_head = served.draft_head_of(self.target, self.serving)

  def prefill(
    self, frozen, target_states, mask, cache_length: int
  ) -> cache_lib.KVCache:
    """See `base.Model.prefill`; takes target states [B, S, E] instead of tokens."""
    del frozen
    cross = self._cross(target_states)
    cache = cache_lib.KVCache.prefilled(cross, mask, cache_length)
    if self.config.reads == "tokens":
      rows, _, width = target_states.shape
      newest = jnp.zeros((rows, 1, width), jnp.dtype(self.target.dtype))
      cache = cache.replace(token_states=newest)
    return cache

  def decode(self, frozen, tokens, cache: cache_lib.KVCache, states=None):
    """See `base.Model.decode` and `base.Model.reads_tokens`."""
    states = cache.token_states if states is None else states
    is_token = tokens != base.NO_TOKEN
    x = jnp.where(is_token[..., None], self._embed(frozen, tokens, states), 0)
    x, cache = self.decoder.step(x, cache, is_token)
    x = self.outward(x)
    if self.config.reads == "tokens":
      cache = cache.replace(token_states=x)
    return self._logits(frozen, x), cache

  def score_steps(
    self,
    frozen,
    target_states,
    mask,
    inputs,
    positions=None,
    tokens=None,
    token_states=None,
    steps: int = 1,
  ):
    """See `base.Model.score_steps`; `inputs` are decoder inputs, not targets."""
    cross, states = self._cross(target_states), token_states
    logits, entries = [], []
    for step in range(steps):
      # The state at an input says which token comes next, so it precedes that token.
      before = None
      if states is not None:
        before = jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
      x = self._embed(frozen, inputs, before)
      is_last = step == steps - 1
      x, own = self.decoder.after(
        x, cross, mask, entries, positions if is_last else None
      )
      entries.append(own)
      states = self.outward(x)
      outputs = states
      if positions is not None and not is_last:
        outputs = jnp.take_along_axis(states, positions[..., None], axis=1)
      logits.append(self._logits(frozen, outputs, tokens))
    return jnp.stack(logits)

  def _cross(self, target_states):
    states = target_states.astype(jnp.dtype(self.target.dtype))
    return self.decoder.cross_keys_values(layers.normalized(states))

  def _embed(self, frozen, tokens, states):
    # Normalized, since the scale of embeddings differs by orders of magnitude between
    # targets, and the initial kernel of `inward` expects a scale of 1.
    dtype = jnp.dtype(self.target.dtype)
    embedded = layers.rows_of(frozen["embedding"], tokens, dtype)
    x = self.inward(layers.normalized(embedded))
    if self.config.reads == "tokens":
      x = x + self.state_inward(layers.normalized(states.astype(dtype)))
    return x

  def _logits(self, frozen, x, tokens=None):
    x = x * self.target.head_scale
    if self.draft_head is not None:
      return self.draft_head(x)
    head = frozen["head"]
    head = head if tokens is None else layers.rows_of(head, tokens, x.dtype)
    is_trained = self.serving is None  # the native product has no gradient
    product = layers.kernel_first_matmul if is_trained else layers.served_matmul
    return served.head_logits(self.target, product(x, head))


def frozen_of(
  target: ModelConfig,
  params: base.Params,
  serving: DraftServing = EXACT_SERVING,
  kept: base.Layout = base.Layout.TRAINED,
) -> base.Params:
  """The target's part in the parameters of an attached draft, from the target's params.

  Returns:
    "embedding" [V, E] and "head" [V, E] as the target stores them, and "encoder" for
    `families.encode_for_draft`. If the draft is served with the whole head in 8 bits,
    also "draft_head", so that swaps need not quantize it again.
  """
  dtype, embedder = jnp.dtype(target.dtype), params["token_embedder"]
  embedding = layers.stored(embedder["embedding"], dtype)
  head = embedding
  if not target.tied_head:
    head = layers.stored(params["decoder"]["logits_dense"]["kernel"], dtype)
    head = _transposed(head) if kept is base.Layout.TRAINED else head
  encoder = families.encoder_params(target, params)
  frozen = {"embedding": embedding, "head": head, "encoder": encoder}
  if serving.int8 and not serving.shortlist:
    frozen["draft_head"] = served.draft_head(target, serving, head, True, None)
  return frozen


_transposed = jax.jit(jnp.transpose)


# Shapes of attached drafts, and the modules that run them.
_MODULES: dict[type, Any] = {AttachedConfig: Attached, EagleConfig: eagle.Eagle}


@functools.cache
def build(
  config: AttachedConfig | EagleConfig,
  target: ModelConfig,
  name: str = "attached",
  serving: DraftServing = EXACT_SERVING,
  kept: base.Layout = base.Layout.TRAINED,
) -> base.Model:
  """The functions of `base.Model`; `params["target"]` comes from `frozen_of`.

  The result is cached, see `families.build`, also for `kept`, the target's layout.
  """
  if serving.shortlist >= target.vocab_size:
    serving = dataclasses.replace(serving, shortlist=0)
  module, is_eagle = _MODULES[type(config)], isinstance(config, EagleConfig)
  width = target.width * (len(config.state_layers) if is_eagle else 1)
  reads_tokens = config.reads != "prompt"
  decoding = module(config, target, serving)
  target_model = families.build(target, "target of a draft")
  encode = functools.partial(_encode_for_draft, target, kept, config.reads)
  score_steps = _scorer(config, target, encode, STEPS)
  score_once = _scorer(config, target, encode, 1)

  def prefill(params, prompt, mask, cache_length):
    arguments = (params[FROZEN], prompt, mask, cache_length)
    return _apply(decoding, params, *arguments, method=module.prefill)

  def decode(params, tokens, cache, states=None):
    arguments = (params[FROZEN], tokens, cache, states)
    return _apply(decoding, params, *arguments, method=module.decode)

  def score(*arguments, **states):
    return score_once(*arguments, **states)[0]

  inner = config.decoder(target)
  # The shapes of the frozen tables do not influence the parameters of the draft.
  table = np.zeros((2, target.width), jnp.dtype(target.dtype))
  token = np.zeros((1, 1), np.int32)
  states = np.zeros((1, 1, width), np.float32)
  tables = {"embedding": table, "head": table}
  arguments = (tables, states, token == 0, token, None, None, states)
  if isinstance(config, EagleConfig):
    arguments = eagle.init_arguments(config, target)
  return base.Model(
    name=name,
    vocab_size=target.vocab_size,
    prefill=prefill,
    decode=decode,
    score=score,
    prepare=functools.partial(_prepare, target, serving),
    **served.initializers(module(config, target), *arguments, method="score_steps"),
    shortlist=serving.shortlist,
    score_at=score,
    frozen=FROZEN,
    state_width=width,
    reads_prompt=is_eagle,
    encode_for_draft=encode,
    reads_tokens=reads_tokens,
    score_steps=score_steps if reads_tokens else None,
    head_dim=inner.head_dim,
    eos_ids=target_model.eos_ids,
    pad_id=target_model.pad_id,
    start=target_model.start,
    start_id=target_model.start_id,
    max_positions=target_model.max_positions,
  )


def _apply(module: nn.Module, params: base.Params, *arguments, method) -> Any:
  trained = {name: part for name, part in params.items() if name != FROZEN}
  return module.apply({"params": trained}, *arguments, method=method)


def _encode_for_draft(target, kept, states, params, source, mask):
  encoder = params[FROZEN]["encoder"]
  return families.encode_for_draft(target, encoder, source, mask, kept, states)


def _scorer(config, target: ModelConfig, encode, steps: int):
  """Returns `base.Model.score_steps` for the first `steps` steps."""
  module = _MODULES[type(config)]
  training = module(config, target)
  target_model = families.build(target, "target of a draft")
  method = functools.partial(module.score_steps, steps=steps)

  def score_steps(params, source, mask, text, positions=None, tokens=None, **states):
    target_states, token_states = map(states.get, ("target_states", "token_states"))
    if target_states is None:
      target_states = encode(params, source, mask)
    if config.reads != "prompt" and token_states is None:
      raise base.InputError(
        "score: token_states is missing; a draft that reads the states of tokens needs"
        " those that the target recorded."
      )
    inputs = layers.inputs_of(text, target_model.starts(source))
    reads_prompt = isinstance(config, EagleConfig)
    prompt = (source, target_states) if reads_prompt else target_states
    arguments = (params[FROZEN], prompt, mask, inputs, positions, tokens)
    return _apply(training, params, *arguments, token_states, method=method)

  return score_steps


def _prepare(
  target: ModelConfig,
  serving: DraftServing,
  params: base.Params,
  shortlist: jax.Array | None = None,
) -> base.Params:
  """The served copy; it shares the target's embedding and full head."""
  dtype, frozen = jnp.dtype(target.dtype), params[FROZEN]
  trained = {name: part for name, part in params.items() if name != FROZEN}
  trained = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), trained)
  copy = served.for_steps(trained, serving.layout)
  # Without the encoder: when serving, the target's own prefill returns the states.
  tables = {name: frozen[name] for name in ("embedding", "ids") if name in frozen}
  if "head" not in frozen:  # an EAGLE-3 head has its own
    return {**copy, FROZEN: tables}
  if "draft_head" in frozen:
    # `frozen_of` has quantized it already, since the target's head never changes.
    copy["draft_head"] = frozen["draft_head"]
  elif served.has_draft_head(target, serving):
    head = frozen["head"]
    copy["draft_head"] = served.draft_head(target, serving, head, True, shortlist)
  else:
    tables["head"] = frozen["head"]
  return {**copy, FROZEN: tables}


def load(
  path: str | Path, target: weights.Identity, sibling: bool = False
) -> weights.AttachedWeights:
  """Reads the file of an attached draft; see `weights.load`.

  A `sibling` may be attached to another target of the same sizes, such as the one that
  this target was quantized or fine-tuned from.

  Raises:
    InputError: see `weights.load`; or the draft is attached to another target.
  """
  tensors, header, config = weights.opened(Path(path), weights.ATTACHED)
  if header.get("target") == target.with_first_end:
    header = {**header, "target": target.fingerprint}
  own_target = header.get("target", "")
  # The shapes may fit another target, but its states mean something else: the draft
  # would run, and nearly all of its tokens would be rejected.
  is_published = isinstance(config, EagleConfig) and not own_target
  if own_target != target.fingerprint and not is_published:
    fact = (
      f"{path} is attached to the target {header.get('target_name') or 'unknown'}"
      f" ({own_target[:12]}...), received {target.name} ({target.fingerprint[:12]}...)."
    )
    if not sibling:
      raise base.InputError(
        f"{fact} An attached draft works with its own target only. Name that target, or"
        " start a new draft with draft = 'attached'; if one target is a quantized or"
        " fine-tuned copy of the other, set PairConfig.sibling_draft = True (as a flag,"
        " --gin.PairConfig.sibling_draft=True)."
      )
    sizes = header.get("target_sizes") or target.sizes
    if sizes != target.sizes:
      raise base.InputError(
        f"{fact} The first is a {sizes}, the second a {target.sizes}, so neither is a"
        " copy of the other. Name the draft's target, or start a new draft with draft ="
        " 'attached'."
      )
  model = build(config, target.config)
  expected = tensors_lib.shapes(jax.eval_shape(model.init, jax.random.key(0)))
  return _read(path, tensors, header, config, expected)


def read(path: str | Path) -> weights.AttachedWeights:
  """Reads the file of an attached draft for any target; see `weights.load`."""
  tensors, header, config = weights.opened(Path(path), weights.ATTACHED)
  return _read(path, tensors, header, config)


def _read(path, tensors, header, config, expected=None) -> weights.AttachedWeights:
  fields = ("target", "target_name", "notes", "target_sizes")
  texts = {name: header.get(name, "") for name in fields}
  own, tensors = weights.own_parts(tensors)
  params = weights.read_params(tensors, expected or tensors.shapes, path)
  return weights.AttachedWeights(config, params, own=own, **texts)
