"""HTTP connections: how long they wait, and the hosts that they may name."""

import asyncio
import contextlib
import ipaddress
import urllib.parse
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# Longer than the pools of common clients keep a connection (Go: 90 seconds). A client
# that reuses a connection while it is closed here gets an error instead of an answer.
KEEP_ALIVE_SECONDS = 120
HEADER_SECONDS = 30  # from the first byte of a request to the end of its header


class Connection(H11Protocol):
  """Closes a connection on which no request's header is finished in time.

  uvicorn has such a limit only after an answer, and every byte ends it.
  """

  _closing: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._watch()

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._stop()

  def _watch(self) -> None:
    # Also the rest of a body that was refused unread.
    if self.cycle is not None and not self.cycle.response_complete:
      self._stop()
    elif self._closing is None:
      self._closing = self.loop.call_later(HEADER_SECONDS, self._close)

  def _close(self) -> None:
    if self.cycle is None or self.cycle.response_complete:
      self.transport.close()

  def _stop(self) -> None:
    if self._closing is not None:
      self._closing.cancel()
      self._closing = None


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches a host."""
  with contextlib.suppress(ValueError):
    return ipaddress.ip_address(host).is_loopback
  return host == "localhost" or host.endswith(".localhost")


def names_loopback(header: str) -> bool:
  """Whether a request's header Host, "NAME" or "NAME:PORT", names this machine."""
  with contextlib.suppress(ValueError):
    return is_loopback(urllib.parse.urlsplit(f"//{header}").hostname or "")
  return False
