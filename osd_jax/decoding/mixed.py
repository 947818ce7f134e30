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

In sampled rows the learned draft draws its tokens, and "right" is an accepted token:
the token that the target emits equals the drawn one with the probability that the rule
accepts it, whatever the two distributions. Where the cache proposed, nothing was drawn,
and the most likely token stands in, weighted by how often drawn and most likely tokens
were right where the draft proposed. Greedy and sampled rows have bins of their own.

The choice depends only on what is known before a token is drawn, so each position has
one draft distribution: that of the learned draft, or one-hot at the cache's token.

The accuracies also say how much to draft. A drafted token survives if it and all before
it are right, so its survival is the product of their accuracies. The next token is
expected to survive with this product times the mean accuracy of all tokens (here .8),
and drafting goes on while that is worth its price:

    accuracy            .95    .9    .5    .9     of the tokens named so far
    survival            .95   .86   .43   .38
    times .8            .76   .68   .34   .31
    price of the next   .32   .32   .32   .32     four are drafted: .31 < .32

Where there is no learned draft, and while it rests because it does not pay
(`Mixture.resting`), the cache drafts alone in the same way (`NgramDrafter`). Its first
token costs no step of a draft, so it is only proposed if verifying it is worth the
price.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.decoding import drafters, ngrams, sampling
from osd_jax.decoding import state as state_lib

# Edges between bins of the learned draft's top probability. Most of a good draft's
# tokens are nearly certain, and there the cache must be very good to be better.
_EDGES = np.asarray([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99])
_MAX_TOTAL, _SHARES = 3, 4
DRAFT_BINS = len(_EDGES) + 1
_CACHE_BINS = len(ngrams.ORDERS) * _MAX_TOTAL * _SHARES
SAMPLED_BINS = DRAFT_BINS + _CACHE_BINS  # where the draft's bins in sampled rows begin
BINS = SAMPLED_BINS + DRAFT_BINS
_ANY = BINS  # all situations together: the token of the source that would propose
_NONE = BINS + 1  # a source names no token

_DECAY = 0.995  # of a situation's counts at each new score, so that they follow shifts
_PRIOR = 4.0  # scores that the first estimates count for
_CACHE_PRIOR, _ANY_PRIOR = 0.3, 0.7
# In sampled rows the draft has to be tried before its acceptance is known, so it begins
# with the best.
_SAMPLED_PRIOR = 1.0
_MAX_WEIGHT = 4.0  # of a most likely token that is scored in place of a drawn one


@flax.struct.dataclass
class Memory:
  """The n-gram cache, with the scores of both sources.

  Attributes:
    draft: prepared parameters of the learned draft while serving; otherwise None.
    table: the n-gram cache.
    right: [BINS + 1] float32, how often the named token was emitted; the last entry
      is for whichever source would have proposed.
    scored: [BINS + 1] float32, how often a token was named; both decay.
    drawn_right: [BINS + 1] float32, where the learned draft proposed, how often the
      drawn token was emitted.
    top_right: [BINS + 1] float32, how often its most likely one was, in these places.
  """

  draft: Any
  table: ngrams.Table
  right: jax.Array
  scored: jax.Array
  drawn_right: jax.Array
  top_right: jax.Array


@flax.struct.dataclass
class State:
  """Rows in flight.

  A token is fed again once it is emitted, so `named` and `bins` hold, for every
  position before `length`, what was named after the emitted tokens.

  Attributes:
    draft: state of the learned draft, if there is one; behind the other fields after
      it has rested.
    text: prompts and outputs.
    named: [B, T, 2] int32; the tokens named after each input, the draft's first.
    bins: [B, T, 2] int32; in which situation; BINS + 1 if none was named.
    drawn: [B, T] int32; the token that the learned draft proposed after each input; -1
      if the cache proposed, or nobody.
    is_sampled: [B] bool.
    length: [B] int32; inputs so far. Callers rewind only this one.
  """

  draft: Any
  text: ngrams.Text
  named: jax.Array
  bins: jax.Array
  drawn: jax.Array
  is_sampled: jax.Array
  length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramDrafter(drafters.ModelDrafter):
  """The n-gram cache alone.

  Its `model` is that of the cache, see `ngrams.build`, or a learned draft that rests,
  whose state is kept unchanged.

  Attributes:
    target: the model it drafts for.
    size: tokens of served answers that the cache keeps.
    widths: see `DecodeSpec.widths`.
  """

  target: base.Model
  size: int
  widths: tuple[int, ...] = ()

  def init(
    self,
    params: Any,
    source: jax.Array,
    target_states: jax.Array | None,
    cache_length: int,
    read: Any = None,
  ) -> State:
    """Keeps the prompts; see `ModelDrafter.init`."""
    text = ngrams.start(self.target, source, self.model.mask(source), cache_length)
    shape = (source.shape[0], cache_length, 2)
    tokens, bins = jnp.zeros(shape, jnp.int32), jnp.full(shape, _NONE, jnp.int32)
    return State(
      draft=None,
      text=text,
      named=tokens,
      bins=bins,
      drawn=jnp.full(shape[:2], -1, jnp.int32),
      is_sampled=jnp.zeros(shape[:1], bool),
      length=text.length,
    )

  def reader(self, params: Any) -> list[tuple[base.Model, base.Params]]:
    """See `ModelDrafter.reader`; the cache alone reads a prompt at once."""
    return []

  def decode(
    self,
    params: Any,
    tokens: jax.Array,
    state: State,
    states: jax.Array | None = None,
  ) -> tuple[jax.Array, State]:
    """Appends tokens to the texts; the logits are one-hot."""
    del states
    vote, token, text = self._look_up(params, tokens, state)
    none = jnp.full(token.shape, _NONE, jnp.int32)
    bins = jnp.stack([none, _cache_bin(vote)], axis=-1)
    state = _advanced(state, text, jnp.stack([token, token], axis=-1), bins)
    return ngrams.one_hot(token, self.target.vocab_size), state

  def _look_up(
    self, params: Any, tokens: jax.Array, state: State
  ) -> tuple[ngrams.Vote, jax.Array, ngrams.Text]:
    """The cache's vote after each token [B, n], its token, and the longer texts."""
    text = state.text.replace(length=state.length)
    vote, text = ngrams.advance(params.table, tokens, text)
    # Where nothing matches, the last token is repeated.
    return vote, jnp.where(vote.order > 0, vote.token, tokens), text

  def fed(self, state: State) -> jax.Array:
    """See `ModelDrafter.fed`."""
    return state.length if state.draft is None else state.draft.length

  def propose(
    self,
    params: Any,
    state: State,
    rows: state_lib.DecodeState,
    num_draft_tokens: int,
    noise: sampling.Purpose,
    prices: jax.Array | None = None,
  ) -> tuple[base.Proposal, Any]:
    """Drafts while the next token is worth its price; see `ModelDrafter.propose`."""
    if prices is None:
      proposal, state = super().propose(params, state, rows, num_draft_tokens, noise)
      tokens, logits = proposal.tokens, proposal.logits
      return self._proposal(params, state, rows, tokens, logits), state
    drafted, logits, state = self.first(params, state, rows, num_draft_tokens, noise)
    running = rows.stop_reason == base.StopReason.RUNNING
    running = running & rows.settings.speculative
    survival = self._first_survival(self._survival(params, state), running, prices[0])
    shape = (*drafted.shape, logits.shape[-1])
    all_logits = jnp.zeros(shape, logits.dtype).at[:, 0].set(logits)
    is_proposed = jnp.zeros(drafted.shape, bool)
    is_proposed = is_proposed.at[:, 0].set(_is_proposed(survival, prices[0]))
    all_survival = jnp.zeros(drafted.shape).at[:, 0].set(survival)
    mean = params.right[_ANY] / params.scored[_ANY]

    def continues(carry):
      offset, survival = carry[:2]
      # A step drafts for all rows, so together they must be worth it.
      worth = jnp.sum(jnp.where(running, survival, 0.0)) * mean
      return (offset < num_draft_tokens) & (worth >= prices.at[offset].get(mode="clip"))

    def step(carry):
      offset, survival, drafted, all_logits, is_proposed, all_survival, state = carry
      drafted, logits, state = self.next(params, state, rows, drafted, offset, noise)
      survival = survival * self._survival(params, state)
      passes = _is_proposed(survival, prices[offset])
      is_proposed = is_proposed.at[:, offset].set(passes)
      all_logits = all_logits.at[:, offset].set(logits)
      all_survival = all_survival.at[:, offset].set(survival)
      return offset + 1, survival, drafted, all_logits, is_proposed, all_survival, state

    carry = (jnp.int32(1), survival, drafted, all_logits, is_proposed, all_survival)
    _, _, drafted, all_logits, is_proposed, all_survival, state = jax.lax.while_loop(
      continues, step, (*carry, state)
    )
    # Survival never rises, so the proposed tokens are a prefix.
    lengths = jnp.sum(is_proposed, axis=1, dtype=jnp.int32)
    all_survival = jnp.where(running[:, None] & is_proposed, all_survival, 0.0)
    lengths = jnp.minimum(lengths, self._most(jnp.sum(all_survival, axis=0), prices))
    drafted = jnp.maximum(drafted, 0)
    return self._proposal(params, state, rows, drafted, all_logits, lengths), state

  def _proposal(
    self,
    params: Any,
    state: State,
    rows: state_lib.DecodeState,
    tokens: jax.Array,
    logits: jax.Array | None,
    lengths: jax.Array | None = None,
  ) -> base.Proposal:
    """A deterministic proposal."""
    del params, state, rows, logits
    return base.Proposal(tokens, None, lengths, jnp.ones(tokens.shape, bool))

  def _most(self, survival: jax.Array, prices: jax.Array) -> jax.Array | int:
    """Most tokens that are worth verifying; `survival` [K] is summed over the rows.

    A verification takes as long as the smallest width that holds the tokens, so a
    single token is worth little if it has to pay for three.
    """
    if not self.widths:
      return len(prices)
    gains = jnp.cumsum(survival) - jnp.cumsum(prices)
    widths = np.asarray([*self.widths[::-1], 0])
    gains = jnp.where(widths > 0, gains[widths - 1], 0.0)
    return jnp.asarray(widths)[jnp.argmax(gains)]

  def _first_survival(
    self, survival: jax.Array, running: jax.Array, price: jax.Array
  ) -> jax.Array:
    """Survival [B] of the first token: 0 if verifying it is not worth its price."""
    worth = jnp.sum(jnp.where(running, survival, 0.0))
    return jnp.where(worth >= price, survival, 0.0)

  def _drawn(self, logits, rows, drafted, offset, noise):
    del rows, drafted, offset, noise
    return sampling.arg_max(logits), logits

  def _fed_again(
    self, params: Any, cache: State, rows: state_lib.DecodeState, drafted: int
  ) -> State:
    # What the cache names does not depend on the target's states.
    del params, drafted
    return _with_settings(cache, rows)

  def _from_input(self, cache: State, index: jax.Array) -> State:
    del index
    return cache

  def _with_drawn(self, params: Any, state: State, token: jax.Array) -> State:
    """Notes the tokens [B] that were drawn after the newest inputs."""
    at = state.length - 1
    bins = jnp.take_along_axis(state.bins, at[:, None, None], axis=1)[:, 0]
    token = jnp.where(is_by_cache(params, bins), -1, token)
    return state.replace(drawn=ngrams.write(state.drawn, token[:, None], at))

  def observe(self, state: State, rows: state_lib.DecodeState) -> State:
    """Rewinds the texts, and forgets tokens that were drawn but not judged."""
    is_judged = jnp.arange(state.drawn.shape[1])[None] < rows.length[:, None]
    is_judged = is_judged & rows.settings.speculative[:, None]
    state = state.replace(drawn=jnp.where(is_judged, state.drawn, -1))
    state = super().observe(state, rows)
    if state.draft is None:
      return state
    # A resting draft stays behind, but is rewound with the text.
    fed_length = jnp.minimum(state.length, state.draft.length)
    return state.replace(draft=state.draft.replace(length=fed_length))

  def catch_up(self, params: Any, state: State, rows: state_lib.DecodeState) -> State:
    """Feeds all sources from where the draft model is; see `ModelDrafter.catch_up`."""
    state = _with_settings(state, rows)
    state = state.replace(length=jnp.minimum(state.length, self.fed(state)))
    return super().catch_up(params, state, rows)

  def _survival(self, params: Any, state: State) -> jax.Array:
    """Probability [B] that the token named last is right; 0 if none was named."""
    at = (state.length - 1)[:, None, None]
    bins = jnp.take_along_axis(state.bins, at, axis=1)[:, 0]
    return jnp.max(jnp.maximum(_accuracy(params, bins), 0.0), axis=-1)

  def memory(self) -> Memory:
    """An empty cache, and scores that believe the learned draft."""
    edges = np.concatenate([[0.0], _EDGES, [1.0]])
    right = np.concatenate(
      [
        (edges[1:] + edges[:-1]) / 2,
        np.full(_CACHE_BINS, _CACHE_PRIOR),
        np.full(DRAFT_BINS, _SAMPLED_PRIOR),
        [_ANY_PRIOR],
      ]
    )
    return Memory(
      draft=None,
      table=ngrams.empty(self.size),
      right=jnp.asarray(right * _PRIOR, jnp.float32),
      **{
        name: jnp.full((BINS + 1,), _PRIOR, jnp.float32)
        for name in ("scored", "drawn_right", "top_right")
      },
    )

  def with_memory(self, prepared: base.Params, memory: Any) -> Memory:
    """Returns the memory with the parameters of this draft."""
    return memory.replace(draft=prepared)

  def absorb(
    self,
    memory: Any,
    state: State | None,
    source: jax.Array,
    emitted: jax.Array,
    length: jax.Array,
    salt: jax.Array | np.ndarray = ngrams.NO_SALT,
  ) -> Memory:
    """Adds the answer to the cache, and scores all tokens that were named for it."""
    table = ngrams.absorb(self.target, memory.table, source, emitted, length, salt)
    if state is None:
      return memory.replace(table=table)
    count = emitted.shape[0]
    # Entry i was named for `emitted[i]`, once inputs 0..i had been fed.
    is_scored = jnp.arange(count) < jnp.minimum(length, state.length[0])
    bins = jnp.where(is_scored[:, None], state.bins[0, :count], _NONE)
    right = (state.named[0, :count] == emitted[:, None]).astype(jnp.float32)
    top, cached, draws = right[:, 0], right[:, 1], state.drawn[0, :count]
    drawn_right = (draws == emitted).astype(jnp.float32)
    weight = memory.drawn_right / memory.top_right
    weight = weight.at[bins[:, 0]].get(mode="fill", fill_value=0.0)
    stand_in = jnp.minimum(weight, _MAX_WEIGHT) * top
    learned = jnp.where(draws >= 0, drawn_right, stand_in)
    by_cache = is_by_cache(memory, bins)
    either = jnp.where(by_cache, cached, learned)
    is_named = jnp.min(bins, axis=-1) != _NONE
    # After a block whose tokens were all accepted, the target draws one more, for which
    # a sampled row has nothing to compare.
    is_known = (draws >= 0) | by_cache | (bins[:, 0] < SAMPLED_BINS)
    learned_bin = jnp.where(is_known, bins[:, 0], _NONE)
    any_bin = jnp.where(is_known & is_named, _ANY, _NONE)
    every = jnp.stack([learned_bin, bins[:, 1], any_bin], axis=1)
    where_drawn = jnp.where(draws >= 0, bins[:, 0], _NONE)
    right, scored = _counted(
      (memory.right, memory.scored),
      every,
      (jnp.stack([learned, cached, either], 1), 1.0),
    )
    drawn_right, top_right = _counted(
      (memory.drawn_right, memory.top_right), where_drawn, (drawn_right, top)
    )
    return Memory(None, table, right, scored, drawn_right, top_right)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(NgramDrafter):
  """The learned draft `model` mixed with the n-gram cache."""

  @property
  def learned(self) -> drafters.ModelDrafter:
    """The learned draft without the cache."""
    return drafters.ModelDrafter(self.model, self.whole_logits)

  def resting(self) -> NgramDrafter:
    """The cache alone while the learned draft rests; `catch_up` ends the rest."""
    return NgramDrafter(
      self.model,
      self.whole_logits,
      target=self.target,
      size=self.size,
      widths=self.widths,
    )

  def init(
    self,
    params: Any,
    source: jax.Array,
    target_states: jax.Array | None,
    cache_length: int,
    read: Any = None,
  ) -> State:
    """Prefills both sources; see `ModelDrafter.init`."""
    state = super().init(params, source, None, cache_length)
    draft = self.learned.init(params.draft, source, target_states, cache_length, read)
    return state.replace(draft=draft)

  def reader(self, params: Any) -> list[tuple[base.Model, base.Params]]:
    """See `ModelDrafter.reader`."""
    return self.learned.reader(params.draft)

  def decode(
    self,
    params: Any,
    tokens: jax.Array,
    state: State,
    states: jax.Array | None = None,
  ) -> tuple[jax.Array, State]:
    """Feeds both sources; the logits are those of the one that proposes."""
    vote, token, text = self._look_up(params, tokens, state)
    draft = state.draft.replace(length=state.length)
    logits, draft = self.learned.decode(params.draft, tokens, draft, states)
    likeliest, draft_bin = (
      sampling.arg_max(logits),
      bin_of(logits, state.is_sampled),
    )
    bins = jnp.stack([draft_bin, _cache_bin(vote)], axis=-1)
    by_cache = is_by_cache(params, bins)
    state = _advanced(state, text, jnp.stack([likeliest, token], axis=-1), bins)
    one_hot = ngrams.one_hot(token, self.target.vocab_size)
    logits = jnp.where(by_cache[..., None], one_hot, logits)
    return logits, state.replace(draft=draft)

  def _proposal(
    self,
    params: Any,
    state: State,
    rows: state_lib.DecodeState,
    tokens: jax.Array,
    logits: jax.Array | None,
    lengths: jax.Array | None = None,
  ) -> base.Proposal:
    # The i-th drafted token was named after the input at `rows.length + i`.
    at = rows.length[:, None] + jnp.arange(tokens.shape[1])[None]
    bins = jnp.take_along_axis(state.bins, at[..., None], axis=1)
    return base.Proposal(tokens, logits, lengths, is_by_cache(params, bins))

  def _most(self, survival: jax.Array, prices: jax.Array) -> jax.Array | int:
    return len(prices)  # the prices of its tokens hold steps of the draft, too

  def _first_survival(
    self, survival: jax.Array, running: jax.Array, price: jax.Array
  ) -> jax.Array:
    del running, price  # the draft's first step has been made
    return survival

  def _drawn(self, logits, rows, drafted, offset, noise):
    return self.learned._drawn(logits, rows, drafted, offset, noise)

  def _fed_again(
    self, params: Any, cache: State, rows: state_lib.DecodeState, drafted: int
  ) -> State:
    cache = super()._fed_again(params, cache, rows, drafted)
    draft = cache.draft.replace(length=cache.length)
    draft = self.learned._fed_again(params.draft, draft, rows, drafted)
    return cache.replace(draft=draft)

  def _from_input(self, cache: State, index: jax.Array) -> State:
    return cache.replace(draft=self.learned._from_input(cache.draft, index))

  def observe(self, state: State, rows: state_lib.DecodeState) -> State:
    """Rewinds both sources; see `NgramDrafter.observe`."""
    state = super().observe(state, rows)
    return state.replace(draft=state.draft.replace(length=state.length))


def drafter(
  draft: base.Model,
  whole_logits: bool,
  target: base.Model,
  size: int,
  widths: tuple[int, ...] = (),
) -> NgramDrafter:
  """Returns the mixture of a draft with an n-gram cache, or the cache if it is one.

  Args:
    draft: the draft model.
    whole_logits: see `drafters.ModelDrafter`.
    target: the model it drafts for.
    size: tokens of served answers that a mixture's cache keeps.
    widths: see `DecodeSpec.widths`.
  """
  if draft.absorb is None:
    return Mixture(draft, whole_logits, target=target, size=size, widths=widths)
  size = jax.eval_shape(draft.init, jax.random.key(0)).ring.shape[0]
  return NgramDrafter(draft, whole_logits, target=target, size=size, widths=widths)


def _advanced(
  state: State, text: ngrams.Text, named: jax.Array, bins: jax.Array
) -> State:
  """Returns the state with longer texts and the tokens named after them [B, n, 2]."""
  length = state.length
  return state.replace(
    text=text,
    named=_write(state.named, named, length),
    bins=_write(state.bins, bins, length),
    length=length + named.shape[1],
  )


def _with_settings(state: State, rows: state_lib.DecodeState) -> State:
  """Sets which rows are sampled and the cache salt of each row."""
  text = state.text.replace(salt=rows.settings.cache_salt)
  return state.replace(is_sampled=rows.settings.temperature > 0, text=text)


def _counted(
  counts: tuple[jax.Array, jax.Array], bins: jax.Array, new: tuple[Any, Any]
) -> tuple[jax.Array, ...]:
  """Adds new values to the counts of their bins, which decay at each."""
  zeros = jnp.zeros((BINS + 1,), jnp.float32)
  decay = _DECAY ** zeros.at[bins].add(1.0, mode="drop")
  return tuple(
    old * decay + zeros.at[bins].add(value, mode="drop")
    for old, value in zip(counts, new, strict=True)
  )


def _accuracy(params: Any, bins: jax.Array) -> jax.Array:
  """Accuracy of every situation; -1 where no token was named."""
  share = (params.right / params.scored).at[bins].get(mode="fill", fill_value=-1.0)
  return jnp.where(bins < BINS, jnp.minimum(share, 1.0), -1.0)


def is_by_cache(params: Any, bins: jax.Array) -> jax.Array:
  """Whether the cache proposes, from the bins [..., 2] of both sources."""
  accuracy = _accuracy(params, bins)
  return accuracy[..., 1] > accuracy[..., 0]


def _is_proposed(survival: jax.Array, price: jax.Array) -> jax.Array:
  # Without a price the number of tokens is fixed, whatever they are.
  return (survival > 0) | (price <= 0)


def bin_of(logits: jax.Array, is_sampled: jax.Array) -> jax.Array:
  """Bin of the top probability [B, n]; none if it is NaN."""
  largest = jnp.max(logits, axis=-1, keepdims=True)
  probability = 1 / jnp.sum(jnp.exp(logits - largest), axis=-1)
  index = jnp.sum(
    probability[..., None] >= _EDGES[None, None], axis=-1, dtype=jnp.int32
  )
  index = index + jnp.where(is_sampled[:, None], SAMPLED_BINS, 0)
  return jnp.where(jnp.isfinite(probability), index, _NONE)


def _cache_bin(vote: ngrams.Vote) -> jax.Array:
  """Bin of a vote [B, n]; none if nothing matched."""
  order = jnp.sum(
    vote.order[..., None] > np.asarray(ngrams.ORDERS)[None, None], axis=-1
  )
  total = jnp.minimum(vote.total, _MAX_TOTAL) - 1
  # The share of the votes, rounded to thirds.
  share = (6 * vote.votes + vote.total) // jnp.maximum(2 * vote.total, 1)
  index = DRAFT_BINS + (order * _MAX_TOTAL + total) * _SHARES + share
  return jnp.where(vote.order > 0, index, _NONE).astype(jnp.int32)


def _write(stored: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
  both = [ngrams.write(stored[..., i], new[..., i], at) for i in (0, 1)]
  return jnp.stack(both, axis=-1)
