"""Only one process may write to a run directory; a dead one holds no lock."""

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


def test_second_process_is_refused_and_a_killed_one_releases_the_lock(
  tmp_path, holder
):
  with pytest.raises(base.InputError, match=f"process {holder.pid} on .*--steps=7"):
    directory.lock(tmp_path)
  with pytest.raises(base.InputError, match=f"process {holder.pid}"):
    RunDirectory.start(tmp_path)
  assert not (tmp_path / "provenance.json").exists()
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  run = RunDirectory.start(tmp_path)  # takes over, though the file still names it
  said = attempt(tmp_path)
  assert f"process {os.getpid()} on" in said and "since" in said
  run.close()
  assert attempt(tmp_path) == "taken\n"


def test_lock_is_released_explicitly_and_when_it_is_deleted(tmp_path):
  held = directory.lock(tmp_path)
  held.release()
  held.release()
  again = directory.lock(tmp_path)
  with pytest.raises(base.InputError, match="is being written by process"):
    directory.lock(tmp_path)
  del again
  directory.lock(tmp_path)


def test_lock_without_a_name_is_held_by_another_process(tmp_path):
  held = directory.lock(tmp_path)
  (tmp_path / ".lock").write_text("")
  with pytest.raises(base.InputError, match="written by another process; wait"):
    directory.lock(tmp_path)
  held.release()
