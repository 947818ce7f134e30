"""What goes into decoding and what comes out: configs, requests, answers."""

import dataclasses
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.decoding import accept
from osd_jax.decoding import state as state_lib
from osd_jax.serving.adaptive import AdaptiveConfig


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """Shapes of decoding, and how much is drafted.

  Attributes:
    rows: B, requests in flight.
    num_draft_tokens: K in 1..8; with `adaptive` the largest.
    acceptance_rule: a key of `accept.RULES`. "rejection" accepts most; by "coupling"
      sampled outputs too are plain decoding's, whatever the draft.
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
  acceptance_rule: str = "rejection"
  source_lengths: tuple[int, ...] = (64,)
  target_length: int = 96
  record_top_k: int = 64
  max_rounds: int = 256
  adaptive: AdaptiveConfig | None = None

  def __post_init__(self):
    lengths = tuple(sorted(self.source_lengths))
    object.__setattr__(self, "source_lengths", lengths)
    checks = {
      "rows": (self.rows >= 1, "an integer >= 1"),
      "num_draft_tokens": (
        1 <= self.num_draft_tokens <= state_lib.MAX_DRAFT_TOKENS,
        f"an integer in 1..{state_lib.MAX_DRAFT_TOKENS}",
      ),
      "acceptance_rule": (
        self.acceptance_rule in accept.RULES,
        f"one of {sorted(accept.RULES)}",
      ),
      "source_lengths": (lengths and lengths[0] >= 2, "lengths >= 2"),
      "target_length": (self.target_length >= 1, "an integer >= 1"),
      "record_top_k": (self.record_top_k >= 0, "an integer >= 0"),
      "max_rounds": (self.max_rounds >= 1, "an integer >= 1"),
      "adaptive": (
        self.adaptive is None or self._takes(self.adaptive),
        f"a candidate in 1..{self.num_draft_tokens} (num_draft_tokens) and as many"
        f" costs as source_lengths ({len(lengths)}), or none",
      ),
    }
    for name, (valid, expected) in checks.items():
      if not valid:
        raise base.InputError(
          f"DecodingConfig.{name}: received {getattr(self, name)!r}, expected"
          f" {expected}."
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
    seed: request i draws with seed + i.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """One prompt to answer.

  Attributes:
    tokens: [n] int32, prompt with end-of-sequence.
    sampling: how to draw; its seed is the request's own.
    max_length: at most this many tokens are emitted; None takes T.
    tag: anything the caller wants back with the answer.
  """

  tokens: np.ndarray
  sampling: SamplingConfig = SamplingConfig()
  max_length: int | None = None
  tag: Any = None


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
