"""Floating-point operations of serving and of learning, for those who count them so.

An estimate: XLA counts teacher-forced passes before it optimises them. Tokens count as
if they were fed that way, at the middle of an answer; what pads a call counts too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.distillation import update
from osd_jax.engine.server import Server


@dataclasses.dataclass(frozen=True)
class Flops:
  """Floating-point operations.

  Attributes:
    request: of a prefill, by target and draft.
    target_token: of a token that the target is fed.
    draft_token: of a token that the draft is fed.
    slice: of a slice of an update, all its rows; 0 where nothing learns.
  """

  request: float
  target_token: float
  draft_token: float
  slice: float

  def served(self, requests: int, rounds: float, drafted: float) -> float:
    """Of speculative serving.

    Args:
      requests: that were served.
      rounds: verifications of all of them.
      drafted: tokens drafted for all of them.
    """
    # A round's target is fed what was drafted and one token more.
    fed = self.target_token * (drafted + rounds) + self.draft_token * drafted
    return self.request * requests + fed


def count(server: Server, source: np.ndarray, learn: bool) -> Flops | None:
  """Counts; nothing is compiled or run.

  Args:
    server: with a draft.
    source: [1, S] int32.
    learn: whether a slice is counted too.

  Returns:
    None where XLA does not count on this platform.
  """
  pair, length = server.pair, server.engine.config.target_length
  assert pair.draft is not None
  target = _of_model(pair.target, pair.target_params, source, length)
  draft = _of_model(pair.draft, pair.draft_params, source, length)
  of_slice = _of_slice(server) if learn else 0.0
  if target is None or draft is None or of_slice is None:
    return None
  return Flops(target[0] + draft[0], target[1], draft[1], of_slice)


def _of_model(
  model: base.Model, params: base.Params, source: np.ndarray, length: int
) -> tuple[float, float] | None:
  """Operations of a prefill, and of a token behind it."""
  prompt = jnp.asarray(source)
  mask = model.mask(prompt)
  # A draft attached to the target reads what that has read: no work of its own.
  target_states = jnp.zeros((*source.shape, model.state_width), jnp.bfloat16)
  read = {"target_states": target_states} if model.state_width else {}

  def of(tokens):
    target = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    score = lambda params, target: model.score(params, prompt, mask, target, **read)
    return _counted(score, params, target)

  one, many = of(1), of(length + 1)
  if one is None or many is None:
    return None
  token = (many - one) / length
  return one - token, token


def _of_slice(server: Server) -> float | None:
  learner = server.learner
  draft, config = server.pair.draft, learner.update_config

  def step(state, batch, frozen):
    return update.slice_step(draft, config, state, batch, frozen)

  return _counted(step, *learner.slice_inputs())


def _counted(function: Any, *arguments: Any) -> float | None:
  analysis = jax.jit(function).lower(*arguments).cost_analysis()
  return float(analysis["flops"]) if analysis and "flops" in analysis else None
