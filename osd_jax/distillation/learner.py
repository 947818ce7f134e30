"""The learner: finished requests go in, new versions of the draft come out.

    finished request --> buffer --> (schedule: now?) --> slices --> new draft

The server calls `Learner.observe` after each request. It returns the update that is
due, if there is one, and the server then swaps in `Learner.serving`.

An update draws its rows when it is launched and donates nothing, so serving and
appending go on while it runs. The request at which its result is taken depends on the
number of finished requests alone (reproducible), or on when it is ready (free).

On one device, updates run on a thread of their own: decoding is bound by memory, so it
leaves a core to them. On a mesh, slices run between the calls of serving. Both are
programs of all devices with collectives inside, so every device must run them in the
same order, and two threads cannot guarantee one.
"""

import abc
import concurrent.futures
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from osd_jax import background, base, sharding
from osd_jax.costs.table import Costs
from osd_jax.distillation import buffer as buffer_lib
from osd_jax.distillation import schedule as schedule_lib
from osd_jax.distillation import update as update_lib
from osd_jax.distillation import worth as worth_lib


@dataclasses.dataclass(frozen=True)
class LearningConfig(base.Config):
  """How a draft learns from the requests it serves.

  >>> LearningConfig(schedule=schedule_lib.ScheduleConfig(update_interval=4)).seed
  0

  Attributes:
    buffer: the replay buffer.
    update: one update.
    schedule: when updates happen: a `ScheduleConfig`, a `WorthConfig` (only where they
      pay), or your own `Schedule`.
    free_updates: swap in each update as soon as it is ready. Updates, and in online
      runs also measuring, learning from and logging an answer, then use whatever
      core serving leaves idle. False waits for request n + I exactly, which makes
      runs reproducible bit by bit.
    seed: seed of the replay draws.
  """

  buffer: buffer_lib.BufferConfig = buffer_lib.BufferConfig()
  update: update_lib.UpdateConfig = update_lib.UpdateConfig()
  schedule: (
    schedule_lib.ScheduleConfig | worth_lib.WorthConfig | schedule_lib.Schedule
  ) = schedule_lib.ScheduleConfig()
  free_updates: bool = False
  seed: base.CountOrZero = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A finished update.

  Attributes:
    learner: state after the update.
    launched: number of finished requests when the update was launched.
    losses: loss of each slice before its step.
    grad_norms: gradient norm of each slice.
    skipped: number of slices skipped because they were not finite.
    update_ms: time the update ran.
    wait_ms: time serving waited for it, between slices and at the end.
    changed: whether there is a new version; False if every slice was skipped.
  """

  learner: update_lib.LearnerState
  launched: int
  losses: list[float]
  grad_norms: list[float]
  skipped: int
  update_ms: float
  wait_ms: float
  changed: bool = True

  @property
  def version(self) -> int:
    """Version of the draft after the update."""
    return int(self.learner.version)

  def figures(self) -> dict[str, float]:
    """Returns the fields of an update record in metrics.jsonl."""
    return {
      "loss": float(np.mean(self.losses)),
      "grad_norm": float(np.mean(self.grad_norms)),
      "steps": len(self.losses),
      "skipped": self.skipped,
      "update_ms": self.update_ms,
      "wait_ms": self.wait_ms,
    }


class UpdateRunner(abc.ABC):
  """Runs one update at a time, slice by slice.

  Attributes:
    learner: state before the update in progress.
  """

  def __init__(
    self,
    model: base.Model,
    config: update_lib.UpdateConfig,
    learner: update_lib.LearnerState,
    interval: int,
    free: bool = False,
    frozen: base.Params = None,
  ):
    """Stores the learner's state; nothing runs yet.

    Args:
      model: the draft, as pure functions.
      config: settings of one update, slices included.
      learner: state before the first update.
      interval: an update launched after request n is taken at request n + interval.
      free: take it as soon as it is ready instead. On a background thread, runs are
        then not reproducible bit by bit.
      frozen: parameters of the draft that belong to the target, see `base.Model.split`.
    """
    self.learner = learner
    self._model, self._config, self._frozen = model, config, frozen
    self._interval, self._free = interval, free
    self._launched: int | None = None
    self._batches: tuple[base.DistillationBatch, ...] = ()
    self._state = learner  # state after the slices that have run
    self._metrics: list[update_lib.UpdateMetrics] = []  # one entry per slice
    self._seconds = 0.0  # time spent in those slices

  @property
  def busy(self) -> bool:
    """Whether an update was launched and not taken yet."""
    return self._launched is not None

  @property
  def is_running(self) -> bool:
    """Whether another thread is computing an update at this moment."""
    return False

  def pending(self) -> tuple[int, tuple[base.DistillationBatch, ...]] | None:
    """Returns launch number and inputs of the update in progress, for a checkpoint."""
    return None if self._launched is None else (self._launched, self._batches)

  def launch(self, batches: Sequence[base.DistillationBatch], finished: int) -> None:
    """Starts an update on these micro-batches after `finished` requests."""
    if self.busy:
      raise RuntimeError("distillation: an update is in progress; take it first")
    self._batches, self._launched = tuple(batches), finished
    # The slices work on a copy of the state. `learner` changes only in `take`, so a
    # checkpoint in between repeats the update from its inputs.
    self._state, self._metrics, self._seconds = self.learner, [], 0.0

  def due(self, finished: int) -> bool:
    """Whether `take` should be called after `finished` requests."""
    if self._launched is None:
      return False
    return self._is_ready() if self._free else self._left(finished) <= 0

  @abc.abstractmethod
  def wait_if_behind(self, finished: int, in_flight: int) -> None:
    """Gives the update in progress time, before a step of serving.

    `finished` requests have finished, and the step may finish `in_flight` more.
    """

  def take(self) -> Outcome:
    """Waits for the update in progress; its state becomes `learner`."""
    assert self._launched is not None
    waited = self._complete()
    learner, metrics = update_lib.finish_update(
      self.learner, self._state, self._metrics
    )
    outcome = Outcome(
      learner=learner,
      launched=self._launched,
      losses=[float(x) for x in metrics.loss],
      grad_norms=[float(x) for x in metrics.grad_norm],
      skipped=int(np.sum(~metrics.finite)),
      update_ms=self._seconds * 1e3,
      wait_ms=waited * 1e3,
      changed=int(learner.version) != int(self.learner.version),
    )
    self._launched, self._batches, self.learner = None, (), learner
    return outcome

  @abc.abstractmethod
  def wait(self) -> None:
    """Waits until nothing computes, without taking the result."""

  @abc.abstractmethod
  def close(self) -> None:
    """Stops; an update in progress is dropped."""

  def _left(self, finished: int) -> int:
    """Returns the number of requests until the update is due."""
    assert self._launched is not None
    return self._launched + self._interval - finished

  def _remaining(self) -> Sequence[base.DistillationBatch]:
    """Returns the micro-batches whose slices have not run yet."""
    return self._batches[len(self._metrics) :]

  def _run_slices(self, count: int) -> None:
    """Runs the next `count` slices on the calling thread."""
    started, batches = time.perf_counter(), self._remaining()[:count]
    for state, metrics in update_lib.slices(
      self._model, self._config, self._state, batches, self._frozen
    ):
      self._state = state
      self._metrics.append(metrics)
    self._seconds += time.perf_counter() - started

  @abc.abstractmethod
  def _is_ready(self) -> bool:
    """Whether `take` would return without waiting."""

  @abc.abstractmethod
  def _complete(self) -> float:
    """Lets all slices finish; returns the seconds that serving waited for them."""


class BackgroundRunner(UpdateRunner):
  """Runs updates on a thread of their own.

  If an update takes longer than its interval, serving waits for it one slice at a
  time. Otherwise the request that completes the interval would wait for all of it.
  """

  def __init__(self, *arguments: Any, **named: Any):
    """Takes the arguments of `UpdateRunner`."""
    super().__init__(*arguments, **named)
    # If serving sometimes waits for updates, a low priority would delay serving too.
    self._thread = background.Worker("learner", low_priority=self._free)
    self._future: concurrent.futures.Future | None = None
    self._launched_at = 0.0
    self._slices = threading.Semaphore(0)  # finished slices that no step waited for
    self._asked = 0  # slices that steps have waited for
    self._waited = 0.0  # seconds they waited
    self._behind = False  # the last update took longer than serving its interval

  @property
  def is_running(self) -> bool:
    """Whether the thread is computing at this moment."""
    return self._future is not None and not self._future.done()

  def wait_if_behind(self, finished: int, in_flight: int) -> None:
    """Waits for one slice if the last update was late and this one may be due."""
    # As long as updates keep up with serving, no step waits for them.
    late = self._behind and not self._free and self._asked < len(self._batches)
    if late and self._left(finished + in_flight) <= 0:
      started = time.perf_counter()
      self._slices.acquire()
      self._asked += 1
      self._waited += time.perf_counter() - started

  def wait(self) -> None:
    """Waits until the thread is idle, without taking the result."""
    if self._future is not None:
      concurrent.futures.wait([self._future])

  def close(self) -> None:
    """Ends the thread; an update in progress is finished and dropped."""
    self._thread.shutdown()

  def launch(self, batches: Sequence[base.DistillationBatch], finished: int) -> None:
    """Starts an update on the thread."""
    super().launch(batches, finished)
    self._launched_at = time.perf_counter()
    self._slices, self._asked, self._waited = threading.Semaphore(0), 0, 0.0
    self._future = self._thread.submit(self._work, self._slices)

  def _is_ready(self) -> bool:
    return self._future is not None and self._future.done()

  def _complete(self) -> float:
    assert self._future is not None
    started = time.perf_counter()
    self._future.result()
    # Time that steps spent waiting for slices is not time that serving needed.
    self._behind = started - self._launched_at - self._waited < self._seconds
    self._future = None
    return self._waited + time.perf_counter() - started

  def _work(self, slices: threading.Semaphore) -> None:
    try:
      for _ in self._batches:
        self._run_slices(1)
        slices.release()
    finally:
      # After an error no step may wait forever; `take` raises the error.
      slices.release(len(self._batches))


class InterleavedRunner(UpdateRunner):
  """Runs slices on the serving thread, between its calls.

  Before each call it runs the remaining slices divided by the remaining requests, so
  that the work is spread evenly until the update is due. Serving waits for all of it.
  """

  def wait_if_behind(self, finished: int, in_flight: int) -> None:
    """Runs the share of the remaining slices that belongs to this request."""
    if self._launched is not None:
      requests = max(self._left(finished), 1)
      self._run_slices(math.ceil(len(self._remaining()) / requests))

  def wait(self) -> None:
    """Returns at once: nothing runs between calls."""

  def close(self) -> None:
    """Does nothing: this runner has no thread."""

  def _is_ready(self) -> bool:
    return not self._remaining()

  def _complete(self) -> float:
    self._run_slices(len(self._batches))
    return self._seconds


class Learner:
  """Learning for one draft: buffer, schedule, and the update in progress.

  Attributes:
    finished: number of requests observed.
    serving: parameters of the newest draft that was returned by `observe`.
    costs: measured costs, for the schedule; None until they are set.
  """

  def __init__(
    self,
    draft: base.Model,
    params: base.Params,
    config: LearningConfig,
    source_length: int,
    target_length: int,
    record_top_k: int,
  ):
    """Starts with an empty buffer and the draft as version 0.

    Args:
      draft: the draft, as pure functions.
      params: its parameters, frozen ones included.
      config: buffer, updates and their schedule.
      source_length: S, the prompt length of observed rows.
      target_length: T, the output length of observed rows.
      record_top_k: k, entries per position in their records.
    """
    if jax.process_count() > 1 and config.free_updates:
      raise base.InputError(
        "LearningConfig.free_updates: received True, expected False when several"
        " processes serve together: all must take an update at the same request."
      )
    self._draft, self._config = draft, config
    self.finished, self.serving = 0, params
    trained, self._frozen = draft.split(params)
    self._since = 0  # rows added to the buffer before the last launch
    self._schedule: Any = config.schedule.init()
    self.costs: Costs | None = None
    runner = (
      InterleavedRunner
      if sharding.is_distributed(params) or jax.process_count() > 1
      else BackgroundRunner
    )
    self._runner = runner(
      draft,
      config.update,
      update_lib.init_learner(config.update, trained),
      config.schedule.update_interval,
      config.free_updates,
      self._frozen,
    )
    self._append = jax.jit(buffer_lib.append, donate_argnums=0)
    self._state_width = draft.state_width if config.buffer.keep_target_states else 0
    buffer = buffer_lib.init(
      config.buffer,
      source_length,
      target_length,
      record_top_k,
      draft.vocab_size,
      self._state_width,
    )
    # The rows come from the draft's mesh. The first append would move the buffer
    # there, and everything that reads it would be compiled a second time.
    self._buffer = sharding.copy_to_mesh_of(params, buffer)

  @property
  def paused(self) -> bool:
    """Whether the schedule has paused updates."""
    return self._schedule.paused

  @property
  def busy(self) -> bool:
    """Whether an update is in progress."""
    return self._runner.busy

  @property
  def is_running(self) -> bool:
    """Whether a background thread is computing an update at this moment."""
    return self._runner.is_running

  @property
  def in_background(self) -> bool:
    """Whether updates run on a thread of their own, not between serving's calls."""
    return isinstance(self._runner, BackgroundRunner)

  @property
  def update_config(self) -> update_lib.UpdateConfig:
    """Settings of one update."""
    return self._config.update

  def seed(self, batches: Iterable[base.DistillationBatch]) -> None:
    """Fills the buffer before the first request; these rows do not count as new."""
    for batch in batches:
      self._buffer = self._append(self._buffer, self._with_states(batch))
      # A mesh can only hold few programs in flight: wait for each one.
      jax.block_until_ready(self._buffer.added)
    self._since = int(self._buffer.added)

  def warm_up(self, batches: Iterable[base.DistillationBatch] = ()) -> None:
    """Compiles an update and the append of such batches; changes no state."""
    for batch in batches:
      # Rows of weight 0 are compiled like others but not added.
      weightless = self._with_states(batch).replace(weight=batch.weight * 0)
      self._buffer = self._append(self._buffer, weightless)
    config, drawn = self._config.update, self._draw()
    state = self._runner.learner
    update_lib.update(self._draft, config, state, drawn, self._frozen)
    update_lib.warm_up(self._draft, config, state, drawn[0], self._frozen)

  @property
  def config(self) -> LearningConfig:
    """The configuration."""
    return self._config

  def try_update(self, slices: int, serve: Callable[[], bool] = lambda: False) -> None:
    """Runs an update as serving does, and drops its result; used to measure its cost.

    Args:
      slices: number of slices that are run.
      serve: runs one step of serving; called while the update runs, until it returns
        False. Then this method waits for the update.
    """
    batches = self._draw(slices)
    if not int(self._buffer.added):
      # An empty buffer gives empty rows, which would be cheaper than any real ones.
      batches = tuple(batch.replace(mask=batch.mask | True) for batch in batches)
    jax.block_until_ready(batches)
    before = self._runner.learner
    self._runner.launch(batches, self.finished)
    while self._runner.is_running and serve():
      pass
    self._runner.take()
    # Only the cost was wanted: the next update starts from the old state again.
    self._runner.learner = before

  def wait_if_behind(self, in_flight: int) -> None:
    """Gives an update in progress time; called before a step of `in_flight` rows."""
    self._runner.wait_if_behind(self.finished, in_flight)

  def observe(self, batch: base.DistillationBatch, overlap: float) -> Outcome | None:
    """Adds a finished request and launches an update if one is due.

    Args:
      batch: one row: the request with its records.
      overlap: overlap of the draft that served it, before it trains on the row.

    Returns:
      The update that is due now, if any; `serving` is its draft.

    Raises:
      InputError: the overlap is not finite, which means that the draft is broken.
    """
    if not np.isfinite(overlap):
      raise base.InputError(
        f"distillation: the draft {self._draft.name!r} gives scores that are not finite"
        f" (its overlap on request {self.finished} is {overlap}); check its weights."
      )
    self.finished += 1
    # Take a due update first, because the schedule may launch the next one below.
    outcome = self._take() if self._runner.due(self.finished) else None
    self._buffer = self._append(self._buffer, self._with_states(batch))
    # Count on the host: numpy would make XLA sum a jax array.
    tokens = int(np.count_nonzero(np.asarray(batch.mask)))
    most = 0 if self.busy else self._config.update.steps_per_update
    request = schedule_lib.Request(overlap, tokens, most)
    self._schedule, slices = self._config.schedule.update(
      self._schedule, request, self.costs
    )
    if slices:
      self._launch(slices)
    return outcome

  def finish(self) -> Outcome | None:
    """Waits for the update in progress and takes it, even if it is not due yet."""
    return self._take() if self.busy else None

  def shortlist(self) -> np.ndarray | None:
    """Returns tokens for a draft with a short head; None if its head is complete."""
    return buffer_lib.shortlist(self._draft, self._buffer)

  def wait(self) -> None:
    """Waits until no update computes, without taking the result."""
    self._runner.wait()

  def close(self) -> None:
    """Stops all threads; an update in progress is dropped."""
    self._runner.close()

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state that a checkpoint stores: (arrays, JSON values)."""
    launched, inputs = self._runner.pending() or (None, None)
    arrays = {
      "learner": self._runner.learner,
      # Not always `learner.served`: a moving average moves even if every slice of an
      # update was skipped, and such an update is not swapped in.
      "serving": self._draft.split(self.serving)[0],
      "buffer": self._buffer,
      "pending": inputs,
    }
    host = {
      "finished": self.finished,
      "since": self._since,
      "schedule": dataclasses.asdict(self._schedule),
      "costs": self.costs and dataclasses.asdict(self.costs),
      "launched": launched,
      "slices": 0 if inputs is None else len(inputs),
    }
    return arrays, host

  def structure(self, host: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree shaped like the arrays that `state` returned with `host`."""
    arrays, _ = self.state()
    if host["launched"] is not None:
      arrays["pending"] = jax.eval_shape(self._draw)[: host["slices"]]
    return arrays

  def restore(self, arrays: dict[str, Any], host: dict[str, Any]) -> None:
    """Restores what `state` returned; launches the update in progress again."""
    self._runner.learner = arrays["learner"]
    self.serving = self._draft.join(arrays["serving"], self._frozen)
    self._buffer = arrays["buffer"]
    self.finished, self._since = host["finished"], host["since"]
    self._schedule = type(self._schedule)(**host["schedule"])
    self.costs = host["costs"] and Costs.from_json(host["costs"])
    if host["launched"] is not None:
      self._runner.launch(arrays["pending"], host["launched"])

  def _with_states(self, batch: base.DistillationBatch) -> base.DistillationBatch:
    """Returns the batch with the target's hidden states, if the buffer keeps them."""
    if not self._state_width:
      return batch.replace(target_states=None)
    if batch.target_states is not None:
      return batch
    return batch.replace(
      target_states=_target_states(self._draft, self.serving, batch.source)
    )

  def _launch(self, slices: int) -> None:
    batches = self._draw(slices)
    # The next append overwrites the buffer in place, so drawing must be done first.
    jax.block_until_ready(batches)
    self._runner.launch(batches, self.finished)
    self._since = int(self._buffer.added)

  def _draw(self, slices: int | None = None) -> tuple[base.DistillationBatch, ...]:
    """Draws the micro-batches of an update that starts now; all slices by default."""
    config = self._config
    # A function of the number of requests, so a resumed run draws the same rows.
    key = jax.random.fold_in(jax.random.key(config.seed), self.finished)
    return update_lib.draw_update(
      config.update, config.buffer, self._buffer, key, self._since, slices
    )

  def _take(self) -> Outcome:
    outcome = self._runner.take()
    if outcome.changed:
      self.serving = self._draft.join(outcome.learner.served, self._frozen)
    return outcome


@functools.partial(jax.jit, static_argnums=0)
def _target_states(
  draft: base.Model, params: base.Params, source: jax.Array
) -> jax.Array:
  """Computes the target's hidden states of sources [R, S] for an attached draft."""
  assert draft.encode_for_draft is not None
  return draft.encode_for_draft(params, source, draft.mask(source))
