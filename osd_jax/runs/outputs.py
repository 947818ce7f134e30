"""Checks that an output can be written, before the work that produces it starts."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax

from osd_jax import base, remote
from osd_jax.runs.checkpoint import KEEP

_EXPECTED = {
  "file": "a file that can be written",
  "folder": "a folder that can be written to",
  "new folder": "a folder that can be written, new or empty",
}


def check_output(
  setting: str, path: str | Path, kind: str = "file", needed_bytes: int = 0
) -> None:
  """Raises InputError if an output cannot be written; call it before any work is done.

  Hours of work must not end in an error about a folder. Every command calls this for
  every path that it will write, and the message is one line for the user:

      check_output("--save", arguments.save)
      check_output("--output", arguments.output, "folder")
      check_output("OnlineConfig.run_directory", path, "folder", needed_bytes=3 * size)

  Missing folders are not created. URLs are not checked: only writing to them can tell,
  and a local copy is kept if that fails.

  Args:
    setting: name of the field or option with the path, for the error message.
    path: the file or folder to be written.
    kind: "file"; "folder", which may exist and have other files; or "new folder", which
      may exist if it is empty.
    needed_bytes: roughly how much will be written.
  """
  if remote.is_remote(path):
    return
  try:
    reason = _problem(str(path), kind, needed_bytes)
  except OSError as error:  # such as a path that is too long
    reason = str(error.strerror)
  if reason:
    raise base.InputError(
      f"{setting}: received {str(path)!r}, expected {_EXPECTED[kind]}, but {reason};"
      " choose another."
    )


def check_space(config: Any, arrays: Any) -> None:
  """Raises InputError if a run's checkpoints of such arrays do not fit on its disk."""
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
  setting = f"{type(config).__name__}.run_directory"
  # While a step is written, all kept ones are there too.
  check_output(setting, config.run_directory, "folder", (KEEP + 1) * size)


def _problem(name: str, kind: str, needed_bytes: int) -> str:
  """The reason why a file or folder cannot be written, "" if it can."""
  if not name.strip():
    return "it is empty"
  if "\0" in name:
    return "it contains a NUL character"
  path = Path(os.path.realpath(name))  # the file that a link points to is written
  if kind == "file" and path.is_dir():
    return "it is a folder"
  if kind == "file" and path.exists() and not path.is_file():
    return "it is a device, a pipe or a socket"
  if kind != "file" and path.exists() and not path.is_dir():
    return "it is a file"
  if kind == "new folder" and path.exists() and any(path.iterdir()):
    return "it exists already and is not empty"
  # A file is renamed into its folder, and a new folder is made in the one above.
  around = (
    path.absolute().parents if kind != "folder" else [path, *path.absolute().parents]
  )
  parent = next(folder for folder in around if folder.exists())
  if not parent.is_dir():
    return f"{parent} is not a folder"
  try:
    # Permissions, read-only disks and quotas are best found out by writing.
    with tempfile.TemporaryFile(dir=parent) as file:
      file.write(b"\0" * 4096)
  except OSError as error:
    return f"{parent} cannot be written to ({error.strerror})"
  free = shutil.disk_usage(parent).free
  if free < needed_bytes:
    return f"it needs about {_megabytes(needed_bytes)} and {_megabytes(free)} are free"
  return ""


def _megabytes(count: int) -> str:
  return f"{count / 1e6:,.0f} MB"
