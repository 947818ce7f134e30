"""Acceptance is 1 for a draft equal to the target, and the closed form otherwise."""

import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import testing
from osd_jax.base import EOS_ID
from osd_jax.decoding import drafters
from osd_jax.decoding import state as state_lib

VOCAB = 8


def self_draft(k, run=harness.ROUNDS):
  table = testing.random_table(VOCAB, 5)
  settings = harness.table_settings(
    temperature=[0.0, 1.0, 0.5, 1.0, 1.0, 2.0],
    top_k=[0, 0, 0, 3, 0, 4],
    top_p=[1, 1, 1, 1, 0.8, 0.9],
  )
  return harness.table_rounds(k, table, table, settings, run=run)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_draft_equal_to_the_target_is_fully_accepted(k):
  final = self_draft(k)
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


def test_counters_equal_the_closed_form():
  """With one distribution for all rows, accepted lengths are truncated geometric."""
  k, rows, count = 3, 4000, 6
  rng = np.random.default_rng(0)
  target, draft = rng.normal(0, 1.2, (2, VOCAB))
  target[EOS_ID] = draft[EOS_ID] = -np.inf  # no row ends, so every round is full
  settings = harness.settings_of(rows, max_length=count * (k + 1), temperature=0.8)
  target_table, draft_table = (
    np.tile(np.float32(row), (VOCAB, VOCAB, 1)) for row in (target, draft)
  )
  final = harness.tabular_rounds(
    k, target_table, draft_table, settings, count * (k + 1), limit=count
  )
  overlap = np.minimum(
    oracles.processed_probs(target, 0.8), oracles.processed_probs(draft, 0.8)
  ).sum()
  assert 0.3 < overlap < 0.8
  counters, total = final.counters, rows * count
  assert np.sum(counters.rounds) == total

  def close(found, expected, trials):
    deviation = np.sqrt(expected * (1 - expected) / trials)
    # A correct loop deviates this much once in a million runs.
    assert abs(found - expected) < 5 * deviation

  close(harness.draft_acceptance(final), overlap, np.sum(counters.drafted))
  passed = np.sum(counters.accepted_per_position, axis=0) / total
  for index in range(k):
    close(passed[index], overlap ** (index + 1), total)
  assert not passed[k:].any()
  tokens_per_call = np.sum(final.length) / total
  expected = (1 - overlap ** (k + 1)) / (1 - overlap)
  assert abs(tokens_per_call - expected) < 5 * k / np.sqrt(total)
  assert tokens_per_call == 1 + np.sum(counters.accepted) / total
