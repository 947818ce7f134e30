"""Where files lie: shipped with the package, on this machine, in a bucket, on a hub."""

import os
import re
from pathlib import Path

from osd_jax import base, remote

PREFIX = "shipped:"
_HUB_NAME = r"[\w-][\w.-]*(/[\w.-]+)?"  # owner/name, or a name alone as "t5-small"
_WANTED = (
  "*.json",
  "*.safetensors",
  "spiece.model",
  "tokenizer.model",
  "chat_template.jinja",
)


def resolve(path: str, setting: str = "assets") -> Path:
  """The file or folder that a configured path means.

  Args:
    path: "shipped:NAME" for a file of this package; an address (gs://, see `remote`),
      whose local copy it is; else a path. Where there is
      nothing, one that may be a name on the Hugging Face hub ("google/flan-t5-small")
      is downloaded, if huggingface_hub is installed.
    setting: name of the field that holds it, for error texts.

  Raises:
    InputError: no such shipped file, or no such file and nothing to download.
  """
  if path.startswith(PREFIX):
    return _shipped(path, setting)
  if remote.is_remote(path):
    return remote.fetched(path, setting)
  if re.fullmatch(_HUB_NAME, path) and not path.endswith(_SUFFIXES):
    return Path(path) if os.path.exists(path) else _downloaded(path, setting)
  return Path(path)


def _shipped(path: str, setting: str) -> Path:
  folder = Path(__file__).parent
  file = folder / path.removeprefix(PREFIX)
  if not file.is_file():
    names = sorted(p.name for p in folder.iterdir() if p.suffix in _SUFFIXES)
    raise base.InputError(
      f"{setting}: received {path!r}, expected one of"
      f" {', '.join(PREFIX + name for name in names)}, or the path of a file."
    )
  return file


def _downloaded(name: str, setting: str) -> Path:
  """The local copy of a folder of the hub."""
  said = f"{setting}: received {name!r}, expected a local file or folder: it is absent"
  try:
    import huggingface_hub
  except ImportError as error:
    raise base.InputError(
      f"{said}. If it is a name on the Hugging Face hub, download it, or install"
      " huggingface_hub (pip install huggingface_hub), which then does."
    ) from error
  try:
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_WANTED)))
  except Exception as error:  # it raises many kinds
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise base.InputError(f"{said}, and from the hub: {reason}") from error


_SUFFIXES = (".model", ".safetensors")
