"""What the policy is told of the calls is what was done, and the draft does no more."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from decoding import harness
from engine import cases, test_drafting

from osd_jax.base import StopReason
from osd_jax.decoding import drafters
from osd_jax.decoding import state as state_lib
from osd_jax.engine import controller, engine, steps

TABLE, CYCLE = test_drafting.TABLE, test_drafting.CYCLE


class Heard(NamedTuple):
  """Of one run.

  Attributes:
    missing: milliseconds that `choose` was told before each call that drafted.
    done: those of the late prefills and chunks before each call that drafted.
    prompts: what the draft's prefill was given, at once or late.
    chunks: fed to the draft.
    told: what `observe` was told.
  """

  missing: list[float]
  done: list[float]
  prompts: list[tuple[int, ...]]
  chunks: list[int]
  told: list[controller.Call]


def listen(monkeypatch, cycle):
  """Makes K follow a cycle, negative where it is a probe; hears what is said."""
  right = controller.observe
  heard, turns = Heard([], [], [], [], []), itertools.cycle(cycle)

  def choose(candidates, costs, state, rows, missing_ms):
    turn = next(turns)
    if turn:
      heard.missing.append(missing_ms)
      heard.done.append(0.0)
    return dataclasses.replace(state, num_draft_tokens=abs(turn), probing=turn < 0)

  def observe(candidates, costs, state, call):
    heard.told.append(call)
    return right(candidates, costs, state, call)

  def insert(spec, served, state, batch):
    heard.prompts.append(tuple(batch.source[0]))
    return steps.insert(spec, served, state, batch)

  def prefill_draft(spec, served, state, batch):
    heard.prompts.append(tuple(batch.source[0]))
    heard.done[-1] += TABLE.prefill_ms
    return steps.prefill_draft(spec, served, state, batch)

  def catching_up(spec, served, state):
    running = np.asarray(state.stop_reason) == StopReason.RUNNING
    lag = state_lib.fed_to_draft(state.length) - state.draft_cache.length
    heard.chunks.append(-(-int(max(lag[running])) // drafters.CHUNK))
    heard.done[-1] += TABLE.chunk_ms * heard.chunks[-1]
    return steps.catch_up(spec, served, state)

  monkeypatch.setattr(controller, "ROUNDS_PER_CALL", 2)
  monkeypatch.setattr(controller, "choose", choose)
  monkeypatch.setattr(controller, "observe", observe)
  compiled = harness.Changed(
    steps, insert=insert, prefill_draft=prefill_draft, catch_up=catching_up
  )
  monkeypatch.setattr(engine, "steps", compiled)
  return heard


@pytest.mark.parametrize("rows", [1, 3])
def test_what_the_draft_missed_is_said_before_it_drafts(monkeypatch, rows):
  heard = listen(monkeypatch, CYCLE)
  test_drafting.make(rows=rows).run(cases.greedy_requests())
  assert heard.missing == pytest.approx(heard.done)
  assert 0.0 in heard.done and max(heard.done) >= TABLE.prefill_ms  # some of each


def test_what_was_done_for_the_draft_is_said_after_the_call(monkeypatch):
  heard = listen(monkeypatch, CYCLE)
  test_drafting.make().run(cases.greedy_requests())
  prefills_ms = TABLE.prefill_ms * len(heard.prompts)
  chunks_ms = TABLE.chunk_ms * sum(heard.chunks)
  assert min(prefills_ms, chunks_ms) > 0
  spent = sum(call.catch_up_ms for call in heard.told)
  assert spent == pytest.approx(prefills_ms + chunks_ms)


def test_no_prompt_is_prefilled_twice_for_the_draft(monkeypatch):
  heard = listen(monkeypatch, (0, 1))
  test_drafting.make().run(cases.greedy_requests())
  assert len(set(heard.prompts)) == len(heard.prompts)
  late = sum(ms >= TABLE.prefill_ms for ms in heard.done)
  assert 0 < late < len(heard.chunks)


def test_a_probe_that_is_over_prefills_for_nobody(monkeypatch):
  """Requests of one token: every second one is decoded plainly, after a probe."""
  heard = listen(monkeypatch, (-1, 0))
  requests = [engine.Request(tokens, max_length=1) for tokens in cases.prompts(6)]
  test_drafting.make(rows=1).run(requests)
  assert [call.catch_up_ms for call in heard.told] == [TABLE.prefill_ms, 0.0] * 3


@pytest.mark.parametrize("rows", [1, 3])
def test_the_policy_hears_of_every_token_once(monkeypatch, rows):
  heard = listen(monkeypatch, CYCLE)
  found = test_drafting.make(rows=rows).run(cases.greedy_requests())
  said = {
    name: sum(sum(getattr(call, name)) for call in heard.told)
    for name in ("emitted", "judged", "accepted")
  }
  assert said == {
    "emitted": sum(len(done.tokens) for done in found),
    "judged": sum(done.drafted for done in found),
    "accepted": sum(done.accepted for done in found),
  }
  assert min(said.values()) > 0
