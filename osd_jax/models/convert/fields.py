"""Fields of a `config.json`: read, or refused by name."""

from collections.abc import Mapping
from typing import Any

from osd_jax import base


def required(config: Mapping[str, Any], field: str) -> Any:
  """The value of a field that must be there."""
  if config.get(field) is None:
    raise base.InputError(
      f"convert: config.json: field {field}: received nothing, expected an"
      " integer; check that the folder holds a model of transformers."
    )
  return config[field]


def check(says: str, field: str, received: Any, expected: tuple[Any, ...]) -> None:
  """Raises InputError unless a field has one of the values that are supported.

  Args:
    says: what can be converted, for the error text.
    field: its name.
    received: its value.
    expected: the supported ones.
  """
  if received not in expected:
    wanted = " or ".join(repr(value) for value in expected)
    raise base.InputError(
      f"convert: config.json: field {field}: received {received!r}, expected"
      f" {wanted}; {says}."
    )
