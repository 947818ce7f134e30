"""Plain decoding with the target alone: the baseline, and what outputs must equal."""

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import speculative
from osd_jax.decoding import state as state_lib


def run_steps(
  target: base.Model,
  until_all: bool,
  target_served: base.Params,
  max_steps: jax.Array,
  state: state_lib.DecodeState,
) -> state_lib.DecodeState:
  """Decodes one token per target call until any, or all, of the rows have stopped.

  A draft's cache stays as it was, behind the tokens.

  Args:
    target: the target model (static).
    until_all: go on until all rows have stopped (static).
    target_served: its prepared parameters.
    max_steps: [] int32.
    state: rows in flight.

  Returns:
    The rows after the last step.
  """

  def step(state: state_lib.DecodeState) -> state_lib.DecodeState:
    logits, cache = target.decode(
      target_served, state.last_token[:, None], state.target_cache
    )
    rows = state.length.shape[0]
    nothing = base.Proposal(
      tokens=jnp.zeros((rows, 0), jnp.int32),
      logits=jnp.zeros((rows, 0, target.vocab_size), jnp.float32),
    )
    verification = base.Verification(logits)
    acceptance = accept_lib.accept(nothing, verification, state.settings, state.length)
    state = state.replace(target_cache=cache)
    return state_lib.append(state, acceptance, verification, 0)

  idle = state.draft_cache  # not carried by the loop: it would be copied
  state = speculative.loop(step, state.replace(draft_cache=None), until_all, max_steps)
  return state.replace(draft_cache=idle)
