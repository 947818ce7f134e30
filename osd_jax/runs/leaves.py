"""The arrays of a pytree by name, and what a checkpoint must know of each."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base


def named(tree: Any) -> dict[str, Any]:
  """Leaves by dotted path, in the order of `jax.tree.leaves`.

  Raises:
    ValueError: there are none, or two paths read alike.
  """
  paths = jax.tree_util.tree_flatten_with_path(tree)[0]
  found = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths
  }
  if len(found) != len(paths) or not found:
    raise base.InputError(
      f"checkpoint: received a tree of {len(paths)} leaves with {len(found)}"
      " distinct paths, expected at least one leaf and no '.' that makes two"
      " paths alike; rename the keys."
    )
  return found


def check_plain(leaves: Mapping[str, Any]) -> None:
  """Raises ValueError that names the first leaf that is no plain array."""
  for name, leaf in leaves.items():
    plain = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    if plain and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
      if jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        continue
    typed = hasattr(leaf, "dtype")
    found = f"{leaf.dtype.name} array" if typed else type(leaf).__name__
    raise base.InputError(
      f"checkpoint save: received {found} at {name}, expected an array of a dtype"
      " that jax keeps (32 bits or fewer, no typed random key); put Python values"
      " into `host`."
    )


def copied(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """The leaves of this moment, whatever is donated or overwritten later.

  They are numpy arrays, but for those that other processes hold parts of.
  """
  here = {name: leaf for name, leaf in leaves.items() if is_whole(leaf)}
  here = jax.device_get(here)  # on a CPU: views of the very buffers
  return {
    name: np.array(here[name]) if name in here else leaf.copy()
    for name, leaf in leaves.items()
  }


def described(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Shape, dtype and checksum of each; None for what other processes hold too."""
  return {
    name: {
      "shape": list(leaf.shape),
      "dtype": leaf.dtype.name,
      "crc32": checksum(leaf) if is_whole(leaf) else None,
    }
    for name, leaf in leaves.items()
  }


def checksum(leaf: Any) -> int:
  """CRC-32 of its bytes."""
  data = np.ascontiguousarray(np.asarray(leaf))
  return zlib.crc32(data.reshape(-1).view(np.uint8)) if data.size else 0


def is_whole(leaf: Any) -> bool:
  """Whether this process holds all of it."""
  return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def check_target(step: int, table: Mapping[str, Any], target: Any) -> None:
  """Raises ValueError unless `target` fits what was saved.

  Args:
    step: for the error's text.
    table: what `described` said at the time.
    target: pytree whose names, shapes and dtypes must be those saved.
  """
  wanted = {
    name: f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
    for name, leaf in named(target).items()
  }
  saved = {name: f"{row['dtype']}{row['shape']}" for name, row in table.items()}
  faults = [
    f"{name}: expected {wanted.get(name, 'nothing')}, found"
    f" {saved.get(name, 'nothing')}"
    for name in sorted(wanted.keys() | saved.keys())
    if wanted.get(name) != saved.get(name)
  ]
  if faults:
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    raise base.InputError(
      f"checkpoint restore: step {step} does not fit this run: "
      + "; ".join(faults[:5])
      + f"{more}. Start with the config that wrote it, or in a new directory."
    )


def abstract(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes, and the shardings of those that are committed to one."""
  found = {}
  for name, leaf in leaves.items():
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
      sharding = None
    found[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return found


def placed(array: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
  """The array where a sharding wants it; None leaves it uncommitted."""
  if sharding is None:
    return jnp.array(np.asarray(array))  # uncommitted: may meet any mesh in jit
  return jax.device_put(array, sharding)
