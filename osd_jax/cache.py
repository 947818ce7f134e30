"""Key/value caches as plain pytrees: written at per-row offsets, rewound by length.

    self keys of one row, T = 6, K = 3, after a round that kept one draft token

        position   0    1    2    3    4    5   6  7  8  9      T + K + 1 slots
        content   BOS  t0   t1   d1   d2   d3   .  .  .  .
        valid     <----- length = 4 ----->                      d2, d3 are stale

Stale entries are never read (attention masks positions >= length) and are
overwritten by the next round. The buffer is K + 1 longer than the output limit
because `dynamic_update_slice` clamps: a write that ran past the end would
silently land on earlier positions.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from osd_jax import native


@flax.struct.dataclass
class KVCache:
  """What a target or draft remembers of its rows; in `cross_*` what prefill fixed.

  Attributes:
    self_keys: per layer [B, H, T + K + 1, D]; tokens fed so far.
    self_values: like self_keys.
    cross_keys: per layer [B, H, S, D]; fixed after prefill.
    cross_values: like cross_keys.
    cross_mask: [B, S] bool; real source tokens.
    length: [B] int32; valid entries of self_keys in each row.
    target_states: [B, S, E] bfloat16; hidden states of the source, for a draft that
      is attached to it; None where nobody asks.
  """

  self_keys: tuple[jax.Array, ...]
  self_values: tuple[jax.Array, ...]
  cross_keys: tuple[jax.Array, ...]
  cross_values: tuple[jax.Array, ...]
  cross_mask: jax.Array
  length: jax.Array
  target_states: jax.Array | None = None


def write(stored: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
  """Writes n new positions of every row at the row's own offset.

  Args:
    stored: [B, H, T, D].
    new: [B, H, n, D].
    length: [B] int32; position of the first new entry. The caller guarantees
      length + n <= T.

  Returns:
    [B, H, T, D]
  """
  new = new.astype(stored.dtype)
  if not native.forms():
    return select(stored, new, length, axis=2)
  if stored.shape[0] == 1:
    # One write a head, which makes a scatter: a single write is fused with what reads
    # it, and XLA CPU then copies the whole cache several times a step.
    starts = jnp.full(stored.shape[1], length[0])
    write_head = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write_head)(stored[0], new[0], starts)[None]
  return jax.vmap(
    lambda row, block, start: jax.lax.dynamic_update_slice(row, block, (0, start, 0))
  )(stored, new, length)


def select(stored: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
  """`write` along any axis, without slices: one pass over what is stored.

  No loop over rows, and nothing to move where heads or rows are split over devices.

  Args:
    stored: [B, ..., T, ...].
    new: [B, ..., n, ...], n small.
    start: [B] int32; of a row whose start is T or more nothing is written.
    axis: of the positions.

  Returns:
    Like `stored`.
  """
  return jax.lax.platform_dependent(
    stored,
    new.astype(stored.dtype),
    start,
    cuda=functools.partial(_summed, axis=axis),
    default=functools.partial(_chosen, axis=axis),
  )


def _chosen(
  stored: jax.Array, new: jax.Array, start: jax.Array, axis: int
) -> jax.Array:
  """`select`, an entry after the other; a GPU would cut each out by a kernel."""
  position = jax.lax.broadcasted_iota(jnp.int32, stored.shape, axis)
  start = start.reshape(-1, *(1,) * (stored.ndim - 1))
  for index in range(new.shape[axis]):
    entry = jax.lax.slice_in_dim(new, index, index + 1, axis=axis)
    stored = jnp.where(position == start + index, entry, stored)
  return stored


def _summed(
  stored: jax.Array, new: jax.Array, start: jax.Array, axis: int
) -> jax.Array:
  """`select`, all entries at once; a TPU would copy the cache for it.

  A sum of one entry and zeros, no product: what is broken stays where it is.
  """
  rows, positions, count = stored.shape[0], stored.shape[axis], new.shape[axis]
  entry = start[:, None, None] + jnp.arange(count)[None, None]
  here = jnp.arange(positions)[None, :, None] == entry
  before, behind = (1,) * (axis - 1), (1,) * (stored.ndim - axis - 1)
  here = here.reshape(rows, *before, positions, count, *behind)
  entries = jnp.where(here, jnp.expand_dims(new, axis), jnp.zeros((), new.dtype))
  if stored.dtype == bool:
    written = jnp.any(entries, axis=axis + 1)
  else:
    written = jnp.sum(entries, axis=axis + 1, dtype=stored.dtype)
  return jnp.where(jnp.any(here, axis=axis + 1), written, stored)


def insert_row(batch, row, slot: jax.Array):
  """Replaces row `slot` of every leaf of a pytree by the only row of another.

  Args:
    batch: pytree whose leaves are [B, ...].
    row: the same pytree with leaves [1, ...].
    slot: [1] int32.

  Returns:
    The pytree with the row replaced; its other rows are untouched.
  """
  return jax.tree.map(
    lambda many, one: jax.lax.dynamic_update_slice_in_dim(
      many, one.astype(many.dtype), slot[0], axis=0
    ),
    batch,
    row,
  )


def take_row(batch, slot: jax.Array):
  """Leaves [1, ...] of row `slot` [1] of a pytree of [B, ...]."""
  return jax.tree.map(
    lambda many: jax.lax.dynamic_slice_in_dim(many, slot[0], 1, axis=0), batch
  )


def empty_self_entries(
  num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
  """Zeroed self keys or values: `num_layers` arrays of `shape` [B, H, T, D]."""
  return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
