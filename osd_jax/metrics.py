"""Metrics computed from counts and logged rows, each defined once.

`engine/agreement` measures how well a draft agrees with the target.
"""

import collections

import numpy as np


def draft_acceptance_rate(accepted: int, drafted: int) -> float | None:
  """Accepted / drafted tokens, or None if no token was drafted."""
  return accepted / drafted if drafted else None


def tokens_per_target_call(emitted: int, target_calls: int) -> float | None:
  """Emitted tokens / target calls, including recovered and bonus tokens (tau)."""
  return emitted / target_calls if target_calls else None


def loops(tokens: np.ndarray, size: int = 8, times: int = 4) -> bool:
  """Whether some sequence of `size` tokens occurs at least `times` times.

  Occurrences may overlap, so one token that is repeated many times is a loop too.
  """
  # Counts n-grams: a loop of any period up to the text's length repeats its windows.
  windows = zip(*(tokens[start:].tolist() for start in range(size)), strict=False)
  return max(collections.Counter(windows).values(), default=0) >= times


def recovery_requests(
  overlaps: list[float], level: float, window: int = 25, share: float = 0.9
) -> int | None:
  """Requests until the trailing mean reaches `share` of `level`; None if never.

  Args:
    overlaps: prequential overlaps of a segment's requests, in order.
    level: overlap of the offline-distilled draft on the topic.
    window: requests in the trailing mean. Near the start of the segment the mean takes
      the requests so far, but at least `window` // 2.
    share: share of `level` to reach.
  """
  # A mean of very few requests would reach the level by chance.
  for count in range(max(window // 2, 1), len(overlaps) + 1):
    if np.mean(overlaps[max(0, count - window) : count]) >= share * level:
      return count
  return None
