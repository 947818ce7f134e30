"""The shipped pair: vocabulary, target and draft of the demo."""

from pathlib import Path

from osd_jax import base

PREFIX = "shipped:"


def resolve(path: str) -> Path:
  """The file that a configured path means; "shipped:NAME" is a file of this folder.

  Raises:
    ValueError: no such shipped file.
  """
  if not path.startswith(PREFIX):
    return Path(path)
  folder = Path(__file__).parent
  found = folder / path.removeprefix(PREFIX)
  if not found.is_file():
    names = sorted(p.name for p in folder.iterdir() if p.suffix in _SUFFIXES)
    raise base.InputError(
      f"assets: received {path!r}, expected one of"
      f" {', '.join(PREFIX + name for name in names)}, or the path of a file."
    )
  return found


_SUFFIXES = (".model", ".safetensors")
