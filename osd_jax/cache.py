"""Key/value caches as plain pytrees, written at per-row offsets, rewound by length.

    self keys of the target in one row, T = 6, K = 3

      position                0    1    2    3    4    5    6    7   8  9   T + K + 1
      t0, t1 were emitted    BOS  t0    .    .    .    .    .    .   .  .   length 2
      a round feeds 4        BOS  t0   t1   d1   d2   d3    .    .   .  .   length 6
      it accepts only d1     BOS  t0   t1   d1   d2   d3    .    .   .  .   length 4
      the next round feeds   BOS  t0   t1   d1   r1   e1   e2   e3   .  .   length 8

Rewinding only sets `length`: the rejected d2, d3 stay in memory, but attention masks
positions >= length, and the next round overwrites them. It feeds the recovered token
r1, which replaced d2, and its own drafted tokens e1, e2, e3.

The buffer has K + 1 positions more than the output limit because
`dynamic_update_slice` clamps its start: a write past the end would silently overwrite
earlier positions.
"""

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from osd_jax import native


@flax.struct.dataclass
class KVCache:
  """Keys and values of a target or draft; `cross_*` does not change after prefill.

  A decoder-only model reads all keys in one product, so its `self_keys` also hold those
  of the prompt, after the others: [B, H, T + K + 1 + S, D]. Its `cross_*` are empty.
  """

  self_keys: tuple[jax.Array, ...]  # per layer [B, H, T + K + 1, D], or as above
  self_values: tuple[jax.Array, ...]  # like self_keys
  cross_keys: tuple[jax.Array, ...]  # per layer [B, H, S, D]
  cross_values: tuple[jax.Array, ...]  # like cross_keys
  cross_mask: jax.Array  # [B, S] bool; real source tokens
  length: jax.Array  # [B] int32; number of tokens fed after the prompt in each row
  # [B, S, E] bfloat16; the target's hidden states of the source, for an attached draft;
  # None if there is none.
  target_states: jax.Array | None = None
  # For a draft that reads them, the last hidden state after each input. Of a target:
  # [B, T + K + 1, E], valid to `length`; of the draft itself: [B, n, E], of the inputs
  # fed last. Otherwise None.
  token_states: jax.Array | None = None

  @classmethod
  def prefilled(cls, cross: Sequence, mask: jax.Array, length: int) -> "KVCache":
    """The cache of rows after prefill, with room for `length` tokens in each.

    `cross` are, per layer, keys and values [B, H, S, D] that prefill computed; the
    entries of fed tokens get the same number of heads, size and type. `mask` [B, S]
    bool says which may be attended to.
    """
    cross_keys, cross_values = zip(*cross)
    rows, heads, _, size = cross_keys[0].shape
    empty = lambda: jnp.zeros((rows, heads, length, size), cross_keys[0].dtype)
    return cls(
      self_keys=tuple(empty() for _ in cross),
      self_values=tuple(empty() for _ in cross),
      cross_keys=cross_keys,
      cross_values=cross_values,
      cross_mask=mask,
      length=jnp.zeros((rows,), jnp.int32),
    )

  @classmethod
  def joined(cls, entries: Sequence, mask: jax.Array, length: int) -> "KVCache":
    """`prefilled` for a decoder-only model."""
    room = lambda prompt: jnp.pad(prompt, ((0, 0), (0, 0), (length, 0), (0, 0)))
    keys, values = zip(*entries)
    return cls(
      self_keys=tuple(map(room, keys)),
      self_values=tuple(map(room, values)),
      cross_keys=(),
      cross_values=(),
      cross_mask=mask,
      length=jnp.zeros(mask.shape[:1], jnp.int32),
    )

  @property
  def slots(self) -> int:
    """Number of tokens that a row has room for, T + K + 1."""
    joined = 0 if self.cross_keys else self.cross_mask.shape[1]
    return self.self_keys[0].shape[2] - joined

  def with_token_states(self, states: jax.Array) -> "KVCache":
    """The cache of a target with the states [B, n, E] of inputs that it is fed now."""
    assert self.token_states is not None
    # As the keys of a single head.
    stored = write(self.token_states[:, None], states[:, None], self.length)
    return self.replace(token_states=stored[:, 0])

  def advanced(self, written: Sequence, count: int) -> "KVCache":
    """The cache after a step of `count` tokens that wrote self keys and values."""
    keys, values = zip(*written)
    return self.replace(self_keys=keys, self_values=values, length=self.length + count)


def write(
  stored: jax.Array, new: jax.Array, length: jax.Array, slots: int | None = None
) -> jax.Array:
  """Writes n new positions into each row, starting at the row's own length.

  `stored` [B, H, T, D] are the keys or values of a layer, `new` [B, H, n, D] the new
  entries. The caller guarantees length [B] + n <= `slots`, which is T if it is None.
  """
  new = new.astype(stored.dtype)
  if not native.forms() and stored.shape[0] == 1:
    return jax.lax.dynamic_update_slice_in_dim(stored, new, length[0], axis=2)
  if not native.forms():
    # GPUs and TPUs, and meshes: per-row slices would become a loop over rows.
    part = jax.lax.slice_in_dim(stored, 0, slots, axis=2)
    part = select(part, new, length, axis=2)
    return jax.lax.dynamic_update_slice_in_dim(stored, part, 0, axis=2)
  if stored.shape[0] == 1:
    # Write each head separately, which compiles to a scatter. XLA CPU would fuse a
    # single write with its readers and copy the whole cache several times per step.
    starts = jnp.full(stored.shape[1], length[0])
    write_head = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write_head)(stored[0], new[0], starts)[None]
  return jax.vmap(
    lambda row, block, start: jax.lax.dynamic_update_slice(row, block, (0, start, 0))
  )(stored, new, length)


def select(stored: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
  """Like `write` along any axis, but in one pass over `stored`, without slices.

  There is no loop over rows, and nothing moves if heads or rows are split over devices.
  Takes `stored` [B, ..., T, ...] and `new` [B, ..., n, ...] with a small n; rows whose
  start [B] is T or more are not written.
  """
  return jax.lax.platform_dependent(
    stored,
    new.astype(stored.dtype),
    start,
    cuda=functools.partial(_summed, axis=axis),
    default=functools.partial(_chosen, axis=axis),
  )


def _chosen(cache: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
  """`select`, one entry at a time; slow on GPUs, which launch a kernel per slice."""
  # n is small, so this is n passes that XLA fuses into one.
  position = jax.lax.broadcasted_iota(jnp.int32, cache.shape, axis)
  start = start.reshape(-1, *(1,) * (cache.ndim - 1))
  for index in range(new.shape[axis]):
    entry = jax.lax.slice_in_dim(new, index, index + 1, axis=axis)
    cache = jnp.where(position == start + index, entry, cache)
  return cache


def _summed(
  stored: jax.Array, new: jax.Array, start: jax.Array, axis: int
) -> jax.Array:
  """`select`, all entries at once; slow on TPUs, which copy the cache for it.

  Sums one entry and zeros instead of multiplying by a mask, because 0 * NaN would
  spread a broken entry to other positions.
  """
  rows, positions, count = stored.shape[0], stored.shape[axis], new.shape[axis]
  entry = start[:, None, None] + jnp.arange(count)[None, None]
  # here[b, t, i]: position t of row b receives the i-th new entry.
  here = jnp.arange(positions)[None, :, None] == entry
  before, after = (1,) * (axis - 1), (1,) * (stored.ndim - axis - 1)
  here = here.reshape(rows, *before, positions, count, *after)
  entries = jnp.where(here, jnp.expand_dims(new, axis), jnp.zeros((), new.dtype))
  if stored.dtype == bool:
    new_entries = jnp.any(entries, axis=axis + 1)
  else:
    new_entries = jnp.sum(entries, axis=axis + 1, dtype=stored.dtype)
  return jnp.where(jnp.any(here, axis=axis + 1), new_entries, stored)


def insert_row(batch, row, slot: jax.Array):
  """Returns a pytree of [B, ...] with row `slot` [1] replaced by one of [1, ...]."""
  return jax.tree.map(
    lambda many, one: jax.lax.dynamic_update_slice_in_dim(
      many, one.astype(many.dtype), slot[0], axis=0
    ),
    batch,
    row,
  )


def take_row(batch, slot: jax.Array):
  """Returns leaves [1, ...]: row `slot` [1] of a pytree of [B, ...]."""
  return jax.tree.map(
    lambda many: jax.lax.dynamic_slice_in_dim(many, slot[0], 1, axis=0), batch
  )
