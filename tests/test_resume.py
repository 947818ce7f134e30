"""An interrupted run ends exactly as an uninterrupted one.

One matrix in process covers every feature that a checkpoint has to hold; two tests kill
the whole command.
"""

import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import rich.console
import safetensors.numpy
import tiny_online

from osd_jax import offline, online, pairs, runs, sharding
from osd_jax.costs import table
from osd_jax.data.batches import BatchConfig
from osd_jax.distillation import gate, schedule, update
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig, SamplingConfig
from osd_jax.loop import loop as loop_lib
from osd_jax.report import progress

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hasty_gate")]

COUNT = 12  # requests of a run in the matrix
TIMES = ("_ms", "_ms_per_token", "_seconds", "ahead_since")  # measured, so they vary
KINDS = ("request", "update", "alarm", "gate", "step", "evaluation")  # rows compared
PATIENCE = 400  # seconds until a child process counts as stuck


def timeless(path, *kinds):
  """Rows of metrics.jsonl without the measured times."""
  return [
    {name: value for name, value in row.items() if not name.endswith(TIMES)}
    for row in runs.read(path / "metrics.jsonl")
    if row["kind"] in kinds
  ]


# --- The matrix, in process


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Weights of the lively T5 and Llama pairs."""
  return {
    family: tiny_online.save_lively_pair(tmp_path_factory.mktemp(family), family)
    for family in ("t5", "llama")
  }


@functools.cache
def loaded(pair):
  """A pair as one object, so that the runs of a test share compiled programs."""
  return pairs.load_pair(pair)


def online_config(pair, folder, rows=2, decoding=None, **changes):
  """12 requests, an update every 2, a checkpoint every 5."""
  config = tiny_online.config(
    pair, folder, rows, compare_every=0, floor_metering=False, **changes
  )
  schedule = config.learning.schedule
  if "schedule" not in changes:
    schedule = dataclasses.replace(schedule, update_interval=2)
  return dataclasses.replace(
    config,
    stream=dataclasses.replace(config.stream, requests_per_task=COUNT // 4),
    learning=dataclasses.replace(config.learning, schedule=schedule),
    decoding=dataclasses.replace(config.decoding, **(decoding or {})),
  )


def online_of(family="t5", is_attached=False, has_shortlist=False, **changes):
  is_cache, reads = changes.pop("is_cache", False), changes.pop("reads", "prompt")

  def make(files, folder):
    pair = files[family]
    if is_cache:
      pair = dataclasses.replace(pair, draft=pairs.CACHE)
    if reads == "layers":
      pair = tiny_online.with_head(pair)
    elif is_attached:
      pair = tiny_online.attached(pair)
      shape = dataclasses.replace(pair.attached, reads=reads)
      pair = dataclasses.replace(pair, attached=shape)
    if has_shortlist:
      pair = dataclasses.replace(pair, draft_serving=tiny_online.SERVING)
    on_mesh = "partition" in changes  # each run then places the pair on its mesh
    return online_config(pair if on_mesh else loaded(pair), folder, **changes)

  return make


def offline_config(files, folder):
  tasks = tiny_online.tasks
  batch = {"source_length": tiny_online.SOURCE}
  return offline.OfflineConfig(
    corpus=BatchConfig(tasks=tasks("train", 2), **batch),
    evaluation=BatchConfig(tasks=tasks("eval", 1), **batch),
    output=str(folder.parent / f"{folder.name}.safetensors"),
    pair=files["t5"],
    decoding=DecodingConfig(
      rows=2, source_lengths=(tiny_online.SOURCE,), target_length=8
    ),
    sample_source="mix_request",
    update=update.UpdateConfig(num_new=2, num_replay=2),
    steps=COUNT,
    evaluate_every=5,
    run_directory=str(folder),
  )


CHOICE = AdaptiveConfig(
  candidates=(0, 1, 3), costs=(table.RoundCosts((1.0, 1.1, 1.3), 0.2, 0.1),)
)
PAYING = schedule.WorthConfig(
  update_interval=2,
  costs=table.Costs(table.RoundCosts((2.0,), num_draft_tokens=(3,)), lost_ms=0.5),
)
# Decides within a few requests, on almost nothing.
HASTY = gate.GateConfig(error_rate=0.99)
# Each run has several features, so that few runs cover all of them.
FEATURES = {
  "independent draft, gate": online_of(gate=HASTY),
  "one row, shortlist, sampled, worth schedule": online_of(
    rows=1,
    has_shortlist=True,
    sampling=SamplingConfig(temperature=0.8, seed=3),
    schedule=PAYING,
  ),
  "Llama, attached draft, block rule, prompts in chunks": online_of(
    "llama",
    is_attached=True,
    reads="tokens",
    sampling=SamplingConfig(temperature=0.8, seed=3),
    decoding={"acceptance_rule": "block", "prefill_chunk": 4},
  ),
  "EAGLE-3 head, n-gram cache, adaptive K": online_of(
    "llama",
    reads="layers",
    gate=HASTY,
    decoding={"cache_tokens": 1 << 10, "adaptive": CHOICE},
  ),
  "cache alone": online_of("llama", is_cache=True, decoding={"cache_tokens": 1 << 10}),
  "n-gram cache, adaptive K": online_of(
    is_attached=True, decoding={"cache_tokens": 1 << 10, "adaptive": CHOICE}
  ),
  "mesh data=2, gate, attached draft, adaptive K": online_of(
    is_attached=True,
    partition=sharding.PartitionConfig(2),
    gate=HASTY,
    decoding={"adaptive": CHOICE},
  ),
  "offline": offline_config,
}


def loop_of(config, directory):
  if isinstance(config, offline.OfflineConfig):
    return offline.OfflineLoop(config, directory, progress.bar(rich.console.Console()))
  return online.begin(config, directory)


def done_by(loop):
  return getattr(loop, "finished", None) or getattr(loop, "steps_taken", 0)


def go(config, until=None):
  """Runs to the end, or stops without closing the loop after `until` steps."""
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    loop = loop_of(config, directory)
    while loop.step() is not None:
      if until is not None and done_by(loop) >= until:
        loop.wait()  # this process continues, so background threads must stop writing
        return
    assert until is None
    loop.wait()
    loop.close(*([0.0] if isinstance(loop, loop_lib.Loop) else []))


def results(config, folder):
  """Everything that a run produces: log rows, outputs and the bytes of the draft."""
  draft = getattr(config, "output", folder / "draft.safetensors")
  # A cache alone has no weights.
  weights = safetensors.numpy.load_file(draft) if Path(draft).exists() else {}
  outputs = folder / "outputs.jsonl"
  return {
    "rows": timeless(folder, *KINDS),
    "outputs": outputs.read_text() if outputs.exists() else "",
    "draft": {name: tensor.tobytes() for name, tensor in weights.items()},
  }


def interrupted_and_whole(make, files, tmp_path):
  whole, cut = (make(files, tmp_path / name) for name in ("whole", "cut"))
  go(whole)
  go(cut, until=8)
  assert not (tmp_path / "cut" / "draft.safetensors").exists()
  steps = [int(p.name) for p in (tmp_path / "cut" / "checkpoints").glob("[0-9]*")]
  # The steps after the last checkpoint are lost.
  assert steps and max(steps) < 8
  go(cut)
  return [results(c, tmp_path / n) for c, n in ((cut, "cut"), (whole, "whole"))]


@pytest.mark.parametrize("feature", FEATURES)
def test_interrupted_run_ends_bit_equal(files, tmp_path, feature):
  if "mesh" in feature and len(jax.devices()) < 2:
    pytest.skip("needs two devices; conftest.py fakes them")
  continued, whole = interrupted_and_whole(FEATURES[feature], files, tmp_path)
  assert continued["rows"] == whole["rows"]
  assert continued["outputs"] == whole["outputs"]
  assert continued["draft"] == whole["draft"]
  kinds = [row["kind"] for row in whole["rows"]]
  assert ("gate" in kinds) == ("gate" in feature)
  if feature == "cache alone":
    assert not whole["draft"] and "update" not in kinds
    assert any(row["accepted"] for row in whole["rows"])
  else:
    assert whole["draft"]
    assert kinds.count("update") >= 2 or kinds.count("evaluation") >= 2


def test_inexact_checkpoint_changes_the_result(files, tmp_path, monkeypatch):
  """Negative control: optimizer and draft are restored with an error of 0.1 %."""
  restore = runs.Checkpointer.restore

  def damaged(self, like):
    found = restore(self, like)
    if found is None:  # a new run
      return None
    arrays, host = found
    learner = jax.tree.map(
      lambda leaf: leaf * 1.001 if leaf.dtype == np.float32 else leaf,
      arrays["learner"]["learner"],
    )
    return arrays | {"learner": arrays["learner"] | {"learner": learner}}, host

  monkeypatch.setattr(runs.Checkpointer, "restore", damaged)
  make = FEATURES["independent draft, gate"]
  continued, whole = interrupted_and_whole(make, files, tmp_path)
  assert continued["draft"] != whole["draft"]
  assert continued["rows"] != whole["rows"]


# --- The whole command, killed


def start(pair_folder, run_directory, repository):
  """Starts the run as a process with the numerical settings of the tests."""
  paths = [str(repository), str(repository / "tests"), os.environ.get("PYTHONPATH", "")]
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # restarts compile nothing
  }
  script = repository / "tests" / "tiny_online.py"
  return subprocess.Popen(
    [sys.executable, str(script), str(pair_folder), str(run_directory)],
    env=environment,
    cwd=repository,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  )


def requests_in(path):
  if not path.exists():
    return 0
  return path.read_bytes().count(b'"kind": "request"')


def wait_for(process, log, count):
  end = time.monotonic() + PATIENCE
  while requests_in(log) < count and process.poll() is None:
    assert time.monotonic() < end, f"only {requests_in(log)} of {count} requests"
    time.sleep(0.002)


def kill_at(process, log, count, delay):
  """Kills the process `delay` seconds after `count` requests were logged."""
  try:
    wait_for(process, log, count)
    time.sleep(delay)
  finally:  # kill the process even if waiting fails
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
  assert process.returncode == -signal.SIGKILL, errors.decode()[-2000:]


def finish(process):
  try:
    _, errors = process.communicate(timeout=PATIENCE)
  finally:
    process.kill()
  assert process.returncode == 0, errors.decode()[-2000:]


def test_killed_and_terminated_run_ends_bit_equal(tmp_path, repository):
  """SIGTERM writes an early checkpoint, after which no request is served again."""
  tiny_online.save_lively_pair(tmp_path)
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  finish(start(tmp_path, whole, repository))
  rng, log = random.Random(0), killed / "metrics.jsonl"
  # Once before the first checkpoint, and once at a random moment between later ones.
  for moment in (rng.randint(1, 4), rng.randint(7, 14)):
    process = start(tmp_path, killed, repository)
    kill_at(process, log, moment, rng.uniform(0, 0.01))
    assert requests_in(log) < tiny_online.REQUESTS
    assert not (killed / "draft.safetensors").exists()
  assert list((killed / "checkpoints").glob("[0-9]*"))
  process = start(tmp_path, killed, repository)
  wait_for(process, log, 16)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=PATIENCE)
  assert process.returncode == -signal.SIGTERM, errors.decode()[-2000:]
  served = timeless(killed, "request")
  newest = max(int(path.name) for path in (killed / "checkpoints").glob("[0-9]*"))
  assert newest == len(served) < tiny_online.REQUESTS
  assert not json.loads((killed / "provenance.json").read_text())["finished"]
  finish(start(tmp_path, killed, repository))
  assert timeless(killed, "request")[: len(served)] == served
  kinds = ("request", "update", "alarm")
  assert timeless(killed, *kinds) == timeless(whole, *kinds)
  queries = [row["query"] for row in timeless(killed, "request")]
  assert sorted(queries) == list(range(tiny_online.REQUESTS))
  weights, expected = (
    safetensors.numpy.load_file(path / "draft.safetensors") for path in (killed, whole)
  )
  assert weights.keys() == expected.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(weights[name], tensor)
  first = safetensors.numpy.load_file(tmp_path / "draft.safetensors")
  assert any(not np.array_equal(first[name], expected[name]) for name in first)
