"""Rows in flight, from the host: requests in, finished requests out.

The host, and only the host, refills rows, takes records and swaps the draft, between
two compiled calls.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from osd_jax import base
from osd_jax.decoding import sampling
from osd_jax.decoding import state as state_lib
from osd_jax.serving import calls, drafting
from osd_jax.serving.adaptive import AdaptiveConfig
from osd_jax.serving.requests import (
  DecodingConfig,
  Finished,
  Request,
  SamplingConfig,
)

__all__ = [
  "AdaptiveConfig",
  "DecodingConfig",
  "Finished",
  "Request",
  "SamplingConfig",
  "Slots",
]


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
      raise base.InputError(
        f"decoding: the draft {draft.name!r} has {draft.vocab_size} token ids, the"
        f" target {target.name!r} has {target.vocab_size}; expected the same"
        " vocabulary. Choose a draft trained with the target's vocabulary."
      )
    self.config = config
    if partitioner is not None and partitioner.mesh.size == 1:
      partitioner = None  # nothing to place, and one compilation with who has none
    self._program = calls.Program(config.shapes(), target, draft, partitioner)
    self._served = calls.Served(calls.prepare(target, target_params))
    self.draft_version = 0
    self._shortlist: np.ndarray | None = None
    if draft is not None:
      if draft.shortlist:
        self._shortlist = np.arange(draft.shortlist, dtype=np.int32)
      self.swap(draft_params, 0)
    self._adaptive = None
    if draft is not None and config.adaptive is not None:
      self._adaptive = drafting.AdaptiveDrafting(self._program, config, config.adaptive)
    self._state: state_lib.DecodeState | None = None
    self._bucket = 0
    self._waiting: deque[Request] = deque()
    self._held: list[Request | None] = [None] * config.rows
    self._milliseconds = [0.0] * config.rows

  @property
  def in_flight(self) -> int:
    """Requests held or waiting."""
    return len(self._waiting) + sum(held is not None for held in self._held)

  @property
  def shortlist(self) -> np.ndarray | None:
    """[N] int32, the tokens that the draft's output head covers; None: all."""
    return self._shortlist

  def swap(
    self,
    draft_params: base.Params,
    version: int,
    shortlist: np.ndarray | None = None,
  ) -> None:
    """New draft parameters from the next call on; outputs do not depend on them.

    The draft's cache entries of rows in flight stay those of the old draft: that can
    cost acceptance for the rest of the request, never exactness.

    Args:
      draft_params: of the draft.
      version: noted in the records.
      shortlist: [N] int32, the tokens that the draft's output head covers from now on;
        None keeps those it has. Only for a draft with a shortlist.

    Raises:
      ValueError: the shortlist is of another length than the draft's.
    """
    assert self._program.draft is not None
    if shortlist is not None:
      size = self._program.draft.shortlist
      if len(shortlist) != size:
        raise base.InputError(
          f"decoding: received a shortlist of {len(shortlist)} tokens, expected"
          f" {size}, DraftServing.shortlist of the draft."
        )
      self._shortlist = np.asarray(shortlist, np.int32)
    draft_served = calls.prepare(self._program.draft, draft_params, self._shortlist)
    self._served = self._served._replace(draft=draft_served)
    self.draft_version = version

  def submit(self, request: Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its prompt is empty or longer than the largest bucket, or a
        sampling value is out of range.
    """
    count = len(request.tokens)
    if not 1 <= count <= self.config.source_lengths[-1]:
      raise base.InputError(
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
    reasons = self._advance(rows)
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
    if self._adaptive is not None:
      self._adaptive.reset()
    return found

  def arrays(self) -> state_lib.DecodeState | None:
    """The rows in flight, for a checkpoint; `held` goes with them."""
    return self._state

  def held(self) -> dict[str, Any]:
    """What a checkpoint keeps beside `arrays`: bucket, tags, times, policy, shortlist.

    The shortlist goes back in by `swap`.
    """
    return {
      "shortlist": None if self._shortlist is None else self._shortlist.tolist(),
      "bucket": self._bucket,
      "tags": [None if held is None else held.tag for held in self._held],
      "waiting": [request.tag for request in self._waiting],
      "milliseconds": list(self._milliseconds),
      "adaptive": None if self._adaptive is None else self._adaptive.held(),
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
    if self._adaptive is not None and held.get("adaptive") is not None:
      self._adaptive.restore(held["adaptive"], arrays)

  def abstract_state(self, bucket: int) -> Any:
    """Shapes of `arrays()` for a bucket, to restore a checkpoint into."""
    if bucket == 0:
      return None
    return jax.eval_shape(lambda: calls.empty(self._program, self._served, bucket))

  def _admit(self) -> None:
    """Fills empty rows in order; a batch holds one bucket of source lengths."""
    while self._waiting and None in self._held:
      request = self._waiting[0]
      needed = next(s for s in self.config.source_lengths if s >= len(request.tokens))
      idle = all(held is None for held in self._held)
      if needed > self._bucket or (idle and needed != self._bucket):
        if not idle:
          return  # its bucket comes when the present rows have finished
        self._bucket = needed
        self._state = calls.empty(self._program, self._served, needed)
        if self._adaptive is not None:
          self._adaptive.warm_up(self._served, needed)
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
    settings = self._settings(request)
    assert self._state is not None
    if self._adaptive is not None:
      return self._adaptive.insert(self._served, self._state, source, settings, slot)
    return calls.insert(
      self._program, self._served, self._state, source, settings, slot
    )

  def _advance(self, rows: list[int]) -> np.ndarray:
    """Runs one compiled call and waits for it; stop reasons [B]."""
    assert self._state is not None
    if self._adaptive is not None:
      self._state, reasons = self._adaptive.advance(
        self._served, self._state, self._bucket, rows
      )
      return reasons
    state = calls.advance(
      self._program,
      self.config.num_draft_tokens,
      self._served,
      np.int32(self.config.max_rounds),
      self._state,
    )
    self._state = state
    return np.asarray(state.stop_reason)

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

  def _take(self, slot: int) -> Finished:
    """Reads a finished row and empties its slot."""
    request = self._held[slot]
    assert request is not None and self._state is not None
    self._held[slot] = None
    source = np.full((1, self.config.source_lengths[-1]), base.PAD_ID, np.int32)
    source[0, : len(request.tokens)] = request.tokens
    batch, settings, figures = calls.read_row(self._program, self._state, source, slot)
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
