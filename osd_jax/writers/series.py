"""The numbers behind plots and report, from the rows of metrics.jsonl."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

WINDOW = 25  # requests of a trailing mean
EDGE = 50  # requests at the beginning and end of a segment that are compared

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Segment:
  """A stretch of the stream in which one source prevails.

  Attributes:
    source: label of the source.
    start: position of its first request.
    stop: position behind its last.
  """

  source: str
  start: int
  stop: int


def request_rows(rows: Iterable[Row]) -> list[Row]:
  """The request rows, in the order of the stream."""
  requests = [row for row in rows if row.get("kind") == "request"]
  return sorted(requests, key=lambda row: row["index"])


def update_rows(rows: Iterable[Row]) -> list[Row]:
  """The update rows, in the order in which they happened."""
  return [row for row in rows if row.get("kind") == "update"]


def column(rows: Sequence[Row], name: str) -> np.ndarray:
  """One field as [n] float64; NaN where a row lacks it or holds null."""
  values = (row.get(name) for row in rows)
  return np.array([math.nan if v is None else float(v) for v in values], np.float64)


def trailing_mean(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
  """Mean of the measured values among the last `window`.

  Args:
    values: [n]; NaN where nothing was measured.
    window: number of positions, the current one included.

  Returns:
    [n]; NaN where the window holds no measured value. The first windows are
    shorter.
  """
  measured = np.isfinite(values)
  sums = np.concatenate([[0.0], np.cumsum(np.where(measured, values, 0.0))])
  counts = np.concatenate([[0], np.cumsum(measured)])
  stop = np.arange(1, len(values) + 1)
  start = np.maximum(stop - window, 0)
  number = counts[stop] - counts[start]
  with np.errstate(invalid="ignore", divide="ignore"):
    return np.where(number > 0, (sums[stop] - sums[start]) / number, math.nan)


def segments(requests: Sequence[Row], min_run: int = 10) -> list[Segment]:
  """Splits the stream where a new source stays for `min_run` requests.

  A stream that mixes its sources has no such place: it is one segment, named
  after its source if it has but one.
  """
  sources = [str(row.get("source", "")) for row in requests]
  if not sources:
    return []
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
    name = sources[0] if len(set(sources)) == 1 else "mixed"
    return [Segment(name, 0, len(sources))]
  first = starts[0][0]
  if first >= min_run:
    starts.insert(0, (0, "mixed"))
  else:  # a few strays before the first long run belong to it
    starts[0] = (0, starts[0][1])
  stops = [start for start, _ in starts[1:]] + [len(sources)]
  return [Segment(name, start, stop) for (start, name), stop in zip(starts, stops)]


def edges(parts: Sequence[Segment], size: int = EDGE) -> tuple[list[int], list[int]]:
  """Positions of the first and of the last requests of every segment.

  Returns:
    Two lists without a common position; in a segment shorter than 2 * `size`
    each takes half.
  """
  first: list[int] = []
  last: list[int] = []
  for part in parts:
    n = min(size, (part.stop - part.start) // 2)
    first.extend(range(part.start, part.start + n))
    last.extend(range(part.stop - n, part.stop))
  return first, last


def acceptance_per_position(requests: Sequence[Row]) -> np.ndarray:
  """Share of verifications that accepted the i-th drafted token.

  `accepted_per_position` of a row counts the verifications that accepted
  position i. Their number is the row's `target_calls`, or where that is absent
  `output_tokens / tokens_per_target_call`.

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


def _target_calls(row: Row) -> float:
  if row.get("target_calls") is not None:
    return float(row["target_calls"])
  per_call = row.get("tokens_per_target_call")
  return float(row.get("output_tokens") or 0) / per_call if per_call else 0.0


def cost_ledger(rows: Sequence[Row]) -> dict[str, float]:
  """Where the seconds of a run went.

  The last summary row's `ledger` (name -> seconds) is taken where there is one.
  Else the rows are summed: `decode_ms` and `metering_ms` of requests, `update_ms`
  and `wait_ms` of updates; `other` is what the summary's `wall_seconds` leaves.
  Updates that overlap with decoding can make the sum exceed the wall time.

  Returns:
    Name -> seconds, in the order to show; names without any seconds left out.
  """
  summaries = [row for row in rows if row.get("kind") == "summary"]
  given = summaries[-1].get("ledger") if summaries else None
  if given:
    return {name: float(value) for name, value in given.items() if value}
  requests, updates = request_rows(rows), update_rows(rows)
  ledger = {
    "decode": _seconds(requests, "decode_ms"),
    "update": _seconds(updates, "update_ms"),
    "waiting for updates": _seconds(updates, "wait_ms"),
    "metering": _seconds(requests, "metering_ms"),
  }
  wall = summaries[-1].get("wall_seconds") if summaries else None
  if wall:
    ledger["other"] = max(0.0, wall - sum(ledger.values()))
  return {name: value for name, value in ledger.items() if value}


def _seconds(rows: Sequence[Row], name: str) -> float:
  return float(np.nansum(column(rows, name))) / 1e3 if rows else 0.0
