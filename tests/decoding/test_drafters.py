"""Drafters: rows that propose fewer tokens, and proposals without logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import base, testing
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import drafters, rounds

VOCAB, LENGTH, K, ROWS = 6, 3, 3, 30_000
THRESHOLD = 1e-6 / 20  # more comparisons than this file makes
TARGET = testing.random_table(VOCAB, 1, sharpness=1.5)
DRAFT = testing.random_table(VOCAB, 2, sharpness=1.5)
MODEL = testing.tabular_model(VOCAB)


@dataclasses.dataclass(frozen=True)
class Varying(drafters.ModelDrafter):
  """Proposes a number of tokens that depends on the row and its position."""

  def propose(self, params, state, rows, num_draft_tokens, noise):
    proposal, state = super().propose(params, state, rows, num_draft_tokens, noise)
    row = jnp.arange(rows.length.shape[0])
    lengths = (row + rows.length) % (num_draft_tokens + 1)
    # The proposal still holds K tokens. Those after a row's length would often be
    # accepted if the lengths were ignored.
    return proposal.replace(lengths=lengths.astype(jnp.int32)), state


@dataclasses.dataclass(frozen=True)
class Guessing(drafters.ModelDrafter):
  """Proposes each model's arg max without logits, as a lookup drafter would."""

  def propose(self, params, state, rows, num_draft_tokens, noise):
    greedy = rows.replace(
      settings=rows.settings.replace(
        temperature=jnp.zeros_like(rows.length, jnp.float32)
      )
    )
    proposal, state = super().propose(params, state, greedy, num_draft_tokens, noise)
    return base.Proposal(proposal.tokens, None), state


KINDS = {kind.__name__: kind for kind in (Varying, Guessing)}


def decoded(kind, settings, length, draft=DRAFT, rule="rejection", run=None):
  """The final state of rows that a drafter of this kind drafts for."""
  run = run or jax.jit(rounds.run_rounds, static_argnums=(0, 1))
  spec = rounds.DecodeSpec(MODEL, kind(MODEL), rule=rule)
  target, draft = jnp.asarray(TARGET), jnp.asarray(draft)
  sources = harness.no_sources(settings.seed.shape[0])
  state = harness.start(MODEL, target, *sources, settings, length, MODEL, draft)
  while True:
    state = run(spec, K, target, draft, jnp.int32(harness.MANY), state)
    if not (np.asarray(state.stop_reason) == base.StopReason.RUNNING).any():
      return state


def p_value(kind, **changes):
  settings = harness.settings_of(ROWS, max_length=LENGTH, temperature=1.0, seed=5)
  tokens = np.asarray(decoded(kind, settings, LENGTH, **changes).tokens[:, :LENGTH])
  law = oracles.joint_law(TARGET, LENGTH, temperature=1.0)
  return oracles.chi_square(oracles.joint_counts(tokens, VOCAB), law)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", accept_lib.RULES)
def test_output_equals_plain_decoding(kind, rule):
  """Greedy rows under every rule, and sampled rows with the same seed if coupled."""
  sampled = np.arange(8) % 2 if accept_lib.RULES[rule].coupled else 0.0
  settings = harness.settings_of(8, max_length=40, temperature=sampled)
  plain = harness.tabular_steps(TARGET, settings, 40, rule=rule)
  for draft in (TARGET, DRAFT):
    found = decoded(KINDS[kind], settings, 40, draft, rule)
    assert harness.outputs(found) == harness.outputs(plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_output_has_the_law_of_the_target(kind, rule):
  assert p_value(KINDS[kind], rule=rule) > THRESHOLD


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_wrong_residual_fails_the_chi_square_test(monkeypatch, kind, rule):
  """Control: the bonus token after a row's length is drawn from a residual."""

  def draft_row(proposal, draft_probs, accepted, vocab_size):
    whole = proposal.replace(lengths=None)
    if kind == "Guessing":  # the proposed token stays in the residual
      return jnp.zeros((accepted.shape[0], vocab_size))
    return RIGHT(whole, draft_probs, accepted, vocab_size)

  monkeypatch.setattr(accept_lib, "_draft_row", draft_row)
  run = jax.jit(lambda *args: rounds.run_rounds(*args), static_argnums=(0, 1))
  assert p_value(KINDS[kind], run=run, rule=rule) < THRESHOLD


RIGHT = accept_lib._draft_row


def test_no_token_after_a_rows_length_is_accepted_or_counted():
  """The draft equals the target, so every proposed token would be accepted."""
  settings = harness.settings_of(8, max_length=40)
  final = decoded(Varying, settings, 40, draft=TARGET)
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
@pytest.mark.parametrize("kind", [drafters.ModelDrafter, Varying, Guessing])
def test_row_that_must_not_draft_decodes_plainly_and_disturbs_no_other(kind, rule):
  """Sampled tokens, too, are those of plain decoding with the same seed."""
  allowed = np.arange(8) % 2 == 0
  settings = harness.settings_of(
    8, max_length=40, temperature=np.arange(8) // 2 % 2, speculative=allowed
  )
  plain = harness.outputs(harness.tabular_steps(TARGET, settings, 40))
  everywhere = settings.replace(speculative=jnp.ones(8, bool))
  found, free = (decoded(kind, each, 40, rule=rule) for each in (settings, everywhere))
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
  final = decoded(Guessing, settings, 1)
  guess = int(DRAFT[0, 0].argmax())
  probability = oracles.processed_probs(TARGET[0, 0], 1.0)[guess]
  share = float(np.mean(final.counters.accepted))
  assert share == pytest.approx(probability, abs=6 * (0.25 / ROWS) ** 0.5)
