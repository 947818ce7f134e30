"""Optimizers by name, for distillation and supervised training."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from osd_jax import base

# Functions from a learning-rate schedule to an optax transformation. Weights do not
# decay.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "adafactor": optax.adafactor,
  "adamw": functools.partial(optax.adamw, weight_decay=0.0),
  "lion": functools.partial(optax.lion, weight_decay=0.0),
  "sgd": optax.sgd,
}

# Functions from (peak rate, steps until the rate is 0) to an optax schedule.
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
  "constant": lambda peak, steps: optax.constant_schedule(peak),
  "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
  "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
  # Constant for the first half, then linear to 0.
  "trapezoid": lambda peak, steps: (
    lambda step: jnp.minimum(peak, optax.linear_schedule(2 * peak, 0.0, steps)(step))
  ),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(base.Config):
  """An optimizer and its learning-rate schedule.

  Attributes:
    name: a key of `OPTIMIZERS`.
    learning_rate: peak rate.
    clip_norm: largest global gradient norm; None does not clip.
    warmup_steps: steps over which the rate rises linearly to its peak.
    schedule: a key of `SCHEDULES`.
    total_steps: steps until the schedule ends; may be None for "constant" only.
    embedding_multiplier: factor on the updates of every parameter whose path contains
      "embedding" (token embeddings, and relative biases as `rel_embedding`).
    query_multiplier: factor on the updates of every parameter whose path contains
      "query". T5 does not scale attention; its query kernels are initialized
      head_dim ** -.5 times smaller instead. Optimizers with a fixed step size, like
      AdamW, then change them too fast; head_dim ** -.5 here corrects that and allows
      larger rates.
  """

  name: Annotated[str, base.OneOf(*OPTIMIZERS)] = "adamw"
  learning_rate: base.Positive = 8e-4
  clip_norm: base.Positive | None = 1.0
  warmup_steps: base.CountOrZero = 20
  schedule: Annotated[str, base.OneOf(*SCHEDULES)] = "constant"
  total_steps: int | None = None
  embedding_multiplier: base.Positive = 1.0
  query_multiplier: base.Positive = 0.18

  def checks(self):
    end, warmup = self.total_steps, self.warmup_steps
    return {
      "total_steps": (
        self.schedule == "constant" if end is None else end > warmup,
        f"an integer above warmup_steps ({warmup}), since the schedule is"
        f" {self.schedule!r}",
      )
    }


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
  """Returns the learning rate as a function of the step, counted from 0.

  The last step of the warm-up has the peak rate.
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  steps = (config.total_steps or warmup + 1) - warmup
  after = SCHEDULES[config.schedule](peak, steps)
  if not warmup:
    return after
  # Start at peak / warmup instead of 0: a step at rate 0 would be wasted.
  rising = optax.linear_schedule(peak / warmup, peak, warmup - 1)
  return optax.join_schedules([rising, after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Chains clipping, the optimizer and the multipliers.

  The transformation's `update` needs the parameters as third argument.
  """
  parts = [OPTIMIZERS[config.name](learning_rate(config))]
  if config.clip_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
  # Scale last: Adam divides by the gradient's size, so scaling gradients does nothing.
  multipliers = {
    "embedding": config.embedding_multiplier,
    "query": config.query_multiplier,
  }
  for part, multiplier in multipliers.items():
    if multiplier != 1.0:
      contains = lambda path, _, part=part: part in jax.tree_util.keystr(path)
      mask = functools.partial(jax.tree_util.tree_map_with_path, contains)
      parts.append(optax.masked(optax.scale(multiplier), mask))
  return optax.chain(*parts)
