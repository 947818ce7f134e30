"""The type checker that the import hook of conftest.py installs."""

from collections.abc import Callable

import beartype

# Accepts an int for a float, as Python does.
_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def typed(function: Callable) -> Callable:
  """Checks the calls of a function, but not `__init__` of dataclasses.

  Decoding states are pytrees, so they may also hold shardings, shapes or numpy arrays.
  """
  return function if function.__name__ == "__init__" else _check(function)
