"""The draft forms that `experiments/draft_forms` compares: ours and EAGLE's."""

import sys

import jax
import numpy as np
import pytest
from conftest import ROOT

from osd_jax import testing
from osd_jax.distillation import optimizers
from osd_jax.models import families, weights

sys.path.append(str(ROOT / "experiments" / "draft_forms"))

import states

from experiments.draft_forms import run

ROWS, PROMPT, ANSWER, WIDTH = 2, 5, 6, 16


@pytest.fixture(scope="module")
def given():
  """(embedded, states before, positions, mask) of prompts of different lengths."""
  rng, count = np.random.default_rng(0), PROMPT + ANSWER
  embedded, before = rng.normal(size=(2, ROWS, count, WIDTH)).astype(np.float32)
  mask = np.ones((ROWS, count), bool)
  mask[0, PROMPT - 2 : PROMPT] = False
  positions = np.cumsum(mask, axis=1).astype(np.int32) - 1
  return embedded, before, positions, mask


@pytest.fixture(scope="module")
def drafter(given):
  """A function (steps, states before) -> states of each step, with noisy distances."""
  module = states.States(WIDTH, 8, 2, 4, 16)
  embedded, before, positions, mask = given
  params = module.init(jax.random.key(0), embedded, before, positions, mask, PROMPT, 1)[
    "params"
  ]
  distances = jax.random.normal(jax.random.key(1), params["distances"].shape)
  params = {**params, "distances": distances}

  def states_of(steps, before):
    with jax.numpy_rank_promotion("allow"):
      return module.apply(
        {"params": params}, embedded, before, positions, mask, PROMPT, steps
      )

  return states_of


@pytest.mark.parametrize("start", [0, 1])
def test_scores_equal_drafting_step_by_step(drafter, given, start):
  """The oracle drafts one token at a time, from its own states."""
  at_once = drafter(4, given[1])
  before = given[1].copy()
  for step in range(4):
    one = np.asarray(drafter(1, before)[0][:, start + step])
    np.testing.assert_allclose(at_once[step][:, start + step], one, atol=1e-5)
    before[:, PROMPT + start + step + 1] = one


SOURCE = np.array([[5, 6, 7, 8, -1], [9, 10, -1, -1, -1]], np.int32)
TARGET = np.array([[11, 12, 13, 1], [14, 1, -1, -1]], np.int32)


@pytest.fixture(scope="module")
def judge():
  """A tiny decoder-only target."""
  params = families.build(testing.TINY_LLAMA).init(jax.random.key(0))
  return run.Judge(weights.Weights(testing.TINY_LLAMA, params, "none", "drawn"), -1)


@pytest.fixture(autouse=True)
def as_the_program_runs():
  """The experiment does not use the strict settings of the tests."""
  with jax.numpy_rank_promotion("allow"):
    yield


def test_state_before_a_token_does_not_depend_on_it(judge):
  """A form that saw a later state would look better than it is."""
  other = TARGET.copy()
  other[0, 1] = 20
  mine, changed = judge.rows(SOURCE, TARGET), judge.rows(SOURCE, other)
  at = SOURCE.shape[1] + 2  # where that token is fed
  assert mine.tokens[0, at] == 12 and changed.tokens[0, at] == 20
  np.testing.assert_array_equal(mine.before[0, : at + 1], changed.before[0, : at + 1])
  assert not np.allclose(mine.before[0, at + 1], changed.before[0, at + 1])


@pytest.mark.slow
def test_loss_of_every_form_falls(judge):
  rows = judge.rows(SOURCE, TARGET)
  for form in run.forms(judge, optimizers.OptimizerConfig(learning_rate=1e-2)).values():
    params = form.init(jax.random.key(0))
    state, losses = form.optimizer.init(params), []
    for _ in range(12):
      loss, params, state = run.learn(form, params, state, rows)
      losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
