"""Weights of our own models: one safetensors file that also says its shape.

Tensors carry t5x's names, joined by "/"; the header's metadata hold the config
and the fingerprint of the vocabulary the model was trained with; or the AttachedConfig
and the fingerprint of the target that a draft is attached to.
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
from osd_jax.models import attached, families
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import AttachedConfig, LlamaConfig, T5Config

_KINDS = {
  "osd_jax.t5": T5Config,
  "osd_jax.llama": LlamaConfig,
  "osd_jax.attached": AttachedConfig,
}
_FORMATS = {kind: name for name, kind in _KINDS.items()}
_MODELS = ("osd_jax.t5", "osd_jax.llama")
_ATTACHED = "osd_jax.attached"

# Fields that files store under an earlier name. The fingerprint of a target is a hash
# of this text: another name would detach every draft from the target it was made for.
_FIELDS_IN_FILES = {"state_layer": "handed_out"}


@dataclasses.dataclass(frozen=True)
class Weights:
  """What a weights file holds.

  Attributes:
    config: shape of the model.
    params: t5x's tree, float32.
    vocabulary: fingerprint of the vocabulary, "" if unknown.
    notes: how the weights came to be.
  """

  config: ModelConfig
  params: base.Params
  vocabulary: str = ""
  notes: str = ""

  @property
  def model(self) -> base.Model:
    """The functions that run these weights."""
    return families.build(self.config, "model")


@dataclasses.dataclass(frozen=True)
class AttachedWeights:
  """What the weights file of an attached draft holds.

  Attributes:
    config: shape of the draft.
    params: what is the draft's own, float32.
    target: `Identity.fingerprint` of the target that it is attached to.
    target_name: what that target was called, for error texts.
    notes: how the weights came to be.
  """

  config: AttachedConfig
  params: base.Params
  target: str
  target_name: str = ""
  notes: str = ""


@dataclasses.dataclass(frozen=True)
class Identity:
  """What tells a target from others.

  Attributes:
    config: its shape.
    fingerprint: of what an attached draft takes from it.
    name: what it is called, for error texts.
  """

  config: ModelConfig
  fingerprint: str
  name: str


def identity(target: Weights, name: str) -> Identity:
  """The identity of a target: its shape, and some rows of all that a draft takes."""
  shape = dataclasses.replace(target.config, dtype="float32")  # a draft serves in any
  digest = hashlib.sha256(_config_json(shape).encode())
  frozen = {
    **families.encoder_params(target.config, target.params),
    "logits_dense": target.params["decoder"].get("logits_dense", {}),
  }
  for path, leaf in sorted(tensors_lib.flat(frozen).items()):
    digest.update(path.encode())
    digest.update(np.asarray(leaf[:8], np.float32).tobytes())
  return Identity(target.config, digest.hexdigest(), name)


def save(
  path: str | Path, weights: Weights | AttachedWeights, storage: str = "float32"
) -> Path:
  """Writes weights to one file; the file appears complete or not at all.

  Args:
    path: the file, by custom `*.safetensors`.
    weights: what to write.
    storage: "float32", or "bfloat16" for half the size (rounded).

  Returns:
    The path.

  Raises:
    InputError: unknown storage.
    DiskError: the file cannot be written.
  """
  if storage not in ("float32", "bfloat16"):
    raise base.InputError(
      f"weights: save: storage: received {storage!r}, expected 'float32' or 'bfloat16'."
    )
  named = dataclasses.asdict(dataclasses.replace(weights, params={}))
  metadata = {
    "format": _FORMATS[type(weights.config)],
    **{field: value for field, value in named.items() if isinstance(value, str)},
    "config": _config_json(weights.config),
  }
  return _write(path, tensors_lib.flat(weights.params), storage, metadata)


def save_tree(
  path: str | Path, params: base.Params, notes: str, storage: str = "float32"
) -> Path:
  """Writes parameters of any model, named by their paths in the tree; see `save`."""
  named, _ = jax.tree_util.tree_flatten_with_path(params)
  flat = {jax.tree_util.keystr(place) or "params": leaf for place, leaf in named}
  metadata = {"format": "osd_jax.tree", "notes": notes}
  return _write(path, flat, storage, metadata)


def _write(
  given: str | Path, flat: dict[str, Any], storage: str, metadata: dict[str, str]
) -> Path:
  """Writes tensors to a file, or to an address."""
  tensors = {name: jnp.asarray(x, storage) for name, x in flat.items()}
  with remote.stored(given) as path:
    _put(path, tensors, metadata)
  return Path(given)


def _put(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
  """Writes tensors to a file beside the path, then puts it there."""
  partial = path.with_name(path.name + ".partial")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()  # as readable as umask says; the library's own file is private
    mode = partial.stat().st_mode
    safetensors.flax.save_file(tensors, partial, metadata=metadata)
    partial.chmod(mode)
    os.replace(partial, path)
  except (OSError, safetensors.SafetensorError) as error:
    raise unwritable(path, error) from error
  finally:
    partial.unlink(missing_ok=True)


def check_output(setting: str, path: str, folder: bool = False) -> None:
  """Checks, before any work, that what it makes can be written.

  Args:
    setting: name of the field that holds the path, for the error text.
    path: where the file or folder shall be.
    folder: it is a folder; one that is there must be empty.

  Raises:
    InputError: there is something else, or the path leads through no folder.
  """
  if remote.is_remote(path):
    return  # found out when it is written; what was made is then still here
  try:
    reason = _not_writable(Path(path), folder) if path else "it is empty"
  except OSError as error:  # too long
    reason = str(error.strerror)
  if reason:
    raise base.InputError(
      f"{setting}: received {path!r}, expected a {'folder' if folder else 'file'} that"
      f" can be written, but {reason}; choose another."
    )


def _not_writable(path: Path, folder: bool) -> str:
  """Why a file or folder cannot be written, "" if it can."""
  if "\0" in str(path):
    return "it holds a NUL"
  if path.is_dir() and not folder:
    return "it is a folder"
  if folder and path.exists() and not (path.is_dir() and not any(path.iterdir())):
    return "it is in use"
  parent = next(p for p in path.absolute().parents if p.exists())
  if not parent.is_dir():
    return f"{parent} is no folder"
  return "" if os.access(parent, os.W_OK) else f"nothing may be written to {parent}"


def unwritable(path: Path, error: Exception) -> base.DiskError:
  """What to raise where a file of weights cannot be written."""
  reason = getattr(error, "strerror", None) or error
  return base.DiskError(f"weights: {path} cannot be written: {reason}.")


def load(path: str | Path) -> Weights:
  """Reads a file that `save` wrote.

  Args:
    path: the file.

  Returns:
    Weights with float32 parameters.

  Raises:
    ValueError: no such file, another format, or tensors that do not fit the
      configuration in the header.
  """
  tensors, header = _opened(Path(path), _MODELS)
  config = _config(_KINDS[header["format"]], header.get("config", ""), path)
  params = _params(tensors, tensors_lib.expected_shapes(config), path)
  return Weights(config, params, header.get("vocabulary", ""), header.get("notes", ""))


def shape_of(path: str | Path) -> ModelConfig | AttachedConfig:
  """The shape that a file's header states; no tensor is read.

  Raises:
    InputError: as `load` does.
  """
  _, header = _opened(Path(path), tuple(_KINDS))
  return _config(_KINDS[header["format"]], header.get("config", ""), path)


def is_attached(path: Path) -> bool:
  """Whether a file, if it can be read, holds an attached draft."""
  return path.is_file() and tensors_lib.format_of(path) == _ATTACHED


def load_attached(path: str | Path, target: Identity) -> AttachedWeights:
  """Reads the file of an attached draft; see `load`.

  Args:
    path: the file.
    target: the target that it shall be attached to.

  Raises:
    InputError: as `load` does, or the draft is attached to another target.
  """
  tensors, header = _opened(Path(path), (_ATTACHED,))
  config = _config(AttachedConfig, header.get("config", ""), path)
  stated = header.get("target", "")
  if stated != target.fingerprint:
    raise base.InputError(
      f"{path} is attached to the target {header.get('target_name') or 'unknown'}"
      f" ({stated[:12]}...), received {target.name} ({target.fingerprint[:12]}...):"
      " a draft reads what its own target reads. Name that target, or begin with draft"
      " 'attached'."
    )
  model = attached.build(config, target.config)
  expected = tensors_lib.shapes(jax.eval_shape(model.init, jax.random.key(0)))
  texts = {name: header.get(name, "") for name in ("target", "target_name", "notes")}
  return AttachedWeights(config, _params(tensors, expected, path), **texts)


def _opened(
  path: Path, wanted: tuple[str, ...]
) -> tuple[tensors_lib.Tensors, dict[str, str]]:
  tensors, header = tensors_lib.of_safetensors(path)
  if header.get("format") not in wanted:
    raise base.InputError(
      f"weights: {path} says format {header.get('format')!r}, expected"
      f" {' or '.join(map(repr, wanted))}; write it with `osd"
      " pretrain` or `osd offline`."
    )
  return tensors, header


def _params(tensors: tensors_lib.Tensors, expected, path: str | Path) -> base.Params:
  tensors_lib.check(tensors.shapes, expected, path)
  return tensors_lib.read_params(tensors, {name: name for name in expected})


def _config_json(config: Any) -> str:
  fields = dataclasses.asdict(config)
  return json.dumps({_FIELDS_IN_FILES.get(name, name): fields[name] for name in fields})


def _config(kind: type, text: str, path: str | Path) -> Any:
  names = {in_file: name for name, in_file in _FIELDS_IN_FILES.items()}
  try:
    return kind(**{names.get(name, name): v for name, v in json.loads(text).items()})
  except (AttributeError, TypeError, ValueError) as error:
    raise base.InputError(
      f"weights: {path}: config in the header: received {text!r}, expected the"
      f" fields of a {kind.__name__} ({error}); the file may be of another version of"
      " this package."
    ) from error
