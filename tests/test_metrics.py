"""Metrics equal closed forms."""

import numpy as np

from osd_jax import metrics


def test_rates_equal_closed_forms():
  assert metrics.draft_acceptance_rate(3, 4) == 0.75
  assert metrics.draft_acceptance_rate(0, 0) is None
  assert metrics.tokens_per_target_call(12, 4) == 3
  assert metrics.tokens_per_target_call(0, 0) is None


def test_recovery_is_the_first_window_at_the_level():
  overlaps = [0.0] * 20 + [1.0] * 40
  # A level of .9 needs 23 good requests of 25; request 43 is the 23rd good one.
  assert metrics.recovery_requests(overlaps, level=1.0) == 43
  assert metrics.recovery_requests(overlaps, level=1.1) is not None
  assert metrics.recovery_requests(overlaps, level=1.2) is None
  assert metrics.recovery_requests([1.0] * 40, level=1.0) == 12
  assert metrics.recovery_requests([1.0] * 11, level=1.0) is None


def test_segment_summary_averages_first_and_last_requests():
  rows = [
    {
      "overlap": float(i),
      "floor_overlap": 0.5,
      "tokens_per_target_call": 2.0,
      "draft_acceptance_rate": None if i == 0 else 1.0,
    }
    for i in range(10)
  ]
  found = metrics.segment_summary(rows, edge=4)
  assert found["requests"] == 10
  assert found["overlap_first"] == 1.5 and found["overlap_last"] == 7.5
  assert found["overlap_mean"] == 4.5 and found["floor_overlap_last"] == 0.5
  assert found["draft_acceptance_first"] == 1.0  # the missing value is ignored
  del rows[3]["floor_overlap"]
  assert metrics.segment_summary(rows, edge=4)["floor_overlap_first"] == 0.5
  assert np.isnan(metrics.segment_summary([], 4)["overlap_first"])
