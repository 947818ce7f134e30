"""Every family, way to draft and number of rows, compiled for TPUs and GPUs.

Models have two layers. Nothing is executed: counts come from the compiled programs, and
cycles are the estimates of the TPU's compiler, which leave out copies that run next to
operations. Kernels and cycles of one layer of a plain step are the difference of three
layers and two. A round of greedy rows must not be refused. Temporaries and copies are
those of a round.

Needs the compilers, for example those that `make test-aot` installs:

  PYTHONPATH=.venv-aot JAX_PLATFORMS=cpu .venv/bin/python benchmarks/compilations.py \\
      [--topology v5e:2x2 h100:1] [--family qwen3 t5] [--draft attached] [--rows 1 8]
"""

import argparse
import pathlib

import jax
import measure

from osd_jax import base, online, pairs
from osd_jax.costs.table import RoundCosts
from osd_jax.data import examples, streams
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig
from osd_tools import chips, sizes
from osd_tools.ahead_of_time import plan, programs

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "h100:1")
DRAFTED = 5
DRAFTS = ("attached", "independent", "mixture", "adaptive")
COSTS = (RoundCosts((1.0, 1.2, 2.0)),) * 2  # only says that there are several Ks


def config(target: str, draft: str, rows: int) -> online.OnlineConfig:
  """Returns the run to compile; an independent draft has the target's own shape."""
  pair = pairs.PairConfig(
    target=target,
    draft=target if draft == "independent" else "attached",
    dtype="bfloat16",
  )
  decoding = DecodingConfig(
    rows=rows,
    num_draft_tokens=DRAFTED,
    source_lengths=(128,),
    target_length=64,
    cache_tokens=65_536 if draft == "mixture" else 0,
    adaptive=AdaptiveConfig((0, 1, DRAFTED), COSTS) if draft == "adaptive" else None,
  )
  stream = streams.StreamConfig(
    (examples.topic_task("sql", rows=1),), source_length=128
  )
  return online.OnlineConfig(stream, pair, decoding, learn=False)


def figures(target: str, draft: str, rows: int, topology: str) -> dict[str, float]:
  """Returns the figures of one cell; those of a refused program are missing."""
  run = config(target, draft, rows)
  two, three = (plan.Plan(run, chips.Topology(topology), n) for n in (2, 3))
  steps = [
    programs.compiled(x, programs.programs(x)["plain step"]) for x in (two, three)
  ]
  less, more = steps
  values = {"kernels of a layer": more.kernels - less.kernels}
  if less.cycles:
    read = 1e9 * (more.arguments_gb - less.arguments_gb)
    cycles = values["cycles of a layer"] = more.cycles - less.cycles
    least = two.topology.chip.cycles_to_read(read)
    values["cycles of a layer over those of reading it"] = cycles / least
    values["cycles of a plain step"] = less.cycles
    values["cycles of a plain step over those of reading it"] = less.over_bound
  values["temporaries of a plain step, MB"] = less.temporaries_gb * 1e3
  listed, refused = programs.programs(two), 0
  drafting = programs.compiled(two, listed["draft step"])
  values["kernels of a draft step"] = drafting.kernels
  if drafting.cycles:
    values["cycles of a draft step"] = drafting.cycles
  for name in [name for name in listed if name.startswith("round, K = ")]:
    try:
      made = programs.compiled(two, listed[name])
    except programs.RefusedError as error:
      print(f"{target}, {draft}, {rows} rows, {topology}: {name} {error}", flush=True)
      refused += 1
      continue
    values["temporaries of a round, MB"] = made.temporaries_gb * 1e3
    values["copies in a round"] = made.copies
  return {**values, "refused rounds": refused}


def main() -> None:
  """Compiles the cells that were asked for, and stores their figures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--topology", nargs="+", default=TOPOLOGIES)
  families = list(sizes.FAMILIES)
  parser.add_argument("--family", nargs="+", choices=families, default=families)
  parser.add_argument("--draft", nargs="+", choices=DRAFTS, default=DRAFTS)
  parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  args = parser.parse_args()
  measure.RESULTS = args.results
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    for topology in args.topology:
      chips.Topology(topology).devices()
  except base.InputError as error:
    parser.error(str(error))
  for family in args.family:
    for draft in args.draft:
      for rows in args.rows:
        for topology in args.topology:
          values = figures(sizes.FAMILIES[family], draft, rows, topology)
          case = f"{family}, {draft}, {rows} rows, {topology}"
          goals = {"refused rounds": "<= 0"}
          found = measure.rows(case, "compiled only", values, goals)
          measure.report("compilations", found)


if __name__ == "__main__":
  main()
