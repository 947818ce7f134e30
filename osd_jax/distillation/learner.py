"""The draft that learns: takes finished requests, hands out drafts.

    finished request --> buffer --> (schedule: now?) --> slices --> a draft

Whoever serves calls `observe` after each request and serves what it hands out.
"""

import abc
import concurrent.futures
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from osd_jax import background, base, sharding
from osd_jax.distillation import buffer as buffer_lib
from osd_jax.distillation import costs as costs_lib
from osd_jax.distillation import schedule as schedule_lib
from osd_jax.distillation import update as update_lib
from osd_jax.distillation import worth as worth_lib


@dataclasses.dataclass(frozen=True)
class LearningConfig:
  """How a draft learns from what it serves.

  >>> LearningConfig(schedule=schedule_lib.ScheduleConfig(update_interval=4)).seed
  0

  Attributes:
    buffer: the replay buffer.
    update: one update.
    schedule: when updates happen; a `ScheduleConfig`, a `WorthConfig` (where they pay),
      or a `Schedule` of your own.
    free_updates: swap an update in as soon as it is ready; updates, and in online runs
      measuring, learning from and logging an answer, use the core that serving leaves
      idle. False waits for request n + I exactly, which makes runs repeat bit by bit.
    seed: of replay.
  """

  buffer: buffer_lib.BufferConfig = buffer_lib.BufferConfig()
  update: update_lib.UpdateConfig = update_lib.UpdateConfig()
  schedule: (
    schedule_lib.ScheduleConfig | worth_lib.WorthConfig | schedule_lib.Schedule
  ) = schedule_lib.ScheduleConfig()
  free_updates: bool = False
  seed: int = 0

  def __post_init__(self):
    base.check_types(self)
    base.check_counts(self, "seed", least=0)


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
    config: update_lib.UpdateConfig,
    learner: update_lib.LearnerState,
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
  def wait_if_behind(self, finished: int, in_flight: int) -> None:
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
  def wait(self) -> None:
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
  def _end(
    self,
  ) -> tuple[update_lib.LearnerState, update_lib.UpdateMetrics, float, float]:
    """Waits for it: state, metrics [slices], milliseconds it ran and serving waited."""


class BackgroundRunner(UpdateRunner):
  """Updates on a thread of their own; serving waits only where they fall behind.

  One that takes longer than its interval is waited for slice by slice, not all at once.
  """

  def __init__(self, *arguments: Any, **named: Any):
    """As `UpdateRunner`."""
    super().__init__(*arguments, **named)
    # Where serving waits for updates at times, giving way to others would delay it.
    self._thread = background.Worker("learner", low_priority=self._free)
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

  def wait_if_behind(self, finished: int, in_flight: int) -> None:
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

  def wait(self) -> None:
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
      learner, metrics = update_lib.update(
        self._model, self._config, self.learner, batches, after_slice, self._frozen
      )
    finally:
      slices.release(len(batches))  # who waits hears of an error from `take`
    return learner, metrics, time.perf_counter() - started


class InterleavedRunner(UpdateRunner):
  """Updates whose slices are taken by the thread that serves, between its calls.

  As many before each call as are left for every request until the update is due. What
  they take, serving waits for.
  """

  @property
  def is_running(self) -> bool:
    """Never, beside whoever asks."""
    return False

  def wait_if_behind(self, finished: int, in_flight: int) -> None:
    """Takes its share of the slices that are left; see the class.

    Args:
      finished: requests.
      in_flight: requests that the step may finish.
    """
    if self._launched is not None:
      requests = max(self._left(finished), 1)
      self._take_slices(math.ceil(len(self._remaining()) / requests))

  def wait(self) -> None:
    """Nothing runs by itself."""

  def close(self) -> None:
    """Nothing runs by itself."""

  def _begin(self):
    self._state, self._spent = self.learner, 0.0
    self._reports: list[update_lib.UpdateMetrics] = []

  def _is_ready(self):
    return not self._remaining()

  def _end(self):
    self._take_slices(len(self._batches))
    learner, metrics = update_lib.finish_update(
      self.learner, self._state, self._reports
    )
    return learner, metrics, self._spent * 1e3, self._spent * 1e3

  def _remaining(self) -> Sequence[base.DistillationBatch]:
    return self._batches[len(self._reports) :]

  def _take_slices(self, count: int) -> None:
    started, batches = time.perf_counter(), self._remaining()[:count]
    for state, report in update_lib.slices(
      self._model, self._config, self._state, batches, self._frozen
    ):
      self._state = state
      self._reports.append(report)
    self._spent += time.perf_counter() - started


class Learner:
  """One draft's learning: buffer, schedule, and the update under way.

  Attributes:
    finished: requests taken in.
    serving: parameters of the draft that was handed out last.
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
    """An empty buffer, and the draft as it is at version 0.

    Args:
      draft: the draft.
      params: its parameters.
      config: how it learns.
      source_length: S of the rows it will be given.
      target_length: T.
      record_top_k: k.
    """
    if jax.process_count() > 1 and config.free_updates:
      raise base.InputError(
        "LearningConfig.free_updates: received True, expected False where several"
        " processes serve together: all must take an update at the same request."
      )
    self._draft, self._config = draft, config
    self.finished, self.serving = 0, params
    trained, self._frozen = draft.split(params)
    self._since = 0  # rows added to the buffer when an update was last launched
    self._schedule: Any = config.schedule.initial()
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
    # Where rows come from: a first append would move it, and all would compile anew.
    self._buffer = sharding.copy_to_mesh_of(params, buffer)

  @property
  def paused(self) -> bool:
    """Whether the schedule has paused updates."""
    return self._schedule.paused

  @property
  def busy(self) -> bool:
    """Whether an update is under way."""
    return self._runner.busy

  @property
  def is_running(self) -> bool:
    """Whether an update computes at this moment, beside whoever asks."""
    return self._runner.is_running

  @property
  def in_background(self) -> bool:
    """Whether updates run beside serving, not between its calls."""
    return isinstance(self._runner, BackgroundRunner)

  def seed(self, batches: Iterable[base.DistillationBatch]) -> None:
    """Fills the buffer before the first request; none of it counts as new."""
    for batch in batches:
      self._buffer = self._append(self._buffer, self._with_states(batch))
      jax.block_until_ready(self._buffer.added)  # of a mesh, few may be in flight
    self._since = int(self._buffer.added)

  def warm_up(self, batches: Iterable[base.DistillationBatch] = ()) -> None:
    """Compiles whatever an update runs, and taking in such batches; changes nothing."""
    for batch in batches:  # rows of weight 0 are not added
      weightless = self._with_states(batch).replace(weight=batch.weight * 0)
      self._buffer = self._append(self._buffer, weightless)
    config, drawn = self._config.update, self._draw()
    state = self._runner.learner
    update_lib.update(self._draft, config, state, drawn, frozen=self._frozen)
    update_lib.warm_up(self._draft, config, state, drawn[0], self._frozen)

  def price(self, costs: costs_lib.UpdateCosts) -> None:
    """Tells a schedule that goes by costs what they are; others do not ask."""
    if isinstance(self._config.schedule, costs_lib.Priced):
      self._schedule = self._config.schedule.priced(self._schedule, costs)

  @property
  def update_config(self) -> update_lib.UpdateConfig:
    """How an update is made."""
    return self._config.update

  def try_update(self) -> None:
    """Runs an update on what the buffer holds, and forgets it: to be timed."""
    batches = self._draw()
    if not int(self._buffer.added):  # rows to come are longer than none
      batches = [batch.replace(mask=batch.mask | True) for batch in batches]
    state, config = self._runner.learner, self._config.update
    jax.block_until_ready(
      update_lib.update(self._draft, config, state, batches, frozen=self._frozen)
    )

  def slice_inputs(
    self,
  ) -> tuple[update_lib.LearnerState, base.DistillationBatch, base.Params]:
    """The state, a micro-batch, and what is not trained, as a slice takes them."""
    return self._runner.learner, self._draw()[0], self._frozen

  def wait_if_behind(self, in_flight: int) -> None:
    """Lets an update come along; called before a step of `in_flight` rows."""
    self._runner.wait_if_behind(self.finished, in_flight)

  def observe(self, batch: base.DistillationBatch, overlap: float) -> Outcome | None:
    """Learns from a finished request.

    Args:
      batch: one row.
      overlap: of the draft that served with it, before it has trained on it.

    Returns:
      The update that is due now, if one is: `serving` is its draft.

    Raises:
      InputError: the overlap is no number: the draft is broken.
    """
    if not np.isfinite(overlap):
      raise base.InputError(
        f"distillation: the draft {self._draft.name!r} gives scores that are not finite"
        f" (its overlap on request {self.finished} is {overlap}); check its weights."
      )
    self.finished += 1
    outcome = self._take() if self._runner.due(self.finished) else None
    self._buffer = self._append(self._buffer, self._with_states(batch))
    schedule = self._config.schedule
    if isinstance(schedule, costs_lib.Priced):
      # On the host: numpy would have XLA sum an array of JAX.
      tokens = int(np.count_nonzero(np.asarray(batch.mask)))
      self._schedule = schedule.emitted(self._schedule, tokens)
    self._schedule = schedule.observe(self._schedule, overlap)
    if not self.busy and schedule.is_due(self._schedule):
      self._launch()
    return outcome

  def finish(self) -> Outcome | None:
    """Takes the update under way, if there is one, whether it is due or not."""
    return self._take() if self.busy else None

  def shortlist(self) -> np.ndarray | None:
    """Tokens for the head of a draft with a short one; None where it has all."""
    return buffer_lib.shortlist(self._draft, self._buffer)

  def wait(self) -> None:
    """Waits until no update computes, without taking its result."""
    self._runner.wait()

  def close(self) -> None:
    """Leaves nothing running; an update under way is dropped."""
    self._runner.close()

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint keeps: arrays, and what the host knows."""
    launched, inputs = self._runner.pending() or (None, None)
    arrays = {
      "learner": self._runner.learner,
      "serving": self._draft.split(self.serving)[0],
      "buffer": self._buffer,
      "pending": inputs,
    }
    host = {
      "finished": self.finished,
      "since": self._since,
      "schedule": dataclasses.asdict(self._schedule),
      "launched": launched,
      "slices": 0 if inputs is None else len(inputs),
    }
    return arrays, host

  def structure(self, host: dict[str, Any]) -> dict[str, Any]:
    """Shapes of the arrays that `state` gave with `host`."""
    arrays, _ = self.state()
    if host["launched"] is not None:
      arrays["pending"] = jax.eval_shape(self._draw)[: host.get("slices")]
    return arrays

  def restore(self, arrays: dict[str, Any], host: dict[str, Any]) -> None:
    """Continues from what `state` gave; an update under way is launched again."""
    self._runner.learner = arrays["learner"]
    self.serving = self._draft.join(arrays["serving"], self._frozen)
    self._buffer = arrays["buffer"]
    self.finished, self._since = host["finished"], host["since"]
    self._schedule = self._config.schedule.restored(host["schedule"])
    if host["launched"] is not None:
      self._runner.launch(arrays["pending"], host["launched"])

  def _with_states(self, batch: base.DistillationBatch) -> base.DistillationBatch:
    """The batch with its target states, where the buffer keeps them."""
    if not self._state_width:
      return batch.replace(target_states=None)
    if batch.target_states is not None:
      return batch
    return batch.replace(target_states=_read(self._draft, self.serving, batch.source))

  def _launch(self) -> None:
    schedule = self._config.schedule
    share = 1.0
    if isinstance(schedule, schedule_lib.Sparing):
      share = schedule.share(self._schedule)
    batches = self._draw(share)
    jax.block_until_ready(batches)  # appending writes the buffer in place
    self._runner.launch(batches, self.finished)
    self._since = int(self._buffer.added)
    self._schedule = schedule.launched(self._schedule)

  def _draw(self, share: float = 1.0) -> tuple[base.DistillationBatch, ...]:
    """The micro-batches of an update launched now, or a share of them."""
    config = self._config
    key = jax.random.fold_in(jax.random.key(config.seed), self.finished)
    return update_lib.draw_update(
      config.update, config.buffer, self._buffer, key, self._since, share
    )

  def _take(self) -> Outcome:
    outcome = self._runner.take()
    if outcome.changed:
      self.serving = self._draft.join(outcome.learner.served, self._frozen)
    return outcome


@functools.partial(jax.jit, static_argnums=0)
def _read(draft: base.Model, params: base.Params, source: jax.Array) -> jax.Array:
  """Target states of sources [R, S], computed from the frozen part of the draft."""
  assert draft.encode_for_draft is not None
  return draft.encode_for_draft(params, source, draft.mask(source))
