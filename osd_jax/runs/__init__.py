"""The files that a run writes and continues from: directory, logs, checkpoints.

Importing this package loads neither orbax nor tensorboardX.
"""

# ruff: noqa: F401  the names are this package's own
from osd_jax.runs.checkpoint import Checkpointer, fingerprint
from osd_jax.runs.directory import RunDirectory, RunResult
from osd_jax.runs.log import (
  PRIVATE_FOLDER,
  JsonLines,
  MetricsLog,
  of_kind,
  read,
  strict,
  tracker_library,
)
from osd_jax.runs.outputs import check_output, check_space
