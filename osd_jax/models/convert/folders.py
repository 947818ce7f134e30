"""Files of a Hugging Face folder: config.json, and tensors in one file or in shards."""

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from osd_jax import base, gguf_files
from osd_jax.models.tensors import Tensors, of_safetensors, parse_json

_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"


def open_folder(folder: Path, allow_torch_bin: bool = False) -> Tensors:
  """Opens the tensors of a Hugging Face folder, in one file or in shards.

  Args:
    folder: contains `model.safetensors` or its index, or `pytorch_model.bin`.
    allow_torch_bin: read `pytorch_model.bin`, a pickle, if there is no other file.

  Raises:
    InputError: the files are missing or cannot be read.
    MissingExtraError: torch is needed and not installed.
  """
  whole: dict[str, Callable[[Path], Tensors]] = {
    _SAFETENSORS: lambda path: of_safetensors(path)[0]
  }
  if allow_torch_bin:
    whole[_TORCH] = _open_torch_bin
  for name, read in whole.items():
    if (folder / name).exists():
      return read(folder / name)
    if (folder / f"{name}.index.json").exists():
      return _of_shards(folder / f"{name}.index.json", read)
  if any((folder / f"{_TORCH}{end}").exists() for end in ("", ".index.json")):
    raise base.InputError(
      f"convert: {folder} holds its tensors in {_TORCH}, a pickle, expected"
      f" {_SAFETENSORS}. If you trust its source, set allow_torch_bin, which needs"
      " torch and uses torch's weights_only reader."
    )
  raise base.InputError(
    f"convert: cannot read {folder / _SAFETENSORS}: neither it nor"
    f" {_SAFETENSORS}.index.json exists; {_advice(folder)}."
  )


def read_json(path: Path) -> dict[str, Any]:
  """Reads the object in a JSON file; InputError if that fails."""
  try:
    return parse_json(path.read_bytes(), path)
  except OSError as error:
    raise base.InputError(
      f"convert: cannot read {path}: {error.strerror}; {_advice(path.parent)}."
    ) from error


def _advice(folder: Path) -> str:
  return kind_of(folder) or "expected a model folder that transformers wrote"


def holds_model(path: Path) -> bool:
  """Whether a path is a folder, or a GGUF file, which is read like one."""
  return path.is_dir() or gguf_files.is_gguf(path)


def kind_of(folder: Path) -> str:
  """Describes a folder that holds no model, with a remedy; "" if it is unknown."""
  if folder.is_dir():
    for pattern, advice in _OTHER_FOLDERS.items():
      if any(folder.glob(pattern)):
        return advice
  return ""


# Files that other formats consist of, and what to do with such a folder.
_OTHER_FOLDERS = {
  "adapter_config.json": (
    "the folder holds an adapter (LoRA), which is only a part of a model; merge it into"
    " its base model (merge_and_unload of peft), save that, and name the saved folder"
  ),
  "*.gguf": ("the folder holds GGUF files of llama.cpp; name one of the files"),
  "model_index.json": (
    "the folder holds a pipeline of diffusers; expected a T5 or a Llama of transformers"
  ),
  "consolidated.*": (
    "the folder holds a checkpoint in Meta's or Mistral's own format; name the folder"
    " of the same model in the format of transformers"
  ),
  "checkpoint": "the folder holds a t5x checkpoint; use `osd convert` with kind t5x",
  "*/config.json": "the folder holds folders with models; name one of those",
}


def _of_shards(index: Path, read: Callable[[Path], Tensors]) -> Tensors:
  """Opens the shards that an index lists."""
  places = read_json(index).get("weight_map")
  if not isinstance(places, dict) or not places:
    raise base.InputError(
      f"convert: {index}: weight_map: received {places!r}, expected a mapping from"
      " tensors to files; download the folder again."
    )
  for name, file in places.items():
    # The index is downloaded, so a name such as ../x must not open another folder.
    if not isinstance(file, str) or Path(file).name != file:
      raise base.InputError(
        f"convert: {index}: tensor {name}: received file {file!r}, expected the name"
        " of a file in this folder; other files are not opened."
      )
  shards = {file: read(index.parent / file) for file in sorted(set(places.values()))}
  listed = set(places.items())
  held = {(name, file) for file, shard in shards.items() for name in shard.shapes}
  # Compared in both directions: a tensor may be missing from its shard, or a shard may
  # come from another version of the model.
  for name, file in sorted(listed - held) + sorted(held - listed):
    received = "found nothing" if (name, file) in listed else "found an unlisted copy"
    raise base.InputError(
      f"convert: {index}: tensor {name}: {received} in {file}, expected it in"
      f" {places.get(name, 'no file')} only; download the folder again."
    )
  return Tensors(
    {name: shards[file].shapes[name] for name, file in places.items()},
    lambda name: shards[places[name]].read(name),
    lambda name: index.parent / places[name],
    frozenset().union(*(shard.short for shard in shards.values())),
  )


def _open_torch_bin(path: Path) -> Tensors:
  """Opens `pytorch_model.bin` with torch's `weights_only` reader."""
  try:
    import torch
  except ImportError as error:
    raise base.MissingExtraError(
      f"convert: {path} can only be read with torch, which is not installed. Install"
      " torch, or convert the file to safetensors on a machine that has it."
    ) from error
  try:
    state = torch.load(
      path,
      map_location="cpu",
      # A pickle can run any code when it is read in full.
      weights_only=True,
      mmap=zipfile.is_zipfile(path),  # torch 1.5 and earlier wrote no zip files
    )
  except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
    raise base.InputError(
      f"convert: cannot read {path}: {str(error).splitlines()[0]}; expected a state"
      " dictionary of tensors, as torch.save writes it. Files with other objects are"
      " not opened."
    ) from error
  if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
    raise base.InputError(
      f"convert: cannot read {path}: it does not hold a mapping of names to"
      " tensors; expected a state dictionary."
    )
  shapes = {name: tuple(x.shape) for name, x in state.items()}
  return Tensors(shapes, lambda name: _numpy(state[name]), lambda name: path)


def _numpy(tensor: Any) -> np.ndarray:
  import torch

  if tensor.dtype == torch.bfloat16:  # numpy has no such type
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def required(config: Mapping[str, Any], field: str) -> Any:
  """The value of a required field of config.json; InputError if it is missing."""
  if config.get(field) is None:
    raise base.InputError(
      f"convert: config.json: field {field}: received nothing, expected an"
      " integer; check that the folder holds a model of transformers."
    )
  return config[field]


def check_field(
  says: str, field: str, received: Any, expected: tuple[Any, ...]
) -> None:
  """Raises InputError unless a field of config.json has one of the expected values.

  `says` names the models that can be converted, for the error message.
  """
  if received not in expected:
    wanted = " or ".join(repr(value) for value in expected)
    raise base.InputError(
      f"convert: config.json: field {field}: received {received!r}, expected"
      f" {wanted}; {says}."
    )
