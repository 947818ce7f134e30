"""The paper's experiment on published weights: drafts that learn from a set of queries.

Every system meets the same greedy answers of the target in the same order, see
`osd_tools.replay`. A draft that knows generic chats alone serves a set of the paper,
or another system does:

    generic          the draft never learns
    static           distilled on the answers before the stream, then frozen
    as published     learns as the paper's scripts do; every new draft serves
    ours             learns with replay, from all positions
    static, then ...  the static draft learns on
    ..., unguarded   every new draft serves, even one that is worse
    offline          distilled on the first three quarters of the stream
    offline on all   distilled on the whole stream
    cache            the n-gram cache, no draft
    cache + ...      both

A stream is one set, or all four: one after another ("shift"), or in a random order
("mixture"). Figures of one set are about the last quarter of its stream, those of four
about the whole one. record.py records the answers first. A cell is one system on one
stream with one seed, in blocks of 40 requests. It is appended to `--out` when it is
finished, and the same command skips what is there.

  python experiments/paper/run.py --target FOLDER [--sets spider gsm8k] [--warm 800]
      [--online 4000] [--seeds 3] [--columns static ours] [--draft independent]
      [--out FILE] [--sets shift mixture]
  python experiments/paper/run.py --quick   # the demo's target and SQL topic, minutes
  python experiments/paper/run.py --table   # prints the cells, measures nothing
"""

# ruff: noqa: E402 (the folders were just added)
import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import columns
import jax
import numpy as np
import record
import rich.console
import rich.table
import sets

from osd_jax import base, corpus, pairs
from osd_jax.data import examples
from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.models import families
from osd_jax.models.convert import eagle as heads
from osd_jax.models.shapes import AttachedConfig, EagleConfig, LlamaConfig
from osd_tools import replay

CELLS = HERE / "cells.jsonl"
FOLDER = pathlib.Path("runs/paper")  # of distilled drafts
DRAFTS = ("attached", "independent", "eagle")
# What a table has in common: the pair, the sets, and the sizes and steps of drafts.
SETTINGS = ("pair", "set", "warm", "online", "chats", "chat_steps", "warm_steps")
KEY = (*SETTINGS, "column", "seed")
BLOCK = 40  # requests
SAMPLES = 2000  # of the bootstrap
FEWEST = 6  # blocks that it needs
STREAMS = ("shift", "mixture")  # of all sets
LATE = 4  # one part of this many, the last one, is where a stream has adapted
NEAR = 0.9  # share of the offline draft's acceptance
Cell = dict[str, Any]
Figure = Callable[[np.ndarray], float]  # of blocks


# ---- Cells


def blocks(course: replay.Course) -> list[list[float]]:
  """Returns [requests, tokens, calls, first tokens that are right, overlap] of blocks.

  The overlap is summed over the requests.
  """
  calls = course.calls(columns.DRAFTED)
  right = np.asarray([one[0].sum() for one in course.right])
  every = np.stack([np.ones_like(calls), course.tokens, calls, right, course.overlap])
  starts = range(0, len(calls), BLOCK)
  return [np.round(every[:, at : at + BLOCK].sum(1), 3).tolist() for at in starts]


def cell(study: columns.Study, key: Cell, computed: columns.Result) -> Cell:
  """Returns what is written about a system on a stream."""
  figures = {"blocks": blocks(computed.course), "updates": computed.course.updates}
  figures["slices"] = computed.course.slices
  if computed.params is not None and not key["column"].startswith("cache"):
    rows = [columns.row(study.held_out, at) for at in range(len(study.held_out.weight))]
    chats = replay.frozen(study.pair.draft, computed.params, rows, columns.DRAFTED)
    figures["of_chats"] = blocks(chats)
  return key | figures


def read(path: pathlib.Path) -> list[Cell]:
  """Returns the cells of a file, none if it does not exist."""
  lines = path.read_text().splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]


def run(
  study: columns.Study, seeds: int, names: Sequence[str], out: pathlib.Path
) -> None:
  """Computes the cells of a study that are missing."""
  done = {tuple(one[part] for part in KEY) for one in read(out)}
  for seed in range(seeds):
    systems = columns.Columns(study, seed)
    for column in names:
      key = study.settings | {"column": column, "seed": seed}
      if tuple(key[part] for part in KEY) in done:
        continue
      written = cell(study, key, systems.result(column))
      with out.open("a") as file:
        file.write(f"{json.dumps(written)}\n")
      figures = "{:.3f}, {:.2f} tokens a call".format(*late(written))
      print(f"{key['set']}, seed {seed}, {column}: {figures}", flush=True)


# ---- Figures


def acceptance(parts: np.ndarray) -> float:
  """Share of tokens that the draft names right after a verified token."""
  return float(parts[..., 3].sum() / parts[..., 1].sum())


def per_call(parts: np.ndarray) -> float:
  """Emitted tokens per target call."""
  return float(parts[..., 1].sum() / parts[..., 2].sum())


def whole(one: Cell) -> np.ndarray:
  """Returns the blocks of a stream."""
  return np.asarray(one["blocks"])


def last(one: Cell) -> np.ndarray:
  """Returns the blocks of the end of a stream, all of one with several sets."""
  parts = whole(one)
  if one["set"] in STREAMS:
    return parts
  return parts[-max(len(parts) // LATE, 1) :]


def late(one: Cell) -> tuple[float, float]:
  """Returns acceptance and tokens per call at the end of a stream."""
  return acceptance(last(one)), per_call(last(one))


def gain(
  ours: Sequence[Cell],
  rival: Sequence[Cell],
  figure: Figure,
  part: Callable[[Cell], np.ndarray] = last,
) -> tuple[float, ...]:
  """Returns the difference of two systems in a part, and its 95 % interval.

  A paired bootstrap over the blocks of the seeds that both have: it is about other
  requests, not about other drafts. Too few blocks have no interval.
  """
  seeds = {one["seed"] for one in ours} & {one["seed"] for one in rival}
  first, second = (
    np.concatenate([part(one) for one in cells if one["seed"] in seeds])
    for cells in (ours, rival)
  )
  difference = figure(first) - figure(second)
  if len(first) < FEWEST:
    return (difference,)
  rng = np.random.default_rng(0)
  drawn = rng.integers(0, len(first), (SAMPLES, len(first)))
  samples = [figure(first[at]) - figure(second[at]) for at in drawn]
  return difference, *np.quantile(samples, [0.025, 0.975])


def requests_to_near(one: Cell, offline: Cell) -> int | None:
  """Returns the requests until acceptance is near an offline draft's; None if never."""
  parts, goal = np.asarray(one["blocks"]), NEAR * late(offline)[0]
  for end in range(1, len(parts) + 1):
    if acceptance(parts[max(end - 2, 0) : end]) >= goal:
      return int(parts[:end, 0].sum())
  return None


# (title, figure, part of a stream)
FIGURES: tuple[tuple[str, Figure, Callable[[Cell], np.ndarray]], ...] = (
  ("acceptance, late", acceptance, last),
  ("tokens a call, late", per_call, last),
  ("tokens a call, all requests", per_call, whole),
)


def table(cells: Sequence[Cell]) -> Iterator[rich.table.Table]:
  """Yields a table of each study; means over seeds."""
  groups: dict[tuple[Any, ...], list[Cell]] = {}
  for one in sorted(cells, key=lambda one: one["seed"]):
    groups.setdefault(tuple(one[name] for name in SETTINGS), []).append(one)
  for group in sorted(groups):
    title = "{}, {}: {} answers before, {} in the stream".format(*group)
    shown = rich.table.Table("system", title=title)
    for name, _, _ in FIGURES:
      shown.add_column(name)
      shown.add_column("over static")
    shown.add_column("requests to .9 of offline")
    shown.add_column("chats")
    by_column = {
      name: [one for one in groups[group] if one["column"] == name]
      for name in columns.COLUMNS
    }
    for name, of_seeds in by_column.items():
      if of_seeds:
        shown.add_row(name, *entries(of_seeds, by_column))
    yield shown


def entries(of_seeds: Sequence[Cell], by_column: dict[str, list[Cell]]) -> list[str]:
  """Returns the entries of a system in a table."""
  name = of_seeds[0]["column"]
  static, row = by_column["static"], []
  is_rival = [x["seed"] for x in static] == [x["seed"] for x in of_seeds]
  for _, figure, part in FIGURES:
    value = np.mean([figure(part(one)) for one in of_seeds])
    row += [f"{value:.3f}", ""]
    if name != "static" and is_rival:
      difference, *interval = gain(of_seeds, static, figure, part)
      bounds = f" ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval else ""
      row[-1] = f"{difference:+.3f}{bounds}"
  row += ["", ""]
  offline = {one["seed"]: one for one in by_column["offline"]}
  if name != "offline" and "cache" not in name:
    counts = [
      requests_to_near(one, offline[one["seed"]])
      for one in of_seeds
      if one["seed"] in offline
    ]
    row[-2] = ", ".join("never" if one is None else str(one) for one in counts)
  if "of_chats" in of_seeds[0]:
    chats = np.mean([acceptance(np.asarray(one["of_chats"])) for one in of_seeds])
    row[-1] = f"{chats:.3f}"
  return row


# ---- Studies


def published(args: argparse.Namespace, name: str) -> columns.Study:
  """A published target and a draft that knows generic chats, on a set or on all."""
  recorded, folder = record.load(args.target), args.rows_folder / args.name
  is_attached = args.draft == "attached"
  pair = recorded if is_attached else MAKERS[args.draft](recorded, args.target)

  def rows(name: str, count: int) -> base.DistillationBatch:
    prompts = sets.read(args.data, pair.vocabulary, name)
    answers = record.rows_of(recorded, prompts, folder, count)
    if args.draft == "eagle":
      return with_states(pair, answers, folder / f"{name}_{count}_layers")
    # States of the target are for attached drafts alone.
    return answers if is_attached else answers.replace(**dict.fromkeys(answers.states))

  parts = list(sets.PAPER) if name in STREAMS else [name]
  answers = [rows(part, args.warm + args.online) for part in parts]
  known = args.warm // len(parts)
  warm = corpus.stack([first(one, known) for one in answers])
  phases = [jax.tree.map(lambda leaf: leaf[args.warm :], one) for one in answers]
  return study(
    args,
    {"pair": f"{args.name}, {args.draft}", "set": name},
    pair,
    warm,
    phases if name == "shift" else [corpus.stack(phases)],
    corpus.stack([rows(one, args.chat_count) for one in sets.GENERIC]),
    corpus.stack([rows(f"{one}.eval", sets.HELD_OUT_ROWS) for one in sets.GENERIC]),
  )


def first(rows: base.DistillationBatch, count: int) -> base.DistillationBatch:
  """Returns the first answers."""
  return jax.tree.map(lambda leaf: leaf[:count], rows)


def with_independent_draft(pair: pairs.Pair, path: str) -> pairs.Pair:
  """The paper's form of a draft: a small model of the target's kind and vocabulary."""
  del path  # the target is the same
  assert pair.identity is not None
  target = pair.identity.config
  if not isinstance(target, LlamaConfig):
    raise SystemExit("--draft: 'independent' needs a target of the Llama family")
  shape = dataclasses.replace(target, **SMALL)
  draft = families.build(shape, "draft")
  params = draft.init(jax.random.key(0))
  return dataclasses.replace(
    pair, draft=draft, draft_params=params, draft_config=shape, is_new=False
  )


def with_eagle_head(pair: pairs.Pair, path: str) -> pairs.Pair:
  """The same target with a new EAGLE-3 head, over the whole vocabulary."""
  assert pair.identity is not None
  target = pair.identity.config
  if not isinstance(target, LlamaConfig):
    raise SystemExit("--draft: 'eagle' needs a target of the Llama family")
  return record.load(
    path,
    EagleConfig(
      layers=dataclasses.replace(target, num_layers=1),
      draft_vocab_size=target.vocab_size,
      state_layers=heads.usual_layers(target),
    ),
  )


def with_states(
  pair: pairs.Pair, answers: base.DistillationBatch, path: pathlib.Path
) -> base.DistillationBatch:
  """Adds the states that a head reads, computed once from the recorded texts."""
  if not (file := path.with_suffix(".npy")).exists():
    served, parts = pair.target.prepare(pair.target_params), []
    read = jax.jit(lambda *prompts: pair.target.prefill(*prompts, 1).target_states)
    for start in range(0, len(answers.weight), STATE_ROWS):
      rows = slice(start, start + STATE_ROWS)
      source, text = answers.source[rows], answers.target[rows]
      mask = np.concatenate([pair.target.mask(source), answers.mask[rows]], axis=1)
      # A text is read like a prompt, which may have padding anywhere.
      states = read(served, np.concatenate([source, text], axis=1), mask)
      parts.append(np.asarray(states).view(np.uint16))  # numpy's files know no bfloat16
      done = min(start + STATE_ROWS, len(answers.weight))
      print(f"{path.stem}: {done} of {len(answers.weight)}", flush=True)
    np.save(file, np.concatenate(parts))
  both = np.load(file, mmap_mode="r").view(jax.numpy.bfloat16)
  length = answers.source.shape[1]
  last = pair.target.mask(answers.source).sum(1) - 1  # the first input of decoding
  first = both[np.arange(len(last)), last][:, None]
  token_states = np.concatenate([first, both[:, length:-1]], axis=1)
  return answers.replace(target_states=both[:, :length], token_states=token_states)


STATE_ROWS = 16  # answers that are read at once
MAKERS = {"independent": with_independent_draft, "eagle": with_eagle_head}

# 5.2 million parameters with a vocabulary of 49,152.
SMALL = {
  "width": 96,
  "num_heads": 4,
  "num_kv_heads": 4,
  "head_dim": 24,
  "mlp_dim": 288,
  "num_layers": 3,
  "tied_head": True,
  "embedding_std": 0.1,
}


def quick(args: argparse.Namespace, name: str) -> columns.Study:
  """A new draft for the demo's target: its other topics are the generic chats."""
  shape = AttachedConfig(reads="tokens")
  pair = record.load(pairs.SHIPPED, shape)
  others = [topic for topic in examples.TOPICS if topic != name]

  def rows(topics: Sequence[str], split: str, count: int) -> base.DistillationBatch:
    tasks = tuple(examples.topic_task(topic, split, count) for topic in topics)
    prompts = read_corpus(BatchConfig(tasks), pair.vocabulary)
    asked = sets.Prompts(f"{name}_{split}", prompts)
    return record.rows_of(pair, asked, None, len(prompts))

  answers = rows([name], "train", args.warm + args.online)
  return study(
    args,
    {"pair": "demo, attached", "set": name},
    pair,
    first(answers, args.warm),
    [jax.tree.map(lambda leaf: leaf[args.warm :], answers)],
    rows(others, "train", args.chat_count),
    rows(others, "eval", QUICK_HELD_OUT),
  )


def study(
  args: argparse.Namespace,
  settings: Cell,
  pair: pairs.Pair,
  warm: base.DistillationBatch,
  phases: Sequence[base.DistillationBatch],
  chats: base.DistillationBatch,
  held_out: base.DistillationBatch,
) -> columns.Study:
  """Distils the first draft on generic chats; returns the study of a set."""
  settings = settings | {
    "warm": args.warm,
    "online": args.online,
    "chats": len(chats.weight),
    "chat_steps": args.chat_steps,
    "warm_steps": args.warm_steps,
  }
  name = "{pair}_{chats}_{chat_steps}".format(**settings).replace(", ", "_")
  folder = args.folder / name
  start = columns.distilled(
    pair, pair.draft_params, chats, args.chat_steps, folder / "chats.safetensors"
  )
  return columns.Study(
    settings=settings,
    pair=dataclasses.replace(pair, draft_params=start, is_new=False),
    warm=warm,
    phases=tuple(phases),
    held_out=held_out,
    steps=args.warm_steps,
    drafts=folder / "{set}_{warm}_{online}_{warm_steps}".format(**settings),
  )


QUICK_HELD_OUT = 20  # prompts of each of the other topics
QUICK = {
  "sets": ["sql"],
  "warm": 40,
  "online": 160,
  "seeds": 1,
  "chat_count": 60,
  "chat_steps": 120,
  "warm_steps": 60,
}


def parser() -> argparse.ArgumentParser:
  options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  options.add_argument("--target", help="folder of the target's weights")
  options.add_argument("--name", default="smollm2_135m")
  options.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0])
  known = (*sets.PAPER, *STREAMS)
  options.add_argument("--sets", nargs="*", choices=known, default=list(sets.PAPER))
  known = tuple(columns.COLUMNS)
  options.add_argument("--columns", nargs="*", choices=known, default=list(known))
  options.add_argument("--warm", type=int, default=sets.WARM)
  options.add_argument("--online", type=int, default=sets.ONLINE)
  options.add_argument("--seeds", type=int, default=3)
  options.add_argument("--chat_count", type=int, default=sets.GENERIC_ROWS)
  options.add_argument("--chat_steps", type=int, default=600)
  options.add_argument("--warm_steps", type=int, default=300)
  options.add_argument("--data", type=pathlib.Path, default=sets.DATA)
  options.add_argument("--rows_folder", type=pathlib.Path, default=record.ROWS)
  options.add_argument("--folder", type=pathlib.Path, default=FOLDER)
  options.add_argument("--out", type=pathlib.Path, default=CELLS)
  options.add_argument("--quick", action="store_true")
  options.add_argument("--table", action="store_true")
  return options


def main(words: Sequence[str] | None = None) -> None:
  args = parser().parse_args(words)
  if args.quick:
    vars(args).update(QUICK)
    if args.out == CELLS:
      args.out = args.folder / "quick.jsonl"
  elif not args.table and not args.target:
    raise SystemExit("--target: expected a folder with the weights of a model")
  args.out.parent.mkdir(parents=True, exist_ok=True)
  for name in () if args.table else args.sets:
    one = (quick if args.quick else published)(args, name)
    run(one, args.seeds, args.columns, args.out)
  console = rich.console.Console()
  for shown in table(read(args.out)):
    console.print(shown)


if __name__ == "__main__":
  main()
