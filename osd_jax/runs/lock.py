"""One writer a folder: a lock that ends with its process, however that ends."""

import datetime
import json
import os
import socket
import sys
import weakref
from pathlib import Path

from osd_jax import base

try:
  import fcntl
except ImportError:  # Windows: nothing is locked there
  fcntl = None

NAME = ".lock"


class Lock:
  """Held from construction until `release`, or until the process is gone.

  Attributes:
    release: gives the lock back; called again, it does nothing.
  """

  def __init__(self, folder: Path):
    """Takes the lock of a folder; the file in it says who holds it.

    Raises:
      InputError: another process holds it; names that one.
      OSError: the folder cannot be written to.
    """
    descriptor = _locked(folder / NAME, folder)
    self.release = weakref.finalize(self, os.close, descriptor)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(_own()).encode())


def _locked(path: Path, folder: Path) -> int:
  """Descriptor of the locked file."""
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if fcntl is None:
      return descriptor
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # Whoever gave it up may have removed the folder: then it locks nothing.
      if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
        return descriptor
    except BlockingIOError:
      holder = _described(os.read(descriptor, 10_000))
      os.close(descriptor)
      raise base.InputError(
        f"run directory: {folder} is being written by {holder}; wait for it or stop"
        " it, or choose another directory."
      ) from None
    os.close(descriptor)


def _own() -> dict[str, str | int]:
  return {
    "pid": os.getpid(),
    "host": socket.gethostname(),
    "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:400],
    "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def _described(text: bytes) -> str:
  try:
    holder = json.loads(text)
    return (
      f"process {holder['pid']} on {holder['host']} ({holder['command']}, since"
      f" {holder['since']})"
    )
  except (ValueError, KeyError, TypeError):
    return "another process"  # which has it for less than a moment
