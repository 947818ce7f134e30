"""Checkpoints are written beside the work that goes on.

What is stored is of the moment of `save`, and what could not be stored is said.
"""

import errno
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from runs import harness

from osd_jax.runs import leaves


@pytest.fixture
def gate(monkeypatch):
  """Nothing is written until this event is set."""
  opened, save = threading.Event(), orbax.checkpoint.CheckpointManager.save

  def held(manager, *arguments, **named):
    assert opened.wait(20)
    return save(manager, *arguments, **named)

  monkeypatch.setattr(orbax.checkpoint.CheckpointManager, "save", held)
  yield opened
  opened.set()


def test_a_step_being_written_is_not_waited_for(tmp_path, gate):
  with harness.opened(tmp_path, every_requests=10) as checkpointer:
    checkpointer.save(10, harness.learner(), {})
    assert not checkpointer.due(19) and checkpointer.due(20)
    assert not (tmp_path / "10").exists()
    gate.set()
    checkpointer.wait()
    assert (tmp_path / "10").exists()
    assert not checkpointer.due(19) and checkpointer.due(20)


def test_the_next_step_waits_for_the_one_being_written(tmp_path, gate):
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, harness.learner(), {})
    threading.Timer(0.2, gate.set).start()
    checkpointer.save(2, harness.learner(), {})
    assert (tmp_path / "1").exists()
    assert checkpointer.steps() == [1, 2]


def test_what_is_stored_is_of_the_moment_of_save(tmp_path, gate):
  passed_on = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
  tree = {"host": np.arange(5.0, dtype=np.float32), "device": jnp.arange(1000.0)}
  kept, host = jax.tree.map(np.array, tree), {"open": [1, 2]}
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, tree, host)
    tree["host"][:] = -1
    host["open"].append(3)
    changed = passed_on(tree["device"])
    assert tree["device"].is_deleted() and float(changed[0]) == 1
    gate.set()
    arrays, found = checkpointer.restore(None, harness.abstract(kept))
  assert harness.same_bits(kept, arrays)
  assert found == {"open": [1, 2]}


def test_closing_waits_for_the_step_being_written(tmp_path, gate):
  writer = harness.opened(tmp_path)
  writer.save(1, harness.learner(3), {"n": 1})
  threading.Timer(0.2, gate.set).start()
  writer.close()
  with harness.opened(tmp_path) as reader:
    restored, host = reader.restore(None, harness.learner())
  assert host == {"n": 1} and harness.same_bits(harness.learner(3), restored)


FULL = r"step 2 cannot be written .*No space left on device.* good one is step 1\."


@pytest.fixture
def full(tmp_path, monkeypatch):
  """A checkpointer whose second step the disk did not take, and the patch."""

  def save(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  checkpointer = harness.opened(tmp_path, every_requests=10)
  checkpointer.save(1, harness.learner(1), {})
  checkpointer.wait()
  with monkeypatch.context() as patch:
    patch.setattr(orbax.checkpoint.CheckpointManager, "save", save)
    checkpointer.save(2, harness.learner(2), {})
    yield checkpointer, patch
  checkpointer.close()


def test_a_full_disk_is_said_at_the_next_step_which_is_due_at_once(full):
  checkpointer, patch = full
  end = time.monotonic() + 60
  while not checkpointer.due(3):
    assert time.monotonic() < end
  with pytest.raises(ValueError, match=FULL):
    checkpointer.save(3, harness.learner(3), {})
  assert checkpointer.steps() == [1] and not checkpointer.due(3)
  patch.undo()
  checkpointer.save(2, harness.learner(2), {})  # there is room again
  assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(
  "how",
  [
    lambda checkpointer: checkpointer.close(),
    lambda checkpointer: checkpointer.wait(),
    lambda checkpointer: checkpointer.restore(None, harness.learner()),
  ],
)
def test_a_full_disk_is_said_at_the_end(full, how):
  checkpointer, _ = full
  with pytest.raises(ValueError, match=FULL):
    how(checkpointer)
  checkpointer.wait()  # it is said once


_SAVE_TOO_MUCH = """
import resource, signal, sys
import numpy as np
from osd_jax import base, runs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails instead
rng = np.random.default_rng(0)
arrays = {f"x{i}": rng.normal(size=(200, 200)).astype(np.float32) for i in range(20)}
with runs.Checkpointer(runs.CheckpointConfig(sys.argv[1])) as writer:
  writer.save(1, arrays, {})
  writer.wait()
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
  writer.save(2, arrays, {})
  try:
    writer.wait()
  except base.InputError as error:
    print(error, file=sys.stderr)
"""


def test_a_write_that_fails_is_said_in_one_line(tmp_path):
  """Orbax and tensorstore would add a traceback for every array under way."""
  words = [sys.executable, "-c", _SAVE_TOO_MUCH, str(tmp_path)]
  run = subprocess.run(words, capture_output=True, text=True, check=True)
  assert "Traceback" not in run.stderr
  (line,) = run.stderr.splitlines()
  assert "step 2 cannot be written" in line and "File too large" in line
  assert "good one is step 1" in line


@pytest.mark.usefixtures("priorities")
def test_a_step_is_written_on_a_thread_that_gives_way(tmp_path, monkeypatch):
  niceness, described = [], leaves.described

  def noting(arrays):
    niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    return described(arrays)

  monkeypatch.setattr(leaves, "described", noting)
  own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, harness.learner(), {})
  assert niceness and niceness[0] > own
