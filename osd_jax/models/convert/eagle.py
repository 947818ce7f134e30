"""EAGLE-3 heads in the formats of other projects: fields and tensor names.

Two formats describe the same head. That of speculators (vLLM) has
`speculators_model_type` in config.json and the layers as "layers.0". The original one,
which SpecForge and SGLang write, has the layers as "midlayer". They count layers of the
target differently: 2 in `eagle_aux_hidden_state_layer_ids` of speculators is the state
after two layers, and in `eagle_config` of SpecForge that after layer 2, three layers.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from osd_jax import base
from osd_jax.models import eagle, weights
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.convert import folders, llama
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import EagleConfig, LlamaConfig
from osd_jax.models.tensors import Tensors

SPECULATORS, SPECFORGE = "speculators", "specforge"
_TYPE = "speculators_model_type"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING, _MIDLAYER = "embed_tokens.weight", "midlayer."
_FIRST = "layers.0."
_DRAFTED = 3  # tokens that other engines draft by default
# Tensors that speculators trains with; they belong to the target.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")
# What transformers takes for fields that a file leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
  "llama": {"vocab_size": 32000, "intermediate_size": 11008},
  "qwen3": {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
  },
}
_USUAL = {
  "model_type": "llama",
  "hidden_size": 4096,
  "num_attention_heads": 32,
  "num_hidden_layers": 1,
  "max_position_embeddings": 2048,
  "eos_token_id": 0,  # not used, but models need one
}
_NAMES = {
  "fc/kernel": "fc.weight",
  "joined_norm/scale": "input_norm.weight",
  "decoder/decoder_norm/scale": "norm.weight",
  "decoder/logits_dense/kernel": "lm_head.weight",
}


def is_head(folder: Path) -> bool:
  """Whether a folder holds an EAGLE-3 head."""
  if not (folder / "config.json").is_file():
    return False
  fields = folders.read_json(folder / "config.json")
  names = fields.get("architectures") or []
  is_named = any("Eagle3" in str(name) for name in names)
  return is_named or _TYPE in fields or "draft_vocab_size" in fields


def shape_of(folder: Path, target: ModelConfig | None = None) -> EagleConfig:
  """The shape of a head; `target` says which layers it reads if its file does not.

  Raises:
    InputError: the folder holds another kind of draft, or does not say enough.
  """
  fields = folders.read_json(folder / "config.json")
  kind = fields.get(_TYPE, "eagle3")
  says = "of the drafts in this format, EAGLE-3 heads can be loaded"
  folders.check_field(says, _TYPE, kind, ("eagle3",))
  inner = fields.get("transformer_layer_config", fields)
  if not isinstance(inner, dict):
    folders.check_field(says, "transformer_layer_config", inner, ("an object",))
  given = {name: value for name, value in inner.items() if value is not None}
  family = given.get("model_type", "llama")
  folders.check_field(says, "model_type", family, tuple(_DEFAULTS))
  layers = {**_USUAL, **_DEFAULTS[family], **given}
  norms = ("joined", "norm_before_fc"), ("each", "fc_norm")
  shape = dataclasses.replace(llama.config_from(layers), tied_head=False)
  return EagleConfig(
    layers=shape,
    draft_vocab_size=fields.get("draft_vocab_size")
    or (32000 if _TYPE in fields else shape.vocab_size),
    state_layers=_state_layers(folder, fields, target),
    norm_before_residual=bool(fields.get("norm_before_residual")),
    state_norm=next((ours for ours, theirs in norms if fields.get(theirs)), ""),
    norm_output=bool(fields.get("norm_output")),
  )


def _state_layers(
  folder: Path, fields: Mapping[str, Any], target: ModelConfig | None
) -> tuple[int, ...]:
  """The numbers of layers whose states a head reads."""
  first, theirs = 0, fields.get(_LAYER_IDS)
  if _TYPE not in fields:
    first, config = 1, fields.get("eagle_config")
    theirs = config.get(_LAYER_IDS) if isinstance(config, dict) else None
  if theirs:
    fits = isinstance(theirs, list)
    if not fits or not all(base.is_count(x, -first) for x in theirs):
      says = "they are the layers of the target that an EAGLE-3 head reads"
      expected = (f"a list of integers >= {-first}",)
      folders.check_field(says, _LAYER_IDS, theirs, expected)
    return tuple(first + number for number in theirs)
  if not isinstance(target, LlamaConfig):
    raise base.InputError(
      f"convert: {folder / 'config.json'}: field {_LAYER_IDS}: received nothing; which"
      " layers the head reads then depends on the depth of its target: bind"
      " ConvertConfig.model to the target's shape."
    )
  if target.num_layers < 4:
    raise base.InputError(
      f"convert: {folder / 'config.json'}: field {_LAYER_IDS}: received nothing,"
      " expected the layers that the head reads: the usual ones exist in a target of 4"
      f" layers or more, and this one has {target.num_layers}."
    )
  return usual_layers(target)


def usual_layers(target: LlamaConfig) -> tuple[int, ...]:
  """The numbers of layers that a head reads if its file names none, as vLLM does."""
  return 2, target.num_layers // 2, target.num_layers - 3


def load(
  folder: Path,
  target: ModelConfig | None = None,
  embedding: Any = None,
) -> weights.AttachedWeights:
  """Reads a head.

  Args:
    folder: folder in one of the two formats.
    target: shape of its target, which it is checked against; None for any.
    embedding: the target's embedding [V, E]; a copy of it in the file is left out.

  Raises:
    InputError: a file is missing or damaged, or the head belongs to another target.
  """
  fields = folders.read_json(folder / "config.json")
  config = shape_of(folder, target)
  tensors = _named(folders.open_tensors(folder))
  name = _target_name(fields)
  own: dict[str, Any] = {}
  ids, order = _draft_vocabulary(folder, config, tensors)
  if ids is not None:
    own["ids"] = ids
  if (given := _embedding(folder, config, tensors, embedding)) is not None:
    own["embedding"] = given
  if target is not None:
    width = tensors.shapes.get("fc.weight", (0, 0))[-1]
    check_target(folder, config, target, own, width, name)
  reads = tensors.shapes.get("fc.weight", (0, 0))[-1] // len(config.state_layers)
  any_target = dataclasses.replace(config.layers, width=max(reads, 1))
  expected = eagle.expected_shapes(config, any_target)
  names = {path: tensor_name(path, config) for path in expected}
  in_file = {
    names[path]: shape[::-1] if llama.is_transposed(path) else shape
    for path, shape in expected.items()
  }
  others = {_EMBEDDING, "d2t", "t2d", *_UNUSED}
  found = {n: shape for n, shape in tensors.shapes.items() if n not in others}
  tensors_lib.check(found, in_file, folder)

  def oriented(path: str, tensor: np.ndarray) -> np.ndarray:
    if path == "decoder/logits_dense/kernel" and order is not None:
      tensor = tensor[order]
    return tensor.T if llama.is_transposed(path) else tensor

  params = tensors_lib.read_params(tensors, names, oriented)
  notes = fields.get("provenance") or f"converted from {folder.name}"
  return weights.AttachedWeights(config, params, "", name, notes, own=own)


def _named(tensors: Tensors) -> Tensors:
  """The tensors by their names in speculators' format."""
  names = {name.replace(_MIDLAYER, _FIRST): name for name in tensors.shapes}
  return folders.renamed(tensors, names)


def _target_name(fields: Mapping[str, Any]) -> str:
  verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
  return verifier.get("name_or_path") or fields.get("target_model_name") or ""


def check_target(
  place: object,
  config: EagleConfig,
  target: ModelConfig,
  own: Mapping[str, Any],
  reads: int = 0,
  name: str = "",
) -> None:
  """Raises InputError unless the sizes of a head fit a target.

  Args:
    place: of the head, for the error message.
    config: its shape.
    target: shape of the target.
    own: `AttachedWeights.own`.
    reads: width of the states that its file was made for; 0 if there is none.
    name: of the target that it was made for, if it is known.
  """
  width = len(config.state_layers) * target.width
  depth = target.num_layers if isinstance(target, LlamaConfig) else 0
  facts = (
    ("token ids", config.layers.vocab_size, target.vocab_size),
    (f"states of {len(config.state_layers)} layers, width", reads or width, width),
  )
  if "embedding" not in own:
    facts += (("an embedding of width", config.layers.width, target.width),)
  wrong = [f"{what} {x} instead of {y}" for what, x, y in facts if x != y]
  if max(config.state_layers) > depth:
    wrong.append(f"layers {config.state_layers} of {depth}")
  if wrong:
    made_for = f" It was made for {name}." if name else ""
    advice = "Name that target, or a head of this one."
    if not reads and not name:
      advice = "Correct EagleConfig, or name the target that the head was made for."
    raise base.InputError(
      f"{place} holds an EAGLE-3 head of another target: {', '.join(wrong)}.{made_for}"
      f" {advice}"
    )


def _draft_vocabulary(
  folder: Path, config: EagleConfig, tensors: Tensors
) -> tuple[np.ndarray | None, np.ndarray | None]:
  """The ids of the draft vocabulary, ascending, and which rows of the head they are.

  None for a head over all tokens; no order if the rows are sorted already.
  """
  vocabulary, size = config.layers.vocab_size, config.draft_vocab_size
  offsets = tensors.read_integers("d2t") if "d2t" in tensors.shapes else None
  if size == vocabulary and (offsets is None or not offsets.any()):
    return None, None
  if offsets is None or offsets.shape != (size,):
    found = "nothing" if offsets is None else f"shape {offsets.shape}"
    raise base.InputError(
      f"convert: {folder}: tensor d2t: found {found}, expected ({size},), the offsets"
      " of the draft vocabulary; save the head with it."
    )
  ids = np.arange(size) + offsets
  order, is_listed = np.argsort(ids), np.ones(vocabulary, bool)
  if "t2d" in tensors.shapes:
    is_listed = tensors.read_integers("t2d").astype(bool)
  fits = len(is_listed) == vocabulary and len(np.unique(ids)) == size
  fits = fits and ids.min() >= 0 and ids.max() < vocabulary
  if fits and "t2d" in tensors.shapes:
    fits = np.array_equal(ids[order], np.flatnonzero(is_listed))
  if not fits:
    raise base.InputError(
      f"convert: {folder}: tensors d2t and t2d: expected d2t[i] + i to be {size}"
      f" different ids below {vocabulary}, those that t2d marks; d2t holds offsets, not"
      " ids."
    )
  found = None if size == vocabulary else ids[order].astype(np.int32)
  return found, None if np.array_equal(order, np.arange(size)) else order


def _embedding(
  folder: Path, config: EagleConfig, tensors: Tensors, target: Any
) -> np.ndarray | None:
  """The head's own embedding, or None if it is the target's."""
  shape = (config.layers.vocab_size, config.layers.width)
  if _EMBEDDING not in tensors.shapes:
    if target is not None and target.shape != shape:
      raise base.InputError(
        f"convert: {folder}: tensor {_EMBEDDING}: found nothing, expected {shape}: the"
        f" target's embedding has the shape {tuple(target.shape)}."
      )
    return None
  tensors_lib.check(
    {_EMBEDDING: tensors.shapes[_EMBEDDING]}, {_EMBEDDING: shape}, folder
  )
  own = tensors_lib.read_params(tensors, {"table": _EMBEDDING}, as_stored=True)["table"]
  # A copy of the target's may be stored in another type.
  rounded = lambda table: np.asarray(table).astype(ml_dtypes.bfloat16)
  if target is not None and target.shape == shape:
    if np.array_equal(rounded(own), rounded(target)):
      return None
  return own


def tensor_name(path: str, config: EagleConfig) -> str:
  """The name in speculators' format of the parameter at a path."""
  if path in _NAMES:
    return _NAMES[path]
  if path.startswith("state_norms_"):
    return f"fc_norm.{path.removeprefix('state_norms_').split('/')[0]}.weight"
  if path.endswith("state_layer_norm/scale"):
    return "layers.0.hidden_norm.weight"
  return llama.tensor_name(path, config.layers).removeprefix("model.")


def write(folder: str | Path, head: weights.AttachedWeights, kind: str) -> Path:
  """Writes a folder in one of the two formats; it appears complete or not at all.

  Raises:
    InputError: the folder is not empty.
    DiskError: the folder cannot be written.
  """
  config = head.config
  assert isinstance(config, EagleConfig)
  tensors: dict[str, np.ndarray] = {}
  for path, leaf in tensors_lib.flat(head.params).items():
    name, array = tensor_name(path, config), np.asarray(leaf, np.float32)
    if kind == SPECFORGE:
      name = name.replace(_FIRST, _MIDLAYER)
    array = array.T if llama.is_transposed(path) else array
    tensors[name] = np.ascontiguousarray(array)
  if "embedding" in head.own:
    tensors[_EMBEDDING] = np.ascontiguousarray(head.own["embedding"])
  if "ids" in head.own:
    ids = np.asarray(head.own["ids"], np.int64)
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.zeros(config.layers.vocab_size, bool)
    tensors["t2d"][ids] = True
  fields = _FIELDS_OF[kind](config, head)
  files = {"config.json": f"{json.dumps(fields, indent=2)}\n".encode()}
  return folders.write(folder, tensors, files)


def _speculators_fields(config: EagleConfig, head: weights.AttachedWeights):
  verifier = {"name_or_path": head.target_name or None, "architectures": []}
  method = {"proposal_type": "greedy", "speculative_tokens": _DRAFTED}
  return {
    "architectures": ["Eagle3Speculator"],
    _TYPE: "eagle3",
    "speculators_config": {
      "algorithm": "eagle3",
      "default_proposal_method": "greedy",
      "proposal_methods": [method],
      "verifier": verifier,
    },
    "transformer_layer_config": _layer_fields(config),
    _LAYER_IDS: list(config.state_layers),
    **_common_fields(config, head),
  }


def _specforge_fields(config: EagleConfig, head: weights.AttachedWeights):
  return {
    **_layer_fields(config),
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {
      _LAYER_IDS: [number - 1 for number in config.state_layers],
      "use_aux_hidden_state": True,
    },
    "target_model_name": head.target_name,
    **_common_fields(config, head),
  }


def _common_fields(config: EagleConfig, head: weights.AttachedWeights):
  return {
    "draft_vocab_size": config.draft_vocab_size,
    "norm_before_residual": config.norm_before_residual,
    "norm_before_fc": config.state_norm == "joined",
    "fc_norm": config.state_norm == "each",
    "norm_output": config.norm_output,
    "dtype": "float32",
    "provenance": head.notes,
  }


_FIELDS_OF = {SPECULATORS: _speculators_fields, SPECFORGE: _specforge_fields}


def _layer_fields(config: EagleConfig) -> dict[str, Any]:
  # A head has an output head of its own, also for a target that shares its embedding.
  return llama.config_to(dataclasses.replace(config.layers, tied_head=False))
