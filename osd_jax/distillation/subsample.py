"""Subsampling for a slice: some positions of each row, some tokens of the vocabulary.

Neighbouring positions teach nearly the same, and the target gives most of its mass to
few tokens. Using a part of both makes a slice several times cheaper. Random other
tokens estimate the mass that the draft gives to the rest of the vocabulary; without
them that mass could grow unnoticed.

    one row, T = 6, P = 2              V = 8, num_tokens = 3, num_negatives = 2

      position   0  1  2  3  4  5        token    5  2  7 | 4   2
      mask       1  1  1  1  0  0        log w    0  0  0 | a  -inf
      sampled       ^     ^              column   0  1  2 | 3   4  | 5

    `positions` is [[1, 3]]. Tokens 5, 2, 7 have most of the target's mass. Tokens 4
    and 2 were drawn at random; each random token stands for 8 / 2 tokens (a = log 4),
    but 2 has a column already, so its weight is 0. Column 5 stands for none of them:
    recorded ids without a column point there.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from osd_jax import base
from osd_jax.distillation import losses

_NO_LOGIT = -1e30  # finite, so that sums and gradients stay free of NaN


@flax.struct.dataclass
class Subsample:
  """A micro-batch restricted to some positions and tokens.

  Attributes:
    batch: R rows; mask and records are [R, P, ...], and the ids of the records are
      columns of `tokens`. The target's mass on other tokens is added to the tail.
    positions: [R, P] int32, distinct within a row; None keeps all, in order.
    tokens: [C] int32; None keeps the whole vocabulary.
    log_weights: [C] float32, log of the number of tokens that each one represents;
      None if each represents itself.
  """

  batch: base.DistillationBatch
  positions: jax.Array | None
  tokens: jax.Array | None
  log_weights: jax.Array | None


def subsample(
  config: losses.LossConfig,
  batch: base.DistillationBatch,
  key: Key[Array, ""],
  vocab_size: int,
) -> Subsample:
  """Draws positions and tokens; with a count of 0 the batch keeps everything."""
  key_positions, key_tokens = jax.random.split(key)
  positions = tokens = log_weights = None
  if 0 < config.num_positions < batch.mask.shape[1]:
    positions = _draw_positions(config, batch, key_positions)
    batch = _at_positions(batch, positions)
  # At least as many columns as a record has entries, because the loss reads them all.
  count = max(config.num_tokens, batch.records.ids.shape[-1])
  if config.num_tokens and count < vocab_size:
    tokens, log_weights = _draw_tokens(config, batch, key_tokens, vocab_size, count)
    batch = _with_token_columns(batch, tokens[:count], len(tokens), vocab_size)
  return Subsample(batch, positions, tokens, log_weights)


def logits_of(
  model: base.Model, params: base.Params, sampled: Subsample
) -> Float[Array, "*steps R P C"]:
  """Computes the draft's logits for `losses.distillation_loss`.

  A model without `score_at` computes all logits and drops the rest.

  Returns:
    [R, P, C + 1] if tokens were drawn; the last column stands for no token. Preceded by
    an axis of steps if the model has `score_steps`.
  """
  batch, positions, tokens = sampled.batch, sampled.positions, sampled.tokens
  arguments = (params, batch.source, model.mask(batch.source), batch.target)
  score_at = model.score_steps or model.score_at
  if score_at is not None:
    logits = score_at(*arguments, positions, tokens, **model.score_inputs(batch))
  else:
    logits = model.score(*arguments, **model.score_inputs(batch))
    if positions is not None:
      logits = jnp.take_along_axis(logits, positions[..., None], axis=1)
    if tokens is not None:
      logits = logits[..., tokens]
  if sampled.log_weights is None:
    return logits
  # A token that represents w tokens counts w times in the normaliser, so its logit
  # grows by log w.
  weights = sampled.log_weights.reshape(*(1,) * (logits.ndim - 1), -1)
  weighted = logits + weights
  padding = [(0, 0)] * (weighted.ndim - 1) + [(0, 1)]
  return jnp.pad(weighted, padding, constant_values=_NO_LOGIT)


def at_step(sampled: Subsample, step: int) -> base.DistillationBatch:
  """The batch for a draft's `step`-th token after a verified one.

  The first tokens of an answer cannot be that far after another.
  """
  batch, positions = sampled.batch, sampled.positions
  if positions is None:
    positions = jnp.arange(batch.mask.shape[1])[None]
  return batch.replace(mask=batch.mask & (positions >= step))


def _draw_positions(
  config: losses.LossConfig, batch: base.DistillationBatch, key: Key[Array, ""]
) -> Int[Array, "R P"]:
  """Draws P distinct positions per row, those that the loss reads first."""
  positions = losses.chosen_positions(config, batch)
  # Uniform noise in [0, 1) plus 1 for chosen positions: the P largest are random
  # chosen ones, and other positions fill up rows that have fewer than P.
  draws = jax.random.uniform(key, positions.shape) + positions
  return jax.lax.top_k(draws, config.num_positions)[1]


def _at_positions(
  batch: base.DistillationBatch, positions: Int[Array, "R P"]
) -> base.DistillationBatch:
  """Takes mask and records at some positions; the target stays whole to be scored."""

  def take(leaf):
    index = positions.reshape(*positions.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, index, axis=1)

  return batch.replace(mask=take(batch.mask), records=jax.tree.map(take, batch.records))


def _draw_tokens(
  config: losses.LossConfig,
  batch: base.DistillationBatch,
  key: Key[Array, ""],
  vocab_size: int,
  count: int,
) -> tuple[Int[Array, " C"], Float[Array, " C"]]:
  """Returns the `count` tokens with most target mass, then negatives; log-weights.

  Negatives are drawn with replacement from the whole vocabulary. Those that are among
  the likeliest get weight 0, which makes the weighted sum over the others unbiased.
  """
  records, is_counted = batch.records, losses.chosen_positions(config, batch)
  mass = jnp.where(is_counted[..., None], jnp.exp(records.log_probs), 0.0)
  expected = jnp.zeros(vocab_size).at[records.ids.astype(jnp.int32)].add(mass)
  likeliest = jax.lax.top_k(expected, count)[1]
  zeros = jnp.zeros(count)  # each represents itself: log 1
  if not config.num_negatives:
    return likeliest, zeros
  negatives = jax.random.randint(key, (config.num_negatives,), 0, vocab_size)
  doubled = jnp.zeros(vocab_size, bool).at[likeliest].set(True)[negatives]
  stands_for = np.log(vocab_size / config.num_negatives)
  weights = jnp.where(doubled, _NO_LOGIT, stands_for)
  return jnp.concatenate([likeliest, negatives]), jnp.concatenate([zeros, weights])


def _with_token_columns(
  batch: base.DistillationBatch, tokens: Int[Array, " n"], outside: int, vocab_size: int
) -> base.DistillationBatch:
  """Replaces recorded ids by their index in `tokens`, or by `outside`."""
  order = jnp.arange(len(tokens))
  columns = jnp.full(vocab_size, outside, jnp.int32).at[tokens].set(order)
  records = batch.records
  ids = columns[records.ids.astype(jnp.int32)]
  is_outside = ids == outside
  # The target's mass on tokens without a column moves to the tail.
  lost = jnp.sum(jnp.where(is_outside, jnp.exp(records.log_probs), 0.0), axis=-1)
  return batch.replace(
    records=records.replace(
      log_probs=jnp.where(is_outside, losses.TARGET_FLOOR, records.log_probs),
      ids=ids,
      tail=records.tail + lost,
    )
  )
