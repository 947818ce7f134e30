"""Time that several systems spend on the same stream, block by block."""

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Accounts:
  """Cumulated time of each system.

  Attributes:
    block_ends: [n] number of requests served at the end of each block.
    seconds: name of a system -> [n] seconds from the first request to each block's end.
  """

  block_ends: list[int]
  seconds: dict[str, list[float]]

  def total(self, name: str) -> float:
    """Returns the seconds that a system took for the whole stream."""
    return self.seconds[name][-1]

  def break_even(self, learned: str, other: str) -> int | None:
    """Applies `break_even` to two systems."""
    return break_even(self.block_ends, self.seconds[learned], self.seconds[other])


def by_blocks(
  systems: Mapping[str, Callable[[int, int], object]],
  requests: int,
  block: int,
  clock: Callable[[], float] = time.perf_counter,
) -> Accounts:
  """Interleaves systems that serve the same requests, block by block.

  The system that goes first changes from block to block.

  Args:
    systems: name -> function of the half-open range of requests in a block. It must
      finish all the work it started before it returns.
    requests: length of the stream.
    block: requests in a block; the last block may be shorter.
    clock: returns seconds.
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
  """Returns the first block end from which `learned` stays cheaper than `other`.

  Args:
    block_ends: [n] number of requests served at the end of each block.
    learned: [n] cumulated seconds of the system that learns.
    other: [n] cumulated seconds of the system it is compared with.

  Returns:
    The number of requests served by then; None if it is not cheaper at the end.
  """
  first = None
  for end, mine, theirs in zip(block_ends, learned, other, strict=True):
    if mine >= theirs:
      first = None
    elif first is None:
      first = end
  return first
