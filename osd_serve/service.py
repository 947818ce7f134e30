"""What `osd serve` runs: the server, its queue, the loop and the metrics."""

import asyncio
import dataclasses
import functools
import hashlib
import logging
import math
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from osd_jax import background, base, pairs, runs, sharding
from osd_jax.data import chat
from osd_jax.distillation.learner import LearningConfig
from osd_jax.engine import agreement, generation_config, measurement, server
from osd_jax.engine.requests import (
  DecodingConfig,
  Finished,
  OwnSampling,
  Request,
  SamplingConfig,
)
from osd_jax.loop.loop import Loop, Settings
from osd_serve import protocol
from osd_serve.metrics import Metrics, finish_reason
from osd_serve.rating import Rating
from osd_serve.scheduler import (
  Call,
  Event,
  Job,
  Scheduler,
  Turn,
  first_line,
)

# Several rows, and updates that serving never waits for.
DECODING = dataclasses.replace(server.DECODING, rows=4)
LEARNING = LearningConfig(free_updates=True)
PLAIN_SECONDS = 1.0  # for measuring plain steps at the start, without compiling
FLOOR_EVERY = 4  # one of so many answers is measured with the first draft, too
HISTORY = 600  # points of the live page's plots
PLOTTED = (
  *("seconds", "tokens", "speed", "tokens_per_target_call", "by_draft_per_call"),
  *("by_cache_per_call", "overlap", "floor_overlap", "saved_seconds"),
  *("update_seconds", "traffic_shifts"),
)
CALL_MS = 8.0  # a call that takes this long has no further rounds


@dataclasses.dataclass(frozen=True)
class ServeConfig(base.Config):
  """Settings of `osd serve`.

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
    run_directory: folder for logs, checkpoints, the draft, and all answers with their
      token ids; the same command continues. "" keeps nothing.
    checkpoint_every: answers between checkpoints.
    overwrite: remove the run in this folder and start over.
    compare_every: n; also serve one of n answers, chosen at random, with plain decoding
      and with the first draft, while all clients wait. The verdict on learning is
      measured on these. 0 compares none.
    keep_answers: False writes weights and the optimizer's state to the run directory,
      but no token of a request. A server that is killed loses what it has learned since
      the last checkpoint, and a restarted one begins with an empty replay buffer.
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
  compare_every: base.CountOrZero = 0
  keep_answers: bool = True

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
      "compare_every": (
        not self.compare_every or (learns and self.keep_answers),
        "0 without learning or with keep_answers = False: an answer that differs from"
        " plain decoding's is logged with its tokens",
      ),
    }

  @property
  def places(self) -> int:
    """Answers that may wait while all rows are taken."""
    return self.decoding.rows if self.max_waiting is None else self.max_waiting

  @property
  def learns(self) -> bool:
    """Whether a draft is trained; the cache adapts without training."""
    return self.learn and pairs.can_learn(self.pair)


class Service:
  """The parts of a running server.

  Attributes:
    config: its settings.
    scheduler: the queue and the serving thread.
    loop: measures, learns from and logs the answers.
    history: the numbers of the live page's plots since the start.
    metrics: counters and histograms.
  """

  def __init__(self, config: ServeConfig, directory: runs.RunDirectory | None = None):
    """Loads the pair, restores the learned draft, and compiles calls."""
    self.config, started = config, time.perf_counter()
    self.history: list[dict[str, float | None]] = []
    # Drawn at every start, so that nobody can choose two texts with the same salt.
    self._salt_key = secrets.token_bytes(32)
    self.sampling = generation_config.resolved(config.sampling, config.pair)
    self.server = server.Server(
      config.pair, config.decoding, config.learning, config.partition
    )
    most = config.decoding.num_draft_tokens
    self.metrics = Metrics(config.model_name, most, self._sources())
    vocabulary = self.server.pair.vocabulary
    # /v1/completions continues the text as it is; only a chat has a template.
    self._untemplated = dataclasses.replace(vocabulary, template=None)
    self._rating: Rating | None = None
    self.scheduler = Scheduler(
      self.server, config.places, self._finished, self._turned, self._between
    )
    self.loop = self._make_loop(directory)
    self.loop.log.on_row = self.metrics.row
    loaded = time.perf_counter()
    self._warm_up()
    background.return_memory()  # compiling needs more than serving
    compiled = time.perf_counter()
    self.loop.restore()
    self.loop.start(loaded - started, compiled - loaded)
    self.scheduler.start(self.loop.step)

  def encode(self, text: str | tuple[int, ...], is_chat: bool) -> np.ndarray:
    """Returns the token ids of a prompt or conversation, [n] int32."""
    if isinstance(text, tuple):
      return np.asarray(text, np.int32)
    keeps_template = is_chat or isinstance(text, chat.Conversation)
    vocabulary = self.server.pair.vocabulary if keeps_template else self._untemplated
    return vocabulary.encode_prompt(text)

  def prompts(self, ask: protocol.Ask) -> list[np.ndarray]:
    """Returns the token ids of the prompts of a request; takes as long as they do.

    Raises:
      Refusal: a prompt or the length limit of the answers is too long.
    """
    decoding = self.config.decoding
    received, most = ask.longest, decoding.target_length
    if received is not None and received > most:
      name = ask.longest_name
      message = f"received {received}, expected at most {most}, the longest answer of"
      raise protocol.wrong(name, name, f"{message} this server")
    longest, prompts = decoding.source_lengths[-1], []
    for one in ask.inputs:
      if isinstance(one, str) and _size(one) > self._longest_text:
        raise _too_long(ask, f"more than {longest}", longest)
      prompts.append(self.encode(one, ask.is_chat))
      if len(prompts[-1]) > longest:
        raise _too_long(ask, str(len(prompts[-1])), longest)
    return prompts

  def submit(self, ask: protocol.Ask, prompts: Sequence[np.ndarray]) -> Call:
    """Queues the answers to the prompts of a request; raises as `Scheduler.submit`."""
    salt, settings = self._salt(ask.cache_salt), ask.settings(self.sampling)
    words = self.server.pair.vocabulary
    decode = words.decode if ask.is_chat else words.decode_continuation
    return self.scheduler.submit(prompts, settings, ask.n, ask.stream, salt, decode)

  @functools.cached_property
  def _longest_text(self) -> float:
    """Characters of text that no prompt can hold, because every token has a piece."""
    vocabulary = self._untemplated
    if not vocabulary.is_causal:  # T5's unknown token stands for any number of them
      return math.inf
    longest_piece = max(map(len, vocabulary.pieces))
    return self.config.decoding.source_lengths[-1] * longest_piece

  async def choice(self, ask: protocol.Ask, event: Event) -> protocol.Choice:
    """Returns the finished answer of an event."""
    job, answer = event.job, event.done
    assert answer is not None
    text, scores = job.text.finish(answer.tokens)[0], None
    if ask.echo:
      text = f"{ask.inputs[job.index // ask.n]}{text}"
    if ask.top is not None:
      scores = await asyncio.to_thread(self._log_probs, ask, answer)
    return protocol.Choice(
      job.index, text, finish_reason(answer), len(job.request.tokens), answer, scores
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

    return await asyncio.wrap_future(self.loop.submit(write))

  async def load_draft(self, path: Path) -> int:
    """Serves the draft in a file; returns its version.

    A draft that learns goes on from it, after the answers that wait for the learner.

    Raises:
      InputError: the file holds no such draft.
    """
    params = await asyncio.to_thread(self.server.pair.load_draft, path)
    return await asyncio.wrap_future(self.loop.submit(lambda: self.loop.load(params)))

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

    def clear() -> None:
      self.server.engine.clear_memory()
      self.loop.copy_memory()

    await asyncio.wrap_future(self.scheduler.between_calls(clear))
    await asyncio.wrap_future(self.loop.submit(self.loop.forget_memory))

  def live(self) -> dict[str, Any]:
    """Returns what the live page shows."""
    load, loop = self.scheduler.load, self.loop
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
      "learning": self.config.learns,
      "learned": self.loop.learned,
      "records_waiting": loop.waiting,
      "learning_failure": loop.failure,
      "num_draft_tokens": self.config.decoding.num_draft_tokens,
    }

  async def watch(self) -> None:
    """Adds to the history, every second at first; old points are thinned out."""
    every = 1.0
    while True:
      now = self.live()
      self.history.append({name: now[name] for name in PLOTTED})
      if len(self.history) > HISTORY:
        del self.history[1:-1:2]
        every *= 2
      await asyncio.sleep(every)

  def exposition(self) -> bytes:
    """Returns all metrics in Prometheus' text format."""
    gauges = {
      "osd:draft_version": self.server.engine.draft_version,
      "osd:records_waiting": self.loop.waiting,
      "osd:records_dropped": self.loop.dropped,
      "osd:learning_failed": bool(self.loop.failure),
    }
    return self.metrics.text(self.scheduler.load, gauges)

  def close(self) -> None:
    """Stops serving, learns from the remaining answers, and saves the draft."""
    self.scheduler.stop()
    self.loop.close(self.loop.seconds, self.config.shutdown_seconds)
    self.metrics.close()

  def _make_loop(self, directory: runs.RunDirectory | None) -> Loop:
    config = self.config
    if config.learns and not self.server.learner.runner.in_background:
      raise base.InputError(
        "ServeConfig.learn: received True with a mesh of several devices, expected one"
        " device: updates run next to serving. Set learn = False or use one device."
      )
    settings = Settings(
      config.learning,
      config.partition,
      learns=config.learns,
      floor_every=FLOOR_EVERY,
      compare_every=config.compare_every,
      checkpoint_every=config.checkpoint_every,
      keep_outputs="ids" if config.keep_answers else "numbers",
      in_background=True,
      is_live=True,
    )
    announce = logging.getLogger(__name__).warning
    return Loop(self.server, self.scheduler, directory, settings, announce)

  def _warm_up(self) -> None:
    """Compiles what the first requests need, and starts to compile the rest."""
    self.server.warm_up(self.config.learns, in_background=True)
    self.loop.meter.warm_up()
    # A row that is stopped, and log-probabilities, have programs of their own.
    prompt = self.encode("-", is_chat=False)
    request = Request(prompt, watch=lambda tokens: 1, remember=False)
    (answer,) = self.server.run([request])
    pair = self.server.pair
    agreement.emitted_log_probs(pair.target, pair.target_params, answer.batch)
    if pair.draft is not None:
      engine = self.server.engine
      plain = measurement.PlainRounds(engine, PLAIN_SECONDS)
      # Clients wait for every round of a slow target, so its calls are short.
      step_ms = min(costs.rounds()[0, 0] for costs in plain.tables.values())
      rounds = math.ceil(CALL_MS / step_ms)
      engine.watched_rounds = min(rounds, engine.watched_rounds)
      self._rating = Rating(plain, engine.watched_rounds)

  def _salt(self, text: str | None) -> int:
    """Returns the salt of cache entries, 64 bits, for a request's `cache_salt`."""
    if not text:
      return 0
    digest = hashlib.blake2b(text.encode(), key=self._salt_key, digest_size=8)
    return int.from_bytes(digest.digest(), "big")

  def _sources(self) -> list[str]:
    """What names drafted tokens in this pair."""
    pair = self.server.pair
    is_cache = pairs.adapts_untrained(pair)
    sources = ["draft"] if pair.draft is not None and not is_cache else []
    return [*sources, *["cache"] * (is_cache or self.config.decoding.cache_tokens > 0)]

  def _turned(self, turn: Turn) -> None:
    """Counts a turn; on the serving thread."""
    self.metrics.called(turn.tokens)
    call = self.server.engine.last_call
    if self._rating is not None and call is not None:
      self._rating.add(turn, call)

  def _between(self) -> None:
    """Times plain decoding again if it is due; on the serving thread."""
    if self._rating is not None:
      self._rating.time_again()

  def _log_probs(self, ask: protocol.Ask, done: Finished) -> dict[str, Any]:
    pair = self.server.pair
    emitted = agreement.emitted_log_probs(pair.target, pair.target_params, done.batch)
    return protocol.log_probs(ask, done, np.asarray(emitted)[0], pair.vocabulary)

  def _finished(self, job: Job, done: Finished) -> None:
    """Counts an answer; on the serving thread."""
    self.metrics.count(job, done, time.perf_counter())


def _size(text: str) -> int:
  """Number of characters that a prompt has at least."""
  if isinstance(text, chat.Conversation):
    return sum(len(message["content"]) for message in text.messages)
  return len(text)


def _too_long(ask: protocol.Ask, count: str, longest: int) -> protocol.Refusal:
  """Refuses a prompt; clients shorten a conversation if they know this code."""
  name = "messages" if ask.is_chat else "prompt"
  message = (
    f"received {count} tokens, but the maximum context length for prompts is {longest}"
    " tokens, the last of DecodingConfig.source_lengths; reduce the length of the"
    f" {name}"
  )
  return protocol.wrong(name, name, message, "context_length_exceeded")
