"""Support for URLs such as gs://BUCKET/PATH wherever a path is expected.

Files are read through a local copy, and written locally before they are uploaded, so
that no other module needs to handle buckets. A bucket cannot append to a file, which
the logs of a run do at every request; a run directory with a URL is therefore a local
folder that is mirrored there. fsspec needs a package for each protocol: gs:// needs
gcsfs, s3:// needs s3fs.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from osd_jax import base

CACHE = "~/.cache/osd_jax/remote"
EVERY_SECONDS = 60.0  # between two uploads of a run directory
_LOCAL_ONLY = re.compile(r"(^|/)\.lock$|\.tmp$|orbax-checkpoint-tmp")


def is_remote(path: str | Path) -> bool:
  """Whether a path is a URL."""
  return bool(re.match(r"[a-z][a-z\d+.-]*://", str(path)))


def fetched(address: str, setting: str) -> Path:
  """Returns a local copy of a remote file or folder; only changed files are copied.

  `setting` is the name of the field that holds the URL, for errors.

  Raises:
    InputError: the URL does not exist or cannot be read.
  """
  folder = _cache(address)
  target, notes = folder / _name(address), folder / "copied.json"
  with _errors(address, setting):
    versions = _versions(address)
    if not versions:
      raise FileNotFoundError("there is no such file or folder")
    before = _read(notes)
    for inside, version in versions.items():
      if before.get(inside) != version or not (target / inside).is_file():
        _get(address, inside, target)
    # A file that was removed remotely must not be read from the copy.
    for inside in before.keys() - versions.keys():
      (target / inside).unlink(missing_ok=True)
    _write(notes, versions)
  return target


def matching(address: str, pattern: str, setting: str) -> list[str]:
  """URLs of the files in a remote folder that match a glob, sorted."""
  with _errors(address, setting):
    system, root = _system(address)
    files = sorted(system.glob(f"{root}/{pattern}"))
    return [system.unstrip_protocol(name) for name in files]


@contextlib.contextmanager
def stored(path: str | Path) -> Iterator[Path]:
  """Yields a local path to write to; a URL is uploaded when the body ends.

  Raises:
    InputError: the URL cannot be written to; names the local file, which is kept.
  """
  if not is_remote(path):
    yield Path(path)
    return
  address = str(path)
  local = _cache(address) / f"written_{os.getpid()}" / _name(address)
  local.parent.mkdir(parents=True, exist_ok=True)
  yield local
  try:
    with _errors(address, "output"):
      _put(local, *_system(address))
  except base.InputError as error:
    raise base.InputError(f"{error} What was written is {local}.") from error
  # Removed only after the upload: if that fails, the file is the only copy.
  shutil.rmtree(local.parent)


class Mirror:
  """A local folder that is mirrored to a URL.

  Attributes:
    address: the URL.
    folder: the local folder.
  """

  def __init__(self, address: str):
    """Names the folder of a URL; copies nothing yet."""
    self.address = address.rstrip("/")
    self.folder = _cache(self.address) / _name(self.address)
    self._notes = self.folder.parent / "mirrored.json"
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None
    self._pushing = threading.Lock()
    with _errors(self.address, "run_directory"):
      _system(self.address)

  def pull(self, sign: str) -> None:
    """Downloads the remote folder unless it is what this machine last uploaded.

    If the remote folder was removed after an upload, the run begins again. Local files
    that are replaced are moved into the folder `removed`, so that nothing is lost. A
    remote folder without a file called `sign` is not a run and is ignored.
    """
    with _errors(self.address, "run_directory"):
      there, before = _versions(self.address), _read(self._notes).get("there", {})
      if there == before or sign not in {**there, **before}:
        return
      self._put_aside()
      if sign in there:
        for inside in there:
          _get(self.address, inside, self.folder)
        _write(self._notes, {"there": there, "here": self._here()})

  def push(self) -> None:
    """Uploads changed files, and removes remote copies of files removed here."""
    with self._pushing, _errors(self.address, "run_directory"):
      system, root = _system(self.address)
      before, here = _read(self._notes).get("here", {}), self._here()
      for inside, stamp in here.items():
        file = self.folder / inside
        # A temporary file may have been renamed since `here` was listed.
        if before.get(inside) != stamp and file.exists():
          _put(file, system, f"{root}/{inside}")
      there = _versions(self.address)
      # Only files that were uploaded from here are removed; others are not ours.
      for inside in there.keys() & (before.keys() - here.keys()):
        system.rm_file(f"{root}/{inside}")
        del there[inside]
      _write(self._notes, {"there": there, "here": here})

  def begin(self) -> None:
    """Starts a thread that uploads every `EVERY_SECONDS`."""
    self._thread = threading.Thread(target=self._work, daemon=True)
    self._thread.start()

  def end(self) -> None:
    """Uploads for the last time. Does nothing if `begin` was never called.

    Raises:
      InputError: the upload failed; the local folder is complete.
    """
    if self._thread is None:
      return
    self._ended.set()
    self._thread.join()
    try:
      self.push()
    except base.InputError as error:
      raise base.InputError(
        f"{error} All is in {self.folder}; the same command copies it again."
      ) from error

  def _put_aside(self) -> None:
    """Moves everything but the lock to the folder `removed`."""
    aside = self.folder.parent / "removed"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(0o700)
    for child in self.folder.iterdir():
      if not _LOCAL_ONLY.search(child.name):
        child.rename(aside / child.name)
    self._notes.unlink(missing_ok=True)

  def _work(self) -> None:
    while not self._ended.wait(EVERY_SECONDS):
      # A network may recover; an error that persists is raised by `end`.
      with contextlib.suppress(base.InputError):
        self.push()

  def _here(self) -> dict[str, list[int]]:
    """Size and modification time of every local file, by relative path."""
    files = {}
    for file in self.folder.rglob("*"):
      inside = file.relative_to(self.folder).as_posix()
      with contextlib.suppress(FileNotFoundError):
        if file.is_file() and not _LOCAL_ONLY.search(inside):
          files[inside] = [file.stat().st_size, file.stat().st_mtime_ns]
    return dict(sorted(files.items()))


@contextlib.contextmanager
def _errors(address: str, setting: str) -> Iterator[None]:
  """Turns the many errors of file systems into InputError."""
  try:
    yield
  except base.InputError:
    raise
  except Exception as error:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise base.InputError(
      f"{setting}: received {address!r}, expected an address that can be read and"
      f' written to ({reason}); gs:// needs pip install "osd_jax[remote]".'
    ) from error


def _system(address: str) -> tuple[Any, str]:
  """The fsspec file system of a URL, and the path on it."""
  import fsspec  # imported late, because most runs do not need it

  system, root = fsspec.core.url_to_fs(address)
  system.invalidate_cache()  # other machines write there too
  return system, root.rstrip("/")


def _versions(address: str) -> dict[str, str]:
  """Version of every remote file, by relative path; "" if `address` is a file.

  The version covers all that the file system tells: size, time, checksum.
  """
  system, root = _system(address)
  files = system.find(root, detail=True)
  return {name.removeprefix(root).strip("/"): str(x) for name, x in files.items()}


def _get(address: str, inside: str, folder: Path) -> None:
  """Downloads one file into a folder; it appears complete or not at all."""
  system, root = _system(address)
  file = folder / inside
  file.parent.mkdir(parents=True, exist_ok=True)
  temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
  system.get_file(f"{root}/{inside}" if inside else root, str(temporary))
  temporary.replace(file)


def _put(file: Path, system: Any, path: str) -> None:
  """Uploads one file. Creates folders on file systems, but never a bucket."""
  if getattr(system, "local_file", False):
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
  system.put_file(str(file), path)


def _cache(address: str) -> Path:
  """A local folder for this URL alone."""
  digest = hashlib.sha256(address.encode()).hexdigest()[:16]
  return Path(CACHE).expanduser() / digest


def _name(address: str) -> str:
  return address.rstrip("/").rpartition("/")[2] or "root"


def _read(path: Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(content), encoding="utf-8")
