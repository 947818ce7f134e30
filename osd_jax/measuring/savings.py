"""What learning has saved so far, against the frozen draft on the same requests.

A fold over the rows of metrics.jsonl by the run's prices, no clock: rounds that were
run, rounds that the frozen draft would have taken at its own acceptance, and what
updates took from serving. A run that is resumed rebuilds it from its rows.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from osd_jax.measuring.prices import Prices


@dataclasses.dataclass(frozen=True)
class Savings:
  """The account so far, milliseconds by the prices.

  Attributes:
    online_ms: decoding as it was.
    frozen_ms: decoding as the frozen draft would have done it.
    learning_ms: what updates took from serving.
    requests: finished.
    in_debt: requests up to the last at which nothing had been saved.
  """

  online_ms: float = 0.0
  frozen_ms: float = 0.0
  learning_ms: float = 0.0
  requests: int = 0
  in_debt: int = 0

  @property
  def saved_ms(self) -> float:
    """Time saved, learning included; negative where learning has not paid yet."""
    return self.frozen_ms - self.online_ms - self.learning_ms

  @property
  def even_since(self) -> int | None:
    """Requests after which learning had paid for good; None if it has not."""
    return None if self.in_debt == self.requests else self.in_debt + 1

  def fields(self) -> dict[str, Any]:
    """What a request row says of it; nothing where no frozen draft is measured."""
    if not self.frozen_ms:
      return {}
    return {"saved_seconds": self.saved_ms / 1e3, "even_since": self.even_since}

  def sentence(self) -> str:
    """In plain words; "" where nothing was learnt or no frozen draft was measured."""
    if not self.learning_ms or not self.frozen_ms:
      return ""
    gained = (self.frozen_ms - self.online_ms) / 1e3
    gains = "saved" if gained >= 0 else "lost"
    times = self.frozen_ms / (self.online_ms + self.learning_ms)
    even = (
      f"it had paid for good after {self.even_since} requests"
      if self.even_since
      else "it has not paid yet"
    )
    return (
      f"By the prices, learning took {self.learning_ms / 1e3:.1f} s from serving and"
      f" {gains} {abs(gained):.1f} s of decoding: {times:.2f}x the frozen draft,"
      f" learning included; {even}."
    )


def observe(
  prices: Prices, state: Savings, kind: str, row: Mapping[str, Any]
) -> Savings:
  """Takes in one row of metrics.jsonl, in the order of the file.

  Args:
    prices: of the run.
    state: what is known.
    kind: of the row; others than "request" and "update" change nothing.
    row: a request without the frozen draft's acceptance counts for nothing.
  """
  if kind == "update":
    steps = row["steps"] / max(prices.slices, 1)
    lost = state.learning_ms + steps * prices.lost_ms
    return dataclasses.replace(state, learning_ms=lost)
  if kind != "request":
    return state
  online, frozen = _decoding(prices, row)
  state = dataclasses.replace(
    state,
    online_ms=state.online_ms + online,
    frozen_ms=state.frozen_ms + frozen,
    requests=state.requests + 1,
  )
  return (
    state if state.saved_ms > 0 else dataclasses.replace(state, in_debt=state.requests)
  )


def of_rows(rows: Iterable[Mapping[str, Any]]) -> Savings | None:
  """The account of a log; None if it has no prices."""
  prices, state = None, Savings()
  for row in rows:
    if row["kind"] == "prices":
      prices = Prices.from_json(row)
    elif prices is not None:
      state = observe(prices, state, row["kind"], row)
  return None if prices is None else state


def sentence_of(rows: Iterable[Mapping[str, Any]]) -> str:
  """`Savings.sentence` of a log; "" if it has no prices."""
  account = of_rows(rows)
  return "" if account is None else account.sentence()


def _decoding(prices: Prices, row: Mapping[str, Any]) -> tuple[float, float]:
  """Milliseconds of a request's rounds, and of those of the frozen draft."""
  rounds, drafted = row["target_calls"], row["drafted"]
  rates = [row.get("acceptance_rate"), row.get("floor_acceptance_rate")]
  known = [rate for rate in rates if rate is not None and math.isfinite(rate)]
  if not rounds or len(known) < 2:
    return 0.0, 0.0
  online = rounds * prices.online.at(drafted / rounds) / prices.online.rows
  costs = prices.update_costs()
  now, then = (costs.token_ms(rate) for rate in known)
  return online, online * then / now
