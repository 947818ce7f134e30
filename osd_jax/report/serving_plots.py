"""Plots of a served stream: what learning gained, request by request.

Online draft blue, floor (frozen first) draft orange, plain decoding grey; thin dots
are single requests, lines are trailing means that begin anew at every shift.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from osd_jax import runs
from osd_jax.costs import account as account_lib
from osd_jax.report import canvas, series

_WARM = 5  # requests behind a shift without a line: a mean of fewer says little


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
  """One series over requests: its name, [n] values, colour and line style."""

  name: str
  values: np.ndarray
  color: str
  style: str = "-"


def overlap(rows: Sequence[series.Row]) -> Any:
  """Distribution overlap of both drafts over the stream."""
  requests = runs.request_rows(rows)
  lines = [
    Line("frozen draft", runs.column(requests, "floor_overlap"), canvas.FLOOR, "--"),
    Line("online draft", runs.column(requests, "overlap"), canvas.ONLINE),
  ]
  return _over_requests(requests, lines, "Distribution overlap", (0.0, 1.02))


def tokens_per_call(rows: Sequence[series.Row]) -> Any:
  """Tokens per target call with both drafts over the stream."""
  requests = runs.request_rows(rows)
  name = "tokens_per_target_call"
  lines = [
    Line("frozen draft", runs.column(requests, f"floor_{name}"), canvas.FLOOR, "--"),
    Line("online draft", runs.column(requests, name), canvas.ONLINE),
  ]
  limits = (1.0, _ceiling(lines, quantile=1.0))
  return _over_requests(requests, lines, "Tokens per target call", limits)


def milliseconds(rows: Sequence[series.Row]) -> Any:
  """Milliseconds per token, plain decoding apart where the learner took cores."""
  requests = runs.request_rows(rows)
  lines = _times(requests)
  limits = (0.0, _ceiling(lines, quantile=0.98))
  return _over_requests(requests, lines, "ms per token", limits)


def saved(rows: Sequence[series.Row]) -> Any:
  """Seconds that learning has saved so far, updates included."""
  requests = runs.request_rows(rows)
  seconds = runs.column(requests, "saved_seconds")
  if not np.isfinite(seconds).any() or not seconds.any():
    return None
  figure, (axes,) = canvas.figure("Time saved against the frozen draft, seconds")
  _mark_shifts(axes, requests)
  _shade_pauses(axes, requests)
  axes.axhline(0.0, color=canvas.FLOOR, lw=1.2, ls="--")
  axes.plot(places(requests), seconds, color=canvas.ONLINE, lw=2.2)
  axes.set_xlabel("request; measured on compared requests, updates included")
  canvas.legend(axes)
  return figure


def latency(rows: Sequence[series.Row]) -> Any:
  """Percentiles of milliseconds per token, over the same requests where compared."""
  requests = runs.request_rows(rows)
  compared = [r for r in requests if r.get("plain_ms_per_token") is not None]
  chosen = compared or requests
  lines = [line for line in _times(chosen) if np.isfinite(line.values).any()]
  if not lines:
    return None
  figure, (axes,) = canvas.figure("ms per token: percentiles")
  canvas.grouped_bars(
    axes,
    ["p50", "p95", "p99"],
    {line.name: np.nanpercentile(line.values, [50, 95, 99]) for line in lines},
    [line.color for line in lines],
  )
  which = "requests served all three ways" if compared else "requests"
  axes.set_xlabel(f"over {len(chosen)} {which}")
  canvas.legend(axes)
  return figure


def loss(rows: Sequence[series.Row]) -> Any:
  """Distillation loss of every update; the line breaks at shifts and pauses."""
  updates = runs.of_kind(rows, "update")
  losses = runs.column(updates, "loss")
  if not np.isfinite(losses).any():
    return None
  requests = runs.request_rows(rows)
  finished = runs.column(updates, "finished")
  figure, (axes,) = canvas.figure("Distillation loss of each update")
  _mark_shifts(axes, requests)
  _shade_pauses(axes, requests)
  axes.plot(finished, losses, ".", color=canvas.ONLINE, alpha=0.4, markersize=6, mew=0)
  starts = _breaks(requests, finished)
  means = series.trailing_mean(losses, 5, starts)
  axes.plot(*_broken(finished, means, starts), color=canvas.ONLINE, lw=2.2)
  skipped = finished[~np.isfinite(losses)]
  if len(skipped):
    axes.plot(
      skipped,
      np.zeros(len(skipped)),
      "x",
      color=canvas.FLOOR,
      clip_on=False,
      label="skipped, not finite",
    )
  axes.set_ylim(bottom=0)
  axes.set_xlabel("finished requests; line: mean of the last 5 updates, dots: updates")
  canvas.legend(axes)
  return figure


def per_position(rows: Sequence[series.Row]) -> Any:
  """Accepted share of drafted tokens by position, a panel a topic."""
  requests = runs.request_rows(rows)
  first, last = series.edges(series.segments(requests))
  edges = {"first": [requests[i] for i in first], "last": [requests[i] for i in last]}
  panels = []
  for topic in dict.fromkeys(str(row.get("source", "")) for row in requests):
    shares = {
      f"{edge} {series.EDGE} requests": series.acceptance_per_position(
        [row for row in part if str(row.get("source", "")) == topic]
      )
      for edge, part in edges.items()
    }
    if all(map(len, shares.values())):
      panels.append((topic, shares))
  panels = panels[:8]
  if not panels:
    return None
  columns = min(len(panels), 4)
  count = -(-len(panels) // columns)
  figure, grid = canvas.figure(
    "Accepted share of drafted tokens",
    rows=count,
    columns=columns,
    height=1.2 + 2.4 * count,
  )
  for axes, (topic, shares) in zip(grid, panels):
    _bars_by_position(axes, shares)
    if len(panels) > 1:
      axes.set_title(topic, fontsize=10, color=canvas.PLAIN)
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  figure.supxlabel("position of the drafted token in its round", fontsize=11)
  if len(panels) == 1:
    canvas.legend(grid[0])
  else:
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(
      handles, names, loc="outside upper right", ncols=2, frameon=False, fontsize=10
    )
  return figure


def _bars_by_position(axes: Any, shares: dict[str, np.ndarray]) -> None:
  colors = (canvas.FAINT, canvas.ONLINE)
  for shift, (name, values), color in zip((-0.2, 0.2), shares.items(), colors):
    positions = np.arange(1, len(values) + 1)
    axes.bar(positions + shift, values, 0.38, color=color, label=name)
    axes.set_xticks(positions)
  axes.set_ylim(0, 1.02)


def rounds(rows: Sequence[series.Row]) -> Any:
  """How many tokens a round drafts, and how many of them are accepted."""
  requests = runs.request_rows(rows)
  accepted = series.accepted_per_round(requests)
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
  figure, (axes,) = canvas.figure("Tokens a round")
  colors = (canvas.FAINT, canvas.ONLINE)[-len(shares) :]
  canvas.grouped_bars(axes, list(map(str, range(len(accepted)))), shares, colors)
  axes.set_xlabel("tokens")
  canvas.legend(axes)
  return figure


def account(rows: Sequence[series.Row]) -> Any:
  """Where the wall time went; learning, beside it or waited for, has its own bar."""
  found = account_lib.Account.of(rows)
  if found is None:
    return None
  figure, (axes,) = canvas.figure("Where the time went, seconds")
  seconds = {**found.parts, "learning": found.learning}
  colors = [
    canvas.FLOOR
    if name == "learning"
    else canvas.FAINT
    if name == "rest"
    else canvas.ONLINE
    for name in seconds
  ]
  bars = axes.barh(list(seconds), list(seconds.values()), 0.6, color=colors)
  labels = [f"{value:.1f} ({value / found.wall:.0%})" for value in seconds.values()]
  axes.bar_label(bars, labels, padding=4, color=canvas.PLAIN, fontsize=10)
  axes.axhline(len(found.parts) - 0.5, color=canvas.FAINT, lw=0.8)
  axes.invert_yaxis()
  axes.grid(False)
  axes.margins(x=0.18)
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel(f"all bars but the last add up to the wall time, {found.wall:.1f} s")
  return figure


def _times(requests: Sequence[series.Row]) -> list[Line]:
  """Milliseconds per token, three ways."""
  plain = runs.column(requests, "plain_ms_per_token")
  return [
    Line("plain", plain, canvas.PLAIN, ":"),
    Line("frozen", runs.column(requests, "floor_ms_per_token"), canvas.FLOOR, "--"),
    Line("online", _online_ms(requests), canvas.ONLINE),
  ]


def _online_ms(requests: Sequence[series.Row]) -> np.ndarray:
  tokens = runs.column(requests, "output_tokens")
  measured = runs.column(requests, "online_ms_per_token")
  per_token = runs.column(requests, "decode_ms") / np.where(tokens > 0, tokens, np.nan)
  return np.where(np.isfinite(measured), measured, per_token)


def _over_requests(
  requests: Sequence[series.Row],
  lines: Sequence[Line],
  title: str,
  limits: tuple[float, float],
) -> Any:
  """Dots of single requests and trailing means, with the stream's shifts."""
  lines = [line for line in lines if np.isfinite(line.values).any()]
  if not lines:
    return None
  figure, (axes,) = canvas.figure(title)
  _mark_shifts(axes, requests)
  _shade_pauses(axes, requests)
  where = places(requests)
  starts = [part.start for part in series.segments(requests)]
  hidden = 0
  for line in lines:
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
  note = f"request; lines: mean of the last {series.WINDOW}, dots: single requests"
  axes.set_xlabel(note + (f"; {hidden} dots above" if hidden else ""))
  canvas.legend(axes)
  return figure


def places(requests: Sequence[series.Row]) -> np.ndarray:
  """Where the requests stand in the stream, [n] float64."""
  return np.array([runs.place(row) for row in requests], float)


def trend(
  where: np.ndarray, values: np.ndarray, starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """(x, y) of the trailing mean that begins anew, a few requests behind each start."""
  means = series.trailing_mean(values, starts=starts)
  for start, stop in zip(starts, [*starts[1:], len(means)]):
    if stop - start > 2 * _WARM:
      means[start : start + _WARM] = np.nan
  return _broken(where, means, starts)


def _broken(
  where: np.ndarray, values: np.ndarray, starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """The same line with a gap before each start but the first."""
  gaps = [start for start in starts if start]
  return np.insert(where, gaps, np.nan), np.insert(values, gaps, np.nan)


def _breaks(requests: Sequence[series.Row], finished: np.ndarray) -> list[int]:
  """Updates at which the loss line begins anew: behind a shift or a pause."""
  where = places(requests)
  shifts = [where[part.start] for part in series.segments(requests) if part.start]
  ends = [stop for _, stop in _pauses(requests)]
  starts = np.searchsorted(finished, [*shifts, *ends], side="right")
  return sorted({0, *(int(i) for i in starts if i < len(finished))})


def _pauses(requests: Sequence[series.Row]) -> list[tuple[float, float]]:
  """(first, last) place of every stretch in which updates were paused."""
  spans = []
  grouped = itertools.groupby(requests, key=lambda row: bool(row.get("paused")))
  for paused, part in grouped:
    places = [runs.place(row) for row in part]
    if paused:
      spans.append((places[0] - 0.5, places[-1] + 0.5))
  return spans


def _shade_pauses(axes: Any, requests: Sequence[series.Row]) -> None:
  for number, (start, stop) in enumerate(_pauses(requests)):
    label = {} if number else {"label": "learning paused"}
    axes.axvspan(start, stop, color="#F0E442", alpha=0.22, lw=0, zorder=0, **label)


def _ceiling(lines: Sequence[Line], quantile: float) -> float:
  """Upper end of the axis: covers the means and `quantile` of the dots."""
  values = [line.values[np.isfinite(line.values)] for line in lines]
  tops = [np.quantile(v, quantile) for v in values if len(v)]
  return float(max(tops, default=1.0)) * 1.08


def _mark_shifts(axes: Any, requests: Sequence[series.Row]) -> None:
  """Vertical lines where the source changes, and the sources' names on top."""
  parts = series.segments(requests)
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
        color=canvas.PLAIN,
      )
