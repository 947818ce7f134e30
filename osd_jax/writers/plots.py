"""PNG plots of a run, drawn from the rows of metrics.jsonl; needs [plots].

One style: online draft blue, floor (frozen first) draft orange, plain decoding
grey; thin dots are single requests, lines are trailing means. The colours are
Okabe and Ito's, told apart by colour-blind readers; each series has a line style
of its own besides. Matplotlib is imported only inside functions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.writers import series

_ONLINE, _FLOOR, _PLAIN, _INK, _FAINT = (
  "#0072B2",
  "#D55E00",
  "#666666",
  "#222222",
  "#B8B8B8",
)
_SIZE, _DPI = (8.0, 4.0), 160

_STYLE: Any = {
  "font.family": "sans-serif",
  "font.size": 11,
  "axes.edgecolor": _FAINT,
  "axes.labelcolor": _INK,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.grid.axis": "y",
  "axes.axisbelow": True,
  "grid.color": "#ECECEC",
  "xtick.color": _PLAIN,
  "ytick.color": _PLAIN,
  "text.color": _INK,
  "figure.facecolor": "white",
  "savefig.facecolor": "white",
}


class _Line:
  """One series of a plot over requests: what to draw and how."""

  def __init__(self, name: str, values: np.ndarray, color: str, style: str = "-"):
    self.name, self.values, self.color, self.style = name, values, color, style


def plots_available() -> bool:
  """Whether matplotlib can be imported."""
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    return False
  return True


def draw_plots_if_available(
  rows: Iterable[Mapping[str, Any]], directory: str | Path
) -> tuple[list[Path], str]:
  """Draws the plots, or says why there are none; never fails for want of them.

  Returns:
    The files, and a sentence for the user.
  """
  try:
    paths = draw_plots(rows, directory)
  except ImportError as error:
    return [], f"Plots were left out: {error}"
  return paths, f"{len(paths)} plots in {directory}"


def draw_plots(rows: Iterable[Mapping[str, Any]], directory: str | Path) -> list[Path]:
  """Draws every plot for which the rows hold data.

  Args:
    rows: rows of metrics.jsonl.
    directory: folder of the PNG files, made if absent.

  Returns:
    The files, in reading order.

  Raises:
    ImportError: matplotlib is not installed; says what to install.
  """
  try:
    import matplotlib
  except ImportError as error:
    raise base.MissingExtraError(
      "plots need matplotlib: pip install osd-jax[plots]"
    ) from error
  rows = list(rows)
  directory = Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  drawn = []
  with matplotlib.rc_context(_STYLE):
    for name, draw in _PLOTS.items():
      figure = draw(rows)
      if figure is not None:
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=_DPI)
        drawn.append(path)
  return drawn


def _overlap(rows: Sequence[series.Row]) -> Any:
  requests = series.request_rows(rows)
  lines = [
    _Line("frozen draft", series.column(requests, "floor_overlap"), _FLOOR, "--"),
    _Line("online draft", series.column(requests, "overlap"), _ONLINE),
  ]
  return _over_requests(
    requests, lines, "Distribution overlap of draft and target", limits=(0.0, 1.02)
  )


def _tokens_per_call(rows: Sequence[series.Row]) -> Any:
  requests = series.request_rows(rows)
  lines = [
    _Line(
      "frozen draft",
      series.column(requests, "floor_tokens_per_target_call"),
      _FLOOR,
      "--",
    ),
    _Line("online draft", series.column(requests, "tokens_per_target_call"), _ONLINE),
  ]
  limits = (1.0, _ceiling(lines, quantile=1.0))
  return _over_requests(requests, lines, "Tokens per target call", limits=limits)


def _milliseconds(rows: Sequence[series.Row]) -> Any:
  requests = series.request_rows(rows)
  online = series.column(requests, "online_ms_per_token")
  if not np.isfinite(online).any():
    tokens = series.column(requests, "output_tokens")
    tokens[tokens == 0] = np.nan
    online = series.column(requests, "decode_ms") / tokens
  lines = [
    _Line("plain", series.column(requests, "plain_ms_per_token"), _PLAIN, ":"),
    _Line("frozen draft", series.column(requests, "floor_ms_per_token"), _FLOOR, "--"),
    _Line("online draft", online, _ONLINE),
  ]
  limits = (0.0, _ceiling(lines, quantile=0.98))
  return _over_requests(requests, lines, "Milliseconds per token", limits=limits)


def _loss(rows: Sequence[series.Row]) -> Any:
  updates = series.update_rows(rows)
  losses = series.column(updates, "loss")
  if not np.isfinite(losses).any():
    return None
  finished = series.column(updates, "finished")
  figure, axes = _new_figure("Distillation loss of each update")
  _mark_shifts(axes, series.request_rows(rows))
  axes.plot(finished, losses, ".", color=_ONLINE, alpha=0.4, markersize=6, mew=0)
  axes.plot(finished, series.trailing_mean(losses, 5), color=_ONLINE, lw=2.2)
  skipped = finished[~np.isfinite(losses)]
  if len(skipped):
    axes.plot(skipped, np.zeros(len(skipped)), "x", color=_FLOOR, clip_on=False)
    axes.plot([], [], "x", color=_FLOOR, label="skipped, not finite")
    _legend(axes)
  axes.set_ylim(bottom=0)
  axes.set_xlabel("finished requests; line: mean of the last 5 updates, dots: updates")
  return figure


def _per_position(rows: Sequence[series.Row]) -> Any:
  requests = series.request_rows(rows)
  parts = series.segments(requests)
  first, last = series.edges(parts)
  early = series.acceptance_per_position([requests[i] for i in first])
  late = series.acceptance_per_position([requests[i] for i in last])
  if not len(early) or len(early) != len(late):
    return None
  size = f"{series.EDGE} of each topic" if len(parts) > 1 else f"{series.EDGE} requests"
  figure, axes = _new_figure("Accepted share of drafted tokens")
  positions = np.arange(1, len(early) + 1)
  for shift, values, color, name in (
    (-0.2, early, _FAINT, f"first {size}"),
    (0.2, late, _ONLINE, f"last {size}"),
  ):
    bars = axes.bar(positions + shift, values, 0.38, color=color, label=name)
    axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=2, color=_PLAIN)
  axes.set_ylim(0, 1.08)
  axes.set_yticks(np.arange(0, 1.01, 0.2))
  axes.set_xticks(positions)
  axes.set_xlabel("position of the drafted token in its round")
  _legend(axes)
  return figure


def _ledger(rows: Sequence[series.Row]) -> Any:
  ledger = series.cost_ledger(rows)
  if not ledger:
    return None
  figure, axes = _new_figure("Where the time went, seconds", height=0.9)
  names, seconds = list(ledger), list(ledger.values())
  bars = axes.barh(range(len(names)), seconds, 0.6, color=_ONLINE)
  total = sum(seconds)
  labels = [f"{value:,.1f} s  ({value / total:.0%})" for value in seconds]
  axes.bar_label(bars, labels, padding=5, fontsize=10)
  axes.set_yticks(range(len(names)), names)
  axes.tick_params(axis="y", length=0, labelcolor=_INK)
  axes.invert_yaxis()
  axes.set_xlim(0, max(seconds) * 1.22)
  axes.grid(visible=False)
  axes.spines["bottom"].set_visible(False)
  axes.set_xticks([])
  return figure


_PLOTS: dict[str, Callable[[Sequence[series.Row]], Any]] = {
  "distribution_overlap": _overlap,
  "tokens_per_target_call": _tokens_per_call,
  "milliseconds_per_token": _milliseconds,
  "acceptance_per_position": _per_position,
  "update_loss": _loss,
  "cost_ledger": _ledger,
}


def _over_requests(
  requests: Sequence[series.Row],
  lines: Sequence[_Line],
  title: str,
  limits: tuple[float, float],
) -> Any:
  """Dots of single requests and trailing means, with the stream's shifts."""
  lines = [line for line in lines if np.isfinite(line.values).any()]
  if not lines:
    return None
  figure, axes = _new_figure(title)
  _mark_shifts(axes, requests)
  index = series.column(requests, "index")
  hidden = 0
  for line in lines:
    hidden += int(np.sum(line.values > limits[1]))
    axes.plot(
      index, line.values, ".", color=line.color, alpha=0.3, markersize=4.5, mew=0
    )
    axes.plot(
      index,
      series.trailing_mean(line.values),
      line.style,
      color=line.color,
      lw=2.2,
      label=line.name,
    )
  axes.set_ylim(*limits)
  note = f"request; lines: mean of the last {series.WINDOW}, dots: single requests"
  axes.set_xlabel(note + (f"; {hidden} dots above" if hidden else ""))
  _legend(axes)
  return figure


def _ceiling(lines: Sequence[_Line], quantile: float) -> float:
  """Upper end of the axis: covers the means and `quantile` of the dots."""
  values = [line.values[np.isfinite(line.values)] for line in lines]
  tops = [np.quantile(v, quantile) for v in values if len(v)]
  return float(max(tops, default=1.0)) * 1.08


def _mark_shifts(axes: Any, requests: Sequence[series.Row]) -> None:
  """Vertical lines where the source changes, and the sources' names on top."""
  parts = series.segments(requests)
  if not parts:
    return
  index = series.column(requests, "index")
  span = index[-1] - index[0] + 1
  axes.set_xlim(index[0] - 0.005 * span, index[-1] + 0.005 * span)
  for part in parts:
    left, right = index[part.start], index[part.stop - 1]
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
        color=_PLAIN,
      )


def _new_figure(title: str, height: float = 1.0) -> tuple[Any, Any]:
  from matplotlib.figure import Figure  # not pyplot: no global state, no display
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  figure = Figure(
    figsize=(_SIZE[0], _SIZE[1] * height),
    layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
  )
  axes = figure.subplots()
  axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
  axes.tick_params(length=3)
  return figure, axes


def _legend(axes: Any) -> None:
  """Names of the series, right above the plot, on the title's line."""
  axes.legend(
    loc="lower right",
    bbox_to_anchor=(1.0, 1.055),
    ncols=3,
    frameon=False,
    borderaxespad=0.0,
    handlelength=2.2,
    columnspacing=1.4,
    fontsize=10,
  )
