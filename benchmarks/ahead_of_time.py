"""Published pairs compiled for TPUs and GPUs, without the machines.

`osd_tools.ahead_of_time` compiles every pair for every topology, in bfloat16, with 8
rows, prompts of 512 tokens, answers of 128 tokens, and t5-small, llama-160m or
qwen3-0.6b as the draft. Counts come from the compiled text. Tokens per second are upper
bounds from the published figures of the chips. Nothing is executed, so none of these
numbers is a measured speed.

Needs the compilers, for example those that `make test-aot` installs:

  PYTHONPATH=.venv-aot JAX_PLATFORMS=cpu .venv/bin/python benchmarks/ahead_of_time.py \\
      [--topology v5e:2x2=4 h100:1=1] [--target flan-t5-xl] [--layers N]
"""

import argparse
import contextlib
import pathlib

import jax
import measure

from osd_jax import base, online, pairs, sharding
from osd_jax.data import examples, streams
from osd_jax.engine.requests import DecodingConfig
from osd_jax.loop import rows as rows_lib
from osd_tools import chips
from osd_tools import rows as tool_rows
from osd_tools.ahead_of_time import estimates, plan, programs

TOPOLOGIES = (
  "v5e:2x2=1 v5e:2x2=4 v5e:2x4=8 v6e:2x4=8 v4:2x2x1=8 v5p:2x2x1=4 h100:1=1 h100:4=4"
).split()
TARGETS = ("flan-t5-large", "flan-t5-xl", "flan-t5-xxl")
DRAFTS = {"vicuna": "llama-160m", "qwen3": "qwen3-0.6b"}  # t5-small for all others
ACCEPTANCE = 0.8
ASKED = {  # of flan-t5-xl on v5e:2x2=4, and on h100:1=1
  "flan-t5-xl, v5e:2x2=4": {
    "inner loops a round": "<= 8",
    "copies a round": "<= 60",
    "compile of a round, s": "<= 60",
    "caches, GB a chip": "<= 0.35",
    "collectives in drafting": "<= 0",
  },
  "flan-t5-xl, h100:1=1": {"kernels of a plain step a decoder layer": "<= 14"},
}


def config(target: str, model: int, rows: int, drafted: int) -> online.OnlineConfig:
  """Returns the run to compile."""
  stream = streams.StreamConfig(
    (examples.topic_task("sql", rows=1),),
    source_length=512,
  )
  draft = DRAFTS.get(target.partition("-")[0], "t5-small")
  return online.OnlineConfig(
    stream,
    pairs.PairConfig(target=target, draft=draft, dtype="bfloat16"),
    DecodingConfig(
      rows=rows,
      num_draft_tokens=drafted,
      source_lengths=(512,),
      target_length=128,
    ),
    partition=sharding.PartitionConfig(model=model),
  )


def figures(found: plan.Plan, drafted: int) -> dict[str, float | None]:
  """Returns the figures of a pair on a machine."""
  calls = {}
  for name, program in programs.programs(found).items():
    if name not in ("read", "append", "draw", "swap"):
      with contextlib.suppress(programs.RefusedError):
        calls[name] = programs.compiled(found, program)
  rows = estimates.conclusions(found, calls, (ACCEPTANCE,))
  memory = rows_lib.of(tool_rows.Memory, rows)
  gigabytes = {row.what: row.gigabytes_a_chip for row in memory}
  (fits,) = rows_lib.of(tool_rows.Fits, rows)
  room = {"needed, GB a chip": fits.needed_gb, "of a chip's, GB": fits.memory_gb}
  speeds = rows_lib.of(tool_rows.Estimate, rows)
  if not speeds or f"round, K = {drafted}" not in calls:
    return room  # the program does not compile for this machine
  (speed,) = speeds
  round_, step = calls[f"round, K = {drafted}"], calls["plain step"]
  layers = len(found.state.target_cache.self_keys)
  return {
    "compile of a round, s": round_.compile_s,
    "kernels a round": round_.kernels,
    "kernels of a plain step a decoder layer": step.kernels / layers,
    "inner loops a round": round_.inner_loops,
    "copies a round": round_.copies,
    "sorts a round": round_.sorts,
    "collectives a round": round_.collectives,
    "collectives in drafting": round_.inner_collectives,
    "moved a round, MB": round_.moved_mb,
    "caches, GB a chip": gigabytes["caches and rows"],
    **room,
    "c, at least": speed.c,
    "v, at least": speed.v,
    "break-even acceptance": speed.break_even_acceptance,
    "plain tokens/s, at most": speed.plain_tokens_s,
    f"frozen tokens/s at {ACCEPTANCE}, at most": speed.frozen_tokens_s,
    f"online tokens/s at {ACCEPTANCE}, at most": speed.online_tokens_s,
  }


def options() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument(
    "--topology",
    nargs="+",
    default=TOPOLOGIES,
    help="NAME=CHIPS; CHIPS is the number of chips that share the weights",
  )
  parser.add_argument("--target", nargs="+", default=TARGETS)
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--drafted", type=int, default=5, help="K")
  parser.add_argument(
    "--layers",
    type=int,
    default=0,
    help="layers of both models, for a quick run; 0: all",
  )
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  return parser


def main() -> None:
  args = options().parse_args()
  measure.RESULTS = args.results
  jax.config.update("jax_enable_compilation_cache", False)
  for target in args.target:
    for machine in args.topology:
      name, _, model = machine.partition("=")
      run = config(target, int(model), args.rows, args.drafted)
      case = f"{target}, {machine}"
      try:
        compiled = plan.Plan(run, chips.Topology(name), args.layers)
      except base.InputError as error:
        print(f"{case}: {error}")
        continue
      goals = ASKED.get(case, {}) if not args.layers else {}
      case += f", {args.layers} layers" if args.layers else ""
      values = figures(compiled, args.drafted)
      available = {name: value for name, value in values.items() if value is not None}
      rows = measure.rows(case, "compiled only", available, goals)
      measure.report("ahead_of_time", rows)


if __name__ == "__main__":
  main()
