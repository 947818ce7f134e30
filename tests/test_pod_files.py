"""The job files of experiments/pods: their syntax, and the command that they run."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from osd_jax import main as cli
from osd_jax.main import commands

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "pods"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(path):
  assert path.read_text().startswith("#!/usr/bin/env bash\n# ")
  assert "set -euo pipefail" in path.read_text()
  subprocess.run(["bash", "-n", str(path)], check=True)


def test_broken_script_is_detected(tmp_path):
  (tmp_path / "broken.sh").write_text("if true; then\n")
  done = subprocess.run(
    ["bash", "-n", str(tmp_path / "broken.sh")], capture_output=True
  )
  assert done.returncode


def test_sky_task_is_valid():
  task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
  assert task["num_nodes"] == 2 and "H100" in task["resources"]["accelerators"]
  subprocess.run(["bash", "-n", "-c", task["run"]], check=True)


def given(tmp_path, *words, **environment):
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
  done = given(tmp_path, **{name: ALL[name] for name in ALL if name != missing})
  assert done.returncode and missing in done.stderr


def test_scripts_run_an_existing_command(tmp_path, unprepared, capsys):
  """A dry run reads the settings, so all of them exist."""
  words = given(tmp_path, "--multihost", **ALL).stdout.splitlines()
  assert words[0] in commands.JOINED and words[-1] == "--multihost"
  assert cli.main([*words[:-1], "--dry_run"]) == 0
  printed = capsys.readouterr().out
  for expected in ("PartitionConfig.model = 4", "DecodingConfig.rows = 32"):
    assert expected in printed


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_valid_settings(path):
  text = path.read_text()
  if "run.sh" not in text.partition("set -euo")[2]:
    return
  assert all(re.search(rf"\b{name}=", text) for name in ALL)
