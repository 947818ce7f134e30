"""Checks of configs: every error names its field."""

import dataclasses
from collections.abc import Callable

import pytest

from osd_jax import base


@dataclasses.dataclass(frozen=True)
class Inner:
  count: int = 1

  def __post_init__(self):
    base.check_types(self)
    base.check_counts(self, "count")


@dataclasses.dataclass(frozen=True)
class Config:
  count: int = 1
  rate: float = 0.5
  name: str = "a"
  flag: bool = False
  pair: tuple[int, str] = (1, "a")
  many: tuple[Inner, ...] = ()
  either: int | tuple[int, ...] | None = None
  inner: Inner = Inner()
  made: Inner | Callable[[str], Inner] = Inner()

  def __post_init__(self):
    base.check_types(self)
    base.check_choices(self, name=("a", "b"))


@pytest.mark.parametrize(
  "changes",
  [
    {"count": 2},
    {"rate": 1},  # an integer is a number
    {"name": "b"},
    {"flag": True},
    {"pair": (2, "b")},
    {"many": (Inner(), Inner(2))},
    {"either": 3},
    {"either": (3, 4)},
    {"made": Inner(3)},
    {"made": lambda text: Inner(len(text))},
  ],
)
def test_values_of_the_declared_type_are_accepted(changes):
  for field, value in changes.items():
    assert getattr(Config(**changes), field) == value


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"count": 1.5}, "int"),
    ({"count": "3"}, "int"),
    ({"count": True}, "int"),
    ({"rate": "fast"}, "float"),
    ({"rate": False}, "float"),
    ({"name": None}, "str"),
    ({"name": "c"}, "one of 'a', 'b'"),
    ({"flag": 1}, "bool"),
    ({"pair": (1, 2)}, "tuple[int, str]"),
    ({"pair": (1, "a", "b")}, "tuple[int, str]"),
    ({"many": [Inner()]}, "tuple[Inner, ...]"),
    ({"many": (1,)}, "tuple[Inner, ...]"),
    ({"either": (1, None)}, "int | tuple[int, ...] | None"),
    ({"inner": {"count": 1}}, "Inner"),
    ({"made": "Inner"}, "Inner | Callable[[str], Inner]"),
  ],
)
def test_invalid_values_are_named_with_the_expected_type(changes, expected):
  with pytest.raises(base.InputError) as caught:
    Config(**changes)
  ((field, value),) = changes.items()
  assert f"Config.{field}: received {value!r}, expected {expected}" in str(caught.value)
