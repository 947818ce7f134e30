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
import contextlib
import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

PAD_ID = 0
EOS_ID = 1
NO_TOKEN = -1  # padding in families where 0 is an ordinary token


def id_dtype(vocab_size: int) -> jnp.dtype:
  """The smallest type that can store the token ids of a vocabulary."""
  return jnp.dtype(jnp.uint16 if vocab_size <= 2**16 else jnp.int32)


# The states of a target that a draft reads: "prompt", "tokens" or "" for none, or those
# after each of several numbers of layers, in one vector.
States = str | tuple[int, ...]
Params = Any  # a nested dict of arrays; models of this package use t5x's names


class UserError(Exception):
  """An error that the user can fix. The message says how, with one line per mistake.

  The command line prints these errors without a traceback.
  """


class InputError(UserError, ValueError):
  """An invalid setting, file or request; the message names the place and the remedy.

  >>> raise InputError("DecodingConfig.rows: received 0, expected an integer >= 1.")
  Traceback (most recent call last):
  osd_jax.base.InputError: DecodingConfig.rows: received 0, expected an integer >= 1.
  """


class NotFiniteError(UserError):
  """The target's logits were not finite, so a prompt has no answer."""

  exit_code = 1


class BrokenDraftError(InputError):
  """A draft whose parameters or scores are NaN or infinite."""


class MissingExtraError(UserError, ImportError):
  """A missing library. The message names the extra that installs it."""


@contextlib.contextmanager
def extra(name: str, needed_by: str) -> Iterator[None]:
  """Raises MissingExtraError if an import in the body fails; `name` is the extra."""
  try:
    yield
  except ImportError as error:
    raise MissingExtraError(
      f'{needed_by} needs {error.name}; pip install "osd_jax[{name}]" adds it.'
    ) from error


class DiskError(UserError, OSError):
  """A file that cannot be written, for example because the disk is full."""


@dataclasses.dataclass(frozen=True)
class Constraint:
  """A requirement on a config field in addition to its type.

  Constraints are declared on the field:

      rows: Annotated[int, AtLeast(1)] = 1
  """

  text: str  # completes "expected an integer ...", or stands alone if `is_complete`
  # Whether a value of the right type satisfies the constraint.
  holds: Callable[[Any], bool]
  is_complete: bool = False  # whether `text` needs no noun in front


def AtLeast(bound: float) -> Constraint:
  """Requires a finite number >= bound."""
  return Constraint(f">= {bound}", lambda x: bound <= x < math.inf)


def Above(bound: float) -> Constraint:
  """Requires a finite number > bound."""
  return Constraint(f"> {bound}", lambda x: bound < x < math.inf)


def Below(bound: float) -> Constraint:
  """Requires a number < bound."""
  return Constraint(f"< {bound}", lambda x: x < bound)


def Between(low: float, high: float) -> Constraint:
  """Requires a number in low..high, both included."""
  return Constraint(f"in {low}..{high}", lambda x: low <= x <= high)


def OneOf(*choices: str) -> Constraint:
  """Requires one of some names."""
  names = ", ".join(map(repr, choices))
  return Constraint(f"one of {names}", lambda x: x in choices, True)


def NonEmpty(expected: str) -> Constraint:
  """Requires a text that is not blank, or a tuple with entries."""
  not_blank = lambda x: bool(x.strip() if isinstance(x, str) else x)
  return Constraint(expected, not_blank, True)


Count = Annotated[int, AtLeast(1)]
CountOrZero = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
NonNegative = Annotated[float, AtLeast(0)]
Share = Annotated[float, Between(0, 1)]
Path = Annotated[str, NonEmpty("a path")]
Folder = Annotated[str, NonEmpty("a folder")]


@dataclasses.dataclass(frozen=True)
class Config:
  """Base class of all configs: checks types and constraints when one is made.

  Subclasses are frozen dataclasses. Lists become tuples and dicts become nested
  configs, so that fields read from JSON make the same config. Scalars of numpy become
  Python numbers.

  >>> @dataclasses.dataclass(frozen=True)
  ... class Serving(Config):
  ...   rows: Annotated[int, AtLeast(1)] = 1
  >>> Serving(rows=0)
  Traceback (most recent call last):
  osd_jax.base.InputError: Serving.rows: received 0, expected an integer >= 1.
  """

  def __init_subclass__(cls, **arguments: Any):
    super().__init_subclass__(**arguments)
    if "__post_init__" in vars(cls):  # it would replace the checks
      raise TypeError(f"{cls.__name__}: define `checks` instead of `__post_init__`.")

  def __post_init__(self):
    hints = field_types(type(self))
    for field, hint in hints.items():
      # Frozen dataclasses with tuples are hashable, which static arguments of jit need.
      value = as_tuples(getattr(self, field))
      # Unknown or missing fields are reported below, as a wrong type.
      with contextlib.suppress(TypeError):
        value = from_json(value, hint)
      object.__setattr__(self, field, value)
    wrong = {
      field: expectation(hint)
      for field, hint in hints.items()
      if not is_of_type(getattr(self, field), hint)
    }
    # Checks across fields may assume that every field has its type.
    wrong = wrong or {
      field: expected for field, (holds, expected) in self.checks().items() if not holds
    }
    if wrong:
      problems = (self._problem(field, expected) for field, expected in wrong.items())
      raise InputError("\n".join(problems))

  def _problem(self, field: str, expected: str) -> str:
    received = repr(getattr(self, field))
    if len(received) > 300:  # a loaded model would print all of its weights
      received = f"a {type(getattr(self, field)).__name__}"
    return f"{type(self).__name__}.{field}: received {received}, expected {expected}."

  def checks(self) -> Mapping[str, tuple[Any, str]]:
    """Checks that need several fields: field -> (whether it holds, expectation)."""
    return {}


def from_json(value: Any, kind: Any) -> Any:
  """Restores a value of this type from JSON values.

  Dicts become the dataclasses that the annotations name, lists become tuples, and
  numbers become enums; `dataclasses.asdict` is the way back. A value that does not fit
  is returned as it is.

  >>> from_json([0, 1], tuple[StopReason, ...])[1].name
  'EOS'

  Raises:
    TypeError: a dataclass has no such field, or needs another one.
  """
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    return from_json(value, inner[0])
  if origin in (typing.Union, types.UnionType):
    for part in inner:
      with contextlib.suppress(TypeError):  # the fields of another part
        restored = from_json(value, part)
        if is_of_type(restored, part):
          return restored
    return value
  if origin is tuple and isinstance(value, list | tuple):
    kinds = _entry_types(inner, len(value))
    fits = len(kinds) == len(value)
    return tuple(map(from_json, value, kinds)) if fits else value
  if not isinstance(kind, type):
    return value
  if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
    hints = field_types(kind)
    fields = {name: from_json(x, hints.get(name)) for name, x in value.items()}
    return kind(**fields)
  return kind(value) if issubclass(kind, enum.Enum) else value


def _entry_types(inner: tuple[Any, ...], count: int) -> tuple[Any, ...]:
  """Types of a tuple's entries; tuple[X, ...] has any length, tuple[X, Y] exactly 2."""
  return inner[:1] * count if inner[-1:] == (...,) else inner


@functools.cache
def field_types(config_class: type) -> dict[str, Any]:
  """Returns the type of every field of a dataclass, constraints included."""
  hints = typing.get_type_hints(config_class, include_extras=True)
  return {f.name: hints[f.name] for f in dataclasses.fields(config_class)}


def is_of_type(value: Any, hint: Any) -> bool:
  """Whether a value has a type and satisfies its constraints.

  Lists are not tuples, bools are not numbers, and ints are accepted as floats.
  """
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    kind, *constraints = inner
    return is_of_type(value, kind) and all(c.holds(value) for c in constraints)
  if origin in (typing.Union, types.UnionType):
    return any(is_of_type(value, part) for part in inner)
  if origin is tuple:
    if not isinstance(value, tuple):
      return False
    kinds = _entry_types(inner, len(value))
    return len(value) == len(kinds) and all(map(is_of_type, value, kinds))
  if origin is collections.abc.Callable:
    return callable(value)
  if hint in (int, float):
    numbers = (int, float) if hint is float else int
    # True is an int in Python, but `rows = True` is a mistake.
    return isinstance(value, numbers) and not isinstance(value, bool)
  return not isinstance(hint, type) or isinstance(value, hint)


def expectation(hint: Any) -> str:
  """Describes a type and its constraints: "an integer >= 1, or None"."""
  inner = typing.get_args(hint)
  if "Annotated" not in repr(hint):
    return type_text(hint)
  if typing.get_origin(hint) is Annotated:
    kind, *constraints = inner
    text = " and ".join(c.text for c in constraints)
    noun = {int: "an integer", float: "a number"}.get(kind, type_text(kind))
    if typing.get_origin(kind) is tuple and "Annotated" in repr(kind):
      text = f"{text}; {expectation(kind)}"
    return text if constraints[0].is_complete else f"{noun} {text}"
  if typing.get_origin(hint) is tuple:
    return f"a tuple, each entry {expectation(inner[0])}"
  return ", or ".join(map(expectation, inner))


def type_text(hint: Any) -> str:
  """Returns a type as text, without modules and constraints."""
  if isinstance(hint, type):
    return "None" if hint is type(None) else hint.__name__
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return type_text(inner[0])
  if origin in (typing.Union, types.UnionType):
    return " | ".join(map(type_text, inner))
  if origin is tuple:
    parts = ("..." if part is ... else type_text(part) for part in inner)
    return f"tuple[{', '.join(parts)}]"
  return re.sub(r"\b[a-z_]\w*\.(?=\w)", "", str(hint))


def as_tuples(value: Any) -> Any:
  """Replaces lists by tuples and numpy's scalars by Python's, nested ones too."""
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, list | tuple):
    items = map(as_tuples, value)
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
  return value


def is_count(value: Any, least: int = 1) -> typing.TypeGuard[int]:
  """Whether a value is an integer of at least `least`; True and 2.0 do not count."""
  is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
  return is_integer and bool(value >= least)


class StopReason(enum.IntEnum):
  """Why a row emits no more tokens; carried per row in the decoding state."""

  RUNNING = 0
  EOS = 1
  LENGTH = 2
  EMPTY = 3  # no request occupies this row
  STOP_STRING = 4
  NOT_FINITE = 5  # the target's logits were NaN or infinite
  REFUSED = 6  # the prompt could not be decoded; no row ever has it

  @property
  def message(self) -> str:
    return {
      StopReason.RUNNING: "still decoding",
      StopReason.EOS: "the target emitted its end-of-sequence token",
      StopReason.LENGTH: "the request reached its own length limit",
      StopReason.EMPTY: "no request is in this row",
      StopReason.STOP_STRING: "the text reached one of the request's stop strings",
      StopReason.NOT_FINITE: "the target's logits were not finite; check its weights",
      StopReason.REFUSED: "the prompt is invalid, and was not decoded",
    }[self]


class Draft(typing.NamedTuple):
  """A draft that a server can serve from its next call on.

  Attributes:
    params: trained parameters.
    version: number that answers report as `draft_version`.
    shortlist: [N] int32, the tokens that its output head covers; None: all.
  """

  params: Params
  version: int = 0
  shortlist: Any = None


class Layout(enum.Enum):
  """How a kernel is stored; `models/layers.py` has a product for each."""

  TRAINED = "[in, out]"
  SERVED = "[out, in]"
  PACKED = "[out, in], kernels that multiply the same vector in one array"
  INT8 = "[out, in] in int8, with one float32 scale per output"


# Kernels that `Layout.PACKED` joins, by the name of the joined one.
JOINED = {"query_key_value": ("query", "key", "value"), "wi": ("wi_0", "wi_1")}


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
    vocab_size: V, number of token ids.
    init: `(key) -> params`. Makes random parameters.
    prefill: `(served, source, mask, cache_length) -> cache`. Processes the prompts and
      returns a cache with room for `cache_length` tokens (static) and length 0 in every
      row. What it stores of a prompt's padding must not matter: an engine cuts padding
      off, or adds False, zeros and tokens of -1. For an attached draft, see
      `state_width`.
    decode: `(served, tokens [B, n], cache) -> (logits [B, n, V] float32, cache)`. Feeds
      n tokens to every row, starting at the row's `cache.length`, and advances the
      length by n. The logits at index i are for the token after `tokens[:, i]`. An
      input of NO_TOKEN (-1) stands for no token: its logits and what it stores are
      never read, so it may be skipped.
    extend: `(served, source, mask, cache, start [], n) -> cache`. Does the part of a
      prefill for the n (static) tokens of every prompt from place `start` on, in the
      cache that `prefill` would return and that holds all tokens before. None for
      models that read a prompt at once, as encoders do.
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
    reads_prompt: an attached draft that also reads the tokens of the prompt. Its
      `prefill` takes `(source, target_states)`.
    encode_for_draft: `(params, source, mask) -> [B, S, E]`. Computes the target states
      of prompts with the frozen parameters of an attached draft. None for other models.
    reads_tokens: a draft that also reads the target's state before each token. Its
      `decode` takes these states [B, n, E] as a fourth argument, and without them goes
      on from its own; its scores take `token_states=` [B, T, E], as the cache of a
      target has them.
    score_steps: `score_at` for such a draft, [steps, B, P, C]: in step n, the draft has
      drafted the n tokens before each one, and has only its own states of them. None
      for other models.
    score_with_states: `score` of a target, which returns (logits, token states
      [B, T, E] bfloat16). None for drafts.
    head_dim: D, size of the groups on the logical axis "joined_kv" that sharding must
      not split.
    eos_ids: tokens that end a sequence.
    pad_id: padding of prompts; it must not occur as a token of a prompt.
    start: `(source, mask) -> [B] int32`. The first input of `decode`, whose logits are
      for the first emitted token. None means `start_id`, as in encoder-decoders.
    start_id: the first input of `decode` in every row, if `start` is None.
    max_positions: longest prompt and output together, in tokens; 0 means no limit.
    absorb: `(params, source [1, S], emitted [T], length []) -> params`. Learns from a
      finished answer without training, as the n-gram cache does, which is served
      unprepared. None for models that are trained.
    dtype: type that the model computes in, which may be wider than the type of its
      parameters; "" means the narrowest type of the served parameters.
  """

  name: str
  vocab_size: int
  init: Callable[[jax.Array], Params]
  prefill: Callable[[Params, jax.Array, jax.Array, int], Any]
  decode: Callable[[Params, jax.Array, Any], tuple[jax.Array, Any]]
  score: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
  prepare: Callable[..., Params]
  logical_axes: Callable[[], Any]
  extend: Callable[..., Any] | None = None
  shortlist: int = 0
  score_at: Callable[..., jax.Array] | None = None
  frozen: str = ""
  state_width: int = 0
  reads_prompt: bool = False
  encode_for_draft: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None
  reads_tokens: bool = False
  score_steps: Callable[..., jax.Array] | None = None
  score_with_states: Callable[..., tuple[jax.Array, jax.Array]] | None = None
  head_dim: int = 1
  eos_ids: tuple[int, ...] = (EOS_ID,)
  pad_id: int = PAD_ID
  start: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  start_id: int = PAD_ID
  max_positions: int = 0
  absorb: Callable[[Params, jax.Array, jax.Array, jax.Array], Params] | None = None
  dtype: str = ""

  def mask(self, source: Any) -> Any:
    """[B, S] bool; which entries of sources [B, S] are tokens, not padding."""
    return source != self.pad_id

  def prompt_of(self, source: jax.Array, target_states: jax.Array | None) -> Any:
    """Returns what `prefill` takes: the prompts, the target's states, or both."""
    if not self.state_width:
      return source
    return (source, target_states) if self.reads_prompt else target_states

  def starts(self, source: jax.Array) -> jax.Array:
    """[B] int32; the first decoder input of prompts [B, S]."""
    if self.start is None:
      return jnp.full(source.shape[:1], self.start_id, jnp.int32)
    return self.start(source, self.mask(source))

  def prompt_text(self, source: jax.Array) -> jax.Array | None:
    """Returns the prompts of continued texts, [B, S] int32, with -1 for padding.

    Returns None for encoder-decoders, whose output is a text of its own.
    """
    if self.start is None:
      return None
    return jnp.where(self.mask(source), source, -1)

  def score_inputs(self, batch: "DistillationBatch") -> dict[str, jax.Array]:
    """Returns the states of a batch that `score` takes as keyword arguments."""
    reads = {"target_states": self.state_width, "token_states": self.reads_tokens}
    return {name: leaf for name, leaf in batch.states.items() if reads[name]}

  def split(self, params: Params) -> tuple[Params, Params]:
    """Splits parameters into (trained, frozen); frozen is None if `frozen` is ""."""
    if not self.frozen:
      return params, None
    trained = {name: leaf for name, leaf in params.items() if name != self.frozen}
    return trained, params[self.frozen]

  def join(self, trained: Params, frozen: Params) -> Params:
    """The inverse of `split`."""
    return {**trained, self.frozen: frozen} if self.frozen else trained

  # By identity: the functions of two builds never compare equal, and hashing all fields
  # in each call would be slow. `families.build` is cached instead.
  __hash__ = object.__hash__

  def __eq__(self, other: object) -> bool:
    return self is other


@flax.struct.dataclass
class SamplingSettings:
  """Settings of each row, as arrays, so that changing one recompiles nothing."""

  temperature: jax.Array  # [B] float32; 0 means greedy
  top_k: jax.Array  # [B] int32; keep the k most probable tokens; 0 keeps all
  top_p: jax.Array  # [B] float32; keep the nucleus of this mass; 1 keeps all
  # [B] float32; keep tokens that are at least this share as probable as the most
  # probable one; 0 keeps all.
  min_p: jax.Array
  # [B] float32; the logits of tokens that the text before contains are divided by it if
  # positive, and else multiplied; 1 changes nothing.
  repetition_penalty: jax.Array
  # [B] uint32; every random draw is a function of (seed, position, purpose).
  seed: jax.Array
  max_length: jax.Array  # [B] int32; maximum number of emitted tokens
  # [B] bool; False: nothing is proposed for the row: plain decoding.
  speculative: jax.Array
  # [B, 2] uint32; the row only uses entries of the n-gram cache with this salt, and its
  # answer gets it: the halves of a number of 64 bits, 0 without a salt.
  cache_salt: jax.Array
  # Static. True: no row samples or has a penalty, so programs leave both out.
  all_greedy: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class Proposal:
  """Tokens that a drafter proposes in one round.

  Attributes:
    tokens: [B, K] int32.
    logits: [B, K, V] float32, raw; row i is the distribution that `tokens[:, i]` was
      drawn from. None for a deterministic proposal, whose draft distributions are
      one-hot at its tokens.
    lengths: [B] int32 in 0..K, how many of its tokens a row proposes; the others are
      ignored, and a row of length 0 decodes plainly. None proposes K in every row. A
      length may depend on the tokens that it keeps, but on none that it leaves out:
      outputs would lose the target's law.
    by_cache: [B, K] bool; which tokens the n-gram cache named. None: none.
  """

  tokens: jax.Array
  logits: jax.Array | None
  lengths: jax.Array | None = None
  by_cache: jax.Array | None = None

  def only_where(self, rows: jax.Array) -> "Proposal":
    """Returns the proposal of some rows [B] bool, and none for the others."""
    lengths = self.tokens.shape[1] if self.lengths is None else self.lengths
    return self.replace(lengths=jnp.where(rows, lengths, 0).astype(jnp.int32))

  def first(self, count: int) -> "Proposal":
    """Returns the first tokens, if no row proposes more."""
    cut = lambda leaf: None if leaf is None else leaf[:, :count]
    return self.replace(
      tokens=cut(self.tokens), logits=cut(self.logits), by_cache=cut(self.by_cache)
    )

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
  """

  log_probs: jax.Array  # [..., T, k] float32
  ids: jax.Array  # [..., T, k] uint16 or int32
  # [..., T] float32; total probability of tokens outside `ids`, 0 if k = V.
  tail: jax.Array
  error: jax.Array  # [..., T] bool; True where a drafted token was rejected


def empty_records(
  rows: int, positions: int, record_top_k: int, vocab_size: int
) -> Records:
  """Returns zeroed records [rows, positions] of at most V entries."""
  shape = (rows, positions)
  entries = (*shape, min(record_top_k, vocab_size))
  return Records(
    log_probs=jnp.zeros(entries, jnp.float32),
    ids=jnp.zeros(entries, id_dtype(vocab_size)),
    tail=jnp.zeros(shape, jnp.float32),
    error=jnp.zeros(shape, bool),
  )


@flax.struct.dataclass
class DistillationBatch:
  """Finished requests with their records, as rows for the distillation loss."""

  source: jax.Array  # [R, S] int32, padded with `Model.pad_id`
  target: jax.Array  # [R, T] int32, emitted tokens with the same padding
  mask: jax.Array  # [R, T] bool; emitted positions, including end-of-sequence
  records: Records  # `Records` with leading axis R
  weight: jax.Array  # [R] float32; 0 for rows that only pad the batch
  # [R, S, E] bfloat16, the target's hidden states of the source, for an attached draft;
  # None where they are not kept.
  target_states: jax.Array | None = None
  # [R, T, E] bfloat16, the target's last hidden state before each token of `target`,
  # for drafts that read it; otherwise None.
  token_states: jax.Array | None = None

  @property
  def states(self) -> dict[str, jax.Array]:
    """The target's states that are kept, by name."""
    states = {"target_states": self.target_states, "token_states": self.token_states}
    return {name: leaf for name, leaf in states.items() if leaf is not None}

  def cut_to(self, length: int) -> "DistillationBatch":
    """Returns the first `length` positions; the source is kept whole."""
    names = ("target", "mask", "records", "token_states")
    parts = {name: getattr(self, name) for name in names}
    return self.replace(**jax.tree.map(lambda leaf: leaf[:, :length], parts))
