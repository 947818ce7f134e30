"""Verify: the target scores all drafted tokens in one call."""

from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base


def verify(
  target: base.Model,
  served: base.Params,
  cache: Any,
  last_token: jax.Array,
  proposal: base.Proposal,
) -> tuple[base.Verification, Any]:
  """Scores last_token and the K drafted tokens (algorithm 1, "verify").

  Args:
    target: the target model.
    served: its prepared parameters.
    cache: its cache, of length c per row.
    last_token: [B] int32, emitted but not yet fed.
    proposal: K drafted tokens per row.

  Returns:
    K + 1 rows of target logits, row i judging the i-th token of this round, and
    the cache of length c + K + 1.
  """
  tokens = jnp.concatenate([last_token[:, None], proposal.tokens], axis=1)
  logits, cache = target.decode(served, tokens, cache)
  return base.Verification(logits), cache
