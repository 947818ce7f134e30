"""What commands say to people: the progress line, tables, the last words."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.progress
import rich.table

from osd_jax import writers
from osd_jax.measuring import alarms, metrics

WINDOW = 25  # requests of the trailing figures in the progress line
EDGE = 50  # requests that "first" and "last" mean


def progress_bar(console: rich.console.Console) -> rich.progress.Progress:
  """A bar whose tasks have a description, a count, the time left, and `figures`."""
  return rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.BarColumn(bar_width=20),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeRemainingColumn(),
    rich.progress.TextColumn("{task.fields[figures]}"),
    console=console,
  )


class Progress:
  """A live line: requests, overlap of draft and floor draft, tau, ms per token."""

  def __init__(self, console: rich.console.Console, total: int, finished: int):
    """Shows `finished` of `total` requests."""
    self._recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
    self._finished = finished
    self._bar = progress_bar(console)
    self._task = self._bar.add_task(
      "serve", total=total, completed=finished, figures=""
    )

  def __enter__(self) -> "Progress":
    self._bar.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.stop()

  def show(self, row: Mapping[str, Any]) -> None:
    """Takes in a request row."""
    self._recent.append(row)
    self._finished += 1

    def mean(name: str) -> str:
      values = [r[name] for r in self._recent if r.get(name) is not None]
      return f"{np.mean(values):.2f}" if values else "-"

    figures = (
      f"{row['source']}  overlap {mean('overlap')} (frozen {mean('floor_overlap')})"
      f"  {mean('tokens_per_target_call')} tokens/call"
      f"  {mean('online_ms_per_token')} ms/token"
    )
    self._bar.update(self._task, completed=self._finished, figures=figures)


def conclude(
  directory: writers.RunDirectory,
  shifts: Sequence[tuple[int, str]],
  console: rich.console.Console,
  verdict: str = "",
) -> None:
  """Prints the tables and the last words of a run and writes its report.

  Args:
    directory: a finished run.
    shifts: (index, label) of each segment of the stream.
    console: where to print.
    verdict: the certificate's sentence, "" where nothing was checked.
  """
  rows = list(writers.read(directory.metrics_path))
  requests = [row for row in rows if row["kind"] == "request"]
  segments = split(requests, shifts)
  tables = {
    "Agreement per topic": agreement_table(segments),
    "Speed per topic": speed_table(segments),
  }
  for table in tables.values():
    print_table(table, console)
  sentences = [*headline(requests, segments, rows), alarms.sentence(rows)]
  sentences += [verdict] if verdict else []
  for sentence in sentences:
    console.print(sentence, highlight=False)
  plots, note = writers.draw_plots_if_available(rows, directory.plots_path)
  page = writers.write_report(
    directory,
    sentences,
    {**tables, "What learning cost": [cost_row(rows)]},
    plots,
    note=note,
  )
  console.print(f"report: {page}")


def split(
  requests: Sequence[Mapping[str, Any]], shifts: Sequence[tuple[int, str]]
) -> list[tuple[str, list[Mapping[str, Any]]]]:
  """Request rows of each segment, by place in the stream."""
  starts = [index for index, _ in shifts] + [len(requests)]
  ordered = sorted(requests, key=lambda row: row["query"])
  return [
    (label, ordered[start:stop])
    for (start, label), stop in zip(shifts, starts[1:], strict=True)
    if ordered[start:stop]
  ]


def agreement_table(
  segments: Sequence[tuple[str, list[Mapping[str, Any]]]],
) -> list[dict[str, Any]]:
  """One row per segment: first and last `EDGE` requests, online and frozen."""
  table = []
  for label, rows in segments:
    found = metrics.segment_summary(rows, EDGE)
    table.append(
      {
        "topic": label,
        "requests": len(rows),
        f"overlap first {EDGE}": _rounded(found["overlap_first"]),
        f"overlap last {EDGE}": _rounded(found["overlap_last"]),
        f"frozen last {EDGE}": _rounded(found["floor_overlap_last"]),
        f"draft accepted first {EDGE}": _rounded(found["draft_acceptance_first"]),
        f"draft accepted last {EDGE}": _rounded(found["draft_acceptance_last"]),
      }
    )
  return table


def speed_table(
  segments: Sequence[tuple[str, list[Mapping[str, Any]]]],
) -> list[dict[str, Any]]:
  """One row per segment: the same requests served plainly, frozen and online."""
  table = []
  for label, rows in segments:
    speeds = _speeds(rows)
    found = metrics.segment_summary(rows, EDGE)
    table.append(
      {
        "topic": label,
        "tokens per target call": _rounded(found["tokens_per_target_call_last"]),
        "plain ms/token": _rounded(speeds["plain"]),
        "frozen ms/token": _rounded(speeds["floor"]),
        "online ms/token": _rounded(speeds["online"]),
      }
    )
  return table


def _acceptance(found: Mapping[str, float | int]) -> str:
  """Draft acceptance of a segment in words; nothing where nothing was drafted."""
  first, last = (found[f"draft_acceptance_{edge}"] for edge in ("first", "last"))
  if np.isnan(first) and np.isnan(last):
    return ""
  return f"; draft acceptance {first:.2f}, then {last:.2f}"


def headline(
  requests: Sequence[Mapping[str, Any]],
  segments: Sequence[tuple[str, list[Mapping[str, Any]]]],
  rows: Sequence[Mapping[str, Any]],
) -> list[str]:
  """What was gained, in plain words; figures that were not measured are left out."""
  sentences = []
  for label, part in segments:
    found = metrics.segment_summary(part, EDGE)
    sentences.append(
      f"{label}: overlap {found['overlap_first']:.2f} in the first {EDGE} requests,"
      f" {found['overlap_last']:.2f} in the last {EDGE} (frozen draft"
      f" {found['floor_overlap_last']:.2f}){_acceptance(found)}."
    )
  compared = [row for row in requests if row.get("plain_ms_per_token") is not None]
  if compared:
    speeds = _speeds(requests)
    sentences.append(
      f"On the same {len(compared)} requests: plain decoding {speeds['plain']:.2f}"
      f" ms/token, frozen draft {speeds['floor']:.2f}, online draft"
      f" {speeds['online']:.2f}: {speeds['plain'] / speeds['online']:.2f}x plain,"
      f" {speeds['floor'] / speeds['online']:.2f}x the frozen draft."
    )
  cost = cost_row(rows)
  sentences.append(
    f"Learning: {cost['updates']} updates in {cost['update seconds']:.1f} s beside"
    f" serving, which waited {cost['waiting seconds']:.1f} s for them; decoding took"
    f" {cost['decode seconds']:.1f} s."
  )
  return sentences


def cost_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """The cost ledger of a run, in seconds."""

  def total(kind: str, name: str) -> float:
    values = [row.get(name) or 0.0 for row in rows if row["kind"] == kind]
    return round(sum(values) / 1e3, 2)

  return {
    "updates": sum(row["kind"] == "update" for row in rows),
    "skipped steps": sum(row.get("skipped", 0) for row in rows),
    "decode seconds": total("request", "decode_ms"),
    "update seconds": total("update", "update_ms"),
    "waiting seconds": total("update", "wait_ms"),
    "metering seconds": total("request", "metering_ms"),
    "comparing seconds": total("request", "compare_ms"),
  }


def _speeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Milliseconds per token over the requests that were served all three ways."""
  compared = [row for row in rows if row.get("plain_ms_per_token") is not None]
  tokens = sum(row["output_tokens"] for row in compared)
  return {
    name: sum(row[f"{name}_ms_per_token"] * row["output_tokens"] for row in compared)
    / tokens
    if tokens
    else float("nan")
    for name in ("plain", "floor", "online")
  }


def _rounded(value: float) -> float | None:
  return None if np.isnan(value) else round(float(value), 3)


def log_rows(
  log: writers.MetricsLog, kind: str, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
  """Logs rows and returns them as a table shows them: rounded, words for names."""
  for row in rows:
    log.write(kind, row)
  return [
    {
      name.replace("_", " "): round(value, 3) if isinstance(value, float) else value
      for name, value in row.items()
    }
    for row in rows
  ]


def print_table(
  table: Sequence[Mapping[str, Any]], console: rich.console.Console
) -> None:
  """Prints rows of equal keys; columns of text to the left, of numbers to the right."""
  if not table:
    return
  shown = rich.table.Table()
  for name in table[0]:
    words = any(isinstance(row[name], str) for row in table)
    shown.add_column(name, justify="left" if words else "right")
  for row in table:
    shown.add_row(*("-" if value is None else str(value) for value in row.values()))
  console.print(shown)
