"""PNG plots of a run, drawn from the rows of metrics.jsonl. Needs the extra [plots].

Every plot has the same style and size. The colours are those of Okabe and Ito, which
people with colour blindness can tell apart, and every series has its own line style:
online draft blue, frozen first draft orange, plain decoding grey. In plots over
requests, dots are single requests and lines are trailing means, which restart where the
topic of the stream changes. Matplotlib is imported only inside functions.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax import base, runs
from osd_jax.costs import account as account_lib
from osd_jax.report import tables
from osd_jax.report.tables import Row

ONLINE, FLOOR, PLAIN = "#0072B2", "#D55E00", "#666666"
FAINT, INK = "#B8B8B8", "#222222"
COLORS = (ONLINE, FLOOR, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", PLAIN, "#000000")
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

# A mean of fewer requests than this after a shift would say little: no line is drawn.
_WARM = 5


def draw_plots_if_available(
  rows: Iterable[Row], directory: str | Path
) -> tuple[list[Path], str]:
  """Draws the plots, or returns a sentence that explains why they are missing.

  Returns:
    The files, and a sentence for the user.
  """
  try:
    paths = draw_plots(rows, directory)
  except ImportError as error:
    return [], f"Plots were left out: {error}"
  return paths, f"{len(paths)} plots in {directory}"


def draw_plots(rows: Iterable[Row], directory: str | Path) -> list[Path]:
  """Draws every plot for which the rows have data.

  Args:
    rows: rows of metrics.jsonl, of any command.
    directory: folder of the PNG files, created if needed.

  Returns:
    The files, in reading order.

  Raises:
    MissingExtraError: matplotlib is not installed.
  """
  rows = list(rows)
  drawn = {name: (lambda draw=draw: draw(rows)) for name, draw in PLOTS.items()}
  return _drawn(drawn, Path(directory))


def draw_comparison(served: Mapping[str, Sequence[Row]], path: Path) -> Path:
  """Draws overlap, tokens per call and time of several online runs in one plot.

  Args:
    served: name of the run -> rows of its metrics.jsonl.
    path: the PNG file that is written.

  Raises:
    MissingExtraError: matplotlib is not installed.
  """
  return _drawn({path.stem: lambda: _comparison(served)}, path.parent)[0]


def _drawn(figures: Mapping[str, Callable[[], Any]], directory: Path) -> list[Path]:
  """Saves the figures that are not None."""
  try:
    import matplotlib
  except ImportError as error:
    raise base.MissingExtraError(
      "plots need matplotlib: pip install osd-jax[plots]"
    ) from error
  directory.mkdir(parents=True, exist_ok=True)
  paths = []
  with matplotlib.rc_context(STYLE):
    for name, draw in figures.items():
      made = draw()
      if made is not None:
        made.savefig(directory / f"{name}.png", dpi=DPI)
        paths.append(directory / f"{name}.png")
  return paths


# --- Figures and axes -----------------------------------------------------------------


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
    title: text above all axes of the figure.
    rows: number of rows of axes.
    columns: number of columns of axes.
    height: height of the whole figure, in inches.
    alike: whether the axes share their scales.
  """
  # Not pyplot, which keeps global state and looks for a display.
  from matplotlib.figure import Figure
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


def _legend_below(made: Any, axes: Any) -> None:
  """A legend for many series, which would not fit next to the title."""
  handles, names = axes.get_legend_handles_labels()
  columns = max(1, min(len(names), 90 // (max(map(len, names)) + 6)))
  made.legend(
    handles,
    names,
    loc="outside lower center",
    ncols=columns,
    frameon=False,
    fontsize=10,
  )


def grouped_bars(
  axes: Any,
  groups: Sequence[str],
  values: Mapping[str, Any],
  colors: Sequence[str] = COLORS,
) -> None:
  """Draws the series as bars next to each other in every group, with their numbers.

  Args:
    axes: matplotlib's axes, which are changed in place.
    groups: names of the groups along the axis.
    values: series -> one number per group; NaN draws nothing.
    colors: one for each series, in order.
  """
  width = 0.8 / max(len(values), 1)
  for number, (name, heights) in enumerate(values.items()):
    # Centred: the middle of a group's bars is at its tick.
    shift = (number - (len(values) - 1) / 2) * width
    where = [group + shift for group in range(len(groups))]
    bars = axes.bar(where, heights, width * 0.94, color=colors[number], label=name)
    if len(groups) * len(values) <= 24:  # more numbers would overlap
      label = lambda height: f"{height:.2f}" if height else ""
      axes.bar_label(bars, fmt=label, fontsize=8, padding=2, color=PLAIN)
  axes.set_xticks(range(len(groups)), groups)
  crowded = sum(map(len, groups)) > 75
  axes.tick_params(axis="x", length=0, rotation=25 if crowded else 0)


# --- Online runs ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
  """One series over requests: its name, [n] values, colour and line style."""

  name: str
  values: np.ndarray
  color: str
  style: str = "-"


def overlap(rows: Sequence[Row]) -> Any:
  """Distribution overlap of both drafts over the stream."""
  requests = runs.request_rows(rows)
  lines = [
    Line("frozen draft", runs.column(requests, "floor_overlap"), FLOOR, "--"),
    Line("online draft", runs.column(requests, "overlap"), ONLINE),
  ]
  return _over_requests(requests, lines, "Distribution overlap", (0.0, 1.02))


def tokens_per_call(rows: Sequence[Row]) -> Any:
  """Tokens per target call of both drafts over the stream."""
  requests = runs.request_rows(rows)
  name = "tokens_per_target_call"
  lines = [
    Line("frozen draft", runs.column(requests, f"floor_{name}"), FLOOR, "--"),
    Line("online draft", runs.column(requests, name), ONLINE),
  ]
  limits = (1.0, _ceiling(lines, quantile=1.0))
  return _over_requests(requests, lines, "Tokens per target call", limits)


def milliseconds(rows: Sequence[Row]) -> Any:
  """Milliseconds per token of plain, frozen and online decoding over the stream."""
  requests = runs.request_rows(rows)
  lines = _times(requests)
  limits = (0.0, _ceiling(lines, quantile=0.98))
  return _over_requests(requests, lines, "ms per token", limits)


def saved(rows: Sequence[Row]) -> Any:
  """Seconds that learning has saved so far, updates included."""
  requests = runs.request_rows(rows)
  seconds = runs.column(requests, "saved_seconds")
  # A run that compares no request has no such field, or only zeros.
  if not np.isfinite(seconds).any() or not seconds.any():
    return None
  made, (axes,) = figure("Time saved against the frozen draft, seconds")
  _mark_shifts(axes, requests)
  _shade_pauses(axes, requests)
  axes.axhline(0.0, color=FLOOR, lw=1.2, ls="--")
  axes.plot(places(requests), seconds, color=ONLINE, lw=2.2)
  axes.set_xlabel("request; measured on compared requests, updates included")
  legend(axes)
  return made


def latency(rows: Sequence[Row]) -> Any:
  """Percentiles of milliseconds per token, over the compared requests if any."""
  requests = runs.request_rows(rows)
  compared = [r for r in requests if r.get("plain_ms_per_token") is not None]
  chosen = compared or requests
  lines = [line for line in _times(chosen) if np.isfinite(line.values).any()]
  if not lines:
    return None
  made, (axes,) = figure("ms per token: percentiles")
  grouped_bars(
    axes,
    ["p50", "p95", "p99"],
    {line.name: np.nanpercentile(line.values, [50, 95, 99]) for line in lines},
    [line.color for line in lines],
  )
  which = "requests served all three ways" if compared else "requests"
  axes.set_xlabel(f"over {len(chosen)} {which}")
  legend(axes)
  return made


def update_loss(rows: Sequence[Row]) -> Any:
  """Distillation loss of every update; the line breaks at shifts and pauses."""
  updates = runs.of_kind(rows, "update")
  losses = runs.column(updates, "loss")
  if not np.isfinite(losses).any():
    return None
  requests = runs.request_rows(rows)
  finished = runs.column(updates, "finished")
  made, (axes,) = figure("Distillation loss of each update")
  _mark_shifts(axes, requests)
  _shade_pauses(axes, requests)
  axes.plot(finished, losses, ".", color=ONLINE, alpha=0.4, markersize=6, mew=0)
  starts = _breaks(requests, finished)
  means = tables.trailing_mean(losses, 5, starts)
  axes.plot(*_broken(finished, means, starts), color=ONLINE, lw=2.2)
  skipped = finished[~np.isfinite(losses)]
  if len(skipped):
    axes.plot(
      skipped,
      np.zeros(len(skipped)),
      "x",
      color=FLOOR,
      clip_on=False,
      label="skipped, not finite",
    )
  axes.set_ylim(bottom=0)
  axes.set_xlabel("finished requests; line: mean of the last 5 updates, dots: updates")
  legend(axes)
  return made


def per_position(rows: Sequence[Row]) -> Any:
  """Accepted share of drafted tokens by position, one panel per topic."""
  requests = runs.request_rows(rows)
  first, last = tables.edges(tables.segments(requests))
  edges = {"first": [requests[i] for i in first], "last": [requests[i] for i in last]}
  panels = []
  for topic in dict.fromkeys(str(row.get("source", "")) for row in requests):
    shares = {
      f"{edge} {tables.EDGE} requests": tables.acceptance_per_position(
        [row for row in part if str(row.get("source", "")) == topic]
      )
      for edge, part in edges.items()
    }
    if all(map(len, shares.values())):
      panels.append((topic, shares))
  panels = panels[:8]  # more would be too small to read
  if not panels:
    return None
  columns = min(len(panels), 4)
  count = -(-len(panels) // columns)
  made, grid = figure(
    "Accepted share of drafted tokens",
    rows=count,
    columns=columns,
    height=1.2 + 2.4 * count,
  )
  for axes, (topic, shares) in zip(grid, panels):
    _bars_by_position(axes, shares)
    if len(panels) > 1:
      axes.set_title(topic, fontsize=10, color=PLAIN)
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  made.supxlabel("position of the drafted token in its round", fontsize=11)
  if len(panels) == 1:
    legend(grid[0])
  else:
    handles, names = grid[0].get_legend_handles_labels()
    made.legend(
      handles, names, loc="outside upper right", ncols=2, frameon=False, fontsize=10
    )
  return made


def _bars_by_position(axes: Any, shares: dict[str, np.ndarray]) -> None:
  colors = (FAINT, ONLINE)
  for shift, (name, values), color in zip((-0.2, 0.2), shares.items(), colors):
    positions = np.arange(1, len(values) + 1)
    axes.bar(positions + shift, values, 0.38, color=color, label=name)
    axes.set_xticks(positions)
  axes.set_ylim(0, 1.02)


def rounds(rows: Sequence[Row]) -> Any:
  """The distribution of drafted and of accepted tokens per round."""
  requests = runs.request_rows(rows)
  accepted = tables.accepted_per_round(requests)
  if not len(accepted):
    return None
  calls = runs.column(requests, "target_calls")
  drafted = runs.column(requests, "drafted") / np.where(calls > 0, calls, np.nan)
  bins = np.arange(len(accepted) + 1) - 0.5
  shares = {"accepted, share of rounds": accepted / accepted.sum()}
  if np.isfinite(drafted).any():
    counts = np.histogram(np.round(drafted[np.isfinite(drafted)]), bins)[0]
    name = "drafted on average, share of requests"
    shares = {name: counts / max(counts.sum(), 1), **shares}
  made, (axes,) = figure("Tokens per round")
  colors = (FAINT, ONLINE)[-len(shares) :]
  grouped_bars(axes, list(map(str, range(len(accepted)))), shares, colors)
  axes.set_xlabel("tokens")
  legend(axes)
  return made


def account(rows: Sequence[Row]) -> Any:
  """Where the wall time went. Learning, which overlaps the rest, has its own bar."""
  found = account_lib.Account.of(rows)
  if found is None:
    return None
  made, (axes,) = figure("Where the time went, seconds")
  seconds = {**found.parts, "learning": found.learning}
  special = {"learning": FLOOR, "rest": FAINT}
  colors = [special.get(name, ONLINE) for name in seconds]
  bars = axes.barh(list(seconds), list(seconds.values()), 0.6, color=colors)
  labels = [f"{value:.1f} ({value / found.wall:.0%})" for value in seconds.values()]
  axes.bar_label(bars, labels, padding=4, color=PLAIN, fontsize=10)
  axes.axhline(len(found.parts) - 0.5, color=FAINT, lw=0.8)
  axes.invert_yaxis()
  axes.grid(False)
  axes.margins(x=0.18)
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel(f"all bars but the last add up to the wall time, {found.wall:.1f} s")
  return made


def _comparison(served: Mapping[str, Sequence[Row]]) -> Any:
  from matplotlib.figure import Figure

  titles = {
    "overlap": "Distribution overlap",
    "tokens_per_target_call": "Tokens per target call",
    "online_ms_per_token": "ms per token",
  }
  made = Figure(figsize=(WIDTH, 7.5), layout="constrained")
  grid = made.subplots(len(titles), 1, sharex=True)
  for axes, (name, title) in zip(grid, titles.items()):
    tops = []
    for number, (run, rows) in enumerate(served.items()):
      requests = runs.request_rows(rows)
      starts = [part.start for part in tables.segments(requests)]
      values = runs.column(requests, name)
      axes.plot(
        *trend(places(requests), values, starts),
        STYLES[number % len(STYLES)],
        color=COLORS[number % len(COLORS)],
        lw=1.8,
        label=run,
      )
      tops.append(np.nanquantile(values, 0.95) if np.isfinite(values).any() else 0)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(0, 1.02 if name == "overlap" else max(max(tops) * 1.15, 1))
  grid[-1].set_xlabel(
    f"request; mean of the last {tables.WINDOW}, restarted at each shift"
  )
  handles, names = grid[0].get_legend_handles_labels()
  made.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
  return made


def _times(requests: Sequence[Row]) -> list[Line]:
  tokens = runs.column(requests, "output_tokens")
  measured = runs.column(requests, "online_ms_per_token")
  # Without a comparison, decoding time per token is all that was measured.
  per_token = runs.column(requests, "decode_ms") / np.where(tokens > 0, tokens, np.nan)
  return [
    Line("plain", runs.column(requests, "plain_ms_per_token"), PLAIN, ":"),
    Line("frozen", runs.column(requests, "floor_ms_per_token"), FLOOR, "--"),
    Line("online", np.where(np.isfinite(measured), measured, per_token), ONLINE),
  ]


def _over_requests(
  requests: Sequence[Row],
  lines: Sequence[Line],
  title: str,
  limits: tuple[float, float],
) -> Any:
  """Dots of single requests and trailing means, with the stream's shifts."""
  lines = [line for line in lines if np.isfinite(line.values).any()]
  if not lines:
    return None
  made, (axes,) = figure(title)
  _mark_shifts(axes, requests)
  _shade_pauses(axes, requests)
  where = places(requests)
  starts = [part.start for part in tables.segments(requests)]
  hidden = 0
  for line in lines:
    # Outliers would flatten the rest of the plot. They are cut off and counted.
    hidden += int(np.sum(line.values > limits[1]))
    axes.plot(
      where, line.values, ".", color=line.color, alpha=0.3, markersize=4.5, mew=0
    )
    axes.plot(
      *trend(where, line.values, starts),
      line.style,
      color=line.color,
      lw=2.2,
      label=line.name,
    )
  axes.set_ylim(*limits)
  note = f"request; lines: mean of the last {tables.WINDOW}, dots: single requests"
  axes.set_xlabel(note + (f"; {hidden} dots above" if hidden else ""))
  legend(axes)
  return made


def places(requests: Sequence[Row]) -> np.ndarray:
  """Positions of the requests in the stream, [n] float64."""
  return np.array([runs.place(row) for row in requests], float)


def trend(
  where: np.ndarray, values: np.ndarray, starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """(x, y) of the trailing mean, restarted at `starts` and without its first values."""
  means = tables.trailing_mean(values, starts=starts)
  for start, stop in zip(starts, [*starts[1:], len(means)]):
    if stop - start > 2 * _WARM:
      # The dots of these requests remain. Only a mean of a few would look like a trend.
      means[start : start + _WARM] = np.nan
  return _broken(where, means, starts)


def _broken(
  where: np.ndarray, values: np.ndarray, starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """The line with a gap before every start except the first."""
  gaps = [start for start in starts if start]
  # matplotlib interrupts a line at NaN.
  return np.insert(where, gaps, np.nan), np.insert(values, gaps, np.nan)


def _breaks(requests: Sequence[Row], finished: np.ndarray) -> list[int]:
  """Updates at which the loss line restarts: after a shift or a pause."""
  where = places(requests)
  shifts = [where[part.start] for part in tables.segments(requests) if part.start]
  ends = [stop for _, stop in _pauses(requests)]
  starts = np.searchsorted(finished, [*shifts, *ends], side="right")
  return sorted({0, *(int(i) for i in starts if i < len(finished))})


def _pauses(requests: Sequence[Row]) -> list[tuple[float, float]]:
  """(first, last) position of every stretch in which updates were paused."""
  spans = []
  grouped = itertools.groupby(requests, key=lambda row: bool(row.get("paused")))
  for paused, part in grouped:
    where = [runs.place(row) for row in part]
    if paused:
      spans.append((where[0] - 0.5, where[-1] + 0.5))
  return spans


def _shade_pauses(axes: Any, requests: Sequence[Row]) -> None:
  for number, (start, stop) in enumerate(_pauses(requests)):
    label = {} if number else {"label": "learning paused"}
    axes.axvspan(start, stop, color="#F0E442", alpha=0.22, lw=0, zorder=0, **label)


def _ceiling(lines: Sequence[Line], quantile: float) -> float:
  """Upper end of the axis, above the means and above `quantile` of the dots."""
  values = [line.values[np.isfinite(line.values)] for line in lines]
  tops = [np.quantile(v, quantile) for v in values if len(v)]
  return float(max(tops, default=1.0)) * 1.08


def _mark_shifts(axes: Any, requests: Sequence[Row]) -> None:
  """Draws a line where the topic changes, and the topics' names on top."""
  parts = tables.segments(requests)
  if not parts:
    return
  where = places(requests)
  span = where[-1] - where[0] + 1
  axes.set_xlim(where[0] - 0.005 * span, where[-1] + 0.005 * span)
  for part in parts:
    left, right = where[part.start], where[part.stop - 1]
    if part.start:
      axes.axvline(left - 0.5, color="#999999", lw=0.8, zorder=1)
    room = (right - left) / span * 75  # characters that fit above the segment
    if len(part.source) <= room:
      axes.text(
        (left + right) / 2,
        1.015,
        part.source,
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="bottom",
        fontsize=10,
        color=PLAIN,
      )


# --- Training, evaluation and certificates --------------------------------------------


def training_loss(rows: Sequence[Row]) -> Any:
  """Loss over optimiser steps."""
  steps = runs.of_kind(rows, "step")
  losses = runs.column(steps, "loss")
  if not np.isfinite(losses).any():
    return None
  made, (axes,) = figure("Training loss")
  axes.plot(runs.column(steps, "step"), losses, color=ONLINE, lw=1.8)
  finite = losses[np.isfinite(losses)]
  # A loss that falls by orders of magnitude would be a flat line on a linear scale.
  if finite.min() > 0 and finite.max() > 30 * finite.min():
    axes.set_yscale("log")
  else:
    axes.set_ylim(bottom=0)
  axes.set_xlabel("optimiser step; each point is the mean since the last one")
  return made


def held_out(rows: Sequence[Row]) -> Any:
  """The results of every evaluation on held-out prompts, one line per task."""
  evaluations = runs.of_kind(rows, "evaluation")
  if not evaluations:
    return None
  tasks = evaluations[-1]["tasks"]
  titles = {
    "distribution_overlap": "Held-out distribution overlap",
    "exact_match": "Held-out greedy exact match",
  }
  name = next((n for n in titles if any(n in task for task in tasks.values())), "")
  if not name:
    return None
  made, (axes,) = figure(titles[name])
  steps = [row["step"] for row in evaluations]
  for number, label in enumerate(tasks):
    values = [row["tasks"].get(label, {}).get(name) for row in evaluations]
    axes.plot(
      steps,
      [np.nan if value is None else value for value in values],
      STYLES[number % len(STYLES)],
      marker="o",
      markersize=4,
      color=COLORS[number % len(COLORS)],
      lw=2,
      label=label,
    )
  axes.set_ylim(0, 1.02)
  axes.set_xlabel("optimiser step")
  _legend_below(made, axes)
  return made


def drafts(rows: Sequence[Row]) -> Any:
  """Overlap of every draft with the target, one group of bars per task."""
  return _by_draft(rows, "draft", "task", "distribution_overlap", "Overlap of drafts")


def speeds(rows: Sequence[Row]) -> Any:
  """Speed-up of every draft over plain decoding, by rows in flight."""
  named = [
    {**row, "rows": f"{row['rows']} row(s)"} for row in runs.of_kind(rows, "speed")
  ]
  title = "Speed-up over plain decoding"
  made = _by_draft(named, "speed", "rows", "speed_up", title)
  if made is not None:
    made.axes[0].axhline(1, color=INK, lw=0.8, ls=":")
  return made


def certificate(rows: Sequence[Row]) -> Any:
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
  made, (axes,) = figure("Outputs equal to plain decoding's", height=height)
  colors = [ONLINE if row["passed"] else FLOOR for row in checks]
  bars = axes.barh(range(len(checks)), equal, 0.62, color=colors)
  labels = [
    f"{row['equal']} of {row['outputs']}"
    + (f", {row['near_ties']} near ties" if row["near_ties"] else "")
    + ("" if row["passed"] else "  NOT EXACT")
    for row in checks
  ]
  axes.bar_label(bars, labels, padding=4, fontsize=9, color=PLAIN)
  axes.set_yticks(range(len(checks)), names)
  axes.set_xlim(0, 1.25)
  axes.set_xticks(np.arange(0, 1.01, 0.25))
  axes.invert_yaxis()
  axes.grid(False)
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel("share of outputs")
  return made


def _by_draft(
  rows: Sequence[Row], kind: str, group: str, value: str, title: str
) -> Any:
  """Groups of bars, one bar per draft."""
  chosen = [row for row in runs.of_kind(rows, kind) if row.get(value) is not None]
  if not chosen:
    return None
  groups = list(dict.fromkeys(str(row[group]) for row in chosen))
  # More drafts than colours could not be told apart.
  labels = list(dict.fromkeys(row["draft"] for row in chosen))[: len(COLORS)]
  known = {(str(row[group]), row["draft"]): row[value] for row in chosen}
  made, (axes,) = figure(title)
  grouped_bars(
    axes,
    groups,
    {name: [known.get((one, name), np.nan) for one in groups] for name in labels},
  )
  axes.margins(y=0.12)
  _legend_below(made, axes)
  return made


# --- Runs that were compiled ahead of time --------------------------------------------


def chip_memory(rows: Sequence[Row]) -> Any:
  """The gigabytes of a chip's memory, by their content."""
  held = [
    (row["what"], row["gigabytes_a_chip"]) for row in runs.of_kind(rows, "memory")
  ]
  if not held or not runs.of_kind(rows, "fits"):  # a killed run has no such row
    return None
  (fits,) = runs.of_kind(rows, "fits")
  names, sizes = zip(*held, strict=True)
  made, (axes,) = figure(
    f"Memory of a chip: {fits['needed_gb']:.3g} of {fits['memory_gb']:.3g} GB"
  )
  bars = axes.barh(range(len(held)), sizes, 0.7, color=ONLINE)
  axes.bar_label(bars, fmt="%.3g", fontsize=9, padding=3, color=PLAIN)
  axes.set_yticks(range(len(held)), names)
  axes.invert_yaxis()
  axes.grid(axis="x")
  axes.grid(visible=False, axis="y")
  # Below the limit, a line at the limit would make all bars too short to see.
  if fits["needed_gb"] > fits["memory_gb"]:
    axes.axvline(fits["memory_gb"], color=FLOOR, lw=1.5, label="all of a chip")
    legend(axes)
  axes.set_xlabel("GB")
  return made


def chip_speeds(rows: Sequence[Row]) -> Any:
  """Highest tokens per second by acceptance: plain, frozen and online."""
  estimates = runs.of_kind(rows, "estimate")
  if not estimates:
    return None
  made, (axes,) = figure("Highest tokens per second, from the chip's data sheet")
  rates = [row["acceptance"] for row in estimates]
  for name, field, color, style in (
    ("online", "online_tokens_s", ONLINE, "o-"),
    ("frozen", "frozen_tokens_s", FLOOR, "s--"),
    ("plain", "plain_tokens_s", PLAIN, ":"),
  ):
    values = [row[field] for row in estimates]
    axes.plot(rates, values, style, color=color, lw=1.8, label=name)
  axes.set_ylim(bottom=0)
  axes.set(xlabel="acceptance of a drafted token", ylabel="tokens/s")
  legend(axes)
  return made


# In reading order. Each function returns None if the rows have no data for it.
PLOTS: dict[str, Callable[[Sequence[Row]], Any]] = {
  "distribution_overlap": overlap,
  "tokens_per_target_call": tokens_per_call,
  "milliseconds_per_token": milliseconds,
  "latency": latency,
  "acceptance_per_position": per_position,
  "tokens_per_round": rounds,
  "update_loss": update_loss,
  "time_saved": saved,
  "time_spent": account,
  "training_loss": training_loss,
  "held_out": held_out,
  "drafts": drafts,
  "speeds": speeds,
  "certificate": certificate,
  "memory_of_a_chip": chip_memory,
  "tokens_per_second": chip_speeds,
}
