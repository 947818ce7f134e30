"""Is the idle compute really there? Arithmetic of the target's calls, next to the most.

A call reads the target's weights once, and multiplies them with one column for each
token of each row. While reading takes longer than multiplying, arithmetic is idle, and
an update of the draft could use it. This program measures calls of B rows with one
token and with K + 1 tokens on this machine, and says for chips with published figures
from how many tokens on a call leaves nothing idle, and how many training steps fit into
what is idle.

  python experiments/open_questions/utilisation.py [--model FOLDER] [--rows 1 2 4 8 16]
      [--drafted 3 7] [--out experiments/open_questions/utilisation.jsonl]
"""

# ruff: noqa: E402 (the folder was just added)
import argparse
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks")]

import jax
import jax.numpy as jnp
import measure
import numpy as np
import rich.console
import rich.table

from osd_jax import base, pairs, sharding
from osd_jax.engine import measurement
from osd_jax.engine.requests import DecodingConfig
from osd_tools.chips import CHIPS

SOURCE, TARGET = 32, 64
SIDE = 2048  # of the product that measures the most arithmetic
# A step of training: 16 rows of 64 tokens, forward and backward.
TRAINED = 16 * 64
BYTES = 2  # of a weight in bfloat16


def most_arithmetic(seconds: float = 3.0) -> float:
  """Returns the operations per second of a large product of float32 matrices."""
  matrix = jnp.ones((SIDE, SIDE), jnp.float32)
  product = jax.jit(jnp.dot)
  product(matrix, matrix).block_until_ready()
  best, end = float("inf"), time.perf_counter() + seconds
  while time.perf_counter() < end:
    began = time.perf_counter()
    product(matrix, matrix).block_until_ready()
    best = min(best, time.perf_counter() - began)
  return 2 * SIDE**3 / best


def multiplied(pair: pairs.Pair) -> int:
  """Returns the weights that every token of a call is multiplied with."""
  # An encoder is no part of a call, and of a table that is not also the head a call
  # reads single rows.
  sizes = {
    jax.tree_util.keystr(path): leaf.size
    for path, leaf in jax.tree.leaves_with_path(pair.target_params)
    if leaf.ndim >= 2 and "['encoder']" not in jax.tree_util.keystr(path)
  }
  heads = [name for name in sizes if "logits" in name or "lm_head" in name]
  tables = [name for name in sizes if "embed" in name]
  return sum(sizes.values()) - sum(sizes[name] for name in tables if heads)


def measured(pair: pairs.Pair, rows: int, drafted: int, most: float) -> dict:
  """Returns times and shares of idle arithmetic of calls with this many rows."""
  decoding = DecodingConfig(
    rows=rows,
    num_draft_tokens=drafted,
    source_lengths=(SOURCE,),
    target_length=TARGET,
  )
  source = np.full((rows, SOURCE), 5, np.int32)
  models = (pair.target, pair.target_params, pair.draft, pair.draft_params)
  times = measurement.measure_steps(decoding, models, source)
  weights = multiplied(pair)
  idle = {
    f"idle_{name}": 1 - 2 * weights * rows * tokens / (ms / 1e3 * most)
    for name, tokens, ms in (
      ("plain", 1, times["plain_step_ms"]),
      ("verify", drafted + 1, times["verify_ms"]),
    )
  }
  return {
    "rows": rows,
    "drafted": drafted,
    "plain_ms": round(times["plain_step_ms"], 3),
    "verify_ms": round(times["verify_ms"], 3),
    **{name: round(share, 3) for name, share in idle.items()},
  }


def on_chips(target: float, draft: float) -> list[dict]:
  """Returns what a call leaves idle on chips, for weights in bfloat16.

  Args:
    target: weights of the target.
    draft: weights of the draft that is trained.
  """
  rows = []
  for name, chip in CHIPS.items():
    if name == "cpu":  # not a real chip
      continue
    full = chip.flops / chip.bandwidth * BYTES / 2  # tokens per call
    idle = target * BYTES / chip.bandwidth * chip.flops  # of a call with one token
    step = 6 * draft * TRAINED
    rows.append(
      {"chip": name, "full_at": round(full), "steps_per_call": round(idle / step, 2)}
    )
  return rows


def main() -> None:
  """Measures, prints two tables and appends the rows to a file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="", help="a target; default: the shipped one")
  parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
  parser.add_argument("--drafted", type=int, nargs="+", default=[3, 7])
  parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
  parser.add_argument("--out", type=pathlib.Path, default=HERE / "utilisation.jsonl")
  args = parser.parse_args()
  measure.restart(args.threads)
  config = pairs.PairConfig()
  if args.model:
    config = pairs.PairConfig(target=args.model, draft="attached")
  pair = pairs.load_pair(config, sharding.make(sharding.PartitionConfig()))
  most = most_arithmetic()
  name = pathlib.Path(args.model).name or "demo target"
  made_by = {"model": name, "gflops": round(most / 1e9), **measure.provenance()}
  console = rich.console.Console()
  columns = ("rows", "drafted", "plain_ms", "verify_ms", "idle_plain", "idle_verify")
  table = rich.table.Table(*columns, title=f"{name}, most {most / 1e9:.0f} GFLOP/s")
  with args.out.open("a") as file:
    for count in args.rows:
      for drafted in args.drafted:
        row = measured(pair, count, drafted, most)
        file.write(json.dumps(row | made_by) + "\n")
        table.add_row(*(str(row[column]) for column in columns))
  console.print(table)
  chips = rich.table.Table("chip", "nothing idle from", "steps in a call of one token")
  for row in on_chips(7e9, 160e6):
    chips.add_row(row["chip"], f"{row['full_at']} tokens", str(row["steps_per_call"]))
  console.print(chips)


if __name__ == "__main__":
  try:
    main()
  except base.InputError as error:
    sys.exit(str(error))
