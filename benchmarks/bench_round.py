"""Where a round's time goes: drafting, verification, and everything outside the models.

Whole requests give the time of a round (without prefill); compiled loops of the models'
calls alone give what drafting and verification take, all by turns. A round drafts with
one call that feeds two tokens and K - 1 that feed one. The draft is unrelated to the
target: a round takes as long whatever is accepted.

  python benchmarks/bench_round.py [--target flan-t5-base] [--draft t5-small]
      [--served both] [--drafted 3] [--turns 7] [--threads 1]
"""

import argparse
import functools

import contenders
import jax
import measure
import numpy as np
import scripting
from bench_speculative import SERVING

from osd_jax.decoding import calls, costs, slots
from osd_jax.decoding import state as state_lib

CALLS = 16
ASKED = "<= 0.02"
WHOLE, FIRST, VERIFY, TWO, ONE = "round", "first tokens", "verify", "feed 2", "feed 1"


def alone(model, served, prompts: np.ndarray, width: int, length: int):
  """A compiled loop of a model's calls that feed `width` tokens."""
  prefill = jax.jit(model.prefill, static_argnums=3)
  cache = prefill(served, prompts, prompts != 0, state_lib.buffer_length(length))

  def feed() -> None:
    jax.block_until_ready(costs.feed(model, width, served, cache, np.int32(CALLS)))

  return feed


def people_of(given: argparse.Namespace) -> dict:
  """Everybody who is timed, by name."""
  target = contenders.random_model(contenders.shape(given.target))
  draft = contenders.random_model(
      contenders.shape(given.draft), 1, SERVING[given.served]
  )
  prompts = contenders.prompts(1, given.source, target[0].vocab_size)
  config = contenders.decoding(1, given.source, given.length, given.drafted)
  decoder = slots.Slots(config, *target, *draft)
  drafts = calls.prepare(*draft)
  fed = functools.partial(alone, prompts=prompts, length=given.length)
  return {
      WHOLE: contenders.Ours(decoder, prompts),
      FIRST: scripting.FirstTokens(decoder, prompts),
      VERIFY: fed(target[0], calls.prepare(*target), width=given.drafted + 1),
      TWO: fed(draft[0], drafts, width=2),
      ONE: fed(draft[0], drafts, width=1),
  }


def rows_of(given: argparse.Namespace) -> list[dict]:
  """Measures by turns; what is left of a round is what the models do not take."""
  clock = "cpu" if given.threads == 1 else "wall"
  people = people_of(given)
  found = scripting.answers({name: people[name] for name in (WHOLE, FIRST)})
  times = measure.by_turns(people, given.turns)
  whole = scripting.round_ms(times, found, WHOLE, FIRST, 1, clock)
  verify, two, one = (
      times[name].milliseconds(clock) / CALLS for name in (VERIFY, TWO, ONE)
  )
  drafting = two + (given.drafted - 1) * one
  case = f"{given.target} + {given.draft} ({given.served}), K {given.drafted}"
  figures = {
      "a round, ms": whole,
      "verification alone, ms": verify,
      "drafting alone, ms": drafting,
      "of that the first step, ms": two,
      "outside the two models, share": 1 - (verify + drafting) / whole,
  }
  return [
      {
          "case": case,
          "clock": f"{clock}, {given.threads} thread(s)",
          "figure": figure,
          "value": value,
          "asked": ASKED if "outside" in figure else "",
      }
      for figure, value in figures.items()
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--target", default="flan-t5-base")
  parser.add_argument("--draft", default="t5-small")
  parser.add_argument("--served", default="both", choices=list(SERVING))
  parser.add_argument("--drafted", type=int, default=3)
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--length", type=int, default=64)
  parser.add_argument("--turns", type=int, default=7)
  parser.add_argument("--threads", type=int, default=1)
  given = parser.parse_args()
  measure.restart(given.threads)
  measure.report("round", rows_of(given))


if __name__ == "__main__":
  main()
