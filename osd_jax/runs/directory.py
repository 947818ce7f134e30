"""The run directory: the files of a run, its lock, config and provenance.

`config.json` holds every setting and `operative_config.gin` the command line's;
`provenance.json` holds code, versions, command, seed, device, hours, and whether the
run is finished. `metrics.jsonl` and `outputs.jsonl` are the logs (`runs.log`),
`checkpoints/` the steps (`runs.checkpoint`), `tensorboard/` optional events. `plots/`
and `report.html` are written at the end. `.lock` names the process that writes. What a
run creates can be read by its owner only.
"""

import dataclasses
import datetime
import functools
import html
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from osd_jax import background, base, remote
from osd_jax.runs import log

# Only these names are ever removed: files that a run writes at its start, and results.
_FIRST = (
  *("config.json", "operative_config.gin", "provenance.json", "metrics.jsonl"),
  *("outputs.jsonl", "checkpoints", log.TENSORBOARD),
)
_RESULTS = ("certificate.json", "draft.safetensors", "drafts", "plots", "report.html")
_LOCK = ".lock"

# Settings that may change when a run continues. Another mesh rounds sums differently.
FREE = ("run_directory", "overwrite", "partition", "replicas")

_PACKAGES = ("osd-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class RunResult:
  """What the `run` function of every command returns.

  Attributes:
    path: the run directory. For a conversion: the file that was written.
    exact: False if a checked output differs from the target's own.
  """

  path: Path
  exact: bool = True

  def _repr_html_(self) -> str | None:
    """The report as HTML, which notebooks display; None before it is written."""
    report = RunDirectory(self.path).report_path
    if not report.is_file():
      return None
    # The page goes into a frame, so that its style does not leak into the notebook.
    page = html.escape(report.read_text(encoding="utf-8"), quote=True)
    style = "width: 100%; height: 40rem; border: 1px solid #ddd"
    return f'<iframe srcdoc="{page}" style="{style}"></iframe>'


class RunDirectory:
  """The paths of a run. `start` opens one for writing, by this process alone.

  Leaving the context releases the lock. If an error comes before anything was
  measured, the files that `start` made are removed again.

  Attributes:
    path: the folder. The attributes that end in `_path` name the files in it.
  """

  def __init__(self, path: str | Path):
    """Names a folder for reading, without creating or locking it."""
    self.path = Path(path)
    self.metrics_path = self.path / "metrics.jsonl"
    self.outputs_path = self.path / "outputs.jsonl"
    self.checkpoints_path = self.path / "checkpoints"
    self.plots_path = self.path / "plots"
    self.report_path = self.path / "report.html"
    self.config_path = self.path / "config.json"
    self.operative_config_path = self.path / "operative_config.gin"
    self.provenance_path = self.path / "provenance.json"
    self._lock: filelock.BaseFileLock | None = None
    self._mirror: remote.Mirror | None = None
    self._made: list[Path] = []  # folders that `start` created, innermost first
    self._is_new = False

  @classmethod
  def start(
    cls,
    path: str | Path,
    config: Any = None,
    *,
    operative_config: str = "",
    seed: int | None = None,
    overwrite: bool = False,
  ) -> "RunDirectory":
    """Continues the run in this folder, or begins a new one.

    A finished run does not change; callers must check `finished`.

    Args:
      path: the folder, created with its parents. A URL (gs://BUCKET/RUN) is mirrored:
        the run is written to a local folder and copied there every minute and at its
        end.
      config: the run's dataclass. It is stored, and compared when a run continues.
      operative_config: the command line's settings, stored as text.
      seed: the run's seed, noted in provenance.json.
      overwrite: remove the run in this folder and begin again.

    Raises:
      InputError: the folder cannot be written to, another process is writing to it,
        or its run has other settings.
    """
    mirror = remote.Mirror(str(path)) if remote.is_remote(path) else None
    if mirror is not None and jax.process_count() > 1:
      raise base.InputError(
        f"{_owner(config)}run_directory: received {str(path)!r}, expected a folder that"
        " all processes see; mount the bucket on every host."
      )
    local, number = mirror.folder if mirror else path, jax.process_index()
    # Every process of a multi-host run gets logs of its own, because files on shared
    # disks cannot be appended to from two hosts. All share the checkpoints of process
    # 0, because every process saves its own shards.
    run = cls(f"{local}.process_{number}" if number else local)
    run.checkpoints_path = Path(local) / "checkpoints"
    run._mirror = mirror
    try:
      # Locked before anything is read: another process may be about to change it.
      run._open()
      # Only a folder that is a run is emptied. Other files of the user stay.
      if overwrite and run.provenance_path.exists():
        run._remove(*_RESULTS, *_FIRST)
      if run.provenance_path.exists():
        run._continue(config)
      else:
        run._begin(config, operative_config, seed)
    except OSError as error:
      run.close()
      raise base.InputError(
        f"{_owner(config)}run_directory: received {str(path)!r}, expected a folder"
        f" that can be created and written to ({error.strerror}); choose another."
      ) from error
    except BaseException:
      run.close()
      raise
    if mirror is not None:
      mirror.begin()
    if jax.process_count() > 1:  # no process may read what another still removes
      multihost_utils.sync_global_devices("run directory")
    return run

  def __enter__(self) -> "RunDirectory":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    # A mistyped setting must not leave a folder that refuses the corrected one.
    has_rows = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
    if error is not None and self._is_new and not has_rows:
      self._remove(*_FIRST, _LOCK)
      for folder in self._made:
        if not any(folder.iterdir()):
          folder.rmdir()
    self.close()

  def close(self) -> None:
    """Releases the lock and brings a remote copy up to date."""
    try:
      if self._mirror is not None:
        self._mirror.end()
    finally:
      if self._lock is not None:
        self._lock.release()

  @property
  def finished(self) -> str | None:
    """When the run was finished; None if it is not."""
    return self.provenance().get("finished")

  def provenance(self) -> dict[str, Any]:
    """Reads provenance.json.

    Raises:
      InputError: the file is missing or not JSON.
    """
    try:
      return json.loads(self.provenance_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise base.InputError(
        f"run directory: received {self.path}, expected a folder with a readable"
        f" provenance.json ({error}); every run writes one."
      ) from error

  def config(self) -> dict[str, Any]:
    """Reads the stored config; {} if the file is missing."""
    if not self.config_path.exists():
      return {}
    return json.loads(self.config_path.read_text(encoding="utf-8"))

  def operative_config(self) -> str:
    """Reads the command line's settings; "" if the file is missing."""
    if not self.operative_config_path.exists():
      return ""
    return self.operative_config_path.read_text(encoding="utf-8")

  def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
    """Writes a JSON file into the directory and returns its path."""
    plain, _ = log.strict(content)
    write_text(self.path / name, json.dumps(plain, indent=2) + "\n")
    return self.path / name

  def finish(self) -> None:
    """Marks the run as finished and adds up the hours of its sessions."""
    notes = self.provenance()
    _end_session(notes, now())
    notes |= {"finished": now().isoformat(timespec="seconds"), "interrupted": False}
    self.write_json(self.provenance_path.name, notes)

  def stop(self) -> None:
    """Notes the end of this session of a run that has no end, such as a server's."""
    notes = self.provenance()
    _end_session(notes, now())
    self.write_json(self.provenance_path.name, notes)

  def _open(self) -> None:
    # Stored, so that a failed start can remove the parents that it created.
    above = [self.path, *self.path.parents]
    self._made = [folder for folder in above if not folder.exists()]
    self.path.mkdir(log.PRIVATE_FOLDER, parents=True, exist_ok=True)
    self._lock = lock(self.path)
    # Only after locking: another process may be uploading from the same folder.
    if self._mirror is not None:
      self._mirror.pull(self.provenance_path.name)

  def _begin(self, config: Any, operative_config: str, seed: int | None) -> None:
    self._is_new = True
    self.write_json(self.config_path.name, described(config))
    if operative_config:
      write_text(self.operative_config_path, operative_config)
    # provenance.json is written last, because its presence makes this folder a run.
    notes = {"seed": seed, "finished": None, "interrupted": False}
    notes |= {**_session(), "resumed": []}
    self.write_json(self.provenance_path.name, notes)

  def _continue(self, config: Any) -> None:
    self._check_config(config)
    notes = self.provenance()
    # A finished run gets no further session, so that its hours stay right.
    if notes.get("finished"):
      return
    was_stopped = [notes, *notes["resumed"]][-1]["ended"] is not None
    notes["interrupted"] |= not was_stopped
    _end_session(notes, self._last_written(notes))
    notes["resumed"].append(_session())
    self.write_json(self.provenance_path.name, notes)

  def _check_config(self, config: Any) -> None:
    different = differences(self.config(), described(config))
    if different:
      lines = [
        f"{_owner(config)}{name}: stored {before!r}, given {now!r}"
        for name, before, now in different[:5]
      ]
      more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
      raise base.InputError(
        f"run directory: {self.path} holds a run with other settings: "
        + "; ".join(lines)
        + f"{more}. Use the same settings, choose a new directory, or set"
        f" {_owner(config)}overwrite = True to remove that run and begin again."
      )

  def _last_written(self, notes: Mapping[str, Any]) -> datetime.datetime:
    """When a killed session last wrote a row: the only record of its end."""
    if not self.metrics_path.exists():
      return datetime.datetime.fromisoformat([notes, *notes["resumed"]][-1]["started"])
    seconds = self.metrics_path.stat().st_mtime
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

  def _remove(self, *names: str) -> None:
    for name in names:
      if (self.path / name).is_dir():
        shutil.rmtree(self.path / name, ignore_errors=True)
      else:
        (self.path / name).unlink(missing_ok=True)


def lock(folder: Path) -> filelock.BaseFileLock:
  """Locks a folder for this process; the kernel releases the lock if it is killed.

  Raises:
    InputError: another process holds the lock; the error names that process.
  """
  path = folder / _LOCK
  # Not thread-local: a run may be closed from another thread than it was opened from.
  lock = filelock.FileLock(path, mode=0o600, thread_local=False)
  try:
    lock.acquire(blocking=False)
  except filelock.Timeout:
    raise base.InputError(
      f"run directory: {folder} is being written by {_holder(path)}; wait for it, stop"
      " it, or choose another directory."
    ) from None
  command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:400]
  # Only for the error above. The file says nothing about whether the lock is held.
  path.write_text(
    f"process {os.getpid()} on {socket.gethostname()} ({command}, since"
    f" {now().isoformat(timespec='seconds')})",
    encoding="utf-8",
  )
  return lock


def _holder(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8") or "another process"
  except OSError:
    return "another process"


def write_text(path: Path, text: str) -> None:
  """Writes a temporary file and renames it, so that readers see all or nothing."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.unlink(missing_ok=True)  # it may have another mode
  with open(temporary, "w", encoding="utf-8", opener=log.private) as file:
    file.write(text)
  temporary.replace(path)


def _owner(config: Any) -> str:
  """The prefix of a field's name in an error."""
  return "" if config is None else f"{type(config).__name__}."


# --- Provenance -----------------------------------------------------------------------


def now() -> datetime.datetime:
  """The time, in UTC."""
  return datetime.datetime.now(datetime.UTC)


def _session() -> dict[str, Any]:
  """Describes this process when it starts to work on a run."""
  return {
    "argv": list(sys.argv),
    **git_state(),
    "versions": {
      "python": platform.python_version(),
      **{name: _version(name) for name in _PACKAGES},
    },
    "device_kind": jax.devices()[0].device_kind,
    "device_count": jax.device_count(),
    "process_count": jax.process_count(),
    "thread_count": background.cores(),
    "thread_settings": {
      name: os.environ[name]
      for name in ("XLA_FLAGS", "OMP_NUM_THREADS")
      if name in os.environ
    },
    "started": now().isoformat(timespec="seconds"),
    "ended": None,
    "hours": None,
  }


def _end_session(notes: dict[str, Any], at: datetime.datetime) -> None:
  """Adds the end of the last session, unless it has one, and the hours of all."""
  sessions = [notes, *notes["resumed"]]
  last = sessions[-1]
  if last["ended"] is not None:
    return
  begin = datetime.datetime.fromisoformat(last["started"])
  # A session killed before its first row left only the rows of an earlier session.
  at = max(begin, at)
  last["ended"] = at.isoformat(timespec="seconds")
  last["hours"] = round((at - begin).total_seconds() / 3600, 4)
  notes["total_hours"] = round(sum(s["hours"] or 0 for s in sessions), 4)


def git_state() -> dict[str, Any]:
  """Commit of the package's own git checkout; None if it was installed."""
  package = Path(__file__).resolve().parents[1]

  def git(*args: str) -> str:
    command = ["git", "-C", str(package), *args]
    return subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()

  try:
    # A package installed inside some other checkout must not report its commit.
    git("ls-files", "--error-unmatch", "base.py")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"git_sha": git("rev-parse", "HEAD"), "git_dirty": bool(changed)}
  except (OSError, subprocess.SubprocessError):
    return {"git_sha": None, "git_dirty": None}


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


# --- The stored config ----------------------------------------------------------------


def described(config: Any) -> dict[str, Any]:
  """Converts a frozen dataclass to JSON, with its nested fields and class names.

  Functions are described by their names, and other objects without a JSON form by
  their class, so that two processes describe equal settings equally.
  """
  return {} if config is None else json.loads(json.dumps(config, default=_plain))


def differences(
  stored: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
  """Lists (field, stored value, given value) for all fields outside `FREE`."""
  # Compared leaf by leaf, so that an error can name the field that differs.
  before, after = _leaves(stored), _leaves(given)
  return [
    (name, before.get(name, "nothing"), after.get(name, "nothing"))
    for name in dict.fromkeys((*before, *after))
    if name.partition(".")[0] not in FREE
    and before.get(name, "nothing") != after.get(name, "nothing")
  ]


def _plain(value: Any) -> Any:
  """Describes a value that `json` cannot write."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {"class": type(value).__name__, **fields}
  # Two partials of one function are different settings.
  if isinstance(value, functools.partial):
    return [value.func, value.args, value.keywords]
  if isinstance(value, Path):
    return str(value)
  if hasattr(value, "dtype") and hasattr(value, "shape"):
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {zlib.crc32(array.tobytes()):08x}"
  owner = value if hasattr(value, "__qualname__") else type(value)
  return f"{owner.__module__}.{owner.__qualname__}"


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns dotted name -> value; None and an empty list count as values."""
  is_leaf = lambda value: value is None or value == []
  leaves = jax.tree_util.tree_leaves_with_path(values, is_leaf=is_leaf)
  name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
  return {name(path): value for path, value in leaves}
