"""The loop: rounds of propose, verify, accept, append, in one compiled call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import propose as propose_lib
from osd_jax.decoding import state as state_lib
from osd_jax.decoding import verify as verify_lib


@dataclasses.dataclass(frozen=True)
class Speculation:
  """Who drafts for whom, and how; a static argument.

  Attributes:
    target: the target model.
    draft: the draft model.
    num_draft_tokens: K in 1..8.
    rule: acceptance rule, a key of `accept.RULES`.
  """

  target: base.Model
  draft: base.Model
  num_draft_tokens: int
  rule: str = "rejection"


def run_rounds(
  speculation: Speculation,
  until_all: bool,
  target_served: base.Params,
  draft_served: base.Params,
  max_rounds: jax.Array,
  state: state_lib.DecodeState,
) -> state_lib.DecodeState:
  """Runs rounds until any running row stops, or all have, or `max_rounds` passed.

  Nothing is read back to the host inside. The first two arguments are static:
  one compilation per pair, K and bucket of lengths, none for new settings, requests
  or draft parameters.

  Args:
    speculation: the pair, K and the rule.
    until_all: go on until all rows have stopped, not only one.
    target_served: prepared parameters of the target.
    draft_served: prepared parameters of the draft.
    max_rounds: [] int32.
    state: rows in flight.

  Returns:
    The rows after the last round.
  """

  def round_(state: state_lib.DecodeState) -> state_lib.DecodeState:
    proposal, draft_cache = propose_lib.propose(
      speculation.draft,
      draft_served,
      state.draft_cache,
      state_lib.inputs_at(state, state_lib.fed_to_draft(state.length), 2),
      state.settings,
      state.length,
      speculation.num_draft_tokens,
      accept_lib.RULES[speculation.rule].draft_noise,
    )
    verification, target_cache = verify_lib.verify(
      speculation.target,
      target_served,
      state.target_cache,
      state.last_token,
      proposal,
    )
    acceptance = accept_lib.accept(
      proposal, verification, state.settings, state.length, speculation.rule
    )
    state = state.replace(target_cache=target_cache, draft_cache=draft_cache)
    return state_lib.append(
      state, acceptance, verification, speculation.num_draft_tokens
    )

  return loop(round_, state, until_all, max_rounds)


def loop(
  round_: Any,
  state: state_lib.DecodeState,
  until_all: bool,
  max_rounds: jax.Array,
) -> state_lib.DecodeState:
  """Repeats `round_` until any (or all) of the running rows have stopped."""
  running_at_start = state.stop_reason == base.StopReason.RUNNING

  def goes_on(carry):
    done, state = carry
    running = state.stop_reason == base.StopReason.RUNNING
    if until_all:
      active = jnp.any(running)
    else:
      active = jnp.any(running) & jnp.all(running == running_at_start)
    return active & (done < max_rounds)

  def body(carry):
    done, state = carry
    return done + 1, round_(state)

  _, state = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))
  return state
