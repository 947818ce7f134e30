"""Block verification: the exact law of one round, and how many tokens it accepts.

`law_of_a_round` treats a rule as a black box that compares uniform numbers with
thresholds. It finds every threshold by bisection and reads the weights of the next
token, for every text that can be drafted. This gives the law of a round's output and
the expected number of accepted tokens without a random draw, so errors of 1e-5 are
seen. `test_law.py` draws whole answers, and so tests the noise of several rounds.
"""

import itertools

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
from osd_jax.decoding import sampling

VOCAB, K = 3, 3
DRAFTED = np.array(list(itertools.product(range(VOCAB), repeat=K)))
ROWS = len(DRAFTED)
GRID = (
  {"temperature": 1.0},
  {"temperature": 0.4},
  {"temperature": 1.6, "top_k": 2},
  {"temperature": 1.0, "top_p": 0.6},
  {"temperature": 1.2, "min_p": 0.4},
  {"temperature": 0.0},
)
CLOSE = 3e-6  # thresholds are found to 2 ** -23, and probabilities are float32
EXAMPLES = hypothesis.settings(
  max_examples=40, deadline=None, derandomize=True, database=None
)


def black_box(rule):
  """(uniform numbers, round) -> accepted [B] and weights [B, V] of the next token."""

  def run(u, proposal, verification, settings):
    weights = []

    def draw(probs, *_):
      weights.append(probs)
      return jnp.zeros((ROWS,), jnp.int32)

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(accept_lib, "_uniform", lambda *_: u)
      patch.setattr(accept_lib, "sampling", harness.Changed(sampling, draw=draw))
      at = jnp.zeros((ROWS,), jnp.int32)
      found = accept_lib.RULES[rule].accept(proposal, verification, settings, at)
    return found.accepted, weights[0]

  compiled = jax.jit(run)
  return lambda u, *one_round: jax.device_get(compiled(np.float32(u), *one_round))


BOXES = {name: black_box(name) for name in ("rejection", "block")}


def logits_after(rng, levels, kind="dense"):
  """Random logits after every text of fewer than `levels` tokens: [V ** i, V] each.

  Kind "one-hot" is a deterministic draft, and "mixed" one that sometimes is.
  """
  found = []
  for level in range(levels):
    rows = np.float32(1.5 * rng.normal(size=(VOCAB**level, VOCAB)))
    if kind != "dense":
      token = rng.integers(VOCAB, size=(len(rows), 1))
      one_hot = np.where(np.arange(VOCAB) == token, 0, -np.inf)
      chosen = rng.random((len(rows), 1)) < (0.5 if kind == "mixed" else 1)
      rows = np.float32(np.where(chosen, one_hot, rows))
    found.append(rows)
  return found


def along(levels):
  """The rows [ROWS, n, ...] after the tokens of every text in DRAFTED."""
  index = np.arange(ROWS)
  return np.stack(
    [level[index // VOCAB ** (K - i)] for i, level in enumerate(levels)], axis=1
  )


def processed(levels, settings):
  return [
    np.array([oracles.processed_probs(row, **settings) for row in level])
    for level in levels
  ]


def law_after(probs, text=()):
  """Law of the tokens that follow a text, up to K + 1 in all."""
  if len(text) > K:
    return np.float64(1)
  number = sum(token * VOCAB**i for i, token in enumerate(reversed(text)))
  row = probs[len(text)][number]
  return np.stack([row[t] * law_after(probs, (*text, t)) for t in range(VOCAB)])


def law_of_a_round(box, one_round, mass, target_probs):
  """Law [V] * (K + 1) of the output of a round, and the expected accepted tokens.

  Args:
    box: see `black_box`.
    one_round: proposal, verification and settings of the texts in DRAFTED.
    mass: [ROWS], the probability that the draft draws each text.
    target_probs: what follows the round, see `processed`.
  """
  passes = thresholds(box, one_round)
  law, expected = np.zeros((VOCAB,) * (K + 1)), 0.0
  for below in itertools.product([False, True], repeat=K):
    chance = mass * np.where(below, passes, 1 - passes).prod(1)
    # A number of 1 is never below a threshold.
    accepted, weights = box(np.tile(np.where(below, 0, 1), (ROWS, 1)), *one_round)
    expected += chance @ accepted
    for row in np.flatnonzero(chance):
      text, after = tuple(DRAFTED[row, : accepted[row]]), weights[row]
      if not after.any():  # a broken target row: the answer ends
        law[text] += chance[row] * law_after(target_probs, text)
      for token in np.flatnonzero(after):
        share = chance[row] * after[token] / after.sum()
        law[(*text, token)] += share * law_after(target_probs, (*text, token))
  return law, expected


def thresholds(box, one_round):
  """The uniform numbers below which each drafted token passes: [ROWS, K]."""
  low, high = np.zeros((ROWS, K)), np.ones((ROWS, K))
  for _ in range(23):
    middle = (low + high) / 2
    for index in range(K):
      # The tokens before this one pass, and those after it do not.
      u = np.tile((np.arange(K) > index).astype(float), (ROWS, 1))
      u[:, index] = middle[:, index]
      passed = box(u, *one_round)[0] > index
      low[passed, index] = middle[passed, index]
      high[~passed, index] = middle[~passed, index]
  # Numbers below 1 pass a threshold of 1, and none passes a threshold of 0.
  return np.where(low == 0, 0, np.where(high == 1, 1, low))


def measured(
  target, draft, box=None, *, temperature=1.0, counts=None, has_logits=True, **filters
):
  """`law_of_a_round` for logits of target and draft; a broken row drafts token 0.

  Args:
    target: see `logits_after`; a broken row ends the answer in the black box only.
    draft: see `logits_after`.
    box: see `black_box`; None for the block rule.
    temperature: as in `oracles.processed_probs`.
    counts: [ROWS] proposed tokens of every text in DRAFTED; None for K.
    has_logits: whether the proposal has logits.
    filters: as in `oracles.processed_probs`.
  """
  settings = {"temperature": temperature, **filters}
  rows = [
    np.where(level.sum(-1, keepdims=True) > 0, level, np.eye(VOCAB)[0])
    for level in processed(draft, settings)
  ]
  mass = np.take_along_axis(along(rows), DRAFTED[..., None], axis=2).prod((1, 2))
  one_round = (
    base.Proposal(
      jnp.asarray(DRAFTED, jnp.int32),
      jnp.asarray(along(draft)) if has_logits else None,
      None if counts is None else jnp.asarray(counts, jnp.int32),
    ),
    base.Verification(jnp.asarray(along(target))),
    harness.settings_of(ROWS, max_length=9, **settings),
  )
  sound = [np.where(np.isnan(level), 0.0, level) for level in target]
  return law_of_a_round(
    box or BOXES["block"], one_round, mass, processed(sound, settings)
  )


def pair(seed, kind="dense"):
  rng = np.random.default_rng(seed)
  return logits_after(rng, K + 1), logits_after(rng, K, kind)


def error(target, draft, box=None, **settings):
  """The largest difference between the law of a round's output and the target's."""
  law, _ = measured(target, draft, box, **settings)
  of_target = {k: v for k, v in settings.items() if k not in ("counts", "has_logits")}
  sound = [np.where(np.isnan(level), 0.0, level) for level in target]
  probs = processed(sound, {"temperature": 1.0, **of_target})
  return np.abs(law - law_after(probs)).max()


@pytest.mark.parametrize("settings", GRID, ids=str)
@pytest.mark.parametrize("rule", BOXES)
def test_output_of_a_round_has_exactly_the_law_of_the_target(rule, settings):
  for seed in range(5):
    assert error(*pair(seed), BOXES[rule], **settings) < CLOSE


FIRST, SECOND, _ = DRAFTED.T
COUNTS = {
  "none": 0 * FIRST,
  "one": 0 * FIRST + 1,
  "two": 0 * FIRST + 2,
  "by the first token": np.where(FIRST == 0, 1, 3),
  "by two tokens": np.where(FIRST == 0, 1, np.where(SECOND == 1, 2, 3)),
}


# Dense and one-hot rows alternate inside a block if it is "mixed".
SHORTER = [
  (kind, {"counts": counts, "has_logits": kind == "dense"})
  for kind in ("dense", "one-hot")
  for counts in COUNTS.values()
]
PROPOSALS = [("mixed", {}), ("one-hot", {}), ("one-hot", {"has_logits": False})]


@pytest.mark.parametrize(("kind", "how"), PROPOSALS + SHORTER)
def test_one_hot_and_shorter_proposals_keep_the_law(kind, how):
  for seed in range(1 if "counts" in how else 5):
    assert error(*pair(seed, kind), **how) < CLOSE


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "broken_target"])
def test_broken_draft_or_broken_target_rows_keep_the_law(value):
  """The target's row after token 1, an end of sequence, judges no emitted token."""
  for seed in range(3, 6):
    target, draft = pair(seed)
    if value == "broken_target":
      target[1][1] = np.nan
    else:
      draft[1][1] = draft[2][2] = value
    assert error(target, draft) < CLOSE


@pytest.mark.parametrize("rule", BOXES)
def test_length_that_depends_on_a_later_token_changes_the_law(rule):
  """Control: the proposal ends before the first token 2, which is already drawn."""
  is_two = DRAFTED == 2
  counts = np.where(is_two.any(1), is_two.argmax(1), K)
  assert error(*pair(0), BOXES[rule], counts=counts) > 0.01


def test_equal_distributions_are_accepted_whole():
  target, _ = pair(5)
  for settings in GRID:
    _, expected = measured(target, target[:K], **settings)
    assert expected == pytest.approx(K, abs=1e-5)


# --- Accepted tokens ----------------------------------------------------------------


def kept(target, draft, temperature=1.0):
  """The paper's expected number of accepted tokens: the sum of E[kept_i]."""
  of_target, of_draft = (
    along(processed(levels, {"temperature": temperature}))
    for levels in (target[:K], draft)
  )
  share, mass, total = np.ones(ROWS), np.ones(ROWS), 0.0
  for i in range(K):
    p, q = (rows[np.arange(ROWS), i, DRAFTED[:, i]] for rows in (of_target, of_draft))
    share, mass = np.minimum(1, share * p / q), mass * q
    total += (share * mass).sum() / VOCAB ** (K - 1 - i)
  return total


@EXAMPLES
@hypothesis.given(
  seed=st.integers(0, 2**31 - 1),
  temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
  distance=st.sampled_from([0.1, 0.5, 2.0]),
)
def test_block_accepts_what_the_paper_says_and_never_less_than_rejection(
  seed, temperature, distance
):
  target, noise = pair(seed)
  draft = [t + distance * n for t, n in zip(target, noise, strict=False)]
  _, block = measured(target, draft, temperature=temperature)
  _, rejection = measured(target, draft, BOXES["rejection"], temperature=temperature)
  assert block == pytest.approx(kept(target, draft, temperature), abs=1e-5)
  assert block > rejection - 1e-5


def test_block_accepts_more_than_rejection():
  gains = []
  for seed in range(5):
    both = [measured(*pair(seed), box)[1] for box in BOXES.values()]
    gains.append(both[1] / both[0] - 1)
  assert min(gains) > 0.005 and np.mean(gains) > 0.02


def test_the_example_of_the_paper():
  """Section 2: two tokens, probabilities 1/3 and 2/3 against 2/3 and 1/3, K = 2."""
  row = np.float32(np.log([1 / 3, 2 / 3, 1e-30]))
  target = [np.tile(row, (VOCAB**i, 1)) for i in range(K + 1)]
  draft = [level[:, [1, 0, 2]] for level in target[:K]]
  two = COUNTS["two"]
  found = {
    name: measured(target, draft, box, counts=two)[1] for name, box in BOXES.items()
  }
  assert found == pytest.approx({"rejection": 10 / 9, "block": 11 / 9}, abs=1e-5)


@pytest.mark.parametrize("how", ["one-hot", "one token"])
def test_one_hot_drafts_and_single_tokens_are_accepted_as_by_rejection(how):
  drafts = pair(6, "one-hot" if how == "one-hot" else "dense")
  counts = COUNTS["one"] if how == "one token" else None
  block, rejection = (
    measured(*drafts, BOXES[rule], counts=counts) for rule in ("block", "rejection")
  )
  np.testing.assert_allclose(block[0], rejection[0], atol=CLOSE)
  assert block[1] == pytest.approx(rejection[1], abs=1e-5)


# --- Negative controls --------------------------------------------------------------


def uncapped(target_at, draft_at):
  ratios = jnp.cumprod(target_at / jnp.maximum(draft_at, 1e-30), axis=1)
  return jnp.pad(ratios, ((0, 0), (1, 0)), constant_values=1.0)


def token_by_token(proposal, target_probs, draft_probs, kept):
  """Judges each token alone, as an engine once did under the name of this rule."""
  del kept
  target_at, draft_at = accept_lib._at_tokens(proposal, target_probs, draft_probs)
  return jnp.minimum(1, target_at / jnp.maximum(draft_at, 1e-30))


def prefix_only(proposal, target_probs, draft_probs, kept):
  return kept[:, 1:]


def whole_blocks(proposal, *others):
  return RIGHT(proposal.replace(lengths=None), *others)


RIGHT = accept_lib._passes
FAULTS = {
  "ratios are not capped": ("_kept", uncapped, {}),
  "tokens are judged alone": ("_passes", token_by_token, {}),
  "the prefix is kept with its own probability": ("_passes", prefix_only, {}),
  "a shorter proposal does not end the block": (
    "_passes",
    whole_blocks,
    {"counts": COUNTS["two"]},
  ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_changes_the_law(monkeypatch, fault):
  name, wrong, how = FAULTS[fault]
  monkeypatch.setattr(accept_lib, name, wrong)
  assert error(*pair(0), black_box("block"), **how) > 0.005
