"""Bounded training steps of the draft on rows of the buffer.

A slice is one gradient step on one micro-batch, so an update can be spread over the
gaps that serving leaves. A step with a non-finite loss or gradient is skipped and
counted. No argument is ever donated: serving may still read the old parameters.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from osd_jax import base, sharding
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import losses, optimizers, subsample


@dataclasses.dataclass(frozen=True)
class UpdateConfig(base.Config):
  """One update: a few bounded steps over new and replayed rows.

  Attributes:
    optimizer: how a gradient becomes a step.
    loss: which divergence, over which positions.
    steps_per_update: slices per update; `ScheduleConfig.much_to_gain` can lower it.
    num_new: rows per slice from those added since the last update.
    num_replay: rows per slice from the whole buffer.
    length_multiple: each micro-batch is cut to its longest row, rounded up to a
      multiple of this. Every length is compiled once, before serving. 0 does not cut.
    ema_decay: decay per slice of the moving average of the parameters that serves as
      the draft: calmer, but a few slices late. 0 serves the newest parameters.
  """

  optimizer: optimizers.OptimizerConfig = optimizers.OptimizerConfig()
  loss: losses.LossConfig = losses.LossConfig()
  steps_per_update: base.Count = 16
  num_new: base.CountOrZero = 4
  num_replay: base.CountOrZero = 12
  length_multiple: base.CountOrZero = 16
  ema_decay: Annotated[float, base.AtLeast(0), base.Below(1)] = 0.9

  def checks(self):
    expected = f"num_new ({self.num_new}) + num_replay to be at least 1"
    return {"num_replay": (self.num_new + self.num_replay >= 1, expected)}


@flax.struct.dataclass
class LearnerState:
  """The state that training carries from slice to slice."""

  params: base.Params  # the newest finite parameters of the draft
  opt_state: optax.OptState
  version: jax.Array  # [] int32; number of updates that changed the parameters
  step: jax.Array  # [] int32; number of slices taken
  skipped: jax.Array  # [] int32; number of slices skipped because they were not finite
  ema: base.Params | None = None  # moving average of `params`; None if `ema_decay` is 0

  @property
  def served(self) -> base.Params:
    """The parameters that draft: the moving average if there is one."""
    return self.params if self.ema is None else self.ema


@flax.struct.dataclass
class UpdateMetrics:
  """Metrics of one slice (scalars), or of all slices of an update ([slices])."""

  loss: jax.Array  # float32, before the step
  grad_norm: jax.Array  # float32, global norm before clipping
  finite: jax.Array  # bool; False if the step was skipped


def init_learner(config: UpdateConfig, params: base.Params) -> LearnerState:
  """Returns the state before any update, on the devices of `params`."""
  # Separate buffers for the counters: other training loops donate the state.
  version, step, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
  opt_state = optimizers.make_optimizer(config.optimizer).init(params)
  ema = params if config.ema_decay else None
  return sharding.copy_to_mesh_of(
    params, LearnerState(params, opt_state, version, step, skipped, ema=ema)
  )


def loss_and_grad(
  model: base.Model,
  config: UpdateConfig,
  params: base.Params,
  batch: base.DistillationBatch,
  frozen: base.Params = None,
  step: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, ""], base.Params]:
  """The distillation loss of a batch and its gradient by the trained parameters.

  `frozen` are the draft's other parameters, see `base.Model.split`. The number of
  slices taken so far, `step`, seeds the subsampling.
  """
  if config.loss.subsamples:
    # A function of the step, so that a resumed run draws the same subsamples.
    key = jax.random.fold_in(jax.random.key(0), step)
    sampled = subsample.subsample(config.loss, batch, key, model.vocab_size)
  else:
    sampled = subsample.Subsample(batch, None, None, None)

  def loss(params):
    whole = model.join(params, frozen)
    logits = subsample.logits_of(model, whole, sampled)
    if model.score_steps is None:
      return losses.distillation_loss(config.loss, logits, sampled.batch)
    of_steps = [
      losses.distillation_loss(config.loss, part, subsample.at_step(sampled, index))
      for index, part in enumerate(logits)
    ]
    return jnp.mean(jnp.stack(of_steps))

  return jax.value_and_grad(loss)(params)


def apply_gradients(
  config: optimizers.OptimizerConfig,
  learner: LearnerState,
  loss: Float[Array, ""],
  gradients: base.Params,
) -> tuple[LearnerState, UpdateMetrics]:
  """Takes one optimiser step, or skips and counts it if anything is not finite."""
  grad_norm = optax.tree.norm(gradients).astype(jnp.float32)
  changes, opt_state = optimizers.make_optimizer(config).update(
    gradients, learner.opt_state, learner.params
  )
  # Check the step too: a finite gradient times a huge learning rate can overflow.
  norms = jnp.stack([loss, grad_norm, optax.tree.norm(changes)])
  finite = jnp.all(jnp.isfinite(norms))
  params = optax.apply_updates(learner.params, changes)
  # `where` instead of `cond`: both results exist already, and it does not branch.
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
  frozen: base.Params = None,
) -> tuple[LearnerState, UpdateMetrics]:
  """Takes one step on one micro-batch of R rows; pure, `model` and `config` static.

  The version does not change here: an update of several slices makes one version.
  """
  loss, gradients = loss_and_grad(
    model, config, learner.params, batch, frozen, learner.step
  )
  learner, metrics = apply_gradients(config.optimizer, learner, loss, gradients)
  if learner.ema is not None:
    # This runs after skipped steps too, and moves the average towards good parameters.
    ema = optax.incremental_update(learner.params, learner.ema, 1 - config.ema_decay)
    learner = learner.replace(ema=ema)
  return learner, metrics


take_slice = jax.jit(slice_step, static_argnames=("model", "config"))


def cut(config: UpdateConfig, batch: base.DistillationBatch) -> base.DistillationBatch:
  """Cuts T to the longest row, rounded up to `length_multiple`; waits for the batch."""
  if not config.length_multiple:
    return batch
  # Use the mask, not the tokens: the target may emit the padding id.
  judged = np.flatnonzero(np.any(np.asarray(batch.mask), axis=0))
  longest = int(judged[-1]) + 1 if len(judged) else 1
  # Only T is cut: cutting S too would multiply the number of programs to compile.
  return batch.cut_to(_round_up(longest, config.length_multiple))


def warm_up(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batch: base.DistillationBatch,
  frozen: base.Params = None,
) -> None:
  """Compiles an update, for every length that `cut` can return; changes nothing."""
  # Compiling during serving would stall it for seconds.
  update(model, config, learner, [batch], frozen)
  full = batch.target.shape[1]
  step = config.length_multiple or full
  for length in range(step, _round_up(full, step) + 1, step):
    take_slice(model, config, learner, batch.cut_to(length), frozen)


def _round_up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple


@functools.partial(jax.jit, static_argnames=("config", "buffer_config"))
def draw_slice(
  config: UpdateConfig,
  buffer_config: replay.BufferConfig,
  buffer: replay.ReplayBuffer,
  key: Key[Array, ""],
  since: Int[Array, ""] | int,
  index: Int[Array, ""] | int,
) -> base.DistillationBatch:
  """Samples the micro-batch of slice `index` of an update; see `replay.sample`.

  The rows are copied, so the buffer can be appended to while the slice runs. `key` is
  the random key of the whole update.
  """
  key = jax.random.fold_in(key, index)
  return replay.sample(
    buffer, key, config.num_new, config.num_replay, buffer_config, since
  )


def draw_update(
  config: UpdateConfig,
  buffer_config: replay.BufferConfig,
  buffer: replay.ReplayBuffer,
  key: Key[Array, ""],
  since: Int[Array, ""] | int,
  slices: int,
) -> tuple[base.DistillationBatch, ...]:
  """Samples the micro-batches of an update, one per slice."""
  # One call per slice: the number of slices then compiles nothing.
  return tuple(
    draw_slice(config, buffer_config, buffer, key, since, index)
    for index in range(slices)
  )


def update(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batches: Sequence[base.DistillationBatch],
  frozen: base.Params = None,
) -> tuple[LearnerState, UpdateMetrics]:
  """Runs a whole update: one slice per micro-batch, then a new version."""
  after, metrics = learner, []
  for state, of_slice in slices(model, config, learner, batches, frozen):
    after = state
    metrics.append(of_slice)
  return finish_update(learner, after, metrics)


def slices(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batches: Sequence[base.DistillationBatch],
  frozen: base.Params = None,
) -> Iterator[tuple[LearnerState, UpdateMetrics]]:
  """Runs the slices of an update one by one; yields state and metrics after each."""
  for batch in batches:
    state, metrics = take_slice(model, config, learner, cut(config, batch), frozen)
    # Results must not move: the next slice, and serving, would be compiled again.
    learner = jax.block_until_ready(sharding.place_like(learner, state))
    yield learner, metrics


def finish_update(
  before: LearnerState, after: LearnerState, metrics: Sequence[UpdateMetrics]
) -> tuple[LearnerState, UpdateMetrics]:
  """Returns the state of a completed update and its metrics, stacked to [slices].

  The version increases by one unless every slice was skipped.
  """
  # Stack with numpy: XLA would compile a program for every number of slices.
  stacked = jax.tree.map(lambda *values: np.stack(jax.device_get(values)), *metrics)
  return after.replace(version=before.version + (after.step > before.step)), stacked
