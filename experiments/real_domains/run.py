"""Gain of the online draft over a static draft on the four real domains.

Reads the metrics that `osd online --gin_file=experiments/shift_cpu.gin` wrote; the run
may still be in progress. For each segment it prints the overlap of both drafts over the
last requests with the standard error of their paired difference, the dip at the
boundary, and the number of requests until the online draft leads and until it reaches
90 % of its final level (means of 25 requests).

The static draft is the one with which the run began. With --static it is the draft of
another, frozen run of the same stream, for example an independent draft to compare with
an attached one.

  python experiments/real_domains/run.py [--run runs/shift_cpu] [--last 200] \\
      [--static runs/shift_cpu_static]
"""

import argparse
import itertools
import json
import pathlib

import numpy as np
import rich.console
import rich.table

from osd_jax import metrics, runs

WINDOW = 25


def segments(path: pathlib.Path) -> list[tuple[str, list[dict]]]:
  """Returns (domain, its requests in order of finishing) for each segment."""
  rows = [row for row in runs.read(path) if row["kind"] == "request"]
  grouped = itertools.groupby(rows, key=lambda row: row["source"])
  return [(label, list(part)) for label, part in grouped]


def summary(rows: list[dict], last: int, before: list[dict]) -> dict[str, float | None]:
  """Returns the figures of one segment; `before` is the previous segment."""
  online, floor = column(rows, "overlap"), column(rows, "floor_overlap")
  accepted = column(rows, "acceptance_rate") - column(rows, "floor_acceptance_rate")
  gain = (online - floor)[-last:]
  level = float(online[-last:].mean())
  dip = None
  if before:
    dip = float(column(before, "overlap")[-50:].mean() - online[:50].mean())
  return {
    "requests": len(rows),
    "static": float(floor[-last:].mean()),
    "online": level,
    "gain": float(gain.mean()),
    "standard_error": float(gain.std(ddof=1) / np.sqrt(len(gain))),
    "acceptance_gain": float(accepted[-last:].mean()),
    "dip": dip,
    "passes_static": passes(online, floor),
    "recovery": metrics.recovery_requests(list(online), level, WINDOW),
  }


def against(
  parts: list[tuple[str, list[dict]]], static: pathlib.Path
) -> list[tuple[str, list[dict]]]:
  """Returns the rows with the static draft's figures taken from another run."""
  rivals = {row["query"]: row for _, rows in segments(static) for row in rows}
  names = ("overlap", "acceptance_rate")
  return [
    (
      label,
      [
        {**row, **{f"floor_{name}": rivals[row["query"]][name] for name in names}}
        for row in rows
        if row["query"] in rivals
      ],
    )
    for label, rows in parts
  ]


def column(rows: list[dict], name: str) -> np.ndarray:
  """Returns one field of all rows."""
  return np.asarray([row[name] for row in rows])


def passes(online: np.ndarray, floor: np.ndarray) -> int | None:
  """Returns the number of requests until the online draft leads in most of a window."""
  return metrics.recovery_requests(list(online > floor), 0.5, WINDOW, share=1.0)


def main() -> None:
  """Prints a JSON line for each segment, then a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--run", type=pathlib.Path, default="runs/shift_cpu")
  parser.add_argument("--last", type=int, default=200)
  parser.add_argument("--static", type=pathlib.Path, help="a frozen run")
  args = parser.parse_args()
  console = rich.console.Console()
  table, before = None, []
  parts = segments(args.run / "metrics.jsonl")
  if args.static:
    parts = against(parts, args.static / "metrics.jsonl")
  for label, rows in parts:
    row = summary(rows, args.last, before)
    console.print(json.dumps({"domain": label, **row}), soft_wrap=True)
    if table is None:
      table = rich.table.Table("domain", *row)
    table.add_row(label, *map(cell, row.values()))
    before = rows
  console.print(table or "no requests yet")


def cell(value: float | None) -> str:
  """Formats a figure for the table."""
  if value is None:
    return "-"
  return str(value) if isinstance(value, int) else f"{value:.3f}"


if __name__ == "__main__":
  main()
