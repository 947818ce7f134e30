"""Tables and sentences about a run, computed from the rows of metrics.jsonl alone."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table

from osd_jax import metrics, runs
from osd_jax.costs import account as account_lib
from osd_jax.costs.table import Costs
from osd_jax.runs import alarms

WINDOW = 25  # requests of a trailing mean
EDGE = 50  # requests that "first" and "last" mean

Row = Mapping[str, Any]
Table = list[dict[str, Any]]
Segments = Sequence[tuple[str, Sequence[Row]]]


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a report says about a run.

  Attributes:
    title: title of the page.
    sentences: the results in words.
    tables: heading -> rows with equal keys.
  """

  title: str
  sentences: list[str]
  tables: dict[str, Table]


def summary(rows: Sequence[Row]) -> Summary:
  """Summarises a run of any command, chosen by the kinds of its rows."""
  by_kind: dict[str, list[Row]] = {}
  for row in rows:
    by_kind.setdefault(row["kind"], []).append(row)
  for kind, make in _SUMMARIES.items():
    if kind in by_kind:
      return make(by_kind, rows)
  return Summary("Run", ["No measurements yet."], {})


# --- Online runs ----------------------------------------------------------------------


def _served(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  segmented = by_segment(by_kind["request"])
  tables = {
    "Agreement per topic": agreement_table(segmented),
    "Speed per topic": speed_table(segmented),
  }
  verdict = account_lib.verdict(rows).sentence()
  sentences = [*headline(segmented), *([verdict] if verdict else [])]
  account = account_lib.Account.of(rows)
  if account is not None:
    tables["Where the time went"] = account.table()
    sentences.append(account.sentence())
  if "costs" in by_kind:
    costs = Costs.from_json(by_kind["costs"][0])
    if predicted := account_lib.predictions(costs, rows):
      tables["Predicted from the costs, and measured"] = predicted
    tables["Costs on this machine"] = costs.table()
    if not verdict and (said := account_lib.predicted_saving(costs, rows)):
      sentences.append(said)
  sentences += [row["said"] for row in by_kind.get("mesh", ())[:1]]
  sentences += [row["said"] for row in by_kind.get("replica", ())[:3]]
  sentences.append(alarms.sentence(rows))
  return Summary("Online speculative decoding", sentences, tables)


def agreement_table(segmented: Segments) -> Table:
  """One row per segment: first and last `EDGE` requests, online and frozen."""
  table = []
  for label, rows in segmented:
    found = metrics.segment_summary(list(rows), EDGE)
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


def speed_table(segmented: Segments) -> Table:
  """One row per segment: the same requests served plainly, frozen and online."""
  table = []
  for label, rows in segmented:
    found = metrics.segment_summary(list(rows), EDGE)
    compared = [row for row in rows if row.get("plain_ms_per_token") is not None]
    table.append(
      {
        "topic": label,
        "tokens per target call": _rounded(found["tokens_per_target_call_last"]),
        "plain ms/token": _rounded(_ms_per_token(compared, "plain")),
        "frozen ms/token": _rounded(_ms_per_token(compared, "floor")),
        "online ms/token": _rounded(_ms_per_token(compared, "online")),
      }
    )
  return table


def headline(segmented: Segments) -> list[str]:
  """One sentence per segment; figures that were not measured are left out."""
  sentences = []
  for label, part in segmented:
    found = metrics.segment_summary(list(part), EDGE)
    frozen = found["floor_overlap_last"]
    rival = "" if np.isnan(frozen) else f" (frozen draft {frozen:.2f})"
    sentences.append(
      f"{label}: overlap {found['overlap_first']:.2f} in the first {EDGE} requests,"
      f" {found['overlap_last']:.2f} in the last {EDGE}{rival}{_acceptance(found)}."
    )
  return sentences


def _acceptance(found: Mapping[str, float | int]) -> str:
  first, last = (found[f"draft_acceptance_{edge}"] for edge in ("first", "last"))
  # Plain decoding drafts no tokens.
  if np.isnan(first) and np.isnan(last):
    return ""
  return f"; draft acceptance {first:.2f}, then {last:.2f}"


def _ms_per_token(rows: Sequence[Row], name: str) -> float:
  tokens = sum(row["output_tokens"] for row in rows)
  # Weighted with the tokens: the mean of ratios would count short answers too much.
  spent = sum(row[f"{name}_ms_per_token"] * row["output_tokens"] for row in rows)
  return spent / tokens if tokens else float("nan")


def comparison_row(name: str, rows: Sequence[Row]) -> dict[str, Any]:
  """One run as a row of the table of `osd compare`."""
  requests = runs.request_rows(rows)
  account = account_lib.Account.of(rows)
  spent = sum(row["decode_ms"] for row in requests)
  tokens = sum(row["output_tokens"] for row in requests)
  calls = sum(row["target_calls"] for row in requests)
  agreement = agreement_table([("", requests)])[0]
  speeds = speed_table([("", requests)])[0]
  return {
    "run": name,
    "requests": len(requests),
    "overlap": _mean(requests, "overlap"),
    "frozen overlap": _mean(requests, "floor_overlap"),
    f"overlap last {EDGE}": agreement[f"overlap last {EDGE}"],
    f"frozen last {EDGE}": agreement[f"frozen last {EDGE}"],
    "tokens per target call": round(tokens / calls, 2),
    "ms per token": round(spent / tokens, 2),
    "plain ms/token": speeds["plain ms/token"],
    "frozen ms/token": speeds["frozen ms/token"],
    "wall seconds": None if account is None else round(account.wall, 1),
    "learning seconds": None if account is None else round(account.learning, 1),
  }


def _mean(requests: Sequence[Row], name: str) -> float | None:
  """Mean over all requests; None unless every request has the field."""
  values = [row[name] for row in requests if row.get(name) is not None]
  return round(sum(values) / len(values), 3) if len(values) == len(requests) else None


# --- Other commands -------------------------------------------------------------------


def _evaluated(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  del rows
  first = by_kind["draft"][0]["draft"] if "draft" in by_kind else ""
  headings = {
    "quality": "Target",
    "draft": "Drafts",
    "change": f"Against {first}",
    "certificate": "Certificate",
    "speed": "Speed",
  }
  tables = {
    heading: _shown(by_kind[kind])
    for kind, heading in headings.items()
    if kind in by_kind
  }
  sentences = [_speed_sentence(row) for row in by_kind.get("speed", ())]
  return Summary("Evaluation", sentences, tables)


def _speed_sentence(row: Row) -> str:
  text = f"{row['rows']} row(s), {row['draft']}: {row['speed_up']:.2f}x plain decoding"
  if row["predicted"] is None:  # the formulas hold for a fixed K only
    return f"{text}, K adaptive."
  return (
    f"{text} ({row['predicted']:.2f}x predicted from the measured costs,"
    f" {row['predicted_paper']:.2f}x by the paper's formula)."
  )


def _certified(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  del rows
  return Summary("Certificate", [], {"Certificate": _shown(by_kind["certificate"])})


def _compiled(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  """Programs that were compiled for another machine and did not run."""
  del rows
  headings = {
    "program": "Programs, each on one chip",
    "memory": "Memory of a chip",
    "estimate": "Highest speeds, estimated",
  }
  tables = {
    heading: _shown([_without_empty(row, by_kind[kind]) for row in by_kind[kind]])
    for kind, heading in headings.items()
    if kind in by_kind
  }
  sentences = [
    f"{row['program']} does not fit, according to the compiler: {row['said']}"
    for row in by_kind.get("too_large", ())
  ]
  sentences += [
    f"It needs {row['needed_gb']:.2f} GB of a chip's {row['memory_gb']:.0f} GB."
    if not row["advice"]
    else f"It does not fit: {row['needed_gb'] - row['memory_gb']:.2f} GB more than a"
    f" chip's {row['memory_gb']:.0f} GB; {row['advice']}."
    for row in by_kind.get("fits", ())
  ]
  sentences.append(
    "The programs were compiled for a machine that is not here, and did not run."
    " Counts come from the compiler's text; estimates are upper bounds from the chip's"
    " published figures."
  )
  return Summary("Ahead of time", sentences, tables)


def _without_empty(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
  """The row without the fields that are None in all rows."""
  return {n: value for n, value in row.items() if any(r[n] is not None for r in rows)}


def _trained(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  """Offline distillation, which measures overlap, or supervised training."""
  del rows
  evaluations = by_kind.get("evaluation", [])
  measured = [
    name for row in evaluations[:1] for t in row["tasks"].values() for name in t
  ]
  sentences = _loss(by_kind.get("step", []))
  if "distribution_overlap" in measured:
    tables = {
      "Held-out prompts": _before_and_after(evaluations[0], evaluations[-1]),
      "Overlap over the run": _over_the_run(evaluations, "distribution_overlap"),
    }
    return Summary("Offline distillation", sentences, tables)
  tables = {}
  if evaluations:
    tables = {
      "Exact match over the run": _over_the_run(evaluations, "exact_match"),
      "Token accuracy over the run": _over_the_run(evaluations, "token_accuracy"),
    }
  return Summary("Supervised training", sentences, tables)


def _loss(steps: Sequence[Row]) -> list[str]:
  if not steps:
    return []
  first, last = (row["loss"] or float("nan") for row in (steps[0], steps[-1]))
  return [
    f"{steps[-1]['step']} steps: loss {first:.4f} in the first {steps[0]['step']},"
    f" {last:.4f} in the last ones; {steps[-1]['skipped']} steps were skipped because"
    " they were not finite."
  ]


def _before_and_after(before: Row, after: Row) -> Table:
  was, now = before["tasks"], after["tasks"]
  return [
    {
      "task": label,
      "prompts": now[label]["requests"],
      "overlap before": _rounded(was[label]["distribution_overlap"]),
      "overlap after": _rounded(now[label]["distribution_overlap"]),
      "at most": _rounded(now[label]["distribution_overlap_upper"]),
      "acceptance before": _rounded(was[label]["acceptance_rate"]),
      "acceptance after": _rounded(now[label]["acceptance_rate"]),
    }
    for label in now
  ]


def _over_the_run(evaluations: Sequence[Row], name: str) -> Table:
  return [
    {"step": row["step"], **{t: _rounded(v[name]) for t, v in row["tasks"].items()}}
    for row in evaluations
  ]


def _shown(rows: Sequence[Row]) -> Table:
  """Log rows as table rows: rounded, with spaces in the names."""
  return [
    {
      name.replace("_", " "): _rounded(value) if isinstance(value, float) else value
      for name, value in row.items()
      if name not in ("kind", "nonfinite")
    }
    for row in rows
  ]


def _rounded(value: float | None) -> float | None:
  return None if value is None or np.isnan(value) else round(float(value), 3)


# The first kind that a log contains decides, so an online run comes before the steps.
_SUMMARIES = {
  "request": _served,
  "quality": _evaluated,
  "evaluation": _trained,
  "step": _trained,
  "certificate": _certified,
  "program": _compiled,
  "too_large": _compiled,
}


# --- Topics of a stream ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segment:
  """The requests `start` to `stop` - 1 of the stream, with one main source."""

  source: str
  start: int
  stop: int


def segments(requests: Sequence[Row], min_run: int = 10) -> list[Segment]:
  """Splits the stream where a new source lasts for `min_run` requests.

  A stream that mixes its sources has no such position and is one segment. If no source
  returns after another one, runs may have any length.

  Args:
    requests: request rows, in the order of the stream.
    min_run: number of consecutive requests that make a segment.
  """
  sources = [str(row.get("source", "")) for row in requests]
  if not sources:
    return []
  if len(list(itertools.groupby(sources))) == len(set(sources)):
    min_run = 1
  starts: list[tuple[int, str]] = []
  run_start = 0
  for i, source in enumerate([*sources[1:], None], start=1):
    if source == sources[i - 1]:
      continue
    current = starts[-1][1] if starts else None
    if i - run_start >= min_run and sources[run_start] != current:
      starts.append((run_start, sources[run_start]))
    run_start = i
  if not starts:
    return [Segment("mixed", 0, len(sources))]
  first = starts[0][0]
  if first >= min_run:
    starts.insert(0, (0, "mixed"))
  else:
    # The few requests before the first long run are counted as part of that run.
    starts[0] = (0, starts[0][1])
  stops = [start for start, _ in starts[1:]] + [len(sources)]
  return [Segment(name, start, stop) for (start, name), stop in zip(starts, stops)]


def by_segment(requests: Sequence[Row]) -> list[tuple[str, list[Row]]]:
  """(source, its requests) of every segment, in the order of the stream."""
  ordered = sorted(requests, key=runs.place)
  return [(part.source, ordered[part.start : part.stop]) for part in segments(ordered)]


def edges(parts: Sequence[Segment], size: int = EDGE) -> tuple[list[int], list[int]]:
  """Positions of the first and of the last `size` requests of every segment.

  The two lists have no common position: in a short segment each gets one half.
  """
  first: list[int] = []
  last: list[int] = []
  for part in parts:
    n = min(size, (part.stop - part.start) // 2)
    first.extend(range(part.start, part.start + n))
    last.extend(range(part.stop - n, part.stop))
  return first, last


def trailing_mean(
  values: np.ndarray, window: int = WINDOW, starts: Sequence[int] = (0,)
) -> np.ndarray:
  """Mean of the measured values among the last `window`.

  Args:
    values: [n]; NaN where nothing was measured.
    window: number of positions, including the current one.
    starts: positions where the mean restarts, increasing from 0.

  Returns:
    [n]; NaN where no value in the window was measured.
  """
  measured = np.isfinite(values)
  # Cumulative sums give all windows in one pass.
  sums = np.concatenate([[0.0], np.cumsum(np.where(measured, values, 0.0))])
  counts = np.concatenate([[0], np.cumsum(measured)])
  stop = np.arange(1, len(values) + 1)
  begun = np.searchsorted(starts, stop - 1, side="right") - 1
  start = np.maximum(stop - window, np.asarray(starts, int)[begun])
  number = counts[stop] - counts[start]
  with np.errstate(invalid="ignore", divide="ignore"):
    return np.where(number > 0, (sums[stop] - sums[start]) / number, math.nan)


def acceptance_per_position(requests: Sequence[Row]) -> np.ndarray:
  """Share of verifications that accepted the i-th drafted token.

  `accepted_per_position` of a row counts the verifications that accepted position i.

  Returns:
    [K] float64, empty if no row has the counts.
  """
  accepted: np.ndarray | None = None
  calls = 0.0
  for row in requests:
    counts = row.get("accepted_per_position")
    made = _target_calls(row)
    if counts is None or not made:
      continue
    counts = np.asarray(counts, np.float64)
    accepted = counts if accepted is None else accepted + counts
    calls += made
  return np.zeros(0) if accepted is None else accepted / calls


def accepted_per_round(requests: Sequence[Row]) -> np.ndarray:
  """Number of verifications that accepted exactly 0, 1, ..., K drafted tokens.

  Returns:
    [K + 1] float64, empty if no row has the counts.
  """
  total: np.ndarray | None = None
  for row in requests:
    counts, made = row.get("accepted_per_position"), _target_calls(row)
    if counts is not None and made:
      # Accepted tokens form a prefix, so the counts say "at least i + 1 accepted".
      at_least = np.array([made, *counts, 0], np.float64)
      exactly = at_least[:-1] - at_least[1:]
      total = exactly if total is None else total + exactly
  return np.zeros(0) if total is None else total


def _target_calls(row: Row) -> float:
  if row.get("target_calls") is not None:
    return float(row["target_calls"])
  per_call = row.get("tokens_per_target_call")
  return float(row.get("output_tokens") or 0) / per_call if per_call else 0.0


# --- On a console ---------------------------------------------------------------------

_PADDING = 2  # characters between two columns


def print_table(
  table: Sequence[Row], console: rich.console.Console, title: str = ""
) -> None:
  """Prints rows with equal keys: text left-aligned, numbers right-aligned.

  Numbers are never cut. Columns that do not fit go into another table below, which
  repeats the leading text columns.
  """
  if not table:
    return
  if title:
    console.print(f"\n{title}", highlight=False)
  for names in _parts(table, console.width):
    shown = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False
    )
    for name in names:
      justify = "left" if _is_text(table, name) else "right"
      least = min(_width(table, name), console.width // 2)
      shown.add_column(name, justify=justify, width=least, overflow="fold")
    for row in table:
      shown.add_row(*(_cell(row[name]) for name in names))
    console.print(shown)


def _parts(table: Sequence[Row], width: int) -> list[list[str]]:
  """Splits the columns into parts that fit the width; each starts with the text."""
  names = list(table[0])
  leading = list(itertools.takewhile(lambda name: _is_text(table, name), names))
  taken = sum(_width(table, name) + _PADDING for name in leading)
  parts, room = [leading.copy()], width - taken
  for name in names[len(leading) :]:
    needed = _width(table, name) + _PADDING
    if needed > room and len(parts[-1]) > len(leading):
      parts.append(leading.copy())
      room = width - taken
    parts[-1].append(name)
    room -= needed
  return parts


def _width(table: Sequence[Row], name: str) -> int:
  """Minimum width: cells stay on one line, headings may wrap between words."""
  return max(map(len, [*(_cell(row[name]) for row in table), *name.split()]))


def _is_text(table: Sequence[Row], name: str) -> bool:
  texts = [row[name] for row in table if isinstance(row[name], str)]
  return any(not text[:1].isdigit() for text in texts)  # "39.6%" is a number


def _cell(value: Any) -> str:
  return "-" if value is None else str(value)
