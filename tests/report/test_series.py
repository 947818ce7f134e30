"""The numbers behind the plots, on streams where they are known."""

import numpy as np
import pytest

from osd_jax import runs
from osd_jax.report import tables


def _requests(sources):
  return [{"kind": "request", "index": i, "source": s} for i, s in enumerate(sources)]


def test_trailing_mean_is_the_mean_of_measured_values_in_the_window():
  values = np.random.default_rng(0).random(60)
  values[np.random.default_rng(1).random(60) < 0.5] = np.nan
  values[:3] = np.nan
  means = tables.trailing_mean(values, 7)
  for i, mean in enumerate(means):
    window = values[max(0, i - 6) : i + 1]
    window = window[np.isfinite(window)]
    assert np.isnan(mean) if not len(window) else mean == pytest.approx(window.mean())
  assert np.isnan(means[:3]).all()


def test_sharp_shifts_are_found_where_they_are():
  parts = tables.segments(_requests(["a"] * 30 + ["b"] * 20 + ["a"] * 15))
  assert parts == [
    tables.Segment("a", 0, 30),
    tables.Segment("b", 30, 50),
    tables.Segment("a", 50, 65),
  ]


def test_strays_around_a_shift_make_no_segments_of_their_own():
  sources = ["b"] + ["a"] * 29 + ["b", "a", "b"] + ["b"] * 30
  parts = tables.segments(_requests(sources))
  assert [(p.source, p.start) for p in parts] == [("a", 0), ("b", 32)]


def test_a_mixed_stream_is_one_segment():
  sources = list(np.random.default_rng(0).choice(["a", "b", "c", "d"], 200))
  assert tables.segments(_requests(sources)) == [tables.Segment("mixed", 0, 200)]
  assert tables.segments(_requests(["a"] * 4)) == [tables.Segment("a", 0, 4)]
  assert tables.segments([]) == []


def test_edges_never_share_a_request():
  parts = [tables.Segment("a", 0, 200), tables.Segment("b", 200, 231)]
  first, last = tables.edges(parts, size=50)
  assert first == [*range(50), *range(200, 215)]
  assert last == [*range(150, 200), *range(216, 231)]


def test_acceptance_per_position_divides_by_the_verifications():
  rows = [
    {"accepted_per_position": [4, 2], "target_calls": 4},
    {
      "accepted_per_position": [3, 0],
      "output_tokens": 9,
      "tokens_per_target_call": 1.5,
    },
    {"output_tokens": 5},
  ]
  np.testing.assert_allclose(tables.acceptance_per_position(rows), [0.7, 0.2])
  assert tables.acceptance_per_position(rows[2:]).size == 0


def test_a_round_accepts_a_prefix_so_counts_by_position_tell_counts_by_length():
  rows = [
    {"accepted_per_position": [4, 2], "target_calls": 5},
    {"accepted_per_position": [1, 1], "target_calls": 1},
  ]
  np.testing.assert_array_equal(tables.accepted_per_round(rows), [1, 2, 3])
  assert tables.accepted_per_round([{"target_calls": 3}]).size == 0


def test_a_mean_that_begins_anew_forgets_what_was_before():
  values = np.array([0.0, 0.0, 1.0, 1.0, 3.0])
  anew = tables.trailing_mean(values, 3, starts=[0, 2])
  np.testing.assert_allclose(anew, [0, 0, 1, 1, 5 / 3])
  assert tables.trailing_mean(values, 3)[2] == pytest.approx(1 / 3)


def test_a_stream_whose_topics_do_not_come_back_is_split_however_short():
  parts = tables.segments(_requests(["a"] * 3 + ["b"] * 2))
  assert [(p.source, p.start, p.stop) for p in parts] == [("a", 0, 3), ("b", 3, 5)]


def test_requests_are_in_the_order_of_the_stream_whatever_finished_first():
  rows = [
    {"kind": "request", "index": i, "query": q, "source": s}
    for i, (q, s) in enumerate([(0, "a"), (2, "b"), (1, "a"), (3, "b")])
  ]
  assert [row["query"] for row in runs.request_rows(rows)] == [0, 1, 2, 3]
  parts = tables.by_segment(list(reversed(rows)))
  assert [(s, [row["query"] for row in part]) for s, part in parts] == [
    ("a", [0, 1]),
    ("b", [2, 3]),
  ]
