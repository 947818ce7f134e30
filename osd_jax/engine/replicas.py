"""Rows held by other processes: replicas that serve, and one process that learns.

    driver                                    replicas (Ray actors), each with its pair
    waiting --- requests, newest draft --->   Engine.step()
    records, answers <--- finished --------   ...
       |
       +--> buffer, updates --> next draft

Requests and drafts go out, answers with their records come back; a replica never hears
of another. The driver alone knows who holds what. So where a replica is lost, its
requests are given to others, and every request is answered, and learnt from, once.
"""

import collections
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from osd_jax import base, pairs, sharding
from osd_jax.engine.engine import Engine
from osd_jax.engine.requests import DecodingConfig, Finished, Request
from osd_jax.engine.rows import Rows

_LIVES = 3  # replicas that may be lost one after the other without an answer between
_INHERITED = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@dataclasses.dataclass(frozen=True)
class ReplicaConfig(base.Config):
  """Processes that serve beside the one that learns; they need the extra `replicas`.

  Attributes:
    count: replicas, each with `DecodingConfig.rows` rows; 0: this process serves.
    cpus: cores of its host that each one takes; 0: they share what there is.
    gpus: likewise GPUs.
    tpus: likewise chips.
  """

  count: base.CountOrZero = 0
  cpus: base.NonNegative = 0.0
  gpus: base.NonNegative = 0.0
  tpus: base.NonNegative = 0.0


class Replica:
  """What runs in an actor: a pair of its own and the rows that it serves."""

  def __init__(
    self,
    settings: Mapping[str, Any],
    pair: pairs.PairConfig,
    decoding: DecodingConfig,
    partition: sharding.PartitionConfig,
  ):
    """Loads nothing yet.

    Args:
      settings: of JAX.
      pair: files of the pair, which the replica's host sees under the same names.
      decoding: shapes.
      partition: mesh of its devices.
    """
    self._settings = settings
    self._given = pair, decoding, partition

  def load(self) -> list[Finished]:
    """Loads the pair and compiles everything; answers to made-up requests."""
    for name, value in self._settings.items():
      jax.config.update(name, value)
    given, decoding, partition = self._given
    partitioner = sharding.make(partition)
    pair = pairs.load_pair(given, partitioner)
    models = pair.target, pair.target_params, pair.draft, pair.draft_params
    self._slots = Engine(decoding, *models, partitioner)
    self._draft, self._frozen = pair.draft, pair.draft.split(pair.draft_params)[1]
    return [_on_host(done) for done in self._slots.warm_up()]

  def step(
    self, requests: list[Request], draft: tuple[Any, ...] | None, expecting: bool
  ) -> list[Finished]:
    """One turn of its rows; see `Engine.step`.

    Args:
      requests: to be put into free rows.
      draft: (trained parameters, version, shortlist) to serve from now on; None keeps.
      expecting: more may come soon.
    """
    if draft is not None:
      trained, version, shortlist = draft
      params = self._draft.join(trained, self._frozen)
      self._slots.swap(params, version, shortlist)
    for request in requests:
      self._slots.submit(request)
    self._slots.expecting = expecting
    return [_on_host(done) for done in self._slots.step()]


@dataclasses.dataclass(eq=False)
class _Handle:
  """What the driver knows of a replica: who it is, what it holds, what it was told."""

  actor: Any
  held: dict[int, Request] = dataclasses.field(default_factory=dict)
  draft: int = 0


class Replicas(Rows):
  """B rows on each of N replicas; learning and metering stay with who owns this.

  Attributes:
    config: shapes of decoding.
    draft_version: of the draft that replicas are told to serve.
    shortlist: [N] int32, the tokens that its output head covers; None: all.
  """

  def __init__(
    self,
    replicas: ReplicaConfig,
    decoding: DecodingConfig,
    given: pairs.PairConfig | pairs.Pair,
    pair: pairs.Pair,
    partition: sharding.PartitionConfig,
  ):
    """Starts the actors; they load while the caller goes on.

    Args:
      replicas: how many, and what each takes.
      decoding: shapes of each.
      given: files of the pair.
      pair: the same, loaded here.
      partition: mesh of each.

    Raises:
      InputError: Ray is not installed, or the pair has no files.
    """
    if not isinstance(given, pairs.PairConfig):
      raise base.InputError(
        "ReplicaConfig: received a loaded pair, expected a PairConfig: replicas read"
        " its files for themselves."
      )
    if jax.process_count() > 1:
      raise base.InputError(
        f"ReplicaConfig.count: received {replicas.count}, expected 0 where several"
        " processes are one program; replicas are programs of their own."
      )
    self._ray, self._began = _ray()
    self.config, self._pair = decoding, pair
    self._vocab_size = pair.target.vocab_size
    self.draft_version, self.shortlist = 0, None
    settings = {name: getattr(jax.config, name) for name in _INHERITED}
    resources = {"TPU": replicas.tpus} if replicas.tpus else None
    self._make = lambda: (
      self._ray.remote(Replica)
      .options(
        num_cpus=replicas.cpus,
        num_gpus=replicas.gpus,
        resources=resources,
        scheduling_strategy="SPREAD",
      )
      .remote(settings, given, decoding, partition)
    )
    self._serial = self._lost_in_turn = self._drafts = 0
    self._draft_reference: Any = None
    self._messages: list[str] = []
    self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
    self._running: dict[Any, _Handle] = {}
    self._replicas = [self._started() for _ in range(replicas.count)]

  @property
  def capacity(self) -> int:
    """Rows of all replicas."""
    return len(self._replicas) * self.config.rows

  @property
  def in_flight(self) -> int:
    """Requests held or waiting."""
    return len(self._waiting) + sum(len(one.held) for one in self._replicas)

  def check(self, request: Request) -> None:
    """Raises `InputError` where a request cannot be decoded; see `Request.check`."""
    if request.watch is not None:
      raise base.InputError(
        "ReplicaConfig: received a request that somebody watches (stop strings, text"
        " piece by piece), expected none: its tokens are elsewhere until it ends."
      )
    request.check(self.config.source_lengths[-1], self._vocab_size)

  def submit(self, request: Request) -> None:
    """Queues a request, or raises as `check` does."""
    self.check(request)
    self._waiting.append((self._serial, request))
    self._serial += 1

  def swap(
    self,
    draft_params: base.Params,
    version: int,
    shortlist: np.ndarray | None = None,
  ) -> None:
    """New draft parameters, which each replica hears of before its next call."""
    trained = jax.device_get(self._pair.draft.split(draft_params)[0])
    if shortlist is not None:
      self.shortlist = np.asarray(shortlist, np.int32)
    self.draft_version, self._drafts = version, self._drafts + 1
    self._draft_reference = self._ray.put((trained, version, self.shortlist))

  def step(self) -> list[Finished]:
    """Gives waiting requests to replicas, and waits for one of them."""
    self._hand_out()
    replica, answers = self._first()
    finished = [  # those to the made-up requests of one that has loaded are nobody's
      dataclasses.replace(done, request=replica.held.pop(done.request.tag))
      for done in answers
      if done.request.tag in replica.held
    ]
    self._lost_in_turn = 0 if finished else self._lost_in_turn
    return finished

  def warm_up(self) -> list[Finished]:
    """Waits until all replicas have loaded and compiled.

    Returns:
      One's answers to made-up requests, to warm up what comes behind.
    """
    answers: list[Finished] = []
    while self._running:
      _, found = self._first()
      answers = found or answers
    return answers

  def clear(self) -> None:
    """Drops whatever waits or is held; replicas that hold something begin anew."""
    self._waiting.clear()
    for replica in self._replicas:
      if replica.held:
        self._ray.kill(replica.actor)
        self._restart(replica)

  def close(self) -> None:
    """Ends the replicas."""
    for replica in self._replicas:
      self._ray.kill(replica.actor)
    if self._began:
      self._ray.shutdown()
    self._replicas, self._running = [], {}
    self._waiting.clear()

  def messages(self) -> list[str]:
    """Replicas that were lost since this was last asked."""
    said, self._messages = self._messages, []
    return said

  def state(self) -> tuple[None, dict[str, Any]]:
    """What a checkpoint keeps: requests without an answer. They are decoded anew."""
    unanswered = dict(self._waiting)
    for replica in self._replicas:
      unanswered |= replica.held
    return None, {
      "shortlist": None if self.shortlist is None else self.shortlist.tolist(),
      "draft_version": self.draft_version,
      "bucket": 0,
      "tags": [],
      "waiting": [unanswered[serial].tag for serial in sorted(unanswered)],
    }

  def structure(self, host: dict[str, Any]) -> None:
    """Nothing is read into.

    Raises:
      InputError: the checkpoint is of a process that held the rows itself.
    """
    if host["tags"]:
      raise base.InputError(
        "ReplicaConfig.count: received replicas for a run whose rows one process held,"
        " expected 0; go on without replicas, or begin a run in a new directory."
      )

  def restore(
    self,
    arrays: None,
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
    draft_params: base.Params,
  ) -> None:
    """Continues from what `state` gave."""
    self.restore_draft(host, draft_params)
    for tag in host["waiting"]:
      self.submit(request_of(tag))

  def _first(self) -> tuple[_Handle, list[Finished]]:
    """Waits for a call of any replica; one that is lost is replaced.

    Returns:
      The replica, and what it gave.
    """
    (reference,), _ = self._ray.wait(list(self._running), num_returns=1)
    replica = self._running.pop(reference)
    try:
      return replica, self._ray.get(reference)
    except self._ray.exceptions.RayActorError as error:
      self._replace(replica, error)
      return replica, []
    except self._ray.exceptions.RayTaskError as error:
      raise error.cause from None  # what was raised there, as if it were here

  def _started(self) -> _Handle:
    replica = _Handle(self._make())
    self._running[replica.actor.load.remote()] = replica
    return replica

  def _restart(self, replica: _Handle) -> None:
    """A new process in the place of one that is gone."""
    self._running = {r: one for r, one in self._running.items() if one is not replica}
    replica.actor, replica.held, replica.draft = self._make(), {}, 0
    self._running[replica.actor.load.remote()] = replica

  def _replace(self, replica: _Handle, error: Exception) -> None:
    """Gives what a lost replica held to the others, first of all that waits."""
    self._lost_in_turn += 1
    reason = str(error).strip().splitlines()[-1].partition(". ")[0].rstrip(".")
    if self._lost_in_turn > _LIVES:
      raise base.UserError(
        f"replicas: {self._lost_in_turn} were lost one after the other without an"
        f" answer between ({reason}); see Ray's own logs, then repeat the command."
      )
    for serial in sorted(replica.held, reverse=True):
      self._waiting.appendleft((serial, replica.held[serial]))
    number = self._replicas.index(replica) + 1
    count = len(replica.held)
    self._messages.append(
      f"Replica {number} was lost ({reason}); its {count} requests go to others, and a"
      " new one takes its place."
    )
    self._restart(replica)

  def _hand_out(self) -> None:
    """Starts a call of every replica that has something to do and is not at it."""
    busy = set(self._running.values())
    idle = [one for one in self._replicas if one not in busy]
    given: dict[_Handle, list[Request]] = {replica: [] for replica in idle}
    while self._waiting and idle:
      emptiest = min(idle, key=lambda one: len(one.held))
      if len(emptiest.held) == self.config.rows:
        break
      serial, request = self._waiting.popleft()
      emptiest.held[serial] = request
      given[emptiest].append(dataclasses.replace(request, tag=serial))
    for replica, requests in given.items():
      if replica.held:
        told = replica.draft == self._drafts
        draft = None if told else self._draft_reference
        replica.draft = self._drafts
        expecting = len(replica.held) < self.config.rows
        call = replica.actor.step.remote(requests, draft, expecting)
        self._running[call] = replica


def _ray() -> tuple[Any, bool]:
  """Ray, connected; and whether it was begun here.

  Raises:
    InputError: it is not installed.
  """
  try:
    import ray
  except ImportError as error:
    raise base.InputError(
      "ReplicaConfig.count: replicas need Ray: pip install 'osd-jax[replicas]'."
    ) from error
  if ray.is_initialized():
    return ray, False
  before = signal.getsignal(signal.SIGTERM)
  ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, before)  # Ray would end the process by itself
  return ray, True


def _on_host(done: Finished) -> Finished:
  """An answer whose arrays can travel."""
  batch, settings = jax.device_get((done.batch, done.settings))
  return dataclasses.replace(done, batch=batch, settings=settings)
