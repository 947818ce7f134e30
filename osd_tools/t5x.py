"""Reads checkpoints of t5x without t5x, in its native format or written by orbax.

A native checkpoint is a folder with a msgpack file `checkpoint`, whose leaves are
arrays, or descriptions of zarr folders in the same folder. With orbax, `state/` is a
key-value store (OCDBT) of such zarr folders. The drivers and paths in a description are
checked and never followed: only zarr folders inside the checkpoint are opened.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
import tensorstore

from osd_jax import base
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.shapes import T5Config
from osd_jax.models.tensors import Tensors
from osd_jax.models.weights import Weights, expected_shapes

_TARGET = "target."
# t5x writes this bucket as a placeholder for the folder of the checkpoint.
_PLACEHOLDER = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
_LOCAL = ({"driver": "file"}, {"driver": "gfile"}, _PLACEHOLDER)
# Prefixes of parameters that t5x stacked over layers, for `scan_layers`.
_SCANNED = ("encoder/encoder/", "decoder/decoder/")


def read(folder: str | Path, config: T5Config) -> Weights:
  """Reads a checkpoint that t5x wrote, one parameter at a time, in float32.

  The folder `checkpoint_STEP` has a file `checkpoint` or a folder `state`, and does not
  contain the shape of the model.

  Raises:
    InputError: the folder is not such a checkpoint, its parameters do not fit `config`,
      or it refers to anything but zarr folders inside it.
  """
  folder = Path(folder)
  _check_links(folder)  # before anything is opened
  if (folder / "checkpoint").is_file():
    tensors = _opened(folder, _native_leaves(folder))
  elif (folder / "state").is_dir():
    tensors = _opened(folder / "state", _orbax_leaves(folder / "state"))
  else:
    raise base.InputError(
      f"convert: {folder}: found neither a file checkpoint nor a folder state;"
      " expected a folder checkpoint_STEP that t5x wrote."
    )
  _check_unscanned(folder, tensors)
  expected = expected_shapes(config)
  tensors_lib.check(tensors.shapes, expected, folder)
  params = tensors_lib.read_params(tensors, {path: path for path in expected})
  return Weights(config, params, notes=f"converted from t5x's {folder.name}")


def _check_links(folder: Path) -> None:
  # A link could make a zarr folder inside the checkpoint point to any file.
  inside = folder.resolve()
  for path in folder.rglob("*"):
    if path.is_symlink() and not path.resolve().is_relative_to(inside):
      raise base.InputError(
        f"convert: {path} is a link to {path.resolve()}, expected a checkpoint"
        " without links to other folders. Copy the linked file if you trust it."
      )


def _check_unscanned(folder: Path, tensors: Tensors) -> None:
  scanned = [name for name in tensors.shapes if name.startswith(_SCANNED)]
  if scanned:
    raise base.InputError(
      f"convert: {folder}: parameter {scanned[0]}: found layers stacked in one array"
      " (t5x's scan_layers), expected one array per layer, as encoder/layers_0/...;"
      " write the checkpoint with scan_layers = False."
    )


def _native_leaves(folder: Path) -> dict[str, Any]:
  """Path -> array, or store of a zarr array, of every parameter."""
  path = folder / "checkpoint"
  data = path.read_bytes()
  try:
    tree = flax.serialization.msgpack_restore(data)
    target = tree["optimizer"]["target"]
    # The description of a zarr folder is a dict as well, but it is a leaf.
    leaves = flax.traverse_util.flatten_dict(
      target, is_leaf=lambda _, x: not isinstance(x, dict) or "driver" in x
    )
    unique = _unique(path, (("/".join(keys), leaf) for keys, leaf in leaves.items()))
  except base.InputError:
    raise
  except Exception as error:  # msgpack, flax and numpy raise many types
    pickled = data[:1] == b"\x80" or data[:2] == b"PK"
    raise base.InputError(
      f"convert: cannot read {path}: {'a pickle' if pickled else repr(error)},"
      " expected flax's msgpack with optimizer/target, as t5x writes it."
    ) from error
  return {
    name: leaf if isinstance(leaf, np.ndarray) else _file(_place(folder, name, leaf))
    for name, leaf in unique.items()
  }


def _place(folder: Path, name: str, leaf: Any) -> Path:
  """The zarr folder that a description names."""
  store = leaf.get("kvstore") if isinstance(leaf, Mapping) else None
  store = dict(store) if isinstance(store, Mapping) else {}
  place = store.pop("path", None)
  local = isinstance(leaf, Mapping) and leaf.get("driver") == "zarr"
  if not local or store not in _LOCAL or not isinstance(place, str):
    raise base.InputError(
      f"convert: {folder}: parameter {name}: received {leaf!r}, expected the driver"
      " zarr on local files. Other stores are not opened."
    )
  path = folder / place
  inside = path.resolve().is_relative_to(folder.resolve())
  if Path(place).is_absolute() or ".." in Path(place).parts or not inside:
    raise base.InputError(
      f"convert: {folder}: parameter {name}: received path {place!r}, expected one"
      " inside the folder of the checkpoint. Other folders are not opened."
    )
  return path


def _orbax_leaves(folder: Path) -> dict[str, Any]:
  """Path -> store of a zarr array, of every parameter."""
  if (folder / "manifest.ocdbt").is_file():
    store = {"driver": "ocdbt", "base": _file(folder)}
    names = list(_ocdbt_names(folder, store))
  else:
    store = _file(folder)
    names = [path.parent.name for path in folder.glob(f"{_TARGET}*/.zarray")]
  if not names:
    raise base.InputError(
      f"convert: {folder}: found no parameters called {_TARGET}...; expected zarr"
      " arrays that t5x wrote with orbax."
    )
  paths = [name.removeprefix(_TARGET).replace(".", "/") for name in names]
  stores = [{**store, "path": f"{store.get('path', '')}{name}/"} for name in names]
  return _unique(folder, zip(paths, stores, strict=True))


def _unique(origin: Path, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  """A dict of the pairs; InputError if a parameter occurs twice."""
  leaves: dict[str, Any] = {}
  for path, leaf in pairs:
    if path in leaves:
      raise base.InputError(
        f"convert: {origin}: parameter {path}: found two, expected one; write the"
        " checkpoint again."
      )
    leaves[path] = leaf
  return leaves


def _ocdbt_names(folder: Path, store: Mapping[str, Any]) -> Iterator[str]:
  try:
    keys = tensorstore.KvStore.open(dict(store)).result().list().result()
  except ValueError as error:
    raise _unreadable(str(folder), error) from error
  for key in map(bytes.decode, keys):
    name, _, end = key.partition("/")
    if name.startswith(_TARGET) and end == ".zarray":
      yield name


def _file(path: Path) -> dict[str, Any]:
  return {"driver": "file", "path": f"{path.resolve()}/"}


def _opened(folder: Path, leaves: Mapping[str, Any]) -> Tensors:
  """Tensors from arrays and stores of zarr arrays."""

  def opened(name: str, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
      return leaf
    try:
      spec = {"driver": "zarr", "kvstore": leaf}
      return tensorstore.open(spec, open=True, read=True).result()
    except ValueError as error:
      raise _unreadable(f"{folder}: parameter {name}", error) from error

  def read(name: str) -> np.ndarray:
    if isinstance(arrays[name], np.ndarray):
      return arrays[name]
    try:
      return arrays[name].read().result()
    except ValueError as error:
      raise _unreadable(f"parameter {name}", error) from error

  arrays = {name: opened(name, leaf) for name, leaf in leaves.items()}
  return dataclasses.replace(tensors_lib.of_arrays(arrays, folder), read=read)


def _unreadable(where: str, error: ValueError) -> base.InputError:
  return base.InputError(
    f"convert: {where}: cannot be read: {str(error).splitlines()[0]}; expected zarr"
    " that t5x wrote. Copy the checkpoint again."
  )
