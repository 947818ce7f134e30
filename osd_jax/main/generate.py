"""`osd generate`: answers prompts; the first command that a new user tries."""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from osd_jax import base, pairs, runs, sharding
from osd_jax.distillation.learner import LearningConfig
from osd_jax.engine import server
from osd_jax.engine.requests import DecodingConfig


@dataclasses.dataclass(frozen=True)
class GenerateConfig(base.Config):
  """What `osd generate` serves with.

  Attributes:
    pair: target, draft and vocabulary.
    decoding: shapes of decoding, including K; the last of `source_lengths` limits the
      length of a prompt.
    learning: how the draft learns with `--learn`.
    partition: device mesh.
  """

  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: DecodingConfig = server.DECODING
  learning: LearningConfig = server.LEARNING
  partition: sharding.PartitionConfig = sharding.PartitionConfig()


def run(config: GenerateConfig, arguments: argparse.Namespace) -> int:
  """Answers prompts from the command line, a file or standard input.

  Returns:
    The exit code.

  Raises:
    InputError: options contradict each other, or a prompt is invalid.
  """
  draft_path = "adapted_draft.safetensors" if arguments.save is None else arguments.save
  _check(arguments, draft_path)
  per_request = {
    "learn": arguments.learn,
    **{name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")},
    "max_new_tokens": arguments.max_new_tokens,
    "stop": tuple(arguments.stop),
  }
  from_terminal = False
  if arguments.file is not None:
    prompts = _from_file(arguments.file)
  elif arguments.prompts:
    prompts = arguments.prompts
  else:
    from_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    prompts = _typed() if from_terminal else _prompts(sys.stdin, "standard input")
  # Longer answers need longer buffers, which are allocated once.
  target_length = max(config.decoding.target_length, arguments.max_new_tokens or 0)
  decoding = dataclasses.replace(config.decoding, target_length=target_length)
  shapes = (config.pair, decoding, config.learning, config.partition)
  with server.Server(*shapes) as serving:
    serving.engine.report = functools.partial(print, file=sys.stderr, flush=True)
    try:
      if arguments.stream or from_terminal:
        _stream(serving, prompts, arguments.seed, per_request, from_terminal)
      else:
        answers = serving.generate(
          prompts, ordered=True, seed=arguments.seed, **per_request
        )
        for answer in answers:
          print(_line(answer, arguments.format), flush=True)
    finally:  # also after Ctrl-C, so that the learned draft is saved
      if serving.statistics.requests:
        _conclude(serving, draft_path if arguments.learn else None)
  return 0


def _conclude(server: Any, draft_path: str | None) -> None:
  """Saves the adapted draft, if there is one, and prints a summary."""
  if draft_path is not None:
    server.finish_learning()
    print(f"adapted draft: {server.save(draft_path)}", file=sys.stderr)
  counts = server.statistics
  print(
    f"{counts.requests} answers, {counts.tokens} tokens,"
    f" {counts.tokens_per_target_call:.2f} tokens per target call,"
    f" {counts.tokens_per_second:.0f} tokens per second",
    file=sys.stderr,
  )


def _check(arguments: argparse.Namespace, draft_path: str) -> None:
  """Raises early for mistakes that would otherwise surface after serving."""
  if arguments.prompts and arguments.file is not None:
    raise base.InputError(
      "--file: received prompts as arguments too; use one of the two."
    )
  if arguments.stream and arguments.format == "jsonl":
    raise base.InputError(
      "--stream: cannot be combined with --format jsonl, whose lines are whole answers."
    )
  if arguments.save is not None and not arguments.learn:
    raise base.InputError("--save: the draft changes only with --learn; add --learn.")
  # Checked before the first prompt: hours of learning must not end in an error about a
  # folder that does not exist.
  if arguments.learn:
    runs.check_output("--save", draft_path)


def _from_file(name: str) -> list[str]:
  """Reads all prompts of a file first, so that errors surface before serving."""
  try:
    with open(name, encoding="utf-8") as file:
      return [*_prompts(file, name)]
  except OSError as error:
    raise base.InputError(f"--file: received {name!r}: {error.strerror}.") from None


def _prompts(lines: Iterable[str], name: str) -> Iterator[str]:
  """Yields the prompts of lines; reads a line only when it is needed."""
  try:
    for number, line in enumerate(lines, 1):
      if line.strip():
        yield _prompt(line, f"{name}:{number}", name.endswith(".jsonl"))
  except UnicodeDecodeError as error:
    raise base.InputError(
      f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8."
    ) from None


def _prompt(line: str, place: str, is_json: bool) -> str:
  if not is_json:
    return line.strip()
  try:
    row = json.loads(line)
  except ValueError as error:
    raise base.InputError(f"{place}: invalid JSON: {error}.") from None
  prompt = row.get("prompt") if isinstance(row, dict) else None
  if not isinstance(prompt, str) or not prompt.strip():
    raise base.InputError(
      f'{place}: received {line.strip()[:60]}, expected {{"prompt": TEXT}}.'
    )
  return prompt


def _typed() -> Iterator[str]:
  """Yields prompts typed in a terminal, until Ctrl-D or Ctrl-C."""
  with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives `input` line editing and history
  print("One prompt per line; Ctrl-D ends.", file=sys.stderr)
  while True:
    try:
      line = input("> ")
    except EOFError:
      break
    except KeyboardInterrupt as stop:
      if (
        type(stop) is not KeyboardInterrupt
      ):  # SIGTERM ends the command, not only the prompt
        raise
      break
    if line.strip():
      yield line.strip()
  print()


def _stream(
  serving: Any,
  prompts: Iterable[str],
  seed: int,
  per_request: dict[str, Any],
  goes_on: bool,
) -> None:
  """Prints each answer while it is decoded; in a terminal, errors do not end it."""
  for index, prompt in enumerate(prompts):
    try:
      # Each prompt has its own seed; otherwise equal prompts would get equal samples.
      for piece in serving.stream(prompt, seed=seed + index, **per_request):
        print(piece, end="", flush=True)
      print(flush=True)
    except base.UserError as error:
      if not goes_on:
        raise
      print(f"osd generate: {error}", file=sys.stderr)


def _line(answer: Any, form: str) -> str:
  """Formats an answer as text or as a line of JSON."""
  if form == "text":
    return answer.text
  row = {
    "index": answer.index,
    "prompt": answer.prompt,
    "text": answer.text,
    "tokens": [int(token) for token in answer.tokens],
    "stop_reason": answer.stop_reason.name.lower(),
    "tokens_per_target_call": round(float(answer.tokens_per_target_call), 4),
    "milliseconds": round(float(answer.milliseconds), 3),
  }
  return json.dumps(row, ensure_ascii=False)
