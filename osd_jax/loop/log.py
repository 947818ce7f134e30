"""The logs of a loop: rows, answers, the verdict on learning, and alarms.

A run that continues cuts its logs back to the rows that its checkpoint counted, and
computes the verdict and the alarms again from these rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from osd_jax.loop import account, alarms
from osd_jax.loop import rows as rows_lib
from osd_jax.runs import log as log_lib
from osd_jax.runs.directory import RunDirectory

_IDS = ("prompt_ids", "output_ids")
# `keep_outputs` -> fields of an answer that outputs.jsonl lacks.
_ABSENT = {"ids": (), "text": _IDS, "numbers": (*_IDS, "prompt", "text")}


class Log:
  """The logs of one run, and the verdict and alarms computed from their rows.

  Attributes:
    rows: metrics.jsonl; None without a run directory.
    outputs: outputs.jsonl; likewise.
    on_row: called with every row.
  """

  def __init__(
    self,
    directory: RunDirectory | None,
    keep_outputs: str,
    tracker: str,
    announce: Callable[[str], object],
    learns: bool,
  ):
    """Opens both logs; without a directory, rows are only passed to `on_row`.

    `announce` is called with each text for the user. Only a draft that `learns` has a
    verdict on learning. For `keep_outputs` see `Settings`.
    """
    self._announce, self._learns = announce, learns
    self._keep_outputs = keep_outputs
    self.on_row: Callable[[rows_lib.Row], object] = lambda row: None
    self.rows: log_lib.MetricsLog | None = None
    self.outputs: log_lib.JsonLines | None = None
    if directory is not None:
      self.rows = log_lib.MetricsLog(directory.metrics_path, tracker)
      self.outputs = log_lib.JsonLines(directory.outputs_path)
    self._verdict, self._alarms = account.Verdict(), alarms.AlarmState()

  def write(self, row: rows_lib.AnyRow) -> rows_lib.AnyRow:
    """Logs a row, and the alarms that start or end here; returns the row.

    A request gets the fields of the verdict so far.
    """
    # Observed before the row is written, so that a request's row holds the verdict that
    # includes it.
    self._verdict = account.observe(self._verdict, row)
    if isinstance(row, rows_lib.Request) and self._learns:
      row = dataclasses.replace(row, **self._verdict.fields())
    self._append(row)
    self._alarms, changes = alarms.observe(self._alarms, row)
    for alarm in changes:
      self._append(alarm)
      self._announce(alarm.text)
    return row

  def write_output(self, answer: Mapping[str, Any]) -> None:
    """Logs what `keep_outputs` keeps of an answer, which has `prompt_ids` too."""
    if self._keep_outputs == "none" or self.outputs is None:
      return
    absent = _ABSENT[self._keep_outputs]
    row = {name: value for name, value in answer.items() if name not in absent}
    self.outputs.append(log_lib.strict(row)[0])

  def log_event(self, name: str, text: str, finished: int = 0) -> None:
    """Logs a sentence, and shows it."""
    self._announce(text)
    self._append(rows_lib.Event(finished=finished, name=name, text=text))

  def restore(self) -> list[rows_lib.Request]:
    """Computes the verdict and the alarms from the log, and returns its requests."""
    rows = [] if self.rows is None else rows_lib.read(self.rows.path)
    self._alarms = alarms.replay(rows)
    self._verdict = account.verdict(rows)
    return rows_lib.of(rows_lib.Request, rows)

  def close(self) -> None:
    """Closes both logs."""
    for file in (self.rows, self.outputs):
      if file is not None:
        file.close()

  def _append(self, row: rows_lib.Row) -> None:
    if self.rows is not None:
      self.rows.write(row)
    self.on_row(row)
