"""Where a round's time goes: drafting, verification, and everything outside the models.

Whole requests give the time of a round (without prefill). A compiled loop of nothing
but the models' calls, in a round's order, gives what they take: a draft step of two
tokens, K - 1 of one, a verification of K + 1; a token is no choice there, it only
depends on the logits before. One of verifications alone gives their part of it, all by
turns. (Draft steps alone would find their weights in the processor's caches.) The
draft is unrelated to the target: a round takes as long whatever is accepted.

  python benchmarks/bench_round.py [--target flan-t5-base] [--draft t5-small]
      [--served both] [--drafted 3] [--turns 7] [--threads 1]
"""

import argparse
import functools

import contenders
import jax
import jax.numpy as jnp
import measure
import numpy as np
import scripting
from bench_speculative import SERVING

from osd_jax.decoding import state as state_lib
from osd_jax.serving import calls, slots

CALLS = 16
ASKED = {"outside the two models, share": "<= 0.02"}
WHOLE, FIRST, MODELS, VERIFY = "round", "first tokens", "both models", "verify"


@functools.partial(jax.jit, static_argnums=0)
def feed(steps, served, caches, count):
  """Runs `steps` of (whose, model, width) `count` times, from the same position."""
  starts = {who: cache.length for who, cache in caches.items()}

  def turn(_, carry):
    token, caches = carry
    for who, model, width in steps:
      tokens = jnp.broadcast_to(token[:, None], (token.shape[0], width))
      logits, cache = model.decode(served[who], tokens, caches[who])
      token = (logits[:, -1, -1] > 0).astype(jnp.int32)
      caches = {**caches, who: cache}
    rewound = {who: c.replace(length=starts[who]) for who, c in caches.items()}
    return token, rewound

  token = jnp.zeros(starts["target"].shape, jnp.int32)
  return jax.lax.fori_loop(0, count, turn, (token, caches))


def people_of(given: argparse.Namespace) -> dict:
  """Everybody who is timed, by name."""
  pair = {
    "target": contenders.random_model(contenders.shape(given.target)),
    "draft": contenders.random_model(
      contenders.shape(given.draft), 1, SERVING[given.served]
    ),
  }
  prompts = contenders.prompts(1, given.source, pair["target"][0].vocab_size)
  config = contenders.decoding(1, given.source, given.length, given.drafted)
  decoder = slots.Slots(config, *pair["target"], *pair["draft"])
  length = state_lib.buffer_length(given.length)
  served = {who: calls.prepare(*member) for who, member in pair.items()}
  caches = {
    who: jax.jit(model.prefill, static_argnums=3)(
      served[who], prompts, prompts != 0, length
    )
    for who, (model, _) in pair.items()
  }

  def alone(*steps):
    named = tuple((who, pair[who][0], width) for who, width in steps)
    return lambda: jax.block_until_ready(feed(named, served, caches, np.int32(CALLS)))

  verify = ("target", given.drafted + 1)
  drafting = (("draft", 2), *(("draft", 1),) * (given.drafted - 1))
  return {
    WHOLE: contenders.Ours(decoder, prompts),
    FIRST: scripting.FirstTokens(decoder, prompts),
    MODELS: alone(*drafting, verify),
    VERIFY: alone(verify),
  }


def rows_of(given: argparse.Namespace) -> list[dict]:
  """Measures by turns; what is left of a round is what the models do not take."""
  clock = measure.clock_of(given.threads)
  people = people_of(given)
  found = scripting.answers({name: people[name] for name in (WHOLE, FIRST)})
  times = measure.by_turns(people, given.turns)
  whole = scripting.round_ms(times, found, WHOLE, FIRST, 1, clock)
  models, verify = (
    times[name].milliseconds(clock) / CALLS for name in (MODELS, VERIFY)
  )
  case = f"{given.target} + {given.draft} ({given.served}), K {given.drafted}"
  figures = {
    "a round, ms": whole,
    "both models alone, ms": models,
    "verification alone, ms": verify,
    "drafting (the difference), ms": models - verify,
    "outside the two models, share": 1 - models / whole,
  }
  return measure.rows(case, f"{clock}, {given.threads} thread(s)", figures, ASKED)


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
