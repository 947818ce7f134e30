"""Speculation at a given acceptance, compared with plain decoding and assisted HF.

The draft runs in full; its tokens are replaced by the target's own greedy continuation,
in which each token is corrupted with probability 1 - alpha. All systems use the same
corrupted tokens, so speed is measured independently of learning. Encoder time is
included for all systems. One thread, CPU time.

`--draft` selects how the draft is served: "float32", "int8" (decoder and head in 8
bits), "shortlist" (a head of 4,096 tokens) or "both". Several choices run interleaved,
as an ablation. `--without_native` adds two variants of each of our systems: without the
C++ attention, and without any C++ code (osd_jax/native). The effect of a lighter draft
on acceptance is not measured here; `osd evaluate` measures it on real requests.

  python benchmarks/bench_speculative.py [--target flan-t5-base] [--alphas .7 .8 .9]
      [--drafted 3 7] [--draft float32 both] [--without_native] [--no_rivals]

All systems are in memory together. With a target of a billion parameters, which takes
5 GB per copy, choose a single `--rival_types`.
"""

import argparse
import dataclasses

import contenders
import measure
import scripting

from osd_jax import native
from osd_jax.engine import engine
from osd_jax.engine.requests import DecodingConfig
from osd_jax.models import shapes

ASKED = {
  "flan-t5-base": {0.7: 1.4, 0.8: 1.6, 0.9: 2.0},
  "flan-t5-large": {0.7: 1.9, 0.8: 2.2, 0.9: 3.0},
  "tinyllama-1.1b": {0.8: 1.8},
  "llama-3.2-1b": {0.8: 1.8},
}
ASKED_OVER_ASSISTED = {
  ("flan-t5-base", "float32"): 2.8,
  ("flan-t5-base", "bfloat16"): 1.9,
  ("flan-t5-large", "float32"): 2.4,
  ("flan-t5-large", "bfloat16"): 1.5,
  ("tinyllama-1.1b", "float32"): 2.5,
  ("llama-3.2-1b", "float32"): 2.5,
}
RIVAL_ALPHA = 0.8
WITHOUT = {"XLA attention": ("attention",), "XLA alone": native.PARTS}
SERVING = {
  "float32": shapes.DraftServing(),
  "int8": shapes.DraftServing(int8=True),
  "shortlist": shapes.DraftServing(shortlist=4096),
  "both": shapes.DraftServing(int8=True, shortlist=4096),
}


class WithoutNative:
  """One of our systems with some C++ kernels replaced by XLA."""

  def __init__(self, competitor: contenders.Ours, parts: tuple[str, ...]):
    self._competitor, self._parts, self.tokens = competitor, parts, competitor.tokens

  def __call__(self):
    with native.off(*self._parts):
      return self._competitor()


class Bench:
  """One target with its prompts, its continuations and the systems that serve them."""

  def __init__(self, args: argparse.Namespace):
    """Creates the target and computes its continuations by plain decoding."""
    self.args = args
    self.config = contenders.shape(args.target)
    self.draft_config = dataclasses.replace(  # the vocabulary is the target's
      contenders.shape(args.drafts_with), vocab_size=self.config.vocab_size
    )
    self.target = contenders.random_model(self.config)
    self.sources = contenders.prompts(args.prompts, args.source, self.config.vocab_size)
    self._plain = engine.Engine(self._decoding(1), *self.target)
    self.plain = contenders.Ours(self._plain, self.sources)
    self.tokens = scripting.continuations(self._plain, self.sources)

  def ours(self, alpha: float, drafted: int, draft: str) -> contenders.Ours:
    """Returns speculative decoding with a draft served as `SERVING[draft]`."""
    model, params = contenders.random_model(self.draft_config, 1, SERVING[draft])
    decoder = scripting.speculative(
      self._decoding(drafted),
      self.target,
      (model, params),
      self.sources,
      self.tokens,
      [alpha] * len(self.sources),
    )
    scripting.share_target(decoder, self._plain)
    return contenders.Ours(decoder, self.sources)

  def theirs(self, dtype: str, drafted: int):
    """Returns assisted generation with scripts corrupted in the same way."""
    import rivals

    model = rivals.random_model(self.config, dtype)
    assistant = rivals.random_model(self.draft_config, dtype, seed=1)
    return rivals.Scripted(
      model, assistant, self.sources, self.args.length, drafted, RIVAL_ALPHA
    )

  def _decoding(self, drafted: int) -> DecodingConfig:
    return contenders.decoding(1, self.args.source, self.args.length, drafted)


def contenders_of(bench: Bench) -> dict:
  """Returns all systems by name."""
  args = bench.args
  competitors = {"plain": bench.plain}
  for alpha in args.alphas:
    for drafted in args.drafted:
      for draft in args.draft:
        name = f"alpha {alpha}, K {drafted}, {draft} draft"
        competitors[name] = bench.ours(alpha, drafted, draft)
  if args.without_native:
    for name, competitor in list(competitors.items()):
      for how, parts in WITHOUT.items():
        competitors[f"{name}, {how}"] = WithoutNative(competitor, parts)
  if not args.no_rivals:
    for dtype in args.rival_types:
      competitors[f"HF assisted {dtype}"] = bench.theirs(dtype, args.rival_drafted)
  return competitors


def native_ones(competitors: dict, alpha: float) -> list[str]:
  """Returns the names of our systems at one acceptance that use the C++ kernels."""
  return [
    name
    for name, competitor in competitors.items()
    if name.startswith(f"alpha {alpha},") and not isinstance(competitor, WithoutNative)
  ]


def best(times: dict, names: list[str], clock: str) -> str:
  """Returns the name of the fastest system."""
  return min(names, key=lambda name: times[name].milliseconds(clock))


def rows_of(bench: Bench) -> list[dict]:
  """Measures all systems, interleaved."""
  args = bench.args
  clock = measure.clock_of(args.threads)
  competitors = contenders_of(bench)
  times = measure.interleave(competitors, args.turns)
  figures, bounds = {}, {}

  def row(figure: str, value: float, asked: float | None = None) -> None:
    figures[figure], bounds[figure] = value, f">= {asked}" if asked else ""

  if args.without_native:
    for how in WITHOUT:
      other = f"plain, {how}"
      row(f"plain over {other}", measure.ratio(times, other, "plain", clock))
  for name, competitor in competitors.items():
    row(f"{name}, ms/token", times[name].milliseconds(clock) / competitor.tokens)
  for alpha in args.alphas:
    for name in competitors:
      if name.startswith(f"alpha {alpha},"):
        row(f"{name}, over plain", measure.ratio(times, "plain", name, clock))
    mine = native_ones(competitors, alpha)
    fastest = best(times, mine, clock)
    row(
      f"alpha {alpha}, the fastest of these, over plain",
      measure.ratio(times, "plain", fastest, clock),
      ASKED.get(args.target, {}).get(alpha),
    )
  if not args.no_rivals:
    mine = native_ones(competitors, RIVAL_ALPHA)
    for dtype in args.rival_types:
      row(
        f"tokens/s over HF assisted {dtype}, alpha {RIVAL_ALPHA}",
        measure.ratio(times, f"HF assisted {dtype}", best(times, mine, clock), clock),
        ASKED_OVER_ASSISTED.get((args.target, dtype)),
      )
  drafts = f", drafts with {args.drafts_with}" * (args.drafts_with != "t5-small")
  case = args.target + drafts + ", ablation" * args.without_native
  return measure.rows(case, f"{clock}, {args.threads} thread(s)", figures, bounds)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--target", default="flan-t5-base")
  parser.add_argument("--drafts_with", default="t5-small")
  parser.add_argument("--alphas", nargs="+", type=float, default=[0.7, 0.8, 0.9])
  parser.add_argument("--drafted", nargs="+", type=int, default=[3, 7])
  parser.add_argument("--draft", nargs="+", default=["both"], choices=list(SERVING))
  parser.add_argument("--rival_drafted", type=int, default=3)
  parser.add_argument("--rival_types", nargs="+", default=["float32", "bfloat16"])
  parser.add_argument("--prompts", type=int, default=4)
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--length", type=int, default=64)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--threads", type=int, default=1)
  parser.add_argument("--without_native", action="store_true")
  parser.add_argument("--no_rivals", action="store_true")
  args = parser.parse_args()
  measure.restart(args.threads)
  measure.report("speculative", rows_of(Bench(args)))


if __name__ == "__main__":
  main()
