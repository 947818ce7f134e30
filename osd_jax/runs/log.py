"""The logs of a run: metrics.jsonl, outputs.jsonl and optional TensorBoard events.

Both files hold one JSON object per line. A line is flushed as soon as it is written,
and a file is cut back to the length that a checkpoint recorded. In metrics.jsonl,
`kind` says what a row is: "request", "update", "summary" and so on. The JSON is strict:
a float that is not finite becomes null, and `nonfinite` lists the names of such fields.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from osd_jax import base

Row = Mapping[str, Any]

OUTPUTS_KEPT = ("none", "text", "ids")
_IDS = ("prompt_ids", "output_ids")
_RESERVED = ("kind", "nonfinite")


class JsonLines:
  """Appends objects to a file. Opening it removes an incomplete last line."""

  def __init__(self, path: str | Path):
    """Opens `path` for appending; its folder must exist."""
    self.path = Path(path)
    self._file = open(self.path, "ab")  # closed by close()
    self._lines = 0
    # A killed process may have written half a line, which would corrupt the next one.
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
    """Bytes written. A checkpoint stores it for `truncate`."""
    return self._file.tell()

  @property
  def lines(self) -> int:
    """Rows written."""
    return self._lines

  def append(self, row: Row) -> None:
    """Appends one object of plain values and flushes it to the operating system.

    Raises:
      DiskError: the row cannot be written, for example because the disk is full.
    """
    # NaN is not JSON: other readers would reject the whole file.
    text = json.dumps(row, allow_nan=False, ensure_ascii=False)
    try:
      self._file.write(text.encode("utf-8") + b"\n")
      self._file.flush()
    except OSError as error:
      kind = f" ({row['kind']!r})" if "kind" in row else ""
      raise base.DiskError(
        error.errno,
        f"{self.path.stem}: row {self._lines}{kind} cannot be written:"
        f" {error.strerror}; free some space and repeat the command, which continues"
        " from the last checkpoint",
        str(self.path),
      ) from error
    self._lines += 1

  def sync(self) -> None:
    """Forces all rows to the disk. Called before a checkpoint that counts on them."""
    os.fsync(self._file.fileno())

  def truncate(self, n_bytes: int) -> None:
    """Cuts the file back to a value that `length` had after a row.

    Raises:
      InputError: the file is shorter, or `n_bytes` is not the end of a row.
    """
    # The bytes are checked, because a copied or edited log may belong to another run.
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


class MetricsLog(JsonLines):
  """Appends rows to metrics.jsonl and, optionally, their numbers to TensorBoard."""

  def __init__(self, path: str | Path, tensorboard: Path | None = None):
    """Opens `path` for appending; its folder must exist.

    Args:
      path: the file, usually metrics.jsonl of a run.
      tensorboard: folder of TensorBoard events; None writes none.

    Raises:
      MissingExtraError: tensorboardX is not installed.
    """
    super().__init__(path)
    self._events = None if tensorboard is None else _Events(tensorboard)

  def write(self, kind: str, values: Row) -> None:
    """Appends one row. Arrays and numpy or jax scalars become plain numbers.

    Raises:
      InputError: a name is reserved or not text, or a value has no JSON form.
      DiskError: the row cannot be written, for example because the disk is full.
    """
    for name in _RESERVED:
      if name in values:
        raise base.InputError(
          f"metrics row {kind!r}: received a field named {name!r}, which the log"
          " itself writes; rename it."
        )
    plain, nonfinite = strict(values, f"metrics row {kind!r}")
    row = {"kind": kind, **plain}
    if nonfinite:
      row["nonfinite"] = nonfinite
    self.append(row)
    if self._events is not None:
      self._events.write(kind, plain)

  def write_rows(self, kind: str, rows: Iterable[Row]) -> None:
    """Appends several rows of one kind."""
    for row in rows:
      self.write(kind, row)

  def close(self) -> None:
    """Closes the file and the events."""
    super().close()
    if self._events is not None:
      self._events.close()


class _Events:
  """TensorBoard scalars of the rows, over finished requests or steps."""

  def __init__(self, directory: Path):
    try:
      import tensorboardX
    except ImportError as error:
      raise base.MissingExtraError(
        "TensorBoard events need tensorboardX: pip install osd-jax[log], or set"
        " tensorboard = False."
      ) from error
    self._make, self._directory = tensorboardX.SummaryWriter, directory
    self._writer: Any = None
    self._step = 0

  def write(self, kind: str, row: Row) -> None:
    # A request has an index, other rows the number of finished requests or steps.
    if "index" in row:
      self._step = row["index"] + 1
    self._step = row.get("finished", row.get("step", self._step))
    if self._writer is None:
      # The log may have been cut back to this row. `purge_step` hides the events that
      # a killed session wrote after its last checkpoint.
      before = len(list(self._directory.glob("*")))
      purge = {"purge_step": self._step} if before else {}
      self._writer = self._make(
        str(self._directory), filename_suffix=f".{before}", **purge
      )
    for name, value in _numbers(row):
      self._writer.add_scalar(f"{kind}/{name}", value, self._step)
    if kind == "alarm":
      self._writer.add_text("alarm", row["text"], self._step)

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()


def _numbers(row: Row, above: str = "") -> Iterator[tuple[str, float]]:
  for name, value in row.items():
    if isinstance(value, Mapping):
      yield from _numbers(value, f"{above}{name}/")
    elif isinstance(value, int | float):
      yield f"{above}{name}", value


@dataclasses.dataclass(frozen=True)
class Output:
  """A served request, as outputs.jsonl stores it.

  Attributes:
    index: number of requests that finished before it.
    query: its position in the stream.
    task: label of its task.
    prompt: the prompt's text.
    text: the answer, decoded.
    stop_reason: why the answer ended.
    tokens: length of the answer.
    tokens_per_target_call: tau of the answer.
    prompt_ids: tokens of the prompt; only written if ids are kept.
    output_ids: tokens of the answer; only written if ids are kept.
  """

  index: int
  query: int
  task: str
  prompt: str
  text: str
  stop_reason: str
  tokens: int
  tokens_per_target_call: float | None
  prompt_ids: Sequence[int] = ()
  output_ids: Sequence[int] = ()


class OutputsLog(JsonLines):
  """Appends served requests to outputs.jsonl."""

  def __init__(self, path: str | Path, keep: str = "text"):
    """Opens `path` for appending; its folder must exist.

    Args:
      path: the file, usually outputs.jsonl of a run.
      keep: "none" writes nothing, "text" writes texts, "ids" adds token ids.
    """
    if keep not in OUTPUTS_KEPT:
      raise base.InputError(
        f"outputs log: keep: received {keep!r}, expected one of"
        f" {', '.join(map(repr, OUTPUTS_KEPT))}."
      )
    super().__init__(path)
    self._keep = keep

  def write(self, output: Output) -> None:
    """Appends one answer.

    Raises:
      DiskError: the row cannot be written, for example because the disk is full.
    """
    if self._keep == "none":
      return
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    if self._keep == "text":
      fields = {name: value for name, value in fields.items() if name not in _IDS}
    self.append(strict(fields, "output")[0])


# --- Reading --------------------------------------------------------------------------


def read(path: str | Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a log, also while a run is still writing it.

  An incomplete last line is skipped.

  Raises:
    InputError: a complete line is not a JSON object; names file and line.
  """
  with open(path, "rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.endswith(b"\n"):  # the run is still writing it
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


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
  """The rows of one kind, in the order of the log."""
  return [row for row in rows if row.get("kind") == kind]


def request_rows(rows: Iterable[Row]) -> list[Row]:
  """The request rows in the order of the stream, which is not the order of finish."""
  return sorted(of_kind(rows, "request"), key=place)


def place(row: Row) -> int:
  """A request's position in the stream."""
  return row.get("query", row["index"])


def column(rows: Sequence[Row], name: str) -> np.ndarray:
  """One field as [n] float64; NaN where a row has no value."""
  values = (row.get(name) for row in rows)
  return np.array([math.nan if v is None else float(v) for v in values], np.float64)


# --- Strict JSON ----------------------------------------------------------------------


def strict(values: Row, where: str) -> tuple[dict[str, Any], list[str]]:
  """Converts arrays, scalars, lists and dicts to strict JSON.

  Args:
    values: the fields of a row.
    where: name of the row in error messages.

  Returns:
    The plain values, and the dotted names of floats that were not finite.

  Raises:
    InputError: a name is not text, or a value has no JSON form.
  """
  nonfinite: list[str] = []
  return _plain(dict(values), where, "", nonfinite), nonfinite


def _plain(value: Any, where: str, name: str, nonfinite: list[str]) -> Any:
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
  # Not an isinstance check, which would have to import jax.
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
