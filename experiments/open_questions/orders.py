"""Streams of recorded answers: the order in which a system meets them."""

from collections.abc import Iterator

import numpy as np
import recordings

from osd_jax.data import examples, streams

ADAPTED = 0.9  # mean overlap at which the adversary changes the topic
LATEST = 8  # answers in that mean
LONGEST = 60  # answers after which it changes the topic in any case


def order(
  recording: recordings.Recording,
  kind: str,
  per_topic: int,
  seed: int,
  period: int = 50,
) -> np.ndarray:
  """Returns the places of a stream's answers; no answer occurs twice.

  Args:
    recording: the answers.
    kind: "heavy tailed", or a kind of `osd_jax.data.streams`.
    per_topic: answers of each topic, on average.
    seed: of the schedule and of the order within a topic.
    period: answers of a topic in a row, in "cyclic".
  """
  rng = np.random.default_rng([seed, 7])
  topics = len(recording.names)
  counts = np.full(topics, per_topic)
  if kind == "heavy tailed":
    # Zipf: the second topic is half as frequent as the first, and so on.
    shares = 1 / np.arange(1, topics + 1)
    counts = np.rint(per_topic * topics * shares / shares.sum()).astype(int)
    counts = np.minimum(counts, len(recording.of_topic(0)))
  schedule = streams.SCHEDULES["mixture" if kind == "heavy tailed" else kind]
  more = {"period": period} if kind == "cyclic" else {}
  entries = schedule(counts, rng, **more)
  return _of_entries(recording, entries, rng)


def _of_entries(
  recording: recordings.Recording, entries: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  places = [
    rng.permutation(recording.of_topic(topic)) for topic in range(len(recording.names))
  ]
  return np.asarray(
    [
      places[topic][nth]
      for topic, nth in zip(entries, examples.ordinals(entries), strict=True)
    ]
  )


class Adversary:
  """A stream that changes the topic as soon as the draft has adapted to it.

  A topic ends when the mean overlap of its last `LATEST` answers reaches `ADAPTED`, or
  after `LONGEST` answers. Iterate over it, and append the overlap with each answer to
  `overlaps` before the next one is read.

  Attributes:
    overlaps: of all answers so far.
    order: their places.
  """

  def __init__(self, recording: recordings.Recording, length: int, seed: int):
    rng = np.random.default_rng([seed, 8])
    topics = range(len(recording.names))
    self._left = [list(rng.permutation(recording.of_topic(t))) for t in topics]
    self._length = length
    self.overlaps: list[float] = []
    self.order: list[int] = []

  def __iter__(self) -> Iterator[int]:
    topic = since = 0
    while len(self.order) < self._length:
      overlaps = self.overlaps[since:]
      adapted = len(overlaps) >= LATEST and np.mean(overlaps[-LATEST:]) >= ADAPTED
      if adapted or len(overlaps) >= LONGEST or not self._left[topic]:
        count = len(self._left)
        others = [(topic + step) % count for step in range(1, count)]
        topic = next(other for other in others if self._left[other])
        since = len(self.overlaps)
      self.order.append(int(self._left[topic].pop()))
      yield self.order[-1]
