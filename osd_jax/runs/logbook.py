"""The logs of an online run: rows, answers, the verdict on learning, and alarms.

A run that continues cuts both files back to the rows that its checkpoint counted, and
computes the verdict and the alarms again from these rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from osd_jax.costs import account
from osd_jax.costs.table import Costs
from osd_jax.loop import rows as rows_lib
from osd_jax.runs import alarms
from osd_jax.runs import log as log_lib
from osd_jax.runs.directory import RunDirectory

_IDS = ("prompt_ids", "output_ids")


class Logbook:
  """The logs of one run, and the verdict and alarms computed from their rows.

  Attributes:
    files: metrics.jsonl and outputs.jsonl, whose rows a checkpoint counts.
  """

  def __init__(
    self,
    directory: RunDirectory,
    keep_outputs: str,
    tensorboard: bool,
    announce: Callable[[str], object],
    learns: bool,
  ):
    """Opens both logs.

    `announce` is called with each text for the user. Only a draft that `learns` has a
    verdict on learning. For `keep_outputs` see `OnlineConfig`.
    """
    self._announce, self._learns = announce, learns
    self._keep_outputs = keep_outputs
    self._rows = log_lib.MetricsLog(
      directory.metrics_path, directory.tensorboard_path if tensorboard else None
    )
    self._outputs = log_lib.JsonLines(directory.outputs_path)
    self.files = (self._rows, self._outputs)
    self._verdict, self._alarms = account.Verdict(), alarms.AlarmState()

  def write_costs(self, costs: Costs) -> None:
    """Logs the run's measured costs."""
    self._rows.write(rows_lib.Costs(**vars(costs)))

  def write(self, kind: str, row: dict[str, Any], finished: int) -> None:
    """Logs a row, the verdict so far, and the alarms that start or end here.

    The fields of the verdict are added to the row of a request. `finished` requests
    have finished, which alarms note.
    """
    # Observed before the row is written, so that a request's row holds the verdict that
    # includes it.
    entry = rows_lib.KINDS[kind](**row)
    self._verdict = account.observe(self._verdict, entry)
    if kind == "request" and self._learns:
      entry = dataclasses.replace(entry, **self._verdict.fields())
    self._rows.write(entry)
    self._alarms, changes = alarms.observe(self._alarms, entry, finished)
    for alarm in changes:
      self._rows.write(alarm)
      self._announce(alarm.text)

  def write_output(self, answer: Mapping[str, Any]) -> None:
    """Logs what `keep_outputs` keeps of an answer, which has `prompt_ids` too."""
    if self._keep_outputs == "none":
      return
    kept = {
      name: value
      for name, value in answer.items()
      if self._keep_outputs == "ids" or name not in _IDS
    }
    self._outputs.append(log_lib.strict(kept)[0])

  def log_event(self, kind: str, said: str, **fields: Any) -> None:
    """Logs a sentence, and shows it."""
    self._announce(said)
    finished = fields.get("finished", 0)
    self._rows.write(rows_lib.Event(name=kind, finished=finished, text=said))

  def restore(self) -> float:
    """Computes the verdict and the alarms from the rows of the log.

    Returns the seconds that the run had served when its last row was written.
    """
    rows = rows_lib.read(self._rows.path)
    self._alarms = alarms.replay(rows)
    self._verdict = account.verdict(rows)
    requests = rows_lib.of(rows_lib.Request, rows)
    return max((row.run_seconds for row in requests), default=0.0)

  def close(self) -> None:
    """Closes both logs."""
    for file in self.files:
      file.close()
