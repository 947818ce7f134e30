"""Run directories: provenance, resumption with equal settings, overwriting, errors."""

import dataclasses
import datetime
import html.parser
import os
import sys

import jax
import numpy as np
import pytest

from osd_jax import base
from osd_jax.runs import Checkpointer, MetricsLog, RunDirectory, RunResult, directory

TEXT = "# made by a test\nonline.seed = 3\n"


@dataclasses.dataclass(frozen=True)
class Config:
  """A config with the fields that all commands have."""

  steps: int = 3
  rate: float = 0.5
  run_directory: str = ""
  overwrite: bool = False


def start(path, config=None, **named):
  return RunDirectory.start(path, config or Config(), **named)


def contents(path):
  return {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}


def test_new_run_has_config_and_provenance(tmp_path, monkeypatch):
  argv = ["osd", "online", "--gin_file=a.gin"]
  monkeypatch.setattr(sys, "argv", argv)
  path = tmp_path / "a" / "b"
  run = start(path, operative_config=TEXT, seed=3)
  assert run.operative_config() == TEXT == run.operative_config_path.read_text()
  assert run.config() == {"class": "Config", **dataclasses.asdict(Config())}
  made = run.provenance()
  assert made["argv"] == argv and made["seed"] == 3
  assert made["versions"]["jax"] == jax.__version__
  assert made["versions"]["numpy"] == np.__version__
  assert made["versions"].keys() >= {"python", "flax", "optax", "orbax-checkpoint"}
  assert made["device_count"] == jax.device_count() and made["thread_count"] >= 1
  assert made["device_kind"] == jax.devices()[0].device_kind
  assert made["ended"] is None and run.finished is None
  age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(
    made["started"]
  )
  assert abs(age.total_seconds()) < 60


def test_git_state_is_empty_outside_a_checkout(tmp_path, monkeypatch):
  state = directory.git_state()
  assert state["git_sha"] is None or len(state["git_sha"]) == 40
  stray = tmp_path / "pkg" / "runs"
  stray.mkdir(parents=True)
  monkeypatch.setattr(directory, "__file__", str(stray / "provenance.py"))
  assert directory.git_state() == {"git_sha": None, "git_dirty": None}


def test_folder_without_provenance_is_refused(tmp_path):
  with pytest.raises(base.InputError, match="expected a folder with a readable"):
    RunDirectory(tmp_path).provenance()


def test_run_continues_only_with_the_same_settings(tmp_path):
  path = tmp_path / "run"
  start(path, operative_config=TEXT).close()
  again = start(path, Config(run_directory="elsewhere"))
  again.close()
  assert len(again.provenance()["resumed"]) == 1
  before = contents(path)
  words = r"Config\.rate: stored 0\.5, given 1; Config\.steps: stored 3, given 9.*over"
  with pytest.raises(base.InputError, match=words):
    start(path, Config(steps=9, rate=1))
  with pytest.raises(base.InputError, match="holds a run with other settings"):
    RunDirectory.start(path)
  assert contents(path) == before


def test_finished_run_is_left_unchanged(tmp_path):
  with start(tmp_path / "run") as run:
    run.finish()
  assert run.finished is not None
  before = contents(run.path)
  with start(run.path) as again:
    assert again.finished == run.finished
  assert contents(run.path) | {".lock": b""} == before | {".lock": b""}
  with pytest.raises(base.InputError, match=r"Config\.steps: stored 3, given 4"):
    start(run.path, Config(steps=4))


def test_overwrite_removes_only_files_of_the_run(tmp_path):
  (tmp_path / "draft.safetensors").write_text("mine")
  (tmp_path / "notes.txt").write_text("mine")
  with start(tmp_path, Config(), overwrite=True) as run:  # there is no run yet
    assert (tmp_path / "draft.safetensors").read_text() == "mine"
    run.metrics_path.write_text('{"kind": "x"}\n')
    run.plots_path.mkdir()
    run.finish()
  with start(tmp_path, Config(steps=4), overwrite=True) as run:
    assert run.finished is None and run.config()["steps"] == 4
    assert not run.metrics_path.exists() and not run.plots_path.exists()
    assert not (tmp_path / "draft.safetensors").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_failed_start_removes_its_files(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")
  for path in (tmp_path / "new" / "run", tmp_path):
    with pytest.raises(base.InputError, match="bad pair"):
      with start(path) as run:
        run.checkpoints_path.mkdir()
        MetricsLog(run.metrics_path).close()
        raise base.InputError("bad pair")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_measured_rows_survive_an_error(tmp_path):
  def fail():
    with start(tmp_path / "run") as run, MetricsLog(run.metrics_path) as log:
      log.append({"kind": "request", "index": 0})
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    fail()
  with pytest.raises(RuntimeError):
    with start(tmp_path / "run") as run:  # this session resumed the run
      raise RuntimeError
  assert len(run.metrics_path.read_text().splitlines()) == 1
  assert run.provenance_path.exists()


def test_unusable_folder_error_is_one_line_and_names_the_setting(tmp_path):
  (tmp_path / "file").write_text("")
  for path in (tmp_path / "file", tmp_path / "file" / "run"):
    with pytest.raises(base.InputError) as caught:
      start(path)
    text = str(caught.value)
    assert "Config.run_directory: received" in text and str(path) in text
    assert "\n" not in text
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("exists", [False, True])
def test_files_are_for_their_owner_only(tmp_path, exists):
  before = os.umask(0o022)
  try:
    if exists:  # a folder of the user keeps its mode
      (tmp_path / "run").mkdir()
    with start(tmp_path / "run") as run, MetricsLog(run.metrics_path):
      run.write_json("certificate.json", {"a": float("-inf")})
      Checkpointer(run.checkpoints_path).close()
  finally:
    os.umask(before)
  mode = lambda path: path.stat().st_mode & 0o777
  modes = {path.name: mode(path) for path in run.path.iterdir()}
  assert modes.pop("checkpoints") == 0o700
  assert set(modes.values()) == {0o600} and len(modes) == 5, modes
  assert mode(run.path) == (0o755 if exists else 0o700)
  assert '"a": null' in (run.path / "certificate.json").read_text()


def test_total_hours_include_an_interrupted_session(tmp_path, monkeypatch):
  begin = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
  hour = datetime.timedelta(hours=1)
  monkeypatch.setattr(directory, "now", lambda: begin)
  run = start(tmp_path / "run")
  run.close()
  run.metrics_path.write_text("")
  killed = (begin + 2 * hour).timestamp()
  # The process was killed right after it wrote the last row.
  os.utime(run.metrics_path, (killed, killed))
  monkeypatch.setattr(directory, "now", lambda: begin + 10 * hour)
  assert run.provenance()["interrupted"] is False  # nobody knows yet
  run = start(run.path)
  assert run.provenance()["interrupted"] is True
  monkeypatch.setattr(directory, "now", lambda: begin + 11 * hour)
  run.finish()
  assert run.provenance()["interrupted"] is False  # the run is complete now
  made = run.provenance()
  assert made["hours"] == 2.0 and made["resumed"][0]["hours"] == 1.0
  assert made["total_hours"] == 3.0


def test_notebook_shows_the_report(tmp_path):
  run = start(tmp_path / "run")
  assert RunResult(run.path)._repr_html_() is None  # the notebook shows text instead
  page = '<style>body { color: red }</style><p title="a">1 &lt; 2</p>'
  run.report_path.write_text(page)
  shown = RunResult(run.path)._repr_html_()
  frame = html.parser.HTMLParser()
  frames = []
  frame.handle_starttag = lambda tag, values: frames.append((tag, dict(values)))
  frame.feed(shown)
  # The whole page is inside a frame, so its style does not affect the notebook.
  assert [(tag, values["srcdoc"]) for tag, values in frames] == [("iframe", page)]
