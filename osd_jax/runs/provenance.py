"""What is known of a process that works on a run: code, versions, command, device."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("osd-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def session(argv: Sequence[str] | None) -> dict[str, Any]:
  """What is known of this process when it starts.

  Args:
    argv: the command line, this process's own if None.
  """
  return {
    "argv": list(sys.argv if argv is None else argv),
    **git_state(),
    "versions": _versions(),
    **_devices(),
    "started": now().isoformat(timespec="seconds"),
    "ended": None,
    "hours": None,
  }


def end(
  provenance: dict[str, Any], at: datetime.datetime, *, interrupted: bool
) -> None:
  """Notes the end of the last session, unless it is noted, and the hours of all.

  Args:
    provenance: of a run; changed in place.
    at: when it ended.
    interrupted: whether the run was not finished.
  """
  sessions = [provenance, *provenance["resumed"]]
  last = sessions[-1]
  if last["ended"] is not None:
    return
  begin = datetime.datetime.fromisoformat(last["started"])
  at = max(begin, at)
  last["ended"] = at.isoformat(timespec="seconds")
  last["interrupted"] = interrupted
  last["hours"] = round((at - begin).total_seconds() / 3600, 4)
  provenance["total_hours"] = round(sum(s["hours"] or 0 for s in sessions), 4)


def now() -> datetime.datetime:
  """The time, in UTC."""
  return datetime.datetime.now(datetime.UTC)


def git_state() -> dict[str, Any]:
  """Commit of the package's own checkout, None outside of one."""
  package = Path(__file__).resolve().parents[1]

  def git(*args: str) -> str:
    command = ["git", "-C", str(package), *args]
    return subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()

  try:
    git("ls-files", "--error-unmatch", "base.py")  # not merely inside some checkout
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"git_sha": git("rev-parse", "HEAD"), "git_dirty": bool(changed)}
  except (OSError, subprocess.SubprocessError):
    return {"git_sha": None, "git_dirty": None}


def _versions() -> dict[str, str | None]:
  versions: dict[str, str | None] = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return versions


def _devices() -> dict[str, Any]:
  import jax

  threads = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  )
  return {
    "device_kind": jax.devices()[0].device_kind,
    "device_count": jax.device_count(),
    "process_count": jax.process_count(),
    "thread_count": threads,
    "thread_settings": {
      name: os.environ[name]
      for name in ("XLA_FLAGS", "OMP_NUM_THREADS")
      if name in os.environ
    },
  }
