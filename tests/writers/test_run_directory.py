"""A run directory says how to repeat the run, and is continued only by its own."""

import datetime
import os

import jax
import numpy as np
import pytest

from osd_jax.writers import RunDirectory, run_directory

CONFIG = "# made by a test\nonline.seed = 3\n\nonline.requests = 800\n"


def test_create_writes_config_and_provenance(tmp_path):
  argv = ["osd", "online", "--gin_file=a.gin"]
  run = RunDirectory.create(tmp_path / "a" / "b", config=CONFIG, seed=3, argv=argv)
  assert run.config() == CONFIG == run.config_path.read_text()
  made = run.provenance()
  assert made["argv"] == argv and made["seed"] == 3
  assert made["versions"]["jax"] == jax.__version__
  assert made["versions"]["numpy"] == np.__version__
  assert made["versions"].keys() >= {"python", "flax", "optax", "orbax-checkpoint"}
  assert made["device_count"] == jax.device_count() and made["thread_count"] >= 1
  assert made["device_kind"] == jax.devices()[0].device_kind
  assert made["ended"] is None
  age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(
    made["started"]
  )
  assert abs(age.total_seconds()) < 60


def test_git_sha_is_that_of_the_packages_own_checkout_only(tmp_path, monkeypatch):
  state = run_directory._git_state()
  assert state["git_sha"] is None or len(state["git_sha"]) == 40
  stray = tmp_path / "pkg" / "writers"
  stray.mkdir(parents=True)
  monkeypatch.setattr(run_directory, "__file__", str(stray / "run_directory.py"))
  assert run_directory._git_state() == {"git_sha": None, "git_dirty": None}


def test_a_run_is_not_overwritten_and_nothing_is_opened_as_a_run(tmp_path):
  with pytest.raises(ValueError, match="expected a folder with a readable"):
    RunDirectory.open(tmp_path)
  RunDirectory.create(tmp_path)
  with pytest.raises(ValueError, match="already holds a run"):
    RunDirectory.create(tmp_path)


def test_start_creates_then_continues_with_the_same_config_only(tmp_path):
  path = tmp_path / "run"
  RunDirectory.start(path, config=CONFIG, seed=3)
  again = RunDirectory.start(path, config="online.requests = 800\nonline.seed = 3\n")
  assert len(again.provenance()["resumed"]) == 1
  assert again.config() == CONFIG
  with pytest.raises(ValueError, match=r"requests = 900"):
    RunDirectory.start(path, config=CONFIG.replace("800", "900"))
  assert len(again.provenance()["resumed"]) == 1


def test_hours_add_up_over_an_interrupted_session(tmp_path, monkeypatch):
  begin = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
  hour = datetime.timedelta(hours=1)
  monkeypatch.setattr(run_directory, "_now", lambda: begin)
  run = RunDirectory.create(tmp_path / "run")
  run.metrics_path.write_text("")
  killed = (begin + 2 * hour).timestamp()
  os.utime(run.metrics_path, (killed, killed))  # last row, then killed
  monkeypatch.setattr(run_directory, "_now", lambda: begin + 10 * hour)
  run = RunDirectory.open(run.path)
  monkeypatch.setattr(run_directory, "_now", lambda: begin + 11 * hour)
  run.finish()
  made = run.provenance()
  assert made["interrupted"] is True and made["hours"] == 2.0
  assert made["resumed"][0]["interrupted"] is False
  assert made["resumed"][0]["hours"] == 1.0
  assert made["total_hours"] == 3.0
