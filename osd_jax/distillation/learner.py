"""The learner: finished requests go in, new versions of the draft come out.

    finished request --> buffer --> (schedule: now?) --> slices --> new draft

The server calls `Learner.observe` after each request. It returns the update that is
due, if there is one, and the server then swaps in `Learner.serving`: the newest draft,
or the one before if answers show that it is better (`gate.py`).

An update draws its rows when it is launched and donates nothing, so serving and
appending go on while it runs. The request at which its result is taken depends on the
number of finished requests alone (reproducible), or on when it is ready (free).

On one device, updates run on a thread of their own: decoding is bound by memory, so it
leaves a core to them. On a mesh, slices run between the calls of serving. Both are
programs of all devices with collectives inside, so every device must run them in the
same order, and two threads cannot guarantee one.
"""

import concurrent.futures
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from osd_jax import background, base, sharding
from osd_jax.costs.table import Costs
from osd_jax.distillation import buffer as buffer_lib
from osd_jax.distillation import gate as gate_lib
from osd_jax.distillation import schedule as schedule_lib
from osd_jax.distillation import update as update_lib


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
    gate: serves trained drafts only while answers show that they are better than the
      first one. None serves every new draft unless answers show that it is worse.
  """

  buffer: buffer_lib.BufferConfig = buffer_lib.BufferConfig()
  update: update_lib.UpdateConfig = update_lib.UpdateConfig()
  schedule: (
    schedule_lib.ScheduleConfig | schedule_lib.WorthConfig | schedule_lib.Schedule
  ) = schedule_lib.ScheduleConfig()
  free_updates: bool = False
  seed: base.CountOrZero = 0
  gate: gate_lib.GateConfig | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A finished update."""

  learner: update_lib.LearnerState  # state after the update
  launched: int  # number of finished requests when the update was launched
  losses: list[float]  # loss of each slice before its step
  grad_norms: list[float]  # gradient norm of each slice
  skipped: int  # number of slices skipped because they were not finite
  update_ms: float  # time the update ran
  wait_ms: float  # time serving waited for it, between slices and at the end
  # Whether there is a new version; False if every slice was skipped.
  changed: bool = True

  @property
  def version(self) -> int:
    """Version of the draft after the update."""
    return int(self.learner.version)

  def figures(self) -> dict[str, Any]:
    """Returns the fields of an update's row in metrics.jsonl."""
    return {
      "loss": float(np.mean(self.losses)),
      "grad_norm": float(np.mean(self.grad_norms)),
      "steps": len(self.losses),
      "skipped": self.skipped,
      "update_ms": self.update_ms,
      "wait_ms": self.wait_ms,
    }


@dataclasses.dataclass
class _Update:
  """An update in progress.

  Attributes:
    launched: number of finished requests when it was launched.
    batches: its micro-batches, one per slice.
    state: state after the slices that have run.
    metrics: one entry per slice that has run.
    seconds: time spent in those slices.
    future: its result, if it runs on the thread.
    started: clock at the launch.
    slices: finished slices that no step of serving waited for.
    asked: slices that steps have waited for.
    waited: seconds that they waited.
  """

  launched: int
  batches: tuple[base.DistillationBatch, ...]
  state: update_lib.LearnerState
  metrics: list[update_lib.UpdateMetrics] = dataclasses.field(default_factory=list)
  seconds: float = 0.0
  future: concurrent.futures.Future | None = None
  started: float = dataclasses.field(default_factory=time.perf_counter)
  slices: threading.Semaphore = dataclasses.field(
    default_factory=lambda: threading.Semaphore(0)
  )
  asked: int = 0
  waited: float = 0.0

  def left(self) -> Sequence[base.DistillationBatch]:
    """Returns the micro-batches whose slices have not run yet."""
    return self.batches[len(self.metrics) :]


class UpdateRunner:
  """Runs one update at a time, slice by slice.

  In the background, a thread runs all slices. If an update takes longer than its
  interval, serving waits for it one slice at a time. Otherwise the request that
  completes the interval would wait for all of it.

  Else the slices run on the serving thread, between its calls. Before each call the
  remaining slices divided by the remaining requests are run, so that the work is spread
  evenly until the update is due. Serving waits for all of it.

  Attributes:
    learner: state before the update in progress.
    in_background: whether updates run on a thread of their own.
  """

  def __init__(
    self,
    model: base.Model,
    config: update_lib.UpdateConfig,
    learner: update_lib.LearnerState,
    interval: int,
    free: bool = False,
    frozen: base.Params = None,
    in_background: bool = True,
  ):
    """Stores the learner's state; nothing runs yet.

    An update that was launched after request n is taken at request n + `interval`, or,
    if `free`, as soon as it is ready. In the background, free runs are not reproducible
    bit by bit. `frozen` are the target's parameters, see `base.Model.split`.
    """
    self.learner, self.in_background = learner, in_background
    self._model, self._config, self._frozen = model, config, frozen
    self._interval, self._free = interval, free
    # If serving sometimes waits for updates, a low priority would delay serving too.
    # The worker starts its thread with the first update.
    self._thread = background.Worker("learner", low_priority=free)
    self._update: _Update | None = None
    self._behind = False  # the last update took longer than serving its interval

  @property
  def busy(self) -> bool:
    """Whether an update was launched and not taken yet."""
    return self._update is not None

  @property
  def is_running(self) -> bool:
    """Whether the thread is computing an update at this moment."""
    future = self._update and self._update.future
    return future is not None and not future.done()

  def pending(self) -> tuple[int, tuple[base.DistillationBatch, ...]] | None:
    """Returns launch number and inputs of the update in progress, for a checkpoint."""
    return self._update and (self._update.launched, self._update.batches)

  def launch(self, batches: Sequence[base.DistillationBatch], finished: int) -> None:
    """Starts an update on these micro-batches after `finished` requests."""
    if self._update is not None:
      raise RuntimeError("distillation: an update is in progress; take it first")
    # The slices change a state of their own. `learner` changes only in `take`, so a
    # checkpoint in between repeats the update from its inputs.
    self._update = update = _Update(finished, tuple(batches), self.learner)
    if self.in_background:
      update.future = self._thread.submit(self._run_all, update)

  def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Runs a call on the thread of updates, before the next one."""
    return self._thread.submit(call)

  def due(self, finished: int) -> bool:
    """Whether `take` should be called after `finished` requests."""
    if self._update is None:
      return False
    if not self._free:
      return self._requests_left(finished) <= 0
    future = self._update.future
    return future.done() if future is not None else not self._update.left()

  def wait_if_behind(self, finished: int, in_flight: int) -> None:
    """Gives the update in progress time, before a step of serving.

    `finished` requests have finished, and the step may finish `in_flight` more.
    """
    update = self._update
    if update is None:
      return
    if not self.in_background:
      requests = max(self._requests_left(finished), 1)
      self._run(update, math.ceil(len(update.left()) / requests))
      return
    # As long as updates keep up with serving, no step waits for them.
    late = self._behind and not self._free and update.asked < len(update.batches)
    if late and self._requests_left(finished + in_flight) <= 0:
      started = time.perf_counter()
      update.slices.acquire()
      update.asked += 1
      update.waited += time.perf_counter() - started

  def take(self) -> Outcome:
    """Waits for the update in progress; its state becomes `learner`."""
    update = self._update
    assert update is not None
    if update.future is not None:
      started = time.perf_counter()
      update.future.result()
      # Time that steps spent waiting for slices is not time that serving needed.
      self._behind = started - update.started - update.waited < update.seconds
      update.waited += time.perf_counter() - started
    else:
      self._run(update, len(update.batches))
      update.waited = update.seconds
    learner, metrics = update_lib.finish_update(
      self.learner, update.state, update.metrics
    )
    outcome = Outcome(
      learner=learner,
      launched=update.launched,
      losses=[float(x) for x in metrics.loss],
      grad_norms=[float(x) for x in metrics.grad_norm],
      skipped=int(np.sum(~metrics.finite)),
      update_ms=update.seconds * 1e3,
      wait_ms=update.waited * 1e3,
      changed=int(learner.version) != int(self.learner.version),
    )
    self._update, self.learner = None, learner
    return outcome

  def wait(self) -> None:
    """Waits until the thread is idle, without taking the result."""
    if self._update is not None and self._update.future is not None:
      concurrent.futures.wait([self._update.future])

  def drop(self) -> None:
    """Waits for the update in progress, and drops its result."""
    self.wait()
    self._update = None

  def close(self) -> None:
    """Ends the thread; an update in progress is finished and dropped."""
    self._thread.shutdown()

  def _requests_left(self, finished: int) -> int:
    assert self._update is not None
    return self._update.launched + self._interval - finished

  def _run(self, update: _Update, count: int) -> None:
    """Runs the next `count` slices on the calling thread."""
    started = time.perf_counter()
    for state, metrics in update_lib.slices(
      self._model, self._config, update.state, update.left()[:count], self._frozen
    ):
      update.state = state
      update.metrics.append(metrics)
    update.seconds += time.perf_counter() - started

  def _run_all(self, update: _Update) -> None:
    try:
      for _ in update.batches:
        self._run(update, 1)
        update.slices.release()
    finally:
      # After an error no step may wait forever; `take` raises the error.
      update.slices.release(len(update.batches))


class Learner:
  """Learning for one draft: buffer, schedule, and the update in progress.

  Attributes:
    config: buffer, updates and their schedule.
    finished: number of requests observed.
    gate: state of the gate, which chooses the draft that serves.
    decision: what the gate decided on the last request, if it decided anything.
    costs: measured costs, for the schedule; None until they are set.
    runner: runs the update in progress.
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

    Rows have a prompt length of S, an output length of T, and k entries per position in
    their records. The parameters include the frozen ones.
    """
    if jax.process_count() > 1 and config.free_updates:
      raise base.InputError(
        "LearningConfig.free_updates: received True, expected False when several"
        " processes serve together: all must take an update at the same request."
      )
    self._draft, self.config = draft, config
    self.finished = 0
    self.gate: gate_lib.GateState = gate_lib.begin(self._follows)
    self.decision: gate_lib.Decision | None = None
    # Drafts that the gate compares, by role. Until the first update, all are the first.
    self._drafts: dict[str, base.Params] = dict.fromkeys(
      ("newest", "proven", "floor"), params
    )
    trained, self._frozen = draft.split(params)
    self._since = 0  # rows added to the buffer before the last launch
    self._is_broken = False  # an answer had no finite overlap
    # Overlap of a draft with the last answer; None: no new draft is checked.
    self._score: Callable[[base.Params], float] | None = None
    self._overlap = 0.0  # that of the serving draft
    self._schedule: Any = config.schedule.init()
    self.costs: Costs | None = None
    on_mesh = sharding.is_distributed(params) or jax.process_count() > 1
    self._compiling: concurrent.futures.Future[Any] | None = None
    self.runner = UpdateRunner(
      draft,
      config.update,
      update_lib.init_learner(config.update, trained),
      config.schedule.update_interval,
      config.free_updates,
      self._frozen,
      in_background=not on_mesh,
    )
    self._append = jax.jit(buffer_lib.append, donate_argnums=0)
    # Tags of the newest rows of the buffer, oldest first.
    self._state_width = draft.state_width if config.buffer.keep_target_states else 0
    buffer = buffer_lib.init(
      config.buffer,
      source_length,
      target_length,
      record_top_k,
      draft.vocab_size,
      self._state_width,
      draft.state_width if draft.reads_tokens else 0,
    )
    # The rows come from the draft's mesh. The first append would move the buffer
    # there, and everything that reads it would be compiled a second time.
    self._buffer = sharding.copy_to_mesh_of(params, buffer)

  @property
  def serving(self) -> base.Params:
    """Parameters of the draft that should serve."""
    return self._drafts["newest" if self.gate.follows else "proven"]

  @property
  def version(self) -> int:
    """Version of the draft that should serve; 0 is the first draft."""
    return self.gate.serving

  @property
  def _follows(self) -> bool:
    """Whether new drafts serve until they are shown to be worse."""
    return self.config.gate is None

  @property
  def paused(self) -> bool:
    """Whether the schedule has paused updates."""
    return self._schedule.paused

  @property
  def rivals(self) -> dict[str, base.Params]:
    """Drafts whose overlaps with the next answer `observe` needs, for the gate."""
    roles = {"rival": "proven" if self.gate.follows else "newest", "floor": "floor"}
    names = gate_lib.wanted(self.gate, self.finished)
    return {name: self._drafts[roles[name]] for name in names}

  def seed(self, batches: Iterable[base.DistillationBatch]) -> None:
    """Fills the buffer before the first request; these rows do not count as new."""
    for batch in batches:
      self._buffer = self._append(self._buffer, self._with_states(batch))
      # A mesh can only hold few programs in flight: wait for each one.
      jax.block_until_ready(self._buffer.added)
    self._since = int(self._buffer.added)

  def warm_up(
    self, batches: Iterable[base.DistillationBatch] = (), in_background: bool = False
  ) -> None:
    """Compiles an update, and the append of such rows; changes no state.

    `in_background`: the thread of updates compiles the update, and none begins before.
    """
    for batch in batches:
      # Rows of weight 0 are compiled like others but not added.
      weightless = self._with_states(batch).replace(weight=batch.weight * 0)
      self._buffer = self._append(self._buffer, weightless)
    (sample,) = self._draw(1)
    compiling = functools.partial(
      *(update_lib.warm_up, self._draft, self.config.update, self.runner.learner),
      *(sample, self._frozen),
    )
    if in_background:
      self._compiling = self.runner.submit(compiling)
    else:
      compiling()

  def try_update(self, slices: int, serve: Callable[[], bool] = lambda: False) -> None:
    """Runs an update as serving does, and drops its result; used to measure its cost.

    `serve` runs one step of serving. It is called while the update runs, until it
    returns False. Then this method waits for the update.
    """
    batches = self._draw(slices)
    if not int(self._buffer.added):
      # An empty buffer gives empty rows, which would be cheaper than any real ones.
      batches = tuple(batch.replace(mask=batch.mask | True) for batch in batches)
    jax.block_until_ready(batches)
    before = self.runner.learner
    self.runner.launch(batches, self.finished)
    while self.runner.is_running and serve():
      pass
    self.runner.take()
    # Only the cost was wanted: the next update starts from the old state again.
    self.runner.learner = before

  def load(self, params: base.Params) -> None:
    """Goes on from another draft, which is the newest version from now on.

    The optimizer begins anew, and an update in progress is dropped. The buffer, the
    schedule and the count of requests stay. This draft is the proven one from now on,
    and the first draft returns if answers show that it is better.
    """
    self.runner.drop()
    trained, _ = self._draft.split(params)
    version = int(self.runner.learner.version) + 1
    fresh = update_lib.init_learner(self.config.update, trained)
    # Not computed on the device, because that would compile a program during serving.
    counter = sharding.copy_to_mesh_of(params, jax.device_put(np.int32(version)))
    self.runner.learner = fresh.replace(version=counter)
    self._drafts |= {"newest": params, "proven": params}
    self.gate = gate_lib.loaded(self.gate, version, self._follows)

  def wait_if_behind(self, in_flight: int) -> None:
    """Gives an update in progress time; called before a step of `in_flight` rows."""
    self.runner.wait_if_behind(self.finished, in_flight)

  def observe(
    self,
    batch: base.DistillationBatch,
    overlap: float,
    mixed: float | None = None,
    rivals: Mapping[str, float] = MappingProxyType({}),
    score: Callable[[base.Params], float] | None = None,
  ) -> Outcome | None:
    """Adds a finished request and launches an update if one is due.

    Args:
      batch: one row: the request with its records.
      overlap: overlap of the draft that served it, before it trains on the row.
      mixed: see `schedule.Request`.
      rivals: overlaps of the drafts in `self.rivals`.
      score: returns the overlap of other parameters with this request. The draft of an
        update that is due now serves only if it is not far worse; None does not check.

    Returns:
      The update that is due now, if any. `serving` is its draft, or the gate's choice.

    Raises:
      InputError: the overlap is not finite, which means that the draft is broken.
    """
    if not np.isfinite(overlap) and not self.gate.serving:
      self._is_broken = True
      raise base.InputError(
        f"distillation: the draft {self._draft.name!r} gives scores that are not finite"
        f" (its overlap on request {self.finished} is {overlap}); check its weights."
      )
    self.finished += 1
    # Before the update is taken: its draft has not been scored on this request.
    self._judge(self.config.gate or gate_lib.GateConfig(), overlap, rivals)
    overlap = overlap if np.isfinite(overlap) else 0.0
    self._overlap, self._score = overlap, score
    # Take a due update first, because the schedule may launch the next one below.
    outcome = self._take() if self.runner.due(self.finished) else None
    self._buffer = self._append(self._buffer, self._with_states(batch))
    # Count on the host: numpy would make XLA sum a jax array.
    tokens = int(np.count_nonzero(np.asarray(batch.mask)))
    can_begin = self._is_compiled() and not self.runner.busy
    most = self.config.update.steps_per_update if can_begin else 0
    request = schedule_lib.Request(overlap, tokens, most, mixed)
    self._schedule, slices = self.config.schedule.update(
      self._schedule, request, self.costs
    )
    if slices:
      batches = self._draw(slices)
      # The next append overwrites the buffer in place, so drawing must be done first.
      jax.block_until_ready(batches)
      self.runner.launch(batches, self.finished)
      self._since = int(self._buffer.added)
    return outcome

  def check_finite(self) -> None:
    """Raises BrokenDraftError if the newest draft gives scores that are not finite.

    An update skips steps that are not finite, but a finite step may still be so large
    that the next scores overflow.
    """
    loss = 0.0
    if int(self.runner.learner.version):  # the first draft was checked by `observe`
      config, (batch,) = self.config.update, self._draw(1)
      served = self.runner.learner.replace(params=self._draft.split(self.serving)[0])
      batch = update_lib.cut(config, batch)
      # A slice is compiled already, and nothing keeps its result.
      _, metrics = update_lib.take_slice(
        self._draft, config, served, batch, self._frozen
      )
      loss = float(metrics.loss)
    if self._is_broken or not np.isfinite(loss):
      raise base.BrokenDraftError(
        "the draft is not saved: it gives scores that are not finite; lower"
        " OptimizerConfig.learning_rate, or check the weights of the first draft."
      )

  def finish(self) -> Outcome | None:
    """Waits for the update in progress and takes it, even if it is not due yet."""
    return self._take() if self.runner.busy else None

  def shortlist(self) -> np.ndarray | None:
    """Returns tokens for a draft with a short head; None if its head is complete."""
    return buffer_lib.shortlist(self._draft, self._buffer)

  def state(self, has_rows: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state that a checkpoint stores: (arrays, JSON values).

    Without `has_rows`, everything that holds tokens of requests is left out: the buffer
    and the update in progress. A learner that is restored then has an empty buffer.
    """
    launched, inputs = (has_rows and self.runner.pending()) or (None, None)
    arrays = {
      "learner": self.runner.learner,
      # The newest is not always `learner.served`: a moving average moves even if every
      # slice of an update was skipped, and such an update is not swapped in.
      "drafts": {
        name: self._draft.split(self._drafts[name])[0] for name in ("newest", "proven")
      },
      "pending": inputs,
    }
    if has_rows:
      arrays["buffer"] = self._buffer
    host = {
      "finished": self.finished,
      "since": self._since if has_rows else 0,
      "schedule": dataclasses.asdict(self._schedule),
      "costs": self.costs and dataclasses.asdict(self.costs),
      "launched": launched,
      "slices": 0 if inputs is None else len(inputs),
      "gate": dataclasses.asdict(self.gate),
      "has_rows": has_rows,
    }
    return arrays, host

  def structure(self, host: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree shaped like the arrays that `state` returned with `host`."""
    arrays, _ = self.state(host["has_rows"])
    if host["launched"] is not None:
      arrays["pending"] = jax.eval_shape(lambda: self._draw(host["slices"]))
    return arrays

  def restore(self, arrays: dict[str, Any], host: dict[str, Any]) -> None:
    """Restores what `state` returned; launches the update in progress again."""
    self.runner.learner = arrays["learner"]
    self._buffer = arrays.get("buffer", self._buffer)
    self.finished, self._since = host["finished"], host["since"]
    self._schedule = base.from_json(host["schedule"], type(self._schedule))
    self.costs = base.from_json(host["costs"], Costs | None)
    self.gate = base.from_json(host["gate"], gate_lib.GateState)
    for name, trained in arrays["drafts"].items():
      self._drafts[name] = self._draft.join(trained, self._frozen)
    if host["launched"] is not None:
      self.runner.launch(arrays["pending"], host["launched"])

  def _with_states(self, batch: base.DistillationBatch) -> base.DistillationBatch:
    """Returns the batch with the target's hidden states that the buffer keeps."""
    if not self._draft.reads_tokens:
      batch = batch.replace(token_states=None)
    if not self._state_width:
      return batch.replace(target_states=None)
    if batch.target_states is not None:
      return batch
    return batch.replace(
      target_states=_target_states(self._draft, self.serving, batch.source)
    )

  def _is_compiled(self) -> bool:
    """Whether an update can begin; raises what compiling raised."""
    future = self._compiling
    return future is None or (future.done() and future.result() is None)

  def _draw(self, slices: int) -> tuple[base.DistillationBatch, ...]:
    config = self.config
    # A function of the number of requests, so a resumed run draws the same rows.
    key = jax.random.fold_in(jax.random.key(config.seed), self.finished)
    return update_lib.draw_update(
      config.update, config.buffer, self._buffer, key, self._since, slices
    )

  def _take(self) -> Outcome:
    outcome = self.runner.take()
    if not outcome.changed:
      return outcome
    newest = self._draft.join(outcome.learner.served, self._frozen)
    if not (self.gate.follows and self._refuses(newest, outcome.version)):
      self._drafts["newest"] = newest
      self.gate = dataclasses.replace(self.gate, newest=outcome.version)
    return outcome

  def _refuses(self, newest: base.Params, version: int) -> bool:
    """Whether a new draft was far worse on the last answer than those before."""
    if self._score is None:
      return False
    overlap, serving, proven = self._score(newest), self._overlap, 0.0
    if self.gate.rival is not None:
      proven = self._score(self._drafts["proven"])
    if not gate_lib.is_far_worse(overlap, max(serving, proven)):
      return False
    if proven >= serving:  # the draft that serves is on the same way down
      self._drafts["newest"] = self._drafts["proven"]
      self.gate = dataclasses.replace(self.gate, newest=self.gate.proven)
    gain = (overlap if np.isfinite(overlap) else 0.0) - max(serving, proven)
    self.decision = gate_lib.Decision("refused", version, 1, gain)
    return True

  def _judge(
    self, config: gate_lib.GateConfig, overlap: float, rivals: Mapping[str, float]
  ) -> None:
    """Lets the gate decide which draft serves from now on."""
    self.gate, self.decision = gate_lib.observe(config, self.gate, overlap, **rivals)
    match self.decision and self.decision.name:
      case "promoted" | "confirmed":
        self._drafts["proven"] = self._drafts["newest"]
      case "floor_returned":
        self._drafts["proven"] = self._drafts["floor"]


@functools.partial(jax.jit, static_argnums=0)
def _target_states(
  draft: base.Model, params: base.Params, source: jax.Array
) -> jax.Array:
  """Computes the target's hidden states of sources [R, S] for an attached draft."""
  assert draft.encode_for_draft is not None
  return draft.encode_for_draft(params, source, draft.mask(source))
