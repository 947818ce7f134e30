"""The type checker of the import hook in conftest.py."""

from collections.abc import Callable

import beartype

# An int may stand where a float is asked for, as everywhere in Python.
_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def typed(function: Callable) -> Callable:
  """Checks calls; not what is put into a dataclass.

  States travel as pytrees: of shardings, shapes and numpy arrays, too.
  """
  return function if function.__name__ == "__init__" else _check(function)
