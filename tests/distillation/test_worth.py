"""Updates that pay, on simulated learners whose overlap is as noisy as requests are."""

import dataclasses
import json
import time

import numpy as np
import pytest

from osd_jax import base
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.distillation import schedule, worth

NOISE, TOKENS, SEEDS = 0.15, 24, range(6)
COSTS = Costs(RoundCosts((11.0,), num_draft_tokens=(7,)), lost_ms=75.0)
DEAR = dataclasses.replace(COSTS, lost_ms=100 * COSTS.lost_ms)
CONFIG = worth.WorthConfig(costs=COSTS)


def observe(config, state, overlap, tokens=TOKENS, slices=1):
  return config.update(state, schedule.Request(overlap, tokens, slices))


class Draft:
  """Closes a share of its gap with every update; jumps and drifts as told."""

  def __init__(self, level, reachable=0.9, pace=0.0, jumps=(), drift=0.0):
    self.level, self.reachable, self.pace = level, reachable, pace
    self.jumps, self.drift = dict(jumps), drift

  def update(self):
    self.level += self.pace * (self.reachable - self.level)

  def request(self, index):
    self.level = self.jumps.get(index, max(self.level - self.drift, 0.0))
    return self.level


def serve(config, draft, requests, seed, noise=NOISE):
  """The last state, the requests that launched updates, the levels, pauses."""
  rng, state, pending = np.random.default_rng(seed), config.init(), None
  launched, levels, paused = [], [], []
  for index in range(requests):
    if pending is not None and index >= pending + config.update_interval:
      pending = None
      draft.update()
    levels.append(draft.request(index))
    overlap = float(np.clip(levels[-1] + rng.normal(0, noise), 0, 1))
    state, slices = observe(config, state, overlap, slices=int(pending is None))
    if slices:
      pending = index + 1
      launched.append(index + 1)
    paused.append(state.paused)
  return state, np.array(launched), np.array(levels), np.array(paused)


def share(state):
  return state.spent_ms / state.served_ms


@pytest.mark.parametrize("level", [0.1, 0.3, 0.6, 0.9])
def test_learning_that_gains_nothing_takes_at_most_3_percent(level):
  for seed in SEEDS:
    state, launched, _, _ = serve(CONFIG, Draft(level), 1200, seed)
    assert 0 < len(launched) and share(state) <= 0.03


def test_learning_every_interval_would_take_far_more():
  """Negative control: the same hopeless draft where nothing is weighed."""
  state, launched, _, _ = serve(CONFIG, Draft(0.6), 1200, 0)
  always = 1200 // CONFIG.update_interval
  assert always * COSTS.lost_ms / state.served_ms > 0.1
  assert len(launched) < always / 4


def test_hopeless_shifts_buy_no_new_grants():
  """Where the stream became easier during an episode, that was taken for a gain."""
  jumps = [(at, 0.7 if at // 150 % 2 else 0.35) for at in range(150, 1500, 150)]
  states = [serve(CONFIG, Draft(0.35, jumps=jumps), 1500, seed)[0] for seed in SEEDS]
  assert min(state.drops for state in states) >= 3
  assert np.mean([share(state) for state in states]) <= 0.03


def test_a_fast_learner_learns_most_of_what_there_is():
  gained = [
    serve(CONFIG, Draft(0.6, pace=0.05), 800, seed)[2][-1] - 0.6 for seed in SEEDS
  ]
  assert np.median(gained) > 0.2  # of .3
  config = dataclasses.replace(CONFIG, costs=DEAR)
  assert serve(config, Draft(0.6, pace=0.05), 800, 0)[2][-1] == 0.6


def test_updates_resume_at_a_shift_and_stop_behind_the_plateau():
  resumed, rested = [], []
  for seed in SEEDS:
    draft = Draft(0.5, pace=0.1, jumps=[(600, 0.4)])
    _, launched, levels, paused = serve(CONFIG, draft, 1200, seed)
    resumed.append(launched[launched > 600][0] - 600)
    rested.append((paused[400:600].mean() + paused[1000:].mean()) / 2)
    assert levels[1199] > 0.75
  assert np.median(resumed) <= 8 and max(resumed) <= 20
  assert np.mean(rested) > 0.7


def test_a_slow_drift_is_answered(monkeypatch):
  monkeypatch.setattr(worth, "SHARP_DROP", 0.9)  # sharp falls are not seen
  seen = [serve(CONFIG, Draft(0.5, pace=0.1, drift=0.0005), 2000, s) for s in SEEDS]
  assert np.mean([state.drops for state, *_ in seen]) >= 1
  monkeypatch.setattr(worth, "SLOW_DROP", 1.0)  # the control
  state, *_ = serve(CONFIG, Draft(0.5, pace=0.1, drift=0.0005), 2000, 0)
  assert state.drops == 0


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_an_expensive_update_is_not_launched(noise):
  config = dataclasses.replace(CONFIG, costs=DEAR)
  for seed in SEEDS:
    assert not len(serve(config, Draft(0.6, pace=0.05), 600, seed, noise)[1])


def test_a_draft_that_is_perfect_is_left_alone():
  state, launched, *_ = serve(CONFIG, Draft(1.0), 600, 0, noise=0.0)
  assert not len(launched) and state.paused


def test_a_state_survives_json_anywhere_in_a_stream():
  rng, draft = np.random.default_rng(0), Draft(0.5, pace=0.1, jumps=[(150, 0.3)])
  state = other = CONFIG.init()
  for index in range(400):
    overlap = float(np.clip(draft.request(index) + rng.normal(0, NOISE), 0, 1))
    other = worth.WorthState(**json.loads(json.dumps(dataclasses.asdict(other))))
    state, slices = observe(CONFIG, state, overlap, index % 40)
    other, _ = observe(CONFIG, other, overlap, index % 40)
    assert other == state
    if slices:
      draft.update()
  assert state.updates > 10 and state.drops


def test_no_clock_is_read(monkeypatch):
  def refuse():
    raise AssertionError("a clock was read")

  for name in ("time", "perf_counter", "monotonic", "process_time"):
    monkeypatch.setattr(time, name, refuse)
  state, launched, *_ = serve(CONFIG, Draft(0.5, pace=0.1), 200, 0)
  assert state.finished == 200 and len(launched)
  with pytest.raises(AssertionError, match="a clock"):
    time.perf_counter()


def test_measured_costs_are_used_unless_some_are_given():
  unknown = worth.WorthConfig()
  with pytest.raises(base.InputError, match="WorthConfig.costs: received None"):
    observe(unknown, unknown.init(), 0.5)
  request = schedule.Request(0.5, TOKENS, 1)
  measured, given = (
    config.update(config.init(), request, DEAR)[0] for config in (unknown, CONFIG)
  )
  assert measured.paused and not given.paused  # DEAR costs more than it can gain


def test_a_request_is_evidence_of_the_version_that_served_it():
  """Until a new draft is swapped in, requests still belong to the old one."""
  state = CONFIG.init()
  slices = 0
  while not slices:
    state, slices = observe(CONFIG, state, 0.3)
  served = state.finished
  for _ in range(CONFIG.update_interval):
    state, _ = observe(CONFIG, state, 0.9, slices=0)
  counts = [count for count, _ in state.versions]
  # The old version served all of these; nothing is known about the new one yet.
  assert counts == [served + CONFIG.update_interval, 0]
  state, _ = observe(CONFIG, state, 0.9, slices=0)
  assert state.versions[-1] == (1, 0.9)


def test_a_long_pause_saves_up_no_more_than_a_grant():
  costs = dataclasses.replace(COSTS, lost_ms=1e9)  # nothing is ever worth it
  config = dataclasses.replace(CONFIG, costs=costs)
  state = config.init()
  cheap = dataclasses.replace(CONFIG, costs=dataclasses.replace(COSTS, lost_ms=0.01))
  for _ in range(50):
    state, _ = observe(config, state, 0.99)
  assert state.paused
  for _ in range(20_000):
    earned = worth._earned(cheap, cheap.costs, state, 0.99)
    state = dataclasses.replace(state, saved_ms=earned.saved_ms)
  grant = worth._full_grant_ms(cheap, cheap.costs, state)
  assert state.saved_ms == pytest.approx(grant)


def test_a_line_through_versions_knows_its_error():
  versions = [(4, 0.5), (4, 0.6), (4, 0.7)]
  slope, error = worth.slope_of(versions, 0.2)
  assert slope == pytest.approx(0.1)
  assert error == pytest.approx(0.2 / np.sqrt(8))
  assert worth.slope_of([(9, 0.5), (0, 0.0)], 0.2)[1] == np.inf


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"update_interval": 0}, "WorthConfig.update_interval: received 0"),
    ({"horizon": 1.5}, "WorthConfig.horizon: received 1.5"),
    ({"window": 2}, "WorthConfig.window: received 2"),
    ({"trial_share": 1.0}, "WorthConfig.trial_share: received 1.0"),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(base.InputError, match=message):
    worth.WorthConfig(**fields)


@pytest.mark.parametrize("overlap", [float("nan"), -0.1, 1.2])
def test_a_bad_overlap_is_refused(overlap):
  with pytest.raises(base.InputError, match="Schedule.update: overlap of request 0"):
    observe(CONFIG, CONFIG.init(), overlap)
