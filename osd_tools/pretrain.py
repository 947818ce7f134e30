"""Supervised training on (prompt, reference): small targets and first drafts.

The paper starts from published checkpoints. This command makes a pair if none exists,
or tunes a target on a domain.
"""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from osd_jax import assets, base, certificate, pairs, runs, session, sharding
from osd_jax.data.batches import BatchConfig
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.distillation import optimizers, update
from osd_jax.loop import rows as rows_lib
from osd_jax.models import families, weights
from osd_jax.report import progress
from osd_tools import batches as training_batches


@dataclasses.dataclass(frozen=True)
class PretrainConfig(base.Config):
  """One supervised training run.

  Attributes:
    model: shape of the model, a T5 or a decoder-only model.
    vocabulary: path of the vocabulary, see `PairConfig.vocabulary`.
    extra_ids: sentinels after the pieces of the vocabulary, see `Vocabulary.load`.
    data: training batches.
    evaluation: held-out batches; one pass over `evaluation_batches` of them.
    output: weights file written at the end.
    start: weights file that training starts from, of the shape of `model` and with the
      same vocabulary; "" draws the first weights from the seed.
    optimizer: optimiser and schedule; its `total_steps` is usually `steps`.
    steps: optimiser steps.
    pool: number of batches whose rows are regrouped by target length, so that short
      rows are not padded to the longest row of all. 1 keeps the order.
    length_multiple: regrouped batches are cut to their longest row, rounded up to a
      multiple of this. Every pair of lengths is compiled once, so long rows need a
      large multiple.
    seed: seed of the initial weights.
    log_every: steps between log rows.
    evaluate_every: steps between evaluations; the last step is always evaluated.
    evaluation_batches: number of batches per evaluation.
    checkpoint_every: steps between checkpoints.
    storage: "float32", or "bfloat16" for an output file of half the size.
    run_directory: folder for metrics and checkpoints; the same command continues a run
      that was interrupted.
    overwrite: remove the run in this folder and start over.
    partition: mesh; the rows of a batch are split over its data axis.
  """

  model: families.ModelConfig
  vocabulary: base.Path
  data: BatchConfig
  evaluation: BatchConfig
  output: base.Path
  start: str = ""
  extra_ids: base.CountOrZero = 0
  optimizer: optimizers.OptimizerConfig = optimizers.OptimizerConfig()
  steps: base.Count = 1000
  pool: base.Count = 8
  length_multiple: base.Count = 8
  seed: base.CountOrZero = 0
  log_every: base.Count = 20
  evaluate_every: base.Count = 500
  evaluation_batches: base.Count = 8
  checkpoint_every: base.Count = 250
  storage: Annotated[str, base.OneOf("float32", "bfloat16")] = "float32"
  run_directory: base.Folder = "runs/pretrain"
  overwrite: bool = False
  partition: sharding.PartitionConfig = sharding.PartitionConfig()


def run(config: PretrainConfig, operative_config: str = "") -> runs.RunResult:
  """Trains, evaluates, writes `config.output`; continues an interrupted run.

  `operative_config` is gin text that is stored in the run directory.
  """
  # Checked first: training must not end in an error about a folder.
  runs.check_output("PretrainConfig.output", config.output)
  path = assets.resolve(config.vocabulary, "PretrainConfig.vocabulary")
  vocabulary = Vocabulary.load(path, config.extra_ids)
  # A larger V is fine, as in published models; the rows beyond the vocabulary are never
  # used.
  if vocabulary.size > config.model.vocab_size:
    raise base.InputError(
      f"pretrain: {type(config.model).__name__}.vocab_size: received"
      f" {config.model.vocab_size}, expected at least the {vocabulary.size} ids of"
      f" {config.vocabulary}."
    )
  model = families.build(config.model, "model")
  first = _stored(config, vocabulary) if config.start else None

  def body(config, directory, console):
    state = initial_state(config, model, first)
    with (
      runs.MetricsLog(directory.metrics_path) as log,
      runs.Checkpointer(directory.checkpoints_path, logs=[log]) as saved,
    ):
      if (checkpoint := saved.restore(state)) is not None:
        state, _ = checkpoint
        resumed = saved.resumed("step", config.steps)
        console.print(resumed, highlight=False, soft_wrap=True)
      state = _loop(config, model, vocabulary, state, log, saved, console)
    trained = weights.Weights(
      config.model,
      sharding.on_host(state.params),
      vocabulary.fingerprint,
      f"osd pretrain, {int(state.step)} steps of {config.data.batch_size} rows",
    )
    # All processes hold the same weights, and only one may write the file.
    if jax.process_index() == 0:
      weights.save(config.output, trained, config.storage)
    return certificate.Certificate(), f"weights: {config.output}"

  return session.run(config, operative_config, config.seed, body)


def _stored(config: PretrainConfig, vocabulary: Vocabulary) -> base.Params:
  """Returns the parameters of `config.start`, in float32."""
  shapes = weights.load(assets.resolve(config.start, "PretrainConfig.start"))
  pairs.check_vocabulary(config, "start", shapes, vocabulary)
  # The type that a model computes in is not part of its shape.
  if dataclasses.replace(shapes.config, dtype=config.model.dtype) != config.model:
    raise base.InputError(
      f"PretrainConfig.start: {config.start} is a {shapes.config}, expected the shape"
      f" of `model`, {config.model}; state the file's shape."
    )
  return shapes.params


def initial_state(
  config: PretrainConfig, model: base.Model, params: base.Params | None = None
) -> update.LearnerState:
  """Places parameters on the mesh; draws them from the seed if none are given."""
  partitioner = sharding.make(config.partition)
  if params is None:
    params = jax.jit(model.init)(jax.random.key(config.seed))
  params = partitioner.place_params(model, params)
  return update.init_learner(
    update.UpdateConfig(optimizer=config.optimizer, ema_decay=0.0), params
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
  model: base.Model,
  optimizer: optimizers.OptimizerConfig,
  state: update.LearnerState,
  source: jax.Array,
  target: jax.Array,
) -> tuple[update.LearnerState, update.UpdateMetrics]:
  """Takes one step on source [R, S] and target [R, T]; skips it if not finite."""
  loss, gradient = jax.value_and_grad(_cross_entropy, argnums=1)(
    model, state.params, source, target
  )
  return update.apply_gradients(optimizer, state, loss, gradient)


def _cross_entropy(model, params, source, target):
  logits = model.score(params, source, model.mask(source), target)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
  mask = target != model.pad_id
  # The mean over tokens, not over rows: a short row has fewer tokens to learn from.
  return jnp.sum(losses * mask) / jnp.sum(mask)


@functools.partial(jax.jit, static_argnums=0)
def judge(
  model: base.Model, params: base.Params, source: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Checks whether greedy decoding would produce the reference.

  A greedy output equals the reference if and only if the arg max is correct at every
  position when the reference itself is fed, so no decoding is needed.

  Returns:
    [R] share of correct tokens, and [R] bool, whether all are correct.
  """
  logits = model.score(params, source, model.mask(source), target)
  mask = target != model.pad_id
  right = (jnp.argmax(logits, -1) == target) & mask
  share = jnp.sum(right, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
  return share, jnp.all(right | ~mask, axis=1)


def regrouped(
  stream: training_batches.BatchStream, pool: int, index: int, multiple: int
) -> list[training_batches.Batch]:
  """Regroups the rows of `pool` batches by target length and cuts their padding.

  Without this, short rows would be padded to the longest row of the corpus. Every row
  is returned exactly once. The new batches are in random order, seeded by `index`.

  Args:
    stream: batches of one fixed shape.
    pool: number of batches in a pool.
    index: number of the pool, which holds the batches from index * pool on.
    multiple: lengths are rounded up to a multiple of this, which bounds the number
      of shapes that get compiled.

  Returns:
    `pool` batches with S and T cut to the longest row of each.
  """
  pool_rows = [stream[index * pool + offset] for offset in range(pool)]
  source, target, task_id = (
    np.concatenate([getattr(batch, name) for batch in pool_rows])
    for name in ("source", "target", "task_id")
  )
  # Padding is at the end, so the number of other ids is the length.
  source_lengths, target_lengths = (
    np.sum(ids != stream.pad_id, axis=1) for ids in (source, target)
  )

  def cut(ids, lengths, rows):  # the width of ids need not be a multiple
    longest = -(-int(lengths[rows].max()) // multiple) * multiple
    return ids[rows, : min(longest, ids.shape[1])]

  batches = [
    training_batches.Batch(
      cut(source, source_lengths, rows),
      cut(target, target_lengths, rows),
      task_id[rows],
    )
    # A stable sort: rows of equal length keep their order on every machine.
    for rows in np.split(np.argsort(target_lengths, kind="stable"), pool)
  ]
  return [batches[place] for place in np.random.default_rng(index).permutation(pool)]


def _loop(config, model, vocabulary, state, log, saved, console) -> update.LearnerState:
  stream = training_batches.BatchStream(config.data, vocabulary)
  held_out = training_batches.BatchStream(config.evaluation, vocabulary)
  corpora = {"train": stream.corpus, "evaluation": held_out.corpus}
  for corpus in corpora.values():
    for sentence in corpus.sentences:
      console.print(sentence, highlight=False)
  if log.rows == 0:
    reports = {name: corpus.report for name, corpus in corpora.items()}
    log.write(rows_lib.Data(tasks=reports))
  partitioner = sharding.make(config.partition)
  # A skipped step has used its batch too, so it counts.
  start = int(state.step + state.skipped)
  pool: list[training_batches.Batch] = []
  losses: list[jax.Array] = []
  with progress.bar(console) as bar:
    task = bar.add_task("pretrain", total=config.steps, completed=start, figures="")
    for step in range(start + 1, config.steps + 1):
      index, place = divmod(step - 1, config.pool)
      # A resumed run starts inside a pool and builds it again.
      if place == 0 or not pool:
        pool = regrouped(stream, config.pool, index, config.length_multiple)
      rows = _placed(partitioner, pool[place])
      state, figures = train_step(model, config.optimizer, state, *rows)
      losses.append(figures.loss)
      if step % config.log_every == 0:
        mean = float(np.mean(jax.device_get(losses)))
        losses.clear()
        # `train_step` skips single bad steps; a mean that is not finite is divergence.
        if not np.isfinite(mean):
          raise base.InputError(
            f"pretrain: the loss of step {step} is {mean}; lower"
            " OptimizerConfig.learning_rate (the last checkpoint is kept)."
          )
        log.write(rows_lib.Step(step=step, loss=mean, skipped=int(state.skipped)))
        bar.update(task, completed=step, figures=f"loss {mean:.4f}")
      if step % config.evaluate_every == 0 or step == config.steps:
        tasks = evaluate(config, model, held_out, state.params)
        log.write(rows_lib.Evaluation(step=step, tasks=tasks))
        bar.console.print(_sentence(step, tasks))
      if step % config.checkpoint_every == 0 or step == config.steps:
        saved.save(step, state, {})
  return state


def evaluate(
  config: PretrainConfig,
  model: base.Model,
  held_out: training_batches.BatchStream,
  params: base.Params,
) -> dict[str, dict[str, float]]:
  """Returns token accuracy and greedy exact match on the held-out rows, per task."""
  partitioner = sharding.make(config.partition)
  sums: dict[str, list[Any]] = {}
  for index in range(config.evaluation_batches):
    batch = held_out[index]
    rows = _placed(partitioner, batch)
    share, exact = sharding.on_host(judge(model, params, *rows))
    for row, task_id in enumerate(batch.task_id):
      label = config.evaluation.tasks[int(task_id)].label
      sums.setdefault(label, []).append((share[row], exact[row]))
  return {
    label: {
      "rows": len(rows),
      "token_accuracy": float(np.mean([share for share, _ in rows])),
      "exact_match": float(np.mean([exact for _, exact in rows])),
    }
    for label, rows in sorted(sums.items())
  }


def _placed(
  partitioner: sharding.Partitioner, batch: training_batches.Batch
) -> tuple[jax.Array, jax.Array]:
  """Puts source [R, S] and target [R, T] on the mesh, split over its data axis."""
  size = len(batch.source)
  # Each process passes the rows of its own devices.
  local = partitioner.own_rows(size)
  return partitioner.place_own_rows(size, (batch.source[local], batch.target[local]))


def _sentence(step: int, rows: dict[str, dict[str, float]]) -> str:
  figures = ", ".join(
    f"{label} {row['exact_match']:.3f} ({row['token_accuracy']:.3f})"
    for label, row in rows.items()
  )
  return f"step {step}: held-out exact match (token accuracy): {figures}"
