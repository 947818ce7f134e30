"""Checkpoints are bit-exact and atomic; a damaged newest step is skipped."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from runs import harness

from osd_jax.runs import checkpoint


def test_every_dtype_is_restored_bit_exactly(tmp_path):
  bits = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
  tree = {
    "float32": bits.view(np.float32),  # NaN payloads and denormals included
    "bfloat16": jnp.asarray(bits.view(np.uint16)).view(jnp.bfloat16),
    "uint16": jnp.asarray(bits.view(np.uint16)),
    "int32": bits.view(np.int32),
    "uint32": jnp.uint32(4_000_000_000),  # larger than any int32
    "bool": jnp.asarray(bits % 2 == 0),
    "empty": jnp.zeros((0, 4)),
  }
  with harness.opened(tmp_path) as writer:
    writer.save(1, tree, {"position": 3})
  with harness.opened(tmp_path) as reader:
    arrays, host = reader.restore(None, harness.abstract(tree))
  assert host == {"position": 3}
  assert harness.same_bits(tree, arrays)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays))


def test_dataclasses_and_optimiser_state_are_restored(tmp_path):
  learner = harness.learner(3)
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(8, learner, {"stream": {"index": 8, "open": [1, 2]}})
    restored, host = checkpointer.restore(8, harness.abstract(harness.learner(0)))
  assert isinstance(restored, harness.Learner)
  assert jax.tree.structure(restored) == jax.tree.structure(learner)
  assert harness.same_bits(learner, restored)
  assert not harness.same_bits(harness.learner(4), restored)  # negative control
  assert host["stream"]["open"] == [1, 2]


def test_arrays_are_restored_with_the_requested_sharding(tmp_path):
  device = jax.devices()[-1]
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  values = jnp.arange(8.0)
  tree = {
    "free": values,
    "placed": jax.device_put(values, device),
    "split": jax.device_put(values, split),
  }
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, tree, {})
    arrays, _ = checkpointer.restore(1, tree)
  assert arrays["placed"].committed and arrays["placed"].devices() == {device}
  assert arrays["split"].sharding == split
  assert not arrays["free"].committed
  assert harness.same_bits(tree, arrays)


def test_two_newest_steps_are_kept_and_due_counts_from_the_newest(tmp_path):
  with harness.opened(tmp_path, every=10) as checkpointer:
    assert checkpointer.latest_step() is None
    assert [checkpointer.due(n) for n in (0, 9, 10, 13)] == [False, False, True, True]
    for step in (10, 23, 31):
      checkpointer.save(step, harness.learner(step), {})
    assert checkpointer.steps() == [23, 31]
    assert not checkpointer.due(40) and checkpointer.due(41)
    assert int(checkpointer.restore(23, harness.learner())[0].version) == 23
    assert int(checkpointer.restore(None, harness.learner())[0].version) == 31


def test_resumed_message_names_step_and_folder(tmp_path):
  with harness.opened(tmp_path) as checkpointer:
    assert checkpointer.resumed("request", 800) == ""
    checkpointer.save(300, harness.learner(), {})
    checkpointer.restore(None, harness.learner())
    message = checkpointer.resumed("request", 800)
  where = tmp_path / "300"
  assert message == f"continues at request 300 of 800 from checkpoint {where}"


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda t: t | {"a": jnp.zeros((2, 4))}, r"a: expected float32\[2, 4\], found"),
    (lambda t: t | {"a": jnp.zeros((2, 3), jnp.bfloat16)}, r"a: expected bfloat16"),
    (lambda t: t | {"c": jnp.zeros(1)}, r"c: expected float32\[1\], found nothing"),
    (lambda t: {"a": t["a"]}, r"b: expected nothing, found int32\[\]"),
  ],
)
def test_mismatched_structure_error_names_the_array(tmp_path, change, words):
  tree = {"a": jnp.zeros((2, 3)), "b": jnp.int32(1)}
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, tree, {})
    checkpointer.save(2, tree, {})
    with pytest.raises(ValueError, match=words):
      checkpointer.restore(None, change(tree))
    assert checkpointer.steps() == [1, 2]  # step 2 is not treated as damaged


def _truncate(step: Path) -> None:
  largest = max((step / "arrays").rglob("*"), key=lambda p: p.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)


def _flip_bits(step: Path) -> None:
  for path in (step / "arrays").rglob("d/*"):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 0xFF
    path.write_bytes(bytes(data))


def _lose_host(step: Path) -> None:
  for path in (step / "host").iterdir():
    path.unlink()


def _lose_arrays(step: Path) -> None:
  for path in sorted((step / "arrays").rglob("*"), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()


def _mix_up_arrays(step: Path) -> None:
  """Replaces the arrays by those of another step, which Orbax cannot detect."""
  _lose_arrays(step)
  shutil.copytree(step.parent / "1" / "arrays", step / "arrays", dirs_exist_ok=True)


@pytest.mark.parametrize(
  "harm", [_truncate, _flip_bits, _lose_host, _lose_arrays, _mix_up_arrays]
)
def test_damaged_newest_step_is_skipped_with_a_warning(tmp_path, harm):
  noise = {"x": jax.random.normal(jax.random.key(0), (64, 64))}
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, noise, {"n": 1})
    checkpointer.save(2, {"x": -noise["x"]}, {"n": 2})
  harm(tmp_path / "2")
  with harness.opened(tmp_path) as checkpointer:
    with pytest.warns(RuntimeWarning, match="step 2 .*continuing from step 1"):
      arrays, host = checkpointer.restore(None, noise)
    assert host == {"n": 1} and harness.same_bits(noise, arrays)
    checkpointer.save(2, noise, {"n": 22})  # the continued run writes step 2 again
    assert checkpointer.restore(None, noise)[1] == {"n": 22}


def test_no_readable_step_is_an_error_and_renames_nothing(tmp_path):
  tree = {"x": jnp.ones(4)}
  with harness.opened(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="expected one of \\[\\]"):
      checkpointer.restore(None, tree)
    checkpointer.save(1, tree, {})
    checkpointer.wait()
    _lose_host(tmp_path / "1")
    with pytest.raises(ValueError, match="no readable step"):
      checkpointer.restore(None, tree)
    assert (tmp_path / "1").exists()


@pytest.mark.parametrize(
  "arrays, host, words",
  [
    ({"n": 3}, {}, "received int at n"),
    ({"n": np.zeros(2)}, {}, "received float64 array at n"),
    ({"n": jax.random.key(0)}, {}, "at n, expected an array"),
    ({}, {}, "expected at least one leaf"),
    ({"n": np.zeros(2, np.int32)}, {"x": {1, 2}}, "not JSON"),
  ],
)
def test_unsupported_values_are_refused_by_name(tmp_path, arrays, host, words):
  with harness.opened(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match=words):
      checkpointer.save(1, arrays, host)
    assert checkpointer.latest_step() is None


def test_older_step_numbers_are_refused(tmp_path):
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(5, {"x": jnp.ones(1)}, {})
    for step in (5, 4, -1):
      with pytest.raises(ValueError, match=f"received step {step}"):
        checkpointer.save(step, {"x": jnp.ones(1)}, {})


_SAVE_FOREVER = """
import sys
import numpy as np
from osd_jax import runs
with runs.Checkpointer(sys.argv[1]) as writer:
  for step in range(1, 10_000):
    writer.save(step, {"x": np.full((128, 128), step, np.int32)}, {"step": step})
    writer.wait()
    print(step, flush=True)
"""


@pytest.mark.filterwarnings("error")
def test_killed_writer_leaves_only_complete_steps(tmp_path):
  rng = np.random.default_rng(0)
  target = {"x": np.zeros((128, 128), np.int32)}
  done = 0
  for attempt in range(2):
    path = tmp_path / str(attempt)
    with subprocess.Popen(
      [sys.executable, "-c", _SAVE_FOREVER, str(path)],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    ) as process:
      assert process.stdout is not None
      for _ in range(3):
        done = int(process.stdout.readline())
      time.sleep(rng.uniform(0, 0.1))  # kill at a random time during a later save
      process.send_signal(signal.SIGKILL)
      done = max([done, *map(int, process.stdout.read().split())])
    with harness.opened(path) as reader:
      # A warning about a damaged step would fail the test.
      arrays, host = reader.restore(None, target)
    assert host["step"] in (done, done + 1)
    assert np.all(np.asarray(arrays["x"]) == host["step"])


# --- Writing in the background ---------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
  """An event that blocks the writing of steps until it is set."""
  opened, save = threading.Event(), orbax.checkpoint.CheckpointManager.save

  def held(manager, *arguments, **named):
    assert opened.wait(20)
    return save(manager, *arguments, **named)

  monkeypatch.setattr(orbax.checkpoint.CheckpointManager, "save", held)
  yield opened
  opened.set()


def test_due_does_not_wait_for_the_step_being_written(tmp_path, gate):
  with harness.opened(tmp_path, every=10) as checkpointer:
    checkpointer.save(10, harness.learner(), {})
    assert not checkpointer.due(19) and checkpointer.due(20)
    assert not (tmp_path / "10").exists()
    gate.set()
    checkpointer.wait()
    assert (tmp_path / "10").exists()
    assert not checkpointer.due(19) and checkpointer.due(20)


def test_save_waits_for_the_previous_step(tmp_path, gate):
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, harness.learner(), {})
    threading.Timer(0.2, gate.set).start()
    checkpointer.save(2, harness.learner(), {})
    assert (tmp_path / "1").exists()
    assert checkpointer.steps() == [1, 2]


def test_changes_after_save_do_not_affect_the_saved_step(tmp_path, gate):
  donating = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
  tree = {"host": np.arange(5.0, dtype=np.float32), "device": jnp.arange(1000.0)}
  kept, host = jax.tree.map(np.array, tree), {"open": [1, 2]}
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, tree, host)
    tree["host"][:] = -1
    host["open"].append(3)
    changed = donating(tree["device"])
    assert tree["device"].is_deleted() and float(changed[0]) == 1
    gate.set()
    arrays, found = checkpointer.restore(None, harness.abstract(kept))
  assert harness.same_bits(kept, arrays)
  assert found == {"open": [1, 2]}


def test_close_waits_for_the_step_being_written(tmp_path, gate):
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
  """A checkpointer whose second step failed, and the patch that fills the disk."""

  def save(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  checkpointer = harness.opened(tmp_path, every=10)
  checkpointer.save(1, harness.learner(1), {})
  checkpointer.wait()
  with monkeypatch.context() as patch:
    patch.setattr(orbax.checkpoint.CheckpointManager, "save", save)
    checkpointer.save(2, harness.learner(2), {})
    yield checkpointer, patch
  checkpointer.close()


def test_full_disk_makes_save_due_at_once_and_raise(full):
  checkpointer, patch = full
  end = time.monotonic() + 60
  while not checkpointer.due(3):
    assert time.monotonic() < end
  with pytest.raises(ValueError, match=FULL):
    checkpointer.save(3, harness.learner(3), {})
  assert checkpointer.steps() == [1] and not checkpointer.due(3)
  patch.undo()
  checkpointer.save(2, harness.learner(2), {})  # the disk has space again
  assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(
  "how",
  [
    lambda checkpointer: checkpointer.close(),
    lambda checkpointer: checkpointer.wait(),
    lambda checkpointer: checkpointer.restore(None, harness.learner()),
  ],
)
def test_full_disk_is_raised_by_close_wait_and_restore(full, how):
  checkpointer, _ = full
  with pytest.raises(ValueError, match=FULL):
    how(checkpointer)
  checkpointer.wait()  # the error is raised only once


_SAVE_TOO_MUCH = """
import resource, signal, sys
import numpy as np
from osd_jax import base, runs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails instead
rng = np.random.default_rng(0)
arrays = {f"x{i}": rng.normal(size=(200, 200)).astype(np.float32) for i in range(20)}
with runs.Checkpointer(sys.argv[1]) as writer:
  writer.save(1, arrays, {})
  writer.wait()
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
  writer.save(2, arrays, {})
  try:
    writer.wait()
  except base.InputError as error:
    print(error, file=sys.stderr)
"""


def test_failed_write_prints_one_line(tmp_path):
  """Orbax would print a traceback for every further array."""
  words = [sys.executable, "-c", _SAVE_TOO_MUCH, str(tmp_path)]
  run = subprocess.run(words, capture_output=True, text=True, check=True)
  assert "Traceback" not in run.stderr
  (line,) = run.stderr.splitlines()
  assert "step 2 cannot be written" in line and "File too large" in line
  assert "good one is step 1" in line


@pytest.mark.usefixtures("priorities")
def test_steps_are_written_on_a_low_priority_thread(tmp_path, monkeypatch):
  niceness, described = [], checkpoint._described

  def noting(arrays):
    niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    return described(arrays)

  monkeypatch.setattr(checkpoint, "_described", noting)
  own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, harness.learner(), {})
  assert niceness and niceness[0] > own
