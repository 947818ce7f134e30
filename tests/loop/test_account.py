"""Accounts of a run from metrics.jsonl: wall time and verdict."""

import dataclasses

import numpy as np
import pytest
from made_rows import request, update

from osd_jax.loop import account
from osd_jax.loop import rows as rows_lib

ROWS = [
  rows_lib.Start(loading_ms=2e3, compiling_ms=30e3, measuring_ms=6e3),
  request(0, decode_ms=3000.0, metering_ms=500.0, run_seconds=4.0),
  request(1, decode_ms=1000.0, compare_ms=750.0, update_wait_ms=100.0, run_seconds=9.0),
  update(update_ms=20_000.0, wait_ms=250.0, skipped=2),
  rows_lib.Summary(wall_seconds=10.0),
]


def compared(plain=125 / 30, frozen=(10 + 15 * 11) / 30, **changes):
  """Returns a compared request: plain decoding takes 125 ms, the frozen draft 175."""
  times = {"plain_ms_per_token": plain, "floor_ms_per_token": frozen}
  return request(**times, floor_tokens_per_target_call=2.0, **changes)


# --- Wall time ----------------------------------------------------------------------


def test_parts_sum_to_the_wall_time():
  found = account.Account.of(ROWS)
  assert found.parts == {
    "loading": 2.0,
    "compiling": 30.0,
    "measuring costs": 6.0,
    "serving": 4.0,
    "waiting for updates": 0.35,
    "comparing": 0.75,
    "metering": 0.5,
    "rest": pytest.approx(4.4),
  }
  assert found.wall == pytest.approx(48.0) == pytest.approx(sum(found.parts.values()))
  assert (found.learning, found.updates, found.skipped) == (20.0, 1, 2)
  assert found.overlapped == pytest.approx(19.65)
  assert "took 48.0 s: 4.0 s of serving, 30.0 s of compiling;" in found.sentence()


def test_table_adds_up_and_puts_learning_below():
  *parts, wall, learning, overlapped = account.Account.of(ROWS).table()
  assert sum(row["seconds"] for row in parts) == pytest.approx(wall["seconds"])
  assert wall["share of wall"] == "100.0%"
  assert learning["part"] == "learning (1 updates, 2 steps skipped)"
  assert (learning["seconds"], overlapped["seconds"]) == (20.0, 19.65)


def test_metering_on_another_thread_is_not_part_of_wall_time():
  rows = ROWS.copy()
  rows[1] = dataclasses.replace(ROWS[1], metering_ms=0.0, metering_beside_ms=500.0)
  found = account.Account.of(rows)
  assert (found.metered, found.parts["metering"]) == (0.5, 0.0)
  assert found.parts["rest"] == pytest.approx(4.9)


def test_wall_time_without_start_or_summary_is_counted_from_the_first_request():
  assert account.Account.of(ROWS[1:4]).wall == 9.0
  # The summary of a resumed session counts only that session.
  late = [*ROWS[1:4], rows_lib.Summary(wall_seconds=1.0)]
  assert account.Account.of(late).wall == 9.0


# --- The verdict --------------------------------------------------------------------


def test_verdict_compares_with_plain_and_frozen_over_all_requests():
  rows = [compared(), request(), update(wait_ms=40.0), request()]
  found = account.verdict(rows)
  assert found.served_ms == 3 * 120 + 40
  assert found.plain_ms == pytest.approx(3 * 125)
  assert found.frozen_ms == pytest.approx(3 * 175)
  assert found.ahead_since is None  # plain decoding takes 375 ms, less than 400
  text = found.sentence()
  assert "all 3 requests" in text and "by 1 request chosen at random" in text
  assert "0.4 s (0.94x), the frozen draft 0.5 s (1.31x)" in text
  assert "1 compared request is too few to say whether learning paid" in text


def test_learning_must_beat_plain_decoding_too_to_pay():
  """Regression: one sentence stated "0.10x plain" and "paid for good"."""
  rows = [compared(plain=0.4, frozen=30.0)] * 20
  found = account.verdict(rows)
  assert found.frozen_ms > found.served_ms > found.plain_ms
  assert found.ahead_since is None
  assert "no draft was trained" in found.sentence()
  learned = account.verdict([update(), *rows])
  assert "learning has not paid" in learned.sentence()
  good = account.verdict(
    [update(wait_ms=1.0), *[compared(plain=10.0, frozen=5.0)] * 20]
  )
  assert good.ahead_since == 1 and "ahead of both since request 1" in good.sentence()


def run_of(gain, count, every, seed, learns=True):
  """A run with noisy times whose draft is `gain` times as fast as the frozen one."""
  rng, rows = np.random.default_rng(seed), [update(wait_ms=0.0)] * learns
  for index in range(count):
    token_ms = 4.0 * rng.gamma(16.0, 1 / 16.0, 3)
    fields = {"output_tokens": int(rng.integers(10, 40)), "source": "ab"[index % 2]}
    fields["decode_ms"] = fields["output_tokens"] * token_ms[0] / gain
    if index % every == 0:
      fields |= {"plain": token_ms[1], "frozen": token_ms[2]}
      rows.append(compared(**fields))
    else:
      rows.append(request(index, **fields))
  return account.verdict(rows)


def outcome(verdict):
  frozen = verdict.over_frozen
  return "paid" if frozen.low > 1 else "lost" if frozen.high < 1 else "open"


@pytest.mark.parametrize(("count", "every"), [(12, 4), (40, 4), (200, 4), (100, 1)])
def test_draft_against_itself_neither_pays_nor_loses(count, every):
  """99 % intervals, whatever the number of compared requests."""
  found = [outcome(run_of(1.0, count, every, seed)) for seed in range(200)]
  assert found.count("open") >= 194
  frozen = run_of(1.0, count, every, 0, learns=False).sentence()
  assert "no draft was trained" in frozen and "frozen draft" not in frozen


@pytest.mark.parametrize(("gain", "expected"), [(1.5, "paid"), (0.7, "lost")])
def test_clear_gain_and_clear_loss_are_seen(gain, expected):
  found = [outcome(run_of(gain, 120, 4, seed)) for seed in range(50)]
  assert found.count(expected) >= 48


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_few_compared_requests_say_nothing(count):
  """However far apart: a headline said 1.56x after a single one."""
  found = run_of(3.0, count, 1, 0)
  assert outcome(found) == "open" and not found.over_plain.is_certain
  number = account.counted(count, "compared request")
  assert found.sentence().count(f"{number} ") == 1
  assert "too few to say whether learning paid" in found.sentence()


def test_interval_holds_what_all_requests_took():
  """Where every request is compared the estimate has no error of the choice."""
  inside = 0
  for seed in range(100):
    rng, rows, whole = np.random.default_rng(seed), [], 0.0
    for _ in range(200):
      ms, tokens = 4.0 * rng.gamma(4.0, 0.25), int(rng.integers(5, 50))
      whole += ms * tokens
      fields = {"output_tokens": tokens, "decode_ms": 4.0 * tokens}
      is_compared = rng.random() < 0.25
      rows.append(compared(ms, ms, **fields) if is_compared else request(**fields))
    found = account.verdict(rows)
    inside += found.over_plain.low <= whole / found.served_ms <= found.over_plain.high
  assert inside >= 96


def test_topics_are_weighted_by_all_their_tokens():
  """The weight of a topic depends on all its requests, not on the compared ones."""
  rows = [compared(plain=10.0, frozen=10.0, source="a")]
  rows += [compared(plain=1.0, frozen=1.0, source="b")] * 9
  rows += [request(source="a")] * 9
  found = account.verdict(rows)
  assert found.plain_ms == pytest.approx(10 * 30 * 10.0 + 9 * 30 * 1.0)


def test_estimate_from_random_comparisons_is_unbiased():
  """One request in each block of four is compared, at a random place."""
  rng, errors = np.random.default_rng(0), []
  for _ in range(200):
    rows = [
      compared(plain=slow, frozen=slow) if place == chosen else request()
      for chosen in rng.integers(0, 4, 50)
      for place, slow in enumerate(rng.gamma(4.0, 1.0, 4))
    ]
    errors.append(account.verdict(rows).plain_ms / (200 * 30 * 4.0) - 1)
  assert abs(np.mean(errors)) < 0.02


def test_update_after_the_last_request_does_not_count():
  """Otherwise the last progress line and the report would state different numbers."""
  rows = [compared(), update(wait_ms=5.0), compared()]
  before = account.verdict(rows)
  after = account.verdict([*rows, update(wait_ms=1e6)])
  assert before.fields() == after.fields() and before.sentence() == after.sentence()
  assert before.served_ms == 245.0


def test_update_time_during_comparisons_is_charged():
  found = account.verdict([compared(update_wait_ms=80.0)])
  assert found.served_ms == 200.0


def test_time_of_the_gate_is_charged():
  rows = [compared(gate_ms=80.0)]
  assert account.verdict(rows).served_ms == 200.0
  clock = rows_lib.Summary(wall_seconds=1.0)
  assert account.Account.of([*rows, clock]).parts["drafts for the gate"] == 0.08
  assert "drafts for the gate" not in account.Account.of([compared(), clock]).parts


def test_verdict_is_empty_without_comparisons():
  found = account.verdict([request(), request()])
  assert not found.fields() and not found.sentence() and found.plain_ms is None
