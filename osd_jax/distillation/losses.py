"""Divergences between the target's recorded distributions and the draft's.

A record holds the target's k most probable tokens and the total mass of all others,
so a divergence is taken over k + 1 buckets: one per kept token, and the tail.

    V = 6, k = 2                token    0    1    2    3    4    5
    target probabilities               .02  .60  .05  .30  .02  .01
    draft probabilities                .10  .40  .10  .20  .10  .10

    record: ids [1, 3], tail .10       target buckets  [.60, .30, .10]
                                       draft buckets   [.40, .20, .40]

With k = V the tail is empty and the buckets are the full distributions, so there is
one code path. By the data-processing inequality, the divergence over buckets is at
most the full one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from osd_jax import base

# Recorded masses of 0 are replaced by the smallest normal float32.
TARGET_FLOOR = float(np.log(np.finfo(np.float32).tiny))
# The draft's log-probabilities are not floored in practice, because their gradient
# matters most where they are lowest. Only the empty tail of a full row is this low.
DRAFT_FLOOR = -1e9
_MASKED = -1e30

Buckets = Float[Array, "*rows buckets"]  # log-masses of k tokens and the tail
Divergence = Callable[[Buckets, Buckets], Float[Array, "*rows"]]


def target_buckets(records: base.Records) -> Buckets:
  """Returns the target's log-masses of the k kept tokens and the tail, tail last."""
  top = records.log_probs.astype(jnp.float32)
  # Floor before the logarithm; k = V has an exact 0 here.
  tail = jnp.maximum(records.tail.astype(jnp.float32), np.finfo(np.float32).tiny)
  buckets = jnp.concatenate([top, jnp.log(tail)[..., None]], axis=-1)
  # A floor far below every real mass; it only replaces -inf, whose product with a mass
  # of 0 would be NaN.
  return jnp.maximum(buckets, TARGET_FLOOR)


def _draft_buckets(records: base.Records, logits: Float[Array, "*rows V"]) -> Buckets:
  """The draft's log-masses in the buckets, tail last, up to a constant per row."""
  return _kept_and_tail(logits.astype(jnp.float32), records.ids.astype(jnp.int32))


def _normalized(buckets: Buckets) -> Buckets:
  """Returns log-masses that sum to 1, none below `DRAFT_FLOOR`."""
  total = jax.nn.logsumexp(buckets, axis=-1, keepdims=True)
  return jnp.maximum(buckets - total, DRAFT_FLOOR)


@jax.custom_vjp
def _kept_and_tail(
  logits: Float[Array, "*rows V"], ids: Int[Array, "*rows k"]
) -> Float[Array, "*rows k+1"]:
  """Returns the logits of k tokens, and the logsumexp over those of all others.

  The tail is summed directly, never computed as one minus the kept mass, so value and
  gradient are accurate even if it is tiny. The custom gradient takes one pass over V;
  JAX's own takes several.
  """
  return _kept_and_tail_forward(logits, ids)[0]


def _kept_and_tail_forward(logits, ids):
  top = jnp.take_along_axis(logits, ids, axis=-1)
  others = jnp.put_along_axis(logits, ids, _MASKED, axis=-1, inplace=False)
  tail = jax.nn.logsumexp(others, axis=-1, keepdims=True)
  return jnp.concatenate([top, tail], axis=-1), (others, ids, tail)


def _kept_and_tail_backward(saved, gradient):
  others, ids, tail = saved
  top, of_tail = gradient[..., :-1], gradient[..., -1:]
  # Rows that the loss ignores have gradient 0, but their logits may be NaN.
  rest = jnp.where(of_tail == 0, 0.0, of_tail * jnp.exp(others - tail))
  return jnp.put_along_axis(rest, ids, top, axis=-1, inplace=False), None


_kept_and_tail.defvjp(_kept_and_tail_forward, _kept_and_tail_backward)


def forward_kl(target: Buckets, draft: Buckets) -> Float[Array, "*rows"]:
  """KL(target || draft) = sum target * log(target / draft), in nats."""
  return jnp.sum(jnp.exp(target) * (target - draft), axis=-1)


def reverse_kl(target: Buckets, draft: Buckets) -> Float[Array, "*rows"]:
  """KL(draft || target) = sum draft * log(draft / target), in nats."""
  return forward_kl(draft, target)


def jsd(target: Buckets, draft: Buckets, beta: float = 0.5) -> Float[Array, "*rows"]:
  """Generalised Jensen-Shannon divergence, in nats, for beta strictly between 0 and 1.

      M = beta * target + (1 - beta) * draft
      JSD = beta * KL(target || M) + (1 - beta) * KL(draft || M)

  It is at most the entropy of (beta, 1 - beta).
  """
  mixture = jnp.logaddexp(np.log(beta) + target, np.log1p(-beta) + draft)
  return beta * forward_kl(target, mixture) + (1 - beta) * forward_kl(draft, mixture)


def total_variation(target: Buckets, draft: Buckets) -> Float[Array, "*rows"]:
  """Half the sum of |target - draft|, in [0, 1]; one minus the overlap of the two."""
  return 0.5 * jnp.sum(jnp.abs(jnp.exp(target) - jnp.exp(draft)), axis=-1)


DIVERGENCES: dict[str, Divergence] = {
  "forward_kl": forward_kl,
  "reverse_kl": reverse_kl,
  "jsd": jsd,
  "total_variation": total_variation,
}
POSITIONS = ("all", "error")


@dataclasses.dataclass(frozen=True)
class LossConfig(base.Config):
  """Which divergence is minimised, and over which positions and tokens.

  Attributes:
    divergence: a key of `DIVERGENCES`, or your own function of two `Buckets`.
    jsd_beta: weight of the target in the mixture of "jsd", in (0, 1).
    positions: "all" emitted positions, or only those where the draft was rejected
      ("error").
    num_positions: P, number of these positions that a slice samples per row; 0 uses
      all.
    num_tokens: number of tokens that a slice compares, those with most of the
      target's mass in its micro-batch, and at least `record_top_k` of them; 0 uses
      the whole vocabulary.
    num_negatives: number of random tokens that represent all others. With 0, the loss
      does not see the mass that the draft gives to tokens outside `num_tokens`.
  """

  divergence: Annotated[str, base.OneOf(*DIVERGENCES)] | Divergence = "jsd"
  jsd_beta: Annotated[float, base.Above(0), base.Below(1)] = 0.1
  positions: Annotated[str, base.OneOf(*POSITIONS)] = "all"
  num_positions: base.CountOrZero = 12
  num_tokens: base.CountOrZero = 256
  num_negatives: base.CountOrZero = 0

  @property
  def subsamples(self) -> bool:
    """Whether a slice uses only a part of its positions or tokens."""
    return bool(self.num_positions or self.num_tokens)

  def checks(self):
    return {
      "num_negatives": (
        self.num_tokens or not self.num_negatives,
        "0 without num_tokens: negatives represent the tokens that are left out",
      )
    }


def divergence(config: LossConfig) -> Divergence:
  """Returns the configured divergence as a function of two `Buckets`."""
  if config.divergence == "jsd":
    return functools.partial(jsd, beta=config.jsd_beta)
  if isinstance(config.divergence, str):
    return DIVERGENCES[config.divergence]
  return config.divergence


def chosen_positions(
  config: LossConfig, batch: base.DistillationBatch
) -> Bool[Array, "R T"]:
  """Returns which positions the loss reads; never padding, never rows of weight 0."""
  is_read = batch.mask & (batch.weight > 0)[:, None]
  if config.positions == "error":
    is_read = is_read & batch.records.error
  return is_read


def distillation_loss(
  config: LossConfig, draft_logits: Float[Array, "R T V"], batch: base.DistillationBatch
) -> Float[Array, ""]:
  """Mean divergence over the chosen positions, weighted by row: [] float32.

  Entry t of the raw `draft_logits` predicts `batch.target[:, t]`. Values at other
  positions, even NaN, affect neither the loss nor its gradient. The unit is nats (total
  variation: in [0, 1]); the loss is 0 if no position is chosen.

  Raises:
    InputError: the shapes of logits and batch differ.
  """
  _check_shapes(draft_logits, batch)
  is_read = chosen_positions(config, batch)
  keep = is_read[..., None]
  # Replace unread entries before and after the logits enter: `where` on the result
  # alone would still multiply NaN by a zero gradient.
  records = batch.records.replace(
    log_probs=jnp.where(keep, batch.records.log_probs, 0.0),
    tail=jnp.where(is_read, batch.records.tail, 0.0),
  )
  draft = _normalized(jnp.where(keep, _draft_buckets(records, draft_logits), 0.0))
  values = divergence(config)(target_buckets(records), draft)
  weights = jnp.where(is_read, batch.weight[:, None], 0.0)
  total = jnp.sum(weights)
  # Without any chosen position 0 / 0 would make the gradient NaN.
  mean = jnp.sum(weights * jnp.where(is_read, values, 0.0))
  return jnp.where(total > 0, mean / jnp.where(total > 0, total, 1.0), 0.0)


def _check_shapes(logits: jax.Array, batch: base.DistillationBatch) -> None:
  rows_and_length = batch.mask.shape
  top = batch.records.ids.shape[-1]
  if logits.shape[:-1] != rows_and_length or logits.shape[-1] < top:
    raise base.InputError(
      f"distillation_loss: draft_logits has shape {logits.shape}, expected [R, T] = "
      f"{rows_and_length} and V >= k = {top}; score the draft on `batch.target`, "
      "with the vocabulary of the records."
    )
