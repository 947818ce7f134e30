"""Defers SIGINT and SIGTERM until a step is over and a checkpoint is written."""

import signal
import threading
from collections.abc import Callable
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


class Deferred:
  """Holds SIGINT and SIGTERM back from `__enter__` until `deliver`.

  A second signal takes effect at once. Outside the main thread nothing is held back,
  because Python delivers signals only to the main thread.
  """

  def __init__(self):
    self._noted: int | None = None
    self._handlers: dict[int, Any] = {}

  def __enter__(self) -> "Deferred":
    if threading.current_thread() is threading.main_thread():
      self._handlers = {s: signal.signal(s, self._note) for s in _ENDING}
    return self

  def __exit__(self, *_: object) -> None:
    while self._handlers:
      signal.signal(*self._handlers.popitem())

  def deliver(self, before: Callable[[], object]) -> None:
    """If a signal arrived, calls `before` and then lets the signal take effect."""
    if self._noted is not None:
      # The handlers are restored before the signal is raised again, so that it has the
      # effect it would have had at first.
      noted, self._noted = self._noted, None
      before()
      self.__exit__()
      signal.raise_signal(noted)

  def _note(self, number: int, frame: object) -> None:
    del frame
    if self._noted is not None:
      self.__exit__()
      signal.raise_signal(number)
    self._noted = number
