"""Every metric, defined once, with its formula.

"Draft" below is any draft; online and floor draft always go through the same
function on the same positions.
"""

import functools
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.decoding import sampling


@flax.struct.dataclass
class Agreement:
  """How well a draft agrees with the target, averaged over a row's emitted tokens.

  All emitted positions count, end-of-sequence and bonus positions too.

  Attributes:
    distribution_overlap: [R]; lower bound from the k kept tokens,
      sum over them of min(target, draft) at temperature 1, no top-k or top-p. The
      figure that is reported.
    distribution_overlap_upper: [R]; the lower bound plus min of both tails. Equal
      to the lower one where k = V.
    acceptance_rate: [R]; the same sum over the distributions that decided
      acceptance. At temperature 0 it is arg-max agreement; at temperature 1 without
      filters it is distribution_overlap; else the draft's whole row and the target's
      kept tokens are processed, which is exact where 0 < top_k <= k or k = V.
  """

  distribution_overlap: jax.Array
  distribution_overlap_upper: jax.Array
  acceptance_rate: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def agreement(
  model: base.Model,
  params: base.Params,
  batch: base.DistillationBatch,
  settings: base.SamplingSettings,
) -> Agreement:
  """Measures a draft on finished requests, by one teacher-forced forward pass.

  No target call: the target's rows are those that verification recorded.

  Args:
    model: the draft.
    params: its parameters (not the served copy).
    batch: R finished requests with their records.
    settings: [R] as the requests were decoded.

  Returns:
    Means per request.
  """
  mask = batch.source != base.PAD_ID
  logits = model.score(params, batch.source, mask, batch.target)
  return agreement_from_logits(logits, batch, settings)


def agreement_from_logits(
  logits: jax.Array, batch: base.DistillationBatch, settings: base.SamplingSettings
) -> Agreement:
  """`agreement` from draft logits [R, T, V]."""
  records = batch.records
  ids = records.ids.astype(jnp.int32)
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  draft_log_probs = jnp.take_along_axis(log_probs, ids, axis=-1)
  draft_tail = jnp.maximum(1.0 - jnp.sum(jnp.exp(draft_log_probs), -1), 0.0)
  lower = _overlap(jnp.exp(records.log_probs), jnp.exp(draft_log_probs))
  upper = lower + jnp.minimum(records.tail, draft_tail)

  temperature = settings.temperature[:, None]
  greedy = (jnp.argmax(logits, -1) == ids[..., 0]).astype(jnp.float32)
  plain = (temperature == 1) & ~_filtered(settings)[:, None]
  ruled = (temperature == 0) | plain
  processed = jax.lax.cond(
    jnp.all(ruled),
    lambda: lower,
    lambda: _overlap(
      sampling.processed_probs(records.log_probs, settings),
      jnp.take_along_axis(sampling.processed_probs(log_probs, settings), ids, axis=-1),
    ),
  )
  accepted = jnp.where(temperature == 0, greedy, jnp.where(plain, lower, processed))

  def mean(values):
    count = jnp.maximum(jnp.sum(batch.mask, axis=1), 1)
    return jnp.sum(jnp.where(batch.mask, values, 0.0), axis=1) / count

  return Agreement(mean(lower), mean(upper), mean(accepted))


def _overlap(target: jax.Array, draft: jax.Array) -> jax.Array:
  return jnp.sum(jnp.minimum(target, draft), axis=-1)


def _filtered(settings: base.SamplingSettings) -> jax.Array:
  """[R] bool; whether a request asks for top-k or top-p."""
  return (settings.top_k > 0) | (settings.top_p < 1)


def draft_acceptance_rate(accepted: int, drafted: int) -> float | None:
  """Accepted / drafted tokens; None where nothing was drafted."""
  return accepted / drafted if drafted else None


def tokens_per_target_call(emitted: int, target_calls: int) -> float | None:
  """Block efficiency tau: emitted / target calls, bonus and recovered included."""
  return emitted / target_calls if target_calls else None


def expected_tokens_per_target_call(acceptance: float, num_draft_tokens: int) -> float:
  """tau of independent positions, (1 - alpha^(K + 1)) / (1 - alpha) (paper, eq. 1)."""
  if acceptance >= 1:
    return float(num_draft_tokens + 1)
  return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


def predicted_speed_up(
  tau: float, num_draft_tokens: int, cost_ratio: float, verify_ratio: float = 1.0
) -> float:
  """tau / (K c + v); the paper's figure takes v = 1.

  Args:
    tau: tokens per target call.
    num_draft_tokens: K.
    cost_ratio: c, draft step / plain target step.
    verify_ratio: v, verification / plain target step.
  """
  return tau / (num_draft_tokens * cost_ratio + verify_ratio)


def loops(tokens: np.ndarray, size: int = 8, times: int = 4) -> bool:
  """Whether a text repeats itself: some `size` tokens in a row occur `times` times.

  Occurrences may overlap, so that one token repeated for ever is a loop as well.
  """
  seen: dict[tuple[int, ...], int] = {}
  for start in range(len(tokens) - size + 1):
    window = tuple(int(token) for token in tokens[start : start + size])
    seen[window] = seen.get(window, 0) + 1
  return max(seen.values(), default=0) >= times


def segment_summary(
  rows: list[Mapping[str, float]], edge: int = 50
) -> dict[str, float | int]:
  """One line per topic: the first and the last requests of a segment.

  Args:
    rows: request rows of one segment, in order.
    edge: how many requests the first and last means take.

  Returns:
    Means of overlap and draft acceptance, online and floor, first and last.
  """

  def mean(part, name):
    values = [row[name] for row in part if row.get(name) is not None]
    return float(np.mean(values)) if values else float("nan")

  found: dict[str, float | int] = {"requests": len(rows)}
  for label, part in (("first", rows[:edge]), ("last", rows[-edge:]), ("mean", rows)):
    found[f"overlap_{label}"] = mean(part, "overlap")
    found[f"floor_overlap_{label}"] = mean(part, "floor_overlap")
    found[f"draft_acceptance_{label}"] = mean(part, "draft_acceptance_rate")
    found[f"tokens_per_target_call_{label}"] = mean(part, "tokens_per_target_call")
  return found


def recovery_requests(
  overlaps: list[float], level: float, window: int = 25, share: float = 0.9
) -> int | None:
  """Requests until the trailing window is at `share` of `level`; None if never.

  Args:
    overlaps: prequential overlap of a segment's requests, in order.
    level: the offline-distilled overlap on that topic.
    window: trailing requests; shorter at the beginning of the segment, where at
      least `window` // 2 requests must have been seen.
    share: of the level to reach.
  """
  for count in range(max(window // 2, 1), len(overlaps) + 1):
    if np.mean(overlaps[max(0, count - window) : count]) >= share * level:
      return count
  return None
