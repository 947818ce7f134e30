"""Query streams: schedules, reports of skipped and cut prompts, exact resumption."""

import dataclasses
import functools
import itertools
import json
import os

import numpy as np
import pytest

from osd_jax import base
from osd_jax.data import streams
from osd_jax.data.examples import TOPICS, TaskConfig, topic_task
from osd_jax.data.streams import SCHEDULES, QueryStream, StreamConfig, of_prompts
from osd_jax.data.vocabulary import Vocabulary

TASKS = tuple(topic_task(topic, "stream", 30) for topic in TOPICS)


def _config(**changes) -> StreamConfig:
  return StreamConfig(**{"tasks": TASKS, "requests_per_task": 40, **changes})


def schedule(config: StreamConfig, sizes=None) -> np.ndarray:
  return streams.schedule(config, sizes or [30] * len(config.tasks))


def _values(queries) -> list:
  return [
    (q.index, q.task, q.task_id, q.prompt, q.reference, q.tokens.tolist(), q.row_id)
    for q in queries
  ]


def _write(folder, *lines: bytes) -> TaskConfig:
  (folder / "a.jsonl").write_bytes(b"\n".join(lines))
  return TaskConfig("a", data_dir=str(folder), pattern="a.jsonl")


@pytest.mark.parametrize("kind", SCHEDULES)
def test_queries_depend_only_on_their_index(vocabulary, kind):
  stream = QueryStream(_config(kind=kind), vocabulary)
  # A task has 30 examples, so with kind "sharp" query 37 is in the second pass.
  late = _values([stream[37]])
  assert late == _values(list(stream)[37:38])
  assert late == _values([QueryStream(_config(kind=kind), vocabulary)[37]])
  for index in (-1, len(stream)):
    with pytest.raises(IndexError):
      stream[index]


@pytest.mark.parametrize("kind", ["gradual", "mixture", "bursty"])
def test_schedule_depends_on_the_seed(kind):
  first, again = schedule(_config(kind=kind)), schedule(_config(kind=kind))
  np.testing.assert_array_equal(first, again)
  assert (schedule(_config(kind=kind, seed=1)) != first).any()


def test_repeated_task_continues_with_unseen_examples(vocabulary):
  config = _config(tasks=(TASKS[0], TASKS[1], TASKS[0]), requests_per_task=15)
  stream = QueryStream(config, vocabulary)
  queries = list(stream)
  assert [q.task_id for q in queries[::15]] == [0, 1, 0]
  maths = [q.prompt for q in queries if q.task == "maths"]
  assert len(set(maths)) == 30, "the second visit does not repeat the first"
  assert stream.shifts() == [(0, "maths"), (15, "sql"), (30, "maths")]


def test_gradual_share_rises_linearly_around_the_boundary():
  config = _config(kind="gradual", tasks=TASKS * 50, requests_per_task=200)
  entries = schedule(config).reshape(200, 200)
  after = entries[1:, :50] == np.arange(1, 200)[:, None]
  before = entries[:-1, -50:] == np.arange(1, 200)[:, None]
  # The means of ten equal parts of a linear rise from 0 to 1.
  shares = np.concatenate([before, after], axis=1).reshape(199, 10, 10).mean((0, 2))
  np.testing.assert_allclose(shares, np.arange(0.05, 1, 0.1), atol=0.05)
  assert (entries[:, 60:-60] == np.arange(200)[:, None]).all()


def test_gradual_shift_is_no_wider_than_the_shortest_task():
  config = _config(kind="gradual", tasks=TASKS[:3], requests_per_task=None)
  entries = schedule(config, [300, 30, 300])
  # The width is reduced to 30, so a query moves by at most 15 places.
  assert not entries[:270].any() and (entries[360:] == 2).all()
  assert set(entries[285:345]) == {0, 1, 2}


def test_cyclic_schedule_repeats_with_its_period():
  for count, parts in ((100, (50, 50)), (80, (50, 30))):
    entries = schedule(_config(kind="cyclic", requests_per_task=count))
    cycles = [np.repeat(np.arange(4), part) for part in parts]
    np.testing.assert_array_equal(entries, np.concatenate(cycles))


def test_bursts_have_their_mean_length_and_visit_all_tasks():
  def mean_run(entries: np.ndarray) -> float:
    return len(entries) / (1 + np.count_nonzero(np.diff(entries)))

  entries, mixed = (
    schedule(_config(kind=kind, requests_per_task=10_000))
    for kind in ("bursty", "mixture")
  )
  early = entries[:20_000]  # before any task runs out of queries
  assert mean_run(early) == pytest.approx(8, rel=0.15)
  np.testing.assert_allclose(np.bincount(early) / len(early), 0.25, atol=0.08)
  assert mean_run(mixed) < 2  # negative control: a mixture has no bursts


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_task_gets_the_requested_number_of_queries(kind):
  entries = schedule(_config(kind=kind))
  assert set(np.bincount(entries)) == {40}
  sizes = [31, 20, 77, 45]
  entries = schedule(_config(kind=kind, requests_per_task=None), sizes)
  np.testing.assert_array_equal(np.bincount(entries), sizes)


def test_every_example_is_served_once_by_default(tmp_path, vocabulary):
  lines = [b'{"prompt": "add %d"}' % number for number in range(24)]
  task = _write(tmp_path, *lines)
  stream = QueryStream(StreamConfig((task,)), vocabulary)
  prompts = [query.prompt for query in stream]
  assert len(prompts) == len(set(prompts)) == len(stream) == stream.total == 24
  assert stream.sentences() == []
  # In the source's order without shuffling, otherwise in a new order in each pass.
  for shuffle in (False, True):
    config = StreamConfig((task,), requests_per_task=60, shuffle=shuffle)
    stream = QueryStream(config, vocabulary)
    passes = np.split(np.array([query.prompt for query in stream]), [24, 48])
    assert ([*passes[0]] == [f"add {i}" for i in range(24)]) != shuffle
    assert (passes[0][:12] == passes[2]).all() != shuffle
    assert set(passes[0]) == set(passes[1])
    assert ([*passes[0]] == [*passes[1]]) != shuffle
    assert stream.sentences() == ["a: each of 24 prompts is served 2 or 3 times."]


def test_order_within_a_task_does_not_depend_on_other_tasks(vocabulary):
  alone = QueryStream(_config(tasks=TASKS[2:3]), vocabulary)
  among = QueryStream(_config(), vocabulary)
  assert [q.prompt for q in alone] == [q.prompt for q in list(among)[80:120]]


def test_long_prompts_are_cut_and_counted(vocabulary):
  whole = QueryStream(_config(), vocabulary)
  cut = QueryStream(_config(source_length=12), vocabulary)
  reports = cut.report().values()
  assert all(task["cut"] == 0 for task in whole.report().values())
  assert 0 < sum(task["cut"] for task in reports) <= 120
  for task, sentence in zip(reports, cut.sentences(), strict=True):
    first = os.path.basename(task["places"]["cut"][0])
    assert (
      f"{task['source']}: {task['cut']} prompts cut to 12 tokens: {first}" in sentence
    )
  too_long = 0
  for full, short in zip(whole, cut, strict=True):
    assert full.prompt == short.prompt and short.tokens[-1] == 1
    assert len(short.tokens) == min(len(full.tokens), 12)
    kept = len(short.tokens) - 1
    np.testing.assert_array_equal(short.tokens[:-1], full.tokens[:kept])
    too_long += len(full.tokens) > 12
  assert too_long > 0


def test_only_served_prompts_are_encoded_for_the_report(vocabulary, monkeypatch):
  """A corpus may hold thousands of prompts more."""
  encoded = []

  def encode_prompt(self, text):
    encoded.append(text)
    return right(self, text)

  right = Vocabulary.encode_prompt
  monkeypatch.setattr(Vocabulary, "encode_prompt", encode_prompt)
  stream = QueryStream(_config(requests_per_task=3, source_length=12), vocabulary)
  report = stream.report()
  served = {query.prompt for query in stream}
  assert set(encoded) == served and len(served) == 3 * len(report)
  cut = sum(len(right(vocabulary, prompt)) > 12 for prompt in served)
  assert sum(task["cut"] for task in report.values()) == cut > 0


def test_bad_lines_are_skipped_and_reported_with_their_number(tmp_path, vocabulary):
  bad = b"not json"
  task = _write(tmp_path, b'{"prompt": "one"}', bad, b'{"prompt": "three"}')
  config = _config(tasks=(task,), shuffle=False)
  stream = QueryStream(config, vocabulary)
  assert [stream[index].prompt for index in range(2)] == ["one", "three"]
  report = stream.report()["a"]
  assert (report["rows"], report["skipped"]) == (2, 1)
  (place,) = report["places"]["skipped"]
  start = f"{tmp_path / 'a.jsonl'}:2: malformed: "
  assert place.startswith(start)
  (sentence,) = stream.sentences()
  reason = place.removeprefix(start)
  assert sentence.startswith(f"a: 1 of 3 lines skipped: a.jsonl:2 {reason}")
  json.dumps(report)


def test_restore_refuses_the_state_of_another_stream(tmp_path, vocabulary):
  stream = QueryStream(_config(), vocabulary)
  state = stream.state()
  for other in (_config(seed=1), _config(kind="bursty"), _config(source_length=20)):
    with pytest.raises(ValueError, match="another stream config"):
      QueryStream(other, vocabulary).restore(state)
  QueryStream(_config(), vocabulary).restore(json.loads(json.dumps(state)))
  task = _write(tmp_path, b'{"prompt": "one"}')
  config = _config(tasks=(task,))
  state = QueryStream(config, vocabulary).state()
  _write(tmp_path, b'{"prompt": "two"}')
  with pytest.raises(ValueError, match="another stream config, vocabulary or data"):
    QueryStream(config, vocabulary).restore(state)


def test_two_different_tasks_of_one_name_are_refused():
  tasks = (TASKS[0], dataclasses.replace(TASKS[0], rows=3))
  with pytest.raises(ValueError, match=r"TaskConfig\.name.*two different tasks"):
    _config(tasks=tasks)


# ---- A caller's own prompts


def test_own_prompts_are_served_in_order_and_cut_to_source_length(vocabulary):
  prompts = ["How many?", "x " * 80, "And then?"]
  stream = of_prompts(prompts, vocabulary, label="mine", source_length=16)
  queries = list(stream)
  assert [query.prompt for query in queries] == prompts
  assert [query.index for query in queries] == [0, 1, 2]
  assert queries[0].tokens.tolist() == [*vocabulary.encode("How many?"), 1]
  assert len(queries[1].tokens) == 16 and queries[1].tokens[-1] == 1
  assert stream.total == 3 and stream.shifts() == [(0, "mine")]
  assert {query.task for query in queries} == {"mine"}
  assert stream.sentences() == ["mine: 1 prompt cut to 16 tokens: mine:2."]


def test_infinite_iterator_is_read_on_demand(vocabulary):
  taken = []

  def endless():
    for number in itertools.count():
      taken.append(number)
      yield f"add {number} and 1"

  stream = functools.partial(of_prompts, endless())(vocabulary)
  assert stream.total is None and not taken
  assert stream[4].prompt == "add 4 and 1" and len(taken) == 5
  assert stream[1].prompt == "add 1 and 1" and len(taken) == 5


def test_blank_prompts_are_skipped_and_reported(vocabulary):
  # The lone surrogate is replaced by "?"; only the two blank prompts are skipped.
  stream = of_prompts(["one", " ", "", "\ud800", "two"], vocabulary)
  assert [query.prompt for query in stream] == ["one", "?", "two"]
  (sentence,) = stream.sentences()
  assert sentence.startswith("own: 2 of 5 lines skipped: own:2 the prompt is blank, ")
  assert [query.row_id for query in stream] == ["own:1", "own:4", "own:5"]


def test_restored_stream_of_own_prompts_serves_the_same_queries(vocabulary):
  prompts = [f"add {number} and 1" for number in range(9)]
  stream = of_prompts(iter(prompts), vocabulary)
  expected = _values(stream[index] for index in range(5))
  state = json.loads(json.dumps(stream.state()))
  resumed = of_prompts(iter(prompts), vocabulary)
  resumed.restore(state)
  assert _values([resumed[4], resumed[2]]) == [expected[4], expected[2]]
  assert _values(resumed) == _values(stream)
  for others in (prompts[:4], ["another", *prompts[1:]]):
    with pytest.raises(ValueError, match="belongs to another stream config"):
      of_prompts(others, vocabulary).restore(state)


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    (("text",), "an iterable of texts"),
    ((3,), "an iterable"),
    (([3],), "prompt 1 is 3"),
  ],
)
def test_values_other_than_texts_are_refused(vocabulary, arguments, match):
  with pytest.raises(base.InputError, match=match):
    of_prompts(*arguments, vocabulary)[0]


def test_none_from_an_iterator_does_not_end_the_stream(vocabulary):
  """None means that no prompt is waiting; the stream reads the next one."""
  arriving = iter(["How many hotels?", None, None, "How many films?", None])
  stream = of_prompts(arriving, vocabulary)
  prompts = [stream[i].prompt for i in range(2)]
  assert prompts == ["How many hotels?", "How many films?"]
  with pytest.raises(IndexError, match="ended after 2 queries"):
    stream[2]
