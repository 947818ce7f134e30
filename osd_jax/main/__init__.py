"""The command `osd`: one subcommand a job, settings from gin files and flags.

Every job is a function `run(config, operative_config)` of a frozen dataclass. This
package is the only place that knows gin: `settings` reads files and flags, `factory`
makes the dataclasses, which know nothing of it.
"""

import argparse
import dataclasses
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Sequence

import osd_jax
from osd_jax.main import settings


@dataclasses.dataclass(frozen=True)
class Command:
  """What `osd --help` says of a command; `osd_jax.<its name>` holds it.

  Attributes:
    config: name of its config class.
    summary: one line.
    example: lines of shell.
  """

  config: str
  summary: str
  example: str


COMMANDS = {
  "pretrain": Command(
    "PretrainConfig",
    "train a T5 on (prompt, reference): makes targets and first drafts",
    "osd pretrain --gin_file=models/flan_t5_small.gin --gin_file=my_run.gin\n"
    "  osd pretrain --gin_file=experiments/shipped_target.gin --gin.STEPS=2000",
  ),
  "offline": Command(
    "OfflineConfig",
    "distil a draft on a fixed corpus before it serves",
    "osd offline --gin_file=my_run.gin --gin.LossConfig.divergence='\"jsd\"'",
  ),
  "online": Command(
    "OnlineConfig",
    "serve a stream of queries while the draft learns from them",
    "osd online --gin_file=runs/demo.gin\n"
    "  osd online --gin_file=my_run.gin --gin.DecodingConfig.num_draft_tokens=3",
  ),
  "evaluate": Command(
    "EvaluateConfig",
    "measure drafts on held-out prompts: acceptance and speed, nothing learns",
    "osd evaluate --gin_file=my_run.gin --gin.DecodingConfig.rows=4",
  ),
  "certify": Command(
    "CertifyConfig",
    "check that speculative outputs are exactly the target's",
    "osd certify --gin_file=experiments/certify_shipped.gin\n"
    "  osd certify --gin_file=my_run.gin --gin.PairConfig.dtype='\"bfloat16\"'",
  ),
  "convert": Command(
    "ConvertConfig",
    "convert weights: from Hugging Face and t5x, and back to Hugging Face",
    "osd convert --gin.ConvertConfig.source='\"t5-small\"' \\\n"
    "    --gin.ConvertConfig.output='\"t5_small.safetensors\"'",
  ),
}

_CACHE = "~/.cache/osd_jax/jax"
_CACHE_FROM = 0.1  # seconds of compiling; JAX's own 1.0 leaves half of a start to redo
_NOTES = f"""\
settings:
  --gin_file         may be repeated; what comes later wins, flags come last
  --gin.NAME=VALUE   NAME is a field (OptimizerConfig.learning_rate), a field in a
                     scope (train/BatchConfig.seed) or a macro (STEPS); VALUE is a
                     Python literal, so text needs its own quotes:
                     --gin.StreamConfig.kind='"gradual"'
  Files are looked for in the current folder, in --gin_search_paths, and in the
  gin_configs/ of the checkout; runs/ there has one file a command to start from.

  A run writes a run directory and prints where it is. A run that was interrupted is
  continued by the same command; `osd COMMAND --gin_file=RUN/operative_config.gin`
  repeats it. Bad input ends with exit code 2 and one line a mistake.

  Compiled programs are kept in {_CACHE}; JAX_COMPILATION_CACHE_DIR names
  another folder ("" keeps none)."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: arguments after the program's name; None takes those of this process.

  Returns:
    Exit code: 0, 2 for bad input, 130 if interrupted.

  Raises:
    SystemExit: with code 1 if outputs are not the target's.
  """
  parser = _parser()
  try:
    words, bindings = split_gin_flags(sys.argv[1:] if argv is None else argv)
  except settings.ConfigError as error:
    parser.error(str(error))
  arguments = parser.parse_args(words)
  try:
    _prepare_jax(arguments.multihost)
    module = importlib.import_module(f"osd_jax.{arguments.command}")
    config, text = settings.load(
      getattr(module, COMMANDS[arguments.command].config),
      arguments.gin_file,
      bindings,
      arguments.gin_search_paths,
    )
    text = f"# osd {arguments.command} --gin_file=THIS_FILE\n\n{text}"
    if arguments.dry_run:
      print(text, end="")
    else:
      module.run(config, text)
  except (ValueError, ImportError, OSError) as error:
    if not _is_for_the_user(error):
      raise
    for line in str(error).splitlines():
      print(f"osd {arguments.command}: {line}", file=sys.stderr)
    if not arguments.gin_file:
      start = f"--gin_file=runs/{arguments.command}.gin"
      print(f"No gin file was given; one to start from: {start}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print(
      f"\nosd {arguments.command}: interrupted; the same command continues the run"
      " from its last checkpoint.",
      file=sys.stderr,
    )
    return 130
  return 0


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


def _parser() -> argparse.ArgumentParser:
  shape = {
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "epilog": _NOTES,
    "allow_abbrev": False,
  }
  parser = argparse.ArgumentParser(
    "osd", description="Online speculative decoding: the draft learns.", **shape
  )
  parser.add_argument("--version", action="version", version=osd_jax.__version__)
  commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
  for name, command in COMMANDS.items():
    described = f"{command.summary}\n\nexamples:\n  {command.example}"
    usage = f"osd {name} [--gin_file=FILE]... [--gin.NAME=VALUE]... [OPTION]..."
    sub = commands.add_parser(
      name, help=command.summary, description=described, usage=usage, **shape
    )
    sub.add_argument(
      "--gin_file", action="append", default=[], metavar="FILE", help="read settings"
    )
    sub.add_argument(
      "--gin_search_paths",
      type=lambda text: [part for part in text.split(",") if part],
      default=[],
      metavar="A,B",
      help="more folders with gin files",
    )
    sub.add_argument(
      "--dry_run", action="store_true", help="print the settings and stop"
    )
    sub.add_argument(
      "--multihost",
      action="store_true",
      help="one process of several: calls jax.distributed.initialize() first",
    )
  return parser


def _prepare_jax(multihost: bool) -> None:
  """What must come before the first computation."""
  import jax

  if multihost:
    jax.distributed.initialize()
  for name, value in (
    ("jax_compilation_cache_dir", os.path.expanduser(_CACHE)),
    ("jax_persistent_cache_min_compile_time_secs", _CACHE_FROM),
  ):
    if name.upper() not in os.environ:
      jax.config.update(name, value)


def _is_for_the_user(error: BaseException) -> bool:
  """Whether a `raise` of this package made the error; all others are faults."""
  frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
  source = linecache.getline(frame.f_code.co_filename, line)
  module = frame.f_globals.get("__name__", "")
  return module.startswith("osd_jax.") and source.lstrip().startswith("raise ")
