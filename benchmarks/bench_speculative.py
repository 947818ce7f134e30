"""Speculation at a given acceptance: ours beside our own greedy and beside assisted HF.

The draft runs in full; its tokens are replaced by the target's own greedy continuation,
each corrupted with probability 1 - alpha, the same for everybody. So speed is measured
apart from learning. Encoders count on both sides. One thread, CPU time.

The draft is served as `--draft` says: "float32", "int8" (decoder and head in 8 bits),
"shortlist" (a head of 4,096 tokens), or "both"; all that are named run by turns, which
makes the ablation; with `--without_native` all of ours twice more, without the
attention in C++ (osd_jax/native) and without anything there. What a lighter draft
costs in acceptance, `osd evaluate` tells on real requests.

  python benchmarks/bench_speculative.py [--target flan-t5-base] [--alphas .7 .8 .9]
      [--drafted 3 7] [--draft float32 both] [--without_native] [--no_rivals]

All are in memory together: of a target of a billion parameters, which takes 5 GB each
time, name one of `--rival_types`.
"""

import argparse
import dataclasses

import contenders
import measure
import scripting

from osd_jax import native
from osd_jax.engine import engine
from osd_jax.models import t5

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
  "float32": t5.DraftServing(),
  "int8": t5.DraftServing(int8=True),
  "shortlist": t5.DraftServing(shortlist=4096),
  "both": t5.DraftServing(int8=True, shortlist=4096),
}


class WithoutNative:
  """Somebody of ours for whom XLA computes what C++ would."""

  def __init__(self, person: contenders.Ours, parts: tuple[str, ...]):
    self._person, self._parts, self.tokens = person, parts, person.tokens

  def __call__(self):
    with native.off(*self._parts):
      return self._person()


class Bench:
  """One target with its prompts, its continuations and whoever serves them."""

  def __init__(self, given: argparse.Namespace):
    """Makes the target and decodes its continuations plainly."""
    self.given = given
    self.config = contenders.shape(given.target)
    self.draft_config = dataclasses.replace(  # of the draft's size, for this target
      contenders.shape(given.drafts_with), vocab_size=self.config.vocab_size
    )
    self.target = contenders.random_model(self.config)
    self.sources = contenders.prompts(
      given.prompts, given.source, self.config.vocab_size
    )
    self._plain = engine.Engine(self._decoding(1), *self.target)
    self.plain = contenders.Ours(self._plain, self.sources)
    self.tokens = scripting.continuations(self._plain, self.sources)

  def ours(self, alpha: float, drafted: int, draft: str) -> contenders.Ours:
    """Speculation with a draft served in one of the ways of `SERVING`."""
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
    """Assisted generation, every prompt with the same corrupted continuation."""
    import rivals

    model = rivals.random_model(self.config, dtype)
    assistant = rivals.random_model(self.draft_config, dtype, seed=1)
    return rivals.Scripted(
      model, assistant, self.sources, self.given.length, drafted, RIVAL_ALPHA
    )

  def _decoding(self, drafted: int) -> engine.DecodingConfig:
    return contenders.decoding(1, self.given.source, self.given.length, drafted)


def contenders_of(bench: Bench) -> dict:
  """Everybody, by name."""
  given = bench.given
  people = {"plain": bench.plain}
  for alpha in given.alphas:
    for drafted in given.drafted:
      for draft in given.draft:
        name = f"alpha {alpha}, K {drafted}, {draft} draft"
        people[name] = bench.ours(alpha, drafted, draft)
  if given.without_native:
    for name, person in list(people.items()):
      for how, parts in WITHOUT.items():
        people[f"{name}, {how}"] = WithoutNative(person, parts)
  if not given.no_rivals:
    for dtype in given.rival_types:
      people[f"HF assisted {dtype}"] = bench.theirs(dtype, given.rival_drafted)
  return people


def native_ones(people: dict, alpha: float) -> list[str]:
  """Ours at an acceptance, as they are served."""
  return [
    name
    for name, person in people.items()
    if name.startswith(f"alpha {alpha},") and not isinstance(person, WithoutNative)
  ]


def best(times: dict, names: list[str], clock: str) -> str:
  """The fastest of some contenders."""
  return min(names, key=lambda name: times[name].milliseconds(clock))


def rows_of(bench: Bench) -> list[dict]:
  """Measures everybody by turns."""
  given = bench.given
  clock = measure.clock_of(given.threads)
  people = contenders_of(bench)
  times = measure.by_turns(people, given.turns)
  figures, bounds = {}, {}

  def row(figure: str, value: float, asked: float | None = None) -> None:
    figures[figure], bounds[figure] = value, f">= {asked}" if asked else ""

  if given.without_native:
    for how in WITHOUT:
      other = f"plain, {how}"
      row(f"plain over {other}", measure.ratio(times, other, "plain", clock))
  for name, person in people.items():
    row(f"{name}, ms/token", times[name].milliseconds(clock) / person.tokens)
  for alpha in given.alphas:
    for name in people:
      if name.startswith(f"alpha {alpha},"):
        row(f"{name}, over plain", measure.ratio(times, "plain", name, clock))
    mine = native_ones(people, alpha)
    fastest = best(times, mine, clock)
    row(
      f"alpha {alpha}, the fastest of these, over plain",
      measure.ratio(times, "plain", fastest, clock),
      ASKED.get(given.target, {}).get(alpha),
    )
  if not given.no_rivals:
    mine = native_ones(people, RIVAL_ALPHA)
    for dtype in given.rival_types:
      row(
        f"tokens/s over HF assisted {dtype}, alpha {RIVAL_ALPHA}",
        measure.ratio(times, f"HF assisted {dtype}", best(times, mine, clock), clock),
        ASKED_OVER_ASSISTED.get((given.target, dtype)),
      )
  named = f", drafts with {given.drafts_with}" * (given.drafts_with != "t5-small")
  case = given.target + named + ", ablation" * given.without_native
  return measure.rows(case, f"{clock}, {given.threads} thread(s)", figures, bounds)


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
  given = parser.parse_args()
  measure.restart(given.threads)
  measure.report("speculative", rows_of(Bench(given)))


if __name__ == "__main__":
  main()
