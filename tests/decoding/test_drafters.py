"""Drafters: rows that propose fewer tokens, and proposals without logits."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness, tables
from decoding.tables import DRAFT, MODEL, TARGET, K

from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import drafters

ROWS = 30_000


def test_no_token_after_a_rows_length_is_accepted_or_counted():
  """The draft equals the target, so every proposed token would be accepted."""
  settings = harness.settings_of(8, max_length=40)
  final = tables.decoded(tables.Varying(MODEL), jnp.asarray(TARGET), settings, 40)
  counters = jax.device_get(final.counters)
  emitted = np.asarray(final.length)
  np.testing.assert_array_equal(counters.accepted, counters.drafted)
  for row in range(8):
    length, expected, proposed = 0, 0, 0
    # Each round emits all proposed tokens and a bonus token.
    while length < 40:
      allowed = (row + length) % (K + 1)
      proposed += min(allowed, 40 - length)
      length += allowed + 1
      expected += 1
    assert counters.rounds[row] == expected and counters.drafted[row] == proposed
  assert (emitted == 40).all()


@pytest.mark.parametrize("rule", accept_lib.RULES)
@pytest.mark.parametrize(
  "kind", [drafters.ModelDrafter, tables.Varying, tables.Guessing]
)
def test_row_that_must_not_draft_decodes_plainly_and_disturbs_no_other(kind, rule):
  """Sampled tokens, too, are those of plain decoding with the same seed."""
  allowed = np.arange(8) % 2 == 0
  settings = harness.settings_of(
    8, max_length=40, temperature=np.arange(8) // 2 % 2, speculative=allowed
  )
  plain = harness.outputs(harness.tabular_steps(TARGET, settings, 40))
  everywhere = settings.replace(speculative=jnp.ones(8, bool))
  found, free = (
    tables.decoded(kind(MODEL), jnp.asarray(DRAFT), each, 40, rule)
    for each in (settings, everywhere)
  )
  one, other = (harness.outputs(state) for state in (found, free))
  for row in range(8):
    assert one[row] == (other if allowed[row] else plain)[row]
  counters, free_counters = jax.device_get((found.counters, free.counters))
  np.testing.assert_array_equal(counters.rounds[~allowed], found.length[~allowed])
  assert not counters.drafted[~allowed].any() and not counters.accepted[~allowed].any()
  # Control: if they may draft, the same rows do, and draw other tokens.
  assert free_counters.drafted.all()
  np.testing.assert_array_equal(
    counters.drafted[allowed], free_counters.drafted[allowed]
  )
  differs = [other[row] != plain[row] for row in range(8) if not allowed[row]]
  assert any(differs) == (not accept_lib.RULES[rule].coupled)


def test_guess_is_accepted_with_its_target_probability():
  settings = harness.settings_of(ROWS, max_length=1, temperature=1.0)
  final = tables.decoded(tables.Guessing(MODEL), jnp.asarray(DRAFT), settings, 1)
  guess = int(DRAFT[0, 0].argmax())
  probability = oracles.processed_probs(TARGET[0, 0], 1.0)[guess]
  share = float(np.mean(final.counters.accepted))
  assert share == pytest.approx(probability, abs=6 * (0.25 / ROWS) ** 0.5)
