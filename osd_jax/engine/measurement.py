"""Measures what an engine's own calls cost on this machine, before the first request.

Calls are the ones that serve: prefill, rounds of every K with acceptance and records,
the steps that rounds consist of, and updates. They run on a made-up prompt, in turn,
and nothing that serves or learns changes. Greedy and sampled rows are timed apart: with
32,128 tokens to draw from, sampled rounds of a small target take a quarter longer.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, native
from osd_jax.costs import measure as measure_lib
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.decoding import drafters, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.decoding.rounds import DecodeSpec
from osd_jax.engine import steps
from osd_jax.engine.requests import DecodingConfig, SamplingConfig
from osd_jax.engine.steps import PaddedPrompt, PromptBatch

if TYPE_CHECKING:
  from osd_jax.engine.engine import CallTime, Engine

CALL_SECONDS, UPDATE_SECONDS = 3.0, 4.0  # budgets; together under 10 seconds
CALL_MS, MOST_ROUNDS = 10.0, 8  # rounds of a timed call: until it takes this long
TEMPERATURES = (0.0, 1.0)  # of greedy and of sampled rows
STEPS = 4  # in a timed loop of single steps
STEP_SHARE = 0.25  # of a run's budget for calls that single steps get
AGAIN = 3  # plain calls that are timed again while serving goes on
TOKENS_PER_REQUEST, TOKENS_PER_ROUND = 24, 2  # assumed, to say when an update is due


def clock() -> float:
  """Seconds; tests replace it."""
  return time.perf_counter()


def measure(
  engine: "Engine",
  bucket: int,
  seconds: float = CALL_SECONDS,
  sampling: SamplingConfig | None = None,
) -> RoundCosts:
  """Compiles and measures the rounds of an idle engine, whose state does not change.

  Args:
    engine: its rows, its Ks and its prepared parameters are used.
    bucket: source length of the prompts.
    seconds: the budget, without compiling.
    sampling: of all requests; None measures greedy and sampled rows.
  """
  return _Rows(engine, bucket, sampling).costs(seconds)


class PlainRounds:
  """Times plain rounds of an engine: when it starts, and again while it serves.

  Attributes:
    tables: their costs at the start, by bucket.
  """

  def __init__(self, engine: "Engine", seconds: float):
    """Compiles and measures the rounds within a budget, without compiling."""
    buckets = engine.config.source_lengths
    self.tables, self._engine = {}, engine
    for bucket in reversed(buckets):
      # The rows of the shortest bucket are kept, because they take the least memory.
      self._bucket, self._rows = bucket, _Rows(engine, bucket, is_plain=True)
      self.tables[bucket] = self._rows.costs(seconds / len(buckets))

  def call_ms(self, call: "CallTime") -> float:
    """Returns what a call of plain rounds took at the start."""
    table = self.tables[call.bucket]
    step_ms = table.rounds(call.is_sampled, call.rows).item()
    return call.rounds * step_ms + table.call_ms

  def again(self, call: "CallTime", rounds: int) -> float:
    """Times plain calls with the rows of a call; returns time / time at the start.

    Requests in flight wait.
    """
    warmth, served = TEMPERATURES[call.is_sampled], self._engine.served
    # After a call that drafted, the first one is slower than in plain decoding.
    self._rows.plain_call(served, rounds, warmth, call.rows)
    spent = expected = 0.0
    for _ in range(AGAIN):
      milliseconds, count = self._rows.plain_call(served, rounds, warmth, call.rows)
      spent += milliseconds
      expected += self.call_ms(call._replace(rounds=count, bucket=self._bucket))
    return spent / expected


def warm_up(
  spec: DecodeSpec,
  candidates: Sequence[int],
  served: steps.Served,
  bucket: int,
  settings: base.SamplingSettings | None = None,
  pauses: bool = True,
) -> state_lib.DecodeState:
  """Compiles every call of a bucket; returns rows that hold a made-up prompt each.

  `pauses`: the draft may rest for a while and catch up later.
  """
  state = steps.empty(spec, served, bucket)
  for batch in _made_up(spec, bucket, settings):
    if pauses:
      state = steps.insert_undrafted(spec, served, state, batch)
      state = steps.prefill_draft(spec, served, state, batch)
    state = steps.insert(spec, served, state, batch)
  for num_draft_tokens in candidates:
    # With 0 rounds the call compiles like any other and computes nothing.
    state = _compiled(spec, spec, num_draft_tokens, served, state)
  if pauses:
    if spec.resting.drafter is not None:
      state = _compiled(spec.resting, spec, candidates[-1], served, state)
    state = steps.catch_up(spec, served, state)
  return state


def _compiled(
  spec: DecodeSpec,
  whole: DecodeSpec,
  num_draft_tokens: int,
  served: steps.Served,
  state: state_lib.DecodeState,
) -> state_lib.DecodeState:
  """Compiles the rounds of greedy and of sampled rows; `whole` decides their prices."""
  largest, prices = steps.exactly(whole, num_draft_tokens)
  for one in dict.fromkeys(map(spec.for_rows, (False, True))):
    state = steps.advance(one, largest, served, np.int32(0), state, prices)
  return state


class SharedBudget:
  """Measures the rounds of each bucket of an engine once, within one budget.

  The first bucket gets at most half of the budget, the next half of the rest, and so
  on; one that would exceed it takes the table of the nearest bucket.

  Attributes:
    tables: the measured costs by bucket.
  """

  def __init__(self, seconds: float = 2 * CALL_SECONDS):
    """Measures nothing yet."""
    self.tables: dict[int, RoundCosts] = {}
    self._remaining, self._last = seconds, 0.0

  def measure(
    self, engine: "Engine", bucket: int, report: Callable[[str], object]
  ) -> RoundCosts:
    """Compiles a bucket's calls and returns their costs."""
    report(f"Compiling rounds for prompts of {bucket} tokens ...")
    rows = _Rows(engine, bucket)
    if self._remaining < self._last:
      return self.tables[min(self.tables, key=lambda other: abs(other - bucket))]
    seconds = self._remaining / 2
    report(f"Measuring rounds for prompts of {bucket} tokens, at most {seconds:.1f} s.")
    started = clock()
    self.tables[bucket] = rows.costs(seconds)
    self._last = clock() - started
    self._remaining -= self._last
    return self.tables[bucket]


class _Rows:
  """Rows of one way to decode, and the calls on them that are timed."""

  def __init__(
    self,
    engine: "Engine",
    bucket: int,
    sampling: SamplingConfig | None = None,
    is_plain: bool = False,
  ):
    """Compiles all calls; the arguments are those of `measure`."""
    spec, served = engine.spec, engine.served
    self._candidates = (0,) if is_plain else engine.candidates
    # Whether the draft may rest for a while and catch up later.
    self._pauses = bool(spec.draft) and 0 in self._candidates and not is_plain
    self._spec, self._served = spec, served
    settings = sampling and sampling.settings(spec.target_length)
    self._temperatures = TEMPERATURES if sampling is None else (sampling.temperature,)
    self._is_sampled = sampling is not None and sampling.needs_sampling
    self._specs = [spec]  # by source, as in `RoundCosts.round_ms`
    if self._pauses and spec.resting.drafter not in (None, spec.drafter):
      self._specs.append(spec.resting)
    self.state = warm_up(spec, self._candidates, served, bucket, settings, self._pauses)
    self._batch = next(_made_up(spec, bucket, settings))
    # On one CPU, rows without a request take hardly any time.
    is_one_cpu = native.forms() and spec.partitioner is None
    self._in_use = (1, spec.rows) if is_one_cpu and spec.rows > 1 else (spec.rows,)
    # Short steps are timed in longer calls, so that the clock and the call itself
    # matter less. A model with steps of 100 ms gets single rounds.
    self.max_rounds = 1
    self._idle: list[float] = []  # milliseconds of calls without rounds
    for num_draft_tokens in self._candidates:
      self.rounds(num_draft_tokens)  # compiles what rewinding needs
    step_ms = self.rounds(self._candidates[0])
    self.max_rounds = int(np.clip(math.ceil(CALL_MS / step_ms), 1, MOST_ROUNDS))

  def costs(self, seconds: float) -> RoundCosts:
    """Times all calls within a budget and returns their table."""
    times = measure_lib.interleaved(self._calls(), seconds, clock)
    return RoundCosts(
      round_ms=self._round_ms(times).tolist(),
      # Both calls rewind and return, so only the feeding remains in the difference.
      chunk_ms=max(times.get("chunk", 0.0) - times.get("nothing", 0.0), 0.0),
      prefill_ms=times.get("prefill", 0.0),
      call_ms=times["idle"],
      num_draft_tokens=self._candidates,
      rows=self._spec.rows,
      request_ms=times["insert"] + times["idle"] / self._spec.rows,
    )

  def _calls(self) -> dict[Any, Callable[[], float]]:
    """Returns the calls to time by name; a call returns its milliseconds."""
    spec, served = self._spec, self._served
    calls: dict[Any, Callable[[], float]] = {"idle": self.idle, "insert": self.insert}
    for source, temperature, in_use in self._axes():
      for k in self._timed_ks(temperature, in_use):
        if k or not source:  # a plain step has no source
          calls[source, temperature, in_use, k] = functools.partial(
            self.rounds, k, temperature, in_use, source
          )
    if self._pauses:
      lag = min(drafters.CHUNK + 1, spec.target_length)
      calls["nothing"] = functools.partial(self.feed, 0)
      calls["chunk"] = functools.partial(self.feed, lag)
      prefill = lambda state: steps.prefill_draft(spec, served, state, self._batch)
      calls["prefill"] = functools.partial(self._timed, prefill)
    return calls

  def _axes(self) -> Iterator[tuple[int, float, int]]:
    """Yields (source, temperature, rows in use), the axes of the table before K."""
    sources = range(len(self._specs))
    return itertools.product(sources, self._temperatures, self._in_use)

  def _timed_ks(self, temperature: float, in_use: int) -> tuple[int, ...]:
    """Returns the Ks to time: all for the first temperature and all rows, else two.

    The cost of sampling, and the saving of fewer rows, grow evenly with K.
    """
    if (temperature, in_use) == (self._temperatures[0], self._spec.rows):
      return self._candidates
    return tuple(sorted({self._candidates[0], self._candidates[-1]}))

  def _round_ms(self, times: Mapping[Any, float]) -> np.ndarray:
    """Returns the typical times of `_calls` as [source, sampled, rows, K]."""

    def timed(source: int, temperature: float, in_use: int) -> np.ndarray:
      ks = self._timed_ks(temperature, in_use)
      return np.asarray([times[source if k else 0, temperature, in_use, k] for k in ks])

    rows = []
    for source, temperature, in_use in self._axes():
      ks = self._timed_ks(temperature, in_use)
      base_ms = timed(source, self._temperatures[0], self._spec.rows)
      more = timed(source, temperature, in_use) - np.interp(
        ks, self._candidates, base_ms
      )
      rows.append(base_ms + np.interp(self._candidates, ks, more))
    shape = len(self._specs), len(self._temperatures), len(self._in_use), -1
    # The difference of two noisy times may be negative, and a cost of 0 would make a
    # division by it infinite. More draft tokens cost no less, either: noise that says
    # otherwise is evened out.
    ms = np.maximum.accumulate(np.maximum(rows, 1e-3), axis=-1)
    return ms.reshape(shape)

  def idle(self) -> float:
    """Times a call without rounds."""
    self._rewind(0)
    self._idle.append(self._advance(self._candidates[-1], 0, self._spec, 0.0))
    return self._idle[-1]

  def rounds(
    self,
    num_draft_tokens: int,
    temperature: float = 0.0,
    in_use: int | None = None,
    source: int = 0,
  ) -> float:
    """Times a round of the first rows."""
    self._rewind(0, temperature, in_use)
    before = np.asarray(self.state.counters.rounds)
    spec = self._specs[source]
    spent = self._advance(num_draft_tokens, self.max_rounds, spec, temperature)
    # A row may finish, which ends the call, so the rounds are counted.
    count = int(np.max(self.state.counters.rounds - before))
    return (spent - float(np.median(self._idle or 0.0))) / max(count, 1)

  def plain_call(
    self, served: steps.Served, rounds: int, warmth: float, in_use: int
  ) -> tuple[float, int]:
    """Times a plain call of the first rows; returns its milliseconds and rounds."""
    self._served = served  # the parameters may have been replaced since
    self._rewind(0, warmth, in_use)
    before = np.asarray(self.state.counters.rounds)
    spent = self._advance(0, rounds, self._spec, warmth)
    # A row that ends, ends the call.
    return spent, int(np.max(self.state.counters.rounds - before))

  def insert(self) -> float:
    """Times the prefill of a row; a call prefills one in every part."""
    spec, served = self._spec, self._served
    insert = lambda state: steps.insert(spec, served, state, self._batch)
    return self._timed(insert) / spec.parts

  def feed(self, lag: int) -> float:
    """Times a call that feeds the draft up to `lag` tokens."""
    self._rewind(lag)
    return self._timed(functools.partial(steps.catch_up, self._spec, self._served))

  def serve(self) -> None:
    """Runs one call with requests in flight, as serving does."""
    self._rewind(0)
    self._advance(self._candidates[-1], self.max_rounds, self._spec, 0.0)

  def _advance(
    self, num_draft_tokens: int, max_rounds: int, spec: DecodeSpec, temperature: float
  ) -> float:
    largest, prices = steps.exactly(self._spec, num_draft_tokens)
    spec = spec.for_rows(self._is_sampled or temperature > 0)
    arguments = (spec, largest, self._served, np.int32(max_rounds))
    return self._timed(lambda state: steps.advance(*arguments, state, prices))

  def _rewind(
    self, lag: int, temperature: float = 0.0, in_use: int | None = None
  ) -> None:
    in_use = self._spec.rows if in_use is None else in_use
    self.state = _rewound(self._spec, self.state, lag, temperature, in_use)

  def _timed(self, call: Callable[[Any], state_lib.DecodeState]) -> float:
    """Milliseconds of a call that consumes the state and returns the next one."""
    # Work that was queued before must not count.
    jax.block_until_ready(self.state)
    started = clock()
    self.state = jax.block_until_ready(call(self.state))
    return (clock() - started) * 1e3


def _made_up(
  spec: DecodeSpec, bucket: int, settings: base.SamplingSettings | None = None
) -> Iterator[PromptBatch]:
  """A prompt for every row."""
  length = spec.target_length
  settings = settings or sampling.make_settings(1, max_length=length)
  prompt = PaddedPrompt(np.full((1, bucket), base.EOS_ID, np.int32), settings)
  everywhere = dict.fromkeys(range(spec.rows), prompt)
  return steps.prefill_batches(everywhere, bucket, spec.rows, spec.parts)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _rewound(
  spec: DecodeSpec,
  state: state_lib.DecodeState,
  lag: jax.Array,
  temperature: jax.Array,
  in_use: jax.Array,
) -> state_lib.DecodeState:
  """Sets the first rows to RUNNING with `lag` tokens and a draft that was fed nothing.

  The others hold no request.
  """
  length = jnp.zeros_like(state.length) + lag
  warmth = jnp.zeros_like(state.settings.temperature) + temperature
  state = state.replace(
    length=length,
    stop_reason=jnp.where(
      jnp.arange(spec.rows) < in_use,
      int(base.StopReason.RUNNING),
      int(base.StopReason.EMPTY),
    ).astype(state.stop_reason.dtype),
    settings=state.settings.replace(temperature=warmth),
    target_cache=state.target_cache.replace(length=length),
  )
  if spec.draft is not None:
    cache = state.draft_cache.replace(length=jnp.zeros_like(length))
    state = state.replace(draft_cache=cache)
  return spec.place(state)


# --- A run's costs ------------------------------------------------------------------


def measure_run(
  server: Any,
  bucket: int,
  learn: bool,
  sampling: SamplingConfig,
  report: Callable[[str], object] = lambda text: None,
) -> Costs:
  """Measures the costs of a server that is warm and idle.

  Rounds that the engine has measured already are not measured again.

  Args:
    server: a server with a draft. What it holds does not change.
    bucket: source length of the requests.
    learn: whether updates are measured too; the draft does not change.
    sampling: sampling of the run's requests.
    report: called with each progress line.
  """
  report("Measuring costs on this machine: calls, at most 3 s ...")
  engine, config = server.engine, server.engine.config
  rows, online = _Rows(engine, bucket, sampling), engine.measured.get(bucket)
  if online is None:
    online = rows.costs((1 - STEP_SHARE) * CALL_SECONDS)
  source = np.full((config.rows, bucket), base.EOS_ID, np.int32)
  single = measure_steps(config, server.pair.models, source, STEP_SHARE * CALL_SECONDS)
  costs = Costs(
    online.flat(sampling.needs_sampling),
    draft_ms=single["draft_step_ms"],
    step_ms=single["plain_step_ms"],
    verify_ms=single["verify_ms"],
  )
  if not learn:
    return costs
  report("Measuring costs on this machine: updates, at most 4 s ...")
  return _with_updates(costs, server, rows)


def _with_updates(costs: Costs, server: Any, rows: _Rows) -> Costs:
  """Adds the time of an update, measured while idle and while serving."""
  learner = server.learner
  total = learner.config.update.steps_per_update
  slice_ms = _ms(lambda: learner.try_update(1))
  # Of a long update only some slices are run, and the rest is extrapolated.
  slices = int(np.clip(UPDATE_SECONDS * 1e3 / 12 // slice_ms, 1, total))
  alone = measure_lib.typical(
    [_ms(lambda: learner.try_update(slices)) for _ in range(2)]
  )
  update_ms = alone * total / slices
  # Serving itself copies the new draft.
  swap_ms = measure_lib.typical([_ms(lambda: _swap(server)) for _ in range(3)])
  lost_ms = update_ms
  if learner.runner.in_background:
    requests = learner.config.schedule.update_interval
    rounds = requests * TOKENS_PER_REQUEST / TOKENS_PER_ROUND / costs.online.rows
    due = max(round(rounds * slices / total / rows.max_rounds), 1)
    if learner.config.free_updates:
      due = max(due, round(UPDATE_SECONDS * 1e3 / costs.online.round_ms[-1]))
    update = functools.partial(learner.try_update, slices)
    # Single differences vary by more than their mean, so most of the budget goes here.
    lost = measure_lib.lost_ms(update, rows.serve, due, UPDATE_SECONDS * 0.8, clock)
    lost_ms = lost * total / slices
  return dataclasses.replace(
    costs, update_ms=update_ms, slices=total, lost_ms=lost_ms + swap_ms
  )


def _swap(server: Any) -> None:
  engine = server.engine
  engine.swap(server.draft_params, engine.draft_version, engine.shortlist)
  jax.block_until_ready(engine.served.draft)


def _ms(call: Callable[[], object]) -> float:
  started = clock()
  call()
  return (clock() - started) * 1e3


# --- Single steps ---------------------------------------------------------------------


def measure_steps(
  config: DecodingConfig,
  models: tuple[Any, ...],
  source: np.ndarray,
  seconds: float = CALL_SECONDS,
) -> dict[str, float]:
  """Measures a step of the draft, a step of the target, and a verification.

  Every step reads the whole cache buffer, so its cost does not depend on how many
  tokens were fed.

  Args:
    config: its K and T are used.
    models: target, its trained parameters, draft, its trained parameters.
    source: [B, S] int32, the prompts to prefill.
    seconds: the budget, without compiling.

  Returns:
    Milliseconds for all rows together, and their ratios to a plain step.
  """
  times = measure_lib.interleaved(_loops(config, models, source), seconds, clock)
  return {
    "cost_ratio": times["draft"] / times["plain"],
    "verify_ratio": times["verify"] / times["plain"],
    "draft_step_ms": times["draft"],
    "plain_step_ms": times["plain"],
    "verify_ms": times["verify"],
  }


def _loops(
  config: DecodingConfig, models: tuple[Any, ...], source: np.ndarray
) -> dict[str, Callable[[], float]]:
  """Compiles loops of single steps; each loop returns the milliseconds of one step."""
  length = state_lib.buffer_length(config.target_length)
  target, target_params, draft, draft_params = models
  target_side = (target, *_prefilled(target, length, target_params, source, source))
  read = draft.prompt_of(source, getattr(target_side[2], "target_states", None))
  draft_side = (draft, *_prefilled(draft, length, draft_params, source, read))
  widths = {
    "draft": (*draft_side, 1),
    "plain": (*target_side, 1),
    "verify": (*target_side, config.num_draft_tokens + 1),
  }

  def timed(model, served, cache, width) -> float:
    run = lambda: jax.block_until_ready(
      feed(model, width, served, cache, np.int32(STEPS))
    )
    return _ms(run) / STEPS

  loops = {n: functools.partial(timed, *side) for n, side in widths.items()}
  for loop in loops.values():
    loop()  # compiles
  return loops


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefilled(model, length, params, source, read) -> tuple[base.Params, Any]:
  """Returns the served copy of `params`, and the cache after prefilling `read`."""
  served = model.prepare(params)
  return served, model.prefill(served, read, model.mask(source), length)


@functools.partial(jax.jit, static_argnums=(0, 1))
def feed(model, width, served, cache, calls):
  """Feeds `width` tokens `calls` times, each choice depending on the last one."""

  def body(_, carry):
    token, cache = carry
    tokens = jnp.broadcast_to(token[:, None], (token.shape[0], width))
    start = cache.length
    logits, cache = model.decode(served, tokens, cache)
    # A token that depends on the last logits keeps XLA from overlapping the steps.
    token = sampling.arg_max(logits[:, -1])
    # The cache is rewound, so that every call reads and writes the same positions.
    return token, cache.replace(length=start)

  token = jnp.zeros(cache.length.shape, jnp.int32)
  return jax.lax.fori_loop(0, calls, body, (token, cache))
