"""The style of all plots.

The colours are those of Okabe and Ito, which people with colour blindness can tell
apart, and every series has its own line style. Matplotlib is imported only inside
functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ONLINE, FLOOR, PLAIN, BUSY = "#0072B2", "#D55E00", "#666666", "#CC79A7"
FAINT, INK = "#B8B8B8", "#222222"
COLORS = (ONLINE, FLOOR, "#009E73", BUSY, "#E69F00", "#56B4E9", PLAIN, "#000000")
STYLES = ("-", "--", "-.", ":")
DPI = 160
WIDTH, HEIGHT = 8.0, 4.0  # inches of a plot

STYLE: Any = {
  "font.family": "sans-serif",
  "font.size": 11,
  "axes.edgecolor": FAINT,
  "axes.labelcolor": INK,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.grid.axis": "y",
  "axes.axisbelow": True,
  "grid.color": "#ECECEC",
  "xtick.color": PLAIN,
  "ytick.color": PLAIN,
  "text.color": INK,
  "figure.facecolor": "white",
  "savefig.facecolor": "white",
}


def figure(
  title: str,
  *,
  rows: int = 1,
  columns: int = 1,
  height: float = HEIGHT,
  alike: bool = True,
) -> tuple[Any, list[Any]]:
  """Makes an empty figure and returns it with its axes, row by row.

  Args:
    title: printed above the axes.
    rows: number of rows of axes.
    columns: number of columns of axes.
    height: height of the whole figure, in inches.
    alike: whether the axes share their scales.
  """
  from matplotlib.figure import Figure  # not pyplot: no global state, no display
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  made = Figure(
    figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
  )
  grid = made.subplots(rows, columns, squeeze=False, sharex=alike, sharey=alike)
  axes = list(grid.flat)
  for one in axes:
    one.tick_params(length=3)
  if len(axes) == 1:
    axes[0].set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
  else:
    made.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold")
  return made, axes


def legend(axes: Any) -> None:
  """Puts the names of the series above the plot, on the line of the title."""
  handles, _ = axes.get_legend_handles_labels()
  if not handles:
    return
  axes.legend(
    loc="lower right",
    bbox_to_anchor=(1.0, 1.055),
    ncols=len(handles),
    frameon=False,
    borderaxespad=0.0,
    handlelength=2.0,
    handletextpad=0.5,
    columnspacing=1.1,
    fontsize=10 if len(handles) < 4 else 9,
  )


def grouped_bars(
  axes: Any,
  groups: Sequence[str],
  values: Mapping[str, Any],
  colors: Sequence[str] = COLORS,
) -> None:
  """Draws the series as bars next to each other in every group, with their numbers.

  Args:
    axes: where to draw.
    groups: names along the axis.
    values: series -> one number per group; NaN draws nothing.
    colors: one per series.
  """
  width = 0.8 / max(len(values), 1)
  for place, (name, heights) in enumerate(values.items()):
    shift = (place - (len(values) - 1) / 2) * width
    where = [group + shift for group in range(len(groups))]
    bars = axes.bar(where, heights, width * 0.94, color=colors[place], label=name)
    if len(groups) * len(values) <= 24:
      number = lambda height: f"{height:.2f}" if height else ""
      axes.bar_label(bars, fmt=number, fontsize=8, padding=2, color=PLAIN)
  axes.set_xticks(range(len(groups)), groups)
  crowded = sum(map(len, groups)) > 75
  axes.tick_params(axis="x", length=0, rotation=25 if crowded else 0)
