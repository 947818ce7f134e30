"""metrics.jsonl: one self-describing JSON object a line, appended and flushed.

`kind` says what a line is: "request", "update", "swap", "summary" and so on.
The file is strict JSON: a float that is not finite becomes null, and the names
of such fields stand in the line's own `nonfinite` list.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from osd_jax import base

_RESERVED = ("kind", "nonfinite")


class MetricsLog:
  """Appends rows to metrics.jsonl; opening cuts off a torn last line."""

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

  def __enter__(self) -> "MetricsLog":
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

  def write(self, kind: str, values: Mapping[str, Any]) -> None:
    """Appends one row and flushes it to the operating system.

    Args:
      kind: what the row is.
      values: names and values; numpy and jax scalars and arrays, dicts, lists
        and tuples of them are converted.

    Raises:
      ValueError: a name is reserved or no text, or a value has no JSON form.
      OSError: it cannot be written, as on a full disk.
    """
    for name in _RESERVED:
      if name in values:
        raise base.InputError(
          f"metrics row {kind!r}: received a field named {name!r}, which the log"
          " itself writes; rename it."
        )
    nonfinite: list[str] = []
    row = {"kind": kind, **_plain(dict(values), kind, "", nonfinite)}
    if nonfinite:
      row["nonfinite"] = nonfinite
    text = json.dumps(row, allow_nan=False, ensure_ascii=False)
    try:
      self._file.write(text.encode("utf-8") + b"\n")
      self._file.flush()
    except OSError as error:
      raise base.DiskError(
        error.errno,
        f"metrics: row {self._lines} ({kind!r}) cannot be written: {error.strerror};"
        " make room and start the same command again, it continues from its last"
        " checkpoint",
        str(self.path),
      ) from error
    self._lines += 1

  def sync(self) -> None:
    """Forces what was written to the disk, as before a checkpoint."""
    os.fsync(self._file.fileno())

  def truncate(self, n_bytes: int) -> None:
    """Cuts the log back to the length that a checkpoint recorded.

    Args:
      n_bytes: a value that `length` had after a row.

    Raises:
      ValueError: the log is shorter, or `n_bytes` lies inside a row.
    """
    with open(self.path, "rb") as existing:
      head = existing.read(max(n_bytes, 0))
    if n_bytes < 0 or len(head) < n_bytes or head[-1:] not in (b"", b"\n"):
      raise base.InputError(
        f"metrics log: received {n_bytes} bytes to keep, expected the end of a"
        f" row within the {self.length} bytes of {self.path}; the checkpoint"
        " belongs to another log."
      )
    self._file.truncate(n_bytes)
    self._file.seek(0, os.SEEK_END)
    self._lines = head.count(b"\n")

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read(path: str | Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a log; a torn last line is left out.

  Args:
    path: a metrics.jsonl, also one that is still being written.

  Yields:
    One dict a row, with `kind`.

  Raises:
    ValueError: a whole line is no JSON object; names file and line.
  """
  with open(path, "rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.endswith(b"\n"):
        return
      try:
        row = json.loads(line)
      except ValueError as error:
        raise _bad_line(path, number, line) from error
      if not isinstance(row, dict):
        raise _bad_line(path, number, line)
      yield row


def _bad_line(path: str | Path, number: int, line: bytes) -> ValueError:
  return ValueError(
    f"metrics log: {path} line {number}: received {line[:60]!r}, expected a JSON"
    " object; remove the line."
  )


def _plain(value: Any, kind: str, name: str, nonfinite: list[str]) -> Any:
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
    return _plain_dict(value, kind, name, nonfinite)
  if isinstance(value, (list, tuple)):
    parts = enumerate(value)
    return [_plain(v, kind, _join(name, i), nonfinite) for i, v in parts]
  if isinstance(value, Path):
    return str(value)
  if hasattr(value, "dtype") and hasattr(value, "shape"):
    return _plain(_array_to_python(value, kind, name), kind, name, nonfinite)
  raise base.InputError(
    f"metrics row {kind!r}: received {type(value).__name__} as {name!r}, expected"
    " numbers, text, booleans, None, arrays, lists or dicts; convert it."
  )


def _plain_dict(
  value: Mapping[Any, Any], kind: str, name: str, nonfinite: list[str]
) -> dict[str, Any]:
  for key in value:
    if not isinstance(key, str):
      raise base.InputError(
        f"metrics row {kind!r}: received the key {key!r} in {name or 'the row'!r},"
        " expected text; convert it."
      )
  return {k: _plain(v, kind, _join(name, k), nonfinite) for k, v in value.items()}


def _array_to_python(value: Any, kind: str, name: str) -> Any:
  array = np.asarray(value)
  if array.dtype.kind in "biuf":
    return array.tolist()
  try:
    return array.astype(np.float32).tolist()  # bfloat16 and the like
  except (TypeError, ValueError) as error:
    raise base.InputError(
      f"metrics row {kind!r}: received an array of {array.dtype} as {name!r},"
      " expected numbers; convert it."
    ) from error


def _join(prefix: str, part: Any) -> str:
  return f"{prefix}.{part}" if prefix else str(part)


class TensorBoardLog:
  """The numbers of metrics rows as TensorBoard scalars; needs the extra [log]."""

  def __init__(self, directory: str | Path):
    """Opens an events file in `directory`.

    Raises:
      ImportError: tensorboardX is not installed; says what to install.
    """
    try:
      import tensorboardX
    except ImportError as error:
      raise base.MissingExtraError(
        "TensorBoard events need tensorboardX: pip install osd-jax[log], or"
        " switch them off."
      ) from error
    self._writer = tensorboardX.SummaryWriter(str(directory))

  def __enter__(self) -> "TensorBoardLog":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Writes each finite number of `values` as `kind/name`; skips the rest."""
    for name, value in _plain(dict(values), kind, "", []).items():
      if isinstance(value, (int, float)):
        self._writer.add_scalar(f"{kind}/{name}", value, step)

  def close(self) -> None:
    """Writes what is pending and closes the file."""
    self._writer.close()
