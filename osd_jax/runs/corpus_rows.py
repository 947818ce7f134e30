"""A distillation corpus on disk: rows are written as they are made, and made once.

A folder holds `made_from.json`, which says what the rows depend on, and files such as
`rows_000064.safetensors` with some rows and the indices of their prompts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import safetensors
import safetensors.flax

from osd_jax import base
from osd_jax.runs.directory import write_text
from osd_jax.runs.log import PRIVATE_FOLDER

PART = 64  # rows of a file
_ABOUT = "made_from.json"
_INDICES = "indices"


class CorpusRows:
  """Rows of a corpus by the index of their prompt.

  Attributes:
    rows: those of the files, and those added since, as numpy arrays of one row.
  """

  def __init__(self, path: str | Path, made_from: Mapping[str, Any]):
    """Opens or makes the folder, and reads the rows that it has; "" has no files.

    `made_from` are JSON values that the rows depend on: prompts, target and settings.

    Raises:
      InputError: the rows in the folder were made from something else, or a file is
        damaged.
    """
    self.rows: dict[int, base.DistillationBatch] = {}
    self._waiting: dict[int, base.DistillationBatch] = {}
    self._path = Path(path) if path else None
    if self._path is None:
      return
    self._path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    about = self._path / _ABOUT
    if about.exists():
      _check_same(about, made_from)
    else:
      write_text(about, json.dumps(made_from, indent=1) + "\n")
    for part in sorted(self._path.glob("rows_*.safetensors")):
      self.rows |= _read(part)

  def add(self, index: int, row: base.DistillationBatch) -> None:
    """Adds the row of a prompt; every `PART` rows, a file is written."""
    self.rows[index] = row
    if self._path is not None:
      self._waiting[index] = row
    if len(self._waiting) >= PART:
      self.flush()

  def flush(self) -> None:
    """Writes the rows that are in no file yet; DiskError if that fails."""
    if not self._waiting or self._path is None:
      return
    indices = list(self._waiting)
    rows = [_named(row) for row in self._waiting.values()]
    tensors: dict[str, Any] = {
      name: np.concatenate([row[name] for row in rows]) for name in rows[0]
    }
    tensors[_INDICES] = np.asarray(indices, np.int32)
    # No other file has this index, so that none is overwritten.
    path = self._path / f"rows_{indices[0]:06d}.safetensors"
    unfinished = path.with_suffix(".partial")
    try:
      safetensors.flax.save_file(tensors, unfinished)
      unfinished.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
      unfinished.unlink(missing_ok=True)
      raise base.DiskError(
        f"corpus file {path}: it cannot be written ({error}); free some space and"
        " repeat the command: rows in other files are not made again."
      ) from error
    self._waiting.clear()


def _check_same(about: Path, made_from: Mapping[str, Any]) -> None:
  try:
    old = json.loads(about.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise _unreadable(about, error, "remove its folder, and all rows") from error
  names = {**old, **made_from}
  other = [name for name in names if old.get(name) != made_from.get(name)]
  if other:
    raise base.InputError(
      f"corpus folder {about.parent}: its rows were made with another"
      f" {', '.join(other)}; choose another folder, or remove this one."
    )


def _unreadable(path: Path, error: Exception, remedy: str) -> base.InputError:
  return base.InputError(
    f"corpus file {path}: it cannot be read ({error}); {remedy} are made again."
  )


def _named(row: base.DistillationBatch) -> Mapping[str, Any]:
  """Returns the arrays of a row by name, such as records/ids."""
  nested = {field: leaf for field, leaf in vars(row).items() if leaf is not None}
  return flax.traverse_util.flatten_dict(
    {**nested, "records": vars(row.records)}, sep="/"
  )


def _read(path: Path) -> dict[int, base.DistillationBatch]:
  try:
    tensors = jax.device_get(safetensors.flax.load_file(path))
  except (OSError, safetensors.SafetensorError) as error:
    raise _unreadable(path, error, "remove it, and its rows") from error
  indices = tensors.pop(_INDICES)
  nested = flax.traverse_util.unflatten_dict(tensors, sep="/")
  records = base.Records(**nested.pop("records"))
  rows = base.DistillationBatch(records=records, **nested)
  return {
    int(index): jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], rows)
    for at, index in enumerate(indices)
  }
