"""Plain greedy decoding: ours beside Hugging Face, and beside the memory bound.

One thread, CPU time: our float32 and `generate` in float32 and bfloat16 answer the same
prompts by turns. Two threads, wall time: our step beside the time in which the measured
bandwidth reads what a step has to read.

  python benchmarks/bench_greedy.py [--shapes flan-t5-base flan-t5-large] [--rows 1 8]
      [--threads 1] [--no_rivals]
"""

import argparse

import contenders
import jax
import measure

# Asked of the ratio to Hugging Face float32, and of that to the memory bound.
ASKED = {
  ("flan-t5-base", 1): 0.52,
  ("flan-t5-large", 1): 0.62,
  ("flan-t5-base", 8): 0.50,
  ("tinyllama-1.1b", 1): 0.5,
  ("llama-3.2-1b", 1): 0.5,
}
ASKED_BOUND = {
  ("flan-t5-base", 1): 1.4,
  ("flan-t5-large", 1): 1.25,
  ("tinyllama-1.1b", 1): 1.35,
  ("llama-3.2-1b", 1): 1.35,
}


def ours(name: str, rows: int, source: int, target: int) -> contenders.Ours:
  """This package's plain decoding."""
  from osd_jax.engine import engine

  config = contenders.shape(name)
  model, params = contenders.random_model(config)
  decoder = engine.Engine(contenders.decoding(rows, source, target, 1), model, params)
  return contenders.Ours(decoder, contenders.prompts(rows, source, config.vocab_size))


def theirs(name: str, rows: int, source: int, target: int) -> dict:
  """Hugging Face in both types."""
  import rivals

  config = contenders.shape(name)
  sources = contenders.prompts(rows, source, config.vocab_size)
  return {
    f"HF {dtype}": rivals.HuggingFace(
      rivals.random_model(config, dtype), sources, target
    )
    for dtype in ("float32", "bfloat16")
  }


def rows_of(given: argparse.Namespace, name: str, rows: int) -> list[dict]:
  """Measures one shape and number of rows."""
  clock = measure.clock_of(given.threads)
  case = f"{name}, {rows} row{'s' * (rows > 1)}"
  shape = (name, rows, given.source, given.target)
  people = {"ours": ours(*shape)} | ({} if given.no_rivals else theirs(*shape))
  times = measure.by_turns(people, given.turns)
  tokens = people["ours"].tokens
  figures = {
    f"{who}, ms/token": times[who].milliseconds(clock) / tokens for who in people
  }
  asked = {}
  for who in people:
    if who != "HF float32" and "HF float32" in people:
      over = measure.ratio(times, who, "HF float32", clock)
      figures[f"{who} over HF float32"] = over
  if given.threads == 1 and (name, rows) in ASKED:
    asked["ours over HF float32"] = f"<= {ASKED[name, rows]}"
  if rows == 1:
    figures |= bound(given, name, figures["ours, ms/token"])
    if given.threads == 2 and (name, rows) in ASKED_BOUND:
      asked["ours over the memory bound"] = f"<= {ASKED_BOUND[name, rows]}"
  return measure.rows(case, f"{clock}, {given.threads} thread(s)", figures, asked)


def bound(given: argparse.Namespace, name: str, ms: float) -> dict[str, float]:
  """The memory bound of a step, measured in the same minute."""
  speed = measure.bandwidth(given.threads)
  read = contenders.step_bytes(
    contenders.shape(name), 1, given.source, given.target // 2
  )
  return {
    "bandwidth, GB/s": speed / 1e9,
    "memory bound, ms/token": read / speed * 1e3,
    "ours over the memory bound": ms / (read / speed * 1e3),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shapes", nargs="+", default=["flan-t5-base", "flan-t5-large"])
  parser.add_argument("--rows", nargs="+", type=int, default=[1])
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--target", type=int, default=64)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--threads", type=int, default=1)
  parser.add_argument("--no_rivals", action="store_true")
  given = parser.parse_args()
  measure.restart(given.threads)
  for name in given.shapes:
    for rows in given.rows:
      measure.report("greedy", rows_of(given, name, rows))
      jax.clear_caches()


if __name__ == "__main__":
  main()
