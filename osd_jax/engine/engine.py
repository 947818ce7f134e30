"""Rows in flight, from the host: requests in, finished requests out.

The host, and only the host, refills rows, takes records and swaps the draft, between
two compiled calls.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from osd_jax import base
from osd_jax.decoding import state as state_lib
from osd_jax.engine import controller, prompts, steps
from osd_jax.engine.adaptive import AdaptiveConfig
from osd_jax.engine.requests import (
  DecodingConfig,
  Finished,
  Request,
  SamplingConfig,
)
from osd_jax.engine.rows import Rows

__all__ = [
  "AdaptiveConfig",
  "DecodingConfig",
  "Finished",
  "Request",
  "SamplingConfig",
  "Engine",
]

WATCHED_ROUNDS = 4  # of a call while somebody reads along or may come in


class Engine(Rows):
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
      InputError: target and draft have different vocabularies.
    """
    if draft is not None and draft.vocab_size != target.vocab_size:
      raise base.InputError(
        f"decoding: the draft {draft.name!r} has {draft.vocab_size} token ids, the"
        f" target {target.name!r} has {target.vocab_size}; expected the same"
        " vocabulary. Choose a draft trained with the target's vocabulary."
      )
    if draft is not None:
      steps.check_target_states(target, target_params, draft)
    for model in (target,) if draft is None else (target, draft):
      config.check(model)
    self.config = config
    if partitioner is not None and partitioner.mesh.size == 1:
      partitioner = None  # nothing to place, and one compilation with who has none
    self._program = steps.Program(config.shapes(), target, draft, partitioner)
    prepared = steps.prepare(target, target_params, program=self._program)
    self._served = steps.Served(prepared)
    self.draft_version = 0
    self._shortlist: np.ndarray | None = None
    if draft is not None:
      if draft.shortlist:
        self._shortlist = np.arange(draft.shortlist, dtype=np.int32)
      self.swap(draft_params, 0)
    self._drafting = (
      controller.FixedDrafting(self._program, config.num_draft_tokens)
      if draft is None or config.adaptive is None
      else controller.AdaptiveDrafting(self._program, config, config.adaptive)
    )
    self._waiting: deque[Request] = deque()
    self.clear()

  @property
  def capacity(self) -> int:
    """B."""
    return self.config.rows

  @property
  def in_flight(self) -> int:
    """Requests held or waiting."""
    return len(self._waiting) + sum(held is not None for held in self._held)

  @property
  def shortlist(self) -> np.ndarray | None:
    """[N] int32, the tokens that the draft's output head covers; None: all."""
    return self._shortlist

  @property
  def program(self) -> steps.Program:
    """What is compiled into every call."""
    return self._program

  @property
  def served(self) -> steps.Served:
    """The prepared parameters."""
    return self._served

  @property
  def candidates(self) -> tuple[int, ...]:
    """Every K that a call may have, ascending."""
    return self._drafting.candidates

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
      version: noted in the answers.
      shortlist: [N] int32, the tokens that the draft's output head covers from now on;
        None keeps those it has. Only for a draft with a shortlist.

    Raises:
      InputError: the shortlist is of another length than the draft's.
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
    draft_served = steps.prepare(
      self._program.draft, draft_params, self._shortlist, self._program
    )
    self._served = self._served._replace(draft=draft_served)
    self.draft_version = version

  def check(self, request: Request) -> None:
    """Raises `InputError` where a request cannot be decoded; see `Request.check`."""
    longest = self.config.source_lengths[-1]
    request.check(longest, self._program.target.vocab_size)

  def submit(self, request: Request) -> None:
    """Queues a request, or raises as `check` does."""
    self.check(request)
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
    ended = [slot for slot in rows if reasons[slot] != base.StopReason.RUNNING]
    reads = [self._read(slot) for slot in ended]  # all asked for, then waited for
    return [self._take(*row) for row in zip(ended, reads, strict=True)]

  def clear(self) -> None:
    """Drops whatever waits or is held; no call, draft or cost is forgotten."""
    self._waiting.clear()
    self.expecting = False
    self._held: list[Request | None] = [None] * self.config.rows
    self._milliseconds = [0.0] * self.config.rows
    self._bucket, self._state = 0, None
    self._idle: dict[int, state_lib.DecodeState] = {}  # by bucket
    self._drafting.reset()

  def warm_up(self) -> list[Finished]:
    """Compiles for every bucket, so that no request's time holds a compilation.

    Returns:
      Answers to made-up requests, to warm up what comes behind.
    """
    made_up = (np.full(n, base.EOS_ID, np.int32) for n in self.config.source_lengths)
    answers = self.run([Request(prompt, max_length=1) for prompt in made_up])
    self.clear()
    return answers

  def state(self) -> tuple[state_lib.DecodeState | None, dict[str, Any]]:
    """What a checkpoint keeps: the rows in flight, and what the host knows of them."""
    return self._state, {
      "shortlist": None if self._shortlist is None else self._shortlist.tolist(),
      "draft_version": self.draft_version,
      "bucket": self._bucket,
      "tags": [None if held is None else held.tag for held in self._held],
      "waiting": [request.tag for request in self._waiting],
      "milliseconds": list(self._milliseconds),
      "drafting": self._drafting.held(),
    }

  def structure(self, host: dict[str, Any]) -> Any:
    """Shapes of the rows that `state` gave with `host`, to read a checkpoint into."""
    if host["bucket"] == 0:
      return None
    return jax.eval_shape(
      lambda: steps.empty(self._program, self._served, host["bucket"])
    )

  def restore(
    self,
    arrays: Any,
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
    draft_params: base.Params,
  ) -> None:
    """Continues from what `state` gave.

    Args:
      arrays: the saved rows, None if there were none.
      host: what went with them.
      request_of: makes the request of a tag again.
      draft_params: of the draft that served.
    """
    self.restore_draft(host, draft_params)
    self._waiting = deque(request_of(tag) for tag in host["waiting"])
    if not host["tags"]:
      return  # replicas held the rows
    self._bucket, self._state = host["bucket"], arrays
    self._held = [None if tag is None else request_of(tag) for tag in host["tags"]]
    self._milliseconds = list(host["milliseconds"])
    self._drafting.restore(host["drafting"], arrays)

  def _admit(self) -> None:
    """Fills empty rows in order; rows in flight have one bucket of source lengths."""
    rows, parts = self.config.rows, self._program.parts
    while self._waiting and None in self._held:
      free = [slot for slot, held in enumerate(self._held) if held is None]
      needed = self._needed()
      idle = len(free) == rows
      if idle and needed != self._bucket:
        self._change_bucket(needed)
      if needed > self._bucket:
        return  # its bucket comes when the present rows have finished
      if prompts.defer_prefill(len(free), len(self._waiting), rows, parts):
        return
      taken = {}
      for slot in prompts.first_free_slots(free, rows, parts):
        if self._waiting and self._needed() <= self._bucket:
          taken[slot] = self._waiting.popleft()
      self._prefill(taken)

  def _change_bucket(self, needed: int) -> None:
    """Rows for other lengths; one is kept for its bucket, many would fill a memory."""
    if self._state is not None and self.config.rows == 1:
      self._idle[self._bucket] = self._state
    self._bucket, self._state = needed, self._idle.pop(needed, None)
    if self._state is None:
      self._state = steps.empty(self._program, self._served, needed)
      self._drafting.warm_up(self._served, needed)

  def _needed(self) -> int:
    """The bucket of the request that waits longest."""
    return self.config.bucket(len(self._waiting[0].tokens))

  def _prefill(self, taken: Mapping[int, Request]) -> None:
    """One call that prefills requests into their slots."""
    started = time.perf_counter()
    assert self._state is not None
    pad_id = self._program.target.pad_id
    given = {
      slot: prompts.pad_prompt(request, self.config, pad_id, self._bucket)
      for slot, request in taken.items()
    }
    self._state = self._drafting.insert(self._served, self._state, given)
    jax.block_until_ready(self._state.length)
    spent = (time.perf_counter() - started) * 1e3
    for slot, request in taken.items():
      self._held[slot] = request
      self._milliseconds[slot] = spent / len(taken)

  def _advance(self, rows: list[int]) -> np.ndarray:
    """Runs one compiled call and waits for it; stop reasons [B]."""
    assert self._state is not None
    watching = {
      slot: request.watch
      for slot in rows
      if (request := self._held[slot]) is not None and request.watch is not None
    }
    limit = self.config.max_rounds
    self._state, reasons = self._drafting.advance(
      self._served,
      self._state,
      self._bucket,
      rows,
      min(limit, WATCHED_ROUNDS) if watching or self.expecting else limit,
    )
    for slot, watch in watching.items():
      if self._is_stopped(slot, watch):
        reasons[slot] = base.StopReason.STOP_STRING
    return reasons

  def _is_stopped(self, slot: int, watch: Callable[[np.ndarray], int | None]) -> bool:
    """Shows a row's tokens to whoever watches, and stops it if told so."""
    assert self._state is not None
    tokens = np.asarray(self._state.tokens[slot])[: int(self._state.length[slot])]
    count = watch(tokens)
    if count is None:
      return False
    reason = np.int32(base.StopReason.STOP_STRING)
    self._state = steps.stop_row(self._state, slot, np.int32(count), reason)
    return True

  def _read(self, slot: int) -> Any:
    """What `steps.read_row` gives of a row."""
    request = self._held[slot]
    assert request is not None and self._state is not None
    prompt = prompts.pad_prompt(request, self.config, self._program.target.pad_id)
    return steps.read_row(self._program, self._state, prompt.source, slot)

  def _take(self, slot: int, read: Any) -> Finished:
    """The answer of a finished row, whose slot is empty then."""
    request, (batch, settings, figures) = self._held[slot], read
    assert request is not None
    self._held[slot] = None
    tokens, length, reason, counters = jax.tree.map(
      lambda leaf: leaf[0], jax.device_get((batch.target, *figures))
    )
    self._drafting.release(slot, int(length))
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
      draft_version=self.draft_version,
    )
