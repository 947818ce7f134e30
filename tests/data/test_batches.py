"""Batches: every row once an epoch, in the shares asked for, resumable."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from osd_jax.data.batches import BatchConfig, batches
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabularies import Vocabulary

TASKS = (
  TaskConfig("sql", kind="generated", topic="sql", limit=60),
  TaskConfig("maths", kind="generated", topic="maths", limit=20),
)


@pytest.fixture(scope="module")
def vocabulary(repository) -> Vocabulary:
  return Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")


def _config(**changes) -> BatchConfig:
  fields = {"tasks": TASKS, "batch_size": 8, "reader": "plain"}
  return BatchConfig(**{**fields, **changes})


def _write(folder, *objects) -> TaskConfig:
  (folder / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
  return TaskConfig("a", data_dir=str(folder), pattern="a.jsonl")


def _take(stream, count: int) -> list:
  return list(itertools.islice(stream, count))


def _assert_same(first: list, second: list) -> None:
  assert len(first) == len(second) > 0
  for one, other in zip(first, second, strict=True):
    for field in dataclasses.fields(one):
      np.testing.assert_array_equal(
        getattr(one, field.name), getattr(other, field.name)
      )


def _rows(found: list) -> list[tuple]:
  return [
    (tuple(s), tuple(t), int(i))
    for batch in found
    for s, t, i in zip(batch.source, batch.target, batch.task_id, strict=True)
  ]


def test_seqio_and_plain_give_the_same_batches(vocabulary):
  plain, seqio = (batches(_config(reader=r), vocabulary) for r in ("plain", "seqio"))
  _assert_same(_take(plain, 15), _take(seqio, 15))
  assert plain.report() == seqio.report()
  assert plain.state() == seqio.state()


def test_shapes_and_padding(vocabulary):
  batch = next(batches(_config(), vocabulary))
  assert batch.source.shape == (8, 64) and batch.target.shape == (8, 96)
  assert batch.source.dtype == batch.target.dtype == batch.task_id.dtype == np.int32
  for row in (*batch.source, *batch.target):
    (end,) = np.flatnonzero(row == 1)
    assert (row[:end] > 1).all() and not row[end + 1 :].any()


def test_rows_pair_a_prompt_with_its_own_reference(vocabulary):
  from osd_jax.data import generated

  known = {
    e.prompt: e.reference
    for topic, count in (("sql", 60), ("maths", 20))
    for e in generated.examples(topic, "train", count, 0)
  }
  batch = next(batches(_config(), vocabulary))
  for source, target in zip(batch.source, batch.target, strict=True):
    assert known[vocabulary.decode(source)] == vocabulary.decode(target)


def test_every_row_comes_once_an_epoch_in_a_new_order(vocabulary):
  stream = batches(_config(), vocabulary)
  assert stream.rows_per_epoch == 80
  first, second = _rows(_take(stream, 10)), _rows(_take(stream, 10))
  assert len(set(first)) == 80
  assert set(first) == set(second) and first != second
  assert collections.Counter(row[2] for row in first) == {0: 60, 1: 20}
  assert first != sorted(first, key=lambda row: row[2]), "tasks are interleaved"


def test_epochs_need_not_fall_on_a_batch_boundary(vocabulary):
  stream = batches(_config(batch_size=7), vocabulary)
  counts = collections.Counter(_rows(_take(stream, 80)))
  assert set(counts.values()) == {7} and len(counts) == 80


def test_weights_set_the_shares_and_rows_still_rotate(vocabulary):
  stream = batches(_config(weights=(1.0, 1.0)), vocabulary)
  found = _rows(_take(stream, 30))
  assert collections.Counter(row[2] for row in found) == {0: 120, 1: 120}
  counts = collections.Counter(found)
  assert sorted(set(counts.values())) == [2, 6]  # 60 sql rows, 20 maths rows


def test_resume_continues_exactly(vocabulary):
  expected = _take(batches(_config(batch_size=7), vocabulary), 40)
  stream = batches(_config(batch_size=7), vocabulary)
  _take(stream, 17)
  resumed = batches(_config(batch_size=7), vocabulary)
  resumed.restore(json.loads(json.dumps(stream.state())))
  _assert_same(_take(resumed, 23), expected[17:])
  _assert_same([resumed[3]], expected[3:4])


def test_the_seed_decides_the_order(vocabulary):
  same = [_take(batches(_config(seed=3), vocabulary), 3) for _ in range(2)]
  _assert_same(*same)
  other = _take(batches(_config(seed=4), vocabulary), 3)
  assert _rows(other) != _rows(same[0])


def test_a_state_of_other_batches_is_refused(vocabulary):
  state = batches(_config(), vocabulary).state()
  for other in (_config(seed=1), _config(batch_size=4), _config(limit_rows=5)):
    with pytest.raises(ValueError, match="another config"):
      batches(other, vocabulary).restore(state)
  with pytest.raises(ValueError, match="BatchStream.restore: step"):
    batches(_config(), vocabulary).restore({**state, "step": -1})


@pytest.mark.parametrize(("limit", "sizes"), [(10, (10, 10)), ((30, 500), (30, 20))])
def test_limit_rows_keeps_a_seeded_choice(vocabulary, limit, sizes):
  stream = batches(_config(limit_rows=limit), vocabulary)
  assert stream.rows_per_epoch == sum(sizes)
  kept = {row for row in _rows(_take(stream, 20)) if row[2] == 0}
  assert len(kept) == sizes[0]
  again = batches(_config(limit_rows=limit), vocabulary)
  assert {row for row in _rows(_take(again, 20)) if row[2] == 0} == kept
  other = batches(_config(limit_rows=limit, seed=1), vocabulary)
  assert {row for row in _rows(_take(other, 20)) if row[2] == 0} != kept


def test_cut_targets_lose_their_end_and_cut_prompts_keep_it(tmp_path, vocabulary):
  long, short = "word " * 50, "word"
  task = _write(
    tmp_path,
    {"prompt": long, "reference": short},
    {"prompt": short, "reference": long},
  )
  config = _config(tasks=(task,), batch_size=2, source_length=10, target_length=12)
  stream = batches(config, vocabulary)
  batch = next(stream)
  row = int(batch.source[0, -1] == 0)  # the row whose prompt is long
  assert batch.source[row, -1] == 1 and (batch.source[row, :-1] > 1).all()
  assert (batch.target[1 - row] > 1).all(), "nothing says that it ends here"
  assert 1 in batch.target[row]
  report = stream.report()
  assert (report["truncated_source"], report["truncated_target"]) == (1, 1)


def test_rows_without_reference_are_left_out_and_counted(tmp_path, vocabulary):
  task = _write(tmp_path, {"prompt": "a", "reference": "b"}, {"prompt": "c"})
  stream = batches(_config(tasks=(task,)), vocabulary)
  assert stream.rows_per_epoch == 1
  assert stream.report()["skipped_no_reference"] == 1
  kept = batches(_config(tasks=(task,), require_reference=False), vocabulary)
  assert kept.rows_per_epoch == 2
  assert kept.report()["skipped_no_reference"] == 0
  task = _write(tmp_path, {"prompt": "c"})
  with pytest.raises(ValueError, match="none with a reference"):
    batches(_config(tasks=(task,)), vocabulary)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tasks": ()}, "BatchConfig.tasks"),
    ({"tasks": (TASKS[0], TASKS[0])}, "BatchConfig.tasks.*every task once"),
    ({"batch_size": 0}, "BatchConfig.batch_size"),
    ({"source_length": 1}, "BatchConfig.source_length"),
    ({"target_length": 0}, "BatchConfig.target_length"),
    ({"seed": -1}, "BatchConfig.seed"),
    ({"reader": "csv"}, "BatchConfig: reader"),
    ({"limit_rows": 0}, "BatchConfig.limit_rows"),
    ({"limit_rows": (1,)}, "BatchConfig.limit_rows"),
    ({"weights": (1.0, 0.0)}, "BatchConfig.weights"),
  ],
)
def test_bad_configs_are_refused_by_field(fields, message):
  with pytest.raises(ValueError, match=message):
    _config(**fields)
