"""What learning costs and gains end to end: three complete runs of one stream.

Plain decoding, the frozen draft and the online draft (updates, metering of the online
draft, logging and checkpoints included) serve the same requests in interleaved blocks.
Wall time; an update that is still running when its block ends is waited for, on the
online run's account.

  python benchmarks/bench_whole_run.py [--gin_file runs/demo.gin] [--seeds 3]
"""

import argparse
import dataclasses
import tempfile
import time

import measure
import numpy as np

from osd_jax import online, writers
from osd_jax.main import settings
from osd_jax.serving import slots
from osd_jax.serving.server import Server


def serve(server: Server, requests: list[slots.Request]) -> tuple[float, int]:
  """Seconds and tokens of serving a block."""
  started = time.perf_counter()
  tokens = sum(len(done.tokens) for done in server.run(requests))
  return time.perf_counter() - started, tokens


def learn(loop: online.OnlineLoop, until: int) -> float:
  """Seconds of serving a block while learning."""
  started = time.perf_counter()
  while loop.finished < until:
    loop.step()
  loop.settle()
  return time.perf_counter() - started


def one_run(config: online.OnlineConfig, block: int, folder: str) -> dict[str, float]:
  directory = writers.RunDirectory.start(folder)
  loop = online.OnlineLoop(dataclasses.replace(config, run_directory=folder), directory)
  unrecorded = dataclasses.replace(config.decoding, record_top_k=0)
  plain = Server(loop.pair.plain(), unrecorded, partition=config.partition)
  frozen = Server(loop.pair, unrecorded, partition=config.partition)
  warm_up(config, loop, plain, frozen)
  seconds = {"plain": 0.0, "frozen": 0.0, "online": 0.0}
  tokens = 0
  for start in range(0, len(loop.stream), block):
    stop = min(start + block, len(loop.stream))
    requests = [
      slots.Request(loop.stream[i].tokens, config.sampling.of_request(i))
      for i in range(start, stop)
    ]
    spent, count = serve(plain, requests)
    seconds["plain"] += spent
    tokens += count
    seconds["frozen"] += serve(frozen, requests)[0]
    seconds["online"] += learn(loop, stop)
  loop.close(sum(seconds.values()))
  rows = list(writers.read(directory.metrics_path))
  overlaps = [row["overlap"] for row in rows if row["kind"] == "request"]
  return {
    **{f"{name}_seconds": value for name, value in seconds.items()},
    "tokens": tokens,
    "updates": sum(row["kind"] == "update" for row in rows),
    "update_seconds": total_seconds(rows, "update", "update_ms"),
    "decode_seconds": total_seconds(rows, "request", "decode_ms"),
    "overlap": float(np.mean(overlaps)),
    "over_plain": seconds["plain"] / seconds["online"],
    "over_frozen": seconds["frozen"] / seconds["online"],
  }


def total_seconds(rows: list, kind: str, field: str) -> float:
  return sum(row[field] for row in rows if row["kind"] == kind) / 1e3


def warm_up(
  config: online.OnlineConfig,
  loop: online.OnlineLoop,
  *frozen: Server,
) -> None:
  """Compiles everything on a short run of its own; compilation is not what we time."""
  tokens = loop.stream[0].tokens
  for server in frozen:
    server.run([slots.Request(tokens) for _ in range(config.decoding.rows + 1)])
  with tempfile.TemporaryDirectory() as folder:
    directory = writers.RunDirectory.start(folder)
    config = dataclasses.replace(config, checkpoint_every=8)
    other = online.OnlineLoop(config, directory)
    while other.finished < 3 * config.learning.schedule.update_interval + 8:
      other.step()
    other.close(0.0)


def rows_of(gin_file: str, seed: int, row: dict[str, float]) -> list[dict]:
  """What the report keeps of a run."""
  asked = {"over plain": ">= 1.5", "over frozen": ">= 1.15"}
  case, figures = f"{gin_file}, seed {seed}", {n.replace("_", " "): row[n] for n in row}
  return measure.rows(case, "wall, 2 thread(s)", figures, asked)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gin_file", default="runs/demo.gin")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--block", type=int, default=25)
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  given = parser.parse_args()
  measure.restart(2)
  for seed in range(given.seeds):
    config, _ = settings.load(
      online.OnlineConfig,
      [given.gin_file],
      [f"StreamConfig.seed={seed}", *given.bindings],
    )
    config = dataclasses.replace(config, floor_metering=False, compare_every=0)
    with tempfile.TemporaryDirectory() as folder:
      row = one_run(config, given.block, folder)
    measure.report("whole_run", rows_of(given.gin_file, seed, row))


if __name__ == "__main__":
  main()
