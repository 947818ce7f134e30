"""The logs of a run: metrics.jsonl, outputs.jsonl, and an optional tracker.

Both files hold one JSON object per line. A line is flushed as soon as it is written,
and a file is cut back to the rows that a checkpoint counted. In metrics.jsonl,
`kind` says what a row is: "request", "update", "summary" and so on. The JSON is strict:
a float that is not finite becomes null, and `nonfinite` lists the names of such fields.
"""

import dataclasses
import importlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import flax.traverse_util
import numpy as np

from osd_jax import base

Row = Mapping[str, Any]


PRIVATE_FOLDER = 0o700  # mode of the folders of a run
TENSORBOARD = "tensorboard"  # this tracker, and its folder


def private(path: str, flags: int) -> int:
  """An opener of new files for their owner only, because runs hold texts of users."""
  return os.open(path, flags, 0o600)


class JsonLines:
  """Appends objects to a file. Opening it removes an incomplete last line.

  Attributes:
    path: the file.
    rows: number of rows in the file.
  """

  def __init__(self, path: str | Path):
    """Opens `path` for appending; its folder must exist."""
    self.path = Path(path)
    self._file = open(self.path, "ab", opener=private)  # closed by close()
    # A killed process may have written half a line, which would corrupt the next one.
    self.rows = self.path.read_bytes().count(b"\n")
    self.truncate(self.rows)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def append(self, row: Row) -> None:
    """Appends one object of plain values and flushes it to the operating system.

    Raises DiskError if that fails, for example because the disk is full.
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
        f"{self.path.stem}: row {self.rows}{kind} cannot be written:"
        f" {error.strerror}; free some space and repeat the command, which continues"
        " from the last checkpoint",
        str(self.path),
      ) from error
    self.rows += 1

  def sync(self) -> None:
    """Forces all rows to the disk. Called before a checkpoint that counts on them."""
    os.fsync(self._file.fileno())

  def truncate(self, rows: int) -> None:
    """Removes all but the first rows; the file must have that many."""
    with open(self.path, "rb") as existing:
      self._file.truncate(sum(len(existing.readline()) for _ in range(rows)))
    self._file.seek(0, os.SEEK_END)
    self.rows = rows

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


class MetricsLog(JsonLines):
  """Appends rows to metrics.jsonl and, optionally, their numbers to TensorBoard."""

  def __init__(self, path: str | Path, tracker: str = ""):
    """Opens `path` for appending; its folder must exist.

    `tracker` also gets the numbers of the rows: "tensorboard" writes events next to
    the log, any other name is a module with the interface of wandb; "" is none.
    """
    library, self._tracker = tracker_library(tracker), None
    if library is not None:
      kind = _Events if tracker == TENSORBOARD else _Run
      self._tracker = kind(library, Path(path).parent)
    super().__init__(path)

  def write(self, row: Any) -> None:
    """Appends one row of a class of `loop.rows`.

    Arrays and numpy or jax scalars become plain numbers. A field whose default is None
    is left out while it is None. Raises TypeError if a value has no JSON form, and as
    `append`.
    """
    fields = {
      field.name: value
      for field in dataclasses.fields(row)
      if (value := getattr(row, field.name)) is not None or field.default is not None
    }
    plain, nonfinite = strict(fields)
    names = {"nonfinite": nonfinite} if nonfinite else {}
    self.append({"kind": row.kind, **plain, **names})
    if self._tracker is not None:
      self._tracker.write(row.kind, plain)

  def write_all(self, rows: Iterable[Any]) -> None:
    """Appends several rows; see `write`."""
    for row in rows:
      self.write(row)

  def close(self) -> None:
    """Closes the file and the tracker."""
    super().close()
    if self._tracker is not None:
      self._tracker.close()


class _Tracker:
  """Passes the numbers of the rows on, over finished requests or steps."""

  _step = 0

  def write(self, kind: str, row: Row) -> None:
    # A request has an index, other rows the number of finished requests or steps.
    if "index" in row:
      self._step = row["index"] + 1
    self._step = row.get("finished", row.get("step", self._step))
    flat = flax.traverse_util.flatten_dict(row, sep="/")
    numbers = {
      f"{kind}/{name}": value
      for name, value in flat.items()
      if isinstance(value, int | float)
    }
    self._log(numbers, row["text"] if kind == "alarm" else "")

  def _log(self, numbers: Mapping[str, float], alarm: str) -> None:
    raise NotImplementedError  # every tracker has its own

  def close(self) -> None:
    raise NotImplementedError  # every tracker has its own


class _Run(_Tracker):
  """A run of wandb, or of a module with its `init`, `log` and `finish`."""

  def __init__(self, module: Any, directory: Path):
    settings = directory / "config.json"
    config = json.loads(settings.read_bytes()) if settings.exists() else {}
    self._module = module
    module.init(project="osd_jax", name=directory.name, config=config, resume="allow")

  def _log(self, numbers: Mapping[str, float], alarm: str) -> None:
    texts = {"alarm": alarm} if alarm else {}
    self._module.log({**numbers, **texts}, step=self._step)

  def close(self) -> None:
    self._module.finish()


class _Events(_Tracker):
  """TensorBoard events."""

  def __init__(self, module: Any, directory: Path):
    self._make, self._directory = module.SummaryWriter, directory / TENSORBOARD
    self._writer: Any = None

  def _log(self, numbers: Mapping[str, float], alarm: str) -> None:
    if self._writer is None:
      self._directory.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
      # The log may have been cut back to this row. `purge_step` hides the events that
      # a killed session wrote after its last checkpoint.
      before = len(list(self._directory.glob("*")))
      purge = {"purge_step": self._step} if before else {}
      self._writer = self._make(
        str(self._directory), filename_suffix=f".{before}", **purge
      )
    for name, value in numbers.items():
      self._writer.add_scalar(name, value, self._step)
    if alarm:
      self._writer.add_text("alarm", alarm, self._step)

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()


def tracker_library(name: str) -> Any:
  """Imports the module of a tracker; None for "".

  Raises:
    MissingExtraError: it cannot be imported, or does not have the interface of wandb.
  """
  if not name:
    return None
  is_tensorboard = name == TENSORBOARD
  module = "tensorboardX" if is_tensorboard else name
  install = 'pip install "osd_jax[log]"' if is_tensorboard else f"pip install {name}"
  try:
    library = importlib.import_module(module)
    reason = "" if is_tensorboard or hasattr(library, "init") else "it has no `init`"
  except ImportError as error:
    library, reason = None, str(error)
  if reason:
    raise base.MissingExtraError(
      f'OnlineConfig.tracker: received {name!r} ({reason}), expected "tensorboard" or'
      f" a module with the interface of wandb; install it: {install}"
    )
  return library


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


# --- Strict JSON ----------------------------------------------------------------------


def strict(values: Row) -> tuple[dict[str, Any], list[str]]:
  """Converts arrays and numbers that are not finite, also nested ones, to strict JSON.

  Returns:
    The values, with null for numbers that are not finite, and the dotted names of
    these.
  """
  nonfinite: list[str] = []

  def plain(value: Any, name: str) -> Any:
    # Not an isinstance check, which would have to import jax.
    if hasattr(value, "dtype") and hasattr(value, "shape"):
      value = np.asarray(value)
      # numpy does not turn bfloat16 and the like into Python numbers.
      value = (value if value.dtype.kind in "biuf" else value.astype(float)).tolist()
    if isinstance(value, float) and not math.isfinite(value):
      nonfinite.append(name)
      return None
    if dataclasses.is_dataclass(value):
      value = vars(value)
    if isinstance(value, Mapping):
      return {key: plain(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
      return [plain(one, f"{name}.{index}") for index, one in enumerate(value)]
    return value

  return {name: plain(value, name) for name, value in values.items()}, nonfinite
