"""The loop of algorithm 1 in one compiled call: propose, verify, accept, append.

    text so far     t0 t1 t2                      (t2 was not read by the target yet)
    propose         d0 d1 d2                      K = 3 draft steps
    verify          rows after t2 d0 d1 d2        one target call, K + 1 rows
    accept          d0 d1 | r                     d2 is rejected, r drawn from row 2
    append          t0 t1 t2 d0 d1 r              caches rewound to what was emitted

K = 0 is plain decoding: the same round with nothing proposed. Read downwards:
`run_rounds` is the loop, what it calls stands below it in the order it happens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base, sharding
from osd_jax.decoding import accept as accept_lib
from osd_jax.decoding import sampling
from osd_jax.decoding import state as state_lib


@dataclasses.dataclass(frozen=True)
class Speculation:
  """Who drafts for whom, and how; a static argument.

  Attributes:
    target: the target model.
    draft: the draft model; None only where nothing is drafted.
    num_draft_tokens: K in 0..8; 0 decodes plainly.
    rule: acceptance rule, a key of `accept.RULES` or a rule of your own.
    draft_is_whole: on a mesh, every device has the whole draft. Its logits are kept
      whole then: XLA would split its head to suit the target's.
  """

  target: base.Model
  draft: base.Model | None
  num_draft_tokens: int
  rule: str | accept_lib.Rule = "rejection"
  draft_is_whole: bool = False


def run_rounds(
  speculation: Speculation,
  target_served: base.Params,
  draft_served: base.Params,
  max_rounds: jax.Array,
  state: state_lib.DecodeState,
) -> state_lib.DecodeState:
  """Runs rounds until any running row stops or `max_rounds` have passed.

  Nothing is read back to the host inside. One compilation per pair, K and bucket of
  lengths; none for new settings, requests or draft parameters.

  Args:
    speculation: the pair, K and the rule (static).
    target_served: prepared parameters of the target.
    draft_served: prepared parameters of the draft; not read where K is 0.
    max_rounds: [] int32.
    state: rows in flight.

  Returns:
    The rows after the last round.
  """
  running_at_start = state.stop_reason == base.StopReason.RUNNING
  idle_cache = state.draft_cache
  if not speculation.num_draft_tokens:
    state = state.replace(draft_cache=None)  # carried by the loop it would be copied

  def goes_on(carry):
    done, state = carry
    running = state.stop_reason == base.StopReason.RUNNING
    none_stopped = jnp.any(running) & jnp.all(running == running_at_start)
    return none_stopped & (done < max_rounds)

  def body(carry):
    done, state = carry
    return done + 1, one_round(speculation, target_served, draft_served, state)

  _, state = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))
  if not speculation.num_draft_tokens:
    state = state.replace(draft_cache=idle_cache)
  return state


def one_round(
  speculation: Speculation,
  target_served: base.Params,
  draft_served: base.Params,
  state: state_lib.DecodeState,
) -> state_lib.DecodeState:
  """One round of algorithm 1, lines 4 to 14; stopped rows stay as they are."""
  proposal, draft_cache = propose(speculation, draft_served, state)
  verification, target_cache = verify(
    speculation.target, target_served, state.target_cache, state.last_token, proposal
  )
  acceptance = accept_lib.accept(
    proposal, verification, state.settings, state.length, speculation.rule
  )
  state = state.replace(target_cache=target_cache, draft_cache=draft_cache)
  return state_lib.append(
    state,
    acceptance,
    verification,
    speculation.num_draft_tokens,
    speculation.target.eos_ids,
  )


def propose(
  speculation: Speculation, draft_served: base.Params, state: state_lib.DecodeState
) -> tuple[base.Proposal, Any]:
  """Drafts K tokens per row, one at a time (algorithm 1, "run the draft").

  The first step of a round reads the two newest inputs: the last drafted token of the
  round before was never fed, and is in the text if all were accepted. So K steps draft
  K tokens, and a second column costs hardly more than one.

  Args:
    speculation: the draft, K, and the rule that says what the draws are for.
    draft_served: prepared parameters of the draft.
    state: rows in flight; the draft's cache has length c per row, all inputs but the
      two newest (at position 0: none of them).

  Returns:
    The proposal, and the cache of length c + K + 1 (c + K at position 0): all but the
    last drafted token is fed. For K = 0 nothing, and the cache as it was.
  """
  draft, num_draft_tokens = speculation.draft, speculation.num_draft_tokens
  if draft is None or not num_draft_tokens:
    return _nothing(speculation.target, state), state.draft_cache
  position, noise = state.length, accept_lib.rule_of(speculation.rule).draft_noise

  def draw(logits, offset):
    return sampling.sample(logits, state.settings, position + offset, noise)

  def kept(logits):
    return sharding.split_rows_only(logits) if speculation.draft_is_whole else logits

  def step(carry, offset):
    token, cache = carry
    logits, cache = draft.decode(draft_served, token[:, None], cache)
    logits = kept(logits)
    token = draw(logits[:, 0], offset)
    return (token, cache), (token, logits[:, 0])

  newest = state_lib.inputs_at(state, state_lib.fed_to_draft(position), 2)
  begun = (position > 0).astype(jnp.int32)  # at position 0 the second one is stale
  length = state.draft_cache.length + begun + 1
  both, cache = draft.decode(draft_served, newest, state.draft_cache)
  cache = cache.replace(length=length)
  logits = kept(jnp.take_along_axis(both, begun[:, None, None], axis=1))
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


def verify(
  target: base.Model,
  served: base.Params,
  cache: Any,
  last_token: jax.Array,
  proposal: base.Proposal,
) -> tuple[base.Verification, Any]:
  """Scores last_token and the K drafted tokens in one call (algorithm 1, "verify").

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


def _nothing(target: base.Model, state: state_lib.DecodeState) -> base.Proposal:
  """A proposal of no tokens."""
  rows = state.length.shape[0]
  return base.Proposal(
    tokens=jnp.zeros((rows, 0), jnp.int32),
    logits=jnp.zeros((rows, 0, target.vocab_size), jnp.float32),
  )
