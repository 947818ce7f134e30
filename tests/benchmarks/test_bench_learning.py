"""The arithmetic of the figures in bench_learning."""

import dataclasses

import bench_learning
import jax
import numpy as np
import pytest
import tiny_online


def run(calls, updates=(), step=0.01):
  """Returns a run of requests with 10 tokens each and updates (finished, update_ms)."""
  requests = [{"target_calls": n, "output_tokens": 10} for n in calls]
  rows = [
    {"finished": at, "update_ms": ms, "steps": 2, "wait_ms": 1.0} for at, ms in updates
  ]
  emitted = np.full(len(calls), 10)
  steps = np.full(len(calls), step)
  return bench_learning.Run(float(steps.sum()), steps, emitted, requests, rows)


def test_gap_between_tokens_is_the_step_time_per_token():
  found = run([5, 5])
  found.emitted = np.array([1, 4])
  assert found.gaps().tolist() == pytest.approx([10, 2.5, 2.5, 2.5, 2.5])


def test_break_even_is_where_savings_exceed_costs_for_good():
  frozen = run([10] * 6)  # a call takes 10 ms
  learned = run([10, 8, 8, 8, 8, 8], updates=[(1, 15.0), (3, 40.0)])
  # Saved so far: 0 20 40 60 80 100 ms; spent so far: 15 15 55 55 55 55. Learning is
  # ahead at request 2, no longer at 3, and again from 4 on.
  assert bench_learning.break_even(learned, frozen) == 4
  never = run([10] + [9] * 5, updates=[(1, 100.0)])
  assert bench_learning.break_even(never, frozen) == float("inf")


def test_tokens_gained_are_relative_to_the_frozen_draft():
  frozen, learned = run([10] * 4), run([5] * 4, updates=[(1, 10.0)])
  found = bench_learning.cost_of([learned], [frozen])
  # The frozen draft emits 1 token per call, so 20 in the 20 calls of the other run.
  assert found["tokens gained"] == pytest.approx(40 - 20)
  assert found["slice, ms"] == 5


def test_latency_goal_is_p99_without_learning_plus_a_slice():
  frozen, learned = run([10] * 4), run([5] * 4, updates=[(1, 10.0)])
  name = "between tokens, p99, ms"
  found = bench_learning.figures("I = 8", [learned], [frozen])
  assert found[name] == (pytest.approx(1), "<= 6")
  found = bench_learning.figures("I = 4", [learned], [frozen])
  assert found[name] == (pytest.approx(1), "<= 1.05"), "5 % more, without a slice"
  assert bench_learning.figures("frozen", [frozen], [frozen])[name][1] == ""


@pytest.mark.parametrize("free", [False, True], ids=["in turn", "free"])
def test_emitted_tokens_add_up_to_the_output_tokens(free, tmp_path):
  """With free updates, a request is logged several steps after its last token."""
  pair = tiny_online.save_lively_pair(tmp_path)
  config = tiny_online.config(pair, tmp_path / "run", keep_drafts=False)
  learning = dataclasses.replace(config.learning, free_updates=free)
  decoding = dataclasses.replace(config.decoding, rows=1, max_rounds=1)
  config = dataclasses.replace(config, learning=learning, decoding=decoding)
  with jax.numpy_rank_promotion("allow"):
    found = bench_learning.serve(config, requests=12)
  assert found.emitted.min() > 0
  assert found.emitted.sum() == found.of("requests", "output_tokens").sum()
  assert len(found.requests) == 12
