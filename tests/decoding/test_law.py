"""Emitted tokens have exactly the target's law, for any draft and any settings.

Chi-square tests compare the joint counts of the first two and first three tokens with
the law computed in float64. Seeds are fixed. The probability that a correct
implementation fails any test of this file is at most 1e-6 (Bonferroni over
COMPARISONS). The planted faults must be caught at the same threshold.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness, tables
from decoding.tables import DRAFT, TARGET, VOCAB

from osd_jax import base
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import drafters, mixed, rounds, sampling

pytestmark = pytest.mark.usefixtures("full_optimization")

LENGTH = 3
DRAWS = 96_000  # per setting; a temperature that is 5 % too high is noticed
FEWER = 36_000  # enough to notice every planted fault
ROWS = 12_000  # rows of a batch for every grid, so each K compiles once
COMPARISONS = 200  # more than this file makes
THRESHOLD = 1e-6 / COMPARISONS
ROUNDS = harness.jitted_rounds(quick=False)
# In batches of PLAIN settings nothing is sorted or penalized.
PLAIN = (
  {"temperature": 1.0},
  {"temperature": 0.4},
  {"temperature": 0.0},
  {"temperature": 1.2, "min_p": 0.2},
)
GRID = (
  {"temperature": 1.7, "top_k": 3},
  {"temperature": 1.0, "top_p": 0.7},
  {"temperature": 0.8, "top_k": 4, "top_p": 0.8},
  {"temperature": 0.9, "repetition_penalty": 1.8},
)


def ending(table):
  """The table with end-of-sequence as probable as any other token."""
  rng = np.random.default_rng(3)
  table = table.copy()
  table[:, :, base.EOS_ID] = rng.normal(size=table.shape[:2])
  return table


def mixed_settings(grid, rows, seed):
  """Settings of `rows` rows that cycle through the grid."""
  full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
  full |= {"min_p": 0.0, "repetition_penalty": 1.0}
  columns = {
    name: np.resize([{**full, **entry}[name] for entry in grid], rows) for name in full
  }
  return harness.settings_of(rows, max_length=LENGTH, seed=seed, **columns)


def first_tokens(final):
  """The first LENGTH tokens of every row, padded after its end."""
  tokens = np.asarray(final.tokens[:, :LENGTH])
  return np.where(np.arange(LENGTH) < np.asarray(final.length)[:, None], tokens, 0)


def p_values(tokens, target, settings):
  """P-values of the joint laws of the first two and the first three tokens."""
  return [
    oracles.chi_square(
      oracles.joint_counts(tokens[:, :count], VOCAB),
      oracles.joint_law(target, count, **settings),
    )
    for count in (2, 3)
  ]


def speculative_p_values(
  k, target, draft, grid, seed=0, run=ROUNDS, draws=DRAWS, rule="rejection"
):
  """P-values [settings, 2] of speculative decoding; the settings share batches."""
  parts = []
  for part in range(draws * len(grid) // ROWS):
    settings = mixed_settings(grid, ROWS, seed + part * ROWS)
    final = harness.tabular_rounds(
      k, target, draft, settings, LENGTH, run=run, rule=rule
    )
    parts.append(first_tokens(final))
  tokens = np.stack(parts).reshape(len(parts), -1, len(grid), LENGTH)
  return np.array(
    [
      p_values(tokens[:, :, index].reshape(-1, LENGTH), target, entry)
      for index, entry in enumerate(grid)
    ]
  )


@pytest.mark.parametrize(
  ("k", "ends", "grid", "rule"),
  [
    (0, True, PLAIN[:1] + GRID[2:], "rejection"),  # plain decoding
    (1, True, PLAIN[:1] + GRID[:1], "rejection"),
    (2, False, PLAIN, "rejection"),
    (2, False, GRID, "rejection"),
    (4, True, GRID[2:], "rejection"),
    (2, False, PLAIN[::3], "block"),
    (2, False, GRID[3:], "block"),
    (4, True, GRID[2:], "block"),
  ],
)
def test_decoding_has_the_law_of_the_target(k, ends, grid, rule):
  target, draft = (ending(TARGET), ending(DRAFT)) if ends else (TARGET, DRAFT)
  found = speculative_p_values(k, target, draft, grid, seed=7 * k, rule=rule)
  assert found.min() > THRESHOLD, found


def of_request(right, seed, position):
  return seed


NOISE = {
  "draft": (rounds, "accept_lib", "round_seed", of_request),
  "acceptance": (accept_lib, "round_seed", None, of_request),
}
NOISY = harness.planted(NOISE, quick=False)


@pytest.mark.parametrize("side", NOISE)
def test_block_rule_needs_noise_of_its_own_in_every_round(side):
  """Control: the rule judges a token by later ones.

  After a rejection the noise of later positions is known to have led to one, so the
  next round must not draw with it.
  """
  grid, run = PLAIN[:1], NOISY(side)
  found = speculative_p_values(3, TARGET, DRAFT, grid, 5, run, rule="block")
  assert found.min() < THRESHOLD, found


BROKEN = {
  "nan": lambda row: np.full_like(row, np.nan),
  "one nan": lambda row: np.where(np.arange(VOCAB) == 3, np.nan, row),
  "inf": lambda row: np.where(np.arange(VOCAB) == 3, np.inf, row),
  "all -inf": lambda row: np.full_like(row, -np.inf),
  "nearly one-hot": lambda row: np.where(np.arange(VOCAB) == 3, 0, -np.inf),
}


@pytest.mark.parametrize(
  "kinds", [("nan", "inf", "nearly one-hot"), ("all -inf", "one nan", "nan")]
)
def test_broken_draft_keeps_the_law_of_the_target(kinds):
  """Breaks the row of the first token, and the rows after tokens 2 and 4."""
  draft = DRAFT.copy()
  for kind, rows in zip(kinds, ((0, 0), (slice(None), 2), (slice(None), 4))):
    draft[rows] = BROKEN[kind](draft[rows])
  found = speculative_p_values(2, TARGET, draft, PLAIN[:1])
  assert found.min() > THRESHOLD, found


# --- Other drafters than one model ------------------------------------------------


def recovered_after_a_length(right, proposal, draft_probs, accepted, vocab_size):
  """Draws the bonus token after a row's length from a residual."""
  if proposal.logits is None:  # the proposed token stays in the residual
    return jnp.zeros((accepted.shape[0], vocab_size))
  return right(proposal.replace(lengths=None), draft_probs, accepted, vocab_size)


RESIDUAL = (accept_lib, "_draft_row", None, recovered_after_a_length)
RUN = harness.planted({"residual": RESIDUAL})


def drafter_p_value(case, rule, fault=None):
  """The p-value of the joint law of three tokens that this drafter drafts for."""
  settings = harness.settings_of(ROWS, max_length=LENGTH, temperature=1.0, seed=5)
  served = case.served(DRAFT)
  more = {"prices": case.prices, "run": RUN(fault), "widths": (1, LENGTH)}
  final = tables.decoded(case.drafter, served, settings, LENGTH, rule, **more)
  return p_values(first_tokens(final), TARGET, {"temperature": 1.0})[1]


SIMILAR = {"model", "empty cache", "mixture, by the draft"}
DRAFTERS = sorted(tables.CASES.keys() - SIMILAR - {"mixture, fair", "mixture, dear"})


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_keeps_the_law_of_the_target(name, rule):
  """At the highest price the cache alone proposes nothing in any row."""
  assert drafter_p_value(tables.CASES[name], rule) > THRESHOLD


@pytest.mark.parametrize("name", ["lengths vary", "no logits"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_wrong_residual_fails_the_chi_square_test(name, rule):
  """Control."""
  assert drafter_p_value(tables.CASES[name], rule, "residual") < THRESHOLD


class Lying(mixed.Mixture):
  """The cache proposes, but acceptance sees the learned draft's logits."""

  def propose(self, params, state, rows, num_draft_tokens, noise):
    proposal, after = super().propose(params, state, rows, num_draft_tokens, noise)
    honest, _ = drafters.ModelDrafter(tables.MODEL).propose(
      params.draft, state.draft, rows, num_draft_tokens, noise
    )
    return proposal.replace(logits=honest.logits), after


class Choosy(mixed.Mixture):
  """A row takes its proposal back after it has seen the token."""

  def propose(self, *args, **named):
    proposal, state = super().propose(*args, **named)
    liked = jnp.cumprod(proposal.tokens < VOCAB // 2, axis=1).sum(axis=1)
    return proposal.replace(lengths=jnp.minimum(proposal.lengths, liked)), state


@pytest.mark.parametrize(
  ("kind", "name", "rule"),
  [
    (Lying, "mixture, by the cache", "rejection"),
    (Lying, "mixture, by the cache", "block"),
    (Choosy, "mixture, cheap", "rejection"),
  ],
)
def test_faulty_drafter_fails_the_chi_square_test(kind, name, rule):
  """Controls."""
  faulty = kind(tables.MODEL, target=tables.MODEL, size=tables.SIZE)
  case = tables.CASES[name]._replace(drafter=faulty)
  assert drafter_p_value(case, rule) < THRESHOLD


# --- Planted faults -----------------------------------------------------------------


def bonus_of_row_before(right, *args):
  verification, cache = right(*args)
  logits = verification.logits
  return base.Verification(logits.at[:, -1].set(logits[:, -2])), cache


def after_append(name, length):
  """Sets the cache length after each round to `length(now, as written)`."""

  def wrong(right, before, *args):
    after = right(before, *args)
    cache = getattr(after, name)
    shifted = length(cache.length, getattr(before, name).length)
    return after.replace(**{name: cache.replace(length=shifted)})

  return (rounds, "state_lib", "append", wrong)


def one_position_long(right, *args):
  """Keeps one position more in the draft's cache than it was rewound to."""
  cache = right(*args)
  return cache.replace(length=cache.length + 1)


def after_a_rejected_token(right, state, start, count):
  """Reads the newest input after the tokens that the last round left behind."""
  cache = state.draft_cache
  at = (cache.length + 2)[:, None]
  left = jnp.take_along_axis(cache.tokens, at, axis=1)[:, 0]
  return right(state, start, count).at[:, 0].set(left)


def draft_before_top_k(right, logits, settings):
  if logits.shape[1] == K:  # the draft has K rows, the target K + 1
    settings = settings.replace(top_k=jnp.zeros_like(settings.top_k))
  return right(logits, settings)


def draft_before_penalty(right, logits, *others):
  return logits if logits.shape[1] == K else right(logits, *others)


def drafted_tokens_not_penalized(right, logits, settings, text, drafted):
  return right(logits, settings, text, jnp.full_like(drafted, -1))


def by_the_noise_of_the_draft(right, probs, seed, position, purpose):
  return right(probs, seed, position, sampling.Purpose.DRAFT)


def uniform_of_the_draft(right, seed, position):
  keys = sampling.row_keys(seed, position, sampling.Purpose.DRAFT)
  return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def always(u):
  return lambda right, seed, position: jnp.full(position.shape, u)


def residual(wrong):
  return (accept_lib, "jnp", "maximum", lambda right, a, b: wrong(a))


def draws(name, wrong):
  return (accept_lib, "sampling", name, wrong)


K = 2
FAULTS = {
  "bonus token from the wrong row": (rounds, "verify", None, bonus_of_row_before),
  "residual without maximum": residual(lambda a: a),
  "absolute residual": residual(abs),
  "recovered token from the target": residual(lambda a: 0 * a),
  "cache one position short": after_append(
    "target_cache", lambda now, written: jnp.maximum(now - 1, 0)
  ),
  "cache one position long": after_append("target_cache", lambda now, written: now + 1),
  "rejected tokens left in the cache": after_append(
    "target_cache", lambda now, written: written
  ),
  "draft distribution before top-k": draws("processed_probs", draft_before_top_k),
  "draft distribution before the penalty": draws("penalized", draft_before_penalty),
  "drafted tokens escape the penalty": draws("penalized", drafted_tokens_not_penalized),
  "recovered by the draft's noise": draws("draw", by_the_noise_of_the_draft),
  "accepted by the draft's noise": (accept_lib, "_uniform", None, uniform_of_the_draft),
}
# After a rejection the draft draws again with the noise of the same positions. If its
# cache contains the rejected tokens, its distribution depends on that noise. This needs
# three drafted tokens: the last one is never fed, and the noise of the first one is not
# used again.
OF_THREE = {
  "rejected tokens left in the draft's cache": (
    *(drafters, "state_lib", "inputs_at", after_a_rejected_token),
  )
}
HARMLESS = {
  "none": (accept_lib, "_uniform", None, lambda right, *args: right(*args)),
  # The draft may see the emitted tokens in any form, because that only affects speed.
  "draft cache one position long": (
    *(drafters.ModelDrafter, "observe", None, one_position_long),
  ),
}
# A chi-square test cannot see these. A draw below 0 amounts to accepting when
# u * draft <= target.
ZERO = {
  "u is 0": (accept_lib, "_uniform", None, always(0.0)),
  "u is below 0": (accept_lib, "_uniform", None, always(-1e-30)),
}
PLANTED = {**FAULTS, **HARMLESS, **ZERO}


FAULTY = harness.planted(PLANTED, quick=False)
FAULTY_THREE = harness.planted(OF_THREE, quick=False)


@pytest.mark.parametrize("fault", {**FAULTS, **OF_THREE})
def test_planted_fault_fails_the_chi_square_test(fault):
  settings = {"top_k": 4 if "top-k" in fault else 0}
  if "penalty" in fault:
    settings["repetition_penalty"] = 1.8
  grid = ({"temperature": 1.0, **settings},)
  k, faulty = (3, FAULTY_THREE) if fault in OF_THREE else (K, FAULTY)
  found = speculative_p_values(k, TARGET, DRAFT, grid, 23, faulty(fault), FEWER)
  assert found.min() < THRESHOLD, found


@pytest.mark.parametrize("fault", HARMLESS)
def test_harmless_change_passes_the_chi_square_test(fault):
  grid = ({"temperature": 1.0, "top_k": 4},)
  found = speculative_p_values(K, TARGET, DRAFT, grid, seed=23, run=FAULTY(fault))
  assert found.min() > THRESHOLD, found


@pytest.mark.parametrize(
  ("fault", "caught"), [("u is 0", False), ("u is below 0", True)]
)
def test_token_without_target_mass_is_never_accepted(fault, caught):
  grid = ({"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5})
  settings = mixed_settings(grid, ROWS, seed=31)
  tokens = first_tokens(
    harness.tabular_rounds(K, TARGET, DRAFT, settings, LENGTH, run=FAULTY(fault))
  )
  impossible = sum(
    (oracles.joint_counts(tokens[index::2], VOCAB) > 0)[
      oracles.joint_law(TARGET, LENGTH, **entry) == 0
    ].sum()
    for index, entry in enumerate(grid)
  )
  assert (impossible > 0) == caught


# --- The test itself ----------------------------------------------------------------


def test_chi_square_p_values_are_uniform_under_the_law():
  """P-values of draws from the law are uniform, and a wrong law is rejected."""
  rng = np.random.default_rng(0)
  law = oracles.joint_law(TARGET, 2, temperature=1.0).ravel()
  counts = rng.multinomial(DRAWS, law, size=400)
  found = np.array([oracles.chi_square(row, law) for row in counts])
  assert 0.4 < found.mean() < 0.6
  assert abs((found < 0.1).mean() - 0.1) < 0.06
  other = oracles.joint_law(TARGET, 2, temperature=1.05).ravel()
  assert oracles.chi_square(counts[0], other) < THRESHOLD
