"""What a checkpoint of the online loop holds: all that a run carries onwards.

The files of a run (pair, stream, config) are not part of it: a run continues with
those that it began with, which is checked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from osd_jax import base, checkpoints
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import schedule as schedules
from osd_jax.distillation import update as updates


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """The online loop between two of its steps.

  Attributes:
    finished: requests answered.
    submitted: requests taken from the stream; those between are in flight.
    stream: the stream's place and fingerprint.
    slots: the rows in flight, None if no request came yet.
    held: what the host knows of these rows: their bucket, tags and times.
    serving: parameters that the served draft was made from.
    draft_version: updates that they have seen.
    buffer: the replay buffer.
    since: rows that the buffer had taken when an update was last launched.
    schedule: when the next update is due.
    learner: the draft that learns, its optimiser, its moving average.
    update: the update under way, as (requests finished at its launch, its inputs);
      it is launched again. None if there is none.
    metrics_bytes: length of metrics.jsonl; rows behind it are written again.
    models: fingerprint of target and first draft.
  """

  finished: int
  submitted: int
  stream: dict[str, Any]
  slots: Any
  held: dict[str, Any]
  serving: base.Params
  draft_version: int
  buffer: replay.ReplayBuffer
  since: int
  schedule: schedules.ScheduleState
  learner: updates.LearnerState
  update: tuple[int, tuple[base.DistillationBatch, ...]] | None
  metrics_bytes: int
  models: int

  @property
  def in_flight(self) -> list[int]:
    """Numbers of the requests that have a row or wait for one."""
    tags = self.held["tags"] + self.held["waiting"]
    return [tag for tag in tags if tag is not None]


def save(saved: checkpoints.Checkpointer, snapshot: Snapshot) -> None:
  """Saves it as the step of its number of finished requests."""
  launched, inputs = snapshot.update or (None, None)
  arrays = {
    "learner": snapshot.learner,
    "serving": snapshot.serving,
    "buffer": snapshot.buffer,
    "slots": snapshot.slots,
    "pending": inputs,
  }
  host = {
    "finished": snapshot.finished,
    "submitted": snapshot.submitted,
    "since": snapshot.since,
    "schedule": dataclasses.asdict(snapshot.schedule),
    "stream": snapshot.stream,
    "slots": snapshot.held,
    "draft_version": snapshot.draft_version,
    "launched": launched,
    "metrics_bytes": snapshot.metrics_bytes,
    "models": snapshot.models,
  }
  saved.save(snapshot.finished, arrays, host)


def restore(
  saved: checkpoints.Checkpointer,
  fresh: Snapshot,
  config: updates.UpdateConfig,
  buffer: replay.BufferConfig,
  slots_of: Callable[[int], Any],
) -> Snapshot:
  """Reads the newest readable step.

  Args:
    saved: where the steps are.
    fresh: the run before its first request: says the structure of the arrays, and
      which models they must be of.
    config: of updates.
    buffer: of the replay buffer.
    slots_of: shapes of the rows in flight, for their bucket.

  Raises:
    ValueError: none is readable, or it is of other models or another config.
  """

  def structure(host):
    under_way = host["launched"] is not None
    return {
      "learner": fresh.learner,
      "serving": fresh.serving,
      "buffer": fresh.buffer,
      "slots": slots_of(host["slots"]["bucket"]),
      "pending": _inputs(config, buffer, fresh.buffer) if under_way else None,
    }

  arrays, host = saved.restore(None, structure)
  checkpoints.check_fingerprint(host.get("models"), fresh.models)
  launched = host["launched"]
  return Snapshot(
    finished=host["finished"],
    submitted=host["submitted"],
    stream=host["stream"],
    slots=arrays["slots"],
    held=host["slots"],
    serving=arrays["serving"],
    draft_version=host["draft_version"],
    buffer=arrays["buffer"],
    since=host["since"],
    schedule=schedules.ScheduleState(**host["schedule"]),
    learner=arrays["learner"],
    update=None if launched is None else (launched, arrays["pending"]),
    metrics_bytes=host["metrics_bytes"],
    models=fresh.models,
  )


def _inputs(config, buffer_config, buffer):
  """Shapes of the micro-batches of an update."""
  one = jax.eval_shape(
    lambda rows: updates.draw_slice(config, buffer_config, rows, jax.random.key(0), 0),
    buffer,
  )
  return (one,) * config.steps_per_update
