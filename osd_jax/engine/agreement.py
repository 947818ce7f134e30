"""Agreement of a draft with the target on answered requests.

Online and floor draft go through the same function on the same positions.
"""

import dataclasses
import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from osd_jax import base
from osd_jax.decoding import sampling
from osd_jax.engine.requests import Finished


@flax.struct.dataclass
class Agreement:
  """Agreement of a draft with the target, averaged over a row's emitted tokens.

  All emitted positions count, including end-of-sequence and bonus positions.

  Attributes:
    distribution_overlap: [R]; lower bound: the sum of min(target, draft) over the k
      kept tokens, at temperature 1 without top-k or top-p. Reports show this one.
    distribution_overlap_upper: [R]; the lower bound plus the smaller of both tails.
      The bounds are equal if k = V.
    acceptance_rate: [R]; the same sum over the distributions that decided acceptance.
      At temperature 0 it is arg-max agreement; at temperature 1 without filters it is
      distribution_overlap. Otherwise the draft's whole row and the target's kept tokens
      are processed, which is exact if 0 < top_k <= k or k = V. Repetition penalties are
      not applied.
  """

  distribution_overlap: jax.Array
  distribution_overlap_upper: jax.Array
  acceptance_rate: jax.Array


def lengths(target_length: int) -> tuple[int, ...]:
  """Returns the lengths that answers are padded to for measuring.

  Most answers are much shorter than `target_length`, and the draft's scores are the
  largest part of the cost of measuring. Each length is one compilation.
  """
  return tuple(sorted({-(-target_length // part) for part in (1, 2, 4)}))


def of_answer(
  model: base.Model,
  params: base.Params,
  done: Finished,
  covered: np.ndarray | None = None,
) -> Agreement:
  """Returns `agreement` on one answer, at the smallest of `lengths` that holds it."""
  longest, tokens = done.batch.target.shape[1], len(done.tokens)
  length = next(length for length in lengths(longest) if length >= tokens)
  return agreement(model, params, done.batch, done.settings, length, covered)


def absorbed(model: base.Model, params: base.Params, done: Finished) -> base.Params:
  """Returns a cache that has taken up an answer, too; `params` are donated.

  A cache is measured on an answer before it takes it up, as a draft is measured before
  it trains on one.
  """
  length = np.int32(len(done.tokens))
  return absorb(model, params, done.batch.source, done.batch.target[0], length)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def absorb(model, params, source, emitted, length):
  """Calls `model.absorb`; `params` are donated."""
  return model.absorb(params, source, emitted, length)


@functools.partial(jax.jit, static_argnums=(0, 4))
def agreement(
  model: base.Model,
  params: base.Params,
  batch: base.DistillationBatch,
  settings: base.SamplingSettings,
  length: int | None = None,
  covered: Int[Array, " N"] | None = None,
) -> Agreement:
  """Measures a draft on finished requests, by one teacher-forced forward pass.

  It makes no target call: the target's rows were recorded by the verification.

  Args:
    model: the draft, with any parameters of its shape.
    params: its parameters (not the served copy).
    batch: R finished requests with their records.
    settings: [R] as the requests were decoded.
    length: positions to measure, at least the longest output; None: all positions.
    covered: [N] int32, distinct; the tokens that a short output head covers. Other
      tokens have no mass. None: all.

  Returns:
    Means per request.
  """
  if length is not None:
    batch = batch.cut_to(length)
  arguments = (params, batch.source, model.mask(batch.source), batch.target)
  if covered is None:
    logits = model.score(*arguments, **model.score_inputs(batch))
  elif model.score_at is None:
    logits = model.score(*arguments, **model.score_inputs(batch))[..., covered]
  else:
    logits = model.score_at(*arguments, None, covered, **model.score_inputs(batch))
  return agreement_from_logits(logits, batch, settings, model.vocab_size, covered)


@functools.partial(jax.jit, static_argnums=0)
def emitted_log_probs(
  target: base.Model, params: base.Params, batch: base.DistillationBatch
) -> jax.Array:
  """[R, T] log-probabilities of a batch's tokens, by one pass of the target."""
  logits = target.score(params, batch.source, target.mask(batch.source), batch.target)
  logits = logits.astype(jnp.float32)
  emitted = jnp.take_along_axis(logits, batch.target[..., None], axis=-1)[..., 0]
  return emitted - jax.nn.logsumexp(logits, axis=-1)


def mean_agreement(
  draft: base.Model,
  params: base.Params,
  answers: Sequence[Finished],
  rows: int = 16,
) -> dict[int, dict[str, float]]:
  """Averages `agreement` over the answers of each task; every request weighs the same.

  Args:
    draft: the draft that is measured.
    params: trained parameters of `draft`, not the served copy. A cache starts empty,
      and takes up each answer after it has been measured on it.
    answers: finished requests with records; `request.tag` is the task id.
    rows: number of requests per forward pass.

  Returns:
    For each task id: the fields of `Agreement`, and the number of requests.
  """
  if draft.absorb is not None:
    rows, params = 1, draft.init(jax.random.key(0))
  values: dict[int, list[np.ndarray]] = {}
  for start in range(0, len(answers), rows):
    part = list(answers[start : start + rows])
    filled = part + [part[-1]] * (rows - len(part))  # a fixed shape compiles once
    batch, settings = jax.tree.map(
      lambda *leaves: jnp.concatenate(leaves),
      *[(done.batch, done.settings) for done in filled],
    )
    figures = jax.device_get(agreement(draft, params, batch, settings))
    if draft.absorb is not None:
      params = absorbed(draft, params, part[0])
    for done, row in zip(
      part, np.stack(jax.tree.leaves(figures), axis=1), strict=False
    ):
      values.setdefault(int(done.request.tag), []).append(row)
  names = [field.name for field in dataclasses.fields(Agreement)]
  return {
    task_id: {
      "requests": len(found),
      **dict(zip(names, np.mean(found, axis=0).tolist(), strict=True)),
    }
    for task_id, found in sorted(values.items())
  }


def agreement_from_logits(
  logits: jax.Array,
  batch: base.DistillationBatch,
  settings: base.SamplingSettings,
  vocab_size: int = 0,
  covered: Int[Array, " N"] | None = None,
) -> Agreement:
  """Returns `agreement` from draft logits [R, T, V], or [R, T, N] of `covered`."""
  records = batch.records
  ids = records.ids.astype(jnp.int32)
  if covered is not None:
    # Positions within `covered`; N for a token that is not covered.
    size = len(covered)
    ids = jnp.full(vocab_size, size, jnp.int32).at[covered].set(jnp.arange(size))[ids]
  logits = logits.astype(jnp.float32)
  # The normaliser is one number per position; a normalised copy would be [R, T, V].
  total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  draft_log_probs = _at(logits, ids, -jnp.inf) - total
  draft_tail = jnp.maximum(1.0 - jnp.sum(jnp.exp(draft_log_probs), -1), 0.0)
  lower = _overlap(jnp.exp(records.log_probs), jnp.exp(draft_log_probs))
  upper = lower + jnp.minimum(records.tail, draft_tail)

  temperature = settings.temperature[:, None]
  greedy = (sampling.arg_max(logits) == ids[..., 0]).astype(jnp.float32)
  plain = (temperature == 1) & ~sampling.has_filters(settings)[:, None]
  ruled = (temperature == 0) | plain
  # Filters need a search over V, so it runs only if a row asks for it.
  processed = jax.lax.cond(
    jnp.all(ruled),
    lambda: lower,
    lambda: _overlap(
      sampling.processed_probs(records.log_probs, settings),
      _at(sampling.processed_probs(logits - total, settings), ids, 0.0),
    ),
  )
  accepted = jnp.where(temperature == 0, greedy, jnp.where(plain, lower, processed))

  def mean(values):
    count = jnp.maximum(jnp.sum(batch.mask, axis=1), 1)
    return jnp.sum(jnp.where(batch.mask, values, 0.0), axis=1) / count

  return Agreement(mean(lower), mean(upper), mean(accepted))


def _at(values: jax.Array, places: jax.Array, otherwise: float) -> jax.Array:
  """Values [R, T, N] at places [R, T, k]; `otherwise` at N."""
  return jnp.take_along_axis(values, places, axis=-1, mode="fill", fill_value=otherwise)


def _overlap(target: jax.Array, draft: jax.Array) -> jax.Array:
  return jnp.sum(jnp.minimum(target, draft), axis=-1)
