"""The state that the decode loop carries, and `append`, which adds a round's tokens."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from osd_jax import base, native
from osd_jax import cache as cache_lib
from osd_jax.decoding import sampling

MAX_DRAFT_TOKENS = 16  # every buffer leaves room for one round of the largest K


@flax.struct.dataclass
class Counters:
  """Totals over the rounds of a row.

  Attributes:
    rounds: [B] int32; target calls.
    drafted: [B] int32; drafted tokens that were judged and could be emitted.
    accepted: [B] int32; drafted tokens that were accepted and emitted.
    accepted_per_position: [B, MAX_DRAFT_TOKENS] int32; rounds that accepted the
      i-th drafted token.
    drafted_by_cache: [B] int32; those of `drafted` that the n-gram cache named.
    accepted_by_cache: [B] int32; those of `accepted` that it named.
  """

  rounds: jax.Array
  drafted: jax.Array
  accepted: jax.Array
  accepted_per_position: jax.Array
  drafted_by_cache: jax.Array
  accepted_by_cache: jax.Array


@flax.struct.dataclass
class DecodeState:
  """Rows in flight. Every leaf has the row axis first.

  Attributes:
    start: [B] int32; the first input of both models, see `base.Model.start`.
    tokens: [B, T + MAX_DRAFT_TOKENS + 1] int32; emitted tokens, valid to `length`.
    length: [B] int32.
    last_token: [B] int32; emitted (or the start token) but not yet fed.
    stop_reason: [B] int32, a `base.StopReason`.
    settings: per-row sampling.
    target_cache: the target's cache.
    draft_cache: state of the drafter (a model's cache), None without a draft. It has
      seen at most `fed_to_draft` inputs; after plain steps its length is shorter.
    records: target distributions at emitted positions, valid to `length`, or None.
    counters: totals over the rounds.
    prompt: [B, S] int32; see `base.Model.prompt_text`.
  """

  start: jax.Array
  tokens: jax.Array
  length: jax.Array
  last_token: jax.Array
  stop_reason: jax.Array
  settings: base.SamplingSettings
  target_cache: Any
  draft_cache: Any
  records: base.Records | None
  counters: Counters
  prompt: jax.Array | None

  @property
  def text(self) -> jax.Array:
    """[B, L] int32; the tokens that a repetition penalty counts, and -1 elsewhere.

    As in transformers these are the decoder's inputs, start token included, and the
    last emitted token.
    """
    position = jnp.arange(self.tokens.shape[1])[None]
    emitted = jnp.where(position < self.length[:, None], self.tokens, -1)
    parts = [self.start[:, None], emitted]
    if self.prompt is not None:
      parts.append(self.prompt)
    return jnp.concatenate(parts, axis=1)


@flax.struct.dataclass
class Judgement:
  """What a round found out about its tokens, without the logits.

  Attributes:
    acceptance: tokens of the round and the length of the accepted prefix.
    is_broken: [B, K + 1] bool; rows of target logits from which no token can follow.
    records: [B, K + 1] the target's distributions, or None.
  """

  acceptance: base.Acceptance
  is_broken: jax.Array
  records: base.Records | None

  @classmethod
  def of(
    cls,
    acceptance: base.Acceptance,
    verification: base.Verification,
    records: base.Records | None,
  ) -> "Judgement":
    """Keeps what `append` needs of the target's logits."""
    return cls(acceptance, _broken(verification, acceptance), records)

  def padded(self, count: int) -> "Judgement":
    """Adds tokens, which are not emitted, so that there are `count`."""

    def pad(leaf):
      if leaf.ndim == 1:  # the number of accepted tokens
        return leaf
      spare = count - leaf.shape[1]
      return jnp.pad(leaf, ((0, 0), (0, spare), *[(0, 0)] * (leaf.ndim - 2)))

    return jax.tree.map(pad, self)


def buffer_length(target_length: int) -> int:
  """Slots of every per-token buffer for outputs of up to `target_length` tokens.

  A round may write K + 1 entries at the last position, and a clamped write would
  land on earlier ones.
  """
  return target_length + MAX_DRAFT_TOKENS + 1


def fed_to_draft(length: jax.Array) -> jax.Array:
  """Returns the number of inputs that a draft has been fed between rounds.

  A row with `length` [B] emitted tokens has length + 1 inputs, and the draft has been
  fed all but the last two; see `ModelDrafter.propose`.
  """
  return jnp.maximum(length - 1, 0)


def inputs_at(state: DecodeState, start: jax.Array, count: int) -> jax.Array:
  """Returns the models' inputs at some positions: start token, then emitted tokens.

  Args:
    state: rows in flight with their emitted tokens.
    start: [B] int32, the first position of each row.
    count: n, the number of positions (static).

  Returns:
    [B, n] int32; undefined after position `length`.
  """
  position = start[:, None] + jnp.arange(count)[None]
  before = jnp.take_along_axis(state.tokens, jnp.maximum(position - 1, 0), axis=1)
  return jnp.where(position == 0, state.start[:, None], before)


def initial_state(
  start: jax.Array,
  settings: base.SamplingSettings,
  target_cache: Any,
  draft_cache: Any,
  target_length: int,
  record_top_k: int,
  vocab_size: int,
  prompt: jax.Array | None = None,
) -> DecodeState:
  """Returns rows that have been prefilled and have emitted nothing.

  Args:
    start: [B] int32, the first inputs; see `base.Model.starts`.
    settings: [B] per-row sampling; max_length is cut to `target_length`.
    target_cache: cache that the target's prefill returned.
    draft_cache: cache that the draft's prefill returned, or None.
    target_length: T, the most tokens that a row can emit.
    record_top_k: k, entries kept per position; 0 records nothing.
    vocab_size: V, which decides the type of recorded ids.
    prompt: [B, S] int32 or None; see `base.Model.prompt_text`.
  """
  rows = settings.seed.shape[0]
  zeros = jnp.zeros((rows,), jnp.int32)
  return DecodeState(
    start=start,
    tokens=jnp.zeros((rows, buffer_length(target_length)), jnp.int32),
    length=zeros,
    last_token=start,
    # A plain int: an enum makes a weak type, and a second compilation with it.
    stop_reason=jnp.full((rows,), int(base.StopReason.RUNNING), jnp.int32),
    settings=settings.replace(
      max_length=jnp.minimum(settings.max_length, target_length)
    ),
    target_cache=target_cache,
    draft_cache=draft_cache,
    records=base.empty_records(
      rows, buffer_length(target_length), record_top_k, vocab_size
    )
    if record_top_k
    else None,
    counters=Counters(
      rounds=zeros,
      drafted=zeros,
      accepted=zeros,
      accepted_per_position=jnp.zeros((rows, MAX_DRAFT_TOKENS), jnp.int32),
      drafted_by_cache=zeros,
      accepted_by_cache=zeros,
    ),
    prompt=prompt,
  )


def append(
  state: DecodeState,
  judgement: Judgement,
  proposal: base.Proposal,
  eos_ids: tuple[int, ...] = (base.EOS_ID,),
) -> DecodeState:
  """Adds a round's tokens and records; cuts at end-of-sequence and at the limit.

  A row whose target is broken (NaN, +inf, or no token possible) ends before the token
  that this row of logits would have judged.

  Args:
    state: rows before the round; their caches may already be those after it.
    judgement: the round's tokens, and what the target said of them.
    proposal: the drafted tokens; K may be 0.
    eos_ids: tokens that end a sequence.

  Returns:
    The rows after the round, with the target's cache rewound to the emitted tokens. The
    draft's cache is left to `ModelDrafter.observe`. Stopped rows do not change.
  """
  acceptance, tokens = judgement.acceptance, judgement.acceptance.tokens
  num_draft_tokens = tokens.shape[1] - 1
  offset = jnp.arange(tokens.shape[1])[None]
  running = state.stop_reason == base.StopReason.RUNNING
  count, stop_reason = _cut(state, judgement, eos_ids)
  length = state.length + count
  last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
  # A bonus token follows the last proposed one; nothing was rejected there.
  proposed = jnp.pad(proposal.is_proposed, ((0, 0), (0, 1)))
  error = (offset == acceptance.accepted[:, None]) & proposed
  # Drafted tokens after a cut were judged by the rule, but could not be emitted.
  # Counting them would lower the acceptance of short answers.
  is_counted = (offset[:, :-1] < count[:, None]) & proposal.is_proposed
  passed = is_counted & (offset[:, :-1] < acceptance.accepted[:, None])
  spare = MAX_DRAFT_TOKENS - num_draft_tokens
  by_cache = jnp.zeros((), bool) if proposal.by_cache is None else proposal.by_cache
  counters = Counters(
    rounds=state.counters.rounds + running,
    drafted=state.counters.drafted + jnp.sum(is_counted, axis=1),
    accepted=state.counters.accepted + jnp.sum(passed, axis=1),
    accepted_per_position=state.counters.accepted_per_position
    + jnp.pad(passed, ((0, 0), (0, spare))),
    drafted_by_cache=state.counters.drafted_by_cache
    + jnp.sum(is_counted & by_cache, axis=1),
    accepted_by_cache=state.counters.accepted_by_cache
    + jnp.sum(passed & by_cache, axis=1),
  )
  return state.replace(
    tokens=_write_block(state.tokens, tokens, state.length, running),
    length=length,
    last_token=jnp.where(running, last, state.last_token),
    stop_reason=stop_reason,
    # Length before the round = tokens emitted: the start token is fed, the last
    # emitted one is not.
    target_cache=state.target_cache.replace(length=length),
    records=_record(state, judgement.records, error, running),
    counters=counters,
  )


def _cut(
  state: DecodeState, judgement: Judgement, eos_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """Number of a round's tokens that are emitted [B], and the new stop reasons [B]."""
  acceptance = judgement.acceptance
  running = state.stop_reason == base.StopReason.RUNNING
  offset = jnp.arange(acceptance.tokens.shape[1])[None]
  count = jnp.where(running, acceptance.accepted + 1, 0)
  room = state.settings.max_length - state.length
  # The order matters: a broken row or end-of-sequence after the length limit is never
  # emitted, so it must not become the reason.
  count = jnp.minimum(count, room)
  is_broken = judgement.is_broken & (offset < count[:, None])
  breaks = jnp.any(is_broken, axis=1)
  count = jnp.where(breaks, jnp.argmax(is_broken, axis=1), count)
  is_eos = _is_any(acceptance.tokens, eos_ids) & (offset < count[:, None])
  ends = jnp.any(is_eos, axis=1)
  count = jnp.where(ends, jnp.argmax(is_eos, axis=1) + 1, count)
  full = running & (state.length + count >= state.settings.max_length)
  # Later lines win: an end-of-sequence token in the last free place counts as EOS.
  reason = jnp.where(full, int(base.StopReason.LENGTH), state.stop_reason)
  reason = jnp.where(breaks, int(base.StopReason.NOT_FINITE), reason)
  reason = jnp.where(ends, int(base.StopReason.EOS), reason)
  return count, reason.astype(jnp.int32)


def _is_any(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
  return functools.reduce(jnp.logical_or, [tokens == token for token in ids])


def _broken(verification: base.Verification, acceptance: base.Acceptance) -> jax.Array:
  """Which target rows [B, K + 1] are unusable: a NaN, a +inf, or no possible token.

  A single -inf is a token that cannot be emitted, which is fine. One sum per row finds
  the other values; a search for NaNs would be scalar on a CPU.
  """
  logits = verification.logits
  # `jnp.maximum` would lose a NaN on XLA CPU.
  bounded = jnp.where(logits < _LEAST, _LEAST, logits)
  total = sampling.sums(bounded)
  emitted = jnp.take_along_axis(logits, acceptance.tokens[..., None], axis=-1)[..., 0]
  return ~(total < jnp.inf) | (emitted == -jnp.inf)


_LEAST = -1e30


def _record(state, block, error, running):
  if state.records is None:
    return None
  block = block.replace(error=error)
  return jax.tree.map(
    lambda stored, new: _write_block(stored, new, state.length, running),
    state.records,
    block,
  )


def _write_block(
  stored: jax.Array, block: jax.Array, start: jax.Array, running: jax.Array
) -> jax.Array:
  """Writes [B, n, ...] at per-row offsets of [B, T, ...]; stopped rows keep theirs."""
  if not native.forms():
    # `select` does not write a row whose start is past the end.
    nowhere = stored.shape[1]
    return cache_lib.select(stored, block, jnp.where(running, start, nowhere), axis=1)

  def one(row, new, at, write):
    zeros = (0,) * (row.ndim - 1)
    old = jax.lax.dynamic_slice(row, (at, *zeros), new.shape)
    new = jnp.where(write, new.astype(row.dtype), old)
    return jax.lax.dynamic_update_slice(row, new, (at, *zeros))

  if stored.shape[0] == 1:  # one row needs no scatter
    return one(stored[0], block[0], start[0], running[0])[None]
  return jax.vmap(one)(stored, block, start, running)
