"""Speculation with several rows in flight, and the acceptance it needs to pay.

Weights are random; the draft runs in full and is scripted to be right with probability
alpha. Tokens/s cover whole requests, prefill included, with `--waves` requests per row.
The break-even alpha solves, for K drafted tokens,

  (1 - alpha^(K + 1)) / (1 - alpha) = round / plain step

where both times exclude prefill and are measured in the same run (see
`scripting.round_ms`); the time of a round does not depend on alpha. A break-even of 1
means that speculation cannot pay.

  python benchmarks/bench_batching.py [--rows 1 2 4 8 16] [--alphas .5 .7 .9]
      [--target flan-t5-base] [--draft t5-small] [--drafted 3] [--threads 1]
"""

import argparse

import contenders
import jax
import measure
import numpy as np
import scripting

from osd_jax.costs.table import expected_tokens
from osd_jax.engine import engine

PLAIN, PLAIN_FIRST, FIRST = "plain", "plain, first tokens", "first tokens"


def break_even(cost: float, drafted: int) -> float:
  """Returns the alpha at which speculative and plain decoding are equally fast.

  Args:
    cost: time of a round / time of a plain step.
    drafted: K.
  """
  low, high = 0.0, 1.0
  for _ in range(50):
    middle = (low + high) / 2
    if expected_tokens(middle, drafted) < cost:
      low = middle
    else:
      high = middle
  return high


def name_of(alpha: float) -> str:
  return f"alpha {alpha:g}"


def create_decoders(args: argparse.Namespace, rows: int) -> dict:
  """Returns the decoders to time with B rows; every alpha has its own prompts."""
  target = contenders.random_model(contenders.shape(args.target))
  draft = contenders.random_model(contenders.shape(args.draft), seed=1)
  config = contenders.decoding(rows, args.source_length, args.length, args.drafted)
  each = args.waves * rows
  sources = contenders.prompts(
    each * len(args.alphas), args.source_length, target[0].vocab_size
  )
  plain = engine.Engine(config, *target)
  tokens = scripting.continuations(plain, sources)
  alphas = np.repeat(args.alphas, each)
  decoder = scripting.speculative(config, target, draft, sources, tokens, alphas)
  parts = np.split(sources, len(args.alphas))
  return {
    PLAIN: contenders.Ours(plain, parts[0]),
    PLAIN_FIRST: scripting.FirstTokens(plain, parts[0]),
    FIRST: scripting.FirstTokens(decoder, parts[0]),
  } | {
    name_of(alpha): contenders.Ours(decoder, part)
    for alpha, part in zip(args.alphas, parts, strict=True)
  }


def rows_of(args: argparse.Namespace, rows: int) -> list[dict]:
  """Measures one batch size."""
  clock = measure.clock_of(args.threads)
  serving = create_decoders(args, rows)
  answers = scripting.answers(serving)
  times = measure.interleave(serving, args.turns)
  names = [name_of(alpha) for alpha in args.alphas]
  step = scripting.round_ms(times, answers, PLAIN, PLAIN_FIRST, rows, clock)
  round_ = float(
    np.median(
      [scripting.round_ms(times, answers, name, FIRST, rows, clock) for name in names]
    )
  )
  figures = {
    f"{name}, tokens/s": serving[name].tokens / times[name].milliseconds(clock) * 1e3
    for name in (PLAIN, *names)
  }
  for name in names:
    figures[f"{name}, over plain"] = measure.ratio(times, PLAIN, name, clock)
    figures[f"{name}, drafted tokens accepted"] = scripting.draft_acceptance(
      answers[name]
    )
  figures |= {
    "plain step, ms": step,
    "round, ms": round_,
    "round over plain step": round_ / step,
    "break-even alpha": break_even(round_ / step, args.drafted),
  }
  count = f"{rows} row{'s' * (rows > 1)}"
  case = f"{args.target} + {args.draft}, K {args.drafted}, {count}"
  return measure.rows(case, f"{clock}, {args.threads} thread(s)", figures)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--target", default="flan-t5-base")
  parser.add_argument("--draft", default="t5-small")
  parser.add_argument("--drafted", type=int, default=3)
  parser.add_argument("--alphas", nargs="+", type=float, default=[0.5, 0.7, 0.9])
  parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16])
  parser.add_argument("--waves", type=int, default=2, help="requests per row")
  parser.add_argument("--source_length", type=int, default=64)
  parser.add_argument("--length", type=int, default=64)
  parser.add_argument("--turns", type=int, default=3)
  parser.add_argument("--threads", type=int, default=1)
  args = parser.parse_args()
  measure.restart(args.threads)
  for rows in args.rows:
    measure.report("batching", rows_of(args, rows))
    jax.clear_caches()


if __name__ == "__main__":
  main()
