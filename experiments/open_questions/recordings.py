"""Recorded answers of a target: made once, and read by every replay of a stream.

A greedy answer depends on the target alone. All drafts can therefore be compared on the
same recorded answers, without calling the target again.
"""

import dataclasses
import pathlib
import pickle
from collections.abc import Sequence

import jax
import numpy as np

from osd_jax import base, corpus, pairs, sharding
from osd_jax.data.batches import EncodedExample
from osd_jax.engine.requests import DecodingConfig, SamplingConfig


@dataclasses.dataclass(frozen=True)
class Recording:
  """Answers of a target, grouped by topic.

  Attributes:
    rows: one answer each, as numpy arrays of one row; in the order of their prompts.
    topics: [N] the topic of each row, an index into `names`.
    names: the topics.
  """

  rows: tuple[base.DistillationBatch, ...]
  topics: np.ndarray
  names: tuple[str, ...]

  def of_topic(self, topic: int) -> np.ndarray:
    """Returns the places of the rows of a topic."""
    return np.flatnonzero(self.topics == topic)

  def answers(self, order: np.ndarray) -> list[base.DistillationBatch]:
    """Returns some rows, in this order."""
    return [self.rows[place] for place in order]


def record(
  pair: pairs.Pair,
  prompts: Sequence[EncodedExample],
  names: Sequence[str],
  decoding: DecodingConfig,
  rows: int = 8,
) -> Recording:
  """Answers prompts greedily, with plain decoding.

  Args:
    pair: the target, and the draft whose inputs are recorded.
    prompts: in the order of the recording.
    names: label of each `task_id`.
    decoding: lengths and records.
    rows: requests in flight.
  """
  decoding = dataclasses.replace(decoding, rows=rows, cache_tokens=0, adaptive=None)
  server = corpus.plain_server(pair, decoding, sharding.PartitionConfig())
  answers = server.run(corpus.requests(prompts, SamplingConfig()))
  server.close()
  rows_of_one = tuple(
    _without_spare_states(jax.device_get(one.batch), pair) for one in answers
  )
  topics = np.asarray([prompt.task_id for prompt in prompts])
  return Recording(rows_of_one, topics, tuple(names))


def load_or_record(path: pathlib.Path, make) -> Recording:
  """Returns the recording of a file; makes and writes it if it does not exist."""
  if path.exists():
    return pickle.loads(path.read_bytes())
  recording = make()
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_suffix(".tmp")
  unfinished.write_bytes(pickle.dumps(recording))
  unfinished.rename(path)
  return recording


def _without_spare_states(
  row: base.DistillationBatch, pair: pairs.Pair
) -> base.DistillationBatch:
  return row if pair.draft.reads_tokens else row.replace(token_states=None)
