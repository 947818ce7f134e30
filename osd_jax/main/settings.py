"""Gin files and flags, read into the config of a command.

gin only parses here. The configs are built by walking the fields of the command's
config class, so every mistake is reported with the line that made it, and config
classes need to know nothing of gin.
"""

import dataclasses
import difflib
import importlib
import inspect
import re
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
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
) -> tuple[Any, str]:
  """Makes a config.

  Args:
    config_class: a `base.Config` of plain values and other configs.
    files: gin files; later ones win.
    bindings: "NAME=VALUE" each; they win over files.
    search_paths: folders that are searched for files after the current folder.

  Returns:
    The config, and gin text that makes it again: all settings in use, and as comments
    every field with its value.

  Raises:
    ConfigError: one line per mistake.
  """
  read = _Settings(config_class, search_paths)
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

  found: dict[str, type] = {}
  # Breadth first, so that `--help_config` lists the command's own config first.
  waiting = [config_class]
  while waiting:
    current = waiting.pop(0)
    if current.__name__ not in found:
      found[current.__name__] = current
      waiting += [c for hint in base.field_types(current).values() for c in _in(hint)]
  return found


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


class _Failed:
  """Marks a config or value that could not be made."""


class _Settings:
  """The bindings of files and flags, and the config that is built from them."""

  def __init__(self, config_class: type, search_paths: Sequence[str]):
    self._root = config_class.__name__
    self._makers: dict[str, Callable[..., Any]] = dict(configs(config_class))
    self._folders = search_folders(search_paths)
    self._bound: dict[_Key, _Bound] = {}
    self._imports: list[str] = []
    self._problems: list[str] = []
    self._scopes: dict[str, set[str]] = {}  # class name -> scopes it was made in
    self._macros: set[_Key] = set()  # macros that the build used

  # ---- Reading

  def read_file(self, name: str, library: bool, opened: tuple[Path, ...] = ()) -> None:
    """Reads a gin file and the files that it includes."""
    path = self._find(name)
    if path.resolve() in opened:
      raise ConfigError(f"gin file {name!r} includes itself.")
    for statement in self._statements(_text(path), str(path)):
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
    for statement in self._statements(binding, flag):
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
      raise ConfigError(f"gin file {name!r} {what}; looked in {folders}.")
    except OSError as error:
      raise ConfigError(f"gin file {name[:80]!r}: {error.strerror}.") from None

  def _statements(self, text: str, name: str) -> Iterator[Any]:
    try:
      yield from config_parser.ConfigParser(text, _Delegate())
    except (SyntaxError, tokenize.TokenError) as error:
      raise ConfigError(_syntax(error, name)) from None
    except (TypeError, ValueError) as error:  # {[]: 0}, or thousands of digits
      if isinstance(error, ConfigError):
        raise
      message = " ".join(str(error).split())
      raise ConfigError(f"{name}: cannot be read: {message}") from None

  def _bind(self, statement: Any, place: str, library: bool) -> None:
    scope, selector, field, value, _ = statement
    if field:
      key = _Key(scope, selector.rpartition(".")[2], field)
      if problem := self._unknown(key):
        # A library may set configs of other commands, but not misspelt ones.
        close = difflib.get_close_matches(key.name, self._makers, 1, 0.85)
        if close or not library:
          # Mistakes are collected and not raised, so that the user sees all of them at
          # once.
          self._problems.append(f"{place}: {key}: {problem}")
        return
    else:
      key = _Key("", _MACRO, f"{scope}/{selector}" if scope else selector)
    # gin.REQUIRED only marks a missing value; it does not remove one that is set.
    if value != _REQUIRED or key not in self._bound:
      self._bound[key] = _Bound(value, place, library)

  def _unknown(self, key: _Key) -> str:
    """Says why no field belongs to a key; "" if one does."""
    if key.name not in self._makers:
      return f"no config is called {key.name!r}{_close(key.name, self._makers)}"
    fields = _fields(self._makers[key.name])
    if key.field not in fields:
      return f"{key.name} has no field {key.field!r}{_close(key.field, fields)}"
    return ""

  def _import(self, statement: Any, place: str) -> None:
    """Makes the functions and classes of a user's module available as @NAME()."""
    if statement.module.startswith("__gin__"):
      raise ConfigError(f"{place}: configs are registered already; remove this line.")
    try:
      module = importlib.import_module(statement.module)
    except ImportError as error:
      raise ConfigError(f"{place}: {str(error).splitlines()[0]}") from None
    for name, made in vars(module).items():
      if callable(made) and getattr(made, "__module__", "") == module.__name__:
        self._makers[name] = made
    self._imports.append(statement.format())

  # ---- Building

  def build(self) -> Any:
    """Makes the config; raises ConfigError with every mistake found."""
    config = self._make(self._root, "")
    self._problems = self._problems or list(self._unused())
    if self._problems:
      raise ConfigError("\n".join(dict.fromkeys(self._problems)))
    return config

  def _make(self, name: str, scope: str) -> Any:
    """Calls a config class with the values that are bound in a scope."""
    # Needed by `_unused`: a binding has an effect if its class is made in its scope.
    self._scopes.setdefault(name, set()).add(scope)
    maker, arguments = self._makers[name], {}
    # All fields are read first, so that every mistake is listed.
    # With a bad field the constructor would only report the same mistake again.
    before = len(self._problems)
    for field, (hint, is_required) in _fields(maker).items():
      key = self._innermost(scope, name, field)
      if key not in self._bound:
        if is_required:
          self._ask(key, hint)
        continue
      value = self._resolved(self._bound[key].value, scope, key, hint)
      if dataclasses.is_dataclass(maker) and not _has_failed(value):
        self._check(maker, field, value, key)
      arguments[field] = value
    if self._problems[before:] or any(map(_has_failed, arguments.values())):
      return _Failed
    try:
      return maker(**arguments)
    except (ValueError, TypeError) as error:
      for line in str(error).splitlines():
        named = re.match(rf"{name}\.(\w+)", line)
        key = self._innermost(scope, name, named[1] if named else "")
        line = line if name in line else f"{name}: {line}"
        self._problems.append(line + self._placed(key, scope))
      return _Failed

  def _innermost(self, scope: str, name: str, field: str) -> _Key:
    """Returns the key that sets a field in a scope: of a/b, a/b wins over a."""
    # gin applies a binding of scope a to everything that is made inside a, as in a/b.
    parts = scope.split("/") if scope else []
    keys = [
      _Key("/".join(parts[:end]), name, field) for end in range(len(parts), -1, -1)
    ]
    return next((key for key in keys if key in self._bound), keys[0])

  def _resolved(self, value: Any, scope: str, key: _Key, hint: Any) -> Any:
    """Replaces the references in a value by configs and values of macros."""
    if value == _REQUIRED:
      self._ask(key, hint)
      return _Failed
    if isinstance(value, _Reference):
      return self._referenced(value, scope, key, hint)
    if isinstance(value, list | tuple):
      # Lists become tuples, because configs must be hashable.
      return tuple(self._resolved(part, scope, key, hint) for part in value)
    return value

  def _referenced(self, value: _Reference, scope: str, key: _Key, hint: Any) -> Any:
    if value.sign == "%":
      macro = _Key("", _MACRO, value.name)
      if macro in self._bound:
        self._macros.add(macro)
        return self._resolved(self._bound[macro].value, scope, macro, hint)
      known = [k.field for k in self._bound if k.name == _MACRO]
      problem = f"{value} has no value{_close(value.name, known)}"
    else:
      inner, _, name = value.name.rpartition("/")
      name = name.rpartition(".")[2]
      if name in self._makers and value.is_call:
        # A reference without a scope inherits the scope in which it is used, as in gin.
        return self._make(name, inner or scope)
      problem = f"@{value.name}: no config is called {name!r}"
      problem += _close(name, self._makers)
      if name in self._makers:
        if not isinstance(self._makers[name], type):
          return self._makers[name]  # a function of the user's, as a divergence
        problem = f"{key}: received {value}; a config is made by {value}()."
    self._problems.append(f"{self._bound[key].place}: {problem}")
    return _Failed

  def _check(self, maker: Any, field: str, value: Any, key: _Key) -> None:
    from osd_jax import base  # imports jax, which `osd --help` does without

    if problem := base.field_problem(maker, field, value):
      kind = base.type_text(base.field_types(maker)[field])
      # The most common slip is a single entry without brackets.
      if kind.startswith("tuple") and not isinstance(value, tuple):
        problem = f"{problem[:-1]} (one entry is written [x])."
      self._problems.append(problem + self._placed(key, key.scope))

  def _ask(self, key: _Key, hint: Any) -> None:
    """Notes that a required value is missing."""
    kinds = _in(hint)
    example = f"@{kinds[0].__name__}()" if kinds else "VALUE"
    self._problems.append(
      f"{key} needs a value: in a gin file, or --gin.{key}={example}"
      + self._placed(key, "")
    )

  def _placed(self, key: _Key, scope: str) -> str:
    """Returns where a value is stated; the place of the macro if it is one."""
    if key not in self._bound:
      return f" [scope {scope}]" if scope else ""
    bound = self._bound[key]
    if isinstance(bound.value, _Reference) and bound.value.sign == "%":
      macro = _Key("", _MACRO, bound.value.name)
      if macro in self._bound:
        return self._placed(macro, scope)
    return f" [{bound.place}]"

  # ---- Unused settings, and the text of the used ones

  def _is_used(self, key: _Key) -> bool:
    """Whether the build made the class in the binding's scope or inside it."""
    if key.name == _MACRO:
      return key in self._macros
    made = self._scopes.get(key.name, ())
    return any(f"{name}/".startswith(f"{key.scope}/") or not key.scope for name in made)

  def _unused(self) -> Iterator[str]:
    """Yields a line for each flag, and for each file's first binding, without effect.

    Included files are libraries: they may state more than a run uses.
    """
    # One line per file: a file for another command would otherwise fill the screen.
    files: dict[str, list[_Key]] = {}
    for key, bound in self._bound.items():
      if bound.library or self._is_used(key):
        continue
      is_flag = bound.place.startswith("--")
      if key.name != _MACRO:
        where = bound.place if is_flag else bound.place.rpartition(":")[0]
        files.setdefault(where, []).append(key)
      elif is_flag:
        known = [macro.field for macro in self._macros]
        yield f"{bound.place}: no setting uses %{key.field}{_close(key.field, known)}"
    for first, *others in files.values():
      place, call = self._bound[first].place, f"@{first.name}()"
      call = f"@{first.scope}/{first.name}()" if first.scope else call
      holders = " or ".join(self._holders(first.name, call))
      line = f"{place}: {first} has no effect, since nothing is made by {call}"
      line += f"; write {holders}" if holders else ""
      if not place.startswith("--"):
        line += "; or include the file if it is a library"
      yield line + (f" (and {len(others)} more in this file)." if others else ".")

  def _holders(self, name: str, call: str) -> Iterator[str]:
    """Yields the bindings that would make a config."""
    for holder, maker in self._makers.items():
      for field, (hint, _) in _fields(maker).items():
        if any(made.__name__ == name for made in _in(hint)):
          several = typing.get_origin(hint) is tuple
          yield f"{holder}.{field} = {f'[{call}]' if several else call}"

  def text(self, config: Any) -> str:
    """Returns the settings in use as gin text, with all fields as comments."""
    used = [key for key in self._bound if self._is_used(key)]
    used.sort(key=lambda key: (key.name != _MACRO, key.name, key.scope, key.field))
    lines = [*self._imports, *(f"{key} = {self._bound[key].value!r}" for key in used)]
    lines += ["", "# Every field, defaults included:"]
    lines += [f"#   {name} = {x!r}" for name, x in values(self._root, config)]
    return "\n".join(lines) + "\n"


def _fields(maker: Any) -> dict[str, tuple[Any, bool]]:
  """Returns (type, whether it is required) of the arguments of a class or function."""
  if not dataclasses.is_dataclass(maker):
    parameters = inspect.signature(maker).parameters.values()
    return {x.name: (Any, x.default is inspect.Parameter.empty) for x in parameters}
  from osd_jax import base  # imports jax, which `osd --help` does without

  hints, missing = base.field_types(maker), dataclasses.MISSING
  return {
    field.name: (
      hints[field.name],
      field.default is missing and field.default_factory is missing,
    )
    for field in dataclasses.fields(maker)
  }


def _in(hint: Any) -> list[type]:
  """Returns the config classes that a type names."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return [hint]
  return [found for inner in typing.get_args(hint) for found in _in(inner)]


def _has_failed(value: Any) -> bool:
  if isinstance(value, tuple):
    return any(map(_has_failed, value))
  return value is _Failed


def _text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ConfigError(
      f"gin file {str(path)!r} is not UTF-8 (byte {error.start}); save it as UTF-8."
    ) from None
  except OSError as error:
    raise ConfigError(f"gin file {str(path)!r}: {error.strerror}.") from None


def _close(name: str, known: Iterable[str]) -> str:
  known = sorted(set(known))
  if close := difflib.get_close_matches(name, known, 3, 0.5):
    return f"; did you mean {' or '.join(close)}?"
  return f"; known: {', '.join(known)}." if known else "."


def _syntax(error: Exception, name: str) -> str:
  """Describes a syntax error in one line; most often, a text lacks its quotes."""
  message = str(error.args[0])
  line = getattr(error, "lineno", None) or (error.args[1:] or [[0]])[0][0]
  place = name if name.startswith("--") else f"{name}:{line}"
  if word := re.search(r"Failed to parse token '(.*)'", message):
    return f"{place}: cannot read {word[1]}; text needs quotes: '\"{word[1]}\"'"
  return f"{place}: {message.splitlines()[0]}"
