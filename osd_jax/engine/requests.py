"""The types that users pass and receive: configs, prompts, requests and answers.

A request changes form four times: a text or `Prompt`, a `Request`, a row of
`DecodeState`, and an `Answer` (`Finished` for callers that work with tokens).
"""

import dataclasses
import functools
import importlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from osd_jax import base, metrics
from osd_jax.costs.table import RoundCosts
from osd_jax.decoding import accept, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.decoding.rounds import DecodeSpec


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig(base.Config):
  """K chosen from measured costs and the running acceptance.

  K is chosen between two calls. With an n-gram cache the choice between two calls is
  whether to draft at all, and every round drafts as many tokens as are worth it; see
  `decoding.mixed`.

  Attributes:
    candidates: the Ks to choose from, including 0 (plain decoding); those above
      `DecodingConfig.num_draft_tokens` are left out. With an n-gram cache, the numbers
      of tokens that a verification may have. One compilation each.
    costs: one table for each of `DecodingConfig.source_lengths`, for greedy and sampled
      rows alike. Without tables, both are measured before the first call; the n-gram
      cache alone learns them while it serves. A run repeats exactly only with given
      tables.
  """

  candidates: tuple[int, ...] = (0, 1, 3, 5, 7, 11, 16)
  costs: tuple[RoundCosts, ...] = ()

  def checks(self):
    largest = state_lib.MAX_DRAFT_TOKENS
    allowed = sorted(set(self.candidates) & set(range(largest + 1)))
    return {
      "candidates": (
        list(self.candidates) == allowed and allowed[:1] == [0] and len(allowed) > 1,
        f"0 and other integers up to {largest}, ascending",
      ),
      "costs": (
        all(table.ms.shape[-1] == len(allowed) for table in self.costs),
        "tables whose round_ms has one entry for each candidate",
      ),
    }

  def up_to(self, num_draft_tokens: int) -> "AdaptiveConfig":
    """Drops the candidates above K, and their costs."""
    candidates = tuple(k for k in self.candidates if k <= num_draft_tokens)
    costs = tuple(table.of(candidates) for table in self.costs)
    return dataclasses.replace(self, candidates=candidates, costs=costs)


@dataclasses.dataclass(frozen=True)
class DecodingConfig(base.Config):
  """Shapes of decoding, and the number of drafted tokens.

  >>> DecodingConfig(source_lengths=(16, 64)).bucket(20)
  64

  Attributes:
    rows: B, requests in flight.
    num_draft_tokens: K in 1..16; with `adaptive` the largest.
    acceptance_rule: a key of `accept.RULES`, or an `accept.Rule` of your own.
      "rejection" and "block" keep the target's distribution, and "block" accepts at
      least as many sampled tokens; with "coupling" sampled outputs, too, equal plain
      decoding's, whatever the draft.
    source_lengths: buckets S that prompts are padded to. All rows in flight share the
      one that the longest of their prompts needs.
    target_length: T, upper limit of every request's length limit.
    record_top_k: k, entries kept of every target distribution; 0 records nothing,
      V or more keeps full rows.
    max_rounds: rounds after which a call returns to the host even if no row has
      finished; bounds how long a swap or a new request waits.
    adaptive: chooses K between two calls, including plain decoding; None keeps K.
    prefill_rows: prompts that one call prefills, a divisor of `rows`; meant for
      accelerators. With more than one, up to an eighth of the rows stay empty until a
      call can fill them. A mesh that splits the rows prefills one in each part instead.
    prefill_chunk: the most tokens that are prefilled between two calls of rounds, in
      each of `prefill_rows`; rows that decode wait for no more, and a longer prompt
      takes several turns. 0: whole prompts. For decoder-only models only, because an
      encoder needs the whole prompt.
    cache_tokens: tokens of served answers, a power of two, in an n-gram cache that is
      mixed with the draft; 0 for no cache. With `PairConfig.draft = "cache"` it is the
      size of that cache, and 0 means 65,536.
  """

  rows: base.Count = 1
  num_draft_tokens: Annotated[int, base.Between(1, state_lib.MAX_DRAFT_TOKENS)] = 5
  acceptance_rule: Annotated[str, base.OneOf(*accept.RULES)] | accept.Rule = "rejection"
  source_lengths: Annotated[
    tuple[Annotated[int, base.AtLeast(2)], ...], base.NonEmpty("integers >= 2")
  ] = (64,)
  target_length: base.Count = 96
  record_top_k: base.CountOrZero = 64
  max_rounds: base.Count = 256
  adaptive: AdaptiveConfig | None = None
  prefill_rows: base.Count = 1
  prefill_chunk: base.CountOrZero = 0
  cache_tokens: base.CountOrZero = 0

  def checks(self):
    lengths, adaptive = self.source_lengths, self.adaptive
    return {
      "cache_tokens": (
        self.cache_tokens & (self.cache_tokens - 1) == 0
        and (not self.cache_tokens or 2**8 <= self.cache_tokens <= 2**26),
        "0 or a power of two in 2**8..2**26",
      ),
      "prefill_rows": (
        self.rows % self.prefill_rows == 0,
        f"a divisor of rows ({self.rows})",
      ),
      "source_lengths": (list(lengths) == sorted(set(lengths)), "ascending integers"),
      "adaptive": (
        adaptive is None
        or (
          adaptive.candidates[1] <= self.num_draft_tokens
          and len(adaptive.costs) in (0, len(lengths))
        ),
        f"a candidate in 1..{self.num_draft_tokens} (num_draft_tokens), and no costs"
        f" or one table for each of the {len(lengths)} source_lengths",
      ),
    }

  def with_rows(self, rows: int) -> "DecodingConfig":
    """Returns the config of another number of rows in flight."""
    fitting = math.gcd(rows, self.prefill_rows)
    return dataclasses.replace(self, rows=rows, prefill_rows=fitting)

  def bucket(self, count: int) -> int:
    """Returns the smallest of `source_lengths` that holds `count` prompt tokens."""
    return next(length for length in self.source_lengths if length >= count)

  @property
  def widths(self) -> tuple[int, ...]:
    """See `DecodeSpec.widths`."""
    if self.adaptive is None:
      return ()
    return self.adaptive.up_to(self.num_draft_tokens).candidates[1:]

  def spec(
    self, target: base.Model, draft: base.Model | None = None, partitioner: Any = None
  ) -> DecodeSpec:
    """Returns the static description that every compiled call takes."""
    return DecodeSpec.of(
      target,
      draft,
      partitioner,
      cache_tokens=self.cache_tokens,
      widths=self.widths,
      rows=self.rows,
      prefill_rows=self.prefill_rows,
      prefill_chunk=self.prefill_chunk,
      target_length=self.target_length,
      record_top_k=self.record_top_k,
      rule=self.acceptance_rule,
    )

  def check_sources(self, config: Any, field: str) -> None:
    """Raises InputError if a `source_length` is longer than every bucket.

    Args:
      config: a config with a field `source_length`.
      field: path of that config, for the error's text.
    """
    received, longest = config.source_length, self.source_lengths[-1]
    if received > longest:
      raise base.InputError(
        f"{field}: received a {type(config).__name__}.source_length of {received},"
        f" expected at most {longest}, the largest of DecodingConfig.source_lengths."
      )

  def check(self, model: base.Model) -> None:
    """Raises InputError if a model cannot be served with these shapes."""
    # An attached draft and the n-gram cache read what the target has read.
    is_reader = not model.state_width and model.absorb is None
    if self.prefill_chunk and is_reader and model.extend is None:
      raise base.InputError(
        f"decoding: DecodingConfig.prefill_chunk: received {self.prefill_chunk},"
        f" expected 0, because the {model.name} reads a whole prompt at once; only"
        " decoder-only models read prompts in chunks."
      )
    longest = self.source_lengths[-1] + self.target_length
    if model.max_positions and longest > model.max_positions:
      raise base.InputError(
        f"decoding: DecodingConfig.source_lengths {self.source_lengths} and"
        f" target_length {self.target_length} add up to {longest} tokens, but the"
        f" {model.name} has {model.max_positions} positions; lower one of them."
      )


@dataclasses.dataclass(frozen=True)
class SamplingConfig(base.Config):
  """Sampling of every request of a run; see `base.SamplingSettings`.

  Attributes:
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    seed: request i draws with seed + i, modulo 2 ** 32.
    min_p: keeps tokens of at least this share of the largest probability; 0 keeps all.
    repetition_penalty: above 1 makes tokens of the text so far less likely: the answer
      and, for decoder-only targets, the prompt. Both mean the same as in transformers.
  """

  temperature: float = 0.0
  top_k: base.CountOrZero = 0
  top_p: Annotated[float, base.Between(1e-30, 1)] = 1.0
  seed: Annotated[int, base.Between(0, 2**32 - 1)] = 0
  min_p: Annotated[float, base.Between(0, 1)] = 0.0
  repetition_penalty: Annotated[float, base.Between(1e-3, 1e3)] = 1.0

  def checks(self):
    # Smaller numbers than 1e-30 underflow in float32: they would read as greedy.
    is_warm = 1e-30 <= self.temperature <= 1e30
    expected = "0, or a number in 1e-30..1e30"
    return {"temperature": (self.temperature == 0 or is_warm, expected)}

  @property
  def needs_sampling(self) -> bool:
    """Whether tokens are not just the arg max of the target's logits."""
    return self.temperature > 0 or self.repetition_penalty != 1

  def of_request(self, index: int) -> "SamplingConfig":
    """Returns the sampling of the index-th request, which has its own seed."""
    return dataclasses.replace(self, seed=(self.seed + index) % 2**32)

  def settings(
    self, max_length: int, speculative: bool = True, cache_salt: int = 0
  ) -> base.SamplingSettings:
    """Returns the same as arrays of one row."""
    fields = vars(self)
    return sampling.make_settings(
      1, max_length=max_length, speculative=speculative, cache_salt=cache_salt, **fields
    )


@dataclasses.dataclass(frozen=True)
class OwnSampling(base.Config):
  """Sampling as the target's own generation_config.json says.

  `generation_config.resolved` returns the `SamplingConfig` that it stands for.

  Attributes:
    seed: request i draws with seed + i, modulo 2 ** 32.
  """

  seed: Annotated[int, base.Between(0, 2**32 - 1)] = 0


@dataclasses.dataclass(frozen=True)
class Prompt(base.Config):
  """A text to answer, with its own settings.

  >>> Prompt("Which singers are older than 30?", temperature=0.7, seed=3).sampling.seed
  3

  Attributes:
    text: the prompt.
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    seed: seed of its draws.
    max_new_tokens: largest number of tokens, at most `DecodingConfig.target_length`,
      which None takes.
    stop: texts that end the answer; it is cut before the first of them.
    learn: False excludes it from the draft's learning and from the n-gram cache.
    log_probs: return the log-probability of every emitted token under the target's own
      distribution, before temperature, top-k and top-p. It takes one more forward pass
      of the target per answer.
    min_p: see `SamplingConfig`.
    repetition_penalty: see `SamplingConfig`.
    speculative: False drafts nothing for this prompt; others in flight go on drafting.
      Its answer has the same law, and takes one target call per token.
  """

  text: Annotated[str, base.NonEmpty("a non-empty text")]
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  max_new_tokens: base.Count | None = None
  # White space alone is a stop string, too: many clients end an answer at a line break.
  stop: tuple[Annotated[str, base.Constraint("non-empty texts", bool, True)], ...] = ()
  learn: bool = True
  log_probs: bool = False
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  speculative: bool = True

  def checks(self):
    _ = self.sampling  # checks its own fields
    expected = "text without lone surrogates, which no encoding has"
    return {
      "text": (_is_encodable(self.text), expected),
      "stop": (all(map(_is_encodable, self.stop)), expected),
    }

  @property
  def sampling(self) -> SamplingConfig:
    """The sampling part of the settings."""
    names = (field.name for field in dataclasses.fields(SamplingConfig))
    return SamplingConfig(**{name: getattr(self, name) for name in names})

  @classmethod
  def of(cls, given: Any, index: int, settings: Mapping[str, Any]) -> "Prompt":
    """Returns the index-th prompt of a call; texts take its settings and seed + index.

    Raises:
      InputError: `given` is neither a text nor a Prompt, or a setting is invalid.
    """
    if isinstance(given, cls):
      return given
    names = {field.name for field in dataclasses.fields(cls)} - {"text"}
    for name in settings:
      if name not in names:
        raise base.InputError(
          f"generate: received a setting {name!r}, expected some of {sorted(names)}."
        )
    # The index makes seeds differ, so that equal prompts of one call get independent
    # samples, and a repeated call the same ones.
    prompt = cls(given, **settings)
    return dataclasses.replace(prompt, seed=prompt.sampling.of_request(index).seed)


def _is_encodable(text: str) -> bool:
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


@dataclasses.dataclass(frozen=True)
class ReplicaConfig(base.Config):
  """Processes that serve while this one learns; they need the extra `replicas`.

  Attributes:
    count: replicas, each with `DecodingConfig.rows` rows; 0: this process serves.
    gpus: GPUs that Ray reserves for each replica.
  """

  count: base.CountOrZero = 0
  gpus: base.NonNegative = 0.0

  @property
  def engine(self) -> Callable[..., Any] | None:
    """The argument `engine` of a `Server`; None without replicas."""
    if not self.count:
      return None
    # Named as text, because the core does not depend on the tools.
    module = importlib.import_module("osd_tools.replicas")
    return functools.partial(module.Replicas, self)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """One prompt in tokens.

  Attributes:
    tokens: [n] int32, prompt with end-of-sequence.
    sampling: how to draw; its seed is the request's own.
    max_new_tokens: at most this many tokens are emitted; at most T, which None takes.
    tag: any value; it is returned with the answer.
    watch: called after every call with the tokens emitted so far [m]; calls are short
      then. If it returns a number, the request ends after that many tokens.
    remember: the n-gram cache, if there is one, takes up the answer.
    speculative: False drafts nothing for it.
    cache_salt: it uses only the n-gram cache's entries with this salt, and its answer
      becomes one of them; see `base.SamplingSettings`.
  """

  tokens: np.ndarray
  sampling: SamplingConfig = SamplingConfig()
  max_new_tokens: int | None = None
  tag: Any = None
  watch: Callable[[np.ndarray], int | None] | None = None
  remember: bool = True
  speculative: bool = True
  cache_salt: int = 0

  def check(self, decoding: DecodingConfig, vocab_size: int) -> None:
    """Raises InputError if the request cannot be decoded with these shapes."""
    tokens, longest = np.asarray(self.tokens), decoding.source_lengths[-1]
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
      raise base.InputError(
        f"decoding: the prompt is an array {tokens.shape} of {tokens.dtype}, expected"
        " token ids, [n] integers; encode the text with the pair's vocabulary."
      )
    if not 1 <= len(tokens) <= longest:
      raise base.InputError(
        f"decoding: the prompt has {len(tokens)} tokens, expected 1 to {longest};"
        " truncate it or add a longer bucket to DecodingConfig.source_lengths."
      )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
      raise base.InputError(
        f"decoding: the prompt holds ids from {tokens.min()} to {tokens.max()},"
        f" expected 0..{vocab_size - 1}; encode the text with the pair's vocabulary."
      )
    limit, most = self.max_new_tokens, decoding.target_length
    if not (isinstance(self.cache_salt, int) and 0 <= self.cache_salt < 2**64):
      raise base.InputError(
        f"decoding: received cache_salt={self.cache_salt!r}, expected an integer in"
        " 0..2**64 - 1."
      )
    # Buffers are allocated once, for T tokens. A larger limit must not be cut silently.
    if limit is not None and not (base.is_count(limit) and limit <= most):
      raise base.InputError(
        f"decoding: received max_new_tokens={limit!r}, expected an integer in"
        f" 1..{most}, or None; for longer answers raise DecodingConfig.target_length."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
  """One answered request.

  Attributes:
    request: the request.
    tokens: [n] int32, emitted, including end-of-sequence.
    stop_reason: why it ended.
    target_calls: number of verifications (plain decoding: steps).
    drafted: drafted tokens that were judged and could be emitted.
    accepted: drafted tokens that were accepted and emitted.
    accepted_per_position: [16] rounds that accepted the i-th drafted token.
    milliseconds: wall time of its prefill and of its share of the calls.
    batch: the same as a `DistillationBatch` of one row; records are None if off.
    settings: [1] sampling it was decoded with.
    draft_version: version of the draft that served when it ended.
    drafted_by_cache: those of `drafted` that the n-gram cache named.
    accepted_by_cache: those of `accepted` that it named.
    prefill_ms: wall time of its prefill.
    number: how many requests were submitted to the server before it; see
      `sampling.numbered_seed`.
  """

  request: Request
  tokens: np.ndarray
  stop_reason: base.StopReason
  target_calls: int
  drafted: int
  accepted: int
  accepted_per_position: tuple[int, ...]
  milliseconds: float
  batch: base.DistillationBatch
  settings: base.SamplingSettings
  draft_version: int = 0
  drafted_by_cache: int = 0
  accepted_by_cache: int = 0
  prefill_ms: float = 0.0
  number: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
  """The target's answer to a prompt.

  >>> reason = base.StopReason.EOS
  >>> Answer(0, "Six?", "6", np.array([8, 7, 1]), reason, 2, 3, 1, 4.5)
  Answer('6', EOS, 1.50 tokens per target call)

  Attributes:
    index: index of the prompt in its call.
    prompt: its text.
    text: the answer, up to a stop string.
    tokens: [n] int32, emitted, including end-of-sequence.
    stop_reason: why it ended.
    target_calls: number of verifications.
    drafted: drafted tokens that were judged.
    accepted: drafted tokens that were accepted.
    milliseconds: wall time of its prefill and of its share of the calls.
    draft_version: number of updates that the draft had seen when the answer ended.
    log_probs: [n] float32, see `Prompt.log_probs`; None unless the prompt asks for it.
    error: why the prompt was refused; "" if it was not.
  """

  index: int
  prompt: str
  text: str
  tokens: np.ndarray
  stop_reason: base.StopReason
  target_calls: int = 0
  drafted: int = 0
  accepted: int = 0
  milliseconds: float = 0.0
  draft_version: int = 0
  log_probs: np.ndarray | None = None
  error: str = ""

  @property
  def tokens_per_target_call(self) -> float:
    """Block efficiency: emitted tokens per verification."""
    return metrics.tokens_per_target_call(len(self.tokens), self.target_calls) or 0.0

  def __repr__(self) -> str:
    return (
      f"Answer({self.text!r}, {self.stop_reason.name},"
      f" {self.tokens_per_target_call:.2f} tokens per target call)"
    )


class GrowingText:
  """Decodes the tokens of an answer that grows, at a cost that does not.

  Only a window of the last tokens is decoded. Its first part is context, because
  decoders treat the beginning of a text differently, and both parts begin between two
  characters, because a character may take several tokens.
  """

  WINDOW = 16  # new tokens after which the window moves

  def __init__(self, decode: Callable[[Any], str]):
    """Starts with no token."""
    self._decode = decode
    self._start = self._middle = 0  # the tokens of the context
    self._before = self._context = ""  # text before `_middle`, and of the context

  def read(self, tokens: Sequence[int] | np.ndarray) -> str:
    """Returns the text of the tokens so far, [n]; earlier ones must not change."""
    window = self._decode(tokens[self._start :])
    new = window[len(self._context) :]
    text = self._before + new
    if len(tokens) - self._middle >= self.WINDOW and not is_incomplete(text):
      context = self._decode(tokens[self._middle :])
      # Otherwise white space may be missing that is there only within a text.
      if context.strip() or (context and context == new):
        self._start, self._middle = self._middle, len(tokens)
        self._before, self._context = text, context
    return text


def is_incomplete(text: str) -> bool:
  """Whether the next token may complete the last character of a decoded text."""
  return text.endswith("\ufffd")


class TextSoFar:
  """The text of one request while its tokens are accepted.

  Pieces that were given out are never taken back: the beginning of a stop string, or of
  a character that takes several tokens, is held until the next tokens decide it.
  """

  def __init__(self, decode: Callable[[np.ndarray], str], stop: tuple[str, ...] = ()):
    """Starts with an empty text."""
    self._decode, self._stop = decode, stop
    self._growing = GrowingText(decode)
    self._searched = 0  # tokens without a stop string
    self._free = 0  # no stop string begins before this character
    self._text, self._given = "", 0

  def watch(self, tokens: np.ndarray) -> int | None:
    """Reads the tokens emitted so far, [n]; see `Request.watch`."""
    if self._stop:
      # Token by token: the answer ends with the token that completes the stop string,
      # and tokens after it are dropped.
      for count in range(self._searched + 1, len(tokens) + 1):
        self._text = self._growing.read(tokens[:count])
        if self._stop_at() is not None:
          return count
      self._searched = len(tokens)
    else:
      self._text = self._growing.read(tokens)
    return None

  def next_piece(self) -> str:
    """Returns the part of the text that is certain and was not given out yet."""
    # An incomplete character decodes to U+FFFD. The next token may complete it.
    text = self._text[: self._stop_at()].rstrip("\ufffd")
    return self._give(text[: len(text) - self._undecided(text)])

  def finish(self, tokens: np.ndarray) -> tuple[str, str]:
    """Returns the whole text, and the part that was not given out yet."""
    self._text = self._decode(tokens)
    text = self._text[: self._stop_at()]
    return text, self._give(text)

  def _give(self, text: str) -> str:
    piece = text[self._given :]
    self._given = max(self._given, len(text))
    return piece

  def _stop_at(self) -> int | None:
    """Index of the first stop string in the text."""
    places = [self._text.find(stop, self._free) for stop in self._stop]
    first = min((place for place in places if place >= 0), default=None)
    if first is None and self._stop:
      longest = max(map(len, self._stop))
      self._free = max(len(self._text.rstrip("\ufffd")) - longest + 1, self._free)
    return first

  def _undecided(self, text: str) -> int:
    """Number of characters at the end that may begin a stop string."""

    def undecided(stop: str) -> int:
      # What was given out begins no stop string.
      first = max(self._given, len(text) - len(stop) + 1)
      starts = (at for at in range(first, len(text)) if stop.startswith(text[at:]))
      return len(text) - next(starts, len(text))

    return max(map(undecided, self._stop), default=0)


def in_order(
  requests: Sequence[Request], finished: Iterable[Finished]
) -> list[Finished]:
  """Returns results in the order of their requests; an object may be there twice."""
  answers: dict[int, deque[Finished]] = {}
  for answer in finished:
    answers.setdefault(id(answer.request), deque()).append(answer)
  return [answers[id(request)].popleft() for request in requests]
