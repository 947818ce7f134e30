"""Streams: the schedule follows its kind, resumes exactly, survives bad lines."""

import dataclasses
import json

import numpy as np
import pytest

from osd_jax.data.sources import TaskConfig
from osd_jax.data.streams import SCHEDULES, QueryStream, StreamConfig, schedule
from osd_jax.data.vocabularies import Vocabulary

TOPICS = ("maths", "sql", "python", "finance")
TASKS = tuple(
  TaskConfig(t, kind="generated", topic=t, split="stream", limit=30) for t in TOPICS
)


@pytest.fixture(scope="module")
def vocabulary(repository) -> Vocabulary:
  return Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")


def _config(**changes) -> StreamConfig:
  fields = {"tasks": TASKS, "requests_per_task": 40, "reader": "plain"}
  fields |= {"gradual_width": 20, "period": 10}
  if changes.get("kind") == "single":
    fields["tasks"] = TASKS[:1]
  return StreamConfig(**{**fields, **changes})


def _values(queries) -> list:
  return [
    (q.index, q.task, q.task_id, q.prompt, q.reference, q.tokens.tolist(), q.row_id)
    for q in queries
  ]


def _write(folder, *lines: bytes) -> TaskConfig:
  (folder / "a.jsonl").write_bytes(b"\n".join(lines))
  return TaskConfig("a", data_dir=str(folder), pattern="a.jsonl")


def test_seqio_and_plain_give_the_same_queries(vocabulary):
  streams = [
    QueryStream(_config(kind="mixture", reader=reader), vocabulary)
    for reader in ("plain", "seqio")
  ]
  assert streams[0].state() == streams[1].state()
  assert _values(streams[0]) == _values(streams[1])
  assert streams[0].report() == streams[1].report()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_resume_continues_exactly(vocabulary, kind):
  config = _config(kind=kind)
  expected = _values(QueryStream(config, vocabulary))
  stream = QueryStream(config, vocabulary)
  for _ in range(33):  # past the 30 rows: inside the second pass where single
    next(stream)
  state = json.loads(json.dumps(stream.state()))
  resumed = QueryStream(config, vocabulary)
  resumed.restore(state)
  assert resumed.report() == stream.report()
  assert _values(resumed) == expected[33:]
  assert len(expected) == len(stream)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_any_query_is_found_from_its_index(vocabulary, kind):
  stream = QueryStream(_config(kind=kind), vocabulary)
  late = _values([stream[37]])
  assert late == _values(list(stream)[37:38])


@pytest.mark.parametrize("kind", ["gradual", "mixture", "bursty"])
def test_the_seed_decides_the_schedule(kind):
  first, again = schedule(_config(kind=kind)), schedule(_config(kind=kind))
  np.testing.assert_array_equal(first, again)
  assert (schedule(_config(kind=kind, seed=1)) != first).any()


def test_no_global_generator_is_used(vocabulary):
  legacy = np.random.mtrand._rand
  before = legacy.get_state(legacy=False)["state"]["key"].copy()
  list(QueryStream(_config(kind="bursty"), vocabulary))
  after = legacy.get_state(legacy=False)["state"]["key"]
  np.testing.assert_array_equal(after, before)


def test_sharp_changes_once_per_task():
  np.testing.assert_array_equal(schedule(_config()), np.repeat(np.arange(4), 40))


def test_a_task_may_come_back_and_goes_on_with_new_rows(vocabulary):
  config = _config(tasks=(TASKS[0], TASKS[1], TASKS[0]), requests_per_task=15)
  stream = QueryStream(config, vocabulary)
  queries = list(stream)
  assert [q.task_id for q in queries[::15]] == [0, 1, 0]
  maths = [q.prompt for q in queries if q.task == "maths"]
  assert len(set(maths)) == 30, "the second visit does not repeat the first"
  assert stream.shifts() == [(0, "maths"), (15, "sql"), (30, "maths")]


def test_gradual_rises_linearly_around_the_boundary():
  config = _config(
    tasks=TASKS[:2], kind="gradual", requests_per_task=20_000, gradual_width=20_000
  )
  entries = schedule(config)
  assert not entries[:10_000].any() and entries[30_000:].all()
  shares = entries[10_000:30_000].reshape(10, 2000).mean(axis=1)
  np.testing.assert_allclose(shares, np.arange(0.05, 1, 0.1), atol=0.05)


def test_mixture_keeps_its_shares():
  weights = (4.0, 3.0, 2.0, 1.0)
  entries = schedule(_config(kind="mixture", requests_per_task=5000, weights=weights))
  shares = np.bincount(entries) / len(entries)
  np.testing.assert_allclose(shares, [0.4, 0.3, 0.2, 0.1], atol=0.02)
  equal = np.bincount(schedule(_config(kind="mixture", requests_per_task=5000)))
  assert np.abs(equal / equal.sum() - [0.4, 0.3, 0.2, 0.1]).max() > 0.1  # control


def test_cyclic_returns_after_every_period():
  entries = schedule(_config(kind="cyclic", period=10))
  np.testing.assert_array_equal(entries[:40], np.repeat(np.arange(4), 10))
  np.testing.assert_array_equal(entries[40:80], entries[:40])


def _mean_run(entries: np.ndarray) -> float:
  return len(entries) / (1 + np.count_nonzero(np.diff(entries)))


@pytest.mark.parametrize("mean", [1.0, 8.0, 40.0])
def test_bursts_have_their_mean_length_and_visit_all_tasks(mean):
  entries = schedule(_config(kind="bursty", requests_per_task=10_000, mean_burst=mean))
  assert _mean_run(entries) == pytest.approx(mean, rel=0.15)
  np.testing.assert_allclose(np.bincount(entries) / len(entries), 0.25, atol=0.06)


def test_a_mixture_is_not_bursty():  # control of the test above
  entries = schedule(_config(kind="mixture", requests_per_task=10_000))
  assert _mean_run(entries) < 2


def test_a_task_that_runs_out_starts_over_in_a_new_order(vocabulary):
  config = _config(tasks=TASKS[:1], kind="single", requests_per_task=75)
  stream = QueryStream(config, vocabulary)
  ids = [query.row_id for query in stream]
  assert len(set(ids[:30])) == len(set(ids[30:60])) == 30
  assert ids[:30] != ids[30:60]
  task = stream.report()["tasks"]["maths"]
  assert (task["served"], task["epochs"], task["rows"]) == (75, 3, 30)


def test_unshuffled_keeps_the_order_of_the_source(vocabulary):
  config = _config(tasks=TASKS[:1], kind="single", shuffle=False)
  ids = [q.row_id.rsplit(":", 1)[1] for q in QueryStream(config, vocabulary)]
  assert ids == [str(1 + i % 30) for i in range(40)]


def test_the_order_of_a_task_does_not_depend_on_its_neighbours(vocabulary):
  alone = QueryStream(_config(tasks=TASKS[2:3], kind="single"), vocabulary)
  among = QueryStream(_config(), vocabulary)
  assert [q.prompt for q in alone] == [q.prompt for q in list(among)[80:120]]


def test_long_prompts_are_cut_and_counted(vocabulary):
  whole = QueryStream(_config(), vocabulary)
  cut = QueryStream(_config(source_length=12), vocabulary)
  assert whole.report()["truncated"] == 0 < cut.report()["truncated"] <= 120
  too_long = 0
  for full, short in zip(whole, cut, strict=True):
    assert full.prompt == short.prompt and short.tokens[-1] == 1
    assert len(short.tokens) == min(len(full.tokens), 12)
    kept = len(short.tokens) - 1
    np.testing.assert_array_equal(short.tokens[:-1], full.tokens[:kept])
    too_long += len(full.tokens) > 12
  assert too_long > 0


BAD_LINES = {
  b"": "empty",
  b"   \t": "empty",
  b'{"prompt": " "}': "empty",
  b"not json": "malformed",
  b'{"prompt": "cut o': "malformed",
  b"[1, 2]": "malformed",
  b"3": "malformed",
  b"null": "malformed",
  b'{"reference": "a"}': "malformed",
  b'{"prompt": 5}': "malformed",
  b'{"prompt": null}': "malformed",
  b'{"prompt": "ok", "reference": [1]}': "malformed",
  b'{"prompt": "\xff\xfe"}': "malformed",
  b'{"prompt": "\\ud800"}': "malformed",
  b"[" * 100_000: "malformed",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: repr(line[:24]))
def test_a_bad_line_is_skipped_and_counted_at_its_place(tmp_path, vocabulary, bad):
  task = _write(tmp_path, b'{"prompt": "one"}', bad, b'{"prompt": "three"}')
  config = _config(tasks=(task,), kind="single", shuffle=False)
  stream = QueryStream(config, vocabulary)
  assert [next(stream).prompt for _ in range(2)] == ["one", "three"]
  report = stream.report()
  counts = {kind: report[f"skipped_{kind}"] for kind in ("empty", "malformed")}
  assert counts == {"empty": 0, "malformed": 0, BAD_LINES[bad]: 1}
  (place,) = report["tasks"]["a"]["skipped_at"]
  assert place.startswith(f"{tmp_path / 'a.jsonl'}:2: {BAD_LINES[bad]}: ")
  json.dumps(report)


def test_all_bad_lines_together_through_both_readers(tmp_path, vocabulary):
  task = _write(tmp_path, *BAD_LINES, b'{"prompt": "last"}')
  config = _config(tasks=(task,), kind="single", requests_per_task=2)
  plain, seqio = (
    QueryStream(dataclasses.replace(config, reader=reader), vocabulary)
    for reader in ("plain", "seqio")
  )
  assert plain.report() == seqio.report()
  assert plain.report()["skipped_empty"] == 3
  assert plain.report()["skipped_malformed"] == 12
  assert [q.prompt for q in seqio] == ["last", "last"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path, vocabulary):
  task = _write(tmp_path, b'\xef\xbb\xbf{"prompt": "one"}\r', b'{"prompt": "two"}\r')
  stream = QueryStream(_config(tasks=(task,), kind="single", shuffle=False), vocabulary)
  assert [next(stream).prompt for _ in range(2)] == ["one", "two"]
  assert stream.report()["skipped_malformed"] == 0


@pytest.mark.parametrize("reader", ["plain", "seqio"])
@pytest.mark.parametrize("lines", [(b"",), (b"nonsense", b'{"prompt": ""}')])
def test_a_stream_without_a_usable_line_is_an_error(
  tmp_path, vocabulary, reader, lines
):
  task = _write(tmp_path, *lines)
  with pytest.raises(ValueError, match="'a': no usable line"):
    QueryStream(_config(tasks=(task,), kind="single", reader=reader), vocabulary)


def test_a_state_of_another_stream_is_refused(tmp_path, vocabulary):
  stream = QueryStream(_config(), vocabulary)
  state = stream.state()
  for other in (_config(seed=1), _config(kind="cyclic"), _config(source_length=20)):
    with pytest.raises(ValueError, match="another stream config"):
      QueryStream(other, vocabulary).restore(state)
  with pytest.raises(ValueError, match=r"expected an integer in 0\.\.160"):
    stream.restore({**state, "index": 161})
  task = _write(tmp_path, b'{"prompt": "one"}')
  config = _config(tasks=(task,), kind="single")
  state = QueryStream(config, vocabulary).state()
  _write(tmp_path, b'{"prompt": "two"}')
  with pytest.raises(ValueError, match="another stream config, vocabulary or data"):
    QueryStream(config, vocabulary).restore(state)


def test_labels_come_from_source(vocabulary):
  tasks = tuple(dataclasses.replace(t, source="demo " + t.name) for t in TASKS)
  stream = QueryStream(_config(tasks=tasks), vocabulary)
  assert stream.labels == tuple("demo " + t for t in TOPICS)
  assert next(stream).task == "demo maths"
  assert stream.shifts()[1] == (40, "demo sql")


def test_the_config_is_hashable_and_compares_by_value():
  assert hash(_config()) == hash(_config()) and _config() == _config()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tasks": ()}, "StreamConfig.tasks"),
    ({"tasks": list(TASKS)}, "StreamConfig.tasks.*a tuple"),
    ({"kind": "random"}, "StreamConfig.kind.*bursty"),
    ({"kind": "single", "tasks": TASKS}, "StreamConfig.tasks.*exactly one"),
    ({"kind": "cyclic", "tasks": TASKS[:1]}, "StreamConfig.tasks.*two or more"),
    ({"requests_per_task": 0}, "StreamConfig.requests_per_task"),
    ({"seed": -1}, "StreamConfig.seed"),
    ({"reader": "csv"}, "StreamConfig: reader.*plain"),
    ({"source_length": 1}, "StreamConfig.source_length"),
    ({"kind": "gradual", "gradual_width": 41}, "StreamConfig.gradual_width"),
    ({"period": 0}, "StreamConfig.period"),
    ({"mean_burst": 0.5}, "StreamConfig.mean_burst"),
    ({"weights": (1.0,)}, "StreamConfig.weights"),
    ({"weights": (1.0, 1.0, 1.0, -1.0)}, "StreamConfig.weights"),
    (
      {"tasks": (TASKS[0], dataclasses.replace(TASKS[0], limit=3))},
      r"TaskConfig\.name.*two different tasks",
    ),
  ],
)
def test_bad_configs_are_refused_by_field(fields, message):
  with pytest.raises(ValueError, match=message):
    _config(**fields)
