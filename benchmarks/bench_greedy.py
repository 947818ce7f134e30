"""Plain greedy decoding compared with Hugging Face and with the memory bound.

With one thread (CPU time), our float32 decoder and `generate` in float32 and bfloat16
answer the same prompts, interleaved. With two threads (wall time), our step is compared
with the time that reading its weights and caches takes at the measured bandwidth.

  python benchmarks/bench_greedy.py [--shapes flan-t5-base flan-t5-large] [--rows 1 8]
      [--threads 1] [--stored float32] [--no_rivals]
"""

import argparse

import contenders
import jax
import measure

# Goals for the ratio to Hugging Face in float32, then for the ratio to the bound.
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


def ours(
  name: str, rows: int, source: int, target: int, stored: str
) -> contenders.Ours:
  """Returns our plain decoder, with weights of type `stored`, computing in float32."""
  from osd_jax.engine import engine

  config = contenders.shape(name)
  model, params = contenders.random_model(config)
  params = jax.tree.map(lambda leaf: leaf.astype(stored), params)
  decoder = engine.Engine(contenders.decoding(rows, source, target, 1), model, params)
  return contenders.Ours(decoder, contenders.prompts(rows, source, config.vocab_size))


def theirs(name: str, rows: int, source: int, target: int) -> dict:
  """Returns Hugging Face's decoder in float32 and in bfloat16."""
  import rivals

  config = contenders.shape(name)
  sources = contenders.prompts(rows, source, config.vocab_size)
  return {
    f"HF {dtype}": rivals.HuggingFace(
      rivals.random_model(config, dtype), sources, target
    )
    for dtype in ("float32", "bfloat16")
  }


def rows_of(args: argparse.Namespace, name: str, rows: int) -> list[dict]:
  """Measures one shape with one batch size."""
  clock = measure.clock_of(args.threads)
  case = f"{name}, {rows} row{'s' * (rows > 1)}"
  if args.stored != "float32":
    case += f", stored in {args.stored}"
  shape = (name, rows, args.source, args.target)
  competitors = {"ours": ours(*shape, args.stored)} | (
    {} if args.no_rivals else theirs(*shape)
  )
  times = measure.interleave(competitors, args.turns)
  tokens = competitors["ours"].tokens
  figures = {
    f"{system}, ms/token": times[system].milliseconds(clock) / tokens
    for system in competitors
  }
  goals = {}
  for system in competitors:
    if system != "HF float32" and "HF float32" in competitors:
      over = measure.ratio(times, system, "HF float32", clock)
      figures[f"{system} over HF float32"] = over
  if args.threads == 1 and (name, rows) in ASKED:
    goals["ours over HF float32"] = f"<= {ASKED[name, rows]}"
  if rows == 1:
    figures |= bound(args, name, figures["ours, ms/token"])
    if args.threads == 2 and (name, rows) in ASKED_BOUND:
      goals["ours over the memory bound"] = f"<= {ASKED_BOUND[name, rows]}"
  return measure.rows(case, f"{clock}, {args.threads} thread(s)", figures, goals)


def bound(args: argparse.Namespace, name: str, ms: float) -> dict[str, float]:
  """Returns the memory bound of a step, from bandwidth measured in the same run."""
  speed = measure.bandwidth(args.threads)
  read = contenders.step_bytes(contenders.shape(name), 1, args.source, args.target // 2)
  if args.stored == "bfloat16":  # the few caches are in float32
    read //= 2
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
  parser.add_argument("--stored", default="float32", choices=["float32", "bfloat16"])
  parser.add_argument("--no_rivals", action="store_true")
  args = parser.parse_args()
  measure.restart(args.threads)
  for name in args.shapes:
    for rows in args.rows:
      measure.report("greedy", rows_of(args, name, rows))
      jax.clear_caches()


if __name__ == "__main__":
  main()
