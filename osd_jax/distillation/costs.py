"""What an update costs and what overlap is worth: for schedules that go by prices."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from osd_jax import base
from osd_jax.costs.table import expected_tokens


@dataclasses.dataclass(frozen=True)
class UpdateCosts:
  """What rounds and updates take on a machine, milliseconds.

  Attributes:
    round_ms: one round of all rows, for each of `num_draft_tokens`.
    update_ms: one update that runs alone.
    num_draft_tokens: the Ks that serving may choose from; 0 is a plain step.
    rows: requests that a round serves.
    hidden: share of an update that costs serving nothing, since another core or
      device does it: 0 where serving waits meanwhile, 1 where it notices nothing.
  """

  round_ms: tuple[float, ...]
  update_ms: float
  num_draft_tokens: tuple[int, ...] = (7,)
  rows: int = 1
  hidden: float = 0.5

  def __post_init__(self):
    object.__setattr__(self, "round_ms", tuple(self.round_ms))  # JSON knows lists only
    object.__setattr__(self, "num_draft_tokens", tuple(self.num_draft_tokens))
    base.check_counts(self, "rows")
    checks = {
      "num_draft_tokens": (
        self.num_draft_tokens
        and all(base.is_count(k, 0) for k in self.num_draft_tokens),
        "integers >= 0, one or more",
      ),
      "round_ms": (
        len(self.round_ms) == len(self.num_draft_tokens) and min(self.round_ms) > 0,
        "milliseconds > 0, as many as num_draft_tokens",
      ),
      "update_ms": (self.update_ms >= 0, "milliseconds >= 0"),
      "hidden": (0 <= self.hidden <= 1, "a share in 0..1"),
    }
    base.check_fields(self, checks)

  @property
  def lost_ms(self) -> float:
    """What one update takes from serving."""
    return self.update_ms * (1 - self.hidden)

  def token_ms(self, overlap: float) -> float:
    """Time of a token at that overlap, with the best of the Ks."""
    choices = zip(self.round_ms, self.num_draft_tokens, strict=True)
    return min(ms / (expected_tokens(overlap, k) * self.rows) for ms, k in choices)


@runtime_checkable
class Priced(Protocol):
  """A `Schedule` that goes by costs and by lengths of requests."""

  def priced(self, state: Any, costs: UpdateCosts) -> Any:
    """The state that knows what the machine takes."""
    ...

  def emitted(self, state: Any, tokens: int) -> Any:
    """The state that knows the length of the request that `observe` takes in next."""
    ...
