import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.progress
import tabular_pair
import tiny_pair

from osd_jax import base, corpus, offline, runs, sharding
from osd_jax.data.batches import BatchConfig
from osd_jax.data.sources import TaskConfig
from osd_jax.distillation import update as updates
from osd_jax.engine import engine
from osd_jax.models import mixture, weights

pytestmark = pytest.mark.slow

DECODING = engine.DecodingConfig(
  rows=3,
  source_lengths=(tabular_pair.SOURCE_LENGTH,),
  target_length=tabular_pair.TARGET_LENGTH,
  record_top_k=tabular_pair.VOCAB_SIZE,
)
COUNT = 12


@pytest.fixture(scope="module")
def pair():
  return tabular_pair.make()


@pytest.fixture(scope="module")
def plain(pair):
  """What target and draft write greedily, [N, T] each."""

  def tokens(model, params):
    writer = engine.Engine(DECODING, model, params)
    prompts = tabular_pair.prompts(COUNT)
    answers = writer.run(corpus.requests(prompts, engine.SamplingConfig()))
    return np.stack([done.tokens for done in answers])

  target = tokens(pair.target, pair.target_params)
  draft = tokens(pair.draft, pair.draft_params)
  assert (target != draft).any(axis=1).all()
  return target, draft


def written(pair, rows=3, temperature=0.0, **values):
  return corpus.generate(
    corpus.TextsConfig(**values),
    dataclasses.replace(DECODING, rows=rows),
    engine.SamplingConfig(temperature=temperature),
    pair,
    sharding.PartitionConfig(),
    tabular_pair.prompts(COUNT),
    rich.progress.Progress(rich.progress.TextColumn("{task.fields[figures]}")),
  )


def test_teacher_texts_are_the_targets_and_student_texts_the_drafts(pair, plain):
  target, draft = plain
  np.testing.assert_array_equal(written(pair).target, target)
  student = written(pair, sample_source="student")
  np.testing.assert_array_equal(student.target, draft)


@pytest.mark.parametrize("source", corpus.SAMPLE_SOURCES)
def test_the_target_judges_whatever_was_written(pair, source):
  rows = written(pair, sample_source=source)
  logits = pair.target.score(pair.target_params, rows.source, None, rows.target)
  expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
  found = np.zeros_like(expected)
  ids = rows.records.ids.astype(np.int64)
  np.put_along_axis(found, ids, rows.records.log_probs, axis=-1)
  usual = expected > -1e6  # end-of-sequence and padding are impossible
  np.testing.assert_allclose(found[usual], expected[usual], rtol=1e-4, atol=1e-5)
  assert rows.weight.tolist() == [1] * COUNT


def test_mix_request_takes_whole_texts_of_one_or_the_other(pair, plain):
  target, draft = plain
  rows = written(pair, sample_source="mix_request", seed=1)
  by_target = (rows.target == target).all(axis=1)
  by_draft = (rows.target == draft).all(axis=1)
  assert (by_target ^ by_draft).all()
  assert by_target.any() and by_draft.any()
  other = written(pair, sample_source="mix_request", seed=2)
  assert (rows.target != other.target).any()


@pytest.mark.parametrize("source", ["mix_request", "mix_token"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_mix_of_one_alone_is_that_one(pair, plain, source, share):
  rows = written(pair, sample_source=source, mix_share=share)
  np.testing.assert_array_equal(rows.target, plain[int(share)])


def test_mix_token_takes_every_token_from_one_or_the_other(pair):
  rows = written(pair, sample_source="mix_token", seed=1)
  first = [
    np.asarray(model.score(params, rows.source, None, rows.target).argmax(-1))
    for model, params in (
      (pair.target, pair.target_params),
      (pair.draft, pair.draft_params),
    )
  ]
  by_target, by_draft = (rows.target == choice for choice in first)
  assert (by_target | by_draft).all()
  differ = first[0] != first[1]
  share = by_draft[differ].mean()
  assert differ.sum() > 50 and 0.25 < share < 0.75


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mix_token_texts_do_not_depend_on_their_batch(pair, temperature):
  values = {"sample_source": "mix_token", "temperature": temperature, "seed": 1}
  rows = written(pair, **values)
  np.testing.assert_array_equal(rows.target, written(pair, rows=1, **values).target)
  # Negative control: they do depend on the seed of the coins.
  assert (rows.target != written(pair, **{**values, "seed": 9}).target).any()


def test_a_mixture_scores_what_it_decodes(pair):
  """Teacher forcing finds the very coins that decoding threw."""
  rows = written(pair, sample_source="mix_token", seed=1)
  mixed = mixture.mix(pair.target, pair.draft, 0.5, 1)
  params = {"target": pair.target_params, "draft": pair.draft_params}
  logits = mixed.score(params, jnp.asarray(rows.source), None, rows.target)
  np.testing.assert_array_equal(logits.argmax(-1), rows.target)
  other = mixture.mix(pair.target, pair.draft, 0.5, 9)
  logits = other.score(params, jnp.asarray(rows.source), None, rows.target)
  assert (np.asarray(logits.argmax(-1)) != rows.target).any()


def test_a_prompts_hash_does_not_depend_on_its_padding():
  source = jnp.asarray([[4, 5, 1, 0], [5, 4, 1, 0]], jnp.int32)
  short, long = mixture.fingerprint(source[:, :3]), mixture.fingerprint(source)
  np.testing.assert_array_equal(short, long)
  assert short[0] != short[1]


def test_epochs_hold_every_row_once_and_differ():
  rows = offline.shuffled(7, 0, 21, seed=3).reshape(3, 7)
  np.testing.assert_array_equal(np.sort(rows, axis=1), np.tile(np.arange(7), (3, 1)))
  assert (rows[0] != rows[1]).any()
  assert (rows.reshape(-1) != offline.shuffled(7, 0, 21, seed=4)).any()


def test_a_stretch_of_the_order_is_the_same_wherever_it_starts():
  whole = offline.shuffled(7, 0, 40, seed=3)
  for start in range(0, 36, 3):
    np.testing.assert_array_equal(
      offline.shuffled(7, start, 4, seed=3), whole[start : start + 4]
    )


def generated(split: str) -> BatchConfig:
  tasks = tuple(
    TaskConfig(
      name=f"generated_{topic}", kind="generated", topic=topic, split=split, rows=5
    )
    for topic in ("maths", "sql")
  )
  return BatchConfig(tasks=tasks, source_length=48, reader="plain")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> offline.OfflineConfig:
  folder = tmp_path_factory.mktemp("offline")
  return offline.OfflineConfig(
    corpus=generated("train"),
    evaluation=generated("eval"),
    output=str(folder / "distilled.safetensors"),
    evaluation_prompts=6,
    pair=tiny_pair.save_tiny_pair(folder),
    decoding=engine.DecodingConfig(
      rows=2,
      source_lengths=(48,),
      target_length=8,
      record_top_k=tiny_pair.VOCAB_SIZE,
    ),
    texts=corpus.TextsConfig(sample_source="mix_request"),
    update=updates.UpdateConfig(num_new=2, num_replay=2),
    steps=12,
    log_every=5,
    evaluate_every=6,
    checkpoint_every=4,
    run_directory=str(folder / "run"),
  )


@pytest.fixture(scope="module")
def finished(config):
  return offline.run(config).path


def logged(path):
  return list(runs.read(path / "metrics.jsonl"))


def test_learning_raises_held_out_overlap(config, finished):
  evaluations = [row for row in logged(finished) if row["kind"] == "evaluation"]
  assert [row["step"] for row in evaluations] == [0, 6, 12]
  for task in ("generated_maths", "generated_sql"):
    overlaps = [row["tasks"][task]["distribution_overlap"] for row in evaluations]
    assert overlaps[0] < overlaps[-1] <= 1
  losses = [row["loss"] for row in logged(finished) if row["kind"] == "step"]
  assert losses[-1] < losses[0]
  assert (finished / "report.html").is_file()


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_four_devices_distil_as_one(config, finished, tmp_path, mesh):
  four = offline.run(
    dataclasses.replace(
      config,
      partition=sharding.PartitionConfig(*mesh),
      output=str(tmp_path / "draft.safetensors"),
      run_directory=str(tmp_path / "run"),
    )
  ).path
  one, split = (
    [row for row in logged(path) if row["kind"] in ("step", "evaluation")]
    for path in (finished, four)
  )
  for name in ("generated_maths", "generated_sql"):
    first = [rows[0]["tasks"][name]["distribution_overlap"] for rows in (one, split)]
    assert first[0] == pytest.approx(first[1], abs=1e-5)
  losses = [[r["loss"] for r in rows if r["kind"] == "step"] for rows in (one, split)]
  np.testing.assert_allclose(*losses, rtol=1e-3)  # rounding grows with the steps


def test_the_saved_draft_is_another_one_of_the_same_shape(config, finished):
  before, after = weights.load(config.pair.draft), weights.load(config.output)
  assert before.config == after.config and before.vocabulary == after.vocabulary
  leaves = zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True)
  assert any((one != other).any() for one, other in leaves)
  assert "mix_request" in after.notes


def test_a_run_killed_between_checkpoints_ends_in_the_same_bits(
  config, finished, tmp_path, monkeypatch
):
  again = dataclasses.replace(
    config, output=str(tmp_path / "d.safetensors"), run_directory=str(tmp_path / "r")
  )
  step, said = offline.OfflineLoop.step, []

  def killed(loop):
    said.append(loop._figures())
    if loop.steps_taken == 7:  # past a checkpoint and an evaluation
      raise KeyboardInterrupt
    return step(loop)

  with monkeypatch.context() as patch:
    patch.setattr(offline.OfflineLoop, "step", killed)
    with pytest.raises(KeyboardInterrupt):
      offline.run(again)
  offline.run(again)
  assert "loss" not in said[0] and "nan" not in "".join(said), "only what is known"
  assert "loss" in said[-1] and "held-out overlap" in said[-1]
  assert logged(tmp_path / "r") == logged(finished)
  whole, continued = (weights.load(c.output) for c in (config, again))
  assert whole.notes == continued.notes
  jax.tree.map(np.testing.assert_array_equal, whole.params, continued.params)


def test_a_finished_run_started_again_writes_the_same_and_learns_nothing(
  config, finished, monkeypatch
):
  before = logged(finished)
  monkeypatch.setattr(offline.OfflineLoop, "step", None)  # would fail
  monkeypatch.setattr(corpus, "generate", None)
  offline.run(config)
  assert logged(finished) == before


def test_non_finite_steps_are_skipped_and_counted(config, tmp_path, monkeypatch):
  broken = dataclasses.replace(
    config,
    output=str(tmp_path / "d.safetensors"),
    run_directory=str(tmp_path / "r"),
    texts=corpus.TextsConfig(),
    steps=3,
  )
  batch = offline.OfflineLoop._batch

  def poisoned(loop, step):
    found = batch(loop, step)
    worth = np.float32(np.nan if step == 1 else 1)
    records = found.records.replace(log_probs=found.records.log_probs * worth)
    return found.replace(records=records)

  monkeypatch.setattr(offline.OfflineLoop, "_batch", poisoned)
  offline.run(broken)
  last = [row for row in logged(tmp_path / "r") if row["kind"] == "step"][-1]
  assert last["skipped"] == 1
  found = weights.load(broken.output)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("steps", 0),
    ("storage", "float16"),
    ("output", ""),
    ("output", "shipped:demo_attached_draft.safetensors"),  # would overwrite the start
    ("decoding", engine.DecodingConfig(record_top_k=0)),
    ("corpus", dataclasses.replace(generated("train"), source_length=65)),
  ],
)
def test_bad_values_are_named(field, value):
  values = {"corpus": generated("train"), "evaluation": generated("eval")}
  with pytest.raises(ValueError, match=f"OfflineConfig.{field}: received"):
    offline.OfflineConfig(**{"output": "x", **values, field: value})


@pytest.mark.parametrize(
  ("field", "value"), [("sample_source", "target"), ("mix_share", 1.5), ("seed", -1)]
)
def test_bad_text_values_are_named(field, value):
  with pytest.raises(ValueError, match=f"TextsConfig.{field}: received"):
    corpus.TextsConfig(**{field: value})


def test_padding_stays_out_of_the_rows(pair):
  """Tokens outside the mask are padding in every row, whoever wrote it."""
  rows = written(pair, sample_source="mix_request")
  assert (rows.target[~rows.mask] == base.PAD_ID).all()
  assert rows.mask.all()  # these models never end before the limit
