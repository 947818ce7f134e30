"""Segments, trailing means and acceptance by position, on streams with known values."""

import made_rows
import numpy as np
import pytest

from osd_jax.loop import rows as rows_lib
from osd_jax.report import tables


def _requests(sources):
  return [made_rows.request(i, source=s) for i, s in enumerate(sources)]


def test_trailing_mean_averages_the_measured_values_of_the_window():
  values = np.random.default_rng(0).random(60)
  values[np.random.default_rng(1).random(60) < 0.5] = np.nan
  values[:3] = np.nan
  means = tables.trailing_mean(values, 7)
  for i, mean in enumerate(means):
    window = values[max(0, i - 6) : i + 1]
    window = window[np.isfinite(window)]
    assert np.isnan(mean) if not len(window) else mean == pytest.approx(window.mean())
  assert np.isnan(means[:3]).all()


@pytest.mark.parametrize(
  ("sources", "expected"),
  [
    (
      ["a"] * 30 + ["b"] * 20 + ["a"] * 15,
      [("a", 0, 30), ("b", 30, 50), ("a", 50, 65)],
    ),
    # Single requests around a shift are not segments.
    (["b"] + ["a"] * 29 + ["b", "a", "b"] + ["b"] * 30, [("a", 0, 32), ("b", 32, 63)]),
    (["a"] * 3 + ["b"] * 2, [("a", 0, 3), ("b", 3, 5)]),  # short, but none repeats
    (
      list(np.random.default_rng(0).choice(["a", "b", "c", "d"], 200)),
      [("mixed", 0, 200)],
    ),
    (["a"] * 4, [("a", 0, 4)]),
    ([], []),
  ],
)
def test_segments_start_where_a_source_lasts(sources, expected):
  found = tables.segments(_requests(sources))
  assert [(part.source, part.start, part.stop) for part in found] == expected


def test_acceptance_per_position_is_relative_to_target_calls():
  rows = [
    made_rows.request(accepted_per_position=[4, 2], target_calls=4),
    made_rows.request(accepted_per_position=[3, 0], target_calls=6),
  ]
  np.testing.assert_allclose(tables.acceptance_per_position(rows), [0.7, 0.2])
  assert tables.acceptance_per_position(rows[2:]).size == 0


def test_requests_are_sorted_by_stream_order():
  rows = [
    made_rows.request(i, query=q, source=s)
    for i, (q, s) in enumerate([(0, "a"), (2, "b"), (1, "a"), (3, "b")])
  ]
  assert [row.query for row in rows_lib.requests(rows)] == [0, 1, 2, 3]
  parts = tables.by_segment(list(reversed(rows)))
  assert [(s, [row.query for row in part]) for s, part in parts] == [
    ("a", [0, 1]),
    ("b", [2, 3]),
  ]
