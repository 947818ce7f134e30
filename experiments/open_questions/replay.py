"""Replays a stream of recorded answers through a learner, request by request.

Nothing is decoded. The number of target calls follows from the positions at which a
draft names the target's token; for greedy answers it is exact (`walk`). Times
follow from measured costs (`Costs`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import recordings

from osd_jax import base, pairs
from osd_jax.decoding import ngrams, sampling
from osd_jax.distillation.learner import Learner, LearningConfig
from osd_jax.engine import agreement

CACHE_TOKENS = 2**16
# Places of the next answer, given the overlaps of all answers so far; None ends.
Stream = Callable[[Sequence[float]], int | None]


@dataclasses.dataclass(frozen=True)
class Course:
  """What a system did on a stream.

  Attributes:
    order: [n] places of the answers in the recording.
    overlap: [n] of the serving draft, before it learned from the answer.
    calls: [n] target calls of each answer.
    tokens: [n] emitted tokens.
    updates: updates that began.
    slices: their slices.
    seconds: processor time of the whole replay.
    decisions: what a gate decided, as (requests so far, its name).
    drafts: copies of the serving draft, as (requests so far, parameters).
  """

  order: np.ndarray
  overlap: np.ndarray
  calls: np.ndarray
  tokens: np.ndarray
  updates: int = 0
  slices: int = 0
  seconds: float = 0.0
  decisions: tuple[tuple[int, str], ...] = ()
  drafts: tuple[tuple[int, base.Params], ...] = ()

  @property
  def tokens_per_call(self) -> float:
    """Emitted tokens per target call of the whole stream."""
    return float(self.tokens.sum() / self.calls.sum())


def walk(right: np.ndarray) -> tuple[int, np.ndarray]:
  """Returns the target calls of one answer, and where they rejected a token.

  >>> walk(np.array([[True, True, False, True]] * 2))
  (2, array([False, False,  True, False]))

  Args:
    right: [K, n]; whether the j-th drafted token of a call, counted from 0, is the
      answer's token at a position. Drafts that read no states of the target have K
      equal rows.
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


@functools.partial(jax.jit, static_argnames=("model", "drafted"))
def score(
  model: base.Model, params: base.Params, rows: base.DistillationBatch, drafted: int
) -> tuple[jax.Array, jax.Array]:
  """Returns (overlap [R], right [R, K, T]) of a draft on recorded greedy answers."""
  arguments = (params, rows.source, model.mask(rows.source), rows.target)
  if model.score_steps is None:
    logits = model.score(*arguments, **rows.score_inputs)[None]
  else:
    logits = model.score_steps(*arguments, **rows.score_inputs)
  greedy = sampling.make_settings(len(rows.target), max_length=rows.target.shape[1])
  greedy = jax.tree.map(jnp.asarray, greedy)
  found = agreement.agreement_from_logits(logits[0], rows, greedy)
  right = jnp.argmax(logits, axis=-1) == rows.target[None]
  # A draft that reads states is trained on fewer steps than it may draft.
  steps = jnp.minimum(jnp.arange(drafted), len(right) - 1)
  return found.distribution_overlap, jnp.moveaxis(right[steps], 0, 1)


def scores(
  model: base.Model,
  params: base.Params,
  recording: recordings.Recording,
  places: Sequence[int] | np.ndarray,
  drafted: int,
  rows: int = 16,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (overlap [n], target calls [n]) of a draft that does not change."""
  overlaps, calls = [], []
  for start in range(0, len(places), rows):
    part = list(places[start : start + rows])
    filled = part + part[-1:] * (rows - len(part))  # a fixed shape compiles once
    overlap, right = jax.device_get(
      score(model, params, recording.stacked(filled), drafted)
    )
    overlaps += list(overlap[: len(part)])
    calls += [
      walk(one[:, : recording.tokens[place]])[0]
      for one, place in zip(right, part, strict=False)
    ]
  return np.asarray(overlaps), np.asarray(calls)


def fixed(
  pair: pairs.Pair,
  params: base.Params,
  recording: recordings.Recording,
  order: np.ndarray,
  drafted: int,
) -> Course:
  """Returns the course of a draft that does not learn."""
  overlap, calls = scores(pair.draft, params, recording, order, drafted)
  return Course(order, overlap, calls, recording.tokens[order])


def cache(
  pair: pairs.Pair, recording: recordings.Recording, order: np.ndarray, drafted: int
) -> Course:
  """Returns the course of an n-gram cache, which takes up every answer."""
  model, params = ngrams.build(pair.target, CACHE_TOKENS), ngrams.empty(CACHE_TOKENS)
  overlaps, calls = [], []
  for place in order:
    row, count = recording.rows[place], recording.tokens[place]
    row = row.replace(target_states=None, token_states=None)
    overlap, right = jax.device_get(score(model, params, row, drafted))
    overlaps.append(overlap[0])
    calls.append(walk(right[0, :, :count])[0])
    params = _absorbed(model, params, row.source, row.target[0], np.int32(count))
  return Course(order, np.asarray(overlaps), np.asarray(calls), recording.tokens[order])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _absorbed(model, params, source, emitted, length):
  return model.absorb(params, source, emitted, length)


def learned(
  pair: pairs.Pair,
  recording: recordings.Recording,
  stream: np.ndarray | Stream,
  learning: LearningConfig,
  drafted: int,
  seen: Sequence[base.DistillationBatch] = (),
  keep_at: Sequence[int] = (),
) -> Course:
  """Returns the course of a draft that learns from every answer.

  Args:
    pair: target and draft; they stay as they are.
    recording: the answers.
    stream: places of the answers, or a function that chooses the next one.
    learning: buffer, updates, their schedule, and the gate.
    drafted: K.
    seen: rows that fill the buffer first.
    keep_at: numbers of requests after which the serving draft is kept.
  """
  first = recording.rows[0]
  learner = Learner(
    pair.draft,
    pair.draft_params,
    learning,
    first.source.shape[1],
    first.target.shape[1],
    first.records.ids.shape[-1],
  )
  learner.seed(seen)
  places: list[int] = []
  overlaps: list[float] = []
  calls: list[int] = []
  slices, updates, decisions, drafts = 0, 0, [], []
  started = time.process_time()
  for place in _places(stream, overlaps):
    row = recording.rows[place]
    found = jax.device_get(score(pair.draft, learner.serving, row, drafted))
    overlap = float(found[0][0])
    rivals = {
      name: float(score(pair.draft, params, row, drafted)[0][0])
      for name, params in learner.rivals.items()
    }
    count, rejected = walk(found[1][0, :, : recording.tokens[place]])
    outcome = learner.observe(_with_errors(row, rejected), overlap, rivals=rivals)
    if learner.decision is not None:
      decisions.append((len(places) + 1, learner.decision.name))
      learner.decision = None
    if outcome is not None:
      slices, updates = slices + len(outcome.losses), updates + 1
    places.append(place)
    overlaps.append(overlap if np.isfinite(overlap) else 0.0)
    calls.append(count)
    if len(places) in keep_at:
      drafts.append((len(places), learner.serving))
  learner.finish()
  learner.runner.close()
  order = np.asarray(places)
  return Course(
    order,
    np.asarray(overlaps),
    np.asarray(calls),
    recording.tokens[order],
    updates,
    slices,
    time.process_time() - started,
    tuple(decisions),
    tuple(drafts),
  )


def merged(courses: Sequence[Course], order: np.ndarray) -> Course:
  """Returns one course of several drafts, each of which served a part of a stream."""
  place_of = {place: index for index, place in enumerate(order)}
  at = [place_of[place] for course in courses for place in course.order]

  def joined(name: str) -> np.ndarray:
    values = np.concatenate([getattr(course, name) for course in courses])
    return values[np.argsort(at)]

  return Course(
    order,
    *(joined(name) for name in ("overlap", "calls", "tokens")),
    sum(course.updates for course in courses),
    sum(course.slices for course in courses),
    sum(course.seconds for course in courses),
  )


def _with_errors(
  row: base.DistillationBatch, rejected: np.ndarray
) -> base.DistillationBatch:
  """Returns a row whose records say where this draft was rejected."""
  error = np.zeros_like(row.records.error)
  error[0, : len(rejected)] = rejected
  return row.replace(records=row.records.replace(error=error))


def _places(stream: np.ndarray | Stream, overlaps: Sequence[float]) -> Iterator[int]:
  """Yields the places of the stream; a function sees the overlaps so far."""
  if not callable(stream):
    yield from stream
    return
  while (place := stream(overlaps)) is not None:
    yield place
