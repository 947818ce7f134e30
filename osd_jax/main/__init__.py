"""The command `osd`: one subcommand per job, with settings from gin files and flags.

Most jobs are a function `run(config, operative_config)` of a `base.Config`. Only this
package knows gin: `settings` reads files and flags into configs, `commands` describes
the command line, and `generate` is the one interactive job.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from osd_jax.main import commands, settings

# Programs that compile faster than this are not cached. With JAX's own 1.0 seconds,
# half of the compiling time of a start would be spent again.
_CACHE_FROM = 0.1


class Terminated(KeyboardInterrupt):
  """SIGTERM, which ends a command as Ctrl-C does."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; None reads the arguments of this process.

  Returns:
    Exit code: 0 for success, 1 if an output differs from the target's or the target's
    logits are not finite, 2 for bad input, 130 if interrupted, 143 if terminated.
  """
  arguments, bindings = commands.parse(sys.argv[1:] if argv is None else argv)
  name = arguments.command
  try:
    with _sigterm_as_interrupt():
      return _dispatch(arguments, bindings)
  except KeyboardInterrupt as stop:
    terminated = isinstance(stop, Terminated)
    what = "terminated" if terminated else "interrupted"
    print(f"\nosd {name}: {what}; {commands.after_interrupt(name)}", file=sys.stderr)
    # 128 plus the signal's number, as shells report it.
    return 143 if terminated else 130
  except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as error:
    from osd_jax import base  # imports jax, which `osd --help` does without

    if not isinstance(error, settings.ConfigError | base.UserError):
      raise
    for line in str(error).splitlines():
      print(f"osd {name}: {line}", file=sys.stderr)
    return getattr(error, "exit_code", 2)


def _dispatch(arguments: argparse.Namespace, bindings: list[str]) -> int:
  if arguments.command in commands.OF_RUNS:
    if bindings:
      raise settings.ConfigError(
        f"--gin.{bindings[0]}: osd {arguments.command} takes no settings."
      )
    return _about_runs(arguments)
  if arguments.command == "compile":  # nothing runs, so JAX needs no accelerator
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  command = commands.COMMANDS[arguments.command]
  with _sign_of_life(arguments.command):
    _prepare_jax()
    _join_others(arguments)
    # Imported late, so that help texts and mistyped options do not wait for jax.
    module = importlib.import_module(command.module)
  config_class = getattr(module, command.config)
  if arguments.help_config:
    print(commands.describe(config_class), end="")
    return 0
  config, text = _load(config_class, arguments, bindings)
  if arguments.dry_run:
    print(text, end="")
    return 0
  if arguments.command == "generate":
    return module.run(config, arguments)
  return 0 if getattr(module, command.function)(config, text).exact else 1


def _load(
  config_class: type, arguments: argparse.Namespace, bindings: list[str]
) -> tuple[Any, str]:
  """Returns the config of a command and the text that repeats it."""
  name, files = arguments.command, arguments.gin_file
  if name in commands.BEGUN:
    # These commands have useful defaults, so they also work without a file. The user's
    # files come later and win.
    files = [f"runs/{name}.gin", *files]
  bindings = [*commands.bindings_of(arguments), *bindings]
  folders = [part for part in (arguments.gin_search_paths or "").split(",") if part]
  owners = {about.config: other for other, about in commands.COMMANDS.items()}
  try:
    config, text = settings.load(config_class, files, bindings, folders, owners)
  except settings.ConfigError as error:
    # The list of missing fields is long then, and its cause is the missing file.
    start = f"no gin file was given; start from runs/{name}.gin"
    raise settings.ConfigError(str(error) if files else f"{error}\n{start}") from None
  return config, f"# osd {name} --gin_file=THIS_FILE\n\n{text}"


def _about_runs(arguments: argparse.Namespace) -> int:
  """Runs `osd report` and `osd compare`."""
  paths = [arguments.run] if arguments.command == "report" else arguments.runs
  from osd_jax import remote

  paths = [
    str(remote.fetched(path, "RUN")) if remote.is_remote(path) else path
    for path in paths
  ]
  for path in paths:
    if not os.path.isfile(os.path.join(path, "metrics.jsonl")):
      raise settings.ConfigError(
        f"RUN: received {path!r}, expected a run directory (it holds metrics.jsonl)."
      )
  import rich.console

  from osd_jax.report import page

  if arguments.command == "report":
    page_path = page.redraw(paths[0])
  else:
    page_path = page.compare(paths, arguments.output, rich.console.Console())
  print(f"report: {page_path}", file=sys.stderr)
  return 0


@contextlib.contextmanager
def _sign_of_life(command: str) -> Iterator[None]:
  """Says that the command starts if the body, an import of jax, takes long."""
  line = f"osd {command}: starting ..."
  timer = threading.Timer(0.5, print, (line,), {"file": sys.stderr, "flush": True})
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
  """Raises `Terminated` at SIGTERM; only the main thread can install a handler."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def terminate(*_) -> None:
    raise Terminated

  # Restored afterwards: a program may run several commands in one process.
  before = signal.signal(signal.SIGTERM, terminate)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def _prepare_jax() -> None:
  """Sets JAX's compilation cache, which it reads before the first computation."""
  import jax

  for name, value in (
    ("jax_compilation_cache_dir", os.path.expanduser(commands.CACHE)),
    ("jax_persistent_cache_min_compile_time_secs", _CACHE_FROM),
  ):
    # A variable that the user has set wins over this default.
    if name.upper() not in os.environ:
      jax.config.update(name, value)


def _join_others(arguments: argparse.Namespace) -> None:
  """Connects to the other processes of a run, if there are any."""
  options = (arguments.coordinator, arguments.num_processes, arguments.process_id)
  if not arguments.multihost and options == (None, None, None):
    return
  if not arguments.multihost and None in options:
    raise settings.ConfigError(
      "--coordinator, --num_processes, --process_id: expected all three, or --multihost"
      " on a cluster from which JAX can detect them."
    )
  from osd_jax import sharding

  sharding.join(*options)
