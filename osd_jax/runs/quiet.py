"""Silence for what a failed write says a hundred times over.

Where one array of a step cannot be written, orbax closes its event loop while the
others are still on their way: each of them ends in a traceback from a thread of its
own, after the error has been raised that says it all.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

_LOGGER = "absl"  # orbax's


@contextlib.contextmanager
def echoes_of_failure() -> Iterator[None]:
  """Keeps orbax's tracebacks off standard error while a step is written.

  After a failure they may still come: "Event loop is closed" stays unsaid then.
  """
  before = sys.unraisablehook

  def without_closed_loops(echo: Any) -> None:
    if not (isinstance(echo.exc_value, RuntimeError) and _is_closed_loop(echo)):
      before(echo)

  sys.unraisablehook = without_closed_loops
  writing = {thread.ident for thread in threading.enumerate()}
  writing.discard(threading.get_ident())

  def of_others(record: logging.LogRecord) -> bool:
    """Records of threads that were there before, and all that are no errors."""
    return record.levelno < logging.ERROR or record.thread in writing

  logger = logging.getLogger(_LOGGER)
  logger.addFilter(of_others)
  try:
    yield
    sys.unraisablehook = before
  finally:
    logger.removeFilter(of_others)


def _is_closed_loop(echo: Any) -> bool:
  return "Event loop is closed" in str(echo.exc_value)
