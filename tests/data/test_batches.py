"""Corpora and batches: epochs, task shares, resumption, cut texts."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.data.examples import TaskConfig, topic_examples, topic_task
from osd_jax.data.vocabulary import Vocabulary
from osd_tools.batches import BatchStream

TASKS = (topic_task("sql", rows=60), topic_task("maths", rows=20))


@pytest.fixture(scope="module")
def vocabulary(repository) -> Vocabulary:
  return Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")


def _config(**changes) -> BatchConfig:
  fields = {"tasks": TASKS, "batch_size": 8}
  return BatchConfig(**{**fields, **changes})


def _write(folder, *objects) -> TaskConfig:
  (folder / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
  return TaskConfig("a", data_dir=str(folder), pattern="a.jsonl")


def _take(stream, count: int, start: int = 0) -> list:
  return [stream[start + step] for step in range(count)]


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


def test_batches_have_fixed_shapes_and_zero_padding(vocabulary):
  batch = BatchStream(_config(), vocabulary)[0]
  assert batch.source.shape == (8, 64) and batch.target.shape == (8, 96)
  assert batch.source.dtype == batch.target.dtype == batch.task_id.dtype == np.int32
  for row in (*batch.source, *batch.target):
    (end,) = np.flatnonzero(row == 1)
    assert (row[:end] > 1).all() and not row[end + 1 :].any()


def test_rows_pair_a_prompt_with_its_own_reference(vocabulary):
  known = {
    e.prompt: e.reference
    for topic, count in (("sql", 60), ("maths", 20))
    for e in topic_examples(topic, "train", count)
  }
  batch = BatchStream(_config(), vocabulary)[0]
  for source, target in zip(batch.source, batch.target, strict=True):
    assert known[vocabulary.decode(source)] == vocabulary.decode(target)


def test_every_epoch_has_every_row_once_in_a_new_order(vocabulary):
  stream = BatchStream(_config(), vocabulary)
  assert stream.rows_per_epoch == 80
  first, second = _rows(_take(stream, 10)), _rows(_take(stream, 10, start=10))
  assert len(set(first)) == 80
  assert set(first) == set(second) and first != second
  assert collections.Counter(row[2] for row in first) == {0: 60, 1: 20}
  assert first != sorted(first, key=lambda row: row[2]), "tasks are interleaved"


def test_epochs_need_not_fall_on_a_batch_boundary(vocabulary):
  stream = BatchStream(_config(batch_size=7), vocabulary)
  counts = collections.Counter(_rows(_take(stream, 80)))
  # 80 batches of 7 are 560 rows, which is 7 epochs of 80 rows.
  assert set(counts.values()) == {7} and len(counts) == 80


def test_weights_set_task_shares_and_rows_are_used_evenly(vocabulary):
  stream = BatchStream(_config(weights=(1.0, 1.0)), vocabulary)
  found = _rows(_take(stream, 30))
  assert collections.Counter(row[2] for row in found) == {0: 120, 1: 120}
  counts = collections.Counter(found)
  assert sorted(set(counts.values())) == [2, 6]  # 60 sql rows, 20 maths rows


def test_batches_depend_only_on_their_step(vocabulary):
  expected = _take(BatchStream(_config(batch_size=7), vocabulary), 40)
  other = BatchStream(_config(batch_size=7), vocabulary)
  _assert_same(_take(other, 23, start=17), expected[17:])
  _assert_same([other[3]], expected[3:4])


def test_order_depends_on_the_seed(vocabulary):
  same = [_take(BatchStream(_config(seed=3), vocabulary), 3) for _ in range(2)]
  _assert_same(*same)
  other = _take(BatchStream(_config(seed=4), vocabulary), 3)
  assert _rows(other) != _rows(same[0])


@pytest.mark.parametrize(("limit", "sizes"), [(10, (10, 10)), ((30, 500), (30, 20))])
def test_limit_rows_keeps_a_seeded_selection(vocabulary, limit, sizes):
  stream = BatchStream(_config(limit_rows=limit), vocabulary)
  assert stream.rows_per_epoch == sum(sizes)
  kept = {row for row in _rows(_take(stream, 20)) if row[2] == 0}
  assert len(kept) == sizes[0]
  again = BatchStream(_config(limit_rows=limit), vocabulary)
  assert {row for row in _rows(_take(again, 20)) if row[2] == 0} == kept
  other = BatchStream(_config(limit_rows=limit, seed=1), vocabulary)
  assert {row for row in _rows(_take(other, 20)) if row[2] == 0} != kept


def test_cut_prompts_keep_their_end_token_and_cut_references_lose_it(
  tmp_path, vocabulary
):
  long, short = "word " * 50, "word"
  task = _write(
    tmp_path,
    {"prompt": long, "reference": short},
    {"prompt": short, "reference": long},
  )
  config = _config(tasks=(task,), batch_size=2, source_length=10, target_length=12)
  stream = BatchStream(config, vocabulary)
  batch = stream[0]
  row = int(batch.source[0, -1] == 0)  # the row whose prompt is long
  assert batch.source[row, -1] == 1 and (batch.source[row, :-1] > 1).all()
  assert (batch.target[1 - row] > 1).all(), "a cut reference has no end token"
  assert 1 in batch.target[row]
  report = stream.report()["a"]
  assert (report["cut_prompts"], report["cut_references"]) == (1, 1)
  assert stream.sentences() == [
    "a: 1 prompts cut to 10 tokens: a.jsonl:1;"
    " 1 references cut to 12 tokens: a.jsonl:2."
  ]


def test_batches_omit_and_count_examples_without_reference(tmp_path, vocabulary):
  task = _write(tmp_path, {"prompt": "a", "reference": "b"}, {"prompt": "c"})
  stream = BatchStream(_config(tasks=(task,)), vocabulary)
  assert stream.rows_per_epoch == 1
  assert stream.report()["a"]["without_reference"] == 1
  assert stream.sentences() == ["a: 1 without reference left out: a.jsonl:2."]
  kept = read_corpus(_config(tasks=(task,)), vocabulary)
  assert len(kept) == 2
  assert kept.report["a"]["without_reference"] == 0 and not kept.sentences
  task = _write(tmp_path, {"prompt": "c"})
  with pytest.raises(ValueError, match="none with a reference"):
    BatchStream(_config(tasks=(task,)), vocabulary)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tasks": ()}, "BatchConfig.tasks"),
    ({"tasks": (TASKS[0], TASKS[0])}, "BatchConfig.tasks.*each of them once"),
    ({"batch_size": 0}, "BatchConfig.batch_size"),
    ({"source_length": 1}, "BatchConfig.source_length"),
    ({"target_length": 0}, "BatchConfig.target_length"),
    ({"seed": -1}, "BatchConfig.seed"),
    ({"batch_size": 1.5}, "BatchConfig.batch_size.*int"),
    ({"seed": "0"}, "BatchConfig.seed"),
    ({"limit_rows": True}, "BatchConfig.limit_rows"),
    ({"limit_rows": (1, 0)}, "BatchConfig.limit_rows"),
    ({"weights": (1.0, float("nan"))}, "BatchConfig.weights"),
    ({"limit_rows": 0}, "BatchConfig.limit_rows"),
    ({"limit_rows": (1,)}, "BatchConfig.limit_rows"),
    ({"weights": (1.0, 0.0)}, "BatchConfig.weights"),
  ],
)
def test_invalid_config_error_names_the_field(fields, message):
  with pytest.raises(ValueError, match=message):
    _config(**fields)


# ---- Corpora


def _corpus(folder, lines) -> BatchConfig:
  return _config(tasks=(_write(folder, *lines),), target_length=4)


def test_corpus_has_every_example_once(vocabulary, tmp_path):
  lines = [{"prompt": f"add {n} and 1", "reference": str(n + 1)} for n in range(9)]
  config = _corpus(tmp_path, lines)
  for count, expected in ((None, 9), (4, 4), (100, 9)):
    found = read_corpus(config, vocabulary, count)
    texts = [vocabulary.decode(example.tokens) for example in found]
    assert len(texts) == len(set(texts)) == expected
    assert set(texts) <= {line["prompt"] for line in lines}


def test_missing_reference_is_empty_in_a_corpus(vocabulary, tmp_path):
  lines = [{"prompt": "one"}, {"prompt": "two", "reference": "2"}]
  found = read_corpus(_corpus(tmp_path, lines), vocabulary)
  lengths = {vocabulary.decode(e.tokens): len(e.reference) for e in found}
  assert lengths["one"] == 0
  assert lengths["two"] >= 2  # negative control: the text and end-of-sequence
