"""What each of several systems has spent on one stream, block by block."""

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Accounts:
  """Seconds spent so far.

  Attributes:
    block_ends: [n] requests served when a block ended.
    seconds: [n] of each system by name, from the first request to that block's end.
  """

  block_ends: list[int]
  seconds: dict[str, list[float]]

  def total(self, name: str) -> float:
    """Seconds of the whole stream."""
    return self.seconds[name][-1]

  def break_even(self, learned: str, other: str) -> int | None:
    """See `break_even`."""
    return break_even(self.block_ends, self.seconds[learned], self.seconds[other])


def by_blocks(
  systems: Mapping[str, Callable[[int, int], object]],
  requests: int,
  block: int,
  clock: Callable[[], float] = time.perf_counter,
) -> Accounts:
  """Lets systems serve the same requests block by block, each beginning equally often.

  Args:
    systems: by name; called with the first request of a block and the one behind its
      last; what a system has begun it ends before it returns.
    requests: of the stream.
    block: requests of a block; the last may be shorter.
    clock: seconds.
  """
  names, ends = list(systems), []
  seconds: dict[str, list[float]] = {name: [] for name in names}
  for turn, start in enumerate(range(0, requests, block)):
    ends.append(min(start + block, requests))
    for place in range(len(names)):
      name = names[(turn + place) % len(names)]
      gc.collect()
      began = clock()
      systems[name](start, ends[-1])
      before = seconds[name][-1] if seconds[name] else 0.0
      seconds[name].append(before + clock() - began)
    print(f"{ends[-1]} of {requests} requests", file=sys.stderr, flush=True)
  return Accounts(ends, seconds)


def break_even(
  block_ends: Sequence[int], learned: Sequence[float], other: Sequence[float]
) -> int | None:
  """The first block end from which on one stays cheaper than another.

  Args:
    block_ends: [n] requests served when a block ended.
    learned: [n] seconds so far of the one that learns.
    other: [n] of the one it is compared with.

  Returns:
    Requests served by then; None where it is not cheaper at the end.
  """
  first = None
  for end, mine, theirs in zip(block_ends, learned, other, strict=True):
    if mine >= theirs:
      first = None
    elif first is None:
      first = end
  return first
