"""What decoding asks of a mesh; where there is none, nothing.

`engine.calls` traces rounds within the mesh of their partitioner. Its axes are "data",
over which rows are split, and "model", over which the target's vocabulary is.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec


def parts(size: int) -> int:
  """Devices that a vocabulary of this size is split over."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty or size % mesh.shape["model"] else mesh.shape["model"]


def with_parts(
  compute: Callable[[jax.Array, jax.Array], Any], logits: jax.Array
) -> Any:
  """What every device computes of its part of the vocabulary, and of the others' words.

  Args:
    compute: (part [b, n, V / parts], its number []) -> arrays [b, n, ...], the same on
      all devices that have parts of the same rows (`jax.lax.all_gather` over "model").
    logits: [B, n, V]; V is split (`parts`).
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows = None if logits.shape[0] % mesh.shape["data"] else "data"
  return jax.shard_map(
    lambda part: compute(part, jax.lax.axis_index("model")),
    in_specs=PartitionSpec(rows, None, "model"),
    out_specs=PartitionSpec(rows),
    check_vma=False,  # that all devices say the same is not seen
  )(logits)


def whole(x: jax.Array) -> jax.Array:
  """x [B, ...], rows where they are, all else on every device."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, *(None,) * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, spec)
