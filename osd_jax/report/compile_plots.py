"""Plots of `osd compile`: the memory of a chip and its highest speed.

Each function takes the rows of metrics.jsonl and returns a figure, or None if the rows
have no data for it.
"""

from collections.abc import Sequence
from typing import Any

from osd_jax import runs
from osd_jax.report import canvas, series


def memory(rows: Sequence[series.Row]) -> Any:
  """Gigabytes of a chip's memory, by what they hold."""
  held = [
    (row["what"], row["gigabytes_a_chip"]) for row in runs.of_kind(rows, "memory")
  ]
  if not held or not runs.of_kind(rows, "fits"):  # a killed run has no such row
    return None
  (fits,) = runs.of_kind(rows, "fits")
  names, sizes = zip(*held, strict=True)
  figure, (axes,) = canvas.figure(
    f"Memory of a chip: {fits['needed_gb']:.3g} of {fits['memory_gb']:.3g} GB"
  )
  bars = axes.barh(range(len(held)), sizes, 0.7, color=canvas.ONLINE)
  axes.bar_label(bars, fmt="%.3g", fontsize=9, padding=3, color=canvas.PLAIN)
  axes.set_yticks(range(len(held)), names)
  axes.invert_yaxis()
  axes.grid(axis="x")
  axes.grid(visible=False, axis="y")
  # Below the limit, a line at the limit would make all bars too short to see.
  if fits["needed_gb"] > fits["memory_gb"]:
    axes.axvline(fits["memory_gb"], color=canvas.FLOOR, lw=1.5, label="all of a chip")
    canvas.legend(axes)
  axes.set_xlabel("GB")
  return figure


def speeds(rows: Sequence[series.Row]) -> Any:
  """Highest tokens per second by acceptance: plain, frozen and online."""
  estimates = runs.of_kind(rows, "estimate")
  if not estimates:
    return None
  figure, (axes,) = canvas.figure(
    "Highest tokens per second, from the chip's data sheet"
  )
  rates = [row["acceptance"] for row in estimates]
  for name, field, color, style in (
    ("online", "online_tokens_s", canvas.ONLINE, "o-"),
    ("frozen", "frozen_tokens_s", canvas.FLOOR, "s--"),
    ("plain", "plain_tokens_s", canvas.PLAIN, ":"),
  ):
    values = [row[field] for row in estimates]
    axes.plot(rates, values, style, color=color, lw=1.8, label=name)
  axes.set_ylim(bottom=0)
  axes.set(xlabel="acceptance of a drafted token", ylabel="tokens/s")
  canvas.legend(axes)
  return figure
