"""Requests served by scripted drafts, and the time of one round.

A script is right only as long as the target emits the tokens from which the script was
made. Where verification rounds differently from plain decoding (bfloat16, batches of
another shape), one different token makes the rest of a script wrong. `speculative`
therefore makes the scripts from the outputs of the same decoder that will use them.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import contenders
import measure
import numpy as np

from osd_jax import base
from osd_jax.engine import engine
from osd_jax.engine.requests import DecodingConfig, Finished, Request

ATTEMPTS = 32  # each attempt removes at least one difference


def continuations(decoder: engine.Engine, sources: np.ndarray) -> np.ndarray:
  """Returns the tokens [N, T] that a decoder emits for full-length sources [N, S]."""
  answers = decoder.run([Request(tokens=source) for source in sources])
  return np.stack([answer.tokens for answer in answers])


def speculative(
  config: DecodingConfig,
  target: tuple[base.Model, base.Params],
  draft: tuple[base.Model, base.Params],
  sources: np.ndarray,
  tokens: np.ndarray,
  alphas: Sequence[float] | np.ndarray,
) -> engine.Engine:
  """Returns a decoder whose draft is right with given probabilities.

  Args:
    config: decoding config.
    target: model and parameters.
    draft: model and parameters; the model runs in full.
    sources: [N, S] int32, all different.
    tokens: [N, T] int32, the target's continuations under plain decoding.
    alphas: [N], probability that a drafted token is right, per prompt.
  """
  model = contenders.scripted(draft[0])
  params = scripts(draft, sources, tokens, alphas)
  decoder = engine.Engine(config, *target, model, params)
  for _ in range(ATTEMPTS):
    emitted = continuations(decoder, sources)
    if np.array_equal(emitted, tokens):
      break
    tokens = emitted
    decoder.swap(scripts(draft, sources, tokens, alphas), 0)
  return decoder


def scripts(
  draft: tuple[base.Model, base.Params],
  sources: np.ndarray,
  tokens: np.ndarray,
  alphas: Sequence[float] | np.ndarray,
) -> contenders.Scripts:
  """Returns parameters of the scripted draft; for arguments see `speculative`."""
  size = draft[0].vocab_size
  drafted = [
    contenders.corrupted(tokens[index : index + 1], alpha, size, seed=index)
    for index, alpha in enumerate(alphas)
  ]
  return contenders.Scripts(draft[1], sources, np.concatenate(drafted))


def share_target(decoder: engine.Engine, other: engine.Engine) -> None:
  """Makes two decoders share one served copy of the target, to save memory."""
  decoder.served = decoder.served._replace(target=other.served.target)


class FirstTokens:
  """The requests of a `contenders.Ours`, cut to one token: prefill and one round.

  Attributes:
    tokens: output tokens per call.
  """

  def __init__(self, decoder: engine.Engine, sources: np.ndarray):
    """Answers all `sources` [N, S] at each call."""
    self._decoder = decoder
    self._requests = [Request(tokens=source, max_new_tokens=1) for source in sources]
    self.tokens = len(sources)

  def __call__(self) -> list[Finished]:
    return self._decoder.run(self._requests)


def rounds(found: Sequence[Finished], rows: int) -> int:
  """Returns the number of rounds that a batch of B rows ran for all requests.

  A free row takes the next request; at the end some rows stay empty.

  Args:
    found: answers in the order of the requests.
    rows: B.
  """
  free = [0] * rows
  for answer in found:
    heapq.heapreplace(free, free[0] + answer.target_calls)
  return max(free)


def round_ms(
  times: Mapping[str, measure.Times],
  found: Mapping[str, Sequence[Finished]],
  whole: str,
  first: str,
  rows: int,
  clock: str,
) -> float:
  """Returns the milliseconds of a round (in plain decoding: a step) without prefill.

  This is (time of whole requests - time of first tokens) / (difference in rounds).

  Args:
    times: times by name.
    found: answers by name.
    whole: name of the `contenders.Ours`.
    first: name of the `FirstTokens` for the same requests.
    rows: B.
    clock: "cpu" or "wall".
  """
  spent = times[whole].milliseconds(clock) - times[first].milliseconds(clock)
  return spent / (rounds(found[whole], rows) - rounds(found[first], rows))


def draft_acceptance(found: Sequence[Finished]) -> float:
  """Returns accepted / drafted tokens."""
  return sum(answer.accepted for answer in found) / sum(
    answer.drafted for answer in found
  )


def answers(competitors: Mapping[str, Any]) -> dict[str, list[Finished]]:
  """Returns the answers of every system; this also compiles the systems."""
  return {name: serve() for name, serve in competitors.items()}
