"""Replays of recorded answers: what a drafter would do with them, without decoding.

For greedy answers the number of target calls follows from the positions at which the
drafter names the target's token, and a draft learns from the same rows as in a run. A
replay of one row in flight therefore repeats the overlaps and the calls of a real run,
up to two simplifications: a draft that reads states drafts on as in the last step that
it is trained on, and a mixture with the cache scores every token as after a
verification.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, pairs
from osd_jax.costs.table import Costs
from osd_jax.decoding import mixed as mixed_lib
from osd_jax.decoding import ngrams, sampling
from osd_jax.distillation.learner import Learner, LearningConfig
from osd_jax.engine import agreement
from osd_jax.models import layers

CACHE_TOKENS = ngrams.SIZE
ROWS = 16  # answers that a draft which does not learn is asked about at once


@dataclasses.dataclass(frozen=True)
class Course:
  """What a drafter did with some answers, one after another."""

  # [N] distribution overlap with each answer, before learning from it.
  overlap: np.ndarray
  # For each answer [K, n] bool: whether the j-th drafted token of a call, counted from
  # 0, is the answer's token at a position. Drafts that read no states of tokens have K
  # equal rows.
  right: tuple[np.ndarray, ...]
  # For each answer [K, n] int: how certain a draft was, see `mixed.bin_of`; empty for
  # others.
  bins: tuple[np.ndarray, ...] = ()
  updates: int = 0  # updates of the draft
  slices: int = 0  # their slices

  @property
  def tokens(self) -> np.ndarray:
    """[N] emitted tokens of each answer."""
    return np.asarray([right.shape[1] for right in self.right])

  def calls(self, num_draft_tokens: int) -> np.ndarray:
    """[N] target calls of each answer, with at most K drafted tokens in each."""
    return np.asarray([walk(right[:num_draft_tokens])[0] for right in self.right])

  def tokens_per_call(self, num_draft_tokens: int) -> float:
    """Emitted tokens per target call."""
    return float(self.tokens.sum() / self.calls(num_draft_tokens).sum())

  def part(self, answers: slice) -> "Course":
    """Returns the course of some of the answers, with the updates of all."""
    return dataclasses.replace(
      self,
      overlap=self.overlap[answers],
      right=self.right[answers],
      bins=self.bins[answers],
    )


def walk(right: np.ndarray) -> tuple[int, np.ndarray]:
  """Returns the target calls of one answer and the places of rejected tokens.

  `right` is [K, n], see `Course`.

  >>> walk(np.array([[True, True, False, True]] * 2))
  (2, array([False, False,  True, False]))
  """
  drafted, length = right.shape
  place = count = 0
  rejected = np.zeros(length, bool)
  while place < length:
    accepted = 0
    while accepted < drafted and place < length and right[accepted, place]:
      accepted, place = accepted + 1, place + 1
    rejected[place : place + 1] = accepted < drafted
    place, count = place + 1, count + 1
  return count, rejected


def frozen(
  draft: base.Model,
  params: base.Params,
  answers: Sequence[base.DistillationBatch],
  num_draft_tokens: int,
) -> Course:
  """Replays a draft that does not learn, on greedy answers with records."""
  overlaps, rights, bins = [], [], []
  for start in range(0, len(answers), ROWS):
    part = list(answers[start : start + ROWS])
    filled = part + part[-1:] * (ROWS - len(part))  # a fixed shape compiles once
    stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *filled)
    figures = jax.device_get(_score(draft, params, stacked, num_draft_tokens))
    for row, overlap, right, certain in zip(part, *figures, strict=False):
      overlaps.append(overlap)
      rights.append(right[:, : _length(row)])
      bins.append(certain[:, : _length(row)])
  return Course(np.asarray(overlaps), tuple(rights), tuple(bins))


def cache(
  target: base.Model,
  answers: Sequence[base.DistillationBatch],
  num_draft_tokens: int,
  size: int = CACHE_TOKENS,
) -> Course:
  """Replays an n-gram cache of `size` tokens, which takes up every answer."""
  model, params = ngrams.build(target, size), ngrams.empty(size)
  overlaps, rights = [], []
  for answer in answers:
    row = answer.replace(target_states=None, token_states=None)
    overlap, right, _ = jax.device_get(_score(model, params, row, num_draft_tokens))
    overlaps.append(overlap[0])
    rights.append(right[0, :, : _length(row)])
    length = np.int32(_length(row))
    params = agreement.absorb(model, params, row.source, row.target[0], length)
  return Course(np.asarray(overlaps), tuple(rights))


def mixed(
  target: base.Model,
  answers: Iterable[base.DistillationBatch],
  course: Course,
  size: int = CACHE_TOKENS,
) -> Course:
  """Replays a draft mixed with an n-gram cache, from the course of the draft alone.

  The mixture chooses a source token by token, as in a run. A draft that learns must
  learn from all positions: where it errs depends on the mixture. The result has the
  overlaps and the updates of the draft.
  """
  drafter = mixed_lib.NgramDrafter(
    ngrams.build(target, size), False, target=target, size=size
  )
  memory, rights = drafter.memory(), []
  for answer, right, bins in zip(answers, course.right, course.bins, strict=True):
    text, length = (answer.source, answer.target[0]), right.shape[1]
    padding = ((0, 0), (0, len(text[1]) - length))
    of_draft = (np.pad(one, padding) for one in (right, bins))
    by_either, memory = _mix(drafter, memory, *text, *of_draft, np.int32(length))
    rights.append(np.asarray(by_either)[:, :length])
  return dataclasses.replace(course, right=tuple(rights), bins=())


@functools.partial(jax.jit, static_argnums=0)
def _mix(
  drafter: mixed_lib.NgramDrafter,
  memory: mixed_lib.Memory,
  source: jax.Array,
  emitted: jax.Array,
  right: jax.Array,
  bins: jax.Array,
  length: jax.Array,
) -> tuple[jax.Array, mixed_lib.Memory]:
  """Returns where a mixture is right [K, T], and the memory with this answer [T].

  `right` and `bins` are [K, T], those of the draft.
  """
  text = emitted[None]
  inputs = layers.inputs_of(text, drafter.target.starts(source))
  state = drafter.init(memory, source, None, text.shape[1])
  _, state = drafter.decode(memory, inputs, state)
  cache_bins = jnp.broadcast_to(state.bins[0, :, 1], bins.shape)
  by_cache = mixed_lib.is_by_cache(memory, jnp.stack([bins, cache_bins], axis=-1))
  by_either = jnp.where(by_cache, state.named[0, :, 1] == emitted, right)
  # Once a token is emitted, both sources are asked again what comes after it.
  named = jnp.where(right[0], emitted, base.NO_TOKEN)
  state = state.replace(
    named=state.named.at[0, :, 0].set(named), bins=state.bins.at[0, :, 0].set(bins[0])
  )
  return by_either, drafter.absorb(memory, state, source, emitted, length)


def learned(
  pair: pairs.Pair,
  answers: Iterable[base.DistillationBatch],
  learning: LearningConfig,
  num_draft_tokens: int,
  seen: Iterable[base.DistillationBatch] = (),
  costs: Costs | None = None,
  on_answer: Callable[[float, Learner], object] = lambda overlap, learner: None,
  is_guarded: bool = True,
) -> Course:
  """Replays a draft that learns from every greedy answer; the pair does not change.

  The answers have records and are read one by one; the rows in `seen` fill the buffer
  first. `costs` are for a schedule that needs them. `on_answer` is called after each
  answer with the overlap of the serving draft and the learner, whose `decision` it may
  take. Without `is_guarded` the newest draft is asked, even if a run would refuse it.
  """
  learning = dataclasses.replace(learning, free_updates=False)
  draft, learner = pair.draft, None
  _, frozen_part = draft.split(pair.draft_params)
  overlaps, rights, bins, slices = [], [], [], []
  for answer in answers:
    if learner is None:
      lengths = answer.source.shape[1], answer.target.shape[1]
      record_size = answer.records.ids.shape[-1]
      learner = Learner(draft, pair.draft_params, learning, *lengths, record_size)
      learner.seed(seen)
      learner.costs = costs
    score = functools.partial(_overlap, draft, answer, num_draft_tokens)
    serving = learner.serving
    if not is_guarded:
      serving = draft.join(learner.runner.learner.served, frozen_part)
    figures = jax.device_get(_score(draft, serving, answer, num_draft_tokens))
    overlap, right = float(figures[0][0]), figures[1][0, :, : _length(answer)]
    bins.append(figures[2][0, :, : _length(answer)])
    rivals = {name: score(params) for name, params in learner.rivals.items()}
    # The records say where this draft was rejected.
    rejected = walk(right)[1]
    error = np.zeros(answer.records.error.shape, bool)
    error[0, : len(rejected)] = rejected
    row = answer.replace(records=answer.records.replace(error=error))
    outcome = learner.observe(row, overlap, rivals=rivals, score=score)
    if outcome is not None:
      slices.append(len(outcome.losses))
    overlaps.append(overlap if np.isfinite(overlap) else 0.0)
    rights.append(right)
    on_answer(overlap, learner)
  if learner is not None:
    learner.finish()
    learner.runner.close()
  return Course(
    np.asarray(overlaps), tuple(rights), tuple(bins), len(slices), sum(slices)
  )


def _overlap(
  model: base.Model, row: base.DistillationBatch, num_draft_tokens: int, params: Any
) -> float:
  return float(_score(model, params, row, num_draft_tokens)[0][0])


@functools.partial(jax.jit, static_argnames=("model", "num_draft_tokens"))
def _score(
  model: base.Model,
  params: base.Params,
  rows: base.DistillationBatch,
  num_draft_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns (overlap [R], right, bins [R, K, T]) of a drafter on greedy answers."""
  arguments = (params, rows.source, model.mask(rows.source), rows.target)
  if model.score_steps is None:
    logits = model.score(*arguments, **model.score_inputs(rows))[None]
  else:
    logits = model.score_steps(*arguments, **model.score_inputs(rows))
  greedy = sampling.make_settings(len(rows.target), max_length=rows.target.shape[1])
  greedy = jax.tree.map(jnp.asarray, greedy)
  figures = agreement.agreement_from_logits(logits[0], rows, greedy)
  right = jnp.argmax(logits, axis=-1) == rows.target[None]
  is_sampled = jnp.zeros(len(rows.target), bool)
  bins = jnp.stack([mixed_lib.bin_of(step, is_sampled) for step in logits])
  # A draft that reads states is trained on fewer steps than it may draft.
  steps = jnp.minimum(jnp.arange(num_draft_tokens), len(right) - 1)
  right, bins = (jnp.moveaxis(values[steps], 0, 1) for values in (right, bins))
  return figures.distribution_overlap, right, bins


def _length(row: base.DistillationBatch) -> int:
  return int(np.count_nonzero(np.asarray(row.mask[0])))
