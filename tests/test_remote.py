"""URLs as paths of pairs, data and runs, on the memory file system of fsspec."""

import dataclasses
import json
import time
import uuid
from unittest import mock

import fsspec
import jax
import numpy as np
import pytest
import tiny_online
import tiny_pair
from test_attached_runs import configured

from osd_jax import base, main, online, pairs, remote, runs
from osd_jax.data import examples
from osd_jax.engine import engine
from osd_jax.models import weights

BUCKET = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
  """A machine with an empty cache."""
  monkeypatch.setattr(remote, "CACHE", str(tmp_path / "machine"))


@pytest.fixture
def bucket():
  """URL of an empty remote folder."""
  return f"memory://{uuid.uuid4().hex}"


def put(address, text):
  with fsspec.open(address, "w") as file:
    file.write(text)


def get(address):
  with fsspec.open(address) as file:
    return file.read().decode()


def failing(method, error):
  """Makes a method of the bucket raise an error, in a `with` block."""
  return mock.patch.object(type(BUCKET), method, side_effect=error)


# --- Reading --------------------------------------------------------------------------


def test_fetched_copy_follows_remote_changes(bucket):
  put(f"{bucket}/models/a.txt", "one")
  put(f"{bucket}/models/deep/b.txt", "two")
  copy = remote.fetched(f"{bucket}/models", "X.y")
  assert (copy / "a.txt").read_text() == "one"
  assert (copy / "deep/b.txt").read_text() == "two"
  assert copy.name == "models"
  put(f"{bucket}/models/deep/b.txt", "another")
  BUCKET.rm(f"{bucket}/models/a.txt")
  put(f"{bucket}/models/c.txt", "three")
  assert remote.fetched(f"{bucket}/models", "X.y") == copy
  there = sorted(file.name for file in copy.rglob("*.txt"))
  assert there == ["b.txt", "c.txt"]
  assert (copy / "deep/b.txt").read_text() == "another"


def test_unchanged_files_are_not_copied_again(bucket):
  put(f"{bucket}/a.txt", "one")
  assert remote.fetched(f"{bucket}/a.txt", "X.y").read_text() == "one"
  with failing("get_file", OSError("read again")):
    assert remote.fetched(f"{bucket}/a.txt", "X.y").read_text() == "one"


@pytest.mark.parametrize("address", ["memory://nothing/here", "nowhere://at/all"])
def test_unreadable_url_error_names_the_setting(address):
  with pytest.raises(base.InputError, match=r"^PairConfig\.target: received '\w+://"):
    pairs.PairConfig(target=address).path("target")


def test_local_paths_are_not_urls():
  for path in ("runs/demo", "/x/y", "C:/models", "google/flan-t5-small", "shipped:a"):
    assert not remote.is_remote(path)
  assert remote.is_remote("gs://bucket/run")


def test_pair_and_data_are_read_from_a_bucket(bucket, tmp_path):
  here = tiny_pair.save_tiny_pair(tmp_path / "pair")
  BUCKET.put(str(tmp_path / "pair"), f"{bucket}/models", recursive=True)
  name = here.target.rpartition("/")[2]
  there = dataclasses.replace(
    here, folder=f"{bucket}/models", target=name, draft=here.draft.rpartition("/")[2]
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    pairs.load_pair(there).target_params,
    pairs.load_pair(here).target_params,
  )
  put(f"{bucket}/data/x.eval.jsonl", '{"prompt": "a", "reference": "b"}\n')
  task = examples.TaskConfig(
    name="x",
    source="x",
    data_dir=f"{bucket}/data",
    pattern="x.{split}.jsonl",
    split="eval",
  )
  (example,) = examples.texts(task)
  assert example.prompt == "a" and example.location.endswith(".jsonl:1")
  with pytest.raises(base.InputError, match=r"TaskConfig\.pattern.*no file in 'memory"):
    examples.find_files(dataclasses.replace(task, pattern="y.jsonl"))


# --- Writing --------------------------------------------------------------------------


def test_weights_are_written_to_a_url_and_read_back(bucket, tmp_path):
  here = tiny_pair.save_tiny_pair(tmp_path / "pair")
  found = weights.load(here.target)
  runs.check_output("X.output", f"{bucket}/copy.safetensors")
  weights.save(f"{bucket}/copy.safetensors", found)
  again = weights.load(remote.fetched(f"{bucket}/copy.safetensors", "X.y"))
  jax.tree.map(np.testing.assert_array_equal, again.params, found.params)


def test_failed_upload_keeps_the_local_file(bucket):
  with (
    failing("put_file", PermissionError("403: not yours")),
    pytest.raises(base.InputError, match="403: not yours") as caught,
    remote.stored(f"{bucket}/a.txt") as path,
  ):
    path.write_text("precious")
  kept = str(caught.value).rpartition("What was written is ")[2].rstrip(".")
  assert open(kept).read() == "precious"


@dataclasses.dataclass(frozen=True)
class Config:
  """A config with the fields that all commands have."""

  steps: int = 3
  run_directory: str = ""
  overwrite: bool = False


def start(address, steps=3, overwrite=False):
  return runs.RunDirectory.start(address, Config(steps), overwrite=overwrite)


def finished_run(address):
  """Makes a finished run; returns its local folder and the remote files."""
  with start(address) as run, runs.MetricsLog(run.metrics_path) as log:
    log.append({"kind": "request", "index": 0})
    run.finish()
  return run.path, {name: BUCKET.cat(name) for name in BUCKET.find(address)}


def test_remote_run_with_other_settings_is_refused_and_unchanged(bucket):
  address = f"{bucket}/run"
  _, before = finished_run(address)
  assert any(name.endswith("/metrics.jsonl") for name in before)
  with pytest.raises(base.InputError, match="other settings"):
    start(address, steps=4)
  assert {name: BUCKET.cat(name) for name in BUCKET.find(address)} == before
  start(address, steps=4, overwrite=True).close()
  assert json.loads(get(f"{address}/config.json"))["steps"] == 4
  assert not BUCKET.exists(f"{address}/metrics.jsonl")


def test_unreadable_url_is_not_written_to(bucket, monkeypatch):
  """Otherwise an empty run could replace one that could not be downloaded."""
  address = f"{bucket}/run"
  _, before = finished_run(address)
  monkeypatch.setattr(remote, "CACHE", remote.CACHE + " again")
  with (
    failing("get_file", OSError("the network is down")),
    pytest.raises(base.InputError, match="the network is down"),
  ):
    start(address)
  assert {name: BUCKET.cat(name) for name in BUCKET.find(address)} == before


def test_run_that_was_removed_remotely_starts_again(bucket):
  address = f"{bucket}/run"
  folder, before = finished_run(address)
  BUCKET.rm(address, recursive=True)
  with start(address) as again:
    assert again.finished is None and not again.metrics_path.exists()
  there = json.loads(get(f"{address}/provenance.json"))
  assert there == again.provenance()
  aside = runs.RunDirectory(folder.parent / "removed")  # the local copy is kept
  assert aside.finished and aside.metrics_path.exists()


def test_upload_can_be_repeated_after_a_missing_bucket_error(bucket):
  """Nothing is recorded as uploaded, so the same command uploads everything."""
  with (
    failing("put_file", FileNotFoundError("no bucket of that name")),
    pytest.raises(base.InputError, match=r"no bucket.*the same command copies"),
  ):
    finished_run(f"{bucket}/run")
  assert not BUCKET.exists(bucket)
  with start(f"{bucket}/run") as again:
    assert again.finished
  assert BUCKET.exists(f"{bucket}/run/metrics.jsonl")


def test_run_is_uploaded_while_it_is_written(bucket, monkeypatch):
  monkeypatch.setattr(remote, "EVERY_SECONDS", 0.01)
  with start(f"{bucket}/run") as run:
    (run.path / "a.txt").write_text("one")
    for _ in range(1000):
      if BUCKET.exists(f"{bucket}/run/a.txt") and get(f"{bucket}/run/a.txt"):
        break  # a copy may catch the file before its text was written
      time.sleep(0.01)
    assert get(f"{bucket}/run/a.txt") == "one"
    (run.path / "a.txt").unlink()
  assert not BUCKET.exists(f"{bucket}/run/a.txt")
  assert not BUCKET.exists(f"{bucket}/run/.lock")


@pytest.mark.slow
def test_run_continues_on_another_machine(lively_pair, bucket, tmp_path, monkeypatch):
  """Files that do not belong to the run stay in the bucket."""
  address = f"{bucket}/runs/one"
  put(f"{address}/notes.txt", "mine")
  config = configured(
    lively_pair, address, learn=False, compare_every=0, measure_costs=False
  )
  config = dataclasses.replace(config, floor_metering=False)
  step, seen = engine.Engine.step, []

  def interrupted(self):
    seen.append(1)
    if len(seen) > 9:
      raise KeyboardInterrupt
    return step(self)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(engine.Engine, "step", interrupted)
    online.run(config)
  before = get(f"{address}/metrics.jsonl").count('"request"')
  assert 0 < before < tiny_online.REQUESTS
  assert BUCKET.find(f"{address}/checkpoints")
  monkeypatch.setattr(remote, "CACHE", str(tmp_path / "another machine"))
  result = online.run(config)
  assert "another machine" in str(result.path)
  rows = [json.loads(line) for line in get(f"{address}/metrics.jsonl").splitlines()]
  served = [row["index"] for row in runs.of_kind(rows, "request")]
  assert served == list(range(tiny_online.REQUESTS))
  assert len(runs.of_kind(rows, "data")) == 1  # the run was continued, not restarted
  for name in ("report.html", "draft.safetensors", "provenance.json", "outputs.jsonl"):
    assert BUCKET.cat(f"{address}/{name}") == (result.path / name).read_bytes()
  assert get(f"{address}/notes.txt") == "mine"
  assert online.run(config).exact  # finished, so nothing is run
  assert main.main(["report", address]) == 0
