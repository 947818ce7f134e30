"""Tensors of a checkpoint, with their shapes known and their values read on demand.

Reading a model needs memory for its parameters and for one tensor of the file.
"""

import collections
import dataclasses
import functools
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from osd_jax import base

Shape = tuple[int, ...]

_DTYPES = {
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F32": np.float32,
  "F64": np.float64,
}
_INTEGERS = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_, "U8": np.uint8}
_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Tensors:
  """The tensors of a checkpoint."""

  shapes: Mapping[str, Shape]  # name -> shape
  read: Callable[[str], np.ndarray]  # name -> value; reads the tensor at every call
  # Name -> file or folder of the tensor, for error messages.
  place: Callable[[str], object]
  # Names of the tensors that are read in bfloat16, as far as a header says so.
  short: frozenset[str] = frozenset()
  # Like `read`, for tensors of integers; those are never parameters of a model.
  read_integers: Callable[[str], np.ndarray] = lambda name: np.zeros(0, np.int64)


def of_arrays(arrays: Mapping[str, Any], place: object = "memory") -> Tensors:
  """Tensors from arrays in memory."""
  shapes = {name: tuple(x.shape) for name, x in arrays.items()}
  read = arrays.__getitem__
  return Tensors(shapes, read, lambda name: place, read_integers=read)


def of_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
  """Opens a safetensors file; returns its tensors and the metadata in its header.

  Tensors are read at their offset. Pages of a memory-mapped file would count as memory
  of the process until all tensors are read.

  Raises:
    InputError: the file cannot be read, or contains a name twice.
  """
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      names = file.keys()  # opening has checked the whole header
    with path.open("rb") as file:
      # The file starts with the length of its JSON header. The header is parsed again
      # here because safe_open does not report duplicate names or offsets.
      length = int.from_bytes(file.read(8), "little")
      header = parse_json(file.read(length), path)
  except (OSError, safetensors.SafetensorError) as error:
    raise _incomplete(path, error) from error

  def read(name: str, dtypes: Mapping[str, Any] = _DTYPES) -> np.ndarray:
    about = header[name]
    if about["dtype"] not in dtypes and dtypes is _INTEGERS:
      raise base.InputError(
        f"weights: {path}: tensor {name}: found {about['dtype']}, expected integers."
      )
    if about["dtype"] not in dtypes:
      raise _not_floating(name, path, about["dtype"])
    # Offsets count from the end of the header.
    start, stop = about["data_offsets"]
    # An mmap of its own: its pages are returned to the system with the tensor.
    buffer = mmap.mmap(-1, max(1, stop - start))
    with path.open("rb") as file:
      file.seek(8 + length + start)
      if file.readinto(memoryview(buffer)[: stop - start]) < stop - start:
        raise _incomplete(path, f"it ends inside tensor {name}")
    count = math.prod(about["shape"])
    array = np.frombuffer(buffer, dtypes[about["dtype"]], count)
    return array.reshape(about["shape"])

  shapes = {name: tuple(header[name]["shape"]) for name in names}
  short = frozenset(name for name in names if header[name]["dtype"] == "BF16")
  integers = functools.partial(read, dtypes=_INTEGERS)
  tensors = Tensors(shapes, read, lambda name: path, short, integers)
  return tensors, header.get("__metadata__", {})


def sort_metadata(path: Path) -> None:
  """Sorts the metadata of a safetensors file, which the library writes in any order."""
  with path.open("r+b") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= size, "the same fields in another order"
    file.seek(8)
    file.write(text.ljust(size))


def format_of(path: Path) -> str:
  """The format in the header of a file, or "" if the header states no format."""
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      return (file.metadata() or {}).get("format", "")
  except (OSError, safetensors.SafetensorError):
    return ""  # reading the file will report the error


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
  """Parses a JSON object; InputError if it is none, or contains a name twice."""

  def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    # `json.loads` keeps the last of two equal names, which would hide a damaged file.
    counts = collections.Counter(name for name, _ in pairs)
    if doubled := [name for name, count in counts.items() if count > 1]:
      raise ValueError(f"it contains {doubled[0]!r} twice")
    return dict(pairs)

  try:
    content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    if not isinstance(content, dict):
      raise ValueError(f"it contains a {type(content).__name__}")
  except (ValueError, RecursionError) as error:
    raise base.InputError(
      f"weights: cannot read {path}: {error}; expected a JSON object with unique names."
    ) from error
  return content


def shapes(params: base.Params) -> dict[str, Shape]:
  """Path -> shape of the leaves of a parameter tree."""
  return {path: tuple(x.shape) for path, x in flat(params).items()}


def flat(params: base.Params) -> dict[str, Any]:
  """Path -> leaf of a parameter tree."""
  return flax.traverse_util.flatten_dict(params, sep="/")


def check(
  found: Mapping[str, Shape], expected: Mapping[str, Shape], origin: object
) -> None:
  """Raises InputError that lists missing, unexpected and misshapen tensors."""
  wrong = [
    f"{name}: found {found.get(name, 'nothing')}, expected"
    f" {expected.get(name, 'nothing')}"
    for name in sorted(expected.keys() | found.keys())
    if expected.get(name) != found.get(name)
  ]
  if wrong:
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    advice = "Check that the configuration and the tensors belong to the same model"
    if expected.items() <= found.items():
      advice = (
        "The model does not read these; if they belong to something else, such as a"
        " head of a trainer, save the folder without them"
      )
    raise base.InputError(
      f"weights: {origin}: tensors do not fit the configuration:"
      f" {'; '.join(wrong[:5])}{more}. {advice}."
    )


def read_params(
  tensors: Tensors,
  names: Mapping[str, str],
  orient: Callable[[str, np.ndarray], np.ndarray] = lambda path, x: x,
  as_stored: bool = False,
) -> base.Params:
  """Reads a parameter tree in float32, one tensor at a time.

  Args:
    tensors: tensors of the checkpoint, read one by one.
    names: path of a parameter -> name of its tensor.
    orient: (path, tensor) -> the tensor in the parameter's shape.
    as_stored: keep bfloat16 tensors as they are, and the order of the file in memory.
      Leaves are numpy arrays, and views of what was read.

  Raises:
    InputError: a tensor is not of a floating-point type, or is not finite.
  """

  def read(path: str, name: str) -> jax.Array:
    # Without local names, which would keep a tensor alive while the next one is read,
    # and with device_put, because jnp.asarray copies.
    return jax.block_until_ready(
      jax.device_put(
        _finite_float32(name, tensors.place(name), orient(path, tensors.read(name)))
      )
    )

  def read_as_stored(path: str, name: str) -> np.ndarray:
    return orient(path, _finite(name, tensors.place(name), tensors.read(name)))

  one = read_as_stored if as_stored else read
  params = {path: one(path, name) for path, name in names.items()}
  return flax.traverse_util.unflatten_dict(params, sep="/")


def _finite(name: str, place: object, tensor: np.ndarray) -> np.ndarray:
  """Returns a finite tensor: bfloat16 unchanged, any other type in float32."""
  if tensor.dtype != ml_dtypes.bfloat16:
    return _finite_float32(name, place, tensor)
  # All bits of the exponent are set in NaN and infinity. Rows, because a mask of the
  # whole tensor would take half of its memory.
  rows = np.atleast_1d(tensor).view(np.uint16)
  wrong = sum(int(np.count_nonzero(row & 0x7F80 == 0x7F80)) for row in _parts(rows))
  if wrong:
    raise _not_finite(name, place, wrong, tensor.size)
  return tensor


def _parts(rows: np.ndarray) -> Iterator[np.ndarray]:
  """Yields consecutive rows, together about a million elements."""
  size = max(1, rows.shape[0] * 2**20 // max(1, rows.size))
  for start in range(0, rows.shape[0], size):
    yield rows[start : start + size]


def _finite_float32(name: str, place: object, tensor: np.ndarray) -> np.ndarray:
  if not jnp.issubdtype(tensor.dtype, jnp.floating):
    raise _not_floating(name, place, str(tensor.dtype))
  # XLA on a CPU shares memory with an aligned array, and copies any other.
  buffer = np.empty(tensor.size + _ALIGNMENT // 4, np.float32)
  start = -buffer.ctypes.data % _ALIGNMENT // 4
  array = buffer[start : start + tensor.size].reshape(tensor.shape)
  with np.errstate(all="ignore"):  # overflows are reported below
    array[...] = tensor
    total = array.sum()
  # The sum needs no memory. It may overflow although every element is finite, so only
  # then are the elements checked.
  if not np.isfinite(total) and not (finite := np.isfinite(array)).all():
    raise _not_finite(name, place, int(np.sum(~finite)), array.size)
  return array


def _not_finite(name: str, place: object, wrong: int, size: int) -> base.InputError:
  return base.InputError(
    f"weights: {place}: tensor {name}: {wrong} of its {size} values are NaN or"
    " infinite, expected finite ones. The training diverged, or the file is damaged."
  )


# First bytes of files that are often taken for weights: (what it is, what to do).
_OTHER_FILES = {
  b"GGUF": (
    "a GGUF file of llama.cpp",
    "name it with the ending .gguf as a target, or convert it",
  ),
  b"PK\x03\x04": (
    "a zip file, as torch.save writes it",
    "load it with transformers, and save it with save_pretrained",
  ),
  b"\x80": ("a pickle", "save the weights as safetensors"),
  b"\x1f\x8b": ("a gzip file", "unpack it"),
  b"version https://git-lfs": ("a Git LFS pointer", "run `git lfs pull`"),
  b"<": ("a web page", "download the file itself"),
  b"{": ("JSON", "name a safetensors file, or the folder of the model"),
  b"\x89HDF": ("an HDF5 file", "save the weights as safetensors"),
}


def _incomplete(path: Path, error: object) -> base.InputError:
  if not path.is_file():
    return base.InputError(f"weights: {path} is not a file; check the path.")
  with path.open("rb") as file:
    begin = file.read(32)
  for magic, (what, remedy) in _OTHER_FILES.items():
    if begin.startswith(magic):
      return base.InputError(
        f"weights: {path} is {what}, expected a safetensors file; {remedy}."
      )
  return base.InputError(
    f"weights: cannot read {path}: {error}; expected a complete safetensors file; copy"
    " or download it again."
  )


def unwritable(path: Path, error: Exception) -> base.DiskError:
  """The error for weights that cannot be written."""
  reason = getattr(error, "strerror", None) or error
  return base.DiskError(f"weights: {path} cannot be written: {reason}.")


def _not_floating(name: str, place: object, received: str) -> base.InputError:
  return base.InputError(
    f"weights: {place}: tensor {name}: found {received}, expected floating-point"
    " numbers of 16, 32 or 64 bits. Quantized checkpoints cannot be converted."
  )
