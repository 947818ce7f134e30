"""Who drafts how much in the next call: one K for all, or one chosen before each.

`Engine` knows one interface, of which there are two:

    insert    prefills requests into rows
    advance   one compiled call for all rows
    release   a row's request has ended
    candidates  every K that a call may have
    warm_up   compiles the calls of a bucket at its first use
    reset     forgets what was decoded
    held      what a checkpoint keeps as JSON; `restore` takes it back

With an adaptive K the draft idles while decoding is plain. What it misses is done when
it drafts again: prefills of requests that came meanwhile, then the tokens, in chunks.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from osd_jax import base
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import sampling
from osd_jax.decoding import state as state_lib
from osd_jax.engine import adaptive, calibration, catch_up, steps
from osd_jax.engine.adaptive import AdaptiveConfig
from osd_jax.engine.prompts import Prompt
from osd_jax.engine.requests import DecodingConfig


class Progress(NamedTuple):
  """How far the rows are, on the host.

  Attributes:
    stop_reason: [B] int32.
    length: [B] int32.
    fed: [B] int32; how far the draft was fed.
    rounds: [B] int32.
    drafted: [B] int32; judged tokens of the draft.
    accepted: [B] int32.
  """

  stop_reason: np.ndarray
  length: np.ndarray
  fed: np.ndarray
  rounds: np.ndarray
  drafted: np.ndarray
  accepted: np.ndarray


def progress(state: state_lib.DecodeState) -> Progress:
  """Reads it back; waits for the call that made the state."""
  counters = state.counters
  read = jax.device_get(
    (
      state.stop_reason,
      state.length,
      state.draft_cache.length,
      counters.rounds,
      counters.drafted,
      counters.accepted,
    )
  )
  return Progress(*map(np.array, read))


class FixedDrafting:
  """The same K in every call, 0 where there is no draft."""

  def __init__(self, program: steps.Program, num_draft_tokens: int):
    """Holds both; compiles nothing."""
    self._program = program
    self._num_draft_tokens = 0 if program.draft is None else num_draft_tokens

  @property
  def candidates(self) -> tuple[int, ...]:
    """The one K there is."""
    return (self._num_draft_tokens,)

  def insert(
    self,
    served: steps.Served,
    state: state_lib.DecodeState,
    given: Mapping[int, Prompt],
  ) -> state_lib.DecodeState:
    """Prefills one call's prompts, by slot; for the draft too."""
    (batch,) = self._program.batches(given)
    return steps.insert(self._program, served, state, batch)

  def advance(
    self,
    served: steps.Served,
    state: state_lib.DecodeState,
    bucket: int,
    rows: Sequence[int],
    max_rounds: int,
  ) -> tuple[state_lib.DecodeState, np.ndarray]:
    """One call; the rows after it and their stop reasons [B]."""
    del bucket, rows
    state = steps.advance(
      self._program, self._num_draft_tokens, served, np.int32(max_rounds), state
    )
    return state, np.array(state.stop_reason)

  def release(self, row: int, tokens: int) -> None:
    """Nothing is known of a row."""

  def warm_up(self, served: steps.Served, bucket: int) -> None:
    """The first request compiles all there is."""

  def reset(self) -> None:
    """Nothing is remembered."""

  def held(self) -> None:
    """Nothing is kept."""

  def restore(self, held: None, state: state_lib.DecodeState | None) -> None:
    """Nothing is taken back."""


class AdaptiveDrafting:
  """Chooses K before every call and makes the draft ready for it.

  Attributes:
    config: the policy, its candidates cut to `DecodingConfig.num_draft_tokens`.
    costs: the tables by bucket and whether a row is sampled, given or measured.
    state: of the policy.
  """

  def __init__(
    self, program: steps.Program, decoding: DecodingConfig, policy: AdaptiveConfig
  ):
    """Measures nothing yet.

    Args:
      program: with a draft.
      decoding: the largest K, and how long a call may be.
      policy: how K is chosen.
    """
    self.config = policy.up_to(decoding.num_draft_tokens)
    self.costs: dict[tuple[int, bool], RoundCosts] = {}
    if self.config.costs:
      tables = zip(decoding.source_lengths, self.config.costs, strict=True)
      for (bucket, table), sampled in itertools.product(tables, (False, True)):
        self.costs[bucket, sampled] = table
    self._program = program
    self._warm: set[int] = set()
    self.reset()

  @property
  def candidates(self) -> tuple[int, ...]:
    """Every K that may be chosen."""
    return self.config.candidates

  def reset(self) -> None:
    """Forgets what was decoded, not what it costs."""
    rows = self._program.config.rows
    self.state = adaptive.initial(self.config, rows)
    self._before = Progress(*(np.zeros(rows, np.int32) for _ in Progress._fields))
    self._sampled = np.zeros(rows, bool)
    self._undrafted: dict[int, Prompt] = {}
    self._spent_ms = 0.0

  def warm_up(self, served: steps.Served, bucket: int) -> None:
    """Compiles all calls of a bucket at its first use; measures them without a table.

    Later requests then wait for no compilation, whatever K they are decoded with.
    """
    if bucket in self._warm:
      return
    self._warm.add(bucket)
    arguments = (self._program, self.config.candidates, served, bucket)
    if (bucket, False) in self.costs:
      calibration.warm_up(*arguments)
    elif jax.process_count() > 1:
      raise base.InputError(
        "AdaptiveConfig.costs: received none, expected them where several processes"
        " serve together: each would measure others, and choose another K."
      )
    else:
      greedy, sampled = calibration.measure(*arguments)
      self.costs |= {(bucket, False): greedy, (bucket, True): sampled}

  def insert(
    self,
    served: steps.Served,
    state: state_lib.DecodeState,
    given: Mapping[int, Prompt],
  ) -> state_lib.DecodeState:
    """Prefills one call's prompts, by slot; for the draft too if it is drafting."""
    for slot, prompt in given.items():
      self._sampled[slot] = prompt.settings.temperature[0] > 0
      for counts in self._before:
        counts[slot] = 0
      self._undrafted.pop(slot, None)
    (batch,) = self._program.batches(given)
    if not self.state.num_draft_tokens or self.state.probing:
      self._undrafted.update(given)
      return steps.insert_undrafted(self._program, served, state, batch)
    self._spent_ms += self.costs[batch.source.shape[1], False].prefill_ms
    return steps.insert(self._program, served, state, batch)

  def advance(
    self,
    served: steps.Served,
    state: state_lib.DecodeState,
    bucket: int,
    rows: Sequence[int],
    max_rounds: int,
  ) -> tuple[state_lib.DecodeState, np.ndarray]:
    """One call with the K of the policy.

    Args:
      served: prepared parameters.
      state: rows in flight.
      bucket: their source length.
      rows: the rows that hold requests.
      max_rounds: of the call, at most.

    Returns:
      The rows after it and their stop reasons [B].
    """
    costs = self.costs[bucket, bool(self._sampled[list(rows)].any())]
    chunks, prefills = self._missing(rows)
    missing_ms = chunks * costs.chunk_ms + prefills * costs.prefill_ms
    self.state = adaptive.choose(self.config, costs, self.state, rows, missing_ms)
    if self.state.num_draft_tokens and (chunks or prefills):
      state = self._ready(served, state)
      self._spent_ms += missing_ms
    rounds = adaptive.rounds(self.config, costs, self.state)
    state = steps.advance(
      self._program,
      self.state.num_draft_tokens,
      served,
      np.int32(min(rounds, max_rounds)),
      state,
    )
    self._observe(costs, progress(state))
    return state, self._before.stop_reason

  def release(self, row: int, tokens: int) -> None:
    """Tells the policy that a row's request has ended.

    Args:
      row: that held it.
      tokens: that it emitted.
    """
    self.state = adaptive.release(self.config, self.state, row, tokens)
    self._undrafted.pop(row, None)

  def held(self) -> dict[str, Any]:
    """What a checkpoint keeps: policy, costs, and who lacks a draft's prefill."""
    return {
      "state": dataclasses.asdict(self.state),
      "costs": [[*of, dataclasses.asdict(table)] for of, table in self.costs.items()],
      "sampled": self._sampled.tolist(),
      "undrafted": {str(s): p.source[0].tolist() for s, p in self._undrafted.items()},
      "spent_ms": self._spent_ms,
    }

  def restore(self, held: dict[str, Any], state: state_lib.DecodeState | None) -> None:
    """Continues from `held()` with the rows in flight.

    Raises:
      InputError: a checkpoint of before sampled rounds had costs of their own.
    """
    if "sampled" not in held:
      raise base.InputError(
        "checkpoint: drafting: received costs of greedy rounds alone, as older versions"
        " wrote them, expected those of sampled rounds too; begin anew, in another"
        " OnlineConfig.run_directory."
      )
    self.state = adaptive.from_json(held["state"])
    self.costs = {
      (bucket, sampled): RoundCosts(**{**table, "round_ms": tuple(table["round_ms"])})
      for bucket, sampled, table in held["costs"]
    }
    self._sampled = np.asarray(held["sampled"], bool)
    settings = sampling.make_settings(1, max_length=1)  # none of a draft's prefill
    self._undrafted = {
      int(slot): Prompt(np.asarray([source], np.int32), settings)
      for slot, source in held["undrafted"].items()
    }
    self._spent_ms = held["spent_ms"]
    if state is not None:
      self._before = progress(state)

  def _missing(self, rows: Sequence[int]) -> tuple[int, int]:
    """Chunks and prefills that the draft needs before it can draft for all rows."""
    lacking = {row: self._undrafted[row] for row in rows if row in self._undrafted}
    prefills = len(list(self._program.batches(lacking)))
    length, fed = self._before.length, self._before.fed.copy()
    fed[list(lacking)] = 0
    lag = max(int(length[row]) - 1 - int(fed[row]) for row in rows)
    return max(-(-lag // catch_up.CHUNK), 0), prefills

  def _ready(
    self, served: steps.Served, state: state_lib.DecodeState
  ) -> state_lib.DecodeState:
    """Does for the draft what it missed."""
    for batch in self._program.batches(self._undrafted):
      state = steps.prefill_draft(self._program, served, state, batch)
    self._undrafted.clear()
    return steps.catch_up(self._program, served, state)

  def _observe(self, costs: RoundCosts, after: Progress) -> None:
    """Tells the policy what the call did."""
    done = {
      name: getattr(after, name) - getattr(self._before, name)
      for name in ("rounds", "length", "drafted", "accepted")
    }
    call = adaptive.Call(
      rounds=int(done["rounds"].max()),
      emitted=tuple(done["length"].tolist()),
      judged=tuple(done["drafted"].tolist()),
      accepted=tuple(done["accepted"].tolist()),
      catch_up_ms=self._spent_ms,
    )
    self._before, self._spent_ms = after, 0.0
    self.state = adaptive.observe(self.config, costs, self.state, call)
