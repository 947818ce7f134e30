"""Loads modules of `osd_tools` by name: readers of other formats, and text sources.

This package does not import `osd_tools`. A model file of another format is read as a
folder of transformers, and only this module knows which files these are.
"""

import importlib
from pathlib import Path
from types import ModuleType

_GGUF = (".gguf", b"GGUF")  # ending and first bytes


def tool(name: str) -> ModuleType:
  """Imports the module `osd_tools.NAME`."""
  return importlib.import_module(f"osd_tools.{name}")


def reader_of(path: Path) -> ModuleType | None:
  """The module that reads a model file of another format; None for other paths.

  It has two functions of the path: `folder_of` returns a folder with the model's small
  files, and `open_tensors` its `Tensors`.
  """
  if not path.is_file():
    return None
  suffix, magic = _GGUF
  with path.open("rb") as file:
    is_gguf = path.suffix == suffix or file.read(len(magic)) == magic
  return tool("gguf") if is_gguf else None


def folder_of(path: Path) -> Path:
  """The folder of a model file of another format; other paths are returned."""
  reader = reader_of(path)
  return reader.folder_of(path) if reader else path
