"""Outputs that cannot be written are refused before the work starts."""

import errno
import os
import shutil
import tempfile
import types

import numpy as np
import pytest

from osd_jax import base, runs
from osd_jax.report import page


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
  """A working directory with a file and a folder that is not empty."""
  (tmp_path / "file").touch()
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "file").touch()
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "link_to_pipe").symlink_to("pipe")
  (tmp_path / "link_to_nothing").symlink_to("file/x")
  monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
  ("kind", "path", "reason"),
  [
    ("file", "", "it is empty"),
    ("file", " ", "it is empty"),
    ("file", "a\0b", "NUL"),
    ("file", ".", "it is a folder"),
    ("file", "full", "it is a folder"),
    ("file", "file/x", "file is not a folder"),
    ("file", "/dev/full", "it is a device"),
    ("file", "pipe", "it is a device, a pipe"),
    ("file", "link_to_pipe", "it is a device, a pipe"),
    ("file", "link_to_nothing", "file is not a folder"),
    ("file", "x" * 300 + "/y", "File name too long"),
    ("folder", "file", "it is a file"),
    ("folder", "file/x", "file is not a folder"),
    ("new folder", "full", "exists already and is not empty"),
  ],
)
def test_unusable_path_is_refused_in_one_line(kind, path, reason):
  before = sorted(os.listdir())
  with pytest.raises(base.InputError) as caught:
    runs.check_output("--save", path, kind)
  message = str(caught.value)
  assert message.startswith(f"--save: received {path!r}, expected a {kind.split()[-1]}")
  assert reason in message and "\n" not in message
  assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
  ("kind", "path"),
  [
    ("file", "new"),
    ("file", "file"),
    ("file", "a/b/new"),
    ("folder", "full"),
    ("folder", "a/b"),
    ("new folder", "a/b"),
    ("file", "memory://bucket/file"),
  ],
)
def test_usable_path_is_accepted_and_not_created(kind, path):
  before = sorted(os.listdir())
  runs.check_output("--save", path, kind)
  assert sorted(os.listdir()) == before


def test_read_only_folder_is_refused(monkeypatch):
  """Simulated, because the superuser can write to every folder."""

  def refuse(dir):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))

  monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
  for kind, path in (("file", "new"), ("folder", "full"), ("new folder", "a")):
    with pytest.raises(base.InputError, match=r"cannot be written to \(Read-only file"):
      runs.check_output("--save", path, kind)


def test_too_little_disk_space_is_refused(monkeypatch):
  usage = shutil._ntuple_diskusage(10**9, 10**9 - 10**8, 10**8)
  monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
  runs.check_output("--save", "new", needed_bytes=99_000_000)
  with pytest.raises(base.InputError, match="needs about 1,234 MB and 100 MB are free"):
    runs.check_output("--save", "new", needed_bytes=1_234_000_000)


def test_run_needs_space_for_three_checkpoints(monkeypatch):
  usage = shutil._ntuple_diskusage(10**9, 10**9 - 10**8, 10**8)
  monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
  config = types.SimpleNamespace(run_directory="new")
  runs.check_space(config, {"draft": np.zeros(33_000_000, bool)})
  words = r"run_directory: received 'new', .* needs about 102 MB and 100 MB are free"
  with pytest.raises(base.InputError, match=words):
    runs.check_space(config, {"draft": np.zeros(34_000_000, bool)})


def test_comparison_into_a_file_is_refused_before_it_is_made():
  with pytest.raises(base.InputError, match="--output: received 'file', .*is a file"):
    page.compare(["full", "other"], "file")
