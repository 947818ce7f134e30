"""Accepts or rejects drafted tokens, and adds the token that the target emits.

There are three rules. All are exact, and they treat greedy rows alike:

  rejection  Leviathan et al.'s and the paper's (algorithm 1, lines 7-14): accept a
             drafted token with probability min(1, target / draft); at the first
             rejection draw from norm(max(target - draft, 0)); if all are accepted, draw
             a bonus token from row K + 1. The output has the target's law, and no other
             rule that judges one token at a time accepts more drafted tokens.
  block      block verification (Sun et al., arXiv 2403.10444, algorithm 2): judges the
             drafted tokens together. The output has the target's law, too, and on
             average more drafted tokens are accepted; see `accept_by_block`.
  coupling   drafter-invariant sampling (Daliri, Musco, Suresh, arXiv 2408.07978): draft
             and target draw with the same Gumbel noise, and a drafted token is accepted
             if the target draws it too. The output equals plain decoding with the same
             seed token for token, whatever was drafted.

A deterministic proposal (no logits) has one-hot draft distributions, so rejection
accepts a token with the probability that the target gives it, and block gains nothing.
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
  resolved, is_penalized = resolve(rule), False
  if resolved.exact and settings.all_greedy:
    return accept_greedy(proposal, verification)
  if text is not None:
    is_penalized = sampling.is_penalized(settings)

  def by_rule():
    both = proposal, verification
    if text is not None:
      both = _penalized(*both, settings, text)
    return resolved.accept(*both, settings, position)

  if not resolved.exact:  # its greedy rows may follow other rules, too
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
  target_probs, draft_probs = _probs(proposal, verification, settings)
  target_at, draft_at = _at_tokens(proposal, target_probs, draft_probs)
  offsets = position[:, None] + jnp.arange(proposal.tokens.shape[1])[None]
  u = _uniform(settings.seed, offsets)
  # Strict, so that u = 0 never accepts a token that the target cannot emit. A broken
  # draft row has no mass and is rejected.
  accepted = _count_prefix(proposal, (u * draft_at < target_at) & (draft_at > 0))

  target_row = jnp.take_along_axis(target_probs, accepted[:, None, None], axis=1)[:, 0]
  draft_row = _draft_row(proposal, draft_probs, accepted, target_row.shape[-1])
  residual = jnp.maximum(target_row - draft_row, 0.0)
  return _recovered(proposal, accepted, residual, target_row, settings, position)


def accept_by_block(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
) -> base.Acceptance:
  """Block verification (arXiv 2403.10444, algorithm 2); see `accept`.

  With x_1 .. x_K drafted, all u_i uniform, and rows that follow the first i tokens:

    kept_0 = 1,  kept_i = min(1, kept_(i-1) * target(x_i) / draft(x_i))
    excess_i = sum over x of max(kept_i * target(x) - draft(x), 0)
    passes_i = excess_i / (excess_i + 1 - kept_i), after the last token kept_i
    accepted = the last i with u_i < passes_i, else 0
    next token from norm(max(kept * target - draft, 0)), after the last one from target

  **Why the output has the target's law.** Given x_1 .. x_i, at least i tokens are
  accepted with probability kept_i. This holds after the last token. Before it, let

    s = sum over x of draft(x) * kept_(i+1) = sum over x of min(kept_i target, draft),

  the probability that more than i are accepted, if it holds for i + 1. As
  min(a, b) + max(a - b, 0) = a, excess_i = kept_i - s, so passes_i is
  excess_i / (1 - s), and s + (1 - s) passes_i = kept_i.

  So x_1 .. x_i are drafted and accepted with a probability D. Then y follows as an
  accepted token in the share min(kept_i target(y), draft(y)) / kept_i of the cases, and
  as the last token of the round in max(kept_i target(y) - draft(y), 0) / kept_i. The
  sum is target(y): each token has the target's law given the output before it, and
  whether tokens were drafted before it tells nothing more. Hence

    - an answer may end in the middle of a block, at end-of-sequence or at its limit;
    - rows may propose fewer tokens, and the number may depend on the tokens drafted
      before, as the draft distributions may, but on no later ones.

  The other rules do not look at what follows the first rejected token, so the next
  round may draw with the same noise again. This one does, so `Rule.noise_per_round`.

  **Why it accepts more.** Under rejection at least i tokens are accepted with
  probability prod min(1, target(x_j) / draft(x_j)), which is at most kept_i. The two
  are equal for K = 1, and whenever all ratios are at most 1 (one-hot drafts).
  """
  num_draft_tokens = proposal.tokens.shape[1]
  if num_draft_tokens < 2:  # the same rule
    return accept_by_rejection(proposal, verification, settings, position)
  target_probs, draft_probs = _probs(proposal, verification, settings)
  kept_probs = _kept(*_at_tokens(proposal, target_probs, draft_probs))
  offsets = position[:, None] + jnp.arange(num_draft_tokens)[None]
  u = _uniform(round_seed(settings.seed, position), offsets)
  passed = (u < _passes(proposal, target_probs, draft_probs, kept_probs)) & (
    proposal.is_proposed
  )
  count = jnp.arange(1, num_draft_tokens + 1)
  accepted = jnp.max(jnp.where(passed, count, 0), axis=1)

  target_row = jnp.take_along_axis(target_probs, accepted[:, None, None], axis=1)[:, 0]
  draft_row = _draft_row(proposal, draft_probs, accepted, target_row.shape[-1])
  share = jnp.take_along_axis(kept_probs, accepted[:, None], axis=1)
  residual = jnp.maximum(share * target_row - draft_row, 0.0)
  return _recovered(proposal, accepted, residual, target_row, settings, position)


def round_seed(
  seed: UInt32[Array, " B"], position: Int[Array, " B"]
) -> UInt32[Array, " B"]:
  """Returns a seed for the round that starts at a position; see `Rule`."""
  keys = sampling.row_keys(seed, position[:, None], sampling.Purpose.ROUND)[:, 0]
  return jax.vmap(jax.random.bits)(keys)


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
    noise_per_round: drafts are drawn with `round_seed`, as the rule must draw its own
      uniform numbers. For rules that judge a token by later ones: otherwise the next
      round would draw with noise that is known to have led to a rejection.
  """

  accept: Callable[..., base.Acceptance]
  draft_noise: sampling.Purpose = sampling.Purpose.DRAFT
  exact: bool = False
  coupled: bool = False
  noise_per_round: bool = False


RULES: dict[str, Rule] = {
  "rejection": Rule(accept_by_rejection, exact=True),
  "block": Rule(accept_by_block, exact=True, noise_per_round=True),
  "coupling": Rule(accept_by_coupling, sampling.Purpose.EMIT, exact=True, coupled=True),
}


def resolve(rule: str | Rule) -> Rule:
  """Returns the rule of that name in `RULES`, or the rule itself."""
  return RULES[rule] if isinstance(rule, str) else rule


def _probs(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
) -> tuple[Float[Array, "B n V"], Float[Array, "B K V"] | None]:
  """Distributions of the target and of the draft, None for a deterministic proposal.

  Both sides are processed alike: temperature and filters define the law that must be
  reproduced, and the draft drew from its processed row.
  """
  target_probs = sampling.processed_probs(verification.logits, settings)
  if proposal.logits is None:
    return target_probs, None
  return target_probs, sampling.processed_probs(proposal.logits, settings)


def _at_tokens(
  proposal: base.Proposal,
  target_probs: Float[Array, "B n V"],
  draft_probs: Float[Array, "B K V"] | None,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
  """Probabilities of the drafted tokens; 1 for those of a deterministic proposal."""
  index = proposal.tokens[..., None]
  target_at = jnp.take_along_axis(target_probs[:, :-1], index, axis=-1)[..., 0]
  if draft_probs is None:
    return target_at, jnp.ones_like(target_at)
  return target_at, jnp.take_along_axis(draft_probs, index, axis=-1)[..., 0]


def _kept(
  target_at: Float[Array, "B K"], draft_at: Float[Array, "B K"]
) -> Float[Array, "B n"]:
  """Probabilities [B, K + 1] that the first i drafted tokens are accepted."""
  probs = [jnp.ones(target_at.shape[:1], target_at.dtype)]
  for index in range(target_at.shape[1]):
    target, draft = target_at[:, index], draft_at[:, index]
    # Not `target / draft`, which may overflow. A token without draft mass was not drawn
    # from a sound row. Numbers below `tiny` may be flushed to 0.
    can_be_drawn = draft >= jnp.finfo(draft.dtype).tiny
    ratio = jnp.minimum(probs[-1] * target, draft) / jnp.where(can_be_drawn, draft, 1.0)
    probs.append(jnp.where(can_be_drawn, ratio, 0.0))
  return jnp.stack(probs, axis=1)


def _passes(
  proposal: base.Proposal,
  target_probs: Float[Array, "B n V"],
  draft_probs: Float[Array, "B K V"] | None,
  kept: Float[Array, "B n"],
) -> Float[Array, "B K"]:
  """Probabilities of the block rule's draws after 1 .. K drafted tokens."""
  if draft_probs is None:
    draft_probs = jax.nn.one_hot(proposal.tokens, target_probs.shape[-1])
  rows, share = target_probs[:, 1:-1], kept[:, 1:-1]
  excess = sampling.sums(jnp.maximum(share[..., None] * rows - draft_probs[:, 1:], 0.0))
  rest = excess + (1 - share)
  # If nothing is left, draft and target are equal and the next token passes, too.
  passes = jnp.where(rest > 0, excess / jnp.where(rest > 0, rest, 1.0), 1.0)
  # A broken target row ends a block, too: no token after it can be emitted.
  continues = proposal.is_proposed[:, 1:] & (sampling.sums(rows) > 0)
  passes = jnp.where(continues, passes, share)
  return jnp.concatenate([passes, kept[:, -1:]], axis=1)


def _recovered(
  proposal: base.Proposal,
  accepted: Int[Array, " B"],
  residual: Float[Array, "B V"],
  target_row: Float[Array, "B V"],
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
) -> base.Acceptance:
  """Draws the token that follows the accepted ones from the residual."""
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
  columns = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
  slot = jnp.arange(columns.shape[1])[None]
  tokens = jnp.where(slot < accepted[:, None], columns, emitted[:, None])
  return base.Acceptance(tokens=tokens, accepted=accepted)


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
  if not proposal.tokens.shape[1]:
    # Without columns, `take_along_axis` ignores `fill_value` and returns 0.
    return jnp.zeros((len(accepted), vocab_size))
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
  row_probs = jnp.take_along_axis(
    draft_probs, row[..., None], axis=1, mode="fill", fill_value=0
  )[:, 0]
  if proposal.lengths is None:
    return row_probs
  return jnp.where(row < proposal.lengths[:, None], row_probs, 0.0)


def _uniform(
  seed: UInt32[Array, " B"], position: Int[Array, "B K"]
) -> Float[Array, "B K"]:
  """Uniform draws in [0, 1) for every entry of position [B, K]."""
  if position.shape[1] == 0:
    return jnp.zeros(position.shape, jnp.float32)
  keys = sampling.row_keys(seed, position, sampling.Purpose.ACCEPT)
  return jax.vmap(jax.vmap(jax.random.uniform))(keys)
