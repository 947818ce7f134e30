"""Processed distributions and the random draws made from them.

The distribution that is sampled is the distribution that is divided by: temperature,
then top-k, then top-p, then softmax, in float32. Every draw is a function of (request
seed, absolute position, purpose), so a row never depends on its batch mates.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from osd_jax import base, native

_BLOCK = 128  # entries that `arg_max` takes the largest of at once


class Purpose(enum.IntEnum):
  """What a random draw is for; two purposes never share noise."""

  DRAFT = 0
  ACCEPT = 1
  EMIT = 2


def make_settings(
  rows: int,
  *,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  max_length: int,
) -> base.SamplingSettings:
  """The same settings for every row, with checks; see `base.SamplingSettings`.

  Raises:
    ValueError: a value outside its range.
  """
  checks = {
    "temperature": (temperature, 0 <= temperature < np.inf, ">= 0, finite"),
    "top_k": (top_k, top_k >= 0, ">= 0 (0 keeps all)"),
    "top_p": (top_p, 0 < top_p <= 1, "in (0, 1]"),
    "seed": (seed, 0 <= seed < 2**32, "in 0..2**32 - 1"),
    "max_length": (max_length, max_length >= 1, ">= 1"),
  }
  for name, (value, valid, expected) in checks.items():
    if not valid:
      raise base.InputError(
        f"SamplingSettings.{name}: received {value!r}, expected a number {expected}."
      )

  def full(value: float, dtype: type) -> Any:
    # numpy: made for every request, and each eager jnp call costs a dispatch.
    return np.full((rows,), value, dtype)

  return base.SamplingSettings(
    temperature=full(temperature, np.float32),
    top_k=full(top_k, np.int32),
    top_p=full(top_p, np.float32),
    seed=full(seed, np.uint32),
    max_length=full(max_length, np.int32),
  )


def processed_probs(
  logits: Float[Array, "B n V"], settings: base.SamplingSettings
) -> Float[Array, "B n V"]:
  """The distributions that decide sampling and acceptance.

  Args:
    logits: [B, n, V] raw.
    settings: per-row settings. A greedy row becomes one-hot at its arg max.

  Returns:
    [B, n, V] float32; each row sums to 1, or to 0 where a logit is NaN or +inf, or
    all are -inf.
  """
  logits = logits.astype(jnp.float32)
  temperature = settings.temperature[:, None, None]
  greedy = temperature == 0
  largest = jnp.max(logits, -1, keepdims=True)
  # The largest becomes 0 first: no temperature, however small, makes it overflow.
  scaled = (logits - largest) / jnp.where(greedy, 1.0, temperature)
  filters = jnp.any((settings.top_k > 0) | (settings.top_p < 1))
  # The search is only paid for when some row asks for a filter.
  scaled = jax.lax.cond(filters, _filter, lambda x, _: x, scaled, settings)
  choice = jax.lax.cond(jnp.any(greedy), arg_max, _no_choice, logits)[..., None]
  others = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) != choice
  masses = jnp.exp(scaled + jnp.where(greedy & others, -jnp.inf, 0.0))
  # A NaN, also one that the maximum has lost (XLA CPU does), and +inf spoil the sum.
  total = jnp.sum(masses, axis=-1, keepdims=True)
  return jnp.where(jnp.isfinite(total), masses / total, 0.0)


def _no_choice(logits: Float[Array, "B n V"]) -> Int[Array, "B n"]:
  """In place of `arg_max` where no row is greedy."""
  return jnp.zeros(logits.shape[:-1], jnp.int32)


def _filter(
  logits: Float[Array, "B n V"], settings: base.SamplingSettings
) -> Float[Array, "B n V"]:
  """Sets logits outside top-k, then outside top-p of what is left, to -inf.

  Ties with the last one stay in, and NaNs. The largest logit is 0. Nothing is sorted:
  that takes five times as long on a CPU, and moves whole vocabularies where they are
  split.
  """
  size, rank = logits.shape[-1], _ranks(logits)
  top_k, top_p = settings.top_k[:, None, None], settings.top_p[:, None, None]
  kept = jnp.where(top_k > 0, jnp.minimum(top_k, size), size).astype(jnp.float32)
  least = _least_rank(rank, jnp.ones_like(logits), kept)
  mass = jnp.where(rank >= least, jnp.exp(logits), 0.0)
  wanted = top_p * jnp.sum(mass, axis=-1, keepdims=True)
  # A sum is rounded; a row without top-p loses nothing to that, so it does not notice
  # whether a batch mate asked for a filter.
  least = jnp.where(top_p < 1, _least_rank(rank, mass, wanted), least)
  return jnp.where((rank >= least) | jnp.isnan(logits), logits, -jnp.inf)


def _ranks(values: Float[Array, "B n V"]) -> UInt32[Array, "B n V"]:
  """Unsigned numbers in the order of the values: their bits, negatives turned over."""
  values = jnp.where(values == 0, 0.0, values)  # -0 and 0 are one value
  bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits < sign, bits | sign, ~bits)


def _least_rank(
  rank: UInt32[Array, "B n V"], mass: Float[Array, "B n V"], wanted: Float[Array, "..."]
) -> UInt32[Array, "B n 1"]:
  """The largest rank that has, with all above it, so much mass; bit by bit."""

  def with_bit(index, found):
    tried = found | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
    above = jnp.sum(jnp.where(rank >= tried, mass, 0.0), axis=-1, keepdims=True)
    return jnp.where(above >= wanted, tried, found)

  return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros_like(rank[..., :1]))


def arg_max(values: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
  """The first of the largest entries of each row.

  On a CPU block by block: XLA's arg max is not vectorised there, its maximum is, and
  four rows of 32,128 take a twentieth of the time.

  Args:
    values: [..., V]; of a row with a NaN it gives any index.

  Returns:
    [...] int32
  """
  size = values.shape[-1]
  if not native.forms():
    return _first_of_largest(values)
  if size % _BLOCK:
    return jnp.argmax(values, axis=-1).astype(jnp.int32)
  blocks = values.reshape(*values.shape[:-1], size // _BLOCK, _BLOCK)
  block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1, keepdims=True)
  found = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
  return (block[..., 0] * _BLOCK + jnp.argmax(found, axis=-1)).astype(jnp.int32)


def _first_of_largest(values: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
  """`arg_max` by two reductions: over a split vocabulary, two numbers a row travel."""
  index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
  is_largest = values == jnp.max(values, axis=-1, keepdims=True)
  last = values.shape[-1] - 1
  return jnp.min(jnp.where(is_largest, index, last), axis=-1)


def row_keys(
  seed: UInt32[Array, " B"], position: Int[Array, "B n"], purpose: Purpose
) -> Key[Array, "B n"]:
  """Random keys of draws at absolute positions.

  Args:
    seed: [B] uint32.
    position: [B, n] int32; index of the token in the row's output.
    purpose: what is drawn.

  Returns:
    [B, n] keys.
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
  """Draws one token a row.

  With Gumbel noise, so that draft and target may draw alike, and plain decoding as
  either rule does. What the draft draws for itself is drawn on a CPU with a single
  uniform number a row: noise for 32,128 tokens takes five times as long.

  Args:
    probs: [B, V], not necessarily normalised; an entry of 0 is never drawn.
    seed: [B] uint32.
    position: [B] int32.
    purpose: of the draw.

  Returns:
    [B] int32
  """
  keys = row_keys(seed, position[:, None], purpose)[:, 0]
  if purpose is Purpose.DRAFT and native.forms():
    return _at_share(probs, jax.vmap(jax.random.uniform)(keys))
  noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[-1:]))(keys)
  return arg_max(jnp.log(probs) + noise)


def _at_share(
  masses: Float[Array, "B V"], share: Float[Array, " B"]
) -> Int[Array, " B"]:
  """The entry at a share of the row's mass, its entries laid end to end.

  Their order is any: columns of every `_BLOCK`-th entry are added up first, which a CPU
  does in vectors, then the entries of the one column. A share is a multiple of 2**-23,
  and sums are rounded: probabilities are right to some 1e-7.

  Args:
    masses: [B, V], none negative.
    share: [B] in [0, 1).

  Returns:
    [B] int32; of a row without mass any entry.
  """
  size = masses.shape[-1]
  padded = jnp.pad(masses, ((0, 0), (0, -size % _BLOCK)))
  columns = padded.reshape(len(masses), -1, _BLOCK)
  sums = jnp.sum(columns, axis=1)
  at = share * jnp.sum(sums, axis=-1)
  column, before = _reached(sums, at)
  inside = jnp.take_along_axis(columns, column[:, None, None], axis=2)[..., 0]
  row, _ = _reached(inside, at - before)
  return jnp.minimum(row * _BLOCK + column, size - 1).astype(jnp.int32)


def _reached(masses, at):
  """Where the sum of [B, n] masses passes [B] `at`, and the sum before that entry."""
  ends = jnp.cumsum(masses, axis=-1)
  has_mass = masses > 0
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
) -> Int[Array, " B"]:
  """Draws from the processed distribution, by arg max alone if all rows are greedy.

  Args:
    logits: [B, V] raw.
    settings: per-row settings.
    position: [B] int32.
    purpose: of the draw.

  Returns:
    [B] int32
  """

  def sampled(logits):
    probs = processed_probs(logits[:, None], settings)[:, 0]
    return draw(probs, settings.seed, position, purpose)

  return jax.lax.cond(jnp.any(settings.temperature > 0), sampled, arg_max, logits)
