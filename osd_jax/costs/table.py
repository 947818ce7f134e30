"""Measured costs in milliseconds, and the formula that turns them into time per token.

The controller of K, the schedule that weighs updates and the report all read these
tables. They are plain numbers: a run with given tables reads no clock.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

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


# Times of all rows, and those of a single one.
_BY_ROWS = {"round_ms": "lone_ms", "cache_ms": "lone_cache_ms"}
_PER_K = ("num_draft_tokens", *_BY_ROWS, *_BY_ROWS.values())


@dataclasses.dataclass(frozen=True)
class RoundCosts(base.Config):
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
    cache_ms: one round in which the n-gram cache of a mixture drafts alone, for each K;
      empty: it never does.
    lone_ms: `round_ms` while a single row holds a request; empty: as with all rows.
    lone_cache_ms: `cache_ms` while a single row holds a request.
  """

  round_ms: Annotated[
    tuple[base.Positive, ...], base.NonEmpty("milliseconds > 0, one value for each K")
  ]
  chunk_ms: base.NonNegative = 0.0
  prefill_ms: base.NonNegative = 0.0
  call_ms: base.NonNegative = 0.0
  num_draft_tokens: tuple[base.CountOrZero, ...] = ()
  rows: base.Count = 1
  request_ms: base.NonNegative = 0.0
  cache_ms: tuple[base.Positive, ...] = ()
  lone_ms: tuple[base.Positive, ...] = ()
  lone_cache_ms: tuple[base.Positive, ...] = ()

  def checks(self):
    expected = "one number for each value of round_ms"
    count = len(self.round_ms)
    return {name: (len(getattr(self, name)) in (count, 0), expected) for name in _PER_K}

  def first(self, count: int) -> "RoundCosts":
    """Returns the table of the first `count` Ks."""
    return dataclasses.replace(
      self, **{name: getattr(self, name)[:count] for name in _PER_K}
    )

  def in_use(self, rows: int) -> "RoundCosts":
    """Returns the table while this many rows hold a request, of `rows` at most."""
    share = min((rows - 1) / max(self.rows - 1, 1), 1.0)
    changes = {}
    for name, lone in _BY_ROWS.items():
      few, all_rows = getattr(self, lone), getattr(self, name)
      if few and all_rows:
        mixed = (1 - share) * np.asarray(few) + share * np.asarray(all_rows)
        changes |= {name: tuple(mixed.tolist()), lone: ()}
    return dataclasses.replace(self, **changes) if changes else self

  def at(self, num_draft_tokens: float) -> float:
    """Milliseconds of a round that drafts this many tokens on average."""
    # With an adaptive K the mean number of drafted tokens lies between two entries.
    return float(np.interp(num_draft_tokens, self.num_draft_tokens, self.round_ms))

  def token_ms(self, acceptance: float) -> float:
    """Milliseconds per token at this acceptance, with the K that is fastest."""
    choices = zip(self.round_ms, self.num_draft_tokens, strict=True)
    return min(ms / expected_tokens(acceptance, k) for ms, k in choices) / self.rows


@dataclasses.dataclass(frozen=True)
class Costs(base.Config):
  """Costs of a run on this machine.

  Attributes:
    online: speculative decoding as the run does it, with all its rows.
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
    found = {name: value for name, value in fields.items() if name in names}
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
