"""The run directory: what a run leaves behind, and what it continues from.

`config.json` holds every setting, `operative_config.gin` those of the command line;
`provenance.json` code, versions, command, seed, device, hours, and whether the run is
finished; `metrics.jsonl` one row a request, update or step (`MetricsLog`);
`outputs.jsonl` what was served (`OutputsLog`); `tensorboard/` events, optional;
`checkpoints/` orbax steps (`osd_jax.runs.checkpoint`); `plots/` and `report.html` come at
the end. `.lock` says which process writes.
"""

import dataclasses
import datetime
import html
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from osd_jax import base, remote
from osd_jax.runs import json_lines
from osd_jax.runs import provenance
from osd_jax.runs import stored_config
from osd_jax.runs import lock as locks

# What a run writes, at its start and later; nothing else is ever removed.
_FIRST = (
  "config.json",
  "operative_config.gin",
  "provenance.json",
  "metrics.jsonl",
  "outputs.jsonl",
  "checkpoints",
  "tensorboard",
)
_RESULTS = ("certificate.json", "draft.safetensors", "drafts", "plots", "report.html")


@dataclasses.dataclass(frozen=True)
class RunResult:
  """What the `run` of every command returns.

  Attributes:
    path: the run directory; of a conversion, what it wrote.
    exact: False if an output was checked and is not the target's.
  """

  path: Path
  exact: bool = True

  def _repr_html_(self) -> str | None:
    """The report, where a notebook shows the result; None where there is none."""
    report = RunDirectory(self.path).report_path
    if not report.is_file():
      return None
    # In a frame, so that the page's style stays its own.
    page = html.escape(report.read_text(encoding="utf-8"), quote=True)
    style = "width: 100%; height: 40rem; border: 1px solid #ddd"
    return f'<iframe srcdoc="{page}" style="{style}"></iframe>'


class RunDirectory:
  """The paths of a run. `start` makes one that this process alone may write to.

  As a context manager it lets others write afterwards, and removes what it made if
  an error came before anything was measured.

  Attributes:
    path: the folder.
  """

  def __init__(self, path: str | Path):
    """Names a folder, to read from it; neither makes nor locks it."""
    self.path = Path(path)
    self._lock: locks.Lock | None = None
    self._mirror: remote.Mirror | None = None
    self._made: list[Path] = []  # folders that were not there before, inner ones first
    self._is_new = False
    self._checkpoints = self.path / "checkpoints"

  @classmethod
  def of_process(cls, path: str | Path, number: int) -> "RunDirectory":
    """Of several processes the first writes to the folder, the others beside it.

    Checkpoints are all processes' together.
    """
    run = cls(f"{path}.process_{number}" if number else path)
    run._checkpoints = Path(path) / "checkpoints"
    return run

  @property
  def metrics_path(self) -> Path:
    return self.path / "metrics.jsonl"

  @property
  def outputs_path(self) -> Path:
    return self.path / "outputs.jsonl"

  @property
  def checkpoints_path(self) -> Path:
    return self._checkpoints

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
    return self.path / "config.json"

  @property
  def operative_config_path(self) -> Path:
    return self.path / "operative_config.gin"

  @property
  def provenance_path(self) -> Path:
    return self.path / "provenance.json"

  @classmethod
  def start(
    cls,
    path: str | Path,
    config: Any = None,
    *,
    operative_config: str = "",
    seed: int | None = None,
    overwrite: bool = False,
    argv: Sequence[str] | None = None,
  ) -> "RunDirectory":
    """Continues the run of this folder if it holds one, else begins one.

    A run that is finished stays as it is: see `finished`.

    Args:
      path: the folder, made with its parents. An address (gs://BUCKET/RUN): the run
        is written here, at `path`, and copied there every minute and at its end.
      config: the run's dataclass; stored, and compared with the one stored.
      operative_config: text of the command line's settings, stored beside it.
      seed: the run's seed.
      overwrite: remove what a run left here, and begin anew.
      argv: the command line, this process's own by default.

    Raises:
      InputError: the folder cannot be written to, another process writes to it, or
        its run has another config.
    """
    mirror = remote.Mirror(str(path)) if remote.is_remote(path) else None
    if mirror is not None and jax.process_count() > 1:
      raise base.InputError(
        f"{_owner(config)}run_directory: received {str(path)!r}, expected a folder that"
        " all processes see; mount the bucket on every host."
      )
    run = cls.of_process(mirror.folder if mirror else path, jax.process_index())
    run._mirror = mirror
    try:
      run._open()
      if overwrite and run.provenance_path.exists():
        run._remove(*_RESULTS, *_FIRST)
      if run.provenance_path.exists():
        run._continue(config, argv)
      else:
        run._begin(config, operative_config, seed, argv)
    except OSError as error:
      run.close()
      raise base.InputError(
        f"{_owner(config)}run_directory: received {str(path)!r}, expected a folder"
        f" that can be made and written to ({error.strerror}); choose another."
      ) from error
    except BaseException:
      run.close()
      raise
    if mirror is not None:
      mirror.begin()
    if jax.process_count() > 1:  # else one might look for what another still removes
      multihost_utils.sync_global_devices("run directory")
    return run

  def __enter__(self) -> "RunDirectory":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if error is not None and self._is_new and not self._has_rows():
      self._remove(*_FIRST, locks.NAME)
      for folder in self._made:
        if not any(folder.iterdir()):
          folder.rmdir()
    self.close()

  def close(self) -> None:
    """Lets other processes write here; a copy elsewhere is brought up to date."""
    try:
      if self._mirror is not None:
        self._mirror.end()
    finally:
      if self._lock is not None:
        self._lock.release()

  @property
  def finished(self) -> str | None:
    """When the run was finished, None if it was not."""
    return self.provenance().get("finished")

  def provenance(self) -> dict[str, Any]:
    """The content of provenance.json.

    Raises:
      InputError: there is none, or it is no JSON.
    """
    try:
      return json.loads(self.provenance_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise base.InputError(
        f"run directory: received {self.path}, expected a folder with a readable"
        f" provenance.json ({error}); every command that runs makes one."
      ) from error

  def config(self) -> dict[str, Any]:
    """The stored config by field, {} if there is none."""
    if not self.config_path.exists():
      return {}
    return json.loads(self.config_path.read_text(encoding="utf-8"))

  def operative_config(self) -> str:
    """The stored text of the command line's settings, "" if there is none."""
    if not self.operative_config_path.exists():
      return ""
    return self.operative_config_path.read_text(encoding="utf-8")

  def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
    """Writes a file of results beside the run; returns where it is."""
    plain, _ = json_lines.strict(content, name)
    write_text(self.path / name, json.dumps(plain, indent=2) + "\n")
    return self.path / name

  def finish(self) -> None:
    """Notes that the run is complete, when this session ended, and the hours of all."""
    notes = self.provenance()
    provenance.end(notes, provenance.now(), interrupted=False)
    notes["finished"] = provenance.now().isoformat(timespec="seconds")
    self._write_provenance(notes)

  def _open(self) -> None:
    """Makes and locks the folder."""
    above = [self.path, *self.path.parents]
    self._made = [folder for folder in above if not folder.exists()]
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = locks.Lock(self.path)
    if self._mirror is not None:
      self._mirror.pull(self.provenance_path.name)

  def _begin(
    self,
    config: Any,
    operative_config: str,
    seed: int | None,
    argv: Sequence[str] | None,
  ) -> None:
    self._is_new = True
    self.write_json(self.config_path.name, stored_config.described(config))
    if operative_config:
      write_text(self.operative_config_path, operative_config)
    begun = {"seed": seed, "finished": None, **provenance.session(argv)}
    self._write_provenance({**begun, "resumed": []})  # last: from now on it is a run

  def _continue(self, config: Any, argv: Sequence[str] | None) -> None:
    self._check_config(config)
    notes = self.provenance()
    if notes.get("finished"):
      return
    provenance.end(notes, self._last_sign_of_life(notes), interrupted=True)
    notes["resumed"].append(provenance.session(argv))
    self._write_provenance(notes)

  def _check_config(self, config: Any) -> None:
    given = stored_config.described(config)
    different = stored_config.differences(self.config(), given)
    if different:
      shown = [
        f"{_owner(config)}{name}: stored {stored!r}, given {now!r}"
        for name, stored, now in different[:5]
      ]
      more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
      raise base.InputError(
        f"run directory: {self.path} holds a run of other settings: "
        + "; ".join(shown)
        + f"{more}. Repeat its settings, choose a new directory, or set"
        f" {_owner(config)}overwrite = True to remove that run and begin anew."
      )

  def _last_sign_of_life(self, notes: Mapping[str, Any]) -> datetime.datetime:
    """When a session that was killed last wrote metrics."""
    if not self.metrics_path.exists():
      return datetime.datetime.fromisoformat([notes, *notes["resumed"]][-1]["started"])
    seconds = self.metrics_path.stat().st_mtime
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

  def _write_provenance(self, notes: Mapping[str, Any]) -> None:
    self.write_json(self.provenance_path.name, notes)

  def _has_rows(self) -> bool:
    return self.metrics_path.exists() and self.metrics_path.stat().st_size > 0

  def _remove(self, *names: str) -> None:
    for name in names:
      if (self.path / name).is_dir():
        shutil.rmtree(self.path / name, ignore_errors=True)
      else:
        (self.path / name).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
  """Writes beside the file and renames, so that readers see all or nothing."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text, encoding="utf-8")
  temporary.replace(path)


def _owner(config: Any) -> str:
  """What comes before a field's name in an error."""
  return "" if config is None else f"{type(config).__name__}."
