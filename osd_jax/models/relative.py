"""T5's relative positions: a bias on attention logits, by buckets of distances.

Source: Raffel et al., 2020 (arXiv 1910.10683), section 2.1.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class RelativePositionBias(nn.Module):
  """T5's bucketed relative position bias, shared by the layers of one stack.

  Attributes:
    num_heads: H.
    num_buckets: entries a head learns.
    max_distance: distances from here on share the last bucket.
    bidirectional: encoder (keys may follow the query) or decoder.
  """

  num_heads: int
  num_buckets: int
  max_distance: int
  bidirectional: bool

  @nn.compact
  def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Bias of every query position towards every key position.

    Args:
      query: [B or 1, n] int32 absolute positions.
      key: [T] int32 absolute positions.

    Returns:
      [B or 1, H, n, T] float32
    """
    init = nn.with_logical_partitioning(
      nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      ("heads", "relpos_buckets"),
    )
    table = self.param("rel_embedding", init, (self.num_heads, self.num_buckets))
    buckets = relative_position_bucket(
      key[None, None, :] - query[:, :, None],
      self.bidirectional,
      self.num_buckets,
      self.max_distance,
    )
    return jnp.transpose(table.T[buckets], (0, 3, 1, 2)).astype(jnp.float32)


def relative_position_bucket(
  relative: jax.Array, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
  """Bucket of a relative position (key minus query), as in T5.

  Half of the buckets hold one exact distance each; the others grow
  logarithmically up to `max_distance` (Raffel et al., 2020, section 2.1).

  Args:
    relative: [...] int32.
    bidirectional: keys after the query get their own half of the buckets.
    num_buckets: number of buckets.
    max_distance: distances from here on share the last bucket.

  Returns:
    [...] int32 in 0..num_buckets - 1
  """
  offset = 0
  distance = -relative
  if bidirectional:
    num_buckets //= 2
    offset = jnp.where(distance < 0, num_buckets, 0)
    distance = jnp.abs(distance)
  else:
    distance = jnp.maximum(distance, 0)
  exact = num_buckets // 2
  # The guard keeps log finite where the exact buckets are used anyway.
  ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact + 1e-6)
  log_bucket = exact + (
    ratio / np.log(max_distance / exact) * (num_buckets - exact)
  ).astype(jnp.int32)
  log_bucket = jnp.minimum(log_bucket, num_buckets - 1)
  return offset + jnp.where(distance < exact, distance, log_bucket)
