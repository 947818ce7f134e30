"""The loop of `osd online` and `osd serve`; the paper's algorithm 1.

    source -> serve -> measure -> gate -> learn -> log -> checkpoint

A source is a stream of queries or the queue of an HTTP server. What follows an answer,
from measuring on, runs inside `step`, or on a thread of its own while serving goes on.

An answer to a client is written to outputs.jsonl, with its token ids, before the client
receives it. A loop that was killed restores the newest checkpoint and learns from the
answers after it, whose records (the target's distributions) it computes again by one
forward pass. So every answer that the draft may learn from is observed exactly once.
"""

import concurrent.futures
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import numpy as np

from osd_jax import background, base, corpus, metrics, pairs, runs, sharding
from osd_jax.data import streams
from osd_jax.data.batches import EncodedExample
from osd_jax.distillation.learner import LearningConfig, Outcome
from osd_jax.engine.requests import Finished, Request, SamplingConfig
from osd_jax.engine.server import Server
from osd_jax.loop import rows as rows_lib
from osd_jax.loop.log import Log
from osd_jax.loop.meter import Meter
from osd_jax.runs.checkpoint import OTHER_WEIGHTS

SHARED = (
  "Up to {} requests are decoded together, but compared ones again alone: the measured"
  " speeds also hold what decoding together gains."
)
MAX_PENDING = 8  # answers per row of a stream that may wait to be processed
# Answers to clients that may wait. Later ones are not learned from, because each holds
# its records, some 50 kB.
MAX_PENDING_LIVE = 1024
# Fields of an answer to a client that outputs.jsonl holds.
_COUNTS = (
  *("target_calls", "drafted", "accepted", "accepted_per_position", "milliseconds"),
  *("draft_version", "number"),
)


class Source(Protocol):
  """Where requests come from and answers go. Called by the thread that serves."""

  def requests(self) -> Iterator[Request | None]:
    """Yields requests; None means that none is waiting now."""
    ...

  def query(self, answer: Finished) -> streams.Query:
    """Returns the query of an answer, for its rows."""
    ...

  def is_taught(self, answer: Finished) -> bool:
    """Returns False if an answer must leave no trace in the draft or on the disk."""
    del answer
    return True

  def publish(self, answers: Sequence[Finished]) -> None:
    """Called after each call of decoding with the answers that it finished."""

  def state(self) -> dict[str, Any]:
    """Returns what `restore` needs, JSON-able."""
    ...

  def restore(self, state: dict[str, Any]) -> Callable[[Any], Request]:
    """Continues; returns a function from a request's tag to that request."""
    ...

  def draft_name(self, finished: int) -> str:
    """Returns a file name if the draft shall be saved after `finished` requests."""
    ...


class StreamSource(Source):
  """The queries of a stream, of which one is always waiting."""

  def __init__(
    self, stream: streams.Stream, sampling: SamplingConfig, keeps_drafts: bool
  ):
    """Starts at the first query."""
    self.stream, self._sampling = stream, sampling
    self._keeps_drafts, self._submitted = keeps_drafts, 0

  def requests(self) -> Iterator[Request]:
    """Yields the requests that were not submitted yet."""
    while True:
      try:
        request = self.request(self._submitted)
      except IndexError:  # the end of the stream
        return
      self._submitted += 1
      yield request

  def request(self, index: int) -> Request:
    """Returns the request of a query."""
    tokens = self.stream[index].tokens
    return Request(tokens, self._sampling.of_request(index), tag=index)

  def query(self, answer: Finished) -> streams.Query:
    """Returns the query of an answer."""
    return self.stream[answer.request.tag]

  def state(self) -> dict[str, Any]:
    """Returns the position in the stream."""
    return {"submitted": self._submitted, "stream": self.stream.state()}

  def restore(self, state: dict[str, Any]) -> Callable[[int], Request]:
    """Continues at a position."""
    self._submitted = state["submitted"]
    self.stream.restore(state["stream"])
    return self.request

  def draft_name(self, finished: int) -> str:
    """Returns the file of the draft at a shift of the stream, if drafts are kept."""
    shifts = dict(self.stream.shifts()[1:]) if self._keeps_drafts else {}
    if finished not in shifts:
      return ""
    return f"{finished:06d}_before_{shifts[finished]}.safetensors"


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a loop works; see `OnlineConfig` and `ServeConfig` for most fields.

  Attributes:
    keep_outputs: as in `OnlineConfig`, or "numbers": no text and no tokens.
    in_background: what follows an answer runs on another thread. Such a run cannot be
      repeated bit for bit, because updates are swapped in whenever they are ready.
    is_live: answers go to clients. The thread that serves then never waits for what
      follows an answer, an error there stops learning but not serving, and requests in
      flight are not continued after a restart. Needs `in_background`.
  """

  learning: LearningConfig
  partition: sharding.PartitionConfig
  learns: bool
  floor_every: int
  compare_every: int
  checkpoint_every: int
  keep_outputs: str
  tracker: str = ""
  in_background: bool = False
  is_live: bool = False


class Loop:
  """Serves a source, and learns from the answers.

  Attributes:
    server: the server, whose draft learns.
    source: requests in, answers out.
    directory: the run directory; None keeps nothing.
    log: the logs.
    finished: answers that were processed, in all sessions.
    learned: those that the draft has learned from.
    failure: why a live loop has stopped learning; "" while it goes on.
    dropped: answers that were not learned from because too many were waiting.
  """

  def __init__(
    self,
    server: Server,
    source: Source,
    directory: runs.RunDirectory | None,
    settings: Settings,
    announce: Callable[[str], object] = lambda text: None,
  ):
    """Opens the logs and the checkpoints; `announce` shows the text of an alarm."""
    self.server, self.source, self.directory = server, source, directory
    self.settings, self.pair = settings, server.pair
    self.meter = Meter(
      self.pair,
      server.engine.config,
      settings.floor_every,
      settings.compare_every,
      settings.partition,
      settings.learning.seed,
    )
    self.log = Log(
      directory,
      settings.keep_outputs,
      settings.tracker,
      announce,
      settings.learns,
    )
    self._checkpointer: runs.Checkpointer | None = None
    # A frozen draft that serves clients changes nothing that a checkpoint holds.
    if directory is not None and (settings.learns or not settings.is_live):
      # The answers after a checkpoint of a live loop are learned from again.
      logs = [self.log.rows] if settings.is_live else [self.log.rows, self.log.outputs]
      self._checkpointer = runs.Checkpointer(
        directory.checkpoints_path,
        settings.checkpoint_every,
        [one for one in logs if one is not None],
        self.pair.named_params,
      )
    self._calls = background.OrderedCalls(
      settings.in_background,
      # `step` of a live loop never waits.
      sys.maxsize if settings.is_live else MAX_PENDING * server.engine.config.rows,
    )
    self.finished = self.learned = self.dropped = 0
    self.failure = ""
    self._seconds_before = 0.0  # serving time of earlier sessions
    # Requests in flight come after `_answered` >= `finished`: the answers between them
    # wait to be processed.
    self._answered = 0
    self._rows: list[rows_lib.Request] = []  # logged, not yet returned by `step`
    self._is_closing = False
    self._memory: Any = None  # a copy of the n-gram cache, for checkpoints
    target = self.pair.named_params["target"]
    self._target = runs.fingerprint(target) if settings.is_live else 0

  # --- The beginning ------------------------------------------------------------------

  def restore(self) -> bool:
    """Continues from the newest checkpoint that can be used, if there is one.

    A live loop also learns from the answers after it.

    Raises:
      InputError: no checkpoint can be used, or an answer is missing.
    """
    state = None
    if self._checkpointer is not None:
      state = self._checkpointer.restore(self._structure)
    requests = self.log.restore()
    self._seconds_before = max((row.run_seconds for row in requests), default=0.0)
    if state is not None:
      arrays, host = state
      self.finished = host["finished"]
      request_of = self.source.restore(host["source"])
      self._restore_server(arrays, host["server"], request_of)
      self.meter.resume(self.server)
      self.learned = self.server.learner.finished if self.settings.learns else 0
    if self.settings.is_live and self.log.outputs is not None:
      if self._checkpointer is None:
        self.finished = len(requests)
      self._started = time.perf_counter()
      self._process_again(runs.read(self.log.outputs.path))
    self._answered = self.finished
    return state is not None

  def start(self, loading: float, compiling: float, measuring: float = 0.0) -> None:
    """Begins to serve, and logs the seconds that the parts of the start took."""
    row = rows_lib.Start(
      loading_ms=loading * 1e3,
      compiling_ms=compiling * 1e3,
      measuring_ms=measuring * 1e3,
    )
    self.log.write(row)
    if (rows := self.server.engine.config.rows) > 1 and self.settings.compare_every:
      if not self.finished:
        self.log.log_event("shared", SHARED.format(rows))
    self._served = self.server.serve(self.source.requests())
    self._started = time.perf_counter()

  def resumed(self, total: int | None) -> str:
    """A sentence that says where the run continues, "" for a new run."""
    if self._checkpointer is None:
      return ""
    return self._checkpointer.resumed("request", total)

  # --- One step -----------------------------------------------------------------------

  @property
  def seconds(self) -> float:
    """Wall time since the first request, summed over all sessions of the run."""
    return self._seconds_before + time.perf_counter() - self._started

  @property
  def waiting(self) -> int:
    """Answers that wait to be processed."""
    return self._answered - self.finished

  def step(self) -> list[rows_lib.Request] | None:
    """Runs one jitted call of decoding and processes the answers that it finished.

    Returns their rows, or None after the end of the source.
    """
    answers = next(self._served, None)
    for message in self.server.engine.messages():
      self.log.log_event("replica", message, self.finished)
    entries = [self._entry(answer) for answer in answers or ()]
    every = self.settings.checkpoint_every
    if any(index % every == every - 1 for index, _, _ in entries):
      self.copy_memory()
    # Before a client has an answer, it is on disk.
    if answers is not None:
      self.source.publish(answers)
    for index, answer, query in entries:
      # Plain decoding and the floor draft are timed, so they need all cores.
      alone = answer.batch is not None and self.meter.compares(index)
      self._calls.add(self._safely, answer, query, alone, alone=alone)
    self._rows += self._calls.ready()
    self._checkpoint_if_due(answers is None)
    rows, self._rows = self._rows, []
    return None if answers is None and not rows else rows

  def _entry(self, answer: Finished) -> tuple[int, Finished, streams.Query]:
    """Numbers an answer and writes it to outputs.jsonl."""
    index, query = self._answered, self.source.query(answer)
    self._answered += 1
    if self.settings.is_live:
      is_full = self.waiting > MAX_PENDING_LIVE
      teaches = self.settings.learns and len(answer.tokens) > 0
      teaches = teaches and answer.stop_reason != base.StopReason.NOT_FINITE
      teaches = teaches and self.source.is_taught(answer) and not self.failure
      self.dropped += teaches and is_full
      if is_full or not teaches:
        answer = dataclasses.replace(answer, batch=None)
    try:
      self._write_output(index, query, answer)
    except base.DiskError as error:
      self._fail(error)
    return index, answer, query

  def _checkpoint_if_due(self, is_end: bool) -> None:
    """Saves a step of a stream; live loops do it after an answer, on their thread."""
    checkpointer = self._checkpointer
    if self.settings.is_live or checkpointer is None:
      return
    if is_end or checkpointer.due(self._answered):
      self._rows += self._calls.wait()
    # Without a new answer the state is that of the last checkpoint.
    if self._rows and checkpointer.due(self.finished):
      self.checkpoint()

  def _safely(
    self, answer: Finished, query: streams.Query, alone: bool
  ) -> rows_lib.Request | None:
    """Calls `_process`; in a live loop, an error stops learning and nothing else."""
    if not self.settings.is_live:
      return self._process(answer, query, alone)
    if not self.failure and not self._is_closing:
      try:
        row = self._process(answer, query, alone)
        if self._checkpointer is not None and self._checkpointer.due(self.finished):
          self.checkpoint()
        return row
      except Exception as error:
        self._fail(error)
    return None

  def _process(
    self, answer: Finished, query: streams.Query, alone: bool
  ) -> rows_lib.Request:
    """Measures an answer, learns from it and logs it; returns its row.

    The answer is measured before the draft trains on it, so all reported overlaps are
    prequential.
    """
    in_background = self._calls.in_background
    beside = in_background and not alone
    row = self.meter.row(answer, query, self.finished, self.server, beside)
    outcome = None
    if self.settings.learns:
      if answer.batch is not None:
        row, rivals = self._score_rivals(answer, row, beside)
        outcome = self.server.learn(answer, row.overlap, in_background, rivals)
      row = dataclasses.replace(row, paused=self.server.learner.paused)
    self.finished += 1
    self._log_update(outcome)
    row = self.log.write(dataclasses.replace(row, run_seconds=self.seconds))
    self._log_decision()
    if name := self.source.draft_name(self.finished):
      self._save_draft(Path("drafts") / name)
    if self.settings.learns:
      self.learned = self.server.learner.finished
    return row

  def _score_rivals(
    self, answer: Finished, row: rows_lib.Request, beside: bool
  ) -> tuple[rows_lib.Request, dict[str, float]]:
    """Returns the row with what a gate adds to it, and the overlaps that it needs."""
    started = time.perf_counter()
    rivals = self.server.score_rivals(answer, row.floor_overlap)
    gate_ms = (time.perf_counter() - started) * 1e3
    row = dataclasses.replace(
      row,
      rival_overlap=rivals.get("rival"),
      gate_ms=0.0 if beside else gate_ms,
      metering_beside_ms=row.metering_beside_ms + gate_ms * beside,
    )
    return row, rivals

  # --- The logs -----------------------------------------------------------------------

  def _write_output(self, index: int, query: streams.Query, answer: Finished) -> None:
    """Writes a row of outputs.jsonl; that of a client holds what learning needs."""
    is_live, tokens = self.settings.is_live, len(answer.tokens)
    row: dict[str, Any] = {"index": index, "query": query.index, "task": query.task}
    if not is_live or answer.batch is not None:
      row["prompt"] = query.prompt
      row["text"] = self.pair.vocabulary.decode(answer.tokens)
    row["stop_reason"], row["tokens"] = answer.stop_reason.name, tokens
    row["tokens_per_target_call"] = metrics.tokens_per_target_call(
      tokens, answer.target_calls
    )
    if is_live:
      row |= {name: getattr(answer, name) for name in _COUNTS}
    if not is_live or answer.batch is not None:
      row |= {"prompt_ids": query.tokens, "output_ids": answer.tokens}
      if is_live:
        row |= {"sampling": vars(answer.request.sampling), "target": self._target}
    self.log.write_output(row)

  def _log_update(self, outcome: Outcome | None) -> None:
    """Logs the update that was swapped in, if there is one."""
    if outcome is not None:
      row = rows_lib.Update(
        finished=self.finished,
        launched=outcome.launched,
        version=outcome.version,
        **outcome.figures(),
      )
      self.log.write(row)

  def _log_decision(self) -> None:
    """Logs what the gate decided on the last answer, if it decided anything."""
    if not self.settings.learns:
      return
    learner = self.server.learner
    decision, learner.decision = learner.decision, None
    if decision is not None:
      fields = {**vars(decision), "text": decision.sentence()}
      self.log.write(rows_lib.Gate(finished=self.finished, **fields))

  def _save_draft(self, name: str | Path) -> Path | None:
    """Saves the draft in the run directory, if it has weights and they are sound."""
    is_frozen = self.settings.is_live and not self.settings.learns
    if self.directory is None or is_frozen or pairs.adapts_untrained(self.pair):
      return None
    path = self.directory.path / name
    try:
      path.parent.mkdir(runs.PRIVATE_FOLDER, exist_ok=True)
      saved = self.server.save(path, f"osd, after {self.finished} requests")
      saved.chmod(0o600)  # weights can memorize texts
      return saved
    except base.BrokenDraftError as error:  # outputs are exact, so the run can end well
      self.log.log_event("unsaved", str(error), self.finished)
      return None

  def _fail(self, error: Exception) -> None:
    if not self.settings.is_live:
      raise error
    self.failure = str(error) or type(error).__name__
    logging.getLogger(__name__).error("learning has stopped: %s", self.failure)

  # --- Checkpoints --------------------------------------------------------------------

  def checkpoint(self, replace: bool = False) -> None:
    """Saves the current step if it has not been saved yet; `replace` saves it again."""
    if self._checkpointer is None:
      return
    if not self.settings.is_live:
      self._rows += self._calls.wait()
      # The rows in flight must be saved with the draft that decodes them from here on.
      self.server.swap_pending()
    arrays, server = self._state()
    host = {
      "finished": self.finished,
      "source": self.source.state(),
      "server": server,
    }
    self._checkpointer.save(self.finished, arrays, host, replace)

  def copy_memory(self) -> None:
    """Copies the n-gram cache for the next checkpoint; between two calls of decoding.

    Only a live loop needs the copy: it saves checkpoints on another thread.
    """
    if self.settings.is_live and self._keeps_tokens and self._checkpointer is not None:
      self._memory = self.server.engine.memory

  def forget_memory(self) -> None:
    """Removes copies of the n-gram cache from the disk; see `submit`."""
    if self._checkpointer is not None and self._keeps_tokens and not self.failure:
      self.checkpoint(replace=True)
      self._checkpointer.remove_older()

  def load(self, params: base.Params) -> int:
    """Goes on from another draft, and returns its version; see `submit`.

    Raises:
      InputError: it does not fit the pair, or cannot be saved.
    """
    version = self.server.serve_draft(params)
    if self._checkpointer is not None and not self.failure:
      self.checkpoint(replace=True)
      self._checkpointer.wait()  # once it is accepted, a kill must not lose it
    return version

  def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Runs a call between two answers, on the thread that processes them."""
    return self._calls.submit(call)

  @property
  def _keeps_tokens(self) -> bool:
    return not self.settings.is_live or self.settings.keep_outputs == "ids"

  def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the server's state: of a live loop, without the requests in flight."""
    if not self.settings.is_live:
      return self.server.state()
    arrays, learner = self.server.learner.state(self._keeps_tokens)
    tree = {"learner": arrays}
    if self._memory is not None:
      tree["memory"] = self._memory
    submitted, has_memory = self.server.engine.submitted, self._memory is not None
    return tree, {"learner": learner, "memory": has_memory, "submitted": submitted}

  def _structure(self, host: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes of the arrays that `_state` gave with `host`."""
    server = host["server"]
    if not self.settings.is_live:
      return self.server.structure(server)
    tree = {"learner": self.server.learner.structure(server["learner"])}
    if server["memory"]:
      tree["memory"] = jax.eval_shape(lambda: self.server.engine.memory)
    return tree

  def _restore_server(
    self,
    arrays: dict[str, Any],
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
  ) -> None:
    if not self.settings.is_live:
      self.server.restore(arrays, host, request_of)
      return
    engine, learner = self.server.engine, self.server.learner
    learner.restore(arrays["learner"], host["learner"])
    engine.submitted = host["submitted"]
    engine.swap(self.server.draft_params, learner.version, learner.shortlist())
    if host["memory"]:
      engine.memory = arrays["memory"]

  def _process_again(self, rows: Iterator[dict[str, Any]]) -> None:
    """Processes the answers to clients that the newest checkpoint lacks."""
    engine, numbers = self.server.engine, 0
    for row in rows:
      # Requests that were in flight had numbers too, which must not come again.
      numbers = max(numbers, row["number"] + 1 + engine.capacity)
      if row["index"] < self.finished:
        continue
      if row["index"] > self.finished:
        raise base.InputError(
          f"outputs.jsonl: answer {self.finished} is missing, expected it before answer"
          f" {row['index']}; restore the file, or set overwrite = True."
        )
      answer = self._answer_of(row)
      place, tokens = row["query"], answer.request.tokens
      query = streams.Query(place, row["task"], 0, "", "", tokens, str(place))
      self._process(answer, query, alone=True)
    engine.submitted = max(engine.submitted, numbers)
    if self.settings.learns:
      self._log_update(self.server.finish_learning())
    self.copy_memory()

  def _answer_of(self, row: dict[str, Any]) -> Finished:
    """Returns an answer of outputs.jsonl, with its records if it may be learned."""
    decoding, batch = self.server.engine.config, cast(Any, None)
    prompt = np.asarray(row.get("prompt_ids", ()), np.int32)
    tokens = np.asarray(row.get("output_ids", [0] * row["tokens"]), np.int32)
    sampling = SamplingConfig(**row.get("sampling", {}))
    if self.settings.learns and "output_ids" in row:
      if row["target"] != self._target:
        raise base.InputError(
          f"outputs.jsonl: answer {row['index']}, which is to be learned from, was"
          f" given by a target with other weights. {OTHER_WEIGHTS}"
        )
      example = EncodedExample(prompt, 0, tokens)
      (batch,) = corpus.reference_rows(self.pair, [example], decoding, rows=1)
    return Finished(
      request=Request(prompt, sampling, remember=False),
      tokens=tokens,
      stop_reason=base.StopReason[row["stop_reason"]],
      batch=batch,
      settings=sampling.settings(decoding.target_length),
      **{name: row[name] for name in _COUNTS},
    )

  # --- The end ------------------------------------------------------------------------

  def wait(self) -> None:
    """Waits for all background work: processing, updates and the last checkpoint."""
    self._rows += self._calls.wait()
    self.server.wait()
    if self._checkpointer is not None:
      self._checkpointer.wait()

  def close(self, wall_seconds: float, timeout: float = math.inf) -> bool:
    """Takes the last update; writes the summary and the adapted draft.

    A live loop processes the answers that wait for up to `timeout` seconds. Returns
    whether it processed all; the others are learned from after a restart.
    """
    end = time.monotonic() + timeout
    while self.settings.is_live and self.waiting and not self.failure:
      if time.monotonic() > end:
        break
      time.sleep(0.01)
    self._is_closing = True
    self._rows += self._calls.wait()
    self._calls.close()
    is_complete = not self.waiting and not self.failure
    if self._checkpointer is not None:
      try:
        if self.settings.is_live and is_complete:
          self.copy_memory()
          if not self._keeps_tokens:  # the checkpoint has no update in progress
            self._log_update(self.server.finish_learning())
          self.checkpoint(replace=True)
      finally:
        # The checkpoints are completed first, so that a failed write is reported before
        # the results exist.
        self._checkpointer.close()
    if is_complete:
      self._log_update(self.server.finish_learning())
      self.log.write(rows_lib.Summary(wall_seconds=wall_seconds))
      self._save_draft("draft.safetensors")
    self.server.close()
    self.log.close()
    return is_complete
