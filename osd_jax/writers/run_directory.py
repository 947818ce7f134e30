"""The run directory: what a run leaves behind, and what it continues from.

`operative_config.gin` holds every setting of the run; `provenance.json` code,
versions, command line, seed, device and hours; `metrics.jsonl` one row a request,
update or swap (`MetricsLog`); `tensorboard/` events, optional; `checkpoints/`
orbax steps (`osd_jax.checkpoints`); `plots/` and `report.html` come at the end.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osd_jax import base

_PACKAGES = ("osd-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class RunResult:
  """What the `run` of every command returns.

  Attributes:
    path: the run directory; of a conversion, what it wrote.
    exact: False if an output was checked and is not the target's.
  """

  path: Path
  exact: bool = True


@dataclasses.dataclass(frozen=True)
class RunDirectory:
  """Paths of one run. Made by `create`, `open` or `start`.

  Attributes:
    path: the folder.
  """

  path: Path

  @property
  def metrics_path(self) -> Path:
    return self.path / "metrics.jsonl"

  @property
  def checkpoints_path(self) -> Path:
    return self.path / "checkpoints"

  @property
  def tensorboard_path(self) -> Path:
    return self.path / "tensorboard"

  @property
  def plots_path(self) -> Path:
    return self.path / "plots"

  @property
  def report_path(self) -> Path:
    return self.path / "report.html"

  @property
  def config_path(self) -> Path:
    return self.path / "operative_config.gin"

  @property
  def provenance_path(self) -> Path:
    return self.path / "provenance.json"

  @classmethod
  def create(
    cls,
    path: str | Path,
    *,
    config: str = "",
    seed: int | None = None,
    argv: Sequence[str] | None = None,
  ) -> "RunDirectory":
    """Makes the folder of a new run and writes its config and provenance.

    Args:
      path: the folder, made with its parents.
      config: text of the operative config.
      seed: the run's seed.
      argv: the command line, this process's own by default.

    Raises:
      ValueError: the folder already holds a run.
    """
    run = cls(Path(path))
    if run.provenance_path.exists():
      raise base.InputError(
        f"run directory: received {path}, which already holds a run, expected a"
        " new folder; choose another, or continue that run with open()."
      )
    run.path.mkdir(parents=True, exist_ok=True)
    _write_text(run.config_path, config)
    run._write_provenance(
      {"seed": seed, **_session(argv), "resumed": []}  # written last: the mark
    )
    return run

  @classmethod
  def open(
    cls,
    path: str | Path,
    *,
    config: str | None = None,
    argv: Sequence[str] | None = None,
  ) -> "RunDirectory":
    """Opens an existing run to continue it; provenance notes the new session.

    Args:
      path: the folder.
      config: text of the operative config now; where given, it must say the same
        as the stored one (comments and blank lines apart).
      argv: the command line, this process's own by default.

    Raises:
      ValueError: the folder holds no run, or its config differs.
    """
    run = cls(Path(path))
    provenance = run.provenance()
    if config is not None:
      run._check_config(config)
    run._close_session(provenance, interrupted=True)
    provenance["resumed"].append(_session(argv))
    run._write_provenance(provenance)
    return run

  @classmethod
  def start(
    cls,
    path: str | Path,
    *,
    config: str = "",
    seed: int | None = None,
    argv: Sequence[str] | None = None,
  ) -> "RunDirectory":
    """Continues the run of this folder if it holds one, else creates it.

    Raises:
      InputError: no folder is named, or its config differs.
    """
    if not str(path).strip():
      raise base.InputError(
        "run_directory: received '', expected a folder for what the run writes."
      )
    if cls(Path(path)).provenance_path.exists():
      return cls.open(path, config=config, argv=argv)
    return cls.create(path, config=config, seed=seed, argv=argv)

  def provenance(self) -> dict[str, Any]:
    """The content of provenance.json.

    Raises:
      ValueError: there is none, or it is no JSON.
    """
    try:
      return json.loads(self.provenance_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise base.InputError(
        f"run directory: received {self.path}, expected a folder with a readable"
        f" provenance.json ({error}); create() makes one."
      ) from error

  def config(self) -> str:
    """The stored operative config, "" if there is none."""
    if not self.config_path.exists():
      return ""
    return self.config_path.read_text(encoding="utf-8")

  def write_config(self, config: str) -> None:
    """Replaces the operative config, for callers that know it in full later."""
    _write_text(self.config_path, config)

  def write_json(self, name: str, content: dict[str, Any]) -> Path:
    """Writes a file of results beside the run; returns where it is."""
    _write_text(self.path / name, json.dumps(content, indent=2) + "\n")
    return self.path / name

  def finish(self) -> None:
    """Notes the end of this session and the hours of all of them."""
    provenance = self.provenance()
    self._close_session(provenance, interrupted=False)
    self._write_provenance(provenance)

  def _check_config(self, config: str) -> None:
    stored, given = _statements(self.config()), _statements(config)
    gone = [line for line in stored if line not in given]
    new = [line for line in given if line not in stored]
    if gone or new:
      raise base.InputError(
        f"run directory: received a config for {self.path} that differs from the"
        f" one it was made with: expected {gone[:3]}, received {new[:3]}; repeat"
        " the first command, or choose a new directory."
      )

  def _close_session(self, provenance: dict[str, Any], interrupted: bool) -> None:
    sessions = [provenance, *provenance["resumed"]]
    last = sessions[-1]
    if last["ended"] is not None:
      return
    end = self._last_sign_of_life(last["started"]) if interrupted else _now()
    last["ended"] = end.isoformat(timespec="seconds")
    last["interrupted"] = interrupted
    last["hours"] = _hours(last["started"], end)
    provenance["total_hours"] = round(sum(s["hours"] or 0 for s in sessions), 4)

  def _last_sign_of_life(self, started: str) -> datetime.datetime:
    """When a session that was killed last wrote metrics."""
    begin = datetime.datetime.fromisoformat(started)
    if not self.metrics_path.exists():
      return begin
    seconds = self.metrics_path.stat().st_mtime
    return max(begin, datetime.datetime.fromtimestamp(seconds, datetime.UTC))

  def _write_provenance(self, provenance: dict[str, Any]) -> None:
    self.write_json(self.provenance_path.name, provenance)


def check_output(setting: str, path: str) -> None:
  """Raises, before a run has taken hours, where its result cannot be written.

  Args:
    setting: what the path is called.
    path: of a file.

  Raises:
    InputError: no file can be written there.
  """
  folder = Path(path).absolute().parent
  while not folder.exists() and folder != folder.parent:
    folder = folder.parent
  writable = folder.is_dir() and os.access(folder, os.W_OK)
  if not path or Path(path).is_dir() or not writable:
    raise base.InputError(
      f"{setting}: received {path!r}, expected a file in a folder that can be written"
      " to."
    )


def _session(argv: Sequence[str] | None) -> dict[str, Any]:
  """What is known of one process that works on a run, when it starts."""
  return {
    "argv": list(sys.argv if argv is None else argv),
    **_git_state(),
    "versions": _versions(),
    **_devices(),
    "started": _now().isoformat(timespec="seconds"),
    "ended": None,
    "hours": None,
  }


def _git_state() -> dict[str, Any]:
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


def _statements(config: str) -> list[str]:
  lines = (line.strip() for line in config.splitlines())
  return [line for line in lines if line and not line.startswith("#")]


def _now() -> datetime.datetime:
  return datetime.datetime.now(datetime.UTC)


def _hours(started: str, end: datetime.datetime) -> float:
  begin = datetime.datetime.fromisoformat(started)
  return round((end - begin).total_seconds() / 3600, 4)


def _write_text(path: Path, text: str) -> None:
  """Writes beside the file and renames, so that readers see all or nothing."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text, encoding="utf-8")
  temporary.replace(path)
