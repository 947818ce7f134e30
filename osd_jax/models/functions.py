"""A linen module of a whole model as the pure functions of `base.Model`."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.models import served
from osd_jax.models.shapes import DraftServing, LlamaConfig, T5Config


def of_module(
  kind: type[nn.Module],
  config: T5Config | LlamaConfig,
  name: str,
  serving: DraftServing,
  return_states: bool,
  **own: Any,
) -> base.Model:
  """The functions of `base.Model` for one configuration.

  Args:
    kind: `kind(config, serving, return_states)` is the module, with methods prefill,
      decode and score; without serving it reads what is trained.
    config: the shape.
    name: what error texts call it.
    serving: what its served copy leaves out; for drafts only.
    return_states: prefill leaves in the cache what it has read, for an attached draft.
    **own: further fields of the `base.Model`.
  """
  if serving.shortlist >= config.vocab_size:
    serving = dataclasses.replace(serving, shortlist=0)
  training: Any = kind(config)  # pyright: ignore[reportCallIssue]
  decoding: Any = kind(config, serving, return_states)  # pyright: ignore[reportCallIssue]

  def apply(module, params, *args, method):
    return module.apply({"params": params}, *args, method=method)

  def init_boxed(key):
    token = jnp.zeros((1, 1), jnp.int32)
    arguments = (token, token == 0, token)
    return training.init(key, *arguments, method="score")["params"]

  def logical_axes():
    return nn.get_partition_spec(jax.eval_shape(init_boxed, jax.random.key(0)))

  return base.Model(
    name=name,
    vocab_size=config.vocab_size,
    init=lambda key: nn.unbox(init_boxed(key)),
    prefill=functools.partial(apply, decoding, method="prefill"),
    decode=functools.partial(apply, decoding, method="decode"),
    score=functools.partial(apply, training, method="score"),
    prepare=functools.partial(served.prepare, config, serving),
    logical_axes=logical_axes,
    shortlist=serving.shortlist,
    score_at=functools.partial(apply, training, method="score"),
    head_dim=config.head_dim,
    **own,
  )
