"""The schedule by worth, on simulated learners with the noise of real requests."""

import dataclasses
import json

import numpy as np
import pytest

from osd_jax import base
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.distillation import schedule

NOISE, TOKENS, SEEDS = 0.15, 24, range(4)
COSTS = Costs(RoundCosts((11.0,), num_draft_tokens=(7,)), lost_ms=75.0)
EXPENSIVE = dataclasses.replace(COSTS, lost_ms=100 * COSTS.lost_ms)
CONFIG = schedule.WorthConfig(costs=COSTS)


def observe(config, state, overlap, tokens=TOKENS, slices=1, mixed=None):
  return config.update(state, schedule.Request(overlap, tokens, slices, mixed))


class Draft:
  """A simulated draft whose overlap changes with updates, jumps and drift.

  Every update closes the share `pace` of the gap to `reachable`. `jumps` lists
  (request, new level), and `drift` is the loss per request.
  """

  def __init__(self, level, reachable=0.9, pace=0.0, jumps=(), drift=0.0):
    self.level, self.reachable, self.pace = level, reachable, pace
    self.jumps, self.drift = dict(jumps), drift

  def update(self):
    self.level += self.pace * (self.reachable - self.level)

  def request(self, index):
    self.level = self.jumps.get(index, max(self.level - self.drift, 0.0))
    return self.level


def serve(config, draft, requests, seed, noise=NOISE, mixed=lambda level: None):
  """Serves requests from a simulated draft; `mixed` maps its level to `Request.mixed`.

  Returns:
    The last state, the requests after which updates started, and per request the level
    of the draft and whether learning was paused.
  """
  rng, state, pending = np.random.default_rng(seed), config.init(), None
  launched, levels, paused = [], [], []
  for index in range(requests):
    if pending is not None and index >= pending + config.update_interval:
      pending = None
      draft.update()
    levels.append(draft.request(index))
    overlap = float(np.clip(levels[-1] + rng.normal(0, noise), 0, 1))
    share_mixed = mixed(levels[-1])
    slices = int(pending is None)
    state, slices = observe(config, state, overlap, slices=slices, mixed=share_mixed)
    if slices:
      pending = index + 1
      launched.append(index + 1)
    paused.append(state.paused)
  return state, np.array(launched), np.array(levels), np.array(paused)


def share(state):
  """Returns the share of serving time that updates took."""
  return state.spent_ms / state.served_ms


@pytest.mark.parametrize("level", [0.1, 0.3, 0.6, 0.9])
def test_useless_learning_takes_at_most_3_percent_of_the_time(level):
  for seed in SEEDS:
    state, launched, _, _ = serve(CONFIG, Draft(level), 1200, seed)
    assert 0 < len(launched) and share(state) <= 0.03


def test_updating_every_interval_takes_over_10_percent():
  """Negative control: the same draft with an update in every interval."""
  state, launched, _, _ = serve(CONFIG, Draft(0.6), 1200, 0)
  always = 1200 // CONFIG.update_interval
  assert always * COSTS.lost_ms / state.served_ms > 0.1
  assert len(launched) < always / 4


def test_shifts_without_gain_do_not_increase_the_share_of_updates():
  """Regression: an easier topic during a trial was counted as a gain of learning."""
  jumps = [(at, 0.7 if at // 150 % 2 else 0.35) for at in range(150, 1500, 150)]
  states = [serve(CONFIG, Draft(0.35, jumps=jumps), 1500, seed)[0] for seed in SEEDS]
  assert min(state.drops for state in states) >= 3
  assert np.mean([share(state) for state in states]) <= 0.03


def test_fast_learner_gains_most_of_the_possible_overlap():
  gained = [
    serve(CONFIG, Draft(0.6, pace=0.05), 800, seed)[2][-1] - 0.6 for seed in SEEDS
  ]
  assert np.median(gained) > 0.2  # 0.3 can be gained
  # Negative control: expensive updates are never started.
  config = dataclasses.replace(CONFIG, costs=EXPENSIVE)
  assert serve(config, Draft(0.6, pace=0.05), 800, 0)[2][-1] == 0.6


def test_gain_that_a_cache_has_already_is_not_paid_for():
  """The draft learns fast, but all that it learns has been served before."""
  shares = {}
  for name, mixed in {
    "no cache": lambda level: None,
    "cache knows nothing": lambda level: level,
    "cache knows half": lambda level: level + (1 - level) / 2,
    "cache knows all": lambda level: 0.98,
  }.items():
    runs = [
      serve(CONFIG, Draft(0.5, 0.95, pace=0.05), 600, seed, mixed=mixed)
      for seed in SEEDS
    ]
    shares[name] = np.mean([share(state) for state, *_ in runs])
  assert shares["no cache"] > 0.15  # it pays, so it is spent
  assert shares["cache knows nothing"] > 0.8 * shares["no cache"]
  assert 0.03 < shares["cache knows half"] < 0.6 * shares["no cache"]
  assert shares["cache knows all"] < 0.03


def test_gain_is_scaled_by_what_the_cache_leaves_open():
  state, _ = observe(CONFIG, CONFIG.init(), 0.5)
  saved = {
    mixed: CONFIG.saved_ms(COSTS, dataclasses.replace(state, mixed=mixed), 0.1)
    for mixed in (0.0, 0.5, 0.75, 1.0)
  }
  token_ms = COSTS.online.token_ms
  assert saved[0.0] == saved[0.5] == CONFIG.horizon * (token_ms(0.5) - token_ms(0.6))
  # A fifth of the gap is closed in both cases.
  expected = CONFIG.horizon * (token_ms(0.75) - token_ms(0.8))
  assert saved[0.75] == pytest.approx(expected)
  assert saved[1.0] == 0


def test_updates_resume_at_a_shift_and_stop_at_the_plateau():
  resumed, rested = [], []
  for seed in SEEDS:
    draft = Draft(0.5, pace=0.1, jumps=[(600, 0.4)])
    _, launched, levels, paused = serve(CONFIG, draft, 1200, seed)
    resumed.append(launched[launched > 600][0] - 600)
    rested.append((paused[400:600].mean() + paused[1000:].mean()) / 2)
    assert levels[1199] > 0.75
  assert np.median(resumed) <= 8 and max(resumed) <= 20
  assert np.mean(rested) > 0.7


def test_slow_drift_is_detected(monkeypatch):
  monkeypatch.setattr(schedule, "SHIFT", 0.9)  # disables the rule for sharp drops
  results = [serve(CONFIG, Draft(0.5, pace=0.1, drift=0.0005), 2000, s) for s in SEEDS]
  assert np.mean([state.drops for state, *_ in results]) >= 1
  monkeypatch.setattr(schedule, "SLOW_DROP", 1.0)  # negative control
  state, *_ = serve(CONFIG, Draft(0.5, pace=0.1, drift=0.0005), 2000, 0)
  assert state.drops == 0


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_expensive_updates_are_not_started(noise):
  config = dataclasses.replace(CONFIG, costs=EXPENSIVE)
  for seed in SEEDS:
    assert not len(serve(config, Draft(0.6, pace=0.05), 600, seed, noise)[1])


def test_perfect_draft_is_not_updated():
  state, launched, *_ = serve(CONFIG, Draft(1.0), 600, 0, noise=0.0)
  assert not len(launched) and state.paused


def test_state_round_trips_through_json_after_every_request():
  rng, draft = np.random.default_rng(0), Draft(0.5, pace=0.1, jumps=[(150, 0.3)])
  state = other = CONFIG.init()
  for index in range(400):
    overlap = float(np.clip(draft.request(index) + rng.normal(0, NOISE), 0, 1))
    other = base.from_json(
      json.loads(json.dumps(dataclasses.asdict(other))), schedule.WorthState
    )
    state, slices = observe(CONFIG, state, overlap, index % 40)
    other, _ = observe(CONFIG, other, overlap, index % 40)
    assert other == state
    if slices:
      draft.update()
  assert state.updates > 10 and state.drops


def test_measured_costs_are_used_unless_the_config_has_costs():
  unknown = schedule.WorthConfig()
  with pytest.raises(base.InputError, match="WorthConfig.costs: received None"):
    observe(unknown, unknown.init(), 0.5)
  request = schedule.Request(0.5, TOKENS, 1)
  by_measured, by_config = (
    config.update(config.init(), request, EXPENSIVE)[0] for config in (unknown, CONFIG)
  )
  # An update at the measured, expensive costs could not gain as much as it takes.
  assert by_measured.paused and not by_config.paused


def test_request_counts_for_the_version_that_served_it():
  """Requests count for the old version until the new draft is swapped in."""
  state = CONFIG.init()
  slices = 0
  while not slices:
    state, slices = observe(CONFIG, state, 0.3)
  served = state.finished
  for _ in range(CONFIG.update_interval):
    state, _ = observe(CONFIG, state, 0.9, slices=0)
  counts = [count for count, _ in state.versions]
  # The old version served all of these requests, and the new one none yet.
  assert counts == [served + CONFIG.update_interval, 0]
  state, _ = observe(CONFIG, state, 0.9, slices=0)
  assert state.versions[-1] == (1, 0.9)


def test_savings_during_a_pause_are_limited_to_one_grant():
  costs = dataclasses.replace(COSTS, lost_ms=1e9)  # updates never pay
  config = dataclasses.replace(CONFIG, costs=costs)
  state = config.init()
  cheap = dataclasses.replace(COSTS, lost_ms=0.01)
  for _ in range(50):
    state, _ = observe(config, state, 0.99)
  assert state.paused
  full = CONFIG.grant_ms(cheap, state)
  state = dataclasses.replace(state, saved_ms=0.99 * full)
  for _ in range(200):
    earned = schedule._earned(CONFIG, cheap, state, 0.99)
    state = dataclasses.replace(state, saved_ms=earned.saved_ms)
  assert state.saved_ms == pytest.approx(full)


def test_slope_over_versions_has_the_right_standard_error():
  versions = [(4, 0.5), (4, 0.6), (4, 0.7)]
  slope, error = schedule.slope_of(versions, 0.2)
  assert slope == pytest.approx(0.1)
  assert error == pytest.approx(0.2 / np.sqrt(8))
  assert schedule.slope_of([(9, 0.5), (0, 0.0)], 0.2)[1] == np.inf
