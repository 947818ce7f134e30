"""The replay buffer: finished requests and the target's records, in a ring of N rows.

    N = 4, after 6 appended rows (added = 6), with since = 4

      slot      0      1      2      3
      row       4      5      2      3      row i is in slot i mod N
      age       1      0      3      2      0 is the newest
      new       yes    yes    no     no     rows added after the last update

An update removes nothing: a row leaves only when a newer one takes its slot. All
functions are pure and run inside jit.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from osd_jax import base

# Recorded tokens per position that the shortlist counts; the others have little mass.
SHORTLIST_RANKS = 16


@dataclasses.dataclass(frozen=True)
class BufferConfig(base.Config):
  """Size of the buffer and the weights of replayed rows.

  Attributes:
    capacity: N, number of rows.
    recency_half_life: age in rows at which a row is drawn half as often as the newest;
      None draws all rows equally often.
    keep_target_states: for an attached draft, store the target's hidden states of each
      source: 2 E bytes per source token (E: width of the target). False computes them
      again in each slice. A draft that reads the states of tokens stores those of each
      answer, too, in any case.
  """

  capacity: base.Count = 1024
  recency_half_life: base.Positive | None = 800.0
  keep_target_states: bool = True


@flax.struct.dataclass
class ReplayBuffer:
  """A ring of N rows."""

  # `DistillationBatch` with leading axis N instead of R. The states hold the bits of
  # bfloat16 as uint16: XLA CPU would convert a whole bfloat16 ring to float32 and back
  # for every row that is written.
  data: base.DistillationBatch
  added: jax.Array  # [] int32; number of rows ever appended

  @property
  def capacity(self) -> int:
    """N."""
    return self.data.weight.shape[0]

  @property
  def filled(self) -> jax.Array:
    """[] int32; number of slots that hold a row."""
    return jnp.minimum(self.added, self.capacity)


def record_bytes_per_token(record_top_k: int, vocab_size: int) -> int:
  """Returns the bytes that one position's record takes; k is cut to V."""
  one = base.empty_records(1, 1, record_top_k, vocab_size)
  return sum(leaf.nbytes for leaf in jax.tree.leaves(one))


def init(
  config: BufferConfig,
  source_length: int,
  target_length: int,
  record_top_k: int,
  vocab_size: int,
  state_width: int = 0,
  token_state_width: int = 0,
) -> ReplayBuffer:
  """Returns an empty buffer.

  Args:
    config: N, the number of rows, and whether target states are stored.
    source_length: S, the length of every stored prompt.
    target_length: T, the length of every stored output.
    record_top_k: k, entries per recorded position; cut to V.
    vocab_size: V; ids are uint16 up to 65,536, else int32.
    state_width: E of the target's hidden states of the prompt; 0 stores none.
    token_state_width: E of its states before each token; 0 stores none.
  """
  rows, positions = (config.capacity,), (config.capacity, target_length)

  def states(length, width):
    return jnp.zeros((*rows, length, width), jnp.uint16) if width else None

  data = base.DistillationBatch(
    source=jnp.zeros((*rows, source_length), jnp.int32),
    target=jnp.zeros(positions, jnp.int32),
    mask=jnp.zeros(positions, bool),
    records=base.empty_records(*positions, record_top_k, vocab_size),
    weight=jnp.zeros(rows, jnp.float32),
    target_states=states(source_length, state_width),
    token_states=states(target_length, token_state_width),
  )
  return ReplayBuffer(data=data, added=jnp.zeros((), jnp.int32))


def append(buffer: ReplayBuffer, batch: base.DistillationBatch) -> ReplayBuffer:
  """Appends the rows of a batch, oldest first; rows of weight 0 are left out.

  Donate `buffer` when jitting (`jax.jit(append, donate_argnums=0)`): rows are then
  written in place, at a cost that does not depend on N.

  Raises:
    InputError: the batch has more rows than the buffer, or another S, T or k.
  """
  _check_batch(buffer, batch)
  size, rows = buffer.capacity, batch.weight.shape[0]
  valid = batch.weight > 0
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  # Rows of weight 0 get distinct slots past the end, which mode="drop" ignores;
  # distinct because of unique_indices.
  outside = size + jnp.arange(rows, dtype=jnp.int32)
  slots = jnp.where(valid, (buffer.added + rank - 1) % size, outside)

  def write(ring, new):
    if new.dtype == jnp.bfloat16 and ring.dtype == jnp.uint16:
      new = jax.lax.bitcast_convert_type(new, jnp.uint16)
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
  """Draws the rows of one step: some new ones, and some from the whole buffer.

  `num_new` rows are drawn uniformly from those added since `since`, the value of
  `buffer.added` at the last update; `num_replay` rows from all, weighted by age. Each
  part is drawn without replacement, but a new row may also be replayed. If a part has
  fewer rows than requested, the missing ones have weight 0.

  Returns:
    A batch of num_new + num_replay rows, new ones first.

  Raises:
    InputError: a number is negative or exceeds N, or both are 0.
  """
  _check_counts(buffer, num_new, num_replay)
  key_new, key_replay = jax.random.split(key)
  # After a long pause, more rows may have arrived than the ring holds.
  newest = jnp.clip(buffer.added - since, 0, buffer.filled)
  half_life = config.recency_half_life
  fading = 0.0 if half_life is None else -np.log(2.0) / half_life
  ages = (
    _draw(key_new, newest, buffer.capacity, 0.0, num_new),
    _draw(key_replay, buffer.filled, buffer.capacity, fading, num_replay),
  )
  # `_draw` returns ages past the end if it runs out of rows.
  present = jnp.concatenate([ages[0] < newest, ages[1] < buffer.filled])
  # Age 0 is the newest row, in slot (added - 1) mod N.
  slots = (buffer.added - 1 - jnp.concatenate(ages)) % buffer.capacity
  rows = jax.tree.map(lambda ring: ring[slots], buffer.data)
  rows = rows.replace(
    **{
      name: jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
      for name, bits in rows.states.items()
    }
  )
  return rows.replace(weight=jnp.where(present, rows.weight, 0.0))


def shortlist(model: base.Model, buffer: ReplayBuffer) -> np.ndarray | None:
  """Returns the tokens that a draft with a short output head should cover.

  Any choice is exact: the draft gives other tokens no mass, and rejected positions are
  resampled from the whole vocabulary. A good choice raises acceptance.

  Returns:
    [n] int32 with n = `model.shortlist`; None if the head covers the whole vocabulary.
  """
  if not model.shortlist:
    return None
  tokens = likeliest_tokens(buffer, model.vocab_size, model.shortlist, model.eos_ids)
  return np.asarray(tokens)


@functools.partial(jax.jit, static_argnames=("vocab_size", "size", "eos_ids"))
def likeliest_tokens(
  buffer: ReplayBuffer,
  vocab_size: int,
  size: int,
  eos_ids: tuple[int, ...] = (base.EOS_ID,),
) -> Int[Array, " size"]:
  """Returns the tokens to which the target gave most mass in the buffer's rows.

  Only the first `SHORTLIST_RANKS` tokens of a record are counted, because serving
  waits for the result. End-of-sequence tokens are always included. Tokens that no
  record holds fill the rest, lowest ids first: SentencePiece sorts ids by frequency.

  Returns:
    [size] int32, distinct, ascending.
  """
  records, rows = buffer.data.records, buffer.data.weight
  # Unused slots have weight 0; their zeroed records would count token 0.
  is_counted = buffer.data.mask & (rows[:, None] > 0)
  ids = records.ids[..., :SHORTLIST_RANKS]
  log_probs = records.log_probs[..., :SHORTLIST_RANKS]
  mass = jnp.where(is_counted[..., None], jnp.exp(log_probs), 0.0)
  expected = jnp.zeros(vocab_size).at[ids.astype(jnp.int32)].add(mass)
  expected = expected.at[np.asarray(eos_ids)].set(jnp.inf)
  # Of equal entries, top_k returns the one with the lower index first.
  _, tokens = jax.lax.top_k(expected, size)
  return jnp.sort(tokens).astype(jnp.int32)


def _draw(
  key: Key[Array, ""],
  size: Int[Array, ""],
  capacity: int,
  fading: float,
  count: int,
) -> Int[Array, " count"]:
  """Draws distinct ages below `size`, weighted by exp(fading * age).

  Returns:
    [count] int32; ages >= `size` once all others are drawn.
  """
  ages = jnp.arange(capacity)
  # The largest sums of log-weight and Gumbel noise are a sample without replacement, in
  # the order of successive draws (Gumbel-top-k, arXiv:1903.06059).
  scores = fading * ages + jax.random.gumbel(key, (capacity,))
  return jax.lax.top_k(jnp.where(ages < size, scores, -jnp.inf), count)[1]


def _check_batch(buffer: ReplayBuffer, batch: base.DistillationBatch) -> None:
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
