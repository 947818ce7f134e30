"""Accept: which drafted tokens stand, and the token that the target adds.

Two rules, both exact; greedy rows are served alike by both:

  rejection  Leviathan et al.'s and the paper's (algorithm 1, lines 7-14): accept a
             drafted token with probability min(1, target / draft); at the first
             rejection draw from norm(max(target - draft, 0)); if all stand, draw a
             bonus token from row K + 1. The output has the target's law, and more
             drafted tokens are accepted than by any other rule.
  coupling   drafter-invariant sampling (Daliri, Musco, Suresh, arXiv 2408.07978): draft
             and target draw with the same Gumbel noise, and a drafted token stands if
             the target draws it too. The output is token for token that of plain
             decoding with the same seed, whatever was drafted.
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
) -> base.Acceptance:
  """Applies a rule; under an exact one the emitted tokens follow the target's law.

  Args:
    proposal: K drafted tokens and the logits that they were drawn from; K may be 0,
      which is plain decoding.
    verification: K + 1 rows of target logits.
    settings: per-row sampling. Greedy rows accept what equals the arg max.
    position: [B] int32; output index of the first drafted token.
    rule: a key of `RULES`, or a rule of your own (static).

  Returns:
    The accepted prefix and the recovered or bonus token behind it.
  """
  chosen = rule_of(rule)
  judged = (proposal, verification, settings, position)
  if not chosen.exact:  # it may treat greedy rows otherwise, too
    return chosen.accept(*judged)
  return jax.lax.cond(
    jnp.any(settings.temperature > 0),
    lambda: chosen.accept(*judged),
    lambda: accept_greedy(proposal, verification),
  )


def accept_greedy(
  proposal: base.Proposal, verification: base.Verification
) -> base.Acceptance:
  """The rule where all rows are greedy: compare with the target's arg max."""
  choice = sampling.arg_max(verification.logits)
  agrees = proposal.tokens == choice[:, :-1]
  return base.Acceptance(tokens=choice, accepted=_prefix_length(agrees))


def accept_by_rejection(
  proposal: base.Proposal,
  verification: base.Verification,
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
) -> base.Acceptance:
  """Rejection sampling; greedy rows are one-hot distributions. See `accept`."""
  rows, num_draft_tokens = proposal.tokens.shape
  target_probs = sampling.processed_probs(verification.logits, settings)
  draft_probs = sampling.processed_probs(proposal.logits, settings)

  index = proposal.tokens[..., None]
  target_at = jnp.take_along_axis(target_probs[:, :-1], index, axis=-1)[..., 0]
  draft_at = jnp.take_along_axis(draft_probs, index, axis=-1)[..., 0]
  offsets = position[:, None] + jnp.arange(num_draft_tokens)[None]
  u = _uniform(settings.seed, offsets)
  # Strict, so that u = 0 never accepts a token the target cannot emit; a broken
  # draft row has no mass and is rejected.
  accepted = _prefix_length((u * draft_at < target_at) & (draft_at > 0))

  row = accepted[:, None, None]
  target_row = jnp.take_along_axis(target_probs, row, axis=1)[:, 0]
  # No draft behind the last one: zeros make the bonus token a recovered one.
  draft_rows = jnp.take_along_axis(draft_probs, row, axis=1, mode="fill", fill_value=0)
  draft_row = draft_rows[:, 0]
  residual = jnp.maximum(target_row - draft_row, 0.0)
  # Rounding can leave no residual although a token was rejected.
  empty = jnp.sum(residual, -1, keepdims=True) <= 0
  emitted = sampling.draw(
    jnp.where(empty, target_row, residual),
    settings.seed,
    position + accepted,
    sampling.Purpose.EMIT,
  )
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
  """The target draws every row with the noise that the draft drew with.

  A drafted token stands with probability (1 - TV) / (1 + TV) at least; see `accept`.
  """
  probs = sampling.processed_probs(verification.logits, settings)
  offsets = position[:, None] + jnp.arange(probs.shape[1])[None]
  choice = jax.vmap(
    lambda row, at: sampling.draw(row, settings.seed, at, sampling.Purpose.EMIT),
    in_axes=1,
    out_axes=1,
  )(probs, offsets)
  agrees = proposal.tokens == choice[:, :-1]
  return base.Acceptance(tokens=choice, accepted=_prefix_length(agrees))


class Rule(NamedTuple):
  """An acceptance rule.

  Attributes:
    accept: (proposal, verification, settings, position) -> acceptance.
    draft_noise: purpose of the draft's draws. Under rejection they must be independent
      of the recovered token's; under coupling they are the target's own.
    exact: outputs have the target's law, and greedy rows are the target's arg max
      token for token (`accept` is not asked where all rows are greedy).
    coupled: sampled outputs, too, are plain decoding's token for token.
  """

  accept: Callable[..., base.Acceptance]
  draft_noise: sampling.Purpose = sampling.Purpose.DRAFT
  exact: bool = False
  coupled: bool = False


RULES: dict[str, Rule] = {
  "rejection": Rule(accept_by_rejection, exact=True),
  "coupling": Rule(accept_by_coupling, sampling.Purpose.EMIT, exact=True, coupled=True),
}


def rule_of(rule: str | Rule) -> Rule:
  """The rule of that name in `RULES`, or the rule itself."""
  return RULES[rule] if isinstance(rule, str) else rule


def _prefix_length(passes: Bool[Array, "B K"]) -> Int[Array, " B"]:
  """Length [B] of the leading run of True in [B, K]."""
  return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)


def _uniform(
  seed: UInt32[Array, " B"], position: Int[Array, "B K"]
) -> Float[Array, "B K"]:
  """Uniform draws in [0, 1) for every entry of position [B, K]."""
  if position.shape[1] == 0:
    return jnp.zeros(position.shape, jnp.float32)
  keys = sampling.row_keys(seed, position, sampling.Purpose.ACCEPT)
  return jax.vmap(jax.vmap(jax.random.uniform))(keys)
