"""Types that cross modules, and the one axis legend of the package.

Axis legend, used in every shape comment and docstring:

  B  rows: requests in flight              H  attention heads
  S  source (prompt) length                D  size of one head
  T  target (output) length                E  width of the model
  K  drafted tokens per round              L  layers
  V  vocabulary                            N  rows of the replay buffer
  k  entries kept of a target distribution R  rows of a training batch

Token ids of T5: 0 pads and starts every decoder, 1 ends a sequence. Other families
say theirs in `Model`.
"""

import collections.abc
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

PAD_ID = 0
EOS_ID = 1
NO_TOKEN = -1  # pads where 0 is a token of text


def id_dtype(vocab_size: int) -> jnp.dtype:
  """The smallest type that stores every token id of a vocabulary in records."""
  return jnp.dtype(jnp.uint16 if vocab_size <= 2**16 else jnp.int32)


Params = Any  # a nested dict of arrays, with t5x's names for T5


class UserError(Exception):
  """Something that whoever called can put right; its text says how, a line a mistake.

  The command line prints these without a traceback; every other error is a fault.
  """


class InputError(UserError, ValueError):
  """A setting, file or request that cannot be used: where, what came, what to do.

  >>> raise InputError("DecodingConfig.rows: received 0, expected an integer >= 1.")
  Traceback (most recent call last):
  osd_jax.base.InputError: DecodingConfig.rows: received 0, expected an integer >= 1.
  """


class MissingExtraError(UserError, ImportError):
  """A library that is not installed, with the extra that installs it."""


class DiskError(UserError, OSError):
  """A file of a run that cannot be written, as on a full disk."""


def check_fields(config: Any, checks: Mapping[str, tuple[Any, str]]) -> None:
  """Raises for the first field of a config that does not hold.

  Args:
    config: a dataclass.
    checks: (holds, expected) by field.

  Raises:
    InputError: naming config, field, what came and what was expected.
  """
  for field, (holds, expected) in checks.items():
    if not holds:
      raise InputError(
        f"{type(config).__name__}.{field}: received {getattr(config, field)!r},"
        f" expected {expected}."
      )


def check_types(config: Any) -> None:
  """Raises for the first field of a config that is not of its annotated type.

  A list is no tuple, True is no number, and an integer does where a float is asked for.
  """
  check_fields(
    config,
    {
      field: (is_of_type(getattr(config, field), hint), type_text(hint))
      for field, hint in field_types(type(config)).items()
    },
  )


@functools.cache
def field_types(config_class: type) -> dict[str, Any]:
  """The type of every field of a dataclass."""
  hints = typing.get_type_hints(config_class)
  return {f.name: hints[f.name] for f in dataclasses.fields(config_class)}


def is_of_type(value: Any, hint: Any) -> bool:
  """Whether a value is of a type, as configs write types."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(is_of_type(value, part) for part in inner)
  if origin is tuple:
    if not isinstance(value, tuple):
      return False
    kinds = inner[:1] * len(value) if inner[-1:] == (...,) else inner
    return len(value) == len(kinds) and all(map(is_of_type, value, kinds))
  if origin is collections.abc.Callable:
    return callable(value)
  if hint in (int, float):
    numbers = (int, float) if hint is float else int
    return isinstance(value, numbers) and not isinstance(value, bool)
  return not isinstance(hint, type) or isinstance(value, hint)


def type_text(hint: Any) -> str:
  """How error texts call a type: without its modules."""
  if isinstance(hint, type) and not typing.get_args(hint):
    return hint.__name__
  return re.sub(r"\b[a-z_]\w*\.(?=\w)", "", str(hint))


def check_counts(config: Any, *fields: str, least: int = 1) -> None:
  """Raises for the first of the fields that is no integer of at least `least`."""
  expected = f"an integer >= {least}"
  check_fields(
    config,
    {field: (is_count(getattr(config, field), least), expected) for field in fields},
  )


def check_choices(config: Any, **choices: Iterable[str]) -> None:
  """Raises for the first field whose value is not among its choices."""
  check_fields(
    config,
    {
      field: (getattr(config, field) in known, f"one of {', '.join(map(repr, known))}")
      for field, known in choices.items()
    },
  )


def is_count(value: Any, least: int = 1) -> bool:
  """Whether a value is an integer of at least `least`; True and 2.0 are none."""
  return isinstance(value, int) and not isinstance(value, bool) and value >= least


class StopReason(enum.IntEnum):
  """Why a row emits no more tokens. Data, carried per row, never a log line."""

  RUNNING = 0
  EOS = 1
  LENGTH = 2
  EMPTY = 3  # no request occupies this row
  STOP_STRING = 4
  NOT_FINITE = 5  # the target is broken: no verdict passes over it

  @property
  def message(self) -> str:
    return {
      StopReason.RUNNING: "still decoding",
      StopReason.EOS: "the target emitted its end-of-sequence token",
      StopReason.LENGTH: "the request reached its own length limit",
      StopReason.EMPTY: "no request is in this row",
      StopReason.STOP_STRING: "the text reached one of the request's stop strings",
      StopReason.NOT_FINITE: "the target's logits were not finite; check its weights",
    }[self]


@dataclasses.dataclass(frozen=True)
class Model:
  """A language model as the pure functions that decoding and distillation call.

  `decoding/` and `distillation/` know models only through this type, so a
  lookup table with known distributions (`testing.py`) runs through the very
  loop that T5 runs through. Frozen and hashed by identity: a static argument.

  Attributes:
    name: what error texts and provenance call it.
    vocab_size: V, number of token ids.
    init: `(key) -> params`.
    prefill: `(served, source [B, S], mask [B, S], cache_length) -> cache`;
      `cache_length` is static, the cache has length 0 in every row.
    decode: `(served, tokens [B, n], cache) -> (logits [B, n, V] float32,
      cache)` with `cache.length` advanced by n in every row.
    score: `(params, source [B, S], mask [B, S], target [B, T]) -> logits
      [B, T, V] float32`; teacher-forced, row t is the distribution of
      `target[:, t]` given `target[:, :t]`. A draft attached to its target takes
      `target_states=` [B, S, E] too, and computes them if they are not given.
    prepare: `(params) -> served`; the copy that prefill and decode read
      (fused, transposed: whatever the backend likes); what needs no change may be
      shared with params. Made once at load and at each swap, never inside a step.
      With a shortlist, `(params, tokens [N])` too.
    logical_axes: `() -> tree` of logical axis names, shaped like what `init` makes.
    shortlist: N, tokens that `decode` gives mass to; 0 for all.
    score_at: `(params, source, mask, target, positions [B, P] or None, tokens [C] or
      None) -> logits [B, P, C]`; `score` at some positions, of some tokens. None:
      whoever wants that leaves out the rest of `score`.
    frozen: the name in params of what belongs to the target and is never trained; ""
      where there is no such thing.
    state_width: E, width of the target's hidden states that an attached draft takes:
      its `prefill` gets `cache.target_states` [B, S, E] in place of the source. 0: the
      model takes the source itself.
    encode_for_draft: `(params, source, mask) -> [B, S, E]`; for an attached draft only:
      computes the target states of prompts.
    head_dim: D, entries of the logical axis "joined_kv" that belong together.
    eos_ids: tokens that end a sequence.
    pad_id: what prompts are filled up with; no token that a prompt may hold.
    start: `(source, mask) -> [B] int32`, the first input of `decode`, whose logits are
      those of the first emitted token; None: `PAD_ID`, as in encoder-decoders.
    max_positions: tokens of prompt and output together that it can place; 0: any.
  """

  name: str
  vocab_size: int
  init: Callable[[jax.Array], Params]
  prefill: Callable[[Params, jax.Array, jax.Array, int], Any]
  decode: Callable[[Params, jax.Array, Any], tuple[jax.Array, Any]]
  score: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
  prepare: Callable[..., Params]
  logical_axes: Callable[[], Any]
  shortlist: int = 0
  score_at: Callable[..., jax.Array] | None = None
  frozen: str = ""
  state_width: int = 0
  encode_for_draft: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None
  head_dim: int = 1
  eos_ids: tuple[int, ...] = (EOS_ID,)
  pad_id: int = PAD_ID
  start: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  max_positions: int = 0

  def mask(self, source: Any) -> Any:
    """[B, S] bool; which entries of sources [B, S] are tokens."""
    return source != self.pad_id

  def starts(self, source: jax.Array) -> jax.Array:
    """[B] int32; the first input of `decode` after prompts [B, S]."""
    if self.start is None:
      return jnp.full(source.shape[:1], PAD_ID, jnp.int32)
    return self.start(source, self.mask(source))

  def split(self, params: Params) -> tuple[Params, Params]:
    """What is trained, and what is the target's; None where nothing is."""
    if not self.frozen:
      return params, None
    trained = {name: leaf for name, leaf in params.items() if name != self.frozen}
    return trained, params[self.frozen]

  def join(self, trained: Params, frozen: Params) -> Params:
    """The parameters that `split` took apart."""
    return {**trained, self.frozen: frozen} if self.frozen else trained

  __hash__ = object.__hash__

  def __eq__(self, other: object) -> bool:
    return self is other


@flax.struct.dataclass
class SamplingSettings:
  """Per-request sampling, as arrays: changing one compiles nothing.

  Attributes:
    temperature: [B] float32; 0 is greedy.
    top_k: [B] int32; keep the k most probable tokens, 0 keeps all.
    top_p: [B] float32; nucleus mass, 1 keeps all.
    seed: [B] uint32; random draws are a function of (seed, position, purpose).
    max_length: [B] int32; at most this many tokens are emitted.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  seed: jax.Array
  max_length: jax.Array


@flax.struct.dataclass
class Proposal:
  """What the draft wrote in one round.

  Attributes:
    tokens: [B, K] int32.
    logits: [B, K, V] float32, raw; row i is what `tokens[:, i]` was drawn from.
  """

  tokens: jax.Array
  logits: jax.Array


@flax.struct.dataclass
class Verification:
  """The target's judgement of one round: row i judges the i-th emitted token.

  Attributes:
    logits: [B, K + 1, V] float32, raw.
  """

  logits: jax.Array


@flax.struct.dataclass
class Acceptance:
  """The tokens that one round emits, before end-of-sequence and limits cut it.

  Attributes:
    tokens: [B, K + 1] int32; the accepted tokens, then the recovered or the
      bonus token at index `accepted`; what follows is undefined.
    accepted: [B] int32 in 0..K; length of the accepted prefix.
  """

  tokens: jax.Array
  accepted: jax.Array


@flax.struct.dataclass
class Records:
  """The target's distributions at emitted positions, as verification saw them.

  Raw log-softmax (temperature 1, before top-k and top-p), truncated to the k
  most probable tokens with the remaining mass as one bucket. `log_probs`
  is sorted, most probable first. Position t judged the t-th emitted token.

  Attributes:
    log_probs: [..., T, k] float32.
    ids: [..., T, k] uint16 or int32.
    tail: [..., T] float32; probability mass outside `ids`, 0 if k = V.
    error: [..., T] bool; a drafted token was rejected here.
  """

  log_probs: jax.Array
  ids: jax.Array
  tail: jax.Array
  error: jax.Array


@flax.struct.dataclass
class DistillationBatch:
  """Rows for the distillation loss: finished requests with their records.

  Attributes:
    source: [R, S] int32, padded with `Model.pad_id`.
    target: [R, T] int32, emitted tokens padded likewise.
    mask: [R, T] bool; emitted positions, up to and including end-of-sequence.
    records: `Records` with leading axis R.
    weight: [R] float32; 0 for rows that only fill the batch.
    target_states: [R, S, E] bfloat16, the target's hidden states of the source, for an
      attached draft; None where they are not kept.
  """

  source: jax.Array
  target: jax.Array
  mask: jax.Array
  records: Records
  weight: jax.Array
  target_states: jax.Array | None = None

  @property
  def score_inputs(self) -> dict[str, jax.Array]:
    """Keyword arguments for `Model.score`: the target states, if they are kept."""
    return {} if self.target_states is None else {"target_states": self.target_states}
