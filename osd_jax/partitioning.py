"""Where arrays live: a mesh of (data, model) and the rules that place every array.

Logical axis names come from the models, rules are resolved only here. On one device
everything is a no-op.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from osd_jax import base

# t5x's standard rules for (data, model): weights are split by heads, hidden units and
# vocabulary; activations and rows in flight by row.
RULES: dict[str, str | None] = {
  "vocab": "model",
  "embed": None,
  "joined_kv": "model",
  "mlp": "model",
  "heads": None,
  "relpos_buckets": None,
}


@dataclasses.dataclass(frozen=True)
class PartitionConfig:
  """Shape of the mesh.

  Attributes:
    data: devices that rows are split over.
    model: devices that weights are split over. data * model devices are used.
  """

  data: int = 1
  model: int = 1

  def __post_init__(self):
    base.check_counts(self, "data", "model")


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """Places parameters and rows on a mesh. Hashable: a static argument.

  Attributes:
    mesh: axes "data" and "model".
  """

  mesh: Mesh

  @property
  def replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec())

  def params(self, model: base.Model) -> Any:
    """Shardings shaped like the parameters of `model`."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(
      lambda spec, shape: self._resolved(spec, shape.shape),
      model.logical_axes(),
      shapes,
      is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )

  def place_params(self, model: base.Model, params: base.Params) -> base.Params:
    """Parameters split by the rules."""
    if self.mesh.size == 1:
      return jax.device_put(params)
    return jax.device_put(params, self.params(model))

  def place_rows(self, tree: Any) -> Any:
    """A tree of [rows, ...] arrays split over "data"; whole where that cannot be."""
    if self.mesh.size == 1:
      return jax.device_put(tree)
    return jax.device_put(tree, jax.tree.map(self._rows, tree))

  def constrain_rows(self, tree: Any) -> Any:
    """Inside jit: the same placement as `place_rows`."""
    if self.mesh.size == 1:
      return tree
    return jax.lax.with_sharding_constraint(tree, jax.tree.map(self._rows, tree))

  def _rows(self, leaf: Any) -> NamedSharding:
    split = leaf.ndim > 0 and leaf.shape[0] % self.mesh.shape["data"] == 0
    return NamedSharding(self.mesh, PartitionSpec("data" if split else None))

  def _resolved(self, spec: PartitionSpec, shape: tuple[int, ...]) -> NamedSharding:
    axes = []
    for name, size in zip(spec, shape, strict=False):
      axis = RULES.get(name) if name is not None else None
      fits = axis is not None and size % self.mesh.shape[axis] == 0
      axes.append(axis if fits else None)
    return NamedSharding(self.mesh, PartitionSpec(*axes))


@functools.cache
def make(config: PartitionConfig = PartitionConfig()) -> Partitioner:
  """A partitioner over the first data * model devices.

  Raises:
    ValueError: there are fewer devices.
  """
  needed = config.data * config.model
  devices = jax.devices()
  if len(devices) < needed:
    raise base.InputError(
      f"partitioning: received data={config.data}, model={config.model}, which needs"
      f" {needed} devices, but there are {len(devices)} ({devices[0].platform});"
      " lower PartitionConfig."
    )
  grid = np.asarray(devices[:needed]).reshape(config.data, config.model)
  return Partitioner(Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2))
