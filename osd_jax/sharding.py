"""Where arrays live: a mesh of (data, model) and the rules that place every array.

Logical axis names come from the models, rules are resolved only here. On one device
everything is a no-op.
"""

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from osd_jax import base
from osd_jax.cache import KVCache

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

_CALLED = {"vocab": "token ids", "joined_kv": "heads", "mlp": "hidden units"}


@dataclasses.dataclass(frozen=True)
class PartitionConfig:
  """Shape of the mesh.

  Attributes:
    data: devices that rows are split over.
    model: devices that weights are split over. data * model devices are used.
    whole_draft: a draft of at most so many parameters is whole on every device: its
      steps are too short to wait for one another's sums. 0 splits every draft.
    cpu_threads: threads that a computation on a CPU is split over; None: as many as
      there are cores. With 1 the learner and serving have a core each and never wait
      for each other's parts: better as long as learning is under way most of the time,
      that is with small targets. Read when JAX starts: the first one in a process
      counts.
  """

  data: int = 1
  model: int = 1
  whole_draft: int = 100_000_000
  cpu_threads: int | None = None

  def __post_init__(self):
    base.check_counts(self, "data", "model")
    base.check_counts(self, "whole_draft", least=0)
    if self.cpu_threads is not None:
      base.check_counts(self, "cpu_threads")


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """Places parameters and rows on a mesh. Hashable: a static argument.

  Attributes:
    mesh: axes "data" and "model".
    whole_draft: see `PartitionConfig`.
  """

  mesh: Mesh
  whole_draft: int = PartitionConfig.whole_draft

  @property
  def replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec())

  def params(self, model: base.Model) -> Any:
    """Shardings shaped like the parameters of `model`."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(
      lambda spec, shape: self._resolved(spec, shape.shape, model.head_dim),
      model.logical_axes(),
      shapes,
      is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )

  def place_params(self, model: base.Model, params: base.Params) -> base.Params:
    """Parameters split by the rules."""
    if self.mesh.size == 1:
      return jax.device_put(params)
    return jax.device_put(params, self.params(model))

  def unsplit(self, model: base.Model) -> str:
    """Which axes of a model stay whole because they do not divide; "" where all do."""
    if self.mesh.shape["model"] == 1:
      return ""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    whole = {}

    def look(spec, shape):
      for name, axis, units in _units(spec, shape.shape, model.head_dim):
        if axis and units % self.mesh.shape[axis]:
          whole[_CALLED[name]] = units

    axes = model.logical_axes()
    jax.tree.map(look, axes, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))
    if not whole:
      return ""
    named = " and ".join(f"its {count} {what}" for what, count in whole.items())
    return (
      f"The {model.name} is not split by {named}: PartitionConfig.model ="
      f" {self.mesh.shape['model']} does not divide them, so that every device has all."
    )

  def draft_params(self, model: base.Model) -> Any:
    """`params` of a draft: whole on every device where it is small."""
    shardings = self.params(model)
    if not self.is_whole(model):
      return shardings
    return jax.tree.map(lambda _: self.replicated, shardings)

  def place_draft(self, model: base.Model, params: base.Params) -> base.Params:
    """Parameters of a draft where `draft_params` wants them."""
    if self.mesh.size == 1:
      return jax.device_put(params)
    return jax.device_put(params, self.draft_params(model))

  def is_whole(self, model: base.Model) -> bool:
    """Whether a draft has no more than `whole_draft` parameters of its own."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes)) <= self.whole_draft

  def place_rows(self, tree: Any) -> Any:
    """A tree of [rows, ...] arrays split over "data"; whole where that cannot be."""
    if self.mesh.size == 1:
      return jax.device_put(tree)
    return jax.device_put(tree, self.of_rows(tree))

  def own_rows(self, rows: int) -> np.ndarray:
    """Which of [rows, ...], placed by row, devices of this process hold; ascending."""
    if self.mesh.size == 1:
      return np.arange(rows)
    held = self._fitting(("data",), (rows,)).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[at] for at in held.values()]))

  def place_own_rows(self, rows: int, tree: Any) -> Any:
    """`place_rows` of arrays [rows, ...], of which `tree` has `own_rows` alone."""
    if self.mesh.size == 1:
      return jax.device_put(tree)
    return jax.tree.map(
      lambda own: jax.make_array_from_process_local_data(
        self._fitting(("data",), (rows,)), own, (rows, *own.shape[1:])
      ),
      tree,
    )

  def parts(self, rows: int) -> int:
    """Parts that rows are split into; 1 where they cannot be."""
    data = self.mesh.shape["data"]
    return 1 if rows % data else data

  def by_part(self, function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of [rows, ...] leaves for every part's rows; inside jit.

    What it gives has rows, too. Over "model" XLA goes on deciding.
    """
    by_row = PartitionSpec("data")
    split = jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=by_row,
      out_specs=by_row,
      axis_names={"data"},
      check_vma=False,
    )
    return split(*trees)

  def of_draft_rows(self, model: base.Model | None, cache: Any) -> Any:
    """`of_rows` of a draft's cache: heads stay together where the draft does."""
    if model is None or not self.is_whole(model):
      return self.of_rows(cache)
    placed = jax.tree.map(self._by_row, cache)
    if isinstance(cache, KVCache):
      placed = placed.replace(length=self.replicated)
    return placed

  def _by_row(self, leaf: Any) -> NamedSharding:
    return self._fitting(("data",), leaf.shape)

  def of_rows(self, tree: Any) -> Any:
    """Shardings: rows over "data", the heads of a cache over "model"."""

    def by_head(leaf):
      return self._fitting(("data", "model"), leaf.shape)

    def placed(node):
      if not isinstance(node, KVCache):
        return self._by_row(node)
      heads = ("self_keys", "self_values", "cross_keys", "cross_values")
      split = {name: jax.tree.map(by_head, getattr(node, name)) for name in heads}
      whole = jax.tree.map(self._by_row, node)
      return whole.replace(length=self.replicated, **split)  # hosts read lengths

    return jax.tree.map(placed, tree, is_leaf=lambda node: isinstance(node, KVCache))

  def _fitting(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The first dimensions split over these axes; whole where that cannot be."""
    fits = [
      axis if size % self.mesh.shape[axis] == 0 else None
      for axis, size in zip(axes, shape, strict=False)
    ]
    return NamedSharding(self.mesh, PartitionSpec(*fits))

  def _resolved(
    self, spec: PartitionSpec, shape: tuple[int, ...], head_dim: int
  ) -> NamedSharding:
    axes = [
      None if axis is None or units % self.mesh.shape[axis] else axis
      for _, axis, units in _units(spec, shape, head_dim)
    ]
    return NamedSharding(self.mesh, PartitionSpec(*axes))


def _units(
  spec: PartitionSpec, shape: tuple[int, ...], head_dim: int
) -> Iterator[tuple[str, str | None, int]]:
  """Of every dimension: logical name, axis of the mesh, parts that it may come in."""
  for named, size in zip(spec, shape, strict=False):
    name = str(named)
    yield name, RULES.get(name), size // head_dim if name == "joined_kv" else size


@functools.cache
def make(config: PartitionConfig = PartitionConfig()) -> Partitioner:
  """A partitioner over the first data * model devices.

  Raises:
    InputError: there are fewer devices.
  """
  if config.cpu_threads is not None:
    _start(config.cpu_threads)
  return over(config, jax.devices())


def over(config: PartitionConfig, devices: Sequence[Any]) -> Partitioner:
  """`make` over the first of the given devices, which need not be there."""
  needed = config.data * config.model
  if len(devices) < needed:
    raise base.InputError(
      f"partitioning: received data={config.data}, model={config.model}, which needs"
      f" {needed} devices, but there are {len(devices)} ({devices[0].platform});"
      " lower PartitionConfig."
    )
  grid = np.asarray(devices[:needed]).reshape(config.data, config.model)
  mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  return Partitioner(mesh, config.whole_draft)


def on_host(tree: Any) -> Any:
  """Values of arrays on every host; where they are split over hosts, all call this."""

  def value(leaf):
    split = isinstance(leaf, jax.Array) and not (
      leaf.is_fully_addressable or leaf.is_fully_replicated
    )
    return multihost_utils.process_allgather(leaf, tiled=True) if split else leaf

  return jax.device_get(jax.tree.map(value, tree))


def join(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Makes this process one of several that serve together; before JAX starts.

  All run the same program over the same stream, each on devices of its own, and the
  mesh has those of all.

  Args:
    coordinator: "HOST:PORT" of the first process; None where the cluster says all
      (TPU pods, Slurm, Open MPI).
    num_processes: of all.
    process_id: of this one, from 0.

  Raises:
    InputError: the others were not met.
  """
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      coordinator, num_processes, process_id, heartbeat_timeout_seconds=_HEARTBEAT
    )
  except (RuntimeError, ValueError) as error:
    raise base.InputError(
      f"--multihost: the processes did not meet ({str(error).splitlines()[0]});"
      " give --coordinator HOST:PORT, --num_processes and --process_id to each."
    ) from error


_HEARTBEAT = 30  # seconds of silence after which the other processes end, too


def _start(cpu_threads: int) -> None:
  """Starts JAX with so many threads a computation on a CPU, if that can still be."""
  if _has_started():
    warnings.warn(
      f"PartitionConfig.cpu_threads: JAX has started already, so that {cpu_threads}"
      " changes nothing; make the server before anything else is computed.",
      stacklevel=4,
    )
    return
  # Who calls computes: with one thread all would else take turns on a single other one.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  with _environment(
    NPROC=str(cpu_threads),  # XLA takes it for the number of cores
    XLA_FLAGS=" ".join(
      [*_IN_TURN[: cpu_threads == 1], os.environ.get("XLA_FLAGS", "")]
    ),
  ):
    jax.devices()


# What could run side by side XLA gives to its pool, too. Of one thread, that is busy
# with an update, and a prompt would wait for a slice.
_IN_TURN = ("--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",)


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
  """Environment variables that are others within."""
  before = {name: os.environ.get(name) for name in changes}
  os.environ.update(changes)
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value


def _has_started() -> bool:
  """Whether JAX has its devices: their number can then no longer be set."""
  before = jax.config.jax_num_cpu_devices
  try:
    jax.config.update("jax_num_cpu_devices", before + 1)
  except RuntimeError:
    return True
  jax.config.update("jax_num_cpu_devices", before)
  return False


def copy_to_mesh_of(params: base.Params, tree: Any) -> Any:
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


def is_distributed(params: base.Params) -> bool:
  """Whether arrays are on several devices, so that programs of all devices use them."""
  leaf = jax.tree.leaves(params)[0]
  return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def place_like(before: Any, after: Any) -> Any:
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


def vocab_shards(size: int) -> int:
  """Devices that a vocabulary of this size is split over."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty or size % mesh.shape["model"] else mesh.shape["model"]


def map_vocab_shards(
  compute: Callable[[jax.Array, jax.Array], Any], logits: jax.Array
) -> Any:
  """What every device computes of its part of the vocabulary, and of the others' words.

  Args:
    compute: (part [b, n, V / parts], its number []) -> arrays [b, n, ...], the same on
      all devices that have parts of the same rows (`jax.lax.all_gather` over "model").
    logits: [B, n, V]; V is split (`vocab_shards`).
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows = None if logits.shape[0] % mesh.shape["data"] else "data"
  return jax.shard_map(
    lambda part: compute(part, jax.lax.axis_index("model")),
    in_specs=PartitionSpec(rows, None, "model"),
    out_specs=PartitionSpec(rows),
    check_vma=False,  # that all devices say the same is not seen
  )(logits)


def split_rows_only(x: jax.Array) -> jax.Array:
  """x [B, ...], rows where they are, all else on every device."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, *(None,) * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, spec)
