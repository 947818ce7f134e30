"""Offline distillation: the draft learns from a fixed corpus before it serves."""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import numpy as np
import rich.console
import rich.progress

from osd_jax import base, certificate, pairs, remote, runs, session, sharding
from osd_jax import corpus as corpus_lib
from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.distillation import update as updates
from osd_jax.engine import agreement, generation_config
from osd_jax.engine.requests import DecodingConfig, Finished
from osd_jax.loop import rows as rows_lib
from osd_jax.report import page, progress

LOG_EVERY = 20  # steps between log rows
HELD_OUT = 128  # held-out prompts, unless `evaluation.limit_rows` says otherwise


@dataclasses.dataclass(frozen=True)
class OfflineConfig(session.RunConfig):
  """One offline run; `session.RunConfig` has further settings.

  The order of rows, and the choice between models, depend on `sampling.seed` too.

  Attributes:
    corpus: prompts to learn on; `limit_rows` makes a small corpus. Their references
      are not used.
    evaluation: held-out prompts; the target answers the first 128 of them, or those
      that `limit_rows` keeps, once.
    output: weights file for the distilled draft.
    pair: target, vocabulary, and the draft to start from.
    decoding: shapes of the answers; many rows make bulk decoding faster.
    sample_source: which model generates the texts: "teacher" is the target, "student"
      the draft, which must be independent; "mix_request" draws one of the two for each
      prompt, "mix_token" for each token, with equal probabilities.
    update: loss and optimiser; each step takes num_new + num_replay rows.
    steps: optimiser steps.
    evaluate_every: steps between evaluations, each followed by a checkpoint; the first
      and the last step are always evaluated.
    storage: "float32", or "bfloat16" for an output of half the size.
    run_directory: folder for logs and checkpoints; the same command continues a run
      that was interrupted.
    texts: folder where texts and the target's distributions are written as they are
      generated. A continued run, or another one with the same prompts, target and
      settings, reads them instead of generating them again. "" keeps them in memory.
  """

  corpus: BatchConfig
  evaluation: BatchConfig
  output: Annotated[str, base.NonEmpty("a weights file")]
  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: DecodingConfig = DecodingConfig(rows=8)
  sample_source: Annotated[str, base.OneOf(*corpus_lib.SAMPLE_SOURCES)] = "teacher"
  update: updates.UpdateConfig = updates.UpdateConfig()
  steps: base.Count = 1000
  evaluate_every: base.Count = 250
  storage: Annotated[str, base.OneOf("float32", "bfloat16")] = "float32"
  run_directory: base.Folder = "runs/offline"
  texts: str = ""

  def checks(self):
    self.decoding.check_sources(self.corpus, "OfflineConfig.corpus")
    self.decoding.check_sources(self.evaluation, "OfflineConfig.evaluation")
    return {
      "pair": (
        pairs.can_learn(self.pair),
        "a `draft` that can be trained; 'cache' adapts without training",
      ),
      "output": (
        self.output not in (self.pair.named("draft"), self.pair.named("target")),
        "a weights file other than those of the pair",
      ),
      "decoding": (
        self.decoding.record_top_k >= 1,
        "record_top_k >= 1: the draft learns from records",
      ),
    }

  @property
  def rows_per_step(self) -> int:
    """Rows of one optimiser step."""
    return self.update.num_new + self.update.num_replay


def run(config: OfflineConfig, operative_config: str = "") -> runs.RunResult:
  """Generates texts, learns on them and saves the draft.

  `operative_config` is gin text that is stored in the run directory.
  """
  runs.check_output("OfflineConfig.output", config.output)
  if config.texts:
    runs.check_output("OfflineConfig.texts", config.texts, "folder")
    if jax.process_count() > 1 or remote.is_remote(config.texts):
      raise base.InputError(
        f"OfflineConfig.texts: received {config.texts!r}, expected a local folder, and"
        " '' when several processes distil together."
      )

  def body(config, directory, console):
    bar = progress.bar(console)
    with progress.status(console, "loading target and draft"):
      loop = OfflineLoop(config, directory, bar)
    if loop.resumed:
      console.print(loop.resumed, highlight=False, soft_wrap=True)
    with bar:
      task = bar.add_task(
        "distil", total=config.steps, completed=loop.steps_taken, figures=""
      )
      session.run_steps(
        loop,
        lambda figures: bar.update(task, completed=loop.steps_taken, figures=figures),
      )
    loop.close()
    return certificate.Certificate(), f"weights: {config.output}"

  return session.run(config, operative_config, config.sampling.seed, body)


class OfflineLoop:
  """The state of an offline run; `step` makes one optimiser step."""

  def __init__(
    self,
    config: OfflineConfig,
    directory: runs.RunDirectory,
    bar: rich.progress.Progress,
  ):
    """Loads the pair, and restores a checkpoint if there is one."""
    self.config = config
    self._sampling = generation_config.resolved(config.sampling, config.pair)
    self._bar = bar
    self._partitioner = sharding.make(config.partition)
    self.pair = pairs.load_pair(config.pair, self._partitioner)
    if self.pair.draft.state_width and config.sample_source != "teacher":
      raise base.InputError(
        f"OfflineConfig.sample_source: received {config.sample_source!r} with a draft"
        " that reads the target's states, expected 'teacher': such a draft cannot write"
        " texts of its own. Use an independent draft, or the target's texts."
      )
    # An attached draft holds frozen parameters of the target, which are not trained.
    trained, self._frozen = self.pair.draft.split(self.pair.draft_params)
    self.learner = updates.init_learner(config.update, trained)
    runs.check_output(
      "OfflineConfig.output", config.output, "file", self.pair.draft_bytes
    )
    self.steps_taken = 0
    self.loss = self.overlap = float("nan")
    self._losses: list[Any] = []
    self._log = runs.MetricsLog(directory.metrics_path)
    self._checkpointer = runs.Checkpointer(
      directory.checkpoints_path, logs=[self._log], models=self.pair.named_params
    )
    self._restore()

  # Corpus and held-out answers are made when first needed, so that a run which only
  # has to write its output again generates nothing.
  @functools.cached_property
  def rows(self) -> base.DistillationBatch:
    """The corpus: texts and the target's distributions, in host memory."""
    config = self.config
    prompts = read_corpus(config.corpus, self.pair.vocabulary)
    if not self.steps_taken:  # a continued run has logged this before
      page.note_data(prompts, self._log, self._bar.console)
    return corpus_lib.generate(
      corpus_lib.TextSource(config.sample_source, seed=config.sampling.seed),
      config.decoding,
      self._sampling,
      self.pair,
      config.partition,
      prompts,
      self._bar,
      config.texts,
    )

  @functools.cached_property
  def held_out(self) -> list[Finished]:
    """The target's answers to the held-out prompts."""
    config = self.config
    prompts = read_corpus(
      config.evaluation,
      self.pair.vocabulary,
      None if config.evaluation.limit_rows else HELD_OUT,
    )
    server = corpus_lib.plain_server(self.pair, config.decoding, config.partition)
    with corpus_lib.counting(self._bar, "held-out prompts", len(prompts)) as count:
      return server.run(corpus_lib.requests(prompts, self._sampling), count)

  @property
  def _draft_params(self) -> base.Params:
    return self.pair.draft.join(self.learner.served, self._frozen)

  @property
  def resumed(self) -> str:
    """A sentence that says where the run continues, "" for a new run."""
    return self._checkpointer.resumed("step", self.config.steps)

  def step(self) -> str | None:
    """One optimiser step, and the logs and checkpoints that are due after it.

    Returns figures for the progress bar, or None after the last step.
    """
    config = self.config
    if self.steps_taken == config.steps:
      return None
    # Measured before the first step, as the baseline of the report.
    if self.steps_taken == 0:
      self._evaluate()
    rows = updates.cut(config.update, self._batch(self.steps_taken))
    batch = self._partitioner.place_rows(rows)
    self.learner, metrics = updates.take_slice(
      self.pair.draft, config.update, self.learner, batch, self._frozen
    )
    self._losses.append(metrics.loss)
    # Waits for the step before this one, so that the host is at most one step ahead.
    jax.block_until_ready(self._losses[-2:-1])
    self.steps_taken += 1
    last = self.steps_taken == config.steps
    if self.steps_taken % LOG_EVERY == 0 or last:
      self._log_step()
    if self.steps_taken % config.evaluate_every == 0 or last:
      self._evaluate()
      self.checkpoint()
    return self._figures()

  def checkpoint(self) -> None:
    """Saves the current step if it has not been saved yet."""
    host = {
      "steps_taken": self.steps_taken,
      "loss": self.loss,
      "overlap": self.overlap,
      "losses": [float(loss) for loss in self._losses],
    }
    self._checkpointer.save(self.steps_taken, self.learner, host)

  def wait(self) -> None:
    """Waits until the last checkpoint is complete on disk."""
    self._checkpointer.wait()

  def close(self) -> None:
    """Saves the draft."""
    # The checkpoints are completed first, so that a failed write is reported before
    # the output exists.
    self._checkpointer.close()
    if not np.isfinite(self.overlap):
      raise base.BrokenDraftError(
        f"OfflineConfig.output: {self.config.output} is not written: the draft's scores"
        " on the held-out prompts are not finite; lower OptimizerConfig.learning_rate."
      )
    notes = (
      f"osd offline, {self.steps_taken} steps of {self.config.rows_per_step} rows,"
      f" {self.config.sample_source} texts"
    )
    params = sharding.on_host(self._draft_params)
    if jax.process_index() == 0:  # all processes hold the same draft
      self.pair.save_draft(self.config.output, params, notes, self.config.storage)
    self._log.close()

  def _figures(self) -> str:
    figures = (("loss", self.loss, 4), ("held-out overlap", self.overlap, 3))
    return "  ".join(
      f"{name} {value:.{digits}f}"
      for name, value, digits in figures
      if not np.isnan(value)  # not measured yet
    )

  def _batch(self, step: int) -> base.DistillationBatch:
    """The rows of a step, from an endless sequence of shuffled epochs."""
    size, count = self.config.rows_per_step, len(self.rows.weight)
    # A function of the step, so a continued run draws what the whole run would draw.
    order = shuffled(count, step * size, size, self.config.sampling.seed)
    return jax.tree.map(lambda leaf: leaf[order], self.rows)

  def _log_step(self) -> None:
    losses = np.asarray(jax.device_get(self._losses), np.float64)
    finite = losses[np.isfinite(losses)]  # steps with other losses were skipped
    self.loss = float(np.mean(finite)) if len(finite) else float("nan")
    self._losses.clear()
    skipped = int(self.learner.skipped)
    row = {"step": self.steps_taken, "loss": self.loss, "skipped": skipped}
    self._log.write(rows_lib.Step(**row))

  def _evaluate(self) -> None:
    agreed = agreement.mean_agreement(
      self.pair.draft, self._draft_params, self.held_out
    )
    labels = [task.label for task in self.config.evaluation.tasks]
    tasks = {labels[task_id]: row for task_id, row in agreed.items()}
    self._log.write(rows_lib.Evaluation(step=self.steps_taken, tasks=tasks))
    overlaps = [row["distribution_overlap"] for row in tasks.values()]
    self.overlap = float(np.mean(overlaps))

  def _restore(self) -> None:
    restored = self._checkpointer.restore(self.learner)
    if restored is None:
      runs.check_space(self.config, self.learner)
    else:
      self.learner, host = restored
      self.steps_taken, self.loss = host["steps_taken"], host["loss"]
      self.overlap = host["overlap"]
      self._losses = list(host["losses"])


def shuffled(count: int, start: int, size: int, seed: int) -> np.ndarray:
  """[size] row indices: part of an endless sequence of shuffled epochs of `count` rows.

  The order of an epoch depends only on the seed and the number of the epoch, so a
  continued run draws the same rows.
  """
  epochs = range(start // count, (start + size - 1) // count + 1)
  orders = [np.random.default_rng([seed, 2, e]).permutation(count) for e in epochs]
  first = start % count
  return np.concatenate(orders)[first : first + size]
