"""Threads that work beside serving, and give way to it."""

import concurrent.futures
import contextlib
import os
import sys
import threading

# Linux gives a thread of this niceness a tenth of a core that another one wants.
_NICENESS = 10


def cores() -> int:
  """Processor cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def one(name: str, gives_way: bool = False) -> concurrent.futures.ThreadPoolExecutor:
  """A thread for one call after the other.

  Args:
    name: of the thread.
    gives_way: whoever serves gets a core first, so that what nobody waits for takes
      only what is idle. On Linux, and where there is a second core.
  """
  initializer = _give_way if gives_way and cores() > 1 else None
  return concurrent.futures.ThreadPoolExecutor(1, name, initializer)


def _give_way() -> None:
  if sys.platform == "linux":  # where a thread has a priority of its own
    with contextlib.suppress(OSError):
      os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
