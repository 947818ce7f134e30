"""The update under way, beside serving or between its calls.

The inputs of an update are drawn before it starts, and it donates nothing, so serving
and appending go on meanwhile. When its result is taken is a function of the number of
finished requests alone (reproducible), or of when it is ready (free).

Where one device serves, updates run on a thread of their own, as memory-bound decoding
leaves a core to them. On a mesh, slices are taken between the calls of serving: both
are programs of all devices, which wait for one another within them, so that every
device must run them in the same order, and two threads promise none.
"""

import abc
import concurrent.futures
import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from osd_jax import base, threads
from osd_jax.distillation import update


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A finished update.

  Attributes:
    learner: state after it.
    launched: finished requests when it was launched.
    losses: per slice, before its step.
    grad_norms: per slice.
    skipped: slices left out because they were not finite.
    update_ms: time it ran.
    wait_ms: time serving waited for it, slice by slice and at the end.
    changed: whether it made a new version; False where every slice was skipped.
  """

  learner: update.LearnerState
  launched: int
  losses: list[float]
  grad_norms: list[float]
  skipped: int
  update_ms: float
  wait_ms: float
  changed: bool = True

  @property
  def version(self) -> int:
    """Of the draft after it."""
    return int(self.learner.version)

  def figures(self) -> dict[str, float]:
    """What metrics.jsonl keeps of it: means over the slices, counts, times."""
    return {
      "loss": float(np.mean(self.losses)),
      "grad_norm": float(np.mean(self.grad_norms)),
      "steps": len(self.losses),
      "skipped": self.skipped,
      "update_ms": self.update_ms,
      "wait_ms": self.wait_ms,
    }


class UpdateRunner(abc.ABC):
  """One update at a time: launched, taken when it is due.

  Attributes:
    learner: state before the update under way.
  """

  def __init__(
    self,
    model: base.Model,
    config: update.UpdateConfig,
    learner: update.LearnerState,
    interval: int,
    free: bool = False,
    frozen: base.Params = None,
  ):
    """Holds the learner's state.

    Args:
      model: the draft.
      config: of updates.
      learner: state to begin with.
      interval: an update launched after request n is taken at request n + interval.
      free: take it when it is ready instead; beside serving, runs are then not
        bit-reproducible.
      frozen: what of the draft is the target's; see `base.Model.split`.
    """
    self.learner = learner
    self._frozen = frozen
    self._model, self._config = model, config
    self._interval, self._free = interval, free
    self._launched: int | None = None
    self._batches: tuple[base.DistillationBatch, ...] = ()

  @property
  def busy(self) -> bool:
    """Whether an update was launched and not taken yet."""
    return self._launched is not None

  @property
  @abc.abstractmethod
  def is_running(self) -> bool:
    """Whether an update computes at this moment, beside whoever asks."""

  def pending(self) -> tuple[int, tuple[base.DistillationBatch, ...]] | None:
    """Launch number and inputs of the update under way, for a checkpoint."""
    return None if self._launched is None else (self._launched, self._batches)

  def launch(self, batches: Sequence[base.DistillationBatch], finished: int) -> None:
    """Starts an update on these micro-batches after `finished` requests."""
    if self.busy:
      raise RuntimeError("distillation: an update is under way; take it first")
    self._batches, self._launched = tuple(batches), finished
    self._begin()

  def due(self, finished: int) -> bool:
    """Whether `take` should be called after `finished` requests."""
    if self._launched is None:
      return False
    return self._is_ready() if self._free else self._left(finished) <= 0

  @abc.abstractmethod
  def keep_pace(self, finished: int, in_flight: int) -> None:
    """Lets the update come along, before a step of serving; what it computes stays.

    Args:
      finished: requests.
      in_flight: requests that the step may finish.
    """

  def take(self) -> Outcome:
    """Waits for the update under way; its state becomes `learner`."""
    assert self._launched is not None
    learner, metrics, update_ms, wait_ms = self._end()
    outcome = Outcome(
      learner=learner,
      launched=self._launched,
      losses=[float(x) for x in metrics.loss],
      grad_norms=[float(x) for x in metrics.grad_norm],
      skipped=int(np.sum(~metrics.finite)),
      update_ms=update_ms,
      wait_ms=wait_ms,
      changed=int(learner.version) != int(self.learner.version),
    )
    self._launched, self._batches, self.learner = None, (), learner
    return outcome

  @abc.abstractmethod
  def settle(self) -> None:
    """Waits until nothing computes, without taking the result."""

  @abc.abstractmethod
  def close(self) -> None:
    """Leaves nothing running; an update under way is dropped."""

  def _left(self, finished: int) -> int:
    """Requests until the update is due."""
    assert self._launched is not None
    return self._launched + self._interval - finished

  @abc.abstractmethod
  def _begin(self) -> None:
    """Starts on `_batches`."""

  @abc.abstractmethod
  def _is_ready(self) -> bool:
    """Whether taking it would not wait."""

  @abc.abstractmethod
  def _end(self) -> tuple[update.LearnerState, update.UpdateMetrics, float, float]:
    """Waits for it: state, metrics [slices], milliseconds it ran and serving waited."""


class BackgroundLearner(UpdateRunner):
  """Updates on a thread of their own; serving waits only where they fall behind.

  One that takes longer than its interval is waited for slice by slice, not all at once.
  """

  def __init__(self, *arguments: Any, **named: Any):
    """As `UpdateRunner`."""
    super().__init__(*arguments, **named)
    # Where serving waits for updates at times, giving way to others would delay it.
    self._thread = threads.one("learner", gives_way=self._free)
    self._future: concurrent.futures.Future | None = None
    self._launched_at = 0.0
    self._slices = threading.Semaphore(0)  # finished ones that no step asked for yet
    self._asked = 0
    self._waited = 0.0
    self._behind = False  # the last update took longer than serving its interval

  @property
  def is_running(self) -> bool:
    """Whether the thread computes at this moment."""
    return self._future is not None and not self._future.done()

  def keep_pace(self, finished: int, in_flight: int) -> None:
    """Waits for one slice where learning is behind: a step of serving asks for one.

    Otherwise the step that finishes an interval would wait for all that is left. Never
    waits where the last update was ready in time.

    Args:
      finished: requests.
      in_flight: requests that the step may finish.
    """
    late = self._behind and not self._free and self._asked < len(self._batches)
    if late and self._left(finished + in_flight) <= 0:
      started = time.perf_counter()
      self._slices.acquire()
      self._asked += 1
      self._waited += time.perf_counter() - started

  def settle(self) -> None:
    """Waits until the thread is idle, without taking the result."""
    if self._future is not None:
      concurrent.futures.wait([self._future])

  def close(self) -> None:
    """Ends the thread; an update under way is finished and dropped."""
    self._thread.shutdown()

  def _begin(self):
    self._launched_at = time.perf_counter()
    self._slices, self._asked, self._waited = threading.Semaphore(0), 0, 0.0
    self._future = self._thread.submit(self._work, self._batches)

  def _is_ready(self):
    return self._future is not None and self._future.done()

  def _end(self):
    assert self._future is not None
    started = time.perf_counter()
    learner, metrics, spent = self._future.result()
    self._behind = started - self._launched_at - self._waited < spent
    self._future = None
    waited = self._waited + time.perf_counter() - started
    return learner, metrics, spent * 1e3, waited * 1e3

  def _work(self, batches):
    slices, started = self._slices, time.perf_counter()

    def after_slice(learner):
      del learner
      slices.release()

    try:
      learner, metrics = update.update(
        self._model, self._config, self.learner, batches, after_slice, self._frozen
      )
    finally:
      slices.release(len(batches))  # who waits hears of an error from `take`
    return learner, metrics, time.perf_counter() - started


class InterleavedLearner(UpdateRunner):
  """Updates whose slices are taken by the thread that serves, between its calls.

  As many before each call as are left for every request until the update is due. What
  they take, serving waits for.
  """

  @property
  def is_running(self) -> bool:
    """Never, beside whoever asks."""
    return False

  def keep_pace(self, finished: int, in_flight: int) -> None:
    """Takes its share of the slices that are left; see the class.

    Args:
      finished: requests.
      in_flight: requests that the step may finish.
    """
    if self._launched is not None:
      requests = max(self._left(finished), 1)
      self._take_slices(math.ceil(len(self._remaining()) / requests))

  def settle(self) -> None:
    """Nothing runs by itself."""

  def close(self) -> None:
    """Nothing runs by itself."""

  def _begin(self):
    self._state, self._spent = self.learner, 0.0
    self._reports: list[update.UpdateMetrics] = []

  def _is_ready(self):
    return not self._remaining()

  def _end(self):
    self._take_slices(len(self._batches))
    learner, metrics = update.finish_update(self.learner, self._state, self._reports)
    return learner, metrics, self._spent * 1e3, self._spent * 1e3

  def _remaining(self) -> Sequence[base.DistillationBatch]:
    return self._batches[len(self._reports) :]

  def _take_slices(self, count: int) -> None:
    started, batches = time.perf_counter(), self._remaining()[:count]
    for state, report in update.slices(
      self._model, self._config, self._state, batches, self._frozen
    ):
      self._state = state
      self._reports.append(report)
    self._spent += time.perf_counter() - started
