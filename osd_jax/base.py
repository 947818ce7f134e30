"""Types that cross modules, and the one axis legend of the package.

Axis legend, used in every shape comment and docstring:

  B  rows: requests in flight              H  attention heads
  S  source (prompt) length                D  size of one head
  T  target (output) length                E  width of the model
  K  drafted tokens per round              L  layers
  V  vocabulary                            N  rows of the replay buffer
  k  entries kept of a target distribution R  rows of a training batch

In T5, token 0 is padding and the first decoder input, and token 1 ends a sequence. For
other families see the fields of `Model`.
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
NO_TOKEN = -1  # padding in families where 0 is an ordinary token


def id_dtype(vocab_size: int) -> jnp.dtype:
  """The smallest type that can store the token ids of a vocabulary."""
  return jnp.dtype(jnp.uint16 if vocab_size <= 2**16 else jnp.int32)


Params = Any  # a nested dict of arrays; models of this package use t5x's names


class UserError(Exception):
  """An error that the user can fix. The message says how, with one line per mistake.

  The command line prints these errors without a traceback.
  """


class InputError(UserError, ValueError):
  """An invalid setting, file or request. The message says where, and what to do.

  >>> raise InputError("DecodingConfig.rows: received 0, expected an integer >= 1.")
  Traceback (most recent call last):
  osd_jax.base.InputError: DecodingConfig.rows: received 0, expected an integer >= 1.
  """


class MissingExtraError(UserError, ImportError):
  """A missing library. The message names the extra that installs it."""


class DiskError(UserError, OSError):
  """A file that cannot be written, for example because the disk is full."""


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
  """Why a row emits no more tokens; carried per row in the decoding state."""

  RUNNING = 0
  EOS = 1
  LENGTH = 2
  EMPTY = 3  # no request occupies this row
  STOP_STRING = 4
  NOT_FINITE = 5  # the target's logits were NaN or infinite

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
  """A language model, as the pure functions that decoding and distillation call.

  `decoding/` and `distillation/` import no model. They receive this type, so that a
  lookup table with known distributions (`testing.py`) runs through the same code as a
  T5. Models are static arguments of jitted functions: they are frozen, and compared and
  hashed by identity.

  The names in the signatures below: `params` are trained parameters; `served` is the
  copy that `prepare` makes of them; `source` [B, S] int32 are padded prompts; `mask`
  [B, S] bool marks their tokens; `target` [B, T] int32 are emitted tokens.

  Attributes:
    name: name for error messages and logs.
    vocab_size: V.
    init: `(key) -> params`. Makes random parameters.
    prefill: `(served, source, mask, cache_length) -> cache`. Processes the prompts and
      returns a cache with room for `cache_length` tokens (static) and length 0 in every
      row. For an attached draft, see `state_width`.
    decode: `(served, tokens [B, n], cache) -> (logits [B, n, V] float32, cache)`. Feeds
      n tokens to every row, starting at the row's `cache.length`, and advances the
      length by n. The logits at index i are for the token after `tokens[:, i]`.
    score: `(params, source, mask, target) -> logits [B, T, V] float32`. Teacher
      forcing: the logits at index t are for `target[:, t]`, given `target[:, :t]`. For
      an attached draft it also takes `target_states=` [B, S, E], and computes them if
      they are not given.
    prepare: `(params) -> served`. Makes the copy that `prefill` and `decode` read, in
      the layout that is fastest on the backend. It is called once when a model is
      loaded and at each swap of the draft. Arrays that need no change may be shared
      with params. If `shortlist` is set, it also accepts `(params, tokens [N])`.
    logical_axes: `() -> tree`. Logical axis names for each parameter, for sharding.
    shortlist: N, number of tokens whose logits `decode` computes; the others get -inf.
      0 means all tokens.
    score_at: `(params, source, mask, target, positions, tokens) -> logits [B, P, C]`.
      Like `score`, for positions [B, P] and tokens [C] only; None means all. If
      `score_at` is None, callers use `score` and select from its result.
    frozen: key in params of the parameters that belong to the target and are never
      trained; "" if there are none.
    state_width: E of the target states that an attached draft needs. Its `prefill`
      takes the `target_states` [B, S, E] of the target's cache instead of `source`. 0
      for models that take the source.
    encode_for_draft: `(params, source, mask) -> [B, S, E]`. Computes the target states
      of prompts with the frozen parameters of an attached draft. None for other models.
    head_dim: D, size of the groups on the logical axis "joined_kv" that sharding must
      not split.
    eos_ids: tokens that end a sequence.
    pad_id: padding of prompts; it must not occur as a token of a prompt.
    start: `(source, mask) -> [B] int32`. The first input of `decode`, whose logits are
      for the first emitted token. None means `PAD_ID`, as in encoder-decoders.
    max_positions: longest prompt and output together, in tokens; 0 means no limit.
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
    """[B, S] bool; which entries of sources [B, S] are tokens, not padding."""
    return source != self.pad_id

  def starts(self, source: jax.Array) -> jax.Array:
    """[B] int32; the first decoder input of prompts [B, S]."""
    if self.start is None:
      return jnp.full(source.shape[:1], PAD_ID, jnp.int32)
    return self.start(source, self.mask(source))

  def split(self, params: Params) -> tuple[Params, Params]:
    """Splits parameters into (trained, frozen); frozen is None if `frozen` is ""."""
    if not self.frozen:
      return params, None
    trained = {name: leaf for name, leaf in params.items() if name != self.frozen}
    return trained, params[self.frozen]

  def join(self, trained: Params, frozen: Params) -> Params:
    """The inverse of `split`."""
    return {**trained, self.frozen: frozen} if self.frozen else trained

  __hash__ = object.__hash__

  def __eq__(self, other: object) -> bool:
    return self is other


@flax.struct.dataclass
class SamplingSettings:
  """Sampling settings of each row, as arrays, so that changing one recompiles nothing.

  Attributes:
    temperature: [B] float32; 0 means greedy.
    top_k: [B] int32; keep the k most probable tokens; 0 keeps all.
    top_p: [B] float32; keep the nucleus of this mass; 1 keeps all.
    seed: [B] uint32; every random draw is a function of (seed, position, purpose).
    max_length: [B] int32; maximum number of emitted tokens.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  seed: jax.Array
  max_length: jax.Array


@flax.struct.dataclass
class Proposal:
  """Tokens that a drafter proposes in one round.

  Attributes:
    tokens: [B, K] int32.
    logits: [B, K, V] float32, raw; row i is the distribution that `tokens[:, i]` was
      drawn from. None for a deterministic proposal, whose draft distributions are
      one-hot at its tokens.
    lengths: [B] int32 in 0..K, how many of its tokens a row proposes; the others are
      ignored, and a row of length 0 decodes plainly. None proposes K in every row.
  """

  tokens: jax.Array
  logits: jax.Array | None
  lengths: jax.Array | None = None

  @property
  def is_proposed(self) -> jax.Array:
    """[B or 1, K] bool; which tokens are proposed."""
    offset = jnp.arange(self.tokens.shape[1])[None]
    if self.lengths is None:
      return offset >= 0
    return offset < self.lengths[:, None]


@flax.struct.dataclass
class Verification:
  """The target's distributions in one round.

  Attributes:
    logits: [B, K + 1, V] float32, raw; `logits[:, i]` is for the i-th emitted token.
  """

  logits: jax.Array


@flax.struct.dataclass
class Acceptance:
  """The tokens that one round emits, before they are cut at end-of-sequence or limits.

  Attributes:
    tokens: [B, K + 1] int32; the accepted tokens, then the recovered or bonus token at
      index `accepted`. Later entries are undefined.
    accepted: [B] int32 in 0..K; length of the accepted prefix.
  """

  tokens: jax.Array
  accepted: jax.Array


@flax.struct.dataclass
class Records:
  """The target's distributions at emitted positions, recorded during verification.

  Raw log-softmax (temperature 1, before top-k and top-p) of the k most probable tokens,
  in descending order, and the total probability of all others. Position t holds the
  distribution of the t-th emitted token.

  Attributes:
    log_probs: [..., T, k] float32.
    ids: [..., T, k] uint16 or int32.
    tail: [..., T] float32; total probability of tokens outside `ids`, 0 if k = V.
    error: [..., T] bool; True where a drafted token was rejected.
  """

  log_probs: jax.Array
  ids: jax.Array
  tail: jax.Array
  error: jax.Array


@flax.struct.dataclass
class DistillationBatch:
  """Finished requests with their records, as rows for the distillation loss.

  Attributes:
    source: [R, S] int32, padded with `Model.pad_id`.
    target: [R, T] int32, emitted tokens with the same padding.
    mask: [R, T] bool; emitted positions, including end-of-sequence.
    records: `Records` with leading axis R.
    weight: [R] float32; 0 for rows that only pad the batch.
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
