"""The paper's algorithm 1: serves a stream while the draft learns from it."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax

from osd_jax import (
  background,
  base,
  certificate,
  corpus,
  metering,
  pairs,
  runs,
  session,
  sharding,
)
from osd_jax.data import streams
from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.distillation.learner import LearningConfig, Outcome
from osd_jax.engine import generation_config, measurement
from osd_jax.engine.requests import DecodingConfig, Finished, ReplicaConfig, Request
from osd_jax.engine.server import Server
from osd_jax.report import progress
from osd_jax.runs.logbook import Logbook

_MAX_PENDING = 8  # answers per row that may wait to be processed in the background


@dataclasses.dataclass(frozen=True)
class OnlineConfig(session.RunConfig):
  """One online run; `session.RunConfig` has further settings.

  Attributes:
    stream: the queries, or a function that makes a `streams.Stream` from a vocabulary.
    pair: target, draft and vocabulary, or a loaded pair. The draft also serves as the
      floor draft, which never learns.
    decoding: shapes of decoding and K.
    learning: buffer, updates, and when they run.
    warm_start: examples that fill the buffer before the first request, usually those
      that the draft was trained on; the target scores their references. None starts
      with an empty buffer.
    replicas: processes that serve while this process learns and measures.
    learn: False freezes the draft: a baseline with the same outputs and metrics. A
      cache (`PairConfig.draft = "cache"`) adapts either way, and nothing is trained.
    floor_metering: measure the floor draft on every request.
    compare_every: n; also serve one of n requests, chosen at random, with plain
      decoding and with the floor draft. The verdict on learning is measured on these.
      0 compares none.
    measure_costs: measure the costs of calls and updates before the first request. A
      continued run keeps its measured costs.
    keep_drafts: save the draft's weights at every shift of the stream and at the end.
    keep_outputs: what outputs.jsonl holds: "text" of prompts and answers, "ids" their
      tokens too, or "none".
    checkpoint_every: requests between checkpoints.
    run_directory: folder for logs, checkpoints and results; the same command continues
      a run that was interrupted.
    tensorboard: also write TensorBoard events.
  """

  stream: streams.StreamConfig | Callable[[Vocabulary], streams.Stream]
  pair: pairs.PairConfig | pairs.Pair = pairs.PairConfig()
  decoding: DecodingConfig = DecodingConfig()
  learning: LearningConfig = LearningConfig()
  warm_start: BatchConfig | None = None
  replicas: ReplicaConfig = ReplicaConfig()
  learn: bool = True
  floor_metering: bool = True
  compare_every: base.CountOrZero = 4
  measure_costs: bool = True
  keep_drafts: bool = False
  keep_outputs: Annotated[str, base.OneOf("none", "text", "ids")] = "text"
  checkpoint_every: base.Count = 100
  run_directory: base.Folder = "runs/online"
  tensorboard: bool = False

  def checks(self):
    if isinstance(self.stream, streams.StreamConfig):
      self.decoding.check_sources(self.stream, "OnlineConfig.stream")
    needs_costs = self.learns and self.learning.schedule.needs_costs
    return {
      "decoding": (
        self.decoding.record_top_k >= 1,
        "record_top_k >= 1: the draft learns from the records",
      ),
      "measure_costs": (
        not needs_costs or (self.measure_costs and not self.replicas.count),
        "True and no replicas: the schedule needs costs, or set WorthConfig.costs",
      ),
    }

  @property
  def learns(self) -> bool:
    """Whether a draft is trained; a cache adapts without training."""
    return self.learn and not pairs.adapts_untrained(self.pair)


def run(config: OnlineConfig, operative_config: str = "") -> runs.RunResult:
  """Serves the whole stream, or continues the interrupted run of the same directory.

  `operative_config` is gin text that is stored in the run directory.

  Returns:
    The run directory, and whether every checked output equals the target's.
  """
  sharding.make(config.partition)  # first, because it configures JAX before its start
  sampling = generation_config.resolved(config.sampling, config.pair)
  config = dataclasses.replace(config, sampling=sampling)

  def body(directory, console):
    shows = functools.partial(progress.status, console)
    loop = OnlineLoop(config, directory, console.print, shows)
    for sentence in filter(None, (loop.resumed, *loop.stream.sentences())):
      console.print(sentence, highlight=False, soft_wrap=True)

    def show(rows):
      for row in rows:
        bar.show(row)

    with progress.Progress(console, loop.stream.total, loop.finished) as bar:
      session.run_steps(loop, show)
    loop.close(loop.seconds)
    verdict = certificate.of_rows(runs.read(directory.metrics_path))
    return verdict, certificate.promise(config.decoding)

  return session.run(config, operative_config, config.learning.seed, body)


class OnlineLoop:
  """The state of an online run; `step` and `_process` are the paper's algorithm 1.

  Attributes:
    finished: answers that were measured, learnt from and logged.
  """

  def __init__(
    self,
    config: OnlineConfig,
    directory: runs.RunDirectory,
    announce: Callable[[str], object] = lambda text: None,
    shows: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
  ):
    """Loads the pair, fills the buffer, and restores a checkpoint if there is one.

    `announce` shows the text of an alarm, and `shows` what is done inside a `with`
    block.
    """
    self.config, self.directory = config, directory
    self._sampling = generation_config.resolved(config.sampling, config.pair)
    started = time.perf_counter()
    with shows("loading target, draft and stream"):
      self.server = Server(
        config.pair,
        config.decoding,
        config.learning,
        config.partition,
        config.replicas.engine,
      )
      self.pair = self.server.pair
      self.stream = streams.make(config.stream, self.pair.vocabulary)
    self._meter = metering.Meter(
      self.pair,
      config.decoding,
      self._sampling,
      config.floor_metering,
      config.compare_every,
      config.partition,
      config.learning.seed,
    )
    self._log = Logbook(
      directory, config.keep_outputs, config.tensorboard, announce, config.learns
    )
    self._announce = self.server.engine.report = announce
    self._checkpointer = runs.Checkpointer(
      directory.checkpoints_path,
      config.checkpoint_every,
      self._log.files,
      self.pair.named_params,
    )
    self.finished = self._submitted = 0
    self._seconds_before = 0.0  # serving time of earlier sessions
    loaded = time.perf_counter()
    # Everything is compiled before the first request is timed.
    with shows("compiling decoding and updates"):
      self.server.warm_up(config.learns)
    with shows("compiling measurements"):
      self._meter.warm_up()
    compiled, measuring_ms = time.perf_counter(), 0.0
    if not self._restored():
      with shows("filling the buffer and measuring costs"):
        measuring_ms = self._begin()
    start = {
      "loading_ms": (loaded - started) * 1e3,
      "compiling_ms": (compiled - loaded) * 1e3,
      "measuring_ms": measuring_ms,
    }
    self._log.write("start", start, self.finished)
    self._calls = background.OrderedCalls(
      self._processes_in_background(), _MAX_PENDING * config.decoding.rows
    )
    # `_submitted` >= `_answered` >= `finished`: requests in flight, then answers that
    # wait to be processed.
    self._answered = self.finished
    self._rows: list[dict[str, Any]] = []  # logged, but not yet returned by `step`
    self._served = self.server.serve(self._requests())
    self._started = time.perf_counter()

  @property
  def seconds(self) -> float:
    """Wall time since the first request, summed over all sessions of the run."""
    return self._seconds_before + time.perf_counter() - self._started

  @property
  def resumed(self) -> str:
    """A sentence that says where the run continues, "" for a new run."""
    return self._checkpointer.resumed("request", self.stream.total)

  def step(self) -> list[dict[str, Any]] | None:
    """Runs one jitted call of decoding and processes the answers that it finished.

    Returns their log records, or None after the end of the stream.
    """
    answers = next(self._served, None)
    for message in self.server.engine.messages():
      self._log.log_event("replica", message, finished=self.finished)
    for done in answers or ():
      # Plain decoding and the floor draft are timed, so they need all cores.
      alone = self._meter.compares(self._answered)
      # Looked up here: the stream is not thread-safe, and `_process` may run on another
      # thread.
      query = self.stream[done.request.tag]
      self._calls.add(self._process, done, query, alone, alone=alone)
      self._answered += 1
    self._rows += self._calls.ready()
    if answers is None or self._checkpointer.due(self._answered):
      self._rows += self._calls.wait()
    # Without a new answer the state is that of the last checkpoint.
    if self._rows and self._checkpointer.due(self.finished):
      self.checkpoint()
    rows, self._rows = self._rows, []
    return None if answers is None and not rows else rows

  def _process(
    self, done: Finished, query: streams.Query, alone: bool
  ) -> dict[str, Any]:
    """Measures an answer, learns from it and logs it; returns its log record.

    The answer is measured before the draft trains on it, so all reported overlaps are
    prequential.
    """
    in_background = self._calls.in_background
    row = self._meter.row(
      done, query, self.finished, self.server, in_background and not alone
    )
    self.finished += 1
    if self.config.learns:
      rivals = self._score_rivals(done, row, in_background and not alone)
      learned = self.server.learn(done, row["overlap"], in_background, rivals)
      self._log_update(learned)
      row["paused"] = self.server.learner.paused
    row["run_seconds"] = self.seconds
    self._log.write("request", row, self.finished)
    self._log_output(row, query, done)
    self._log_decision()
    self._save_draft_at_shift()
    return row

  def _score_rivals(
    self, done: Finished, row: dict[str, Any], beside: bool
  ) -> dict[str, float]:
    """Returns the overlaps that a gate needs; adds the rival's to the row."""
    if self.config.learning.gate is None:
      return {}
    started = time.perf_counter()
    rivals = self.server.score_rivals(done, row.get("floor_overlap"))
    spent = (time.perf_counter() - started) * 1e3
    row["rival_overlap"], row["gate_ms"] = rivals.get("rival"), 0.0
    row["metering_beside_ms" if beside else "gate_ms"] += spent
    return rivals

  def _processes_in_background(self) -> bool:
    """Whether answers are processed on another thread while serving goes on.

    Such a run cannot be repeated bit for bit, because updates are swapped in whenever
    they are ready. It needs a second core.
    """
    config = self.config
    free = config.learns and config.learning.free_updates and not config.replicas.count
    return free and self.server.learner.runner.in_background and background.cores() > 1

  def checkpoint(self) -> None:
    """Saves the current step if it has not been saved yet."""
    self._rows += self._calls.wait()
    # The rows in flight must be saved with the draft that decodes them from here on.
    self.server.swap_pending()
    arrays, server = self.server.state()
    host = {
      "finished": self.finished,
      "submitted": self._submitted,
      "stream": self.stream.state(),
      "server": server,
    }
    self._checkpointer.save(self.finished, arrays, host)

  def wait(self) -> None:
    """Waits for all background work: processing, updates and the last checkpoint."""
    self._rows += self._calls.wait()
    self.server.wait()
    self._checkpointer.wait()

  def close(self, wall_seconds: float) -> None:
    """Takes the last update; writes the summary and the adapted draft."""
    self._rows += self._calls.wait()
    self._calls.close()
    # The checkpoints are completed first, so that a failed write is reported before
    # the results exist.
    self._checkpointer.close()
    self._log_update(self.server.finish_learning())
    self._log.write("summary", {"wall_seconds": wall_seconds}, self.finished)
    self._save_draft(self.directory.path / "draft.safetensors")
    self.server.close()
    self._log.close()

  def _requests(self) -> Iterator[Request]:
    """Yields the requests of the stream that were not submitted yet."""
    while True:
      try:
        request = self._request(self._submitted)
      except IndexError:  # the end of the stream
        return
      self._submitted += 1
      yield request

  def _request(self, index: int) -> Request:
    tokens = self.stream[index].tokens
    return Request(tokens, self._sampling.of_request(index), tag=index)

  def _log_output(
    self, row: dict[str, Any], query: streams.Query, done: Finished
  ) -> None:
    self._log.write_output(
      {
        "index": row["index"],
        "query": query.index,
        "task": query.task,
        "prompt": query.prompt,
        "text": self.pair.vocabulary.decode(done.tokens),
        "stop_reason": done.stop_reason.name,
        "tokens": len(done.tokens),
        "tokens_per_target_call": row["tokens_per_target_call"],
        "prompt_ids": query.tokens,
        "output_ids": done.tokens,
      }
    )

  def _log_update(self, outcome: Outcome | None) -> None:
    """Logs the update that was swapped in, if there is one."""
    if outcome is not None:
      row = {"finished": self.finished, "launched": outcome.launched}
      row |= {"version": outcome.version, **outcome.figures()}
      self._log.write("update", row, self.finished)

  def _log_decision(self) -> None:
    """Logs what the gate decided on the last answer, if it decided anything."""
    if not self.config.learns:
      return
    learner = self.server.learner
    decision, learner.decision = learner.decision, None
    if decision is not None:
      row = {"finished": self.finished, **dataclasses.asdict(decision)}
      self._log.write("gate", {**row, "text": decision.sentence()}, self.finished)

  def _save_draft_at_shift(self) -> None:
    shifts = dict(self.stream.shifts()[1:]) if self.config.keep_drafts else {}
    if self.finished in shifts:
      name = f"{self.finished:06d}_before_{shifts[self.finished]}.safetensors"
      self._save_draft(self.directory.path / "drafts" / name)

  def _save_draft(self, path: Path) -> None:
    if pairs.adapts_untrained(self.pair):
      return  # it has no weights
    try:
      self.server.save(path, f"osd online, after {self.finished} requests")
    except base.BrokenDraftError as error:  # outputs are exact, so the run can end well
      self._log.log_event("unsaved", str(error), finished=self.finished)

  def _begin(self) -> float:
    """Logs the data, fills the buffer, and measures costs before the first request.

    Returns the milliseconds that measuring costs took.
    """
    config = self.config
    runs.check_space(config, self.server.state()[0])
    self._log.write("data", {"tasks": self.stream.report()}, self.finished)
    if own := self.pair.sibling:
      said = f"The draft was trained for {own}; the target is of the same sizes."
      self._log.log_event("sibling", said)
    if warning := sharding.make(config.partition).unsplit(self.pair.target):
      self._log.log_event("mesh", warning)
    if config.learns:
      rows = []
      if config.warm_start is not None:
        examples = read_corpus(config.warm_start, self.pair.vocabulary)
        rows = corpus.reference_rows(self.pair, examples, config.decoding)
      self.server.seed(rows)
    # Other processes would measure other costs, and decide differently by them.
    started = time.perf_counter()
    if config.measure_costs and jax.process_count() == 1 and not config.replicas.count:
      self._measure_costs()
    return (time.perf_counter() - started) * 1e3

  def _measure_costs(self) -> None:
    try:
      prompt = self.stream[0].tokens
    except IndexError:
      return  # an empty stream
    config = self.config
    bucket = config.decoding.bucket(len(prompt))
    found = measurement.measure_run(
      self.server, bucket, config.learns, self._sampling, self._announce
    )
    self._log.write_costs(found)
    if config.learns:
      self.server.learner.costs = found

  def _restored(self) -> bool:
    """Continues from the newest checkpoint that can be used, if there is one."""
    found = self._checkpointer.restore(
      lambda host: self.server.structure(host["server"])
    )
    if found is None:
      return False
    arrays, host = found
    self.stream.restore(host["stream"])
    self.finished, self._submitted = host["finished"], host["submitted"]
    self.server.restore(arrays, host["server"], self._request)
    self._meter.resume(self.server)
    self._seconds_before = self._log.restore()
    return True
