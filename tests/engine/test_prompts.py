"""Prefills of several prompts, on a mesh or one device: each prompt is read once."""

import collections

import hypothesis
import jax
import numpy as np
import pytest
from engine import cases
from hypothesis import strategies as st

from osd_jax import sharding
from osd_jax.costs.table import RoundCosts
from osd_jax.engine import engine, steps
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


def on_a_mesh(rows, data, model, times=1, **decoding):
  """Answers the usual requests; returns how many prompts each prefill read."""
  if len(jax.devices()) < data * model:
    pytest.skip("needs several devices; conftest.py fakes them")
  partitioner = sharding.make(sharding.PartitionConfig(data, model))
  draft = cases.TARGET, cases.draft_params("close")
  config = cases.config_of(rows, **decoding)
  decoder = engine.Engine(
    config, cases.TARGET, cases.target_params(), *draft, partitioner
  )
  answers = decoder.run(times * cases.greedy_requests())
  assert cases.texts(answers) == times * cases.expected()
  # The prompts of one call share its time.
  return collections.Counter(done.prefill_ms for done in answers).values()


def policy(ms):
  costs = RoundCosts((1.0, ms))
  return AdaptiveConfig(candidates=(0, 2), costs=(costs, costs))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("data", "model", "rows", "together", "decoding"),
  [
    (4, 1, 8, 4, {}),
    (2, 2, 4, 2, {}),
    # With the draft prefilled on insertion, and later; rows end at different times.
    (4, 1, 4, 2, {"adaptive": policy(1.1), "max_rounds": 1}),
    (4, 1, 4, 2, {"adaptive": policy(4.0), "max_rounds": 1}),
  ],
)
def test_parallel_prefill_changes_no_output(data, model, rows, together, decoding):
  taken = on_a_mesh(rows, data, model, **decoding)
  assert len(taken) < len(cases.LIMITS) and together <= max(taken) <= data


@pytest.mark.parametrize(
  ("rows", "together", "model", "times"), [(4, 4, 1, 1), (4, 2, 2, 1), (16, 4, 1, 3)]
)
def test_prompts_of_one_prefill_change_no_output(rows, together, model, times):
  """With 16 rows, a prefill waits until two of them are free."""
  taken = on_a_mesh(rows, 1, model, times, prefill_rows=together)
  assert 1 < max(taken) <= together


def test_rows_are_a_multiple_of_the_prompts_of_a_prefill():
  decoding = cases.config_of(8, prefill_rows=4)
  assert [decoding.with_rows(n).prefill_rows for n in (1, 2, 6, 16)] == [1, 2, 2, 4]


def test_part_without_a_prompt_keeps_its_rows():
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
