"""Optimisers by name, for distillation and supervised training."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from osd_jax import base

# Functions from (learning-rate schedule, weight decay) to an optax transformation.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "adafactor": lambda rate, decay: optax.adafactor(
    rate, weight_decay_rate=decay or None
  ),
  "adamw": lambda rate, decay: optax.adamw(rate, weight_decay=decay),
  "lion": lambda rate, decay: optax.lion(rate, weight_decay=decay),
  "sgd": lambda rate, decay: optax.chain(
    optax.add_decayed_weights(decay), optax.sgd(rate)
  ),
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
class OptimizerConfig:
  """An optimiser and its learning-rate schedule.

  Attributes:
    name: a key of `OPTIMIZERS`.
    learning_rate: peak rate.
    weight_decay: decoupled, per step and multiplied by the rate (adafactor: per step).
    clip_norm: largest global gradient norm; None does not clip.
    warmup_steps: steps over which the rate rises linearly to its peak.
    schedule: a key of `SCHEDULES`.
    total_steps: steps until the schedule ends; may be None for "constant" only.
    embedding_multiplier: factor on the updates of every parameter whose path contains
      "embedding" (token embeddings, and relative biases as `rel_embedding`).
    query_multiplier: factor on the updates of every parameter whose path contains
      "query". T5 does not scale attention; its query kernels are initialised
      head_dim ** -.5 times smaller instead. Optimisers with a fixed step size, like
      AdamW, then change them too fast; head_dim ** -.5 here corrects that and allows
      larger rates.
  """

  name: str = "adamw"
  learning_rate: float = 1e-3
  weight_decay: float = 0.0
  clip_norm: float | None = 1.0
  warmup_steps: int = 0
  schedule: str = "constant"
  total_steps: int | None = None
  embedding_multiplier: float = 1.0
  query_multiplier: float = 1.0

  def __post_init__(self):
    base.check_choices(self, name=OPTIMIZERS, schedule=SCHEDULES)
    base.check_counts(self, "warmup_steps", least=0)
    end, least = self.total_steps, self.warmup_steps + 1
    checks = {
      "learning_rate": (self.learning_rate > 0, "a number > 0"),
      "weight_decay": (self.weight_decay >= 0, "a number >= 0"),
      "clip_norm": (
        self.clip_norm is None or self.clip_norm > 0,
        "a number > 0, or None",
      ),
      "total_steps": (
        self.schedule == "constant" if end is None else base.is_count(end, least),
        f"an integer above warmup_steps ({self.warmup_steps}), because the schedule is"
        f" {self.schedule!r}",
      ),
      "embedding_multiplier": (self.embedding_multiplier > 0, "a number > 0"),
      "query_multiplier": (self.query_multiplier > 0, "a number > 0"),
    }
    base.check_fields(self, checks)


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
  """Returns the learning rate as a function of the step, counted from 0.

  The last step of the warm-up has the peak rate.
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  steps = (config.total_steps or warmup + 1) - warmup
  after = SCHEDULES[config.schedule](peak, steps)
  if not warmup:
    return after
  rising = optax.linear_schedule(peak / warmup, peak, warmup - 1)
  return optax.join_schedules([rising, after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Chains clipping, the optimiser and the multipliers.

  Returns:
    An optax transformation whose `update` needs the parameters as third argument.
  """
  parts = [OPTIMIZERS[config.name](learning_rate(config), config.weight_decay)]
  if config.clip_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
  # Scale last: Adam divides by the gradient's size, so scaling gradients does nothing.
  multipliers = {
    "embedding": config.embedding_multiplier,
    "query": config.query_multiplier,
  }
  for part, multiplier in multipliers.items():
    if multiplier != 1.0:
      mask = functools.partial(_path_contains, part)
      parts.append(optax.masked(optax.scale(multiplier), mask))
  return optax.chain(*parts)


def _path_contains(part: str, params: base.Params) -> base.Params:
  """Returns a tree like `params` of bools."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: part in jax.tree_util.keystr(path), params
  )
