"""Gin files and flags, read into the config of a command."""

import dataclasses
import difflib
import re
import tokenize
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

import osd_jax
from osd_jax.main import factory, fields


class ConfigError(ValueError):
  """Settings that make no config; the text is meant for the user, a line a mistake."""


def load(
  config_class: type,
  files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
) -> tuple[Any, str]:
  """Makes a config.

  Args:
    config_class: a frozen dataclass of plain values and such dataclasses.
    files: gin files, later ones win.
    bindings: "NAME=VALUE" each; they win over files.
    search_paths: folders to look for files in, after the current one.

  Returns:
    The config, and gin text that makes it again: all settings that it was made
    from, and as comments every field with its value.

  Raises:
    ConfigError: a line for each mistake.
  """
  gin.clear_config()
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
  """Folders in which gin files are looked for, in this order."""
  # A link in a checkout, a folder in a wheel; printed paths shall be those to edit.
  shipped = (Path(osd_jax.__file__).parent / "gin_configs").resolve()
  return [Path(), *map(Path, search_paths), shipped, shipped.parent]


@dataclasses.dataclass(frozen=True)
class _Bound:
  """A value and where it is stated.

  Attributes:
    value: as parsed, references unresolved.
    place: "file:line" or the flag.
    library: stated in an included file, which may state more than is used.
  """

  value: Any
  place: str
  library: bool


class _Settings:
  """What files and flags bind, until it is built. One at a time: gin is global."""

  def __init__(self, config_class: type, search_paths: Sequence[str]):
    self._factories = {f.selector: f for f in factory.reachable(config_class)}
    self._root = factory.of(config_class)
    self._folders = search_folders(search_paths)
    self._bound: dict[tuple[str, str, str], _Bound] = {}
    self._imports: list[str] = []

  def read_file(self, name: str, library: bool, opened: tuple[Path, ...] = ()) -> None:
    """Reads a gin file and what it includes."""
    path = self._find(name)
    if path.resolve() in opened:
      raise ConfigError(f"gin file {name!r} includes itself.")
    opened = (*opened, path.resolve())
    for statement in self._statements(_text(path), str(path)):
      place = f"{path}:{statement.location.line_num}"
      if isinstance(statement, config_parser.BindingStatement):
        self._bind(statement, place, library)
      elif isinstance(statement, config_parser.IncludeStatement):
        self.read_file(statement.filename, True, opened)
      elif isinstance(statement, config_parser.ImportStatement):
        self._import(statement, place)

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

  def read_flag(self, binding: str) -> None:
    """Reads the "NAME=VALUE" of one flag."""
    flag = f"--gin.{binding}"
    for statement in self._statements(binding, flag):
      if not isinstance(statement, config_parser.BindingStatement):
        raise ConfigError(f"{flag}: expected one --gin.NAME=VALUE.")
      self._bind(statement, flag, False)

  def build(self) -> Any:
    """Calls the root config; raises ConfigError with every mistake found."""
    problems = [*self._undefined_macros()]
    if not problems:
      for known in self._factories.values():
        known.scopes.clear()
        known.problems.clear()
      config = self._root.configurable()
      problems = [
        self._located(p) for f in self._factories.values() for p in f.problems
      ]
    if not problems:
      problems = [*self._unused()]
    if problems:
      raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config

  def text(self, config: Any) -> str:
    """Gin text of the settings in use, with all fields as comments."""
    gin.clear_config()
    gin.parse_config(self._imports)
    used = {key for key in self._bound if self._is_used(key)}
    while grown := self._macros(used) - used:
      used |= grown
    for key in used:
      gin.bind_parameter(key, self._bound[key].value)
    values = fields.values(type(config).__name__, config)
    lines = [f"#   {name} = {value!r}" for name, value in values]
    comments = "\n".join(["# Every field, defaults included:", *lines])
    return f"{gin.config_str()}\n{comments}\n"

  def _statements(self, text: str, name: str) -> Iterator[Any]:
    delegate = _Delegate({f.name for f in self._factories.values()})
    try:
      yield from config_parser.ConfigParser(text, delegate)
    except ConfigError as error:  # gin has added the line to it
      line = re.search(r"\n  In .*line (\d+)", str(error))
      place = name if name.startswith("--") or not line else f"{name}:{line[1]}"
      raise ConfigError(f"{place}: {str(error).splitlines()[0]}") from None
    except (SyntaxError, tokenize.TokenError) as error:
      raise ConfigError(_syntax(error, name)) from None
    except (TypeError, ValueError) as error:  # {[]: 0}, or thousands of digits
      raise ConfigError(f"{name}: no value: {' '.join(str(error).split())}") from None

  def _bind(
    self, statement: config_parser.BindingStatement, place: str, library: bool
  ) -> None:
    scope, selector, field, value, _ = statement
    if _has_reference_as_key(value):
      raise ConfigError(f"{place}: a reference is no key of a dict; write its value.")
    if not field:
      key = (f"{scope}/{selector}" if scope else selector, _MACRO, "value")
    else:
      key = (scope, self._selector(selector, field, place), field)
    if repr(value) == _REQUIRED and key in self._bound:
      return  # asks for a value, and there is one
    self._bound[key] = _Bound(value, place, library)
    gin.bind_parameter(key, value)

  def _selector(self, selector: str, field: str, place: str) -> str:
    """Full name of a config class whose field is bound, or of what an import made."""
    for known in self._factories.values():
      if f".{known.selector}".endswith(f".{selector}"):
        if field in known.hints:
          return known.selector
        problem = f"{known.name} has no field {field!r}"
        raise ConfigError(
          f"{place}: {selector}.{field}: {problem}{_close(field, known.hints)}"
        )
    try:
      return gin.config.ParsedBindingKey.parse(("", selector, field)).complete_selector
    except (ValueError, KeyError):
      names = [known.name for known in self._factories.values()]
      raise ConfigError(
        f"{place}: {selector}.{field}: no config is called {selector!r}"
        + _close(selector, names)
      ) from None

  def _import(self, statement: config_parser.ImportStatement, place: str) -> None:
    if statement.module.startswith("__gin__"):
      raise ConfigError(f"{place}: configs are registered already; remove this line.")
    try:
      gin.parse_config(statement.format())
    except ImportError as error:
      raise ConfigError(f"{place}: {str(error).splitlines()[0]}") from None
    self._imports.append(statement.format())

  def _macros(self, keys: Iterable[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """Keys of the macros that the values of some keys name."""
    values = [self._bound[key].value for key in keys if key in self._bound]
    references = gin.config.iterate_references(values)
    return {(*ref.config_key, "value") for ref in references if _is_macro(ref)}

  def _undefined_macros(self) -> Iterator[str]:
    defined = [key[0] for key in self._bound if key[1] == _MACRO]
    for key, bound in self._bound.items():
      for name, _, _ in self._macros([key]):
        if name not in defined:
          yield f"{bound.place}: %{name} has no value{_close(name, defined)}"

  def _is_used(self, key: tuple[str, str, str]) -> bool:
    """Whether the build called the class in the binding's scope or inside it."""
    scope, selector, _ = key
    if selector not in self._factories:
      return selector != _MACRO
    called = self._factories[selector].scopes
    return (
      not scope
      and bool(called)
      or any(f"{name}/".startswith(f"{scope}/") for name in called)
    )

  def _unused(self) -> Iterator[str]:
    """Bindings without effect: mistakes, but for those of an included library.

    Yields:
      A line for each flag, and for the first such binding of a file.
    """
    named = self._macros(self._bound)
    files: dict[str, list[tuple[str, str, str]]] = {}
    for key, bound in self._bound.items():
      if bound.library or self._is_used(key) or key in named:
        continue
      if bound.place.startswith("--") and key[1] == _MACRO:
        names = [name for name, _, _ in named]
        yield f"{bound.place}: no setting uses %{key[0]}{_close(key[0], names)}"
      elif bound.place.startswith("--"):
        yield f"{bound.place}: {self._without_effect(key)}."
      elif key[1] != _MACRO:
        files.setdefault(bound.place.rpartition(":")[0], []).append(key)
    for keys in files.values():
      more = f" (and {len(keys) - 1} more in this file)" if keys[1:] else ""
      place, problem = self._bound[keys[0]].place, self._without_effect(keys[0])
      yield f"{place}: {problem}; or include the file if it is a library{more}."

  def _without_effect(self, key: tuple[str, str, str]) -> str:
    scope, selector, field = key
    name = self._factories[selector].name
    call = f"@{scope}/{name}()" if scope else f"@{name}()"
    holders = " or ".join(self._holders(selector, call))
    return (
      f"{_key(scope, name, field)} has no effect, since nothing is made by {call};"
      f" write {holders}"
    )

  def _holders(self, selector: str, call: str) -> Iterator[str]:
    """Bindings that would call a config class."""
    for known in self._factories.values():
      for field, hint in known.hints.items():
        if any(factory.of(c).selector == selector for c in factory.classes(hint)):
          several = typing.get_origin(hint) is tuple
          yield f"{known.name}.{field} = {f'[{call}]' if several else call}"

  def _located(self, problem: factory.Problem) -> str:
    """A mistake with the place of the binding that made it."""
    parts = problem.scope.split("/") if problem.scope else []
    scopes = ["/".join(parts[:end]) for end in range(len(parts), -1, -1)]
    keys = [(scope, problem.factory.selector, problem.field) for scope in scopes]
    key = self._origin(next((key for key in keys if key in self._bound), keys[0]))
    place = f" [{self._bound[key].place}]" if key in self._bound else ""
    if problem.text:
      scope = f" [scope {problem.scope}]" if problem.scope and not place else ""
      return problem.text + place + scope
    name = _key(key[0], problem.factory.name, problem.field)
    name = key[0] if key[1] == _MACRO else name
    kinds = list(factory.classes(problem.factory.hints[problem.field]))
    value = f"@{kinds[0].__name__}()" if kinds else "VALUE"
    return f"{name} needs a value: in a gin file, or --gin.{name}={value}{place}"

  def _origin(self, key: tuple[str, str, str]) -> tuple[str, str, str]:
    """The macro that a value comes from, where it is one or lacks one."""
    for macro in sorted(self._macros([key])):
      origin = self._origin(macro)
      if repr(self._bound[key].value)[0] == "%" or self._asks(origin):
        return origin
    return key

  def _asks(self, key: tuple[str, str, str]) -> bool:
    return repr(self._bound[key].value) == _REQUIRED


_MACRO = "gin.macro"
_REQUIRED = "%gin.REQUIRED"


class _Delegate(gin.config.ParserDelegate):
  """Makes references; names what is close to one that is unknown."""

  def __init__(self, names: Iterable[str]):
    super().__init__()
    self._names = names

  def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Any:
    try:
      return super().configurable_reference(scoped_selector, evaluate)
    except (ValueError, KeyError):
      name = scoped_selector.rpartition("/")[2]
      raise ConfigError(
        f"@{scoped_selector}: no config is called {name!r}{_close(name, self._names)}"
      ) from None


def _text(path: Path) -> str:
  """Text of a file.

  Raises:
    ConfigError: it cannot be read, or is not UTF-8.
  """
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ConfigError(
      f"gin file {str(path)!r} is no text: not UTF-8 at byte {error.start}; save it"
      " as UTF-8."
    ) from None
  except OSError as error:
    raise ConfigError(f"gin file {str(path)!r}: {error.strerror}.") from None


def _is_macro(reference: Any) -> bool:
  return reference.config_key[1] == _MACRO


def _has_reference_as_key(value: Any) -> bool:
  """Whether gin would have to resolve a key of a dict, where it looks for none."""
  if isinstance(value, dict):
    keys = gin.config.iterate_references(list(value))
    return any(True for _ in keys) or any(map(_has_reference_as_key, value.values()))
  return isinstance(value, list | tuple) and any(map(_has_reference_as_key, value))


def _key(scope: str, name: str, field: str) -> str:
  return f"{scope}/{name}.{field}" if scope else f"{name}.{field}"


def _close(name: str, known: Iterable[str]) -> str:
  known = sorted(set(known))
  close = difflib.get_close_matches(name, known, 3, 0.5)
  if close:
    return f"; did you mean {' or '.join(close)}?"
  return f"; known: {', '.join(known)}." if known else "."


def _syntax(error: Exception, name: str) -> str:
  """A syntax error on one line; text without quotes is the usual one."""
  message = str(error.args[0])
  line = getattr(error, "lineno", None) or (error.args[1:] or [[0]])[0][0]
  place = name if name.startswith("--") else f"{name}:{line}"
  word = re.search(r"Failed to parse token '(.*)'", message)
  if word:
    return f"{place}: cannot read {word[1]}; text needs quotes: '\"{word[1]}\"'"
  return f"{place}: {message.splitlines()[0]}"
