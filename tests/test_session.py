"""The loop of a command: signals wait for a step, and every write is completed."""

import dataclasses
import os
import signal

import pytest

from osd_jax import base, pairs, session
from osd_jax.data import examples
from osd_jax.data.batches import BatchConfig
from osd_jax.evaluate import CertifyConfig
from osd_jax.online import OnlineConfig


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


@pytest.mark.parametrize("kind", [OnlineConfig, CertifyConfig])
def test_commands_that_measure_a_draft_refuse_none(kind, tmp_path):
  folder = tmp_path / "run"
  inputs = {
    "stream": lambda vocabulary: None,
    "prompts": BatchConfig((examples.topic_task("sql", "train", 1),)),
  }
  names = [field.name for field in dataclasses.fields(kind) if field.name in inputs]
  config = kind(
    **{name: inputs[name] for name in names},
    pair=pairs.PairConfig(draft=pairs.NONE),
    run_directory=str(folder),
  )
  with pytest.raises(base.InputError, match=f"{kind.__name__}.pair: .*'none'"):
    session.run(config, "", 0, lambda *_: pytest.fail("it has started"))
  assert not folder.exists()


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
