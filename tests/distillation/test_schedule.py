"""The pausing schedule on synthetic overlap curves with the noise of real requests."""

import dataclasses
import json

import numpy as np
import pytest

from osd_jax.distillation import schedule

NOISE = 0.15  # typical standard deviation of the overlap between requests
SEEDS = range(6)
DEFAULT = schedule.ScheduleConfig()
SLICES = 4  # per update


def observe(config, state, overlap, slices=0):
  """Returns state and slices after a request; with 0 slices no update can start."""
  return config.update(state, schedule.Request(overlap, 20, slices))


def run(config, overlaps):
  """Observes a curve of overlaps.

  Returns:
    The state after each request, and the requests after which updates started.
  """
  state, states, updates = config.init(), [], []
  for overlap in overlaps:
    state, slices = observe(config, state, overlap, SLICES)
    if slices:
      updates.append(state.finished)
    states.append(state)
  return states, updates


def noisy(mean, seed):
  noise = np.random.default_rng(seed).normal(0.0, NOISE, len(mean))
  return np.clip(np.asarray(mean) + noise, 0.0, 1.0)


def toggles(states):
  paused = np.array([state.paused for state in states])
  return int((paused[1:] != paused[:-1]).sum())


def paused_at_level(level):
  """Returns a paused state after 300 requests at `level`."""
  states, _ = run(DEFAULT, [level] * 300)
  assert states[-1].paused
  return states[-1]


def requests_to_resume(state, overlaps):
  """Returns the number of requests after which a paused state resumes, or None."""
  for count, overlap in enumerate(overlaps, start=1):
    state, _ = observe(DEFAULT, state, overlap)
    if not state.paused:
      return count
  return None


def test_updates_start_every_interval_if_pausing_is_off():
  config = schedule.ScheduleConfig(update_interval=3, pause=False)
  states, updates = run(config, [0.5] * 200)
  assert updates == list(range(3, 201, 3))
  assert states[-1].updates == len(updates) and not any(s.paused for s in states)


def test_schedule_does_not_pause_while_the_overlap_rises():
  states, updates = run(DEFAULT, np.linspace(0.1, 0.95, 500))
  assert not any(state.paused for state in states)
  assert len(updates) == 500 // DEFAULT.update_interval


def test_noisy_rise_is_mostly_learnt_before_a_pause():
  time = np.arange(300)
  mean = 0.85 - 0.5 * np.exp(-time / 60)
  first = []
  for seed in SEEDS:
    states, _ = run(DEFAULT, noisy(mean, seed))
    paused = [state.finished for state in states if state.paused]
    first.append(paused[0] if paused else 300)
  assert np.median([mean[at - 1] for at in first]) > 0.8


def test_flat_curve_pauses_and_stops_updates():
  states, updates = run(DEFAULT, [0.7] * 300)
  # Two windows are compared, and must be flat for `PAUSE_AFTER_FLAT` requests.
  start = 2 * schedule.WINDOW + schedule.PAUSE_AFTER_FLAT - 1
  assert [s.finished for s in states if s.paused] == list(range(start, 301))
  assert updates and max(updates) <= start


def test_schedule_pauses_when_a_window_reaches_enough():
  states, _ = run(DEFAULT, [0.97] * 60)
  assert [s.paused for s in states].index(True) == schedule.WINDOW - 1
  assert states[-1].level == pytest.approx(0.97)
  below, _ = run(DEFAULT, np.linspace(0.1, 0.94, 300))
  assert not any(s.paused for s in below)


@pytest.mark.parametrize("drop", [0.25, 0.3, 0.5])
def test_sharp_drop_resumes_within_eight_requests_and_updates_at_once(drop):
  state = paused_at_level(0.75)
  assert requests_to_resume(state, [0.75 - drop] * 50) <= 8
  states, updates = run(DEFAULT, [0.75] * 300 + [0.75 - drop] * 8)
  assert not states[-1].paused and updates[-1] > 300


def test_noisy_sharp_drop_resumes_within_eight_requests():
  state = paused_at_level(0.75)
  counts = [
    requests_to_resume(state, noisy(np.full(200, 0.45), seed)) for seed in range(50)
  ]
  assert np.mean([count <= 8 for count in counts]) >= 0.9
  assert max(counts) <= 20


def test_drop_while_active_does_not_cause_a_pause():
  time = np.arange(60)
  curve = np.concatenate([np.full(60, 0.75), 0.4 + 0.004 * time])
  states, _ = run(DEFAULT, curve)
  assert not any(state.paused for state in states)


def test_slow_drift_resumes_without_a_sharp_drop(monkeypatch):
  state = paused_at_level(0.75)
  slow = 0.75 - 0.0003 * np.arange(1000)
  count = requests_to_resume(state, slow)
  assert count is not None and slow[count - 1] > 0.75 - schedule.RESUME_DROP
  # Negative control: without the drift rule, the sharp rule does not resume.
  monkeypatch.setattr(schedule, "DRIFT_DROP", 1.0)
  later = dataclasses.replace(state)
  for overlap in slow[:count]:
    later, _ = observe(DEFAULT, later, overlap)
  assert later.paused


def test_noise_around_a_flat_mean_rarely_toggles_the_schedule(monkeypatch):
  flat = np.full(1000, 0.7)
  runs = [run(DEFAULT, noisy(flat, seed))[0] for seed in SEEDS]
  counts = [toggles(states) for states in runs]
  assert np.mean(counts) <= 1.5 and max(counts) <= 3, counts
  shares = [np.mean([state.paused for state in states]) for states in runs]
  assert np.mean(shares) > 0.75, shares
  # Negative control: a schedule with short windows and tight limits toggles often.
  monkeypatch.setattr(schedule, "RESUME_WINDOW", 2)
  monkeypatch.setattr(schedule, "RESUME_DROP", 0.03)
  for name, nervous in (
    ("WINDOW", 4),
    ("PAUSE_AFTER_FLAT", 1),
    ("FLAT_TOLERANCE", 0.5),
  ):
    monkeypatch.setattr(schedule, name, nervous)
  assert toggles(run(DEFAULT, noisy(flat, 0))[0]) > 100


def test_schedule_pauses_again_at_a_lower_level_if_learning_does_not_help():
  states, _ = run(DEFAULT, [0.8] * 200 + [0.4] * 300)
  assert states[-1].paused and states[-1].pauses == 2
  assert states[-1].level == pytest.approx(0.4, abs=0.05)


def test_low_overlaps_before_a_pause_do_not_count_as_drift():
  states, _ = run(DEFAULT, [0.2] * 60 + [0.8] * 300)
  assert states[-1].paused and toggles(states) == 1


def test_state_restored_from_json_continues_identically():
  overlaps = noisy(np.full(200, 0.7), 5)
  states, _ = run(DEFAULT, overlaps)
  text = json.dumps(dataclasses.asdict(states[119]))
  restored = schedule.ScheduleState(**json.loads(text))
  assert restored == states[119]
  for overlap in overlaps[120:]:
    restored, _ = observe(DEFAULT, restored, overlap, SLICES)
  assert restored == states[-1]


def test_history_has_a_maximal_length():
  states, _ = run(DEFAULT, [0.6] * 400)
  assert max(len(state.recent) for state in states) == schedule.DRIFT_WINDOW


@pytest.mark.parametrize(
  ("fields", "named"),
  [
    ({"update_interval": 0}, "ScheduleConfig.update_interval: received 0"),
    ({"much_to_gain": -0.1}, "ScheduleConfig.much_to_gain: received -0.1"),
  ],
)
def test_invalid_config_error_names_the_field(fields, named):
  with pytest.raises(ValueError, match=named):
    schedule.ScheduleConfig(**fields)


@pytest.mark.parametrize("overlap", [float("nan"), -0.1, 1.5])
def test_overlap_outside_0_to_1_is_refused(overlap):
  with pytest.raises(ValueError, match="Schedule.update: overlap of request 0"):
    observe(DEFAULT, DEFAULT.init(), overlap)


def test_updates_do_not_overlap():
  state = DEFAULT.init()
  for _ in range(3 * DEFAULT.update_interval):
    state, slices = observe(DEFAULT, state, 0.5, slices=0)
    assert not slices
  state, slices = observe(DEFAULT, state, 0.5, SLICES)
  assert slices == SLICES and state.updates == 1


# The share of the slices is (1 - overlap) / much_to_gain, at most 1.
@pytest.mark.parametrize("overlap, expected", [(0.2, 16), (0.8, 8), (0.99, 1)])
def test_updates_have_fewer_slices_if_little_can_be_gained(overlap, expected):
  config = schedule.ScheduleConfig(update_interval=8, much_to_gain=0.4)
  state = config.init()
  for _ in range(8):
    state, slices = observe(config, state, overlap, 16)
  assert slices == expected


def test_pause_level_is_the_mean_of_both_windows():
  """The newer window alone would be biased, because a pause depends on it."""
  rise = [0.70] * 90 + [0.78] * 50
  states, _ = run(DEFAULT, rise)
  at = [state.paused for state in states].index(True)
  both = rise[at + 1 - 2 * schedule.WINDOW : at + 1]
  assert states[at].level == pytest.approx(np.mean(both), abs=1e-12)
  assert np.mean(both[-schedule.WINDOW :]) - np.mean(both) > 1e-3


def test_after_resuming_enough_needs_a_whole_new_window():
  """After a short drop, the window still contains high overlaps of the old topic."""
  states, _ = run(DEFAULT, [0.3] * 40 + [1.0] * 42 + [0.05] * 2 + [1.0] * 60)
  paused = [state.paused for state in states]
  resumed = paused.index(False, paused.index(True))
  assert np.mean(states[resumed].recent[-schedule.WINDOW :]) > schedule.ENOUGH
  again = paused.index(True, resumed)
  assert again - resumed == schedule.WINDOW
  assert states[resumed].changed == resumed + 1


def test_possible_gain_depends_on_the_last_requests_only():
  config = schedule.ScheduleConfig(update_interval=12, much_to_gain=0.4)
  state = config.init()
  for overlap in [0.1] * 4 + [0.9] * schedule.RESUME_WINDOW:
    state, slices = observe(config, state, overlap, 8)
  assert slices == 2
