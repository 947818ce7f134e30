"""Stored configs: differences between the settings of a run and new ones."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osd_jax.runs import directory


@dataclasses.dataclass(frozen=True)
class Inner:
  rate: float = 0.1
  names: tuple[str, ...] = ("a", "b")


@dataclasses.dataclass(frozen=True)
class Other:
  """The same fields as `Inner` in another class."""

  rate: float = 0.1
  names: tuple[str, ...] = ("a", "b")


@dataclasses.dataclass(frozen=True)
class Config:
  inner: Any = Inner()
  steps: int = 3
  made: Any = None
  run_directory: str = "a"
  overwrite: bool = False


def square(x):
  return x * x


def differing(one: Config, other: Config) -> list[str]:
  before = json.loads(json.dumps(directory.described(one)))
  after = directory.described(other)
  return [name for name, _, _ in directory.differences(before, after)]


def test_described_has_every_field_and_class_name():
  assert directory.described(Config(made=square)) == {
    "class": "Config",
    "inner": {"class": "Inner", "rate": 0.1, "names": ["a", "b"]},
    "steps": 3,
    "made": f"{__name__}.square",
    "run_directory": "a",
    "overwrite": False,
  }
  assert directory.described(None) == {}


@pytest.mark.parametrize(
  ("change", "names"),
  [
    ({}, []),
    # These two fields do not affect the results.
    ({"run_directory": "b", "overwrite": True}, []),
    ({"steps": 4}, ["steps"]),
    ({"inner": Inner(rate=0.2)}, ["inner.rate"]),
    ({"inner": Inner(names=("a",))}, ["inner.names.1"]),
    ({"inner": Inner(names=())}, ["inner.names.0", "inner.names.1", "inner.names"]),
    ({"inner": Other()}, ["inner.class"]),
    ({"inner": None}, ["inner.class", "inner.rate", "inner.names.0", "inner.names.1"]),
    ({"made": square}, ["made"]),
  ],
)
def test_differences_name_the_fields(change, names):
  fields = differing(Config(), Config(**change))
  assert sorted({*fields} - {"inner"}) == sorted(names)


@pytest.mark.parametrize(
  ("one", "other"),
  [
    (square, differing),
    (functools.partial(square, 1), functools.partial(square, 2)),
    (np.zeros(3), np.ones(3)),
    (np.zeros(3), np.zeros(4)),
    (Path("a"), Path("b")),
    (1.0, math.inf),
    ({"x": 1}, {"x": 2}),
    (object(), Path("a")),
  ],
)
def test_values_without_a_json_form_are_compared(one, other):
  assert differing(Config(made=one), Config(made=one)) == []
  assert differing(Config(made=one), Config(made=other))


def test_objects_are_described_without_addresses():
  text = json.dumps(directory.described(Config(made=object())))
  assert "0x" not in text and "builtins.object" in text
