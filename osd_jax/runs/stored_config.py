"""A config as config.json holds it, and where two of them differ."""

import dataclasses
import enum
import functools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Fields that may differ when a run goes on; on another mesh sums are rounded otherwise.
FREE = ("run_directory", "overwrite", "partition", "replicas")


def described(config: Any) -> dict[str, Any]:
  """Every field of a frozen dataclass, nested, with the names of the classes.

  Functions are told apart by their names alone, other objects by their class.

  Args:
    config: the dataclass; None has no fields.
  """
  if config is None:
    return {}
  return json.loads(json.dumps(_plain(config), allow_nan=False))


def differences(
  stored: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
  """(field, stored value, given value) of whatever differs but for `FREE` fields.

  Args:
    stored: what `described` said when the run began.
    given: what it says now.
  """
  before, now = dict(_leaves(stored)), dict(_leaves(given))
  return [
    (name, before.get(name, "nothing"), now.get(name, "nothing"))
    for name in dict.fromkeys((*before, *now))
    if name.partition(".")[0] not in FREE
    and before.get(name, "nothing") != now.get(name, "nothing")
  ]


def _plain(value: Any) -> Any:
  if value is None or isinstance(value, bool | str | int) and not _is_enum(value):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else repr(value)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = dataclasses.fields(value)
    values = {field.name: _plain(getattr(value, field.name)) for field in fields}
    return {"class": type(value).__name__, **values}
  if isinstance(value, Mapping):
    return {str(key): _plain(one) for key, one in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(one) for one in value]
  return _named(value)


def _named(value: Any) -> Any:
  """Of what has no JSON form: a text that is the same in the next process."""
  if _is_enum(value):
    return value.name
  if isinstance(value, Path):
    return str(value)
  if isinstance(value, functools.partial):
    return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
  if hasattr(value, "dtype") and hasattr(value, "shape"):
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {zlib.crc32(array.tobytes()):08x}"
  named = value if hasattr(value, "__qualname__") else type(value)
  return f"{named.__module__}.{named.__qualname__}"


def _is_enum(value: Any) -> bool:
  return isinstance(value, enum.Enum)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
  """(dotted name, value) of all that is not nested; empty lists are values."""
  if isinstance(value, Mapping):
    parts = value.items()
  elif isinstance(value, list) and value:
    parts = enumerate(value)
  else:
    yield name, value
    return
  for key, part in parts:
    yield from _leaves(part, f"{name}.{key}" if name else str(key))
