"""The paper's algorithm 1: serves a stream while the draft learns from it."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Annotated

import jax

from osd_jax import (
  background,
  base,
  certificate,
  corpus,
  pairs,
  runs,
  session,
  sharding,
)
from osd_jax.data import streams
from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.distillation.learner import LearningConfig
from osd_jax.engine import generation_config, measurement
from osd_jax.engine.requests import DecodingConfig, ReplicaConfig, SamplingConfig
from osd_jax.engine.server import Server
from osd_jax.loop import rows as rows_lib
from osd_jax.loop.loop import Loop, Settings, StreamSource
from osd_jax.report import progress


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
    tracker: where the numbers of metrics.jsonl also go: "tensorboard", or a module with
      wandb's `init`, `log` and `finish`, such as "wandb" or "trackio".
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
  tracker: str = ""

  def checks(self):
    runs.tracker_library(self.tracker)
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
    return self.learn and pairs.can_learn(self.pair)


def run(config: OnlineConfig, operative_config: str = "") -> runs.RunResult:
  """Serves the whole stream, or continues the interrupted run of the same directory.

  `operative_config` is gin text that is stored in the run directory.

  Returns:
    The run directory, and whether every checked output equals the target's.
  """
  sharding.make(config.partition)  # first, because it configures JAX before its start

  def body(config, directory, console):
    shows = functools.partial(progress.status, console)
    loop = begin(config, directory, console.print, shows)
    stream = loop.source.stream
    for sentence in filter(None, (loop.resumed(stream.total), *stream.sentences())):
      console.print(sentence, highlight=False, soft_wrap=True)

    def show(rows):
      for row in rows:
        bar.show(row)

    with progress.Progress(console, stream.total, loop.finished) as bar:
      session.run_steps(loop, show)
    loop.close(loop.seconds)
    verdict = certificate.of_rows(runs.read(directory.metrics_path))
    return verdict, certificate.promise(config.decoding)

  return session.run(config, operative_config, config.learning.seed, body)


def begin(
  config: OnlineConfig,
  directory: runs.RunDirectory,
  announce: Callable[[str], object] = lambda text: None,
  shows: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Loop:
  """Loads the pair, and restores a checkpoint or fills the buffer.

  `announce` shows the text of an alarm, and `shows` what is done inside a `with` block.
  """
  sampling = generation_config.resolved(config.sampling, config.pair)
  started = time.perf_counter()
  with shows("loading target, draft and stream"):
    server = Server(
      config.pair,
      config.decoding,
      config.learning,
      config.partition,
      config.replicas.engine,
    )
    stream = streams.make(config.stream, server.pair.vocabulary)
  is_free = config.learns and config.learning.free_updates
  settings = Settings(
    config.learning,
    config.partition,
    learns=config.learns,
    floor_every=int(config.floor_metering),
    compare_every=config.compare_every,
    checkpoint_every=config.checkpoint_every,
    keep_outputs=config.keep_outputs,
    tracker=config.tracker,
    # It needs a second core. Replicas leave this process nothing else to do.
    in_background=is_free
    and not config.replicas.count
    and server.learner.runner.in_background
    and background.cores() > 1,
  )
  source = StreamSource(stream, sampling, config.keep_drafts)
  loop = Loop(server, source, directory, settings, announce)
  server.engine.report = announce
  loaded = time.perf_counter()
  # Everything is compiled before the first request is timed.
  with shows("compiling decoding and updates"):
    server.warm_up(config.learns)
  with shows("compiling measurements"):
    loop.meter.warm_up()
  compiled, measuring = time.perf_counter(), 0.0
  if not loop.restore():
    with shows("filling the buffer and measuring costs"):
      measuring = _prepare(config, loop, sampling, announce)
  loop.start(loaded - started, compiled - loaded, measuring)
  return loop


def _prepare(
  config: OnlineConfig,
  loop: Loop,
  sampling: SamplingConfig,
  announce: Callable[[str], object],
) -> float:
  """Logs the data, fills the buffer, and measures costs before the first request.

  Returns the seconds that measuring costs took.
  """
  server, log, stream = loop.server, loop.log, loop.source.stream
  runs.check_space(config, server.state()[0])
  log.write(rows_lib.Data(tasks=stream.report()))
  if sentence := getattr(config.pair, "padding", ""):  # printed when the run began
    log.write(rows_lib.Event(finished=0, name="padded", text=sentence))
  if sibling := server.pair.sibling:
    text = f"The draft was trained for {sibling}; the target is of the same sizes."
    log.log_event("sibling", text)
  if warning := sharding.make(config.partition).unsplit(server.pair.target):
    log.log_event("mesh", warning)
  if config.learns:
    rows = []
    if config.warm_start is not None:
      examples = read_corpus(config.warm_start, server.pair.vocabulary)
      rows = corpus.reference_rows(server.pair, examples, config.decoding)
    server.seed(rows)
  started = time.perf_counter()
  # Other processes would measure other costs, and decide differently by them.
  is_alone = jax.process_count() == 1 and not config.replicas.count
  first = next(StreamSource(stream, sampling, False).requests(), None)
  if config.measure_costs and is_alone and first is not None:
    bucket = config.decoding.bucket(len(first.tokens))
    costs = measurement.measure_run(server, bucket, config.learns, sampling, announce)
    log.write(rows_lib.Costs(**vars(costs)))
    if config.learns:
      server.learner.costs = costs
  return time.perf_counter() - started
