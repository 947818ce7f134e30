"""The schedule at a fixed interval, and the detector of shifts."""

import numpy as np
import pytest

from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.distillation import schedule

CONFIG = schedule.ScheduleConfig(update_interval=3, much_to_gain=0.4)
SLICES = 16  # per update
COSTS = Costs(RoundCosts((11.0,), num_draft_tokens=(7,)), lost_ms=75.0)


def observe(config, state, overlap, slices=SLICES):
  """Returns state and slices after a request; with 0 slices no update can start."""
  return config.update(state, schedule.Request(overlap, 20, slices))


def run(config, overlaps):
  """Returns the last state, and the slices after each request."""
  state, started = config.init(), []
  for overlap in overlaps:
    state, slices = observe(config, state, overlap)
    started.append(slices)
  return state, started


def test_updates_start_every_interval():
  state, started = run(CONFIG, [0.5] * 200)
  assert list(np.flatnonzero(started) + 1) == list(range(3, 201, 3))
  assert state.updates == 66 and not state.paused


def test_updates_do_not_overlap():
  state = CONFIG.init()
  for _ in range(3 * CONFIG.update_interval):
    state, slices = observe(CONFIG, state, 0.5, slices=0)
    assert not slices
  state, slices = observe(CONFIG, state, 0.5)
  assert slices == SLICES and state.updates == 1


# The share of the slices is (1 - overlap) / much_to_gain, at most 1.
@pytest.mark.parametrize("overlap, expected", [(0.2, 16), (0.8, 8), (0.99, 1)])
def test_updates_have_fewer_slices_if_little_can_be_gained(overlap, expected):
  assert run(CONFIG, [overlap] * 3)[1][-1] == expected


def test_possible_gain_depends_on_the_last_requests_only():
  config = schedule.ScheduleConfig(update_interval=12, much_to_gain=0.4)
  state, started = run(config, [0.1] * 4 + [0.9] * schedule.SHORT)
  assert started[-1] == 4 and len(state.recent) == schedule.SHORT


@pytest.mark.parametrize("overlap", [float("nan"), -0.1, 1.5])
@pytest.mark.parametrize("config", [CONFIG, schedule.WorthConfig(costs=COSTS)])
def test_overlap_outside_0_to_1_is_refused(config, overlap):
  with pytest.raises(ValueError, match="Schedule.update: overlap of request 0"):
    observe(config, config.init(), overlap)


@pytest.mark.parametrize("change", [-0.3, -0.25, 0.3])
def test_shift_is_found_within_as_many_requests_as_its_window(change):
  before, after = [0.6] * 56, [0.6 + change] * schedule.SHORT
  assert schedule.shift(before + after) == pytest.approx(change)
  assert abs(schedule.shift(before)) < 1e-9


def test_noise_alone_is_rarely_a_shift_and_a_short_past_never():
  """The negative control: no change, with the noise of real requests."""
  noise = np.random.default_rng(0).normal(0.55, schedule.NOISE, (2000, 64))
  values = [schedule.shift(tuple(row)) for row in noise.clip(0, 1)]
  assert np.mean(np.abs(values) > schedule.SHIFT) < 0.005
  assert schedule.shift([0.9] * 7 + [0.1] * 8) == 0.0
