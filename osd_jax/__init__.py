"""Online speculative decoding in JAX: the draft learns from the requests it serves.

    import osd_jax

    prompt = "Write cap_club_hours(hours) that caps every hour at 42."
    with osd_jax.Server() as server:  # the shipped pair, or Server(target=FOLDER)
      for answer in server.generate([prompt], learn=True):
        print(answer.text, answer.tokens_per_target_call)

Importing the package imports nothing else: a name is looked up at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors; at run time `__getattr__` finds them
  from osd_jax import convert, evaluate, offline, online
  from osd_jax.base import InputError
  from osd_jax.data.examples import TaskConfig
  from osd_jax.data.streams import StreamConfig
  from osd_jax.distillation.learner import LearningConfig
  from osd_jax.engine.requests import Answer, DecodingConfig, Prompt
  from osd_jax.engine.server import Server
  from osd_jax.pairs import PairConfig, load_pair

__version__ = "0.4.0"

__all__ = [
  "Answer",
  "DecodingConfig",
  "InputError",
  "LearningConfig",
  "PairConfig",
  "Prompt",
  "Server",
  "StreamConfig",
  "TaskConfig",
  "convert",
  "evaluate",
  "load_pair",
  "offline",
  "online",
]

# Where each is defined; the commands are modules: `online.run(config)`.
_HOMES = {
  "Answer": "engine.requests",
  "DecodingConfig": "engine.requests",
  "InputError": "base",
  "LearningConfig": "distillation.learner",
  "PairConfig": "pairs",
  "Prompt": "engine.requests",
  "Server": "engine.server",
  "StreamConfig": "data.streams",
  "TaskConfig": "data.examples",
  "load_pair": "pairs",
}


def __getattr__(name: str) -> Any:
  """Imports the object of a public name at its first use (PEP 562)."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  # The remaining names are modules, the commands.
  if name not in _HOMES:
    return importlib.import_module(f"{__name__}.{name}")
  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
