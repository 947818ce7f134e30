"""The account of a run adds up to its wall time; learning is told apart."""

import pytest

from osd_jax.measuring.ledger import Ledger

ROWS = [
  {
    "kind": "request",
    "index": 0,
    "decode_ms": 3000.0,
    "metering_ms": 500.0,
    "run_seconds": 4.0,
  },
  {
    "kind": "request",
    "index": 1,
    "decode_ms": 1000.0,
    "compare_ms": 750.0,
    "run_seconds": 9.0,
  },
  {"kind": "update", "update_ms": 20_000.0, "wait_ms": 250.0, "skipped": 2},
  {"kind": "summary", "wall_seconds": 10.0},
]


def test_the_parts_add_up_to_the_wall_time_and_learning_is_none_of_them():
  found = Ledger.of(ROWS)
  assert found.parts == {
    "serving": 4.0,
    "waiting for updates": 0.25,
    "comparing": 0.75,
    "metering": 0.5,
    "rest": 4.5,
  }
  assert found.wall == 10.0 == pytest.approx(sum(found.parts.values()))
  assert (found.learning, found.updates, found.skipped) == (20.0, 1, 2)
  assert found.beside == 19.75


def test_the_table_has_the_sum_and_learning_below_it():
  *parts, wall, learning = Ledger.of(ROWS).table()
  assert sum(row["seconds"] for row in parts) == pytest.approx(wall["seconds"])
  assert wall["share of wall"] == "100.0%"
  assert learning["part"] == "learning (1 updates)"
  assert learning["seconds"] == 20.0


def test_metering_beside_serving_is_none_of_the_parts():
  rows = [{**ROWS[0], "metering_ms": 0.0, "metering_beside_ms": 500.0}, *ROWS[1:]]
  found = Ledger.of(rows)
  assert (found.metered, found.parts["metering"], found.parts["rest"]) == (0.5, 0, 5.0)
  assert found.beside == Ledger.of(ROWS).beside
  assert found.table()[-1]["part"] == "metering, beside"
  assert Ledger.of(ROWS).metered == 0


def test_a_run_under_way_counts_to_its_last_request():
  assert Ledger.of(ROWS[:3]).wall == 9.0
  assert Ledger.of(ROWS[:3]).parts["rest"] == 3.5


def test_rest_is_never_negative_though_the_time_of_earlier_sessions_is_lost():
  rows = [{**row, "run_seconds": None} for row in ROWS[:3]]
  found = Ledger.of([*rows, {"kind": "summary", "wall_seconds": 1.0}])
  assert found.parts["rest"] == 0 and found.wall == sum(found.parts.values()) == 5.5


def test_what_served_nothing_or_knows_no_time_has_no_account():
  assert Ledger.of([]) is None
  assert Ledger.of(ROWS[2:]) is None
  assert Ledger.of([{"kind": "request", "index": 0, "decode_ms": 1.0}]) is None
