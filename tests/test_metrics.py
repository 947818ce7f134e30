"""Metrics equal closed forms."""

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
