"""Optimisers by name, for distillation and for supervised training alike."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from osd_jax import base

# Each makes (learning-rate schedule, weight decay) -> optax transformation.
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

# Each makes (peak rate, steps until 0) -> optax schedule.
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
  "constant": lambda peak, steps: optax.constant_schedule(peak),
  "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
  "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
  # Constant, then falling linearly over the second half.
  "trapezoid": lambda peak, steps: (
    lambda step: jnp.minimum(peak, optax.linear_schedule(2 * peak, 0.0, steps)(step))
  ),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """An optimiser, for distillation and for supervised training alike.

  Attributes:
    name: a key of `OPTIMIZERS`.
    learning_rate: peak rate.
    weight_decay: decoupled, per step and unit of rate (adafactor: per step).
    clip_norm: largest global gradient norm; None does not clip.
    warmup_steps: steps over which the rate rises linearly to its peak.
    schedule: a key of `SCHEDULES`.
    total_steps: steps until the schedule ends; only "constant" may leave it None.
    embedding_multiplier: factor on the updates of every parameter whose path contains
      "embedding" (token embeddings and relative biases, `rel_embedding`).
    query_multiplier: the same for every path that contains "query". T5 draws its
      queries head_dim ** -.5 smaller in place of scaling attention; with that number
      here an optimiser of fixed step size, as AdamW is, changes them no faster, in
      proportion, than the rest, and bears larger rates.
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
        f"an integer above warmup_steps ({self.warmup_steps}), as the schedule is "
        f"{self.schedule!r}",
      ),
      "embedding_multiplier": (self.embedding_multiplier > 0, "a number > 0"),
      "query_multiplier": (self.query_multiplier > 0, "a number > 0"),
    }
    base.check_fields(self, checks)


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
  """The learning rate by step, the first being step 0.

  Args:
    config: peak, warm-up and schedule.

  Returns:
    An optax schedule; the last step of the warm-up has the peak.
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  steps = (config.total_steps or warmup + 1) - warmup
  after = SCHEDULES[config.schedule](peak, steps)
  if not warmup:
    return after
  rising = optax.linear_schedule(peak / warmup, peak, warmup - 1)
  return optax.join_schedules([rising, after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Clip, then the named optimiser, then the multipliers.

  Args:
    config: the optimiser.

  Returns:
    An optax transformation; `update` needs the parameters as its third argument.
  """
  parts = [OPTIMIZERS[config.name](learning_rate(config), config.weight_decay)]
  if config.clip_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
  multipliers = {
    "embedding": config.embedding_multiplier,
    "query": config.query_multiplier,
  }
  for part, multiplier in multipliers.items():
    if multiplier != 1.0:
      mask = functools.partial(path_mask, part)
      parts.append(optax.masked(optax.scale(multiplier), mask))
  return optax.chain(*parts)


def path_mask(part: str, params: base.Params) -> base.Params:
  """A tree like `params` of bools: whether the path contains `part`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: part in jax.tree_util.keystr(path), params
  )
