"""Plots of a run as SVG, drawn from the rows of metrics.jsonl. Needs the extra [plots].

Every plot has the same style and is small enough for its labels to be readable at the
width of a phone. The colors are those of Okabe and Ito, which people with color
blindness can tell apart, and every series has its own line style: online draft blue,
frozen first draft orange, plain decoding grey. In plots over requests, dots are single
requests and lines are trailing means, which restart where the topic of the stream
changes. Matplotlib is imported only inside functions.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax.loop import rows as rows_lib
from osd_jax.loop.rows import Request, Row, column
from osd_jax.report import tables

ONLINE, FLOOR, PLAIN = "#0072B2", "#D55E00", "#666666"
FAINT, INK, GRID = "#B8B8B8", "#222222", "#ECECEC"
PAGE, PAUSE = "#FFFFFF", "#FBF7D5"
COLORS = (ONLINE, FLOOR, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", PLAIN, INK)
STYLES = ("-", "--", "-.", ":")
# Inches. The page scales a plot to its own width, so small numbers make large labels.
WIDTH, HEIGHT = 5.2, 3.1

STYLE: Any = {
  "font.family": "sans-serif",
  "font.size": 9.5,
  "axes.titlesize": "large",
  "axes.edgecolor": FAINT,
  "axes.labelcolor": INK,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.grid.axis": "y",
  "axes.axisbelow": True,
  "grid.color": GRID,
  "xtick.color": PLAIN,
  "ytick.color": PLAIN,
  "text.color": INK,
  "figure.facecolor": PAGE,
  "savefig.facecolor": PAGE,
  "svg.fonttype": "none",  # text stays text, in the font of the page
}

_METADATA = ("Date", "Creator", "Format", "Type")  # left out of the files

# A mean of fewer requests than this after a shift would say little: no line is drawn.
_WARM = 5


@dataclasses.dataclass(frozen=True)
class Plot:
  """A plot of a page."""

  path: Path  # the SVG file
  caption: str = ""  # what it shows, for readers of the page


def draw_plots(rows: Iterable[Row], directory: str | Path) -> tuple[list[Plot], str]:
  """Draws every plot for which the rows of metrics.jsonl, of any command, have data.

  Returns:
    The plots in reading order, and "" or a sentence that explains why there are none.
  """
  return _drawn(PLOTS, list(rows), Path(directory))


def draw_comparison(
  served: Mapping[str, Sequence[Row]], directory: str | Path
) -> tuple[list[Plot], str]:
  """Draws overlap, tokens per call and time of several online runs; see `draw_plots`.

  `served`: name of the run -> rows of its metrics.jsonl.
  """
  return _drawn(COMPARED, served, Path(directory))


def _drawn(
  plots: Mapping[str, tuple[Callable[[Any], Any], str]], data: Any, directory: Path
) -> tuple[list[Plot], str]:
  """Saves the figures that are not None."""
  try:
    import matplotlib
  except ImportError:
    # Everything else that a report says needs no matplotlib.
    note = 'Plots were left out: they need matplotlib: pip install "osd_jax[plots]"'
    return [], note
  directory.mkdir(parents=True, exist_ok=True)
  saved = []
  for name, (draw, caption) in plots.items():
    # The salt makes ids unique on a page that shows several plots, and the same rows
    # give the same file.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
      picture = draw(data)
      if picture is not None:
        path = directory / f"{name}.svg"
        picture.savefig(path, dpi=200, metadata=dict.fromkeys(_METADATA))
        saved.append(Plot(path, caption))
  return saved, ""


# --- Figures and axes -----------------------------------------------------------------


def figure(
  title: str,
  *,
  rows: int = 1,
  columns: int = 1,
  width: float = WIDTH,
  height: float = HEIGHT,
  alike: bool = True,
) -> tuple[Any, list[Any]]:
  """Makes an empty figure and returns it with its axes, row by row.

  Width and height are those of the whole figure, in inches; `alike` axes share scales.
  """
  # Not pyplot, which keeps global state and looks for a display.
  from matplotlib.figure import Figure
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  picture = Figure(
    figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
  )
  grid = picture.subplots(rows, columns, squeeze=False, sharex=alike, sharey=alike)
  axes = list(grid.flat)
  for one in axes:
    one.tick_params(length=3)
  if len(axes) == 1:
    axes[0].set_title(title, loc="left", fontweight="bold", pad=20)
  else:
    picture.suptitle(title, x=0.02, ha="left", fontsize="large", fontweight="bold")
  return picture, axes


def legend(picture: Any, axes: Any) -> Any:
  """Puts the names of the series below the axes, in columns if they fit."""
  handles, names = axes.get_legend_handles_labels()
  if names:
    columns = max(1, min(len(names), 70 // (max(map(len, names)) + 6)))
    picture.legend(
      handles,
      names,
      loc="outside lower center",
      ncols=columns,
      frameon=False,
      handlelength=2.0,
      handletextpad=0.5,
      columnspacing=1.3,
    )
  return picture


def _labelled(picture: Any, axes: Any, along: str) -> Any:
  axes.set_xlabel(along)
  return legend(picture, axes)


# --- Online runs ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
  """One series over requests."""

  name: str  # text of the legend
  requests: Sequence[Request]  # its requests, in the order of the stream
  values: np.ndarray  # [n], one for each request
  color: str  # color of line and dots
  style: str = "-"  # line style
  dots: bool = True  # whether single requests are drawn too


def _drafts_over(
  field: str, title: str, limits: tuple[float, float] | None, rows: Sequence[Row]
) -> Any:
  """One field of both drafts over the stream."""
  requests = rows_lib.requests(rows)
  frozen = column(requests, f"floor_{field}")
  lines = [
    Line("frozen draft", requests, frozen, FLOOR, "--"),
    Line("online draft", requests, column(requests, field), ONLINE),
  ]
  return _over_requests(lines, title, limits or (1.0, _ceiling(lines, 1.0)))


def milliseconds(rows: Sequence[Row]) -> Any:
  """Milliseconds per token of plain, frozen and online decoding over the stream."""
  requests = rows_lib.requests(rows)
  lines = [
    Line(name, requests, column(requests, f"{field}_ms_per_token"), color, style)
    for name, field, color, style in (
      ("plain", "plain", PLAIN, ":"),
      ("frozen", "floor", FLOOR, "--"),
      ("online", "online", ONLINE, "-"),
    )
  ]
  limits = (0.0, _ceiling(lines, 0.98))
  return _over_requests(lines, "Milliseconds per token", limits)


def saved(rows: Sequence[Row]) -> Any:
  """Seconds that learning has saved so far, against both rivals."""
  requests = rows_lib.requests(rows)
  frozen = column(requests, "saved_seconds")
  # A run that compares no request has no such field, or only zeros.
  if not np.isfinite(frozen).any() or not frozen.any():
    return None
  picture, axes = _over_stream("Time saved, seconds", requests)
  axes.axhline(0.0, color=FAINT, lw=1.0)
  where, plain = places(requests), column(requests, "saved_plain_seconds")
  axes.plot(where, plain, ":", color=PLAIN, lw=2, label="against plain decoding")
  axes.plot(where, frozen, color=ONLINE, lw=2, label="against the frozen draft")
  return _labelled(picture, axes, "request")


def update_loss(rows: Sequence[Row]) -> Any:
  """Distillation loss of every update; the line breaks at shifts and pauses."""
  updates = rows_lib.of(rows_lib.Update, rows)
  losses = column(updates, "loss")
  if not np.isfinite(losses).any():
    return None
  requests = rows_lib.requests(rows)
  finished = column(updates, "finished")
  picture, axes = _over_stream("Distillation loss of each update", requests)
  axes.plot(finished, losses, ".", color=ONLINE, alpha=0.4, markersize=5, mew=0)
  starts = _breaks(requests, finished)
  means = tables.trailing_mean(losses, 5, starts)
  axes.plot(*_broken(finished, means, starts), color=ONLINE, lw=2)
  skipped = finished[~np.isfinite(losses)]
  if len(skipped):
    zeros = np.zeros(len(skipped))
    label = "skipped, not finite"
    axes.plot(skipped, zeros, "x", color=FLOOR, clip_on=False, label=label)
  axes.set_ylim(bottom=0)
  return _labelled(picture, axes, "finished requests")


def per_position(rows: Sequence[Row]) -> Any:
  """Accepted share of drafted tokens by position, one panel per topic."""
  topics: dict[str, list[Request]] = {}
  for row in rows_lib.requests(rows):
    topics.setdefault(row.source, []).append(row)
  panels = []
  for topic, requests in topics.items():
    edge = min(tables.EDGE, max(len(requests) // 2, 1))
    shares = {
      "first requests": tables.acceptance_per_position(requests[:edge]),
      "last requests": tables.acceptance_per_position(requests[-edge:]),
    }
    if all(map(len, shares.values())):
      panels.append((topic, shares))
  panels = panels[:8]  # more would be too small to read
  if not panels:
    return None
  count = -(-len(panels) // 2)
  picture, grid = figure(
    "Accepted share of drafted tokens",
    rows=count,
    columns=min(len(panels), 2),
    height=1.2 + 1.6 * count,
  )
  for axes, (topic, shares) in zip(grid, panels):
    for shift, (name, values), color in zip(
      (-0.2, 0.2), shares.items(), (FAINT, ONLINE)
    ):
      positions = np.arange(1, len(values) + 1)
      axes.bar(positions + shift, values, 0.38, color=color, label=name)
      axes.set_xticks(positions)
    axes.set_ylim(0, 1.02)
    if len(panels) > 1:
      axes.set_title(topic, fontsize="medium", color=PLAIN)
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  for axes in grid[-min(len(panels), 2) :]:
    axes.set_xlabel("position in the round")
  return legend(picture, grid[0])


def _compared(
  title: str,
  bottom: float,
  field: str,
  subtracted: str,
  served: Mapping[str, Sequence[Row]],
) -> Any:
  """One field of several runs over their streams, minus another field if named."""
  lines, means = [], [np.array([bottom, bottom + 1e-3])]
  for number, (name, rows) in enumerate(served.items()):
    requests = rows_lib.requests(rows)
    color, style = COLORS[number % len(COLORS)], STYLES[number % len(STYLES)]
    values = column(requests, field)
    if subtracted:
      values = values - column(requests, subtracted)
    line = Line(name, requests, values, color, style, dots=False)
    lines.append(line)
    means.append(_trend(line)[1])
  low, high = np.nanmin(np.concatenate(means)), np.nanmax(np.concatenate(means))
  room = 0.06 * (high - low)
  return _over_requests(lines, title, (low - room * (low < bottom), high + room))


def _over_requests(
  lines: Sequence[Line], title: str, limits: tuple[float, float]
) -> Any:
  """Dots of single requests and trailing means, with the shifts of the first line."""
  lines = [line for line in lines if np.isfinite(line.values).any()]
  if not lines:
    return None
  # Compared runs, which have no dots, pause at different times.
  picture, axes = _over_stream(title, lines[0].requests, pauses=lines[0].dots)
  hidden = 0
  for line in lines:
    if line.dots:
      # Outliers would flatten the rest of the plot. They are cut off and counted.
      hidden += int(np.sum(line.values > limits[1]))
      # Thousands of dots as a picture: as shapes they would make the page slow.
      few = len(line.requests) <= 200  # they are larger, because the means hide little
      dots = {"alpha": 0.6 if few else 0.4, "markersize": 9 if few else 4, "mew": 0}
      where = places(line.requests)
      axes.plot(where, line.values, ".", color=line.color, rasterized=True, **dots)
    axes.plot(*_trend(line), line.style, color=line.color, lw=2, label=line.name)
  axes.set_ylim(*limits)
  return _labelled(
    picture, axes, "request" + (f" ({hidden} dots above)" if hidden else "")
  )


def _over_stream(
  title: str, requests: Sequence[Request], pauses: bool = True
) -> tuple[Any, Any]:
  """Makes a figure and its axes, with the shifts and pauses of the stream."""
  picture, (axes,) = figure(title)
  _mark_shifts(axes, requests)
  for number, (start, stop) in enumerate(_pauses(requests) if pauses else ()):
    label = {} if number else {"label": "learning paused"}
    axes.axvspan(start, stop, color=PAUSE, lw=0, zorder=0, **label)
  return picture, axes


def places(requests: Sequence[Request]) -> np.ndarray:
  """Positions of the requests in the stream, [n] float64."""
  return column(requests, "query")


def _trend(line: Line) -> tuple[np.ndarray, np.ndarray]:
  """(x, y) of the trailing mean, restarted at shifts and without its first values."""
  starts = [part.start for part in tables.segments(line.requests)]
  means = tables.trailing_mean(line.values, starts=starts)
  for start, stop in zip(starts, [*starts[1:], len(means)]):
    if stop - start > 2 * _WARM:
      # The dots of these requests remain. Only a mean of a few would look like a trend.
      means[start : start + _WARM] = np.nan
  return _broken(places(line.requests), means, starts)


def _broken(
  where: np.ndarray, values: np.ndarray, starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """The line with a gap before every start except the first."""
  gaps = [start for start in starts if start]
  # matplotlib interrupts a line at NaN.
  return np.insert(where, gaps, np.nan), np.insert(values, gaps, np.nan)


def _breaks(requests: Sequence[Request], finished: np.ndarray) -> list[int]:
  """Updates at which the loss line restarts: after a shift or a pause."""
  where = places(requests)
  shifts = [where[part.start] for part in tables.segments(requests) if part.start]
  ends = [stop for _, stop in _pauses(requests)]
  starts = np.searchsorted(finished, [*shifts, *ends], side="right")
  return sorted({0, *(int(i) for i in starts if i < len(finished))})


def _pauses(requests: Sequence[Request]) -> list[tuple[float, float]]:
  """(first, last) position of every stretch in which updates were paused."""
  grouped = itertools.groupby(requests, key=lambda row: bool(row.paused))
  paused = [places(list(part)) for is_paused, part in grouped if is_paused]
  return [(where[0] - 0.5, where[-1] + 0.5) for where in paused]


def _ceiling(lines: Sequence[Line], quantile: float) -> float:
  """Upper end of the axis, above the means and above `quantile` of the dots."""
  values = [line.values[np.isfinite(line.values)] for line in lines]
  tops = [np.quantile(v, quantile) for v in values if len(v)]
  return float(max(tops, default=1.0)) * 1.08


def _mark_shifts(axes: Any, requests: Sequence[Request]) -> None:
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
      axes.axvline(left - 0.5, color=FAINT, lw=0.8, zorder=1)
    room = int((right - left) / span * 58)  # characters that fit above the segment
    label = part.source if len(part.source) <= room else part.source[: room - 1] + "…"
    if room > 2:
      axes.text(
        (left + right) / 2,
        1.015,
        label,
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="bottom",
        color=PLAIN,
      )


# --- Training and evaluation --------------------------------------------


def training_loss(rows: Sequence[Row]) -> Any:
  """Loss over optimizer steps."""
  steps = rows_lib.of(rows_lib.Step, rows)
  losses = column(steps, "loss")
  if not np.isfinite(losses).any():
    return None
  picture, (axes,) = figure("Training loss")
  axes.plot(column(steps, "step"), losses, color=ONLINE, lw=1.8)
  finite = losses[np.isfinite(losses)]
  # A loss that falls by orders of magnitude would be a flat line on a linear scale.
  if finite.min() > 0 and finite.max() > 30 * finite.min():
    axes.set_yscale("log")
  else:
    axes.set_ylim(bottom=0)
  return _labelled(picture, axes, "optimizer step")


def held_out(rows: Sequence[Row]) -> Any:
  """The results of every evaluation on held-out prompts, one line per task."""
  evaluations = rows_lib.of(rows_lib.Evaluation, rows)
  if not evaluations:
    return None
  tasks = evaluations[-1].tasks
  titles = {
    "distribution_overlap": "Held-out distribution overlap",
    "exact_match": "Held-out greedy exact match",
  }
  name = next((n for n in titles if any(n in task for task in tasks.values())), "")
  if not name:
    return None
  picture, (axes,) = figure(titles[name])
  steps = [row.step for row in evaluations]
  for number, label in enumerate(tasks):
    values = [row.tasks.get(label, {}).get(name, np.nan) for row in evaluations]
    style = {"color": COLORS[number % len(COLORS)], "marker": "o", "markersize": 4}
    axes.plot(steps, values, STYLES[number % len(STYLES)], lw=2, label=label, **style)
  axes.set_ylim(0, 1.02)
  return _labelled(picture, axes, "optimizer step")


def drafts(rows: Sequence[Row]) -> Any:
  """Overlap of every draft with the target, one group of bars per task."""
  measured = rows_lib.of(rows_lib.Draft, rows)
  bars = {(row.task, row.draft): row.distribution_overlap for row in measured}
  return _by_draft(bars, "Overlap of drafts")


def speeds(rows: Sequence[Row]) -> Any:
  """Speed-up of every draft over plain decoding, by rows in flight."""
  measured = rows_lib.of(rows_lib.Speed, rows)
  bars = {(f"{row.rows} row(s)", row.draft): row.speed_up for row in measured}
  picture = _by_draft(bars, "Speed-up over plain decoding")
  if picture is not None:
    picture.axes[0].axhline(1, color=INK, lw=0.8, ls=":")
  return picture


def replayed(rows: Sequence[Row]) -> Any:
  """Share of the target's tokens that each system names, over the answers of a log."""
  answers = rows_lib.of(rows_lib.Replayed, rows)
  if not answers:
    return None
  picture, (axes,) = figure("Tokens named rightly")
  for name, color in zip(answers[0].shares, COLORS, strict=False):
    values = tables.trailing_mean(np.array([row.shares[name] for row in answers]))
    axes.plot(column(answers, "answer") + 1, values, color=color, label=name)
  return _labelled(picture, axes, "answers of the log")


def _by_draft(bars: Mapping[tuple[str, str], float | None], title: str) -> Any:
  """Groups of bars, (group, draft) -> value, with their numbers; NaN draws nothing."""
  heights = {place: value for place, value in bars.items() if value is not None}
  if not heights:
    return None
  groups = list(dict.fromkeys(group for group, _ in heights))
  # More drafts than colors could not be told apart.
  labels = list(dict.fromkeys(draft for _, draft in heights))[: len(COLORS)]
  picture, (axes,) = figure(title)
  width = 0.8 / len(labels)
  for number, label in enumerate(labels):
    # Centered: the middle of a group's bars is at its tick.
    shift = (number - (len(labels) - 1) / 2) * width
    values = [heights.get((group, label), np.nan) for group in groups]
    where = np.arange(len(groups)) + shift
    drawn = axes.bar(where, values, width * 0.94, color=COLORS[number], label=label)
    if len(groups) * len(labels) <= 24:  # more numbers would overlap
      shown = lambda height: f"{height:.2f}" if height else ""
      axes.bar_label(drawn, fmt=shown, fontsize="small", padding=2, color=PLAIN)
  axes.set_xticks(range(len(groups)), groups)
  crowded = sum(map(len, groups)) > 45
  axes.tick_params(axis="x", length=0, rotation=25 if crowded else 0)
  axes.margins(y=0.12)
  return legend(picture, axes)


_LINES = "Lines are means of the last 25 requests, dots single requests."

# Name -> function and caption, in reading order; a page shows the first four that have
# data and folds the others away. A function returns None if the rows have no data.
PLOTS: dict[str, tuple[Callable[[Sequence[Row]], Any], str]] = {
  "distribution_overlap": (
    functools.partial(_drafts_over, "overlap", "Overlap", (0.0, 1.02)),
    "How much of the target's distribution the draft covers, before it learned from the"
    " request. The draft has learned where blue is above orange. " + _LINES,
  ),
  "tokens_per_target_call": (
    functools.partial(
      _drafts_over, "tokens_per_target_call", "Tokens per target call", None
    ),
    "Tokens that one call of the target gives: 1 is plain decoding. " + _LINES,
  ),
  "milliseconds_per_token": (
    milliseconds,
    "Whether more tokens per call became less time; lower is better. " + _LINES,
  ),
  "time_saved": (
    saved,
    "Decoding time saved so far, waiting for updates included. Below 0, learning or"
    " drafting has cost more than it saved.",
  ),
  "acceptance_per_position": (
    per_position,
    "If the last positions are rarely accepted, draft fewer tokens; if all are, more.",
  ),
  "update_loss": (
    update_loss,
    "The loss falls after a shift of topic and levels off. The line is the mean of the"
    " last five updates.",
  ),
  "training_loss": (training_loss, "Each point is the mean since the last one."),
  "held_out": (held_out, "Measured on prompts that are not trained on."),
  "drafts": (drafts, "Overlap of every draft with the target; higher is better."),
  "replayed": (
    replayed,
    "The share of the target's tokens that each system would have drafted, mean of the"
    " last 25 answers. Learning pays where its line leaves that of the draft.",
  ),
  "speeds": (speeds, "Above the dotted line, a draft is faster than plain decoding."),
}

_RUNS = " One line per run, mean of the last 25 requests, restarted at each shift."
_TIMES = "Decoding only, without waiting for updates; lower is better."
_GAIN = "Higher is better. Overlap minus that of the same draft, frozen."
# Title, lower end of the axis, field, field that is subtracted from it, caption.
_COMPARED = (
  ("Milliseconds per token", 0.0, "online_ms_per_token", "", _TIMES),
  ("Tokens per target call", 1.0, "tokens_per_target_call", "", "Higher is better."),
  ("Overlap", 0.0, "overlap", "", "Higher is better."),
  ("Overlap gain", 0.0, "overlap", "floor_overlap", _GAIN),
)
# As in `PLOTS`; the functions take name of the run -> its rows.
COMPARED: dict[str, tuple[Callable[[Mapping[str, Sequence[Row]]], Any], str]] = {
  f"compared_{spec[0].lower().replace(' ', '_')}": (
    functools.partial(_compared, *spec),
    caption + _RUNS,
  )
  for *spec, caption in _COMPARED
}
