"""Resolves paths of files: shipped, local, in a bucket or on the Hugging Face hub."""

import difflib
import os
import re
from pathlib import Path

from osd_jax import base, remote

PREFIX = "shipped:"
FOLDER = Path(__file__).parent
_HUB_NAME = r"[\w-][\w.-]*(/[\w.-]+)?"  # owner/name, or a name such as "t5-small"
_WANTED = (
  "*.json",
  "*.safetensors",
  "spiece.model",
  "tokenizer.model",
  "merges.txt",
  "chat_template.jinja",
)


def resolve(path: str, setting: str = "assets") -> Path:
  """The local file or folder of a path.

  Args:
    path: "shipped:NAME" for a file of this package, a remote address (see `remote`)
      that is copied to this machine, or a local path. If the path does not exist and
      may be a name on the Hugging Face hub, such as "google/flan-t5-small", it is
      downloaded; this needs huggingface_hub.
    setting: name of the field with the path, for error messages.

  Raises:
    InputError: there is no such file, and it cannot be downloaded.
  """
  if path.startswith(PREFIX):
    return _shipped(path, setting)
  if remote.is_remote(path):
    return remote.fetched(path, setting)
  # Local files come first: a folder that is called like a published model is the user's
  # own.
  if os.path.exists(path) or not re.fullmatch(_HUB_NAME, path):
    return Path(path)
  return Path(path) if path.endswith(_SUFFIXES) else _downloaded(path, setting)


def _shipped(path: str, setting: str) -> Path:
  file = FOLDER / path.removeprefix(PREFIX)
  if not file.exists():
    names = sorted(p.name for p in FOLDER.iterdir() if p.suffix in _SUFFIXES)
    names = [x for x in names if f"_{setting.rpartition('.')[2]}." in x] or names
    raise base.InputError(
      f"{setting}: received {path!r}, expected one of"
      f" {', '.join(PREFIX + name for name in names)}, or the path of a file."
    )
  return file


def _downloaded(name: str, setting: str) -> Path:
  """Downloads a folder from the hub and returns its path."""
  parent, last = os.path.split(name)
  message = f"{setting}: received {name!r}, but there is no such file or folder here"
  if os.path.isdir(parent or "."):
    names = difflib.get_close_matches(last, os.listdir(parent or "."), 1)
    message += "".join(f" (did you mean {os.path.join(parent, n)!r}?)" for n in names)
  if parent and os.path.isdir(parent):
    raise base.InputError(f"{message}; expected a local file or folder.")
  try:
    import huggingface_hub
  except ImportError as error:
    raise base.InputError(
      f"{message}. If it is a name on the Hugging Face hub, download it, or install"
      " huggingface_hub (pip install huggingface_hub) to download it automatically."
    ) from error
  try:
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_WANTED)))
  except Exception as error:  # it raises many types
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    is_away = type(error).__name__ == "LocalEntryNotFoundError"
    fact = "cannot be reached" if is_away else f"did not give it ({reason})"
    raise base.InputError(
      f"{message}, and the Hugging Face hub {fact}; correct the path or the name."
    ) from error


_SUFFIXES = (".model", ".safetensors", ".gguf")
