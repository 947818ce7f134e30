"""Plots of training, of held-out measurements and of certificates."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from osd_jax import runs
from osd_jax.report import canvas, series


def loss(rows: Sequence[series.Row]) -> Any:
  """Loss over optimiser steps."""
  steps = runs.of_kind(rows, "step")
  losses = runs.column(steps, "loss")
  if not np.isfinite(losses).any():
    return None
  figure, (axes,) = canvas.figure("Training loss")
  axes.plot(runs.column(steps, "step"), losses, color=canvas.ONLINE, lw=1.8)
  finite = losses[np.isfinite(losses)]
  if finite.min() > 0 and finite.max() > 30 * finite.min():
    axes.set_yscale("log")
  else:
    axes.set_ylim(bottom=0)
  axes.set_xlabel("optimiser step; each point is the mean since the last one")
  return figure


def held_out(rows: Sequence[series.Row]) -> Any:
  """The results of every evaluation on held-out prompts, one line per task."""
  evaluations = runs.of_kind(rows, "evaluation")
  if not evaluations:
    return None
  tasks = evaluations[-1]["tasks"]
  names = {
    "distribution_overlap": "Held-out distribution overlap",
    "exact_match": "Held-out greedy exact match",
  }
  name = next((n for n in names if any(n in task for task in tasks.values())), "")
  if not name:
    return None
  figure, (axes,) = canvas.figure(names[name])
  steps = [row["step"] for row in evaluations]
  for place, label in enumerate(tasks):
    values = [row["tasks"].get(label, {}).get(name) for row in evaluations]
    axes.plot(
      steps,
      [np.nan if value is None else value for value in values],
      canvas.STYLES[place % len(canvas.STYLES)],
      marker="o",
      markersize=4,
      color=canvas.COLORS[place % len(canvas.COLORS)],
      lw=2,
      label=label,
    )
  axes.set_ylim(0, 1.02)
  axes.set_xlabel("optimiser step")
  _legend_below(figure, axes)
  return figure


def drafts(rows: Sequence[series.Row]) -> Any:
  """Overlap of every draft with the target, one group of bars per task."""
  return _by_draft(rows, "draft", "task", "distribution_overlap", "Overlap of drafts")


def speeds(rows: Sequence[series.Row]) -> Any:
  """Speed-up of every draft over plain decoding, by rows in flight."""
  named = [
    {**row, "rows": f"{row['rows']} row(s)"} for row in runs.of_kind(rows, "speed")
  ]
  title = "Speed-up over plain decoding"
  figure = _by_draft(named, "speed", "rows", "speed_up", title)
  if figure is not None:
    figure.axes[0].axhline(1, color=canvas.INK, lw=0.8, ls=":")
  return figure


def certificate(rows: Sequence[series.Row]) -> Any:
  """Share of outputs that equal plain decoding's, one bar per arrangement."""
  checks = runs.of_kind(rows, "certificate")
  if not checks:
    return None
  names = [
    ", ".join(f"{key} {row[key]}" for key in ("K", "rows", "draft") if key in row)
    for row in checks
  ]
  equal = [row["equal"] / max(row["outputs"], 1) for row in checks]
  height = 1.4 + 0.34 * len(checks)
  figure, (axes,) = canvas.figure("Outputs equal to plain decoding's", height=height)
  colors = [canvas.ONLINE if row["passed"] else canvas.FLOOR for row in checks]
  bars = axes.barh(range(len(checks)), equal, 0.62, color=colors)
  labels = [
    f"{row['equal']} of {row['outputs']}"
    + (f", {row['near_ties']} near ties" if row["near_ties"] else "")
    + ("" if row["passed"] else "  NOT EXACT")
    for row in checks
  ]
  axes.bar_label(bars, labels, padding=4, fontsize=9, color=canvas.PLAIN)
  axes.set_yticks(range(len(checks)), names)
  axes.set_xlim(0, 1.25)
  axes.set_xticks(np.arange(0, 1.01, 0.25))
  axes.invert_yaxis()
  axes.grid(False)
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel("share of outputs")
  return figure


def _by_draft(
  rows: Sequence[series.Row], kind: str, group: str, value: str, title: str
) -> Any:
  """Groups of bars, one bar per draft."""
  chosen = [row for row in runs.of_kind(rows, kind) if row.get(value) is not None]
  if not chosen:
    return None
  groups = list(dict.fromkeys(str(row[group]) for row in chosen))
  labels = list(dict.fromkeys(row["draft"] for row in chosen))[: len(canvas.COLORS)]
  known = {(str(row[group]), row["draft"]): row[value] for row in chosen}
  figure, (axes,) = canvas.figure(title)
  canvas.grouped_bars(
    axes,
    groups,
    {name: [known.get((one, name), np.nan) for one in groups] for name in labels},
  )
  axes.margins(y=0.12)
  _legend_below(figure, axes)
  return figure


def _legend_below(figure: Any, axes: Any) -> None:
  """A legend for many series, which would not fit next to the title."""
  handles, names = axes.get_legend_handles_labels()
  columns = max(1, min(len(names), 90 // (max(map(len, names)) + 6)))
  figure.legend(
    handles,
    names,
    loc="outside lower center",
    ncols=columns,
    frameon=False,
    fontsize=10,
  )
