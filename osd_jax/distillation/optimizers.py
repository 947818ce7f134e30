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

# Share of the learning rate left at a progress of 0..1 through `total_steps`.
SCHEDULES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "constant": jnp.ones_like,
  "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
  "linear": lambda progress: 1.0 - progress,
  # Constant, then falling linearly to 0 over the second half.
  "trapezoid": lambda progress: jnp.minimum(1.0, 2.0 * (1.0 - progress)),
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
    needs_end = self.schedule != "constant"
    end = self.total_steps
    checks = {
      "name": (self.name in OPTIMIZERS, f"one of {sorted(OPTIMIZERS)}"),
      "learning_rate": (self.learning_rate > 0, "a number > 0"),
      "weight_decay": (self.weight_decay >= 0, "a number >= 0"),
      "clip_norm": (
        self.clip_norm is None or self.clip_norm > 0,
        "a number > 0, or None",
      ),
      "warmup_steps": (self.warmup_steps >= 0, "an integer >= 0"),
      "schedule": (self.schedule in SCHEDULES, f"one of {sorted(SCHEDULES)}"),
      "total_steps": (
        end > self.warmup_steps if end is not None else not needs_end,
        f"more than warmup_steps ({self.warmup_steps}), as the schedule is "
        f"{self.schedule!r}",
      ),
      "embedding_multiplier": (self.embedding_multiplier > 0, "a number > 0"),
      "query_multiplier": (self.query_multiplier > 0, "a number > 0"),
    }
    check_fields(self, checks)


def learning_rate(config: OptimizerConfig, step: jax.Array | int) -> jax.Array:
  """The learning rate of a step, the first being step 0.

  Args:
    config: peak, warm-up and schedule.
    step: [] int32; steps taken before this one.

  Returns:
    [] float32.
  """
  step = jnp.asarray(step, jnp.float32)
  warmup = jnp.minimum(1.0, (step + 1.0) / max(config.warmup_steps, 1))
  after = (config.total_steps or config.warmup_steps + 1) - config.warmup_steps
  progress = jnp.clip((step - config.warmup_steps) / after, 0.0, 1.0)
  return config.learning_rate * warmup * SCHEDULES[config.schedule](progress)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Clip, then the named optimiser, then the multipliers.

  Args:
    config: the optimiser.

  Returns:
    An optax transformation; `update` needs the parameters as its third argument.
  """
  rate = functools.partial(learning_rate, config)
  parts = [OPTIMIZERS[config.name](rate, config.weight_decay)]
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


def check_fields(config, checks: dict[str, tuple[bool, str]]) -> None:
  """Raises for the first field whose check, `(holds, expected)`, does not hold.

  Args:
    config: a dataclass.
    checks: by field.

  Raises:
    ValueError: naming config, field, what came and what was expected.
  """
  for field, (holds, expected) in checks.items():
    if not holds:
      raise base.InputError(
        f"{type(config).__name__}.{field}: received {getattr(config, field)!r}, "
        f"expected {expected}."
      )
