"""Requests served by scripted drafts, and what one round of them takes.

A script is right only while the target emits what the script was made of. Where
verification rounds differently from plain decoding (bfloat16, batches of another
shape), one token that differs makes the rest of a script wrong; `speculative` therefore
makes scripts of the outputs of the very decoder that they are for.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import contenders
import measure
import numpy as np

from osd_jax import base
from osd_jax.engine import engine

ATTEMPTS = 32  # each makes the scripts right up to one more difference, at least


def continuations(decoder: engine.Engine, sources: np.ndarray) -> np.ndarray:
  """What a decoder emits [N, T] for sources [N, S] of full length."""
  found = decoder.run([engine.Request(tokens=source) for source in sources])
  return np.stack([done.tokens for done in found])


def speculative(
  config: engine.DecodingConfig,
  target: tuple[base.Model, base.Params],
  draft: tuple[base.Model, base.Params],
  sources: np.ndarray,
  tokens: np.ndarray,
  alphas: Sequence[float] | np.ndarray,
) -> engine.Engine:
  """A decoder whose draft is right with a probability of one's choice.

  Args:
    config: shapes.
    target: model and parameters.
    draft: what runs in full behind the script.
    sources: [N, S] int32, all different.
    tokens: [N, T] int32, the target's continuations as plain decoding has them.
    alphas: [N], of each prompt.
  """
  model = contenders.scripted(draft[0])
  written = scripts(draft, sources, tokens, alphas)
  decoder = engine.Engine(config, *target, model, written)
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
  """Parameters of the scripted draft; arguments as of `speculative`."""
  size = draft[0].vocab_size
  drafted = [
    contenders.corrupted(tokens[index : index + 1], alpha, size, seed=index)
    for index, alpha in enumerate(alphas)
  ]
  return contenders.Scripts(draft[1], sources, np.concatenate(drafted))


def share_target(decoder: engine.Engine, other: engine.Engine) -> None:
  """Lets two decoders of one target serve from one copy of it: a gigabyte each."""
  decoder._served = decoder._served._replace(target=other._served.target)


class FirstTokens:
  """The requests of a `contenders.Ours`, cut to one token: prefill and one round.

  Attributes:
    tokens: output tokens of a call.
  """

  def __init__(self, decoder: engine.Engine, sources: np.ndarray):
    """Answers all `sources` [N, S] at each call."""
    self._decoder = decoder
    self._requests = [engine.Request(tokens=source, max_length=1) for source in sources]
    self.tokens = len(sources)

  def __call__(self) -> list[engine.Finished]:
    return self._decoder.run(self._requests)


def rounds(found: Sequence[engine.Finished], rows: int) -> int:
  """Rounds that were run for requests which waited for one of the rows.

  A row that is free takes the next request; empty rows at the end run along.

  Args:
    found: answers in the order of the requests.
    rows: B.
  """
  free = [0] * rows
  for done in found:
    heapq.heapreplace(free, free[0] + done.target_calls)
  return max(free)


def round_ms(
  times: Mapping[str, measure.Times],
  found: Mapping[str, Sequence[engine.Finished]],
  whole: str,
  first: str,
  rows: int,
  clock: str,
) -> float:
  """Milliseconds of a round (of a step, in plain decoding), without prefill.

  (time of the whole requests - time of their first tokens) / rounds between them.

  Args:
    times: of the contenders.
    found: their answers.
    whole: name of the `contenders.Ours`.
    first: name of the `FirstTokens` for the same requests.
    rows: B.
    clock: "cpu" or "wall".
  """
  spent = times[whole].milliseconds(clock) - times[first].milliseconds(clock)
  return spent / (rounds(found[whole], rows) - rounds(found[first], rows))


def draft_acceptance(found: Sequence[engine.Finished]) -> float:
  """Accepted / drafted tokens."""
  return sum(done.accepted for done in found) / sum(done.drafted for done in found)


def answers(people: Mapping[str, Any]) -> dict[str, list[engine.Finished]]:
  """What every contender answers; compiles what `measure.by_turns` would have to."""
  return {name: serve() for name, serve in people.items()}
