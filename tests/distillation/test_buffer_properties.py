"""The ring under drawn histories of appends and draws, against a Python list."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import oracles
import pytest

from osd_jax import base
from osd_jax.distillation import buffer as replay

CAPACITY, ROWS, NEW, REPLAY = 5, 3, 2, 3
CONFIG = replay.BufferConfig(CAPACITY, recency_half_life=2.0)
EXAMPLES = hypothesis.settings(
  max_examples=40, deadline=None, derandomize=True, database=None
)
append = jax.jit(replay.append)
sample = jax.jit(replay.sample, static_argnums=(2, 3, 4))

# Weight 0 only fills a batch; such a row must never be kept or drawn.
WEIGHTS = st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=ROWS, max_size=ROWS)
HISTORIES = st.lists(WEIGHTS, max_size=9)


def batch_of(values, weights):
  """Rows whose every field is made from a number, so that mixtures show."""
  values = np.asarray(values)
  spread = lambda *shape: np.broadcast_to(
    values.reshape(-1, *(1 for _ in shape)), (len(values), *shape)
  )
  return base.DistillationBatch(
    source=spread(2).astype(np.int32),
    target=spread(2).astype(np.int32),
    mask=spread(2) % 2 == 0,
    records=base.Records(
      log_probs=-spread(2, 1).astype(np.float32),
      ids=spread(2, 1).astype(np.uint16),
      tail=spread(2).astype(np.float32) / 1e6,
      error=spread(2) % 3 == 0,
    ),
    weight=np.asarray(weights, np.float32),
  )


def play(history, weights_of=lambda weights: weights):
  """The ring and the list after a history, and how much was added before each."""
  ring = replay.init(CONFIG, 2, 2, 1, 9)
  oracle, marks = oracles.ListBuffer(CAPACITY), [0]
  for number, weights in enumerate(history):
    values = [1 + ROWS * number + place for place in range(ROWS)]
    ring = append(ring, batch_of(values, weights_of(weights)))
    oracle.append(values, weights)
    marks.append(oracle.added)
  return ring, oracle, marks


def held(ring):
  """(value, weight) of each row of the ring, oldest first; each row is whole."""
  added, filled = int(ring.added), int(ring.filled)
  slots = [serial % CAPACITY for serial in range(added - filled, added)]
  data = jax.device_get(ring.data)
  rows = jax.tree.map(lambda leaf: leaf[slots], data)
  values, weights = rows.source[:, 0], rows.weight
  jax.tree.map(np.testing.assert_array_equal, rows, batch_of(values, weights))
  return list(zip(values.tolist(), weights.tolist(), strict=True))


def listed(oracle):
  return [(value, weight) for _, value, weight in oracle.rows]


@EXAMPLES
@hypothesis.given(history=HISTORIES)
def test_the_ring_holds_the_newest_rows_in_order(history):
  ring, oracle, _ = play(history)
  assert int(ring.added) == oracle.added
  assert held(ring) == listed(oracle)


@EXAMPLES
@hypothesis.given(history=HISTORIES)
def test_rows_one_by_one_are_the_batch(history):
  whole, _, _ = play(history)
  single = [
    [weight if place == at else 0.0 for at in range(ROWS)]
    for weights in history
    for place, weight in enumerate(weights)
  ]
  ring = replay.init(CONFIG, 2, 2, 1, 9)
  for number, weights in enumerate(single):
    start = 1 + ROWS * (number // ROWS)
    ring = append(ring, batch_of(range(start, start + ROWS), weights))
  jax.tree.map(np.testing.assert_array_equal, ring, whole)


@EXAMPLES
@hypothesis.given(history=HISTORIES, data=st.data(), seed=st.integers(0, 2**31))
def test_a_draw_is_fresh_rows_then_any_rows_and_never_one_twice(history, data, seed):
  ring, oracle, marks = play(history)
  since = data.draw(st.sampled_from(marks))
  rows = sample(ring, jax.random.key(seed), NEW, REPLAY, CONFIG, since)
  rows = jax.device_get(rows)
  present = rows.weight > 0
  jax.tree.map(  # no row is made of two
    np.testing.assert_array_equal,
    jax.tree.map(lambda leaf: leaf[present], rows),
    batch_of(rows.source[present, 0], rows.weight[present]),
  )
  parts = (slice(0, NEW), oracle.since(since)), (slice(NEW, None), oracle.since(0))
  for part, allowed in parts:
    values = rows.source[part, 0][present[part]].tolist()
    count = part.stop or NEW + REPLAY
    assert len(values) == min(count - part.start, len(allowed))
    assert len(set(values)) == len(values)
    assert set(values) <= {value for _, value, _ in allowed}


@pytest.mark.parametrize(
  "fault",
  [
    lambda weights: [1.0] * ROWS,  # keeps what only fills the batch
    lambda weights: [*weights[:-1], 0.0],  # loses the last row
  ],
)
def test_padding_that_is_kept_and_a_row_that_is_lost_are_told_apart(fault):
  """Negative controls: the histories above would notice."""

  def differs(history):
    ring, oracle, _ = play(history, fault)
    return held(ring) != listed(oracle)

  hypothesis.find(
    HISTORIES, differs, settings=hypothesis.settings(EXAMPLES, max_examples=300)
  )
