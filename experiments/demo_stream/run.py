"""Learning on the demo stream: rise, recovery after each shift, forgetting.

Trains the offline-distilled draft unless it exists, serves the stream once per seed,
and measures the drafts saved at every shift on held-out prompts of all topics. `--keep`
writes the overlaps of the first seed, from which benchmarks/figures.py draws a picture.

  python experiments/demo_stream/run.py [--seeds 3] [--out runs/demo_stream]
      [--gin_file runs/demo.gin] [--keep experiments/demo_stream/overlap.jsonl]
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
import rich.console
import rich.table

from osd_jax import corpus, metrics, offline, online, pairs, runs, sharding
from osd_jax.data import streams
from osd_jax.data.batches import read_corpus
from osd_jax.engine import agreement
from osd_jax.engine.server import Server
from osd_jax.loop import rows as rows_lib
from osd_jax.main import settings
from osd_jax.report import tables

HELD_OUT = 100  # prompts per topic


def ceiling(pair, answers, labels) -> dict[str, float]:
  """Returns the held-out overlap of the offline-distilled draft by topic."""
  config, text = settings.load(
    offline.OfflineConfig, ["experiments/demo_ceiling.gin"], []
  )
  if not pathlib.Path(config.output).exists():
    offline.run(config, text)
  return overlap(pair, pair.load_draft(config.output), answers, labels)


def overlap(pair, params, answers, labels) -> dict[str, float]:
  """Returns the held-out overlap of a draft by topic."""
  rows = agreement.mean_agreement(pair.draft, params, answers)
  return {labels[task]: row["distribution_overlap"] for task, row in rows.items()}


def held_out_answers(config: online.OnlineConfig, pair: pairs.Pair):
  """Returns recorded answers to held-out prompts, and the label of each topic."""
  evaluation, _ = settings.load(
    offline.OfflineConfig,
    ["experiments/demo_ceiling.gin"],
    [f"GENERATED_EVAL_ROWS={HELD_OUT}"],
  )
  decoding = dataclasses.replace(config.decoding, rows=8)
  server = Server(pair, decoding, partition=config.partition)
  prompts = read_corpus(evaluation.evaluation, pair.vocabulary)
  labels = [task.label for task in evaluation.evaluation.tasks]
  return server.run(corpus.requests(prompts, config.sampling)), labels


def served(
  gin_file: str, seed: int, out: pathlib.Path
) -> tuple[online.OnlineConfig, pathlib.Path]:
  """Serves the stream of a seed unless already done; returns config and folder."""
  config, text = settings.load(
    online.OnlineConfig,
    [gin_file],
    [
      f"StreamConfig.seed={seed}",
      f"LearningConfig.seed={seed}",
      "OnlineConfig.keep_drafts=True",
      "OnlineConfig.compare_every=0",
      f"OnlineConfig.run_directory='{out / f'seed_{seed}'}'",
    ],
  )
  if not (out / f"seed_{seed}" / "draft.safetensors").exists():
    online.run(config, text)
  return config, out / f"seed_{seed}"


def curves(path: pathlib.Path, level: dict[str, float]) -> dict[str, dict]:
  """Returns for each topic means, first and last 50, and requests to recover."""
  requests = rows_lib.requests(rows_lib.read(path / "metrics.jsonl"))
  by_label = {}
  for label, rows in tables.by_segment(requests):
    row = segment_summary(rows)
    row["recovery"] = metrics.recovery_requests(
      [request.overlap for request in rows], level[label]
    )
    by_label[label] = row
  return by_label


def segment_summary(rows, edge: int = 50) -> dict[str, float]:
  """Returns means over the first, the last and all requests of a topic."""
  summary: dict[str, float] = {"requests": len(rows)}
  fields = {
    "overlap": "overlap",
    "floor_overlap": "floor_overlap",
    "draft_acceptance": "draft_acceptance_rate",
    "tokens_per_target_call": "tokens_per_target_call",
  }
  for label, part in (("first", rows[:edge]), ("last", rows[-edge:]), ("mean", rows)):
    for name, field in fields.items():
      # A request has no rate if it drafted no token.
      summary[f"{name}_{label}"] = float(np.nanmean(rows_lib.column(part, field)))
  return summary


def forgetting(pair, path: pathlib.Path, shifts, answers, labels) -> dict[str, float]:
  """Returns the overlap that each topic lost between its end and the stream's end."""
  final = pair.load_draft(path / "draft.safetensors")
  at_end = overlap(pair, final, answers, labels)
  files = sorted((path / "drafts").glob("*.safetensors"))
  lost = {}
  for (_, label), file in zip(shifts, files, strict=False):
    then = overlap(pair, pair.load_draft(file), answers, labels)
    lost[label] = then[label] - at_end[label]
  return lost


def main() -> None:
  """Trains the ceiling, serves every seed, and prints means and ranges."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--out", type=pathlib.Path, default="runs/demo_stream")
  parser.add_argument("--gin_file", default="runs/demo.gin")
  parser.add_argument(
    "--keep", type=pathlib.Path, help="file for the overlaps of seed 0"
  )
  args = parser.parse_args()
  console = rich.console.Console()
  first, _ = settings.load(online.OnlineConfig, [args.gin_file], [])
  pair = pairs.load_pair(first.pair, sharding.make(first.partition))
  answers, labels = held_out_answers(first, pair)
  level = ceiling(pair, answers, labels)
  frozen = overlap(pair, pair.draft_params, answers, labels)
  console.print(json.dumps({"held_out": {"frozen": frozen, "offline": level}}))
  results = []
  for seed in range(args.seeds):
    config, path = served(args.gin_file, seed, args.out)
    stream_shifts = shifts_of(config, pair)
    row = {
      "seed": seed,
      "topics": curves(path, level),
      "forgetting": forgetting(pair, path, stream_shifts, answers, labels),
    }
    console.print(json.dumps(row), soft_wrap=True)
    results.append(row)
    if args.keep and not seed:
      keep(path, stream_shifts, args.keep)
  show(results, console)


def keep(run: pathlib.Path, shifts, path: pathlib.Path) -> None:
  """Writes the overlap of both drafts by request as one line of JSON."""
  rows = [r for r in runs.read(run / "metrics.jsonl") if r["kind"] == "request"]
  rows.sort(key=lambda row: row["query"])
  columns = {"online": "overlap", "frozen": "floor_overlap"}
  line = {name: [round(r[field], 3) for r in rows] for name, field in columns.items()}
  provenance = json.loads((run / "provenance.json").read_text())
  line |= {"shifts": shifts, "commit": provenance["git_sha"][:7]}
  path.write_text(json.dumps(line) + "\n")


def shifts_of(config: online.OnlineConfig, pair: pairs.Pair):
  """Returns (first request, topic) of every segment."""
  return streams.QueryStream(config.stream, pair.vocabulary).shifts()


def show(results: list[dict], console: rich.console.Console) -> None:
  """Prints mean and range over the seeds."""

  def spread(values) -> str:
    numbers = [v for v in values if v is not None]
    missing = len(list(values)) - len(numbers)
    text = (
      f"{np.mean(numbers):.3f} ({min(numbers):.3f}-{max(numbers):.3f})"
      if numbers
      else "-"
    )
    return text + (f", {missing} never" if missing else "")

  columns = (
    "overlap_mean",
    "floor_overlap_mean",
    "overlap_first",
    "overlap_last",
    "draft_acceptance_last",
    "recovery",
  )
  table = rich.table.Table("topic", *columns, "forgetting")
  for label in results[0]["topics"]:
    cells = [spread([r["topics"][label][name] for r in results]) for name in columns]
    lost = [r["forgetting"].get(label) for r in results]
    table.add_row(label, *cells, spread(lost) if lost[0] is not None else "last topic")
  overall = [
    spread([np.mean([t[name] for t in r["topics"].values()]) for r in results])
    for name in columns[:2]
  ]
  table.add_row("all", *overall, *[""] * 5)
  console.print(table)


if __name__ == "__main__":
  main()
