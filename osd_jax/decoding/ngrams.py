"""The n-gram cache: tokens that followed the same context before, in any served answer.

Served answers are kept one after another in a ring of tokens. For every order n, a hash
table leads from the last n tokens to the places where they were seen most recently:

    ring      ... select name from films where year > 3 </s> select name from ...
    order 2   hash(name, from) -> places of "films", ...     (the newest WAYS of them)

A lookup takes the longest order with a match, and the tokens that followed there vote.
Every candidate is compared with the ring itself, so a collision of hashes or an
overwritten place is never a candidate. A row's own prompt and answer take part, too:
they need no table, but are compared with the context directly (prompt lookup, Saxena
2023).

Every text has a salt, a number of 64 bits, and a lookup only finds texts with its own
salt. The salt is part of the hash, so equal texts with different salts do not push each
other's places out. It is also compared with the salt of the stored token, so that a
collision of hashes cannot lead from one salt to another. All texts share the
room: many new answers overwrite the oldest ones, whoever asked for them.

All shapes are fixed, and lookups run inside the compiled round. An answer is added by
one call after it has finished.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from osd_jax import base

ORDERS = (1, 2, 3, 4, 6, 8)
CONTEXT = max(ORDERS)  # tokens that a lookup compares
WAYS = 4  # places kept of every n-gram
SIZE = 2**16  # tokens that are kept unless a size is given
NO_TOKEN = -1  # before a text begins

NO_SALT = np.zeros(2, np.uint32)  # salt of texts without one

_MULTIPLIER = np.uint32(0x9E3779B1)  # 2**32 / golden ratio


@flax.struct.dataclass
class Table:
  """Served answers and the places of their n-grams.

  A place is the number of tokens written before it, modulo 2**32. The token at place p
  is at index p % R of the ring.

  Attributes:
    ring: [R] int32, the newest R tokens.
    salts: [R, 2] uint32, of each token; see `base.SamplingSettings.cache_salt`.
    places: [O, H, WAYS] uint32; places of tokens that follow an n-gram with this hash.
    counts: [O, H] uint32; how often the hash was written, which decides the next way.
    end: [] uint32; place of the next token.
  """

  ring: jax.Array
  salts: jax.Array
  places: jax.Array
  counts: jax.Array
  end: jax.Array


@flax.struct.dataclass
class Text:
  """Prompts and outputs of rows in flight, as the cache of a draft model.

  Attributes:
    tokens: [B, N] int32; the prompt, then the inputs of `decode`.
    begin: [B] int32; index of the first input.
    length: [B] int32; number of inputs.
    salt: [B, 2] uint32; see `base.SamplingSettings.cache_salt`.
  """

  tokens: jax.Array
  begin: jax.Array
  length: jax.Array
  salt: jax.Array


@flax.struct.dataclass
class Vote:
  """The token that a lookup names, with its support; all [B, n] int32.

  Attributes:
    token: undefined if `order` is 0.
    order: number of context tokens that matched; 0 if none did.
    votes: candidates with this token.
    total: all candidates.
  """

  token: jax.Array
  order: jax.Array
  votes: jax.Array
  total: jax.Array


def empty(size: int) -> Table:
  """Returns a table for the newest `size` tokens of served answers, a power of two."""
  # Every token writes one place of each order, and many contexts repeat.
  buckets = max(size // WAYS, 8)
  return Table(
    ring=jnp.full((size,), NO_TOKEN, jnp.int32),
    salts=jnp.zeros((size, 2), jnp.uint32),
    places=jnp.zeros((len(ORDERS), buckets, WAYS), jnp.uint32),
    counts=jnp.zeros((len(ORDERS), buckets), jnp.uint32),
    end=jnp.zeros((), jnp.uint32),
  )


@functools.cache
def build(target: base.Model, size: int = SIZE) -> base.Model:
  """Returns a draft model that looks its tokens up; its parameters are a `Table`.

  Its distributions are one-hot. Where it has seen no context, it repeats the last
  token, which is likely to be rejected.

  Args:
    target: the model it drafts for, which decides vocabulary and padding.
    size: tokens of served answers that are kept.
  """

  def decode(table, inputs, text):
    vote, text = advance(table, inputs, text)
    token = jnp.where(vote.order > 0, vote.token, inputs)
    return one_hot(token, target.vocab_size), text

  def score(table, source, mask, emitted):
    inputs = jnp.concatenate([target.starts(source)[:, None], emitted[:, :-1]], axis=1)
    text = start(target, source, mask, inputs.shape[1])
    return decode(table, inputs, text)[0]

  return base.Model(
    name="n-gram cache",
    vocab_size=target.vocab_size,
    init=lambda key: empty(size),
    prefill=lambda table, source, mask, length: start(target, source, mask, length),
    decode=decode,
    score=score,
    prepare=lambda table: table,
    logical_axes=lambda: jax.tree.map(
      lambda leaf: jax.sharding.PartitionSpec(*(None,) * leaf.ndim),
      jax.eval_shape(lambda: empty(size)),
    ),
    eos_ids=target.eos_ids,
    pad_id=target.pad_id,
    start=target.start,
    start_id=target.start_id,
    absorb=functools.partial(absorb, target),
  )


def start(
  target: base.Model, source: jax.Array, mask: jax.Array, cache_length: int
) -> Text:
  """Returns the texts of rows that have prompts [B, S] and no output."""
  tokens = jnp.where(mask, source, NO_TOKEN).astype(jnp.int32)
  tokens = jnp.pad(tokens, ((0, 0), (0, cache_length)), constant_values=NO_TOKEN)
  # The first input of a decoder-only model is the last token of the prompt itself.
  begin = jnp.sum(mask, axis=1) - (target.start is not None)
  no_salt = jnp.zeros((source.shape[0], 2), jnp.uint32)
  return Text(tokens, begin, jnp.zeros_like(begin), no_salt)


def advance(table: Table, fed: Int[Array, "B n"], text: Text) -> tuple[Vote, Text]:
  """Appends inputs to the rows, and names the token after each one."""
  ends = (text.begin + text.length)[:, None] + 1 + jnp.arange(fed.shape[1])[None]
  text = text.replace(
    tokens=write(text.tokens, fed, ends[:, 0] - 1), length=text.length + fed.shape[1]
  )
  return look_up(table, text.tokens, ends, text.salt), text


def absorb(
  target: base.Model,
  table: Table,
  source: Int[Array, "1 S"],
  emitted: Int[Array, " T"],
  length: Int[Array, ""],
  salt: UInt32[Array, " 2"] | np.ndarray = NO_SALT,
) -> Table:
  """Adds a finished answer of `length` tokens; see `base.Model.absorb`."""
  text = start(target, source, target.mask(source), 1)
  tokens = write(text.tokens, target.starts(source)[:, None], text.begin)
  context = _contexts(tokens, text.begin[:, None] + 1)[0, 0]
  return insert(table, context, emitted, length, salt)


def insert(
  table: Table,
  context: Int[Array, " CONTEXT"],
  emitted: Int[Array, " T"],
  length: Int[Array, ""],
  salt: UInt32[Array, " 2"] | np.ndarray = NO_SALT,
) -> Table:
  """Adds a text's tokens and the places of all its n-grams.

  Args:
    table: the texts so far.
    context: the tokens before the text, NO_TOKEN where there are none.
    emitted: the text, padded.
    length: its number of tokens.
    salt: the salt of the text.
  """
  text, count = jnp.concatenate([context, emitted]), emitted.shape[0]
  size, buckets = table.ring.shape[0], table.counts.shape[1]
  place = table.end + jnp.arange(text.shape[0], dtype=jnp.uint32)
  is_written = jnp.arange(text.shape[0]) < CONTEXT + length
  # Indices after the last one are dropped.
  index = jnp.where(is_written, place % size, size)
  ring = table.ring.at[index].set(text, mode="drop")
  salts = table.salts.at[index].set(salt, mode="drop")
  windows = text[jnp.arange(count)[:, None] + jnp.arange(CONTEXT)[None]]
  places, counts = table.places, table.counts
  for row, order in enumerate(ORDERS):
    is_known = jnp.all(windows[:, -order:] != NO_TOKEN, axis=1) & is_written[CONTEXT:]
    bucket = jnp.where(is_known, _bucket(windows, order, buckets, salt), buckets)
    same = bucket[:, None] == bucket[None]
    earlier = jnp.sum(jnp.tril(same, -1), axis=1, dtype=jnp.uint32)
    later = jnp.sum(jnp.triu(same, 1), axis=1)
    way = (counts[row].at[bucket].get(mode="fill", fill_value=0) + earlier) % WAYS
    # Only the newest places of a hash are written, so that no way is written twice.
    newest = jnp.where(later < WAYS, bucket, buckets)
    places = places.at[row, newest, way].set(place[CONTEXT:], mode="drop")
    counts = counts.at[row, bucket].add(jnp.uint32(1), mode="drop")
  end = table.end + CONTEXT + length.astype(jnp.uint32)
  return Table(ring, salts, places, counts, end)


def look_up(
  table: Table,
  text: Int[Array, "B N"],
  ends: Int[Array, "B n"],
  salt: UInt32[Array, "B 2"],
) -> Vote:
  """Names the token that most often followed the longest known end of a text.

  Args:
    table: served answers.
    text: the rows' prompts and outputs.
    ends: numbers of tokens of the text; each is a lookup of its own.
    salt: of each row; answers with other salts are not found.
  """
  context = _contexts(text, ends)
  served, of_row = _served(table, context, salt), _own(text, ends, context)
  token, order = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), served, of_row)
  longest = jnp.max(order, axis=-1)
  takes_part = (order == longest[..., None]) & (order > 0)
  agrees = (token[..., :, None] == token[..., None, :]) & takes_part[..., None, :]
  votes = jnp.where(takes_part, jnp.sum(agrees, axis=-1), 0)
  winner = jnp.argmax(votes, axis=-1)[..., None]
  return Vote(
    token=jnp.take_along_axis(token, winner, axis=-1)[..., 0],
    order=longest,
    votes=jnp.take_along_axis(votes, winner, axis=-1)[..., 0],
    total=jnp.sum(takes_part, axis=-1, dtype=jnp.int32),
  )


def one_hot(token: jax.Array, vocab_size: int) -> jax.Array:
  """Logits [..., V] of distributions that are certain of a token: 0, else -inf."""
  ids = jax.lax.broadcasted_iota(jnp.int32, (*token.shape, vocab_size), token.ndim)
  return jnp.where(ids == token[..., None], 0.0, -jnp.inf)


def write(
  tokens: Int[Array, "B N"], new: Int[Array, "B n"], at: Int[Array, " B"]
) -> Int[Array, "B N"]:
  """Writes at per-row offsets, in one pass over all entries and without slices."""
  index = jnp.arange(tokens.shape[1])[None] - at[:, None]
  is_new = (index >= 0) & (index < new.shape[1])
  values = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[1] - 1), axis=1)
  return jnp.where(is_new, values, tokens)


def _contexts(
  text: Int[Array, "B N"], ends: Int[Array, "B n"]
) -> Int[Array, "B n CONTEXT"]:
  """The tokens before each end, the newest last."""
  at = ends[..., None] + jnp.arange(-CONTEXT, 0)[None, None]
  tokens = jnp.take_along_axis(text[:, None], jnp.maximum(at, 0), axis=2)
  return jnp.where(at >= 0, tokens, NO_TOKEN)


def _served(
  table: Table, context: Int[Array, "B n CONTEXT"], salt: UInt32[Array, "B 2"]
) -> tuple[Int[Array, "B n c"], Int[Array, "B n c"]]:
  """Tokens that followed a context in served answers, and the order that matched."""
  size, buckets = table.ring.shape[0], table.counts.shape[1]
  shape = (*context.shape[:-1], len(ORDERS) * WAYS)
  hashed = functools.partial(_bucket, context, buckets=buckets, salt=salt[:, None])
  bucket = jnp.stack([hashed(order) for order in ORDERS], axis=-1)
  places = table.places[jnp.arange(len(ORDERS))[None, None], bucket]
  offsets = (jnp.arange(CONTEXT + 1) - CONTEXT).astype(jnp.uint32)
  near = places[..., None] + offsets[None, None, None, None]
  texts = table.ring[near % size]  # [B, n, O, WAYS, CONTEXT + 1], the token last
  context = context[..., None, None, :]
  equal = (texts[..., :CONTEXT] == context) & (context != NO_TOKEN)
  orders = jnp.asarray(ORDERS)[None, None, :, None]  # [1, 1, O, 1]
  ignored = jnp.arange(CONTEXT)[None, None, None, None] < CONTEXT - orders[..., None]
  matches = jnp.all(equal | ignored, axis=-1)
  # Of an older place, a part of the context has been overwritten.
  is_kept = table.end - places <= size - CONTEXT
  # The context was written in one piece with the token, so it has the same salt.
  theirs = table.salts[places % size]
  is_own = jnp.all(theirs == salt[:, None, None, None], axis=-1)
  token = texts[..., CONTEXT]
  valid = matches & is_kept & is_own & (token != NO_TOKEN)
  order = jnp.where(valid, orders, 0)
  return token.reshape(shape), order.reshape(shape)


def _own(
  text: Int[Array, "B N"], ends: Int[Array, "B n"], context: Int[Array, "B n CONTEXT"]
) -> tuple[Int[Array, "B n WAYS"], Int[Array, "B n WAYS"]]:
  """Like `_served`, for the newest places of the longest match in the row itself."""
  size = text.shape[1]
  index = jnp.arange(size)[None, None]
  matches = jnp.ones((*ends.shape, size), bool)
  order = jnp.zeros(matches.shape, jnp.int32)
  for back in range(1, CONTEXT + 1):
    before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, :size]
    matches = matches & _equal(before[:, None], context[..., -back, None])
    if back in ORDERS:
      order = jnp.where(matches, back, order)
  order = jnp.where(index < ends[..., None], order, 0)
  # The longest match first, then the newest. Finding the largest WAYS times is faster
  # than sorting.
  rank, tokens, orders = order * size + index, [], []
  for _ in range(WAYS):
    largest = jnp.max(rank, axis=-1)
    tokens.append(jnp.take_along_axis(text, largest % size, axis=1))
    orders.append(largest // size)
    rank = jnp.where(rank == largest[..., None], -1, rank)
  return jnp.stack(tokens, axis=-1), jnp.stack(orders, axis=-1)


def _equal(token: jax.Array, other: jax.Array) -> Bool[Array, "..."]:
  return (token == other) & (token != NO_TOKEN)


def _bucket(
  windows: Int[Array, "*any CONTEXT"],
  order: int,
  buckets: int,
  salt: UInt32[Array, "*more 2"] | np.ndarray,
) -> Int[Array, "*any"]:
  """Hash of a salt and the last `order` tokens, in 0..buckets - 1."""
  value = jnp.full(windows.shape[:-1], order, jnp.uint32)
  tokens = [windows[..., -back].astype(jnp.uint32) for back in range(order, 0, -1)]
  for part in (salt[..., 0], salt[..., 1], *tokens):
    value = (value ^ part) * _MULTIPLIER
    value = value ^ (value >> 15)
  return (value % buckets).astype(jnp.int32)
