"""Divergences between the target's recorded rows and the draft's rows.

A recorded row holds the target's k most probable tokens and the mass of all others.
The loss sees k + 1 buckets: one for each kept token and a last one for the tail. With
k = V the tail is empty and the rows are the full distributions: one code path. By the
data-processing inequality the bucketed divergence never exceeds the full one.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from osd_jax import base

# log of the smallest mass float32 holds: what a recorded mass of 0 is taken for.
TARGET_FLOOR = float(np.log(np.finfo(np.float32).tiny))
# The draft's log-probabilities stay exact (their gradient matters most where they are
# lowest); only the empty tail bucket of a full row is this low.
DRAFT_FLOOR = -1e9
_MASKED = -1e30

Buckets = Float[Array, "*rows buckets"]  # log-masses of k tokens and the tail
Divergence = Callable[[Buckets, Buckets], Float[Array, "*rows"]]


def target_buckets(records: base.Records) -> Buckets:
  """The target's log-masses over the k kept tokens and the tail.

  Args:
    records: leading axes [...], k entries a row.

  Returns:
    [..., k + 1] float32, natural log, the tail last, nothing below `TARGET_FLOOR`.
  """
  kept = records.log_probs.astype(jnp.float32)
  tail = jnp.maximum(records.tail.astype(jnp.float32), np.finfo(np.float32).tiny)
  buckets = jnp.concatenate([kept, jnp.log(tail)[..., None]], axis=-1)
  return jnp.maximum(buckets, TARGET_FLOOR)


def draft_log_probs_on(
  records: base.Records, logits: Float[Array, "*rows V"]
) -> Buckets:
  """The draft's log-masses in the buckets of the target's records.

  Args:
    records: leading axes [...], k entries a row.
    logits: [..., V], raw, any float type.

  Returns:
    [..., k + 1] float32, natural log, the tail last, nothing below `DRAFT_FLOOR`.
  """
  return _normalized(_draft_buckets(records, logits))


def _draft_buckets(records: base.Records, logits: Float[Array, "*rows V"]) -> Buckets:
  """`draft_log_probs_on` up to a constant a row: kept logits, and the tail's."""
  return _kept_and_tail(logits.astype(jnp.float32), records.ids.astype(jnp.int32))


def _normalized(buckets: Buckets) -> Buckets:
  total = jax.nn.logsumexp(buckets, axis=-1, keepdims=True)
  return jnp.maximum(buckets - total, DRAFT_FLOOR)


@jax.custom_vjp
def _kept_and_tail(
  logits: Float[Array, "*rows V"], ids: Int[Array, "*rows k"]
) -> Float[Array, "*rows k+1"]:
  """The logits of k tokens, and the logsumexp over those of all others.

  The tail is never one minus a sum, so that it and its gradient are right however
  small it is. Differentiated by hand: one pass over all of V, where JAX takes several.

  Args:
    logits: [..., V] float32.
    ids: [..., k] int32.

  Returns:
    [..., k + 1] float32
  """
  return _kept_and_tail_forward(logits, ids)[0]


def _kept_and_tail_forward(logits, ids):
  kept = jnp.take_along_axis(logits, ids, axis=-1)
  others = jnp.put_along_axis(logits, ids, _MASKED, axis=-1, inplace=False)
  tail = jax.nn.logsumexp(others, axis=-1, keepdims=True)
  return jnp.concatenate([kept, tail], axis=-1), (others, ids, tail)


def _kept_and_tail_backward(saved, gradient):
  others, ids, tail = saved
  kept, of_tail = gradient[..., :-1], gradient[..., -1:]
  # A row that nobody asks for may hold nan.
  rest = jnp.where(of_tail == 0, 0.0, of_tail * jnp.exp(others - tail))
  return jnp.put_along_axis(rest, ids, kept, axis=-1, inplace=False), None


_kept_and_tail.defvjp(_kept_and_tail_forward, _kept_and_tail_backward)


def forward_kl(target: Buckets, draft: Buckets) -> Float[Array, "*rows"]:
  """KL(target || draft) = sum target * log(target / draft).

  Args:
    target: [..., k + 1] log-masses.
    draft: [..., k + 1] log-masses in the same buckets.

  Returns:
    [...] in nats.
  """
  return jnp.sum(jnp.exp(target) * (target - draft), axis=-1)


def reverse_kl(target: Buckets, draft: Buckets) -> Float[Array, "*rows"]:
  """KL(draft || target) = sum draft * log(draft / target).

  Args:
    target: [..., k + 1] log-masses.
    draft: [..., k + 1] log-masses in the same buckets.

  Returns:
    [...] in nats.
  """
  return forward_kl(draft, target)


def jsd(target: Buckets, draft: Buckets, beta: float = 0.5) -> Float[Array, "*rows"]:
  """Jensen-Shannon divergence through the true mixture.

  With M = beta * target + (1 - beta) * draft,
  JSD = beta * KL(target || M) + (1 - beta) * KL(draft || M).

  Args:
    target: [..., k + 1] log-masses.
    draft: [..., k + 1] log-masses in the same buckets.
    beta: weight of the target, strictly between 0 and 1.

  Returns:
    [...] in nats, at most the entropy of (beta, 1 - beta).
  """
  mixture = jnp.logaddexp(np.log(beta) + target, np.log1p(-beta) + draft)
  return beta * forward_kl(target, mixture) + (1 - beta) * forward_kl(draft, mixture)


def total_variation(target: Buckets, draft: Buckets) -> Float[Array, "*rows"]:
  """Half the sum of |target - draft|: one minus the overlap of the two.

  Args:
    target: [..., k + 1] log-masses.
    draft: [..., k + 1] log-masses in the same buckets.

  Returns:
    [...] in 0..1.
  """
  return 0.5 * jnp.sum(jnp.abs(jnp.exp(target) - jnp.exp(draft)), axis=-1)


DIVERGENCES: dict[str, Divergence] = {
  "forward_kl": forward_kl,
  "reverse_kl": reverse_kl,
  "jsd": jsd,
  "total_variation": total_variation,
}
POSITIONS = ("all", "error")


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Which divergence, over which positions.

  Attributes:
    divergence: a key of `DIVERGENCES`, or a function of your own like those.
    jsd_beta: weight of the target in the mixture of "jsd", in (0, 1).
    positions: "all" emitted positions, or those where the draft "error"ed.
    num_positions: P, random ones of them that a slice looks at in each row; 0 all.
    num_tokens: the tokens with most of the target's mass in a micro-batch, over which
      a slice compares; 0 all.
    num_negatives: random other tokens that stand for all others; without any, the draft
      is not told what it gives them.
  """

  divergence: str | Divergence = "forward_kl"
  jsd_beta: float = 0.5
  positions: str = "all"
  num_positions: int = 0
  num_tokens: int = 0
  num_negatives: int = 0

  @property
  def narrows(self) -> bool:
    """Whether a slice looks at a part of its rows; see `narrowing`."""
    return bool(self.num_positions or self.num_tokens)

  def __post_init__(self):
    base.check_types(self)
    base.check_counts(self, "num_positions", "num_tokens", "num_negatives", least=0)
    alone = self.num_negatives and not self.num_tokens
    beside = "0 without num_tokens: negatives stand for the tokens left out"
    base.check_fields(self, {"num_negatives": (not alone, beside)})
    if isinstance(self.divergence, str):
      base.check_choices(self, divergence=DIVERGENCES)
    base.check_choices(self, positions=POSITIONS)
    expected = "a number between 0 and 1; their limits are forward_kl and reverse_kl"
    base.check_fields(self, {"jsd_beta": (0.0 < self.jsd_beta < 1.0, expected)})


def divergence(config: LossConfig) -> Divergence:
  """The divergence that the config names, as a function of two bucketed rows."""
  if config.divergence == "jsd":
    return functools.partial(jsd, beta=config.jsd_beta)
  if isinstance(config.divergence, str):
    return DIVERGENCES[config.divergence]
  return config.divergence


def chosen_positions(
  config: LossConfig, batch: base.DistillationBatch
) -> Bool[Array, "R T"]:
  """Which positions the loss reads.

  Args:
    config: says "all" or "error".
    batch: R rows of T positions.

  Returns:
    [R, T] bool; false outside the mask and in rows of weight 0.
  """
  chosen = batch.mask & (batch.weight > 0)[:, None]
  if config.positions == "error":
    chosen = chosen & batch.records.error
  return chosen


def position_divergences(
  config: LossConfig,
  draft_logits: Float[Array, "R T V"],
  batch: base.DistillationBatch,
) -> Float[Array, "R T"]:
  """The divergence at every position that the loss reads, 0 elsewhere.

  What lies at other positions, even nan, reaches neither value nor gradient.

  Args:
    config: divergence and positions.
    draft_logits: [R, T, V], raw, any float type.
    batch: R rows of T positions.

  Returns:
    [R, T] float32 in nats (total variation: 0..1).

  Raises:
    ValueError: if logits and batch differ in shape.
  """
  _check_shapes(draft_logits, batch)
  chosen = chosen_positions(config, batch)
  keep = chosen[..., None]
  records = batch.records.replace(
    log_probs=jnp.where(keep, batch.records.log_probs, 0.0),
    tail=jnp.where(chosen, batch.records.tail, 0.0),
  )
  draft = _normalized(jnp.where(keep, _draft_buckets(records, draft_logits), 0.0))
  values = divergence(config)(target_buckets(records), draft)
  return jnp.where(chosen, values, 0.0)


def distillation_loss(
  config: LossConfig,
  draft_logits: Float[Array, "R T V"],
  batch: base.DistillationBatch,
) -> Float[Array, ""]:
  """Mean of D(target || draft) over the chosen positions, weighted by row.

  Args:
    config: divergence and positions.
    draft_logits: [R, T, V], raw, any float type; row t judges `batch.target[:, t]`.
    batch: R rows with the target's records.

  Returns:
    Scalar float32; 0 where no position is chosen.

  Raises:
    ValueError: if logits and batch differ in shape.
  """
  values = position_divergences(config, draft_logits, batch)
  weights = jnp.where(chosen_positions(config, batch), batch.weight[:, None], 0.0)
  total = jnp.sum(weights)
  mean = jnp.sum(weights * values) / jnp.where(total > 0, total, 1.0)
  return jnp.where(total > 0, mean, 0.0)


def _check_shapes(logits: jax.Array, batch: base.DistillationBatch) -> None:
  """Refuses logits that cannot belong to the batch."""
  rows_and_length = batch.mask.shape
  kept = batch.records.ids.shape[-1]
  if logits.shape[:-1] != rows_and_length or logits.shape[-1] < kept:
    raise base.InputError(
      f"distillation_loss: draft_logits has shape {logits.shape}, expected [R, T] = "
      f"{rows_and_length} and V >= k = {kept}; score the draft on `batch.target`, "
      "with the vocabulary that the records were taken with."
    )
  if batch.records.log_probs.shape[:-1] != rows_and_length:
    raise base.InputError(
      f"distillation_loss: records.log_probs has shape "
      f"{batch.records.log_probs.shape}, expected [R, T] = {rows_and_length} first; "
      "cut records and mask to one target length."
    )
