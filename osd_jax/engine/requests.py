"""What goes into decoding and what comes out: configs, requests, answers."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from osd_jax import base
from osd_jax.decoding import accept, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.engine.adaptive import AdaptiveConfig


@dataclasses.dataclass(frozen=True)
class DecodingConfig(base.Config):
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

  def checks(self):
    lengths, most = self.source_lengths, self.num_draft_tokens
    return {
      "source_lengths": (list(lengths) == sorted(set(lengths)), "ascending integers"),
      "adaptive": (
        self.adaptive is None or self._takes(self.adaptive),
        f"a candidate in 1..{most} (num_draft_tokens) and no costs or one table for"
        f" each of the {len(lengths)} source_lengths",
      ),
    }

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
class SamplingConfig(base.Config):
  """Sampling of every request of a run; see `base.SamplingSettings`.

  Attributes:
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    seed: request i draws with seed + i, modulo 2 ** 32.
  """

  temperature: float = 0.0
  top_k: base.CountOrZero = 0
  top_p: Annotated[float, base.Between(1e-30, 1)] = 1.0
  seed: Annotated[int, base.Between(0, 2**32 - 1)] = 0

  def checks(self):
    # Smaller numbers than 1e-30 underflow float32: they would read as 0.
    is_warm = 1e-30 <= self.temperature <= 1e30
    return {
      "temperature": (
        self.temperature == 0 or is_warm,
        "0, or a number in 1e-30..1e30",
      )
    }

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
