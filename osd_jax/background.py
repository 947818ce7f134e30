"""Background threads: one worker that runs calls in order, at low priority if asked."""

import concurrent.futures
import contextlib
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

# Linux gives a thread of this niceness about a tenth of a contested core.
_NICENESS = 10
_M_ARENA_MAX = -8  # of malloc.h


def cores() -> int:
  """Number of processor cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Worker(concurrent.futures.ThreadPoolExecutor):
  """A thread that runs submitted calls one after another."""

  def __init__(self, name: str, low_priority: bool = False):
    """Creates the worker; its thread starts with the first call.

    Args:
      name: prefix of the thread's name.
      low_priority: let the serving thread have a core first. Takes effect on Linux, if
        the process has a second core: on a single one the worker would starve.
    """
    super().__init__(1, name, _lower_priority if low_priority and cores() > 1 else None)


class OneTimeCalls:
  """Runs calls on a thread, each once, while the caller goes on."""

  def __init__(self):
    """Starts no thread yet; the first call does."""
    self._worker = Worker("one-time calls", low_priority=True)
    self._calls: dict[Any, concurrent.futures.Future[Any]] = {}

  def has_run(self, name: Any, prepare: Callable[[], Callable[[], Any]]) -> bool:
    """Whether the call of that name has ended; starts it when it is first asked for.

    `prepare` returns the call, and runs on the caller's thread.

    Raises:
      Exception: raised by the call.
    """
    if name not in self._calls:
      self._calls[name] = self._worker.submit(prepare())
    if not self._calls[name].done():
      return False
    self._calls[name].result()
    return True

  def close(self) -> None:
    """Ends the thread after the call in progress; drops the others."""
    self._worker.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
  if sys.platform == "linux":  # elsewhere a niceness belongs to the whole process
    with contextlib.suppress(OSError):
      os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def share_heaps() -> None:
  """Lets all threads of this process allocate from two heaps, with glibc.

  It gives every thread a heap of its own, and each keeps what large arrays have left
  behind, such as the copies that checkpoints write. In a server of many threads that is
  a fifth of its memory, and grows for a long time. Call it before other threads start.
  """
  if sys.platform == "linux":
    with contextlib.suppress(AttributeError):  # another C library
      ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def return_memory() -> None:
  """Returns freed memory to the operating system, with glibc."""
  if sys.platform == "linux":
    with contextlib.suppress(AttributeError):  # another C library
      ctypes.CDLL(None).malloc_trim(0)


class OrderedCalls:
  """Runs calls in the order they were added and returns their results in that order.

  Calls run inside `add`, or on a low-priority thread so that serving does not wait.

  >>> calls = OrderedCalls()
  >>> calls.add(len, "abc")
  >>> calls.ready(), calls.ready()
  ([3], [])
  """

  def __init__(self, in_background: bool = False, max_pending: int = 1):
    """Creates an empty queue, whose calls run inside `add` unless `in_background`.

    At most `max_pending` calls are unfinished when `ready` returns.
    """
    self._worker = Worker("calls", low_priority=True) if in_background else None
    self._max_pending, self._failed = max_pending, False
    self._calls: deque[concurrent.futures.Future[Any]] = deque()

  @property
  def in_background(self) -> bool:
    """Whether calls run on a thread of their own."""
    return self._worker is not None

  def add(self, call: Callable[..., Any], *arguments: Any, alone: bool = False) -> None:
    """Runs the call now, or after all calls that were added before it.

    With `alone`, waits for the earlier calls and runs the call inside `add`.

    Raises:
      Exception: raised by the call, if it runs now.
    """
    if self._worker is None:
      self._calls.append(_done(call(*arguments)))
    elif alone:
      concurrent.futures.wait(self._calls)
      self._calls.append(_done(self._run(call, *arguments)))
    else:
      self._calls.append(self._worker.submit(self._run, call, *arguments))

  def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Runs a call on the thread, between two others; its result is the future's."""
    if self._worker is None:
      return _done(call())
    return self._worker.submit(call)

  def ready(self) -> list[Any]:
    """Returns new results in order; waits if more than `max_pending` are missing.

    Raises:
      Exception: raised by a call; later calls are not run.
    """
    return self._results(self._max_pending)

  def wait(self) -> list[Any]:
    """Waits for all calls and returns their new results; raises like `ready`."""
    return self._results(0)

  def close(self) -> None:
    """Ends the thread after its last call."""
    if self._worker is not None:
      self._worker.shutdown()

  def _results(self, max_pending: int) -> list[Any]:
    results = []
    while self._calls and (self._calls[0].done() or len(self._calls) > max_pending):
      try:
        results.append(self._calls.popleft().result())
      except Exception:
        self._calls.clear()  # report the error once; later calls were not run
        raise
    return results

  def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
    # The caller must see the error before anything that came after it has effects.
    if self._failed:
      return None
    try:
      return call(*arguments)
    except Exception:
      self._failed = True
      raise


def _done(result: Any) -> concurrent.futures.Future[Any]:
  future: concurrent.futures.Future[Any] = concurrent.futures.Future()
  future.set_result(result)
  return future
