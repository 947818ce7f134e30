"""Files of one JSON object a line: appended, flushed, cut back exactly.

They are strict JSON: a float that is not finite becomes null.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from osd_jax import base


class JsonLines:
  """Appends objects to a file; opening cuts off a torn last line."""

  def __init__(self, path: str | Path):
    """Opens `path` for appending, made if absent.

    Args:
      path: the file; its folder must exist.
    """
    self.path = Path(path)
    self._file = open(self.path, "ab")  # closed by close()
    self._lines = 0
    whole = 0
    with open(self.path, "rb") as existing:
      for line in existing:
        if line.endswith(b"\n"):
          whole += len(line)
          self._lines += 1
    if whole < self.length:
      self._file.truncate(whole)
      self._file.seek(0, os.SEEK_END)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def length(self) -> int:
    """Bytes written; what a checkpoint keeps, and `truncate` takes."""
    return self._file.tell()

  @property
  def lines(self) -> int:
    """Rows written."""
    return self._lines

  def append(self, row: Mapping[str, Any]) -> None:
    """Appends one object of plain values and flushes it to the operating system.

    Raises:
      DiskError: it cannot be written, as on a full disk.
    """
    text = json.dumps(row, allow_nan=False, ensure_ascii=False)
    try:
      self._file.write(text.encode("utf-8") + b"\n")
      self._file.flush()
    except OSError as error:
      kind = f" ({row['kind']!r})" if "kind" in row else ""
      raise base.DiskError(
        error.errno,
        f"{self.path.stem}: row {self._lines}{kind} cannot be written:"
        f" {error.strerror}; make room and start the same command again, it continues"
        " from its last checkpoint",
        str(self.path),
      ) from error
    self._lines += 1

  def sync(self) -> None:
    """Forces what was written to the disk, as before a checkpoint."""
    os.fsync(self._file.fileno())

  def truncate(self, n_bytes: int) -> None:
    """Cuts the file back to the length that a checkpoint recorded.

    Args:
      n_bytes: a value that `length` had after a row.

    Raises:
      InputError: the file is shorter, or `n_bytes` lies inside a row.
    """
    with open(self.path, "rb") as existing:
      head = existing.read(max(n_bytes, 0))
    if n_bytes < 0 or len(head) < n_bytes or head[-1:] not in (b"", b"\n"):
      raise base.InputError(
        f"{self.path.stem} log: received {n_bytes} bytes to keep, expected the end of"
        f" a row within the {self.length} bytes of {self.path}; the checkpoint"
        " belongs to another log."
      )
    self._file.truncate(n_bytes)
    self._file.seek(0, os.SEEK_END)
    self._lines = head.count(b"\n")

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read(path: str | Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a file; a torn last line is left out.

  Args:
    path: a metrics.jsonl or outputs.jsonl, also one that is still being written.

  Yields:
    One dict a row.

  Raises:
    InputError: a whole line is no JSON object; names file and line.
  """
  with open(path, "rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.endswith(b"\n"):
        return
      try:
        row = json.loads(line)
      except ValueError:
        row = None
      if not isinstance(row, dict):
        raise base.InputError(
          f"{Path(path).stem} log: {path} line {number}: received {line[:60]!r},"
          " expected a JSON object; remove the line."
        )
      yield row


def of_kind(rows: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
  """The rows of a kind, as they were logged."""
  return [row for row in rows if row.get("kind") == kind]


def request_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """The request rows, in the order of the stream, whatever finished first."""
  return sorted(of_kind(rows, "request"), key=place)


def place(row: Mapping[str, Any]) -> int:
  """Where a request stands in the stream."""
  return row.get("query", row["index"])


def column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
  """One field as [n] float64; NaN where a row lacks it or holds null."""
  values = (row.get(name) for row in rows)
  return np.array([math.nan if v is None else float(v) for v in values], np.float64)


def strict(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
  """The values as strict JSON knows them.

  Args:
    values: numpy and jax scalars and arrays, dicts, lists and tuples of them, too.
    where: what an error calls them.

  Returns:
    The plain values, and the dotted names of floats that were not finite.

  Raises:
    InputError: a name is no text, or a value has no JSON form.
  """
  nonfinite: list[str] = []
  return _plain(dict(values), where, "", nonfinite), nonfinite


def _plain(value: Any, where: str, name: str, nonfinite: list[str]) -> Any:
  """The value as strict JSON; names of non-finite floats go to `nonfinite`."""
  if value is None or isinstance(value, (bool, str)):
    return value
  if isinstance(value, int):
    return int(value)  # an IntEnum becomes its number
  if isinstance(value, float):
    if math.isfinite(value):
      return float(value)
    nonfinite.append(name)
    return None
  if isinstance(value, Mapping):
    return _plain_dict(value, where, name, nonfinite)
  if isinstance(value, (list, tuple)):
    parts = enumerate(value)
    return [_plain(v, where, _join(name, i), nonfinite) for i, v in parts]
  if isinstance(value, Path):
    return str(value)
  if hasattr(value, "dtype") and hasattr(value, "shape"):
    return _plain(_array_to_python(value, where, name), where, name, nonfinite)
  raise base.InputError(
    f"{where}: received {type(value).__name__} as {name!r}, expected"
    " numbers, text, booleans, None, arrays, lists or dicts; convert it."
  )


def _plain_dict(
  value: Mapping[Any, Any], where: str, name: str, nonfinite: list[str]
) -> dict[str, Any]:
  for key in value:
    if not isinstance(key, str):
      raise base.InputError(
        f"{where}: received the key {key!r} in {name or 'the row'!r},"
        " expected text; convert it."
      )
  return {k: _plain(v, where, _join(name, k), nonfinite) for k, v in value.items()}


def _array_to_python(value: Any, where: str, name: str) -> Any:
  array = np.asarray(value)
  if array.dtype.kind in "biuf":
    return array.tolist()
  try:
    return array.astype(np.float32).tolist()  # bfloat16 and the like
  except (TypeError, ValueError) as error:
    raise base.InputError(
      f"{where}: received an array of {array.dtype} as {name!r},"
      " expected numbers; convert it."
    ) from error


def _join(prefix: str, part: Any) -> str:
  return f"{prefix}.{part}" if prefix else str(part)
