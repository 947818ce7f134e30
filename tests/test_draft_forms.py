"""EAGLE's form of a draft, as `experiments/draft_forms` compares it with ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.draft_forms import run

ROWS, PROMPT, ANSWER, WIDTH = 2, 5, 6, 16


@pytest.fixture(scope="module")
def given():
  """(embedded, states before, positions, mask) of prompts of unequal length."""
  rng, count = np.random.default_rng(0), PROMPT + ANSWER
  embedded, before = rng.normal(size=(2, ROWS, count, WIDTH)).astype(np.float32)
  mask = np.ones((ROWS, count), bool)
  mask[0, PROMPT - 2 : PROMPT] = False
  positions = np.cumsum(mask, axis=1).astype(np.int32) - 1
  return embedded, before, positions, mask


@pytest.fixture(scope="module")
def drafter(given):
  """(steps, states before) -> what it says at each step; distances count."""
  module = run.States(WIDTH, 8, 2, 4, 16)
  embedded, before, positions, mask = given
  params = module.init(jax.random.key(0), embedded, before, positions, mask, PROMPT, 1)[
    "params"
  ]
  distances = jax.random.normal(jax.random.key(1), params["distances"].shape)
  params = {**params, "distances": distances}

  def said(steps, before):
    with jax.numpy_rank_promotion("allow"):
      return module.apply(
        {"params": params}, embedded, before, positions, mask, PROMPT, steps
      )

  return said


@pytest.mark.parametrize("start", [0, 1])
def test_a_step_is_that_of_a_draft_that_goes_on_from_its_own_states(
  drafter, given, start
):
  """The oracle drafts one by one, and has what it said in the target's place."""
  at_once = drafter(4, given[1])
  before = given[1].copy()
  for step in range(4):
    one = np.asarray(drafter(1, before)[0][:, start + step])
    np.testing.assert_allclose(at_once[step][:, start + step], one, atol=1e-5)
    before[:, PROMPT + start + step + 1] = one


def test_the_targets_later_states_are_not_seen(drafter, given):
  before = given[1].copy()
  before[:, PROMPT + 3 :] = 7.0
  for step, (mine, other) in enumerate(zip(drafter(3, given[1]), drafter(3, before))):
    np.testing.assert_array_equal(mine[:, : 3 + step], other[:, : 3 + step])
    assert not np.allclose(mine[:, 3 + step], other[:, 3 + step])


def test_padding_is_not_seen(drafter, given):
  before = given[1].copy()
  before[0, PROMPT - 2 : PROMPT] = 7.0
  for mine, other in zip(drafter(3, given[1]), drafter(3, before)):
    np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
  ("right", "length", "calls"),
  [
    (np.ones((7, 16), bool), 16, 2),
    (np.ones((7, 16), bool), 9, 2),
    (np.zeros((7, 16), bool), 5, 5),
    (np.arange(7)[:, None] * np.ones((1, 16)) < 1, 6, 3),
  ],
)
def test_calls_of_an_answer(right, length, calls):
  assert run.calls_of(right.astype(bool), length) == calls


def test_overlaps_are_of_the_places_that_a_step_can_be_at():
  mask = jnp.arange(5)[None] < jnp.asarray([[3], [5]])
  seen = np.asarray(run.places(mask, 2))
  assert seen.tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]
