"""A target without a draft, as `Server(target=...)` and `osd generate` serve it.

The default and plain decoding answer the same prompts in turn, on one loaded target.
All is compiled first. The first two answers time their rounds, and do not count. Other
work of the machine disturbs wall times, so CPU times of the process are printed, too.

  python benchmarks/bench_target_alone.py --target FOLDER --file PROMPTS [--file ...]
      [--answers 20] [--lengths 64 256] [--temperatures 0 0.8] [--rows 1] [--learns]

`--learns` serves the pair that learns, whose new draft rests. Prompts are read as
`osd generate --file` reads them; those of more than 128 tokens are left out.
"""

import argparse
import dataclasses
import statistics
import time

from osd_jax import pairs
from osd_jax.data import examples
from osd_jax.engine import server

SOURCE, WARM = 128, 2


def answered(serving: server.Server, prompts: list, settings: dict) -> tuple:
  """Returns the texts, and wall and CPU seconds per token."""
  wall, cpu = time.perf_counter(), time.process_time()
  answers = list(serving.generate(prompts, ordered=True, **settings))
  tokens = max(sum(len(answer.tokens) for answer in answers), 1)
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  return [answer.text for answer in answers], wall / tokens, cpu / tokens


def compared(pair: pairs.Pair, prompts: list, rows: int, settings: dict) -> str:
  """Serves the prompts in both ways; returns a line of figures."""
  decoding = dataclasses.replace(
    server.DECODING,
    rows=rows,
    source_lengths=(SOURCE,),
    target_length=settings["max_new_tokens"],
  )
  with (
    server.Server(pair, server.by_worth(decoding)) as default,
    server.Server(pair.plain(), decoding) as plain,
  ):
    default.warm_up()
    walls, cpus = [], []
    for first in range(0, len(prompts), rows):
      systems = (plain, default) if first // rows % 2 else (default, plain)
      part = prompts[first : first + rows]
      results = {id(each): answered(each, part, settings) for each in systems}
      (texts, wall, cpu), (plain_texts, plain_wall, plain_cpu) = (
        results[id(default)],
        results[id(plain)],
      )
      if not settings["temperature"]:
        assert texts == plain_texts
      walls.append(plain_wall / wall)
      cpus.append(plain_cpu / cpu)
    tokens_per_call = default.statistics.tokens_per_target_call
  wall, cpu = statistics.median(walls[WARM:]), statistics.median(cpus[WARM:])
  return f"{wall:.2f}x plain, CPU {cpu:.2f}x, {tokens_per_call:.2f} tokens per call"


def main() -> None:
  """Compares every file of prompts at every length and temperature."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--target", required=True)
  parser.add_argument("--file", action="append", required=True)
  parser.add_argument("--answers", type=int, default=20)
  parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256])
  parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
  parser.add_argument("--rows", type=int, default=1)
  parser.add_argument("--learns", action="store_true")
  args = parser.parse_args()
  draft = "" if args.learns else pairs.CACHE
  pair = pairs.load_pair(pairs.PairConfig(target=args.target, draft=draft))
  for file in args.file:
    texts = [text for _, text in examples.read_prompts(file, "--file")]
    count = lambda text: len(pair.vocabulary.encode_prompt(text))
    prompts = [t for t in texts if isinstance(t, str) and 0 < count(t) <= SOURCE]
    prompts = prompts[: args.answers * args.rows]
    for length in args.lengths:
      for temperature in args.temperatures:
        settings = {"max_new_tokens": length, "temperature": temperature}
        figures = compared(pair, prompts, args.rows, settings)
        print(f"{file}, {length} tokens, temperature {temperature}: {figures}")


if __name__ == "__main__":
  main()
