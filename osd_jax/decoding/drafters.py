"""Drafters: they propose tokens, which the target then verifies.

A drafter is a frozen set of pure functions over a state that the decode loop carries in
`DecodeState.draft_cache`:

    init      prompts -> state                     when a request enters its row
    propose   state, rows -> proposal, state       at the start of a round
    observe   state, rows -> state                 after a round appended its tokens
    catch_up  state, rows -> state                 before drafting resumes
    absorb    memory, answer -> memory             after a request finished

What a drafter proposes changes the speed of decoding, never its output.

Implementations: a language model that reads the prompt; a small model attached to the
target's hidden states; either of them mixed with an n-gram cache; and this cache alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from osd_jax import base, native, sharding
from osd_jax.decoding import sampling
from osd_jax.decoding import state as state_lib

# Positions that `catch_up` feeds at a time. A chunk at position T still ends in the
# buffer, which has room for `MAX_DRAFT_TOKENS`.
CHUNK = 8


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
  """A draft model: one that reads the prompt, as in the paper, or an attached one.

  Other drafters derive from it. A drafter is hashable and compared by value, as a
  static argument is. Every leaf of its state has the row axis first, and `state.length`
  [B] is the number of inputs that it has seen in each row.

  Attributes:
    model: the draft model.
    whole_logits: on a mesh, keeps the logits whole on every device. Otherwise XLA would
      split a small draft's head the way the target's head is split.
  """

  model: base.Model
  whole_logits: bool = False

  def init(
    self,
    params: base.Params,
    source: jax.Array,
    target_states: jax.Array | None,
    cache_length: int,
    read: Any = None,
  ) -> Any:
    """Returns the state of rows that have their prompt and no output.

    Args:
      params: served parameters of the draft, see `with_memory`.
      source: [B, S] int32, the prompts.
      target_states: [B, S, E], the target's hidden states, for an attached draft.
      cache_length: positions of the output buffer.
      read: the draft model's cache, if the prompts were read in chunks; see `reader`.
    """
    if read is not None:
      return read
    mask, prompt = self.model.mask(source), self.model.prompt_of(source, target_states)
    return self.model.prefill(params, prompt, mask, cache_length)

  def reader(self, params: base.Params) -> list[tuple[base.Model, base.Params]]:
    """The draft model and its parameters, if it reads prompts in chunks, or nothing."""
    return [(self.model, params)] if self.model.extend else []

  def propose(
    self,
    params: base.Params,
    state: Any,
    rows: state_lib.DecodeState,
    num_draft_tokens: int,
    noise: sampling.Purpose,
    prices: jax.Array | None = None,
  ) -> tuple[base.Proposal, Any]:
    """Drafts K >= 1 tokens per row, one at a time (algorithm 1, "run the draft").

    The draft distribution may depend on everything in `rows` and `state`, but not on a
    token of this proposal that comes later. See `base.Proposal` for fewer tokens in
    some rows and for proposals without logits.

    `prices` [K] are only given if `DecodeSpec.widths` is not empty: the i-th token
    costs as much time as emitting `prices[i]` tokens. 0 asks for the token in any case.

    The first step of a round reads the two newest inputs: the last drafted token of the
    round before was never fed, and it is in the text if every token was accepted. So K
    steps draft K tokens, and the second column of the first step is almost free.

    Returns:
      The proposal, and the cache of length c + K + 1 (c + K at position 0), where c was
      its length: every drafted token but the last has been fed.
    """
    del prices  # a model alone does not know how likely a token is right
    drafted, first, cache = self.first(params, state, rows, num_draft_tokens, noise)
    logits = first[:, None]

    def step(carry, offset):
      drafted, cache = carry
      drafted, logits, cache = self.next(params, cache, rows, drafted, offset, noise)
      return (drafted, cache), logits

    if num_draft_tokens > 1:
      offsets = jnp.arange(1, num_draft_tokens)
      # A loop costs an accelerator more than a step of a small draft.
      has_loop = native.forms() or native.is_split()
      unroll = 1 if has_loop else num_draft_tokens - 1
      (drafted, cache), later = jax.lax.scan(
        step, (drafted, cache), offsets, unroll=unroll
      )
      logits = jnp.concatenate([logits, jnp.swapaxes(later, 0, 1)], axis=1)
    return base.Proposal(drafted, logits), cache

  def first(
    self,
    params: base.Params,
    state: Any,
    rows: state_lib.DecodeState,
    num_draft_tokens: int,
    noise: sampling.Purpose,
  ) -> tuple[jax.Array, jax.Array, Any]:
    """The first step of `propose`: (tokens [B, K], logits [B, V], state)."""
    position = rows.length
    state = self._fed_again(params, state, rows, num_draft_tokens)
    newest, states = self._inputs(rows, state_lib.fed_to_draft(position), 2)
    begun = (position > 0).astype(jnp.int32)  # at position 0 the second one is stale
    length = state.length + begun + 1
    both, cache = self.decode(params, newest, state, states)
    cache = self._from_input(cache, begun).replace(length=length)
    logits = jnp.take_along_axis(both, begun[:, None, None], axis=1)[:, 0]
    drafted = jnp.full((len(position), num_draft_tokens), -1, jnp.int32)
    token, logits = self._drawn(logits, rows, drafted, 0, noise)
    cache = self._with_drawn(params, cache, token)
    return drafted.at[:, 0].set(token), logits, cache

  def next(
    self,
    params: base.Params,
    state: Any,
    rows: state_lib.DecodeState,
    drafted: jax.Array,
    offset: jax.Array,
    noise: sampling.Purpose,
  ) -> tuple[jax.Array, jax.Array, Any]:
    """Drafts the token at an offset of 1 or more; returns what `first` returns."""
    last = jax.lax.dynamic_slice_in_dim(drafted, offset - 1, 1, axis=1)
    logits, cache = self.decode(params, _where_running(rows, last), state)
    token, logits = self._drawn(logits[:, 0], rows, drafted, offset, noise)
    cache = self._with_drawn(params, cache, token)
    return drafted.at[:, offset].set(token), logits, cache

  def _inputs(
    self, rows: state_lib.DecodeState, start: jax.Array, count: int
  ) -> tuple[jax.Array, jax.Array | None]:
    """Inputs [B, count] from `start`, with the states that the draft reads with them.

    The target's state before an emitted token is known; before the first input there
    is none.
    """
    tokens = _where_running(rows, state_lib.inputs_at(rows, start, count))
    if not self.model.reads_tokens:
      return tokens, None
    before = start[:, None] + jnp.arange(count)[None] - 1
    states = jnp.take_along_axis(
      rows.target_cache.token_states, jnp.maximum(before, 0)[..., None], axis=1
    )
    return tokens, jnp.where(before[..., None] >= 0, states, 0)

  def _fed_again(
    self, params: base.Params, cache: Any, rows: state_lib.DecodeState, drafted: int
  ) -> Any:
    """Feeds accepted tokens of the last round again, now with the target's states."""
    count = min(drafted - 1, CHUNK)
    if not self.model.reads_tokens or not count:
      return cache
    end = state_lib.fed_to_draft(rows.length)
    start = jnp.maximum(end - count, 0)
    tokens, states = self._inputs(rows, start, count)
    _, again = self.model.decode(params, tokens, cache.replace(length=start), states)
    return again.replace(length=cache.length, token_states=cache.token_states)

  def _from_input(self, cache: Any, index: jax.Array) -> Any:
    """Lets the draft's next step go on from one of the inputs fed last [B]."""
    if not self.model.reads_tokens:
      return cache
    states = jnp.take_along_axis(cache.token_states, index[:, None, None], axis=1)
    return cache.replace(token_states=states)

  def _drawn(self, logits, rows, drafted, offset, noise):
    """Draws the tokens [B] at an offset from logits [B, V]; returns both."""

    def placed(logits):
      return sharding.split_rows_only(logits) if self.whole_logits else logits

    logits = placed(logits)
    text = jnp.concatenate([rows.text, drafted], axis=1)
    settings, at = rows.settings, rows.length + offset
    return sampling.sample(logits, settings, at, noise, text, placed), logits

  def _with_drawn(self, params: base.Params, cache: Any, token: jax.Array) -> Any:
    """Returns the state once tokens [B] were drawn after the newest inputs."""
    del params, token
    return cache

  def observe(self, state: Any, rows: state_lib.DecodeState) -> Any:
    """Rewinds the cache to all but the two newest inputs, which `propose` feeds."""
    return state.replace(length=state_lib.fed_to_draft(rows.length))

  def catch_up(
    self, params: base.Params, state: Any, rows: state_lib.DecodeState
  ) -> Any:
    """Feeds the tokens that were emitted while the draft did not draft.

    A row that emitted t0 .. t9, whose draft was fed five inputs, in chunks of 3:

        position       0    1    2    3    4    5    6    7    8    9   10
        input         BOS   t0   t1   t2   t3   t4   t5   t6   t7   t8   t9
        before        <----- length = 5 ---->
        first chunk                            t4   t5   t6
        second chunk                                          t7   t8   t9
        after         <------------- length = 9 ---------------->

    The two newest inputs are left to `propose`. Entries that a chunk writes at or after
    the length are never read, and overwritten later. Rows may be behind by different
    numbers of tokens; stopped rows are not waited for.
    """
    target_length = state_lib.fed_to_draft(rows.length)

    def lags(cache) -> jax.Array:
      running = rows.stop_reason == base.StopReason.RUNNING
      return jnp.any(running & (cache.length < target_length))

    def feed(cache):
      tokens, states = self._inputs(rows, cache.length, CHUNK)
      # Rows that lag less are not moved past `wanted`: `propose` feeds the last two.
      end = jnp.minimum(cache.length + CHUNK, target_length)
      _, cache = self.decode(params, tokens, cache, states)
      last = jnp.full_like(end, CHUNK - 1)  # of a fixed shape, and never continued
      return self._from_input(cache, last).replace(length=end)

    return jax.lax.while_loop(lags, feed, state)

  def decode(
    self,
    params: base.Params,
    tokens: jax.Array,
    state: Any,
    states: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """Feeds tokens [B, n] to every row; see `base.Model.decode` and `reads_tokens`."""
    optional = () if states is None else (states,)
    return self.model.decode(params, tokens, state, *optional)

  def fed(self, state: Any) -> jax.Array:
    """Returns the number [B] of inputs that the draft model has read."""
    return state.length

  def memory(self) -> Any:
    """Returns what `absorb` starts from; None for drafters that must be trained."""
    return None

  def with_memory(self, prepared: base.Params, memory: Any) -> base.Params:
    """Returns the `params` of the functions above.

    Args:
      prepared: parameters of the draft model, see `base.Model.prepare`.
      memory: what `memory` or `absorb` returned.
    """
    del memory
    return prepared

  def absorb(
    self,
    memory: Any,
    state: Any,
    source: jax.Array,
    emitted: jax.Array,
    length: jax.Array,
    salt: jax.Array,
  ) -> Any:
    """Learns from a finished request, without training; returns the new memory.

    A draft that is trained has none.

    Args:
      memory: what was served with; callers donate it.
      state: the drafter's state of the request's row, leaves [1, ...]; None if another
        engine answered.
      source: [1, S] int32, the prompt.
      emitted: [T] int32, the answer, padded.
      length: [] int32, the number of its tokens.
      salt: [2] uint32; only rows with this salt may use what is stored of the answer;
        see `base.SamplingSettings`.
    """
    del memory, state, source, emitted, length, salt


def _where_running(rows: state_lib.DecodeState, tokens: jax.Array) -> jax.Array:
  """Tokens [B, n], with `base.NO_TOKEN` in rows that do not run."""
  running = rows.stop_reason == base.StopReason.RUNNING
  return jnp.where(running[:, None], tokens, base.NO_TOKEN)
