"""Checkpoints: what a run needs to continue, written whole or not at all."""

from osd_jax.checkpoints.checkpointer import (
  CheckpointConfig,
  Checkpointer,
  check_fingerprint,
  fingerprint,
)

__all__ = ["CheckpointConfig", "Checkpointer", "check_fingerprint", "fingerprint"]
