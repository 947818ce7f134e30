"""What a server has done so far, counted as answers finish."""

import dataclasses

from osd_jax.engine.requests import Finished


@dataclasses.dataclass
class Statistics:
  """What a server has done so far.

  Attributes:
    requests: answered.
    tokens: emitted.
    target_calls: verifications that they took.
    drafted: drafted tokens that were judged.
    accepted: of those, accepted.
    milliseconds: of prefills and calls, shared out to the requests.
    updates: of the draft.
  """

  requests: int = 0
  tokens: int = 0
  target_calls: int = 0
  drafted: int = 0
  accepted: int = 0
  milliseconds: float = 0.0
  updates: int = 0

  @property
  def tokens_per_target_call(self) -> float:
    """Block efficiency: emitted tokens per verification."""
    return self.tokens / max(self.target_calls, 1)

  @property
  def draft_acceptance_rate(self) -> float:
    """Accepted / drafted tokens."""
    return self.accepted / max(self.drafted, 1)

  @property
  def tokens_per_second(self) -> float:
    """Emitted tokens over the time of decoding."""
    return 1e3 * self.tokens / max(self.milliseconds, 1e-9)

  def count(self, done: Finished) -> None:
    """Adds an answered request."""
    self.requests += 1
    self.tokens += len(done.tokens)
    self.target_calls += done.target_calls
    self.drafted += done.drafted
    self.accepted += done.accepted
    self.milliseconds += done.milliseconds
