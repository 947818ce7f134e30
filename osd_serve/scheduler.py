"""A bounded queue of requests: the source of the loop, which one thread drives.

    asyncio  --submit-->  waiting  --serving thread-->  rows in flight
    asyncio  <--events--  pieces of text and finished answers, after every compiled call

All JAX work of serving happens on the serving thread. A request takes part in the next
compiled call if a row is free, and a cancelled one leaves its row after the present
call. Both wait for one call at most, which has `Engine.watched_rounds` rounds, because
every request is watched.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from osd_jax import base
from osd_jax.data import streams
from osd_jax.engine.requests import Finished, Prompt, Request, TextSoFar
from osd_jax.engine.server import Server


class QueueFullError(Exception):
  """The queue is full."""


class DrainingError(Exception):
  """The server finishes the requests that it has, and takes no more."""


class EngineFailedError(Exception):
  """The serving thread has ended with an error; the message is that error."""


class Event(NamedTuple):
  """News of a job."""

  job: "Job"
  piece: str = ""  # text that is certain and was not sent before
  done: Finished | None = None  # the result, if it has finished
  error: Exception | None = None  # why there will be no result


class Job:
  """One answer that a request asks for.

  Attributes:
    index: its number in the request.
    prompt: its settings.
    request: what the engine decodes.
    text: its text so far.
    is_cancelled: nobody waits for it any more.
    emitted: tokens so far.
    decoding_ms: its share of the time of all turns so far.
    plain_ms: the same if nothing had been drafted, see `rating`.
    arrived: clock at its arrival; `admitted` and `first_token` are 0 until then.
  """

  def __init__(
    self,
    index: int,
    tokens: np.ndarray,
    prompt: Prompt,
    decode: Callable[[Any], str],
    is_streamed: bool,
    cache_salt: int,
  ):
    """Makes the request of one answer; see `Scheduler.submit`."""
    self.index, self.prompt = index, prompt
    self.text = TextSoFar(decode, prompt.stop)
    self.is_cancelled, self.emitted = False, 0
    self.decoding_ms = self.plain_ms = 0.0
    self._counted = 0
    self.arrived, self.admitted, self.first_token = time.perf_counter(), 0.0, 0.0
    self.request = Request(
      tokens=tokens,
      sampling=prompt.sampling.of_request(index),
      max_new_tokens=prompt.max_new_tokens,
      tag=self,
      watch=self._watch,
      remember=prompt.learn,
      speculative=prompt.speculative,
      cache_salt=cache_salt,
    )
    self._reads_text = is_streamed or bool(prompt.stop)

  def _watch(self, tokens: np.ndarray) -> int | None:
    """Ends the row of a cancelled job, or at a stop string; see `Request.watch`."""
    self.first_token = self.first_token or time.perf_counter()
    self.emitted = len(tokens)
    if self.is_cancelled:
      return len(tokens)
    return self.text.watch(tokens) if self._reads_text else None

  def take_new(self) -> int:
    """Returns the number of tokens that were emitted since the last call of this."""
    new, self._counted = max(self.emitted - self._counted, 0), self.emitted
    return new


class Turn(NamedTuple):
  """One turn of the serving thread: its tokens and its time.

  Attributes:
    tokens: emitted tokens, and those of the prompts that were prefilled.
    emitted: job -> its new tokens, for every job that has some.
    milliseconds: wall time of admission, prefill, call and delivery, but not of
      waiting for requests.
    ends: whether an answer ended.
  """

  tokens: int
  emitted: Mapping[Job, int]
  milliseconds: float
  ends: bool = False


class Call:
  """The jobs of one HTTP request and their events.

  Attributes:
    jobs: one per answer.
    is_streamed: whether events carry pieces of text.
    loop: the event loop that reads the events.
  """

  def __init__(self, jobs: Sequence[Job], is_streamed: bool):
    """Belongs to the running event loop."""
    self.jobs, self.is_streamed = tuple(jobs), is_streamed
    self.loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event]()

  async def events(self):
    """Yields the news of all jobs until each has finished.

    Raises:
      EngineFailedError: a job has no result.
    """
    missing = len(self.jobs)
    while missing:
      event = await self._events.get()
      if event.error is not None:
        raise event.error
      missing -= event.done is not None
      yield event

  def put(self, event: Event) -> None:
    """Adds an event; called on the event loop."""
    self._events.put_nowait(event)


def _post(news: Sequence[tuple[Call, Event]]) -> None:
  """Hands events to the event loops of their calls; called on the serving thread.

  Each event loop is woken once, because that gives up the interpreter lock, and getting
  it back may take as long as `sys.getswitchinterval`.
  """

  def deliver(news: Sequence[tuple[Call, Event]]) -> None:
    for call, event in news:
      call.put(event)

  for loop in {call.loop for call, _ in news}:
    # After the event loop has been closed, nobody waits for the events.
    with contextlib.suppress(RuntimeError):
      entries = [entry for entry in news if entry[0].loop is loop]
      loop.call_soon_threadsafe(deliver, entries)


@dataclasses.dataclass(frozen=True)
class Load:
  """What the scheduler holds at one moment."""

  running: int  # jobs in rows
  waiting: int  # jobs in the queue
  draining: bool  # no request is taken any more
  failure: BaseException | None  # the error that ended the serving thread, or None


class Scheduler:
  """The queue and the serving thread.

  Methods may be called from any thread, `submit` from an event loop.
  """

  def __init__(
    self,
    server: Server,
    max_waiting: int,
    on_finished: Callable[[Job, Finished], object],
    on_turn: Callable[[Turn], object] = lambda turn: None,
    between: Callable[[], object] = lambda: None,
  ):
    """Starts nothing yet; only the serving thread uses the server after `start`.

    `max_waiting` jobs may wait while all rows are taken. On the serving thread,
    `on_finished` is called with every finished answer that was not cancelled, before
    its client receives it; `on_turn` after every compiled call that emitted tokens,
    before that; and `between` between two calls.
    """
    self._server, self._max_waiting = server, max_waiting
    self._on_finished, self._on_turn, self._between = on_finished, on_turn, between
    self._began = 0.0  # clock at the start of the turn
    self._delivery = 0.0  # seconds of the last delivery
    self._waiting: deque[tuple[Call, Job]] = deque()
    self._running: dict[Job, Call] = {}
    self._changed = threading.Condition()
    self._functions: list[tuple[Callable[[], Any], concurrent.futures.Future]] = []
    self._is_draining = self._is_stopped = self._is_ended = False
    self._failure: BaseException | None = None
    self._thread: threading.Thread | None = None

  def start(self, step: Callable[[], Any]) -> None:
    """Starts the serving thread, which calls `Loop.step` until it returns None."""
    self._thread = threading.Thread(
      target=self._serve, args=[step], name="serving", daemon=True
    )
    self._thread.start()

  @property
  def load(self) -> Load:
    """What the scheduler holds now."""
    with self._changed:
      counts = len(self._running), len(self._waiting)
      return Load(*counts, self._is_draining, self._failure)

  def submit(
    self,
    prompts: Sequence[np.ndarray],
    prompt: Prompt,
    n: int,
    is_streamed: bool,
    cache_salt: int = 0,
    decode: Callable[[Any], str] | None = None,
  ) -> Call:
    """Queues n answers to each prompt, or none at all; answer i draws with seed + i.

    They use only entries of the n-gram cache with the same salt. `decode` returns the
    text of an answer's tokens; None takes that of the vocabulary.

    Raises:
      InputError: the engine cannot decode a prompt, or there are more answers than
        could ever wait.
      QueueFullError: there is no room for all jobs.
      DrainingError, EngineFailedError: nothing is answered any more.
    """
    decode = decode or self._server.pair.vocabulary.decode
    copies = [tokens for tokens in prompts for _ in range(n)]
    shared = prompt, decode, is_streamed, cache_salt
    jobs = [Job(index, tokens, *shared) for index, tokens in enumerate(copies)]
    for job in jobs[::n]:
      self._server.engine.check(job.request)
    call = Call(jobs, is_streamed)
    most = self._max_waiting + self._server.engine.capacity
    if len(jobs) > most:
      raise base.InputError(
        f"n: received {len(jobs)} answers in one request, expected at most {most}: the"
        " rows of this server and its places for waiting requests."
      )
    with self._changed:
      if self._failure is not None:
        raise EngineFailedError(first_line(self._failure))
      if self._is_draining:
        raise DrainingError
      free = self._server.engine.capacity - len(self._running)
      if len(self._waiting) + len(jobs) > self._max_waiting + max(free, 0):
        raise QueueFullError
      self._waiting.extend((call, job) for job in jobs)
      self._changed.notify()
    return call

  def cancel(self, call: Call) -> None:
    """Drops the jobs of a call that have not finished."""
    with self._changed:
      for job in call.jobs:
        job.is_cancelled = True
      others = [entry for entry in self._waiting if entry[0] is not call]
      self._waiting = deque(others)
      self._changed.notify()

  def between_calls(
    self, function: Callable[[], Any]
  ) -> concurrent.futures.Future[Any]:
    """Runs a function on the serving thread, between two compiled calls.

    Raises:
      EngineFailedError: the serving thread has ended.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    with self._changed:
      if self._is_ended:
        raise EngineFailedError("the server has stopped")
      self._functions.append((function, future))
      self._changed.notify()
    return future

  def drain(self) -> None:
    """Takes no more requests; those that were taken are answered."""
    with self._changed:
      self._is_draining = True

  def stop(self, timeout: float | None = None) -> None:
    """Ends the serving thread; requests that were not answered have an error."""
    with self._changed:
      self._is_draining = self._is_stopped = True
      for job in self._running:
        job.is_cancelled = True
      self._changed.notify()
    if self._thread is not None:
      self._thread.join(timeout)

  def _serve(self, step: Callable[[], Any]) -> None:
    failure: BaseException = DrainingError("the server has stopped")
    try:
      while self._turn(step) is not None:
        self._run_functions()
        self._between()
    except BaseException as error:
      self._failure = failure = error
      logging.getLogger(__name__).exception("the serving thread has failed")
    self._fail_all(failure)

  def _turn(self, step: Callable[[], Any]) -> Any:
    self._began = time.perf_counter()
    return step()

  # --- The source of the loop, on the serving thread ----------------------------------

  def requests(self) -> Iterator[Request | None]:
    """Yields the requests of waiting jobs, and None when no job waits.

    Waits only while no row is taken.
    """
    while True:
      with self._changed:
        while not (
          self._waiting or self._running or self._functions or self._is_stopped
        ):
          self._changed.wait()
          self._began = time.perf_counter()
        if self._is_stopped:
          return
        request = None
        if self._waiting:
          call, job = self._waiting.popleft()
          self._running[job] = call
          job.admitted, request = time.perf_counter(), job.request
      yield request

  def _run_functions(self) -> None:
    with self._changed:
      functions, self._functions = self._functions, []
    for function, future in functions:
      if not future.set_running_or_notify_cancel():
        continue  # its client has left
      try:
        future.set_result(function())
      except Exception as error:
        future.set_exception(error)

  def query(self, answer: Finished) -> streams.Query:
    """Returns the query of an answer, whose place is the number of its request."""
    tokens, number = answer.request.tokens, answer.number
    prompt = self._server.pair.vocabulary.decode(tokens)
    return streams.Query(number, "", 0, prompt, "", tokens, str(number))

  def is_taught(self, answer: Finished) -> bool:
    """Whether a client waits for the answer and lets the draft learn from it."""
    job = answer.request.tag
    return job.prompt.learn and not job.is_cancelled

  def state(self) -> dict[str, Any]:
    """Returns nothing: requests that were not answered are lost with the process."""
    return {}

  def restore(self, state: dict[str, Any]) -> Callable[[Any], Request]:
    """Continues with an empty queue."""
    del state
    return lambda tag: tag.request

  def draft_name(self, finished: int) -> str:
    """Returns "": the draft is saved at the end."""
    del finished
    return ""

  def publish(self, answers: Sequence[Finished]) -> None:
    """Sends new pieces of text and finished answers to their clients."""
    news: list[tuple[Call, Event]] = []
    results = {answer.request.tag: answer for answer in answers}
    started = time.perf_counter()
    self._count(results, (started - self._began + self._delivery) * 1e3)
    for job, call in list(self._running.items()):
      done = results.get(job)
      if job.is_cancelled:
        continue
      if done is not None:
        piece = job.text.finish(done.tokens)[1]
        self._on_finished(job, done)
      else:
        piece = job.text.next_piece() if call.is_streamed else ""
      if piece or done is not None:
        news.append((call, Event(job, piece, done)))
    with self._changed:
      for job in results:
        self._running.pop(job, None)
    _post(news)
    # Delivering is a part of the next turn: this one has been counted.
    self._delivery = (time.perf_counter() - started) if self._running else 0.0

  def _count(self, results: Mapping[Job, Finished], milliseconds: float) -> None:
    """Counts the tokens that each row emitted in the last call."""
    tokens, new = 0, {}
    for job in self._running:
      is_first = not job.decoding_ms
      if job in results:
        job.emitted = len(results[job].tokens)
      if count := job.take_new():
        new[job] = count
        tokens += count + (len(job.request.tokens) if is_first else 0)
    for job in new:
      job.decoding_ms += milliseconds / len(new)
    if new:
      self._on_turn(Turn(tokens, new, milliseconds, bool(results)))

  def _fail_all(self, failure: BaseException) -> None:
    """Tells every client that there will be no answer."""
    with self._changed:
      self._is_draining = self._is_ended = True
      functions, self._functions = self._functions, []
      unanswered = [
        *self._running.items(),
        *((job, call) for call, job in self._waiting),
      ]
      self._running.clear()
      self._waiting.clear()
    for _, future in functions:
      if future.set_running_or_notify_cancel():
        future.set_exception(EngineFailedError(first_line(failure)))
    error = EngineFailedError(first_line(failure))
    _post([(call, Event(job, error=error)) for job, call in unanswered])


def first_line(error: BaseException) -> str:
  """Returns the first line of an error."""
  return next(iter(str(error).splitlines()), "") or type(error).__name__
