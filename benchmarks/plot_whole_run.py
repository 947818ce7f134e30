"""Draws the time that drafts save over requests, from the results of `bench_whole_run`.

A panel a setting, a line a system and seed: seconds of plain decoding so far less those
of the system, as a share of all seconds of plain decoding. Where a learning draft's
line crosses that of its frozen one for good, learning has paid for itself.

  python benchmarks/plot_whole_run.py [--results FILE] [--output FILE]
"""

import argparse
import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import measure
import numpy as np

from osd_jax.writers import canvas

PLAIN = "plain"
LOOKS = {
  "independent frozen": (canvas.FLOOR, "--"),
  "independent online": (canvas.ONLINE, "-"),
  "attached frozen": (canvas.BUSY, ":"),
  "attached online": (canvas.COLORS[2], "-"),
}
Row = Mapping[str, Any]


def panels(rows: Sequence[Row]) -> dict[str, dict[tuple[int, str], Row]]:
  """Rows that hold the course of a run: by setting, then by seed and system."""
  courses: dict[str, dict[tuple[int, str], Row]] = {}
  for row in rows:
    if "cumulated_seconds" in row:
      setting = f"{row['setting']}; {row['clock']}"
      courses.setdefault(setting, {})[row["seed"], row["system"]] = row
  return courses


def saved(plain: Row, row: Row) -> tuple[list[int], np.ndarray]:
  """Requests served, and the share of plain decoding's time saved by then, in %."""
  ours, its = (np.array([0.0, *r["cumulated_seconds"]]) for r in (row, plain))
  return [0, *row["block_ends"]], 100 * (its - ours) / its[-1]


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Writes the picture.

  Args:
    rows: of results/whole_run.jsonl.
    path: the PNG file.
  """
  import matplotlib

  courses = panels(rows)
  if not courses:
    raise SystemExit("plot_whole_run: no row holds seconds by block; run the benchmark")
  columns = min(len(courses), 2)
  lines = -(-len(courses) // columns)
  with matplotlib.rc_context(canvas.STYLE):
    made, axes = canvas.figure(
      "Time saved over plain decoding",
      rows=lines,
      columns=columns,
      height=canvas.HEIGHT * (1 + 0.8 * (lines - 1)),
    )
    for panel, (setting, course) in zip(axes, courses.items(), strict=False):
      draw_panel(panel, course)
      panel.set_xlabel(textwrap.fill(f"requests; {setting}", 96 // columns), fontsize=9)
    for place in range(0, len(axes), columns):
      axes[place].set_ylabel("% of all its time")
    for empty in axes[len(courses) :]:
      empty.set_axis_off()
    named = {}
    for panel in axes:
      named |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    made.legend(  # by name, once
      named.values(),
      named,
      loc="outside lower center",
      ncols=4,
      frameon=False,
      fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=canvas.DPI)


def draw_panel(axes: Any, course: Mapping[tuple[int, str], Row]) -> None:
  """One setting."""
  axes.axhline(0, color=canvas.PLAIN, lw=1)
  for (seed, system), row in course.items():
    if system != PLAIN:
      color, style = LOOKS[system]
      places, share = saved(course[seed, PLAIN], row)
      axes.plot(places, share, style, color=color, lw=1.6, label=system)


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  results = measure.RESULTS / "whole_run.jsonl"
  parser.add_argument("--results", type=pathlib.Path, default=results)
  parser.add_argument("--output", type=pathlib.Path, help="a PNG file")
  given = parser.parse_args(arguments)
  output = given.output or given.results.with_name("whole_run_saved.png")
  lines = given.results.read_text().splitlines()
  draw([json.loads(line) for line in lines], output)
  print(output)


if __name__ == "__main__":
  main()
