"""Weights of our own models: one safetensors file that also says its shape.

Tensors carry t5x's names, joined by "/"; the header's metadata hold the T5Config
and the fingerprint of the vocabulary the model was trained with.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import safetensors
import safetensors.flax

from osd_jax import base
from osd_jax.models import t5


@dataclasses.dataclass(frozen=True)
class Weights:
  """What a weights file holds.

  Attributes:
    config: shape of the model.
    params: t5x's tree, float32.
    vocabulary: fingerprint of the vocabulary, "" if unknown.
    notes: how the weights came to be.
  """

  config: t5.T5Config
  params: base.Params
  vocabulary: str = ""
  notes: str = ""

  @property
  def model(self) -> base.Model:
    """The functions that run these weights."""
    return t5.build(self.config)


def save(path: str | Path, weights: Weights, storage: str = "float32") -> Path:
  """Writes weights to one file; the file appears complete or not at all.

  Args:
    path: the file, by custom `*.safetensors`.
    weights: what to write.
    storage: "float32", or "bfloat16" for half the size (rounded).

  Returns:
    The path.

  Raises:
    ValueError: unknown storage.
  """
  if storage not in ("float32", "bfloat16"):
    raise base.InputError(
      f"weights: save: storage: received {storage!r}, expected 'float32' or 'bfloat16'."
    )
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  flat = flax.traverse_util.flatten_dict(weights.params, sep="/")
  tensors = {name: jnp.asarray(x, storage) for name, x in flat.items()}
  metadata = {
    "format": "osd_jax.t5",
    "config": json.dumps(dataclasses.asdict(weights.config)),
    "vocabulary": weights.vocabulary,
    "notes": weights.notes,
  }
  partial = path.with_name(path.name + ".partial")
  try:
    partial.touch()  # as readable as umask says; the library's own file is private
    mode = partial.stat().st_mode
    safetensors.flax.save_file(tensors, partial, metadata=metadata)
    partial.chmod(mode)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
  return path


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
  path = Path(path)
  metadata, tensors = _read(path)
  if metadata.get("format") != "osd_jax.t5":
    raise base.InputError(
      f"weights: {path} says format {metadata.get('format')!r}, expected"
      " 'osd_jax.t5'; write it with `osd pretrain` or `osd offline`."
    )
  config = _config(metadata.get("config", ""), path)
  params = flax.traverse_util.unflatten_dict(
    {name: jnp.asarray(x, jnp.float32) for name, x in tensors.items()}, sep="/"
  )
  check_shapes(config, params, str(path))
  vocabulary, notes = (metadata.get(field, "") for field in ("vocabulary", "notes"))
  return Weights(config, params, vocabulary, notes)


def check_shapes(config: t5.T5Config, params: base.Params, origin: str) -> None:
  """Raises ValueError that names the first parameter not of `config`'s shape."""
  expected = _shapes(jax.eval_shape(t5.build(config).init, jax.random.key(0)))
  found = _shapes(params)
  for name in sorted(expected.keys() | found.keys()):
    if expected.get(name) != found.get(name):
      raise base.InputError(
        f"weights: {origin}: parameter {name}: found"
        f" {found.get(name, 'nothing')}, expected"
        f" {expected.get(name, 'nothing')} for this T5Config; check that"
        " the file belongs to the configured model."
      )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
  flat = flax.traverse_util.flatten_dict(params, sep="/")
  return {name: tuple(x.shape) for name, x in flat.items()}


def _config(text: str, path: Path) -> t5.T5Config:
  try:
    return t5.T5Config(**json.loads(text))
  except (TypeError, ValueError) as error:
    raise base.InputError(
      f"weights: {path}: config in the header: received {text!r}, expected the"
      f" fields of a T5Config ({error}); the file may be of another version of"
      " this package."
    ) from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, jax.Array]]:
  try:
    with safetensors.safe_open(path, framework="flax") as file:
      metadata = file.metadata() or {}
      return metadata, {name: file.get_tensor(name) for name in file.keys()}
  except (OSError, safetensors.SafetensorError) as error:
    raise base.InputError(
      f"weights: cannot read {path}: {error}; expected a safetensors file made by"
      " `osd pretrain` or `osd offline`."
    ) from error
