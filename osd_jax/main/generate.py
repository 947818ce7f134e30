"""`osd generate`: answers prompts; the first command that a new user tries."""

import argparse
import bisect
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import rich.console

from osd_jax import base, pairs, runs, sharding
from osd_jax.costs import measure
from osd_jax.data import chat, examples
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.distillation.learner import LearningConfig
from osd_jax.engine import generation_config, server
from osd_jax.engine.requests import Answer, DecodingConfig, OwnSampling, Prompt
from osd_jax.main import commands
from osd_jax.report import progress

# Lengths that prompts are padded to if the settings state none. Each is compiled when
# the first prompt needs it.
_LENGTHS = (*server.DECODING.source_lengths, 256, 1024)
# With fewer tokens to decode, compiling what drafts from the n-gram cache takes longer
# than it can save.
_FEW_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class GenerateConfig(base.Config):
  """What `osd generate` serves with.

  Attributes:
    pair: target, draft and vocabulary.
    decoding: shapes of decoding, including K. With the default `source_lengths`, longer
      prompts are allowed for, up to 1,024 tokens.
    learning: how the draft learns with `--learn`.
    partition: device mesh.
  """

  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: DecodingConfig = server.DECODING
  learning: LearningConfig = LearningConfig()
  partition: sharding.PartitionConfig = sharding.PartitionConfig()


def run(config: GenerateConfig, arguments: argparse.Namespace) -> int:
  """Answers prompts from the command line, files or standard input.

  Returns the exit code: 1 if the target's logits were not finite, 2 if a prompt was
  refused.

  Raises:
    InputError: options contradict each other, or a setting is invalid.
  """
  loading = measure.Stopwatch()
  draft_path = "adapted_draft.safetensors" if arguments.save is None else arguments.save
  _check(arguments, draft_path)
  template = _template(config, arguments)
  is_typed = not (arguments.prompts or arguments.file)
  from_terminal = is_typed and sys.stdin.isatty() and sys.stdout.isatty()
  untrained = {
    pairs.CACHE: "takes up every answer without training",
    pairs.NONE: "is plain decoding",
  }
  if arguments.learn and (draft := config.pair.named("draft")) in untrained:
    raise base.InputError(
      f"--learn: the draft {draft!r} {untrained[draft]}; leave --learn out."
    )
  # Known prompts are read first, so that a bad file is reported before any loading.
  given_prompts = None if is_typed else list(_given(arguments))
  console = rich.console.Console(stderr=True)
  with progress.status(console, "loading target and draft"):
    default = _default_draft(config, arguments, given_prompts)
    pair = pairs.load_pair(config.pair, sharding.make(config.partition), default)
  decoding = _enough(config.decoding, pair, arguments, given_prompts)
  if (default or config.pair.named("draft")) in (pairs.ATTACHED, pairs.CACHE):
    decoding = server.by_worth(decoding)
  if arguments.learn:
    runs.check_output("--save", draft_path, needed_bytes=pair.draft_bytes)
  with server.Server(pair, decoding, config.learning, config.partition) as serving:
    loading_ms = loading.ms
    if config.pair.target == pairs.SHIPPED:
      print(
        "the demo's model answers, which knows four topics"
        f" ({', '.join(examples.TOPICS)}); --target serves another",
        file=sys.stderr,
      )
    # A draft that is named drafts from the first answer on.
    serving.engine.compiles_in_background = not config.pair.draft
    serving.engine.report = functools.partial(print, file=sys.stderr, flush=True)
    lines = given_prompts or (
      _from_terminal() if from_terminal else _from_standard_input()
    )
    prompts = _Prompts(lines, pair.vocabulary, decoding, arguments.on_long, template)
    answer = _stream if arguments.stream or from_terminal else _answer
    try:
      is_broken = answer(serving, prompts, arguments)
      if not (prompts.indices or prompts.is_refused or from_terminal):
        print("osd generate: standard input has no prompt", file=sys.stderr)
    finally:  # also after Ctrl-C, so that the learned draft is saved
      if serving.statistics.requests:
        _conclude(serving, draft_path if arguments.learn else None, loading_ms)
  return 1 if is_broken else 2 if prompts.is_refused else 0


def _default_draft(
  config: GenerateConfig, arguments: argparse.Namespace, known: list[Any] | None
) -> str:
  """Returns what drafts without `--draft`; "" for the default of `PairConfig`.

  A new draft is of use only if it learns. Otherwise the n-gram cache drafts, or nothing
  for a few tokens.
  """
  pair = config.pair
  if pair.draft or arguments.learn or pair.named("draft") != pairs.ATTACHED:
    return ""
  most = arguments.max_new_tokens or config.decoding.target_length
  is_little = known is not None and len(known) * most < _FEW_TOKENS
  return pairs.NONE if is_little else pairs.CACHE


def _template(config: GenerateConfig, arguments: argparse.Namespace) -> Prompt:
  names = (*commands.SAMPLING, "log_probs")
  overrides = {name: x for name in names if (x := getattr(arguments, name)) is not None}
  if arguments.own_sampling:
    shipped = vars(generation_config.resolved(OwnSampling(), config.pair))
    if doubled := [
      f"--{name}" for name in overrides if name in shipped and name != "seed"
    ]:
      raise base.InputError(
        f"--own_sampling: received {', '.join(doubled)} too, which the model's"
        " generation_config.json decides; leave one of the two out."
      )
    overrides = shipped | overrides
  return Prompt("-", **overrides)


def _check(arguments: argparse.Namespace, draft_path: str) -> None:
  """Raises early for mistakes that would otherwise surface after serving."""
  if arguments.prompts and arguments.file:
    raise base.InputError(
      "--file: received prompts as arguments too; use one of the two."
    )
  if arguments.stream and arguments.format == "jsonl":
    raise base.InputError(
      "--stream: cannot be combined with --format jsonl, whose lines are whole answers."
    )
  if arguments.log_probs and arguments.format != "jsonl":
    raise base.InputError("--log_probs: needs --format jsonl, which shows them.")
  if arguments.save is not None and not arguments.learn:
    raise base.InputError("--save: the draft changes only with --learn; add --learn.")
  # Checked before the first prompt: hours of learning must not end in an error about a
  # folder that does not exist.
  if arguments.learn:
    runs.check_output("--save", draft_path)


def _enough(
  decoding: DecodingConfig,
  pair: pairs.Pair,
  arguments: argparse.Namespace,
  known: list[tuple[str, Any]] | None,
) -> DecodingConfig:
  """Allocates what `--max_new_tokens` and the known prompts need."""
  target_length = max(decoding.target_length, arguments.max_new_tokens or 0)
  decoding = dataclasses.replace(decoding, target_length=target_length)
  if decoding.source_lengths != server.DECODING.source_lengths:
    return decoding  # the user chose them
  most = (pair.target.max_positions or target_length + max(_LENGTHS)) - target_length
  lengths = [length for length in _LENGTHS if length <= most] or _LENGTHS[:1]
  if arguments.learn:
    # The learner pads every prompt to the longest length, so none is spare.
    texts = [text for _, text in known or () if isinstance(text, str)]
    counts = [len(pair.vocabulary.encode_prompt(text)) for text in texts]
    spare = [length for length in lengths if length >= max(counts, default=0)][1:]
    lengths = [length for length in lengths if length not in spare]
  return dataclasses.replace(decoding, source_lengths=tuple(lengths))


class _Prompts:
  """Prompts with their own settings; those that cannot be answered are reported.

  Attributes:
    indices: index in the input of each prompt that was taken.
    is_refused: whether the command has failed for some prompt.
  """

  def __init__(
    self,
    lines: Iterable[tuple[str, Any]],
    vocabulary: Vocabulary,
    decoding: DecodingConfig,
    on_long: str,
    template: Prompt,
  ):
    self._lines, self._vocabulary, self._template = lines, vocabulary, template
    self._longest, self._on_long = decoding.source_lengths[-1], on_long
    self.indices: list[int] = []
    self.is_refused = False

  def __iter__(self) -> Iterator[Prompt]:
    for index, (place, text) in enumerate(self._lines):
      try:
        if not isinstance(text, str):
          raise base.InputError(f"{text}.")
        text = self._fitting(place, text)
        if text is None:
          continue
        # Each prompt has its own seed; otherwise equal prompts would get equal samples.
        seed = self._template.sampling.of_request(index).seed
        prompt = dataclasses.replace(self._template, text=text, seed=seed)
      except base.UserError as error:
        self.refuse(place, error)
        continue
      self.indices.append(index)
      yield prompt

  def refuse(self, place: str, error: Any) -> None:
    """Reports a prompt that is not answered."""
    self.is_refused = True
    print(f"osd generate: {place}: {error}", file=sys.stderr, flush=True)

  def _fitting(self, place: str, text: str) -> str | None:
    """Returns the text, cut with `--on_long=truncate`; None skips it."""
    count = len(self._vocabulary.encode_prompt(text))
    if count <= self._longest:
      return text
    message = f"the prompt has {count} tokens, more than {self._longest}"
    if self._on_long == "error" or isinstance(text, chat.Conversation):
      raise base.InputError(
        f"{message}; see --on_long, or set a longer DecodingConfig.source_lengths."
      )
    action = "it is skipped"
    if self._on_long == "truncate":
      text, action = _cut(text, self._vocabulary, self._longest), "it is truncated"
    print(f"osd generate: {place}: {message}; {action}.", file=sys.stderr, flush=True)
    return text if self._on_long == "truncate" else None


def _cut(text: str, vocabulary: Vocabulary, longest: int) -> str:
  """Cuts a text so that its prompt has at most `longest` tokens.

  The beginning is kept. For a decoder-only model without a chat template, which
  continues where the prompt ends, it is the end.
  """
  keeps_end = vocabulary.is_causal and vocabulary.template is None

  def cut(count: int) -> str:
    return text[len(text) - count :] if keeps_end else text[:count]

  length = lambda count: len(vocabulary.encode_prompt(cut(count)))
  return cut(bisect.bisect_right(range(1, len(text)), longest, key=length))


def _given(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
  """Yields place and text, or fault, of each prompt of the command line or of files."""
  for number, text in enumerate(arguments.prompts, 1):
    yield f"prompt {number}", text
  for path in arguments.file:
    for number, text in examples.read_prompts(path, "--file"):
      if getattr(text, "kind", "") != "empty":  # blank lines separate prompts
        yield f"{path}:{number}", text


def _from_standard_input() -> Iterator[tuple[str, str]]:
  """Yields the lines of standard input; reads a line only when it is needed."""
  try:
    for number, line in enumerate(sys.stdin, 1):
      if line.strip():
        yield f"standard input:{number}", line.strip()
  except UnicodeDecodeError as error:
    raise base.InputError(
      f"standard input is not UTF-8 (byte {error.start}); convert it to UTF-8."
    ) from None


def _from_terminal() -> Iterator[tuple[str, str]]:
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
      # SIGTERM ends the command, not only the prompt.
      if type(stop) is not KeyboardInterrupt:
        raise
      break
    if line.strip():
      yield "prompt", line.strip()
  print()


def _answer(serving: Any, prompts: _Prompts, arguments: argparse.Namespace) -> bool:
  """Prints the answers in order; returns whether the target's logits were broken."""
  is_broken = False
  for answer in serving.generate(
    prompts, ordered=True, learn=arguments.learn, return_failed=True
  ):
    is_broken |= _is_broken(answer)
    index = prompts.indices[answer.index]
    if answer.stop_reason == base.StopReason.REFUSED:
      prompts.refuse(f"prompt {index + 1}", answer.error)
      continue
    print(_line(index, answer, arguments.format), flush=True)
  return is_broken


def _stream(serving: Any, prompts: _Prompts, arguments: argparse.Namespace) -> bool:
  """Prints each answer while it is decoded."""
  for prompt in prompts:
    for piece in serving.stream(prompt, learn=arguments.learn):
      print(piece, end="", flush=True)
    print(flush=True)
  return False


def _is_broken(answer: Answer) -> bool:
  if answer.stop_reason != base.StopReason.NOT_FINITE:
    return False
  print(
    "osd generate: the target's logits are not finite, so it has no answer to"
    f" {answer.prompt[:60]!r}; check its weights.",
    file=sys.stderr,
  )
  return True


def _conclude(serving: Any, draft_path: str | None, loading_ms: float) -> None:
  """Saves the adapted draft, if there is one, and prints a summary."""
  if draft_path is not None:
    serving.finish_learning()
    print(f"adapted draft: {serving.save(draft_path)}", file=sys.stderr)
  counts = serving.statistics
  answers = "1 answer" if counts.requests == 1 else f"{counts.requests} answers"
  print(
    f"{answers}, {counts.tokens} tokens,"
    f" {counts.tokens_per_target_call:.2f} tokens per target call,"
    f" {counts.tokens_per_second:.1f} tokens per second; {loading_ms / 1e3:.1f} s of"
    f" loading, {measure.compiling_ms() / 1e3:.1f} s of compiling,"
    f" {counts.milliseconds / 1e3:.1f} s of decoding",
    file=sys.stderr,
  )


def _line(index: int, answer: Answer, form: str) -> str:
  """Formats an answer as text or as a line of JSON."""
  if form == "text":
    return answer.text
  row = {
    "index": index,
    "prompt": answer.prompt,
    "text": answer.text,
    "tokens": [int(token) for token in answer.tokens],
    "stop_reason": answer.stop_reason.name.lower(),
    "tokens_per_target_call": round(float(answer.tokens_per_target_call), 4),
    "milliseconds": round(float(answer.milliseconds), 3),
  }
  if answer.log_probs is not None:
    row["log_probs"] = [round(float(x), 4) for x in answer.log_probs]
  return json.dumps(row, ensure_ascii=False)
