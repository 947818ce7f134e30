"""From times of calls to a table of costs: noise on some turns changes little."""

import numpy as np
import pytest

from osd_jax.engine import calibration

ROUND_MS = np.array([20.0, 30.0, 43.0])
IDLE_MS, CHUNK_MS, PREFILL_MS = 2.0, 5.0, 45.0
ROUNDS = 2


def timed(turns=16, slower=lambda shape: np.ones(shape), round_ms=ROUND_MS):
  """Turns as `measure` times them; `slower` gives factors of [turns, n]."""
  full = IDLE_MS + round_ms * ROUNDS
  calls = np.stack([np.full(3, IDLE_MS), full, np.full(3, float(ROUNDS))], axis=1)
  rest = [IDLE_MS, IDLE_MS + CHUNK_MS, PREFILL_MS]
  found = np.tile(np.concatenate([calls.ravel(), rest]), (turns, 1))
  is_time = np.arange(found.shape[1]) % 3 != 2  # the third is a count of rounds
  is_time[-1] = True
  return np.where(is_time, found * slower(found.shape), found)


def test_quiet_turns_give_the_costs():
  table = calibration.table(timed())
  np.testing.assert_allclose(table.round_ms, ROUND_MS)
  assert table.chunk_ms == pytest.approx(CHUNK_MS)
  assert table.prefill_ms == pytest.approx(PREFILL_MS)
  assert table.call_ms == pytest.approx(IDLE_MS)


def test_what_else_ran_in_a_third_of_the_turns_changes_nothing():
  rng = np.random.default_rng(0)

  def busy(shape):
    return np.where(rng.random((shape[0], 1)) < 0.33, rng.uniform(1, 9, shape), 1.0)

  table = calibration.table(timed(slower=busy))
  np.testing.assert_allclose(table.round_ms, ROUND_MS, rtol=1e-6)
  mean = np.mean(timed(slower=busy)[:, 1])
  assert mean > 1.2 * (IDLE_MS + ROUNDS * ROUND_MS[0])  # a mean would have noticed


def test_ratios_to_plain_steps_are_steadier_than_those_of_medians():
  """Under noise like a shared machine's: it only adds, on every turn."""
  rng = np.random.default_rng(1)

  def noisy(shape):
    return 1 + rng.gamma(1.0, 0.12, shape)

  ratios = []
  for _ in range(300):
    turns = timed(slower=noisy)
    found = calibration.table(turns).round_ms
    medians = np.median(turns[:, 1:9:3] - IDLE_MS, axis=0)
    ratios.append((np.log(found[2] / found[0]), np.log(medians[2] / medians[0])))
  ours, of_medians = np.std(ratios, axis=0)
  assert ours < 0.9 * of_medians and ours < 0.03


def test_more_drafted_tokens_cost_no_less():
  table = calibration.table(timed(round_ms=np.array([20.0, 30.0, 29.0])))
  np.testing.assert_allclose(table.round_ms, [20.0, 30.0, 30.0])
