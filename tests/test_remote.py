"""URLs as paths of pairs, data and runs, on the memory file system of fsspec."""

import dataclasses
import json
import uuid

import fsspec
import jax
import numpy as np
import pytest
import tiny_online
import tiny_pair
from test_attached_runs import configured, outputs

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


def test_unchanged_files_are_not_copied_again(bucket, monkeypatch):
  put(f"{bucket}/a.txt", "one")
  copied = []
  get_file = type(BUCKET).get_file
  monkeypatch.setattr(
    type(BUCKET), "get_file", lambda *args: (copied.append(args), get_file(*args))
  )
  for _ in range(3):
    assert remote.fetched(f"{bucket}/a.txt", "X.y").read_text() == "one"
  assert len(copied) == 1


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
  weights.check_output("X.output", f"{bucket}/copy.safetensors")
  weights.save(f"{bucket}/copy.safetensors", found)
  again = weights.load(remote.fetched(f"{bucket}/copy.safetensors", "X.y"))
  jax.tree.map(np.testing.assert_array_equal, again.params, found.params)


def test_failed_upload_keeps_the_local_file(bucket, monkeypatch):
  def refuse(*args, **kwargs):
    raise PermissionError("403: not yours")

  monkeypatch.setattr(type(BUCKET), "put_file", refuse)
  with (
    pytest.raises(base.InputError, match="403: not yours") as caught,
    remote.stored(f"{bucket}/a.txt") as path,
  ):
    path.write_text("precious")
  kept = str(caught.value).rpartition("What was written is ")[2].rstrip(".")
  assert open(kept).read() == "precious"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


def frozen(pair, folder, **changes):
  config = configured(pair, folder, learn=False, compare_every=0, measure_costs=False)
  return dataclasses.replace(config, floor_metering=False, **changes)


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  return outputs(
    online.run(frozen(pair, tmp_path_factory.mktemp("alone") / "run")).path
  )


class Interrupted(Exception):
  """Ends a run between two steps, like a kill."""


@pytest.mark.slow
def test_run_continues_on_another_machine(pair, alone, bucket, tmp_path, monkeypatch):
  """Files that do not belong to the run stay in the bucket."""
  address = f"{bucket}/runs/one"
  put(f"{address}/notes.txt", "mine")
  step, seen = engine.Engine.step, []

  def interrupted(self):
    seen.append(1)
    if len(seen) > 9:
      raise Interrupted
    return step(self)

  with monkeypatch.context() as patch, pytest.raises(Interrupted):
    patch.setattr(engine.Engine, "step", interrupted)
    online.run(frozen(pair, address))
  before = get(f"{address}/metrics.jsonl").count('"request"')
  assert 0 < before < tiny_online.REQUESTS
  assert BUCKET.find(f"{address}/checkpoints")
  monkeypatch.setattr(remote, "CACHE", str(tmp_path / "another machine"))
  result = online.run(frozen(pair, address))
  assert outputs(result.path) == alone and "another machine" in str(result.path)
  rows = [json.loads(line) for line in get(f"{address}/metrics.jsonl").splitlines()]
  assert [r["index"] for r in rows if r["kind"] == "request"] == list(range(len(alone)))
  assert len(runs.of_kind(rows, "data")) == 1  # the run was continued, not restarted
  for name in ("report.html", "draft.safetensors", "provenance.json", "outputs.jsonl"):
    assert BUCKET.cat(f"{address}/{name}") == (result.path / name).read_bytes()
  assert not BUCKET.exists(f"{address}/.lock")
  assert get(f"{address}/notes.txt") == "mine"
  again = online.run(frozen(pair, address))  # finished, so nothing is run
  assert again.exact
  assert main.main(["report", address]) == 0


def test_remote_run_with_other_settings_is_refused_and_unchanged(pair, bucket):
  address = f"{bucket}/run"
  online.run(frozen(pair, address))
  before = {name: BUCKET.cat(name) for name in BUCKET.find(address)}
  other = frozen(pair, address, sampling=engine.SamplingConfig(seed=3))
  with pytest.raises(base.InputError, match="other settings"):
    online.run(other)
  assert {name: BUCKET.cat(name) for name in BUCKET.find(address)} == before
  online.run(dataclasses.replace(other, overwrite=True))
  stored = json.loads(get(f"{address}/config.json"))
  assert stored["sampling"]["seed"] == 3


def test_unreadable_url_is_not_written_to(pair, bucket, monkeypatch):
  """Otherwise an empty run could replace one that could not be downloaded."""
  address = f"{bucket}/run"
  online.run(frozen(pair, address))
  before = BUCKET.find(address)

  def refuse(*args, **kwargs):
    raise OSError("the network is down")

  monkeypatch.setattr(remote, "CACHE", remote.CACHE + " again")
  with monkeypatch.context() as patch:
    patch.setattr(type(BUCKET), "get_file", refuse)
    with pytest.raises(base.InputError, match="the network is down"):
      online.run(frozen(pair, address))
  assert BUCKET.find(address) == before


def test_run_that_was_removed_remotely_starts_again(pair, bucket, alone):
  address = f"{bucket}/run"
  first = online.run(frozen(pair, address))
  started = json.loads((first.path / "provenance.json").read_text())
  BUCKET.rm(address, recursive=True)
  again = online.run(frozen(pair, address))
  assert outputs(again.path) == alone
  there = json.loads(get(f"{address}/provenance.json"))
  assert there == json.loads((again.path / "provenance.json").read_text()) != started
  aside = again.path.parent / "removed"  # the local copy is kept
  assert json.loads((aside / "provenance.json").read_text()) == started


def test_upload_can_be_repeated_after_a_missing_bucket_error(pair, bucket, monkeypatch):
  """Nothing is recorded as uploaded, so the same command uploads everything."""

  def refuse(*args, **kwargs):
    raise FileNotFoundError("no bucket of that name")

  with monkeypatch.context() as patch:
    patch.setattr(type(BUCKET), "put_file", refuse)
    with pytest.raises(base.InputError, match=r"no bucket.*the same command copies"):
      online.run(frozen(pair, f"{bucket}/run"))
  online.run(frozen(pair, f"{bucket}/run"))
  assert BUCKET.exists(f"{bucket}/run/draft.safetensors")


def test_run_is_uploaded_while_it_is_written(bucket, monkeypatch, tmp_path):
  monkeypatch.setattr(remote, "EVERY_SECONDS", 0.01)
  mirror = remote.Mirror(f"{bucket}/run")
  mirror.folder.mkdir(parents=True)
  mirror.pull("provenance.json")
  mirror.begin()
  (mirror.folder / "a.txt").write_text("one")
  for _ in range(1000):
    if BUCKET.exists(f"{bucket}/run/a.txt") and get(f"{bucket}/run/a.txt"):
      break  # a copy may catch the file before its text was written
    mirror._ended.wait(0.01)
  assert get(f"{bucket}/run/a.txt") == "one"
  (mirror.folder / "a.txt").unlink()
  mirror.end()
  assert not BUCKET.exists(f"{bucket}/run/a.txt")
