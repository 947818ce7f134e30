"""experiments/serving_soak and serving_kill detect faults; a short soak."""

import argparse
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.serving_kill import run as kill
from experiments.serving_soak import run as soak

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


@pytest.mark.parametrize(
  ("kind", "limit", "text", "status", "expected"),
  [
    (soak.COMPLETE, None, "an answer", 200, ""),
    (soak.COMPLETE, None, "an", 200, "wrong"),
    (soak.COMPLETE, None, "an answer", 0, "lost"),
    (soak.COMPLETE, None, "", 503, "lost"),
    (soak.COMPLETE, 1, "an", 200, ""),
    (soak.LEFT, None, "an ans", 0, ""),
    (soak.LEFT, None, "another", 0, "wrong"),
    (soak.LEFT, None, "", 500, "wrong"),
    (soak.SAMPLED, None, "whatever", 200, ""),
    (soak.SAMPLED, None, "", 429, "lost"),
    (soak.BAD, None, '{"error": {"message": "no"}}', 400, ""),
    (soak.BAD, None, '{"error": {"message": "no"}}', 200, "wrong"),
    (soak.BAD, None, "no", 400, "lost"),
  ],
)
def test_soak_notices_lost_and_wrong_answers(
  monkeypatch, kind, limit, text, status, expected
):
  reply = soak.http_load.Reply(0.0, status, text=text)
  monkeypatch.setattr(soak.http_load, "ask", lambda *_, **__: reply)
  monkeypatch.setattr(soak.http_load, "send", lambda *_: (status, text))
  work = soak.Work(kind, PROMPT, is_streamed=True, limit=limit, number=1)
  assert soak.verdict("http://nowhere", work).partition(":")[0] == expected


def test_every_broken_promise_of_the_soak_is_a_fault():
  assert soak.is_kept(KEPT)
  for name in KEPT:
    assert not soak.is_kept({**KEPT, name: 0 if name.startswith("swaps") else 1}), name


def test_kill_test_compares_the_buffer_with_the_journal_row_by_row():
  rows = [((5, 6), (7,)), ((8,), (9, 1)), ((4, 4), (3,))]
  journal = dict(enumerate(rows))

  def ring(rows, capacity=4):
    source, target = np.zeros((2, capacity, 3), int)
    mask = np.zeros((capacity, 3), bool)
    for number, (prompt, answer) in enumerate(rows):
      slot = number % capacity
      source[slot], target[slot], mask[slot] = 0, 0, False
      source[slot, : len(prompt)], target[slot, : len(answer)] = prompt, answer
      mask[slot, : len(answer)] = True
    data = SimpleNamespace(source=source, target=target, mask=mask)
    return SimpleNamespace(data=data, added=len(rows), capacity=capacity)

  assert kill.differing(ring(rows), journal) == 0
  assert kill.differing(ring(rows, capacity=2), journal) == 0
  assert kill.differing(ring([rows[0], *rows]), journal) == 3  # the first one twice
  assert kill.differing(ring(rows[1:]), journal) == 2  # the first one is missing
  assert kill.Tally(kills=3, answers=20, in_journal=21).faults() == 0
  assert kill.Tally(kills=3, answers=20, in_journal=21, lost=1).faults() == 1


@pytest.mark.slow
def test_soaked_server_keeps_its_promises(lively_pair, tmp_path):
  bindings = [
    f"PairConfig.target={lively_pair.target!r}",
    f"PairConfig.draft={lively_pair.draft!r}",
    "DecodingConfig.rows=2",
    "DecodingConfig.num_draft_tokens=3",
    "DecodingConfig.target_length=24",
    "UpdateConfig.steps_per_update=1",
    "UpdateConfig.length_multiple=12",
    "LearningConfig.gate=None",  # so few requests would promote no draft
  ]
  arguments = argparse.Namespace(out=tmp_path, bindings=bindings, clients=4)
  before, after = (soak.prompts_of(x, 4, bindings) for x in (soak.BEFORE, soak.AFTER))
  works = soak.plan(before, after, 100, seed=0)
  assert {work.prompt for work in works[50:]} <= set(after)  # the topics change
  counts = soak.soaked(arguments, works)
  counts["memory growth"] = 0  # so few requests say nothing about it
  assert soak.is_kept(counts), [f"{name}: {counts[name]}" for name in KEPT]
  assert sum(counts[f"requests, {kind}"] for kind in soak.SHARES) == 100
