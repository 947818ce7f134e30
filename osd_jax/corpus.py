"""Texts in bulk: who writes the answers to a corpus, and what the target says of them.

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

from osd_jax import base, pairs, sharding
from osd_jax.data.prompts import Prompt
from osd_jax.decoding import records
from osd_jax.engine import engine
from osd_jax.engine.server import Server
from osd_jax.models import mixture

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
    base.check_choices(self, sample_source=SAMPLE_SOURCES)
    base.check_counts(self, "seed", least=0)
    share = self.mix_share
    base.check_fields(self, {"mix_share": (0 <= share <= 1, "a number in 0..1")})


class Texts:
  """Texts of a corpus, with the target's distributions."""

  def __init__(
    self,
    config: TextsConfig,
    decoding: engine.DecodingConfig,
    sampling: engine.SamplingConfig,
    pair: pairs.Pair,
    partition: sharding.PartitionConfig,
    prompts: Sequence[Prompt],
    bar: rich.progress.Progress,
  ):
    """Writes nothing yet."""
    self.config, self.pair, self.prompts = config, pair, prompts
    self._decoding, self._sampling = decoding, sampling
    self._partition, self._bar = partition, bar

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
    server = plain_server(self.pair, self._decoding, self._partition)
    return [jax.device_get(done.batch) for done in self._answer(server, places)]

  def _by_draft(
    self, places: np.ndarray, params: base.Params
  ) -> Iterator[base.DistillationBatch]:
    """Rows of texts by the draft or the mix, through one target pass each."""
    if not len(places):
      return
    writer = self.pair.draft
    if self.config.sample_source == "mix_token":
      writer = mixture.mix(
        self.pair.target, writer, self.config.mix_share, self.config.seed
      )
      params = {"target": self.pair.target_params, "draft": params}
    alone = dataclasses.replace(self.pair, target=writer, target_params=params)
    unrecorded = dataclasses.replace(self._decoding, record_top_k=0)
    answers = self._answer(plain_server(alone, unrecorded, self._partition), places)
    size = self._decoding.rows
    for start in range(0, len(answers), size):
      yield from self._judged([d.batch for d in answers[start : start + size]], size)

  def _judged(
    self, texts: list[base.DistillationBatch], size: int
  ) -> Iterator[base.DistillationBatch]:
    """The same rows with the target's distributions; `size` fixes the shape."""
    filled = stack(texts + texts[-1:] * (size - len(texts)))
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

  def _answer(self, server: Server, places: np.ndarray) -> list[engine.Finished]:
    prompts = [self.prompts[place] for place in places]
    with counting(self._bar, "texts", len(prompts)) as count:
      return server.run(requests(prompts, self._sampling), count)


@contextlib.contextmanager
def counting(
  bar: rich.progress.Progress, label: str, total: int
) -> Iterator[Callable[[engine.Finished], None]]:
  """A line of its own below the bar, for prompts being answered."""
  task = bar.add_task(label, total=total, figures="")
  yield lambda done: bar.advance(task)
  bar.remove_task(task)


def plain_server(
  pair: pairs.Pair,
  decoding: engine.DecodingConfig,
  partition: sharding.PartitionConfig,
) -> Server:
  """The target alone; a call may take as many steps as an answer has tokens."""
  config = dataclasses.replace(decoding, max_rounds=decoding.target_length)
  return Server(pair.plain(), config, partition=partition)


def requests(
  prompts: Sequence[Prompt], sampling: engine.SamplingConfig
) -> list[engine.Request]:
  """The i-th prompt draws with seed + i; tags are the numbers of the tasks."""
  return [
    engine.Request(prompt.tokens, sampling.of_request(index), tag=prompt.task_id)
    for index, prompt in enumerate(prompts)
  ]


def reference_rows(
  pair: pairs.Pair,
  prompts: Sequence[Prompt],
  decoding: engine.DecodingConfig,
  rows: int = 8,
) -> Iterator[base.DistillationBatch]:
  """The target's distributions along the references of prompts, teacher-forced.

  Args:
    pair: its target judges.
    prompts: those without reference get weight 0.
    decoding: lengths and k of the rows.
    rows: R of each batch; the last one is filled up with rows of weight 0.

  Yields:
    Batches of R rows.
  """
  source_length = decoding.source_lengths[-1]
  for start in range(0, len(prompts), rows):
    pad_id = pair.target.pad_id
    source = np.full((rows, source_length), pad_id, np.int32)
    tokens = np.full((rows, decoding.target_length), pad_id, np.int32)
    for row, prompt in enumerate(prompts[start : start + rows]):
      source[row, : len(prompt.tokens)] = prompt.tokens[:source_length]
      reference = prompt.reference[: decoding.target_length]
      tokens[row, : len(reference)] = reference
    yield jax.block_until_ready(  # of a mesh, few may be in flight
      records.teacher_forced(
        pair.target, pair.target_params, source, tokens, decoding.record_top_k
      )
    )


def stack(rows: Sequence[base.DistillationBatch]) -> base.DistillationBatch:
  """One batch of all rows."""
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
