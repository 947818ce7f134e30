"""JSONL files: lines with their place, and what is wrong with a bad one.

No line can stop a run: a bad one is an `UnusableRow`, skipped and counted with
its file and line number by whoever reads.
"""

import dataclasses
import glob
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from osd_jax import base, remote


class UnusableRow(ValueError):
  """One example that cannot be used.

  Attributes:
    kind: "empty" (nothing there) or "malformed" (something else there).
  """

  def __init__(self, kind: Literal["empty", "malformed"], reason: str):
    super().__init__(reason)
    self.kind = kind


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of a file.

  Attributes:
    location: "file:line number", counted from 1.
    data: its bytes.
  """

  location: str
  data: bytes


def find(data_dir: str, pattern: str, whose: str = "") -> list[str]:
  """Finds the files of a pattern.

  Args:
    data_dir: the folder.
    pattern: file name or glob inside it.
    whose: what error texts put behind the setting's name.

  Returns:
    Paths in sorted order, at least one, each a file that can be read.

  Raises:
    InputError: the folder or a match is missing, or a match cannot be read.
  """
  if remote.is_remote(data_dir):
    return _fetched(data_dir, pattern, whose)
  try:
    names = sorted(os.listdir(data_dir or "."))
    paths = sorted(glob.glob(os.path.join(data_dir, pattern)))
  except (OSError, ValueError) as error:  # ValueError: a NUL
    raise base.InputError(
      f"TaskConfig.data_dir{whose}: received {data_dir!r}, expected a readable folder"
      f" ({error}); name the one that holds the JSONL files."
    ) from error
  if not paths:
    there = [name for name in names if "json" in name]
    raise base.InputError(
      f"TaskConfig.pattern{whose}: received {pattern!r}, which no file in"
      f" {data_dir!r} matches; its JSON files are {there[:20]}. Correct the pattern,"
      " the split or data_dir."
    )
  for path in paths:
    try:
      with open(path, "rb"):
        pass
    except OSError as error:
      raise base.InputError(
        f"TaskConfig.pattern{whose}: received {pattern!r}, expected files that can be"
        f" read, but {path} cannot ({error.strerror})."
      ) from error
  return paths


def _fetched(address: str, pattern: str, whose: str) -> list[str]:
  """Local copies of the files in a bucket."""
  setting = f"TaskConfig.data_dir{whose}"
  found = remote.matching(address, pattern, setting)
  if not found:
    raise base.InputError(
      f"TaskConfig.pattern{whose}: received {pattern!r}, which no file in {address!r}"
      " matches. Correct the pattern, the split or data_dir."
    )
  return [str(remote.fetched(one, setting)) for one in found]


def lines(paths: Sequence[str]) -> Iterator[Line]:
  """Yields every line of the files, in order, undecoded."""
  for path in paths:
    with open(path, "rb") as file:
      for number, data in enumerate(file, 1):
        if number == 1:
          data = data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        yield Line(f"{path}:{number}", data)


def parse(data: bytes) -> dict[str, Any]:
  """Reads one line.

  Args:
    data: the bytes of a line.

  Returns:
    The JSON object.

  Raises:
    UnusableRow: a blank line, not UTF-8, not JSON, or not an object.
  """
  if not data.strip():
    raise UnusableRow("empty", "blank line")
  try:
    raw = json.loads(data.decode("utf-8"))
  except UnicodeDecodeError as error:
    raise UnusableRow("malformed", f"not UTF-8 at byte {error.start}") from error
  except RecursionError as error:
    raise UnusableRow("malformed", "JSON nested too deeply") from error
  except ValueError as error:
    raise UnusableRow("malformed", f"not JSON: {error}") from error
  if not isinstance(raw, dict):
    raise UnusableRow(
      "malformed", f"expected a JSON object, received {type(raw).__name__}"
    )
  return raw
