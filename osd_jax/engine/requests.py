"""What goes into decoding and what comes out: configs, requests, answers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.decoding import accept, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.engine.adaptive import AdaptiveConfig


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """Shapes of decoding, and how much is drafted.

  >>> DecodingConfig(source_lengths=(64, 16)).bucket(20)
  64

  Attributes:
    rows: B, requests in flight.
    num_draft_tokens: K in 1..8; with `adaptive` the largest.
    acceptance_rule: a key of `accept.RULES`, or an `accept.Rule` of your own.
      "rejection" accepts most; by "coupling" sampled outputs too are plain decoding's,
      whatever the draft.
    source_lengths: buckets S that prompts are padded to; a batch holds one bucket.
    target_length: T, upper limit of every request's length limit.
    record_top_k: k, entries kept of every target distribution; 0 records nothing,
      V or more keeps full rows.
    max_rounds: rounds after which a call returns to the host although no row has
      finished; bounds how long a swap or a new request waits.
    adaptive: chooses K between two calls, plain decoding included; None keeps K.
  """

  rows: int = 1
  num_draft_tokens: int = 5
  acceptance_rule: str | accept.Rule = "rejection"
  source_lengths: tuple[int, ...] = (64,)
  target_length: int = 96
  record_top_k: int = 64
  max_rounds: int = 256
  adaptive: AdaptiveConfig | None = None

  def __post_init__(self):
    base.check_counts(self, "rows", "target_length", "max_rounds")
    base.check_counts(self, "record_top_k", least=0)
    lengths = self.source_lengths
    base.check_fields(
      self,
      {
        "num_draft_tokens": (
          base.is_count(self.num_draft_tokens)
          and self.num_draft_tokens <= state_lib.MAX_DRAFT_TOKENS,
          f"an integer in 1..{state_lib.MAX_DRAFT_TOKENS}",
        ),
        "acceptance_rule": (
          isinstance(self.acceptance_rule, accept.Rule)
          or self.acceptance_rule in accept.RULES,
          f"one of {sorted(accept.RULES)}, or an accept.Rule",
        ),
        "source_lengths": (
          lengths and all(base.is_count(length, 2) for length in lengths),
          "a tuple of integers >= 2",
        ),
        "adaptive": (
          self.adaptive is None or self._takes(self.adaptive),
          f"a candidate in 1..{self.num_draft_tokens} (num_draft_tokens) and as many"
          f" costs as source_lengths ({len(lengths)}), or none",
        ),
      },
    )
    object.__setattr__(self, "source_lengths", tuple(sorted(lengths)))

  def bucket(self, count: int) -> int:
    """The smallest of `source_lengths` that holds a prompt of `count` tokens."""
    return next(length for length in self.source_lengths if length >= count)

  def check_sources(self, config: Any, field: str) -> None:
    """Raises InputError where a `source_length` is longer than every bucket.

    Args:
      config: that has it.
      field: where the config itself stands, for the error's text.
    """
    received, longest = config.source_length, self.source_lengths[-1]
    if received > longest:
      raise base.InputError(
        f"{field}: received a {type(config).__name__}.source_length of {received},"
        f" expected at most {longest}, the largest of DecodingConfig.source_lengths."
      )

  def check(self, model: base.Model) -> None:
    """Raises InputError where the longest prompt and output are too many tokens."""
    longest = self.source_lengths[-1] + self.target_length
    if model.max_positions and longest > model.max_positions:
      raise base.InputError(
        f"decoding: DecodingConfig.source_lengths {self.source_lengths} and"
        f" target_length {self.target_length} are {longest} tokens, expected at most"
        f" the {model.max_positions} that the {model.name} can place; lower one of"
        " them."
      )

  def shapes(self) -> "DecodingConfig":
    """What is compiled into every call: all but K and numbers of rounds."""
    plain = DecodingConfig()
    return dataclasses.replace(
      self,
      num_draft_tokens=plain.num_draft_tokens,
      max_rounds=plain.max_rounds,
      adaptive=None,
    )

  def _takes(self, adaptive: AdaptiveConfig) -> bool:
    some = adaptive.candidates[1] <= self.num_draft_tokens
    return some and len(adaptive.costs) in (0, len(self.source_lengths))


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling of every request of a run; see `base.SamplingSettings`.

  Attributes:
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    seed: request i draws with seed + i, modulo 2 ** 32.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    # Smaller numbers are no float32: they would read as greedy, or as no mass at all.
    warm = _is_number(self.temperature) and 1e-30 <= self.temperature <= 1e30
    base.check_fields(
      self,
      {
        "temperature": (self.temperature == 0 or warm, "0, or a number in 1e-30..1e30"),
        "top_k": (base.is_count(self.top_k, 0), "an integer >= 0 (0 keeps all)"),
        "top_p": (
          _is_number(self.top_p) and 1e-30 <= self.top_p <= 1,
          "a number in 1e-30..1 (1 keeps all)",
        ),
        "seed": (
          base.is_count(self.seed, 0) and self.seed < 2**32,
          "an integer in 0..2**32 - 1",
        ),
      },
    )

  def of_request(self, index: int) -> "SamplingConfig":
    """The sampling of the index-th request, with a seed of its own."""
    return dataclasses.replace(self, seed=(self.seed + index) % 2**32)

  def settings(self, max_length: int) -> base.SamplingSettings:
    """The same as arrays of one row."""
    return sampling.make_settings(
      1,
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      seed=self.seed,
      max_length=max_length,
    )


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """One prompt to answer.

  Attributes:
    tokens: [n] int32, prompt with end-of-sequence.
    sampling: how to draw; its seed is the request's own.
    max_length: at most this many tokens are emitted; None takes T.
    tag: anything the caller wants back with the answer.
    watch: shown the tokens emitted so far [m] after every call, which is short then; a
      number ends the request behind that many of them.
  """

  tokens: np.ndarray
  sampling: SamplingConfig = SamplingConfig()
  max_length: int | None = None
  tag: Any = None
  watch: Callable[[np.ndarray], int | None] | None = None

  def check(self, longest: int, vocab_size: int) -> None:
    """Raises where it cannot be decoded.

    Args:
      longest: tokens of the longest prompt.
      vocab_size: V.

    Raises:
      InputError: the prompt is empty, too long or no ids of the vocabulary, or the
        length limit is no integer >= 1.
    """
    tokens = np.asarray(self.tokens)
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
    if self.max_length is not None and not base.is_count(self.max_length):
      raise base.InputError(
        f"decoding: received max_length={self.max_length!r}, expected an integer >= 1,"
        " or None for DecodingConfig.target_length."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
  """One answered request.

  Attributes:
    request: the request.
    tokens: [n] int32, emitted, end-of-sequence included.
    stop_reason: why it ended.
    target_calls: verifications (plain decoding: steps) it took.
    drafted: drafted tokens that were judged and could be emitted.
    accepted: of those, accepted.
    accepted_per_position: [8] rounds that accepted the i-th drafted token.
    milliseconds: wall time of its prefill and of its share of the calls.
    batch: the same as a `DistillationBatch` of one row; records None if off.
    settings: [1] sampling it was decoded with.
    draft_version: of the draft that served when it ended.
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
