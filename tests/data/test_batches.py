"""Corpora and batches: epochs, limits, resumption, cut and missing texts."""

import collections
import json

import numpy as np
import pytest

from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.data.examples import TaskConfig, topic_examples, topic_task
from osd_tools.batches import BatchStream

TASKS = (topic_task("sql", rows=60), topic_task("maths", rows=20))


def _config(**changes) -> BatchConfig:
  return BatchConfig(**{"tasks": TASKS, "batch_size": 8, **changes})


def _write(folder, *objects) -> TaskConfig:
  (folder / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
  return TaskConfig("a", data_dir=str(folder), pattern="a.jsonl")


def _rows(stream: BatchStream, steps) -> list[tuple]:
  return [
    (tuple(s), tuple(t), int(i))
    for batch in map(stream.__getitem__, steps)
    for s, t, i in zip(batch.source, batch.target, batch.task_id, strict=True)
  ]


def test_batches_are_padded_and_pair_prompts_with_their_references(vocabulary):
  known = {
    e.prompt: e.reference
    for topic, count in (("sql", 60), ("maths", 20))
    for e in topic_examples(topic, "train", count)
  }
  batch = BatchStream(_config(), vocabulary)[0]
  assert batch.source.shape == (8, 64) and batch.target.shape == (8, 96)
  assert batch.source.dtype == batch.target.dtype == batch.task_id.dtype == np.int32
  for row in (*batch.source, *batch.target):
    (end,) = np.flatnonzero(row == 1)
    assert (row[:end] > 1).all() and not row[end + 1 :].any()
  for source, target in zip(batch.source, batch.target, strict=True):
    assert known[vocabulary.decode(source)] == vocabulary.decode(target)


def test_every_epoch_has_every_row_once_in_a_new_order(vocabulary):
  stream = BatchStream(_config(), vocabulary)
  first, second = _rows(stream, range(10)), _rows(stream, range(10, 20))
  assert len(set(first)) == 80
  assert set(first) == set(second) and first != second
  assert collections.Counter(row[2] for row in first) == {0: 60, 1: 20}
  assert first != sorted(first, key=lambda row: row[2]), "tasks are interleaved"
  # 80 batches of 7 are 560 rows, which is 7 epochs of 80 rows.
  uneven = BatchStream(_config(batch_size=7), vocabulary)
  counts = collections.Counter(_rows(uneven, range(80)))
  assert set(counts.values()) == {7} and len(counts) == 80


def test_batches_depend_only_on_seed_and_step(vocabulary):
  expected = _rows(BatchStream(_config(batch_size=7), vocabulary), range(17, 40))
  again = BatchStream(_config(batch_size=7), vocabulary)
  assert _rows(again, range(39, 16, -1))[-7:] == expected[:7]
  assert _rows(again, range(17, 40)) == expected
  other = BatchStream(_config(batch_size=7, seed=4), vocabulary)
  assert _rows(other, range(17, 40)) != expected


@pytest.mark.parametrize(("limit", "sizes"), [(10, (10, 10)), ((30, 500), (30, 20))])
def test_limit_rows_keeps_a_seeded_selection(vocabulary, limit, sizes):
  def kept(**changes):
    corpus = read_corpus(_config(limit_rows=limit, **changes), vocabulary)
    assert [sum(e.task_id == i for e in corpus) for i in (0, 1)] == list(sizes)
    return {tuple(e.tokens) for e in corpus if e.task_id == 0}

  assert kept() == kept() != kept(seed=1)


def test_cut_prompts_keep_their_end_token_and_cut_references_lose_it(
  tmp_path, vocabulary
):
  long, short = "word " * 50, "word"
  task = _write(
    tmp_path, {"prompt": long, "reference": short}, {"prompt": short, "reference": long}
  )
  config = _config(tasks=(task,), batch_size=2, source_length=10, target_length=12)
  stream = BatchStream(config, vocabulary)
  batch = stream[0]
  row = int(batch.source[0, -1] == 0)  # the row whose prompt is long
  assert batch.source[row, -1] == 1 and (batch.source[row, :-1] > 1).all()
  assert (batch.target[1 - row] > 1).all(), "a cut reference has no end token"
  assert 1 in batch.target[row]
  report = stream.corpus.report["a"]
  assert (report["cut_prompts"], report["cut_references"]) == (1, 1)
  assert stream.corpus.sentences == [
    "a: 1 prompt cut to 10 tokens: a.jsonl:1; 1 reference cut to 12 tokens: a.jsonl:2."
  ]


def test_missing_references_are_empty_or_left_out_on_request(tmp_path, vocabulary):
  task = _write(tmp_path, {"prompt": "one", "reference": "b"}, {"prompt": "two"})
  whole = read_corpus(_config(tasks=(task,)), vocabulary)
  lengths = {vocabulary.decode(e.tokens): len(e.reference) for e in whole}
  assert lengths["two"] == 0 and lengths["one"] >= 2  # the text and end-of-sequence
  assert whole.report["a"]["without_reference"] == 0 and not whole.sentences
  corpus = BatchStream(_config(tasks=(task,)), vocabulary).corpus
  assert len(corpus) == corpus.report["a"]["without_reference"] == 1
  assert corpus.sentences == ["a: 1 without reference left out: a.jsonl:2."]
  task = _write(tmp_path, {"prompt": "c"})
  with pytest.raises(ValueError, match="none with a reference"):
    BatchStream(_config(tasks=(task,)), vocabulary)


def test_corpus_has_every_example_once(vocabulary):
  texts = [vocabulary.decode(e.tokens) for e in read_corpus(_config(), vocabulary)]
  assert len(set(texts)) == len(texts) == 80
  for count in (4, 100):
    some = read_corpus(_config(), vocabulary, count)
    assert [vocabulary.decode(e.tokens) for e in some] == texts[:count]
