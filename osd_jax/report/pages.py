"""What came out of a run, in words and tables, from the rows of metrics.jsonl alone."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import metrics
from osd_jax.costs import account as account_lib
from osd_jax.costs.table import Costs
from osd_jax.report import series
from osd_jax.runs import alarms

EDGE = 50  # requests that "first" and "last" mean

Row = Mapping[str, Any]
Table = list[dict[str, Any]]
Segments = Sequence[tuple[str, Sequence[Row]]]


@dataclasses.dataclass(frozen=True)
class Page:
  """What is said of a run.

  Attributes:
    title: of the page.
    sentences: in plain words.
    tables: heading -> rows of equal keys.
  """

  title: str
  sentences: list[str]
  tables: dict[str, Table]


def page(rows: Sequence[Row]) -> Page:
  """The page of any run, by the kinds of its rows."""
  by_kind: dict[str, list[Row]] = {}
  for row in rows:
    by_kind.setdefault(row["kind"], []).append(row)
  for kind, make in _PAGES.items():
    if kind in by_kind:
      return make(by_kind, rows)
  return Page("Run", ["Nothing was measured yet."], {})


def _served(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Page:
  segments = series.by_segment(by_kind["request"])
  tables = {
    "Agreement per topic": agreement_table(segments),
    "Speed per topic": speed_table(segments),
  }
  verdict = account_lib.verdict(rows).sentence()
  sentences = [*headline(segments), *([verdict] if verdict else [])]
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
  return Page("Online speculative decoding", sentences, tables)


def agreement_table(segments: Segments) -> Table:
  """One row per segment: first and last `EDGE` requests, online and frozen."""
  table = []
  for label, rows in segments:
    edges = metrics.segment_summary(list(rows), EDGE)
    table.append(
      {
        "topic": label,
        "requests": len(rows),
        f"overlap first {EDGE}": _rounded(edges["overlap_first"]),
        f"overlap last {EDGE}": _rounded(edges["overlap_last"]),
        f"frozen last {EDGE}": _rounded(edges["floor_overlap_last"]),
        f"draft accepted first {EDGE}": _rounded(edges["draft_acceptance_first"]),
        f"draft accepted last {EDGE}": _rounded(edges["draft_acceptance_last"]),
      }
    )
  return table


def speed_table(segments: Segments) -> Table:
  """One row per segment: the same requests served plainly, frozen and online."""
  table = []
  for label, rows in segments:
    speeds = _speeds(rows)
    edges = metrics.segment_summary(list(rows), EDGE)
    table.append(
      {
        "topic": label,
        "tokens per target call": _rounded(edges["tokens_per_target_call_last"]),
        "plain ms/token": _rounded(speeds["plain"]),
        "frozen ms/token": _rounded(speeds["floor"]),
        "online ms/token": _rounded(speeds["online"]),
      }
    )
  return table


def headline(segments: Segments) -> list[str]:
  """What was gained, in plain words; figures that were not measured are left out."""
  sentences = []
  for label, part in segments:
    edges = metrics.segment_summary(list(part), EDGE)
    frozen = edges["floor_overlap_last"]
    beside = "" if np.isnan(frozen) else f" (frozen draft {frozen:.2f})"
    sentences.append(
      f"{label}: overlap {edges['overlap_first']:.2f} in the first {EDGE} requests,"
      f" {edges['overlap_last']:.2f} in the last {EDGE}{beside}{_acceptance(edges)}."
    )
  return sentences


def _acceptance(edges: Mapping[str, float | int]) -> str:
  """Draft acceptance of a segment in words; nothing where nothing was drafted."""
  first, last = (edges[f"draft_acceptance_{edge}"] for edge in ("first", "last"))
  if np.isnan(first) and np.isnan(last):
    return ""
  return f"; draft acceptance {first:.2f}, then {last:.2f}"


def _speeds(rows: Sequence[Row]) -> dict[str, float]:
  """Milliseconds per token over the requests that were served all three ways."""
  compared = [row for row in rows if row.get("plain_ms_per_token") is not None]
  return {
    name: _per_token(compared, f"{name}_ms_per_token")
    for name in ("plain", "floor", "online")
  }


def _per_token(rows: Sequence[Row], name: str) -> float:
  tokens = sum(row["output_tokens"] for row in rows)
  spent = sum(row[name] * row["output_tokens"] for row in rows)
  return spent / tokens if tokens else float("nan")


def _evaluated(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Page:
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
  return Page("Evaluation", sentences, tables)


def _speed_sentence(row: Row) -> str:
  """A row of the speed table in words; an adaptive K has no prediction."""
  text = f"{row['rows']} row(s), {row['draft']}: {row['speed_up']:.2f}x plain decoding"
  if row["predicted"] is None:
    return f"{text}, K adaptive."
  return (
    f"{text} ({row['predicted']:.2f}x predicted from the measured costs,"
    f" {row['predicted_paper']:.2f}x by the paper's formula)."
  )


def _certified(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Page:
  del rows
  return Page("Certificate", [], {"Certificate": _shown(by_kind["certificate"])})


def _compiled(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Page:
  """Of programs that were compiled for another machine, and did not run."""
  del rows
  tables = {
    heading: _shown([_without_empty(row, by_kind[kind]) for row in by_kind[kind]])
    for kind, heading in _COMPILED.items()
    if kind in by_kind
  }
  sentences = [
    f"{row['program']} does not fit, says the compiler: {row['said']}"
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
    "Compiled for a machine that is not here, and not run: what is counted is the"
    " compiler's text, what is estimated is what the chip's published figures allow at"
    " best."
  )
  return Page("Ahead of time", sentences, tables)


_COMPILED = {
  "program": "Programs, each on one chip",
  "memory": "Memory of a chip",
  "estimate": "At most, an estimate",
}


def _without_empty(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
  """The row without what no row states."""
  return {n: value for n, value in row.items() if any(r[n] is not None for r in rows)}


def _trained(by_kind: Mapping[str, list[Row]], rows: Sequence[Row]) -> Page:
  """Of offline distillation, which measures overlap, or of supervised training."""
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
    return Page("Offline distillation", sentences, tables)
  tables = {}
  if evaluations:
    tables = {
      "Exact match over the run": _over_the_run(evaluations, "exact_match"),
      "Token accuracy over the run": _over_the_run(evaluations, "token_accuracy"),
    }
  return Page("Supervised training", sentences, tables)


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
  """One row a task."""
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
  """One figure of every task at each evaluation."""
  return [
    {"step": row["step"], **{t: _rounded(v[name]) for t, v in row["tasks"].items()}}
    for row in evaluations
  ]


def _shown(rows: Sequence[Row]) -> Table:
  """Rows as tables show them: rounded, words for names."""
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


_PAGES = {
  "request": _served,
  "quality": _evaluated,
  "evaluation": _trained,
  "step": _trained,
  "certificate": _certified,
  "program": _compiled,
  "too_large": _compiled,
}
