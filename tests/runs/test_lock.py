"""Only one process can write to a run directory; a killed process frees its lock."""

import os
import signal
import subprocess
import sys

import pytest

from osd_jax import base
from osd_jax.runs import RunDirectory, directory

HOLD = """
import pathlib, sys, time
from osd_jax.runs import directory
held = directory.lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""
TRY = """
import pathlib, sys
from osd_jax import base
from osd_jax.runs import directory
try:
  directory.lock(pathlib.Path(sys.argv[1]))
  print("taken")
except base.InputError as error:
  print(error)
"""


def attempt(folder) -> str:
  """Tries to lock the folder from another process; returns its output."""
  words = [sys.executable, "-c", TRY, str(folder)]
  return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock."""
  words = [sys.executable, "-c", HOLD, str(tmp_path), "--steps=7"]
  with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()


def test_second_process_is_refused_and_a_killed_one_releases_the_lock(tmp_path, holder):
  with pytest.raises(base.InputError, match=f"process {holder.pid} on .*--steps=7"):
    directory.lock(tmp_path)
  with pytest.raises(base.InputError, match=f"process {holder.pid}"):
    RunDirectory.start(tmp_path)
  assert not (tmp_path / "provenance.json").exists()
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  # The lock file still names the killed process, but the lock itself is free.
  run = RunDirectory.start(tmp_path)
  message = attempt(tmp_path)
  assert f"process {os.getpid()} on" in message and "since" in message
  run.close()
  assert attempt(tmp_path) == "taken\n"


def test_lock_is_released_by_release_and_by_garbage_collection(tmp_path):
  held = directory.lock(tmp_path)
  held.release()
  held.release()
  again = directory.lock(tmp_path)
  with pytest.raises(base.InputError, match="is being written by process"):
    directory.lock(tmp_path)
  del again
  directory.lock(tmp_path)


def test_empty_lock_file_is_reported_as_another_process(tmp_path):
  held = directory.lock(tmp_path)
  (tmp_path / ".lock").write_text("")
  with pytest.raises(base.InputError, match="written by another process; wait"):
    directory.lock(tmp_path)
  held.release()
