"""The job files of experiments/pods: the command that they run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from osd_jax import main as cli
from osd_jax.main import commands

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "pods"


def run(tmp_path, *words, **environment):
  """Runs run.sh with a stand-in for `osd` that prints its arguments."""
  (tmp_path / "osd").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
  (tmp_path / "osd").chmod(0o755)
  path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
  return subprocess.run(
    ["bash", str(FOLDER / "run.sh"), *words],
    env={"PATH": path, **environment},
    capture_output=True,
    text=True,
  )


ALL = {"CHECKPOINTS": "/w", "DATA_DIR": "/d", "RUNS": "/r", "ROWS": "32"}
ALL |= {"DATA": "4", "MODEL": "4"}


@pytest.mark.parametrize("missing", ALL)
def test_missing_variable_is_named(tmp_path, missing):
  result = run(tmp_path, **{name: ALL[name] for name in ALL if name != missing})
  assert result.returncode and missing in result.stderr


def test_scripts_run_an_existing_command(tmp_path, unprepared, capsys):
  """A dry run reads the settings and fails if one does not exist."""
  words = run(tmp_path, "--multihost", **ALL).stdout.splitlines()
  assert words[0] in commands.JOINED and words[-1] == "--multihost"
  assert cli.main([*words[:-1], "--dry_run"]) == 0
  printed = capsys.readouterr().out
  for expected in ("PartitionConfig.model = 4", "DecodingConfig.rows = 32"):
    assert expected in printed


def test_scripts_pass_valid_settings():
  for path in FOLDER.glob("*.sh"):
    if "run.sh" in (text := path.read_text()).partition("set -euo")[2]:
      assert all(re.search(rf"\b{name}=", text) for name in ALL), path
