"""What of a micro-batch a slice looks at: some positions of each row, some tokens.

Neighbouring positions of a row teach much the same, and of a large vocabulary the
target thinks of few tokens. Both subsets together make a slice several times cheaper.
The mass that the draft gives all other tokens is estimated from random ones, so that
it does not grow unseen.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from osd_jax import base
from osd_jax.distillation import losses

_NOTHING = -1e30  # logit of a token that is not there


@flax.struct.dataclass
class Narrowed:
  """A micro-batch, and what of it is looked at.

  Attributes:
    batch: R rows whose records and mask are those of the positions; the ids of the
      records say which of the tokens. What the target gives others is in the tail.
    positions: [R, P] int32, distinct in each row; None: all of them, in order.
    tokens: [C] int32; None: the whole vocabulary.
    log_weights: [C] float32, log of how many tokens each of them stands for; None
      where each stands for itself.
  """

  batch: base.DistillationBatch
  positions: jax.Array | None
  tokens: jax.Array | None
  log_weights: jax.Array | None


def narrow(
  config: losses.LossConfig,
  batch: base.DistillationBatch,
  key: Key[Array, ""],
  vocab_size: int,
) -> Narrowed:
  """Chooses positions and tokens at random; all of them where the config says 0.

  Args:
    config: how many.
    batch: R rows of T positions.
    key: random key of the slice.
    vocab_size: V.
  """
  key_positions, key_tokens = jax.random.split(key)
  positions = tokens = log_weights = None
  if 0 < config.num_positions < batch.mask.shape[1]:
    positions = _positions(config, batch, key_positions)
    batch = _at(batch, positions)
  if 0 < config.num_tokens < vocab_size:
    tokens, log_weights = _tokens(config, batch, key_tokens, vocab_size)
    batch = _among(batch, tokens[: config.num_tokens], len(tokens), vocab_size)
  return Narrowed(batch, positions, tokens, log_weights)


def logits_of(
  model: base.Model, params: base.Params, narrowed: Narrowed
) -> Float[Array, "R P C"]:
  """The draft's logits where `narrowed` looks, for `losses.distillation_loss`.

  Args:
    model: the draft; one without `score_at` computes all and leaves out the rest.
    params: its parameters, frozen ones too.
    narrowed: where to look.

  Returns:
    [R, P, C + 1] where tokens were chosen: the last one is none of them.
  """
  batch, positions, tokens = narrowed.batch, narrowed.positions, narrowed.tokens
  arguments = (params, batch.source, model.mask(batch.source), batch.target)
  if model.score_at is not None:
    logits = model.score_at(*arguments, positions, tokens, **batch.score_inputs)
  else:
    logits = model.score(*arguments, **batch.score_inputs)
    if positions is not None:
      logits = jnp.take_along_axis(logits, positions[..., None], axis=1)
    if tokens is not None:
      logits = logits[..., tokens]
  if narrowed.log_weights is None:
    return logits
  nothing = ((0, 0), (0, 0), (0, 1))
  weighted = logits + narrowed.log_weights[None, None]
  return jnp.pad(weighted, nothing, constant_values=_NOTHING)


def _positions(
  config: losses.LossConfig, batch: base.DistillationBatch, key: Key[Array, ""]
) -> Int[Array, "R P"]:
  """Positions that the loss would read; where a row has too few, others too."""
  chosen = losses.chosen_positions(config, batch)
  draws = jax.random.uniform(key, chosen.shape) + chosen
  return jax.lax.top_k(draws, config.num_positions)[1]


def _at(
  batch: base.DistillationBatch, positions: Int[Array, "R P"]
) -> base.DistillationBatch:
  """The batch with the records and mask of some positions."""

  def take(leaf):
    index = positions.reshape(*positions.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, index, axis=1)

  return batch.replace(mask=take(batch.mask), records=jax.tree.map(take, batch.records))


def _tokens(
  config: losses.LossConfig,
  batch: base.DistillationBatch,
  key: Key[Array, ""],
  vocab_size: int,
) -> tuple[Int[Array, " C"], Float[Array, " C"]]:
  """The tokens with most of the target's mass, then random ones, and log-weights.

  Random ones are drawn with replacement from all; those that are among the first count
  nothing. Their weighted sum is then right in the mean.
  """
  records, counted = batch.records, losses.chosen_positions(config, batch)
  mass = jnp.where(counted[..., None], jnp.exp(records.log_probs), 0.0)
  expected = jnp.zeros(vocab_size).at[records.ids.astype(jnp.int32)].add(mass)
  likeliest = jax.lax.top_k(expected, config.num_tokens)[1]
  own = jnp.zeros(config.num_tokens)
  if not config.num_negatives:
    return likeliest, own
  negatives = jax.random.randint(key, (config.num_negatives,), 0, vocab_size)
  doubled = jnp.zeros(vocab_size, bool).at[likeliest].set(True)[negatives]
  stands_for = np.log(vocab_size / config.num_negatives)
  weights = jnp.where(doubled, _NOTHING, stands_for)
  return jnp.concatenate([likeliest, negatives]), jnp.concatenate([own, weights])


def _among(
  batch: base.DistillationBatch,
  tokens: Int[Array, " n"],
  outside: int,
  vocab_size: int,
) -> base.DistillationBatch:
  """The batch with records over some tokens; ids count those, `outside` is another."""
  order = jnp.arange(len(tokens))
  slots = jnp.full(vocab_size, outside, jnp.int32).at[tokens].set(order)
  records = batch.records
  ids = slots[records.ids.astype(jnp.int32)]
  is_outside = ids == outside
  lost = jnp.sum(jnp.where(is_outside, jnp.exp(records.log_probs), 0.0), axis=-1)
  return batch.replace(
    records=records.replace(
      log_probs=jnp.where(is_outside, losses.TARGET_FLOOR, records.log_probs),
      ids=ids,
      tail=records.tail + lost,
    )
  )
