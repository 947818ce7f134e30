"""Reads and writes model folders of transformers.

`t5.py` and `llama.py` hold the names of fields and tensors of each family.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from osd_jax import base, formats
from osd_jax.models import tensors as tensors_lib
from osd_jax.models import weights as weights_lib
from osd_jax.models.convert import folders, llama, t5, t5gemma
from osd_jax.models.convert.folders import check_field, open_tensors, read_json
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import LlamaConfig, T5Config, T5GemmaConfig
from osd_jax.models.tensors import Tensors
from osd_jax.models.weights import Weights

_FAMILIES: dict[type, Any] = {T5Config: t5, LlamaConfig: llama, T5GemmaConfig: t5gemma}
_EMBEDDING, _HEAD = "token_embedder/embedding", "decoder/logits_dense/kernel"
_PREFIX = "model."  # of tensors in a model with a head, in decoder-only families
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
# Prefixes of DistributedDataParallel and of torch.compile.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)*")
# Tensors that transformers does not read: positions, and the value heads of trl.
_IGNORED = re.compile(r"(.+\.)?position_ids|v_head\..+")


def config_from(config: Mapping[str, Any]) -> ModelConfig:
  """The shape that a parsed Hugging Face `config.json` describes, in float32.

  Raises:
    InputError: a field is missing or describes an unsupported model.
  """
  config = _without_nulls(config)
  if config.get("model_type") == "gemma3":  # one that also reads images
    whole = ("eos_token_id", "tie_word_embeddings")
    fields = {field: config[field] for field in whole if field in config}
    config = {**config.get("text_config", {}), **fields, "model_type": "gemma3_text"}
  kinds = {kind: family for family in _FAMILIES.values() for kind in family.MODEL_TYPES}
  kind = config.get("model_type")
  says = "other architectures cannot be converted"
  check_field(says, "model_type", kind, tuple(kinds))
  return kinds[kind].config_from(config)


def _without_nulls(config: Any) -> Any:
  """Leaves out fields that are null: they have their default, but caps are off."""
  if not isinstance(config, Mapping):
    return config
  return {
    k: _without_nulls(v)
    for k, v in config.items()
    if v is not None or k.endswith("_softcapping")
  }


def shape_of(folder: str | Path) -> ModelConfig:
  """The shape in a folder's config.json, or in another model file; reads no weights."""
  return config_from(_fields(Path(folder)))


def config_to(config: ModelConfig) -> dict[str, Any]:
  """The fields of `config.json` for a shape, for transformers 4 and 5.

  The type that the model computes in and `embedding_std` are not written; `dtype` is
  that of the tensors, float32 here.

  Raises:
    InputError: transformers has no such model.
  """
  return _FAMILIES[type(config)].config_to(config)


def load(folder: str | Path, as_stored: bool = False) -> Weights:
  """Reads a model folder that transformers wrote, tensor by tensor.

  The folder contains `config.json`, and `model.safetensors` in one file or in shards.
  A file that `formats` can read is read like a folder.

  Returns:
    Weights in float32, or as they are stored (see `tensors.read_params`), without the
    fingerprint of a vocabulary.

  Raises:
    InputError: a file is missing or cannot be read, or the model is not supported.
  """
  folder = Path(folder)
  config, tensors, names = _named(folder)
  turn = functools.partial(_oriented, _FAMILIES[type(config)])
  params = tensors_lib.read_params(tensors, names, turn, as_stored)
  return Weights(config, params, notes=f"converted from {folder.name}")


def bfloat16_of(folder: str | Path) -> frozenset[str]:
  """Paths of the parameters that are stored in bfloat16; reads no weights."""
  _, tensors, names = _named(Path(folder))
  return frozenset(path for path, name in names.items() if name in tensors.short)


def _named(folder: Path) -> tuple[ModelConfig, Tensors, dict[str, str]]:
  """The shape and the tensors of a folder, and path of a parameter -> its tensor."""
  fields = _fields(folder)
  config = config_from(fields)
  family = _FAMILIES[type(config)]
  tensors = _text_tensors(_without_wrapper(open_tensors(folder)))
  expected = weights_lib.expected_shapes(config)
  names = {path: family.tensor_name(path, config) for path in expected}
  # A file may hold a model without its head, whose names lack a prefix.
  bare = family.EMBEDDING.removeprefix(_PREFIX)
  if family.EMBEDDING not in tensors.shapes and bare in tensors.shapes:
    names = {path: name.removeprefix(_PREFIX) for path, name in names.items()}
  aliases = (*family.COPIES, *((family.HEAD,) if config.tied_head else ()))
  names[_EMBEDDING] = _only_embedding(tensors, (names[_EMBEDDING], *aliases))
  # Transformers 5 does not write a head that is the embedding without scaling.
  shares_head = fields.get("tie_word_embeddings", family.TIED_BY_DEFAULT)
  if not config.tied_head and shares_head and family.HEAD not in tensors.shapes:
    names[_HEAD] = names[_EMBEDDING]
  dropped = {*aliases, family.EMBEDDING} - set(names.values())
  shapes = {
    name: shape
    for name, shape in tensors.shapes.items()
    if name not in dropped
    and not name.endswith(family.UNUSED)
    and not _IGNORED.fullmatch(name)
  }
  in_file = {
    names[path]: shape[::-1] if family.is_transposed(path) else shape
    for path, shape in expected.items()
  }
  tensors_lib.check(shapes, in_file, folder)
  return config, tensors, names


def _without_wrapper(tensors: Tensors) -> Tensors:
  """Leaves out the prefixes that wrappers of torch have put before all names."""
  names = {_WRAPPERS.sub("", name): name for name in tensors.shapes}
  starts = {theirs.removesuffix(ours) for ours, theirs in names.items()}
  return folders.renamed(tensors, names) if len(starts) == 1 else tensors


def _text_tensors(tensors: Tensors) -> Tensors:
  """The tensors of the text model, if a file also has one that reads images."""
  names = {
    _PREFIX + name.removeprefix(prefix): name
    for name in tensors.shapes
    for prefix in _TEXT_PREFIXES
    if name.startswith(prefix)
  }
  return folders.renamed(tensors, names) if names else tensors


def _only_embedding(tensors: Tensors, names: tuple[str, ...]) -> str:
  """Returns the first name of the embedding; a file may hold equal copies."""
  copies = [name for name in names if name in tensors.shapes]
  for alias in copies[1:]:
    first, copy = tensors.read(copies[0]), tensors.read(alias)
    if not np.array_equal(first, copy, equal_nan=True):  # NaNs are reported later
      raise base.InputError(
        f"convert: tensor {alias}: differs from {copies[0]}, expected a copy of it in"
        " this model; if the head was trained separately, set tie_word_embeddings"
        " (and in a T5 scale_decoder_outputs) to false in config.json."
      )
  return (copies or names)[0]


def write(
  folder: str | Path,
  weights: Weights,
  tokenizer: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
  """Writes a folder that transformers loads; it appears complete or not at all.

  The folder must be new or empty. Weights in bfloat16 are written as they are, all
  others in float32. For tied models `lm_head.weight` is not written. `tokenizer` holds
  further files by name; see `vocabulary.tokenizer_files`.

  Raises:
    InputError: the folder is not empty, or transformers has no such model.
    DiskError: the folder cannot be written.
  """
  fields = config_to(weights.config)
  flat = tensors_lib.flat(weights.params)
  tensors_lib.check(
    tensors_lib.shapes(weights.params),
    weights_lib.expected_shapes(weights.config),
    "the weights to write",
  )
  # transformers loads all tensors in this type, so one in float32 decides for all.
  if all(_stored_type(x) == ml_dtypes.bfloat16 for x in flat.values()):
    fields["dtype"] = "bfloat16"
  family = _FAMILIES[type(weights.config)]
  tensors = {
    family.tensor_name(path, weights.config): np.ascontiguousarray(
      _oriented(family, path, np.asarray(x, _stored_type(x)))
    )
    for path, x in flat.items()
  }
  text = json.dumps(fields, indent=2) + "\n"
  return folders.write(folder, tensors, {"config.json": text.encode(), **tokenizer})


def _stored_type(tensor: Any) -> np.dtype:
  is_short = tensor.dtype == ml_dtypes.bfloat16
  return np.dtype(ml_dtypes.bfloat16 if is_short else np.float32)


def _fields(folder: Path) -> dict[str, Any]:
  """The fields of config.json, with the eos_token_id of generation_config.json."""
  folder = formats.folder_of(folder)
  fields = read_json(folder / "config.json")
  has_adapter = (folder / "adapter_config.json").exists()
  if has_adapter and any(folder.glob("model*.safetensors")):
    raise base.InputError(
      f"convert: {folder} holds a model and an adapter (adapter_config.json), which"
      " transformers with peft loads together; merge them (merge_and_unload of peft),"
      " save that and name its folder, or move the adapter's files to serve the model"
      " alone."
    )
  if (folder / "generation_config.json").exists():
    ends = read_json(folder / "generation_config.json").get("eos_token_id")
    # Chat models often list further end tokens there, such as <|eot_id|> of Llama 3.
    if ends is not None and fields.get("model_type") not in t5.MODEL_TYPES:
      fields["eos_token_id"] = ends
  return _without_nulls(fields)


def _oriented(family: Any, path: str, tensor: np.ndarray) -> np.ndarray:
  return tensor.T if family.is_transposed(path) else tensor
