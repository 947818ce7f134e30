"""What the commands are called, what they take and what `--help` says of them."""

import argparse
import dataclasses

import osd_jax


@dataclasses.dataclass(frozen=True)
class Command:
  """A command that is set by gin.

  Attributes:
    config: name of its config class.
    module: module of the config class and of the command's function.
    summary: one line.
    example: lines of shell.
    continues: whether the same command continues a run that was interrupted.
    function: name of the function that runs the command.
  """

  config: str
  module: str
  summary: str
  example: str
  continues: bool = False
  function: str = "run"


COMMANDS = {
  "generate": Command(
    "GenerateConfig",
    "osd_jax.main.generate",
    "answer prompts: text in, text out; the draft can learn from them",
    "osd generate \"What is the average price of hotels with country 'Italy'?\"\n"
    "  osd generate --file prompts.jsonl --format jsonl --learn > answers.jsonl\n"
    "  osd generate --target t5 --draft draft.safetensors --vocabulary t5",
  ),
  "online": Command(
    "OnlineConfig",
    "osd_jax.online",
    "serve a stream of queries while the draft learns from them",
    "osd online --gin_file=runs/demo.gin\n"
    "  osd online --gin_file=my_run.gin --gin.DecodingConfig.num_draft_tokens=3",
    continues=True,
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
    "compile a run for a TPU or GPU that is not here: does it fit, how fast at most",
    "osd compile --gin_file=runs/demo.gin --gin.CompileConfig.topology=\"'v5e:2x2'\"",
  ),
  "convert": Command(
    "ConvertConfig",
    "osd_jax.convert",
    "convert weights: from Hugging Face and t5x, and back",
    "osd convert --gin.ConvertConfig.source='\"t5-small\"' \\\n"
    "    --gin.ConvertConfig.output='\"t5_small.safetensors\"'",
  ),
}
# What several processes can run together.
JOINED = ("online", "pretrain", "offline", "evaluate", "certify")
BEGUN = ("generate", "compile")  # their file of runs/ is read before any other
OF_RUNS = {
  "report": "draw the report of a run anew",
  "compare": "put runs side by side: a table and a plot",
}

CACHE = "~/.cache/osd_jax/jax"
_NOTES = f"""\
settings:
  --gin_file         may be repeated; what comes later wins, flags come last
  --gin.NAME=VALUE   NAME is a field (OptimizerConfig.learning_rate), a field in
                     a scope (train/BatchConfig.seed) or a macro (STEPS); VALUE
                     is a Python literal, so text needs its own quotes:
                     --gin.StreamConfig.kind='"gradual"'
  --help_config      lists every field of a command with type and default

  Files are looked for in the current folder, in --gin_search_paths, and among
  those of the package: runs/ has one file a command to start from.

  A run writes a run directory and prints where it is. A run that was
  interrupted is continued by the same command; what repeats it is
  `osd COMMAND --gin_file=RUN/operative_config.gin`. Bad input ends with exit
  code 2 and one line a mistake; an output that is not the target's with 1.

  Compiled programs are kept in {CACHE}; JAX_COMPILATION_CACHE_DIR
  names another folder ("" keeps none)."""
_SHORT = {
  "PairConfig": ("target", "draft", "vocabulary"),
  "DecodingConfig": ("rows", "num_draft_tokens"),
}
_SHAPE = {
  "formatter_class": argparse.RawDescriptionHelpFormatter,
  "allow_abbrev": False,
}


def after_interrupt(name: str) -> str:
  """How to go on after a command was interrupted."""
  if name in COMMANDS and COMMANDS[name].continues:
    return "the same command continues the run from its last checkpoint."
  return "the same command starts anew."


def bindings_of(arguments: argparse.Namespace) -> list[str]:
  """Gin bindings that options of `osd generate` and `osd online` are short for."""
  if arguments.command == "online" and arguments.replicas is not None:
    count = f"ReplicaConfig.count={arguments.replicas}"
    return ["OnlineConfig.replicas=@ReplicaConfig()", count]
  if arguments.command != "generate":
    return []
  return [
    f"{config}.{name}={getattr(arguments, name)!r}"
    for config, names in _SHORT.items()
    for name in names
    if getattr(arguments, name) is not None
  ]


def parser() -> argparse.ArgumentParser:
  """The parser of all commands, `--gin.NAME=VALUE` apart."""
  made = argparse.ArgumentParser(
    "osd",
    description="Online speculative decoding: the draft learns.",
    epilog=_NOTES,
    **_SHAPE,
  )
  made.add_argument("--version", action="version", version=osd_jax.__version__)
  subparsers = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
  for name, command in COMMANDS.items():
    words = "[PROMPT]..." if name == "generate" else "[--gin_file=FILE]..."
    sub = subparsers.add_parser(
      name,
      help=command.summary,
      description=f"{command.summary}\n\nexamples:\n  {command.example}",
      usage=f"osd {name} {words} [--gin.NAME=VALUE]... [OPTION]...",
      epilog=_NOTES,
      **_SHAPE,
    )
    if name == "generate":
      _add_generate(sub)
    _add_gin(sub)
    if name == "online":
      sub.add_argument(
        "--replicas", type=int, metavar="N", help="N processes serve, this one learns"
      )
  report = subparsers.add_parser("report", help=OF_RUNS["report"], **_SHAPE)
  report.add_argument("run", metavar="RUN", help="a run directory")
  compare = subparsers.add_parser("compare", help=OF_RUNS["compare"], **_SHAPE)
  compare.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
  compare.add_argument(
    "--output", default="comparison", metavar="DIR", help="where to (comparison)"
  )
  return made


def _add_gin(sub: argparse.ArgumentParser) -> None:
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
  sub.add_argument("--dry_run", action="store_true", help="print the settings and stop")
  sub.add_argument(
    "--help_config", action="store_true", help="list every setting and stop"
  )
  hosts = sub.add_argument_group(
    f"several processes, one program ({', '.join(JOINED)})"
  )
  hosts.add_argument(
    "--multihost", action="store_true", help="the cluster says who and how many"
  )
  hosts.add_argument("--coordinator", metavar="HOST:PORT", help="the first process")
  hosts.add_argument("--num_processes", type=int, metavar="N", help="of all")
  hosts.add_argument("--process_id", type=int, metavar="I", help="this one, from 0")


def _add_generate(sub: argparse.ArgumentParser) -> None:
  sub.add_argument(
    "prompts", nargs="*", metavar="PROMPT", help="none: lines of standard input"
  )
  prompts = sub.add_argument_group("prompts and answers")
  prompts.add_argument(
    "--file", metavar="FILE", help='a prompt a line; .jsonl: field "prompt"'
  )
  prompts.add_argument(
    "--format", choices=("text", "jsonl"), default="text", help="of answers (text)"
  )
  prompts.add_argument(
    "--stream", action="store_true", help="print text while tokens are accepted"
  )
  sampling = sub.add_argument_group("sampling")
  for name, kind, default, text in (
    ("temperature", float, 0.0, "0 is greedy (0)"),
    ("top_k", int, 0, "keep the K likeliest tokens; 0 keeps all (0)"),
    ("top_p", float, 1.0, "keep this much probability (1)"),
    ("seed", int, 0, "of sampling (0)"),
    ("max_length", int, None, "tokens of an answer at most"),
  ):
    sampling.add_argument(
      f"--{name}", type=kind, default=default, metavar="N", help=text
    )
  sampling.add_argument(
    "--stop",
    action="append",
    default=[],
    metavar="TEXT",
    help="ends an answer (repeatable)",
  )
  learning = sub.add_argument_group("learning")
  learning.add_argument(
    "--learn", action="store_true", help="the draft learns from what it serves"
  )
  learning.add_argument(
    "--save",
    metavar="FILE",
    help="where the adapted draft is kept (adapted_draft.safetensors)",
  )
  pair = sub.add_argument_group("pair (the shipped one unless named)")
  for config, names in _SHORT.items():
    for name in names:
      kind, shown = (str, "PATH") if config == "PairConfig" else (int, "N")
      pair.add_argument(
        f"--{name}", type=kind, metavar=shown, help=f"short for --gin.{config}.{name}"
      )
