"""What decoding costs: its parts timed alone, and whole requests side by side."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.decoding import sampling
from osd_jax.decoding import state as state_lib
from osd_jax.engine.requests import DecodingConfig, Request
from osd_jax.engine.server import Server


@dataclasses.dataclass(frozen=True)
class Costs:
  """Milliseconds of one call for all rows together.

  Attributes:
    draft_step_ms: the draft feeds one token.
    plain_step_ms: the target feeds one token.
    verify_ms: the target feeds K + 1 tokens.
  """

  draft_step_ms: float
  plain_step_ms: float
  verify_ms: float

  @property
  def cost_ratio(self) -> float:
    """c: draft step / plain step."""
    return self.draft_step_ms / self.plain_step_ms

  @property
  def verify_ratio(self) -> float:
    """v: verification / plain step."""
    return self.verify_ms / self.plain_step_ms


def measure(
  config: DecodingConfig,
  target: base.Model,
  target_params: base.Params,
  draft: base.Model,
  draft_params: base.Params,
  source: np.ndarray,
  *,
  calls: int = 32,
  repeats: int = 7,
) -> Costs:
  """Times compiled loops of calls, by turns; the median of the repeats counts.

  Every call reads the whole cache buffer, so that its cost does not depend on how
  many tokens were fed.

  Args:
    config: K and T; the rows are those of `source`.
    target: the target.
    target_params: its parameters.
    draft: the draft.
    draft_params: its parameters.
    source: [B, S] int32, prompts.
    calls: in a loop.
    repeats: of each loop.
  """
  length = state_lib.buffer_length(config.target_length)
  target_side = (target, *_prefilled(target, length, target_params, source, source))
  read = target_side[2].target_states if draft.state_width else source
  draft_side = (draft, *_prefilled(draft, length, draft_params, source, read))
  loops = {
    "draft_step_ms": (*draft_side, 1),
    "plain_step_ms": (*target_side, 1),
    "verify_ms": (*target_side, config.num_draft_tokens + 1),
  }
  found: dict[str, list[float]] = {name: [] for name in loops}
  for repeat in range(repeats + 1):
    for name, (model, served, cache, width) in loops.items():
      started = time.perf_counter()
      jax.block_until_ready(feed(model, width, served, cache, np.int32(calls)))
      if repeat:  # the first one compiles
        found[name].append((time.perf_counter() - started) * 1e3 / calls)
  return Costs(**{name: float(np.median(times)) for name, times in found.items()})


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefilled(model, length, params, source, read) -> tuple[base.Params, Any]:
  """The served copy and a cache after prefill of what it reads of the source."""
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
    token = sampling.arg_max(logits[:, -1])
    return token, cache.replace(length=start)

  token = jnp.zeros(cache.length.shape, jnp.int32)
  return jax.lax.fori_loop(0, calls, body, (token, cache))


@dataclasses.dataclass(frozen=True)
class Timing:
  """What a server took for the timed requests.

  Attributes:
    ms_per_token: wall time / emitted tokens of all requests.
    tokens_per_target_call: emitted tokens / target calls of the requests.
  """

  ms_per_token: float
  tokens_per_target_call: float


def timings(
  servers: Sequence[Server], requests: Sequence[Request], block: int
) -> list[Timing]:
  """Serves the same requests with each server, by turns in blocks.

  Who begins changes from block to block, so that a machine that slows down favours
  nobody. What compiles comes before and is not counted.

  Args:
    servers: with nothing in flight.
    requests: what each of them answers.
    block: requests of a turn.

  Returns:
    One timing a server.
  """
  for server in servers:
    bucket = server.engine.config.bucket
    one_a_bucket = {bucket(len(request.tokens)): request for request in requests}
    server.run(list(one_a_bucket.values()))
  seconds = np.zeros(len(servers))
  tokens, calls = seconds.copy(), seconds.copy()
  for turn, start in enumerate(range(0, len(requests), block)):
    for offset in range(len(servers)):
      index = (turn + offset) % len(servers)
      started = time.perf_counter()
      answers = servers[index].run(requests[start : start + block])
      seconds[index] += time.perf_counter() - started
      tokens[index] += sum(len(done.tokens) for done in answers)
      calls[index] += sum(done.target_calls for done in answers)
  return [
    Timing(float(s * 1e3 / t), float(t / c))
    for s, t, c in zip(seconds, tokens, calls, strict=True)
  ]
