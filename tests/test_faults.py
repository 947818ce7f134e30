"""A run that met a full disk and a damaged checkpoint ends like an undisturbed run."""

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


@pytest.fixture(scope="module")
def loaded(lively_pair):
  """All runs share one loaded pair, so they share programs."""
  return pairs.load_pair(lively_pair, sharding.make(sharding.PartitionConfig()))


def serve(models, folder):
  quick = {"compare_every": 0, "floor_metering": False, "keep_drafts": False}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plots, "draw_plots", lambda *_: ([], ""))
    return online.run(tiny_online.config(models, folder, **quick)).path


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


def steps(folder):
  names = (path.name for path in (folder / "checkpoints").iterdir())
  return sorted(int(name) for name in names if name.isdigit())


def queries(folder):
  rows = runs.of_kind(runs.read(folder / "metrics.jsonl"), "request")
  return [row["query"] for row in rows]


def test_run_continues_after_a_full_disk_and_a_damaged_checkpoint(
  loaded, tmp_path, monkeypatch
):
  folder = tmp_path / "run"
  usage = shutil._ntuple_diskusage(10**6, 10**6, 0)
  with monkeypatch.context() as patch:
    patch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="OnlineConfig.run_directory: .*0 MB are free"):
      serve(loaded, folder)
  assert not folder.exists()
  with monkeypatch.context() as patch:
    full_after(patch, 13)
    with pytest.raises(ValueError) as caught:
      serve(loaded, folder)
  older, last = steps(folder)
  assert 0 < last < 13
  message = str(caught.value)
  assert "No space left on device" in message and "repeat the command" in message
  assert f"the last good one is step {last}" in message
  assert not (folder / "draft.safetensors").exists()
  # The same files with other weights: rows in flight would change their target.
  other = jax.tree.map(lambda leaf: leaf * 1.5, loaded.target_params)
  with monkeypatch.context() as patch:
    patch.setattr(directory, "differences", lambda *_: [])
    with pytest.raises(ValueError, match="with other weights of the target;"):
      serve(dataclasses.replace(loaded, target_params=other), folder)
  assert steps(folder) == [older, last]
  newest = folder / "checkpoints" / str(last) / "arrays"
  largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  words = f"step {last} .*cannot be used.*continuing from step {older}"
  with pytest.warns(RuntimeWarning, match=words):
    serve(loaded, folder)
  whole = serve(loaded, tmp_path / "whole")
  assert queries(folder) == queries(whole)
  assert sorted(queries(whole)) == list(range(tiny_online.REQUESTS))
  drafts = [weights.load(path / "draft.safetensors").params for path in (whole, folder)]
  jax.tree.map(np.testing.assert_array_equal, *drafts)
