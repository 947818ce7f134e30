"""Updates that run beside serving, on the thread that memory-bound decoding leaves.

The inputs of an update are drawn before it starts, and it donates nothing, so serving
and appending go on meanwhile. When its result is taken is a function of the number of
finished requests alone (reproducible), or of when it is ready (free). An update that
takes longer than its interval is waited for slice by slice, not all at once.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np

from osd_jax import base
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


class BackgroundLearner:
  """Runs one update at a time on a thread of its own."""

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
      free: take it when it is ready instead; runs are then not bit-reproducible.
      frozen: what of the draft is the target's; see `base.Model.split`.
    """
    self.learner = learner
    self._frozen = frozen
    self._model, self._config = model, config
    self._interval, self._free = interval, free
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "learner")
    self._future: concurrent.futures.Future | None = None
    self._launched, self._launched_at = 0, 0.0
    self._batches: tuple[base.DistillationBatch, ...] = ()
    self._slices = threading.Semaphore(0)  # finished ones that no step asked for yet
    self._asked = 0
    self._waited = 0.0
    self._behind = False  # the last update took longer than serving its interval

  @property
  def busy(self) -> bool:
    """Whether an update was launched and not taken yet."""
    return self._future is not None

  @property
  def is_running(self) -> bool:
    """Whether the thread computes at this moment."""
    return self._future is not None and not self._future.done()

  def pending(self) -> tuple[int, tuple[base.DistillationBatch, ...]] | None:
    """Launch number and inputs of the update under way, for a checkpoint."""
    return (self._launched, self._batches) if self.busy else None

  def launch(self, batches: Sequence[base.DistillationBatch], finished: int) -> None:
    """Starts an update on these micro-batches after `finished` requests."""
    if self.busy:
      raise RuntimeError("distillation: an update is under way; take it first")
    self._batches, self._launched = tuple(batches), finished
    self._launched_at = time.perf_counter()
    self._slices, self._asked, self._waited = threading.Semaphore(0), 0, 0.0
    self._future = self._thread.submit(self._work, self._batches)

  def due(self, finished: int) -> bool:
    """Whether `take` should be called after `finished` requests."""
    if self._future is None:
      return False
    if self._free:
      return self._future.done()
    return finished >= self._launched + self._interval

  def keep_pace(self, finished: int) -> None:
    """Waits for one slice where learning is behind: a step of serving asks for one.

    Otherwise the step that finishes an interval would wait for all that is left. Never
    waits where the last update was ready in time; what is computed stays the same.

    Args:
      finished: requests that may be finished after the step.
    """
    late = self._behind and not self._free and self._asked < len(self._batches)
    if late and finished >= self._launched + self._interval:
      started = time.perf_counter()
      self._slices.acquire()
      self._asked += 1
      self._waited += time.perf_counter() - started

  def take(self) -> Outcome:
    """Waits for the update under way; its state becomes `learner`."""
    assert self._future is not None
    started = time.perf_counter()
    learner, metrics, spent = self._future.result()
    self._behind = started - self._launched_at - self._waited < spent
    waited = self._waited + time.perf_counter() - started
    changed = int(learner.version) != int(self.learner.version)
    self._future, self._batches, self.learner = None, (), learner
    return Outcome(
      learner=learner,
      launched=self._launched,
      losses=[float(x) for x in metrics.loss],
      grad_norms=[float(x) for x in metrics.grad_norm],
      skipped=int(np.sum(~metrics.finite)),
      update_ms=spent * 1e3,
      wait_ms=waited * 1e3,
      changed=changed,
    )

  def settle(self) -> None:
    """Waits until the thread is idle, without taking the result."""
    if self._future is not None:
      concurrent.futures.wait([self._future])

  def close(self) -> None:
    """Ends the thread; an update under way is finished and dropped."""
    self._thread.shutdown()

  def _work(self, batches):
    slices, started = self._slices, time.perf_counter()

    def after_slice(learner):
      jax.block_until_ready(learner)
      slices.release()

    try:
      learner, metrics = update.update(
        self._model, self._config, self.learner, batches, after_slice, self._frozen
      )
    finally:
      slices.release(len(batches))  # who waits hears of an error from `take`
    metrics = jax.device_get(metrics)
    jax.block_until_ready(learner)
    return learner, metrics, time.perf_counter() - started
