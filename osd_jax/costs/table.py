"""Measured costs in milliseconds, and the formula that turns them into time per token.

The controller of K, the schedule that weighs updates and the report all read these
tables. They are plain numbers: a run with given tables reads no clock.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import base

LEAST_PRICE = 1e-6  # a token with a price of 0 would be drafted in any case


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


def predicted_speed_up(
  tau: float, num_draft_tokens: int, cost_ratio: float, verify_ratio: float = 1.0
) -> float:
  """Speed-up over plain decoding, tau / (K c + v); the paper assumes v = 1.

  Tau is the number of tokens per target call, recovered and bonus tokens included; c is
  the time of a draft step, and v that of a verification, divided by the time of a plain
  target step.
  """
  return tau / (num_draft_tokens * cost_ratio + verify_ratio)


def prices(
  num_draft_tokens: Sequence[int], round_ms: Sequence[float], token_ms: float
) -> np.ndarray:
  """Returns what each further drafted token costs, in tokens emitted in that time.

  Args:
    num_draft_tokens: the Ks that were timed, ascending.
    round_ms: a round of each.
    token_ms: time in which one token is emitted.
  """
  ms = np.interp(np.arange(num_draft_tokens[-1] + 1), num_draft_tokens, round_ms)
  return np.maximum(np.diff(ms) / token_ms, LEAST_PRICE).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RoundCosts(base.Config):
  """Costs of one way to decode, for prompts of one bucket.

  Attributes:
    round_ms: one round in milliseconds, an array [source, sampled, rows, K] as nested
      tuples. Source: 0 the draft, 1 the n-gram cache of a mixture alone. Sampled: 0
      greedy, 1 sampled rows. Rows: 0 while a single row holds a request, 1 all. K: as
      in `num_draft_tokens`. An axis of size 1 holds for all; leading axes may be left
      out.
    chunk_ms: feeding the draft one chunk of the tokens that it missed.
    prefill_ms: the draft's prefill of one row.
    call_ms: a call without its rounds.
    num_draft_tokens: the Ks in ascending order, 0 for a plain step; empty for those of
      `AdaptiveConfig.candidates`.
    rows: requests that a round serves.
    request_ms: a request without its rounds: prefill, and its share of the call.
  """

  round_ms: tuple
  chunk_ms: base.NonNegative = 0.0
  prefill_ms: base.NonNegative = 0.0
  call_ms: base.NonNegative = 0.0
  num_draft_tokens: tuple[base.CountOrZero, ...] = ()
  rows: base.Count = 1
  request_ms: base.NonNegative = 0.0

  def checks(self):
    try:
      ms = self.ms
    except (TypeError, ValueError):  # ragged, or no numbers
      ms = np.zeros((1, 1, 1, 0))
    is_array = ms.ndim == 4 and set(ms.shape[:3]) <= {1, 2}
    is_positive = ms.size > 0 and bool(np.all((ms > 0) & np.isfinite(ms)))
    return {
      "round_ms": (
        is_array and is_positive,
        "milliseconds > 0, one value for each K, or a nested tuple of such tuples",
      ),
      "num_draft_tokens": (
        len(self.num_draft_tokens) in (ms.shape[-1], 0),
        "one number for each K of round_ms",
      ),
    }

  @property
  def ms(self) -> np.ndarray:
    """`round_ms` with all of its axes [source, sampled, rows, K]."""
    ms = np.asarray(self.round_ms, float)
    return ms.reshape((1,) * (4 - ms.ndim) + ms.shape)

  def rounds(self, is_sampled: bool = False, rows: int | None = None) -> np.ndarray:
    """Returns [source, K] for a number of rows that hold a request; None means all."""
    ms = self.ms[:, -1 if is_sampled else 0]
    share = 1.0 if rows is None else min((rows - 1) / max(self.rows - 1, 1), 1.0)
    return (1 - share) * ms[:, 0] + share * ms[:, -1]

  def flat(self, is_sampled: bool) -> "RoundCosts":
    """Returns the table [K] of the draft with all rows."""
    flat_ms = tuple(self.rounds(is_sampled)[0].tolist())
    return dataclasses.replace(self, round_ms=flat_ms)

  def of(self, num_draft_tokens: Sequence[int]) -> "RoundCosts":
    """Returns the table of the first Ks, which are named here."""
    ks = tuple(num_draft_tokens)
    round_ms = self.ms[..., : len(ks)].tolist()
    return dataclasses.replace(self, round_ms=round_ms, num_draft_tokens=ks)

  def at(self, num_draft_tokens: float) -> float:
    """Milliseconds of a round that drafts this many tokens on average."""
    # With an adaptive K the mean number of drafted tokens lies between two entries.
    return float(np.interp(num_draft_tokens, self.num_draft_tokens, self.rounds()[0]))

  def token_ms(self, acceptance: float) -> float:
    """Milliseconds per token at this acceptance, with the K that is fastest."""
    choices = zip(self.rounds()[0].tolist(), self.num_draft_tokens, strict=True)
    return min(ms / expected_tokens(acceptance, k) for ms, k in choices) / self.rows


@dataclasses.dataclass(frozen=True)
class Costs(base.Config):
  """Costs of a run on this machine.

  Attributes:
    online: speculative decoding as the run does it, with all its rows; its times are
      [K].
    lost_ms: time that serving loses to one update.
    draft_ms: a step of the draft, all rows.
    step_ms: a plain step of the target, all rows.
    verify_ms: the target on K + 1 tokens, all rows; K is the largest.
    update_ms: an update while nothing is served; 0 if nothing learns.
    slices: slices of an update; 0 if nothing learns.
  """

  online: RoundCosts
  lost_ms: base.NonNegative = 0.0
  draft_ms: base.NonNegative = 0.0
  step_ms: base.NonNegative = 0.0
  verify_ms: base.NonNegative = 0.0
  update_ms: base.NonNegative = 0.0
  slices: base.CountOrZero = 0

  def checks(self):
    expected = "RoundCosts with num_draft_tokens: the Ks that round_ms belongs to"
    return {"online": (self.online.num_draft_tokens, expected)}

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Costs":
    """Restores the costs that `dataclasses.asdict` turned into a JSON object."""
    # A row of metrics.jsonl has fields of its own, such as its kind.
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in names})

  def table(self) -> list[dict[str, Any]]:
    """Rows for the report."""
    online = self.online
    round_times = zip(online.num_draft_tokens, online.round_ms, strict=True)
    entries = {
      "plain step": self.step_ms,
      f"verification of {max(online.num_draft_tokens) + 1} tokens": self.verify_ms,
      "draft step": self.draft_ms,
      **{f"round, K = {k}": ms for k, ms in round_times},
      "request without its rounds": online.request_ms,
    }
    if self.slices:
      entries[f"update of {self.slices} slices, nothing served"] = self.update_ms
      entries["time an update takes from serving"] = self.lost_ms
    return [
      {"call": name, "milliseconds": round(ms, 3)} for name, ms in entries.items()
    ]
