"""Bounded steps that teach the draft what the buffer holds.

One slice is one micro-batch gradient, so that an update can be spread over the gaps
that serving leaves. A step with a non-finite loss or gradient changes nothing and is
counted. No argument is ever donated: serving may still read the old parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import optax

from osd_jax import base
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import losses

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
    _check_fields(self, checks)


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
  """One update: a few bounded steps over new and replayed rows.

  Attributes:
    optimizer: how a gradient becomes a step.
    loss: which divergence, over which positions.
    steps_per_update: slices of one update.
    num_new: rows a slice takes from those added since the last update.
    num_replay: rows a slice takes from the whole buffer.
  """

  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  loss: losses.LossConfig = dataclasses.field(default_factory=losses.LossConfig)
  steps_per_update: int = 2
  num_new: int = 4
  num_replay: int = 4

  def __post_init__(self):
    rows = self.num_new + self.num_replay
    checks = {
      "steps_per_update": (self.steps_per_update >= 1, "an integer >= 1"),
      "num_new": (self.num_new >= 0, "an integer >= 0"),
      "num_replay": (
        self.num_replay >= 0 and rows >= 1,
        f"an integer >= 0, with num_new ({self.num_new}) at least one row together",
      ),
    }
    _check_fields(self, checks)


@flax.struct.dataclass
class LearnerState:
  """What learning carries.

  Attributes:
    params: the newest good parameters of the draft.
    opt_state: optax state.
    version: [] int32; updates that changed the parameters.
    step: [] int32; slices taken.
    skipped: [] int32; slices left out because loss or gradient were not finite.
  """

  params: base.Params
  opt_state: optax.OptState
  version: jax.Array
  step: jax.Array
  skipped: jax.Array


@flax.struct.dataclass
class UpdateMetrics:
  """What steps report; one slice has scalars, an update has [steps_per_update].

  Attributes:
    loss: [...] float32, before the step.
    grad_norm: [...] float32, global, before clipping.
    finite: [...] bool; false where the step was skipped.
  """

  loss: jax.Array
  grad_norm: jax.Array
  finite: jax.Array


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


def init_learner(config: UpdateConfig, params: base.Params) -> LearnerState:
  """A learner at version 0 that starts from `params`.

  Args:
    config: says which optimiser.
    params: the draft's parameters.
  """
  zero = jnp.zeros((), jnp.int32)
  opt_state = make_optimizer(config.optimizer).init(params)
  return LearnerState(params, opt_state, version=zero, step=zero, skipped=zero)


def loss_and_grad(
  model: base.Model,
  config: UpdateConfig,
  params: base.Params,
  batch: base.DistillationBatch,
) -> tuple[jax.Array, base.Params]:
  """The distillation loss of a batch and its gradient by the parameters.

  Args:
    model: the draft.
    config: the loss.
    params: the draft's parameters.
    batch: R rows.

  Returns:
    (loss [] float32, gradient shaped like params).
  """

  def loss(params):
    mask = batch.source != base.PAD_ID
    logits = model.score(params, batch.source, mask, batch.target)
    return losses.distillation_loss(config.loss, logits, batch)

  return jax.value_and_grad(loss)(params)


def apply_gradients(
  config: OptimizerConfig,
  learner: LearnerState,
  loss: jax.Array,
  gradients: base.Params,
) -> tuple[LearnerState, UpdateMetrics]:
  """One optimiser step, or none: the guard that all training goes through.

  Args:
    config: the optimiser.
    learner: state before the step.
    loss: [] float32.
    gradients: shaped like `learner.params`.

  Returns:
    (state, metrics); where loss, gradient or step is not finite, parameters and
    optimiser state are those from before and `skipped` is one more.
  """
  grad_norm = optax.tree.norm(gradients).astype(jnp.float32)
  changes, opt_state = make_optimizer(config).update(
    gradients, learner.opt_state, learner.params
  )
  # The step itself is judged too: a rate can be too large for a sound gradient.
  norms = jnp.stack([loss, grad_norm, optax.tree.norm(changes)])
  finite = jnp.all(jnp.isfinite(norms))
  params = optax.apply_updates(learner.params, changes)
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    (params, opt_state),
    (learner.params, learner.opt_state),
  )
  learner = learner.replace(
    params=params,
    opt_state=opt_state,
    step=learner.step + finite,
    skipped=learner.skipped + ~finite,
  )
  return learner, UpdateMetrics(loss=loss, grad_norm=grad_norm, finite=finite)


def slice_step(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batch: base.DistillationBatch,
) -> tuple[LearnerState, UpdateMetrics]:
  """One bounded step on one micro-batch; pure, jit with `model`, `config` static.

  Args:
    model: the draft.
    config: loss and optimiser.
    learner: state before the step; its version stays.
    batch: R rows.

  Returns:
    (state, metrics of scalars).
  """
  loss, gradients = loss_and_grad(model, config, learner.params, batch)
  return apply_gradients(config.optimizer, learner, loss, gradients)


take_slice = jax.jit(slice_step, static_argnames=("model", "config"))


@functools.partial(jax.jit, static_argnames=("config", "buffer_config"))
def draw_slice(
  config: UpdateConfig,
  buffer_config: replay.BufferConfig,
  buffer: replay.ReplayBuffer,
  key: jax.Array,
  since: jax.Array | int,
) -> base.DistillationBatch:
  """Samples the micro-batch of one slice, in one compiled call.

  Args:
    config: numbers of rows (static).
    buffer_config: how replayed rows are weighed (static).
    buffer: rows to draw from; not changed, and not read again by the slice, so that
      appending may go on while the slice runs.
    key: random key of this slice; see `slice_key`.
    since: [] int32; `buffer.added` at the last update.

  Returns:
    A batch of num_new + num_replay rows.
  """
  return replay.sample(
    buffer, key, config.num_new, config.num_replay, buffer_config, since
  )


def draw_update(
  config: UpdateConfig,
  buffer_config: replay.BufferConfig,
  buffer: replay.ReplayBuffer,
  key: jax.Array,
  since: jax.Array | int,
) -> tuple[base.DistillationBatch, ...]:
  """Samples all micro-batches of an update; see `draw_slice`."""
  return tuple(
    draw_slice(config, buffer_config, buffer, slice_key(key, index), since)
    for index in range(config.steps_per_update)
  )


def slice_key(key: jax.Array, index: int) -> jax.Array:
  """The random key of the index-th slice of the update that `key` belongs to."""
  return jax.random.fold_in(key, index)


def finish_update(before: LearnerState, after: LearnerState) -> LearnerState:
  """Gives the result of an update its version.

  Args:
    before: state when the update began.
    after: state after its last slice.

  Returns:
    `after`, its version one more than before if at least one slice was taken.
  """
  return after.replace(version=before.version + (after.step > before.step))


def update(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batches: Sequence[base.DistillationBatch],
) -> tuple[LearnerState, UpdateMetrics]:
  """A whole update: a slice per micro-batch, then a new version.

  A caller that spreads an update over time runs the same lines itself and gets the
  same bits.

  Args:
    model: the draft.
    config: loss and optimiser.
    learner: state before the update.
    batches: from `draw_update`.

  Returns:
    (state, metrics [steps_per_update]).
  """
  state, metrics = learner, []
  for batch in batches:
    state, report = take_slice(model, config, state, batch)
    metrics.append(report)
  stacked = jax.tree.map(lambda *values: jnp.stack(values), *metrics)
  return finish_update(learner, state), stacked


def _check_fields(config, checks: dict[str, tuple[bool, str]]) -> None:
  """Raises for the first field whose check, `(holds, expected)`, does not hold."""
  for field, (holds, expected) in checks.items():
    if not holds:
      raise ValueError(
        f"{type(config).__name__}.{field}: received {getattr(config, field)!r}, "
        f"expected {expected}."
      )
