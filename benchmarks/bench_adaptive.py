"""Adaptive K compared with plain decoding and every fixed K, at several acceptances.

Weights are random; the draft runs in full and is scripted to be right with probability
alpha. All systems answer the same requests, interleaved, prefill included. Adaptive K
starts from scratch at each alpha, and its probes are part of the measured time. Ratios
are taken between total times.

  python benchmarks/bench_adaptive.py [--alphas .3 .5 .7 .8 .9] [--rows 1]
      [--target flan-t5-base] [--draft t5-small] [--candidates 0 1 3 5 7] [--threads 1]
"""

import argparse
import dataclasses

import contenders
import measure
import numpy as np
import scripting

from osd_jax.engine import engine
from osd_jax.engine.requests import AdaptiveConfig

ASKED = ">= 0.97"  # over plain decoding at the smallest alpha, else over the best K
PLAIN, ADAPTIVE = "plain", "adaptive"


def name_of(num_draft_tokens: int) -> str:
  return f"K {num_draft_tokens}"


class Bench:
  """A pair of models, and separate prompts for every alpha."""

  def __init__(self, args: argparse.Namespace, rows: int):
    """Creates the pair and the scripts of the draft."""
    self._args, self._rows = args, rows
    self._target = contenders.random_model(contenders.shape(args.target))
    self._draft = contenders.random_model(contenders.shape(args.draft), seed=1)
    self._config = contenders.decoding(
      rows, args.source_length, args.length, args.candidates[-1]
    )
    each = args.requests * rows
    sources = contenders.prompts(
      each * len(args.alphas), args.source_length, self._target[0].vocab_size
    )
    self._plain = engine.Engine(self._config, *self._target)
    tokens = scripting.continuations(self._plain, sources)
    alphas = np.repeat(args.alphas, each)
    self._fixed = {}
    for k in args.candidates[1:]:
      config = dataclasses.replace(self._config, num_draft_tokens=k)
      self._fixed[k] = scripting.speculative(
        config, self._target, self._draft, sources, tokens, alphas
      )
      scripting.share_target(self._fixed[k], self._plain)
    self._scripts = scripting.scripts(self._draft, sources, tokens, alphas)
    self._parts = dict(
      zip(args.alphas, np.split(sources, len(args.alphas)), strict=True)
    )

  def rows_of(self, alpha: float) -> list[dict]:
    """Measures one alpha and returns its rows."""
    args = self._args
    clock = measure.clock_of(args.threads)
    part, adaptive = self._parts[alpha], self._adaptive()
    competitors = (
      {PLAIN: contenders.Ours(self._plain, part)}
      | {name_of(k): contenders.Ours(one, part) for k, one in self._fixed.items()}
      | {ADAPTIVE: contenders.Ours(adaptive, part)}
    )
    times = measure.interleave(competitors, args.turns)
    spent = {name: float(np.sum(getattr(times[name], clock))) for name in competitors}
    tokens = competitors[PLAIN].tokens * args.turns
    best = min(list(spent)[1:-1], key=spent.__getitem__)
    answers = competitors[ADAPTIVE]()
    figures = {
      f"{name}, ms/token": spent[name] * 1e3 / tokens for name in competitors
    } | {
      "best fixed K": float(best.split()[1]),
      "adaptive, drafted per target call": sum(answer.drafted for answer in answers)
      / sum(answer.target_calls for answer in answers),
      "adaptive, speed over plain": spent[PLAIN] / spent[ADAPTIVE],
      "adaptive, speed over the best fixed K": spent[best] / spent[ADAPTIVE],
    }
    against = "plain" if alpha == min(args.alphas) else "the best fixed K"
    goals = {f"adaptive, speed over {against}": ASKED}
    count = f"{self._rows} row{'s' * (self._rows > 1)}"
    case = f"{args.target} + {args.draft}, {count}, alpha {alpha:g}"
    return measure.rows(case, f"{clock}, {args.threads} thread(s)", figures, goals)

  def _adaptive(self) -> engine.Engine:
    """Returns a new decoder that knows its costs but has seen no acceptance."""
    policy = AdaptiveConfig(candidates=tuple(self._args.candidates))
    decoder = engine.Engine(
      dataclasses.replace(self._config, adaptive=policy),
      *self._target,
      contenders.scripted(self._draft[0]),
      self._scripts,
    )
    decoder.warm_up()
    return decoder


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--target", default="flan-t5-base")
  parser.add_argument("--draft", default="t5-small")
  parser.add_argument("--candidates", nargs="+", type=int, default=[0, 1, 3, 5, 7])
  parser.add_argument(
    "--alphas", nargs="+", type=float, default=[0.3, 0.5, 0.7, 0.8, 0.9]
  )
  parser.add_argument("--rows", nargs="+", type=int, default=[1])
  parser.add_argument(
    "--requests", type=int, default=4, help="requests per row and repetition"
  )
  parser.add_argument("--source_length", type=int, default=64)
  parser.add_argument("--length", type=int, default=64)
  parser.add_argument("--turns", type=int, default=4)
  parser.add_argument("--threads", type=int, default=1)
  args = parser.parse_args()
  measure.restart(args.threads)
  for rows in args.rows:
    bench = Bench(args, rows)
    for alpha in args.alphas:
      measure.report("adaptive", bench.rows_of(alpha))


if __name__ == "__main__":
  main()
