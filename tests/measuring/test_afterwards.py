"""What follows answers: in order, at once or beside, and no error is lost."""

import os
import threading

import pytest

from osd_jax import threads
from osd_jax.measuring.afterwards import Afterwards


def broken():
  raise ValueError("of a call")


def test_at_once_it_is_called_where_it_is_added():
  after, called = Afterwards(), []
  after.add(called.append, threading.get_ident())
  assert called == [threading.get_ident()] and not after.is_beside
  with pytest.raises(ValueError, match="of a call"):
    after.add(broken)
  assert after.rest() == [None]


def test_beside_nobody_waits_and_the_order_stays():
  after, go = Afterwards(beside=True, most=2), threading.Event()
  after.add(go.wait)
  after.add(threading.get_ident)
  assert after.ready() == []  # two may be unfinished
  go.set()
  first, thread = after.rest()
  assert first and thread != threading.get_ident()
  assert after.ready() == after.rest() == []
  after.close()


def test_beside_it_waits_where_too_much_is_unfinished():
  after, go = Afterwards(beside=True, most=1), threading.Event()
  after.add(go.wait)
  assert after.ready() == []
  after.add(lambda: "second")
  opener = threading.Timer(0.2, go.set)
  opener.start()
  given = after.ready()  # not before the timer
  assert given[0] is True and go.is_set()
  assert given + after.rest() == [True, "second"]
  after.close()


def test_an_error_comes_to_who_asks_once_and_nothing_after_it_is_called():
  after, called = Afterwards(beside=True), []
  for call in (lambda: "before", broken, lambda: called.append("after")):
    after.add(call)
  with pytest.raises(ValueError, match="of a call"):
    after.rest()
  assert after.rest() == []
  after.add(lambda: called.append("later"))
  after.close()
  assert called == []


def niceness(**options):
  def own():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

  with threads.one("tried", **options) as thread:
    return thread.submit(own).result() - own()


@pytest.mark.usefixtures("priorities")
def test_a_thread_that_gives_way_has_a_low_priority_and_others_keep_theirs(monkeypatch):
  assert niceness(gives_way=True) > 0
  assert niceness() == 0
  monkeypatch.setattr(threads, "cores", lambda: 1)
  assert niceness(gives_way=True) == 0  # on the only core it would starve
