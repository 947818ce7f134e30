"""Supervised training: regrouped batches, evaluation, resumption, sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import assets, base, runs, sharding, testing
from osd_jax.data.batches import BatchConfig
from osd_jax.data.examples import topic_task
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.decoding import rounds, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.distillation.optimizers import OptimizerConfig
from osd_jax.models import families, weights
from osd_tools import pretrain
from osd_tools.batches import BatchStream

MODEL = dataclasses.replace(testing.TINY_DRAFT, vocab_size=1536)
TASKS = tuple(topic_task(topic, rows=40) for topic in ("maths", "sql"))


@pytest.fixture(scope="module")
def stream(repository) -> BatchStream:
  vocabulary = Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")
  return BatchStream(BatchConfig(TASKS, 4, 48, 48), vocabulary)


def without_padding(batch) -> list[tuple]:
  """Returns the rows of a batch as (source, target) without padding."""
  cut = lambda tokens: tuple(tokens[tokens != 0].tolist())
  return [(cut(s), cut(t)) for s, t in zip(batch.source, batch.target, strict=True)]


def config(folder, **changes) -> pretrain.PretrainConfig:
  tasks = tuple(dataclasses.replace(task, rows=8) for task in TASKS)
  data = BatchConfig(tasks, 4, source_length=32, target_length=32)
  return pretrain.PretrainConfig(
    **{
      "model": MODEL,
      "vocabulary": "shipped:demo_vocabulary.model",
      "data": data,
      "evaluation": data,
      "output": str(folder / "out.safetensors"),
      "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
      "steps": 12,
      "pool": 2,
      "length_multiple": 32,
      "log_every": 4,
      "evaluation_batches": 1,
      "checkpoint_every": 6,
      "run_directory": str(folder / "run"),
      **changes,
    }
  )


@pytest.mark.parametrize("pool", [1, 8])
def test_regrouping_keeps_every_row_once_and_shortens_batches(stream, pool):
  drawn = [stream[offset] for offset in range(pool)]
  batches = pretrain.regrouped(stream, pool, 0, multiple=8)
  assert len(batches) == pool
  for tokens in (ids for batch in batches for ids in (batch.source, batch.target)):
    longest = (tokens != 0).sum(1).max()
    assert longest <= tokens.shape[1] < longest + 8
  rows, expected = (
    sorted(row for batch in some for row in without_padding(batch))
    for some in (batches, drawn)
  )
  assert rows == expected
  spread, before = (
    np.mean([np.ptp((batch.target != 0).sum(1)) for batch in some])
    for some in (batches, drawn)
  )
  assert pool == 1 or spread < 0.5 * before


def test_judge_accepts_exactly_the_greedy_output():
  model = families.build(testing.TINY_DRAFT)
  params = jax.tree.map(lambda x: 2 * x, model.init(jax.random.key(3)))
  source, mask = testing.random_sources(4, 6, 64, seed=0)
  served, length = model.prepare(params), 8
  cache = model.prefill(served, source, mask, state_lib.buffer_length(length))
  settings = sampling.make_settings(4, max_length=length)
  state = state_lib.initial_state(
    model.starts(source), settings, cache, None, length, 0, 64
  )
  spec = rounds.DecodeSpec(model)
  while (np.asarray(state.stop_reason) == base.StopReason.RUNNING).any():
    state = rounds.run_rounds(spec, 0, served, None, jnp.int32(99), state)
  written = np.asarray(state.tokens[:, :length])
  written = np.where(np.arange(length) < np.asarray(state.length)[:, None], written, 0)
  share, exact = pretrain.judge(model, params, source, written)
  assert np.all(exact) and np.all(share == 1)
  # Negative control: one wrong token per row.
  wrong = written.copy()
  wrong[:, 0] = np.where(wrong[:, 0] == 7, 8, 7)
  share, exact = pretrain.judge(model, params, source, wrong)
  assert not np.any(exact) and np.all(share < 1)


def test_training_lowers_the_loss_and_resumed_run_matches_uninterrupted_run(tmp_path):
  pretrain.run(config(tmp_path / "whole"))
  rows = list(runs.read(tmp_path / "whole" / "run" / "metrics.jsonl"))
  losses = [row["loss"] for row in rows if row["kind"] == "step"]
  assert len(losses) == 3 and losses[-1] < losses[0]

  class Stopped(Exception):
    pass

  def stop(*_):
    raise Stopped

  with pytest.MonkeyPatch.context() as patch:
    # The evaluation at step 9 comes after the checkpoint of step 6.
    patch.setattr(pretrain, "evaluate", stop)
    with pytest.raises(Stopped):
      pretrain.run(config(tmp_path / "cut", evaluate_every=9))
  pretrain.run(config(tmp_path / "cut", evaluate_every=9))
  whole, again = (
    weights.load(tmp_path / name / "out.safetensors") for name in ("whole", "cut")
  )
  for one, other in zip(
    jax.tree.leaves(whole.params), jax.tree.leaves(again.params), strict=True
  ):
    np.testing.assert_array_equal(one, other)
  steps = [
    row["step"]
    for row in runs.read(tmp_path / "cut" / "run" / "metrics.jsonl")
    if row["kind"] == "step"
  ]
  assert steps == [4, 8, 12]


def test_training_starts_from_stored_weights(tmp_path):
  pretrain.run(config(tmp_path / "first"))
  stored = tmp_path / "first" / "out.safetensors"

  def first_loss(name, **changes):
    made = config(tmp_path / name, steps=1, log_every=1, pool=1, **changes)
    pretrain.run(made)
    rows = runs.read(tmp_path / name / "run" / "metrics.jsonl")
    return next(row["loss"] for row in rows if row["kind"] == "step")

  drawn = first_loss("drawn")
  assert first_loss("tuned", start=str(stored)) < drawn - 0.1
  held = weights.load(tmp_path / "tuned" / "out.safetensors")
  # One step of AdamW moves a weight by about its learning rate.
  for one, other in zip(
    jax.tree.leaves(held.params),
    jax.tree.leaves(weights.load(stored).params),
    strict=True,
  ):
    np.testing.assert_allclose(one, other, atol=0.03)


def test_weights_of_another_shape_or_vocabulary_are_no_start(tmp_path):
  small = dataclasses.replace(MODEL, vocab_size=64)
  with pytest.raises(ValueError, match="T5Config.vocab_size: received 64.*1536"):
    pretrain.run(config(tmp_path, model=small))
  named = "PretrainConfig.start: .*"
  model = families.build(MODEL)
  params = model.init(jax.random.key(0))
  own = Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model")).fingerprint
  path = tmp_path / "start.safetensors"
  weights.save(path, weights.Weights(MODEL, params, "f" * 64))
  with pytest.raises(base.InputError, match=f"{named} was trained with"):
    pretrain.run(config(tmp_path, start=str(path)))
  weights.save(path, weights.Weights(MODEL, params, own))
  narrow = dataclasses.replace(MODEL, mlp_dim=MODEL.mlp_dim // 2)
  with pytest.raises(base.InputError, match=f"{named} expected the shape"):
    pretrain.run(config(tmp_path, start=str(path), model=narrow))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_losses_on_four_devices_equal_those_on_one(tmp_path):
  """Compares the losses before and after the first step, so also its gradient."""

  def losses(name, partition):
    changes = {"steps": 2, "log_every": 1, "partition": partition}
    pretrain.run(config(tmp_path / name, **changes))
    rows = runs.read(tmp_path / name / "run" / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "step"]

  one = losses("one", sharding.PartitionConfig())
  four = losses("four", sharding.PartitionConfig(2, 2))
  assert len(one) == 2 and one[0] != one[1]
  np.testing.assert_allclose(four, one, rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"evaluation_batches": 0}, "evaluation_batches"),
    ({"storage": "int8"}, "storage"),
    ({"output": "/dev/null/w"}, "output"),
    ({"output": "."}, "output"),
  ],
)
def test_invalid_settings_are_refused_before_the_run_starts(
  tmp_path, monkeypatch, changes, named
):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(base.InputError, match=rf"PretrainConfig\.{named}: received"):
    pretrain.run(config(tmp_path, **changes))
  assert not list(tmp_path.iterdir())
