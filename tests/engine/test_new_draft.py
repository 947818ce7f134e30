"""A target alone: its new draft costs nothing until it is trained, and changes nothing.

The n-gram cache drafts as many tokens as are worth their time. Costs are learned from
the calls that serve; when the draft wakes, they are measured.
"""

import dataclasses

import pytest
import tiny_online
from compilations import Compilations

from osd_jax import online, pairs, runs
from osd_jax.distillation import schedule
from osd_jax.distillation.learner import LearningConfig
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_jax.engine.server import Server

INTERVAL = 4
LEARNING = LearningConfig(schedule=schedule.ScheduleConfig(update_interval=INTERVAL))


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


@pytest.mark.parametrize(("rows", "temperature"), [(3, 0.0), (1, 1.0)])
def test_new_draft_rests_until_it_is_trained_and_changes_no_answer(
  pair, rows, temperature
):
  decoding = DecodingConfig(
    rows=rows,
    num_draft_tokens=7,
    source_lengths=(tiny_online.SOURCE,),
    target_length=24,
    acceptance_rule="coupling",
  )
  requests = requests_of(pair, temperature)
  with Server(pair, decoding, LEARNING) as server:
    controller = server.engine.controller
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


def test_warm_server_compiles_nothing_when_its_draft_wakes(pair):
  decoding = DecodingConfig(
    num_draft_tokens=3,
    source_lengths=(tiny_online.SOURCE,),
    target_length=24,
    acceptance_rule="coupling",
  )
  requests = requests_of(pair, 0.0)
  with Server(pair, decoding, LEARNING) as server:
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


def test_named_draft_keeps_the_settings(pair):
  decoding = DecodingConfig(source_lengths=(tiny_online.SOURCE,), target_length=24)
  with Server(dataclasses.replace(pair, draft="attached"), decoding) as server:
    assert server.engine.config == decoding
    assert not server.engine.controller.rests


def test_run_of_a_target_alone_is_exact(pair, tmp_path):
  config = tiny_online.config(pair, tmp_path / "run")
  result = online.run(config)
  assert result.exact
  rows = [r for r in runs.read(result.path / "metrics.jsonl") if r["kind"] == "request"]
  assert rows[-1]["draft_version"] > 0
