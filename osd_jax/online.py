"""The paper's algorithm 1: serve a stream of queries while the draft learns from it."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import rich.console

from osd_jax import background, base, corpus, pairs, runs, sharding
from osd_jax.data import batches as batches_lib
from osd_jax.data import prompts, streams
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.distillation.learner import LearningConfig, Outcome
from osd_jax.distillation.worth import WorthConfig
from osd_jax.engine import engine
from osd_jax.engine.replicas import ReplicaConfig
from osd_jax.engine.server import Server
from osd_jax.measuring import (
  certificate,
  logbook,
  metering,
  prices,
)
from osd_jax.report import progress, summaries
from osd_jax.runs import signals

BEHIND = 8  # answers a row that may wait to be learnt from, where serving goes on


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
  """One online run.

  Attributes:
    stream: the queries; or a function of the vocabulary that makes a `streams.Stream`.
    pair: target, draft and vocabulary, or a loaded pair. The draft is also the floor
      draft.
    decoding: shapes of decoding, K among them.
    sampling: request i draws with seed + i.
    learning: buffer, updates, and when they happen.
    warm_start: rows that seed the buffer, usually those the draft was trained on;
      the target judges their references. None starts empty.
    partition: mesh.
    replicas: processes that serve in place of this one, which learns and measures.
    learn: False freezes the draft: a baseline with the same outputs and metering.
    floor_metering: measure the floor draft on every request.
    compare_every: serve every n-th request plainly and with the floor draft too;
      0 never.
    prices: time the run's calls and updates before the first request, and say what
      they promise beside what is measured. A run that is resumed keeps its prices.
    keep_drafts: save the draft's weights at every stream shift and at the end.
    keep_outputs: "text" writes prompts and answers to outputs.jsonl, "ids" their tokens
      too, "none" nothing.
    checkpoint_every: requests between checkpoints.
    run_directory: where everything goes; a run killed there continues.
    overwrite: remove the run that the directory holds, and begin anew.
    tensorboard: write TensorBoard events too.
  """

  stream: streams.StreamConfig | Callable[[Vocabulary], streams.Stream]
  pair: pairs.PairConfig | pairs.Pair = pairs.PairConfig()
  decoding: engine.DecodingConfig = engine.DecodingConfig()
  sampling: engine.SamplingConfig = engine.SamplingConfig()
  learning: LearningConfig = LearningConfig()
  warm_start: batches_lib.BatchConfig | None = None
  partition: sharding.PartitionConfig = sharding.PartitionConfig()
  replicas: ReplicaConfig = ReplicaConfig()
  learn: bool = True
  floor_metering: bool = True
  compare_every: int = 4
  prices: bool = True
  keep_drafts: bool = False
  keep_outputs: str = "text"
  checkpoint_every: int = 100
  run_directory: str = "runs/online"
  overwrite: bool = False
  tensorboard: bool = False

  def __post_init__(self):
    base.check_types(self)
    base.check_counts(self, "checkpoint_every")
    base.check_counts(self, "compare_every", least=0)
    base.check_choices(self, keep_outputs=runs.OUTPUTS_KEPT)
    schedule = self.learning.schedule
    unpriced = self.learn and isinstance(schedule, WorthConfig) and not schedule.costs
    priced = self.prices and not self.replicas.count
    base.check_fields(
      self,
      {
        "run_directory": (self.run_directory.strip(), "a folder"),
        "decoding": (
          self.decoding.record_top_k >= 1,
          "record_top_k >= 1: the draft learns from the records",
        ),
        "prices": (
          priced or not unpriced,
          "True and no replicas, or WorthConfig.costs: the schedule goes by them",
        ),
      },
    )
    if isinstance(self.stream, streams.StreamConfig):
      self.decoding.check_sources(self.stream, "OnlineConfig.stream")


def run(config: OnlineConfig, operative_config: str = "") -> runs.RunResult:
  """Serves the whole stream; continues an interrupted run of the same directory.

  Args:
    config: the run.
    operative_config: text stored beside the results.

  Returns:
    The run directory, and whether every output checked is the target's.
  """
  console = rich.console.Console(stderr=True)
  sharding.make(config.partition)  # first: JAX starts as the config says
  with runs.RunDirectory.start(
    config.run_directory,
    config,
    operative_config=operative_config,
    seed=config.learning.seed,
    overwrite=config.overwrite,
  ) as directory:
    if directory.finished:
      return summaries.leave_alone(directory, console)
    loop = OnlineLoop(config, directory, announce=console.print)
    for sentence in filter(None, (loop.resumed, *loop.stream.sentences())):
      console.print(sentence, highlight=False, soft_wrap=True)
    try:
      with (
        progress.Progress(console, loop.stream.total, loop.finished) as bar,
        signals.Deferred() as interruption,
      ):
        while (rows := loop.step()) is not None:
          for row in rows:
            bar.show(row)
          interruption.deliver(loop.leave)
    finally:
      loop.wait()  # an interrupted run, too, leaves its last checkpoint whole
    loop.close(loop.seconds)
    verdict = certificate.of_rows(runs.read(directory.metrics_path))
    unchecked = certificate.promise(config.decoding)
    return summaries.result(verdict, directory, console, unchecked)


class OnlineLoop:
  """The state of an online run; `step` is one turn of algorithm 1."""

  def __init__(
    self,
    config: OnlineConfig,
    directory: runs.RunDirectory,
    announce: Callable[[str], object] = lambda text: None,
  ):
    """Loads the pair, seeds the buffer, and restores a checkpoint if there is one.

    Args:
      config: the run.
      directory: where its results go.
      announce: shows the text of an alarm.
    """
    self.config, self.directory = config, directory
    self.server = Server(
      config.pair, config.decoding, config.learning, config.partition, config.replicas
    )
    self.pair = self.server.pair
    self.stream = streams.make(config.stream, self.pair.vocabulary)
    self.finished = self._answered = self._submitted = 0
    self._meter = metering.Meter(
      self.pair,
      config.decoding,
      config.sampling,
      config.floor_metering,
      config.compare_every,
      config.partition,
    )
    self._models = runs.fingerprint((self.pair.target_params, self.pair.draft_params))
    self._log = logbook.Logbook(
      directory, config.keep_outputs, config.tensorboard, announce
    )
    self._saved = runs.Checkpointer(
      runs.CheckpointConfig(
        str(directory.checkpoints_path), every_requests=config.checkpoint_every
      )
    )
    self._seconds_before = 0.0  # that earlier sessions served
    self.server.warm_up(config.learn)
    if self._saved.latest_step() is None:
      self._begin()
    else:
      self._continue()
    self._after = background.OrderedCalls(
      self._frees_serving(), BEHIND * config.decoding.rows
    )
    self._answered = self.finished
    self._rows: list[dict[str, Any]] = []  # that no step gave yet
    self._turns = self.server.turns(self._requests())
    self._started = time.perf_counter()

  @property
  def seconds(self) -> float:
    """Wall time since the first request, over all sessions of the run."""
    return self._seconds_before + time.perf_counter() - self._started

  @property
  def resumed(self) -> str:
    """Where the run continues from, "" if it begins."""
    return self._saved.resumed("request", self.stream.total)

  def step(self) -> list[dict[str, Any]] | None:
    """Fills the rows, runs one compiled call, learns from what finished.

    Returns:
      The request rows that were logged; None where the stream has ended.
    """
    finished = next(self._turns, None)
    if news := self.server.engine.messages():
      self._conclude()
      for said in news:
        self._log.tell("replica", said, finished=self.finished)
    for done in finished or ():
      self._follow(done)
    self._rows += self._after.ready()
    if finished is None or self._saved.due(self._answered):
      self._conclude()
    if self._rows and self._saved.due(self.finished):
      self.checkpoint()
    rows, self._rows = self._rows, []
    return None if finished is None and not rows else rows

  def _follow(self, done: engine.Finished) -> None:
    """Has an answer measured, learnt from and logged."""
    index, query = self._answered, self.stream[done.request.tag]
    self._answered += 1
    alone = self._meter.compares(index)  # rivals are timed: nobody serves meanwhile
    if alone:
      self._conclude()
    self._after.add(self._account, done, query, self._after.in_background and not alone)
    if alone:
      self._conclude()

  def _account(
    self, done: engine.Finished, query: streams.Query, beside: bool
  ) -> dict[str, Any]:
    """The row of an answer, after the draft has learnt from it.

    Args:
      done: the answer.
      query: what it answers.
      beside: serving goes on meanwhile.
    """
    row = self._meter.row(done, query, self.finished, self.server, beside)
    self.finished += 1  # measured before the draft trains on it
    if self.config.learn:
      self._log_update(
        self.server.learn(done, row["overlap"], self._after.in_background)
      )
      row["paused"] = self.server.learner.paused
    row["run_seconds"] = self.seconds
    self._log.write("request", row, self.finished)
    self._log.keep(row, query, done, self.pair.vocabulary.decode(done.tokens))
    self._keep_draft_at_shift()
    return row

  def _conclude(self) -> None:
    """Waits until all that was answered is learnt from and logged."""
    self._rows += self._after.wait()

  def checkpoint(self) -> None:
    """Saves what the run carries onwards, as it is between two calls."""
    self._conclude()
    self.server.swap_pending()
    log = self._log.state()  # what it describes is on disk before it is
    arrays, server = self.server.state()
    host = {
      "finished": self.finished,
      "submitted": self._submitted,
      "stream": self.stream.state(),
      "server": server,
      "models": self._models,
      **log,
    }
    if self.finished not in self._saved.steps():
      self._saved.save(self.finished, arrays, host)

  def leave(self) -> None:
    """Checkpoints the present step, whole on disk, before the process may end."""
    self.checkpoint()
    self.wait()

  def wait(self) -> None:
    """Waits until nothing runs beside serving: what follows is timed alone."""
    self._conclude()
    self.server.wait()
    self._saved.wait()

  def close(self, wall_seconds: float) -> None:
    """Takes the last update, writes the summary and the adapted draft."""
    self._conclude()
    self._after.close()
    self._saved.close()  # first: without its checkpoints no run is complete
    self._log_update(self.server.finish_learning())
    self._log.write("summary", {"wall_seconds": wall_seconds}, self.finished)
    self._save_draft(self.directory.path / "draft.safetensors")
    self.server.close()
    self._log.close()

  def _requests(self) -> Iterator[engine.Request]:
    """The requests of the stream that were not submitted yet."""
    while True:
      try:
        request = self._request(self._submitted)
      except IndexError:  # the stream's way to say that it has ended
        return
      self._submitted += 1
      yield request

  def _request(self, index: int) -> engine.Request:
    tokens = self.stream[index].tokens
    return engine.Request(tokens, self.config.sampling.of_request(index), tag=index)

  def _frees_serving(self) -> bool:
    """Whether what follows an answer runs beside serving; then no run repeats."""
    config = self.config
    free = config.learn and config.learning.free_updates and not config.replicas.count
    return free and self.server.learner.in_background and background.cores() > 1

  def _log_update(self, outcome: Outcome | None) -> None:
    """Logs an update that was swapped in, if one was."""
    if outcome is not None:
      row = {"finished": self.finished, "launched": outcome.launched}
      row |= {"version": outcome.version, **outcome.figures()}
      self._log.write("update", row, self.finished)

  def _keep_draft_at_shift(self) -> None:
    shifts = dict(self.stream.shifts()[1:]) if self.config.keep_drafts else {}
    if self.finished in shifts:
      name = f"{self.finished:06d}_before_{shifts[self.finished]}.safetensors"
      self._save_draft(self.directory.path / "drafts" / name)

  def _save_draft(self, path: Path) -> None:
    notes = f"osd online, after {self.finished} requests"
    self.pair.save_draft(path, self.server.draft_params, notes)

  def _begin(self) -> None:
    self._log.begin()
    self._log.write("data", {"tasks": self.stream.report()}, self.finished)
    if said := sharding.make(self.config.partition).unsplit(self.pair.target):
      self._log.tell("mesh", said)
    if self.config.learn:
      self._seed()
    alone = jax.process_count() == 1 and not self.config.replicas.count
    if self.config.prices and alone:  # others measure other ones
      self._take_prices()

  def _take_prices(self) -> None:
    """Times what calls take; nothing is served yet."""
    try:
      prompt = self.stream[0].tokens
    except IndexError:
      return  # an empty stream
    found = prices.measure(self.server, prompt, self.config.learn, self.config.sampling)
    self._log.price(found)
    if self.config.learn:
      self.server.learner.price(found.update_costs())

  def _seed(self) -> None:
    warm_start, rows = self.config.warm_start, []
    if warm_start is not None:
      examples = prompts.prompts(warm_start, self.pair.vocabulary)
      rows = corpus.reference_rows(self.pair, examples, self.config.decoding)
    self.server.seed(rows)

  def _continue(self) -> None:
    """Takes over the newest readable checkpoint."""
    arrays, host = self._saved.restore(
      None, lambda host: self.server.structure(host["server"])
    )
    runs.check_fingerprint(host["models"], self._models)
    self.stream.restore(host["stream"])
    self.finished, self._submitted = host["finished"], host["submitted"]
    self.server.restore(arrays, host["server"], self._request)
    self._seconds_before = self._log.restore(host)
