"""Checkpoints: bit-exact, atomic, checked, and forgiving of a damaged last step."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import harness

from osd_jax import runs


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
  bits = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
  tree = {
    "float32": bits.view(np.float32),  # NaN payloads and denormals included
    "bfloat16": jnp.asarray(bits.view(np.uint16)).view(jnp.bfloat16),
    "uint16": jnp.asarray(bits.view(np.uint16)),
    "int32": bits.view(np.int32),
    "uint32": jnp.uint32(4_000_000_000),
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


def test_structure_of_dataclasses_and_optimiser_state_comes_back(tmp_path):
  learner = harness.learner(3)
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(8, learner, {"stream": {"index": 8, "open": [1, 2]}})
    restored, host = checkpointer.restore(8, harness.abstract(harness.learner(0)))
  assert isinstance(restored, harness.Learner)
  assert jax.tree.structure(restored) == jax.tree.structure(learner)
  assert harness.same_bits(learner, restored)
  assert not harness.same_bits(harness.learner(4), restored)  # the comparison can fail
  assert host["stream"]["open"] == [1, 2]


def test_the_sharding_of_the_target_is_honoured(tmp_path):
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


def test_newest_steps_are_kept_and_due_counts_from_the_newest(tmp_path):
  with harness.opened(tmp_path, keep=2, every_requests=10) as checkpointer:
    assert checkpointer.latest_step() is None
    assert [checkpointer.due(n) for n in (0, 9, 10, 13)] == [False, False, True, True]
    for step in (10, 23, 31):
      checkpointer.save(step, harness.learner(step), {})
    assert checkpointer.steps() == [23, 31]
    assert not checkpointer.due(40) and checkpointer.due(41)
    assert int(checkpointer.restore(23, harness.learner())[0].version) == 23
    assert int(checkpointer.restore(None, harness.learner())[0].version) == 31


def test_a_resumed_run_says_from_where(tmp_path):
  with harness.opened(tmp_path) as checkpointer:
    assert checkpointer.resumed("request", 800) == ""
    checkpointer.save(300, harness.learner(), {})
    checkpointer.restore(None, harness.learner())
    said = checkpointer.resumed("request", 800)
  where = tmp_path / "300"
  assert said == f"continues at request 300 of 800 from checkpoint {where}"


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda t: t | {"a": jnp.zeros((2, 4))}, r"a: expected float32\[2, 4\], found"),
    (lambda t: t | {"a": jnp.zeros((2, 3), jnp.bfloat16)}, r"a: expected bfloat16"),
    (lambda t: t | {"c": jnp.zeros(1)}, r"c: expected float32\[1\], found nothing"),
    (lambda t: {"a": t["a"]}, r"b: expected nothing, found int32\[\]"),
  ],
)
def test_a_target_that_does_not_fit_is_named(tmp_path, change, words):
  tree = {"a": jnp.zeros((2, 3)), "b": jnp.int32(1)}
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, tree, {})
    checkpointer.save(2, tree, {})
    with pytest.raises(ValueError, match=words):
      checkpointer.restore(None, change(tree))
    assert checkpointer.steps() == [1, 2]  # a misfit is no damage


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
  """Files that Orbax finds nothing wrong with."""
  _lose_arrays(step)
  shutil.copytree(step.parent / "1" / "arrays", step / "arrays", dirs_exist_ok=True)


@pytest.mark.parametrize(
  "harm", [_truncate, _flip_bits, _lose_host, _lose_arrays, _mix_up_arrays]
)
def test_a_damaged_newest_step_is_skipped_with_a_warning(tmp_path, harm):
  noise = {"x": jax.random.normal(jax.random.key(0), (64, 64))}
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(1, noise, {"n": 1})
    checkpointer.save(2, {"x": -noise["x"]}, {"n": 2})
  harm(tmp_path / "2")
  with harness.opened(tmp_path) as checkpointer:
    with pytest.warns(RuntimeWarning, match="step 2 .*continuing from step 1"):
      arrays, host = checkpointer.restore(None, noise)
    assert host == {"n": 1} and harness.same_bits(noise, arrays)
    checkpointer.save(2, noise, {"n": 22})  # the run goes on and writes it anew
    assert checkpointer.restore(None, noise)[1] == {"n": 22}


def test_nothing_readable_is_an_error_and_moves_nothing(tmp_path):
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
    ({"n": np.zeros(2, np.int32)}, {"x": {1, 2}}, "no JSON"),
  ],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path, arrays, host, words):
  with harness.opened(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match=words):
      checkpointer.save(1, arrays, host)
    assert checkpointer.latest_step() is None


def test_a_step_is_never_written_behind_a_newer_one(tmp_path):
  with harness.opened(tmp_path) as checkpointer:
    checkpointer.save(5, {"x": jnp.ones(1)}, {})
    for step in (5, 4, -1):
      with pytest.raises(ValueError, match=f"received step {step}"):
        checkpointer.save(step, {"x": jnp.ones(1)}, {})


@pytest.mark.parametrize(
  "change", [{"directory": ""}, {"keep": 0}, {"every_requests": 0}, {"keep": 1.5}]
)
def test_config_refuses_bad_values(change):
  name = next(iter(change))
  with pytest.raises(ValueError, match=f"CheckpointConfig.{name}: received"):
    runs.CheckpointConfig(**{"directory": "x", **change})


_SAVE_FOREVER = """
import sys
import numpy as np
from osd_jax import runs
with runs.Checkpointer(runs.CheckpointConfig(sys.argv[1])) as writer:
  for step in range(1, 10_000):
    writer.save(step, {"x": np.full((128, 128), step, np.int32)}, {"step": step})
    writer.wait()
    print(step, flush=True)
"""


@pytest.mark.filterwarnings("error")
def test_a_killed_writer_leaves_only_whole_steps(tmp_path):
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
      time.sleep(rng.uniform(0, 0.1))  # somewhere inside a later save
      process.send_signal(signal.SIGKILL)
      done = max([done, *map(int, process.stdout.read().split())])
    with harness.opened(path) as reader:
      arrays, host = reader.restore(None, target)  # a warning would be an error
    assert host["step"] in (done, done + 1)
    assert np.all(np.asarray(arrays["x"]) == host["step"])
