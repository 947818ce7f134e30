"""metrics.jsonl: one self-describing JSON object a line.

`kind` says what a line is: "request", "update", "summary" and so on. A float that is
not finite becomes null, and the names of such fields stand in the line's own
`nonfinite` list.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from osd_jax import base
from osd_jax.runs import json_lines

_RESERVED = ("kind", "nonfinite")


class MetricsLog(json_lines.JsonLines):
  """Appends rows to metrics.jsonl, and their numbers to TensorBoard where asked."""

  def __init__(self, path: str | Path, tensorboard: Path | None = None):
    """Opens `path` for appending, made if absent.

    Args:
      path: the file; its folder must exist.
      tensorboard: folder of events of every row, None for none.

    Raises:
      MissingExtraError: tensorboardX is not installed; says what to install.
    """
    super().__init__(path)
    self._events = None if tensorboard is None else _Events(tensorboard)

  def write(self, kind: str, values: Mapping[str, Any]) -> None:
    """Appends one row and flushes it to the operating system.

    Args:
      kind: what the row is.
      values: names and values; numpy and jax scalars and arrays, dicts, lists
        and tuples of them are converted.

    Raises:
      InputError: a name is reserved or no text, or a value has no JSON form.
      DiskError: it cannot be written, as on a full disk.
    """
    for name in _RESERVED:
      if name in values:
        raise base.InputError(
          f"metrics row {kind!r}: received a field named {name!r}, which the log"
          " itself writes; rename it."
        )
    plain, nonfinite = json_lines.strict(values, f"metrics row {kind!r}")
    row = {"kind": kind, **plain}
    if nonfinite:
      row["nonfinite"] = nonfinite
    self.append(row)
    if self._events is not None:
      self._events.write(kind, plain)

  def write_rows(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends several rows of a kind."""
    for row in rows:
      self.write(kind, row)

  def close(self) -> None:
    """Closes the file and the events."""
    super().close()
    if self._events is not None:
      self._events.close()


class _Events:
  """The numbers of rows as TensorBoard scalars, over finished requests or steps."""

  def __init__(self, directory: Path):
    try:
      import tensorboardX
    except ImportError as error:
      raise base.MissingExtraError(
        "TensorBoard events need tensorboardX: pip install osd-jax[log], or"
        " switch them off."
      ) from error
    self._make, self._directory = tensorboardX.SummaryWriter, directory
    self._writer: Any = None
    self._step = 0

  def write(self, kind: str, row: Mapping[str, Any]) -> None:
    """Writes each number of a row as `kind/name`, and the text of an alarm."""
    if "index" in row:
      self._step = row["index"] + 1
    self._step = row.get("finished", row.get("step", self._step))
    if self._writer is None:
      # The log was cut back to this row: events from here on are of a killed session.
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
    """Writes what is pending and closes the file."""
    if self._writer is not None:
      self._writer.close()


def _numbers(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
  for name, value in row.items():
    if isinstance(value, Mapping):
      yield from _numbers(value, f"{above}{name}/")
    elif isinstance(value, int | float):
      yield f"{above}{name}", value
