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

from osd_jax import base


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


def find(data_dir: str, pattern: str, who: str) -> list[str]:
  """Finds the files of a pattern.

  Args:
    data_dir: the folder.
    pattern: file name or glob inside it.
    who: what the error text calls the asker.

  Returns:
    Paths in sorted order, at least one.

  Raises:
    ValueError: the folder or a match is missing.
  """
  if not os.path.isdir(data_dir or "."):
    raise base.InputError(
      f"{who}: data_dir is {data_dir!r}, expected an existing folder; bind"
      " data_dir to the folder that holds the JSONL files."
    )
  paths = sorted(glob.glob(os.path.join(data_dir, pattern)))
  if not paths:
    there = sorted(name for name in os.listdir(data_dir or ".") if "json" in name)
    raise base.InputError(
      f"{who}: no file matches {pattern!r} in {data_dir!r}; its JSON files are"
      f" {there[:20]}. Correct the pattern, the split or data_dir."
    )
  return paths


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
