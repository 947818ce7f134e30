"""The law of what is emitted: exactly the target's, whatever the draft and settings.

Chi-square of the joint law of the first two and the first three tokens against the
law computed in float64. Seeds are fixed; a true implementation fails one of all the
tests of this file with probability 1e-6 at most (Bonferroni over COMPARISONS). The
planted faults must be caught at the same threshold.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import base, testing
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import sampling, speculative, state, verify

VOCAB, LENGTH, DRAWS = 6, 3, 100_000
ROWS = 60_000  # of a batch, whatever the grid: one compilation for each K
COMPARISONS = 200  # more than this file makes
THRESHOLD = 1e-6 / COMPARISONS
TARGET = testing.random_table(VOCAB, 1, sharpness=1.5)
DRAFT = testing.random_table(VOCAB, 2, sharpness=1.5)

GRID = (
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.8},
    {"temperature": 0.0},
)


def ending(table):
  """The table with end-of-sequence as probable as any other token."""
  rng = np.random.default_rng(3)
  table = table.copy()
  table[:, :, base.EOS_ID] = rng.normal(size=table.shape[:2])
  return table


def mixed_settings(grid, rows, seed):
  """Rows that take turns among the settings of the grid."""
  full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
  columns = {
      name: np.resize([{**full, **entry}[name] for entry in grid], rows)
      for name in full
  }
  return harness.settings_of(rows, max_length=LENGTH, seed=seed, **columns)


def first_tokens(final):
  """The first LENGTH tokens of every row, padded behind its end."""
  tokens = np.asarray(final.tokens[:, :LENGTH])
  return np.where(np.arange(LENGTH) < np.asarray(final.length)[:, None], tokens, 0)


def p_values(tokens, target, settings):
  """Of the joint laws of the first two and the first three tokens."""
  return [
      oracles.chi_square(
          oracles.joint_counts(tokens[:, :count], VOCAB),
          oracles.joint_law(target, count, **settings),
      )
      for count in (2, 3)
  ]


def speculative_p_values(k, target, draft, grid, seed=0, run=harness.ROUNDS):
  """P-values [settings, 2] of the loop; the settings share batches."""
  parts = []
  for part in range(-(-DRAWS * len(grid) // ROWS)):
    settings = mixed_settings(grid, ROWS, seed + part * ROWS)
    final = harness.tabular_rounds(k, target, draft, settings, LENGTH, run=run)
    parts.append(first_tokens(final))
  tokens = np.stack(parts).reshape(len(parts), -1, len(grid), LENGTH)
  return np.array([
      p_values(tokens[:, :, index].reshape(-1, LENGTH), target, entry)
      for index, entry in enumerate(grid)
  ])


@pytest.mark.parametrize(
    ("k", "ends", "grid"), [(1, True, GRID), (2, False, GRID), (5, True, GRID[2:5])]
)
def test_the_loop_emits_the_law_of_the_target(k, ends, grid):
  target, draft = (ending(TARGET), ending(DRAFT)) if ends else (TARGET, DRAFT)
  found = speculative_p_values(k, target, draft, grid, seed=7 * k)
  assert found.min() > THRESHOLD, found


def test_plain_decoding_has_the_same_law():
  grid = GRID[:1] + GRID[4:]
  settings = mixed_settings(grid, DRAWS * len(grid), seed=11)
  tokens = first_tokens(harness.tabular_steps(ending(TARGET), settings, LENGTH))
  for index, entry in enumerate(grid):
    found = p_values(tokens[index :: len(grid)], ending(TARGET), entry)
    assert min(found) > THRESHOLD, (entry, found)


BROKEN = {
    "nan": lambda row: np.full_like(row, np.nan),
    "one nan": lambda row: np.where(np.arange(VOCAB) == 3, np.nan, row),
    "inf": lambda row: np.where(np.arange(VOCAB) == 3, np.inf, row),
    "all -inf": lambda row: np.full_like(row, -np.inf),
    "nearly one-hot": lambda row: np.where(np.arange(VOCAB) == 3, 0, -np.inf),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_draft_that_broke_costs_speed_only(kind):
  draft = DRAFT.copy()
  draft[0, 0] = BROKEN[kind](draft[0, 0])
  draft[:, 2::2] = BROKEN[kind](draft[:, 2::2])
  found = speculative_p_values(2, TARGET, draft, GRID[:1])
  assert found.min() > THRESHOLD, found


# --- Planted faults -----------------------------------------------------------------


def bonus_from_the_row_before(monkeypatch):
  def wrong(*args):
    verification, cache = verify.verify(*args)
    logits = verification.logits
    return base.Verification(logits.at[:, -1].set(logits[:, -2])), cache

  monkeypatch.setattr(
      speculative, "verify_lib", harness.Changed(verify, verify=wrong)
  )


def residual_by(maximum):
  def plant(monkeypatch):
    monkeypatch.setattr(accept_lib, "jnp", harness.Changed(jnp, maximum=maximum))

  return plant


def rewound_to(wrong_length):
  """The target's cache has another length after each round."""

  def plant(monkeypatch):
    def append(before, *args):
      after = state.append(before, *args)
      cache = after.target_cache
      length = wrong_length(cache.length, before.target_cache.length)
      return after.replace(target_cache=cache.replace(length=length))

    monkeypatch.setattr(
        speculative, "state_lib", harness.Changed(state, append=append)
    )

  return plant


def draft_before_top_k(monkeypatch):
  def wrong(logits, settings):
    if logits.shape[1] == 2:  # K rows are the draft's, K + 1 the target's
      settings = settings.replace(top_k=jnp.zeros_like(settings.top_k))
    return sampling.processed_probs(logits, settings)

  monkeypatch.setattr(
      accept_lib, "sampling", harness.Changed(sampling, processed_probs=wrong)
  )


def recovered_by_the_noise_of(purpose):
  def plant(monkeypatch):
    def draw(probs, seed, position, _):
      return sampling.draw(probs, seed, position, purpose)

    monkeypatch.setattr(
        accept_lib, "sampling", harness.Changed(sampling, draw=draw)
    )

  return plant


def accepted_by_the_noise_of_the_draft(monkeypatch):
  def uniform(seed, position):
    keys = sampling.row_keys(seed, position, sampling.Purpose.DRAFT)
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (VOCAB,))[2]))(keys)

  monkeypatch.setattr(accept_lib, "_uniform", uniform)


FAULTS = {
    "none": lambda monkeypatch: None,
    "bonus token from the wrong row": bonus_from_the_row_before,
    "residual without maximum": residual_by(lambda a, _: a),
    "absolute residual": residual_by(lambda a, _: abs(a)),
    "recovered token from the target": residual_by(lambda a, _: 0 * a),
    "cache one position short": rewound_to(lambda now, _: jnp.maximum(now - 1, 0)),
    "cache one position long": rewound_to(lambda now, _: now + 1),
    "rejected tokens left in the cache": rewound_to(lambda _, written: written),
    "draft distribution before top-k": draft_before_top_k,
    "recovered by the draft's noise": recovered_by_the_noise_of(sampling.Purpose.DRAFT),
    "accepted by the draft's noise": accepted_by_the_noise_of_the_draft,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
  FAULTS[fault](monkeypatch)
  grid = ({"temperature": 1.0, "top_k": 4},)
  run = harness.jitted_rounds()
  found = speculative_p_values(2, TARGET, DRAFT, grid, seed=23, run=run)
  if fault == "none":
    assert found.min() > THRESHOLD, found
  else:
    assert found.min() < THRESHOLD, found


def test_a_draft_cache_off_by_one_changes_no_law(monkeypatch):
  """What the draft was fed decides speed, never the law; see test_speculative."""

  def append(before, *args):
    after = state.append(before, *args)
    cache = after.draft_cache
    return after.replace(draft_cache=cache.replace(length=cache.length + 1))

  monkeypatch.setattr(speculative, "state_lib", harness.Changed(state, append=append))
  run = harness.jitted_rounds()
  found = speculative_p_values(2, TARGET, DRAFT, GRID[:1], seed=29, run=run)
  assert found.min() > THRESHOLD, found


# --- u = 0, which no chi-square sees ------------------------------------------------


@pytest.mark.parametrize(("u", "caught"), [(0.0, False), (-1e-30, True)])
def test_a_token_without_mass_is_never_accepted(u, caught, monkeypatch):
  """u below 0 has the effect of accepting at u * draft <= target: the control."""
  monkeypatch.setattr(
      accept_lib, "_uniform", lambda seed, position: jnp.full(position.shape, u)
  )
  grid = ({"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5})
  settings = mixed_settings(grid, ROWS, seed=31)
  final = harness.tabular_rounds(
      2, TARGET, DRAFT, settings, LENGTH, run=harness.jitted_rounds()
  )
  tokens = first_tokens(final)
  impossible = sum(
      (oracles.joint_counts(tokens[index::2], VOCAB) > 0)[
          oracles.joint_law(TARGET, LENGTH, **entry) == 0
      ].sum()
      for index, entry in enumerate(grid)
  )
  assert (impossible > 0) == caught


# --- The test itself ----------------------------------------------------------------


def test_chi_square_has_the_right_level():
  """P-values of draws from the law itself are spread evenly; a wrong law is seen."""
  rng = np.random.default_rng(0)
  law = oracles.joint_law(TARGET, 2, temperature=1.0).ravel()
  counts = rng.multinomial(DRAWS, law, size=400)
  found = np.array([oracles.chi_square(row, law) for row in counts])
  assert 0.4 < found.mean() < 0.6
  assert abs((found < 0.1).mean() - 0.1) < 0.06
  other = oracles.joint_law(TARGET, 2, temperature=1.05).ravel()
  assert oracles.chi_square(counts[0], other) < THRESHOLD
