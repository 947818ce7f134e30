"""The front door: prompts in, the target's answers out, with a draft that may learn.

Commands and services use this object: it alone submits requests, collects answers and
swaps drafts. `generate` and `stream` take text; `serve` and `run` take tokens.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, metrics, pairs, sharding
from osd_jax.distillation.learner import Learner, LearningConfig, Outcome
from osd_jax.engine import agreement
from osd_jax.engine.engine import Engine
from osd_jax.engine.requests import (
  AdaptiveConfig,
  Answer,
  DecodingConfig,
  Finished,
  Prompt,
  Request,
  TextSoFar,
  in_order,
)

SHIPPED, ONE_DEVICE = pairs.PairConfig(), sharding.PartitionConfig()
TUNED = LearningConfig()

# One bucket, because the learner pads every prompt to the longest one.
DECODING = DecodingConfig(num_draft_tokens=7)

_FEW = (3, 7)  # numbers of tokens of a verification; each takes time to compile
_END: Any = object()  # of an iterator; None means that no request is waiting now


def by_worth(decoding: DecodingConfig) -> DecodingConfig:
  """Adds an n-gram cache, and lets every round choose how much it drafts.

  So a draft that knows nothing yet costs nothing. Several processes share no cache, and
  keep what was set.
  """
  if jax.process_count() > 1:
    return decoding
  largest = decoding.num_draft_tokens
  candidates = (0, *(k for k in _FEW if k < largest), largest)
  return dataclasses.replace(
    decoding,
    cache_tokens=decoding.cache_tokens or 2**16,
    adaptive=decoding.adaptive or AdaptiveConfig(candidates),
  )


@dataclasses.dataclass
class Statistics:
  """Totals of a server.

  Attributes:
    requests: answered requests.
    tokens: emitted tokens.
    target_calls: verifications.
    drafted: drafted tokens that were judged.
    accepted: drafted tokens that were accepted.
    milliseconds: time of prefills and calls, without compiling.
    updates: updates of the draft.
  """

  requests: int = 0
  tokens: int = 0
  target_calls: int = 0
  drafted: int = 0
  accepted: int = 0
  milliseconds: float = 0.0
  updates: int = 0

  @property
  def tokens_per_target_call(self) -> float:
    """Block efficiency: emitted tokens per verification; 0 before the first answer."""
    return metrics.tokens_per_target_call(self.tokens, self.target_calls) or 0.0

  @property
  def tokens_per_second(self) -> float:
    """Emitted tokens over the time of decoding."""
    return 1e3 * self.tokens / max(self.milliseconds, 1e-9)

  def count(self, done: Finished) -> None:
    """Adds an answered request."""
    self.requests += 1
    self.tokens += len(done.tokens)
    self.target_calls += done.target_calls
    self.drafted += done.drafted
    self.accepted += done.accepted
    self.milliseconds += done.milliseconds


class Server:
  """Serves a target with its draft.

  >>> prompt = "What is the average rating and the total price of hotels with price"
  >>> prompt += " above 44 and country 'Italy'?"
  >>> with Server() as server:
  ...   for answer in server.generate([prompt]):
  ...     print(answer.text)
  SELECT AVG(rating), SUM(price) FROM hotels WHERE price > 44 AND country = 'Italy';

  Only one thread may use it, for one call at a time; another call raises. A second
  thread may call `learn` in the `background` meanwhile, or `close`.

  Attributes:
    pair: target, draft and vocabulary.
    engine: the rows in flight, an `Engine` or an object with its surface.
    statistics: totals so far.
  """

  def __init__(
    self,
    pair: pairs.PairConfig | pairs.Pair | str = SHIPPED,
    decoding: DecodingConfig = DECODING,
    learning: LearningConfig = TUNED,
    partition: sharding.PartitionConfig = ONE_DEVICE,
    engine: Callable[..., Any] | None = None,
    *,
    target: str = "",
  ):
    """Loads the pair; calls are compiled when the first prompt of a bucket arrives.

    If costs are learned while serving, a thread compiles drafting. Decoding is plain
    until then.

    Args:
      pair: files of the pair, the shipped one by default, or a loaded pair; one
        without a draft decodes plainly. A text is the target of a `PairConfig`.
      decoding: rows in flight, K, lengths and records.
      learning: how the draft learns, if it learns.
      partition: mesh over the devices.
      engine: makes the engine from (decoding, the `pair` that was given, the loaded
        pair, partition); None: an `Engine` in this process. See `ReplicaConfig.engine`.
      target: folder or file of a target, instead of `pair`. The draft is a new one,
        mixed with an n-gram cache, which rests until it is trained.

    Raises:
      InputError: a file is missing or broken, or the parts do not belong together.
    """
    if target or isinstance(pair, str):
      pair = pairs.PairConfig(target=target or str(pair))
    partitioner = sharding.make(partition)
    self.pair = pairs.load_pair(pair, partitioner)
    if self.pair.is_new:
      decoding = by_worth(decoding)
    self.pair = self.pair.with_cache_size(decoding.cache_tokens)
    self.engine: Any = (
      Engine(decoding, *self.pair.models, partitioner)
      if engine is None
      else engine(decoding, pair, self.pair, partition)
    )
    if self.pair.is_new and engine is None:
      self.engine.controller.rest()
    self.statistics = Statistics()
    self._learning = learning
    self._learner: Learner | None = None
    # The learning thread sets it in one assignment; the serving thread swaps it in
    # between two calls.
    self._pending_draft: base.Draft | None = None
    self._is_closed = False
    self._process = os.getpid()
    self._answering = threading.Lock()  # held during a call, by whichever thread
    self._stepping = threading.RLock()  # so that `close` waits for a compiled call

  def __enter__(self) -> "Server":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def learner(self) -> Learner:
    """The learner, made at its first use.

    Raises:
      InputError: there is no draft that can be trained, or no records to learn from.
    """
    if self._learner is None:
      config = self.engine.config
      if self.pair.draft is None or config.record_top_k < 1:
        raise base.InputError(
          "Server: a draft that learns needs a pair with a draft, and"
          f" DecodingConfig.record_top_k >= 1 (received {config.record_top_k})."
        )
      if pairs.adapts_untrained(self.pair):
        raise base.InputError(
          f"Server: the {self.pair.draft.name} takes up every answer without training,"
          " so there is no learner; leave `learn` out."
        )
      self._learner = Learner(
        self.pair.draft,
        self.pair.draft_params,
        self._learning,
        config.source_lengths[-1],
        config.target_length,
        config.record_top_k,
      )
    return self._learner

  @property
  def draft_params(self) -> base.Params:
    """Parameters of the newest draft, or of the one that the gate has chosen."""
    return self.pair.draft_params if self._learner is None else self._learner.serving

  @property
  def shortlist(self) -> Any:
    """[N] int32, the tokens that this draft's output head covers; None: all."""
    return (self._pending_draft or self.engine).shortlist

  @property
  def is_learning(self) -> bool:
    """Whether an update is running."""
    return self._learner is not None and self._learner.runner.is_running

  def generate(
    self,
    prompts: str | Prompt | Iterable[str | Prompt | None],
    *,
    learn: bool = False,
    ordered: bool = False,
    return_failed: bool = False,
    **settings: Any,
  ) -> Iterator[Answer]:
    """Answers prompts lazily, so both prompts and answers may be endless.

    If a prompt is refused, or `prompts` itself raises, the answers of earlier prompts
    are yielded before the error is raised.

    Args:
      prompts: texts, or `Prompt`s with their own settings. At most one prompt per row
        is taken before its predecessors are answered. None means that no prompt is
        waiting now: an iterator over a queue yields it, so that rows in flight go on.
      learn: the draft learns from the answers.
      ordered: yields answers in the order of the prompts, not as they finish.
      return_failed: a prompt that is refused gets an answer with the stop reason
        REFUSED, one with a broken target NOT_FINITE. Otherwise both raise.
      **settings: fields of `Prompt` for the texts; the i-th draws with seed + i.

    Yields:
      One answer per prompt.

    Raises:
      InputError: a prompt or a setting is invalid; the error names it.
      NotFiniteError: the target's logits were not finite.
    """
    call = _Call(ordered, return_failed)
    with self._one_call(clears=True):
      try:
        for finished in self._serve(self._requests(prompts, settings, call)):
          for answer in finished:
            call.add(self._answer(answer, learn))
          yield from call.ready()
      except Exception as error:
        call.failure = call.failure or error
      yield from call.rest()
    if call.failure is not None:
      raise call.failure

  def stream(
    self, prompt: str | Prompt, *, learn: bool = False, **settings: Any
  ) -> Iterator[str]:
    """Yields the text of one answer in pieces, while its tokens are accepted.

    Args:
      prompt: a text, or a `Prompt`.
      learn: the draft learns from the answer.
      **settings: fields of `Prompt`, as in `generate`.

    Yields:
      Pieces that together are the answer's text.
    """
    request = self._request(0, prompt, settings, is_streamed=True)
    _, settled, text = request.tag
    with self._one_call(clears=True):
      for finished in self._serve([request]):
        # `watch` has read the tokens during the call; only the certain part is shown.
        piece = text.next_piece()
        for answer in finished:
          piece += text.finish(answer.tokens)[1]
          if learn and settled.learn:
            self.learn(answer)
        if piece:
          yield piece
        for answer in finished:
          _check_finite(0, answer.stop_reason)

  def serve(self, requests: Iterable[Request | None]) -> Iterator[list[Finished]]:
    """Answers requests of tokens: submits them as rows become free, and collects.

    Args:
      requests: may be endless; no more are taken than there are free rows. None means
        that no request is waiting now; rows in flight go on.

    Yields:
      The requests that finished in each call, possibly none.
    """
    with self._one_call():
      yield from self._serve(requests)

  def _serve(self, requests: Iterable[Request | None]) -> Iterator[list[Finished]]:
    coming, request, engine = iter(requests), None, self.engine
    failure: Exception | None = None
    while not self._is_closed:
      while engine.in_flight < engine.capacity and failure is None:
        try:
          request = next(coming, _END)
          if request is None or request is _END:
            break
          engine.submit(request)
        except Exception as error:
          failure, request = error, _END  # raised when the rows in flight have ended
      # With a free row and a caller that has more prompts soon, calls stay short, so
      # that the next prompt does not wait for many rounds.
      engine.expecting = request is None and engine.in_flight < engine.capacity
      if request is _END and not engine.in_flight:
        break
      finished: list[Finished] = []
      if engine.in_flight:
        self.swap_pending()
        if self._learner is not None:
          self._learner.wait_if_behind(engine.in_flight)
        with self._stepping:
          finished = [] if self._is_closed else engine.step()
      for answer in finished:
        self.statistics.count(answer)
      yield finished
    if failure is not None:
      raise failure

  def run(
    self,
    requests: Sequence[Request],
    on_finished: Callable[[Finished], object] = lambda answer: None,
  ) -> list[Finished]:
    """Answers all requests of tokens; returns the results in order.

    Args:
      requests: any number; all are checked before the first is answered.
      on_finished: called as each one finishes, for progress.
    """
    answers: list[Finished] = []
    with self._one_call(clears=True):
      for request in requests:
        self.engine.check(request)
      for finished in self._serve(requests):
        for answer in finished:
          on_finished(answer)
          answers.append(answer)
    if self._is_closed:
      raise base.InputError("Server.run: the server was closed during this call.")
    return in_order(requests, answers)

  def learn(
    self,
    done: Finished,
    overlap: float | None = None,
    background: bool = False,
    rivals: Mapping[str, float] | None = None,
  ) -> Outcome | None:
    """Passes an answer to the learner; swaps in a draft whose update has ended.

    Args:
      done: the finished request with its records.
      overlap: overlap of the serving draft with it; None measures it.
      background: another thread serves meanwhile, and swaps the draft in at its next
        call.
      rivals: the result of `score_rivals`; None measures it.

    Returns:
      The update that has ended, if there was one. Its draft serves from now on, unless
      the gate decides otherwise.
    """
    self._check_process()
    if not _teaches(done):
      return None
    if rivals is None:
      rivals = self.score_rivals(done)
    if overlap is None:
      overlap = self._overlap(self.learner.serving, done)
    mixed = None
    if self.engine.config.cache_tokens and done.drafted:
      mixed = done.accepted / done.drafted
    score = lambda params: self._overlap(params, done)
    outcome = self.learner.observe(done.batch, overlap, mixed, rivals, score)
    return self._publish(outcome, background)

  def score_rivals(
    self, done: Finished, floor_overlap: float | None = None
  ) -> dict[str, float]:
    """Returns the overlaps of an answer that the gate needs; see `Learner.rivals`.

    Args:
      done: the finished request with its records.
      floor_overlap: overlap of the first draft, if it was measured already.
    """
    if not _teaches(done):
      return {}
    overlaps = {}
    for name, params in self.learner.rivals.items():
      if floor_overlap is not None and params is self.pair.draft_params:
        overlaps[name] = floor_overlap
      else:
        overlaps[name] = self._overlap(params, done)
    return overlaps

  def finish_learning(self, background: bool = False) -> Outcome | None:
    """Waits for a running update and takes its draft; `background` as in `learn`."""
    if self._learner is None:
      return None
    return self._publish(self._learner.finish(), background)

  def seed(self, batches: Iterable[base.DistillationBatch]) -> None:
    """Fills the buffer before the first request, and chooses a short head from it."""
    self.learner.seed(batches)
    self.engine.swap(self.draft_params, 0, self.learner.shortlist())

  def warm_up(self, learn: bool = False, in_background: bool = False) -> None:
    """Compiles the calls of every bucket now, so that no request waits for it.

    `in_background`: with a new draft, only plain decoding is compiled now. Threads
    compile drafting and updates while requests are answered.
    """
    engine = self.engine
    is_new = isinstance(engine, Engine) and engine.controller.rests
    in_background = in_background and is_new
    answers = engine.warm_up(in_background) if is_new else engine.warm_up()
    if learn:
      self.learner.warm_up((answer.batch for answer in answers), in_background)
    if self.pair.draft is not None and self.engine.config.record_top_k:
      for answer in answers:
        for length in agreement.lengths(self.engine.config.target_length):
          agreement.agreement(
            self.pair.draft,
            self.draft_params,
            answer.batch,
            answer.settings,
            length,
            self.engine.shortlist,
          )

  def save(self, path: str | Path, notes: str = "") -> Path:
    """Writes the newest draft with some notes; `PairConfig.draft` reads the file.

    Raises:
      BrokenDraftError: the draft's parameters or scores are not finite.
      InputError, DiskError: the file cannot be written; the error names the file that
        was written instead.
    """
    self._check_process()
    if self._learner is not None:
      self._learner.check_finite()
    notes = notes or f"adapted, after {self.statistics.requests} requests"
    return self.pair.save_draft(path, self.draft_params, notes)

  def serve_draft(self, params: base.Params) -> int:
    """Serves other parameters of the draft from the next call on.

    For a draft that another server trains. Answers do not change. Any thread may call
    it, but only the one that calls `learn` if this server's own draft learns. That then
    goes on from the given one, with a new optimizer state.

    Args:
      params: parameters of the pair's draft, such as `Pair.load_draft` returns.

    Returns:
      The version of the draft that answers report.

    Raises:
      InputError: this server has no draft, or the shapes differ from its draft's.
      BrokenDraftError: a parameter is not finite.
    """
    if self.pair.draft is None:
      raise base.InputError(
        "Server.serve_draft: this server decodes plainly, expected one with a draft."
      )
    if _shapes(params) != _shapes(self.pair.draft_params):
      raise base.InputError(
        "Server.serve_draft: the shapes of the parameters differ from those of the"
        f" {self.pair.draft.name}; expected a draft of the same configuration."
      )
    trained, _ = self.pair.draft.split(params)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained)):
      raise base.BrokenDraftError(
        "Server.serve_draft: some parameters are NaN or infinite, expected finite"
        " numbers; give the draft of an earlier checkpoint."
      )
    if self._learner is not None:
      self._learner.load(jax.tree.map(jnp.asarray, params))
      self._publish(None, background=True)
      return self._learner.version
    version = self._newest_version + 1
    self.pair = dataclasses.replace(self.pair, draft_params=params)
    self._pending_draft = base.Draft(params, version, self.shortlist)
    return version

  def clear_cache(self) -> None:
    """Empties the n-gram cache, if there is one, with the scores of its tokens.

    Prompts and answers so far leave no trace in it. The draft's weights and the
    learner's buffer stay.

    Raises:
      InputError: a call is running.
    """
    with self._one_call():
      self.engine.clear_memory()

  def wait(self) -> None:
    """Waits until no update is running."""
    if self._learner is not None:
      self._learner.runner.wait()

  def close(self) -> None:
    """Ends learning and drops requests in flight; a running `generate` ends."""
    if os.getpid() != self._process:
      return  # after a fork, threads and devices belong to the parent
    # Set first, so that no new call starts while the engine closes.
    self._is_closed = True
    with self._stepping:
      self.engine.close()
    if self._learner is not None:
      self._learner.runner.close()

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state that a checkpoint stores: (arrays, JSON values)."""
    parts = {name: part.state() for name, part in self._parts().items()}
    arrays = {name: arrays for name, (arrays, _) in parts.items()}
    return arrays, {name: host for name, (_, host) in parts.items()}

  def structure(self, host: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes of the arrays that `state` gave with `host`."""
    parts = self._parts("learner" in host)
    return {name: part.structure(host[name]) for name, part in parts.items()}

  def restore(
    self,
    arrays: dict[str, Any],
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
  ) -> None:
    """Continues from the result of `state`; `request_of` makes the request of a tag."""
    if "learner" in host:
      self.learner.restore(arrays["learner"], host["learner"])
    # The engine needs the parameters of the draft that served, which the learner has.
    self.engine.restore(arrays["engine"], host["engine"], request_of, self.draft_params)

  def swap_pending(self) -> None:
    """Swaps in the newest draft, on the serving thread."""
    pending = self._pending_draft
    if pending is not None and pending.version != self.engine.draft_version:
      self.engine.swap(*pending)

  @property
  def _newest_version(self) -> int:
    pending = self._pending_draft
    return self.engine.draft_version if pending is None else pending.version

  def _parts(self, learns: bool = False) -> dict[str, Any]:
    """The parts that have a state."""
    if self._learner is None and not learns:
      return {"engine": self.engine}
    return {"engine": self.engine, "learner": self.learner}

  def _check_process(self) -> None:
    if os.getpid() != self._process:
      raise base.InputError(
        "Server: this process was forked from the one that made the server, and JAX"
        " does not work after a fork; start processes with multiprocessing's 'spawn'"
        " method, and make the server there."
      )

  @contextlib.contextmanager
  def _one_call(self, clears: bool = False) -> Iterator[None]:
    """Allows one call at a time; `clears` drops requests that a caller leaves."""
    self._check_process()
    is_free = not self._is_closed and self._answering.acquire(blocking=False)
    if not is_free:
      state = "closed" if self._is_closed else "answering another call"
      raise base.InputError(
        f"Server: this server is {state}; read that call to its end, or make another"
        " server."
      )
    try:
      yield
    finally:
      if clears and self.engine.in_flight:
        self.engine.clear()
      self._answering.release()

  def _requests(
    self, prompts: Any, settings: dict[str, Any], call: "_Call"
  ) -> Iterator[Request | None]:
    """Yields the requests of the prompts of a call, until the call has failed."""
    if isinstance(prompts, str | Prompt):
      prompts = [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
      raise base.InputError(
        f"generate: received a {type(prompts).__name__} as prompts, expected a text, a"
        " Prompt, or an iterable of them."
      )
    index, coming = 0, iter(prompts)
    while call.failure is None:
      try:
        prompt = next(coming, _END)
      except Exception as error:
        error.add_note(f"generate: the iterator of prompts raised this at {index}.")
        raise
      if prompt is _END:
        return
      if prompt is None:
        yield None
        continue
      request = None  # so that a refused prompt's answer does not wait for the next one
      try:
        request = self._request(index, prompt, settings)
      except base.InputError as error:
        if not call.return_failed:
          raise
        call.add(_refused(index, prompt, str(error)))
      yield request
      index += 1

  def _request(
    self,
    index: int,
    given: str | Prompt,
    settings: dict[str, Any],
    is_streamed: bool = False,
  ) -> Request:
    """Returns the request of a prompt; its tag holds the fields of the answer."""
    try:
      prompt = Prompt.of(given, index, settings)
      text = TextSoFar(self.pair.vocabulary.decode, prompt.stop)
      request = Request(
        tokens=self.pair.vocabulary.encode_prompt(prompt.text),
        sampling=prompt.sampling,
        max_new_tokens=prompt.max_new_tokens,
        tag=(index, prompt, text),
        watch=text.watch if prompt.stop or is_streamed else None,
        remember=prompt.learn,
        speculative=prompt.speculative,
      )
      self.engine.check(request)
    except base.InputError as error:
      raise base.InputError(f"prompt {index}: {error}") from None
    return request

  def _answer(self, done: Finished, learn: bool) -> Answer:
    """Returns the answer of a finished request, after the draft has learned from it."""
    index, prompt, text = done.request.tag
    if learn and prompt.learn:
      self.learn(done)
    log_probs = None
    if prompt.log_probs:
      pair = self.pair
      rows = agreement.emitted_log_probs(pair.target, pair.target_params, done.batch)
      log_probs = np.asarray(rows)[0, : len(done.tokens)]
    return Answer(
      index,
      prompt.text,
      text.finish(done.tokens)[0],
      done.tokens,
      done.stop_reason,
      done.target_calls,
      done.drafted,
      done.accepted,
      done.milliseconds,
      done.draft_version,
      log_probs,
    )

  def _publish(
    self, outcome: Outcome | None, background: bool = False
  ) -> Outcome | None:
    """Serves the learner's draft from the next call on, if it has changed."""
    learner = self.learner
    self.statistics.updates += outcome is not None
    # An update whose slices were all skipped has no new draft to serve, and the gate
    # may change the draft between two updates.
    if learner.version != self._newest_version:
      draft = base.Draft(learner.serving, learner.version, learner.shortlist())
      self._pending_draft = draft
      if not background:
        self.swap_pending()
    return outcome

  def _overlap(self, params: base.Params, done: Finished) -> float:
    """Returns the overlap of a draft with an answer."""
    figures = agreement.of_answer(self.pair.draft, params, done, self.shortlist)
    return float(jax.device_get(figures.distribution_overlap)[0])


@dataclasses.dataclass
class _Call:
  """Answers of one call of `generate`, on their way to the caller.

  Attributes:
    ordered: whether answers are yielded in the order of the prompts.
    return_failed: whether failed prompts have answers.
    failure: raised at the end of the call.
  """

  ordered: bool
  return_failed: bool
  failure: Exception | None = None
  _waiting: dict[int, Answer] = dataclasses.field(default_factory=dict)
  _place: int = 0

  def add(self, answer: Answer) -> None:
    """Takes the answer of a finished or refused prompt."""
    try:
      if not self.return_failed:
        _check_finite(answer.index, answer.stop_reason)
      self._waiting[answer.index] = answer
    except base.NotFiniteError as error:
      self.failure = self.failure or error

  def ready(self) -> Iterator[Answer]:
    """Yields the answers whose turn it is."""
    while self._waiting:
      index = self._place if self.ordered else next(iter(self._waiting))
      if index not in self._waiting:
        return
      self._place += 1
      yield self._waiting.pop(index)

  def rest(self) -> Iterator[Answer]:
    """Yields the answers after one that failed, too."""
    yield from self.ready()
    yield from (self._waiting[index] for index in sorted(self._waiting))


def _shapes(params: base.Params) -> Any:
  return jax.tree.map(np.shape, params)


def _teaches(done: Finished) -> bool:
  """Whether the draft can learn from an answer: it has tokens and finite logits."""
  return done.stop_reason != base.StopReason.NOT_FINITE and len(done.tokens) > 0


def _check_finite(index: int, reason: base.StopReason) -> None:
  if reason == base.StopReason.NOT_FINITE:
    raise base.NotFiniteError(f"prompt {index} has no answer: {reason.message}.")


def _refused(index: int, given: Any, error: str) -> Answer:
  """Returns the answer of a prompt that cannot be decoded."""
  prompt = given.text if isinstance(given, Prompt) else str(given)
  tokens, reason = np.zeros(0, np.int32), base.StopReason.REFUSED
  return Answer(index, prompt, "", tokens, reason, error=error)
