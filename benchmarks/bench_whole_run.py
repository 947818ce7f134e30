"""The cost and gain of learning end to end: complete runs of one stream.

Plain decoding, a frozen draft and an online draft serve the same requests, interleaved
block by block; with `--attached`, so do a frozen and an online attached draft. Each
system has its own server. The online runs include updates, metering of the online
draft, logging and checkpoints. An "independent" draft is one that reads the prompt
itself.

Times are wall times. If an update or a checkpoint is still running at the end of a
block, the program waits for it and counts the wait for that system. An uninterrupted
run has no such waits except at its end, so blocks have 190 requests: they end between
the checkpoints that the demo takes every 200 requests, which are therefore written
during serving, as usual. Loading, compiling, the warm start of the buffer and the files
written when a run is closed are not counted.

Break-even is the first end of a block from which a learning run has spent less time
than another run, up to the end of the stream.

`--systems` selects the systems, by default all. Updates of an independent draft with a
vocabulary of 32,128 take long on a CPU. Times with a small target say little about a
large one: `--target padded:flan-t5-base` is the shipped target, with unchanged outputs,
at the cost of that model (`osd_tools.padded`).

  python benchmarks/bench_whole_run.py [--gin_file runs/demo_independent.gin]
      [--seeds 3] [--target FILE] [--draft FILE] [--attached FILE] [--attached_gin FILE]
      [--requests_per_task 200] [--threads 2] [--bindings NAME=VALUE ...]
      [--systems plain "attached frozen" "attached online"]

`figures.py time_saved` draws the time saved from the stored results.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence

import accounts
import measure
import systems

from osd_jax import base, online, pairs
from osd_jax.main import settings

PLAIN, INDEPENDENT, ATTACHED = "plain", "independent", "attached"
SYSTEMS = (
  PLAIN,
  f"{INDEPENDENT} frozen",
  f"{INDEPENDENT} online",
  f"{ATTACHED} frozen",
  f"{ATTACHED} online",
)
ASKED = {
  "independent online, over plain": ">= 1.5",
  "independent online, over independent frozen": ">= 1.15",
  "attached online, over plain": ">= 1.6",
  "attached online, over independent frozen": ">= 1.3",
  "attached online, over attached frozen": ">= 1.05",
}
# Goals of special cases: the first key that occurs in the setting or the clock counts.
ASKED_OF = {
  # The demo's draft already knows this topic, so learning cannot gain anything.
  "StreamConfig.tasks=(@maths/stream/TaskConfig(),)": {
    "attached online, over attached frozen": ">= 0.97"
  },
  "experiments/shift_cpu.gin": {"attached online, over plain": ">= 1.1"},
  "target padded:flan-t5-base": {
    "attached online, over plain": ">= 2.8",
    "attached online, over independent frozen": ">= 1.5",
    "attached online, over attached frozen": ">= 1.2",
  },
  "target padded:": {},
  " a task": {},
  "wall, 1 thread(s)": {
    "attached online, over plain": ">= 1.4",
    "attached online, over independent frozen": ">= 1.15",
    "attached online, over attached frozen": ">= 0.97",
  },
}
# Fields of OnlineConfig that `--attached_gin` may change.
OF_A_DRAFT = ("decoding", "learning", "warm_start")


def configs(args: argparse.Namespace, seed: int) -> dict[str, online.OnlineConfig]:
  """Returns the config of each kind of draft."""
  by_kind = {INDEPENDENT: config_of(args, seed, [], args.draft)}
  if args.attached:
    files = [args.attached_gin] if args.attached_gin else []
    by_kind[ATTACHED] = config_of(args, seed, files, args.attached)
    check(by_kind[INDEPENDENT], by_kind[ATTACHED], args.attached_gin)
  elif args.attached_gin:
    raise base.InputError(
      f"--attached_gin: received {args.attached_gin!r}, expected --attached as well."
    )
  return by_kind


def config_of(
  args: argparse.Namespace, seed: int, files: list[str], draft: str | None
) -> online.OnlineConfig:
  """Loads the config of one kind of draft from gin files, bindings and options."""
  bindings = [f"StreamConfig.seed={seed}"]
  if args.requests_per_task:
    bindings.append(f"StreamConfig.requests_per_task={args.requests_per_task}")
  config, _ = settings.load(
    online.OnlineConfig, [args.gin_file, *files], [*bindings, *args.bindings]
  )
  paths = {"target": args.target, "draft": draft}
  changes = {field: _path(value) for field, value in paths.items() if value}
  return dataclasses.replace(config, pair=dataclasses.replace(config.pair, **changes))


def _path(value: str) -> str:
  """Makes the path of an existing file absolute, so PairConfig.folder is not used."""
  path = pathlib.Path(value)
  return str(path.absolute()) if path.exists() else value


def check(
  one: online.OnlineConfig, other: online.OnlineConfig, file: str | None
) -> None:
  """Raises InputError if runs differ in more than the draft and its learning."""
  differing = [
    f"{type(mine).__name__}.{field.name}"
    for mine, its, name in (
      (one, other, (*OF_A_DRAFT, "pair", "run_directory")),
      (one.pair, other.pair, ("draft", "draft_serving", "attached")),
    )
    for field in dataclasses.fields(mine)
    if field.name not in name and getattr(mine, field.name) != getattr(its, field.name)
  ]
  if differing:
    raise base.InputError(
      f"--attached_gin: {file} changes {', '.join(differing)}, expected changes"
      f" only of {', '.join(OF_A_DRAFT)} and the draft, because all systems must serve"
      " the same requests with the same target."
    )


def check_independent(pair: pairs.Pair) -> None:
  """Raises InputError if the draft of a pair is attached to its target."""
  if pair.draft.frozen:
    raise base.InputError(
      "--draft: received a draft that is attached to its target, expected one that"
      " reads prompts itself; name it with --attached, and an independent one here or"
      " in the gin file."
    )


def create_systems(
  made: Mapping[str, online.OnlineConfig],
  loaded: Mapping[str, pairs.Pair],
  folder: pathlib.Path,
  chosen: Sequence[str],
) -> dict[str, systems.Frozen | systems.Learning]:
  """Creates the chosen systems by name."""
  requests = systems.requests_of(made[INDEPENDENT], loaded[INDEPENDENT])

  def server(name: str) -> systems.Frozen | systems.Learning:
    kind, *state = name.split()
    if name == PLAIN:
      pair = loaded[INDEPENDENT].plain()
      return systems.Frozen(pair, made[INDEPENDENT], requests)
    if state == ["frozen"]:
      return systems.Frozen(loaded[kind], made[kind], requests)
    return systems.Learning(loaded[kind], made[kind], folder / kind)

  return {name: server(name) for name in chosen}


def chosen_of(args: argparse.Namespace) -> list[str]:
  """Returns the selected names in the order of `SYSTEMS`.

  Raises:
    InputError: if an attached system is selected without `--attached`.
  """
  there = [name for name in SYSTEMS if args.attached or not name.startswith(ATTACHED)]
  names = args.systems or there
  for name in names:
    if name not in there:
      raise base.InputError(
        f"--systems: received {name!r}, expected --attached as well."
      )
  return [name for name in there if name in names]


def one_run(
  made: Mapping[str, online.OnlineConfig],
  loaded: Mapping[str, pairs.Pair],
  block: int,
  chosen: Sequence[str],
) -> tuple[accounts.Accounts, dict[str, float]]:
  """Serves the stream once; returns the time of each system and its figures."""
  with tempfile.TemporaryDirectory() as folder:
    serving = create_systems(made, loaded, pathlib.Path(folder), chosen)
    total = len(systems.requests_of(made[INDEPENDENT], loaded[INDEPENDENT]))
    serve = {name: system.serve for name, system in serving.items()}
    spent = accounts.by_blocks(serve, total, block)
    figures = {
      f"{name}, {figure}": value
      for name, system in serving.items()
      for figure, value in system.close().items()
    }
  return spent, figures


def rivals_of(name: str, names: list[str]) -> list[str]:
  """Returns the baselines: plain, independent frozen and its own kind frozen."""
  frozen = f"{name.split()[0]} frozen"
  others = dict.fromkeys(
    (PLAIN, f"{INDEPENDENT} frozen", frozen) if name != PLAIN else ()
  )
  return [other for other in others if other in names and other != name]


def compared(spent: accounts.Accounts) -> dict[str, float]:
  """Returns ratios of total times, and break-even requests (inf: never)."""
  names, figures = list(spent.seconds), {}
  for name in names:
    for other in rivals_of(name, names):
      figures[f"{name}, over {other}"] = spent.total(other) / spent.total(name)
  for name in names:
    kind, *state = name.split()
    rivals = (PLAIN, f"{kind} frozen") if state == ["online"] else ()
    for other in (rival for rival in rivals if rival in names):
      request = spent.break_even(name, other)
      figure = f"{name}, break-even over {other}, requests"
      figures[figure] = float("inf") if request is None else float(request)
  return figures


def rows_of(
  setting: str,
  seed: int,
  clock: str,
  spent: accounts.Accounts,
  figures: Mapping[str, float],
) -> list[dict]:
  """Returns the rows of a run; rows of seconds also hold the course of the run."""
  to_rows = functools.partial(measure.rows, f"{setting}, seed {seed}", clock)
  rows = []
  for name, seconds in spent.seconds.items():
    (row,) = to_rows({f"{name}, seconds": spent.total(name)})
    course = {"block_ends": spent.block_ends, "cumulated_seconds": seconds}
    rows.append(row | {"setting": setting, "seed": seed, "system": name} | course)
  return rows + to_rows({**figures, **compared(spent)}, asked_of(setting, clock))


def asked_of(setting: str, clock: str) -> dict[str, str]:
  """Returns the goals of a run by figure."""
  parts = (part for part in ASKED_OF if part in f"{setting}, {clock}")
  return next((ASKED_OF[part] for part in parts), ASKED)


def setting_of(args: argparse.Namespace) -> str:
  """Returns a label: the gin file and every option that changes it."""
  files = ("target", "draft", "attached", "attached_gin")
  options_of_files = {name: getattr(args, name) for name in files}
  parts = [
    f"{n} {pathlib.Path(value).stem}" for n, value in options_of_files.items() if value
  ]
  if args.requests_per_task:
    parts.append(f"{args.requests_per_task} a task")
  return ", ".join([args.gin_file, *parts, *args.bindings])


def options() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gin_file", default="runs/demo_independent.gin")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--block", type=int, default=190, help="requests in a block")
  parser.add_argument("--target", help="weights of the target of all systems")
  parser.add_argument("--draft", help="weights of the independent draft")
  parser.add_argument("--attached", help='weights of an attached draft, or "attached"')
  parser.add_argument("--attached_gin", help="gin file read after --gin_file for it")
  parser.add_argument("--requests_per_task", type=int)
  parser.add_argument(
    "--systems",
    nargs="+",
    choices=SYSTEMS,
    metavar="NAME",
    help="systems to run; default: all",
  )
  parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  return parser


def main() -> None:
  args = options().parse_args()
  measure.restart(args.threads)
  measure.RESULTS = args.results
  # Other work on this machine slows down all systems, but not every block equally.
  figures = {"load of other work at the start": os.getloadavg()[0]}
  names = chosen_of(args)
  loaded = systems.load(configs(args, 0))
  check_independent(loaded[INDEPENDENT])
  for kind, config in configs(args, 0).items():
    if f"{kind} online" in names:
      systems.rehearse(loaded[kind], config)
  clock = f"wall, {args.threads} thread(s)"
  for seed in range(args.seeds):
    spent, run_figures = one_run(configs(args, seed), loaded, args.block, names)
    rows = rows_of(setting_of(args), seed, clock, spent, figures | run_figures)
    measure.report("whole_run", rows)


if __name__ == "__main__":
  try:
    main()
  except base.InputError as error:
    sys.exit(str(error))
