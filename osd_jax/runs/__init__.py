"""The files that a run writes and continues from: directory, logs, checkpoints.

Importing this package loads neither orbax nor tensorboardX.
"""

from osd_jax.runs.checkpoint import Checkpointer, check_fingerprint, fingerprint
from osd_jax.runs.directory import RunDirectory, RunResult
from osd_jax.runs.log import (
  OUTPUTS_KEPT,
  MetricsLog,
  Output,
  OutputsLog,
  column,
  of_kind,
  place,
  read,
  request_rows,
)

__all__ = [
  "OUTPUTS_KEPT",
  "Checkpointer",
  "MetricsLog",
  "Output",
  "OutputsLog",
  "RunDirectory",
  "RunResult",
  "check_fingerprint",
  "column",
  "fingerprint",
  "of_kind",
  "place",
  "read",
  "request_rows",
]
