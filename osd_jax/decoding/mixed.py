"""A learned draft mixed with the n-gram cache, token by token.

At every step both name a token: the learned draft its most likely one, the cache the
one with the most votes. The source that has been right more often in such a situation
proposes:

    source          situation                                       accuracy
    learned draft   its top probability, in bins                    right / scored
    cache           matched order, candidates (1 to 3), agreement   right / scored

Both are scored at every emitted position, whether they proposed or not, so nothing has
to be explored. Raw frequencies would not do: a token that was seen once, in one case,
has frequency 1 and is often wrong.

The choice depends only on what is known before a token is drawn, so each position has
one draft distribution: that of the learned draft, or one-hot at the cache's token.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.decoding import drafters, ngrams

# Edges between bins of the learned draft's top probability. Most of a good draft's
# tokens are nearly certain, and there the cache must be very good to be better.
_EDGES = np.asarray([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99])
_MAX_TOTAL, _SHARES = 3, 4
_DRAFT_BINS = len(_EDGES) + 1
_CACHE_BINS = len(ngrams.ORDERS) * _MAX_TOTAL * _SHARES
BINS = _DRAFT_BINS + _CACHE_BINS

_DECAY = 0.995  # of a situation's counts at each new score, so that they follow shifts
_PRIOR = 4.0  # scores that the first estimates count for
_CACHE_PRIOR = 0.3


@flax.struct.dataclass
class Mixture:
  """What a mixed draft serves with.

  Attributes:
    draft: prepared parameters of the learned draft; None in the drafter's memory.
    table: the n-gram cache.
    right: [BINS] float32, how often the named token was emitted.
    scored: [BINS] float32, how often a token was named; both decay.
  """

  draft: Any
  table: ngrams.Table
  right: jax.Array
  scored: jax.Array


@flax.struct.dataclass
class State:
  """Rows in flight.

  A token is fed again once it is emitted, so `named` and `bins` hold, for every
  position before `length`, what was named after the emitted tokens.

  Attributes:
    draft: state of the learned draft.
    text: prompts and outputs.
    named: [B, T, 2] int32; the tokens named after each input, the draft's first.
    bins: [B, T, 2] int32; in which situation; BINS if none was named.
    length: [B] int32; inputs so far. Callers rewind only this one.
  """

  draft: Any
  text: ngrams.Text
  named: jax.Array
  bins: jax.Array
  length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedDraft(drafters.ModelDrafter):
  """A draft model mixed with the n-gram cache.

  Attributes:
    target: the model it drafts for.
    size: tokens of served answers that the cache keeps.
  """

  target: base.Model
  size: int

  def init(
    self,
    params: Any,
    source: jax.Array,
    target_states: jax.Array | None,
    cache_length: int,
  ) -> State:
    """Prefills both sources; see `Drafter.init`."""
    draft = super().init(params.draft, source, target_states, cache_length)
    text = ngrams.start(self.target, source, self.model.mask(source), cache_length)
    shape = (source.shape[0], cache_length, 2)
    named, bins = jnp.zeros(shape, jnp.int32), jnp.full(shape, BINS, jnp.int32)
    return State(draft, text, named, bins, text.length)

  def decode(
    self, params: Any, tokens: jax.Array, state: State
  ) -> tuple[jax.Array, State]:
    """Feeds both sources; the logits are those of the one that proposes."""
    length = state.length
    logits, draft = self.model.decode(
      params.draft, tokens, state.draft.replace(length=length)
    )
    vote, text = ngrams.advance(params.table, tokens, state.text.replace(length=length))
    named = jnp.stack([_arg_max(logits), vote.token], axis=-1)
    bins = jnp.stack([_draft_bin(logits), _cache_bin(vote)], axis=-1)
    accuracy = (params.right / params.scored).at[bins].get(mode="fill", fill_value=-1.0)
    by_cache = accuracy[..., 1] > accuracy[..., 0]
    one_hot = ngrams.one_hot(vote.token, logits.shape[-1])
    state = State(
      draft=draft,
      text=text,
      named=_write(state.named, named, length),
      bins=_write(state.bins, bins, length),
      length=length + tokens.shape[1],
    )
    return jnp.where(by_cache[..., None], one_hot, logits), state

  def memory(self) -> Mixture:
    """An empty cache, and scores that believe the learned draft."""
    edges = np.concatenate([[0.0], _EDGES, [1.0]])
    right = np.concatenate(
      [(edges[1:] + edges[:-1]) / 2, np.full(_CACHE_BINS, _CACHE_PRIOR)]
    )
    return Mixture(
      draft=None,
      table=ngrams.empty(self.size),
      right=jnp.asarray(right * _PRIOR, jnp.float32),
      scored=jnp.full((BINS,), _PRIOR, jnp.float32),
    )

  def with_memory(self, prepared: base.Params, memory: Any) -> Mixture:
    """Returns the mixture with this learned draft."""
    return memory.replace(draft=prepared)

  def absorb(
    self,
    memory: Any,
    state: State | None,
    source: jax.Array,
    emitted: jax.Array,
    length: jax.Array,
  ) -> Mixture:
    """Adds the answer to the cache, and scores all tokens that were named for it."""
    table = ngrams.absorb(self.target, memory.table, source, emitted, length)
    if state is None:
      return memory.replace(table=table)
    count = emitted.shape[0]
    # Entry i was named for `emitted[i]`, once inputs 0..i had been fed.
    is_scored = jnp.arange(count) < jnp.minimum(length, state.length[0])
    bins = jnp.where(is_scored[:, None], state.bins[0, :count], BINS)
    right = (state.named[0, :count] == emitted[:, None]).astype(jnp.float32)
    zeros = jnp.zeros((BINS,), jnp.float32)
    scored = zeros.at[bins].add(1.0, mode="drop")
    decay = _DECAY**scored
    return Mixture(
      draft=None,
      table=table,
      right=memory.right * decay + zeros.at[bins].add(right, mode="drop"),
      scored=memory.scored * decay + scored,
    )


def _arg_max(logits: jax.Array) -> jax.Array:
  return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draft_bin(logits: jax.Array) -> jax.Array:
  """Bin of the top probability [B, n]; BINS, which is never chosen, if it is NaN."""
  largest = jnp.max(logits, axis=-1, keepdims=True)
  probability = 1 / jnp.sum(jnp.exp(logits - largest), axis=-1)
  index = jnp.sum(
    probability[..., None] >= _EDGES[None, None], axis=-1, dtype=jnp.int32
  )
  return jnp.where(jnp.isfinite(probability), index, BINS)


def _cache_bin(vote: ngrams.Vote) -> jax.Array:
  """Bin of a vote [B, n]; BINS if nothing matched."""
  order = jnp.sum(
    vote.order[..., None] > np.asarray(ngrams.ORDERS)[None, None], axis=-1
  )
  total = jnp.minimum(vote.total, _MAX_TOTAL) - 1
  # The share of the votes, rounded to thirds.
  share = (6 * vote.votes + vote.total) // jnp.maximum(2 * vote.total, 1)
  index = _DRAFT_BINS + (order * _MAX_TOTAL + total) * _SHARES + share
  return jnp.where(vote.order > 0, index, BINS).astype(jnp.int32)


def _write(stored: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
  both = [ngrams.write(stored[..., i], new[..., i], at) for i in (0, 1)]
  return jnp.stack(both, axis=-1)
