"""What a run writes and continues from: its directory, logs and checkpoints.

Importing this package loads neither orbax nor tensorboardX.
"""

from osd_jax.runs.checkpoint import (
  CheckpointConfig,
  Checkpointer,
  check_fingerprint,
  fingerprint,
)
from osd_jax.runs.directory import RunDirectory, RunResult
from osd_jax.runs.json_lines import column, of_kind, place, read, request_rows
from osd_jax.runs.metrics_log import MetricsLog
from osd_jax.runs.outputs_log import KEPT as OUTPUTS_KEPT
from osd_jax.runs.outputs_log import Output, OutputsLog

__all__ = [
  "OUTPUTS_KEPT",
  "CheckpointConfig",
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
