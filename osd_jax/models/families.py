"""The families of models that this package implements, as `base.Model`s."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from osd_jax import base, native
from osd_jax.models import llama, served, t5, t5gemma
from osd_jax.models.shapes import (
  EXACT_SERVING,
  DraftServing,
  LlamaConfig,
  T5Config,
  T5GemmaConfig,
)

ModelConfig = T5Config | LlamaConfig | T5GemmaConfig

_MODULES: dict[type, Any] = {
  T5Config: t5.T5,
  LlamaConfig: llama.Llama,
  T5GemmaConfig: t5gemma.T5Gemma,
}


@functools.cache
def build(
  config: ModelConfig,
  name: str = "model",
  serving: DraftServing = EXACT_SERVING,
  states: base.States = "",
  kept: base.Layout = base.Layout.TRAINED,
) -> base.Model:
  """The functions of `base.Model` for one configuration.

  The result is cached. Models are static arguments of jitted functions and compared by
  identity, so that equal configurations must give the same object.

  >>> build(LlamaConfig(num_layers=2)).eos_ids
  (2,)

  Args:
    config: shape of the model; its class decides the family.
    name: name for error messages and logs.
    serving: approximations of the served copy, for drafts only.
    states: what the cache holds for an attached draft, as in `AttachedConfig.reads` or
      `EagleConfig.state_layers`; "" for none.
    kept: layout of the decoder's kernels in the parameters. A target, which is never
      trained, keeps them as they are served, so that `prepare` copies nothing.
  """
  if serving.shortlist >= config.vocab_size:
    serving = dataclasses.replace(serving, shortlist=0)
  kind = _MODULES[type(config)]
  # Two modules, because the served copy stores its kernels in another layout.
  training = kind(config, states=states, kept=kept)
  decoding = kind(config, serving, states)

  def apply(module, params, *args, method):
    return module.apply({"params": params}, *args, method=method)

  token = np.zeros((1, 1), np.int32)

  def forced(params, *args, method):
    with native.off("products", "attention"):  # they have no gradient
      return apply(training, params, *args, method=method)

  score = functools.partial(forced, method="score")

  return base.Model(
    name=name,
    vocab_size=config.vocab_size,
    prefill=functools.partial(apply, decoding, method="prefill"),
    decode=functools.partial(apply, decoding, method="decode"),
    extend=functools.partial(apply, decoding, method="extend")
    if kind.is_decoder_only
    else None,
    score=score,
    prepare=functools.partial(served.prepare, config, serving, kept=kept),
    shortlist=serving.shortlist,
    score_at=score,
    score_with_states=functools.partial(forced, method="score_with_states"),
    head_dim=config.head_dim,
    eos_ids=config.eos_ids,
    dtype=config.dtype,
    **served.initializers(training, token, token == 0, token),
    **kind.model_fields(config),
  )


def encoder_params(
  config: ModelConfig, params: base.Params, states: base.States = ""
) -> base.Params:
  """The part of a target's parameters that `encode_for_draft` needs."""
  if isinstance(states, tuple):
    config = dataclasses.replace(config, state_layer=max(states))
  return _MODULES[type(config)].encoder_params(config, params)


def encode_for_draft(
  config: ModelConfig,
  params: base.Params,
  source: jax.Array,
  mask: jax.Array,
  kept: base.Layout = base.Layout.TRAINED,
  states: base.States = "",
) -> jax.Array:
  """Target states [B, S, E] bfloat16 of prompts, from `encoder_params`."""
  module = _MODULES[type(config)](config, states=states, kept=kept)
  return module.apply({"params": params}, source, mask, method="encode_for_draft")
