"""Replicas: other processes serve, and this one learns.

    driver                                    replicas (Ray actors), each with its pair
    waiting --- requests, newest draft --->   Engine.step()
    records, answers <--- finished --------   ...
       |
       +--> buffer, updates --> next draft

Requests and drafts go out, answers with their records come back, and replicas do not
communicate with each other. With an n-gram cache, the driver passes every answer on to
the other replicas with their next call, so that all draft from the same answers. Only
the driver knows which replica holds which request. So if a replica is lost, the driver
gives its requests to others, and every request is answered and learnt from once.

`Replicas` has the surface of `Engine` that a server uses: check, submit, step, swap,
clear, clear_memory, warm_up, state, structure, restore, messages and close. A server
gets it as its argument `engine`; see `ReplicaConfig.engine`.
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
from osd_jax.engine.requests import DecodingConfig, Finished, ReplicaConfig, Request

_UNSEEN = 256  # answers of others that wait for a replica's next call, at most
_LIVES = 3  # replicas that may be lost in a row, without an answer in between
_INHERITED = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


class Replica:
  """Runs in an actor: a pair of its own and the engine that serves it."""

  def load(
    self,
    settings: Mapping[str, Any],
    given: pairs.PairConfig,
    decoding: DecodingConfig,
    partition: sharding.PartitionConfig,
  ) -> list[Finished]:
    """Loads the pair and compiles everything; returns answers to made-up requests.

    Args:
      settings: names and values for `jax.config.update`.
      given: files of the pair; the replica's host has them under the same names.
      decoding: shapes of decoding, equal for all replicas.
      partition: mesh over the devices of this replica.
    """
    for name, value in settings.items():
      jax.config.update(name, value)
    partitioner = sharding.make(partition)
    pair = pairs.load_pair(given, partitioner).with_cache_size(decoding.cache_tokens)
    self._engine = Engine(decoding, *pair.models, partitioner)
    self._draft, self._frozen = pair.draft, pair.draft.split(pair.draft_params)[1]
    answers = [_on_host(answer) for answer in self._engine.warm_up()]
    self._engine.absorb(_text_of(answers[0]))  # compiles
    self._engine.clear_memory()
    return answers

  def step(
    self,
    requests: list[Request],
    draft: base.Draft | None,
    expecting: bool,
    forgets: bool = False,
    unseen: tuple[Finished, ...] = (),
  ) -> list[Finished]:
    """Runs one turn of its rows; see `Engine.step`.

    Args:
      requests: new requests for free rows.
      draft: a new draft, of which only the trained parameters are given; None keeps
        the present one.
      expecting: whether calls are short; see `Engine.expecting`.
      forgets: empty the n-gram cache first.
      unseen: answers of other replicas, for the n-gram cache.
    """
    if forgets:
      self._engine.clear_memory()
    for answer in unseen:
      self._engine.absorb(answer)
    if draft is not None:
      # The frozen part is the target's, which the replica has already.
      params = self._draft.join(draft.params, self._frozen)
      self._engine.swap(params, draft.version, draft.shortlist)
    for request in requests:  # their tags are numbers of the driver
      self._engine.submit(request, request.tag)
    self._engine.expecting = expecting
    return [_on_host(answer) for answer in self._engine.step()]


@dataclasses.dataclass(eq=False)
class _Handle:
  """The driver's record of a replica.

  Attributes:
    actor: the Ray actor.
    held: requests that it has not answered, by serial number.
    draft: serial number of the draft that it serves.
    unseen: answers of others that its n-gram cache lacks.
    forgets: its n-gram cache is emptied before its next call.
  """

  actor: Any
  held: dict[int, Request] = dataclasses.field(default_factory=dict)
  draft: int = 0
  unseen: collections.deque[Finished] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_UNSEEN)
  )
  forgets: bool = False


class Replicas:
  """B rows on each of N replicas.

  Attributes:
    config: shapes of decoding.
    draft_version: version of the newest draft that replicas get.
    shortlist: [N] int32, the tokens that its output head covers; None: all.
    submitted: requests so far, in all sessions; each has its number in this order.
    expecting: see `Engine.expecting`; every replica has a value of its own.
  """

  def __init__(
    self,
    replicas: ReplicaConfig,
    decoding: DecodingConfig,
    given: pairs.PairConfig | pairs.Pair,
    pair: pairs.Pair,
    partition: sharding.PartitionConfig,
  ):
    """Starts the actors, which load in the background.

    Args:
      replicas: number of replicas, and the resources of each.
      decoding: shapes of decoding of each replica.
      given: the files, which every replica loads itself.
      pair: the pair, loaded in this process.
      partition: mesh over the devices of each replica.

    Raises:
      InputError: Ray is not installed, the pair has no files, or several processes run
        as one program.
    """
    if not isinstance(given, pairs.PairConfig):
      raise base.InputError(
        "ReplicaConfig: received a loaded pair, expected a PairConfig, because every"
        " replica reads the files itself."
      )
    if jax.process_count() > 1:
      raise base.InputError(
        f"ReplicaConfig.count: received {replicas.count}, expected 0 with several"
        " processes (--multihost): each replica is a separate program."
      )
    self.expecting = False
    self._ray, self._started_ray = _ray()
    self.config, self._pair = decoding, pair
    self._has_cache = bool(decoding.cache_tokens) or pairs.adapts_untrained(pair)
    self._vocab_size = pair.target.vocab_size
    self.draft_version, self.shortlist = 0, None
    settings = {name: getattr(jax.config, name) for name in _INHERITED}
    self._make = lambda: (
      self._ray.remote(Replica)
      .options(
        num_cpus=0,  # replicas share the cores of their host
        num_gpus=replicas.gpus,
        scheduling_strategy="SPREAD",
      )
      .remote()
    )
    self._load_arguments = settings, given, decoding, partition
    self.submitted = self._lost_in_turn = self._drafts = 0
    self._draft_reference: Any = None
    self._messages: list[str] = []
    self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
    self._running: dict[Any, _Handle] = {}
    self._replicas = [_Handle(None) for _ in range(replicas.count)]
    for replica in self._replicas:
      self._restart(replica)

  @property
  def capacity(self) -> int:
    """Rows of all replicas."""
    return len(self._replicas) * self.config.rows

  @property
  def in_flight(self) -> int:
    """Requests in rows or waiting."""
    return len(self._waiting) + sum(len(one.held) for one in self._replicas)

  def check(self, request: Request) -> None:
    """Raises `InputError` if a request cannot be decoded; see `Request.check`."""
    if request.watch is not None:
      raise base.InputError(
        "ReplicaConfig: received a request with stop strings or streamed text, expected"
        " neither: its tokens stay in the replica until it ends."
      )
    request.check(self.config, self._vocab_size)

  def submit(self, request: Request) -> None:
    """Queues a request, or raises as `check` does."""
    self.check(request)
    self._waiting.append((self.submitted, request))
    self.submitted += 1

  def swap(
    self,
    draft_params: base.Params,
    version: int,
    shortlist: np.ndarray | None = None,
  ) -> None:
    """Sends new draft parameters to each replica before its next call."""
    trained = jax.device_get(self._pair.draft.split(draft_params)[0])
    if shortlist is not None:
      self.shortlist = np.asarray(shortlist, np.int32)
    self.draft_version, self._drafts = version, self._drafts + 1
    # Stored once: Ray sends one copy per host, however many replicas it has.
    self._draft_reference = self._ray.put(base.Draft(trained, version, self.shortlist))

  def step(self) -> list[Finished]:
    """Gives waiting requests to replicas, and waits for one replica to return."""
    self._dispatch()
    replica, answers = self._first()
    finished = [  # answers to warm-up requests are ignored
      dataclasses.replace(answer, request=replica.held.pop(answer.request.tag))
      for answer in answers
      if answer.request.tag in replica.held
    ]
    self._lost_in_turn = 0 if finished else self._lost_in_turn
    self._share(replica, finished)
    return finished

  def warm_up(self) -> list[Finished]:
    """Waits until all replicas have loaded and compiled.

    Returns:
      One replica's answers to made-up requests; see `Engine.warm_up`.
    """
    answers: list[Finished] = []
    while self._running:
      answers = self._first()[1] or answers
    return answers

  def clear(self) -> None:
    """Drops all requests; replicas that hold some are restarted."""
    self._waiting.clear()
    for replica in self._replicas:
      if replica.held:
        self._ray.kill(replica.actor)
        self._restart(replica)

  @property
  def memory(self) -> None:
    """None, because the n-gram cache stays in the replicas."""

  def clear_memory(self) -> None:
    """Empties the n-gram cache of each replica before its next call."""
    for replica in self._replicas:
      replica.unseen.clear()
      replica.forgets = True

  def close(self) -> None:
    """Stops the replicas."""
    for replica in self._replicas:
      self._ray.kill(replica.actor)
    if self._started_ray:
      self._ray.shutdown()
    self._replicas, self._running = [], {}
    self._waiting.clear()

  def messages(self) -> list[str]:
    """Returns, once, a message for each replica that was lost."""
    messages, self._messages = self._messages, []
    return messages

  def state(self) -> tuple[None, dict[str, Any]]:
    """Returns the state that a checkpoint stores: requests to be decoded again."""
    unanswered = dict(self._waiting)
    for replica in self._replicas:
      unanswered |= replica.held
    return None, {
      "shortlist": None if self.shortlist is None else self.shortlist.tolist(),
      "draft_version": self.draft_version,
      "bucket": 0,  # an engine in one process then expects no rows
      "slots": [],
      "waiting": [[serial, unanswered[serial].tag] for serial in sorted(unanswered)],
      "submitted": self.submitted,
      "is_numbered": True,
    }

  def structure(self, host: dict[str, Any]) -> None:
    """Returns None, because no arrays are saved.

    Raises:
      InputError: the checkpoint is from a run without replicas.
    """
    if host["slots"]:
      raise base.InputError(
        "ReplicaConfig.count: received replicas for a run that was started without,"
        " expected 0; continue without replicas, or start a run in a new directory."
      )

  def restore(
    self,
    arrays: None,
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
    draft_params: base.Params,
  ) -> None:
    """Continues from the result of `state`."""
    self.swap(draft_params, host["draft_version"], host["shortlist"])
    self._waiting.extend((n, request_of(tag)) for n, tag in host["waiting"])
    self.submitted = host["submitted"]

  def _first(self) -> tuple[_Handle, list[Finished]]:
    """Waits for a call of any replica; replaces a replica that was lost.

    Returns:
      The replica, and the answers of its call.
    """
    (reference,), _ = self._ray.wait(list(self._running), num_returns=1)
    replica = self._running.pop(reference)
    try:
      return replica, self._ray.get(reference)
    except self._ray.exceptions.RayActorError as error:
      self._replace(replica, error)
      return replica, []
    except self._ray.exceptions.RayTaskError as error:
      raise error.cause from None  # as if it was raised here

  def _share(self, source: _Handle, finished: list[Finished]) -> None:
    """Keeps answers of a replica for the n-gram caches of the others."""
    if not self._has_cache:
      return
    texts = [_text_of(answer) for answer in finished if answer.request.remember]
    for replica in self._replicas:
      if replica is not source:
        replica.unseen.extend(texts)

  def _restart(self, replica: _Handle) -> None:
    """Starts a process, which replaces a lost one if there was one."""
    self._running = {r: one for r, one in self._running.items() if one is not replica}
    # Draft 0 is the one in the files, which the new process loads.
    replica.actor, replica.held, replica.draft = self._make(), {}, 0
    replica.unseen.clear()  # its n-gram cache is empty
    replica.forgets = False
    self._running[replica.actor.load.remote(*self._load_arguments)] = replica

  def _replace(self, replica: _Handle, error: Exception) -> None:
    """Moves the requests of a lost replica to the front of the queue."""
    self._lost_in_turn += 1
    reason = str(error).strip().splitlines()[-1].partition(". ")[0].rstrip(".")
    if self._lost_in_turn > _LIVES:
      raise base.UserError(
        f"replicas: {self._lost_in_turn} replicas were lost in a row without answering"
        f" ({reason}); see Ray's logs, then repeat the command."
      )
    # In reverse, because each one is put in front of the others.
    for serial in sorted(replica.held, reverse=True):
      self._waiting.appendleft((serial, replica.held[serial]))
    number = self._replicas.index(replica) + 1
    count = len(replica.held)
    self._messages.append(
      f"Replica {number} was lost ({reason}); its {count} requests go to other"
      " replicas, and a new replica replaces it."
    )
    self._restart(replica)

  def _dispatch(self) -> None:
    """Starts a call of every idle replica that holds requests."""
    busy = set(self._running.values())
    idle = [one for one in self._replicas if one not in busy]
    batches: dict[_Handle, list[Request]] = {replica: [] for replica in idle}
    while self._waiting and idle:
      emptiest = min(idle, key=lambda one: len(one.held))
      if len(emptiest.held) == self.config.rows:
        break
      serial, request = self._waiting.popleft()
      emptiest.held[serial] = request
      # Tags are arbitrary values of the caller, and may be large or not serialisable.
      # The serial number identifies the request on its way.
      batches[emptiest].append(dataclasses.replace(request, tag=serial))
    for replica, requests in batches.items():
      if replica.held:
        is_current = replica.draft == self._drafts
        draft = None if is_current else self._draft_reference
        replica.draft = self._drafts
        expecting = len(replica.held) < self.config.rows
        call = replica.actor.step.remote(
          requests, draft, expecting, replica.forgets, tuple(replica.unseen)
        )
        replica.unseen.clear()
        replica.forgets = False
        self._running[call] = replica


def _ray() -> tuple[Any, bool]:
  """Returns Ray, connected, and whether it was started here.

  Raises:
    InputError: Ray is not installed.
  """
  try:
    import ray
  except ImportError as error:
    raise base.InputError(
      'ReplicaConfig.count: replicas need Ray: pip install "osd_jax[replicas]" adds it.'
    ) from error
  if ray.is_initialized():
    return ray, False
  before = signal.getsignal(signal.SIGTERM)
  ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, before)  # Ray would end the process
  return ray, True


def _on_host(done: Finished) -> Finished:
  """Copies an answer's arrays to the host, so that they can be sent."""
  batch, settings = jax.device_get((done.batch, done.settings))
  return dataclasses.replace(done, batch=batch, settings=settings)


def _text_of(done: Finished) -> Finished:
  """Returns the part of an answer that an n-gram cache takes up."""
  # Tags are arbitrary values of the caller, and may not be serialisable.
  request = dataclasses.replace(done.request, tag=None, watch=None)
  batch = done.batch.replace(records=None, target_states=None, token_states=None)
  return dataclasses.replace(done, request=request, batch=batch)
