"""What a run writes down: rows, answers, the verdict so far, and alarms.

A checkpoint keeps how long both files were; a run that continues cuts them there and
rebuilds the rest from their rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from osd_jax import runs
from osd_jax.costs import account
from osd_jax.costs.table import Costs
from osd_jax.data import streams
from osd_jax.engine.requests import Finished
from osd_jax.runs import alarms


class Logbook:
  """The logs of one run, with what is folded over their rows.

  Attributes:
    costs: measured costs of the run; None until `write_costs`.
  """

  def __init__(
    self,
    directory: runs.RunDirectory,
    keep_outputs: str,
    tensorboard: bool,
    announce: Callable[[str], object],
    learns: bool = True,
  ):
    """Opens both logs.

    Args:
      directory: of the run.
      keep_outputs: what of prompts and answers is kept.
      tensorboard: write TensorBoard events too.
      announce: shows a text to the user.
      learns: whether the draft learns, so that there is a verdict on learning.
    """
    self.costs: Costs | None = None
    self._path, self._announce = directory.metrics_path, announce
    self._learns = learns
    self._rows = runs.MetricsLog(
      directory.metrics_path, directory.tensorboard_path if tensorboard else None
    )
    self._outputs = runs.OutputsLog(directory.outputs_path, keep_outputs)
    self._verdict, self._alarms = account.Verdict(), alarms.AlarmState()

  def begin(self) -> None:
    """Empties both logs, which a run killed before its first checkpoint has left."""
    self._outputs.truncate(0)
    self._rows.truncate(0)

  def write_costs(self, costs: Costs) -> None:
    """Logs the run's measured costs."""
    self.costs = costs
    self._rows.write("costs", dataclasses.asdict(costs))

  def write(self, kind: str, row: dict[str, Any], finished: int) -> None:
    """Logs a row, the verdict so far, and the alarms that start or end here.

    Args:
      kind: of the row.
      row: its fields; a request's row gets those of the verdict.
      finished: requests, for alarms.
    """
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

  def log_output(
    self, row: Mapping[str, Any], query: streams.Query, done: Finished, text: str
  ) -> None:
    """Logs a prompt and its answer.

    Args:
      row: of the request.
      query: the prompt.
      done: the answer.
      text: of the answer.
    """
    self._outputs.write(
      runs.Output(
        index=row["index"],
        query=query.index,
        task=query.task,
        prompt=query.prompt,
        text=text,
        stop_reason=done.stop_reason.name,
        tokens=len(done.tokens),
        tokens_per_target_call=row["tokens_per_target_call"],
        prompt_ids=query.tokens.tolist(),
        output_ids=done.tokens.tolist(),
      )
    )

  def state(self) -> dict[str, Any]:
    """What a checkpoint keeps, after both logs are on disk."""
    self._rows.sync()
    self._outputs.sync()
    return {
      "metrics_bytes": self._rows.length,
      "outputs_bytes": self._outputs.length,
      "costs": self.costs and dataclasses.asdict(self.costs),
    }

  def restore(self, host: Mapping[str, Any]) -> float:
    """Continues from what `state` gave.

    Returns:
      Seconds that the run had served by then.
    """
    self._rows.truncate(host["metrics_bytes"])
    self._outputs.truncate(host["outputs_bytes"])
    rows = list(runs.read(self._path))
    self._alarms = alarms.replay(rows)
    self.costs = host["costs"] and Costs.from_json(host["costs"])
    self._verdict = account.verdict(rows)
    clocks = [row["run_seconds"] for row in rows if row["kind"] == "request"]
    return max(clocks, default=0.0)

  def close(self) -> None:
    """Closes both logs."""
    self._rows.close()
    self._outputs.close()
