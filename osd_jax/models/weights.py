"""Weights in this package's own format: one safetensors file with its configuration.

Tensors have t5x's names, joined by "/". The metadata in the header hold the
configuration and the fingerprint of the vocabulary. For an attached draft they hold the
AttachedConfig and the fingerprint of the target.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax

from osd_jax import base, remote
from osd_jax.models import families
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import (
  AttachedConfig,
  EagleConfig,
  LlamaConfig,
  T5Config,
  T5GemmaConfig,
)

_KINDS = {
  "osd_jax.t5": T5Config,
  "osd_jax.llama": LlamaConfig,
  "osd_jax.t5gemma": T5GemmaConfig,
  "osd_jax.attached": AttachedConfig,
  "osd_jax.eagle": EagleConfig,
}
_FORMATS = {kind: name for name, kind in _KINDS.items()}
_MODELS = ("osd_jax.t5", "osd_jax.llama", "osd_jax.t5gemma")
ATTACHED = ("osd_jax.attached", "osd_jax.eagle")
_OWN = "own/"  # before the names of `AttachedWeights.own`
_AS_HELD = "as held"

# Fields of a shape that a target shares with its copies.
_SIZES = (
  *("vocab_size", "width", "num_heads", "head_dim", "mlp_dim", "state_layer"),
  *("num_layers", "num_encoder_layers", "num_decoder_layers"),
)
_DEPTHS = ("num_layers", "num_encoder_layers", "num_decoder_layers", "state_layer")
# Fields that files store under an earlier name. The fingerprint of a target is a hash
# of this text: another name would detach every draft from the target it was made for.
_FIELDS_IN_FILES = {"state_layer": "handed_out"}
# For the same reason, fields that were added later are stored if they are not default.
_LATER_FIELDS = (
  *("mlp_activations", "rope_factor", "local_rope_theta", "windows"),
  *("query_pre_attn_scalar", "attention_cap", "logit_cap"),
  *("post_norms", "unit_offset_norms", "scaled_embeddings"),
)


@dataclasses.dataclass(frozen=True)
class Weights:
  """The content of a weights file."""

  config: ModelConfig
  # Parameters in float32, with t5x's names; or as they are stored in a file.
  params: base.Params
  vocabulary: str = ""  # fingerprint of the vocabulary, "" if unknown
  notes: str = ""  # how the weights were made

  @property
  def model(self) -> base.Model:
    """The functions that run these weights."""
    return families.build(self.config, "model")


@dataclasses.dataclass(frozen=True)
class AttachedWeights:
  """The content of the weights file of an attached draft."""

  config: AttachedConfig | EagleConfig  # shape of the draft
  params: base.Params  # the draft's trained parameters in float32
  target: str  # `Identity.fingerprint` of its target
  target_name: str = ""  # name of that target, for error messages
  notes: str = ""  # how the weights were made
  # `Identity.sizes` of that target, "" in files of earlier versions.
  target_sizes: str = ""
  # What an EAGLE-3 head has in place of a part of the target, see `eagle.frozen_of`.
  own: base.Params = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Identity:
  """Identifies a target."""

  config: ModelConfig  # shape of the target
  fingerprint: str  # hash of the parameters that an attached draft takes
  name: str  # name for error messages
  # The fingerprint with only the first of its end tokens, which older files have: other
  # end tokens change nothing that a draft learns.
  with_first_end: str = ""

  @property
  def sizes(self) -> str:
    """The sizes of the target, which its quantized and fine-tuned copies share.

    Other fields may differ between copies: one ties its head, another stores the head
    quantized, and they may end texts with other tokens.
    """
    fields = dataclasses.asdict(self.config)
    sizes = (f"{name}={fields[name]}" for name in _SIZES if name in fields)
    return f"{type(self.config).__name__}({', '.join(sizes)})"


def identity(target: Weights, name: str) -> Identity:
  """Computes the identity of a target.

  The fingerprint covers the shape and the first rows of every parameter that an
  attached draft takes. Hashing all rows of a large target would take seconds.
  """
  # The type that the target computes in is not part of its identity.
  shape = dataclasses.replace(target.config, dtype="float32")
  digests = [hashlib.sha256(_config_json(shape).encode())]
  if len(ends := getattr(shape, "eos_ids", ())) > 1:
    first = dataclasses.replace(shape, eos_ids=ends[:1])
    digests.append(hashlib.sha256(_config_json(first).encode()))
  frozen = {
    **families.encoder_params(target.config, target.params),
    "logits_dense": target.params["decoder"].get("logits_dense", {}),
  }
  # Eight rows of each parameter are enough to tell two trainings apart.
  for path, leaf in sorted(tensors_lib.flat(frozen).items()):
    for digest in digests:
      digest.update(path.encode())
      digest.update(np.asarray(leaf[:8], np.float32).tobytes())
  return Identity(target.config, digests[0].hexdigest(), name, digests[-1].hexdigest())


def expected_shapes(config: ModelConfig) -> dict[str, tensors_lib.Shape]:
  """Path ("encoder/layers_0/...") -> shape of the parameters of a model.

  The layers of a stack are alike, so only the first of each is traced.
  """
  sizes = {name: getattr(config, name) for name in _DEPTHS if hasattr(config, name)}
  short = {name: min(size, 1) for name, size in sizes.items()}
  model = families.build(dataclasses.replace(config, **short), "model")
  shapes = tensors_lib.shapes(jax.eval_shape(model.init, jax.random.key(0)))
  # T5Gemma's decoder has as many layers as `num_layers` says, T5's has its own number.
  depths = {
    "encoder": sizes.get("num_encoder_layers", 0),
    "decoder": sizes.get("num_decoder_layers") or sizes["num_layers"],
  }
  return {
    path.replace("/layers_0/", f"/layers_{layer}/"): shape
    for path, shape in shapes.items()
    for layer in range(depths[path.split("/")[0]] if "/layers_0/" in path else 1)
  }


def save(
  path: str | Path, weights: Weights | AttachedWeights, storage: str = "float32"
) -> Path:
  """Writes weights to one file, atomically.

  Args:
    path: a local or remote file.
    weights: weights of a model or of an attached draft.
    storage: "float32", "bfloat16" for half the size, or "as held", the type of each
      parameter.

  Raises:
    InputError: unknown storage.
    DiskError: the file cannot be written.
  """
  if storage not in ("float32", "bfloat16", _AS_HELD):
    raise base.InputError(
      f"weights: save: storage: received {storage!r}, expected 'float32', 'bfloat16' or"
      f" {_AS_HELD!r}."
    )
  # Every text field of the dataclass is stored under its own name.
  flat, own = tensors_lib.flat(weights.params), getattr(weights, "own", {})
  flat |= {f"{_OWN}{name}": leaf for name, leaf in own.items()}
  fields = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
  metadata = {
    "format": _FORMATS[type(weights.config)],
    **{field: value for field, value in fields.items() if isinstance(value, str)},
    "config": _config_json(weights.config),
  }
  return _write(path, flat, storage, metadata)


def save_tree(
  path: str | Path, params: base.Params, notes: str, storage: str = "float32"
) -> Path:
  """Writes the parameters of any model, named by their paths; see `save`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  flat = {jax.tree_util.keystr(place) or "params": leaf for place, leaf in leaves}
  metadata = {"format": "osd_jax.tree", "notes": notes}
  return _write(path, flat, storage, metadata)


def _write(
  given: str | Path, flat: dict[str, Any], storage: str, metadata: dict[str, str]
) -> Path:
  """Writes a local or remote file, by renaming a temporary one in the same folder.

  A link stays, and the file that it points to is replaced.
  """
  dtype = None if storage == _AS_HELD else storage
  is_floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  tensors = {
    name: jnp.asarray(x, dtype if is_floating(x) else None) for name, x in flat.items()
  }
  with remote.stored(given) as path:
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + ".partial")
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      partial.touch()  # with the permissions of umask; safetensors makes private files
      mode = partial.stat().st_mode
      safetensors.flax.save_file(tensors, partial, metadata=metadata)
      tensors_lib.sort_metadata(partial)  # so that equal weights are equal files
      partial.chmod(mode)
      # Renaming is atomic, so a reader finds the old file or the new one.
      os.replace(partial, path)
    except (OSError, safetensors.SafetensorError) as error:
      raise tensors_lib.unwritable(path, error) from error
    finally:
      partial.unlink(missing_ok=True)
  return Path(given)


def check_finite(what: str, params: base.Params, storage: str = "float32") -> None:
  """Raises BrokenDraftError if parameters are not finite in their stored type."""
  for place, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    with np.errstate(all="ignore"):  # overflows are reported below
      array = np.asarray(leaf).astype(jnp.dtype(storage))
    if wrong := int(np.sum(~np.isfinite(array))):
      name = jax.tree_util.keystr(place)
      raise base.BrokenDraftError(
        f"{what} is not saved: {wrong} of the {array.size} values of {name} are NaN or"
        " infinite; lower OptimizerConfig.learning_rate."
      )


def load(path: str | Path, as_stored: bool = False) -> Weights:
  """Reads a file that `save` wrote, in float32 or `as_stored` (`tensors.read_params`).

  Raises:
    InputError: the file is missing or has another format, or its tensors do not fit the
      configuration in its header.
  """
  tensors, header, config = opened(Path(path), _MODELS)
  params = read_params(tensors, expected_shapes(config), path, as_stored)
  return Weights(config, params, header.get("vocabulary", ""), header.get("notes", ""))


def shape_of(path: str | Path) -> ModelConfig | AttachedConfig | EagleConfig:
  """The configuration in the header of a file; reads no tensors."""
  return opened(Path(path), tuple(_KINDS))[2]


def bfloat16_of(path: str | Path) -> frozenset[str]:
  """Paths of the parameters that a file stores in bfloat16; reads no tensors."""
  return opened(Path(path), tuple(_KINDS))[0].short


def is_attached(path: Path) -> bool:
  """Whether a file exists and contains an attached draft."""
  return path.is_file() and tensors_lib.format_of(path) in ATTACHED


def opened(
  path: Path, wanted: tuple[str, ...]
) -> tuple[tensors_lib.Tensors, dict[str, str], Any]:
  """Opens a file of one of the wanted formats: tensors, header, configuration."""
  tensors, header = tensors_lib.of_safetensors(path)
  if header.get("format") not in wanted:
    advice = "`osd pretrain`, `osd offline` and `osd convert` write such files."
    if header.get("format") == ATTACHED[1]:
      advice = (
        "An EAGLE-3 head is served together with its target, as PairConfig.draft;"
        " `osd convert` writes it for speculators and SpecForge."
      )
    elif header.get("format") in ATTACHED:
      advice = (
        "An attached draft is served together with its target, as PairConfig.draft. It"
        " has no head or embedding of its own, so that it cannot be a target, and"
        " cannot be exported to another format."
      )
    elif header.get("format") in (None, "pt"):
      advice = (
        "Tensors of transformers need their config.json: name the folder that contains"
        " both."
      )
    raise base.InputError(
      f"weights: {path} has format {header.get('format')!r}, expected"
      f" {' or '.join(map(repr, wanted))}. {advice}"
    )
  kind, text = _KINDS[header["format"]], header.get("config", "")
  names = {in_file: name for name, in_file in _FIELDS_IN_FILES.items()}
  try:
    fields = {names.get(name, name): v for name, v in json.loads(text).items()}
    return tensors, header, kind(**fields)
  except (AttributeError, TypeError, ValueError) as error:
    raise base.InputError(
      f"weights: {path}: config in the header: received {text!r}, expected the"
      f" fields of {kind.__name__} ({error}). The file may come from another version of"
      " this package."
    ) from error


def read_params(
  tensors: tensors_lib.Tensors, expected, path: str | Path, as_stored: bool = False
) -> base.Params:
  """Reads parameters of the expected shapes, which are named by their paths."""
  tensors_lib.check(tensors.shapes, expected, path)
  names = {name: name for name in expected}
  return tensors_lib.read_params(tensors, names, as_stored=as_stored)


def own_parts(tensors: tensors_lib.Tensors) -> tuple[base.Params, tensors_lib.Tensors]:
  """Reads `AttachedWeights.own` of a file; returns it and the other tensors."""
  own: base.Params = {}
  if (name := f"{_OWN}ids") in tensors.shapes:
    own["ids"] = tensors.read_integers(name)
  if (name := f"{_OWN}embedding") in tensors.shapes:
    own["embedding"] = tensors.read(name)
  rest = {n: x for n, x in tensors.shapes.items() if not n.startswith(_OWN)}
  return own, dataclasses.replace(tensors, shapes=rest)


def _config_json(config: Any) -> str:
  fields = dataclasses.asdict(config)
  if isinstance(config, LlamaConfig):
    usual = type(config)()
    for name in _LATER_FIELDS:
      if fields[name] == getattr(usual, name):
        del fields[name]
  return json.dumps({_FIELDS_IN_FILES.get(name, name): fields[name] for name in fields})
