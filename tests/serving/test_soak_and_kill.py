"""experiments/serving_soak and serving_kill: their checks, and short whole runs."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_online

from experiments.serving_kill import run as kill
from experiments.serving_soak import run as soak

slow = pytest.mark.slow
PROMPT = soak.Prompt("a question", ("", "an", "an answer"))
KEPT = {
  "lost": 0,
  "wrong": 0,
  "swaps of the draft": 3,
  "learning failed": 0,
  "memory growth": 0.01,
  "compilations": 0,
  "exit code": 0,
}


def work(kind, limit=None):
  return soak.Work(kind, PROMPT, is_streamed=True, limit=limit, number=1)


def verdict(monkeypatch, one, text, status=200):
  reply = soak.http_load.Reply(0.0, status, text=text)
  monkeypatch.setattr(soak.http_load, "ask", lambda *given, **named: reply)
  return soak.verdict("http://nowhere", one).partition(":")[0]


@pytest.mark.parametrize(
  ("one", "text", "status", "expected"),
  [
    (work(soak.COMPLETE), "an answer", 200, ""),
    (work(soak.COMPLETE), "an", 200, "wrong"),
    (work(soak.COMPLETE), "an answer", 0, "lost"),
    (work(soak.COMPLETE), "", 503, "lost"),
    (work(soak.COMPLETE, limit=1), "an", 200, ""),
    (work(soak.COMPLETE, limit=9), "an answer", 200, ""),
    (work(soak.LEFT), "an ans", 0, ""),
    (work(soak.LEFT), "another", 0, "wrong"),
    (work(soak.LEFT), "", 500, "wrong"),
    (work(soak.SAMPLED), "whatever", 200, ""),
    (work(soak.SAMPLED), "", 429, "lost"),
  ],
)
def test_soak_notices_lost_and_wrong_answers(monkeypatch, one, text, status, expected):
  assert verdict(monkeypatch, one, text, status) == expected


@pytest.mark.parametrize(
  ("status", "text", "expected"),
  [
    (400, '{"error": {"message": "no"}}', ""),
    (200, '{"error": {"message": "no"}}', "wrong"),
    (500, '{"error": {"message": "no"}}', "wrong"),
    (400, "no", "lost"),
  ],
)
def test_soak_notices_bad_requests_that_are_not_refused(
  monkeypatch, status, text, expected
):
  monkeypatch.setattr(soak.http_load, "send", lambda *given: (status, text))
  found = soak.verdict("http://nowhere", work(soak.BAD))
  assert found.partition(":")[0] == expected


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("lost", 1),
    ("wrong", 1),
    ("swaps of the draft", 0),
    ("learning failed", 1),
    ("memory growth", 0.03),
    ("compilations", 1),
    ("exit code", -9),
  ],
)
def test_every_broken_promise_of_the_soak_is_a_fault(name, value):
  assert soak.is_kept(KEPT)
  assert not soak.is_kept({**KEPT, name: value})


def test_memory_grows_from_a_fifth_of_the_requests_to_the_end():
  made = soak.Soak(SimpleNamespace(), [])
  made.memory = [*range(100, 120), *([120] * 60), *([150] * 20)]
  assert made.growth() == pytest.approx(150 / 117 - 1)


def test_pauses_at_swaps_are_told_from_others():
  steady = [0.1 * i for i in range(50)]
  slow = [*steady[:20], *(clock + 0.4 for clock in steady[20:])]  # 0.5 s after 1.9
  found = soak.pauses([steady, slow, [7.0]], [(2.0, 2.05), (9.0, 9.1)])
  assert found["pauses at swaps"] == 2 and found["pauses elsewhere"] == 96
  assert found["pause at swaps, p99, ms"] == pytest.approx(496, abs=1)
  assert found["pause elsewhere, p99, ms"] == pytest.approx(100, abs=1)
  # The negative control: without swaps the long pause belongs to the others.
  found = soak.pauses([steady, slow], [])
  assert found["pauses at swaps"] == 0 and "pause at swaps, p99, ms" not in found
  assert soak.pauses([], []) == {"pauses at swaps": 0, "pauses elsewhere": 0}


def test_plan_changes_its_prompts_in_the_middle_and_has_every_kind():
  other = soak.Prompt("another question", ("",))
  works = soak.plan([PROMPT], [other], 400, seed=0)
  assert {one.prompt for one in works[:200]} == {PROMPT}
  assert {one.prompt for one in works[200:]} == {other}
  assert {one.kind for one in works} == set(soak.SHARES)
  assert works == soak.plan([PROMPT], [other], 400, seed=0)


ROWS = {0: ((5, 6), (7,)), 1: ((8,), (9, 1)), 2: ((4, 4), (3,))}


def ring(rows, capacity=4):
  """Returns a replay buffer with these rows."""
  source, target = np.zeros((2, capacity, 3), int)
  mask = np.zeros((capacity, 3), bool)
  for number, (prompt, answer) in enumerate(rows):
    slot = number % capacity
    source[slot], target[slot], mask[slot] = 0, 0, False
    source[slot, : len(prompt)], target[slot, : len(answer)] = prompt, answer
    mask[slot, : len(answer)] = True
  data = SimpleNamespace(source=source, target=target, mask=mask)
  return SimpleNamespace(data=data, added=len(rows), capacity=capacity)


def test_buffer_is_compared_with_the_journal_row_by_row():
  rows = list(ROWS.values())
  assert kill.differing(ring(rows), ROWS) == 0
  assert kill.differing(ring(rows, capacity=2), ROWS) == 0
  assert kill.differing(ring([rows[0], rows[0], *rows[1:]]), ROWS) == 3  # twice
  assert kill.differing(ring(rows[1:]), ROWS) == 2  # one is missing


def test_journal_notices_rows_that_change(tmp_path):
  path = tmp_path / "outputs.jsonl"
  journal = kill.Journal(path)
  journal.read()  # before the first start there is no file
  rows = [
    {"prompt_ids": prompt, "output_ids": answer} for prompt, answer in ROWS.values()
  ]
  lines = [json.dumps(row) for row in [rows[0], {"tokens": 3}, *rows[1:]]]
  path.write_text("\n".join(lines) + '\n{"prompt_ids": [3')
  journal.read()
  assert journal.rows == ROWS and not journal.renumbered
  path.write_text(json.dumps(rows[1]) + "\n")
  journal.read()
  assert journal.renumbered == {0}


def test_every_count_of_the_kill_test_but_the_first_three_is_a_fault():
  tally = kill.Tally(kills=3, answers=20, in_journal=21)
  assert tally.faults() == 0
  tally.lost = 1
  assert tally.faults() == 1


@slow
def test_killed_server_loses_nothing(tmp_path):
  assert kill.main(["--kills", "2", "--out", str(tmp_path)]) == 0
  found = json.loads((tmp_path / "result.json").read_text())
  assert found["kills"] == 2 and found["answers"] > 0


@slow
def test_soaked_server_keeps_its_promises(tmp_path):
  pair = tiny_online.save_lively_pair(tmp_path)
  bindings = [
    f"PairConfig.target={pair.target!r}",
    f"PairConfig.draft={pair.draft!r}",
    "DecodingConfig.rows=2",
    "DecodingConfig.num_draft_tokens=3",
    "DecodingConfig.target_length=24",
    "UpdateConfig.steps_per_update=1",
    "UpdateConfig.length_multiple=12",
  ]
  given = argparse.Namespace(out=tmp_path, bindings=bindings, clients=4)
  before = soak.prompts_of(soak.BEFORE, 4, bindings)
  works = soak.plan(before, soak.prompts_of(soak.AFTER, 4, bindings), 100, seed=0)
  found = soak.soaked(given, works)
  found["memory growth"] = 0  # so few requests say nothing about it
  assert soak.is_kept(found), found
  assert sum(found[f"requests, {kind}"] for kind in soak.SHARES) == 100
