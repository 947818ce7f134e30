"""Drafts compared: prompt lookup, a cache, a learned draft, and both, frozen or not.

All systems serve the same requests. With fixed K their tokens per target call are exact
numbers. Times are those of systems that take turns, block by block, as in
benchmarks/bench_whole_run.py, with the time of learning included; `--untimed` serves
one system after another and leaves times out.

    plain              plain decoding
    lookup             n-grams of the row's own prompt and answer
    cache              n-grams of these and of all served answers
    frozen, online     the learned draft, without and with updates while it serves
    ... + cache        the same, mixed with the cache
    oracle of choice   frozen + cache, if the right one of the two were always asked
                       (from the recorded greedy answers of plain decoding)
    transformers ...   `generate`: plain, in float32 and bfloat16, with
                       `prompt_lookup_num_tokens`, and with the draft as
                       `assistant_model` (`--qwen_draft` is then a folder too)

A cell is one system on one stream, with a temperature, a number of rows and a seed. It
is written to `--out` when it is finished, and the same command skips what is there.
Streams: demo (the shipped pair), domains and chat (a target of 15 M parameters, made by
experiments/shift_cpu_target.gin), qwen, qwen_chat and qwen_edit (Qwen2.5-Coder-0.5B, a
folder of transformers; its draft starts from random parameters without `--qwen_draft`).

  python experiments/drafters/run.py --streams demo [--requests 200] [--untimed]
      [--temperatures 0 .7] [--rows 1] [--seeds 3] [--by_worth] [--systems plain cache]
      [--target FILE] [--draft FILE] [--qwen FOLDER] [--qwen_draft FILE]
      [--data ../shared/data]
  python experiments/drafters/run.py --table    # prints the cells, measures nothing
"""

# ruff: noqa: E402 (the benchmarks are found only after their folder was added)
import argparse
import dataclasses
import functools
import gc
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import accounts
import measure
import oracle
import rich.console
import rich.table
import systems
import traffic

from osd_jax import base, online, pairs
from osd_jax.data import streams
from osd_jax.decoding import ngrams

PLAIN, ORACLE = "plain", "oracle of choice"
LEARNED = ("frozen", "frozen + cache", "online", "online + cache")
OURS = (PLAIN, "lookup", "cache", *LEARNED, ORACLE)
ASSISTED = "transformers assisted"
# Systems of transformers -> type of the weights, and whether they look up the prompt.
THEIRS = {
  "transformers plain": ("float32", False),
  "transformers lookup": ("float32", True),
  "transformers bfloat16": ("bfloat16", False),
  ASSISTED: ("float32", False),
}
EARLY = 50  # requests after a shift
CACHE = 2**16
KEY = (
  *("stream", "temperature", "rows", "requests", "seed"),
  *("by_worth", "timed", "bindings", "draft"),
)
Cell = dict[str, Any]


def create(
  name: str, pair: pairs.Pair, config: online.OnlineConfig, folder: pathlib.Path
) -> Any:
  """Creates a system, with `serve`, `close` and `per_request`."""
  requests = systems.requests_of(config, pair)
  mixed = dataclasses.replace(config.decoding, cache_tokens=CACHE)
  if name.endswith("+ cache"):
    config = dataclasses.replace(config, decoding=mixed)
  if name.startswith("online"):
    return systems.Learning(pair, config, folder / name.replace(" ", "_"))
  if name in THEIRS:
    import rival

    target = str(config.pair.path("target"))
    dtype, looks_up = THEIRS[name]
    drafted = config.decoding.num_draft_tokens if looks_up else 0
    length = config.decoding.target_length
    assistant = str(config.pair.path("draft")) if name == ASSISTED else ""
    return rival.HuggingFace(target, requests, length, drafted, dtype, assistant)
  if name == PLAIN:
    pair = pair.plain()
  elif name == "lookup":
    # It absorbs nothing, so that it knows only what the row itself contains.
    small = ngrams.build(pair.target, 256)
    model = dataclasses.replace(small, absorb=None)
    pair = pair.with_draft(model, ngrams.empty(256))
  elif name == "cache":
    model = ngrams.build(pair.target, CACHE)
    pair = pair.with_draft(model, ngrams.empty(CACHE))
  return systems.Frozen(pair, config, requests)


def one_by_one(
  names: Sequence[str],
  pair: pairs.Pair,
  config: online.OnlineConfig,
  count: int,
) -> Iterable[tuple[str, Cell, Any]]:
  """Serves the stream with one system after another, untimed."""
  for name in names:
    with tempfile.TemporaryDirectory() as folder:
      system = create(name, pair, config, pathlib.Path(folder))
      system.serve(0, count)
      figures = system.close()
      yield name, figures | {"per_request": system.per_request()}, system
    del system
    gc.collect()


def in_turns(
  names: Sequence[str],
  pair: pairs.Pair,
  config: online.OnlineConfig,
  count: int,
  block: int,
) -> Iterable[tuple[str, Cell, Any]]:
  """Serves the stream with all systems, block by block, and measures their times."""
  for name in names:
    if name.startswith("online"):
      is_mixed = name.endswith("+ cache")
      size = CACHE if is_mixed else 0
      decoding = dataclasses.replace(config.decoding, cache_tokens=size)
      systems.rehearse(pair, dataclasses.replace(config, decoding=decoding))
  with tempfile.TemporaryDirectory() as folder:
    by_name = {name: create(name, pair, config, pathlib.Path(folder)) for name in names}
    serve = {name: system.serve for name, system in by_name.items()}
    spent = accounts.by_blocks(serve, count, block)
    for name, system in by_name.items():
      figures = system.close()
      course = {"block_ends": spent.block_ends, "seconds": spent.seconds[name]}
      figures |= {"per_request": system.per_request(), **course}
      yield name, figures, system


def summary(cell: Cell, labels: Sequence[str]) -> Cell:
  """Returns a cell with tokens per target call: in all, by topic and after shifts."""
  counts = cell["per_request"]
  places = {
    label: [i for i, other in enumerate(labels) if other == label] for label in labels
  }
  after = [place for group in list(places.values())[1:] for place in group[:EARLY]]

  def per_call(group: Iterable[int]) -> float | None:
    tokens, calls = (sum(counts[i][part] for i in group) for part in (0, 1))
    return tokens / calls if calls else None

  cell = cell | {
    "tokens": sum(tokens for tokens, _ in counts),
    "tokens_per_call": per_call(range(len(counts))),
    "after_shifts": per_call(after),
    "by_topic": {label: per_call(group) for label, group in places.items()},
  }
  if "seconds" in cell:
    cell["ms_per_token"] = 1e3 * cell["seconds"][-1] / cell["tokens"]
  return cell


def measured(
  names: Sequence[str],
  pair: pairs.Pair,
  config: online.OnlineConfig,
  block: int | None,
  keep: Callable[[str, Cell], None],
) -> None:
  """Measures cells of one stream and hands each to `keep`.

  Args:
    names: systems. Timed runs always include plain decoding, to compare with.
    pair: the loaded pair.
    config: config of the learning runs.
    block: requests in a block; None leaves times out.
    keep: receives the name and the figures of a finished cell.
  """
  stream = streams.QueryStream(config.stream, pair.vocabulary)
  labels = [stream[place].task for place in range(len(stream))]
  drafted = config.decoding.num_draft_tokens
  served = [name for name in names if name != ORACLE]
  if (block or ORACLE in names) and PLAIN not in served:
    served = [PLAIN, *served]
  if block:
    cells = in_turns(served, pair, config, len(labels), block)
  else:
    cells = one_by_one(served, pair, config, len(labels))
  total = 0.0
  for name, figures, system in cells:
    cell = summary(figures, labels)
    if name == PLAIN:
      total, answers = cell.get("ms_per_token", 0.0), system.answers
    if block:
      cell["over_plain"] = total / cell["ms_per_token"]
    if name in names:
      keep(name, cell)
    if name == PLAIN and ORACLE in names:
      draft = (pair.draft, pair.draft_params)
      counts_of_oracle = oracle.choose(pair.target, draft, answers, drafted, CACHE)[
        ORACLE
      ]
      counts = [
        (len(d.tokens), calls)
        for d, calls in zip(answers, counts_of_oracle, strict=True)
      ]
      keep(ORACLE, summary({"per_request": counts}, labels))


def possible(
  name: str, stream: str, temperature: float, rows: int, has_assistant: bool
) -> bool:
  """Returns whether a system can serve a stream."""
  if name == ORACLE:
    return temperature == 0 and rows == 1
  if name == ASSISTED and not has_assistant:
    return False
  return name not in THEIRS or (traffic.PAIRS[stream] == "qwen" and rows == 1)


def write(path: pathlib.Path, common: Cell, name: str, cell: Cell) -> None:
  """Appends a cell to the file."""
  row = {**common, "system": name, **cell}
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    file.write(json.dumps(row) + "\n")
  rich.console.Console(width=150).print(table([row]))


def identity(cell: Mapping[str, Any]) -> tuple:
  return (*(cell.get(name, "") for name in KEY), cell["system"])


def table(cells: Iterable[Cell]) -> rich.table.Table:
  """Returns the cells as a table."""
  names = ("after shifts", "updates", "ms a token", "over plain")
  lines = rich.table.Table("cell", "system", "tokens a call", *names)
  fields = ("tokens_per_call", "after_shifts", "updates", "ms_per_token", "over_plain")
  for cell in cells:
    where = f"{cell['stream']}, T {cell['temperature']}, {cell['rows']} row(s),"
    where += f" {cell['requests']} a topic, seed {cell['seed']}"
    where += ", by worth" * cell["by_worth"]
    where += f", {cell['draft']}" if cell.get("draft") else ""
    values = (cell.get(name) for name in fields)
    lines.add_row(
      where, cell["system"], *("" if v is None else f"{v:.3f}" for v in values)
    )
  return lines


def options() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--streams", nargs="+", default=["demo"], choices=traffic.PAIRS)
  parser.add_argument(
    "--systems", nargs="+", default=OURS, choices=[*OURS, *THEIRS], metavar="NAME"
  )
  parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
  parser.add_argument("--rows", nargs="+", type=int, default=[1])
  parser.add_argument("--requests", type=int, default=200, help="of every topic")
  parser.add_argument("--seeds", type=int, default=1)
  parser.add_argument(
    "--by_worth", action="store_true", help="K and updates follow measured costs"
  )
  parser.add_argument("--untimed", action="store_true")
  parser.add_argument("--block", type=int, default=25, help="requests in a block")
  parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  parser.add_argument("--qwen_draft", default="attached", metavar="DRAFT")
  for name, default in (
    ("target", "runs/shift_cpu_target.safetensors"),
    ("draft", "runs/shift_cpu_attached_draft.safetensors"),
    ("qwen", "runs/qwen05"),
    ("data", "../shared/data"),
    ("out", "runs/drafters/cells.jsonl"),
  ):
    parser.add_argument(f"--{name}", type=pathlib.Path, default=pathlib.Path(default))
  parser.add_argument("--table", action="store_true", help="only print the cells")
  return parser


def run(
  args: argparse.Namespace,
  config_of: Callable[..., online.OnlineConfig] = traffic.config_of,
) -> None:
  """Measures the cells that `--out` does not have yet."""
  groups = itertools.product(
    args.streams, args.temperatures, args.rows, range(args.seeds)
  )
  loaded: dict[str, pairs.Pair] = {}
  for stream, temperature, rows, seed in groups:
    values = (stream, temperature, rows, args.requests, seed)
    values += (args.by_worth, not args.untimed, " ".join(args.bindings))
    is_qwen = traffic.PAIRS[stream] == "qwen"
    values += (pathlib.Path(args.qwen_draft).name if is_qwen else "",)
    common = dict(zip(KEY, values, strict=True))
    there = {identity(cell) for cell in measure.read(args.out)}
    has_assistant = pathlib.Path(args.qwen_draft).is_dir()
    names = [
      name
      for name in args.systems
      if possible(name, stream, temperature, rows, has_assistant)
      and identity(common | {"system": name}) not in there
    ]
    if not names:
      print(f"already measured: {common}", flush=True)
      continue
    config = config_of(stream, args, temperature, rows, seed)
    kind = traffic.PAIRS[stream]
    if kind not in loaded:
      loaded.clear()  # frees a large target before the next one is loaded
      loaded |= systems.load({kind: config})

    common |= measure.provenance()  # of the code that was loaded
    keep = functools.partial(write, args.out, common)
    block = None if args.untimed else args.block
    measured(names, loaded[kind], config, block, keep)


def main() -> None:
  args = options().parse_args()
  if not args.table:
    measure.restart(args.threads)
    run(args)
  rich.console.Console(width=150).print(table(measure.read(args.out)))


if __name__ == "__main__":
  try:
    main()
  except base.InputError as error:
    sys.exit(str(error))
