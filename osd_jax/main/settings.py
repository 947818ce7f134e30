"""Gin files and flags, read into the config of a command.

gin only parses here. It would raise the first mistake alone, and without a place if a
config refuses a value. Here the configs are built by walking the fields of the
command's config class, so every mistake is reported with the line that made it, and
config classes need to know nothing of gin.
"""

import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

import osd_jax


class ConfigError(ValueError):
  """Settings from which no config can be made; the text has one line per mistake."""


def load(
  config_class: type,
  files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  commands: Mapping[str, str] | None = None,
) -> tuple[Any, str]:
  """Makes a config of a class, with plain values and other configs in its fields.

  Later files win, and the "NAME=VALUE" of `bindings` win over files. `search_paths` are
  searched for files after the current folder. `commands` maps names of configs to
  commands, for the error about another command's file.

  Returns:
    The config, and gin text that makes it again: all settings in use, and as comments
    every field with its value.

  Raises:
    ConfigError: one line per mistake.
  """
  read = _Settings(config_class, search_paths, commands or {})
  for file in files:
    read.read_file(file, library=False)
  for binding in bindings:
    read.read_flag(binding)
  try:
    config = read.build()
  except RecursionError:
    raise ConfigError(
      "settings refer to each other in a circle; follow the @ and % references."
    ) from None
  return config, read.text(config)


def search_folders(search_paths: Sequence[str] = ()) -> list[Path]:
  """Returns the folders that are searched for gin files, in order."""
  # gin_configs is a link in a checkout and a folder in a wheel. The resolved path is
  # the one that a reader of an error can edit.
  shipped = (Path(osd_jax.__file__).parent / "gin_configs").resolve()
  return [Path(), *map(Path, search_paths), shipped, shipped.parent]


def configs(config_class: type) -> dict[str, type]:
  """Returns a config class and all that its fields lead to, by name."""
  from osd_jax import base  # imports jax, which `osd --help` does without

  classes: dict[str, type] = {}
  # Breadth first, so that `--help_config` lists the command's own config first.
  waiting = [config_class]
  while waiting:
    current = waiting.pop(0)
    if current.__name__ not in classes:
      classes[current.__name__] = current
      waiting += [c for hint in base.field_types(current).values() for c in _in(hint)]
  return classes


def values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Yields path and value of every plain field of a config and of its nested ones."""
  if dataclasses.is_dataclass(value):
    for field in dataclasses.fields(value):
      yield from values(f"{name}.{field.name}", getattr(value, field.name))
  elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
    for index, part in enumerate(value):
      yield from values(f"{name}[{index}]", part)
  else:
    yield name, value


class _Reference(NamedTuple):
  """`@scope/NAME()`, `@NAME` or `%NAME` as a value."""

  sign: str
  name: str
  is_call: bool = False

  def __repr__(self) -> str:
    return f"{self.sign}{self.name}{'()' if self.is_call else ''}"


_REQUIRED = _Reference("%", "gin.REQUIRED")
_MACRO = "%"  # class name in the keys of macros


class _Delegate(config_parser.ParserDelegate):
  """Keeps references as they are written."""

  def configurable_reference(
    self, scoped_configurable_name: str, evaluate: bool
  ) -> Any:
    return _Reference("@", scoped_configurable_name, evaluate)

  def macro(self, macro_name):
    return _Reference("%", macro_name)


class _Key(NamedTuple):
  """What a binding sets: a field of a class in a scope, or a macro."""

  scope: str
  name: str
  field: str

  def __str__(self) -> str:
    if self.name == _MACRO:
      return self.field
    return f"{f'{self.scope}/' if self.scope else ''}{self.name}.{self.field}"


class _Bound(NamedTuple):
  """A value and its place: "file:line" or the flag.

  `library` marks included files, which may state more than a run uses.
  """

  value: Any
  place: str
  library: bool


class _Settings:
  """The bindings of files and flags, and the config that is built from them.

  Mistakes are collected, so that the user sees all of them at once.
  """

  def __init__(
    self, config_class: type, search_paths: Sequence[str], commands: Mapping[str, str]
  ):
    self._root, self._commands = config_class.__name__, commands
    self._makers: dict[str, Callable[..., Any]] = dict(configs(config_class))
    self._folders = search_folders(search_paths)
    self._bound: dict[_Key, _Bound] = {}
    self._imports: list[str] = []
    self._problems: list[str] = []
    self._foreign: tuple[str, str] | None = None  # place and name of another's config
    self._scopes: dict[str, set[str]] = {}  # class name -> scopes it was made in
    self._macros: set[_Key] = set()  # macros that the build used

  # ---- Reading

  def read_file(self, name: str, library: bool, opened: tuple[Path, ...] = ()) -> None:
    """Reads a gin file and the files that it includes."""
    path = self._find(name)
    if path.resolve() in opened:
      raise ConfigError(f"gin file {name!r} includes itself.")
    for statement in _statements(_text(path), str(path)):
      place = f"{path}:{statement.location.line_num}"
      if isinstance(statement, config_parser.BindingStatement):
        self._bind(statement, place, library)
      elif isinstance(statement, config_parser.IncludeStatement):
        self.read_file(statement.filename, True, (*opened, path.resolve()))
      elif isinstance(statement, config_parser.ImportStatement):
        self._import(statement, place)

  def read_flag(self, binding: str) -> None:
    """Reads the "NAME=VALUE" of one flag."""
    flag = f"--gin.{binding}"
    for statement in _statements(binding, flag):
      if not isinstance(statement, config_parser.BindingStatement):
        raise ConfigError(f"{flag}: expected one --gin.NAME=VALUE.")
      self._bind(statement, flag, False)

  def _find(self, name: str) -> Path:
    paths = [folder / name for folder in self._folders]
    try:
      for path in paths:
        if path.is_file():
          return path
      folders = ", ".join(str(folder.absolute()) for folder in self._folders)
      what = "is a folder" if any(p.is_dir() for p in paths) else "not found"
      near = {
        str(Path(name).parent / path.name)
        for folder in self._folders
        for path in (folder / name).parent.glob("*.gin")
      }
      names = difflib.get_close_matches(name, near, 1, 0.8)
      meant = f"; did you mean {names[0]}?" if names else "."
      raise ConfigError(f"gin file {name!r} {what}; looked in {folders}{meant}")
    except OSError as error:
      raise ConfigError(f"gin file {name[:80]!r}: {error.strerror}.") from None

  def _bind(self, statement: Any, place: str, library: bool) -> None:
    scope, selector, field, value, _ = statement
    if field:
      key = _Key(scope, selector.rpartition(".")[2], field)
      if problem := self._unknown(key):
        if key.name in self._commands:
          self._foreign = self._foreign or (place, key.name)
        # A library may set configs of other commands, but not misspelt ones.
        close = difflib.get_close_matches(key.name, self._makers, 1, 0.85)
        if close or not library:
          self._problems.append(f"{place}: {key}: {problem}")
        return
    else:
      key = _Key("", _MACRO, f"{scope}/{selector}" if scope else selector)
    # gin.REQUIRED only marks a missing value; it does not remove one that is set.
    if value != _REQUIRED or key not in self._bound:
      self._bound[key] = _Bound(value, place, library)

  def _unknown(self, key: _Key) -> str:
    """Says why no field belongs to a key; "" if one does."""
    if key.name in self._makers:
      fields = _fields(self._makers[key.name])
      if key.field in fields:
        return ""
      return f"{key.name} has no field {key.field!r}{close(key.field, fields)}"
    return f"no config is called {key.name!r}{close(key.name, self._makers)}"

  def _import(self, statement: Any, place: str) -> None:
    """Makes the functions and classes of a user's module available as @NAME()."""
    if statement.module.startswith("__gin__"):
      raise ConfigError(f"{place}: configs are registered already; remove this line.")
    # `python -m` searches the current folder, a console script does not.
    if os.getcwd() not in sys.path:
      sys.path.append(os.getcwd())
    try:
      module = importlib.import_module(statement.module)
    except ImportError as error:
      raise ConfigError(f"{place}: {str(error).splitlines()[0]}") from None
    for name, value in vars(module).items():
      if callable(value) and getattr(value, "__module__", "") == module.__name__:
        self._makers[name] = value
    self._imports.append(statement.format())

  # ---- Building

  def build(self) -> Any:
    """Makes the config; raises ConfigError with every mistake found."""
    config = self._make(self._root, "")
    problems = self._problems or list(self._unused())
    if (
      problems and self._foreign and all(key.name != self._root for key in self._bound)
    ):
      # Every line of the file would be a mistake; this is the one that explains them.
      place, name = self._foreign
      command = f"osd {self._commands[name]}"
      problems = [f"{place}: {name} belongs to `{command}`; run `{command}` instead."]
    if problems:
      raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config

  def _make(self, name: str, scope: str) -> Any:
    """Calls a config class with the values that are bound in a scope."""
    # Needed by `_unused`: a binding has an effect if its class is made in its scope.
    self._scopes.setdefault(name, set()).add(scope)
    maker, arguments, before = self._makers[name], {}, len(self._problems)
    for field, is_required in _fields(maker).items():
      key = self._innermost(scope, name, field)
      if key in self._bound:
        arguments[field] = self._resolved(self._bound[key].value, scope, key)
      elif is_required:
        self._ask(key)
    if len(self._problems) > before:
      return None
    try:
      return maker(**arguments)
    except (ValueError, TypeError) as error:
      for line in str(error).splitlines():
        match = re.match(rf"{name}\.(\w+)", line)
        key = self._innermost(scope, name, match[1] if match else "")
        line = line if name in line else f"{name}: {line}"
        if "expected tuple[" in line:  # most often, a single entry without brackets
          line = f"{line[:-1]} (one entry is written [x])."
        self._problems.append(line + self._placed(key, scope))
    return None

  def _innermost(self, scope: str, name: str, field: str) -> _Key:
    """Returns the key that sets a field in a scope: of a/b, a/b wins over a."""
    # gin applies a binding of scope a to everything that is made inside a, as in a/b.
    parts = scope.split("/") if scope else []
    keys = [
      _Key("/".join(parts[:end]), name, field) for end in range(len(parts), -1, -1)
    ]
    return next((key for key in keys if key in self._bound), keys[0])

  def _resolved(self, value: Any, scope: str, key: _Key) -> Any:
    """Replaces the references in a value by configs and values of macros."""
    if value == _REQUIRED:
      return self._ask(key)
    if not isinstance(value, _Reference):
      if isinstance(value, list | tuple):
        return tuple(self._resolved(part, scope, key) for part in value)
      return value
    if value.sign == "%":
      macro = _Key("", _MACRO, value.name)
      if macro in self._bound:
        self._macros.add(macro)
        return self._resolved(self._bound[macro].value, scope, macro)
      names = [k.field for k in self._bound if k.name == _MACRO]
      problem = f"{value} has no value{close(value.name, names)}"
    else:
      inner, _, name = value.name.rpartition("/")
      name = name.rpartition(".")[2]
      if name not in self._makers:
        problem = f"@{value.name}: no config is called {name!r}"
        problem += close(name, self._makers)
      elif value.is_call:
        # A reference without a scope inherits the scope in which it is used, as in gin.
        return self._make(name, inner or scope)
      elif not isinstance(self._makers[name], type):
        return self._makers[name]  # a function of the user's, as a divergence
      else:
        problem = f"{key}: received {value}; a config is made by {value}()."
    return self._problems.append(f"{self._bound[key].place}: {problem}")

  def _ask(self, key: _Key) -> None:
    """Notes that a required value is missing."""
    kinds = [] if key.name == _MACRO else _kinds(self._makers[key.name], key.field)
    example = f"@{kinds[0].__name__}()" if kinds else "VALUE"
    self._problems.append(
      f"{key} needs a value: in a gin file, or --gin.{key}={example}"
      + self._placed(key, "")
    )

  def _placed(self, key: _Key, scope: str) -> str:
    """Returns where a value is stated; the place of the macro if it is one."""
    if key not in self._bound:
      return f" [scope {scope}]" if scope else ""
    binding = self._bound[key]
    if isinstance(binding.value, _Reference) and binding.value.sign == "%":
      macro = _Key("", _MACRO, binding.value.name)
      if macro in self._bound:
        return self._placed(macro, scope)
    return f" [{binding.place}]"

  # ---- Unused settings, and the text of the used ones

  def _is_used(self, key: _Key) -> bool:
    """Whether the build made the class in the binding's scope or inside it."""
    if key.name == _MACRO:
      return key in self._macros
    scopes = self._scopes.get(key.name, ())
    return any(
      f"{name}/".startswith(f"{key.scope}/") or not key.scope for name in scopes
    )

  def _unused(self) -> Iterator[str]:
    """Yields a line for each flag without effect and for the first in each file."""
    # One line per file: a file for another command would otherwise fill the screen.
    places: set[str] = set()
    for key, (_, place, library) in self._bound.items():
      is_flag = place.startswith("--")
      where = place if is_flag else place.rpartition(":")[0]
      # Files may state macros that only some of their readers use.
      is_spare = library or (key.name == _MACRO and not is_flag)
      if is_spare or where in places or self._is_used(key):
        continue
      places.add(where)
      if key.name == _MACRO:
        names = [macro.field for macro in self._macros]
        yield f"{place}: no setting uses %{key.field}{close(key.field, names)}"
        continue
      call = f"@{key.scope}/{key.name}()" if key.scope else f"@{key.name}()"
      line = f"{place}: {key} has no effect, since nothing is made by {call}"
      holders = [
        f"{holder}.{field} = {call}"
        for holder, maker in self._makers.items()
        for field in _fields(maker)
        if key.name in [kind.__name__ for kind in _kinds(maker, field)]
      ]
      yield line + (f"; write {' or '.join(holders)}." if holders else ".")

  def text(self, config: Any) -> str:
    """Returns the settings in use as gin text, with all fields as comments."""
    bindings = [key for key in self._bound if self._is_used(key)]
    bindings.sort(key=lambda key: (key.name != _MACRO, key.name, key.scope, key.field))
    lines = [
      *self._imports,
      *(f"{key} = {self._bound[key].value!r}" for key in bindings),
    ]
    lines += ["", "# Every field, defaults included:"]
    lines += [f"#   {name} = {x!r}" for name, x in values(self._root, config)]
    return "\n".join(lines) + "\n"


def _fields(maker: Callable[..., Any]) -> dict[str, bool]:
  """Returns whether each argument of a config class or function is required."""
  parameters = inspect.signature(maker).parameters.values()
  return {x.name: x.default is inspect.Parameter.empty for x in parameters}


def _kinds(maker: Any, field: str) -> list[type]:
  """Returns the config classes that a field of a config takes."""
  from osd_jax import base  # imports jax, which `osd --help` does without

  is_config = dataclasses.is_dataclass(maker)
  return _in(base.field_types(maker)[field]) if is_config else []


def _in(hint: Any) -> list[type]:
  """Returns the config classes that a type names."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    # Configs compare by value; loaded models, which Python may pass instead, do not.
    return [hint] if hint.__eq__ is not object.__eq__ else []
  return [config for inner in typing.get_args(hint) for config in _in(inner)]


def _text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ConfigError(
      f"gin file {str(path)!r} is not UTF-8 (byte {error.start}); save it as UTF-8."
    ) from None
  except OSError as error:
    raise ConfigError(f"gin file {str(path)!r}: {error.strerror}.") from None


def close(name: str, candidates: Iterable[str]) -> str:
  """Returns the end of a sentence about an unknown name: what may have been meant."""
  candidates = sorted(set(candidates))
  if close := difflib.get_close_matches(name, candidates, 3, 0.5):
    return f"; did you mean {' or '.join(close)}?"
  return f"; known: {', '.join(candidates)}." if candidates else "."


def _statements(text: str, name: str) -> Iterator[Any]:
  """Yields the statements of a gin text; raises ConfigError with the line at fault."""
  try:
    yield from config_parser.ConfigParser(text, _Delegate())
  except ConfigError:
    raise
  except (SyntaxError, tokenize.TokenError) as error:
    raise ConfigError(_syntax(error, name, text)) from None
  except (TypeError, ValueError) as error:  # {[]: 0}, or thousands of digits
    message = " ".join(str(error).split())
    raise ConfigError(f"{name}: cannot be read: {message}") from None


def _syntax(error: Exception, name: str, text: str) -> str:
  """Describes a syntax error in one line."""
  cause = str(error.args[0]).splitlines()[-1].strip()
  line = getattr(error, "lineno", None) or error.args[1][0]
  excerpt = "".join(text.splitlines()[line - 1 : line]).strip()
  if word := re.search(r"Failed to parse token '(.*)'", cause):
    cause = f"text needs quotes: '\"{word[1]}\"'"
    if excerpt.startswith(word[1]):  # the next setting was read as part of a value
      cause = "a bracket above this line is not closed"
  elif cause == "Unable to parse value.":
    cause = "the value is missing or is not a Python literal"
  elif isinstance(error, tokenize.TokenError):  # it names the end of the file
    cause = f"a {'text' if 'string' in cause else 'bracket'} is never closed"
  place = name if name.startswith("--") else f"{name}:{line}"
  return f"{place}: cannot read `{excerpt[:80]}`: {cause.rstrip('.')}."
