"""Config classes as gin calls them: found by their fields, checked, then called."""

import dataclasses
import functools
import inspect
import re
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
    from osd_jax import base  # it imports jax, which `osd --help` does not wait for

    self.name = config_class.__name__
    self.selector = f"{config_class.__module__}.{self.name}"
    self.config_class = config_class
    self.hints = base.field_types(config_class)
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
    from osd_jax import base

    for field in dataclasses.fields(self.config_class):
      value = values.get(field.name, dataclasses.MISSING)
      optional = {field.default, field.default_factory} != {dataclasses.MISSING}
      if _asks(value) or (value is dataclasses.MISSING and not optional):
        yield field.name, ""
      elif value is not dataclasses.MISSING:
        hint = self.hints[field.name]
        fits = base.is_of_type(value, hint) and not _is_unmade(value)
        if not _has_failed(value) and not fits:
          yield (
            field.name,
            (
              f"{self.name}.{field.name}: received {value!r}, expected"
              f" {base.type_text(hint)}{_advice(value, hint)}."
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
      for hint in factories[current].hints.values():
        waiting.extend(classes(hint))
  return list(factories.values())


def classes(hint: Any) -> Iterator[type]:
  """Config classes that a type names."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    yield hint
  for inner in typing.get_args(hint):
    yield from classes(inner)


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


def _is_unmade(value: Any) -> bool:
  """Whether a value is @NAME of a config without the parentheses that make it."""
  return callable(value) and isinstance(inspect.unwrap(value), Factory)


def _advice(value: Any, hint: Any) -> str:
  if callable(value):
    return " (a reference that makes a config ends in parentheses: @NAME())"
  if typing.get_origin(hint) is tuple and not isinstance(value, tuple):
    return " (one entry is written [x])"
  return ""
