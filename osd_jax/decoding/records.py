"""Records of the target's distributions at emitted positions."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from osd_jax import base, native, sharding

_BLOCK = 32  # entries per block in the search for the largest


def from_logits(logits: Float[Array, "B n V"], kept: int) -> base.Records:
  """Truncates target rows to their k most probable tokens.

  Args:
    logits: [B, n, V] raw target logits.
    kept: k, at most V (static).

  Returns:
    Records [B, n] with log-softmax at temperature 1, no errors. The tail is summed over
    the tokens left out: 1 minus the kept mass would round a tiny tail away.
  """
  logits = logits.astype(jnp.float32)
  top, ids = _top_k(logits, kept)
  largest, least = top[..., :1], top[..., -1:]
  # Subtracting the largest logit keeps `exp` from overflowing.
  masses = jnp.exp(logits - largest)
  total = jnp.sum(masses, axis=-1)
  # Some of the tokens that tie with the last kept one may be left out.
  ties = jnp.sum(logits == least, axis=-1) - jnp.sum(top == least, axis=-1)
  others = jnp.sum(jnp.where(logits < least, masses, 0.0), axis=-1)
  tail = (others + ties * jnp.exp(least - largest)[..., 0]) / total
  return base.Records(
    log_probs=top - largest - jnp.log(total)[..., None],
    ids=ids.astype(base.id_dtype(logits.shape[-1])),
    tail=tail,
    error=jnp.zeros(tail.shape, bool),
  )


def _top_k(
  logits: Float[Array, "B n V"], kept: int
) -> tuple[Float[Array, "B n k"], Int[Array, "B n k"]]:
  """`jax.lax.top_k`; a split vocabulary is searched in each part first."""
  parts = sharding.vocab_shards(logits.shape[-1])
  if parts > 1 and kept <= logits.shape[-1] // parts:
    first = functools.partial(_first_of_all_parts, kept)
    return sharding.map_vocab_shards(first, logits)
  size = logits.shape[-1]
  if native.forms() and size % _BLOCK == 0 and kept * _BLOCK <= size // 2:
    return _top_k_by_blocks(logits, kept)
  return _searched(logits, kept)


def _top_k_by_blocks(
  logits: Float[Array, "B n V"], kept: int
) -> tuple[Float[Array, "B n k"], Int[Array, "B n k"]]:
  """Searches only the k blocks with the largest maxima, in half the time on a CPU.

  XLA's search is scalar there, but maxima are vectorised. If tied entries are in more
  than k blocks, other ones of them may be kept than by a search of the whole row.
  """
  blocks = logits.reshape(*logits.shape[:-1], -1, _BLOCK)
  _, blocks_of_top = _searched(jnp.max(blocks, axis=-1), kept)
  # In ascending order, so that the first of tied entries is kept, as by `top_k`.
  blocks_of_top = jnp.sort(blocks_of_top, axis=-1)
  entries = jnp.take_along_axis(blocks, blocks_of_top[..., None], axis=-2)
  top, at = _searched(entries.reshape(*logits.shape[:-1], -1), kept)
  block = jnp.take_along_axis(blocks_of_top, at // _BLOCK, axis=-1)
  return top, block * _BLOCK + at % _BLOCK


def _searched(
  values: Float[Array, "B n V"], kept: int
) -> tuple[Float[Array, "B n k"], Int[Array, "B n k"]]:
  """`jax.lax.top_k` behind a barrier."""
  # Without a barrier XLA CPU fuses the search with its consumers and turns it into a
  # sort, which costs ten times as much as everything else here. Each result has its own
  # barrier, because one for both aborts XLA if the vocabulary is split.
  top, ids = map(jax.lax.optimization_barrier, jax.lax.top_k(values, kept))
  return top, ids


def _first_of_all_parts(kept: int, part: jax.Array, number: jax.Array):
  """The largest entries and their ids, from the candidates of every device's part."""
  top, ids = jax.lax.top_k(part, kept)
  # From indices within a part to token ids.
  ids = ids + number * part.shape[-1]
  # k candidates per device travel, not the vocabulary: the k largest of all are among
  # the k largest of each part.
  top, ids = (jax.lax.all_gather(x, "model", axis=2, tiled=True) for x in (top, ids))
  top, best = jax.lax.top_k(top, kept)
  return top, jnp.take_along_axis(ids, best, axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def teacher_forced(
  target: base.Model,
  params: base.Params,
  source: Int[Array, "R S"],
  tokens: Int[Array, "R T"],
  record_top_k: int,
  with_states: bool = False,
) -> base.DistillationBatch:
  """Returns rows for the loss from given texts, by one forward pass of the target.

  For texts without records of a verification: references of a warm start, or text that
  the draft wrote (`student` sampling).

  Args:
    target: the target model (static), which gives the distributions.
    params: the target's trained parameters, not the served copy.
    source: [R, S] int32, prompts padded with the target's `pad_id`.
    tokens: [R, T] int32, padded as sources are; a pad id before a token is a token.
    record_top_k: k (static); more than V keeps full rows.
    with_states: whether the rows hold `token_states` (static).

  Returns:
    A batch of R rows; rows without tokens have weight 0.
  """
  arguments, states = (params, source, target.mask(source), tokens), None
  if with_states:
    assert target.score_with_states is not None
    logits, states = target.score_with_states(*arguments)
  else:
    logits = target.score(*arguments)
  position = jnp.arange(tokens.shape[1])[None]
  # The last real token ends the text. Padding ids before it are tokens of the text.
  ends = jnp.where(tokens != target.pad_id, position + 1, 0)
  mask = position < jnp.max(ends, axis=1, keepdims=True)
  return base.DistillationBatch(
    source=source,
    target=tokens,
    mask=mask,
    records=from_logits(logits, min(record_top_k, target.vocab_size)),
    weight=jnp.any(mask, axis=1).astype(jnp.float32),
    token_states=states,
  )
