"""What happens when the target is tuned on a domain and replaced under the service?

The demo's target is tuned on one topic, SQL, in another style: all letters are small.
A draft learns from the answers of the former target; then the tuned one answers, and
the draft goes on with what it has.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import numpy as np
import recordings
import tuning
from setting import Answers, Cell, Setting, changed, key_of

from osd_jax import base, corpus, pairs
from osd_jax.data.batches import EncodedExample
from osd_tools import replay

TUNED = "sql"
STEPS = 150  # of tuning, 32 rows each
LAST, WINDOW, NEAR = 100, 25, 0.95
STREAMS = ("mixture", TUNED)


def tuned_pair(setting: Setting, target: pathlib.Path) -> pairs.Pair:
  """Returns the tuned target with the former draft."""
  return pairs.load_pair(tuning.with_target(setting.files, target))


def prompt_of(row: base.DistillationBatch, pair: pairs.Pair, topic: int):
  """Returns the prompt of an answer."""
  tokens = np.asarray(row.source[0])
  return EncodedExample(tokens[tokens != pair.target.pad_id], topic, np.zeros(0, int))


def with_draft(new: pairs.Pair, old: pairs.Pair, params: base.Params) -> pairs.Pair:
  """Returns a pair whose draft is what another pair's draft has become."""
  trained, _ = old.draft.split(params)
  _, frozen = new.draft.split(new.draft_params)
  return dataclasses.replace(new, draft_params=new.draft.join(trained, frozen))


def scored_again(
  setting: Setting, new: pairs.Pair, rows: Sequence[base.DistillationBatch]
) -> list[base.DistillationBatch]:
  """Returns old answers with the new target's distributions and states."""
  prompts = [
    dataclasses.replace(
      prompt_of(row, new, 0),
      reference=np.asarray(row.target[0])[np.asarray(row.mask[0])],
    )
    for row in rows
  ]
  return list(corpus.reference_rows(new, prompts, setting.decoding))


def targets(setting: Setting) -> Answers:
  """Records the tuned target's answers, then replays the replacement."""
  folder = setting.out / "targets"
  parts = [tuning.in_small_letters(folder, TUNED, split) for split in ("train", "eval")]
  target = tuning.tuned(
    folder / "tuned_target.safetensors", parts[:1], parts[1:], STEPS
  )
  new = tuned_pair(setting, target)
  old = setting.answers
  prompts = [
    prompt_of(row, new, int(topic))
    for row, topic in zip(old.rows, old.topics, strict=True)
  ]
  after = recordings.load_or_record(
    folder / "stream.pickle",
    lambda: recordings.record(new, prompts, old.names, setting.decoding),
  )
  for seed in range(setting.seeds):
    for stream in STREAMS:
      places = halves(setting, stream, seed)
      yield from replaced(setting, new, after, stream, seed, places)


def halves(setting: Setting, stream: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the places of the answers before and after the replacement."""
  if stream == "mixture":
    order = setting.order("mixture", seed)
  else:
    places = setting.answers.of_topic(setting.answers.names.index(stream))
    order = np.random.default_rng([seed, 9]).permutation(places)
  half = len(order) // 2
  return order[:half], order[half:]


def replaced(
  setting: Setting,
  new: pairs.Pair,
  after: recordings.Recording,
  stream: str,
  seed: int,
  places: tuple[np.ndarray, np.ndarray],
) -> Answers:
  """Yields the cells of one replacement."""
  first = setting.answers.answers(places[0])
  second = after.answers(places[1])
  is_tuned = after.topics[places[1]] == after.names.index(TUNED)
  learning = changed(setting.learning, seed=seed)

  @functools.cache
  def before() -> tuple[replay.Course, pairs.Pair]:
    learners = []
    course = setting.learned(
      places[0], learning, on_answer=lambda overlap, learner: learners.append(learner)
    )
    return course, with_draft(new, setting.pair, learners[-1].serving)

  def draft(records: str) -> Cell:
    course, pair = before()
    if records == "none":
      later = replay.frozen(pair.draft, pair.draft_params, second, setting.drafted)
      return figures(setting, course, later, is_tuned)
    rows = {"kept": first, "removed": [], "scored again": []}[records]
    if records == "scored again":
      rows = scored_again(setting, new, first)
    later = replay.learned(pair, second, learning, setting.drafted, rows)
    return figures(setting, course, later, is_tuned)

  def cache(is_kept: bool) -> Cell:
    course = replay.cache(setting.pair.target, [*first, *second], setting.drafted)
    begins = len(first)
    later = course.part(slice(begins, None))
    if not is_kept:
      later = replay.cache(new.target, second, setting.drafted)
    return figures(setting, course.part(slice(0, begins)), later, is_tuned)

  systems = {
    "does not learn": lambda: draft("none"),
    "learns, old records kept": lambda: draft("kept"),
    "learns, old records removed": lambda: draft("removed"),
    "learns, old records scored again": lambda: draft("scored again"),
  }
  if setting.name == "demo":  # the cache is the same for every draft
    systems["cache, kept"] = lambda: cache(True)
    systems["cache, emptied"] = lambda: cache(False)
  for name, compute in systems.items():
    yield key_of(setting, "targets", stream, name, seed), compute


def figures(
  setting: Setting, before: replay.Course, after: replay.Course, is_tuned: np.ndarray
) -> Cell:
  """Returns the figures of a replacement, on all answers and on the tuned topic's."""
  former = float(before.overlap[-LAST:].mean())
  overlaps = after.overlap[is_tuned]
  parts = {
    "before": before.part(slice(-LAST, None)),
    "at_first": after.part(slice(0, WINDOW)),
    "at_end": after.part(slice(-LAST, None)),
    "after": after,
  }
  means = {name: float(course.overlap.mean()) for name, course in parts.items()}
  calls = {
    f"tokens_per_call_{name}": course.tokens_per_call(setting.drafted)
    for name, course in parts.items()
  }
  rounded = {name: round(value, 4) for name, value in (means | calls).items()}
  return rounded | {
    "tuned_at_first": round(float(overlaps[: WINDOW // 2].mean()), 4),
    "tuned_at_end": round(float(overlaps[-LAST // 4 :].mean()), 4),
    "recovery": recovered(after.overlap, former),
    "requests": len(after.overlap),
    "slices": after.slices,
  }


def recovered(overlap: np.ndarray, former: float) -> int | None:
  """Returns the requests until overlap is 95 % of the former, as a mean of 25.

  >>> recovered(np.r_[np.full(30, 0.5), np.full(30, 0.8)], 0.8)
  52

  Returns:
    The requests, 0 if overlap never fell below, or None if it stays below.
  """
  width = min(WINDOW, len(overlap))
  means = np.convolve(overlap, np.full(width, 1 / width), "valid")
  near = means >= NEAR * former
  if near[0]:
    return 0
  return int(np.argmax(near)) + width if near.any() else None
