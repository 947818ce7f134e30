"""Offline runs: the draft improves, meshes agree, broken steps are skipped.

`test_resume` covers interrupted runs.
"""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_pair

from osd_jax import base, offline, runs, sharding
from osd_jax.data.batches import BatchConfig
from osd_jax.data.examples import topic_task
from osd_jax.distillation import losses, optimizers
from osd_jax.distillation import update as updates
from osd_jax.engine.requests import DecodingConfig
from osd_jax.models import weights
from osd_jax.runs import corpus_rows

pytestmark = pytest.mark.slow


def test_each_epoch_contains_every_row_once_in_a_new_order():
  rows = offline.shuffled(7, 0, 21, seed=3).reshape(3, 7)
  np.testing.assert_array_equal(np.sort(rows, axis=1), np.tile(np.arange(7), (3, 1)))
  assert (rows[0] != rows[1]).any()
  assert (rows.reshape(-1) != offline.shuffled(7, 0, 21, seed=4)).any()


def test_order_does_not_depend_on_the_first_step():
  whole = offline.shuffled(7, 0, 40, seed=3)
  for start in range(0, 36, 3):
    np.testing.assert_array_equal(
      offline.shuffled(7, start, 4, seed=3), whole[start : start + 4]
    )


def generated(split: str) -> BatchConfig:
  tasks = tuple(topic_task(topic, split, 5) for topic in ("maths", "sql"))
  return BatchConfig(tasks=tasks, source_length=48)


@pytest.fixture(scope="module", autouse=True)
def short_intervals():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(offline, "LOG_EVERY", 5)
    yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> offline.OfflineConfig:
  folder = tmp_path_factory.mktemp("offline")
  return offline.OfflineConfig(
    corpus=generated("train"),
    evaluation=generated("eval"),
    output=str(folder / "distilled.safetensors"),
    pair=tiny_pair.save_tiny_pair(folder),
    decoding=DecodingConfig(
      rows=2, source_lengths=(48,), target_length=8, record_top_k=tiny_pair.VOCAB_SIZE
    ),
    sample_source="mix_request",
    update=updates.UpdateConfig(
      optimizers.OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
      losses.LossConfig("forward_kl", num_positions=0, num_tokens=0),
      num_new=2,
      num_replay=2,
      ema_decay=0.0,
    ),
    steps=12,
    evaluate_every=6,
    run_directory=str(folder / "run"),
  )


@pytest.fixture(scope="module")
def finished(config):
  return offline.run(config).path


def rows_of(path, *kinds):
  return [row for row in runs.read(path / "metrics.jsonl") if row["kind"] in kinds]


def test_learning_raises_held_out_overlap(config, finished):
  evaluations = rows_of(finished, "evaluation")
  assert [row["step"] for row in evaluations] == [0, 6, 12]
  for task in ("maths", "sql"):
    overlaps = [row["tasks"][task]["distribution_overlap"] for row in evaluations]
    assert overlaps[0] < overlaps[-1] <= 1
  losses = [row["loss"] for row in rows_of(finished, "step")]
  assert losses[-1] < losses[0]
  assert (finished / "report.html").is_file()
  before, after = weights.load(config.pair.draft), weights.load(config.output)
  assert before.config == after.config and before.vocabulary == after.vocabulary
  leaves = zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True)
  assert any((one != other).any() for one, other in leaves)
  assert "mix_request" in after.notes


def test_kept_texts_are_generated_once(config, finished, tmp_path, monkeypatch):
  names = dataclasses.replace(config, texts=str(tmp_path / "texts"))
  drafts = []
  for name in ("first", "second"):
    output = str(tmp_path / f"{name}.safetensors")
    changes = {"output": output, "run_directory": str(tmp_path / name)}
    offline.run(dataclasses.replace(names, **changes))
    drafts.append(weights.load(output))
    monkeypatch.setattr(corpus_rows.CorpusRows, "add", None)  # for new rows
  drafts.append(weights.load(config.output))
  for leaves in zip(*(jax.tree.leaves(one.params) for one in drafts), strict=True):
    for other in leaves[1:]:
      np.testing.assert_array_equal(leaves[0], other)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_four_devices_learn_like_one(config, finished, tmp_path):
  four = offline.run(
    dataclasses.replace(
      config,
      partition=sharding.PartitionConfig(2, 2),
      output=str(tmp_path / "draft.safetensors"),
      run_directory=str(tmp_path / "run"),
    )
  ).path
  for name in ("maths", "sql"):
    first = [
      rows_of(path, "evaluation")[0]["tasks"][name]["distribution_overlap"]
      for path in (finished, four)
    ]
    assert first[0] == pytest.approx(first[1], abs=1e-5)
  losses = [[row["loss"] for row in rows_of(path, "step")] for path in (finished, four)]
  np.testing.assert_allclose(*losses, rtol=1e-3)  # rounding errors grow with the steps


def test_non_finite_steps_are_skipped_and_counted(config, tmp_path, monkeypatch):
  broken = dataclasses.replace(
    config,
    output=str(tmp_path / "d.safetensors"),
    run_directory=str(tmp_path / "r"),
    steps=3,
  )
  batch, text = offline.OfflineLoop._batch, []

  def poisoned(loop, step):
    text.append(loop._figures())
    result = batch(loop, step)
    factor = np.float32(np.nan if step == 1 else 1)
    records = result.records.replace(log_probs=result.records.log_probs * factor)
    return result.replace(records=records)

  monkeypatch.setattr(offline.OfflineLoop, "_batch", poisoned)
  offline.run(broken)
  assert rows_of(tmp_path / "r", "step")[-1]["skipped"] == 1
  result = weights.load(broken.output)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))
  # The progress bar shows only values that are known.
  assert "loss" not in text[0] and "held-out overlap" in text[0]
  assert "nan" not in "".join(text)


def test_draft_with_broken_scores_is_not_written(config, tmp_path, monkeypatch):
  real, output = offline.OfflineLoop._evaluate, tmp_path / "draft.safetensors"

  def evaluate(loop):
    real(loop)
    loop.overlap = float("nan")

  monkeypatch.setattr(offline.OfflineLoop, "_evaluate", evaluate)
  folder = str(tmp_path / "run")
  changed = dataclasses.replace(
    config, output=str(output), steps=1, run_directory=folder
  )
  with pytest.raises(base.BrokenDraftError, match="is not written: .* not finite"):
    offline.run(changed)
  assert not output.exists()


def test_draft_that_reads_states_is_not_asked_for_texts(tmp_path):
  """The shipped draft is attached to its target."""
  config = offline.OfflineConfig(
    corpus=generated("train"),
    evaluation=generated("eval"),
    output=str(tmp_path / "draft.safetensors"),
    run_directory=str(tmp_path / "run"),
    sample_source="student",
  )
  with pytest.raises(base.InputError, match="sample_source: received 'student'"):
    offline.run(config)
