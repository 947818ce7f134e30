"""Bounded steps that teach the draft what the buffer holds.

One slice is one micro-batch gradient, so that an update can be spread over the gaps
that serving leaves. A step with a non-finite loss or gradient changes nothing and is
counted. No argument is ever donated: serving may still read the old parameters.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

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
class UpdateConfig:
  """One update: a few bounded steps over new and replayed rows.

  Attributes:
    optimizer: how a gradient becomes a step.
    loss: which divergence, over which positions.
    steps_per_update: slices of one update; see `ScheduleConfig.much_to_gain` for fewer.
    num_new: rows a slice takes from those added since the last update.
    num_replay: rows a slice takes from the whole buffer.
    length_multiple: a slice is cut to its longest row, rounded up to a multiple of
      this; every length is compiled once, before serving. 0 leaves the padding.
    ema_decay: the served draft is the moving average of the learner's parameters
      that keeps this share of itself at a slice: calmer, a few slices late. 0 serves
      the newest parameters.
  """

  optimizer: optimizers.OptimizerConfig = optimizers.OptimizerConfig()
  loss: losses.LossConfig = dataclasses.field(default_factory=losses.LossConfig)
  steps_per_update: int = 2
  num_new: int = 4
  num_replay: int = 4
  length_multiple: int = 0
  ema_decay: float = 0.0

  def __post_init__(self):
    base.check_counts(self, "steps_per_update")
    base.check_counts(self, "num_new", "num_replay", "length_multiple", least=0)
    checks = {
      "num_replay": (
        self.num_new + self.num_replay >= 1,
        f"with num_new ({self.num_new}) at least one row together",
      ),
      "ema_decay": (0 <= self.ema_decay < 1, "a number in 0..1, below 1"),
    }
    base.check_fields(self, checks)


@flax.struct.dataclass
class LearnerState:
  """What learning carries.

  Attributes:
    params: the newest good parameters of the draft.
    opt_state: optax state.
    version: [] int32; updates that changed the parameters.
    step: [] int32; slices taken.
    skipped: [] int32; slices left out because loss or gradient were not finite.
    ema: moving average of `params`, None where it is not kept.
  """

  params: base.Params
  opt_state: optax.OptState
  version: jax.Array
  step: jax.Array
  skipped: jax.Array
  ema: base.Params | None = None

  @property
  def served(self) -> base.Params:
    """The parameters that draft: the average where one is kept."""
    return self.params if self.ema is None else self.ema


@flax.struct.dataclass
class UpdateMetrics:
  """What steps report; one slice has scalars, an update has [slices].

  Attributes:
    loss: [...] float32, before the step.
    grad_norm: [...] float32, global, before clipping.
    finite: [...] bool; false where the step was skipped.
  """

  loss: jax.Array
  grad_norm: jax.Array
  finite: jax.Array


def init_learner(config: UpdateConfig, params: base.Params) -> LearnerState:
  """A learner at version 0 that starts from `params`, on their devices.

  Args:
    config: says which optimiser.
    params: the draft's parameters, those that are trained.
  """
  # A buffer of its own for each counter: training donates them.
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
  """The distillation loss of a batch and its gradient by the parameters.

  Args:
    model: the draft.
    config: the loss.
    params: the draft's parameters, those that are trained.
    batch: R rows.
    frozen: those that are not; see `base.Model.split`.
    step: [] int32, slices taken; what a slice looks at is a function of it.

  Returns:
    (loss [] float32, gradient shaped like params).
  """
  if config.loss.narrows:
    key = jax.random.fold_in(jax.random.key(0), step)
    narrowed = subsample.narrow(config.loss, batch, key, model.vocab_size)
  else:
    narrowed = subsample.Narrowed(batch, None, None, None)

  def loss(params):
    whole = model.join(params, frozen)
    logits = subsample.logits_of(model, whole, narrowed)
    return losses.distillation_loss(config.loss, logits, narrowed.batch)

  return jax.value_and_grad(loss)(params)


def apply_gradients(
  config: optimizers.OptimizerConfig,
  learner: LearnerState,
  loss: Float[Array, ""],
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
  changes, opt_state = optimizers.make_optimizer(config).update(
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
  frozen: base.Params = None,
) -> tuple[LearnerState, UpdateMetrics]:
  """One bounded step on one micro-batch; pure, jit with `model`, `config` static.

  Args:
    model: the draft.
    config: loss and optimiser.
    learner: state before the step; its version stays.
    batch: R rows.
    frozen: what of the draft is the target's; see `base.Model.split`.

  Returns:
    (state, metrics of scalars).
  """
  loss, gradients = loss_and_grad(
    model, config, learner.params, batch, frozen, learner.step
  )
  learner, metrics = apply_gradients(config.optimizer, learner, loss, gradients)
  if learner.ema is not None:
    ema = optax.incremental_update(learner.params, learner.ema, 1 - config.ema_decay)
    learner = learner.replace(ema=ema)
  return learner, metrics


take_slice = jax.jit(slice_step, static_argnames=("model", "config"))


def cut(config: UpdateConfig, batch: base.DistillationBatch) -> base.DistillationBatch:
  """Cuts the padding that all rows of a micro-batch share; waits for the batch.

  Args:
    config: its `length_multiple`.
    batch: R rows of T positions.

  Returns:
    The same rows with T as short as the longest of them allows.
  """
  if not config.length_multiple:
    return batch
  # By the mask: a target may emit the id that pads.
  judged = np.flatnonzero(np.any(np.asarray(batch.mask), axis=0))
  longest = int(judged[-1]) + 1 if len(judged) else 1
  return _cut_to(batch, _rounded_up(longest, config.length_multiple))


def warm_up(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batch: base.DistillationBatch,
  frozen: base.Params = None,
) -> None:
  """Compiles a slice of every length that `cut` can leave; changes nothing.

  Args:
    model: the draft.
    config: loss and optimiser.
    learner: any state.
    batch: a micro-batch from `draw_slice`.
    frozen: what of the draft is the target's.
  """
  full = batch.target.shape[1]
  step = config.length_multiple or full
  for length in range(step, _rounded_up(full, step) + 1, step):
    take_slice(model, config, learner, _cut_to(batch, length), frozen)


def _cut_to(batch: base.DistillationBatch, length: int) -> base.DistillationBatch:
  shorter = jax.tree.map(
    lambda leaf: leaf[:, :length], (batch.target, batch.mask, batch.records)
  )
  target, mask, records = shorter
  return batch.replace(target=target, mask=mask, records=records)


def _rounded_up(number: int, multiple: int) -> int:
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
  """Samples the micro-batch of one slice, in one compiled call.

  Args:
    config: numbers of rows (static).
    buffer_config: how replayed rows are weighed (static).
    buffer: rows to draw from; not changed, and not read again by the slice, so that
      appending may go on while the slice runs.
    key: random key of the update.
    since: [] int32; `buffer.added` at the last update.
    index: [] int32; slices of the update before this one.

  Returns:
    A batch of num_new + num_replay rows.
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
  share: float = 1.0,
) -> tuple[base.DistillationBatch, ...]:
  """Samples the micro-batches of an update; see `draw_slice`.

  Args:
    config: as there, and the number of slices.
    buffer_config: as there.
    buffer: as there.
    key: random key of the update.
    since: as there.
    share: of the slices, rounded up.
  """
  slices = max(1, math.ceil(config.steps_per_update * share))
  return tuple(
    draw_slice(config, buffer_config, buffer, key, since, index)
    for index in range(slices)
  )


def update(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batches: Sequence[base.DistillationBatch],
  after_slice: Callable[[LearnerState], object] = lambda learner: None,
  frozen: base.Params = None,
) -> tuple[LearnerState, UpdateMetrics]:
  """A whole update: a slice per micro-batch, then a new version.

  Args:
    model: the draft.
    config: loss and optimiser.
    learner: state before the update.
    batches: from `draw_update`.
    after_slice: told of the state that a slice leaves, computed.
    frozen: what of the draft is the target's; see `base.Model.split`.

  Returns:
    (state, metrics [slices]).
  """
  state, reports = learner, []
  for state, report in slices(model, config, learner, batches, frozen):
    reports.append(report)
    after_slice(state)
  return finish_update(learner, state, reports)


def slices(
  model: base.Model,
  config: UpdateConfig,
  learner: LearnerState,
  batches: Sequence[base.DistillationBatch],
  frozen: base.Params = None,
) -> Iterator[tuple[LearnerState, UpdateMetrics]]:
  """The slices of `update`, each taken when it is asked for.

  Yields:
    (state behind a slice, its metrics, scalars), computed.
  """
  for batch in batches:
    state, report = take_slice(model, config, learner, cut(config, batch), frozen)
    learner = jax.block_until_ready(sharding.place_like(learner, state))
    yield learner, report


def finish_update(
  before: LearnerState, after: LearnerState, reports: Sequence[UpdateMetrics]
) -> tuple[LearnerState, UpdateMetrics]:
  """What an update leaves: the state with its version, metrics [slices].

  Args:
    before: state when the update began.
    after: state behind its last slice; one version later if any was not skipped.
    reports: of the slices, one at least.
  """
  # By numpy: for every number of slices it would be compiled once.
  stacked = jax.tree.map(lambda *values: np.stack(jax.device_get(values)), *reports)
  return after.replace(version=before.version + (after.step > before.step)), stacked
