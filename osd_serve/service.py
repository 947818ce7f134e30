"""What `osd serve` runs: the server, its queue, its learning thread and its metrics."""

import asyncio
import contextlib
import dataclasses
import functools
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from osd_jax import background, base, pairs, sharding
from osd_jax.costs.table import RoundCosts
from osd_jax.data import chat
from osd_jax.distillation.learner import LearningConfig, Outcome
from osd_jax.engine import agreement, generation_config, measurement, server
from osd_jax.engine.requests import (
  DecodingConfig,
  Finished,
  OwnSampling,
  Request,
  SamplingConfig,
)
from osd_serve import protocol
from osd_serve.learning import Learning
from osd_serve.metrics import Metrics, finish_reason
from osd_serve.scheduler import (
  Call,
  EngineFailedError,
  Event,
  Job,
  Scheduler,
  first_line,
)
from osd_serve.tenants import Tenants

# Several rows, and updates that serving never waits for.
DECODING = dataclasses.replace(server.DECODING, rows=4)
LEARNING = dataclasses.replace(server.LEARNING, free_updates=True)
PLAIN_SECONDS = 1.0  # for measuring plain steps at the start, without compiling
CALL_MS = 8.0  # a call that takes this long has no further rounds


@dataclasses.dataclass(frozen=True)
class ServeConfig(base.Config):
  """What `osd serve` serves, and how.

  Attributes:
    pair: target, draft and vocabulary.
    decoding: rows in flight, K and lengths; `target_length` is the largest max_tokens.
    sampling: settings of requests that state none. The default is OpenAI's; its seed is
      not used, because a request without a seed draws a new one.
    learning: how the draft learns.
    partition: device mesh; learning needs a single device.
    learn: False freezes the draft. A cache adapts either way.
    model_name: name of the model in requests and answers.
    host: address to listen on; the default is this machine only.
    port: port to listen on; 0 takes a free one.
    max_waiting: answers that may wait while all rows are taken; more get status 429.
      None: as many as there are rows, so that none waits much longer than an answer
      takes.
    shutdown_seconds: after SIGTERM, requests in flight have this long to finish.
    run_directory: keeps the draft, checkpoints, and the token ids of answers until the
      draft has learnt from them; the same command continues. "" keeps nothing.
    checkpoint_every: answers between checkpoints.
    overwrite: remove the run in this folder and start over.
    keep_answers: False writes weights and the optimizer's state to the run directory,
      but no token of a request. A server that is killed loses what it has learnt since
      the last checkpoint, and a restarted one begins with an empty replay buffer.
    record_seconds: records older than this are removed from the buffer, the journal and
      the checkpoints, and the n-gram cache is emptied so often; 0 keeps them. Up to a
      tenth of this time passes until it happens.
    stream_tokens: tokens of each piece of a streamed answer, so that the size of a
      packet does not tell how many were accepted; 0 sends what a call has accepted.
    share_cache: tenants use each other's entries of the n-gram cache. Answers are then
      faster where another tenant has had the same text, which tells that it had it.
  """

  pair: pairs.PairConfig | pairs.Pair = pairs.PairConfig()
  decoding: DecodingConfig = DECODING
  sampling: SamplingConfig | OwnSampling = SamplingConfig(temperature=1.0)
  learning: LearningConfig = LEARNING
  partition: sharding.PartitionConfig = sharding.PartitionConfig()
  learn: bool = True
  model_name: base.Path = "osd"
  host: base.Path = "127.0.0.1"
  port: Annotated[int, base.Between(0, 65535)] = 8000
  max_waiting: base.CountOrZero | None = None
  shutdown_seconds: base.NonNegative = 30.0
  run_directory: str = ""
  checkpoint_every: base.Count = 100
  overwrite: bool = False
  keep_answers: bool = True
  record_seconds: base.NonNegative = 0.0
  stream_tokens: base.CountOrZero = 0
  share_cache: bool = False

  def checks(self):
    learns = self.learns
    return {
      "learning": (
        not learns or self.learning.free_updates,
        "free_updates = True: serving does not wait for updates",
      ),
      "decoding": (
        not learns or self.decoding.record_top_k >= 1,
        "record_top_k >= 1: the draft learns from the records",
      ),
    }

  @property
  def places(self) -> int:
    """Answers that may wait while all rows are taken."""
    return self.decoding.rows if self.max_waiting is None else self.max_waiting

  @property
  def learns(self) -> bool:
    """Whether a draft is trained; a cache adapts without training."""
    return self.learn and not pairs.adapts_untrained(self.pair)


class Service:
  """The parts of a running server.

  Attributes:
    config: its settings.
    scheduler: the queue and the serving thread.
    metrics: counters and histograms.
    tenants: whose requests there are.
  """

  def __init__(
    self,
    config: ServeConfig,
    directory: Path | None = None,
    clock: Callable[[], float] = time.time,
  ):
    """Loads the pair, restores what was learnt, and compiles every call."""
    self.config, self._directory, self._clock = config, directory, clock
    self.tenants = Tenants(config.share_cache)
    self.sampling = generation_config.resolved(config.sampling, config.pair)
    self.server = server.Server(
      config.pair, config.decoding, config.learning, config.partition
    )
    most = config.decoding.num_draft_tokens
    self.metrics = Metrics(config.model_name, most, self._sources())
    vocabulary = self.server.pair.vocabulary
    # /v1/completions continues the text as it is; only a chat has a template.
    self._untemplated = dataclasses.replace(vocabulary, template=None)
    self.learning: Learning | None = None
    self._plain: dict[int, RoundCosts] = {}
    self._warm_up()
    background.return_memory()  # compiling needs more than serving
    if config.learns:
      self.learning = Learning(
        self.server,
        directory,
        config.checkpoint_every,
        self._learned,
        config.record_seconds,
        config.keep_answers,
        clock,
      )
    self.scheduler = Scheduler(
      self.server,
      config.places,
      self._finished,
      self.metrics.called,
      config.stream_tokens,
    )
    self.scheduler.start()
    self._is_closed, self._cache_began = threading.Event(), clock()
    if config.record_seconds:
      threading.Thread(target=self._expire_often, daemon=True).start()

  def encode(self, text: str | tuple[int, ...], is_chat: bool) -> np.ndarray:
    """Returns the token ids of a prompt or conversation, [n] int32."""
    if isinstance(text, tuple):
      return np.asarray(text, np.int32)
    keeps_template = is_chat or isinstance(text, chat.Conversation)
    vocabulary = self.server.pair.vocabulary if keeps_template else self._untemplated
    return vocabulary.encode_prompt(text)

  def submit(self, ask: protocol.Ask) -> Call:
    """Queues the answers that a request asks for; raises as `Scheduler.submit`."""
    prompts = [self.encode(one, ask.is_chat) for one in ask.inputs]
    tenant = self.tenants.of(ask.tenant)
    return self.scheduler.submit(prompts, ask.prompt, ask.n, ask.stream, tenant)

  async def choice(self, ask: protocol.Ask, event: Event) -> protocol.Choice:
    """Returns the finished answer of an event."""
    job, done = event.job, event.done
    assert done is not None
    text, found = job.text.finish(done.tokens)[0], None
    if ask.echo:
      text = f"{ask.inputs[job.index // ask.n]}{text}"
    if ask.top_logprobs is not None:
      found = await asyncio.to_thread(self._log_probs, ask, done)
    return protocol.Choice(
      job.index, text, finish_reason(done), len(job.request.tokens), done, found
    )

  async def draft(self) -> bytes:
    """Returns the newest draft as a file that `PairConfig.draft` reads.

    Raises:
      InputError: the draft is broken, or a cache, which has no weights.
    """

    def write() -> bytes:
      with tempfile.TemporaryDirectory() as folder:
        path = self.server.save(Path(folder) / "draft.safetensors", "osd serve")
        return path.read_bytes()

    if self.learning is None:
      return await asyncio.to_thread(write)
    return await asyncio.wrap_future(self.learning.submit(write))

  async def load_draft(self, path: Path) -> int:
    """Serves the draft in a file; returns its version.

    A draft that learns goes on from it, after the answers that wait to be learnt from.

    Raises:
      InputError: the file holds no such draft.
    """
    server, learning = self.server, self.learning
    params = await asyncio.to_thread(server.pair.load_draft, path)
    if learning is None:
      return await asyncio.to_thread(server.serve_draft, params)
    return await asyncio.wrap_future(learning.submit(lambda: learning.load(params)))

  async def clear_cache(self) -> None:
    """Empties the n-gram cache; rows in flight add their answers later.

    Raises:
      InputError: there is none.
    """
    if "cache" not in self._sources():
      raise base.InputError(
        "the n-gram cache: this server has none, expected one with"
        " DecodingConfig.cache_tokens; nothing is to be emptied."
      )
    emptied = self.scheduler.between_calls(self.server.engine.clear_memory)
    await asyncio.wrap_future(emptied)

  async def forget_tenant(self, name: str) -> None:
    """Removes a tenant's records and cache entries; see `Learning.forget`.

    Its requests in flight are answered first; nothing is kept of them.

    Raises:
      InputError: the records cannot be removed; the error says why.
    """
    if self.learning is None and self._directory is not None:
      if self.config.keep_answers and (self._directory / "checkpoints").exists():
        raise base.InputError(
          f"tenant {name}: this server does not learn, but its run directory holds"
          " records; start it with ServeConfig.learn = True, then delete the tenant."
        )
    former = self.tenants.forget(name)
    while self.scheduler.holds(former):
      await asyncio.sleep(0.02)
    if self.config.share_cache:  # nothing says whose entries these are
      clear = self.server.engine.clear_memory
      await asyncio.wrap_future(self.scheduler.between_calls(clear))
    if (learning := self.learning) is not None:
      drops = lambda tag: tag["tenant"] == name
      await asyncio.wrap_future(learning.submit(lambda: learning.forget(drops)))

  def expire(self) -> None:
    """Removes what is older than `record_seconds`, and waits for it.

    The entries of the cache have no times, so all leave it when the oldest may be too
    old.
    """
    if self._clock() - self._cache_began > self.config.record_seconds:
      self.scheduler.between_calls(self.server.engine.clear_memory).result()
      self._cache_began = self._clock()
    if self.learning is not None:
      self.learning.submit(self.learning.expire).result()

  def _expire_often(self) -> None:
    pause = min(max(self.config.record_seconds / 10, 1), 3600)
    # While the server stops, calls are cancelled or refused.
    with contextlib.suppress(RuntimeError, CancelledError, EngineFailedError):
      while not self._is_closed.wait(pause):
        self.expire()

  def live(self) -> dict[str, Any]:
    """Returns what the live page shows."""
    load, learning = self.scheduler.load, self.learning
    return {
      **self.metrics.snapshot(),
      "model": self.config.model_name,
      "running": load.running,
      "waiting": load.waiting,
      "rows": self.server.engine.capacity,
      "draining": load.draining,
      "failure": "" if load.failure is None else first_line(load.failure),
      "seconds": time.monotonic(),
      "draft_version": self.server.engine.draft_version,
      "learning": learning is not None,
      "learned": learning.finished if learning else 0,
      "records_waiting": learning.waiting if learning else 0,
      "learning_failure": learning.failure if learning else "",
      "num_draft_tokens": self.config.decoding.num_draft_tokens,
    }

  def exposition(self) -> bytes:
    """Returns all metrics in Prometheus' text format."""
    learning = self.learning
    gauges = {
      "osd:draft_version": self.server.engine.draft_version,
      "osd:records_waiting": learning.waiting if learning else 0,
      "osd:records_dropped": learning.dropped if learning else 0,
      "osd:learning_failed": learning is not None and bool(learning.failure),
    }
    return self.metrics.text(self.scheduler.load, gauges)

  def close(self) -> None:
    """Stops serving, learns from what is left, and saves the draft."""
    self._is_closed.set()
    self.scheduler.stop()
    if self.learning is not None:
      is_complete = self.learning.close(self.config.shutdown_seconds)
      if self._directory is not None and is_complete:
        path = self.server.save(self._directory / "draft.safetensors", "osd serve")
        print(f"adapted draft: {path}", file=sys.stderr, flush=True)
    self.server.close()
    self.metrics.close()

  def _warm_up(self) -> None:
    """Compiles every call, so that no request waits for it."""
    self.server.warm_up(self.config.learns)
    # A row that is stopped, and log-probabilities, have programs of their own.
    prompt = self.encode("-", is_chat=False)
    request = Request(prompt, watch=lambda tokens: 1, remember=False)
    (done,) = self.server.run([request])
    pair = self.server.pair
    agreement.emitted_log_probs(pair.target, pair.target_params, done.batch)
    if pair.draft is not None:
      engine = self.server.engine
      buckets = engine.config.source_lengths
      seconds = PLAIN_SECONDS / len(buckets)
      self._plain = {
        bucket: measurement.measure(engine, bucket, seconds, is_plain=True)
        for bucket in buckets
      }
      # Clients wait for every round of a slow target, so its calls are short.
      step_ms = min(costs.rounds().item() for costs in self._plain.values())
      rounds = math.ceil(CALL_MS / step_ms)
      engine.watched_rounds = min(rounds, engine.watched_rounds)

  def _sources(self) -> list[str]:
    """What names drafted tokens in this pair."""
    pair = self.server.pair
    is_cache = pairs.adapts_untrained(pair)
    sources = ["draft"] if pair.draft is not None and not is_cache else []
    return [*sources, *["cache"] * (is_cache or self.config.decoding.cache_tokens > 0)]

  def _plain_seconds(self, job: Job, prefill_ms: float) -> float:
    """Estimated seconds of plain decoding for an answer; 0 if nothing is drafted."""
    if not self._plain:
      return 0.0
    bucket = self.config.decoding.bucket(len(job.request.tokens))
    costs, sampled = self._plain[bucket], job.request.sampling.needs_sampling
    # A call has this many rounds at most, because every request is watched.
    call_ms = costs.call_ms / self.server.engine.watched_rounds
    steps = job.plain_steps.items()
    ms = sum(count * (costs.rounds(sampled, n).item() + call_ms) for n, count in steps)
    return (prefill_ms + ms) / 1e3

  def _log_probs(self, ask: protocol.Ask, done: Finished) -> dict[str, Any]:
    pair = self.server.pair
    chosen = agreement.emitted_log_probs(pair.target, pair.target_params, done.batch)
    return protocol.log_probs(ask, done, np.asarray(chosen)[0], pair.vocabulary.decode)

  def _finished(self, job: Job, done: Finished) -> None:
    """Counts an answer and lets the draft learn from it; on the serving thread."""
    plain = self._plain_seconds(job, done.prefill_ms)
    self.metrics.count(job, done, time.perf_counter(), plain)
    is_dropped = functools.partial(self.tenants.is_forgotten, job.tenant)
    if self.learning is not None and job.prompt.learn and not is_dropped():
      self.learning.add(done, job.tenant.name, is_dropped)

  def _learned(
    self, overlap: float, floor: float | None, outcome: Outcome | None
  ) -> None:
    seconds = None if outcome is None else outcome.update_ms / 1e3
    self.metrics.learned(overlap, floor, seconds)
