"""The loop of a command: signals wait for a step, and every write is completed."""

import os
import signal

import pytest

from osd_jax import session


class Loop:
  """Three steps; `act` runs in the second."""

  def __init__(self, act=lambda: None):
    self.act, self.calls = act, []

  def step(self):
    self.calls.append("step")
    if self.calls.count("step") == 2:
      self.act()
    return self.calls.count("step") if self.calls.count("step") < 4 else None

  def checkpoint(self):
    self.calls.append("checkpoint")

  def wait(self):
    self.calls.append("wait")


def test_every_step_is_shown():
  loop, shown = Loop(), []
  session.run_steps(loop, shown.append)
  assert shown == [1, 2, 3] and loop.calls == ["step"] * 4 + ["wait"]


def test_failed_step_waits_for_the_checkpoint_that_is_being_written():
  def fail():
    raise KeyError

  loop = Loop(fail)
  with pytest.raises(KeyError):
    session.run_steps(loop, lambda shown: None)
  assert loop.calls == ["step", "step", "wait"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_takes_effect_after_the_step_and_a_checkpoint(number):
  class Ended(Exception):
    pass

  def end(*_):
    raise Ended

  before = signal.signal(number, end)
  try:
    loop = Loop(lambda: os.kill(os.getpid(), number))
    with pytest.raises(Ended):
      session.run_steps(loop, lambda shown: None)
    assert loop.calls == ["step", "step", "checkpoint", "wait", "wait"]
    assert signal.getsignal(number) is end
    # A second signal does not wait.
    loop = Loop(lambda: [os.kill(os.getpid(), number) for _ in range(2)])
    with pytest.raises(Ended):
      session.run_steps(loop, lambda shown: None)
    assert loop.calls == ["step", "step", "wait"]
  finally:
    signal.signal(number, before)
