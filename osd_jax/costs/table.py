"""Measured costs in milliseconds, and the formula that turns them into time per token.

The controller of K, the schedule that weighs updates and the report all read these
tables. They are plain numbers: a run with given tables reads no clock.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from osd_jax import base


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
  """Tokens that a round emits, (1 - a^(K + 1)) / (1 - a) (paper, eq. 1).

  Assumes that every position is accepted independently, with the same probability.

  >>> expected_tokens(0.5, 2)
  1.75
  >>> expected_tokens(1.0, 2)
  3.0
  """
  # The sum needs no special case where the acceptance is 1.
  return sum(min(acceptance, 1.0) ** i for i in range(num_draft_tokens + 1))


@dataclasses.dataclass(frozen=True)
class RoundCosts:
  """Costs of one way to decode, for all rows at once.

  Attributes:
    round_ms: one round, for each number of draft tokens (K) in ascending order.
    chunk_ms: feeding the draft one chunk of the tokens that it missed.
    prefill_ms: the draft's prefill of one row.
    call_ms: a call without its rounds.
    num_draft_tokens: the Ks, 0 for a plain step; empty for those of
      `AdaptiveConfig.candidates`.
    rows: requests that a round serves.
    request_ms: a request without its rounds: prefill, and its share of the call.
  """

  round_ms: tuple[float, ...]
  chunk_ms: float = 0.0
  prefill_ms: float = 0.0
  call_ms: float = 0.0
  num_draft_tokens: tuple[int, ...] = ()
  rows: int = 1
  request_ms: float = 0.0

  def __post_init__(self):
    # JSON has no tuples.
    object.__setattr__(self, "round_ms", tuple(self.round_ms))
    object.__setattr__(self, "num_draft_tokens", tuple(self.num_draft_tokens))
    base.check_counts(self, "rows")
    lengths = (len(self.round_ms), 0)
    checks = {
      "round_ms": (
        self.round_ms and min(self.round_ms) > 0,
        "milliseconds > 0, one value for each K",
      ),
      "num_draft_tokens": (
        len(self.num_draft_tokens) in lengths
        and all(base.is_count(k, 0) for k in self.num_draft_tokens),
        "integers >= 0, one for each value of round_ms",
      ),
    }
    for name in ("chunk_ms", "prefill_ms", "call_ms", "request_ms"):
      checks[name] = (getattr(self, name) >= 0, "milliseconds >= 0")
    base.check_fields(self, checks)

  def at(self, num_draft_tokens: float) -> float:
    """Milliseconds of a round that drafts this many tokens on average."""
    return float(np.interp(num_draft_tokens, self.num_draft_tokens, self.round_ms))

  def token_ms(self, acceptance: float) -> float:
    """Milliseconds per token at this acceptance, with the K that is fastest."""
    choices = zip(self.round_ms, self.num_draft_tokens, strict=True)
    return min(ms / expected_tokens(acceptance, k) for ms, k in choices) / self.rows


@dataclasses.dataclass(frozen=True)
class Costs:
  """Costs of a run on this machine.

  Attributes:
    online: speculative decoding as the run does it, with all its rows.
    lost_ms: time that serving loses to one update.
    plain: plain decoding of one request, without records.
    frozen: speculative decoding of one request.
    draft_ms: a step of the draft, all rows.
    step_ms: a plain step of the target, all rows.
    verify_ms: the target on K + 1 tokens, all rows; K is the largest.
    update_ms: an update while nothing is served; 0 if nothing learns.
    slices: slices of an update; 0 if nothing learns.
  """

  online: RoundCosts
  lost_ms: float = 0.0
  plain: RoundCosts | None = None
  frozen: RoundCosts | None = None
  draft_ms: float = 0.0
  step_ms: float = 0.0
  verify_ms: float = 0.0
  update_ms: float = 0.0
  slices: int = 0

  def __post_init__(self):
    times = ("lost_ms", "draft_ms", "step_ms", "verify_ms", "update_ms")
    checks = {name: (getattr(self, name) >= 0, "milliseconds >= 0") for name in times}
    checks["online"] = (
      self.online.num_draft_tokens,
      "RoundCosts with num_draft_tokens: the Ks that round_ms belongs to",
    )
    base.check_fields(self, checks)

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Costs":
    """Restores the costs that `dataclasses.asdict` turned into a JSON object."""
    # A row of metrics.jsonl has fields of its own, such as its kind.
    names = {field.name for field in dataclasses.fields(cls)}
    found = {name: value for name, value in fields.items() if name in names}
    for name in ("online", "plain", "frozen"):
      found[name] = RoundCosts(**found[name]) if found.get(name) else None
    return cls(**found)

  def table(self) -> list[dict[str, Any]]:
    """Rows for the report."""
    online = self.online
    listed = zip(online.num_draft_tokens, online.round_ms, strict=True)
    entries = {
      "plain step": self.step_ms,
      f"verification of {max(online.num_draft_tokens) + 1} tokens": self.verify_ms,
      "draft step": self.draft_ms,
      **{f"round, K = {k}": ms for k, ms in listed},
      "request without its rounds": online.request_ms,
    }
    if self.slices:
      entries[f"update of {self.slices} slices, nothing served"] = self.update_ms
      entries["time an update takes from serving"] = self.lost_ms
    return [
      {"call": name, "milliseconds": round(ms, 3)} for name, ms in entries.items()
    ]
