"""The rejection rule of one round against a slow oracle, and its limiting cases."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import base
from osd_jax.decoding import accept as accept_lib

ROWS, K, VOCAB = 4, 3, 6
accept = jax.jit(accept_lib.accept)
uniform = jax.jit(accept_lib._uniform)


def a_round(seed, *, similar=0.0, masked=0.0, temperature=1.0, top_k=0, top_p=1.0):
  """A random round: proposal, verification, settings, position.

  `similar` mixes the target's logits into the draft's; `masked` is the share of
  -inf among the logits.
  """
  rng = np.random.default_rng(seed)
  target = rng.normal(0, 2, (ROWS, K + 1, VOCAB))
  draft = similar * target[:, :K] + (1 - similar) * rng.normal(0, 2, (ROWS, K, VOCAB))
  target = np.where(rng.random(target.shape) < masked, -np.inf, target)
  draft = np.where(rng.random(draft.shape) < masked, -np.inf, draft)
  target[..., 0] = draft[..., 0] = 0.0  # something is always possible
  settings = harness.settings_of(
    ROWS,
    max_length=99,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=int(rng.integers(2**31)),
  )
  on_host = jax.device_get(settings)
  probs = [oracle_probs(draft, on_host, row) for row in range(ROWS)]
  drafted = [[rng.choice(VOCAB, p=at) for at in row] for row in probs]
  proposal = base.Proposal(
    tokens=jnp.asarray(drafted, jnp.int32), logits=jnp.asarray(draft, jnp.float32)
  )
  position = jnp.asarray(rng.integers(0, 50, ROWS), jnp.int32)
  verification = base.Verification(jnp.asarray(target, jnp.float32))
  return proposal, verification, settings, position


def oracle_probs(logits, settings, row):
  return np.array(
    [
      oracles.processed_probs(
        logits_at,
        float(settings.temperature[row]),
        int(settings.top_k[row]),
        float(settings.top_p[row]),
      )
      for logits_at in np.asarray(logits[row])
    ]
  )


SETTINGS = st.sampled_from(
  [
    {},
    {"temperature": 0.3},
    {"top_k": 2},
    {"temperature": 1.5, "top_k": 4},
    {"top_p": 0.6137},
    {"temperature": [0.0, 1.0, 0.0, 2.0]},
    {"temperature": 0.0},
  ]
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  seed=st.integers(0, 2**31),
  similar=st.sampled_from([0.0, 0.8, 1.0]),
  masked=st.sampled_from([0.0, 0.5]),
  settings=SETTINGS,
)
def test_accept_equals_the_oracle(seed, similar, masked, settings):
  proposal, verification, settings, position = a_round(
    seed, similar=similar, masked=masked, **settings
  )
  found = accept(proposal, verification, settings, position)
  uniforms = uniform(settings.seed, position[:, None] + jnp.arange(K)[None])
  found, uniforms, proposal, verification, settings = jax.device_get(
    (found, uniforms, proposal, verification, settings)
  )
  for row in range(ROWS):
    count, weights = oracles.accept(
      proposal.tokens[row],
      oracle_probs(verification.logits, settings, row),
      oracle_probs(proposal.logits, settings, row),
      uniforms[row],
    )
    tokens = found.tokens[row]
    assert found.accepted[row] == count
    np.testing.assert_array_equal(tokens[:count], proposal.tokens[row, :count])
    assert weights[tokens[count]] > 0


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), similar=st.sampled_from([0.0, 0.8, 1.0]))
def test_greedy_alone_equals_greedy_beside_a_sampled_row(seed, similar):
  """Two code paths, one rule."""
  proposal, verification, settings, position = a_round(
    seed, similar=similar, temperature=0.0
  )
  mixed = settings.replace(temperature=settings.temperature.at[0].set(1.0))
  alone = accept(proposal, verification, settings, position)
  beside = accept(proposal, verification, mixed, position)
  np.testing.assert_array_equal(alone.accepted[1:], beside.accepted[1:])
  for row in range(1, ROWS):
    end = int(alone.accepted[row]) + 1
    np.testing.assert_array_equal(alone.tokens[row, :end], beside.tokens[row, :end])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_distributions_accept_everything(temperature):
  for seed in range(20):
    proposal, verification, settings, position = a_round(seed, temperature=temperature)
    logits = verification.logits[:, :K]
    proposal = proposal.replace(
      logits=logits, tokens=jnp.argmax(logits, -1).astype(jnp.int32)
    )
    found = accept(proposal, verification, settings, position)
    assert (np.asarray(found.accepted) == K).all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_draft_row_is_rejected_where_it_stands(broken):
  proposal, verification, settings, position = a_round(3)
  logits = verification.logits[:, :K]
  proposal = proposal.replace(
    tokens=jnp.argmax(logits, -1).astype(jnp.int32),
    logits=logits.at[:, 1].set(broken),
  )
  found = accept(proposal, verification, settings, position)
  assert (np.asarray(found.accepted) == 1).all()


def test_nothing_drafted_is_plain_decoding():
  _, verification, settings, position = a_round(5)
  nothing = base.Proposal(
    jnp.zeros((ROWS, 0), jnp.int32), jnp.zeros((ROWS, 0, VOCAB), jnp.float32)
  )
  one_row = base.Verification(verification.logits[:, :1])
  found = accept(nothing, one_row, settings, position)
  assert found.tokens.shape == (ROWS, 1) and not found.accepted.any()
  greedy = accept(
    nothing, one_row, settings.replace(temperature=jnp.zeros(ROWS)), position
  )
  np.testing.assert_array_equal(
    greedy.tokens[:, 0], np.argmax(one_row.logits[:, 0], -1)
  )


def test_uniform_draws_are_even_and_fresh_at_every_position():
  draws = np.asarray(
    uniform(
      jnp.arange(2000, dtype=jnp.uint32), jnp.tile(jnp.arange(4)[None], (2000, 1))
    )
  )
  assert (draws >= 0).all() and (draws < 1).all()
  counts, _ = np.histogram(draws, bins=10, range=(0, 1))
  assert oracles.chi_square(counts, np.full(10, 0.1)) > 1e-6
  assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.1


@pytest.mark.parametrize("rule", accept_lib.RULES)
def test_a_low_temperature_still_samples(rule):
  """Only 0 is greedy: plain decoding draws two tokens that are close."""
  rows, temperature = 2000, 1e-4
  logits = jnp.tile(jnp.asarray([0.0, -temperature, -1.0]), (rows, 1, 1))
  nothing = base.Proposal(jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0, 3)))
  settings = harness.settings_of(rows, max_length=1, temperature=temperature)
  drawn = accept_lib.accept(
    nothing, base.Verification(logits), settings, jnp.zeros((rows,), jnp.int32), rule
  )
  assert np.mean(drawn.tokens) == pytest.approx(0.2689, abs=0.05)
