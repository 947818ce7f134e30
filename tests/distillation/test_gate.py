"""The promotion gate: error rate, delay, and returns to earlier drafts."""

import dataclasses
import math

import numpy as np
import pytest

from osd_jax.distillation import gate

CONFIG = gate.GateConfig()
STREAMS, ANSWERS = 1000, 800  # 800 requests, as in the demo
EVERY = 4  # answers from one new draft to the next

# Differences of overlap between two drafts that are equally good, [streams, answers].
EQUAL = {
  "normal": lambda rng, shape: rng.normal(0, 0.05, shape),
  "large": lambda rng, shape: rng.normal(0, 0.3, shape),
  "rare": lambda rng, shape: rng.choice([-0.5, 0.0, 0.5], shape, p=[0.05, 0.9, 0.05]),
}


def serve(differences, config=CONFIG, state=None):
  """Serves answers on which trained drafts have these overlaps over the floor draft.

  Returns:
    The decisions with their answers, counted from 1, and the last state.
  """
  state, decisions = state or gate.GateState(), []
  for index, difference in enumerate(np.asarray(differences).tolist()):
    if index % EVERY == 0:
      state = dataclasses.replace(state, newest=state.newest + 1)
    trained = 0.5 + difference
    serving = trained if state.serving else 0.5
    rival = None if state.rival is None else trained if state.rival else 0.5
    floor = 0.5 if state.serving else None
    state, decision = gate.observe(config, state, serving, rival, floor)
    if decision is not None:
      decisions.append((index + 1, decision.name))
  return decisions, state


def first_promotion(differences, config=CONFIG):
  """Number of answers until trained drafts serve, infinite if they never do."""
  decisions, _ = serve(differences, config)
  return decisions[0][0] if decisions else math.inf


def first_wins(differences, config=CONFIG):
  """Answers until the first trial of a series is won, for many streams at once.

  The same rule as in `gate.Series`, written for arrays [streams, answers].
  """
  bets, count = np.array(gate.BETS), len(differences)
  begun, answers = np.ones(count), np.zeros(count)
  capital, wins = np.full((count, 3), 1 / 6), np.full(count, math.inf)
  for index, gain in enumerate(np.asarray(differences).T):
    x = np.clip(gain / gate.CAP, -1, 1)
    capital, answers = capital * (1 + np.outer(x, bets)), answers + 1
    total, stake = capital.sum(axis=1), 1 / (begun * (begun + 1))
    wins = np.where(np.isinf(wins) & (total >= 3 / config.error_rate), index + 1, wins)
    ended = (answers >= gate.WINDOW) & (total <= stake)
    begun, answers = begun + ended, np.where(ended, 0, answers)
    share = (1 / (begun * (begun + 1)) / 3)[:, None]
    capital = np.where(ended[:, None], share, capital)
  return wins


def z_test_promotes(differences):
  """The naive rule: a one-sided z-test at 1 %, repeated after every answer."""
  counts = np.arange(1, differences.shape[1] + 1)
  means = np.cumsum(differences, axis=1) / counts
  spread = np.sqrt(np.cumsum(np.square(differences), axis=1) / counts - means**2)
  z = means / (spread + 1e-9) * np.sqrt(counts)
  return np.any(z[:, 10:] > 2.33, axis=1)


def test_simulation_promotes_when_the_gate_does():
  rng = np.random.default_rng(6)
  gains = np.repeat([0.2, 0.05, 0.03, -0.1, 0.0], 20)[:, None]
  streams = rng.normal(gains, 0.06, (100, 150))
  assert list(first_wins(streams)) == [first_promotion(one) for one in streams]
  assert 40 <= np.isfinite(first_wins(streams)).sum() <= 60


@pytest.mark.parametrize("name", EQUAL)
def test_at_most_one_percent_of_runs_with_equal_drafts_decide_anything(name):
  streams = EQUAL[name](np.random.default_rng(0), (STREAMS, ANSWERS))
  # A promotion needs one series to be won, a return one of the two others, on which the
  # proven draft or the floor draft is ahead.
  for differences in (streams, -streams):
    assert np.isfinite(first_wins(differences)).sum() <= 0.01 * STREAMS / 3
  # Negative controls: the same streams mislead the naive rule and a lax gate.
  assert z_test_promotes(streams).sum() > 0.05 * STREAMS
  lax = first_wins(streams, gate.GateConfig(error_rate=0.99))
  assert np.isfinite(lax).sum() > 0.01 * STREAMS


def test_equal_drafts_are_not_exchanged_after_a_promotion():
  """All three series run then, in the gate itself."""
  _, promoted = serve(np.full(20, 0.3))
  assert promoted.follows and promoted.floor.trial is not None
  rng = np.random.default_rng(1)
  streams = [one for make in EQUAL.values() for one in make(rng, (10, ANSWERS // 2))]
  assert sum(bool(serve(one, state=promoted)[0]) for one in streams) == 0
  # Negative control: drafts that are not equal are exchanged.
  assert all(serve(one - 0.5, state=promoted)[0] for one in streams)


@pytest.mark.parametrize(
  ("gain", "noise", "median", "late"),
  [
    (0.2, 0.1, 13, 20),
    (0.1, 0.05, 16, 24),
    (0.05, 0.05, 30, 50),
    (0.02, 0.05, 130, 400),
  ],
)
def test_delay_until_a_better_draft_serves(gain, noise, median, late):
  """Median and 95th percentile of the answers until a gain is shown."""
  rng = np.random.default_rng(2)
  delays = first_wins(gain + rng.normal(0, noise, (STREAMS, ANSWERS)))
  assert np.median(delays) <= median
  assert np.quantile(delays, 0.95) <= late


def test_worse_drafts_never_serve():
  assert serve(np.full(100, -0.02))[0] == []
  assert serve(np.full(40, math.nan))[0] == []


def until_decision(serving, rival, floor, most):
  """Answers with these overlaps, after a promotion, up to the next decision."""
  state = dataclasses.replace(serve(np.full(20, 0.3))[1], newest=9)
  assert state.follows and 0 < state.proven < 9
  for _ in range(most):
    state, decision = gate.observe(CONFIG, state, serving, rival, floor)
    if decision is not None:
      return decision, state
  return pytest.fail(f"no decision within {most} answers")


def test_drafts_that_became_worse_are_taken_back():
  """The floor draft is worse still, so it does not return."""
  decision, state = until_decision(0.02, rival=0.8, floor=0.01, most=20)
  assert decision.name == "taken_back"
  assert state.serving == state.proven == decision.version > 0


def test_proven_draft_goes_before_the_floor_draft():
  """It is scored less often here, so the floor draft wins its trial first."""
  state = dataclasses.replace(serve(np.full(20, 0.3))[1], newest=9)
  decision = before = rival = None
  for index in range(60):
    before, rival = state, 0.8 if index % gate.EVERY == 0 else None
    state, decision = gate.observe(CONFIG, state, 0.02, rival, floor=0.5)
    if decision is not None:
      break
  assert before is not None
  assert decision is not None and decision.name == "taken_back"
  assert state.serving == state.proven > 0
  ahead = None if rival is None else rival - 0.02
  assert before.floor.score(0.48).is_won(CONFIG)
  assert not before.down.score(ahead).is_won(CONFIG)


def test_floor_draft_returns_if_every_trained_draft_is_worse():
  decision, state = until_decision(0.4, rival=0.4, floor=0.5, most=40)
  assert decision.name == "floor_returned" and state.serving == 0
  # Trained drafts serve again once they are better again.
  assert serve(np.full(60, 0.3), state=state)[0][0][1] == "promoted"


def test_broken_draft_is_replaced_at_once():
  decision, state = until_decision(math.nan, rival=0.8, floor=0.5, most=1)
  assert decision.name == "taken_back" and state.serving == state.proven > 0
  state, decision = gate.observe(CONFIG, state, math.inf, rival=math.nan, floor=0.5)
  assert decision is not None
  assert decision.name == "floor_returned" and state.serving == 0


def test_new_drafts_serve_at_once_after_a_promotion():
  _, state = serve(np.full(20, 0.3))
  newer = dataclasses.replace(state, newest=state.newest + 1)
  assert newer.serving == newer.newest > state.proven > 0


def test_all_answers_are_scored_only_while_a_draft_leads():
  state = dataclasses.replace(serve(np.full(20, 0.3))[1], newest=9)
  every = range(gate.EVERY, 2 * gate.EVERY)

  def count(name):
    return sum(name in gate.wanted(state, index) for index in every)

  assert gate.wanted(gate.GateState(), 0) == ()
  assert count("rival") == count("floor") == 1
  state, _ = gate.observe(CONFIG, state, 0.5, rival=0.6, floor=0.4)
  assert count("rival") == gate.EVERY and count("floor") == 1
  state, _ = gate.observe(CONFIG, state, 0.8, rival=0.6, floor=0.4)
  assert count("rival") == 1
  # A newest draft that leads is followed closely only if it does not serve.
  state = dataclasses.replace(gate.GateState(), newest=1)
  state, _ = gate.observe(CONFIG, state, 0.5, rival=0.6)
  assert count("rival") == gate.EVERY and count("floor") == 0


def test_window_forgets_answers_from_before_a_change(monkeypatch):
  change = np.concatenate([np.full(100, -0.2), np.full(60, 0.2)])
  assert first_promotion(change) <= 100 + gate.WINDOW + 20
  monkeypatch.setattr(gate, "WINDOW", 10**6)  # negative control
  assert first_promotion(change) == math.inf


def test_shares_of_lost_trials_never_exceed_the_whole():
  """Whatever is won in between: a won trial passes its share on, and no more."""
  rng = np.random.default_rng(4)
  for _ in range(10):
    series, lost = gate.Series().begin(), 0.0
    for won in rng.random(60) < rng.random():
      assert series.trial is not None
      lost += 0.0 if won else series.trial.stake
      series = series.end(bool(won)).begin()
    assert lost <= 1 + 1e-9
