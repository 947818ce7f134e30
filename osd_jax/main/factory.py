"""Config classes as gin calls them: found by their fields, checked, then called."""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import gin


@dataclasses.dataclass(frozen=True)
class Problem:
  """A mistake in a field.

  Attributes:
    factory: whose field.
    scope: the gin scope it was called in.
    field: name of the field, "" if unknown.
    text: what is wrong; "" if the value is missing.
  """

  factory: "Factory"
  scope: str
  field: str
  text: str = ""


class Factory:
  """What gin calls in place of a config class. Made by `of`.

  It never raises for bad values but notes them, so that one run of the command
  names all of them.

  Attributes:
    name: of the class.
    selector: name with its module, as gin knows it.
    config_class: what it makes.
    hints: type of each field.
    configurable: calls the class with the bound values.
    scopes: gin scopes that it was called in.
    problems: what it found wrong.
  """

  def __init__(self, config_class: type):
    self.name = config_class.__name__
    self.selector = f"{config_class.__module__}.{self.name}"
    self.config_class = config_class
    self.hints = hints(config_class)
    self.scopes: set[str] = set()
    self.problems: list[Problem] = []
    keyword = inspect.Parameter.KEYWORD_ONLY
    self.__signature__ = inspect.Signature(
      [inspect.Parameter(field, keyword) for field in self.hints]
    )
    self.configurable: Callable[[], Any] = gin.external_configurable(
      self, self.name, config_class.__module__
    )

  def __call__(self, **values: Any) -> Any:
    """Returns the config, or a stand-in if there were problems here or inside."""
    scope = "/".join(gin.current_scope())
    self.scopes.add(scope)
    values = {field: _as_tuples(value) for field, value in values.items()}
    problems = list(self._check(values))
    if not problems and not any(map(_has_failed, values.values())):
      try:
        return self.config_class(**values)
      except (ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        named = re.match(rf"{self.name}\.(\w+)", text)
        text = text if self.name in text else f"{self.name}: {text}"
        problems = [(named[1] if named else "", text)]
    self.problems += [Problem(self, scope, *problem) for problem in problems]
    return _FAILED

  def _check(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(self.config_class):
      value = values.get(field.name, dataclasses.MISSING)
      optional = {field.default, field.default_factory} != {dataclasses.MISSING}
      if _asks(value) or (value is dataclasses.MISSING and not optional):
        yield field.name, ""
      elif value is not dataclasses.MISSING:
        hint = self.hints[field.name]
        if not _has_failed(value) and not _fits(value, hint):
          yield (
            field.name,
            (
              f"{self.name}.{field.name}: received {value!r}, expected"
              f" {hint_text(hint)}{_advice(value, hint)}."
            ),
          )


@functools.cache
def of(config_class: type) -> Factory:
  """The factory of a config class, registered with gin at the first call."""
  return Factory(config_class)


def reachable(config_class: type) -> list[Factory]:
  """Factories of a config class, of those of its fields, and of theirs."""
  factories: dict[type, Factory] = {}
  waiting = [config_class]
  while waiting:
    current = waiting.pop(0)
    if current not in factories:
      factories[current] = of(current)
      for hint in hints(current).values():
        waiting.extend(classes(hint))
  return list(factories.values())


def classes(hint: Any) -> Iterator[type]:
  """Config classes that a type names."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    yield hint
  for inner in typing.get_args(hint):
    yield from classes(inner)


def hints(config_class: type) -> dict[str, Any]:
  """Type of each field of a config class."""
  of_all = typing.get_type_hints(config_class)
  return {f.name: of_all[f.name] for f in dataclasses.fields(config_class)}


def hint_text(hint: Any) -> str:
  """A type as it is written, without modules."""
  if isinstance(hint, type) and not typing.get_args(hint):
    return hint.__name__
  return re.sub(r"\b[a-z_]\w*\.(?=\w)", "", str(hint))


_FAILED = object()  # stands for a config that could not be made


def _as_tuples(value: Any) -> Any:
  if isinstance(value, list | tuple):
    return tuple(map(_as_tuples, value))
  return value


def _asks(value: Any) -> bool:
  if isinstance(value, tuple):
    return any(map(_asks, value))
  return value is gin.REQUIRED


def _has_failed(value: Any) -> bool:
  if isinstance(value, tuple):
    return any(map(_has_failed, value))
  return value is _FAILED


def _fits(value: Any, hint: Any) -> bool:
  """Whether a value is of a type, as configs write types."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(_fits(value, part) for part in inner)
  if origin is tuple:
    if not isinstance(value, tuple):
      return False
    kinds = inner[:1] * len(value) if inner[-1:] == (...,) else inner
    return len(value) == len(kinds) and all(map(_fits, value, kinds))
  if hint in (int, float):
    numbers = (int, float) if hint is float else int
    return isinstance(value, numbers) and not isinstance(value, bool)
  return not isinstance(hint, type) or isinstance(value, hint)


def _advice(value: Any, hint: Any) -> str:
  if callable(value):
    return " (a reference that makes a config ends in parentheses: @NAME())"
  if typing.get_origin(hint) is tuple and not isinstance(value, tuple):
    return " (one entry is written [x])"
  return ""
