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
from osd_jax.costs.table import Costs
from osd_jax.loop import account as account_lib
from osd_jax.loop import alarms

WINDOW = 25  # requests of a trailing mean
EDGE = 50  # requests that "first" and "last" mean

Row = Mapping[str, Any]
Table = list[dict[str, Any]]
Segments = Sequence[tuple[str, Sequence[Row]]]


@dataclasses.dataclass(frozen=True)
class Fact:
  """A result: its most important figure, and a sentence that explains it."""

  figure: str
  sentence: str


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a report says about a run."""

  title: str  # title of the page
  headline: Sequence[Fact] = ()  # the results, at most four
  notes: Sequence[str] = ()  # further sentences for every reader
  # Heading -> rows with equal keys.
  tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
  # The same, folded away on the page.
  details: Mapping[str, Table] = dataclasses.field(default_factory=dict)
  details_notes: Sequence[str] = ()  # sentences about the details


def summary(rows: Sequence[Row]) -> Summary:
  """Summarises a run of any command, chosen by the kinds of its rows."""
  by_kind: dict[str, list[Row]] = {}
  for row in rows:
    by_kind.setdefault(row["kind"], []).append(row)
  for kind, make in _SUMMARIES.items():
    if kind in by_kind:
      return make(by_kind, rows)
  return Summary("Run", notes=["No measurements yet."])


# --- Online runs ----------------------------------------------------------------------


def _served(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  requests = runs.request_rows(rows)
  segmented = by_segment(requests)
  verdict = account_lib.verdict(rows)
  details, said = {}, verdict.sentence()
  if latency := latency_table(requests):
    details["Percentiles of milliseconds per token"] = latency
  account = account_lib.Account.of(rows)
  if account is not None:
    details["Where the time went"] = account.table()
  if "costs" in by_kind:
    costs = Costs.from_json(by_kind["costs"][0])
    details["Costs on this machine"] = costs.table()
  shown = {"sibling": 1, "mesh": 1, "replica": 3}
  events = [row for kind, most in shown.items() for row in by_kind.get(kind, ())[:most]]
  events += by_kind.get("unsaved", ())[-1:]
  return Summary(
    "Online speculative decoding",
    _headline(requests, verdict, learns="update" in by_kind),
    [*(row["said"] for row in events), _gate_sentence(by_kind), alarms.sentence(rows)],
    {
      "Agreement per topic": agreement_table(segmented),
      "Speed per topic": speed_table(segmented),
    },
    details,
    [said] if said else [],
  )


def _gate_sentence(by_kind: Mapping[str, list[Row]]) -> str:
  """Says what the gate decided; "" if the run had no gate."""
  if not any("gate_ms" in row for row in by_kind["request"]):
    return ""
  said = {
    "promoted": "trained drafts served from request {}",
    "taken_back": "an earlier draft again from {}",
    "floor_returned": "the first draft again from {}",
  }
  parts = [
    said[row["name"]].format(row["finished"])
    for row in by_kind.get("gate", ())
    if row["name"] in said
  ]
  return f"Gate: {', '.join(parts) or 'the first draft served all requests'}."


def _headline(
  requests: Sequence[Row], verdict: account_lib.Verdict, learns: bool
) -> list[Fact]:
  """Returns requests, tokens per call, speed, and the verdict on learning."""
  topics = list(dict.fromkeys(str(row.get("source", "")) for row in requests))
  named = f"{len(topics)} topics ({', '.join(topics[:8])})"
  tokens = sum(row["output_tokens"] for row in requests)
  facts = [
    Fact(
      f"{len(requests):,} requests",
      f"About {named if len(topics) > 1 else topics[0] or 'one topic'}, answered with"
      f" {tokens:,} tokens.",
    )
  ]
  if per_call := _per_call(requests, "tokens_per_target_call"):
    frozen = _per_call(requests, "floor_tokens_per_target_call")
    rival = f", the frozen draft {frozen:.2f}" if frozen else ""
    facts.append(
      Fact(
        f"{per_call:.2f} tokens per call",
        f"The average over all calls of the target; plain decoding gives 1{rival}.",
      )
    )
  return [*facts, *_speed_facts(verdict, learns)]


def _speed_facts(verdict: account_lib.Verdict, learns: bool) -> list[Fact]:
  served, plain, frozen = verdict.served_ms, verdict.plain_ms, verdict.frozen_ms
  if not (served and plain and frozen):
    said = (
      "No request was served by plain decoding as well, so no speeds were compared."
    )
    return [Fact("Not compared", said)]
  speed = Fact(
    f"{plain / served:.2f}x plain decoding",
    f"Serving took {served / 1e3:.1f} s, waiting for updates included: plain decoding"
    f" would have taken {plain / 1e3:.1f} s ({plain / served:.2f}x) and the frozen"
    f" draft {frozen / 1e3:.1f} s ({frozen / served:.2f}x).",
  )
  saved = (frozen - served) / 1e3
  if not learns:
    return [speed, Fact("No learning", "No draft was trained in this run.")]
  if verdict.ahead_since:
    paid = Fact(
      "Learning paid",
      f"It saved {saved:.1f} s against the frozen draft, and has been ahead of it and"
      f" of plain decoding since request {verdict.ahead_since:,}.",
    )
  elif saved > 0:
    paid = Fact(
      "Learning helped, drafting did not pay",
      f"It saved {saved:.1f} s against the frozen draft, but plain decoding would have"
      " been faster than both.",
    )
  else:
    paid = Fact(
      "Learning has not paid",
      f"Serving took {-saved:.1f} s longer than it would have taken with the frozen"
      " draft.",
    )
  return [speed, paid]


def _per_call(requests: Sequence[Row], name: str) -> float:
  """Tokens per target call, over the requests that have the field; 0 without any."""
  rows = [row for row in requests if row.get(name)]
  calls = sum(row["output_tokens"] / row[name] for row in rows)
  return sum(row["output_tokens"] for row in rows) / calls if calls else 0.0


def agreement_table(segmented: Segments) -> Table:
  """One row per segment: first and last `EDGE` requests, online and frozen."""
  shown = {
    f"overlap first {EDGE}": "overlap_first",
    f"overlap last {EDGE}": "overlap_last",
    f"frozen last {EDGE}": "floor_overlap_last",
    f"draft accepted first {EDGE}": "draft_acceptance_first",
    f"draft accepted last {EDGE}": "draft_acceptance_last",
  }
  table = []
  for label, rows in segmented:
    found = metrics.segment_summary(list(rows), EDGE)
    figures = {heading: _rounded(found[name]) for heading, name in shown.items()}
    table.append({"topic": label, "requests": len(rows), **figures})
  return table


# Ways of decoding, with the prefix of their fields.
_WAYS = {"plain": "plain", "frozen": "floor", "online": "online"}


def _compared(requests: Sequence[Row]) -> list[Row]:
  return [row for row in requests if row.get("plain_ms_per_token") is not None]


def speed_table(segmented: Segments) -> Table:
  """One row per segment: the same requests served plainly, frozen and online."""
  table = []
  for label, rows in segmented:
    found = metrics.segment_summary(list(rows), EDGE)
    per_call = _rounded(found["tokens_per_target_call_last"])
    times = {
      f"{name} ms/token": _rounded(_ms_per_token(_compared(rows), field))
      for name, field in _WAYS.items()
    }
    table.append({"topic": label, "tokens per target call": per_call, **times})
  return table


def latency_table(requests: Sequence[Row]) -> Table:
  """Percentiles of ms per token over the compared requests, one row per way."""
  table = []
  for name, field in _WAYS.items():
    values = runs.column(_compared(requests), f"{field}_ms_per_token")
    values = values[np.isfinite(values)]
    if len(values):
      found = np.percentile(values, [50, 95, 99])
      shown = {f"p{p}": _rounded(v) for p, v in zip((50, 95, 99), found)}
      table.append({"decoding": name, "requests": len(values), **shown})
  return table


def _ms_per_token(rows: Sequence[Row], name: str) -> float:
  tokens = sum(row["output_tokens"] for row in rows)
  # Weighted with the tokens: the mean of ratios would count short answers too much.
  spent = sum(row[f"{name}_ms_per_token"] * row["output_tokens"] for row in rows)
  return spent / tokens if tokens else float("nan")


# --- Compared runs --------------------------------------------------------------------


def comparison(served: Mapping[str, Sequence[Row]]) -> Summary:
  """Summarises two or more online runs: the fastest, one row per run, verdicts.

  `served`: name of the run -> rows of its metrics.jsonl.
  """
  table = [_comparison_row(name, rows) for name, rows in served.items()]
  streams = [
    [(runs.place(row), row.get("source")) for row in runs.request_rows(rows)]
    for rows in served.values()
  ]
  verdicts = [
    f"{name}: {said}"
    for name, rows in served.items()
    if (said := account_lib.verdict(rows).sentence())
  ]
  notes = []
  if any(stream != streams[0] for stream in streams):
    notes.append(
      "The runs served different requests, so their times and overlaps say little about"
      " each other. Compare runs with the same stream and seed."
    )
  fastest, second, *_ = sorted(table, key=lambda row: row["ms per token"])
  ahead = second["ms per token"] / max(fastest["ms per token"], 1e-9)
  times = (
    f"{fastest['ms per token']:.2f} ms per token, waiting for updates included, against"
    f" {second['ms per token']:.2f} of {second['run']}"
  )
  if ahead < _EQUAL:
    fact = Fact(
      "About equally fast",
      f"{fastest['run']} and {second['run']} are fastest: {times}.",
    )
  else:
    fact = Fact(
      f"{fastest['run']} is fastest",
      f"{fastest['run']} is {ahead:.2f}x as fast as {second['run']}: {times}.",
    )
  return Summary(
    "Comparison of runs", [fact], notes, {"Runs": table}, details_notes=verdicts
  )


_EQUAL = 1.02  # a smaller difference in speed is noise on most machines


def _comparison_row(name: str, rows: Sequence[Row]) -> dict[str, Any]:
  requests = runs.request_rows(rows)
  account, verdict = account_lib.Account.of(rows), account_lib.verdict(rows)
  tokens = max(sum(row["output_tokens"] for row in requests), 1)
  overlap, frozen = _mean(requests, "overlap"), _mean(requests, "floor_overlap")
  gain = None
  if overlap is not None and frozen is not None:
    gain = round(overlap - frozen, 3)
  over = lambda ms: f"{ms / verdict.served_ms:.2f}x" if ms else None
  return {
    "run": name,
    "requests": len(requests),
    "ms per token": round(verdict.served_ms / tokens, 3),
    "speed over plain": over(verdict.plain_ms),
    "speed over frozen": over(verdict.frozen_ms),
    "tokens per target call": round(_per_call(requests, "tokens_per_target_call"), 2),
    "overlap": overlap,
    "frozen overlap": frozen,
    "overlap gain": gain,
    "learning seconds": None if account is None else round(account.learning, 1),
    "wall seconds": None if account is None else round(account.wall, 1),
  }


def _mean(requests: Sequence[Row], name: str) -> float | None:
  """Mean over all requests; None unless every request has the field."""
  values = [row[name] for row in requests if row.get(name) is not None]
  return round(sum(values) / len(values), 3) if len(values) == len(requests) else None


# --- Other commands -------------------------------------------------------------------


# Kind of row -> heading of its table.
_HEADINGS = {
  "quality": "Target",
  "draft": "Drafts",
  "change": "Against {first}",
  "certificate": "Certificate",
  "speed": "Speed",
  "program": "Programs, each on one chip",
  "memory": "Memory of a chip",
  "estimate": "Highest speeds, estimated",
}


def _measured(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  """Evaluations, certificates, and programs that were compiled for other machines."""
  title = "Evaluation" if "quality" in by_kind else "Certificate"
  if {"program", "refused"} & by_kind.keys():
    title = "Ahead of time"
  first = by_kind["draft"][0]["draft"] if "draft" in by_kind else ""
  tables = {
    heading.format(first=first): _shown(by_kind[kind], signed=kind == "change")
    for kind, heading in _HEADINGS.items()
    if kind in by_kind
  }
  speeds = sorted(by_kind.get("speed", ()), key=lambda row: -row["speed_up"])
  facts = [_speed_fact(row) for row in speeds[:4]]
  return Summary(title, facts, [row["said"] for row in rows if "said" in row], tables)


def _speed_fact(row: Row) -> Fact:
  said = f"{row['draft']}, {row['rows']} row(s) in flight"
  if row["predicted"] is None:  # the formulas hold for a fixed K only
    said += ", K adaptive."
  else:
    said += (
      f" ({row['predicted']:.2f}x predicted from the measured costs,"
      f" {row['predicted_paper']:.2f}x by the paper's formula)."
    )
  return Fact(f"{row['speed_up']:.2f}x plain decoding", said)


def _trained(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  """Offline distillation, which measures overlap, or supervised training."""
  del rows
  evaluations = by_kind.get("evaluation", [])
  measured = [
    name for row in evaluations[:1] for t in row["tasks"].values() for name in t
  ]
  sentences = _loss(by_kind.get("step", []))
  is_distilled = "distribution_overlap" in measured
  title = "Offline distillation" if is_distilled else "Supervised training"
  if not evaluations:
    return Summary(title, notes=sentences)
  name, said = (
    ("distribution_overlap", "overlap") if is_distilled else ("exact_match",) * 2
  )
  was, now = (
    np.mean([task[name] for task in row["tasks"].values()])
    for row in (evaluations[0], evaluations[-1])
  )
  said = said.replace("_", " ")
  fact = Fact(
    f"{now:.2f} {said}",
    f"On held-out prompts, the {said} went from {was:.2f} at step"
    f" {evaluations[0]['step']} to {now:.2f} at step {evaluations[-1]['step']}, as a"
    " mean over tasks.",
  )
  if is_distilled:
    tables = {"Held-out prompts": _before_and_after(evaluations[0], evaluations[-1])}
    details = {"Overlap over the run": _over_the_run(evaluations, name)}
  else:
    tables = {"Exact match over the run": _over_the_run(evaluations, name)}
    accuracy = _over_the_run(evaluations, "token_accuracy")
    details = {"Token accuracy over the run": accuracy}
  return Summary(title, [fact], sentences, tables, details)


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


def _shown(rows: Sequence[Row], signed: bool = False) -> Table:
  """Log rows as table rows: rounded, without fields that no row has."""
  names = [name for name in rows[0] if name not in ("kind", "nonfinite")]

  def shown(value: Any) -> Any:
    if not isinstance(value, float):
      return value
    return f"{value:+.3f}" if signed else _rounded(value)

  names = [name for name in names if any(row.get(name) is not None for row in rows)]
  return [
    {name.replace("_", " "): shown(row.get(name)) for name in names} for row in rows
  ]


def _rounded(value: float | None) -> float | None:
  return None if value is None or np.isnan(value) else round(float(value), 3)


def _advised(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Summary:
  """What drafters would do on a log."""
  del rows
  found = by_kind["advice"]
  # The figure of a mixture is only an upper bound.
  best = min(
    (row for row in found if not row["is_bound"]), key=lambda row: row["ms_per_token"]
  )
  fact = Fact(
    f"{best['over_plain']:.2f}x plain decoding",
    f"{best['system']}: {best['tokens_per_call']:.2f} tokens per call, estimated from"
    f" {len(by_kind['replayed'])} answers of the log and the costs on this machine.",
  )
  notes = [row["said"] for row in by_kind.get("advice_note", ())]
  shown = [{k: v for k, v in row.items() if k != "is_bound"} for row in found]
  return Summary("Advice", [fact], notes, {"Systems": _shown(shown)})


# The first kind that a log contains decides, so an online run comes before the steps.
_SUMMARIES = {
  "request": _served,
  "advice": _advised,
  "quality": _measured,
  "evaluation": _trained,
  "step": _trained,
  "certificate": _measured,
  "program": _measured,
  "refused": _measured,
}


# --- Topics of a stream ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segment:
  """The requests `start` to `stop` - 1 of the stream, with one main source."""

  source: str
  start: int
  stop: int


def segments(requests: Sequence[Row], min_run: int = 10) -> list[Segment]:
  """Splits the stream where a new source lasts for `min_run` consecutive requests.

  A stream that mixes its sources has no such position and is one segment. If no source
  returns after another one, runs may have any length.
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
  """Share of verifications that accepted the i-th drafted token, [K] float64.

  `accepted_per_position` of a row counts the verifications that accepted position i.
  Without any counts, the result is empty.
  """
  rows = [row for row in requests if row.get("accepted_per_position") is not None]
  calls = sum(row["target_calls"] for row in rows)
  if not calls:
    return np.zeros(0)
  return np.sum([row["accepted_per_position"] for row in rows], axis=0) / calls


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
