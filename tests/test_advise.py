"""`osd advise`: what drafters would do on a log, without decoding it."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_online

from osd_jax import base, pairs, runs
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.data.examples import TaskConfig
from osd_jax.distillation.schedule import WorthConfig
from osd_jax.engine import measurement
from osd_jax.engine.server import Server
from osd_tools import advise, replay

COSTS = Costs(
  RoundCosts((2.0, 3.0, 4.0), num_draft_tokens=(0, 1, 3), request_ms=1.0),
  lost_ms=6.0,
  slices=3,
  draft_ms=0.25,
)


DRAFTS = [
  name + end for name in (advise.FROZEN, advise.LEARNED) for end in ("", advise.MIXED)
]


def course(*rights, **more) -> replay.Course:
  """A course of answers, given where its drafter is right."""
  right = tuple(np.repeat(np.array([one], bool), 3, axis=0) for one in rights)
  bins = tuple(np.zeros_like(one, int) for one in right)
  return replay.Course(np.zeros(len(right)), right, bins, **more)


def test_the_fastest_number_of_drafted_tokens_is_found():
  never, always = course([0] * 8), course([1] * 8)
  plain = advise.figures(never, COSTS, advise.PLAIN)
  # 8 steps of 2 ms, and 1 ms for the request.
  assert (plain["ms_per_token"], plain["num_draft_tokens"]) == (17 / 8, 0)
  wrong = advise.figures(never, COSTS, advise.FROZEN)
  assert (wrong["ms_per_token"], wrong["num_draft_tokens"]) == (25 / 8, 1)
  found = advise.figures(always, COSTS, advise.FROZEN)
  assert (found["num_draft_tokens"], found["tokens_per_call"]) == (3, 4)
  assert found["ms_per_token"] == (2 * 4 + 1) / 8
  # A cache does not pay for draft steps, and learning pays for its slices.
  cached = advise.figures(always, COSTS, advise.CACHE)
  assert cached["ms_per_token"] == (2 * 3.25 + 1) / 8
  learns = course([1] * 8, updates=2, slices=6)
  learned = advise.figures(learns, COSTS, advise.LEARNED)
  assert learned["ms_per_token"] == (2 * 4 + 1 + 12) / 8 and learned["updates"] == 2


def test_what_learning_gains_is_read_off_the_end_of_the_log():
  """The draft is right about nothing at first, and about everything at the end."""
  never, adapting = (
    course(*[[0] * 8] * 4),
    course(*[[0] * 8] * 2, *[[1] * 8] * 2, updates=2),
  )
  said = advise.by_its_end(never, adapting, 3)
  assert "4.00 tokens per call" in said and "+3.00 over" in said
  useless = dataclasses.replace(never, updates=1)
  assert "+0.00 over" in advise.by_its_end(never, useless, 3)
  single = course([1] * 8, updates=1)
  assert advise.by_its_end(course([0] * 8), single, 3) == ""
  assert "nothing is known" in advise.by_its_end(never, never, 3)


@pytest.mark.parametrize(
  ("fastest", "expected"),
  [
    (advise.PLAIN, "Plain decoding is the fastest"),
    (advise.CACHE, "PairConfig.draft = 'cache'"),
    (advise.FROZEN, "OnlineConfig.learn = False"),
    (advise.LEARNED, "OnlineConfig.learn = True"),
    (advise.FROZEN + advise.MIXED, "OnlineConfig.learn = False"),
    (advise.LEARNED + advise.MIXED, "OnlineConfig.learn = True"),
  ],
)
def test_settings_are_those_of_the_fastest_system(fastest, expected):
  names = (advise.PLAIN, advise.CACHE, *DRAFTS)
  speeds = dict.fromkeys(names, 1.0) | {fastest: 2.0}
  rows = [
    {
      "system": name,
      "ms_per_token": 1 / speed,
      "over_plain": speed,
      "num_draft_tokens": 0 if name == advise.PLAIN else 3,
    }
    for name, speed in speeds.items()
  ]
  said = advise.settings_for(rows, 4096)
  assert expected in said
  assert ("cache_tokens = 4096" in said) == fastest.endswith(advise.MIXED)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """A pair, and a log of its target's own answers."""
  folder = tmp_path_factory.mktemp("advise")
  pair = tiny_online.attached(tiny_online.save_lively_pair(folder))
  online = tiny_online.config(pair, folder / "run", rows=1)
  log = folder / "log.jsonl"
  made = advise.AdviseConfig(
    log=TaskConfig("log", pattern=str(log), reference="{text}"),
    count=10,
    pair=pair,
    decoding=online.decoding,
    learning=online.learning,
    run_directory=str(folder / "advice"),
  )
  prompts = [f"Count to {number}, then to {number + 7}." for number in range(12)]
  with Server(pairs.load_pair(pair).plain(), online.decoding) as server:
    answers = list(server.generate(prompts, ordered=True))
  rows = [{"prompt": one.prompt, "text": one.text} for one in answers]
  log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return made


@pytest.mark.slow
def test_a_log_is_read_and_advice_is_reported(config, monkeypatch):
  online = RoundCosts((1.0, 1.1, 1.2), num_draft_tokens=(0, 1, 3))
  monkeypatch.setattr(measurement, "measure_run", lambda *_: Costs(online))
  result = advise.run(config)
  rows = list(runs.read(result.path / "metrics.jsonl"))
  advice = {row["system"]: row for row in rows if row["kind"] == "advice"}
  assert advice[advise.PLAIN]["over_plain"] == 1
  assert advice[advise.LEARNED]["updates"] >= 1
  assert sum(row["kind"] == "replayed" for row in rows) == 10
  assert set(DRAFTS) < set(advice)
  page = (result.path / "report.html").read_text()
  assert "Advice" in page and advice[advise.CACHE]["system"] in page


@pytest.mark.parametrize("made", [0, 3])
def test_a_schedule_without_updates_is_not_taken_for_no_gain(config, monkeypatch, made):
  """ "+0.00" came from a replay that never learned; then another schedule is tried."""
  online, schedules = RoundCosts((1.0, 1.1, 1.2), num_draft_tokens=(0, 1, 3)), []
  monkeypatch.setattr(measurement, "measure_run", lambda *_: Costs(online))

  def learned(pair, answers, learning, *_, **__):
    schedules.append(learning.schedule)
    updates = made if isinstance(learning.schedule, WorthConfig) else 2
    rights = [[0] * int(row.mask.sum()) for row in answers]
    return course(*rights, updates=updates, slices=updates)

  monkeypatch.setattr(replay, "learned", learned)
  learning = dataclasses.replace(config.learning, schedule=WorthConfig())
  result = advise.run(dataclasses.replace(config, learning=learning, overwrite=True))
  rows = list(runs.read(result.path / "metrics.jsonl"))
  notes = " ".join(row["text"] for row in rows if row["kind"] == "note")
  assert ("WorthConfig made no update" in notes) == (not made)
  assert len(schedules) == 1 + (not made)
  assert "10 of 12 answers of the log are replayed, the first ones" in notes
  advice = {row["system"]: row for row in rows if row["kind"] == "advice"}
  assert advice[advise.LEARNED]["updates"] == (made or 2)


def test_a_log_of_another_model_is_noticed():
  rows = [
    base.DistillationBatch(
      source=np.zeros((1, 2), np.int32),
      target=np.array([[5, 6, 7, 8]]),
      mask=np.array([[True, True, True, False]]),
      records=base.Records(
        log_probs=np.zeros((1, 4, 1), np.float32),
        ids=np.array(ids).reshape(1, 4, 1),
        tail=np.zeros((1, 4), np.float32),
        error=np.zeros((1, 4), bool),
      ),
      weight=np.ones(1, np.float32),
    )
    for ids in ([5, 6, 7, 0], [5, 0, 0, 0])
  ]
  assert advise.own_share(rows[:1]) == ""
  assert "Only 67% of the log's tokens" in advise.own_share(rows)


def test_rows_that_are_left_out_or_cut_are_counted(config, tmp_path):
  path = tmp_path / "log.jsonl"
  rows = [
    {"prompt": "How many?", "text": "Two."},
    {"prompt": "How many?"},
    {"prompt": "How many? " * 50, "text": "Two."},
    {"prompt": "How many?", "text": "Two and two and two and two and two and two."},
  ]
  lines = [json.dumps(row) for row in rows]
  path.write_text("\n".join([*lines, "no JSON"]))
  pair = pairs.load_pair(config.pair)
  named = dataclasses.replace(config.log, pattern=str(path))
  found, said = advise.read_log(dataclasses.replace(config, log=named), pair)
  longest = config.decoding.target_length
  assert [len(one.reference) <= longest for one in found] == [True, True]
  assert said == (
    "2 of 4 answers of the log are replayed. Of the log: 1 row(s) cannot be read;"
    " 2 row(s) have no answer, or a prompt of more"
    f" than {tiny_online.SOURCE} tokens; 1 answer(s) are cut to {longest} tokens."
  )
  path.write_text(lines[0])
  _, said = advise.read_log(dataclasses.replace(config, log=named), pair)
  assert said == "1 of 1 answers of the log are replayed."


def test_a_log_without_answers_is_refused_in_one_line(config, tmp_path):
  path = tmp_path / "log.jsonl"
  path.write_text('{"prompt": "How many?"}\n')
  named = dataclasses.replace(config.log, pattern=str(path))
  pair = pairs.load_pair(config.pair)
  with pytest.raises(
    base.InputError, match=r"AdviseConfig\.log: .* none with an answer"
  ):
    advise.read_log(dataclasses.replace(config, log=named), pair)
  with pytest.raises(base.InputError, match="AdviseConfig"):
    dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, rows=2))
