"""Acceptance under the coupling rule; test_equals_plain.py has its exactness."""

import functools

import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import testing
from osd_jax.base import EOS_ID
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import sampling
from osd_jax.engine import requests

VOCAB = 8
TABLE = testing.random_table(VOCAB, 8)


def test_draft_with_independent_noise_is_accepted_less(monkeypatch):
  """Outputs stay exact, so only the acceptance reveals the fault."""
  settings = harness.table_settings(temperature=1.0)
  run = functools.partial(
    harness.table_rounds, 2, TABLE, TABLE, settings, rule="coupling"
  )
  plain = harness.tabular_steps(TABLE, settings, harness.TABLE_LENGTH)
  assert harness.draft_acceptance(run()) == 1.0
  apart = accept_lib.RULES["coupling"]._replace(draft_noise=sampling.Purpose.DRAFT)
  monkeypatch.setitem(accept_lib.RULES, "coupling", apart)
  found = run(run=harness.jitted_rounds())
  assert harness.outputs(found) == harness.outputs(plain)
  assert harness.draft_acceptance(found) < 0.9


def test_acceptance_equals_the_closed_form_of_shared_noise():
  """P(both arg maxes are x) = 1 / sum_y max(p_y / p_x, q_y / q_x)."""
  k, rows, rounds = 2, 6000, 4
  rng = np.random.default_rng(0)
  target, draft = rng.normal(0, 1.2, (2, VOCAB))
  target[EOS_ID] = draft[EOS_ID] = -np.inf
  limit = rounds * (k + 1)
  settings = harness.settings_of(rows, max_length=limit, temperature=0.8)
  tables = (np.tile(np.float32(row), (VOCAB, VOCAB, 1)) for row in (target, draft))
  final = harness.tabular_rounds(
    k, *tables, settings, limit, limit=rounds, rule="coupling"
  )
  p, q = (oracles.processed_probs(row, 0.8) for row in (target, draft))
  kept = p > 0
  ratios = np.maximum(p[None] / p[kept, None], q[None] / q[kept, None])
  expected = float(np.sum(1 / ratios.sum(1)))
  overlap = float(np.minimum(p, q).sum())
  # Shared noise accepts at least (1 - TV) / (1 + TV), with TV = 1 - overlap, and here
  # clearly less than the rejection rule, which accepts the overlap.
  assert overlap / (2 - overlap) <= expected < overlap - 0.02
  trials = np.sum(final.counters.drafted)
  deviation = np.sqrt(expected * (1 - expected) / trials)
  assert abs(harness.draft_acceptance(final) - expected) < 5 * deviation


def test_unknown_acceptance_rule_is_refused_by_name():
  with pytest.raises(ValueError, match=r"acceptance_rule: received 'greedy', expected"):
    requests.DecodingConfig(acceptance_rule="greedy")
