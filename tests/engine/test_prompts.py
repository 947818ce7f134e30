"""Prefills of several prompts, on a mesh or one device: each prompt is read once."""

import dataclasses

import hypothesis
import jax
import numpy as np
import pytest
from decoding import harness
from engine import cases
from hypothesis import strategies as st

from osd_jax import base, sharding
from osd_jax.costs.table import RoundCosts
from osd_jax.engine import controller, engine, steps
from osd_jax.engine.requests import AdaptiveConfig, SamplingConfig

ROWS = 8


def prompt(number):
  """A prompt of one repeated token and a seed, which both identify it."""
  settings = SamplingConfig(seed=number).settings(4)
  return steps.PaddedPrompt(np.full((1, 6), number, np.int32), settings)


@hypothesis.given(
  parts=st.sampled_from([1, 2, 4, 8]), asked=st.sets(st.integers(0, ROWS - 1))
)
def test_every_prompt_is_prefilled_once_in_its_own_part(parts, asked):
  found, made = (
    {},
    list(steps.prefill_batches({s: prompt(s) for s in asked}, 6, ROWS, parts)),
  )
  for batch in made:
    assert batch.source.shape == (parts, 6)
    for part, slot in enumerate(batch.slots):
      if slot >= 0:
        row = part * (ROWS // parts) + int(slot)
        assert row not in found
        found[row] = (int(batch.source[part, 0]), int(batch.settings.seed[part]))
  assert found == {slot: (slot, slot) for slot in asked}
  of_part = [sum(s * parts // ROWS == part for s in asked) for part in range(parts)]
  assert len(made) == max(of_part)  # the fullest part decides the number of calls


@hypothesis.given(free=st.sets(st.integers(0, ROWS - 1), min_size=1))
def test_first_free_slot_of_every_part_is_used(free):
  found = steps.first_free_slots(sorted(free), ROWS, 4)
  assert found == sorted({min(s for s in free if s // 2 == f // 2) for f in free})


def test_prefill_waits_for_an_eighth_of_the_rows_if_prompts_fill_them():
  def later(free, waiting, rows=32, parts=4):
    return steps.defer_prefill(free, waiting, rows, parts)

  assert [later(free, free) for free in (1, 3, 4, 32)] == [True, True, False, False]
  assert not later(3, 2)  # rows stay free even if it waits
  assert not later(1, 1, parts=1)  # a call that takes one prompt gains nothing
  assert not later(1, 1, rows=8)  # an eighth is one row


# --- On devices -----------------------------------------------------------------------


def on_a_mesh(rows, data, model, monkeypatch, times=1, **decoding):
  """Returns the answers to the usual requests and the batches of all prefills."""
  if len(jax.devices()) < data * model:
    pytest.skip("needs several devices; conftest.py fakes them")
  read = []

  def insert(spec, served, state, batch):
    read.append(batch)
    return steps.insert(spec, served, state, batch)

  monkeypatch.setattr(engine, "steps", harness.Changed(steps, insert=insert))
  partitioner = sharding.make(sharding.PartitionConfig(data, model))
  decoder = engine.Engine(
    dataclasses.replace(cases.config_of(rows), **decoding),
    cases.TARGET,
    cases.target_params(),
    cases.TARGET,
    cases.draft_params("close"),
    partitioner,
  )
  requests = [request for _ in range(times) for request in cases.greedy_requests()]
  return decoder.run(requests), read


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model", "rows"), [(4, 1, 8), (2, 2, 4)])
def test_parallel_prefill_changes_no_output(data, model, rows, monkeypatch):
  found, read = on_a_mesh(rows, data, model, monkeypatch)
  assert cases.texts(found) == cases.expected()
  taken = [int((batch.slots >= 0).sum()) for batch in read]
  assert sum(taken) == len(found) and len(read) < len(found)
  assert max(taken) == data


@pytest.mark.parametrize(
  ("rows", "together", "model"), [(8, 4, 1), (4, 4, 1), (4, 2, 2)]
)
def test_prompts_of_one_prefill_change_no_output(rows, together, model, monkeypatch):
  found, read = on_a_mesh(rows, 1, model, monkeypatch, prefill_rows=together)
  assert cases.texts(found) == cases.expected()
  assert {batch.source.shape[0] for batch in read} == {together}
  taken = [int((batch.slots >= 0).sum()) for batch in read]
  assert sum(taken) == len(found) and 1 < max(taken) <= together


def test_rows_are_a_multiple_of_the_prompts_of_a_prefill():
  with pytest.raises(base.InputError, match=r"prefill_rows: .* 3, .* divisor of rows"):
    cases.config_of(8, prefill_rows=3)
  decoding = cases.config_of(8, prefill_rows=4)
  assert [decoding.with_rows(n).prefill_rows for n in (1, 2, 6, 16)] == [1, 2, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("data", [4, 1])  # on a mesh, and on one device
def test_waiting_saves_prefill_calls_and_changes_no_output(data, monkeypatch):
  calls_made = []
  for patience in (2, 10**6):  # wait for half of the rows; control: for one row
    monkeypatch.setattr(steps, "_PATIENCE", patience)
    found, read = on_a_mesh(8, data, 1, monkeypatch, times=3, prefill_rows=4)
    assert cases.texts(found) == 3 * cases.expected()
    calls_made.append(len(read))
  # Seven calls with four prompts each would suffice.
  assert 7 <= calls_made[0] < calls_made[1]


def test_part_without_a_prompt_keeps_its_rows(monkeypatch):
  """Such a part computes without storing. Control: slot 0 would be overwritten."""
  if len(jax.devices()) < 2:
    pytest.skip("needs two devices; conftest.py fakes them")
  partitioner = sharding.make(sharding.PartitionConfig(data=2))
  spec = cases.config_of(2).spec(cases.TARGET, None, partitioner)
  params = cases.target_params()
  served = steps.Served(steps.prepare(cases.TARGET, params, spec=spec))

  def after(second_slot):
    state = steps.empty(spec, served, 6)
    (both,) = steps.prefill_batches({0: prompt(5), 1: prompt(6)}, 6, 2, 2)
    state = steps.insert(spec, served, state, both)
    (one,) = steps.prefill_batches({0: prompt(7)}, 6, 2, 2)
    assert one.slots.tolist() == [0, -1]
    given = one._replace(slots=np.asarray([0, second_slot], np.int32))
    state = steps.insert(spec, served, state, given)
    return np.asarray(state.settings.seed).tolist()

  assert after(-1) == [7, 6]
  assert after(0) == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize("data", [4, 1])
@pytest.mark.parametrize("turn", [0, 2])
def test_parallel_prefill_with_adaptive_k_changes_no_output(turn, data, monkeypatch):
  """With the draft prefilled on insertion, and later."""
  monkeypatch.setattr(controller, "ROUNDS_PER_CALL", 1)
  policy = AdaptiveConfig(
    candidates=(0, 2),
    costs=(RoundCosts((1.0, 1.1 if turn else 4.0)),) * 2,
  )
  found, _ = on_a_mesh(4, data, 1, monkeypatch, adaptive=policy, prefill_rows=4)
  assert cases.texts(found) == cases.expected()
