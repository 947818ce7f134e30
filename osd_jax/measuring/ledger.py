"""Where the seconds of an online run went: the same account in table, report, plot."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import runs


@dataclasses.dataclass(frozen=True)
class Ledger:
  """The account of a run, in seconds.

  Attributes:
    parts: name -> seconds of what serving's own thread did, one thing at a time;
      they add up to `wall`. Compiling, checkpoints and logs are the "rest".
    wall: from the first request to the last, over all sessions of the run.
    learning: time that updates ran, on another thread and so beside `parts`.
    metered: time that agreements were measured beside `parts`, likewise.
    updates: how many.
    skipped: steps of updates left out because they were not finite.
  """

  parts: Mapping[str, float]
  wall: float
  learning: float
  metered: float
  updates: int
  skipped: int

  @classmethod
  def of(cls, rows: Iterable[Mapping[str, Any]]) -> "Ledger | None":
    """The account of a run, None if it served nothing or its time is not known.

    Args:
      rows: of metrics.jsonl. Wall time is `run_seconds` of the last request, or
        `wall_seconds` of the summary if that is more.
    """
    rows = list(rows)
    requests = runs.request_rows(rows)
    updates = runs.of_kind(rows, "update")
    clocks = [row.get("run_seconds") or row.get("wall_seconds") or 0.0 for row in rows]
    wall = max(clocks, default=0.0)
    if not requests or not wall:
      return None
    parts = {
      "serving": _seconds(requests, "decode_ms"),
      "waiting for updates": _seconds(updates, "wait_ms"),
      "comparing": _seconds(requests, "compare_ms"),
      "metering": _seconds(requests, "metering_ms"),
    }
    spent = sum(parts.values())
    wall = max(wall, spent)  # a log that knows the time of its last session only
    return cls(
      parts={**parts, "rest": wall - spent},
      wall=wall,
      learning=_seconds(updates, "update_ms"),
      metered=_seconds(requests, "metering_beside_ms"),
      updates=len(updates),
      skipped=sum(row.get("skipped") or 0 for row in updates),
    )

  @property
  def beside(self) -> float:
    """Seconds that updates ran while serving went on: idle compute that was used."""
    return max(self.learning - self.parts["waiting for updates"], 0.0)

  def table(self) -> list[dict[str, Any]]:
    """Rows of the parts, their sum, and learning below it."""
    share = lambda seconds: f"{seconds / self.wall:.1%}" if self.wall else "-"
    entries = [*self.parts.items(), ("wall time", self.wall)]
    rows = [
      {"part": name, "seconds": round(seconds, 2), "share of wall": share(seconds)}
      for name, seconds in entries
    ]
    others = {f"learning ({self.updates} updates)": self.learning}
    if self.metered:
      others["metering, beside"] = self.metered
    return rows + [
      {"part": name, "seconds": round(seconds, 2), "share of wall": share(seconds)}
      for name, seconds in others.items()
    ]


def _seconds(rows: Sequence[Mapping[str, Any]], name: str) -> float:
  return float(np.nansum(runs.column(rows, name))) / 1e3 if rows else 0.0
