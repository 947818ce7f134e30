"""Offline distillation: the draft learns from a fixed corpus before it serves."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from osd_jax import base, pairs, runs, sharding
from osd_jax import corpus as texts_lib
from osd_jax.data import batches as batches_lib
from osd_jax.data import prompts as prompts_lib
from osd_jax.distillation import update as updates
from osd_jax.engine import agreement, engine
from osd_jax.models import weights
from osd_jax.report import progress, summaries
from osd_jax.runs import signals


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
  """One offline run.

  Attributes:
    corpus: prompts to learn on; `limit_rows` makes a thin corpus. References are
      not read.
    evaluation: held-out prompts, answered once by the target.
    output: weights file of the distilled draft.
    evaluation_prompts: how many held-out prompts.
    pair: target, vocabulary, and the draft to start from.
    decoding: shapes of the answers; many rows suit bulk decoding.
    sampling: the i-th prompt that a model answers draws with seed + i.
    texts: who writes what the draft learns on.
    resample_every: steps after which the draft as it is by then writes its part
      anew; 0 keeps the texts of the first draft.
    update: loss and optimiser; num_new + num_replay rows make a step.
    steps: optimiser steps.
    log_every: steps between log rows.
    evaluate_every: steps between evaluations; first and last are always evaluated.
    checkpoint_every: steps between checkpoints.
    seed: of the order of rows.
    storage: "float32", or "bfloat16" for an output of half the size.
    run_directory: where everything goes; a run killed there continues. Texts are not
      part of a checkpoint but written again, the same ones.
    overwrite: remove the run that the directory holds, and begin anew.
    partition: mesh.
  """

  corpus: batches_lib.BatchConfig
  evaluation: batches_lib.BatchConfig
  output: str
  evaluation_prompts: int = 128
  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: engine.DecodingConfig = engine.DecodingConfig(rows=8)
  sampling: engine.SamplingConfig = engine.SamplingConfig()
  texts: texts_lib.TextsConfig = texts_lib.TextsConfig()
  resample_every: int = 0
  update: updates.UpdateConfig = updates.UpdateConfig()
  steps: int = 1000
  log_every: int = 20
  evaluate_every: int = 250
  checkpoint_every: int = 250
  seed: int = 0
  storage: str = "float32"
  run_directory: str = "runs/offline"
  overwrite: bool = False
  partition: sharding.PartitionConfig = sharding.PartitionConfig()

  def __post_init__(self):
    base.check_fields(self, {"run_directory": (self.run_directory.strip(), "a folder")})
    base.check_counts(
      self, "evaluation_prompts", "steps", "log_every", "evaluate_every"
    )
    base.check_counts(self, "checkpoint_every")
    base.check_counts(self, "resample_every", "seed", least=0)
    base.check_choices(self, storage=("float32", "bfloat16"))
    base.check_fields(
      self,
      {
        "output": (
          self.output not in ("", self.pair.draft, self.pair.target),
          "a weights file other than those of the pair",
        ),
        "decoding": (
          self.decoding.record_top_k >= 1,
          "record_top_k >= 1: the draft learns from records",
        ),
      },
    )
    self.decoding.check_sources(self.corpus, "OfflineConfig.corpus")
    self.decoding.check_sources(self.evaluation, "OfflineConfig.evaluation")


def run(config: OfflineConfig, operative_config: str = "") -> runs.RunResult:
  """Writes texts, learns on them, saves the draft; continues an interrupted run.

  Args:
    config: the run.
    operative_config: text stored beside the results.

  Returns:
    The run directory.
  """
  weights.check_output("OfflineConfig.output", config.output)
  console = rich.console.Console(stderr=True)
  with runs.RunDirectory.start(
    config.run_directory,
    config,
    operative_config=operative_config,
    seed=config.seed,
    overwrite=config.overwrite,
  ) as directory:
    if directory.finished:
      return summaries.leave_alone(directory, console)
    with progress.bar(console) as bar:
      loop = OfflineLoop(config, directory, bar)
      if resumed := loop.resumed:
        console.print(resumed, highlight=False, soft_wrap=True)
      task = bar.add_task(
        "distil", total=config.steps, completed=loop.taken, figures=""
      )
      loop.evaluate_if_first()
      try:
        with signals.Deferred() as interruption:
          while loop.taken < config.steps:
            loop.step()
            bar.update(task, completed=loop.taken, figures=loop.figures)
            interruption.deliver(loop.leave)
      finally:
        loop.wait()  # an interrupted run, too, leaves its last checkpoint whole
    loop.close()
    directory.finish()
    summaries.conclude(directory, console)
    console.print(
      f"weights: {config.output}\nrun directory: {directory.path}", soft_wrap=True
    )
    return runs.RunResult(directory.path)


class OfflineLoop:
  """The state of an offline run; `step` is one optimiser step."""

  def __init__(
    self,
    config: OfflineConfig,
    directory: runs.RunDirectory,
    bar: rich.progress.Progress,
  ):
    """Loads the pair and restores a checkpoint if there is one."""
    self.config = config
    self._bar = bar
    self._partitioner = sharding.make(config.partition)
    self.pair = pairs.load_pair(config.pair, self._partitioner)
    trained, self._frozen = self.pair.draft.split(self.pair.draft_params)
    self.learner = updates.init_learner(config.update, trained)
    self.taken = 0
    self.loss = self.overlap = float("nan")
    self._losses: list[Any] = []
    self._writer = trained  # what wrote the draft's texts
    self._log = runs.MetricsLog(directory.metrics_path)
    self._saved = runs.Checkpointer(
      runs.CheckpointConfig(str(directory.checkpoints_path))
    )
    if self._saved.latest_step() is None:
      self._log.truncate(0)
    else:
      self._restore()

  @functools.cached_property
  def texts(self) -> texts_lib.Texts:
    """The corpus; only read if there is something left to learn."""
    config = self.config
    prompts = prompts_lib.prompts(config.corpus, self.pair.vocabulary)
    if not self.taken:  # a continued run has said it
      summaries.note_data(prompts, self._log, self._bar.console)
    return texts_lib.Texts(
      config.texts,
      config.decoding,
      config.sampling,
      self.pair,
      config.partition,
      prompts,
      self._bar,
    )

  @functools.cached_property
  def rows(self) -> base.DistillationBatch:
    """The texts with the target's distributions, on the host."""
    return self.texts.rows(self.pair.draft.join(self._writer, self._frozen))

  @functools.cached_property
  def held_out(self) -> list[engine.Finished]:
    """The target's answers to the held-out prompts."""
    config = self.config
    prompts = prompts_lib.prompts(
      config.evaluation, self.pair.vocabulary, config.evaluation_prompts
    )
    server = texts_lib.plain_server(self.pair, config.decoding, config.partition)
    with texts_lib.counting(self._bar, "held-out prompts", len(prompts)) as count:
      return server.run(texts_lib.requests(prompts, config.sampling), count)

  @property
  def _served_params(self) -> base.Params:
    """All parameters of the draft as it is by now."""
    return self.pair.draft.join(self.learner.served, self._frozen)

  @property
  def figures(self) -> str:
    """What the progress line says: what is known by now."""
    figures = (("loss", self.loss, 4), ("held-out overlap", self.overlap, 3))
    return "  ".join(
      f"{name} {value:.{digits}f}"
      for name, value, digits in figures
      if not np.isnan(value)
    )

  def step(self) -> None:
    """One optimiser step and whatever is due after it."""
    config = self.config
    if self._resamples():
      self._writer = self.learner.served
      vars(self).pop("rows", None)  # the new draft writes them
    drawn = updates.cut(config.update, self._batch(self.taken))
    batch = self._partitioner.place_rows(drawn)
    self.learner, found = updates.take_slice(
      self.pair.draft, config.update, self.learner, batch, self._frozen
    )
    self._losses.append(found.loss)
    jax.block_until_ready(self._losses[-2:-1])  # one step ahead of the devices
    self.taken += 1
    last = self.taken == config.steps
    if self.taken % config.log_every == 0 or last:
      self._log_step()
    if self.taken % config.evaluate_every == 0 or last:
      self._evaluate()
    if self.taken % config.checkpoint_every == 0 or last:
      self.checkpoint()

  def evaluate_if_first(self) -> None:
    """Evaluates the draft that the run starts from."""
    if self.taken == 0:
      self._evaluate()

  @property
  def resumed(self) -> str:
    """Where the run continues from, "" if it begins."""
    return self._saved.resumed("step", self.config.steps)

  def leave(self) -> None:
    """Checkpoints the present step, whole on disk, before the process may end."""
    self.checkpoint()
    self.wait()

  def wait(self) -> None:
    """Waits until the last checkpoint is complete on disk."""
    self._saved.wait()

  def close(self) -> None:
    """Saves the draft."""
    self._saved.close()  # first: without its checkpoints no run is complete
    notes = (
      f"osd offline, {self.taken} steps of {_rows_per_step(self.config)} rows,"
      f" {self.config.texts.sample_source} texts"
    )
    params = sharding.on_host(self._served_params)
    if jax.process_index() == 0:
      self.pair.save_draft(self.config.output, params, notes, self.config.storage)
    self._log.close()

  def _resamples(self) -> bool:
    every = self.config.resample_every
    due = every > 0 and self.taken > 0 and self.taken % every == 0
    return due and self.config.texts.sample_source != "teacher"

  def _batch(self, step: int) -> base.DistillationBatch:
    """Rows of a step: places of an endless sequence of shuffled epochs."""
    size, count = _rows_per_step(self.config), len(self.rows.weight)
    order = shuffled(count, step * size, size, self.config.seed)
    return jax.tree.map(lambda leaf: leaf[order], self.rows)

  def _log_step(self) -> None:
    losses = np.asarray(jax.device_get(self._losses), np.float64)
    finite = losses[np.isfinite(losses)]  # the other steps were skipped
    self.loss = float(np.mean(finite)) if len(finite) else float("nan")
    self._losses.clear()
    skipped = int(self.learner.skipped)
    row = {"step": self.taken, "loss": self.loss, "skipped": skipped}
    self._log.write("step", row)

  def _evaluate(self) -> None:
    agreed = agreement.mean_agreement(
      self.pair.draft, self._served_params, self.held_out
    )
    labels = [task.label for task in self.config.evaluation.tasks]
    tasks = {labels[task_id]: row for task_id, row in agreed.items()}
    self._log.write("evaluation", {"step": self.taken, "tasks": tasks})
    overlaps = [row["distribution_overlap"] for row in tasks.values()]
    self.overlap = float(np.mean(overlaps))

  def checkpoint(self) -> None:
    """Saves what the run carries onwards, if this step was not saved yet."""
    if self.taken in self._saved.steps():
      return
    host = {
      "taken": self.taken,
      "loss": self.loss,
      "overlap": self.overlap,
      "losses": [float(loss) for loss in self._losses],
      "metrics_bytes": self._log.length,
    }
    self._log.sync()
    arrays = {"learner": self.learner, "writer": self._writer}
    self._saved.save(self.taken, arrays, host)

  def _restore(self) -> None:
    arrays, host = self._saved.restore(
      None, {"learner": self.learner, "writer": self._writer}
    )
    self.learner, self._writer = arrays["learner"], arrays["writer"]
    self.taken, self.loss = host["taken"], host["loss"]
    self.overlap = host["overlap"]
    self._losses = list(host["losses"])
    self._log.truncate(host["metrics_bytes"])


def shuffled(count: int, start: int, size: int, seed: int) -> np.ndarray:
  """A stretch of the endless sequence of shuffled epochs of `count` rows.

  Args:
    count: rows of an epoch.
    start: first place.
    size: places.
    seed: each epoch's order is a function of the seed and its number.

  Returns:
    [size] row numbers.
  """
  epochs = range(start // count, (start + size - 1) // count + 1)
  orders = [np.random.default_rng([seed, 2, e]).permutation(count) for e in epochs]
  first = start % count
  return np.concatenate(orders)[first : first + size]


def _rows_per_step(config: OfflineConfig) -> int:
  return config.update.num_new + config.update.num_replay
