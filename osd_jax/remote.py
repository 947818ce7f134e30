"""Addresses such as gs://BUCKET/PATH: what lies there is used through a copy here.

Whatever fsspec knows will do: gs:// with gcsfs, s3:// with s3fs. Files are read and
written on this machine's disk, so that nothing else of the package knows of buckets.
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
EVERY_SECONDS = 60.0  # between two copies of a run directory
_TOLD_APART_BY = ("size", "etag", "ETag", "crc32c", "md5Hash", "mtime", "created")
_UNSHARED = re.compile(r"(^|/)\.lock$|\.tmp$|orbax-checkpoint-tmp")


def is_remote(path: str | Path) -> bool:
  """Whether a path is an address of somewhere else."""
  return bool(re.match(r"[a-z][a-z\d+.-]*://", str(path)))


def fetched(address: str, setting: str) -> Path:
  """The local copy of a file or folder; what changed there since is copied again.

  Args:
    address: of it.
    setting: name of the field that holds it, for error texts.

  Raises:
    InputError: there is nothing, or it cannot be read.
  """
  folder = _cache(address)
  target = folder / _name(address)
  with _errors(address, setting):
    found = _files(address)
    if not found:
      raise FileNotFoundError("there is no such file or folder")
    known = _read(folder / "copied.json")
    for inside, info in found.items():
      file = target / inside if inside else target
      token = _token(info)
      if known.get(inside) != token or not file.is_file():
        _get(address, info["name"], file)
        known[inside] = token
    for inside in known.keys() - found.keys():
      (target / inside).unlink(missing_ok=True)
    _write(folder / "copied.json", {name: known[name] for name in found})
  return target


def matching(address: str, pattern: str, setting: str) -> list[str]:
  """Addresses of the files in a folder that a glob names, in sorted order."""
  with _errors(address, setting):
    system, root = _system(address)
    found = sorted(system.glob(f"{root}/{pattern}"))
    return [system.unstrip_protocol(name) for name in found]


@contextlib.contextmanager
def stored(path: str | Path) -> Iterator[Path]:
  """Where to write a file so that it is at `path` afterwards.

  Raises:
    InputError: the address cannot be written to.
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
  shutil.rmtree(local.parent)


class Mirror:
  """A folder here that is copied to an address, and was there before, perhaps.

  Attributes:
    address: of the copy.
    folder: here.
  """

  def __init__(self, address: str):
    """Copies nothing yet.

    Raises:
      InputError: nothing can read or write such an address.
    """
    self.address = address.rstrip("/")
    self.folder = _cache(self.address) / _name(self.address)
    self._notes = self.folder.parent / "mirrored.json"
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None
    self._one_at_a_time = threading.Lock()
    with _errors(address, "run_directory"):
      _system(address)

  def pull(self, sign: str) -> None:
    """Takes what is there, unless it is what was last copied from here.

    What was copied there once and has been removed since is begun anew. What was here
    is put aside, into the folder `removed`.

    Args:
      sign: name of a file; where it is absent, what is there is not ours.
    """
    with _errors(self.address, "run_directory"):
      found = _files(self.address)
      there = {inside: _token(info) for inside, info in found.items()}
      before = _read(self._notes).get("there", {})
      if sign not in there and sign in before:
        self._put_aside()
      if sign not in there or there == before:
        return
      self._put_aside()
      for inside, info in found.items():
        _get(self.address, info["name"], self.folder / inside)
      _write(self._notes, {"there": there, "here": self._here()})

  def push(self) -> None:
    """Copies what has changed here since, and removes there what was removed here."""
    with self._one_at_a_time, _errors(self.address, "run_directory"):
      system, root = _system(self.address)
      before, here = _read(self._notes).get("here", {}), self._here()
      for inside, stamp in here.items():
        file = self.folder / inside
        if before.get(inside) != stamp and file.exists():  # else it passed through
          _put(file, system, f"{root}/{inside}")
      there = _files(self.address)
      for inside in there.keys() & (before.keys() - here.keys()):
        system.rm_file(there.pop(inside)["name"])
      tokens = {inside: _token(info) for inside, info in there.items()}
      _write(self._notes, {"there": tokens, "here": here})

  def begin(self) -> None:
    """Copies now and then, beside whatever else goes on."""
    self._thread = threading.Thread(target=self._work, daemon=True)
    self._thread.start()

  def end(self) -> None:
    """Copies for the last time; nothing where `begin` was not reached.

    Raises:
      InputError: it could not be written; all is still here.
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
    """Empties the folder but for its lock."""
    aside = self.folder.parent / "removed"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for child in self.folder.iterdir():
      if not _UNSHARED.search(child.name):
        child.rename(aside / child.name)
    self._notes.unlink(missing_ok=True)

  def _work(self) -> None:
    while not self._ended.wait(EVERY_SECONDS):
      with contextlib.suppress(base.InputError):  # `end` says so, if it stays
        self.push()

  def _here(self) -> dict[str, list[int]]:
    """Size and time of every file here, by its place in the folder."""
    found = {}
    for file in self.folder.rglob("*"):
      inside = file.relative_to(self.folder).as_posix()
      with contextlib.suppress(FileNotFoundError):
        if file.is_file() and not _UNSHARED.search(inside):
          found[inside] = [file.stat().st_size, file.stat().st_mtime_ns]
    return dict(sorted(found.items()))


@contextlib.contextmanager
def _errors(address: str, setting: str) -> Iterator[None]:
  """Whatever a file system raises, as one kind of error."""
  try:
    yield
  except base.InputError:
    raise
  except Exception as error:  # they raise many kinds
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise base.InputError(
      f"{setting}: received {address!r}, expected an address that can be read and"
      f" written to ({reason}); gs:// needs pip install 'osd-jax[remote]'."
    ) from error


def _system(address: str) -> tuple[Any, str]:
  """The file system of an address, and the path on it."""
  import fsspec  # here: most runs have no need of it

  system, root = fsspec.core.url_to_fs(address)
  system.invalidate_cache()  # others write there, too
  return system, root.rstrip("/")


def _files(address: str) -> dict[str, dict[str, Any]]:
  """What is known of every file below an address, by its place there; "" is itself."""
  system, root = _system(address)
  found = system.find(root, detail=True)
  return {
    name.removeprefix(root).strip("/"): {**info, "name": name}
    for name, info in found.items()
  }


def _get(address: str, name: str, file: Path) -> None:
  """Copies one file; it appears complete or not at all."""
  system, _ = _system(address)
  file.parent.mkdir(parents=True, exist_ok=True)
  passing = file.with_name(f"{file.name}.{os.getpid()}.tmp")
  system.get_file(name, str(passing))
  passing.replace(file)


def _put(file: Path, system: Any, path: str) -> None:
  """Copies one file to a file system; a bucket that is not there is not made."""
  if getattr(system, "local_file", False):
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
  system.put_file(str(file), path)


def _token(info: Mapping[str, Any]) -> str:
  return repr([str(info.get(name)) for name in _TOLD_APART_BY])


def _cache(address: str) -> Path:
  """A folder of this address's own."""
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
