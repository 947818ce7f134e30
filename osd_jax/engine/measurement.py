"""Measures what an engine's own calls cost on this machine, before the first request.

Calls are the ones that serve: prefill, rounds of every K with acceptance and records,
the steps that rounds consist of, and updates. They run on a made-up prompt, in turn,
and nothing that serves or learns changes. Greedy and sampled rows have tables of their
own: with 32,128 tokens to draw from, sampled rounds of a small target take a quarter
longer.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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

CALL_SECONDS, UPDATE_SECONDS = 4.0, 4.0  # budgets; together under 10 seconds
CALL_MS, MOST_ROUNDS = 10.0, 8  # rounds of a timed call: until it takes this long
TEMPERATURES = (0.0, 1.0)  # of greedy and of sampled rows
STEPS = 4  # in a timed loop of single steps
TOKENS_PER_REQUEST, TOKENS_PER_ROUND = 24, 2  # assumed, to say when an update is due


def clock() -> float:
  """Seconds; tests replace it."""
  return time.perf_counter()


def warm_up(
  spec: DecodeSpec,
  candidates: Sequence[int],
  served: steps.Served,
  bucket: int,
  settings: base.SamplingSettings | None = None,
) -> state_lib.DecodeState:
  """Compiles every call of a bucket; returns rows that hold a made-up prompt each."""
  state, pauses = steps.empty(spec, served, bucket), spec.draft and 0 in candidates
  for batch in _made_up(spec, bucket, settings):
    if pauses:
      state = steps.insert_undrafted(spec, served, state, batch)
      state = steps.prefill_draft(spec, served, state, batch)
    state = steps.insert(spec, served, state, batch)
  for num_draft_tokens in candidates:
    # With 0 rounds the call compiles like any other and computes nothing.
    largest, prices = steps.exactly(spec, num_draft_tokens)
    state = steps.advance(spec, largest, served, np.int32(0), state, prices)
  if pauses:
    if spec.resting.drafter is not None:
      largest, prices = steps.exactly(spec, candidates[-1])
      state = steps.advance(spec.resting, largest, served, np.int32(0), state, prices)
    state = steps.catch_up(spec, served, state)
  return state


class RoundTables:
  """Tables for the controller of K, measured when a bucket is first used.

  All buckets share one budget. The first gets at most half of it, the next half of the
  rest, and so on; one that would exceed the budget takes the nearest bucket's table.
  """

  def __init__(self, seconds: float = 2 * CALL_SECONDS):
    self._left, self._last = seconds, 0.0
    self._found: dict[int, tuple[RoundCosts, RoundCosts]] = {}

  def measure(
    self,
    spec: DecodeSpec,
    candidates: Sequence[int],
    served: steps.Served,
    bucket: int,
    report: Callable[[str], object],
  ) -> tuple[RoundCosts, RoundCosts]:
    """Compiles a bucket's calls; returns the tables of greedy and of sampled rows."""
    report(f"Compiling rounds for prompts of {bucket} tokens ...")
    rows = _Rows(spec, candidates, served, bucket)
    if self._left < self._last:
      return self._found[min(self._found, key=lambda other: abs(other - bucket))]
    seconds = self._left / 2
    report(f"Measuring rounds for prompts of {bucket} tokens, at most {seconds:.1f} s.")
    started = clock()
    found = measure_lib.interleaved(rows.calls(TEMPERATURES), seconds, clock)
    self._last = clock() - started
    self._left -= self._last
    greedy, sampled = (rows.table(found, temperature) for temperature in TEMPERATURES)
    self._found[bucket] = greedy, sampled
    return greedy, sampled


def plain_tables(
  engine: Any, seconds: float
) -> dict[int, tuple[RoundCosts, RoundCosts]]:
  """Measures plain decoding with as many rows as an engine has; compiles its calls.

  Args:
    engine: an engine that is idle. What it holds does not change.
    seconds: budget of all buckets together, without compiling.

  Returns:
    For each bucket, the costs of greedy and of sampled rows.
  """
  spec = dataclasses.replace(engine.spec, record_top_k=0, drafter=None)
  served, buckets = steps.Served(engine.served.target), engine.config.source_lengths
  found = {}
  for bucket in buckets:
    rows = _Rows(spec, (0,), served, bucket)
    calls = rows.calls(TEMPERATURES)
    times = measure_lib.interleaved(calls, seconds / len(buckets), clock)
    greedy, sampled = (rows.table(times, temperature) for temperature in TEMPERATURES)
    found[bucket] = greedy, sampled
  return found


class _Rows:
  """Rows of one way to decode, and the calls on them that are timed."""

  def __init__(
    self,
    spec: DecodeSpec,
    candidates: Sequence[int],
    served: steps.Served,
    bucket: int,
    settings: base.SamplingSettings | None = None,
  ):
    """Compiles all calls."""
    self._spec, self._candidates, self._served = spec, tuple(candidates), served
    # The n-gram cache of a mixture alone, if the draft can rest.
    resting = spec.resting if 0 in candidates else spec
    self._cache = resting if resting.drafter not in (None, spec.drafter) else None
    self.state = warm_up(spec, candidates, served, bucket, settings)
    self._batch = next(_made_up(spec, bucket, settings))
    # On one CPU, rows without a request take hardly any time.
    is_one_cpu = native.forms() and spec.partitioner is None
    self._in_use = (1, spec.rows) if is_one_cpu and spec.rows > 1 else (spec.rows,)
    # Short steps are timed in longer calls, so that the clock and the call itself
    # matter less. A model with steps of 100 ms gets single rounds.
    self.max_rounds = 1
    self._base: tuple[float, int] = (0.0, spec.rows)  # see `calls`
    self._idle: list[float] = []  # milliseconds of calls without rounds
    for num_draft_tokens in candidates:
      self.rounds(num_draft_tokens, 0.0)  # compiles what rewinding needs
    step_ms = self.rounds(candidates[0], 0.0)
    self.max_rounds = int(np.clip(math.ceil(CALL_MS / step_ms), 1, MOST_ROUNDS))

  def calls(self, temperatures: Sequence[float]) -> dict[Any, Callable[[], float]]:
    """Returns the calls to time by name; a call returns its milliseconds."""
    spec, served = self._spec, self._served
    timed: dict[Any, Callable[[], float]] = {"idle": self.idle, "insert": self.insert}
    self._base = temperatures[0], spec.rows
    for temperature, in_use in itertools.product(temperatures, self._in_use):
      rounds = functools.partial(self.rounds, temperature=temperature, in_use=in_use)
      for k in self._timed_with(temperature, in_use):
        timed[k, temperature, in_use] = functools.partial(rounds, k)
        if self._cache is not None and k:
          timed["cache", k, temperature, in_use] = functools.partial(
            rounds, k, spec=self._cache
          )
    if spec.draft is not None and 0 in self._candidates:
      lag = min(drafters.CHUNK + 1, spec.target_length)
      timed["nothing"] = functools.partial(self.feed, 0)
      timed["chunk"] = functools.partial(self.feed, lag)
      prefill = lambda state: steps.prefill_draft(spec, served, state, self._batch)
      timed["prefill"] = functools.partial(self._timed, prefill)
    return timed

  def _timed_with(self, temperature: float, in_use: int) -> tuple[int, ...]:
    """The Ks that are timed: all for the first temperature and all rows, else two.

    What sampling costs, and what fewer rows save, grows evenly with K.
    """
    if (temperature, in_use) == self._base:
      return self._candidates
    return tuple(sorted({self._candidates[0], self._candidates[-1]}))

  def table(self, found: Mapping[Any, float], temperature: float) -> RoundCosts:
    """Makes the table from typical times of `calls`."""
    # The difference of two noisy times may be negative, and a cost of 0 would make a
    # division by it infinite.
    plain, spec = self._candidates[0], self._spec

    def timed(kind: Sequence[str], degrees: float, in_use: int) -> np.ndarray:
      """The times of the Ks that were timed at a temperature with some rows."""
      later = self._timed_with(degrees, in_use)[1:]
      ms = [found[*kind, k, degrees, in_use] for k in later]
      return np.asarray([found[plain, degrees, in_use], *ms])

    def rounds(in_use: int, *kind: str) -> tuple[float, ...]:
      numbers = self._timed_with(temperature, in_use)
      base_ms, own_ms = timed(kind, *self._base), timed(kind, temperature, in_use)
      more = own_ms - np.interp(numbers, self._candidates, base_ms)
      ms = base_ms + np.interp(self._candidates, numbers, more)
      # More draft tokens cost no less: noise that says otherwise is evened out.
      return tuple(np.maximum.accumulate(np.maximum(ms, 1e-3)).tolist())

    def of_cache(in_use: int) -> tuple[float, ...]:
      return () if self._cache is None else rounds(in_use, "cache")

    lone = {}
    if len(self._in_use) > 1:
      lone = {"lone_ms": rounds(1), "lone_cache_ms": of_cache(1)}
    return RoundCosts(
      round_ms=rounds(spec.rows),
      cache_ms=of_cache(spec.rows),
      **lone,
      # Both calls rewind and return, so only the feeding remains in the difference.
      chunk_ms=max(found.get("chunk", 0.0) - found.get("nothing", 0.0), 0.0),
      prefill_ms=found.get("prefill", 0.0),
      call_ms=found["idle"],
      num_draft_tokens=self._candidates,
      rows=spec.rows,
      request_ms=found["insert"] + found["idle"] / spec.rows,
    )

  def idle(self) -> float:
    """Times a call without rounds."""
    self._rewind(0)
    self._idle.append(self._advance(self._candidates[-1], 0))
    return self._idle[-1]

  def rounds(
    self,
    num_draft_tokens: int,
    temperature: float,
    spec: DecodeSpec | None = None,
    in_use: int | None = None,
  ) -> float:
    """Times a round of the first rows, of another spec if one is given."""
    self._rewind(0, temperature, in_use)
    before = np.asarray(self.state.counters.rounds)
    spent = self._advance(num_draft_tokens, self.max_rounds, spec)
    # A row may finish, which ends the call, so the rounds are counted.
    ran = int(np.max(self.state.counters.rounds - before))
    return (spent - float(np.median(self._idle or 0.0))) / max(ran, 1)

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
    self._advance(self._candidates[-1], self.max_rounds)

  def _advance(
    self, num_draft_tokens: int, max_rounds: int, spec: DecodeSpec | None = None
  ) -> float:
    largest, prices = steps.exactly(self._spec, num_draft_tokens)
    arguments = (spec or self._spec, largest, self._served, np.int32(max_rounds))
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


def measure(
  server: Any,
  bucket: int,
  learn: bool,
  sampled: SamplingConfig,
  report: Callable[[str], object] = lambda text: None,
) -> Costs:
  """Measures the costs of a server that is warm and idle.

  Args:
    server: a server with a draft. What it holds does not change.
    bucket: source length of the requests.
    learn: whether updates are measured too; the draft does not change.
    sampled: sampling of the run's requests.
    report: called with each progress line.
  """
  report("Measuring costs on this machine: calls, at most 4 s ...")
  engine, pair, config = server.engine, server.pair, server.engine.config
  settings = sampled.settings(config.target_length)
  rows = _Rows(engine.spec, engine.candidates, engine.served, bucket, settings)
  calls = rows.calls((sampled.temperature,))
  models = pair.target, pair.target_params, pair.draft, pair.draft_params
  source = np.full((config.rows, bucket), base.EOS_ID, np.int32)
  calls |= {("step", n): timed for n, timed in _loops(config, models, source).items()}
  found = measure_lib.interleaved(calls, CALL_SECONDS, clock)
  costs = Costs(
    rows.table(found, sampled.temperature),
    draft_ms=found["step", "draft"],
    step_ms=found["step", "plain"],
    verify_ms=found["step", "verify"],
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
  config: DecodingConfig, models: tuple[Any, ...], source: np.ndarray
) -> dict[str, float]:
  """Measures a step of the draft, a step of the target, and a verification.

  Every step reads the whole cache buffer, so its cost does not depend on how many
  tokens were fed.

  Args:
    config: its K and T are used.
    models: target, its trained parameters, draft, its trained parameters.
    source: [B, S] int32, the prompts to prefill.

  Returns:
    Milliseconds for all rows together, and their ratios to a plain step.
  """
  found = measure_lib.interleaved(_loops(config, models, source), CALL_SECONDS, clock)
  return {
    "cost_ratio": found["draft"] / found["plain"],
    "verify_ratio": found["verify"] / found["plain"],
    "draft_step_ms": found["draft"],
    "plain_step_ms": found["plain"],
    "verify_ms": found["verify"],
  }


def _loops(
  config: DecodingConfig, models: tuple[Any, ...], source: np.ndarray
) -> dict[str, Callable[[], float]]:
  """Compiles loops of single steps; each loop returns the milliseconds of one step."""
  length = state_lib.buffer_length(config.target_length)
  target, target_params, draft, draft_params = models
  target_side = (target, *_prefilled(target, length, target_params, source, source))
  read = target_side[2].target_states if draft.state_width else source
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
