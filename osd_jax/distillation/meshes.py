"""Arrays of learning on a mesh: beside the draft, and where they were."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from osd_jax import base


def beside(params: base.Params, tree: Any) -> Any:
  """The arrays of `tree`, those of one device copied to every device of `params`.

  Args:
    params: arrays, of one device or split over a mesh.
    tree: of arrays.
  """
  mesh = _mesh(params)
  if mesh is None:
    return tree
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(
    lambda leaf: leaf if _mesh(leaf) == mesh else jax.device_put(leaf, everywhere), tree
  )


def spans(params: base.Params) -> bool:
  """Whether arrays are on several devices, so that programs of all devices use them."""
  leaf = jax.tree.leaves(params)[0]
  return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def placed_like(before: Any, after: Any) -> Any:
  """`after` where `before` was: XLA places results as it likes.

  Else the next slice, and whoever serves the draft, would be compiled once more.
  """
  if _mesh(before) is None:
    return after
  return jax.device_put(after, jax.tree.map(lambda leaf: leaf.sharding, before))


def _mesh(tree: Any) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
  """The mesh of a tree's first array; None where that is traced or on one device."""
  sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
  return sharding.mesh if isinstance(sharding, NamedSharding) else None
