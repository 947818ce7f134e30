"""`osd serve`: loads the pair, listens, and shuts down in order."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import rich.console

from osd_jax import background, base, certificate, runs, sharding
from osd_jax.report import page, progress

with base.extra("serve", "osd serve"):
  import starlette  # noqa: F401
  import uvicorn

  from osd_serve.service import ServeConfig, Service

__all__ = ["ServeConfig", "run"]

TOKEN = "OSD_API_KEY"  # an environment variable, because `ps` shows command lines
# Settings that may change when a server continues with a run directory.
_FREE = (
  *("learn", "model_name", "host", "port", "max_waiting", "shutdown_seconds"),
  *("checkpoint_every", "compare_every", "sampling"),
)


def run(config: ServeConfig, operative_config: str = "") -> runs.RunResult:
  """Serves until SIGTERM or Ctrl-C; returns the run directory, "." without one.

  `operative_config` is gin text that is stored in the run directory.
  """
  from osd_serve import app, connections

  background.share_heaps()
  sharding.make(config.partition)  # first, because it configures JAX before its start
  token = os.environ.get(TOKEN, "")
  console = rich.console.Console(stderr=True)
  with contextlib.ExitStack() as stack:
    listening = stack.enter_context(_listening(config))
    is_local = connections.is_loopback(config.host)
    if not token and not is_local:
      console.print(
        f"warning: {config.host} may be reached from other machines, and no token is"
        f" needed; set the environment variable {TOKEN}.",
        highlight=False,
      )
    directory = None
    if config.run_directory:
      directory = stack.enter_context(_opened(config, operative_config))
    with progress.status(console, "loading and compiling"):
      service = Service(config, directory)
    try:
      host, port = listening.getsockname()[:2]
      host_text = f"[{host}]" if ":" in host else host
      address = f"http://{host_text}:{port}"
      print(f"serving {config.model_name} at {address}", file=sys.stderr, flush=True)
      application = app.make(service, token, is_local)
      asyncio.run(_listen(application, service, listening))
    finally:
      service.close()
    if directory is not None:
      directory.stop()
      _report(directory, console)
  return runs.RunResult(Path(config.run_directory))


def _report(directory: runs.RunDirectory, console: rich.console.Console) -> None:
  """Prints where the draft is, and writes the report."""
  draft = directory.path / "draft.safetensors"
  if draft.exists():
    print(f"adapted draft: {draft}", file=sys.stderr, flush=True)
  verdict = certificate.of_rows(runs.read(directory.metrics_path))
  page.conclude(directory, console, verdict.sentence() if verdict.outputs else "")


def _listening(config: ServeConfig) -> socket.socket:
  """Opens the port, before the models are loaded: a mistake is reported early."""
  family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
  try:
    return socket.create_server((config.host, config.port), family=family)
  except OSError as error:
    raise base.InputError(
      f"ServeConfig.port: received {config.host} port {config.port}, expected an"
      f" address that is free ({error.strerror}); choose another port or host."
    ) from None


def _opened(config: ServeConfig, operative_config: str) -> runs.RunDirectory:
  defaults = {
    field.name: field.default
    for field in dataclasses.fields(ServeConfig)
    if field.name in _FREE
  }
  return runs.RunDirectory.start(
    config.run_directory,
    dataclasses.replace(config, **defaults),
    operative_config=operative_config,
    seed=config.learning.seed,
    overwrite=config.overwrite,
  )


async def _listen(application: Any, service: Service, listening: socket.socket) -> None:
  """Runs uvicorn until a signal, and then answers the accepted requests."""
  from osd_serve import connections

  server = uvicorn.Server(
    uvicorn.Config(
      application,
      http=connections.Connection,
      timeout_keep_alive=connections.KEEP_ALIVE_SECONDS,
      log_level="warning",
      access_log=False,
      timeout_graceful_shutdown=2,
    )
  )
  # Its own handlers would close the port at once, and run the handlers of `main` after.
  server.capture_signals = contextlib.nullcontext
  ending: list[asyncio.Task[None]] = []

  async def end() -> None:
    """Refuses new requests, and waits for those that were taken."""
    service.scheduler.drain()
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(service.config.shutdown_seconds):
        while (load := service.scheduler.load).running or load.waiting:
          await asyncio.sleep(0.02)
    server.should_exit = True

  def note(number: int) -> None:
    if ending:  # the second signal; answered requests are in outputs.jsonl
      os._exit(128 + number)
    print("osd serve: shutting down", file=sys.stderr, flush=True)
    ending.append(asyncio.create_task(end()))

  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, note, number)
  await server.serve(sockets=[listening])
