"""Every metric that is a formula of numbers, defined once.

`engine/agreement` measures how well a draft agrees with the target.
"""

from collections.abc import Mapping

import numpy as np


def draft_acceptance_rate(accepted: int, drafted: int) -> float | None:
  """Accepted / drafted tokens; None where nothing was drafted."""
  return accepted / drafted if drafted else None


def tokens_per_target_call(emitted: int, target_calls: int) -> float | None:
  """Block efficiency tau: emitted / target calls, bonus and recovered included."""
  return emitted / target_calls if target_calls else None


def predicted_speed_up(
  tau: float, num_draft_tokens: int, cost_ratio: float, verify_ratio: float = 1.0
) -> float:
  """tau / (K c + v); the paper's figure takes v = 1.

  Args:
    tau: tokens per target call.
    num_draft_tokens: K.
    cost_ratio: c, draft step / plain target step.
    verify_ratio: v, verification / plain target step.
  """
  return tau / (num_draft_tokens * cost_ratio + verify_ratio)


def loops(tokens: np.ndarray, size: int = 8, times: int = 4) -> bool:
  """Whether a text repeats itself: some `size` tokens in a row occur `times` times.

  Occurrences may overlap, so that one token repeated for ever is a loop as well.
  """
  seen: dict[tuple[int, ...], int] = {}
  for start in range(len(tokens) - size + 1):
    window = tuple(int(token) for token in tokens[start : start + size])
    seen[window] = seen.get(window, 0) + 1
  return max(seen.values(), default=0) >= times


def segment_summary(
  rows: list[Mapping[str, float]], edge: int = 50
) -> dict[str, float | int]:
  """One line per topic: the first and the last requests of a segment.

  Args:
    rows: request rows of one segment, in order.
    edge: how many requests the first and last means take.

  Returns:
    Means of overlap and draft acceptance, online and floor, first and last.
  """

  def mean(part, name):
    values = [row[name] for row in part if row.get(name) is not None]
    return float(np.mean(values)) if values else float("nan")

  found: dict[str, float | int] = {"requests": len(rows)}
  for label, part in (("first", rows[:edge]), ("last", rows[-edge:]), ("mean", rows)):
    found[f"overlap_{label}"] = mean(part, "overlap")
    found[f"floor_overlap_{label}"] = mean(part, "floor_overlap")
    found[f"draft_acceptance_{label}"] = mean(part, "draft_acceptance_rate")
    found[f"tokens_per_target_call_{label}"] = mean(part, "tokens_per_target_call")
  return found


def recovery_requests(
  overlaps: list[float], level: float, window: int = 25, share: float = 0.9
) -> int | None:
  """Requests until the trailing window is at `share` of `level`; None if never.

  Args:
    overlaps: prequential overlap of a segment's requests, in order.
    level: the offline-distilled overlap on that topic.
    window: trailing requests; shorter at the beginning of the segment, where at
      least `window` // 2 requests must have been seen.
    share: of the level to reach.
  """
  for count in range(max(window // 2, 1), len(overlaps) + 1):
    if np.mean(overlaps[max(0, count - window) : count]) >= share * level:
      return count
  return None
