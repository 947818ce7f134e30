"""Model folders of transformers, both ways: T5s and decoder-only models.

What their fields and tensors are called is in a module for each family.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import flax.traverse_util
import numpy as np
import safetensors
import safetensors.numpy

from osd_jax import base
from osd_jax.models import tensors as tensors_lib
from osd_jax.models import weights as weights_lib
from osd_jax.models.convert import fields as fields_lib
from osd_jax.models.convert import llama, t5
from osd_jax.models.convert.folders import open_folder, read_json
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import T5Config
from osd_jax.models.tensors import Tensors
from osd_jax.models.weights import Weights

_FAMILIES = (t5, llama)
_INDEX = "model.safetensors.index.json"
_SHARD = 5 * 10**9  # bytes of a file that is written, as transformers has it


def config_from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
  """The shape that a Hugging Face `config.json` describes.

  Args:
    config: the parsed file.

  Returns:
    A T5Config or LlamaConfig, float32.

  Raises:
    InputError: a field is missing or describes a model that there is not here.
  """
  kinds = {kind: family for family in _FAMILIES for kind in family.MODEL_TYPES}
  kind = config.get("model_type")
  says = "no other architecture can be converted"
  fields_lib.check(says, "model_type", kind, tuple(kinds))
  return kinds[kind].config_from(config)


def shape_of_hugging_face(folder: str | Path) -> ModelConfig:
  """The shape that a folder's config.json states; no weights are read."""
  return config_from_hugging_face(_fields(Path(folder)))


def config_to_hugging_face(config: ModelConfig) -> dict[str, Any]:
  """The `config.json` of a shape, for transformers 4 and 5.

  Args:
    config: the shape; its compute type and initial values have no place there.

  Returns:
    The fields.

  Raises:
    InputError: transformers has no such model.
  """
  return _family(config).config_to(config)


def params_from_hugging_face(
  tensors: Mapping[str, np.ndarray], config: ModelConfig
) -> base.Params:
  """Hugging Face's tensors as t5x's parameter tree.

  Args:
    tensors: name -> array of any floating type.
    config: the model's shape; `tied_head` decides whether `lm_head.weight` is a
      parameter or a copy of the embedding.

  Returns:
    The tree, float32.

  Raises:
    ValueError: tensors are missing, of another shape, unexpected, or copies of the
      embedding that differ from it.
  """
  return _params(tensors_lib.of_arrays(tensors), config, "memory")


def read_hugging_face(folder: str | Path, allow_torch_bin: bool = False) -> Weights:
  """Reads a model folder that transformers wrote, one tensor at a time.

  Args:
    folder: holds `config.json`, and `model.safetensors` whole or in shards.
    allow_torch_bin: read `pytorch_model.bin`, a pickle, where there is nothing else;
      needs torch.

  Returns:
    Weights with float32 parameters; the vocabulary's fingerprint is unknown.

  Raises:
    ValueError: a file is missing or cannot be read, or describes a model that is
      of no family that there is here.
    ImportError: torch is needed and not installed.
  """
  folder = Path(folder)
  fields = _fields(folder)
  config = config_from_hugging_face(fields)
  tensors = open_folder(folder, allow_torch_bin)
  tensors = _family(config).completed(tensors, config, fields)
  notes = f"converted from the Hugging Face folder {folder.name}"
  return Weights(config, _params(tensors, config, folder), notes=notes)


def write_hugging_face(
  folder: str | Path,
  weights: Weights,
  tokenizer: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
  """Writes a folder that transformers loads; it appears complete or not at all.

  Args:
    folder: the folder, not there yet or empty.
    weights: what to write, float32. A tied model gets no `lm_head.weight`.
    tokenizer: name -> content of files to put beside it; see
      `vocabularies.tokenizer_files`.

  Returns:
    The folder.

  Raises:
    InputError: the folder is in use, or transformers has no such model.
    DiskError: it cannot be written.
  """
  folder = Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise base.InputError(
      f"convert: output {folder} is in use, expected a folder that is not there yet"
      " or is empty; remove it or choose another."
    )
  fields = config_to_hugging_face(weights.config)
  flat = flax.traverse_util.flatten_dict(weights.params, sep="/")
  tensors_lib.check(
    tensors_lib.shapes(weights.params),
    tensors_lib.expected_shapes(weights.config),
    "what shall be written",
  )
  family = _family(weights.config)
  tensors = {
    family.tensor_name(path): np.ascontiguousarray(
      _turned(family, path, np.asarray(x, np.float32))
    )
    for path, x in flat.items()
  }
  partial = folder.with_name(folder.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  try:
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    for path in _save(tensors, partial):
      shutil.copymode(partial / "config.json", path)
    for name, content in tokenizer.items():
      (partial / name).write_bytes(content)
    os.replace(partial, folder)
  except (OSError, safetensors.SafetensorError) as error:
    raise weights_lib.unwritable(folder, error) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return folder


def _save(tensors: Mapping[str, np.ndarray], folder: Path) -> list[Path]:
  """One file, or shards and their index where they are more than `_SHARD` bytes."""
  shards: list[dict[str, np.ndarray]] = [{}]
  for name, tensor in tensors.items():
    held = sum(other.nbytes for other in shards[-1].values())
    if shards[-1] and held + tensor.nbytes > _SHARD:
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
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
  paths = [folder / name for name in names]
  for path, shard in zip(paths, shards, strict=True):
    safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
  return paths


def tensor_name(path: str, config: ModelConfig) -> str:
  """The name that transformers gives to the parameter of a path."""
  return _family(config).tensor_name(path)


def file_shape(
  path: str, shape: tuple[int, ...], config: ModelConfig
) -> tuple[int, ...]:
  """The shape in a file of the parameter of a path."""
  return tuple(shape[::-1] if _family(config).is_turned(path) else shape)


def _family(config: ModelConfig) -> Any:
  return t5 if isinstance(config, T5Config) else llama


def _fields(folder: Path) -> dict[str, Any]:
  """config.json; what generation stops at, where a file of its own says so."""
  fields = read_json(folder / "config.json")
  if (folder / "generation_config.json").exists():
    ends = read_json(folder / "generation_config.json").get("eos_token_id")
    if ends is not None and fields.get("model_type") in llama.MODEL_TYPES:
      fields["eos_token_id"] = ends
  return fields


def _params(tensors: Tensors, config: ModelConfig, origin: object) -> base.Params:
  family = _family(config)
  tensors = family.without_copies(tensors, config)
  expected = tensors_lib.expected_shapes(config)
  names = {path: family.tensor_name(path) for path in expected}
  shapes = {
    names[path]: file_shape(path, shape, config) for path, shape in expected.items()
  }
  tensors_lib.check(tensors.shapes, shapes, origin)

  def turn(path: str, tensor: np.ndarray) -> np.ndarray:
    return _turned(family, path, tensor)

  return tensors_lib.read_params(tensors, names, turn)


def _turned(family: Any, path: str, tensor: np.ndarray) -> np.ndarray:
  return tensor.T if family.is_turned(path) else tensor
