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


def test_second_process_is_refused_and_a_killed_one_releases_the_lock(tmp_path):
  words = [sys.executable, "-c", HOLD, str(tmp_path), "--steps=7"]
  with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(base.InputError, match=f"process {holder.pid} on .*--steps=7"):
      RunDirectory.start(tmp_path)
    assert not (tmp_path / "provenance.json").exists()
    holder.send_signal(signal.SIGKILL)
  # The lock file still names the killed process, but the lock itself is free.
  RunDirectory.start(tmp_path).close()


def test_lock_is_released_by_close_and_by_garbage_collection(tmp_path):
  held = directory.lock(tmp_path)
  with pytest.raises(base.InputError, match=f"process {os.getpid()} on .*since"):
    directory.lock(tmp_path)
  (tmp_path / ".lock").write_text("")
  with pytest.raises(base.InputError, match="written by another process; wait"):
    directory.lock(tmp_path)
  held.release()
  held.release()
  again = directory.lock(tmp_path)
  del again
  directory.lock(tmp_path)
