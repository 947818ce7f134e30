"""What the calls cost that `adaptive` chooses between: compiled, then timed by turns.

Rounds are those that serve, with acceptance, records and all; they run on made-up
rows. What a call costs beside its rounds is measured with no rounds and subtracted.
Rows that are sampled have a table of their own: with 32,128 tokens to draw from, steps
and rounds take a quarter longer than greedy ones, where the target is small.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import drafters, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.decoding.rounds import DecodeSpec
from osd_jax.engine import steps
from osd_jax.engine.steps import PaddedPrompt, PromptBatch

ROUNDS = 2  # of a timed call
LEAST, MOST, SECONDS = 16, 60, 3.0  # turns: at least, at most, and for how long else
TEMPERATURES = (0.0, 1.0)  # of greedy and of sampled rows


def warm_up(
  spec: DecodeSpec,
  candidates: Sequence[int],
  served: steps.Served,
  bucket: int,
) -> state_lib.DecodeState:
  """Compiles every call of a bucket; returns rows that hold a made-up prompt each."""
  state = steps.empty(spec, served, bucket)
  for batch in _made_up(spec, bucket):
    state = steps.insert_undrafted(spec, served, state, batch)
    state = steps.prefill_draft(spec, served, state, batch)
  state = steps.insert(spec, served, state, batch)
  for num_draft_tokens in candidates:
    state = _advance(spec, num_draft_tokens, served, 0, state)
  return steps.catch_up(spec, served, state)


def _made_up(spec: DecodeSpec, bucket: int) -> Iterator[PromptBatch]:
  """A prompt for every row."""
  settings = sampling.make_settings(1, max_length=spec.target_length)
  prompt = PaddedPrompt(np.full((1, bucket), base.EOS_ID, np.int32), settings)
  return steps.prefill_batches(
    dict.fromkeys(range(spec.rows), prompt), bucket, spec.rows, spec.parts
  )


def measure(
  spec: DecodeSpec,
  candidates: Sequence[int],
  served: steps.Served,
  bucket: int,
) -> tuple[RoundCosts, RoundCosts]:
  """Times the calls of a bucket, of greedy and of sampled rows; see `table`.

  Args:
    spec: with a draft.
    candidates: the Ks.
    served: prepared parameters.
    bucket: source length of the made-up rows.
  """
  state = warm_up(spec, candidates, served, bucket)
  batch = next(_made_up(spec, bucket))
  lag = min(drafters.CHUNK + 1, spec.target_length)
  feed = functools.partial(steps.catch_up, spec, served)
  turns: list[list[list[float]]] = []
  started = time.perf_counter()
  while len(turns) < LEAST or (
    len(turns) < MOST and time.perf_counter() - started < SECONDS
  ):
    times: tuple[list[float], list[float]] = ([], [])
    for k in candidates:
      for kind, temperature in zip(times, TEMPERATURES, strict=True):
        state, ms = _round_ms(spec, k, served, state, temperature)
        kind.extend(ms)
    state, nothing = _timed(feed, _rewound(spec, state, 0))
    state, chunk = _timed(feed, _rewound(spec, state, lag))
    state, prefill = _timed(
      lambda state: steps.prefill_draft(spec, served, state, batch), state
    )
    turns.append([[*kind, nothing, chunk, prefill] for kind in times])
  greedy, sampled = np.moveaxis(np.asarray(turns), 1, 0)
  return table(greedy), table(sampled)


def table(turns: np.ndarray) -> RoundCosts:
  """Costs from what was timed; the faster half of the turns counts.

  More drafted tokens cost no less: noise that says so is evened out.

  Args:
    turns: [turns, 3 * candidates + 3]; a call without rounds in milliseconds, one with,
      and its rounds, for each candidate; then feeding nothing, a chunk, and a prefill.
  """
  idle, full, rounds = np.moveaxis(turns[:, :-3].reshape(len(turns), -1, 3), 2, 0)
  ms = _typical((full - np.median(idle)) / rounds)
  nothing, chunk, prefill = _typical(turns[:, -3:])
  return RoundCosts(
    round_ms=tuple(np.maximum.accumulate(np.maximum(ms, 1e-3)).tolist()),
    chunk_ms=max(float(chunk - nothing), 0.0),
    prefill_ms=float(prefill),
    call_ms=float(np.median(idle)),
  )


def _round_ms(
  spec: DecodeSpec,
  num_draft_tokens: int,
  served: steps.Served,
  state: state_lib.DecodeState,
  temperature: float,
) -> tuple[state_lib.DecodeState, tuple[float, float, float]]:
  """The rows, the time of a call without rounds, of one with, and the rounds it ran.

  Rows may stop early, so rounds are counted.
  """
  state = _rewound(spec, state, 0, temperature)
  before = np.asarray(state.counters.rounds)
  call = functools.partial(_advance, spec, num_draft_tokens, served)
  state, idle = _timed(functools.partial(call, 0), state)
  state, full = _timed(functools.partial(call, ROUNDS), state)
  return state, (idle, full, float(np.max(state.counters.rounds - before)))


def _typical(times: np.ndarray) -> np.ndarray:
  """Mean of the faster half of [turns, n] for each of n.

  What else a machine does only adds to a time; ratios of these means to plain steps
  vary a quarter less than those of medians.
  """
  return np.mean(np.sort(times, axis=0)[: (len(times) + 1) // 2], axis=0)


def _advance(spec, num_draft_tokens, served, rounds, state):
  return steps.advance(spec, num_draft_tokens, served, np.int32(rounds), state)


def _timed(
  call: Callable[[state_lib.DecodeState], state_lib.DecodeState],
  state: state_lib.DecodeState,
) -> tuple[state_lib.DecodeState, float]:
  """The state after a call that consumes it, and the milliseconds of the call."""
  jax.block_until_ready(state)
  started = time.perf_counter()
  state = jax.block_until_ready(call(state))
  return state, (time.perf_counter() - started) * 1e3


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _rewound(
  spec: DecodeSpec,
  state: state_lib.DecodeState,
  lag: jax.Array,
  temperature: float = 0.0,
) -> state_lib.DecodeState:
  """All rows running with `lag` tokens, none of them fed to the draft."""
  length = jnp.zeros_like(state.length) + lag
  warmth = jnp.zeros_like(state.settings.temperature) + temperature
  state = state.replace(
    length=length,
    stop_reason=jnp.zeros_like(state.stop_reason) + int(base.StopReason.RUNNING),
    settings=state.settings.replace(temperature=warmth),
    target_cache=state.target_cache.replace(length=length),
    draft_cache=state.draft_cache.replace(length=jnp.zeros_like(length)),
  )
  return spec.place(state)
