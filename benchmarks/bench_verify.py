"""What verifying n tokens costs: one call of the target beside the memory bound.

Compiled loops of calls by turns, one thread, CPU time; the bound is that of one step of
one token. Speculation needs n = K + 1 tokens for the price of one.

  python benchmarks/bench_verify.py [--shapes flan-t5-base] [--counts 1 2 3 4 6 8]
"""

import argparse
import functools

import contenders
import jax
import measure
import numpy as np

from osd_jax import base
from osd_jax.measuring import timing

ASKED = {
  ("flan-t5-base", 4): {"over the memory bound": "<= 2.0"},
  ("flan-t5-base", 8): {"over the memory bound": "<= 2.5"},
}
CALLS = 16


def loops(name: str, counts: list[int], source: int, target: int) -> dict:
  """By number of tokens, a compiled loop that feeds them `CALLS` times."""
  config = contenders.shape(name)
  model, params = contenders.random_model(config)
  prompt = contenders.prompts(1, source, config.vocab_size)
  served = jax.jit(model.prepare)(params)
  prefill = jax.jit(model.prefill, static_argnums=3)
  cache = prefill(served, prompt, prompt != base.PAD_ID, target)

  def feed(count: int) -> None:
    calls = timing.feed(model, count, served, cache, np.int32(CALLS))
    jax.block_until_ready(calls)

  return {str(count): functools.partial(feed, count) for count in counts}


def rows_of(given: argparse.Namespace, name: str) -> list[dict]:
  """Measures one shape."""
  clock = measure.clock_of(given.threads)
  times = measure.by_turns(
    loops(name, given.counts, given.source, given.target), given.turns
  )
  speed = measure.bandwidth(given.threads)
  read = contenders.step_bytes(contenders.shape(name), 1, given.source, given.target)
  bound = read / speed * 1e3
  shown = f"{clock}, {given.threads} thread(s)"
  found = measure.rows(name, shown, {"memory bound, ms": bound})
  for count in given.counts:
    ms = times[str(count)].milliseconds(clock) / CALLS
    figures = {
      "ms a call": ms,
      "over the memory bound": ms / bound,
      "over one token": measure.ratio(times, str(count), str(given.counts[0]), clock),
    }
    found += measure.rows(
      f"{name}, {count} tokens", shown, figures, ASKED.get((name, count))
    )
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shapes", nargs="+", default=["flan-t5-base"])
  parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--target", type=int, default=73)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--threads", type=int, default=1)
  given = parser.parse_args()
  measure.restart(given.threads)
  for name in given.shapes:
    measure.report("verify", rows_of(given, name))


if __name__ == "__main__":
  main()
