"""Checkpoints are bit-exact and atomic; a step that cannot be used is skipped."""

import asyncio
import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from models import tiny

from osd_jax import background, base, runs, testing
from osd_jax.models import families, served
from osd_jax.runs import checkpoint


@flax.struct.dataclass
class Learner:
  params: dict
  opt_state: optax.OptState
  version: jax.Array


def learner(seed: int = 0) -> Learner:
  params = {
    "layers_0": {"kernel": jax.random.normal(jax.random.key(seed), (5, 7))},
    "rel": jnp.full((3,), 2.5, jnp.bfloat16),
  }
  return Learner(params, optax.adamw(1e-3).init(params), jnp.int32(seed))


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def have_same_bits(left, right) -> bool:
  def equal(a, b):
    bits = (np.asarray(x).tobytes() for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and len({*bits}) == 1

  return all(jax.tree.leaves(jax.tree.map(equal, left, right)))


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
    "state": learner(3),
  }
  with runs.Checkpointer(tmp_path) as writer:
    assert writer.restore(tree) is None
    writer.save(8, tree, {"stream": {"open": (1, 2)}})
    assert writer.resumed("request", 800) == ""
  with runs.Checkpointer(tmp_path) as reader:
    arrays, host = reader.restore(abstract(tree))
    where = f"continues at request 8 of 800 from checkpoint {tmp_path / '8'}"
    assert reader.resumed("request", 800) == where
  assert host == {"stream": {"open": [1, 2]}}
  assert have_same_bits(tree, arrays)
  assert jax.tree.structure(arrays) == jax.tree.structure(tree)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays))
  assert not have_same_bits(learner(4), learner(3))  # negative control


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
  with runs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, tree, {})
    arrays, _ = checkpointer.restore(tree)
  assert arrays["placed"].committed and arrays["placed"].devices() == {device}
  assert arrays["split"].sharding == split
  assert not arrays["free"].committed
  assert have_same_bits(tree, arrays)


def test_two_newest_steps_are_kept_and_due_counts_from_the_newest(tmp_path):
  with runs.Checkpointer(tmp_path, every=10) as checkpointer:
    assert [checkpointer.due(n) for n in (0, 9, 10, 13)] == [False, False, True, True]
    for step in (10, 23, 31, 31):  # a step that exists is not written again
      checkpointer.save(step, {"version": jnp.int32(step)}, {})
    assert checkpointer.steps() == [23, 31]
    assert not checkpointer.due(40) and checkpointer.due(41)
    assert int(checkpointer.restore({"version": jnp.int32(0)})[0]["version"]) == 31
    with pytest.raises(ValueError, match="step 30 is older than the last, 31"):
      checkpointer.save(30, {"version": jnp.int32(30)}, {})


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda t: t | {"a": jnp.zeros((2, 4))}, r"a: expected float32\[2, 4\], found"),
    (lambda t: t | {"a": jnp.zeros((2, 3), jnp.bfloat16)}, r"a: expected bfloat16"),
    (lambda t: t | {"c": jnp.zeros(1)}, r"c: expected float32\[1\], found nothing"),
    (lambda t: {"a": t["a"]}, r"b: expected nothing, found int32\[\]"),
    (None, "written with other weights of the target;"),
  ],
)
def test_checkpoint_of_another_run_is_refused_and_kept(tmp_path, change, words):
  tree = {"a": jnp.zeros((2, 3)), "b": jnp.int32(1)}
  with runs.Checkpointer(tmp_path, models={"target": tree}) as checkpointer:
    checkpointer.save(1, tree, {})
    checkpointer.save(2, tree, {})
  models = tree if change else {"a": tree["a"] + 1, "b": tree["b"]}
  with runs.Checkpointer(tmp_path, models={"target": models}) as checkpointer:
    with pytest.raises(ValueError, match=words):
      checkpointer.restore(change(tree) if change else tree)
    assert checkpointer.steps() == [1, 2]  # step 2 is not treated as damaged


def test_fingerprint_changes_with_the_weights():
  params = {"a": np.ones((3, 4), np.float32), "b": np.zeros(2, np.float32)}
  own = runs.fingerprint(params)
  assert own == runs.fingerprint(jax.tree.map(jnp.asarray, params))
  for change in ({"a": params["a"] * 2}, {"b": params["b"] + 1}):
    assert runs.fingerprint(params | change) != own


@pytest.mark.parametrize("shape", [testing.TINY_LLAMA, testing.TINY_T5])
def test_fingerprint_is_that_of_the_target_in_every_layout(shape):
  """Runs go on on another device, which stores the same target in another way."""
  first, other = (
    {
      layout: runs.fingerprint(served.taken(tiny.random_params(model, seed), *more))
      for layout in (base.Layout.TRAINED, base.Layout.SERVED, base.Layout.PACKED)
      for more in [("float32", layout)]
    }
    for model in [families.build(shape)]
    for seed in (0, 1)
  )
  assert len(set(first.values())) == len(set(other.values())) == 1
  assert first[base.Layout.PACKED] != other[base.Layout.PACKED]


def test_checkpoint_of_another_version_is_refused_and_not_set_aside(tmp_path):
  with runs.Checkpointer(tmp_path) as writer:
    writer.save(1, learner(), {})
  for path in (tmp_path / "1" / "host").iterdir():
    path.write_text(path.read_text().replace('"models"', '"fingerprint"'))
  with runs.Checkpointer(tmp_path) as reader:
    with pytest.raises(ValueError, match="by another version of osd_jax. Continue"):
      reader.restore(learner())
    assert reader.steps() == [1]


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


def _mix_up_arrays(step: Path) -> None:
  """Replaces the arrays by those of another step, which Orbax cannot detect."""
  shutil.rmtree(step / "arrays")
  shutil.copytree(step.parent / "1" / "arrays", step / "arrays")


@pytest.mark.parametrize("harm", [_truncate, _flip_bits, _lose_host, _mix_up_arrays])
def test_damaged_newest_step_is_skipped_with_a_warning(tmp_path, harm):
  noise = {"x": jax.random.normal(jax.random.key(0), (64, 64))}
  with runs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, noise, {"n": 1})
    checkpointer.save(2, {"x": -noise["x"]}, {"n": 2})
  harm(tmp_path / "2")
  with runs.Checkpointer(tmp_path) as checkpointer:
    with pytest.warns(RuntimeWarning, match="step 2 .*continuing from step 1"):
      arrays, host = checkpointer.restore(noise)
    assert host == {"n": 1} and have_same_bits(noise, arrays)
    checkpointer.save(2, noise, {"n": 22})  # the continued run writes step 2 again
    assert checkpointer.restore(noise)[1] == {"n": 22}


def test_no_readable_step_is_an_error_and_renames_nothing(tmp_path):
  tree = {"x": jnp.ones(4)}
  with runs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, tree, {})
    checkpointer.wait()
    _lose_host(tmp_path / "1")
    with pytest.raises(ValueError, match="no step .* can be used .*overwrite = True"):
      checkpointer.restore(tree)
    assert (tmp_path / "1").exists()


@pytest.fixture
def logged(tmp_path):
  """Checkpoints after 2 and after 4 of 5 rows of a log, and the log's path."""
  path = tmp_path / "metrics.jsonl"
  with runs.MetricsLog(path) as log, runs.Checkpointer(tmp_path / "c", 2, [log]) as c:
    for index in range(5):
      if index and not index % 2:
        c.save(index, {"x": jnp.zeros(1)}, {})
      log.append({"kind": "request", "index": index})
  return tmp_path / "c", path


def rows_after_restore(checkpoints, path):
  with runs.MetricsLog(path) as log, runs.Checkpointer(checkpoints, 2, [log]) as c:
    assert c.restore({"x": jnp.zeros(1)}) is not None
    return [row["index"] for row in runs.read(path)]


def test_logs_are_cut_to_the_rows_of_the_checkpoint(logged):
  assert rows_after_restore(*logged) == [0, 1, 2, 3]


@pytest.mark.parametrize("left", [3, 2])
def test_shortened_log_continues_from_the_newest_step_that_fits(logged, left):
  checkpoints, path = logged
  path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
  words = rf"step 4 .*metrics\.jsonl has {left} of the 4 rows.*continuing from step 2"
  with pytest.warns(RuntimeWarning, match=words):
    assert rows_after_restore(*logged) == [0, 1]
  assert rows_after_restore(*logged) == [0, 1]  # now without a warning


def test_lost_log_error_says_how_to_go_on(logged):
  checkpoints, path = logged
  path.unlink()
  words = r"step 4: .*has 0 of the 4 rows.*step 2: .*Put the files back.*overwrite"
  with pytest.raises(ValueError, match=words):
    rows_after_restore(*logged)
  assert sorted(p.name for p in checkpoints.iterdir()) == ["2", "4"]


def test_logs_are_emptied_if_there_is_no_checkpoint(tmp_path):
  with runs.MetricsLog(tmp_path / "m.jsonl") as log:
    log.append({"kind": "request"})
    with runs.Checkpointer(tmp_path / "c", logs=[log]) as checkpointer:
      assert checkpointer.restore({}) is None
    assert log.rows == log.path.stat().st_size == 0


@pytest.mark.parametrize(
  "arrays, words",
  [
    ({"n": 3}, "n is int"),
    ({"n": np.zeros(2)}, "n is float64"),
    ({"n": jax.random.key(0)}, "n is key"),
    ({"n": {"m": np.zeros(1, bool)}, "n.m": np.zeros(1, bool)}, "n.m is bool"),
  ],
)
def test_unsupported_values_are_refused_by_name(tmp_path, arrays, words):
  with runs.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match=words):
      checkpointer.save(1, arrays, {})
    assert not checkpointer.steps()


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
  target = {"x": np.zeros((128, 128), np.int32)}
  with subprocess.Popen(
    [sys.executable, "-c", _SAVE_FOREVER, str(tmp_path)],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as process:
    assert process.stdout is not None
    done = [int(process.stdout.readline()) for _ in range(3)]
    # Kill at a random time during a later save.
    time.sleep(np.random.default_rng().uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    done += map(int, process.stdout.read().split())
  with runs.Checkpointer(tmp_path) as reader:
    # A warning about a damaged step would fail the test.
    arrays, host = reader.restore(target)
  assert host["step"] in (done[-1], done[-1] + 1)
  assert np.all(np.asarray(arrays["x"]) == host["step"])


# --- Writing in the background --------------------------------------------------------


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
  with runs.Checkpointer(tmp_path, every=10) as checkpointer:
    checkpointer.save(10, learner(), {})
    assert not checkpointer.due(19) and checkpointer.due(20)
    assert not (tmp_path / "10").exists()
    gate.set()
    checkpointer.wait()
    assert (tmp_path / "10").exists()
    assert not checkpointer.due(19) and checkpointer.due(20)


def test_save_and_close_wait_for_the_previous_step(tmp_path, gate):
  checkpointer = runs.Checkpointer(tmp_path)
  checkpointer.save(1, learner(1), {})
  threading.Timer(0.2, gate.set).start()
  checkpointer.save(2, learner(2), {})
  assert (tmp_path / "1").exists()
  gate.clear()
  threading.Timer(0.2, gate.set).start()
  checkpointer.close()
  with runs.Checkpointer(tmp_path) as reader:
    assert reader.steps() == [1, 2]
    assert have_same_bits(learner(2), reader.restore(learner())[0])


def test_changes_after_save_do_not_affect_the_saved_step(tmp_path, gate):
  donating = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
  tree = {"host": np.arange(5.0, dtype=np.float32), "device": jnp.arange(1000.0)}
  kept, host = jax.tree.map(np.array, tree), {"open": [1, 2]}
  with runs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, tree, host)
    tree["host"][:] = -1
    host["open"].append(3)
    changed = donating(tree["device"])
    assert tree["device"].is_deleted() and float(changed[0]) == 1
    gate.set()
    arrays, found = checkpointer.restore(abstract(kept))
  assert have_same_bits(kept, arrays)
  assert found == {"open": [1, 2]}


FULL = r"step 2 cannot be written .*No space left on device.* good one is step 1\."


@pytest.fixture
def full(tmp_path, monkeypatch):
  """A checkpointer whose second step failed, and the patch that fills the disk."""

  def save(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  checkpointer = runs.Checkpointer(tmp_path, every=10)
  checkpointer.save(1, learner(1), {})
  checkpointer.wait()
  with monkeypatch.context() as patch:
    patch.setattr(orbax.checkpoint.CheckpointManager, "save", save)
    checkpointer.save(2, learner(2), {})
    yield checkpointer, patch
  checkpointer.close()


def test_full_disk_makes_save_due_at_once_and_raise(full):
  checkpointer, patch = full
  end = time.monotonic() + 60
  while not checkpointer.due(3):
    assert time.monotonic() < end
  with pytest.raises(ValueError, match=FULL):
    checkpointer.save(3, learner(3), {})
  assert checkpointer.steps() == [1] and not checkpointer.due(3)
  patch.undo()
  checkpointer.save(2, learner(2), {})  # the disk has space again
  assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(
  "how",
  [
    lambda checkpointer: checkpointer.close(),
    lambda checkpointer: checkpointer.wait(),
    lambda checkpointer: checkpointer.restore(learner()),
  ],
)
def test_full_disk_is_raised_by_close_wait_and_restore(full, how):
  checkpointer, _ = full
  with pytest.raises(ValueError, match=FULL):
    how(checkpointer)
  checkpointer.wait()  # the error is raised only once


_FAIL_TWICE = """
import os, pathlib, resource, signal, sys, warnings
import numpy as np
from osd_jax import base, runs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails instead
rng = np.random.default_rng(0)
arrays = {f"x{i}": rng.normal(size=(200, 200)).astype(np.float32) for i in range(20)}
path = pathlib.Path(sys.argv[1])
with runs.Checkpointer(path) as writer:
  writer.save(1, arrays, {})
  writer.save(2, arrays, {})
  writer.wait()
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
  writer.save(3, arrays, {})
  try:
    writer.wait()
  except base.InputError as error:
    print(error)
  resource.setrlimit(resource.RLIMIT_FSIZE, limit)
largest = max((path / "2/arrays").rglob("*"), key=lambda p: p.stat().st_size)
os.truncate(largest, largest.stat().st_size // 2)
warnings.showwarning = lambda message, *_: print(message)
with runs.Checkpointer(path) as reader:
  reader.restore(arrays)
"""


def test_failed_write_and_failed_read_print_one_line_each(tmp_path):
  """Orbax would print a traceback for every further array."""
  words = [sys.executable, "-c", _FAIL_TWICE, str(tmp_path)]
  run = subprocess.run(words, capture_output=True, text=True, check=True)
  assert not run.stderr
  wrote, read = run.stdout.splitlines()
  assert "step 3 cannot be written" in wrote and "File too large" in wrote
  assert "good one is step 2" in wrote
  assert "step 2 " in read and "continuing from step 1" in read


@pytest.mark.parametrize("file, count", [("orbax/arrays.py", 0), ("own.py", 1)])
def test_only_orbax_tasks_that_nobody_awaited_are_not_reported(file, count, caplog):
  """Such a task reports its error when it is freed, often after the failure."""
  names = {}
  exec(compile("async def fail(): raise OSError('cut short')", file, "exec"), names)
  with pytest.raises(OSError, match="first"), checkpoint._without_echoes():
    raise OSError("first")
  loop = asyncio.new_event_loop()
  loop.run_until_complete(asyncio.wait([loop.create_task(names["fail"]())]))
  loop.close()
  gc.collect()
  assert len([record for record in caplog.records if record.name == "asyncio"]) == count


@pytest.mark.usefixtures("priorities")
def test_steps_are_written_at_low_priority_and_their_memory_is_returned(
  tmp_path, monkeypatch
):
  """A step's copy is as large as the learner, and is freed when it is on disk."""
  niceness = lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
  own, seen = niceness(), []
  returned = lambda: seen.append(((tmp_path / "1").exists(), niceness() > own))
  monkeypatch.setattr(background, "return_memory", returned)
  with runs.Checkpointer(tmp_path, 1) as saved:
    saved.save(1, {"a": jnp.zeros(3)}, {})
  assert seen == [(True, True)]
