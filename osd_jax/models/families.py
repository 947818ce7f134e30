"""The families of models: who runs which shape."""

from typing import Any

import jax

from osd_jax import base
from osd_jax.models import llama, t5
from osd_jax.models.shapes import DraftServing, LlamaConfig, T5Config

ModelConfig = T5Config | LlamaConfig

_WHOLE = DraftServing()


def build(
  config: ModelConfig,
  name: str,
  serving: DraftServing = _WHOLE,
  return_states: bool = False,
) -> base.Model:
  """The functions of `base.Model` for one configuration; see `t5.build`.

  >>> build(LlamaConfig(num_layers=2), "a Llama").eos_ids
  (2,)

  Args:
    config: the shape.
    name: what error texts call it.
    serving: what its served copy leaves out; for drafts only.
    return_states: prefill leaves in the cache what it has read, for an attached draft.
  """
  return _family(config).build(config, name, serving, return_states)


def encoder_params(config: ModelConfig, params: base.Params) -> base.Params:
  """The part of a target's parameters that `read` needs."""
  return _family(config).encoder_params(config, params)


def encode_for_draft(
  config: ModelConfig, params: base.Params, source, mask
) -> jax.Array:
  """What a target reads of prompts [B, S] for an attached draft, [B, S, E] bfloat16."""
  return _family(config).encode_for_draft(config, params, source, mask)


def _family(config: ModelConfig) -> Any:
  return t5 if isinstance(config, T5Config) else llama
