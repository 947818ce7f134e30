"""Catch up: the draft is fed the tokens that were emitted while it did not draft.

    a row that emitted t0 .. t9; its draft was fed five inputs; chunks of 3

        position       0    1    2    3    4    5    6    7    8    9   10
        input         BOS   t0   t1   t2   t3   t4   t5   t6   t7   t8   t9
        before        <----- length = 5 ---->
        first chunk                            t4   t5   t6
        second chunk                                          t7   t8   t9
        after         <------------- length = 9 ---------------->

The two newest inputs are for `propose`. What a chunk writes behind the length is never
read and overwritten.
"""

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import state as state_lib

CHUNK = state_lib.MAX_DRAFT_TOKENS  # a chunk at position T still ends in the buffer


def catch_up(
  draft: base.Model, draft_served: base.Params, state: state_lib.DecodeState
) -> state_lib.DecodeState:
  """Feeds chunks until no running row's draft cache lags behind its tokens.

  Rows may lag by different amounts; those that do not lag stay as they are.

  Args:
    draft: the draft model (static).
    draft_served: its prepared parameters.
    state: rows in flight.
  """
  wanted = state_lib.fed_to_draft(state.length)

  def lags(cache) -> jax.Array:
    running = state.stop_reason == base.StopReason.RUNNING
    return jnp.any(running & (cache.length < wanted))

  def feed(cache):
    tokens = state_lib.inputs_at(state, cache.length, CHUNK)
    end = jnp.minimum(cache.length + CHUNK, wanted)
    _, cache = draft.decode(draft_served, tokens, cache)
    return cache.replace(length=end)

  cache = jax.lax.while_loop(lags, feed, state.draft_cache)
  return state.replace(draft_cache=cache)
