"""Processed distributions and the random draws made from them.

Sampling and acceptance use the same distributions: repetition penalty, temperature,
top-k, top-p, min-p, softmax, in this order and in float32. Every setting means what it
means in transformers, which applies them in the same order. Every draw is a function of
(seed, absolute position, purpose), so a row never depends on its batch mates. The seed
is that of the request, or one for each of its rounds (`accept.Rule.noise_per_round`).
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from osd_jax import base, native

# Bits of a rank that one pass over the vocabulary finds. A pass with n bits makes
# 2**n - 1 comparisons of each entry. By its compiler's estimates 2 are best for a TPU
# with 64 rows, and a fifth slower than 1 with one row; 8 would take 20 times as long.
_BITS_OF_A_PASS = {"cpu": 1, "tpu": 2, "cuda": 4}
_BLOCK = 128  # entries per block in `arg_max`, `sums` and `_at_share`


class Purpose(enum.IntEnum):
  """Purpose of a random draw; two purposes never share noise."""

  DRAFT = 0
  ACCEPT = 1
  EMIT = 2
  ROUND = 3


def numbered_seed(seed: int, number: int) -> int:
  """Returns the seed of one of several requests with the same seed.

  Drafts that were learned from an answer, or copied from it, depend on the noise that
  drew it. A request that draws with this noise again would accept them too often. So
  requests have numbers, and different numbers below 2**32 turn a seed into different
  seeds.

  Args:
    seed: uint32, the request's own.
    number: how many requests came before it.
  """
  # The finalizer of MurmurHash3: each step is invertible, so no two numbers collide.
  mixed = (number + 1) % 2**32
  for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
    mixed = (mixed ^ mixed >> shift) * factor % 2**32
  return (seed + (mixed ^ mixed >> 16)) % 2**32


# Type and default of each setting; `requests.SamplingConfig` checks the values.
_SETTINGS: dict[str, tuple[type, Any]] = {
  "max_length": (np.int32, None),
  "temperature": (np.float32, 0.0),
  "top_k": (np.int32, 0),
  "top_p": (np.float32, 1.0),
  "min_p": (np.float32, 0.0),
  "repetition_penalty": (np.float32, 1.0),
  "seed": (np.uint32, 0),
  "speculative": (np.bool_, True),
  "cache_salt": (np.uint64, 0),
}


def make_settings(
  rows: int, *, max_length: Any, **values: Any
) -> base.SamplingSettings:
  """Returns settings of B rows; see `base.SamplingSettings`.

  Args:
    rows: B.
    max_length: largest number of tokens: one for every row, or [B].
    **values: the other fields, where they differ from greedy decoding without a salt.
  """
  values["max_length"] = max_length
  # numpy, because settings are made for every request, and each eager jnp call would
  # cost a dispatch.
  arrays: dict[str, Any] = {
    name: np.full((rows,), values.pop(name, default), dtype)
    for name, (dtype, default) in _SETTINGS.items()
  }
  if values:
    raise TypeError(f"make_settings: unknown settings {sorted(values)}")
  halves = np.divmod(arrays.pop("cache_salt"), np.uint64(2**32))
  salt: Any = np.stack(halves, axis=1).astype(np.uint32)
  return base.SamplingSettings(**arrays, cache_salt=salt)


def sums(values: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
  """Sums over the vocabulary; on a CPU by blocks, which is vectorised."""
  size = values.shape[-1]
  if native.forms() and size % _BLOCK == 0:
    blocks = values.reshape(*values.shape[:-1], size // _BLOCK, _BLOCK)
    values = jnp.sum(blocks, axis=-2)
  return jnp.sum(values, axis=-1)


def is_penalized(settings: base.SamplingSettings) -> Bool[Array, ""]:
  """Whether any row has a repetition penalty."""
  return jnp.any(settings.repetition_penalty != 1)


def penalized(
  logits: Float[Array, "B n V"],
  settings: base.SamplingSettings,
  text: Int[Array, "B L"],
  drafted: Int[Array, "B m"],
) -> Float[Array, "B n V"]:
  """Applies the repetition penalty of each row, as transformers and vLLM define it.

  Args:
    logits: [B, n, V], raw.
    settings: per-row settings; without a penalty the logits are returned.
    text: [B, L] int32; the tokens before the first position; -1 is no token.
    drafted: [B, m] int32, m >= n - 1; position i has also the first i of them before
      it. A drafted token is part of the text only if all before it were accepted, and
      only then position i is read.

  Returns:
    [B, n, V] float32
  """
  logits = logits.astype(jnp.float32)
  if settings.all_greedy:
    return logits
  arguments = (logits, settings.repetition_penalty, text, drafted)
  # The search for repeated tokens runs only if some row has a penalty.
  return jax.lax.cond(is_penalized(settings), _penalized, lambda x, *_: x, *arguments)


def _penalized(logits, penalty, text, drafted):
  rows, count, size = logits.shape
  places = jnp.where(text < 0, size, text)  # "drop" ignores the place after the last
  is_repeated = jnp.zeros((rows, size), bool)
  is_repeated = is_repeated.at[jnp.arange(rows)[:, None], places].set(
    True, mode="drop"
  )[:, None]
  token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
  position = jnp.arange(count)[None, :, None]
  for index in range(count - 1):
    is_repeated |= (position > index) & (token == drafted[:, index, None, None])
  penalty = penalty[:, None, None]
  changed = jnp.where(logits > 0, logits / penalty, logits * penalty)
  # An extreme penalty must not make a finite logit infinite, which counts as broken.
  largest = jnp.finfo(jnp.float32).max
  changed = jnp.clip(changed, -largest, largest)
  return jnp.where(is_repeated & jnp.isfinite(logits), changed, logits)


def processed_probs(
  logits: Float[Array, "B n V"], settings: base.SamplingSettings
) -> Float[Array, "B n V"]:
  """Returns the distributions that decide sampling and acceptance.

  Args:
    logits: [B, n, V], raw, of any floating-point type.
    settings: per-row settings. A greedy row becomes one-hot at its arg max.

  Returns:
    [B, n, V] float32; each row sums to 1, or to 0 if a logit is NaN or +inf, or all are
    -inf.
  """
  logits = logits.astype(jnp.float32)
  temperature = settings.temperature[:, None, None]
  greedy = temperature == 0
  largest = jnp.max(logits, -1, keepdims=True)
  # The largest becomes 0 first, so that no small temperature makes it overflow.
  scaled = (logits - largest) / jnp.where(greedy, 1.0, temperature)
  filters = jnp.any(has_filters(settings))
  # The search runs only if some row has a filter.
  scaled = jax.lax.cond(filters, _filter, lambda x, _: x, scaled, settings)
  choice = jax.lax.cond(jnp.any(greedy), arg_max, _no_choice, logits)[..., None]
  others = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) != choice
  masses = jnp.exp(scaled + jnp.where(greedy & others, -jnp.inf, 0.0))
  # A NaN or +inf makes the sum NaN, even where the maximum of XLA CPU loses a NaN.
  total = jnp.sum(masses, axis=-1, keepdims=True)
  return jnp.where(jnp.isfinite(total), masses / total, 0.0)


def has_filters(settings: base.SamplingSettings) -> Bool[Array, " B"]:
  """Which rows exclude tokens by top-k, top-p or min-p."""
  return (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)


def _no_choice(logits: Float[Array, "B n V"]) -> Int[Array, "B n"]:
  """Returns zeros in the shape of `arg_max`, for batches without greedy rows."""
  return jnp.zeros(logits.shape[:-1], jnp.int32)


def _filter(
  logits: Float[Array, "B n V"], settings: base.SamplingSettings
) -> Float[Array, "B n V"]:
  """Sets logits outside top-k, then outside top-p of the rest, then min-p, to -inf.

  Ties with the last kept logit are kept, and so are NaNs. The largest logit must be 0.
  A sort would take five times as long on a CPU, and would gather split vocabularies.
  """
  size, rank = logits.shape[-1], _ranks(logits)
  top_k, top_p = settings.top_k[:, None, None], settings.top_p[:, None, None]
  is_in = jnp.where(top_k > 0, jnp.minimum(top_k, size), size).astype(jnp.float32)
  least = _least_rank(rank, jnp.ones_like(logits), is_in)
  mass = jnp.where(rank >= least, jnp.exp(logits), 0.0)
  mass_wanted = top_p * jnp.sum(mass, axis=-1, keepdims=True)
  # Sums are rounded, so a row without top-p skips the search: its distribution must not
  # depend on the filter of a batch mate.
  least = jnp.where(top_p < 1, _least_rank(rank, mass, mass_wanted), least)
  # The largest logit is 0, so this is the probability relative to the largest one.
  is_in = (rank >= least) & (jnp.exp(logits) >= settings.min_p[:, None, None])
  return jnp.where(is_in | jnp.isnan(logits), logits, -jnp.inf)


def _ranks(values: Float[Array, "B n V"]) -> UInt32[Array, "B n V"]:
  """Unsigned integers in the order of the values: their bits, negatives inverted."""
  values = jnp.where(values == 0, 0.0, values)  # -0 and 0 are one value
  bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits < sign, bits | sign, ~bits)


def _least_rank(
  rank: UInt32[Array, "B n V"], mass: Float[Array, "B n V"], wanted: Float[Array, "..."]
) -> UInt32[Array, "B n 1"]:
  """The largest rank such that it and all ranks above it have the wanted mass."""
  on = {name: functools.partial(_search, n) for name, n in _BITS_OF_A_PASS.items()}
  if native.forms():
    return on["cpu"](rank, mass, wanted)
  own = {"cuda": on["cuda"], "default": on["tpu"]}
  return jax.lax.platform_dependent(rank, mass, wanted, **own)


def _search(bits: int, rank: jax.Array, mass: jax.Array, wanted: jax.Array):
  """Returns the rank of `_least_rank`; a pass finds `bits` of it, the highest first."""
  digits = jnp.arange(1, 2**bits, dtype=jnp.uint32).reshape(1, 1, -1, 1)

  def with_bits(index, found):
    shift = jnp.uint32(32 - bits) - jnp.uint32(bits) * index.astype(jnp.uint32)
    candidates = found[..., None] | (digits << shift)
    is_in = rank[..., None, :] >= candidates
    above = jnp.sum(jnp.where(is_in, mass[..., None, :], 0.0), axis=-1, keepdims=True)
    # The mass falls with the rank, so this counts the candidates up to the largest.
    count = jnp.sum(above >= wanted[..., None], axis=-2, dtype=jnp.uint32)
    return found | (count << shift)

  return jax.lax.fori_loop(0, 32 // bits, with_bits, jnp.zeros_like(rank[..., :1]))


def arg_max(values: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
  """Returns the first index of the largest entry of each row.

  On a CPU it works block by block: XLA's maximum is vectorised there, its arg max is
  not. Four rows of 32,128 take a twentieth of the time.

  Args:
    values: [..., V]; for a row with a NaN the result is any index.

  Returns:
    [...] int32
  """
  size = values.shape[-1]
  if size % _BLOCK or not native.forms():
    return _first_of_largest(values)
  blocks = values.reshape(*values.shape[:-1], size // _BLOCK, _BLOCK)
  # Without the barrier, XLA would compute the maxima once for each of their two uses.
  largest = jax.lax.optimization_barrier(jnp.max(blocks, axis=-1))
  block = _first_of_largest(largest)[..., None]
  values_of_block = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
  return block[..., 0] * _BLOCK + _first_of_largest(values_of_block)


def _first_of_largest(values: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
  """Returns `arg_max` by two reductions, so that a split vocabulary is not gathered.

  XLA's own arg max reduces two arrays at once, which jaxlib 0.12 refuses to compile for
  some layouts on a CPU.
  """
  index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
  is_largest = values == jnp.max(values, axis=-1, keepdims=True)
  last = values.shape[-1] - 1
  return jnp.min(jnp.where(is_largest, index, last), axis=-1)


def row_keys(
  seed: UInt32[Array, " B"], position: Int[Array, "B n"], purpose: Purpose
) -> Key[Array, "B n"]:
  """Returns the random keys of draws at absolute positions of each row's output.

  Keys differ by seed, position and purpose, and by nothing else.
  """

  def one(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.fold_in(key, int(purpose))

  return jax.vmap(lambda s, row: jax.vmap(lambda p: one(s, p))(row))(seed, position)


def draw(
  probs: Float[Array, "B V"],
  seed: UInt32[Array, " B"],
  position: Int[Array, " B"],
  purpose: Purpose,
) -> Int[Array, " B"]:
  """Draws one token per row.

  It uses Gumbel noise, so that draft and target can draw the same token, and plain
  decoding draws as either rule does. Draws of the purpose DRAFT need no coupling: on a
  CPU they use one uniform number per row, because noise for 32,128 tokens takes five
  times as long.

  Args:
    probs: [B, V], not necessarily normalised; an entry of 0 is never drawn.
    seed: [B] uint32, the seed of each request, or of its round.
    position: [B] int32, the absolute position of each draw.
    purpose: purpose of the draw (static); see `Purpose`.

  Returns:
    [B] int32
  """
  keys = row_keys(seed, position[:, None], purpose)[:, 0]
  if purpose is Purpose.DRAFT and native.forms():
    return _at_share(probs, jax.vmap(jax.random.uniform)(keys))
  # Gumbel-max trick: the arg max of log probabilities plus this noise has the law of
  # `probs`.
  noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[-1:]))(keys)
  return arg_max(jnp.log(probs) + noise)


def _at_share(
  masses: Float[Array, "B V"], share: Float[Array, " B"]
) -> Int[Array, " B"]:
  """Returns the entry at a share, in [0, 1), of the row's cumulated mass.

  Any order of the entries gives the same law. This one cumulates columns of every
  `_BLOCK`-th entry first, which a CPU does in vectors, then the entries of one column.
  A share is a multiple of 2**-23 and sums are rounded, so probabilities are right to
  about 1e-7. For a row without mass the result is any entry.
  """
  size = masses.shape[-1]
  entries = jnp.pad(masses, ((0, 0), (0, -size % _BLOCK)))
  columns = entries.reshape(len(masses), -1, _BLOCK)
  sums = jnp.sum(columns, axis=1)
  at = share * jnp.sum(sums, axis=-1)
  column, before = _reached(sums, at)
  inside = jnp.take_along_axis(columns, column[:, None, None], axis=2)[..., 0]
  row, _ = _reached(inside, at - before)
  return jnp.minimum(row * _BLOCK + column, size - 1).astype(jnp.int32)


def _reached(masses, at):
  """Index at which cumulated masses [B, n] exceed `at` [B], and the sum before it."""
  ends = jnp.cumsum(masses, axis=-1)
  has_mass = masses > 0
  # Rounding may leave `at` at or above the last sum. The last entry with mass is then
  # taken, never one without mass.
  passes = (ends > at[:, None]) & has_mass
  last = masses.shape[-1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
  index = jnp.where(jnp.any(passes, axis=-1), jnp.argmax(passes, axis=-1), last)
  before = jnp.take_along_axis(ends - masses, index[:, None], axis=-1)[:, 0]
  return index, before


def sample(
  logits: Float[Array, "B V"],
  settings: base.SamplingSettings,
  position: Int[Array, " B"],
  purpose: Purpose,
  text: Int[Array, "B L"],
  place: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> Int[Array, " B"]:
  """Draws from the processed distribution; only takes an arg max if all are greedy.

  Args:
    logits: [B, V], raw, of any floating-point type.
    settings: sampling settings of every row.
    position: [B] int32, the absolute position of each token.
    purpose: purpose of the draw (static); see `Purpose`.
    text: [B, L] int32; the tokens before this one, for the penalty; -1 is no token.
    place: constrains the sharding of logits [B, 1, V] (static).

  Returns:
    [B] int32
  """

  def processed(logits):
    logits = penalized(place(logits[:, None]), settings, text, text[:, :0])
    logits = place(logits)
    probs = processed_probs(logits, settings)[:, 0]
    return draw(probs, settings.seed, position, purpose)

  def largest(logits):
    # Placed in each branch, because XLA may split the operand of a `cond` otherwise.
    return arg_max(place(logits[:, None]))[:, 0]

  if settings.all_greedy:
    return largest(logits)
  needs_more = jnp.any(settings.temperature > 0) | is_penalized(settings)
  return jax.lax.cond(needs_more, processed, largest, logits)
