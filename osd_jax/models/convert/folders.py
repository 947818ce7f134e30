"""Files of a Hugging Face folder: tensors whole, in shards, or pickled by torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from osd_jax import base
from osd_jax.models.convert import torch_bin
from osd_jax.models.tensors import Tensors, of_safetensors, parse_json

_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"


def open_folder(folder: Path, allow_torch_bin: bool = False) -> Tensors:
  """Tensors of a Hugging Face folder, whole or in shards.

  Args:
    folder: holds `model.safetensors` or its index, or `pytorch_model.bin`.
    allow_torch_bin: read `pytorch_model.bin`, a pickle, where there is nothing else.

  Raises:
    InputError: there are no such files, or they cannot be read.
    MissingExtraError: torch is needed and not installed.
  """
  whole: dict[str, Callable[[Path], Tensors]] = {
    _SAFETENSORS: lambda path: of_safetensors(path)[0]
  }
  if allow_torch_bin:
    whole[_TORCH] = torch_bin.open_bin
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
  """The object in a JSON file; InputError if there is none."""
  try:
    return parse_json(path.read_bytes(), path)
  except OSError as error:
    raise base.InputError(
      f"convert: cannot read {path}: {error.strerror}; expected a model folder that"
      " transformers wrote."
    ) from error


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
  listed = set(places.items())
  held = {(name, file) for file, shard in shards.items() for name in shard.shapes}
  for name, file in sorted(listed - held) + sorted(held - listed):
    fault = "found nothing" if (name, file) in listed else "found one more"
    raise base.InputError(
      f"convert: {index}: tensor {name}: {fault} in {file}, expected it in"
      f" {places.get(name, 'no file')} alone; download the folder again."
    )
  return Tensors(
    {name: shards[file].shapes[name] for name, file in places.items()},
    lambda name: shards[places[name]].read(name),
    lambda name: index.parent / places[name],
  )
