"""The engine: rows in flight, from the host.

One step admits waiting requests, chooses how much to draft, runs one compiled call and
collects finished rows. The host refills rows, reads records and swaps the draft between
two calls, never inside one.

The path of a request through the calls:

    Server.generate    texts to requests, finished requests to answers
    Server._serve      submits requests as rows become free
    Engine.step        one turn of all rows
    steps.advance      one compiled call
    rounds.run_rounds  the loop over rounds
    rounds.one_round   propose, verify, accept, append
"""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import background, base
from osd_jax.costs import measure
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import accept, drafters, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.decoding.rounds import DecodeSpec
from osd_jax.engine import measurement, steps
from osd_jax.engine.controller import Choice, Controller, RoundResult
from osd_jax.engine.requests import (
  DecodingConfig,
  Finished,
  Request,
  SamplingConfig,
  in_order,
)
from osd_jax.engine.steps import PaddedPrompt, PromptBatch

# Rounds of a call while a caller watches a request's text, or may submit another one.
# Where a round takes milliseconds, the host's work between calls is a part of the time.
WATCHED_ROUNDS = 4


@dataclasses.dataclass
class Slot:
  """A row that holds a request, on the host.

  Attributes:
    request: the request.
    prompt: its padded prompt.
    number: see `Finished.number`.
    milliseconds: wall time of its prefill and of its share of the calls, without
      compiling.
    lacks_draft: the draft has not been prefilled for it.
    prefill_ms: wall time of its prefill.
    chunks: chunks of its prompt that were read so far; None: all, and it decodes.
  """

  request: Request
  prompt: PaddedPrompt
  number: int
  milliseconds: float = 0.0
  lacks_draft: bool = False
  prefill_ms: float = 0.0
  chunks: int | None = None

  def to_json(self) -> dict[str, Any]:
    """Returns the part that a checkpoint stores as JSON."""
    names = ("number", "milliseconds", "lacks_draft", "prefill_ms", "chunks")
    return {"tag": self.request.tag, **{name: getattr(self, name) for name in names}}


class CallTime(NamedTuple):
  """What a compiled call did, and the time that it took.

  Attributes:
    bucket: source length of the rows.
    rows: rows that held a request.
    is_sampled: whether any of them was sampled.
    drafted: tokens that a round drafted; 0 is plain decoding.
    by_cache: whether the n-gram cache of a mixture drafted alone.
    rounds: its rounds.
    milliseconds: wall time from the choice of K until its results were read.
    prefill_ms: wall time of the prefills before it.
  """

  bucket: int
  rows: int
  is_sampled: bool
  drafted: float
  by_cache: bool
  rounds: int
  milliseconds: float
  prefill_ms: float


class RowProgress(NamedTuple):
  """RowProgress of the rows, read back after a call; all [B] int32 but the tokens.

  Attributes:
    tokens: [B, N] int32, the emitted tokens, valid to `length`.
    stop_reason: a `base.StopReason`.
    length: emitted tokens.
    fed: inputs that the draft model has read.
    rounds: target calls.
    drafted: drafted tokens that were judged.
    accepted: drafted tokens that were accepted.
  """

  tokens: np.ndarray
  stop_reason: np.ndarray
  length: np.ndarray
  fed: np.ndarray
  rounds: np.ndarray
  drafted: np.ndarray
  accepted: np.ndarray


def read_progress(
  state: state_lib.DecodeState, drafter: drafters.ModelDrafter | None
) -> RowProgress:
  """Reads the progress back; waits for the call that made the state."""
  counters = state.counters
  # Without a draft the field is not used; the length saves a second kind of state.
  inputs = state.length if drafter is None else drafter.fed(state.draft_cache)
  counts = counters.rounds, counters.drafted, counters.accepted
  values = jax.device_get(
    (state.tokens, state.stop_reason, state.length, inputs, *counts)
  )
  return RowProgress(*map(np.array, values))


class Engine:
  """The rows in flight: B rows that hold a request or are empty.

  Without a draft it decodes plainly, so the baseline runs through the same host code.

  Attributes:
    config: shapes of decoding.
    spec: static description of decoding.
    served: prepared parameters.
    shortlist: [N] int32, the tokens that the draft's output head covers; None: all.
    draft_version: version of the draft that serves.
    controller: chooses K before each call.
    submitted: requests so far, in all sessions of a run that continues.
    expecting: more requests may come soon, so calls are short.
    watched_rounds: rounds of such a call, and while a request's text is watched.
    last_call: the newest call, None before the first.
    report: called with a progress line before costs are measured.
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
    """Prepares the parameters, without decoding anything.

    Args:
      config: shapes of decoding; it must fit both models.
      target: the target, whose outputs the engine reproduces.
      target_params: trained parameters of the target.
      draft: the draft; None makes the engine decode plainly.
      draft_params: trained parameters of the draft.
      partitioner: a `sharding.Partitioner`; None for one device.

    Raises:
      InputError: target and draft do not belong together, or a model has fewer
        positions than the config needs.
    """
    if draft is not None and draft.vocab_size != target.vocab_size:
      raise base.InputError(
        f"decoding: the target {target.name!r} has {target.vocab_size} token ids, the"
        f" draft {draft.name!r} has {draft.vocab_size} token ids; expected the same"
        " vocabulary. Choose a draft trained with the target's vocabulary."
      )
    if draft is not None:
      steps.check_target_states(target, target_params, draft)
    for model in (target,) if draft is None else (target, draft):
      config.check(model)
    if partitioner is not None and partitioner.mesh.size == 1:
      partitioner = None  # so that both share their compiled calls
    self.config = config
    self.spec = config.spec(target, draft, partitioner)
    self._resting = self.spec.resting
    self.served = steps.Served(steps.prepare(target, target_params, spec=self.spec))
    self.draft_version = 0
    self.shortlist: np.ndarray | None = None
    # What the drafter learned from answers without training; None if it does not.
    self._memory = None if self.spec.drafter is None else self.spec.drafter.memory()
    if self._memory is not None and jax.process_count() > 1:
      raise base.InputError(
        f"DecodingConfig.cache_tokens: received {config.cache_tokens}, expected 0 and"
        " a draft that is trained, because several processes serve together, which"
        " share no n-gram cache."
      )
    if draft is not None:
      if draft.shortlist:
        self.shortlist = np.arange(draft.shortlist, dtype=np.int32)
      self._prepare_draft_params(draft_params)
    widths = self.spec.widths
    is_cache = draft is not None and draft.absorb is not None
    self.controller = Controller(config, draft is not None, bool(widths), is_cache)
    self._warm: set[int] = set()  # buckets whose calls are compiled and measured
    self._budget = measurement.SharedBudget()
    # With learned costs, decoding is then plain until a thread has compiled drafting.
    self.compiles_in_background = True
    self.compilations = background.OneTimeCalls()
    self._is_trained = False
    self._waiting: deque[tuple[int, Request]] = deque()
    self.submitted = 0
    # Whether noise depends on a request's number, too: from when on drafts may depend
    # on earlier answers. A coupled rule gives plain decoding's answer in any case.
    rule = accept.resolve(config.acceptance_rule)
    self._may_be_numbered = draft is not None and not rule.coupled
    self._is_numbered = self._may_be_numbered and (
      self._memory is not None or not self.controller.is_fixed
    )
    self.watched_rounds = WATCHED_ROUNDS
    self.last_call: CallTime | None = None
    self._prefill_ms = 0.0  # since the last call
    self.report: Callable[[str], object] = lambda text: None
    self.clear()

  @property
  def capacity(self) -> int:
    """B, the requests that can be in flight."""
    return self.config.rows

  @property
  def in_flight(self) -> int:
    """Requests in rows or waiting."""
    return len(self._waiting) + sum(slot is not None for slot in self._slots)

  @property
  def measured(self) -> dict[int, RoundCosts]:
    """Costs that were measured for the choice of K, by bucket."""
    return self._budget.tables

  @property
  def candidates(self) -> tuple[int, ...]:
    """Every K that a call may have, ascending."""
    return self.controller.candidates

  def swap(
    self,
    draft_params: base.Params,
    version: int,
    shortlist: np.ndarray | None = None,
  ) -> None:
    """Serves new draft parameters from the next call on; outputs do not change.

    The draft's cache of rows in flight keeps the entries of the old draft: that may
    cost acceptance for the rest of the request, never exactness. Noise depends on the
    requests' numbers from here on, because the new draft may have learned from answers.

    Args:
      draft_params: trained parameters; the served copy is made here.
      version: number that answers report as `draft_version`.
      shortlist: [N] int32, the tokens that the draft's output head covers from now on;
        None keeps the present ones. Only for a draft with a shortlist.

    Raises:
      InputError: the shortlist has another length than the draft's.
    """
    assert self.spec.draft is not None
    if shortlist is not None:
      size = self.spec.draft.shortlist
      if len(shortlist) != size:
        raise base.InputError(
          f"decoding: received a shortlist of {len(shortlist)} tokens, expected"
          f" {size}, DraftServing.shortlist of the draft."
        )
      self.shortlist = np.asarray(shortlist, np.int32)
    self._prepare_draft_params(draft_params)
    self.draft_version = version
    self._is_trained |= bool(version)
    if self._is_trained and not self.compiles_in_background:
      self.controller.rests = False
    self._number_noise()

  def _prepare_draft_params(self, draft_params: base.Params) -> None:
    assert self.spec.draft is not None
    self._prepared = steps.prepare(
      self.spec.draft, draft_params, self.shortlist, self.spec
    )
    self._serve_memory(self._memory)

  def _number_noise(self) -> None:
    """Makes the noise of all requests depend on their numbers, in rows in flight too.

    A swap before the first request and update changes nothing: no answer can have
    taught that draft.
    """
    if self._is_numbered or not self._may_be_numbered:
      return
    if not (self.submitted or self.draft_version):
      return
    self._is_numbered = True
    rows = self._occupied()
    for slot in self._reading().values():
      slot.prompt = self._padded(slot.request, slot.number)
    if rows:
      seeds = np.zeros(self.config.rows, np.uint32)
      for number, slot in rows:
        seeds[number] = self._seed(slot.request, slot.number)
      self._state = steps.reseed(self.spec, self._state, seeds)

  def _seed(self, request: Request, number: int) -> int:
    seed = request.sampling.seed
    if self._is_numbered and request.speculative:
      return sampling.numbered_seed(seed, number)
    return seed

  def _serve_memory(self, memory: Any) -> None:
    assert self.spec.drafter is not None
    self._memory = memory
    draft = self.spec.drafter.with_memory(self._prepared, memory)
    self.served = self.served._replace(draft=draft)

  @property
  def memory(self) -> Any:
    """A copy of what the drafter learned from answers without training, or None."""
    return jax.tree.map(jnp.copy, self._memory)  # calls donate it

  @memory.setter
  def memory(self, memory: Any) -> None:
    self._serve_memory(memory)

  def absorb(self, done: Finished) -> None:
    """Adds an answer that another engine gave to the n-gram cache, if there is one."""
    if self._memory is not None and done.request.remember:
      length = np.asarray([len(done.tokens)], np.int32)
      row = 0, np.True_, np.asarray(done.settings.cache_salt[0])
      self._serve_memory(
        steps.absorb(self.spec, self._memory, None, done.batch, length, *row)
      )

  def clear_memory(self) -> None:
    """Forgets what the drafter has learned without training; a trained draft stays."""
    if self._memory is not None:
      assert self.spec.drafter is not None
      self._serve_memory(self.spec.drafter.memory())

  def copy_memory(self, other: Any) -> None:
    """Takes over what another engine's drafter has learned without training.

    Replicas keep theirs, so nothing is taken over from them.
    """
    memory = other.memory
    if self._memory is not None and memory is not None:
      self._serve_memory(memory)

  def check(self, request: Request) -> None:
    """Raises `InputError` if a request cannot be decoded; see `Request.check`."""
    request.check(self.config, self.spec.target.vocab_size)

  def submit(self, request: Request, number: int | None = None) -> None:
    """Queues a request, or raises as `check` does.

    `number` is its number in a server of several engines; None counts here.
    """
    self.check(request)
    place = self.submitted if number is None else number
    self.submitted = max(self.submitted, place + 1)
    self._waiting.append((place, request))

  def step(self) -> list[Finished]:
    """Runs one turn of all rows; returns the requests that finished, by slot."""
    # Free rows are filled first, so that waiting requests take part in this call.
    self._admit()
    rows = self._occupied()
    if not rows:
      return []
    self._wake()
    self._warm_up_bucket(self._bucket)  # a draft that rested may be trained now
    watch = measure.Stopwatch()
    is_sampled = any(slot.request.sampling.needs_sampling for _, slot in rows)
    choice, max_rounds = self._choose(rows, is_sampled)
    spec = self._resting if choice.by_cache else self.spec
    self._state = steps.advance(
      spec.for_rows(is_sampled),
      choice.num_draft_tokens,
      self.served,
      np.int32(max_rounds),
      self._state,
      choice.prices,
    )
    assert self._state is not None
    before, after = self._progress, read_progress(self._state, self.spec.drafter)
    milliseconds = watch.ms
    count, drafted = int((after.rounds - before.rounds).max()), choice.num_draft_tokens
    if choice.prices is not None:  # the drafter decided; its longest proposal counts
      drafted = float((after.drafted - before.drafted).max()) / max(count, 1)
    times = milliseconds, self._prefill_ms
    self.last_call = CallTime(
      self._bucket, len(rows), is_sampled, drafted, choice.by_cache, count, *times
    )
    self._progress, self._prefill_ms = after, 0.0
    ended = self._observe(rows, before, milliseconds)
    spent = watch.ms
    for _, slot in rows:
      # All rows run in the same call, so each request pays an equal share of its time.
      slot.milliseconds += spent / len(rows)
    return self._collect(ended)

  def run(self, requests: Sequence[Request]) -> list[Finished]:
    """Answers all requests in order, or raises before the first; see `Server.run`."""
    # Checked first, so that a bad request fails before any other is answered.
    for request in requests:
      self.check(request)
    for request in requests:
      self.submit(request)
    answers: list[Finished] = []
    while self.in_flight:
      answers += self.step()
    return in_order(requests, answers)

  def clear(self) -> None:
    """Drops all requests; compiled calls, draft and costs stay."""
    self._waiting.clear()
    self.expecting = False
    self._slots: list[Slot | None] = [None] * self.config.rows
    self._caches: list[Any] | None = None  # of prompts that are read in chunks
    self._bucket = 0
    self._state: state_lib.DecodeState | None = None
    zeros = np.zeros(self.config.rows, np.int32)
    self._progress = RowProgress(*(zeros.copy() for _ in RowProgress._fields))
    self._is_behind = False  # the n-gram cache has not read what plain calls emitted
    self.controller.reset()

  def warm_up(self, in_background: bool = False) -> list[Finished]:
    """Compiles the calls of every bucket, so that no request waits for a compilation.

    `in_background`: if the draft rests, only plain decoding is compiled now, and
    drafting on a thread while requests are answered.

    Returns:
      Answers to made-up requests, with which a caller may warm up its own calls.
    """
    lengths, memory, answers = self.config.source_lengths, self.memory, []
    submitted, rests = self.submitted, self.controller.rests
    self.compiles_in_background = in_background and rests
    self.controller.rests = in_background and rests  # else all calls are compiled
    self.controller.reset()
    # Sampled requests may have a program of their own.
    is_one_program = self.spec.for_rows(False) == self.spec.for_rows(True)
    temperatures = (0.0,) if is_one_program else measurement.TEMPERATURES
    for length, temperature in itertools.product(lengths, temperatures):
      # One after the other, or all rows would have the longest prompt.
      prompt = np.full(length, base.EOS_ID, np.int32)
      sampled = SamplingConfig(temperature=temperature)
      answers += self.run([Request(prompt, sampled, max_new_tokens=1)])
    for before, after in itertools.permutations(lengths, 2):
      state = steps.empty(self.spec, self.served, before)
      steps.resize(self.spec, self.served, state, after)
      if before > after and self.config.rows > 1:
        self._warm_up_insertion(state, after)
    self._warm_up_swap()
    self.clear()
    if rests:
      self.controller.rest()
    if memory is not None:
      self._serve_memory(memory)  # without the made-up requests
    self.submitted = submitted
    return answers

  def messages(self) -> list[str]:
    """Returns messages for a run's log. Only `Replicas` has any."""
    return []

  def close(self) -> None:
    """Drops all requests."""
    self.clear()
    self.compilations.close()

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state that a checkpoint stores: (arrays, JSON values)."""
    arrays = {"rows": self._state, "memory": self._memory, "prompts": self._caches}
    return arrays, {
      "shortlist": None if self.shortlist is None else self.shortlist.tolist(),
      "draft_version": self.draft_version,
      "bucket": self._bucket,
      "prompt_bucket": self._prompt_bucket if self._caches else 0,
      "slots": [slot and slot.to_json() for slot in self._slots],
      "waiting": [[number, request.tag] for number, request in self._waiting],
      "submitted": self.submitted,
      "is_numbered": self._is_numbered,
      "is_behind": self._is_behind,
      "controller": self.controller.to_json(),
    }

  def structure(self, host: dict[str, Any]) -> Any:
    """Returns the shapes of the arrays that `state` gave with `host`."""
    rows, caches, bucket = None, None, host["bucket"]
    if bucket:  # otherwise no request had been admitted
      rows = jax.eval_shape(lambda: steps.empty(self.spec, self.served, bucket))
    if length := host.get("prompt_bucket"):
      drafts = not any(x and x["chunks"] and x["lacks_draft"] for x in host["slots"])
      spec = self.spec if drafts else self.spec.resting
      source = jax.ShapeDtypeStruct((spec.parts, length), jnp.int32)
      unread = functools.partial(steps.unread, spec)
      caches = jax.eval_shape(unread, self.served, source)
    memory = jax.eval_shape(lambda: self._memory)
    return {"rows": rows, "memory": memory, "prompts": caches}

  def restore(
    self,
    arrays: Any,
    host: dict[str, Any],
    request_of: Callable[[Any], Request],
    draft_params: base.Params,
  ) -> None:
    """Continues from the result of `state`.

    Args:
      arrays: the saved arrays.
      host: the JSON part of `state`.
      request_of: makes the request of a tag again.
      draft_params: parameters of the draft that served.
    """
    shortlist = host["shortlist"]
    self.swap(draft_params, host["draft_version"], shortlist)
    self._waiting = deque((n, request_of(tag)) for n, tag in host["waiting"])
    self.submitted, self._is_numbered = host["submitted"], host["is_numbered"]
    if not host["slots"]:
      return  # the checkpoint of a run with replicas, which held the rows
    self._bucket, self._state = host["bucket"], arrays["rows"]
    self._is_behind = host.get("is_behind", False)
    self._caches = arrays["prompts"]
    if self._memory is not None:
      self._serve_memory(arrays["memory"])
    for number, saved in enumerate(host["slots"]):
      if saved is not None:
        request = request_of(saved["tag"])
        fields = {name: value for name, value in saved.items() if name != "tag"}
        prompt = self._padded(request, saved["number"])
        self._slots[number] = Slot(request, prompt, **fields)
    self.controller.from_json(host["controller"])
    if self._state is not None:
      self._progress = read_progress(self._state, self.spec.drafter)

  def _occupied(self) -> list[tuple[int, Slot]]:
    """Rows that decode."""
    slots = enumerate(self._slots)
    return [(n, slot) for n, slot in slots if slot and slot.chunks is None]

  def _reading(self) -> dict[int, Slot]:
    """Rows whose prompts are being read."""
    slots = enumerate(self._slots)
    return {n: slot for n, slot in slots if slot and slot.chunks is not None}

  @property
  def _prompt_bucket(self) -> int:
    """The length at which prompts are being read."""
    # A short prompt costs no more next to a long one in flight.
    return max(self._bucket_of(slot.request) for slot in self._reading().values())

  def _padded(self, request: Request, number: int = 0) -> PaddedPrompt:
    """Returns the request as arrays, padded to the longest bucket."""
    limit, longest = request.max_new_tokens, self.config.source_lengths[-1]
    # One shape for all buckets: a batch is cut to its bucket when it is prefilled, and
    # the learner gets rows of equal length.
    source = np.full((1, longest), self.spec.target.pad_id, np.int32)
    source[0, : len(request.tokens)] = request.tokens
    limit = self.config.target_length if limit is None else limit
    draws = dataclasses.replace(request.sampling, seed=self._seed(request, number))
    settings = draws.settings(limit, request.speculative, request.cache_salt)
    return PaddedPrompt(source, settings)

  # --- Admission ----------------------------------------------------------------------

  def _admit(self) -> None:
    """Fills empty rows in order; rows that decode wait for one chunk at most."""
    chunk, tokens = self.config.prefill_chunk, 0
    while self._reading() or self._begin():
      tokens += min(self._prompt_bucket, chunk)
      if tokens > chunk and self._occupied():
        return
      self._prefill()

  def _begin(self) -> bool:
    """Gives empty rows to waiting requests, whose prompts are read next, if it can."""
    rows, parts = self.config.rows, self.spec.parts
    free = [number for number, slot in enumerate(self._slots) if slot is None]
    waiting = len(self._waiting)
    if not (free and waiting) or steps.defer_prefill(len(free), waiting, rows, parts):
      return False
    self._fit_bucket()
    for number in steps.first_free_slots(free, rows, parts):
      if self._waiting and self._bucket_of(self._waiting[0][1]) <= self._bucket:
        place, request = self._waiting.popleft()
        prompt = self._padded(request, place)
        self._slots[number] = Slot(request, prompt, place, chunks=0)
    drafts = self.spec.drafter is None or self.controller.state.is_drafting
    slots = self._reading().values()
    if not self.controller.is_fixed:
      drafts = drafts and any(slot.request.speculative for slot in slots)
    for slot in slots:
      # An idle draft reads the prompt when it drafts again, if it is still in flight.
      slot.lacks_draft = not drafts
    return True

  def _bucket_of(self, request: Request) -> int:
    return self.config.bucket(len(request.tokens))

  def _fit_bucket(self) -> None:
    """Gives the rows the bucket of the longest prompt in flight or next in line.

    All rows share one bucket, because a call has one source length.
    """
    requests = [self._waiting[0][1], *(slot.request for slot in self._slots if slot)]
    needed = max(map(self._bucket_of, requests))
    if needed == self._bucket:
      return
    if self._state is None:
      self._state = steps.empty(self.spec, self.served, needed)
    else:
      self._state = steps.resize(self.spec, self.served, self._state, needed)
    self._bucket = needed
    self._warm_up_bucket(needed)

  def _warm_up_insertion(self, state: state_lib.DecodeState, bucket: int) -> None:
    """Compiles how prompts of a bucket join rows of a longer one; consumes `state`."""
    prompt = self._padded(Request(np.full(bucket, base.EOS_ID, np.int32)))
    (batch,) = steps.prefill_batches(
      {0: prompt}, bucket, self.config.rows, self.spec.parts
    )
    state = steps.insert(self.spec, self.served, state, batch)
    if not self.controller.is_fixed:
      steps.insert_undrafted(self.spec, self.served, state, batch)

  def _warm_up_swap(self) -> None:
    """Compiles what a first swap does with the rows in flight, for each bucket."""
    if self._may_be_numbered and not self._is_numbered:
      seeds = np.zeros(self.config.rows, np.uint32)
      for length in self.config.source_lengths:
        state = steps.empty(self.spec, self.served, length)
        steps.reseed(self.spec, state, seeds)

  def _warm_up_bucket(self, bucket: int) -> None:
    """Compiles every call of a bucket at its first use, and measures missing costs.

    A fixed K needs neither: the first request compiles all there is.
    """
    controller = self.controller
    if controller.is_fixed or controller.rests or bucket in self._warm:
      return
    self._warm.add(bucket)
    if bucket in controller.costs:
      measurement.warm_up(self.spec, controller.candidates, self.served, bucket)
      return
    if jax.process_count() > 1:
      raise base.InputError(
        "AdaptiveConfig.costs: received no costs, expected a table for each bucket,"
        " because several processes serve together: their own measurements would"
        " differ, and they would choose different Ks."
      )
    controller.costs[bucket] = self._budget.measure(self, bucket, self.report)

  def _prefill(self) -> None:
    """Reads the next chunk of prompts, or short prompts as a whole, in one call."""
    watch = measure.Stopwatch()
    slots, bucket = self._reading(), self._prompt_bucket
    (batch,) = self._batches(slots, bucket)
    first = next(iter(slots.values()))
    assert self._state is not None and first.chunks is not None
    drafts, chunks = not first.lacks_draft, first.chunks + 1
    spec = self.spec if drafts else self.spec.resting
    starts = steps.chunk_starts(spec, batch.source)
    if starts:
      if self._caches is None:
        self._caches = steps.unread(spec, self.served, batch.source)
      start = np.int32(starts[first.chunks])
      self._caches = steps.read_chunk(
        spec, self.served, self._caches, batch.source, start
      )
    is_read = chunks >= len(starts)
    if is_read:
      self._insert(batch, bucket, drafts)
    # Without waiting, the time of the prefill would be charged to the next call.
    jax.block_until_ready(self._state.length if is_read else self._caches)
    spent = watch.ms
    self._prefill_ms += spent
    for number, slot in slots.items():
      slot.milliseconds += spent / len(slots)
      slot.prefill_ms += spent / len(slots)
      slot.chunks = None if is_read else chunks
      # `_observe` subtracts the previous progress, which belongs to another request.
      for counts in self._progress:
        counts[number] = 0

  def _insert(self, batch: PromptBatch, bucket: int, drafts: bool) -> None:
    """Puts prompts into their rows."""
    assert self._state is not None
    insert = steps.insert if drafts else steps.insert_undrafted
    self._state = insert(self.spec, self.served, self._state, batch, self._caches)
    self._caches = None
    if drafts:
      is_priced = bucket in self.controller.costs
      self.controller.charge_prefill(bucket if is_priced else self._bucket)

  def _batches(self, slots: Mapping[int, Slot], bucket: int) -> Iterator[PromptBatch]:
    prompts = {number: slot.prompt for number, slot in slots.items()}
    return steps.prefill_batches(prompts, bucket, self.config.rows, self.spec.parts)

  # --- One call -----------------------------------------------------------------------

  def _choose(
    self, rows: list[tuple[int, Slot]], is_sampled: bool
  ) -> tuple[Choice, int]:
    """Chooses K and the number of rounds, and prepares an idle draft."""
    chunks, prefills = self._missing(rows)
    undrafted = [number for number, slot in rows if not slot.request.speculative]
    numbers = [number for number, _ in rows]
    choice = self.controller.choose(
      self._bucket, is_sampled, numbers, chunks, prefills, undrafted
    )
    if self.controller.learns and not self._can_draft(choice):
      self.controller.mute()
      choice = Choice(0, choice.max_rounds)
    if choice.num_draft_tokens and not choice.by_cache and (chunks or prefills):
      self._prepare_draft(rows)
    is_short = self.expecting or any(slot.request.watch for _, slot in rows)
    is_short = is_short or bool(self._reading())
    # The shortest limit wins: a streamed text should not wait for the longest call that
    # the controller would choose.
    watched = self.watched_rounds if is_short else None
    limits = (self.config.max_rounds, choice.max_rounds, watched)
    return choice, min(limit for limit in limits if limit is not None)

  def _can_draft(self, choice: Choice) -> bool:
    """Whether drafting from the n-gram cache is compiled; starts a thread that does it.

    Compiling takes longer than many answers, so decoding is plain until it ends.
    """
    spec = self._resting if choice.by_cache else self.spec
    arguments = spec, choice.num_draft_tokens, self.served, self._state
    if self.compiles_in_background and not self.compilations.has_run(
      (spec, self._bucket),
      lambda: functools.partial(steps.compile_drafting, *arguments),
    ):
      self._is_behind = True
      return False
    self._read_on(spec)
    return True

  def _read_on(self, spec: DecodeSpec) -> None:
    """Lets the n-gram cache read what plain calls emitted while it was compiled."""
    if self._is_behind:
      self._state = steps.catch_up(spec, self.served, self._state)
    self._is_behind = False

  def _wake(self) -> None:
    """Ends the rest of a trained draft, once a thread has compiled its calls."""
    if not (self._is_trained and self.controller.rests):
      return

    def prepare() -> Callable[[], None]:
      assert self.spec.drafter is not None
      # Calls donate the memory, so the thread gets a copy.
      draft = self.spec.drafter.with_memory(self._prepared, self.memory)
      return functools.partial(self._compile_draft, self.served._replace(draft=draft))

    if not self.compiles_in_background or self.compilations.has_run("draft", prepare):
      self._read_on(self._resting)
      self.controller.rests = False

  def _compile_draft(self, served: steps.Served) -> None:
    for length in self.config.source_lengths:
      measurement.warm_up(self.spec, self.candidates, served, length)

  def _missing(self, rows: list[tuple[int, Slot]]) -> tuple[int, int]:
    """Chunks and prefill calls that the draft needs before it can draft."""
    if self.controller.is_fixed:
      return 0, 0  # it drafts in every call, or in none
    lacking = {number: slot for number, slot in rows if slot.lacks_draft}
    prefills = len(list(self._batches(lacking, self._bucket)))
    inputs = self._progress.fed.copy()
    inputs[list(lacking)] = 0
    # A draft that is up to date has been fed length - 1 inputs; see `fed_to_draft`.
    lag = max(int(self._progress.length[n]) - 1 - int(inputs[n]) for n, _ in rows)
    return max(-(-lag // drafters.CHUNK), 0), prefills

  def _prepare_draft(self, rows: list[tuple[int, Slot]]) -> None:
    """Does the prefills that the draft has missed, and lets it catch up."""
    lacking = {number: slot for number, slot in rows if slot.lacks_draft}
    for batch in self._batches(lacking, self._bucket):
      self._state = steps.prefill_draft(self.spec, self.served, self._state, batch)
    for slot in lacking.values():
      slot.lacks_draft = False
    self._state = steps.catch_up(self.spec, self.served, self._state)

  def _observe(
    self, rows: list[tuple[int, Slot]], before: RowProgress, milliseconds: float
  ) -> list[int]:
    """Informs the controller about a call, and returns the rows that ended."""
    after = self._progress
    self.controller.observe(
      RoundResult(
        rounds=int((after.rounds - before.rounds).max()),
        emitted=tuple((after.length - before.length).tolist()),
        judged=tuple((after.drafted - before.drafted).tolist()),
        accepted=tuple((after.accepted - before.accepted).tolist()),
        milliseconds=milliseconds,
      )
    )
    return [
      number
      for number, slot in rows
      if self._is_stopped_by_watch(number, slot)
      or after.stop_reason[number] != base.StopReason.RUNNING
    ]

  def _is_stopped_by_watch(self, number: int, slot: Slot) -> bool:
    """Calls a row's `Request.watch`, and ends the row if it returns a number."""
    if slot.request.watch is None:
      return False
    length = self._progress.length[number]
    count = slot.request.watch(self._progress.tokens[number, :length])
    if count is None:
      return False
    assert self._state is not None
    reason = np.int32(base.StopReason.STOP_STRING)
    self._state = steps.stop_row(self._state, number, np.int32(count), reason)
    return True

  def _collect(self, ended: list[int]) -> list[Finished]:
    """Returns the answers of finished rows and empties their slots."""
    # All reads are started before the host waits for the first.
    reads = [
      (number, steps.read_row(self.spec, self._state, slot.prompt.source, number))
      for number, slot in self._occupied()
      if number in ended
    ]
    if self._memory is not None:
      for number, read in reads:
        self._absorb(number, read)
    return [self._finish(number, read) for number, read in reads]

  def _absorb(self, number: int, read: Any) -> None:
    """Lets the drafter learn from a finished row."""
    slot, (batch, _, (length, *_)) = self._slots[number], read
    assert slot is not None and self._state is not None
    if not slot.request.remember:
      return
    # A drafter that was never prefilled holds the state of an earlier request.
    is_stale = np.bool_(slot.lacks_draft and self._resting.drafter is None)
    row = number, is_stale, slot.prompt.settings.cache_salt[0]
    memory = steps.absorb(
      self.spec, self._memory, self._state.draft_cache, batch, length, *row
    )
    self._serve_memory(memory)

  def _finish(self, number: int, read: Any) -> Finished:
    slot, (batch, settings, figures) = self._slots[number], read
    assert slot is not None
    self._slots[number] = None
    tokens, length, reason, counters = jax.tree.map(
      lambda leaf: leaf[0], jax.device_get((batch.target, *figures))
    )
    # The next request in this row starts without the acceptance of this one.
    self.controller.release(number, int(length))
    return Finished(
      request=slot.request,
      tokens=tokens[:length],
      stop_reason=base.StopReason(int(reason)),
      target_calls=int(counters.rounds),
      drafted=int(counters.drafted),
      accepted=int(counters.accepted),
      accepted_per_position=tuple(counters.accepted_per_position.tolist()),
      milliseconds=slot.milliseconds,
      number=slot.number,
      prefill_ms=slot.prefill_ms,
      batch=batch,
      settings=settings,
      draft_version=self.draft_version,
      drafted_by_cache=int(counters.drafted_by_cache),
      accepted_by_cache=int(counters.accepted_by_cache),
    )
