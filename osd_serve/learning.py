"""The learning thread: finished answers go in, the server serves newer drafts.

With a run directory, nothing that has been answered is lost if the process is killed:

- `journal.jsonl` holds the token ids of every answer that the draft shall learn from,
  written before the client receives the answer;
- a checkpoint holds the learner, which counts the answers that it has observed.

A restarted server restores the newest checkpoint and observes the journal's answers
from that count on, so each one is learnt from exactly once. Their records (the target's
distributions) are computed again by one forward pass. Answers older than the oldest
checkpoint are removed from the journal.

Every record has a tag, the tenant and the time of its request. By these tags records
are removed from everything that holds them: the queue of answers, the buffer, the
journal and the checkpoints. So are records that are older than a limit.

Without answers on disk, there is no journal, and checkpoints hold weights and the state
of the optimizer, but no buffer. A restarted server begins with an empty one.
"""

import concurrent.futures
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax import background, base, corpus, runs
from osd_jax.data.batches import EncodedExample
from osd_jax.distillation.learner import Outcome
from osd_jax.engine import agreement
from osd_jax.engine.requests import Finished, Request, SamplingConfig
from osd_jax.engine.server import Server
from osd_jax.runs import checkpoint

# Answers that may wait for the learning thread. Each holds its records, some 50 kB.
MAX_PENDING = 1024
FLOOR_EVERY = 4  # one in so many answers is measured with the first draft, too

# Of a record: "tenant", a name or "", and "time", seconds since 1970.
Tag = Mapping[str, Any]


class Journal:
  """A file of answers, numbered in the order in which they are learnt from.

  The serving thread appends while the learning thread reads and forgets.

  Attributes:
    path: the file.
    target: fingerprint of the target that answers.
    end: number of the next answer.
  """

  def __init__(self, path: Path, target: int = 0):
    """Opens the file, or creates it; removes an incomplete last line."""
    self.path, self.target, self._lock = path, target, threading.Lock()
    self._open()
    self.end = max((row["number"] + 1 for row in self.read(0)), default=0)

  def append(self, done: Finished, tag: Tag) -> None:
    """Writes one answer and flushes it; DiskError if that fails."""
    row = {"number": self.end, **tag, "target": self.target}
    row["prompt"] = done.request.tokens.tolist()
    sampling = vars(done.request.sampling)
    row |= {"answer": done.tokens.tolist(), "sampling": sampling}
    row["request"] = done.number
    with self._lock:
      self._lines.append(row)
    self.end += 1

  def read(self, start: int) -> Iterator[dict[str, Any]]:
    """Yields the answers from number `start` on."""
    return _parsed(self._content(), start)

  def forget(self, start: int, drops: Callable[[Tag], bool] | None = None) -> None:
    """Removes the answers before number `start`, and those that `drops` chooses.

    Of the latter the number is kept, so that no answer seems to be missing. Answers
    that are appended meanwhile are kept.
    """
    before = self._content()
    kept = [
      {"number": row["number"]} if drops and "time" in row and drops(row) else row
      for row in _parsed(before, start)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in kept)
    with self._lock:  # the serving thread waits for it, so it is held for copying only
      later = self.path.read_bytes()[len(before) :]
      self._lines.close()
      runs.directory.write_text(self.path, text + later.decode())
      self._open()

  def close(self) -> None:
    """Closes the file."""
    self._lines.close()

  def _open(self) -> None:
    self._lines = runs.JsonLines(self.path)

  def _content(self) -> bytes:
    with self._lock:
      return self.path.read_bytes()


def _parsed(content: bytes, start: int) -> Iterator[dict[str, Any]]:
  """Yields the answers of a journal's content from number `start` on."""
  for line in content.splitlines():
    row = json.loads(line)
    if row["number"] >= start:
      yield row


class Learning:
  """Learns from answers on a thread of its own, one after the other.

  An error stops the learning, never the serving: outputs do not depend on the draft.

  Attributes:
    finished: answers that the learner has observed, in all sessions.
    failure: why learning has stopped; "" while it goes on.
    dropped: answers that were not learnt from because too many were waiting.
  """

  def __init__(
    self,
    server: Server,
    directory: Path | None,
    every: int,
    on_learned: Callable[[float, float | None, Outcome | None], object],
    record_seconds: float = 0.0,
    keep_answers: bool = True,
    clock: Callable[[], float] = time.time,
  ):
    """Restores the learner from the run directory, if there is one.

    The learner of `server` is used by the learning thread only. Checkpoints, one in
    `every` answers, and the journal are kept in `directory`; None keeps nothing.
    Records older than `record_seconds` are removed by `expire`; 0 keeps them.
    `keep_answers` = False writes no token of a request to the disk. `clock` returns
    seconds since 1970.

    `on_learned` is called with the overlap of the newest draft with every answer,
    before it learns from the answer; with that of the first draft, or None if it was
    not measured; and with the update that has ended, if any.

    Raises:
      InputError: the pair's draft cannot learn, or no checkpoint can be used.
    """
    self._server, self._on_learned, self._clock = server, on_learned, clock
    self._record_seconds = record_seconds
    self._oldest = 0.0  # time of the oldest record that a file or the buffer may hold
    self.finished, self.failure, self.dropped, self._pending = 0, "", 0, 0
    self._lock = threading.Lock()  # of `_pending`
    self._thread = background.Worker("learning", low_priority=True)
    self._journal: Journal | None = None
    self._checkpoints: checkpoint.Checkpointer | None = None
    if not server.learner.runner.in_background:
      raise base.InputError(
        "ServeConfig.learn: received True with a mesh of several devices, expected one"
        " device: updates run next to serving. Set learn = False or use one device."
      )
    if directory is not None:
      models = server.pair.named_params
      if keep_answers:
        target = runs.fingerprint(models["target"])
        self._journal = Journal(directory / "journal.jsonl", target)
      self._checkpoints = runs.Checkpointer(
        directory / "checkpoints", every, models=models
      )
      self._restore()

  @property
  def waiting(self) -> int:
    """Answers that wait to be learnt from."""
    with self._lock:
      return self._pending

  def add(
    self,
    done: Finished,
    tenant: str = "",
    is_dropped: Callable[[], bool] = lambda: False,
  ) -> None:
    """Takes an answer; called on the serving thread, which it never delays for long.

    `is_dropped` is called before the draft learns from the answer; True if it must not.
    """
    is_broken = done.stop_reason == base.StopReason.NOT_FINITE
    with self._lock:
      if self.failure or is_broken or not len(done.tokens):
        return
      if self._pending >= MAX_PENDING:
        self.dropped += 1
        return
      self._pending += 1
    tag = {"tenant": tenant, "time": self._clock()}
    if self._journal is not None:
      try:
        self._journal.append(done, tag)
      except base.DiskError as error:
        self._fail(error)
        return
    self._thread.submit(self._learn, done, tag, is_dropped)

  def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Runs a call on the learning thread, between two answers."""
    return self._thread.submit(call)

  def load(self, params: base.Params) -> int:
    """Goes on from another draft, and returns its version; on the learning thread.

    Raises:
      InputError: it does not fit the pair, or cannot be saved.
    """
    version = self._server.serve_draft(params)
    if self._checkpoints is not None and not self.failure:
      self._checkpoint(replace=True)
      self._checkpoints.wait()  # once it is accepted, a kill must not lose it
    return version

  def forget(self, drops: Callable[[Tag], bool]) -> None:
    """Removes records whose tags `drops` chooses from buffer, journal and checkpoints.

    Runs on the learning thread, see `submit`. When it returns, no file of the run
    directory holds them. What the draft has learnt from them stays in its weights.

    Raises:
      InputError: learning has failed, or a checkpoint cannot be written.
    """
    if self.failure:
      raise base.InputError(
        "osd serve: records cannot be removed, because learning has stopped"
        f" ({self.failure}); restart the server, then remove them."
      )
    self._server.finish_learning(background=True)  # an update holds rows
    self._server.learner.forget(drops)
    # Without a journal, checkpoints hold no records either.
    if self._checkpoints is not None and self._journal is not None:
      self._checkpoints.rewrite(self.finished, *self._state())
      self._journal.forget(self.finished, drops)

  def expire(self) -> None:
    """Removes records that are too old; on the learning thread, as `forget`."""
    if self._is_old(self._oldest) and not self.failure:
      try:
        self.forget(lambda tag: self._is_old(tag["time"]))
      except Exception as error:
        self._fail(error)
      times = [tag["time"] for tag in self._server.learner.tags]
      self._oldest = min(times, default=self._clock())

  def _is_old(self, time: float) -> bool:
    limit = self._record_seconds
    return limit > 0 and time < self._clock() - limit

  def close(self, timeout: float) -> bool:
    """Learns from the answers that wait, up to `timeout` seconds, and saves.

    Returns whether it learned from all of them. The others stay in the journal.
    """
    ended = self._thread.submit(self._save)
    finished, _ = concurrent.futures.wait([ended], timeout)
    self._thread.shutdown(wait=bool(finished), cancel_futures=True)
    if not finished:
      return False
    if self._checkpoints is not None:
      self._checkpoints.close()
    if self._journal is not None:
      self._journal.close()
    return not self.failure

  def _learn(self, done: Finished, tag: Tag, is_dropped: Callable[[], bool]) -> None:
    with self._lock:
      self._pending -= 1
    if self.failure:
      return
    try:
      if is_dropped() or self._is_old(tag["time"]):
        self._skip()
      else:
        self._observe(done, tag)
      if self._checkpoints is not None and self._checkpoints.due(self.finished):
        self._checkpoint()
    except Exception as error:
      self._fail(error)

  def _skip(self) -> None:
    self._server.learner.skip()
    self.finished = self._server.learner.finished

  def _observe(self, done: Finished, tag: Tag) -> None:
    """Measures the newest draft on an answer and learns from it."""
    server, floor = self._server, None
    overlap = self._overlap(server.draft_params, done)
    if self.finished % FLOOR_EVERY == 0:
      floor = self._overlap(server.pair.draft_params, done)
    outcome = server.learn(done, overlap, background=True, tag=tag)
    self.finished = server.learner.finished
    self._on_learned(overlap, floor, outcome)

  def _overlap(self, params: base.Params, done: Finished) -> float:
    server = self._server
    found = agreement.of_answer(server.pair.draft, params, done, server.shortlist)
    return float(np.asarray(found.distribution_overlap)[0])

  def _fail(self, error: Exception) -> None:
    self.failure = str(error) or type(error).__name__
    logging.getLogger(__name__).error("learning has stopped: %s", self.failure)

  def _checkpoint(self, replace: bool = False) -> None:
    """Saves the learner, and forgets answers that no checkpoint needs."""
    assert self._checkpoints is not None
    complete = self._checkpoints.steps()  # the new step may fail to be written
    self._checkpoints.save(self.finished, *self._state(), replace)
    if self._journal is not None:
      self._journal.forget(min(complete[-checkpoint.KEEP :], default=0))

  def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the learner's state, and how many requests there were."""
    arrays, host = self._server.learner.state(has_rows=self._journal is not None)
    return arrays, {**host, "submitted": self._server.engine.submitted}

  def _save(self) -> None:
    """Saves a checkpoint and takes a running update, at the end of serving."""
    try:
      if not self.failure:
        if self._journal is not None:
          self._checkpoint()  # the update is a part of it
        self._server.finish_learning()
        if self._checkpoints is not None and self._journal is None:
          # The newest step may have been saved before this update.
          self._checkpoints.rewrite(self.finished, *self._state())
    except Exception as error:
      self._fail(error)

  def _restore(self) -> None:
    """Continues from the newest checkpoint and the answers after it."""
    assert self._checkpoints is not None
    server, learner = self._server, self._server.learner
    found = self._checkpoints.restore(learner.structure)
    if found is not None:
      server.engine.submitted = found[1].pop("submitted")
      learner.restore(*found)
      self.finished = learner.finished
      server.engine.swap(server.draft_params, learner.version, learner.shortlist())
    if self._journal is not None:
      self._observe_again(self._journal)
    server.finish_learning()
    self.expire()

  def _observe_again(self, journal: Journal) -> None:
    """Learns from the answers that the newest checkpoint lacks."""
    server, learner = self._server, self._server.learner
    journal.end = max(journal.end, learner.finished)
    engine = server.engine
    for row in journal.read(0):
      engine.submitted = max(engine.submitted, row.get("request", -1) + 1)
    for row in journal.read(learner.finished):
      if row["number"] != learner.finished:
        raise base.InputError(
          f"{journal.path}: answer {learner.finished} is missing, expected it"
          f" before answer {row['number']}; restore the file, or set overwrite = True."
        )
      if row.get("target", journal.target) != journal.target:
        raise base.InputError(
          f"{journal.path}: answer {row['number']}, which is to be learnt from, was"
          f" given by a target with other weights. {checkpoint.OTHER_WEIGHTS}"
        )
      is_gone = "answer" not in row or self._is_old(row["time"])
      if is_gone:  # it was removed, or shall be
        self._skip()
      else:
        tag = {"tenant": row["tenant"], "time": row["time"]}
        self._observe(_scored(server, row), tag)


def _scored(server: Server, row: dict[str, Any]) -> Finished:
  """Returns an answer of the journal with its records."""
  tokens = np.asarray(row["answer"], np.int32)
  prompt = np.asarray(row["prompt"], np.int32)
  request = Request(prompt, SamplingConfig(**row["sampling"]))
  decoding = server.engine.config
  example = EncodedExample(prompt, 0, tokens)
  (batch,) = corpus.reference_rows(server.pair, [example], decoding, rows=1)
  return Finished(
    request=request,
    tokens=tokens,
    stop_reason=base.StopReason.EOS,
    target_calls=0,
    drafted=0,
    accepted=0,
    accepted_per_position=(),
    milliseconds=0.0,
    batch=batch,
    settings=request.sampling.settings(decoding.target_length),
  )
