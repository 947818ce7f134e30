"""The paper's algorithm 1: serve a stream of queries while the draft learns from it."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import rich.console

from osd_jax import base, checkpoints, corpus, pairs, partitioning, snapshot, writers
from osd_jax.data import batches as data_batches
from osd_jax.data import streams
from osd_jax.distillation import background, shortlist
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import schedule as schedules
from osd_jax.distillation import update as updates
from osd_jax.measuring import alarms, certificate, metering, metrics, summaries
from osd_jax.models import weights
from osd_jax.serving import slots


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
      raise base.InputError(
        "OnlineConfig.decoding: received record_top_k=0, expected at least 1: the"
        " draft learns from the records."
      )
    longest = self.decoding.source_lengths[-1]
    if self.stream.source_length > longest:
      raise base.InputError(
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
  try:
    with summaries.Progress(console, len(loop.stream), loop.finished) as bar:
      while loop.finished < len(loop.stream):
        for row in loop.step():
          bar.show(row)
  finally:
    loop.settle()  # an interrupted run, too, leaves its last checkpoint whole
  loop.close(time.perf_counter() - started)
  verdict = certificate.of_rows(writers.read(directory.metrics_path))
  summaries.conclude(directory, loop.stream.shifts(), console, verdict.sentence())
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
    self.finished = self._submitted = self._since = 0
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
    buffer = replay.init(
      config.buffer,
      config.decoding.source_lengths[-1],
      config.decoding.target_length,
      config.decoding.record_top_k,
      self.pair.target.vocab_size,
    )
    # Where rows come from: a first append would move it, and all would compile anew.
    self._buffer = updates.beside(self.pair.draft_params, buffer)
    self._meter = metering.Meter(
      self.pair,
      config.decoding,
      config.sampling,
      config.floor_metering,
      config.compare_every,
    )
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
      writers.TensorBoardLog(directory.tensorboard_path) if config.tensorboard else None
    )
    if self._saved.latest_step() is None:
      self._begin()
    else:
      self._continue()
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
    self._learner.keep_pace(self.finished + self._decoder.in_flight)
    rows = [self._learn_from(done) for done in self._decoder.step()]
    if rows and self._saved.due(self.finished):
      self._log.sync()
      snapshot.save(self._saved, self._snapshot())
    return rows

  def settle(self) -> None:
    """Waits until nothing runs beside serving: what follows is timed alone."""
    self._learner.settle()
    self._saved.wait()

  def close(self, wall_seconds: float) -> None:
    """Takes the last update, writes the summary and the adapted draft."""
    self._saved.close()  # first: without its checkpoints no run is complete
    if self._learner.busy:
      self._take_update()
    self._log.write("summary", {"wall_seconds": wall_seconds})
    self._save_draft(self.directory.path / "draft.safetensors")
    self._learner.close()
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
    return self._meter.row(done, query, self.finished, self._serving, self._decoder)

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
      self._swap(version)
    self._write(
      "update",
      {
        "finished": self.finished,
        "launched": outcome.launched,
        "version": version,
        **outcome.figures(),
      },
    )

  def _swap(self, version: int) -> None:
    """Serves `_serving`, its output head cut to what the stream is about."""
    chosen = shortlist.of_stream(self.pair.draft, self._buffer)
    self._decoder.swap(self._serving, version, chosen)

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

  def _begin(self) -> None:
    self._log.truncate(0)  # of a run that was killed before its first checkpoint
    self._seed_buffer()
    self._since = int(self._buffer.added)
    self._swap(0)

  def _snapshot(self) -> snapshot.Snapshot:
    return snapshot.Snapshot(
      finished=self.finished,
      submitted=self._submitted,
      stream=self.stream.state(),
      slots=self._decoder.arrays(),
      held=self._decoder.held(),
      serving=self._serving,
      draft_version=self._decoder.draft_version,
      buffer=self._buffer,
      since=self._since,
      schedule=self._schedule,
      learner=self._learner.learner,
      update=self._learner.pending(),
      metrics_bytes=self._log.length,
      models=self._models,
    )

  def _continue(self) -> None:
    """Takes over the newest readable checkpoint."""
    found = snapshot.restore(
      self._saved,
      self._snapshot(),
      self.config.update,
      self.config.buffer,
      self._decoder.abstract_state,
    )
    self.stream.restore(found.stream)
    self.finished, self._submitted = found.finished, found.submitted
    chosen = found.held.get("shortlist")
    self._decoder.swap(found.serving, found.draft_version, chosen)
    requests = {index: self._request(index) for index in found.in_flight}
    self._decoder.restore(found.slots, found.held, requests)
    self._serving, self._buffer = found.serving, found.buffer
    self._since, self._schedule = found.since, found.schedule
    self._learner.learner = found.learner
    if found.update is not None:
      launched, inputs = found.update
      self._learner.launch(inputs, launched)
    self._log.truncate(found.metrics_bytes)
    self._alarms = alarms.replay(writers.read(self.directory.metrics_path))
