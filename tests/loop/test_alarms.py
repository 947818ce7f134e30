"""Alarms start and end once, at the right row."""

import random

import made_rows
import pytest

from osd_jax.loop import alarms
from osd_jax.loop import rows as rows_lib


def request(drafted=5, accepted=2, loops=False):
  return made_rows.request(drafted=drafted, accepted=accepted, loops=loops)


def update(skipped=0):
  return made_rows.update(skipped=skipped)


def alarms_of(rows):
  """Returns (row number, name, active) of every alarm."""
  state, found = alarms.AlarmState(), []
  for place, row in enumerate(rows, 1):
    state, new = alarms.observe(state, row)
    found += [(place, alarm.alarm, alarm.active) for alarm in new]
  return found


NOTHING, ALL = request(accepted=0), request(accepted=5)


@pytest.mark.parametrize(
  ("row", "name"),
  [(NOTHING, "acceptance_pinned_at_0"), (ALL, "acceptance_pinned_at_1")],
)
def test_pinned_acceptance_is_reported_once_at_start_and_end(row, name):
  window = alarms.WINDOW
  assert alarms_of([row] * (window - 1)) == []  # too few requests
  assert alarms_of([row] * (3 * window)) == [(window, name, True)]
  once_over = [*[row] * (window + 4), request(), *[row] * (window - 1)]
  assert alarms_of(once_over) == [(window, name, True), (window + 5, name, False)]
  again = [*once_over, row]
  assert alarms_of(again)[2:] == [(2 * window + 5, name, True)]


@pytest.mark.parametrize(
  "rows",
  [
    [request()] * 60,
    [NOTHING, ALL] * 30,
    [request(drafted=0, accepted=0)] * 60,  # no draft ran, so nothing was rejected
    # One accepted or rejected token in every window of 25 requests.
    [*[NOTHING] * 24, request(accepted=1), *[NOTHING] * 24],
    [*[ALL] * 24, request(accepted=4), *[ALL] * 24],
    [update()] * 9,
    [rows_lib.Summary(wall_seconds=1.0)],
  ],
)
def test_healthy_run_raises_no_alarm(rows):
  assert alarms_of(rows) == []


def test_empty_request_does_not_hide_pinned_acceptance():
  rows = [NOTHING, request(drafted=0, accepted=0)] * 20
  assert alarms_of(rows) == [(alarms.WINDOW, "acceptance_pinned_at_0", True)]


def test_skipped_step_alarm_ends_with_the_next_finite_update():
  rows = [update(), update(1), request(), update(2), update(), request(), update(1)]
  name = "update_not_finite"
  assert alarms_of(rows) == [(2, name, True), (5, name, False), (7, name, True)]


def test_loop_alarm_ends_after_a_window_without_loops():
  loop, plain = request(loops=True), request()
  rows = [plain, loop, plain, loop, *[plain] * 30]
  assert alarms_of(rows) == [
    (2, "output_loops", True),
    (4 + alarms.WINDOW, "output_loops", False),
  ]


def test_replay_equals_the_state_of_the_run():
  rng = random.Random(0)
  rows, state = [], alarms.AlarmState()
  for _ in range(300):
    row = rng.choice(
      [NOTHING] * 40 + [ALL, request(loops=True), update(1), update(), update()]
    )
    state, new = alarms.observe(state, row)
    rows += [row, *new]
    assert alarms.replay(rows) == state
  kinds = {row.alarm for row in rows_lib.of(rows_lib.Alarm, rows)}
  assert {"acceptance_pinned_at_0", "output_loops", "update_not_finite"} <= kinds
  assert alarms.replay(rows[:40]) != state  # negative control


def test_alarm_text_is_one_line_with_its_meaning():
  for rows in ([NOTHING] * 25, [ALL] * 25, [update(1)], [request(loops=True)]):
    state = alarms.replay(rows[:-1])
    _, [alarm] = alarms.observe(state, rows[-1])
    name, text = alarm.alarm, alarm.text
    assert alarms.MEANINGS[name] in text and "\n" not in text
    notice = name == "acceptance_pinned_at_1"
    assert text.startswith("notice:" if notice else "alarm:")


def test_sentence_names_the_requests_of_every_alarm():
  row = lambda name, active, finished: rows_lib.Alarm(
    alarm=name, active=active, finished=finished, text=""
  )
  rows = [
    request(),
    row("acceptance_pinned_at_0", True, 30),
    row("output_loops", True, 31),
    row("acceptance_pinned_at_0", False, 55),
    row("acceptance_pinned_at_0", True, 90),
  ]
  assert alarms.sentence(rows) == (
    "Alarms: acceptance pinned at 0 from request 30 to 55; output loops from request"
    " 31 to the end; acceptance pinned at 0 from request 90 to the end."
  )
  assert alarms.sentence([request(), update()]) == "Alarms: none."
