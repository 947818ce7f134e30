"""Accepts or rejects drafted tokens, and adds the token that the target emits.

There are two rules. Both are exact, and they treat greedy rows alike:

  rejection  Leviathan et al.'s and the paper's (algorithm 1, lines 7-14): accept a
             drafted token with probability min(1, target / draft); at the first
             rejection draw from norm(max(target - draft, 0)); if all are accepted, draw
             a bonus token from row K + 1. The output has the target's law, and no other
             rule accepts more drafted tokens.
  coupling   drafter-invariant sampling (Daliri, Musco, Suresh, arXiv 2408.07978): draft
             and target draw with the same Gumbel noise, and a drafted token is accepted
             if the target draws it too. The output equals plain decoding with the same
             seed token for token, whatever was drafted.

A deterministic proposal (no logits) has one-hot draft distributions, so rejection
accepts a token with the probability that the target gives it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from osd_jax import base
from osd_jax.decoding import sampling


def accept(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
  rule: "str | Rule" = "rejection",
  text: Int[Array, "B L"] | None = None,
) -> base.Acceptance:
  """Applies a rule; under an exact one the emitted tokens follow the target's law.

  Args:
    proposal: drafted tokens; K may be 0, which is plain decoding.
    verification: K + 1 rows of target logits.
    settings: per-row sampling. Greedy rows accept a token that equals the arg max.
    position: [B] int32; output index of the first drafted token.
    rule: a key of `RULES`, or a rule of your own (static).
    text: [B, L] int32; the tokens before the first drafted one, for the repetition
      penalty; -1 is no token. None if no row has a penalty.

  Returns:
    The accepted prefix and the recovered or bonus token after it.
  """
  chosen, is_penalized = resolve(rule), False
  if text is not None:
    is_penalized = sampling.is_penalized(settings)

  def by_rule():
    both = proposal, verification
    if text is not None:
      both = _penalized(*both, settings, text)
    return chosen.accept(*both, settings, position)

  if not chosen.exact:  # its greedy rows may follow other rules, too
    return by_rule()
  return jax.lax.cond(
    jnp.any(settings.temperature > 0) | is_penalized,
    by_rule,
    lambda: accept_greedy(proposal, verification),
  )


def _penalized(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
  text: Int[Array, "B L"],
) -> tuple[base.Proposal, base.Verification]:
  """Both sides' logits with the repetition penalty that the draft drew with."""

  def penalized(logits):
    return sampling.penalized(logits, settings, text, proposal.tokens)

  if proposal.logits is not None:
    proposal = proposal.replace(logits=penalized(proposal.logits))
  return proposal, base.Verification(penalized(verification.logits))


def accept_greedy(
  proposal: base.Proposal, verification: base.Verification
) -> base.Acceptance:
  """Compares with the target's arg max; applies if all rows are greedy."""
  choice = sampling.arg_max(verification.logits)
  return _accept_equal(proposal, choice)


def accept_by_rejection(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
) -> base.Acceptance:
  """Rejection sampling; greedy rows are one-hot distributions. See `accept`."""
  num_draft_tokens = proposal.tokens.shape[1]
  # Both sides are processed alike: temperature and filters define the law that must be
  # reproduced, and the draft drew from its processed row.
  target_probs = sampling.processed_probs(verification.logits, settings)
  draft_probs = None
  if proposal.logits is not None:
    draft_probs = sampling.processed_probs(proposal.logits, settings)

  index = proposal.tokens[..., None]
  target_at = jnp.take_along_axis(target_probs[:, :-1], index, axis=-1)[..., 0]
  # A deterministic proposal has probability 1.
  draft_at = jnp.ones_like(target_at)
  if draft_probs is not None:
    draft_at = jnp.take_along_axis(draft_probs, index, axis=-1)[..., 0]
  offsets = position[:, None] + jnp.arange(num_draft_tokens)[None]
  u = _uniform(settings.seed, offsets)
  # Strict, so that u = 0 never accepts a token that the target cannot emit. A broken
  # draft row has no mass and is rejected.
  accepted = _count_prefix(proposal, (u * draft_at < target_at) & (draft_at > 0))

  target_row = jnp.take_along_axis(target_probs, accepted[:, None, None], axis=1)[:, 0]
  draft_row = _draft_row(proposal, draft_probs, accepted, target_row.shape[-1])
  residual = jnp.maximum(target_row - draft_row, 0.0)
  # Rounding can leave no residual although a token was rejected.
  empty = jnp.sum(residual, -1, keepdims=True) <= 0
  # EMIT at the absolute position: plain decoding would draw this token with the same
  # noise.
  emitted = sampling.draw(
    jnp.where(empty, target_row, residual),
    settings.seed,
    position + accepted,
    sampling.Purpose.EMIT,
  )
  # The emitted token follows the accepted prefix, at index K if all are accepted.
  padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
  slot = jnp.arange(num_draft_tokens + 1)[None]
  tokens = jnp.where(slot < accepted[:, None], padded, emitted[:, None])
  return base.Acceptance(tokens=tokens, accepted=accepted)


def accept_by_coupling(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
) -> base.Acceptance:
  """Draws every target row with the noise that the draft drew with.

  A drafted token is accepted with probability (1 - TV) / (1 + TV) at least, where TV is
  the total variation distance between the two distributions; see `accept`.
  """
  probs = sampling.processed_probs(verification.logits, settings)
  offsets = position[:, None] + jnp.arange(probs.shape[1])[None]
  choice = jax.vmap(
    lambda row, at: sampling.draw(row, settings.seed, at, sampling.Purpose.EMIT),
    in_axes=1,
    out_axes=1,
  )(probs, offsets)
  return _accept_equal(proposal, choice)


class Rule(NamedTuple):
  """An acceptance rule.

  Attributes:
    accept: (proposal, verification, settings, position) -> acceptance. It accepts none
      of the tokens that `Proposal.is_proposed` excludes.
    draft_noise: purpose of the draft's draws. Under rejection they must be independent
      of the recovered token's draw; under coupling they use the target's own noise.
    exact: outputs have the target's law, and greedy rows are the target's arg max
      token for token (`accept` is not called if all rows are greedy).
    coupled: sampled outputs, too, equal plain decoding token for token.
  """

  accept: Callable[..., base.Acceptance]
  draft_noise: sampling.Purpose = sampling.Purpose.DRAFT
  exact: bool = False
  coupled: bool = False


RULES: dict[str, Rule] = {
  "rejection": Rule(accept_by_rejection, exact=True),
  "coupling": Rule(accept_by_coupling, sampling.Purpose.EMIT, exact=True, coupled=True),
}


def resolve(rule: str | Rule) -> Rule:
  """Returns the rule of that name in `RULES`, or the rule itself."""
  return RULES[rule] if isinstance(rule, str) else rule


def _accept_equal(
  proposal: base.Proposal, choice: Int[Array, "B n"]
) -> base.Acceptance:
  """Accepts the drafted tokens that equal the target's choice, up to a difference."""
  accepted = _count_prefix(proposal, proposal.tokens == choice[:, :-1])
  return base.Acceptance(tokens=choice, accepted=accepted)


def _count_prefix(
  proposal: base.Proposal, passes: Bool[Array, "B K"]
) -> Int[Array, " B"]:
  """Length of the leading run of True, within the tokens that a row proposes."""
  # `cumprod` is 0 from the first False on, so its sum is the length of the prefix.
  passes = passes & proposal.is_proposed
  return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)


def _draft_row(
  proposal: base.Proposal,
  draft_probs: Float[Array, "B K V"] | None,
  accepted: Int[Array, " B"],
  vocab_size: int,
) -> Float[Array, "B V"]:
  """Draft distribution at the first rejected token, zeros if none was rejected.

  With zeros the residual is the whole target row, the law of the bonus token.
  """
  row = accepted[:, None]
  if draft_probs is None:
    # -1 is outside the vocabulary: a row of zeros.
    token = jnp.take_along_axis(
      jnp.where(proposal.is_proposed, proposal.tokens, -1),
      row,
      axis=1,
      mode="fill",
      fill_value=-1,
    )[:, 0]
    return jax.nn.one_hot(token, vocab_size)
  found = jnp.take_along_axis(
    draft_probs, row[..., None], axis=1, mode="fill", fill_value=0
  )[:, 0]
  if proposal.lengths is None:
    return found
  return jnp.where(row < proposal.lengths[:, None], found, 0.0)


def _uniform(
  seed: UInt32[Array, " B"], position: Int[Array, "B K"]
) -> Float[Array, "B K"]:
  """Uniform draws in [0, 1) for every entry of position [B, K]."""
  if position.shape[1] == 0:
    return jnp.zeros(position.shape, jnp.float32)
  keys = sampling.row_keys(seed, position, sampling.Purpose.ACCEPT)
  return jax.vmap(jax.vmap(jax.random.uniform))(keys)
