"""A target alone: its new draft costs nothing until it is trained, and changes nothing.

The n-gram cache drafts as many tokens as are worth their time. Costs are learned from
the calls that serve; when the draft wakes, they are measured.
"""

import dataclasses
import threading

import numpy as np
import pytest
import tiny_online
from compilations import Compilations

from osd_jax import online, pairs, runs
from osd_jax.distillation import schedule
from osd_jax.distillation.learner import LearningConfig
from osd_jax.engine import server as server_lib
from osd_jax.engine import steps
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_jax.engine.server import Server

INTERVAL = 4
LEARNING = LearningConfig(schedule=schedule.ScheduleConfig(update_interval=INTERVAL))
DECODING = DecodingConfig(  # shared, so that tests compile few programs
  num_draft_tokens=3,
  source_lengths=(tiny_online.SOURCE,),
  target_length=24,
  acceptance_rule="coupling",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  saved = tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"), "llama")
  return dataclasses.replace(saved, draft="")


def requests_of(pair, temperature, count=12):
  vocabulary = pairs.load_vocabulary(pair)
  texts = [f"{word} of all rows" for word in ("max", "sum", "min")]
  return [
    Request(
      vocabulary.encode_prompt(texts[index % 3]),
      SamplingConfig(temperature=temperature, seed=index % 3),
      tag=index,
      speculative=index % 5 != 4,
    )
    for index in range(count)
  ]


# First, because another test with these settings would compile for it.
def test_warm_server_compiles_nothing_when_its_draft_wakes(pair):
  requests = requests_of(pair, 0.0)
  with Server(pair, DECODING, LEARNING) as server:
    server.warm_up(learn=True)
    assert server.engine.controller.rests
    server.run(requests[:1])
    with Compilations() as compilations:
      for request in requests:
        (done,) = server.run([request])
        server.learn(done)
      server.finish_learning()
      server.run(requests)
    assert server.engine.draft_version > 0
    assert compilations.count == 0


@pytest.mark.parametrize(("rows", "temperature"), [(3, 0.0), (1, 1.0)])
def test_new_draft_rests_until_it_is_trained_and_changes_no_answer(
  pair, rows, temperature
):
  decoding = dataclasses.replace(DECODING, rows=rows)
  requests = requests_of(pair, temperature)
  with Server(pair, decoding, LEARNING) as server:
    controller = server.engine.controller
    server.engine.compiles_in_background = False
    plain = Server(server.pair.plain(), decoding).run(requests)
    untrained = server.run(requests)
    assert controller.rests and not controller.costs  # nothing was measured
    assert all(done.drafted == done.drafted_by_cache for done in untrained)
    assert sum(done.accepted for done in untrained)  # requests come again
    for done in untrained:
      server.learn(done)
    server.finish_learning()
    assert server.engine.draft_version > 0 and not controller.rests
    trained = server.run(requests)
    assert controller.costs
  expected = [done.tokens.tolist() for done in plain]
  for answers in (untrained, trained):
    assert [done.tokens.tolist() for done in answers] == expected


@pytest.mark.parametrize("draft", ["", pairs.CACHE])
def test_decoding_is_plain_while_drafting_is_compiled(pair, draft):
  decoding = dataclasses.replace(DECODING, acceptance_rule="block")  # not yet compiled
  config = dataclasses.replace(pair, draft=draft)
  with Server(config, server_lib.by_worth(decoding), LEARNING) as server:
    engine, release = server.engine, threading.Event()
    engine.watched_rounds = 2  # a request takes several calls
    request = dataclasses.replace(requests_of(pair, 0.0)[0], watch=lambda tokens: None)
    (plain,) = Server(server.pair.plain(), decoding).run([request])

    assert not engine.compilations.has_run("first", lambda: release.wait)
    (before,) = engine.run([request])
    engine.submit(request)
    for _ in range(3):
      assert not engine.step()
    release.set()
    while not engine.compilations.has_run("last", lambda: lambda: None):
      pass  # the thread runs one call after another
    with Compilations() as compilations:
      after = engine.step()
    assert compilations.count == 0
    text = engine._state.draft_cache.text  # holds what plain calls emitted, too
    emitted = text.tokens[0, int(text.begin[0]) + 1 :][:6]
    assert emitted.tolist() == plain.tokens[:6].tolist()
    while engine.in_flight:
      after += engine.step()
    assert not before.drafted and after[0].drafted and after[0].accepted
    for done in (before, *after):
      assert done.tokens.tolist() == plain.tokens.tolist()


def test_trained_draft_rests_until_its_calls_are_compiled(pair):
  lengths = (tiny_online.SOURCE, 2 * tiny_online.SOURCE)
  decoding = dataclasses.replace(DECODING, source_lengths=lengths)
  requests = requests_of(pair, 0.0)
  with Server(pair, decoding, LEARNING) as server:
    engine, release = server.engine, threading.Event()
    server.warm_up(in_background=True)
    assert not engine.compilations.has_run("first", lambda: release.wait)
    for done in server.run(requests):
      server.learn(done)
    server.finish_learning()
    (resting,) = server.run(requests[:1])
    assert engine.draft_version > 0 and engine.controller.rests
    release.set()
    while engine.controller.rests:
      (awake,) = server.run(requests[:1])
    before = steps.advance._cache_size()
    server.run([Request(np.full(lengths[1], 5, np.int32))])
    assert len(engine.controller.costs) == 2 and steps.advance._cache_size() == before
    assert awake.tokens.tolist() == resting.tokens.tolist()


def test_named_draft_keeps_the_settings(pair):
  with Server(dataclasses.replace(pair, draft="attached"), DECODING) as server:
    assert server.engine.config == DECODING
    assert not server.engine.controller.rests


def test_run_of_a_target_alone_is_exact(pair, tmp_path):
  config = tiny_online.config(pair, tmp_path / "run")
  result = online.run(config)
  assert result.exact
  rows = [r for r in runs.read(result.path / "metrics.jsonl") if r["kind"] == "request"]
  assert rows[-1]["draft_version"] > 0
