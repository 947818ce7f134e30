"""The rolling buffer: finished requests with the target's records, in a fixed ring.

Everything is a pure function of arrays and runs inside jit. Nothing is emptied by an
update: a row leaves only when a newer one takes its slot.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from osd_jax import base

SHORTLIST_RANKS = 16  # recorded tokens of a position; the others have hardly any mass


@dataclasses.dataclass(frozen=True)
class BufferConfig:
  """Size of the buffer and how replayed rows are drawn.

  Attributes:
    capacity: N, rows kept.
    recency_half_life: age in rows at which a row is drawn half as often; None draws
      all rows alike.
    keep_target_states: store the target states of each source for an attached draft,
      2 E bytes a source token (E: the target's width). False reads anew in each slice.
  """

  capacity: int = 1024
  recency_half_life: float | None = None
  keep_target_states: bool = True

  def __post_init__(self):
    base.check_counts(self, "capacity")
    half_life = self.recency_half_life
    fades = half_life is None or half_life > 0
    expected = "a number of rows > 0, or None for uniform"
    base.check_fields(self, {"recency_half_life": (fades, expected)})


@flax.struct.dataclass
class ReplayBuffer:
  """A ring of N rows.

  Attributes:
    data: `DistillationBatch` with leading axis N in place of R; the i-th row ever
      added lies in slot i mod N. Readings are kept as their bits, uint16: XLA CPU would
      turn a whole ring of bfloat16 into float32 and back for each row that is written.
    added: [] int32; rows ever added.
  """

  data: base.DistillationBatch
  added: jax.Array

  @property
  def capacity(self) -> int:
    """N."""
    return self.data.weight.shape[0]

  @property
  def filled(self) -> jax.Array:
    """[] int32; slots that hold a row."""
    return jnp.minimum(self.added, self.capacity)


def record_bytes_per_token(record_top_k: int, vocab_size: int) -> int:
  """Bytes that the target's record of one position takes.

  Args:
    record_top_k: k asked for; never more than V are kept.
    vocab_size: V.

  Returns:
    Bytes of log-probabilities, ids, tail and error flag.
  """
  one = _empty_records((1,), record_top_k, vocab_size, np.empty)
  return sum(leaf.nbytes for leaf in jax.tree.leaves(one))


def init(
  config: BufferConfig,
  source_length: int,
  target_length: int,
  record_top_k: int,
  vocab_size: int,
  state_width: int = 0,
) -> ReplayBuffer:
  """An empty buffer.

  Args:
    config: says how many rows, N.
    source_length: S.
    target_length: T.
    record_top_k: k; cut to V.
    vocab_size: V; ids are uint16 up to 65,536, else int32.
    state_width: E of the target states to store; 0 stores none.

  Returns:
    A buffer with `added` = 0.

  Raises:
    ValueError: if a length is below 1.
  """
  lengths = {
    "source_length": source_length,
    "target_length": target_length,
    "record_top_k": record_top_k,
    "vocab_size": vocab_size,
  }
  for name, value in lengths.items():
    if value < 1:
      raise base.InputError(
        f"buffer.init: {name} is {value!r}, expected an integer >= 1."
      )
  rows, positions = (config.capacity,), (config.capacity, target_length)
  data = base.DistillationBatch(
    source=jnp.zeros((*rows, source_length), jnp.int32),
    target=jnp.zeros(positions, jnp.int32),
    mask=jnp.zeros(positions, bool),
    records=_empty_records(positions, record_top_k, vocab_size, jnp.zeros),
    weight=jnp.zeros(rows, jnp.float32),
    target_states=_empty_states(rows, source_length, state_width),
  )
  return ReplayBuffer(data=data, added=jnp.zeros((), jnp.int32))


def append(buffer: ReplayBuffer, batch: base.DistillationBatch) -> ReplayBuffer:
  """Adds the rows of a batch, oldest first; rows of weight 0 are not added.

  Donate `buffer` when jitting (`jax.jit(append, donate_argnums=0)`): the rows are
  then written in place, at a cost that does not depend on N.

  Args:
    buffer: N rows.
    batch: R <= N rows with the buffer's S, T and k.

  Returns:
    The buffer with the new rows in place of the oldest.

  Raises:
    ValueError: if the batch has more rows than the buffer or other lengths.
  """
  _check_batch(buffer, batch)
  size, rows = buffer.capacity, batch.weight.shape[0]
  valid = batch.weight > 0
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  # Rows to leave out get distinct slots past the end, which `drop` ignores.
  outside = size + jnp.arange(rows, dtype=jnp.int32)
  slots = jnp.where(valid, (buffer.added + rank - 1) % size, outside)

  def write(ring, new):
    new = _bits(new) if ring.dtype == jnp.uint16 else new
    new = new.astype(ring.dtype)
    return ring.at[slots].set(new, mode="drop", unique_indices=True)

  data = jax.tree.map(write, buffer.data, batch)
  return ReplayBuffer(data=data, added=buffer.added + rank[-1])


def sample(
  buffer: ReplayBuffer,
  key: Key[Array, ""],
  num_new: int,
  num_replay: int,
  config: BufferConfig,
  since: Int[Array, ""] | int,
) -> base.DistillationBatch:
  """Draws rows for one step: some of the new ones, some of all.

  Within each part no row comes twice; a new row may be replayed as well. Where a part
  has fewer rows to draw from than asked, the missing ones have weight 0.

  Args:
    buffer: N rows.
    key: random key.
    num_new: rows drawn uniformly from those added as `since`-th or later (static).
    num_replay: rows drawn from all, as `config` weighs them by age (static).
    config: recency.
    since: [] int32; `buffer.added` at the last update.

  Returns:
    A batch of num_new + num_replay rows, new ones first.

  Raises:
    ValueError: if a number is negative, their sum 0, or one exceeds N.
  """
  _check_counts(buffer, num_new, num_replay)
  key_new, key_replay = jax.random.split(key)
  newest = jnp.clip(buffer.added - since, 0, buffer.filled)
  half_life = config.recency_half_life
  fading = 0.0 if half_life is None else -np.log(2.0) / half_life
  ages = (
    _draw(key_new, newest, 0.0, num_new),
    _draw(key_replay, buffer.filled, fading, num_replay),
  )
  present = jnp.concatenate([ages[0] < newest, ages[1] < buffer.filled])
  slots = (buffer.added - 1 - jnp.concatenate(ages)) % buffer.capacity
  rows = jax.tree.map(lambda ring: ring[slots], buffer.data)
  if rows.target_states is not None:
    bits = rows.target_states
    rows = rows.replace(target_states=jax.lax.bitcast_convert_type(bits, jnp.bfloat16))
  return rows.replace(weight=jnp.where(present, rows.weight, 0.0))


def shortlist(model: base.Model, buffer: ReplayBuffer) -> np.ndarray | None:
  """The shortlist of a draft for the rows of the buffer.

  Args:
    model: the draft.
    buffer: N rows.

  Returns:
    [N] int32; None if the draft covers the whole vocabulary.
  """
  if not model.shortlist:
    return None
  return np.asarray(
    likeliest_tokens(buffer, model.vocab_size, model.shortlist, model.eos_ids)
  )


@functools.partial(jax.jit, static_argnames=("vocab_size", "size", "eos_ids"))
def likeliest_tokens(
  buffer: ReplayBuffer,
  vocab_size: int,
  size: int,
  eos_ids: tuple[int, ...] = (base.EOS_ID,),
) -> Int[Array, " size"]:
  """The tokens to which the target gave most mass in the rows of the buffer.

  Only the first `SHORTLIST_RANKS` recorded tokens of a position count: serving waits.
  End-of-sequence is always among them. Tokens that the target has not thought of fill
  what is left, lowest ids first: SentencePiece orders them by frequency.

  Args:
    buffer: N rows.
    vocab_size: V (static).
    size: tokens to choose, at most V (static).
    eos_ids: tokens that end a sequence (static).

  Returns:
    [size] int32, distinct, in ascending order.
  """
  records, rows = buffer.data.records, buffer.data.weight
  counted = buffer.data.mask & (rows[:, None] > 0)
  ids, log_probs = (
    records.ids[..., :SHORTLIST_RANKS],
    records.log_probs[..., :SHORTLIST_RANKS],
  )
  mass = jnp.where(counted[..., None], jnp.exp(log_probs), 0.0)
  expected = jnp.zeros(vocab_size, jnp.float32)
  expected = expected.at[ids.astype(jnp.int32)].add(mass)
  expected = expected.at[np.asarray(eos_ids)].set(jnp.inf)
  # top_k takes the lower of two equal entries first.
  _, chosen = jax.lax.top_k(expected, size)
  return jnp.sort(chosen).astype(jnp.int32)


def _draw(
  key: Key[Array, ""], size: Int[Array, ""], fading: float, count: int
) -> Int[Array, " count"]:
  """Draws different ages below `size`, one after another; many cost what few do.

  The weight of an age is exp(fading * age), so that all below age a weigh
  (exp(fading * a) - 1) / (exp(fading) - 1): what is left of that is inverted.

  Args:
    key: random key.
    size: [] int32.
    fading: log of an age's weight over that of the age before; at most 0.
    count: ages to draw (static).

  Returns:
    [count] int32; `size` or more where too few ages were left.
  """
  if not count:
    return jnp.zeros((0,), jnp.int32)
  nothing = jnp.iinfo(jnp.int32).max

  def weight_below(age):
    return jnp.expm1(fading * age) / np.expm1(fading) if fading else age

  def age_at(weight):
    return jnp.log1p(weight * np.expm1(fading)) / fading if fading else weight

  def draw(taken, uniform):  # taken: [count] ascending, `nothing` at the end
    is_age = taken < nothing
    below = weight_below(taken.astype(jnp.float32))
    weights = jnp.where(is_age, weight_below(taken + 1.0) - below, 0.0)
    total = weight_below(size.astype(jnp.float32))
    remaining = total - jnp.sum(weights)
    point = uniform * remaining
    passed = is_age & (point >= below - (jnp.cumsum(weights) - weights))
    age = age_at(point + jnp.sum(jnp.where(passed, weights, 0.0)))
    age = jnp.clip(age, 0, size - 1).astype(jnp.int32)
    # Its place among the ages left: rounding does not find what is taken.
    left = size - jnp.sum(is_age)
    place = jnp.clip(age - jnp.sum(taken < age), 0, left - 1)
    # Where rounding has lost what remains, the newest comes.
    place = jnp.where(remaining > 1e-5 * total, place, 0)
    age = place + jnp.sum(taken - jnp.arange(count) <= place)
    age = jnp.where(left > 0, age, size)
    return jnp.sort(taken.at[-1].set(age)), age

  start = jnp.full((count,), nothing, jnp.int32)
  return jax.lax.scan(draw, start, jax.random.uniform(key, (count,)))[1]


def _empty_records(leading, record_top_k: int, vocab_size: int, make) -> base.Records:
  """Records of the buffer's types, filled by `make(shape, dtype)`."""
  kept = (*leading, min(record_top_k, vocab_size))
  return base.Records(
    log_probs=make(kept, np.float32),
    ids=make(kept, base.id_dtype(vocab_size)),
    tail=make(leading, np.float32),
    error=make(leading, np.bool_),
  )


def _empty_states(rows: tuple[int], source_length: int, width: int) -> jax.Array | None:
  shape = (*rows, source_length, width)
  return jnp.zeros(shape, jnp.uint16) if width else None


def _bits(x: jax.Array) -> jax.Array:
  """bfloat16 as the integers that its bits are; integers as they are."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _check_batch(buffer: ReplayBuffer, batch: base.DistillationBatch) -> None:
  """Refuses a batch that does not fit the ring."""
  rows = batch.weight.shape[0]
  if rows > buffer.capacity:
    raise base.InputError(
      f"buffer.append: the batch has {rows} rows, expected at most the capacity "
      f"{buffer.capacity}; append it in parts or raise BufferConfig.capacity."
    )
  rings, _ = jax.tree_util.tree_flatten_with_path(buffer.data)
  for (path, ring), leaf in zip(rings, jax.tree.leaves(batch), strict=True):
    if leaf.shape != (rows, *ring.shape[1:]):
      raise base.InputError(
        f"buffer.append: batch{jax.tree_util.keystr(path)} has shape {leaf.shape}, "
        f"expected {(rows, *ring.shape[1:])}; pad to the lengths given to buffer.init."
      )


def _check_counts(buffer: ReplayBuffer, num_new: int, num_replay: int) -> None:
  """Refuses numbers of rows that the ring cannot give."""
  for name, count in (("num_new", num_new), ("num_replay", num_replay)):
    if not 0 <= count <= buffer.capacity:
      raise base.InputError(
        f"buffer.sample: {name} is {count}, expected 0 to the capacity "
        f"{buffer.capacity}; lower UpdateConfig.{name} or raise BufferConfig.capacity."
      )
  if num_new + num_replay == 0:
    raise base.InputError(
      "buffer.sample: num_new and num_replay are both 0, expected at least one row."
    )
