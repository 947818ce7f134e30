"""Propose: the draft writes K tokens, one at a time."""

from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import sampling


def propose(
    draft: base.Model,
    served: base.Params,
    cache: Any,
    last_token: jax.Array,
    settings: base.SamplingSettings,
    position: jax.Array,
    num_draft_tokens: int,
    noise: sampling.Purpose = sampling.Purpose.DRAFT,
) -> tuple[base.Proposal, Any]:
  """Drafts K tokens per row (algorithm 1, "run the draft").

  Args:
    draft: the draft model.
    served: its prepared parameters.
    cache: its cache, of length c per row.
    last_token: [B] int32, emitted but not yet fed.
    settings: per-row sampling.
    position: [B] int32; output index of the first drafted token.
    num_draft_tokens: K, static, at least 1.
    noise: what the draws are for; the acceptance rule says (`accept.Rule`).

  Returns:
    The proposal, and the cache of length c + K + 1: the last drafted token is fed
    too, so that nothing is missing after a full acceptance.
  """

  def step(carry, offset):
    token, cache = carry
    logits, cache = draft.decode(served, token[:, None], cache)
    logits = logits[:, 0]
    token = sampling.sample(logits, settings, position + offset, noise)
    return (token, cache), (token, logits)

  (last, cache), (tokens, logits) = jax.lax.scan(
      step, (last_token, cache), jnp.arange(num_draft_tokens)
  )
  _, cache = draft.decode(served, last[:, None], cache)  # for its cache entry only
  proposal = base.Proposal(
      tokens=jnp.swapaxes(tokens, 0, 1), logits=jnp.swapaxes(logits, 0, 1)
  )
  return proposal, cache
