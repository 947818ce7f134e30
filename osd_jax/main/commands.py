"""The commands, their options and their help texts."""

import argparse
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import osd_jax
from osd_jax.main import settings


class Command(NamedTuple):
  """A command with gin settings."""

  config: str  # name of its config class
  # Module of that class and of the command's function, as text: it is imported when the
  # command runs.
  module: str
  summary: str  # one line
  example: str  # lines of shell
  continues: bool = False  # whether the same command continues an interrupted run
  function: str = "run"  # name of the function that runs the command


COMMANDS = {
  "generate": Command(
    "GenerateConfig",
    "osd_jax.main.generate",
    "answer prompts: text in, text out; the draft can learn from them",
    'osd generate "Write cap_club_hours(hours) that caps every hour at 42."\n'
    "  osd generate --file prompts.jsonl --format jsonl --learn > answers.jsonl\n"
    "  osd generate --target my_flan_t5 --max_new_tokens 200 < questions.txt",
  ),
  "online": Command(
    "OnlineConfig",
    "osd_jax.online",
    "serve a stream of queries while the draft learns from them",
    "osd online --gin_file=runs/demo.gin\n"
    "  osd online --gin_file=my_run.gin --gin.DecodingConfig.num_draft_tokens=3",
    continues=True,
  ),
  "serve": Command(
    "ServeConfig",
    "osd_serve.command",
    "serve OpenAI's HTTP API while the draft learns from its traffic",
    "osd serve --run_directory runs/serve\n  osd serve --target my_flan_t5 --port 8080",
  ),
  "pretrain": Command(
    "PretrainConfig",
    "osd_tools.pretrain",
    "train a model on (prompt, reference): makes targets and drafts",
    "osd pretrain --gin_file=models/flan_t5_small.gin --gin_file=my_run.gin\n"
    "  osd pretrain --gin_file=experiments/shipped_target.gin --gin.STEPS=2000",
    continues=True,
  ),
  "offline": Command(
    "OfflineConfig",
    "osd_jax.offline",
    "distil a draft on a fixed corpus before it serves",
    "osd offline --gin_file=my_run.gin --gin.LossConfig.divergence='\"jsd\"'",
    continues=True,
  ),
  "evaluate": Command(
    "EvaluateConfig",
    "osd_jax.evaluate",
    "measure drafts on held-out prompts; nothing learns",
    "osd evaluate --gin_file=my_run.gin --gin.DecodingConfig.rows=4",
  ),
  "certify": Command(
    "CertifyConfig",
    "osd_jax.evaluate",
    "check that speculative outputs are exactly the target's",
    "osd certify --gin_file=experiments/certify_shipped.gin\n"
    "  osd certify --gin_file=my_run.gin --gin.PairConfig.dtype='\"bfloat16\"'",
    function="certify",
  ),
  "compile": Command(
    "CompileConfig",
    "osd_tools.ahead_of_time",
    "compile a run for a TPU or GPU that is not here: memory and speed limits",
    "osd compile --gin_file=runs/demo.gin --gin.CompileConfig.topology=\"'v5e:2x2'\"",
  ),
  "advise": Command(
    "AdviseConfig",
    "osd_tools.advise",
    "estimate on a log of answers what a draft, a cache and learning would gain",
    "osd advise runs/demo/outputs.jsonl",
  ),
  "convert": Command(
    "ConvertConfig",
    "osd_jax.convert",
    "convert weights: from Hugging Face and t5x, and back",
    "osd convert t5-small t5_small.safetensors",
  ),
}
# Commands that several processes can run together.
JOINED = ("online", "pretrain", "offline", "evaluate", "certify")
# Commands that read their own file of runs/ before any other.
BEGUN = ("generate", "serve", "compile", "advise")
# Commands that take run directories instead of settings.
OF_RUNS = {
  "report": "redraw the report of a run",
  "compare": "compare runs in a table and a plot",
}

CACHE = "~/.cache/osd_jax/jax"
_NOTES = f"""\
settings:
  --gin_file         may be repeated; later files win, and flags win over files
  --gin.NAME=VALUE   NAME is a field (OptimizerConfig.learning_rate), a field in
                     a scope (train/BatchConfig.seed) or a macro (STEPS); VALUE
                     is a Python literal, so text needs its own quotes:
                     --gin.StreamConfig.kind='"gradual"'
  --help_config      lists every field of a command with type and default

  Files are searched in the current folder, in --gin_search_paths and in the
  package, whose runs/ has one file per command to start from.

  A run writes a run directory and prints its path. The same command continues
  an interrupted run; `osd COMMAND --gin_file=RUN/operative_config.gin` repeats
  a run. Exit code 2 means bad input, with one line per mistake, and exit code 1
  means that an output differs from the target's or the target is broken (its
  logits are not finite).

  Compiled programs are cached in {CACHE}. Set
  JAX_COMPILATION_CACHE_DIR for another folder ("" turns the cache off)."""
_FIELD_NOTES = """\
CONFIG.FIELD = VALUE in a gin file, or --gin.CONFIG.FIELD=VALUE, sets a field of
the configs that @CONFIG() makes; SCOPE/CONFIG.FIELD sets it for those that
@SCOPE/CONFIG() makes. The files in runs/ make each config of a command.
"""


class Short(NamedTuple):
  """An option that is short for a setting."""

  setting: str  # in gin; {config} is the config of the command
  commands: tuple[str, ...]
  kind: type
  metavar: str
  text: str
  is_positional: bool = False


_PAIRED = ("generate", "online", "serve", "offline", "evaluate", "certify", "advise")
_SERVING = ("generate", "online", "serve")
SHORT = {
  "log": Short("LOG", ("advise",), str, "LOG", "file with prompts and answers", True),
  "source": Short(
    "ConvertConfig.source", ("convert",), str, "SOURCE", "weights to read", True
  ),
  "output": Short(
    "ConvertConfig.output",
    ("convert",),
    str,
    "OUTPUT",
    "file, or folder for transformers",
    True,
  ),
  "target": Short(
    "PairConfig.target",
    _PAIRED,
    str,
    "PATH",
    "model folder, Hugging Face name or weights file",
  ),
  "draft": Short(
    "PairConfig.draft",
    _PAIRED,
    str,
    "PATH",
    'its draft; "cache" repeats what was served, "none" decodes plainly (default for'
    " your target: the cache, and a new draft that joins it once it has learned)",
  ),
  "vocabulary": Short(
    "PairConfig.vocabulary",
    _PAIRED,
    str,
    "PATH",
    "tokenizer (default: the target's own)",
  ),
  "rows": Short(
    "DecodingConfig.rows", _SERVING, int, "N", "requests answered at the same time"
  ),
  "num_draft_tokens": Short(
    "DecodingConfig.num_draft_tokens",
    _SERVING,
    int,
    "N",
    "tokens that the draft proposes (default: 7)",
  ),
  "host": Short(
    "ServeConfig.host", ("serve",), str, "ADDRESS", "address (default: 127.0.0.1)"
  ),
  "port": Short(
    "ServeConfig.port", ("serve",), int, "N", "port (default: 8000); 0: any free one"
  ),
  "run_directory": Short(
    "{config}.run_directory",
    ("online", "serve", "pretrain", "offline", "evaluate", "certify", "advise"),
    str,
    "DIR",
    "folder of the run",
  ),
}
_SHAPE = {
  "formatter_class": argparse.RawDescriptionHelpFormatter,
  # An abbreviation that works today would be ambiguous after the next new option.
  "allow_abbrev": False,
}


def after_interrupt(name: str) -> str:
  """Says how to go on after a command was interrupted."""
  if name in COMMANDS and COMMANDS[name].continues:
    return "the same command continues the run from its last checkpoint."
  return "the same command starts again from the beginning."


def bindings_of(arguments: argparse.Namespace) -> list[str]:
  """Translates the short options of a command into gin bindings."""
  command, bindings = arguments.command, []
  if command == "online" and arguments.replicas is not None:
    count = f"ReplicaConfig.count={arguments.replicas}"
    bindings = ["OnlineConfig.replicas=@ReplicaConfig()", count]
  for name, short in SHORT.items():
    value = getattr(arguments, name) if command in short.commands else None
    if value is not None:
      setting = short.setting.format(config=COMMANDS[command].config)
      bindings.append(f"{setting}={value!r}")  # `repr` quotes texts, as gin needs it
  return bindings


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """Parses a command line; exits with code 2 after a mistake.

  Returns:
    The options, and "NAME=VALUE" for each `--gin.NAME=VALUE`.
  """
  parser, subparsers = _parsers()
  bindings = [word for word in argv if word.startswith("--gin.")]
  words = [word for word in argv if not word.startswith("--gin.")]
  if words and not words[0].startswith("-") and words[0] not in subparsers:
    end = settings.close(words[0], subparsers)
    parser.error(f"no command is called {words[0]!r}{end}")
  for binding in bindings:
    if "=" not in binding:
      parser.error(f"{binding}: expected --gin.NAME=VALUE in one word.")
  arguments, unknown = parser.parse_known_args(words)
  if unknown:
    # argparse would report these as mistakes of `osd`, without the command's name.
    options = {name: one._option_string_actions for name, one in subparsers.items()}
    option = unknown[0].partition("=")[0]
    others = [name for name, names in options.items() if option in names]
    end = settings.close(option, options[arguments.command])
    if others:
      end = f"; it is an option of osd {', '.join(others)}"
    subparsers[arguments.command].error(
      f"unknown option or argument {unknown[0]!r}{end}"
    )
  return arguments, [binding.removeprefix("--gin.") for binding in bindings]


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
  """Returns the parser of the program and that of each command."""
  parser = argparse.ArgumentParser(
    "osd",
    description="Online speculative decoding: the draft learns.",
    epilog=_NOTES,
    **_SHAPE,
  )
  parser.add_argument("--version", action="version", version=osd_jax.__version__)
  commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
  for name, command in COMMANDS.items():
    words = "[PROMPT]..." if name == "generate" else "[--gin_file=FILE]..."
    places = [x for x in SHORT.values() if x.is_positional and name in x.commands]
    if places:
      words = " ".join(f"[{x.metavar}]" for x in places)
    sub = commands.add_parser(
      name,
      help=command.summary,
      description=f"{command.summary}\n\nexamples:\n  {command.example}",
      usage=f"osd {name} {words} [--gin.NAME=VALUE]... [OPTION]...",
      epilog=_NOTES,
      **_SHAPE,
    )
    if name == "generate":
      _add_generate(sub)
    _add_short(sub, name)
    _add_options(sub, _GIN)
    sub.set_defaults(**dict.fromkeys(_PROCESSES))
    if name in JOINED:
      group = sub.add_argument_group(f"several processes ({', '.join(JOINED)})")
      _add_options(group, _PROCESSES)
    if name == "online":
      text = "N processes serve and this one learns"
      _add_options(sub, {"replicas": (int, "N", text)})
  report = commands.add_parser("report", help=OF_RUNS["report"], **_SHAPE)
  report.add_argument("run", metavar="RUN", help="a run directory")
  compare = commands.add_parser("compare", help=OF_RUNS["compare"], **_SHAPE)
  compare.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
  compare.add_argument(
    "--output",
    default="comparison",
    metavar="DIR",
    help="output folder (default: comparison)",
  )
  return parser, commands.choices


# Options by name: type, name of the value and help. A type in a list makes an option
# repeatable; bool makes a flag.
_GIN = {
  "gin_file": ([str], "FILE", "file with settings"),
  "gin_search_paths": (str, "A,B", "more folders to search for gin files"),
  "dry_run": (bool, "", "print the settings and stop"),
  "help_config": (bool, "", "list every setting and stop"),
}
_PROCESSES = {
  "multihost": (bool, "", "detect the processes from the cluster"),
  "coordinator": (str, "HOST:PORT", "address of the first process"),
  "num_processes": (int, "N", "number of processes"),
  "process_id": (int, "I", "index of this process, starting at 0"),
}
_PROMPTS = {
  "file": (
    [str],
    "FILE",
    "one prompt per line, or per row of a JSONL, CSV or Parquet file (repeatable)",
  ),
  "on_long": (
    ("error", "truncate", "skip"),
    "",
    "too long prompts: answer the others and fail, cut them, or leave them out",
  ),
  "format": (("text", "jsonl"), "", "format of the answers (default: text)"),
  "log_probs": (bool, "", "add the log-probability of every token (with jsonl)"),
  "stream": (bool, "", "print text as soon as it is accepted"),
}
SAMPLING = {  # all are settings of `Prompt`
  "max_new_tokens": (int, "N", "maximum number of tokens per answer"),
  "temperature": (float, "X", "0 is greedy (default: 0)"),
  "top_k": (int, "N", "keep the N most probable tokens; 0 keeps all (default: 0)"),
  "top_p": (float, "X", "keep this much probability (default: 1)"),
  "min_p": (
    float,
    "X",
    "drop tokens below X times the largest probability (default: 0)",
  ),
  "repetition_penalty": (float, "X", "above 1: repeat less (default: 1)"),
  "seed": (int, "N", "seed of sampling (default: 0)"),
  "stop": ([str], "TEXT", "end answers at this text (repeatable)"),
}
_OWN = {
  "own_sampling": (
    bool,
    "",
    "sample as the model's generation_config.json says; only the seed is yours",
  )
}
_LEARNING = {
  "learn": (bool, "", "let the draft learn from the requests"),
  "save": (
    str,
    "FILE",
    "file for the adapted draft (default: adapted_draft.safetensors)",
  ),
}


def _add_options(parser: Any, options: Mapping[str, tuple[Any, str, str]]) -> None:
  """Adds options; those that are not given are None, False or []."""
  for name, (kind, metavar, text) in options.items():
    values: dict[str, Any] = {"type": kind, "metavar": metavar}
    if kind is bool:
      values = {"action": "store_true"}
    elif isinstance(kind, tuple):
      values = {"choices": kind, "default": kind[0]}
    elif isinstance(kind, list):
      values |= {"type": kind[0], "action": "append", "default": []}
    parser.add_argument(f"--{name}", help=text, **values)


def _add_short(sub: argparse.ArgumentParser, command: str) -> None:
  """Adds the options of a command that are short for settings."""
  group = sub.add_argument_group("short for settings")
  for name, short in SHORT.items():
    if command in short.commands:
      values = {"type": short.kind, "metavar": short.metavar, "help": short.text}
      if short.is_positional:
        sub.add_argument(name, nargs="?", **values)
      else:
        group.add_argument(f"--{name}", **values)


def _add_generate(sub: argparse.ArgumentParser) -> None:
  sub.add_argument(
    "prompts", nargs="*", metavar="PROMPT", help="without any, lines of standard input"
  )
  for title, options in (
    ("prompts and answers", _PROMPTS),
    ("sampling", SAMPLING | _OWN),
    ("learning", _LEARNING),
  ):
    _add_options(sub.add_argument_group(title), options)


def describe(config_class: type) -> str:
  """Returns the text of `--help_config`: every config of a command, field by field."""
  paragraphs = map(_paragraph, settings.configs(config_class).values())
  return "\n".join([_FIELD_NOTES, *paragraphs])


def documented(config_class: type) -> dict[str, str]:
  """Returns the description of each field in the `Attributes:` of a docstring.

  Inherited fields are described by the class that has them.
  """
  parent = config_class.__base__
  inherited = documented(parent) if dataclasses.is_dataclass(parent) else {}
  text = inspect.getdoc(config_class) or ""
  # Docstrings are the only place that describes a field, so that the help text and the
  # reference pages cannot disagree.
  section = re.search(r"^Attributes:\n((?:  .*\n?|\n)*)", text, re.M)
  entries = re.split(r"^  (?=\S)", section[1], flags=re.M) if section else []
  pairs = (" ".join(entry.split()).partition(": ") for entry in entries if entry)
  return inherited | {name: meaning for name, _, meaning in pairs}


def _paragraph(config_class: type) -> str:
  from osd_jax import base  # imports jax, which `osd --help` does without

  def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=indent)

  summary = (inspect.getdoc(config_class) or "").partition("\n\n")[0]
  lines = [config_class.__name__, *wrapped(summary, "  "), ""]
  meanings, hints = documented(config_class), base.field_types(config_class)
  for field in dataclasses.fields(config_class):
    kind = base.type_text(hints[field.name])
    lines += wrapped(f"{field.name}: {kind}{_default(field.default)}", "  ")
    lines += wrapped(meanings.get(field.name, ""), "      ")
  return "\n".join([*lines, ""])


def _default(value: Any) -> str:
  if value is dataclasses.MISSING:
    return " (required)"
  if dataclasses.is_dataclass(value):
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    # Every config has a paragraph of its own, so its name is enough here.
    if vars(value) == defaults:
      return f" = {type(value).__name__}()"
  return f" = {value!r}"
