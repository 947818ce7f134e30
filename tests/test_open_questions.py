"""Replays of recorded answers give the figures of real runs."""

import dataclasses
import itertools
import sys

import jax
import numpy as np
import pytest
import tiny_online
from conftest import ROOT

from osd_jax import corpus, online, pairs, runs
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.data import streams
from osd_jax.data.batches import EncodedExample, read_corpus
from osd_jax.distillation import losses
from osd_jax.engine.requests import Request
from osd_jax.engine.server import Server
from osd_tools import replay

sys.path += [str(ROOT / "experiments" / "open_questions"), str(ROOT / "benchmarks")]

import recordings
import setting
import stability
import tuning

from experiments.open_questions import run


@pytest.mark.parametrize("drafted", [1, 3, 7])
def test_a_walk_emits_every_token_once(drafted):
  """Each call emits its accepted tokens and one more, which a rejection replaces."""
  rng = np.random.default_rng(drafted)
  for share in (0.0, 0.3, 0.8, 1.0):
    right = np.broadcast_to(rng.random(40) < share, (drafted, 40))
    calls, rejected = replay.walk(right)
    assert not (rejected & right[0]).any() and (share or rejected.all())
    # Tokens between two rejections take one call for every K + 1 of them.
    ends = np.flatnonzero(rejected)
    lengths = np.diff(np.concatenate([[-1], ends, [39] if not rejected[-1] else []]))
    assert calls == sum(-(-int(n) // (drafted + 1)) for n in lengths)


@pytest.mark.parametrize("name", tuning.MORE_TOPICS)
def test_a_generated_topic_has_no_prompt_in_two_splits(name):
  splits = {"train": 3000, "eval": 200, "stream": 400}
  rows = {split: tuning.drawn(name, split, 5000) for split in splits}
  assert {split: len(part) for split, part in rows.items()} == splits
  assert len({prompt for part in rows.values() for prompt, _ in part}) == 3600


@pytest.fixture(scope="module", params=["prompt", "tokens"])
def config(request, tmp_path_factory):
  """A run of one row whose draft is served as it is trained."""
  folder = tmp_path_factory.mktemp("pair")
  files = tiny_online.attached(tiny_online.save_lively_pair(folder))
  shape = dataclasses.replace(files.attached, reads=request.param)
  config = tiny_online.config(files, folder / "run", rows=1, gate=None)
  served = dataclasses.replace(files, attached=shape)
  # A tiny draft learns quickly from all tokens.
  loss = losses.LossConfig("forward_kl", num_positions=0, num_tokens=0)
  learning = setting.changed(config.learning, update__loss=loss)
  return dataclasses.replace(config, pair=pairs.load_pair(served), learning=learning)


@pytest.fixture(scope="module")
def recording(config):
  stream = streams.make(config.stream, config.pair.vocabulary)
  prompts = [
    EncodedExample(stream[i].tokens, stream[i].task_id, np.zeros(0, np.int32))
    for i in range(len(stream))
  ]
  names = [task.label for task in config.stream.tasks]
  return recordings.record(config.pair, prompts, names, config.decoding)


@pytest.mark.slow
def test_a_replay_repeats_a_run(config, recording):
  """Overlaps, target calls and updates are those of the run on the same stream."""
  directory = online.run(config).path
  rows = list(runs.read(directory / "metrics.jsonl"))
  requests = [row for row in rows if row["kind"] == "request"]
  requests.sort(key=lambda row: row["index"])
  examples = read_corpus(config.warm_start, config.pair.vocabulary)
  first = list(corpus.reference_rows(config.pair, examples, config.decoding))
  drafted = config.decoding.num_draft_tokens
  course = replay.learned(config.pair, recording.rows, config.learning, drafted, first)
  np.testing.assert_allclose(
    course.overlap, [row["overlap"] for row in requests], atol=2e-4
  )
  assert course.calls(drafted).tolist() == [row["target_calls"] for row in requests]
  assert course.tokens.tolist() == [row["output_tokens"] for row in requests]
  assert course.updates + 1 >= sum(row["kind"] == "update" for row in rows) > 2
  # Negative control: a draft that does not learn has other overlaps.
  floor = replay.frozen(
    config.pair.draft, config.pair.draft_params, recording.rows, drafted
  )
  assert np.abs(floor.overlap - course.overlap).max() > 0.01


@pytest.mark.slow
def test_a_replayed_cache_has_the_calls_of_a_served_one(lively_pair, tmp_path):
  """The second half of the prompts repeats the first, so the cache is right there."""
  pair = pairs.load_pair(dataclasses.replace(lively_pair, draft="cache"))
  config = tiny_online.config(lively_pair, tmp_path / "run", rows=1)
  decoding = dataclasses.replace(config.decoding, cache_tokens=1024)
  stream = streams.make(config.stream, pair.vocabulary)
  with Server(pair, decoding) as server:
    answers = server.run([Request(stream[place % 5].tokens) for place in range(10)])
  batches = [jax.device_get(answer.batch) for answer in answers]
  course = replay.cache(pair.target, batches, decoding.num_draft_tokens, 1024)
  calls = course.calls(decoding.num_draft_tokens)
  assert calls.tolist() == [answer.target_calls for answer in answers]
  assert calls[5:].sum() < calls[:5].sum()


@pytest.mark.slow
def test_a_replayed_mixture_has_the_calls_of_a_served_one(config, recording):
  """Of a frozen draft and the cache, on prompts whose second half repeats the first."""
  pair, rows = config.pair, recording.rows
  decoding = dataclasses.replace(config.decoding, cache_tokens=1024)
  order = [place % 5 for place in range(10)]
  prompts = [rows[place].source[0] for place in order]
  with Server(pair, decoding) as server:
    answers = server.run([Request(one[one != pair.target.pad_id]) for one in prompts])
  batches = [rows[place] for place in order]
  drafted = decoding.num_draft_tokens
  alone = replay.frozen(pair.draft, pair.draft_params, batches, drafted)
  mixed = replay.mixed(pair.target, batches, alone, 1024)
  served = np.asarray([answer.target_calls for answer in answers])
  assert mixed.tokens.tolist() == [len(answer.tokens) for answer in answers]
  # The two differ where a draft is asked again after a rejection.
  assert np.abs(mixed.calls(drafted) - served).max() <= 1
  assert abs(mixed.calls(drafted).sum() / served.sum() - 1) < 0.02
  # Negative control: the draft alone needs more calls.
  assert alone.calls(drafted).sum() > 1.1 * served.sum()


@pytest.fixture
def tiny(config, recording, tmp_path) -> setting.Setting:
  """What the questions share, with the tiny pair."""
  return setting.Setting(
    name="demo",
    pair=config.pair,
    files=pairs.PairConfig(),
    decoding=config.decoding,
    answers=recording,
    held_out=recording,
    seen=[],
    learning=config.learning,
    costs=Costs(RoundCosts((2.0,), num_draft_tokens=(3,)), lost_ms=24.0, slices=8),
    drafted=3,
    ceiling=config.pair.draft_params,
    out=tmp_path,
    per_topic=6,
    seeds=1,
  )


@pytest.mark.slow
def test_questions_are_answered_once(tiny, tmp_path, monkeypatch, capsys):
  """The first cells of every question that trains no model of its own."""
  monkeypatch.setattr(stability, "LOG", 4)
  monkeypatch.setattr(stability, "LATER", 6)
  path = tmp_path / "cells.jsonl"
  names = ("how_often", "variance", "forgetting", "routing", "shifts", "stability")
  for name in (*names, "well_trained", "frequent"):
    for _ in range(2):  # the second time, nothing is missing
      run.answer(path, itertools.islice(run.QUESTIONS[name](tiny), 2), {})
  cells = run.measure.read(path)
  assert {cell["question"] for cell in cells} == {*names, "well_trained", "frequent"}
  keys = [tuple(cell[name] for name in setting.KEY) for cell in cells]
  assert len(set(keys)) == len(keys)
  run.show(cells)
  assert "how_often, demo" in capsys.readouterr().out
  for name in ("gkd", "mixing", "bigger"):  # these distil drafts
    keys = [tuple(key.values()) for key, _ in run.QUESTIONS[name](tiny)]
    assert len(set(keys)) == len(keys) > 3
