"""The paper's algorithm 1: serve a stream of queries while the draft learns from it."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console

from osd_jax import (
    alarms,
    base,
    certificate,
    checkpoints,
    comparison,
    corpus,
    metrics,
    pairs,
    partitioning,
    report,
    writers,
)
from osd_jax.data import batches as data_batches
from osd_jax.data import streams
from osd_jax.decoding import slots
from osd_jax.distillation import background
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import schedule as schedules
from osd_jax.distillation import update as updates
from osd_jax.models import weights


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
  """One online run.

  Attributes:
    stream: the queries.
    pair: target, draft and vocabulary. The draft is also the floor draft.
    decoding: shapes of decoding, K among them.
    sampling: request i draws with seed + i.
    buffer: the replay buffer.
    update: one update.
    schedule: when updates happen.
    warm_start: rows that seed the buffer, usually those the draft was trained on;
      the target judges their references. None starts empty.
    partition: mesh.
    learn: False freezes the draft: a baseline with the same outputs and metering.
    free_updates: swap an update in as soon as it is ready. False waits for request
      n + I exactly, which makes runs repeat bit by bit.
    floor_metering: measure the floor draft on every request.
    compare_every: serve every n-th request plainly and with the floor draft too;
      0 never.
    keep_drafts: save the draft's weights at every stream shift and at the end.
    checkpoint_every: requests between checkpoints.
    seed: of replay.
    run_directory: where everything goes; a run killed there continues.
    tensorboard: write TensorBoard events too.
  """

  stream: streams.StreamConfig
  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: slots.DecodingConfig = slots.DecodingConfig()
  sampling: slots.SamplingConfig = slots.SamplingConfig()
  buffer: replay.BufferConfig = replay.BufferConfig()
  update: updates.UpdateConfig = updates.UpdateConfig()
  schedule: schedules.ScheduleConfig = schedules.ScheduleConfig()
  warm_start: data_batches.BatchConfig | None = None
  partition: partitioning.PartitionConfig = partitioning.PartitionConfig()
  learn: bool = True
  free_updates: bool = False
  floor_metering: bool = True
  compare_every: int = 4
  keep_drafts: bool = False
  checkpoint_every: int = 100
  seed: int = 0
  run_directory: str = "runs/online"
  tensorboard: bool = False

  def __post_init__(self):
    if self.decoding.record_top_k < 1:
      raise ValueError(
          "OnlineConfig.decoding: received record_top_k=0, expected at least 1: the"
          " draft learns from the records."
      )
    longest = self.decoding.source_lengths[-1]
    if self.stream.source_length > longest:
      raise ValueError(
          f"OnlineConfig.stream: received source_length={self.stream.source_length},"
          f" expected at most the largest of DecodingConfig.source_lengths, {longest}."
      )


def run(config: OnlineConfig, operative_config: str = "") -> Path:
  """Serves the whole stream; continues an interrupted run of the same directory.

  Args:
    config: the run.
    operative_config: text stored beside the results.

  Returns:
    The run directory.
  """
  console = rich.console.Console(stderr=True)
  directory = writers.RunDirectory.start(
      config.run_directory, config=operative_config, seed=config.seed
  )
  loop = OnlineLoop(config, directory, announce=console.print)
  started = time.perf_counter()
  with report.Progress(console, len(loop.stream), loop.finished) as bar:
    while loop.finished < len(loop.stream):
      for row in loop.step():
        bar.show(row)
  loop.close(time.perf_counter() - started)
  verdict = certificate.of_rows(writers.read(directory.metrics_path))
  report.conclude(directory, loop.stream.shifts(), console, verdict.sentence())
  directory.finish()
  console.print(f"run directory: {directory.path}")
  certificate.conclude(verdict, directory)
  return directory.path


class OnlineLoop:
  """The state of an online run; `step` is one turn of algorithm 1."""

  def __init__(
      self,
      config: OnlineConfig,
      directory: writers.RunDirectory,
      announce: Callable[[str], object] = lambda text: None,
  ):
    """Loads the pair, seeds the buffer, and restores a checkpoint if there is one.

    Args:
      config: the run.
      directory: where its results go.
      announce: shows the text of an alarm.
    """
    self.config, self.directory, self._announce = config, directory, announce
    partitioner = partitioning.make(config.partition)
    self.pair = pairs.load(config.pair, partitioner)
    self.stream = streams.QueryStream(config.stream, self.pair.vocabulary)
    self.finished = 0
    self._submitted = 0
    self._requests: dict[int, slots.Request] = {}
    self._schedule = schedules.ScheduleState()
    self._append = jax.jit(replay.append, donate_argnums=0)
    self._decoder = slots.Slots(
        config.decoding,
        self.pair.target,
        self.pair.target_params,
        self.pair.draft,
        self.pair.draft_params,
        partitioner,
    )
    warm = self._decoder.warm_up()
    self._serving = self.pair.draft_params  # what the decoder's copy was made from
    self._learner = background.BackgroundLearner(
        self.pair.draft,
        config.update,
        updates.init_learner(config.update, self.pair.draft_params),
        config.schedule.update_interval,
        config.free_updates,
    )
    self._buffer = replay.init(
        config.buffer,
        config.decoding.source_lengths[-1],
        config.decoding.target_length,
        config.decoding.record_top_k,
        self.pair.target.vocab_size,
    )
    self._rivals: comparison.Rivals | None = None
    self._certifier = certificate.Certifier(self.pair)
    self._alarms = alarms.AlarmState()
    self._models = checkpoints.fingerprint(
        (self.pair.target_params, self.pair.draft_params)
    )
    self._log = writers.MetricsLog(directory.metrics_path)
    self._saved = checkpoints.Checkpointer(
        checkpoints.CheckpointConfig(
            str(directory.checkpoints_path), every_requests=config.checkpoint_every
        )
    )
    self._events = (
        writers.TensorBoardLog(directory.tensorboard_path)
        if config.tensorboard
        else None
    )
    if self._saved.latest_step() is None:
      self._log.truncate(0)
      self._seed_buffer()
      self._since = int(self._buffer.added)
    else:
      self._restore()
    self._warm_up(warm)

  def step(self) -> list[dict[str, Any]]:
    """Fills the rows, runs one compiled call, learns from what finished.

    Returns:
      The request rows that were logged.
    """
    while self._submitted < len(self.stream) and (
        self._decoder.in_flight < self.config.decoding.rows
    ):
      self._decoder.submit(self._request(self._submitted))
      self._submitted += 1
    rows = [self._learn_from(done) for done in self._decoder.step()]
    if rows and self._saved.due(self.finished):
      self._checkpoint()
    return rows

  def settle(self) -> None:
    """Waits until no update is running, so that what follows is timed alone."""
    self._learner.settle()

  def close(self, wall_seconds: float) -> None:
    """Takes the last update, writes the summary and the adapted draft."""
    if self._learner.busy:
      self._take_update()
    self._log.write("summary", {"wall_seconds": wall_seconds})
    self._save_draft(self.directory.path / "draft.safetensors")
    self._learner.close()
    self._saved.close()
    self._log.close()

  def _request(self, index: int) -> slots.Request:
    query = self.stream[index]
    request = slots.Request(
        tokens=query.tokens,
        sampling=dataclasses.replace(
            self.config.sampling, seed=self.config.sampling.seed + index
        ),
        tag=index,
    )
    self._requests[index] = request
    return request

  def _learn_from(self, done: slots.Finished) -> dict[str, Any]:
    """Measures a finished request, then lets the draft learn from it."""
    del self._requests[done.request.tag]
    query = self.stream[done.request.tag]
    done = corpus.with_source(done, query.task_id)
    row = self._measure(done, query)  # before the draft trains on it
    self.finished += 1
    if self._learner.due(self.finished):
      self._take_update()
    if self.config.learn:
      self._buffer = self._append(self._buffer, done.batch)
      self._schedule = schedules.observe(
          self.config.schedule, self._schedule, row["overlap"]
      )
      self._maybe_launch()
    row["paused"] = self._schedule.paused
    self._write("request", row)
    if self._events is not None:
      self._events.write("request", self.finished, row)
    self._keep_draft_at_shift()
    return row

  def _measure(self, done: slots.Finished, query: streams.Query) -> dict[str, Any]:
    """The row of metrics.jsonl for one request."""
    started = time.perf_counter()
    found = metrics.agreement(
        self.pair.draft, self._serving, done.batch, done.settings
    )
    floor = None
    if self.config.floor_metering:
      floor = metrics.agreement(
          self.pair.draft, self.pair.draft_params, done.batch, done.settings
      )
    found, floor = jax.device_get((found, floor))
    tokens = len(done.tokens)
    row = {
        "index": self.finished,
        "query": query.index,
        "source": query.task,
        "overlap": float(found.distribution_overlap[0]),
        "overlap_upper": float(found.distribution_overlap_upper[0]),
        "acceptance_rate": float(found.acceptance_rate[0]),
        "draft_acceptance_rate": metrics.draft_acceptance_rate(
            done.accepted, done.drafted
        ),
        "tokens_per_target_call": metrics.tokens_per_target_call(
            tokens, done.target_calls
        ),
        "accepted_per_position": done.accepted_per_position[
            : self.config.decoding.num_draft_tokens
        ],
        "target_calls": done.target_calls,
        "drafted": done.drafted,
        "accepted": done.accepted,
        "output_tokens": tokens,
        "stop_reason": done.stop_reason.name,
        "loops": metrics.loops(done.tokens),
        "draft_version": self._decoder.draft_version,
        "decode_ms": done.milliseconds,
        "online_ms_per_token": done.milliseconds / tokens,
    }
    if floor is not None:
      row["floor_overlap"] = float(floor.distribution_overlap[0])
      row["floor_acceptance_rate"] = float(floor.acceptance_rate[0])
    row["metering_ms"] = (time.perf_counter() - started) * 1e3
    if self.config.compare_every and self.finished % self.config.compare_every == 0:
      row.update(self._compare(done))
    return row

  def _compare(self, done: slots.Finished) -> dict[str, Any]:
    if self._rivals is None:
      self._rivals = comparison.Rivals(
          self.config.decoding,
          self.pair.target,
          self.pair.target_params,
          self.pair.draft,
          self.pair.draft_params,
      )
    started = time.perf_counter()  # what the rivals compiled is no comparing
    found = self._rivals.serve(done)
    row = {
        "plain_ms_per_token": found.plain_ms / len(done.tokens),
        "floor_ms_per_token": found.floor_ms / len(done.tokens),
        "floor_draft_acceptance_rate": found.floor_draft_acceptance_rate,
        "floor_tokens_per_target_call": found.floor_tokens_per_target_call,
        "compare_ms": (time.perf_counter() - started) * 1e3,
    }
    if certificate.applies(self.config.sampling, self.config.decoding):
      judged = self._certifier.judge([(found.plain, done)], done.request.tag)
      row["certificate"] = dataclasses.asdict(judged)
    return row

  def _maybe_launch(self) -> None:
    if self._learner.busy or not schedules.update_due(
        self.config.schedule, self._schedule
    ):
      return
    batches = self._draw()
    jax.block_until_ready(batches)
    self._learner.launch(batches, self.finished)
    self._since = int(self._buffer.added)
    self._schedule = schedules.updated(self.config.schedule, self._schedule)

  def _draw(self) -> tuple[base.DistillationBatch, ...]:
    """The micro-batches of an update launched now."""
    key = jax.random.fold_in(jax.random.key(self.config.seed), self.finished)
    return updates.draw_update(
        self.config.update, self.config.buffer, self._buffer, key, self._since
    )

  def _warm_up(self, answers: list[slots.Finished]) -> None:
    """Compiles what is timed beside decoding; changes nothing."""
    if self.config.learn:
      learner, drawn = self._learner.learner, self._draw()
      updates.update(self.pair.draft, self.config.update, learner, drawn)
      updates.warm_up(self.pair.draft, self.config.update, learner, drawn[0])
    for done in answers:
      metrics.agreement(self.pair.draft, self._serving, done.batch, done.settings)

  def _take_update(self) -> None:
    """Takes the update under way and swaps its parameters in."""
    outcome = self._learner.take()
    version = int(outcome.learner.version)
    if version != self._decoder.draft_version:
      self._serving = outcome.learner.served
      self._decoder.swap(self._serving, version)
    self._write(
        "update",
        {
            "finished": self.finished,
            "launched": outcome.launched,
            "version": version,
            "loss": float(np.mean(outcome.losses)),
            "grad_norm": float(np.mean(outcome.grad_norms)),
            "steps": len(outcome.losses),
            "skipped": outcome.skipped,
            "update_ms": outcome.update_ms,
            "wait_ms": outcome.wait_ms,
        },
    )

  def _write(self, kind: str, row: dict[str, Any]) -> None:
    """Logs a row and the alarms that it starts or ends."""
    self._log.write(kind, row)
    self._alarms, changed = alarms.observe(self._alarms, kind, row)
    for alarm in changed:
      told = {"finished": self.finished, **dataclasses.asdict(alarm)}
      self._log.write("alarm", told)
      self._announce(alarm.text)

  def _seed_buffer(self) -> None:
    if self.config.warm_start is None or not self.config.learn:
      return
    found = corpus.prompts(self.config.warm_start, self.pair.vocabulary)
    for batch in corpus.reference_rows(
        self.pair.target, self.pair.target_params, found, self.config.decoding
    ):
      self._buffer = self._append(self._buffer, batch)

  def _keep_draft_at_shift(self) -> None:
    shifts = {index: label for index, label in self.stream.shifts() if index}
    if self.config.keep_drafts and self.finished in shifts:
      name = f"{self.finished:06d}_before_{shifts[self.finished]}.safetensors"
      self._save_draft(self.directory.path / "drafts" / name)

  def _save_draft(self, path: Path) -> None:
    notes = f"osd online, after {self.finished} requests"
    weights.save(path, self.pair.draft_weights(self._serving, notes))

  def _checkpoint(self) -> None:
    pending = self._learner.pending()
    arrays = {
        "learner": self._learner.learner,
        "serving": self._serving,
        "buffer": self._buffer,
        "slots": self._decoder.arrays(),
        "pending": None if pending is None else pending[1],
    }
    host = {
        "finished": self.finished,
        "submitted": self._submitted,
        "since": self._since,
        "schedule": dataclasses.asdict(self._schedule),
        "stream": self.stream.state(),
        "slots": self._decoder.held(),
        "draft_version": self._decoder.draft_version,
        "launched": None if pending is None else pending[0],
        "metrics_bytes": self._log.length,
        "models": self._models,
    }
    self._log.sync()
    self._saved.save(self.finished, arrays, host)

  def _restore(self) -> None:
    arrays, host = self._saved.restore(None, self._abstract)
    checkpoints.check_fingerprint(host.get("models"), self._models)
    self.stream.restore(host["stream"])
    self.finished, self._submitted = host["finished"], host["submitted"]
    self._since = host["since"]
    self._schedule = schedules.ScheduleState(**host["schedule"])
    self._buffer, self._serving = arrays["buffer"], arrays["serving"]
    self._learner.learner = arrays["learner"]
    self._decoder.swap(self._serving, host["draft_version"])
    held = host["slots"]
    tags = [tag for tag in held["tags"] + held["waiting"] if tag is not None]
    self._decoder.restore(
        arrays["slots"], held, {tag: self._request(tag) for tag in tags}
    )
    if host["launched"] is not None:
      self._learner.launch(arrays["pending"], host["launched"])
    self._log.truncate(host["metrics_bytes"])
    self._alarms = alarms.replay(writers.read(self.directory.metrics_path))

  def _abstract(self, host: dict[str, Any]) -> dict[str, Any]:
    """The structure of a checkpoint, which depends on what was under way."""
    slice_ = jax.eval_shape(
        lambda buffer: updates.draw_slice(
            self.config.update, self.config.buffer, buffer, jax.random.key(0), 0
        ),
        self._buffer,
    )
    pending = (slice_,) * self.config.update.steps_per_update
    return {
        "learner": self._learner.learner,
        "serving": self._serving,
        "buffer": self._buffer,
        "slots": self._decoder.abstract_state(host["slots"]["bucket"]),
        "pending": None if host["launched"] is None else pending,
    }
