"""Segments, means and counts of request rows, for plots and tables."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import runs

WINDOW = 25  # requests of a trailing mean
EDGE = 50  # requests at the beginning and end of a segment that are compared

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Segment:
  """Requests `start` to `stop` of the stream, most of which have one source."""

  source: str
  start: int
  stop: int


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
  sums = np.concatenate([[0.0], np.cumsum(np.where(measured, values, 0.0))])
  counts = np.concatenate([[0], np.cumsum(measured)])
  stop = np.arange(1, len(values) + 1)
  begun = np.searchsorted(starts, stop - 1, side="right") - 1
  start = np.maximum(stop - window, np.asarray(starts, int)[begun])
  number = counts[stop] - counts[start]
  with np.errstate(invalid="ignore", divide="ignore"):
    return np.where(number > 0, (sums[stop] - sums[start]) / number, math.nan)


def segments(requests: Sequence[Row], min_run: int = 10) -> list[Segment]:
  """Splits the stream where a new source lasts for `min_run` requests.

  A stream that mixes its sources has no such position and is one segment. If no source
  returns after another one, runs may have any length.

  Args:
    requests: request rows, in the order of the stream.
    min_run: number of requests.
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
  else:  # other requests before the first long run are part of it
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
