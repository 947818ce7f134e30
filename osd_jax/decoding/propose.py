"""Propose: the draft writes K tokens, one at a time.

Its first step of a round reads the two newest tokens: the last drafted token of the
round before was never fed, and is in the text if all were accepted. So K steps draft K
tokens, and a second column costs hardly more than one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import sampling


def propose(
  draft: base.Model,
  served: base.Params,
  cache: Any,
  newest: jax.Array,
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
    newest: [B, 2] int32, the last two inputs, of which it was fed none or the first;
      at position 0 the start token and anything.
    settings: per-row sampling.
    position: [B] int32; output index of the first drafted token.
    num_draft_tokens: K, static, at least 1.
    noise: what the draws are for; the acceptance rule says (`accept.Rule`).

  Returns:
    The proposal, and the cache of length c + K + 1 (c + K at position 0): all but the
    last drafted token is fed.
  """

  def draw(logits, offset):
    return sampling.sample(logits, settings, position + offset, noise)

  def step(carry, offset):
    token, cache = carry
    logits, cache = draft.decode(served, token[:, None], cache)
    token = draw(logits[:, 0], offset)
    return (token, cache), (token, logits[:, 0])

  begun = (position > 0).astype(jnp.int32)
  length = cache.length + begun + 1
  both, cache = draft.decode(served, newest, cache)
  cache = cache.replace(length=length)
  logits = jnp.take_along_axis(both, begun[:, None, None], axis=1)
  first = draw(logits[:, 0], 0)
  if num_draft_tokens == 1:
    return base.Proposal(first[:, None], logits), cache
  (_, cache), (tokens, later) = jax.lax.scan(
    step, (first, cache), jnp.arange(1, num_draft_tokens)
  )
  tokens, later = jnp.swapaxes(tokens, 0, 1), jnp.swapaxes(later, 0, 1)
  proposal = base.Proposal(
    tokens=jnp.concatenate([first[:, None], tokens], axis=1),
    logits=jnp.concatenate([logits, later], axis=1),
  )
  return proposal, cache
