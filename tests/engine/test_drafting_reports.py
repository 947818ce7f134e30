"""The engine reports to the policy exactly the work that it did for the draft."""

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


class Record(NamedTuple):
  """What the engine did and reported in one run.

  Attributes:
    missing: `missing_ms` as passed to `choose` before each call that drafted.
    done: milliseconds of late prefills and chunks before each call that drafted.
    prompts: prompts that the draft read, on insertion or later.
    chunks: number of chunks fed to the draft, by call.
    calls: what was passed to `observe`.
  """

  missing: list[float]
  done: list[float]
  prompts: list[tuple[int, ...]]
  chunks: list[int]
  calls: list[controller.Call]


def recording(monkeypatch, cycle):
  """Makes K follow a cycle, negative for probes; returns the record of a run."""
  right = controller.observe
  record, turns = Record([], [], [], [], []), itertools.cycle(cycle)

  def choose(candidates, costs, state, rows, missing_ms):
    turn = next(turns)
    if turn:
      record.missing.append(missing_ms)
      record.done.append(0.0)
    return dataclasses.replace(state, num_draft_tokens=abs(turn), probing=turn < 0)

  def observe(candidates, costs, state, call):
    record.calls.append(call)
    return right(candidates, costs, state, call)

  def insert(spec, served, state, batch):
    record.prompts.append(tuple(batch.source[0]))
    return steps.insert(spec, served, state, batch)

  def prefill_draft(spec, served, state, batch):
    record.prompts.append(tuple(batch.source[0]))
    record.done[-1] += TABLE.prefill_ms
    return steps.prefill_draft(spec, served, state, batch)

  def catching_up(spec, served, state):
    running = np.asarray(state.stop_reason) == StopReason.RUNNING
    lag = state_lib.fed_to_draft(state.length) - state.draft_cache.length
    record.chunks.append(-(-int(max(lag[running])) // drafters.CHUNK))
    record.done[-1] += TABLE.chunk_ms * record.chunks[-1]
    return steps.catch_up(spec, served, state)

  monkeypatch.setattr(controller, "ROUNDS_PER_CALL", 2)
  monkeypatch.setattr(controller, "choose", choose)
  monkeypatch.setattr(controller, "observe", observe)
  compiled = harness.Changed(
    steps, insert=insert, prefill_draft=prefill_draft, catch_up=catching_up
  )
  monkeypatch.setattr(engine, "steps", compiled)
  return record


@pytest.mark.parametrize("rows", [1, 3])
def test_choose_receives_the_cost_of_catching_up(monkeypatch, rows):
  record = recording(monkeypatch, CYCLE)
  test_drafting.make(rows=rows).run(cases.greedy_requests())
  assert record.missing == pytest.approx(record.done)
  # Some calls need no work for the draft, and some need a prefill.
  assert 0.0 in record.done and max(record.done) >= TABLE.prefill_ms


def test_observe_receives_the_cost_of_all_draft_work(monkeypatch):
  record = recording(monkeypatch, CYCLE)
  test_drafting.make().run(cases.greedy_requests())
  prefills_ms = TABLE.prefill_ms * len(record.prompts)
  chunks_ms = TABLE.chunk_ms * sum(record.chunks)
  assert min(prefills_ms, chunks_ms) > 0
  spent = sum(call.catch_up_ms for call in record.calls)
  assert spent == pytest.approx(prefills_ms + chunks_ms)


def test_draft_reads_each_prompt_at_most_once(monkeypatch):
  record = recording(monkeypatch, (0, 1))
  test_drafting.make().run(cases.greedy_requests())
  assert len(set(record.prompts)) == len(record.prompts)
  late = sum(ms >= TABLE.prefill_ms for ms in record.done)
  assert 0 < late < len(record.chunks)


def test_requests_after_a_probe_are_not_prefilled_for_the_draft(monkeypatch):
  """Requests of one token; every second one is decoded plainly, after a probe."""
  record = recording(monkeypatch, (-1, 0))
  requests = [engine.Request(tokens, max_new_tokens=1) for tokens in cases.prompts(6)]
  test_drafting.make(rows=1).run(requests)
  assert [call.catch_up_ms for call in record.calls] == [TABLE.prefill_ms, 0.0] * 3


@pytest.mark.parametrize("rows", [1, 3])
def test_observe_counts_every_token_once(monkeypatch, rows):
  record = recording(monkeypatch, CYCLE)
  found = test_drafting.make(rows=rows).run(cases.greedy_requests())
  totals = {
    name: sum(sum(getattr(call, name)) for call in record.calls)
    for name in ("emitted", "judged", "accepted")
  }
  assert totals == {
    "emitted": sum(len(done.tokens) for done in found),
    "judged": sum(done.drafted for done in found),
    "accepted": sum(done.accepted for done in found),
  }
  assert min(totals.values()) > 0
