"""The logs of an online run: rows, answers, the verdict on learning, and alarms.

A checkpoint stores the lengths of both files. A run that continues cuts them to these
lengths and computes the verdict and the alarms again from the rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from osd_jax.costs import account
from osd_jax.costs.table import Costs
from osd_jax.runs import alarms
from osd_jax.runs import log as log_lib
from osd_jax.runs.directory import RunDirectory


class Logbook:
  """The logs of one run, and the verdict and alarms computed from their rows.

  Attributes:
    outputs: outputs.jsonl.
    costs: measured costs of the run; None until `write_costs`.
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

    Args:
      directory: the run's folder, opened for writing.
      keep_outputs: see `OnlineConfig.keep_outputs`.
      tensorboard: whether to write TensorBoard events too.
      announce: called with each text for the user.
      learns: whether the draft learns, so that there is a verdict on learning.
    """
    self.costs: Costs | None = None
    self._announce, self._learns = announce, learns
    self._rows = log_lib.MetricsLog(
      directory.metrics_path, directory.tensorboard_path if tensorboard else None
    )
    self.outputs = log_lib.OutputsLog(directory.outputs_path, keep_outputs)
    self._verdict, self._alarms = account.Verdict(), alarms.AlarmState()

  def begin(self) -> None:
    """Empties both logs; a run killed before its first checkpoint has left rows."""
    self.outputs.truncate(0)
    self._rows.truncate(0)

  def write_costs(self, costs: Costs) -> None:
    """Logs the run's measured costs."""
    self.costs = costs
    self._rows.write("costs", dataclasses.asdict(costs))

  def write(self, kind: str, row: dict[str, Any], finished: int) -> None:
    """Logs a row, the verdict so far, and the alarms that start or end here.

    Args:
      kind: the row's kind, such as "request" or "update".
      row: its fields. For a request, the fields of the verdict are added to it.
      finished: number of finished requests, noted in alarms.
    """
    # Observed before the row is written, so that a request's row holds the verdict that
    # includes it.
    self._verdict = account.observe(self._verdict, kind, row)
    if kind == "request" and self._learns:
      row |= self._verdict.fields()
    self._rows.write(kind, row)
    self._alarms, changed = alarms.observe(self._alarms, kind, row)
    for alarm in changed:
      told = {"finished": finished, **dataclasses.asdict(alarm)}
      self._rows.write("alarm", told)
      self._announce(alarm.text)

  def log_event(self, kind: str, said: str, **fields: Any) -> None:
    """Logs a sentence, and shows it."""
    self._announce(said)
    self._rows.write(kind, {**fields, "said": said})

  def state(self) -> dict[str, Any]:
    """Returns what a checkpoint stores, after both logs are on disk."""
    self._rows.sync()
    self.outputs.sync()
    return {
      "metrics_bytes": self._rows.length,
      "outputs_bytes": self.outputs.length,
      "costs": self.costs and dataclasses.asdict(self.costs),
    }

  def restore(self, host: Mapping[str, Any]) -> float:
    """Continues from the result of `state`.

    Returns:
      Seconds that the run had served until that checkpoint.
    """
    self._rows.truncate(host["metrics_bytes"])
    self.outputs.truncate(host["outputs_bytes"])
    rows = list(log_lib.read(self._rows.path))
    self._alarms = alarms.replay(rows)
    self.costs = host["costs"] and Costs.from_json(host["costs"])
    self._verdict = account.verdict(rows)
    clocks = [row["run_seconds"] for row in rows if row["kind"] == "request"]
    return max(clocks, default=0.0)

  def close(self) -> None:
    """Closes both logs."""
    self._rows.close()
    self.outputs.close()
