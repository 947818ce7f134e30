"""Rows of metrics.jsonl with invented values."""

import dataclasses
from typing import Any

from osd_jax.loop import rows


def of_kind(kind: str, **fields: Any) -> Any:
  """Returns a row with any fields, for tests of the file itself."""
  made = dataclasses.make_dataclass("Made", list(fields), namespace={"kind": kind})
  return made(**fields)


def request(index: int = 0, **changes) -> rows.Request:
  """Returns a request of 30 tokens: 10 rounds, 120 ms."""
  fields = {
    "query": index,
    "source": "maths",
    "overlap": 0.8,
    "overlap_upper": 0.9,
    "acceptance_rate": 0.8,
    "draft_acceptance_rate": 2 / 7,
    "tokens_per_target_call": 3.0,
    "accepted_per_position": [8, 6, 4, 2, 0, 0, 0],
    "target_calls": 10,
    "drafted": 70,
    "accepted": 20,
    "output_tokens": 30,
    "stop_reason": "EOS",
    "loops": False,
    "draft_version": 0,
    "decode_ms": 120.0,
    "online_ms_per_token": 4.0,
    "run_seconds": 0.0,
  }
  return rows.Request(index=index, **{**fields, **changes})


def update(finished: int = 0, **changes) -> rows.Update:
  """Returns an update of two slices that nothing waited for."""
  times = {"update_ms": 180.0, "wait_ms": 0.0}
  fields = {"launched": finished, "version": 1, "loss": 1.0, "grad_norm": 1.0}
  counts = {"steps": 2, "skipped": 0}
  return rows.Update(finished=finished, **{**fields, **counts, **times, **changes})


def draft(name: str, overlap: float, kind: type[rows.Draft] = rows.Draft) -> rows.Draft:
  """Returns what osd evaluate measures of a draft on one task."""
  return kind(
    task="sql",
    draft=name,
    distribution_overlap=overlap,
    distribution_overlap_upper=0.9,
    acceptance_rate=0.5,
    draft_acceptance_rate=0.5,
    tokens_per_target_call=2.0,
  )


def speed() -> rows.Speed:
  """Returns the measured speed of a draft, with one row in flight."""
  times = {"draft_step_ms": 1.0, "plain_step_ms": 10.0, "verify_ms": 12.0}
  return rows.Speed(
    rows=1,
    draft="first",
    plain_ms_per_token=10.0,
    ms_per_token=8.0,
    speed_up=1.25,
    predicted=1.5,
    predicted_paper=2.0,
    tokens_per_target_call=3.0,
    cost_ratio=0.1,
    verify_ratio=1.2,
    **times,
  )
