"""A full disk, a damaged checkpoint, and a checkpoint of another model.

After each, the continued run is compared with an undisturbed run.
"""

import dataclasses
import errno
import os
import shutil

import jax
import numpy as np
import pytest
import tiny_online

from osd_jax import online, pairs, runs, sharding
from osd_jax.models import weights
from osd_jax.report import plots
from osd_jax.runs import directory

pytestmark = pytest.mark.slow

QUICK = {"compare_every": 0, "floor_metering": False, "keep_drafts": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def serve(pair):
  """Runs in a given folder. All runs share one loaded pair, so they share programs."""
  loaded = pairs.load_pair(pair, sharding.make(sharding.PartitionConfig()))

  def served(folder, models=loaded):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(plots, "draw_plots", lambda *_: ([], ""))
      return online.run(tiny_online.config(models, folder, **QUICK)).path

  served.loaded = loaded
  return served


@pytest.fixture(scope="module")
def whole(serve, tmp_path_factory):
  return serve(tmp_path_factory.mktemp("whole") / "run")


def full_after(patch, step):
  """From checkpoint `step` on, saving fails after the first bytes (full disk)."""
  orbax = pytest.importorskip("orbax.checkpoint")
  real = orbax.CheckpointManager.save

  def save(manager, number, **rest):
    if number < step:
      return real(manager, number, **rest)
    # Orbax writes to a temporary folder and renames it when it is complete.
    torn = manager.directory / f"{number}.orbax-checkpoint-tmp"
    (torn / "arrays").mkdir(parents=True)
    (torn / "arrays" / "data").write_bytes(b"beginning")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(torn))

  patch.setattr(orbax.CheckpointManager, "save", save)


@pytest.fixture(scope="module")
def stopped(serve, tmp_path_factory):
  """A run that failed at its third checkpoint, and its error message."""
  folder = tmp_path_factory.mktemp("stopped") / "run"
  with pytest.MonkeyPatch.context() as patch:
    full_after(patch, 13)
    with pytest.raises(ValueError) as caught:
      serve(folder)
  return folder, str(caught.value)


def steps(folder):
  return sorted(
    int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()
  )


def assert_equal_to(whole, folder):
  """Both runs served the same requests, each once, and learnt the same draft."""
  queries = [
    [
      row["query"]
      for row in runs.read(path / "metrics.jsonl")
      if row["kind"] == "request"
    ]
    for path in (whole, folder)
  ]
  assert queries[0] == queries[1]
  assert sorted(queries[1]) == list(range(tiny_online.REQUESTS))
  drafts = [weights.load(path / "draft.safetensors").params for path in (whole, folder)]
  jax.tree.map(np.testing.assert_array_equal, *drafts)


def test_interrupted_run_completes_the_checkpoint_it_started(serve, tmp_path):
  save, begun = online.OnlineLoop.checkpoint, []

  def interrupted(loop):
    save(loop)
    begun.append(loop.finished)
    raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(online.OnlineLoop, "checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
      serve(tmp_path)
  assert steps(tmp_path) == begun
  assert not list((tmp_path / "checkpoints").glob("*tmp*"))


@pytest.fixture
def copied(stopped, tmp_path):
  """The stopped run in a folder of its own."""
  shutil.copytree(stopped[0], tmp_path / "run")
  return tmp_path / "run"


def test_full_disk_stops_the_run_and_says_how_to_continue(stopped):
  folder, message = stopped
  last = steps(folder)[-1]
  assert "No space left on device" in message
  assert (
    f"the last good one is step {last}" in message and "repeat the command" in message
  )
  assert 0 < last < 13
  assert not (folder / "draft.safetensors").exists()


def test_run_continues_from_the_last_good_checkpoint(serve, copied, whole):
  serve(copied)
  assert_equal_to(whole, copied)


def test_damaged_checkpoint_is_reported_and_skipped(serve, copied, whole):
  newest = copied / "checkpoints" / str(steps(copied)[-1])
  largest = max((newest / "arrays").rglob("*"), key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  older = steps(copied)[0]
  words = f"step {newest.name} .*cannot be read.*continuing from step {older}"
  with pytest.warns(RuntimeWarning, match=words):
    serve(copied)
  assert_equal_to(whole, copied)


@pytest.fixture
def unnoticed(monkeypatch):
  """Hides that settings changed, as if files of the same names had new contents."""
  monkeypatch.setattr(directory, "differences", lambda *_: [])


def test_checkpoint_of_other_weights_is_refused(serve, copied, unnoticed):
  """Shapes are equal, so without the check rows in flight would change their target."""
  loaded = serve.loaded
  changed = jax.tree.map(lambda leaf: leaf * 1.5, loaded.target_params)
  other = dataclasses.replace(loaded, target_params=changed)
  before = steps(copied)
  with pytest.raises(ValueError, match="taken with other models .* have changed"):
    serve(copied, other)
  assert steps(copied) == before


def test_checkpoint_of_another_shape_is_refused(serve, copied, unnoticed):
  loaded = serve.loaded
  other = dataclasses.replace(
    loaded, draft=loaded.target, draft_params=loaded.target_params
  )
  with pytest.raises(ValueError, match="does not fit this run: .*expected .*found"):
    serve(copied, other)


def test_fingerprint_changes_with_the_weights():
  params = {"a": np.ones((3, 4), np.float32), "b": np.zeros(2, np.float32)}
  own = runs.fingerprint(params)
  assert own == runs.fingerprint(jax.tree.map(jax.numpy.asarray, params))
  for change in ({"a": params["a"] * 2}, {"b": params["b"] + 1}):
    assert runs.fingerprint(params | change) != own
  runs.check_fingerprint(None, own)  # a checkpoint without fingerprint
  runs.check_fingerprint(own, own)
