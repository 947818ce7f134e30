"""Tokens per second that prices promise, beside those that were measured."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from osd_jax import runs
from osd_jax.measuring.prices import CallPrices, Prices

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Seen:
  """What a prediction needs to know of the requests.

  Attributes:
    request_tokens: emitted by a request, mean.
    tokens_a_round: emitted by a round, mean; 1 in plain decoding.
    num_draft_tokens: drafted by a round, mean; 0 in plain decoding.
    busy: share of the time in which the learner ran beside.
    lost_ms: what updates take from decoding, milliseconds a request.
  """

  request_tokens: float
  tokens_a_round: float = 1.0
  num_draft_tokens: float = 0.0
  busy: float = 0.0
  lost_ms: float = 0.0


def predict(calls: CallPrices, seen: Seen, slowdown: float = 1.0) -> float:
  """Tokens per second of one way to decode, all rows together.

  Args:
    calls: its prices.
    seen: the requests.
    slowdown: time of a call beside an update / alone.
  """
  rounds = seen.request_tokens / seen.tokens_a_round
  ms = calls.request_ms + rounds * calls.at(seen.num_draft_tokens) / calls.rows
  ms *= 1 + seen.busy * (slowdown - 1)
  return seen.request_tokens * 1e3 / (ms + seen.lost_ms)


def table(prices: Prices, rows: Sequence[Row]) -> list[dict[str, Any]]:
  """Plain, frozen and online decoding: predicted, measured, and how far apart.

  Plain decoding and the frozen draft are measured on compared requests, the online
  draft on all.

  Args:
    prices: of the run.
    rows: of its metrics.jsonl.
  """
  requests = [row for row in runs.request_rows(rows) if row["output_tokens"]]
  served = ("plain_ms_per_token", "floor_ms_per_token", "floor_tokens_per_target_call")
  compared = [row for row in requests if all(map(row.get, served))]
  lines = []
  if compared:
    busy = sum(bool(row.get("learner_busy")) for row in compared) / len(compared)
    plain = Seen(_mean(compared, "output_tokens"), busy=busy)
    drafted = max(prices.frozen.num_draft_tokens)
    frozen = dataclasses.replace(
      plain, tokens_a_round=_frozen_tokens_a_round(compared), num_draft_tokens=drafted
    )
    lines.append(_line("plain", prices.plain, plain, prices, compared))
    if len(prices.frozen.num_draft_tokens) == 1:  # else nobody knows how it drafted
      lines.append(_line("frozen", prices.frozen, frozen, prices, compared))
  if requests:
    seen = _online(prices, requests, rows)
    lines.append(_line("online", prices.online, seen, prices, requests))
  return lines


def operations(prices: Prices, rows: Sequence[Row]) -> str:
  """A sentence on floating-point operations; "" where they or updates are missing."""
  requests, updates = runs.request_rows(rows), runs.of_kind(rows, "update")
  if prices.flops is None or not updates or not requests:
    return ""
  learning = prices.flops.slice * sum(row["steps"] for row in updates)
  serving = prices.flops.served(
    len(requests), _sum(requests, "target_calls"), _sum(requests, "drafted")
  )
  return (
    f"Floating-point operations, an estimate: learning {learning:.2g}"
    f" ({prices.flops.slice * prices.slices:.2g} an update), serving {serving:.2g}"
    f" ({serving / len(requests):.2g} a request)."
  )


def _online(prices: Prices, requests: Sequence[Row], rows: Sequence[Row]) -> Seen:
  """Of all requests; learning takes from decoding what it does not from the rest."""
  updates = runs.of_kind(rows, "update")
  beside = [_sum(requests, name) for name in ("metering_ms", "compare_ms")]
  decoding = _sum(requests, "decode_ms")
  share = decoding / (decoding + sum(beside)) if decoding else 1.0
  made = _sum(updates, "steps") / max(prices.slices, 1)
  calls = _sum(requests, "target_calls")
  return Seen(
    request_tokens=_mean(requests, "output_tokens"),
    tokens_a_round=_sum(requests, "output_tokens") / calls,
    num_draft_tokens=_sum(requests, "drafted") / calls,
    lost_ms=made * prices.lost_ms * share / len(requests),
  )


def _line(
  name: str, calls: CallPrices, seen: Seen, prices: Prices, rows: Sequence[Row]
) -> dict[str, Any]:
  predicted = predict(calls, seen, prices.slowdown)
  key = {"plain": "plain_ms_per_token", "frozen": "floor_ms_per_token"}.get(name)
  spent = (
    sum(row[key] * row["output_tokens"] for row in rows)
    if key
    else _sum(rows, "decode_ms")
  )
  measured = _sum(rows, "output_tokens") * 1e3 / spent
  return {
    "decoding": name,
    "predicted tokens/s": round(predicted, 1),
    "measured tokens/s": round(measured, 1),
    "apart": f"{predicted / measured - 1:+.1%}",
  }


def _frozen_tokens_a_round(rows: Sequence[Row]) -> float:
  rounds = sum(
    row["output_tokens"] / row["floor_tokens_per_target_call"] for row in rows
  )
  return _sum(rows, "output_tokens") / rounds


def _sum(rows: Sequence[Row], name: str) -> float:
  return float(sum(row.get(name) or 0.0 for row in rows))


def _mean(rows: Sequence[Row], name: str) -> float:
  return _sum(rows, name) / len(rows)
