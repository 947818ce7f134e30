"""The command `osd`: one subcommand a job, settings from gin files and flags.

Most jobs are a function `run(config, operative_config)` of a frozen dataclass. This
package is the only place that knows gin: `settings` reads files and flags, `factory`
makes the dataclasses, which know nothing of it, `fields` describes them; `generate`
is the one job that talks to whoever started it.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

from osd_jax.main import commands, fields, settings

_CACHE_FROM = 0.1  # seconds of compiling; JAX's own 1.0 leaves half of a start to redo


class Terminated(KeyboardInterrupt):
  """SIGTERM: ends a command in the way of Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: arguments after the program's name; None takes those of this process.

  Returns:
    Exit code: 0, 1 if an output is not the target's, 2 for bad input, 130 if
    interrupted, 143 if terminated.
  """
  parser = commands.parser()
  try:
    words, bindings = split_gin_flags(sys.argv[1:] if argv is None else argv)
  except settings.ConfigError as error:
    parser.error(str(error))
  arguments = parser.parse_args(words)
  name = arguments.command
  try:
    with _sigterm_as_interrupt():
      return _dispatch(arguments, bindings)
  except KeyboardInterrupt as stop:
    terminated = isinstance(stop, Terminated)
    what = "terminated" if terminated else "interrupted"
    print(f"\nosd {name}: {what}; {commands.after_interrupt(name)}", file=sys.stderr)
    return 143 if terminated else 130
  except BrokenPipeError:  # as by `| head`: nobody reads on
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as error:
    if not _is_for_the_user(error):
      raise
    for line in str(error).splitlines():
      print(f"osd {name}: {line}", file=sys.stderr)
    return 2


def split_gin_flags(argv: Iterable[str]) -> tuple[list[str], list[str]]:
  """Takes `--gin.NAME=VALUE` out of a command line.

  Returns:
    The other words, and "NAME=VALUE" of each such flag.

  Raises:
    ConfigError: a flag has no "=".
  """
  words, bindings = [], []
  for word in argv:
    if word.startswith("--gin."):
      if "=" not in word:
        raise settings.ConfigError(f"{word}: expected --gin.NAME=VALUE in one word.")
      bindings.append(word.removeprefix("--gin."))
    else:
      words.append(word)
  return words, bindings


def _dispatch(arguments: argparse.Namespace, bindings: list[str]) -> int:
  if arguments.command in commands.OF_RUNS:
    if bindings:
      raise settings.ConfigError(f"--gin.{bindings[0]}: no settings are read here.")
    return _about_runs(arguments)
  if arguments.command == "compile":  # nothing runs, and JAX shall not look for more
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  _prepare_jax()
  _join_others(arguments)
  command = commands.COMMANDS[arguments.command]
  module = importlib.import_module(command.module)
  config_class = getattr(module, command.config)
  if arguments.help_config:
    print(fields.describe(config_class), end="")
    return 0
  files = arguments.gin_file
  if arguments.command in commands.BEGUN:
    files = [f"runs/{arguments.command}.gin", *files]
  bindings = [*commands.bindings_of(arguments), *bindings]
  try:
    config, text = settings.load(
      config_class, files, bindings, arguments.gin_search_paths
    )
  except settings.ConfigError as error:
    start = f"no gin file was given; one to start from: runs/{arguments.command}.gin"
    raise settings.ConfigError(str(error) if files else f"{error}\n{start}") from None
  text = f"# osd {arguments.command} --gin_file=THIS_FILE\n\n{text}"
  if arguments.dry_run:
    print(text, end="")
    return 0
  try:
    if arguments.command == "generate":
      return module.run(config, arguments)
    return 0 if getattr(module, command.function)(config, text).exact else 1
  except OSError as error:
    setting = fields.naming_path(config, error.filename2 or error.filename)
    if setting and not _is_for_the_user(error):
      raise settings.ConfigError(f"{setting}: {error.strerror}.") from error
    raise


def _about_runs(arguments: argparse.Namespace) -> int:
  """`osd report` and `osd compare`."""
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

  from osd_jax.report import summaries

  if arguments.command == "report":
    page = summaries.redraw(paths[0])
  else:
    page = summaries.compare(paths, arguments.output, rich.console.Console())
  print(f"report: {page}", file=sys.stderr)
  return 0


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
  """SIGTERM raises `Terminated` in here; only the main thread may ask for that."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def terminate(*_) -> None:
    raise Terminated

  before = signal.signal(signal.SIGTERM, terminate)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def _prepare_jax() -> None:
  """What must come before the first computation."""
  import jax

  for name, value in (
    ("jax_compilation_cache_dir", os.path.expanduser(commands.CACHE)),
    ("jax_persistent_cache_min_compile_time_secs", _CACHE_FROM),
  ):
    if name.upper() not in os.environ:
      jax.config.update(name, value)


def _join_others(arguments: argparse.Namespace) -> None:
  """Meets the other processes, where there are some."""
  stated = (arguments.coordinator, arguments.num_processes, arguments.process_id)
  if not arguments.multihost and stated == (None, None, None):
    return
  if arguments.command not in commands.JOINED:
    raise settings.ConfigError(
      f"--multihost: osd {arguments.command} is one process, on all devices of its"
      f" host; several can run osd {', '.join(commands.JOINED)}."
    )
  if not arguments.multihost and None in stated:
    raise settings.ConfigError(
      "--coordinator, --num_processes, --process_id: expected all three, or --multihost"
      " where the cluster says them."
    )
  from osd_jax import sharding

  sharding.join(*stated)


def _is_for_the_user(error: Exception) -> bool:
  from osd_jax import base  # here: it imports jax, which `osd --help` does without

  return isinstance(error, settings.ConfigError | base.UserError)
