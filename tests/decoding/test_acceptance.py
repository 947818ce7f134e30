"""Acceptance is 1 for a draft equal to the target, and the closed form otherwise."""

import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import testing
from osd_jax.base import EOS_ID
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import drafters, sampling
from osd_jax.decoding import state as state_lib

VOCAB = 8
SAMPLED = {
  "temperature": [0.0, 1.0, 0.5, 1.0, 1.0, 2.0],
  "top_k": [0, 0, 0, 3, 0, 4],
  "top_p": [1, 1, 1, 1, 0.8, 0.9],
}


def self_draft(k, rule="rejection", run=harness.ROUNDS):
  table = testing.random_table(VOCAB, 5)
  settings = harness.table_settings(**SAMPLED)
  return harness.table_rounds(k, table, table, settings, run=run, rule=rule)


@pytest.mark.parametrize(
  ("k", "rule"), [(1, "rejection"), (3, "rejection"), (8, "block"), (2, "coupling")]
)
def test_draft_equal_to_the_target_is_fully_accepted(k, rule):
  final = self_draft(k, rule)
  assert harness.draft_acceptance(final) == 1.0
  expected = -(-harness.TABLE_LENGTH // (k + 1))
  np.testing.assert_array_equal(final.counters.rounds, expected)


def test_unfed_last_token_lowers_acceptance(monkeypatch):
  """Fault: a fully accepted round leaves a hole where its last token was not fed."""

  def inputs_at(*args):
    return state_lib.inputs_at(*args).at[:, 0].set(0)

  monkeypatch.setattr(
    drafters, "state_lib", harness.Changed(state_lib, inputs_at=inputs_at)
  )
  assert harness.draft_acceptance(self_draft(2, run=harness.jitted_rounds())) < 0.9


def test_draft_with_independent_noise_is_accepted_less(monkeypatch):
  """Coupled outputs stay exact, so only the acceptance reveals the fault."""
  exact = harness.outputs(self_draft(2, "coupling"))
  apart = accept_lib.RULES["coupling"]._replace(draft_noise=sampling.Purpose.DRAFT)
  monkeypatch.setitem(accept_lib.RULES, "coupling", apart)
  final = self_draft(2, "coupling", harness.jitted_rounds())
  assert harness.outputs(final) == exact
  assert harness.draft_acceptance(final) < 0.9


def shared_noise(target, draft):
  """P(both arg maxes are x) = 1 / sum_y max(p_y / p_x, q_y / q_x)."""
  support = target > 0
  ratios = np.maximum(target / target[support, None], draft / draft[support, None])
  return np.sum(1 / ratios.sum(1))


def overlap(target, draft):
  return np.minimum(target, draft).sum()


@pytest.mark.parametrize(
  ("rule", "closed_form"), [("rejection", overlap), ("coupling", shared_noise)]
)
def test_counters_equal_the_closed_form(rule, closed_form):
  """With one distribution for all rows, accepted lengths are truncated geometric."""
  k, rows, count = 3, 4000, 6
  logits = np.random.default_rng(0).normal(0, 1.2, (2, VOCAB))
  logits[:, EOS_ID] = -np.inf  # no row ends, so every round is full
  settings = harness.settings_of(rows, max_length=count * (k + 1), temperature=0.8)
  tables = (np.tile(np.float32(row), (VOCAB, VOCAB, 1)) for row in logits)
  final = harness.tabular_rounds(
    k, *tables, settings, count * (k + 1), limit=count, rule=rule
  )
  probs = [oracles.processed_probs(row, 0.8) for row in logits]
  rate, share = closed_form(*probs), overlap(*probs)
  # Shared noise accepts at least (1 - TV) / (1 + TV), with TV = 1 - overlap, and here
  # clearly less than the rejection rule, which accepts the overlap.
  assert share / (2 - share) <= rate
  assert rate == share if rule == "rejection" else rate < share - 0.02
  counters, total = final.counters, rows * count
  assert np.sum(counters.rounds) == total

  def close(found, expected, trials):
    deviation = np.sqrt(expected * (1 - expected) / trials)
    # A correct loop deviates this much once in a million runs.
    assert abs(found - expected) < 5 * deviation

  close(harness.draft_acceptance(final), rate, np.sum(counters.drafted))
  passed = np.sum(counters.accepted_per_position, axis=0) / total
  for index in range(k):
    close(passed[index], rate ** (index + 1), total)
  assert not passed[k:].any()
  tokens_per_call = np.sum(final.length) / total
  expected = (1 - rate ** (k + 1)) / (1 - rate)
  assert abs(tokens_per_call - expected) < 5 * k / np.sqrt(total)
  assert tokens_per_call == 1 + np.sum(counters.accepted) / total
