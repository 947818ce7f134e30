"""What an update costs and what overlap is worth: for schedules that go by prices."""

import dataclasses
from typing import Annotated, Any, Protocol, runtime_checkable

from osd_jax import base
from osd_jax.costs.table import expected_tokens


@dataclasses.dataclass(frozen=True)
class UpdateCosts(base.Config):
  """What rounds and updates take on a machine, milliseconds.

  Attributes:
    round_ms: one round of all rows, for each of `num_draft_tokens`.
    update_ms: one update that runs alone.
    num_draft_tokens: the Ks that serving may choose from; 0 is a plain step.
    rows: requests that a round serves.
    hidden: share of an update that costs serving nothing, since another core or
      device does it: 0 where serving waits meanwhile, 1 where it notices nothing.
  """

  round_ms: tuple[base.Positive, ...]
  update_ms: base.NonNegative
  num_draft_tokens: Annotated[
    tuple[base.CountOrZero, ...], base.NonEmpty("integers >= 0")
  ] = (7,)
  rows: base.Count = 1
  hidden: base.Share = 0.5

  def checks(self):
    fits = len(self.round_ms) == len(self.num_draft_tokens)
    return {"round_ms": (fits, "one number for each of num_draft_tokens")}

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
