"""Tensors of a checkpoint: their shapes at once, their values one at a time.

Reading holds the model that is being made and one tensor more, whatever the size of
the file.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from osd_jax import base
from osd_jax.models import t5
from osd_jax.models.convert import torch_bin

Shape = tuple[int, ...]

_ADVICE = "Check that the configuration and the tensors belong to one model."
_DTYPES = {
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F32": np.float32,
  "F64": np.float64,
}
_ALIGNMENT = 64  # bytes
_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"


@dataclasses.dataclass(frozen=True)
class Tensors:
  """What a checkpoint holds.

  Attributes:
    shapes: name -> shape of every tensor.
    read: name -> its value, read when called.
  """

  shapes: Mapping[str, Shape]
  read: Callable[[str], np.ndarray]

  @classmethod
  def of(cls, arrays: Mapping[str, np.ndarray]) -> "Tensors":
    """Arrays that are in memory."""
    return cls({name: tuple(x.shape) for name, x in arrays.items()}, arrays.__getitem__)


def expected_shapes(config: t5.T5Config) -> dict[str, Shape]:
  """Path ("encoder/layers_0/...") -> shape of every parameter of a model."""
  tree = jax.eval_shape(t5.build(config).init, jax.random.key(0))
  flat = flax.traverse_util.flatten_dict(tree, sep="/")
  return {path: tuple(x.shape) for path, x in flat.items()}


def check(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
  """Raises ValueError that names the tensors which are not as expected."""
  wrong = [
    f"{name}: found {found.get(name, 'nothing')}, expected"
    f" {expected.get(name, 'nothing')}"
    for name in sorted(expected.keys() | found.keys())
    if expected.get(name) != found.get(name)
  ]
  if wrong:
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    raise base.InputError(
      f"convert: tensors do not fit the configuration: {'; '.join(wrong[:5])}"
      f"{more}. {_ADVICE}"
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
    ValueError: a tensor holds no floating-point numbers.
  """

  def read(path: str, name: str) -> jax.Array:
    # no name that would outlive its use, and no jnp.asarray, which copies
    found = jax.device_put(_float32(name, orient(path, tensors.read(name))))
    return jax.block_until_ready(found)

  params = {path: read(path, name) for path, name in names.items()}
  return flax.traverse_util.unflatten_dict(params, sep="/")


def open_folder(folder: Path, allow_torch_bin: bool = False) -> Tensors:
  """Tensors of a Hugging Face folder, whole or in shards.

  Args:
    folder: holds `model.safetensors` or its index, or `pytorch_model.bin`.
    allow_torch_bin: read `pytorch_model.bin`, a pickle, where there is nothing else.

  Raises:
    ValueError: there are no such files, or they cannot be read.
    ImportError: torch is needed and not installed.
  """
  whole: dict[str, Callable[[Path], Tensors]] = {_SAFETENSORS: _of_safetensors}
  if allow_torch_bin:
    whole[_TORCH] = _of_torch
  for name, read in whole.items():
    if (folder / name).exists():
      return read(folder / name)
    if (folder / f"{name}.index.json").exists():
      return _of_shards(folder / f"{name}.index.json", read)
  if any((folder / f"{_TORCH}{end}").exists() for end in ("", ".index.json")):
    raise base.InputError(
      f"convert: {folder} holds its tensors in {_TORCH}, a pickle, expected"
      f" {_SAFETENSORS}; if you trust where it comes from, set allow_torch_bin"
      " (it needs torch and runs nothing but torch's weights_only reader)."
    )
  raise base.InputError(
    f"convert: cannot read {folder / _SAFETENSORS}: it is not there, nor is"
    f" {_SAFETENSORS}.index.json; expected a model folder that transformers wrote."
  )


def read_json(path: Path) -> dict[str, Any]:
  """The object in a JSON file; ValueError if there is none."""
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise base.InputError(
      f"convert: cannot read {path}: {error}; expected a model folder that"
      " transformers wrote."
    ) from error
  if not isinstance(found, dict):
    raise base.InputError(
      f"convert: cannot read {path}: received {type(found).__name__}, expected a JSON"
      " object as transformers writes it."
    )
  return found


def _of_shards(index: Path, read: Callable[[Path], Tensors]) -> Tensors:
  """Tensors of several files, each of which an index names with its file."""
  places = read_json(index).get("weight_map")
  if not isinstance(places, dict) or not places:
    raise base.InputError(
      f"convert: {index}: weight_map: received {places!r}, expected the file of every"
      " tensor; download the folder again."
    )
  for name, file in places.items():
    if not isinstance(file, str) or Path(file).name != file:
      raise base.InputError(
        f"convert: {index}: tensor {name}: received file {file!r}, expected the name"
        " of a file in this folder; the index may not lead outside."
      )
  shards = {file: read(index.parent / file) for file in sorted(set(places.values()))}
  for name, file in places.items():
    if name not in shards[file].shapes:
      raise base.InputError(
        f"convert: {index}: tensor {name}: found nothing in {file}, expected it"
        " there; download the folder again."
      )
  return Tensors(
    {name: shards[file].shapes[name] for name, file in places.items()},
    lambda name: shards[places[name]].read(name),
  )


def _of_safetensors(path: Path) -> Tensors:
  """Reads by offset: a mapped file would count as memory, page by page."""
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      names = file.keys()  # and the whole header was checked
    with path.open("rb") as file:
      length = int.from_bytes(file.read(8), "little")
      header = json.loads(file.read(length))
  except (OSError, safetensors.SafetensorError) as error:
    raise _incomplete(path, error) from error

  def read(name: str) -> np.ndarray:
    found = header[name]
    if found["dtype"] not in _DTYPES:
      raise _not_floating(name, found["dtype"])
    start, stop = found["data_offsets"]
    # pages of its own, which go back to the system with the tensor
    buffer = mmap.mmap(-1, max(1, stop - start))
    with path.open("rb") as file:
      file.seek(8 + length + start)
      if file.readinto(memoryview(buffer)[: stop - start]) < stop - start:
        raise _incomplete(path, f"it ends within {name}")
    count = math.prod(found["shape"])
    array = np.frombuffer(buffer, _DTYPES[found["dtype"]], count)
    return array.reshape(found["shape"])

  return Tensors({name: tuple(header[name]["shape"]) for name in names}, read)


def _of_torch(path: Path) -> Tensors:
  shapes, read = torch_bin.open_bin(path)
  return Tensors(shapes, read)


def _float32(name: str, tensor: np.ndarray) -> np.ndarray:
  if not jnp.issubdtype(tensor.dtype, jnp.floating):
    raise _not_floating(name, str(tensor.dtype))
  # Aligned as XLA wants it: on a CPU the parameter is this array, and no copy of it.
  buffer = np.empty(tensor.size + _ALIGNMENT // 4, np.float32)
  start = -buffer.ctypes.data % _ALIGNMENT // 4
  array = buffer[start : start + tensor.size].reshape(tensor.shape)
  array[...] = tensor
  return array


def _incomplete(path: Path, error: object) -> ValueError:
  return ValueError(
    f"convert: cannot read {path}: {error}; expected a safetensors file, complete."
  )


def _not_floating(name: str, found: str) -> ValueError:
  return ValueError(
    f"convert: tensor {name}: found {found}, expected floating-point numbers of 16,"
    " 32 or 64 bits; quantised checkpoints cannot be converted."
  )
