"""Texts to learn on: written by the target, the draft or both, judged by the target.

The paper's four sampling sources; "teacher" and "student" name nothing else here.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.progress

from osd_jax import base, corpus, pairs, partitioning
from osd_jax.decoding import records
from osd_jax.models import mixture
from osd_jax.serving import slots

SAMPLE_SOURCES = ("teacher", "student", "mix_request", "mix_token")


@dataclasses.dataclass(frozen=True)
class TextsConfig:
  """Who writes.

  Attributes:
    sample_source: "teacher": the target writes; "student": the draft writes;
      "mix_request": one of them, chosen for each prompt; "mix_token": for each token.
    mix_share: share of prompts or tokens that the draft writes in a mix.
    seed: of the coins of a mix.
  """

  sample_source: str = "teacher"
  mix_share: float = 0.5
  seed: int = 0

  def __post_init__(self):
    checks = {
      "sample_source": (
        self.sample_source in SAMPLE_SOURCES,
        f"one of {', '.join(SAMPLE_SOURCES)}",
      ),
      "mix_share": (0 <= self.mix_share <= 1, "a number in 0..1"),
      "seed": (self.seed >= 0, "an integer >= 0"),
    }
    for name, (valid, expected) in checks.items():
      if not valid:
        raise base.InputError(
          f"TextsConfig.{name}: received {getattr(self, name)!r}, expected {expected}."
        )


class Texts:
  """Texts of a corpus, with the target's distributions."""

  def __init__(
    self,
    config: TextsConfig,
    decoding: slots.DecodingConfig,
    sampling: slots.SamplingConfig,
    pair: pairs.Pair,
    partitioner: partitioning.Partitioner,
    found: Sequence[corpus.Prompt],
    bar: rich.progress.Progress,
  ):
    """Writes nothing yet."""
    self.config, self.pair, self.prompts = config, pair, found
    self._decoding, self._sampling = decoding, sampling
    self._partitioner, self._bar = partitioner, bar

  def rows(self, draft_params: base.Params) -> base.DistillationBatch:
    """All rows in the order of the prompts.

    Args:
      draft_params: the draft that writes, where it does.

    Returns:
      A batch of [N] rows of numpy arrays.
    """
    by_draft = self.draft_writes()
    parts: list[Any] = [None] * len(self.prompts)
    for index, row in zip(np.flatnonzero(~by_draft), self._by_target, strict=True):
      parts[index] = row
    places = np.flatnonzero(by_draft)
    for index, row in zip(places, self._by_draft(places, draft_params), strict=True):
      parts[index] = row
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

  def draft_writes(self) -> np.ndarray:
    """Which prompts the draft (or a mix by token) writes, [N] bool."""
    share = {"teacher": 0.0, "mix_request": self.config.mix_share}
    rng = np.random.default_rng([self.config.seed, 1])
    coins = rng.random(len(self.prompts))
    return coins < share.get(self.config.sample_source, 1.0)

  @functools.cached_property
  def _by_target(self) -> list[base.DistillationBatch]:
    """Rows of the target's own texts: decoding them recorded its distributions."""
    places = np.flatnonzero(~self.draft_writes())
    if not len(places):
      return []
    decoder = plain_slots(self._decoding, self.pair, self._partitioner)
    return [jax.device_get(done.batch) for done in self._answer(decoder, places)]

  def _by_draft(
    self, places: np.ndarray, params: base.Params
  ) -> Iterator[base.DistillationBatch]:
    """Rows of texts by the draft or the mix, through one target pass each."""
    if not len(places):
      return
    model = self.pair.draft
    if self.config.sample_source == "mix_token":
      model = mixture.mix(
        self.pair.target, model, self.config.mix_share, self.config.seed
      )
      params = {"target": self.pair.target_params, "draft": params}
    unrecorded = dataclasses.replace(_plain(self._decoding), record_top_k=0)
    decoder = slots.Slots(unrecorded, model, params, partitioner=self._partitioner)
    answers = self._answer(decoder, places)
    size = self._decoding.rows
    for start in range(0, len(answers), size):
      yield from self._judged([d.batch for d in answers[start : start + size]], size)

  def _judged(
    self, texts: list[base.DistillationBatch], size: int
  ) -> Iterator[base.DistillationBatch]:
    """The same rows with the target's distributions; `size` fixes the shape."""
    filled = corpus.stack(texts + texts[-1:] * (size - len(texts)))
    judged = records.teacher_forced(
      self.pair.target,
      self.pair.target_params,
      filled.source,
      filled.target,
      self._decoding.record_top_k,
    )
    host = jax.device_get(filled.replace(records=judged.records))
    for row in range(len(texts)):
      yield jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], host)

  def _answer(self, decoder: slots.Slots, places: np.ndarray) -> list[slots.Finished]:
    found = [self.prompts[place] for place in places]
    with counting(self._bar, "texts", len(found)) as count:
      return corpus.answer(decoder, found, self._sampling, count)


@contextlib.contextmanager
def counting(
  bar: rich.progress.Progress, label: str, total: int
) -> Iterator[Callable[[slots.Finished], None]]:
  """A line of its own below the bar, for prompts being answered."""
  task = bar.add_task(label, total=total, figures="")
  yield lambda done: bar.advance(task)
  bar.remove_task(task)


def plain_slots(
  config: slots.DecodingConfig,
  pair: pairs.Pair,
  partitioner: partitioning.Partitioner,
) -> slots.Slots:
  """The target alone, with records."""
  return slots.Slots(
    _plain(config),
    pair.target,
    pair.target_params,
    partitioner=partitioner,
  )


def _plain(config: slots.DecodingConfig) -> slots.DecodingConfig:
  """One step a token: a call may take as many as an answer has tokens."""
  return dataclasses.replace(config, max_rounds=config.target_length)
