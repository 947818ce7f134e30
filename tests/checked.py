"""The type checker that the import hook of conftest.py installs."""

from collections.abc import Callable

import beartype

# Accepts an int for a float, as Python does.
_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def typed(function: Callable) -> Callable:
  """Checks calls; not what is put into a dataclass.

  States travel as pytrees: of shardings, shapes and numpy arrays, too.
  """
  return function if function.__name__ == "__init__" else _check(function)
