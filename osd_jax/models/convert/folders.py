"""Files of a Hugging Face folder: config.json, and tensors in one file or in shards."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from osd_jax import base, formats
from osd_jax.models.tensors import Tensors, of_safetensors, parse_json, unwritable

_SHARD = 5 * 10**9  # largest file in bytes, as in transformers
_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"


def open_tensors(folder: Path) -> Tensors:
  """Opens the tensors of a model: `model.safetensors` of a folder, or its shards.

  A file that `formats` can read is opened like a folder.
  """
  if reader := formats.reader_of(folder):
    return reader.open_tensors(folder)
  if (folder / _SAFETENSORS).exists():
    return of_safetensors(folder / _SAFETENSORS)[0]
  index = folder / f"{_SAFETENSORS}.index.json"
  if index.exists():
    return _of_shards(index)
  if any((folder / f"{_TORCH}{end}").exists() for end in ("", ".index.json")):
    raise base.InputError(
      f"convert: {folder} holds its tensors in {_TORCH}, a pickle, expected"
      f" {_SAFETENSORS}. If you trust its source, load it with transformers and save it"
      " again: save_pretrained writes safetensors."
    )
  raise base.InputError(
    f"convert: cannot read {folder / _SAFETENSORS}: neither it nor {index.name} exists;"
    f" {_advice(folder)}."
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
  """Whether a path is a folder, or a file that `formats` reads like one."""
  return path.is_dir() or formats.reader_of(path) is not None


def kind_of(folder: Path) -> str:
  """Describes a folder that holds no model, with a remedy; "" if it is unknown."""
  if folder.is_dir():
    for pattern, advice in _OTHER_FOLDERS.items():
      if any(folder.glob(pattern)):
        return advice
  return ""


_SHARDS = (
  "the folder holds shards of FSDP; merge them with `accelerate merge-weights`, and"
  " name the folder that it writes"
)
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
  "model.*fp16*": (
    "the folder holds only a variant of the tensors, fp16; load it with transformers"
    " and variant='fp16', save that, and name the saved folder"
  ),
  "flax_model*.msgpack": (
    "the folder holds the tensors of flax only; load it with transformers 4 and"
    " from_flax=True, save that, and name the saved folder"
  ),
  "tf_model*.h5": (
    "the folder holds the tensors of TensorFlow only; load it with transformers 4 and"
    " from_tf=True, save that, and name the saved folder"
  ),
  "zero_to_fp32.py": (
    "the folder holds a checkpoint of DeepSpeed; run its zero_to_fp32.py with"
    " --safe_serialization, and name the folder that it writes"
  ),
  "pytorch_model_fsdp*": _SHARDS,
  "**/*.distcp": _SHARDS,
  "checkpoint": "the folder holds a t5x checkpoint; convert it with `osd convert`",
  "*/config.json": "the folder holds folders with models; name one of those",
}


def _of_shards(index: Path) -> Tensors:
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
  shards = {
    file: of_safetensors(index.parent / file)[0]
    for file in sorted(set(places.values()))
  }
  index_entries = set(places.items())
  shard_entries = {
    (name, file) for file, shard in shards.items() for name in shard.shapes
  }
  # Compared in both directions: a tensor may be missing from its shard, or a shard may
  # come from another version of the model.
  for name, file in sorted(index_entries - shard_entries) + sorted(
    shard_entries - index_entries
  ):
    received = (
      "found nothing" if (name, file) in index_entries else "found an unlisted copy"
    )
    raise base.InputError(
      f"convert: {index}: tensor {name}: {received} in {file}, expected it in"
      f" {places.get(name, 'no file')} only; download the folder again."
    )
  return Tensors(
    {name: shards[file].shapes[name] for name, file in places.items()},
    lambda name: shards[places[name]].read(name),
    lambda name: index.parent / places[name],
    frozenset().union(*(shard.short for shard in shards.values())),
    lambda name: shards[places[name]].read_integers(name),
  )


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
  """The tensors by other names: new name -> name in the file."""
  return Tensors(
    {ours: tensors.shapes[theirs] for ours, theirs in names.items()},
    lambda name: tensors.read(names[name]),
    lambda name: tensors.place(names[name]),
    frozenset(ours for ours, theirs in names.items() if theirs in tensors.short),
    lambda name: tensors.read_integers(names[name]),
  )


def write(
  folder: str | Path, tensors: Mapping[str, np.ndarray], files: Mapping[str, bytes]
) -> Path:
  """Writes tensors and other files to a new or empty folder, completely or not at all.

  Raises:
    InputError: the folder is not empty.
    DiskError: the folder cannot be written.
  """
  folder = Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise base.InputError(
      f"convert: output {folder} is in use, expected a new or empty folder;"
      " remove it or choose another."
    )
  # Write a temporary folder and rename it, so that readers see all files or none.
  partial = folder.with_name(folder.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  try:
    partial.mkdir(parents=True)
    for name, content in files.items():
      (partial / name).write_bytes(content)
    # The safetensors library makes private files; give them the usual mode.
    for path in _save(tensors, partial):
      shutil.copymode(partial / next(iter(files)), path)
    os.replace(partial, folder)
  except (OSError, safetensors.SafetensorError) as error:
    raise unwritable(folder, error) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return folder


def _save(tensors: Mapping[str, np.ndarray], folder: Path) -> list[Path]:
  """Writes one file, or shards of at most `_SHARD` bytes and their index."""
  shards: list[dict[str, np.ndarray]] = [{}]
  for name, tensor in tensors.items():
    size = sum(other.nbytes for other in shards[-1].values())
    if shards[-1] and size + tensor.nbytes > _SHARD:
      shards.append({})
    shards[-1][name] = tensor
  names = ["model.safetensors"]
  if len(shards) > 1:
    numbers = range(1, len(shards) + 1)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in numbers]
    index = {
      "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
      "weight_map": {t: n for n, s in zip(names, shards, strict=True) for t in s},
    }
    (folder / f"{_SAFETENSORS}.index.json").write_text(
      json.dumps(index, indent=2) + "\n"
    )
  paths = [folder / name for name in names]
  for path, shard in zip(paths, shards, strict=True):
    # The format that transformers writes and checks when it loads.
    safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
  return paths


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
    values = " or ".join(repr(value) for value in expected)
    raise base.InputError(
      f"convert: config.json: field {field}: received {received!r}, expected"
      f" {values}; {says}."
    )
