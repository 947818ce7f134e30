"""Online speculative decoding in JAX: the draft learns from what it drafts for.

Importing the package imports nothing else; a module is loaded when it is first
used, so `import osd_jax; osd_jax.online.run(config)` needs no second import.
"""

import importlib
import pkgutil
from types import ModuleType

__version__ = "0.1.0"


def _public_modules() -> set[str]:
  """Names of the modules and packages directly inside this one."""
  return {m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"}


def __getattr__(name: str) -> ModuleType:
  """Loads a module of the package at its first use (PEP 562)."""
  if name.startswith("_") or name not in _public_modules():
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
  return sorted(globals().keys() | _public_modules())
