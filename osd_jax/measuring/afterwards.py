"""What follows every answer: at once, or beside serving, on a thread of its own.

Measuring an answer, learning from it and logging it take as long on a small pair as
several rounds. Where a run need not repeat bit by bit, serving does not wait for them.
"""

import concurrent.futures
from collections import deque
from collections.abc import Callable
from typing import Any

from osd_jax import threads


class Afterwards:
  """Calls one function after the other, in the order they were given.

  >>> after = Afterwards()
  >>> after.add(len, "abc")
  >>> after.ready(), after.ready()
  ([3], [])
  """

  def __init__(self, beside: bool = False, most: int = 1):
    """Starts nothing yet.

    Args:
      beside: on a thread of its own; else within `add`.
      most: calls that may be unfinished when `ready` returns.
    """
    self._thread = threads.one("afterwards", gives_way=True) if beside else None
    self._most, self._failed = most, False
    self._calls: deque[concurrent.futures.Future[Any]] = deque()

  @property
  def is_beside(self) -> bool:
    """Whether calls run on a thread of their own."""
    return self._thread is not None

  def add(self, call: Callable[..., Any], *arguments: Any) -> None:
    """Calls the function when those before it are done; at once: now.

    Raises:
      Exception: of the call, where it is made at once.
    """
    if self._thread is None:
      done: concurrent.futures.Future[Any] = concurrent.futures.Future()
      done.set_result(call(*arguments))
      self._calls.append(done)
    else:
      self._calls.append(self._thread.submit(self._in_turn, call, *arguments))

  def ready(self) -> list[Any]:
    """Results that are there and were not given yet, in order.

    Waits where more calls than `most` are unfinished.

    Raises:
      Exception: of a call that failed; those after it are not made.
    """
    return self._given(self._most)

  def rest(self) -> list[Any]:
    """Waits for all calls; else as `ready`."""
    return self._given(0)

  def close(self) -> None:
    """Ends the thread, after its last call."""
    if self._thread is not None:
      self._thread.shutdown()

  def _given(self, most: int) -> list[Any]:
    """Results of the calls that are done, and of those beyond `most`."""
    results = []
    while self._calls and (self._calls[0].done() or len(self._calls) > most):
      try:
        results.append(self._calls.popleft().result())
      except Exception:
        self._calls.clear()  # it is told once, and nothing came of the others
        raise
    return results

  def _in_turn(self, call: Callable[..., Any], *arguments: Any) -> Any:
    if self._failed:
      return None
    try:
      return call(*arguments)
    except Exception:
      self._failed = True
      raise
