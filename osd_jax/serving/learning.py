"""The learning thread: finished answers go in, the server serves newer drafts.

With a run directory, nothing that has been answered is lost if the process is killed:

- `journal.jsonl` holds the token ids of every answer that the draft shall learn from,
  written before the client receives the answer;
- a checkpoint holds the learner, which counts the answers that it has observed.

A restarted server restores the newest checkpoint and observes the journal's answers
from that count on, so each one is learnt from exactly once. Their records (the target's
distributions) are computed again by one forward pass. Answers older than the oldest
checkpoint are removed from the journal.
"""

import concurrent.futures
import json
import logging
import threading
from collections.abc import Callable, Iterator
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


class Journal:
  """A file of answers, numbered in the order in which they are learnt from.

  Attributes:
    path: the file.
    end: number of the next answer.
  """

  def __init__(self, path: Path):
    """Opens the file, or creates it; removes an incomplete last line."""
    self.path = path
    self._open()
    self.end = max((row["number"] + 1 for row in self.read(0)), default=0)

  def append(self, done: Finished) -> None:
    """Writes one answer and flushes it to the operating system.

    Raises:
      DiskError: it cannot be written.
    """
    row = {"number": self.end, "prompt": done.request.tokens.tolist()}
    sampling = vars(done.request.sampling)
    self._lines.append({**row, "answer": done.tokens.tolist(), "sampling": sampling})
    self.end += 1

  def read(self, start: int) -> Iterator[dict[str, Any]]:
    """Yields the answers from number `start` on."""
    with open(self.path, encoding="utf-8") as lines:
      for line in lines:
        row = json.loads(line)
        if row["number"] >= start:
          yield row

  def forget(self, start: int) -> None:
    """Removes the answers before number `start`."""
    kept = "".join(f"{json.dumps(row)}\n" for row in self.read(start))
    self._lines.close()
    runs.directory.write_text(self.path, kept)
    self._open()

  def close(self) -> None:
    """Closes the file."""
    self._lines.close()

  def _open(self) -> None:
    self._lines = runs.JsonLines(self.path)


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
  ):
    """Restores the learner from the run directory, if there is one.

    Args:
      server: its learner is used by the learning thread only.
      directory: keeps checkpoints and the journal; None keeps nothing.
      every: answers between checkpoints.
      on_learned: called with the overlap of the newest draft with every answer, before
        it learns from the answer; with that of the first draft, or None if it was not
        measured; and with the update that has ended, if any.

    Raises:
      InputError: the pair's draft cannot learn, or no checkpoint can be used.
    """
    self._server, self._on_learned = server, on_learned
    self.finished, self.failure, self.dropped, self._pending = 0, "", 0, 0
    self._lock = threading.Lock()  # of the journal, and of `_pending`
    self._thread = background.Worker("learning", low_priority=True)
    self._journal: Journal | None = None
    self._checkpoints: checkpoint.Checkpointer | None = None
    if not server.learner.runner.in_background:
      raise base.InputError(
        "ServeConfig.learn: received True with a mesh of several devices, expected one"
        " device: updates run next to serving. Set learn = False or use one device."
      )
    if directory is not None:
      self._journal = Journal(directory / "journal.jsonl")
      models = server.pair.target_params, server.pair.draft_params
      self._checkpoints = runs.Checkpointer(
        directory / "checkpoints", every, models=models
      )
      self._restore()

  @property
  def waiting(self) -> int:
    """Answers that wait to be learnt from."""
    with self._lock:
      return self._pending

  def add(self, done: Finished) -> None:
    """Takes an answer; called on the serving thread, which it never delays for long."""
    is_broken = done.stop_reason == base.StopReason.NOT_FINITE
    with self._lock:
      if self.failure or is_broken or not len(done.tokens):
        return
      if self._pending >= MAX_PENDING:
        self.dropped += 1
        return
      self._pending += 1
      if self._journal is not None:
        try:
          self._journal.append(done)
        except base.DiskError as error:
          self._fail(error)
          return
    self._thread.submit(self._learn, done)

  def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Runs a call on the learning thread, between two answers."""
    return self._thread.submit(call)

  def load(self, params: base.Params) -> int:
    """Goes on from another draft; called on the learning thread.

    Returns:
      Its version.

    Raises:
      InputError: it does not fit the pair, or cannot be saved.
    """
    version = self._server.serve_draft(params)
    if self._checkpoints is not None and not self.failure:
      self._checkpoint(replace=True)
      self._checkpoints.wait()  # once it is accepted, a kill must not lose it
    return version

  def close(self, timeout: float) -> bool:
    """Learns from the answers that wait, up to `timeout` seconds, and saves.

    Returns:
      Whether it learned from all of them. The others stay in the journal.
    """
    ended = self._thread.submit(self._save)
    finished, _ = concurrent.futures.wait([ended], timeout)
    self._thread.shutdown(wait=bool(finished), cancel_futures=True)
    if not finished:
      return False
    if self._checkpoints is not None and self._journal is not None:
      self._checkpoints.close()
      self._journal.close()
    return not self.failure

  def _learn(self, done: Finished) -> None:
    with self._lock:
      self._pending -= 1
    if self.failure:
      return
    try:
      self._observe(done)
      if self._checkpoints is not None and self._checkpoints.due(self.finished):
        self._checkpoint()
    except Exception as error:
      self._fail(error)

  def _observe(self, done: Finished) -> None:
    """Measures the newest draft on an answer and learns from it."""
    server, floor = self._server, None
    overlap = self._overlap(server.draft_params, done)
    if self.finished % FLOOR_EVERY == 0:
      floor = self._overlap(server.pair.draft_params, done)
    outcome = server.learn(done, overlap, background=True)
    self.finished = server.learner.finished
    self._on_learned(overlap, floor, outcome)

  def _overlap(self, params: base.Params, done: Finished) -> float:
    """Returns the overlap of a draft with an answer."""
    server = self._server
    found = agreement.of_answer(server.pair.draft, params, done, server.shortlist)
    return float(np.asarray(found.distribution_overlap)[0])

  def _fail(self, error: Exception) -> None:
    self.failure = str(error) or type(error).__name__
    logging.getLogger(__name__).error("learning has stopped: %s", self.failure)

  def _checkpoint(self, replace: bool = False) -> None:
    """Saves the learner, and forgets answers that no checkpoint needs."""
    assert self._checkpoints is not None and self._journal is not None
    arrays, host = self._server.learner.state()
    complete = self._checkpoints.steps()  # the new step may fail to be written
    self._checkpoints.save(self.finished, arrays, host, replace)
    with self._lock:
      self._journal.forget(min(complete[-checkpoint.KEEP :], default=0))

  def _save(self) -> None:
    """Saves a checkpoint and takes a running update, at the end of serving."""
    try:
      if not self.failure:
        if self._checkpoints is not None:  # the update is a part of it
          self._checkpoint()
        self._server.finish_learning()
    except Exception as error:
      self._fail(error)

  def _restore(self) -> None:
    """Continues from the newest checkpoint and the answers after it."""
    assert self._checkpoints is not None and self._journal is not None
    server, learner = self._server, self._server.learner
    found = self._checkpoints.restore(learner.structure)
    if found is not None:
      learner.restore(*found)
      self.finished = learner.finished
      server.engine.swap(server.draft_params, learner.version, learner.shortlist())
    self._journal.end = max(self._journal.end, learner.finished)
    for row in self._journal.read(learner.finished):
      if row["number"] != learner.finished:
        raise base.InputError(
          f"{self._journal.path}: answer {learner.finished} is missing, expected it"
          f" before answer {row['number']}; restore the file, or set overwrite = True."
        )
      self._observe(_scored(server, row))
    server.finish_learning()


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
