"""Online speculative decoding in JAX: the draft learns from what it drafts for.

    import osd_jax

    with osd_jax.Server() as server:  # the shipped pair
      for answer in server.generate(["Which singers are older than 30?"], learn=True):
        print(answer.text, answer.tokens_per_target_call)

Importing the package imports nothing else: names are looked up when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each name is defined. The commands are modules: `online.run(OnlineConfig(...))`.
_HOMES = {
  "Server": "serving.server",
  "Prompt": "serving.answers",
  "Answer": "serving.answers",
  "DecodingConfig": "serving.requests",
  "LearningConfig": "distillation.learner",
  "PairConfig": "pairs",
  "StreamConfig": "data.streams",
  "TaskConfig": "data.sources",
  "InputError": "base",
  "load_pair": "pairs",
  "online": None,
  "offline": None,
  "evaluate": None,
  "certify": None,
  "pretrain": None,
  "convert": None,
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
  """Loads what a public name means at its first use (PEP 562)."""
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  home = _HOMES[name]
  if home is None:
    return importlib.import_module(f"{__name__}.{name}")
  return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
