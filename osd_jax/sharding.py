"""Sharding: a mesh with axes (data, model) and the rules that place arrays on it.

    mesh (data 2, model 2)           model 0        model 1
      data 0   rows 0 .. B/2 - 1     heads 0, 1     heads 2, 3
      data 1   rows B/2 .. B - 1     heads 0, 1     heads 2, 3

Models name the logical axes of their parameters; only this module maps them to the
mesh. A dimension that the mesh does not divide stays whole on every device. With one
device everything here is a no-op.
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
# vocabulary, and rows in flight over "data".
RULES: dict[str, str | None] = {
  "vocab": "model",
  "embed": None,
  "joined_kv": "model",
  "mlp": "model",
  "heads": None,
  "relpos_buckets": None,
}

# Drafts with at most this many parameters are replicated instead of split: their steps
# are too short to wait for sums over devices.
WHOLE_DRAFT = 100_000_000

# Names for messages about axes that could not be split.
_AXIS_NAMES = {"vocab": "token ids", "joined_kv": "heads", "mlp": "hidden units"}


@dataclasses.dataclass(frozen=True)
class PartitionConfig(base.Config):
  """Shape of the mesh; data * model devices are used.

  Attributes:
    data: number of devices that rows are split over.
    model: number of devices that weights are split over.
    cpu_threads: number of threads per computation on a CPU; None uses all cores. With
      1, learning and serving have a core each and never wait in the same thread pool,
      which pays if the target is small, so that the learner is busy most of the time.
      Takes effect when JAX starts, so the first config in a process counts.
  """

  data: base.Count = 1
  model: base.Count = 1
  cpu_threads: base.Count | None = None


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """Places parameters and rows on a mesh. Hashable, so it can be a static argument."""

  mesh: Mesh  # mesh with axes "data" and "model"
  # A draft with at most this many parameters is replicated.
  whole_draft: int = WHOLE_DRAFT

  @property
  def replicated(self) -> NamedSharding:
    """The sharding of an array that is whole on every device."""
    return NamedSharding(self.mesh, PartitionSpec())

  def params(self, model: base.Model) -> Any:
    """Returns a tree of shardings shaped like the parameters of `model`."""

    def sharding(dimensions):
      # JAX splits axes evenly or not at all.
      axes = [
        None if axis is None or units % self.mesh.shape[axis] else axis
        for _, axis, units in dimensions
      ]
      return NamedSharding(self.mesh, PartitionSpec(*axes))

    return _map_dimensions(sharding, model)

  def place_params(self, model: base.Model, params: base.Params) -> base.Params:
    """Puts parameters on the mesh, split by `RULES`."""
    if self.mesh.size == 1:
      return jax.device_put(params)
    return jax.device_put(params, self.params(model))

  def unsplit(self, model: base.Model) -> str:
    """Returns a message about axes that the mesh does not divide, or ""."""
    if self.mesh.shape["model"] == 1:
      return ""
    whole = {}

    def check(dimensions):
      for name, axis, units in dimensions:
        if axis and units % self.mesh.shape[axis]:
          whole[_AXIS_NAMES[name]] = units

    _map_dimensions(check, model)
    if not whole:
      return ""
    names = " and ".join(f"its {count} {what}" for what, count in whole.items())
    return (
      f"The {model.name} is not split by {names}: PartitionConfig.model ="
      f" {self.mesh.shape['model']} does not divide them, so every device holds all."
    )

  def place_draft(self, model: base.Model, params: base.Params) -> base.Params:
    """Like `place_params`, but small drafts are replicated."""
    if self.mesh.size > 1 and self.is_whole(model):
      return jax.device_put(params, self.replicated)
    return self.place_params(model, params)

  def is_whole(self, model: base.Model) -> bool:
    """Whether a draft is small enough to be replicated."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes)) <= self.whole_draft

  def place_rows(self, tree: Any) -> Any:
    """Puts [rows, ...] arrays on the mesh, split over "data" if that divides them."""
    if self.mesh.size == 1:
      return jax.device_put(tree)
    return jax.device_put(tree, self.of_rows(tree))

  def own_rows(self, rows: int) -> np.ndarray:
    """Returns the indices of the rows that this process's devices hold, ascending."""
    if self.mesh.size == 1:
      return np.arange(rows)
    local = self._fitting(("data",), (rows,)).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[at] for at in local.values()]))

  def place_own_rows(self, rows: int, tree: Any) -> Any:
    """Like `place_rows`, but `tree` holds only the rows in `own_rows(rows)`."""
    if self.mesh.size == 1:
      return jax.device_put(tree)
    return jax.tree.map(
      lambda own: jax.make_array_from_process_local_data(
        self._fitting(("data",), (rows,)), own, (rows, *own.shape[1:])
      ),
      tree,
    )

  def parts(self, rows: int) -> int:
    """Returns the number of parts that rows are split into; 1 if they do not divide."""
    data = self.mesh.shape["data"]
    return 1 if rows % data else data

  def by_part(self, function: Callable[..., Any], *trees: Any) -> Any:
    """Applies `function` to each part's rows separately; call it inside jit.

    Leaves and results are [rows, ...]. Over "model", XLA still chooses the sharding.
    """
    by_row = PartitionSpec("data")
    split = jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=by_row,
      out_specs=by_row,
      axis_names={"data"},
      check_vma=False,  # JAX cannot see that results are equal over "model"
    )
    return split(*trees)

  def of_rows(self, tree: Any, split_heads: bool = True) -> Any:
    """Returns shardings: rows over "data", and heads of a `KVCache` over "model"."""

    def by_row(leaf):
      return self._fitting(("data",), leaf.shape)

    def by_head(leaf):
      # Each device attends with its own heads, so no key or value ever moves.
      return self._fitting(("data", "model"), leaf.shape)

    def placed(node):
      if not isinstance(node, KVCache):
        return by_row(node)
      shardings = jax.tree.map(by_row, node)
      if split_heads:
        heads = ("self_keys", "self_values", "cross_keys", "cross_values")
        split = {name: jax.tree.map(by_head, getattr(node, name)) for name in heads}
        shardings = shardings.replace(**split)
      return shardings.replace(length=self.replicated)  # every host reads lengths

    return jax.tree.map(placed, tree, is_leaf=lambda node: isinstance(node, KVCache))

  def of_draft_rows(self, model: base.Model | None, cache: Any) -> Any:
    """Like `of_rows` for a draft's cache; replicated drafts keep all heads together."""
    return self.of_rows(cache, model is None or not self.is_whole(model))

  def _fitting(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Splits the first dimensions over `axes`, each only if the mesh divides it."""
    fits = [
      axis if size % self.mesh.shape[axis] == 0 else None
      for axis, size in zip(axes, shape, strict=False)
    ]
    return NamedSharding(self.mesh, PartitionSpec(*fits))


def _map_dimensions(function: Callable[[Any], Any], model: base.Model) -> Any:
  """Maps parameters to `function` of their dimensions: (name, mesh axis, units)."""

  def dimensions(spec, shape):
    for name, size in zip(map(str, spec), shape.shape, strict=False):
      # A head is one unit: its D entries are never split over devices.
      units = size // model.head_dim if name == "joined_kv" else size
      yield name, RULES.get(name), units

  return jax.tree.map(
    lambda spec, shape: function(dimensions(spec, shape)),
    model.logical_axes(),
    jax.eval_shape(model.init, jax.random.key(0)),
    is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
  )


@functools.cache
def make(config: PartitionConfig = PartitionConfig()) -> Partitioner:
  """Returns a partitioner over data * model devices; InputError if there are fewer."""
  if config.cpu_threads is not None:
    _start(config.cpu_threads)
  return over(config, jax.devices())


def over(config: PartitionConfig, devices: Sequence[Any]) -> Partitioner:
  """Like `make`, for given devices, which need not exist: compilers describe them."""
  needed = config.data * config.model
  if len(devices) < needed:
    raise base.InputError(
      f"PartitionConfig: received data={config.data}, model={config.model}, which needs"
      f" {needed} devices, but there are {len(devices)} ({devices[0].platform});"
      " lower data or model."
    )
  # Neighbouring devices share the model axis, which communicates in every layer.
  grid = np.asarray(devices[:needed]).reshape(config.data, config.model)
  # Auto: XLA derives the shardings of intermediate arrays from those of the arguments.
  mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  return Partitioner(mesh)


def on_host(tree: Any) -> Any:
  """Fetches arrays to every host. If they span hosts, all hosts must call this."""

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
  """Connects this process to the others that serve together; call before JAX starts.

  All processes run the same program over the same stream. Each has devices of its own,
  and the mesh spans the devices of all. `coordinator` is "HOST:PORT" of the first
  process; None lets the cluster provide all three arguments (TPU pods, Slurm, Open
  MPI). `process_id` starts at 0.

  Raises:
    InputError: the processes could not connect.
  """
  # CPU devices of several processes need gloo; accelerators ignore this setting.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      coordinator, num_processes, process_id, heartbeat_timeout_seconds=_HEARTBEAT
    )
  except (RuntimeError, ValueError) as error:
    raise base.InputError(
      f"--multihost: the processes could not connect ({str(error).splitlines()[0]});"
      " pass --coordinator HOST:PORT, --num_processes and --process_id to each."
    ) from error


# If a process is silent for this many seconds, the others stop too.
_HEARTBEAT = 30


def _start(cpu_threads: int) -> None:
  """Starts JAX with this many threads per CPU computation; warns if it is too late."""
  if _has_started():
    warnings.warn(
      f"PartitionConfig.cpu_threads: JAX has started already, so {cpu_threads} has no"
      " effect; create the server before anything else is computed.",
      stacklevel=4,
    )
    return
  # Run computations on the calling thread; by default one worker thread runs all.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  with _environment(
    NPROC=str(cpu_threads),  # XLA reads this as the number of cores
    XLA_FLAGS=" ".join(
      [*_SEQUENTIAL[: cpu_threads == 1], os.environ.get("XLA_FLAGS", "")]
    ),
  ):
    jax.devices()


# With a single thread, XLA would queue parallel operations behind a running update, and
# prompts would wait for it. This scheduler runs them in sequence on the caller.
_SEQUENTIAL = ("--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",)


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
  """Sets environment variables inside the context."""
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
  """Whether JAX has created its devices; their number cannot be set after that."""
  # JAX has no public query for this, but it refuses to change the number afterwards.
  before = jax.config.jax_num_cpu_devices
  try:
    jax.config.update("jax_num_cpu_devices", before + 1)
  except RuntimeError:
    return True
  jax.config.update("jax_num_cpu_devices", before)
  return False


def copy_to_mesh_of(params: base.Params, tree: Any) -> Any:
  """Copies single-device arrays of `tree` to every device of the mesh of `params`."""
  mesh = _mesh(params)
  if mesh is None:
    return tree
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(
    lambda leaf: leaf if _mesh(leaf) == mesh else jax.device_put(leaf, everywhere), tree
  )


def is_distributed(params: base.Params) -> bool:
  """Whether parameters are on several devices, so programs that use them span these."""
  leaf = jax.tree.leaves(params)[0]
  return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def place_like(before: Any, after: Any) -> Any:
  """Moves `after` to the shardings of `before`; XLA may have chosen other ones.

  Without this, the next slice and serving would be compiled a second time.
  """
  if _mesh(before) is None:
    return after
  return jax.device_put(after, jax.tree.map(lambda leaf: leaf.sharding, before))


def _mesh(tree: Any) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
  """Returns the mesh of a tree's first array; None if it is traced or on one device."""
  sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
  return sharding.mesh if isinstance(sharding, NamedSharding) else None


def vocab_shards(size: int) -> int:
  """Returns the number of devices that a vocabulary of this size is split over."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty or size % mesh.shape["model"] else mesh.shape["model"]


def map_vocab_shards(
  compute: Callable[[jax.Array, jax.Array], Any], logits: jax.Array
) -> Any:
  """Runs `compute` on each vocabulary shard; call it while tracing within a mesh.

  `compute` maps (part [b, n, V / shards], index of the part []) to arrays [b, n, ...].
  They must be equal on all devices that hold parts of the same rows, which
  `jax.lax.all_gather` over "model" ensures. The mesh divides V, see `vocab_shards`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows = None if logits.shape[0] % mesh.shape["data"] else "data"
  return jax.shard_map(
    lambda part: compute(part, jax.lax.axis_index("model")),
    in_specs=PartitionSpec(rows, None, "model"),
    out_specs=PartitionSpec(rows),
    check_vma=False,  # JAX cannot see that the results are equal
  )(logits)


def split_rows_only(x: jax.Array) -> jax.Array:
  """Replicates x [B, ...] over the mesh except for its rows, which stay split."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, *(None,) * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, spec)
