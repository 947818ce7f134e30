"""OrderedCalls runs calls in order, in `add` or in the background; no error is lost."""

import os
import pathlib
import platform
import subprocess
import sys
import threading

import pytest

from osd_jax import background


def broken():
  raise ValueError("of a call")


def in_background(max_pending=1):
  return background.OrderedCalls(in_background=True, max_pending=max_pending)


def test_foreground_calls_run_inside_add():
  calls, called = background.OrderedCalls(), []
  calls.add(called.append, threading.get_ident())
  assert called == [threading.get_ident()] and not calls.in_background
  with pytest.raises(ValueError, match="of a call"):
    calls.add(broken)
  assert calls.wait() == [None]


def test_background_results_come_in_order_without_waiting():
  calls, go = in_background(max_pending=2), threading.Event()
  calls.add(go.wait)
  calls.add(threading.get_ident)
  assert calls.ready() == []  # two may be unfinished
  go.set()
  first, thread = calls.wait()
  assert first and thread != threading.get_ident()
  assert calls.ready() == calls.wait() == []
  calls.close()


def test_ready_waits_when_too_many_calls_are_pending():
  calls, go = in_background(), threading.Event()
  calls.add(go.wait)
  assert calls.ready() == []
  calls.add(lambda: "second")
  opener = threading.Timer(0.2, go.set)
  opener.start()
  results = calls.ready()  # not before the timer
  assert results[0] is True and go.is_set()
  assert results + calls.wait() == [True, "second"]
  calls.close()


def test_error_is_raised_once_and_later_calls_are_skipped():
  calls, called = in_background(), []
  for call in (lambda: "before", broken, lambda: called.append("after")):
    calls.add(call)
  with pytest.raises(ValueError, match="of a call"):
    calls.wait()
  assert calls.wait() == []
  calls.add(lambda: called.append("later"))
  calls.close()
  assert called == []


def niceness(**options):
  def own():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

  with background.Worker("tried", **options) as worker:
    return worker.submit(own).result() - own()


@pytest.mark.usefixtures("priorities")
def test_low_priority_applies_to_one_thread_and_needs_a_second_core(monkeypatch):
  assert niceness(low_priority=True) > 0
  assert niceness() == 0
  monkeypatch.setattr(background, "cores", lambda: 1)
  assert niceness(low_priority=True) == 0  # on a single core it would starve


HEAPS = """
import ctypes, sys, threading
from osd_jax import background

if sys.argv[1] == "shared":
  background.share_heaps()
together = threading.Barrier(8)

def work():
  pieces = bytearray(1000)
  together.wait()  # threads that live at the same time have heaps of their own

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
  thread.start()
for thread in threads:
  thread.join()
ctypes.CDLL(None).malloc_stats()  # prints "Arena 0:", "Arena 1:", ...
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_threads_share_two_heaps_if_asked():
  def heaps(kind):
    command = [sys.executable, "-c", HEAPS, kind]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return process.stderr.count("Arena ")

  assert heaps("shared") <= 2 < heaps("own")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_was_freed_is_returned():
  def resident():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

  # Pieces below the size that glibc maps one by one; the last keeps the heap's end.
  pieces = [bytearray(100_000) for _ in range(1000)]
  values, before = pieces.pop(), resident()
  pieces.clear()
  middle = resident()
  background.return_memory()
  assert before - middle < 50e6 < before - resident()
  assert len(values) == 100_000
