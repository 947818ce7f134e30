"""Rows in flight, from the host: requests in, finished requests out.

The host, and only the host, refills rows, takes records and swaps the draft, between
two compiled calls.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, cache
from osd_jax.decoding import autoregressive, sampling, speculative
from osd_jax.decoding import state as state_lib


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """Shapes of decoding; all of them are compiled in.

  Attributes:
    rows: B, requests in flight.
    num_draft_tokens: K in 1..8.
    source_lengths: buckets S that prompts are padded to; a batch holds one bucket.
    target_length: T, upper limit of every request's length limit.
    record_top_k: k, entries kept of every target distribution; 0 records nothing,
      V or more keeps full rows.
    max_rounds: rounds after which a call returns to the host although no row has
      finished; bounds how long a swap or a new request waits.
  """

  rows: int = 1
  num_draft_tokens: int = 5
  source_lengths: tuple[int, ...] = (64,)
  target_length: int = 96
  record_top_k: int = 64
  max_rounds: int = 256

  def __post_init__(self):
    lengths = tuple(sorted(self.source_lengths))
    object.__setattr__(self, "source_lengths", lengths)
    checks = {
        "rows": (self.rows >= 1, "an integer >= 1"),
        "num_draft_tokens": (
            1 <= self.num_draft_tokens <= state_lib.MAX_DRAFT_TOKENS,
            f"an integer in 1..{state_lib.MAX_DRAFT_TOKENS}",
        ),
        "source_lengths": (lengths and lengths[0] >= 2, "lengths >= 2"),
        "target_length": (self.target_length >= 1, "an integer >= 1"),
        "record_top_k": (self.record_top_k >= 0, "an integer >= 0"),
        "max_rounds": (self.max_rounds >= 1, "an integer >= 1"),
    }
    for name, (valid, expected) in checks.items():
      if not valid:
        raise ValueError(
            f"DecodingConfig.{name}: received {getattr(self, name)!r}, expected"
            f" {expected}."
        )


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling of every request of a run; see `base.SamplingSettings`.

  Attributes:
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    seed: request i draws with seed + i.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """One prompt to answer.

  Attributes:
    tokens: [n] int32, prompt with end-of-sequence.
    sampling: how to draw; its seed is the request's own.
    max_length: at most this many tokens are emitted; None takes T.
    tag: anything the caller wants back with the answer.
  """

  tokens: np.ndarray
  sampling: SamplingConfig = SamplingConfig()
  max_length: int | None = None
  tag: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
  """One answered request.

  Attributes:
    request: the request.
    tokens: [n] int32, emitted, end-of-sequence included.
    stop_reason: why it ended.
    target_calls: verifications (plain decoding: steps) it took.
    drafted: drafted tokens that were judged and could be emitted.
    accepted: of those, accepted.
    accepted_per_position: [8] rounds that accepted the i-th drafted token.
    milliseconds: wall time of its prefill and of its share of the calls.
    batch: the same as a `DistillationBatch` of one row; records None if off.
    settings: [1] sampling it was decoded with.
  """

  request: Request
  tokens: np.ndarray
  stop_reason: base.StopReason
  target_calls: int
  drafted: int
  accepted: int
  accepted_per_position: tuple[int, ...]
  milliseconds: float
  batch: base.DistillationBatch
  settings: base.SamplingSettings


class Slots:
  """B rows, each holding a request or empty.

  Without a draft it decodes plainly: the baseline runs through the same host code.
  """

  def __init__(
      self,
      config: DecodingConfig,
      target: base.Model,
      target_params: base.Params,
      draft: base.Model | None = None,
      draft_params: base.Params | None = None,
      partitioner: Any = None,
  ):
    """Prepares the parameters; nothing is decoded yet.

    Args:
      config: shapes.
      target: the target model.
      target_params: its parameters; the served copy is made here.
      draft: the draft model, None for plain decoding.
      draft_params: its parameters.
      partitioner: a `partitioning.Partitioner`, None for one device.

    Raises:
      ValueError: target and draft have different vocabularies.
    """
    if draft is not None and draft.vocab_size != target.vocab_size:
      raise ValueError(
          f"decoding: the draft {draft.name!r} has {draft.vocab_size} token ids, the"
          f" target {target.name!r} has {target.vocab_size}; expected the same"
          " vocabulary. Choose a draft trained with the target's vocabulary."
      )
    self.config = config
    if partitioner is not None and partitioner.mesh.size == 1:
      partitioner = None  # nothing to place, and one compilation with who has none
    self._target, self._draft, self._partitioner = target, draft, partitioner
    self._target_served = _prepare(target, target_params)
    self._draft_served: base.Params = None
    self.draft_version = 0
    if draft is not None:
      self.swap(draft_params, 0)
    self._state: state_lib.DecodeState | None = None
    self._bucket = 0
    self._waiting: deque[Request] = deque()
    self._held: list[Request | None] = [None] * config.rows
    self._milliseconds = [0.0] * config.rows

  @property
  def in_flight(self) -> int:
    """Requests held or waiting."""
    return len(self._waiting) + sum(held is not None for held in self._held)

  def swap(self, draft_params: base.Params, version: int) -> None:
    """New draft parameters from the next call on; outputs do not depend on them.

    The draft's cache entries of rows in flight stay those of the old draft: that can
    cost acceptance for the rest of the request, never exactness.
    """
    assert self._draft is not None
    self._draft_served = _prepare(self._draft, draft_params)
    self.draft_version = version

  def submit(self, request: Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its prompt is empty or longer than the largest bucket, or a
        sampling value is out of range.
    """
    count = len(request.tokens)
    if not 1 <= count <= self.config.source_lengths[-1]:
      raise ValueError(
          f"decoding: the prompt has {count} tokens, expected 1 to"
          f" {self.config.source_lengths[-1]}; truncate it or add a longer bucket to"
          " DecodingConfig.source_lengths."
      )
    self._settings(request)  # checked before it is queued
    self._waiting.append(request)

  def step(self) -> list[Finished]:
    """Fills empty rows, runs one compiled call, returns what finished, by slot."""
    self._admit()
    rows = [slot for slot, held in enumerate(self._held) if held is not None]
    if not rows:
      return []
    started = time.perf_counter()
    self._state = self._advance(self._state)
    reasons = np.asarray(self._state.stop_reason)  # waits for the call
    spent = (time.perf_counter() - started) * 1e3
    for slot in rows:
      self._milliseconds[slot] += spent / len(rows)
    return [self._take(s) for s in rows if reasons[s] != base.StopReason.RUNNING]

  def run(self, requests: Sequence[Request]) -> list[Finished]:
    """Answers all requests; results in the order of the requests."""
    for request in requests:
      self.submit(request)
    found: list[Finished] = []
    while self.in_flight:
      found += self.step()
    place = {id(request): index for index, request in enumerate(requests)}
    return sorted(found, key=lambda done: place[id(done.request)])

  def warm_up(self) -> list[Finished]:
    """Compiles for every bucket, so that no request's time holds a compilation.

    Returns:
      Answers to made-up requests, to warm up what comes behind.
    """
    found = []
    for bucket in self.config.source_lengths:
      prompt = np.full(bucket, base.EOS_ID, np.int32)
      found += self.run([Request(prompt, max_length=1)])
    self._bucket, self._state = 0, None
    return found

  def arrays(self) -> state_lib.DecodeState | None:
    """The rows in flight, for a checkpoint; `held` goes with them."""
    return self._state

  def held(self) -> dict[str, Any]:
    """What a checkpoint keeps beside `arrays`: bucket, requests' tags, times."""
    return {
        "bucket": self._bucket,
        "tags": [None if held is None else held.tag for held in self._held],
        "waiting": [request.tag for request in self._waiting],
        "milliseconds": list(self._milliseconds),
    }

  def restore(
      self, arrays: Any, held: dict[str, Any], requests: dict[Any, Request]
  ) -> None:
    """Continues from `arrays()` and `held()`.

    Args:
      arrays: the saved rows, None if there were none.
      held: what `held` returned.
      requests: the requests by tag.
    """
    self._bucket = held["bucket"]
    self._state = arrays
    self._held = [None if tag is None else requests[tag] for tag in held["tags"]]
    self._waiting = deque(requests[tag] for tag in held["waiting"])
    self._milliseconds = list(held["milliseconds"])

  def abstract_state(self, bucket: int) -> Any:
    """Shapes of `arrays()` for a bucket, to restore a checkpoint into."""
    return None if bucket == 0 else jax.eval_shape(lambda: self._empty(bucket))

  def _admit(self) -> None:
    """Fills empty rows in order; a batch holds one bucket of source lengths."""
    while self._waiting and None in self._held:
      request = self._waiting[0]
      needed = next(
          s for s in self.config.source_lengths if s >= len(request.tokens)
      )
      idle = all(held is None for held in self._held)
      if needed > self._bucket or (idle and needed != self._bucket):
        if not idle:
          return  # its bucket comes when the present rows have finished
        self._bucket, self._state = needed, self._empty(needed)
      self._waiting.popleft()
      slot = self._held.index(None)
      started = time.perf_counter()
      self._state = self._insert(request, slot)
      jax.block_until_ready(self._state.length)
      self._held[slot] = request
      self._milliseconds[slot] = (time.perf_counter() - started) * 1e3

  def _insert(self, request: Request, slot: int) -> state_lib.DecodeState:
    source = np.full((1, self._bucket), base.PAD_ID, np.int32)
    source[0, : len(request.tokens)] = request.tokens
    return _insert(
        self.config,
        self._target,
        self._draft,
        self._partitioner,
        self._target_served,
        self._draft_served,
        self._state,
        source,
        self._settings(request),
        slot,
    )

  def _settings(self, request: Request) -> base.SamplingSettings:
    chosen, limit = request.sampling, request.max_length
    return sampling.make_settings(
        1,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        seed=chosen.seed,
        max_length=self.config.target_length if limit is None else limit,
    )

  def _advance(self, state: Any) -> state_lib.DecodeState:
    if self._draft is None:
      # One plain step emits what a round emits at most in K + 1.
      return _plain(
          self.config,
          self._target,
          self._partitioner,
          self._target_served,
          np.int32(self.config.max_rounds),
          state,
      )
    return _speculative(
        self.config,
        self._target,
        self._draft,
        self._partitioner,
        self._target_served,
        self._draft_served,
        np.int32(self.draft_version),
        np.int32(self.config.max_rounds),
        state,
    )

  def _empty(self, bucket: int) -> state_lib.DecodeState:
    """A state whose rows are all empty."""
    return _empty(
        self.config,
        self._target,
        self._draft,
        self._partitioner,
        self._target_served,
        self._draft_served,
        bucket,
    )

  def _take(self, slot: int) -> Finished:
    """Reads a finished row and empties its slot."""
    request = self._held[slot]
    assert request is not None and self._state is not None
    self._held[slot] = None
    source = np.full((1, self.config.source_lengths[-1]), base.PAD_ID, np.int32)
    source[0, : len(request.tokens)] = request.tokens
    batch, settings, figures = _row(self.config, self._state, source, slot)
    tokens, length, reason, counters = jax.tree.map(
        lambda leaf: leaf[0], jax.device_get((batch.target, *figures))
    )
    return Finished(
        request=request,
        tokens=tokens[:length],
        stop_reason=base.StopReason(int(reason)),
        target_calls=int(counters.rounds),
        drafted=int(counters.drafted),
        accepted=int(counters.accepted),
        accepted_per_position=tuple(counters.accepted_per_position.tolist()),
        milliseconds=self._milliseconds[slot],
        batch=batch,
        settings=settings,
    )


@functools.partial(jax.jit, static_argnums=0)
def _prepare(model: base.Model, params: base.Params) -> base.Params:
  return model.prepare(params)


def _prefilled(
    config, target, draft, target_served, draft_served, source, settings
) -> state_lib.DecodeState:
  """Rows after prefill: both encoders, empty self caches."""
  mask = source != base.PAD_ID
  length = state_lib.buffer_length(config.target_length)
  draft_cache = None
  if draft is not None:
    draft_cache = draft.prefill(draft_served, source, mask, length)
  return state_lib.initial_state(
      settings,
      target.prefill(target_served, source, mask, length),
      draft_cache,
      config.target_length,
      config.record_top_k,
      target.vocab_size,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 6))
def _empty(config, target, draft, partitioner, target_served, draft_served, bucket):
  source = jnp.zeros((config.rows, bucket), jnp.int32)
  settings = sampling.make_settings(config.rows, max_length=config.target_length)
  shapes = jax.eval_shape(
      functools.partial(_prefilled, config, target, draft),
      target_served,
      draft_served,
      source,
      settings,
  )
  state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  state = state.replace(
      stop_reason=jnp.full((config.rows,), int(base.StopReason.EMPTY), jnp.int32)
  )
  return _constrained(partitioner, state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=6)
def _insert(
    config,
    target,
    draft,
    partitioner,
    target_served,
    draft_served,
    state,
    source,
    settings,
    slot,
):
  row = _prefilled(config, target, draft, target_served, draft_served, source, settings)
  return _constrained(partitioner, cache.insert_row(state, row, slot))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=8)
def _speculative(
    config,
    target,
    draft,
    partitioner,
    target_served,
    draft_served,
    draft_version,
    max_rounds,
    state,
):
  state = speculative.run_rounds(
      target,
      draft,
      config.num_draft_tokens,
      False,
      target_served,
      draft_served,
      draft_version,
      max_rounds,
      state,
  )
  return _constrained(partitioner, state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _plain(config, target, partitioner, target_served, max_steps, state):
  del config  # part of the key only: its shapes are the state's
  state = autoregressive.run_steps(target, False, target_served, max_steps, state)
  return _constrained(partitioner, state)


@functools.partial(jax.jit, static_argnums=0)
def _row(config, state, source, slot):
  """One row: what the loss wants of it, its settings, and its figures for the host.

  One compiled call: eager operations would cost the host more than a draft step.
  """

  def take(leaf):
    return jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)

  def cut(leaf):
    return take(leaf)[:, : config.target_length]

  length = take(state.length)
  mask = jnp.arange(config.target_length)[None] < length[:, None]
  batch = base.DistillationBatch(
      source=source,
      target=jnp.where(mask, cut(state.tokens), base.PAD_ID),
      mask=mask,
      records=jax.tree.map(cut, state.records),
      source_id=jnp.zeros((1,), jnp.int32),
      weight=jnp.ones((1,), jnp.float32),
  )
  settings, reason, counters = jax.tree.map(
      take, (state.settings, state.stop_reason, state.counters)
  )
  return batch, settings, (length, reason, counters)


def _constrained(partitioner, state):
  return state if partitioner is None else partitioner.constrain_rows(state)
