"""A run killed by SIGKILL and started again ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy
import tiny_online

from osd_jax import runs

pytestmark = pytest.mark.slow

TIMES = ("_ms", "_ms_per_token", "_seconds", "learner_busy")  # as the clock has it
PATIENCE = 400  # seconds; seconds are needed, on a busy machine minutes


def start(pair_folder, run_directory, repository, kind="independent"):
  """The run as a process of its own, numerically set up like the tests."""
  paths = [str(repository), str(repository / "tests"), os.environ.get("PYTHONPATH", "")]
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # restarts compile nothing
  }
  script = repository / "tests" / "tiny_online.py"
  return subprocess.Popen(
    [sys.executable, str(script), str(pair_folder), str(run_directory), kind],
    env=environment,
    cwd=repository,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  )


def requests_in(path):
  if not path.exists():
    return 0
  return path.read_bytes().count(b'"kind": "request"')


def kill_at(process, log, count, delay):
  """Kills it `delay` seconds after `count` requests were logged."""
  end = time.monotonic() + PATIENCE
  try:
    while requests_in(log) < count and process.poll() is None:
      assert time.monotonic() < end, f"only {requests_in(log)} of {count} requests"
      time.sleep(0.002)
    time.sleep(delay)
  finally:  # nothing is left behind, whatever happens
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
  assert process.returncode == -signal.SIGKILL, errors.decode()[-2000:]


def finish(process):
  try:
    _, errors = process.communicate(timeout=PATIENCE)
  finally:
    process.kill()
  assert process.returncode == 0, errors.decode()[-2000:]


def timeless(path, kind):
  return [
    {name: value for name, value in row.items() if not name.endswith(TIMES)}
    for row in runs.read(path / "metrics.jsonl")
    if row["kind"] == kind
  ]


@pytest.mark.parametrize("kind", ["independent", "attached"])
def test_killed_three_times_it_ends_bit_equal(tmp_path, repository, kind):
  tiny_online.save_lively_pair(tmp_path)
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  finish(start(tmp_path, whole, repository, kind))

  rng = random.Random(0)
  # Before the first checkpoint, and at random moments between later ones.
  moments = [rng.randint(1, 4), rng.randint(7, 13), rng.randint(15, 21)]
  for moment in moments:
    process = start(tmp_path, killed, repository, kind)
    kill_at(process, killed / "metrics.jsonl", moment, rng.uniform(0, 0.01))
    assert requests_in(killed / "metrics.jsonl") < tiny_online.REQUESTS
    assert not (killed / "draft.safetensors").exists()
  names = [path.name for path in (killed / "checkpoints").iterdir()]
  steps = [int(name) for name in names if name.isdigit()]  # others are half written
  assert any(step < tiny_online.REQUESTS for step in steps)
  finish(start(tmp_path, killed, repository, kind))

  assert timeless(killed, "request") == timeless(whole, "request")
  assert timeless(killed, "update") == timeless(whole, "update")
  assert timeless(killed, "alarm") == timeless(whole, "alarm")
  queries = [row["query"] for row in timeless(killed, "request")]
  assert sorted(queries) == list(range(tiny_online.REQUESTS))
  found, wanted = (
    safetensors.numpy.load_file(path / "draft.safetensors") for path in (killed, whole)
  )
  assert found.keys() == wanted.keys()
  for name, tensor in wanted.items():
    np.testing.assert_array_equal(found[name], tensor)
  updates = timeless(whole, "update")
  assert [row["version"] for row in updates] == list(range(1, len(updates) + 1))
  if kind == "independent":
    first = safetensors.numpy.load_file(tmp_path / "draft.safetensors")
    assert any(not np.array_equal(first[name], wanted[name]) for name in first)


def test_a_signal_waits_for_the_step_and_leaves_a_checkpoint(tmp_path, repository):
  """Before the first one that would have come; nothing served is served again."""
  tiny_online.save_lively_pair(tmp_path)
  run = tmp_path / "run"
  process, end = start(tmp_path, run, repository), time.monotonic() + PATIENCE
  log = run / "metrics.jsonl"
  while requests_in(log) < 2 and process.poll() is None:
    assert time.monotonic() < end
    time.sleep(0.002)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=PATIENCE)
  assert process.returncode == -signal.SIGTERM, errors.decode()[-2000:]
  served = [row["query"] for row in timeless(run, "request")]
  (step,) = (path.name for path in (run / "checkpoints").iterdir())
  assert int(step) == len(served) < tiny_online.REQUESTS
  finish(start(tmp_path, run, repository))
  after = [row["query"] for row in timeless(run, "request")]
  assert after[: len(served)] == served
  assert sorted(after) == list(range(tiny_online.REQUESTS))
