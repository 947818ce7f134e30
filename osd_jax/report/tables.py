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

from osd_jax.loop import account as account_lib
from osd_jax.loop import alarms
from osd_jax.loop import rows as rows_lib
from osd_jax.loop.rows import Request, Row

WINDOW = 25  # requests of a trailing mean
EDGE = 50  # requests that "first" and "last" mean

Table = list[dict[str, Any]]
Segments = Sequence[tuple[str, Sequence[Request]]]


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
  lead: str = ""  # the first sentence, if readers must know it before any figure


def summary(rows: Sequence[Row]) -> Summary:
  """Summarizes a run of any command, chosen by the classes of its rows."""
  classes = {type(row) for row in rows}
  if Request in classes:
    return _served(rows)
  if classes & {rows_lib.Evaluation, rows_lib.Step} and rows_lib.Quality not in classes:
    return _trained(rows)
  return _measured(rows)


# --- Online runs ----------------------------------------------------------------------


_MOST_EVENTS = 3  # of each name, the latest


def _served(rows: Sequence[Row]) -> Summary:
  requests = rows_lib.requests(rows)
  segmented = by_segment(requests)
  verdict = account_lib.verdict(rows)
  details = {}
  if latency := latency_table(requests):
    details["Percentiles of milliseconds per token"] = latency
  times = ""
  if account := account_lib.Account.of(rows):
    details["Where the time went"], times = account.table(), account.sentence()
  for costs in rows_lib.of(rows_lib.Costs, rows)[:1]:
    details["Costs on this machine"] = costs.table()
  events: dict[str, list[str]] = {}
  for row in rows_lib.of(rows_lib.Event, rows):
    events.setdefault(row.name, []).append(row.text)
  lead = "".join(events.pop("padded", ()))
  texts = [
    text for topic_names in events.values() for text in topic_names[-_MOST_EVENTS:]
  ]
  return Summary(
    "Online speculative decoding",
    _headline(requests, verdict, bool(rows_lib.of(rows_lib.Update, rows))),
    [*texts, _gate_sentence(rows), alarms.sentence(rows), times],
    {
      "Agreement per topic": agreement_table(segmented),
      "Speed per topic": speed_table(segmented),
    },
    details,
    [verdict.sentence()],
    lead,
  )


_DECISIONS = {
  "promoted": "trained drafts served from request {}",
  "taken_back": "an earlier draft again from {}",
  "floor_returned": "the first draft again from {}",
}


def _gate_sentence(rows: Sequence[Row]) -> str:
  """Says what the gate decided; "" if it decided nothing and trained drafts served."""
  decisions = rows_lib.of(rows_lib.Gate, rows)
  parts = [
    _DECISIONS[row.name].format(row.finished)
    for row in decisions
    if row.name in _DECISIONS
  ]
  if refused := sum(row.name == "refused" for row in decisions):
    parts.append(f"{refused} new drafts were far worse and did not serve")
  requests = rows_lib.of(Request, rows)
  if not parts and any(row.gate_ms is not None for row in requests):
    if not any(row.draft_version for row in requests):
      parts.append("the first draft served all requests")
  return f"Gate: {', '.join(parts)}." if parts else ""


def _headline(
  requests: Sequence[Request], verdict: account_lib.Verdict, learns: bool
) -> list[Fact]:
  """Returns requests, tokens per call, speed, and the verdict on learning."""
  topics = list(dict.fromkeys(row.source for row in requests))
  subject = topics[0] or "one topic"
  if len(topics) > 1:
    subject = f"{len(topics)} topics ({', '.join(topics[:8])})"
  tokens = sum(row.output_tokens for row in requests)
  facts = [
    Fact(
      f"{len(requests):,} requests",
      f"About {subject}, answered with {tokens:,} tokens.",
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
  plain, frozen = verdict.over_plain, verdict.over_frozen
  if plain is None or frozen is None:
    text = (
      "No request was served by plain decoding as well, so no speeds were compared."
    )
    return [Fact("Not compared", text)]
  served = verdict.served_ms / 1e3
  rival = f" and the frozen draft {served * frozen.value:.1f} s ({frozen.text})"
  speed = Fact(
    f"{plain.value:.2f}x plain decoding",
    f"Serving took {served:.1f} s, waiting for updates included: plain decoding"
    f" would have taken {served * plain.value:.1f} s ({plain.text})"
    f"{rival if learns else ''}.",
  )
  if plain.is_even:
    speed = dataclasses.replace(speed, figure="As fast as plain decoding")
  elif not plain.is_certain:
    speed = Fact(
      "Speed: too few to say", f"{_first_up(plain.too_few)}. {speed.sentence}"
    )
  if not learns:
    return [speed, Fact("No learning", "No draft was trained in this run.")]
  return [speed, _learning_fact(verdict, plain, frozen)]


def _first_up(text: str) -> str:
  return text[:1].upper() + text[1:]


def _learning_fact(
  verdict: account_lib.Verdict,
  plain: account_lib.SpeedUp,
  frozen: account_lib.SpeedUp,
) -> Fact:
  saved = verdict.served_ms * (frozen.value - 1) / 1e3
  if frozen.high < 1:
    return Fact(
      "Learning has not paid",
      f"Serving took {-saved:.1f} s longer than it would have taken with the frozen"
      " draft.",
    )
  if frozen.is_even:
    text = "Serving took as long as it would have taken with the frozen draft."
    return Fact("Learning made no difference", text)
  if frozen.low <= 1:
    return Fact(
      "Learning: too few to say", f"{_first_up(frozen.too_few)} whether it paid."
    )
  if plain.high < 1:
    return Fact(
      "Learning helped, drafting did not pay",
      f"It saved {saved:.1f} s against the frozen draft, but plain decoding would have"
      " been faster than both.",
    )
  text = f"It saved {saved:.1f} s against the frozen draft"
  if not plain.is_certain:
    return Fact("Learning helped", f"{text}. Against plain decoding, {plain.too_few}.")
  since = f" since request {verdict.ahead_since:,}" if verdict.ahead_since else ""
  return Fact(
    "Learning paid", f"{text}, and is ahead of it and of plain decoding{since}."
  )


def _per_call(requests: Sequence[Request], name: str) -> float:
  """Tokens per target call, over the requests that have the field; 0 without any."""
  rates = rows_lib.column(requests, name)
  tokens = rows_lib.column(requests, "output_tokens")[rates > 0]
  return float(tokens.sum() / (tokens / rates[rates > 0]).sum()) if len(tokens) else 0.0


def _mean(requests: Sequence[Request], name: str) -> float | None:
  """Mean over the requests that have the field; None without any."""
  values = rows_lib.column(requests, name)
  values = values[np.isfinite(values)]
  return _rounded(float(values.mean())) if len(values) else None


def agreement_table(segmented: Segments) -> Table:
  """One row per segment: first and last `EDGE` requests, online and frozen."""
  return [
    {
      "topic": label,
      "requests": len(rows),
      f"overlap first {EDGE}": _mean(rows[:EDGE], "overlap"),
      f"overlap last {EDGE}": _mean(rows[-EDGE:], "overlap"),
      f"frozen last {EDGE}": _mean(rows[-EDGE:], "floor_overlap"),
      f"draft accepted first {EDGE}": _mean(rows[:EDGE], "draft_acceptance_rate"),
      f"draft accepted last {EDGE}": _mean(rows[-EDGE:], "draft_acceptance_rate"),
    }
    for label, rows in segmented
  ]


# Ways of decoding, with the prefix of their fields.
_WAYS = {"plain": "plain", "frozen": "floor", "online": "online"}


def _compared(requests: Sequence[Request]) -> list[Request]:
  return [row for row in requests if row.plain_ms_per_token is not None]


def speed_table(segmented: Segments) -> Table:
  """One row per segment: the same requests served plainly, frozen and online."""
  return [
    {
      "topic": label,
      "tokens per target call": _mean(rows[-EDGE:], "tokens_per_target_call"),
      **{
        f"{name} ms/token": _ms_per_token(_compared(rows), field)
        for name, field in _WAYS.items()
      },
    }
    for label, rows in segmented
  ]


def latency_table(requests: Sequence[Request]) -> Table:
  """Percentiles of ms per token over the compared requests, one row per way."""
  table = []
  for name, field in _WAYS.items():
    values = rows_lib.column(_compared(requests), f"{field}_ms_per_token")
    values = values[np.isfinite(values)]
    if len(values):
      percentiles = {f"p{p}": _rounded(np.percentile(values, p)) for p in (50, 95, 99)}
      table.append({"decoding": name, "requests": len(values), **percentiles})
  return table


def _ms_per_token(rows: Sequence[Request], name: str) -> float | None:
  tokens = rows_lib.column(rows, "output_tokens")
  # Weighted with the tokens: the mean of ratios would count short answers too much.
  ms = tokens @ rows_lib.column(rows, f"{name}_ms_per_token")
  return _rounded(float(ms / tokens.sum())) if tokens.any() else None


# --- Compared runs --------------------------------------------------------------------


def comparison(served: Mapping[str, Sequence[Row]]) -> Summary:
  """Summarizes two or more online runs: the fastest, one row per run, verdicts.

  `served`: name of the run -> rows of its metrics.jsonl.
  """
  table = [_comparison_row(name, rows) for name, rows in served.items()]
  streams = [
    [(row.query, row.source) for row in rows_lib.requests(rows)]
    for rows in served.values()
  ]
  verdicts = [
    f"{name}: {sentence}"
    for name, rows in served.items()
    if (sentence := account_lib.verdict(rows).sentence())
  ]
  notes = []
  if any(stream != streams[0] for stream in streams):
    notes.append(
      "The runs served different requests, so their times and overlaps say little about"
      " each other. Compare runs with the same stream and seed."
    )
  fastest, second, *_ = sorted(table, key=lambda row: row["ms per token"])
  ahead = _ahead(*(served[row["run"]] for row in (fastest, second)))
  times = (
    f"{fastest['ms per token']:.2f} ms per token, waiting for updates included, against"
    f" {second['ms per token']:.2f} of {second['run']}"
  )
  surely = "" if math.isinf(ahead.high) else f" ({ahead.interval})"
  factor = (
    f"{fastest['run']} is {ahead.value:.2f}x as fast as {second['run']}{surely}:"
    f" {times}."
  )
  if ahead.is_certain:
    fact = Fact(f"{fastest['run']} is fastest", factor)
  elif ahead.is_even:
    fact = Fact("Equally fast", factor)
  else:
    too_few = f"{account_lib.counted(ahead.requests, 'request')} are too few to say"
    fact = Fact("Too few to say", f"{too_few} which run is fastest. {factor}")
  return Summary(
    "Comparison of runs", [fact], notes, {"Runs": table}, details_notes=verdicts
  )


def _ahead(fastest: Sequence[Row], second: Sequence[Row]) -> account_lib.SpeedUp:
  """How many times as fast the first run is, by requests that both served."""
  runs = [
    {
      (row.query, row.source): row
      for row in rows_lib.requests(rows)
      if row.output_tokens
    }
    for rows in (fastest, second)
  ]
  token_ms = [
    account_lib.verdict(rows).served_ms
    / max(sum(x.output_tokens for x in run.values()), 1)
    for rows, run in zip((fastest, second), runs, strict=True)
  ]
  value = token_ms[1] / max(token_ms[0], 1e-9)
  both = sorted(runs[0].keys() & runs[1].keys())
  ours, others = (
    np.array([run[key].decode_ms / run[key].output_tokens for key in both])
    for run in runs
  )
  # Of each pair, what is left when the mean ratio is taken away.
  differences = others - others.sum() / max(ours.sum(), 1e-9) * ours
  spread = math.sqrt(np.sum(differences**2) / max(len(both) - 1, 1) * len(both))
  spread /= max(ours.sum(), 1e-9)
  return account_lib.SpeedUp.of(value, spread, len(both) - 1, len(both))


def _comparison_row(name: str, rows: Sequence[Row]) -> dict[str, Any]:
  requests = rows_lib.requests(rows)
  account, verdict = account_lib.Account.of(rows), account_lib.verdict(rows)
  tokens = max(sum(row.output_tokens for row in requests), 1)
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


# --- Other commands -------------------------------------------------------------------


def _measured(rows: Sequence[Row]) -> Summary:
  """Tables of evaluations, certificates and the tools, one for each heading."""
  by_heading: dict[str, list[Row]] = {}
  for row in rows:
    if row.heading:
      by_heading.setdefault(row.heading, []).append(row)
  notes = [row.text for row in rows if isinstance(row, rows_lib.Note)]
  if not by_heading and not notes:
    return Summary("Run", notes=["No measurements yet."])
  title = "Evaluation" if "Target" in by_heading else next(iter(by_heading), "Notes")
  tables = {heading: _shown(of_one) for heading, of_one in by_heading.items()}
  speeds = sorted(rows_lib.of(rows_lib.Speed, rows), key=lambda row: -row.speed_up)
  return Summary(title, [_speed_fact(row) for row in speeds[:4]], notes, tables)


def _speed_fact(row: rows_lib.Speed) -> Fact:
  text = f"{row.draft}, {row.rows} row(s) in flight"
  if row.predicted is None:  # the formulas hold for a fixed K only
    text += ", K adaptive."
  else:
    text += (
      f" ({row.predicted:.2f}x predicted from the measured costs,"
      f" {row.predicted_paper:.2f}x by the paper's formula)."
    )
  return Fact(f"{row.speed_up:.2f}x plain decoding", text)


def _trained(rows: Sequence[Row]) -> Summary:
  """Offline distillation, which measures overlap, or supervised training."""
  evaluations = rows_lib.of(rows_lib.Evaluation, rows)
  steps = rows_lib.of(rows_lib.Step, rows)
  measures = {name for row in evaluations for t in row.tasks.values() for name in t}
  is_distilled = "distribution_overlap" in measures
  title = "Offline distillation" if is_distilled else "Supervised training"
  if not evaluations:
    return Summary(title, notes=_loss(steps))
  name, words = ("exact_match", "exact match")
  if is_distilled:
    name, words = "distribution_overlap", "overlap"
  first, last = evaluations[0], evaluations[-1]
  before, now = (
    np.mean([task[name] for task in row.tasks.values()]) for row in (first, last)
  )
  fact = Fact(
    f"{now:.2f} {words}",
    f"On held-out prompts, the {words} went from {before:.2f} at step {first.step} to"
    f" {now:.2f} at step {last.step}, as a mean over tasks.",
  )
  if is_distilled:
    tables = {"Held-out prompts": _before_and_after(first.tasks, last.tasks)}
    details = {"Overlap over the run": _over_the_run(evaluations, name)}
  else:
    tables = {"Exact match over the run": _over_the_run(evaluations, name)}
    accuracy = _over_the_run(evaluations, "token_accuracy")
    details = {"Token accuracy over the run": accuracy}
  return Summary(title, [fact], _loss(steps), tables, details)


def _loss(steps: Sequence[rows_lib.Step]) -> list[str]:
  if not steps:
    return []
  first, last = steps[0], steps[-1]
  return [
    f"{last.step} steps: loss {first.loss:.4f} in the first {first.step},"
    f" {last.loss:.4f} in the last ones; {last.skipped} steps were skipped because"
    " they were not finite."
  ]


def _before_and_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
  both = {"overlap": "distribution_overlap", "acceptance": "acceptance_rate"}
  return [
    {
      "task": label,
      "prompts": scores["requests"],
      "at most": _rounded(scores["distribution_overlap_upper"]),
      **{
        f"{name} {when}": _rounded(tasks[label][field])
        for name, field in both.items()
        for when, tasks in (("before", before), ("after", after))
      },
    }
    for label, scores in after.items()
  ]


def _over_the_run(evaluations: Sequence[rows_lib.Evaluation], name: str) -> Table:
  return [
    {"step": row.step, **{task: _rounded(v[name]) for task, v in row.tasks.items()}}
    for row in evaluations
  ]


def _shown(rows: Sequence[Row]) -> Table:
  """Rows of one class as a table: rounded, without fields that no row has."""
  names = [
    name for name in vars(rows[0]) if any(vars(row)[name] is not None for row in rows)
  ]

  def shown(value: Any) -> Any:
    if not isinstance(value, float):
      return value
    return f"{value:+.3f}" if isinstance(rows[0], rows_lib.Change) else _rounded(value)

  return [
    {name.replace("_", " "): shown(vars(row)[name]) for name in names} for row in rows
  ]


def _rounded(value: float | None) -> float | None:
  return None if value is None or np.isnan(value) else round(float(value), 3)


# --- Topics of a stream ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segment:
  """The requests `start` to `stop` - 1 of the stream, with one main source."""

  source: str
  start: int
  stop: int


def segments(requests: Sequence[Request], min_run: int = 10) -> list[Segment]:
  """Splits the stream where a new source lasts for `min_run` consecutive requests.

  A stream that mixes its sources has no such position and is one segment. If no source
  returns after another one, runs may have any length.
  """
  grouped = itertools.groupby(requests, key=lambda row: row.source)
  stretches = [(source, len(list(part))) for source, part in grouped]
  if len(stretches) == len({source for source, _ in stretches}):
    min_run = 1
  starts: list[tuple[int, str]] = []
  place = 0
  for source, length in stretches:
    if length >= min_run and (not starts or source != starts[-1][1]):
      starts.append((place, source))
    place += length
  if requests and (not starts or starts[0][0] >= min_run):
    starts.insert(0, (0, "mixed"))
  # The few requests before the first long run are counted as part of that run.
  starts[:1] = [(0, source) for _, source in starts[:1]]
  stops = [start for start, _ in starts[1:]] + [len(requests)]
  return [Segment(name, start, stop) for (start, name), stop in zip(starts, stops)]


def by_segment(requests: Sequence[Request]) -> list[tuple[str, list[Request]]]:
  """(source, its requests) of every segment, in the order of the stream."""
  ordered = rows_lib.requests(requests)
  return [(part.source, ordered[part.start : part.stop]) for part in segments(ordered)]


def trailing_mean(
  values: np.ndarray, window: int = WINDOW, starts: Sequence[int] = (0,)
) -> np.ndarray:
  """Mean of the measured values among the last `window`.

  Args:
    values: [n]; NaN where nothing was is_finite.
    window: number of positions, including the current one.
    starts: positions where the mean restarts, increasing from 0.

  Returns:
    [n]; NaN where no value in the window was is_finite.
  """
  is_finite = np.isfinite(values)
  # Cumulative sums give all windows in one pass.
  sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
  counts = np.concatenate([[0], np.cumsum(is_finite)])
  stop = np.arange(1, len(values) + 1)
  begun = np.searchsorted(starts, stop - 1, side="right") - 1
  start = np.maximum(stop - window, np.asarray(starts, int)[begun])
  number = counts[stop] - counts[start]
  with np.errstate(invalid="ignore", divide="ignore"):
    return np.where(number > 0, (sums[stop] - sums[start]) / number, math.nan)


def acceptance_per_position(requests: Sequence[Request]) -> np.ndarray:
  """Share of verifications that accepted the i-th drafted token, [K] float64.

  Without any verification, the result is empty.
  """
  calls = sum(row.target_calls for row in requests)
  if not calls:
    return np.zeros(0)
  return np.sum([row.accepted_per_position for row in requests], axis=0) / calls


# --- On a console ---------------------------------------------------------------------


def print_table(table: Table, console: rich.console.Console, title: str = "") -> None:
  """Prints rows with equal keys: text left-aligned, numbers right-aligned.

  Nothing is cut: in a table that is too wide columns become rows, and in one that still
  is, every row becomes a list.
  """
  if not table:
    return
  if title:
    console.print(f"\n{title}", highlight=False)
  if "" not in table[0] and _width(table) > console.width:
    rows, table = (
      table,
      [
        {"": name, **{str(number): row[name] for number, row in enumerate(table)}}
        for name in table[0]
      ],
    )
    if len(rows) > 1 and _width(table) > console.width:
      for row in rows:
        print_table(
          [{"": name, "value": value} for name, value in row.items()], console
        )
        console.print()
      return
  grid = rich.table.Table(
    box=rich.box.SIMPLE_HEAD,
    pad_edge=False,
    padding=(0, 1, 0, 0),
    show_edge=False,
    show_header="" not in table[0],
  )
  for name, width in _widths(table).items():
    texts = [row[name] for row in table if isinstance(row[name], str)]
    is_text = any(not text[:1].isdigit() for text in texts)  # "39.6%" is a number
    grid.add_column(
      name,
      justify="left" if is_text else "right",
      overflow="fold",
      width=min(width, console.width // 2),
    )
  for row in table:
    grid.add_row(*map(_cell, row.values()))
  console.print(grid)


def _width(table: Table) -> int:
  return sum(_widths(table).values()) + 2 * len(table[0])


def _widths(table: Table) -> dict[str, int]:
  """Least width of each column: only headings may wrap, between words."""
  return {
    name: max(map(len, [*(_cell(row[name]) for row in table), *name.split(), ""]))
    for name in table[0]
  }


def _cell(value: Any) -> str:
  return "-" if value is None else str(value)
