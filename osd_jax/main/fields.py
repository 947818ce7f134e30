"""The fields of configs: types, defaults, what they are for, and their values."""

import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from osd_jax.main import factory

_WIDTH = 80
_NOTES = """\
CONFIG.FIELD = VALUE in a gin file, or --gin.CONFIG.FIELD=VALUE, sets a field of
the configs that are made by @CONFIG(); SCOPE/CONFIG.FIELD of those made by
@SCOPE/CONFIG(). The files in runs/ make each config that a command takes.
"""


def describe(config_class: type) -> str:
  """A paragraph for each config that a config class leads to, a line or two a field."""
  configs = [made.config_class for made in factory.reachable(config_class)]
  return "\n".join([_NOTES, *map(_paragraph, configs)])


def documented(config_class: type) -> dict[str, str]:
  """What the `Attributes:` of a docstring say of each field, lines joined."""
  text = inspect.getdoc(config_class) or ""
  section = re.search(r"^Attributes:\n((?:  .*\n?|\n)*)", text, re.M)
  entries = re.split(r"^  (?=\S)", section[1], flags=re.M) if section else []
  pairs = (" ".join(entry.split()).partition(": ") for entry in entries if entry)
  return {name: meaning for name, _, meaning in pairs}


def values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Path and value of every plain field of a config and of those inside it."""
  if dataclasses.is_dataclass(value):
    for field in dataclasses.fields(value):
      yield from values(f"{name}.{field.name}", getattr(value, field.name))
  elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
    for index, part in enumerate(value):
      yield from values(f"{name}[{index}]", part)
  else:
    yield name, value


def naming_path(config: Any, path: str | bytes | int | None) -> str:
  """The setting that a path of an error comes from, "" if there is none.

  Args:
    config: the config of a command.
    path: `OSError.filename`: what a text field names, or something in there, or a
      folder that could not be made for it.

  Returns:
    "OnlineConfig.run_directory: received 'x'", of the longest such value.
  """
  if not isinstance(path, str):
    return ""
  asked = os.path.abspath(path)
  named = []
  for name, value in values(type(config).__name__, config):
    if isinstance(value, str) and value:
      both = (os.path.abspath(value), asked)
      if os.path.commonpath(both) in both and asked not in os.getcwd():
        named.append((len(value), f"{name}: received {value!r}"))
  return max(named, default=(0, ""))[1]


def _paragraph(config_class: type) -> str:
  summary = (inspect.getdoc(config_class) or "").partition("\n\n")[0]
  lines = [config_class.__name__, *_wrapped(summary, "  "), ""]
  from osd_jax import base  # imports jax, which `osd --help` does not wait for

  meanings, hints = documented(config_class), base.field_types(config_class)
  for field in dataclasses.fields(config_class):
    kind, value = base.type_text(hints[field.name]), _default(field)
    value = f" = {value}" if value else " (required)"
    lines += _wrapped(f"{field.name}: {kind}{value}", "  ")
    lines += _wrapped(meanings.get(field.name, ""), "      ")
  return "\n".join([*lines, ""])


def _wrapped(text: str, indent: str) -> list[str]:
  return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _default(field: dataclasses.Field[Any]) -> str:
  """Text of a field's default, "" if it has none."""
  value = field.default
  if field.default_factory is not dataclasses.MISSING:
    value = field.default_factory()
  if value is dataclasses.MISSING:
    return ""
  if dataclasses.is_dataclass(value):
    name = type(value).__name__
    return f"{name}()" if repr(value) == repr(_made(type(value))) else repr(value)
  return repr(value)


def _made(config_class: Any) -> Any:
  """A config with defaults alone, None where it needs more."""
  needed = (_default(field) == "" for field in dataclasses.fields(config_class))
  return None if any(needed) else config_class()
