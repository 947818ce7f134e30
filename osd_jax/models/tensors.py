"""Tensors of a checkpoint: their shapes at once, their values one at a time.

Reading holds the model that is being made and one tensor more, whatever the size of
the file.
"""

import collections
import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from osd_jax import base
from osd_jax.models import families

Shape = tuple[int, ...]

_DTYPES = {
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F32": np.float32,
  "F64": np.float64,
}
_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Tensors:
  """What a checkpoint holds.

  Attributes:
    shapes: name -> shape of every tensor.
    read: name -> its value, read when called.
    place: name -> the file or folder it is read from, for error texts.
  """

  shapes: Mapping[str, Shape]
  read: Callable[[str], np.ndarray]
  place: Callable[[str], object]

  def also(self, name: str, of: str) -> "Tensors":
    """The same, one of them under a second name too."""
    actual = lambda wanted: of if wanted == name else wanted
    return Tensors(
      {**self.shapes, name: self.shapes[of]},
      lambda wanted: self.read(actual(wanted)),
      lambda wanted: self.place(actual(wanted)),
    )


def of_arrays(arrays: Mapping[str, Any], place: object = "memory") -> Tensors:
  """Arrays that are there: in memory, or stores that read when they are indexed."""
  shapes = {name: tuple(x.shape) for name, x in arrays.items()}
  return Tensors(shapes, arrays.__getitem__, lambda name: place)


def of_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
  """Opens a file; reads by offset, since a mapped file would count as memory.

  Args:
    path: the file.

  Returns:
    Its tensors, and the texts in its header.

  Raises:
    InputError: it cannot be read, or holds a name twice.
  """
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      names = file.keys()  # and the whole header was checked
    with path.open("rb") as file:
      length = int.from_bytes(file.read(8), "little")
      header = parse_json(file.read(length), path)
  except (OSError, safetensors.SafetensorError) as error:
    raise _incomplete(path, error) from error

  def read(name: str) -> np.ndarray:
    about = header[name]
    if about["dtype"] not in _DTYPES:
      raise _not_floating(name, path, about["dtype"])
    start, stop = about["data_offsets"]
    # pages of its own, which go back to the system with the tensor
    buffer = mmap.mmap(-1, max(1, stop - start))
    with path.open("rb") as file:
      file.seek(8 + length + start)
      if file.readinto(memoryview(buffer)[: stop - start]) < stop - start:
        raise _incomplete(path, f"it ends within {name}")
    count = math.prod(about["shape"])
    array = np.frombuffer(buffer, _DTYPES[about["dtype"]], count)
    return array.reshape(about["shape"])

  shapes = {name: tuple(header[name]["shape"]) for name in names}
  return Tensors(shapes, read, lambda name: path), header.get("__metadata__", {})


def format_of(path: Path) -> str:
  """The format that a file's header states, "" where it states none."""
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      return (file.metadata() or {}).get("format", "")
  except (OSError, safetensors.SafetensorError):
    return ""  # whoever reads it says what is wrong


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
  """The object in a JSON file.

  Raises:
    InputError: there is none, or it names something twice.
  """

  def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(name for name, _ in pairs)
    if doubled := [name for name, count in counts.items() if count > 1]:
      raise ValueError(f"it names {doubled[0]!r} twice")
    return dict(pairs)

  try:
    content = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    if not isinstance(content, dict):
      raise ValueError(f"it holds a {type(content).__name__}")
  except (ValueError, RecursionError) as error:
    raise base.InputError(
      f"weights: cannot read {path}: {error}; expected a JSON object that names"
      " everything once."
    ) from error
  return content


def expected_shapes(config: families.ModelConfig) -> dict[str, Shape]:
  """Path ("encoder/layers_0/...") -> shape of every parameter of a model."""
  return shapes(jax.eval_shape(families.build(config, "model").init, jax.random.key(0)))


def shapes(params: base.Params) -> dict[str, Shape]:
  """Path -> shape of every leaf of a parameter tree."""
  return {path: tuple(x.shape) for path, x in flat(params).items()}


def flat(params: base.Params) -> dict[str, Any]:
  """Path -> leaf of a parameter tree."""
  return flax.traverse_util.flatten_dict(params, sep="/")


def check(
  found: Mapping[str, Shape], expected: Mapping[str, Shape], origin: object
) -> None:
  """Raises InputError that names the tensors which are not as expected."""
  wrong = [
    f"{name}: found {found.get(name, 'nothing')}, expected"
    f" {expected.get(name, 'nothing')}"
    for name in sorted(expected.keys() | found.keys())
    if expected.get(name) != found.get(name)
  ]
  if wrong:
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    raise base.InputError(
      f"weights: {origin}: tensors do not fit the configuration:"
      f" {'; '.join(wrong[:5])}{more}. Check that the configuration and the tensors"
      " belong to one model."
    )


def read_params(
  tensors: Tensors,
  names: Mapping[str, str],
  orient: Callable[[str, np.ndarray], np.ndarray] = lambda path, x: x,
) -> base.Params:
  """Reads parameters one after another.

  Args:
    tensors: the checkpoint.
    names: path of a parameter -> name of its tensor.
    orient: turns the tensor of a path into the parameter's shape.

  Returns:
    The tree, float32.

  Raises:
    InputError: a tensor holds no floating-point numbers, or some that are not finite.
  """

  def read(path: str, name: str) -> jax.Array:
    # no name that would outlive its use, and no jnp.asarray, which copies
    return jax.block_until_ready(
      jax.device_put(
        _finite_float32(name, tensors.place(name), orient(path, tensors.read(name)))
      )
    )

  params = {path: read(path, name) for path, name in names.items()}
  return flax.traverse_util.unflatten_dict(params, sep="/")


def _finite_float32(name: str, place: object, tensor: np.ndarray) -> np.ndarray:
  if not jnp.issubdtype(tensor.dtype, jnp.floating):
    raise _not_floating(name, place, str(tensor.dtype))
  # Aligned as XLA wants it: on a CPU the parameter is this array, and no copy of it.
  buffer = np.empty(tensor.size + _ALIGNMENT // 4, np.float32)
  start = -buffer.ctypes.data % _ALIGNMENT // 4
  array = buffer[start : start + tensor.size].reshape(tensor.shape)
  with np.errstate(all="ignore"):  # what overflows is found below
    array[...] = tensor
    total = array.sum()
  # One pass that needs no memory. A sum may overflow where no summand is infinite.
  if not np.isfinite(total) and not (finite := np.isfinite(array)).all():
    raise base.InputError(
      f"weights: {place}: tensor {name}: {np.sum(~finite)} of its {array.size} numbers"
      " are NaN or infinite, expected finite ones: a training that diverged, or a"
      " damaged file."
    )
  return array


def _incomplete(path: Path, error: object) -> base.InputError:
  return base.InputError(
    f"weights: cannot read {path}: {error}; expected a safetensors file, complete."
  )


def _not_floating(name: str, place: object, received: str) -> base.InputError:
  return base.InputError(
    f"weights: {place}: tensor {name}: found {received}, expected floating-point"
    " numbers of 16, 32 or 64 bits; quantised checkpoints cannot be converted."
  )
