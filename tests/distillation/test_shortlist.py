"""The shortlist against a slow count of the same rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import base
from osd_jax.distillation import buffer as replay

VOCAB, LENGTH, KEPT = 24, 5, 3


def filled(rng, rows, tokens):
  """A buffer of which every record names tokens out of `tokens`."""
  buffer = replay.init(replay.BufferConfig(capacity=8), 4, LENGTH, KEPT, VOCAB)
  ids = np.stack(
    [
      [rng.choice(tokens, KEPT, replace=False) for _ in range(LENGTH)]
      for _ in range(rows)
    ]
  )
  probs = np.sort(rng.dirichlet(np.ones(KEPT + 1), (rows, LENGTH)))[..., ::-1]
  mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, rows)[:, None]
  batch = base.DistillationBatch(
    source=jnp.ones((rows, 4), jnp.int32),
    target=jnp.where(mask, jnp.asarray(ids[..., 0]), 0).astype(jnp.int32),
    mask=jnp.asarray(mask),
    records=base.Records(
      log_probs=jnp.log(probs[..., :KEPT]).astype(jnp.float32),
      ids=jnp.asarray(ids, jnp.uint16),
      tail=jnp.asarray(probs[..., KEPT], jnp.float32),
      error=jnp.zeros((rows, LENGTH), bool),
    ),
    weight=jnp.ones(rows, jnp.float32),
  )
  return replay.append(buffer, batch), ids, probs, mask


def counted(ids, probs, mask):
  mass = np.zeros(VOCAB)
  for row, column in zip(*np.nonzero(mask), strict=True):
    for rank in range(KEPT):
      mass[ids[row, column, rank]] += probs[row, column, rank]
  return mass


@pytest.mark.parametrize("seed", range(3))
def test_it_holds_the_tokens_of_most_mass(seed):
  rng = np.random.default_rng(seed)
  buffer, ids, probs, mask = filled(rng, 6, np.arange(5, VOCAB))
  found = np.asarray(replay.likeliest_tokens(buffer, VOCAB, 6))
  mass = counted(ids, probs, mask)
  assert len(set(found.tolist())) == 6 and base.EOS_ID in found
  others = [token for token in found if token != base.EOS_ID]
  left = [t for t in range(VOCAB) if t not in found]
  assert min(mass[others]) >= max(mass[left])


def test_every_end_of_a_sequence_is_covered():
  buffer, *_ = filled(np.random.default_rng(0), 6, np.arange(5, VOCAB))
  found = np.asarray(replay.likeliest_tokens(buffer, VOCAB, 6, (0, 3)))
  assert {0, 3} <= set(found.tolist()) and base.EOS_ID not in found


def test_what_the_stream_has_not_shown_is_filled_by_id():
  rng = np.random.default_rng(0)
  buffer, ids, _, mask = filled(rng, 4, np.array([20, 21, 22]))
  found = np.asarray(replay.likeliest_tokens(buffer, VOCAB, 8)).tolist()
  assert set(ids[mask].ravel().tolist()) <= set(found)
  assert found == sorted({0, 1, 2, 3, 4, 20, 21, 22})


def test_an_empty_buffer_gives_the_first_tokens():
  buffer = replay.init(replay.BufferConfig(capacity=2), 4, LENGTH, KEPT, VOCAB)
  assert replay.likeliest_tokens(buffer, VOCAB, 4).tolist() == [0, 1, 2, 3]


def test_masked_positions_do_not_count():
  rng = np.random.default_rng(1)
  buffer, ids, _, mask = filled(rng, 6, np.arange(5, VOCAB))
  blind = buffer.replace(
    data=buffer.data.replace(mask=jnp.zeros_like(buffer.data.mask))
  )
  assert replay.likeliest_tokens(blind, VOCAB, 6).tolist() == [0, 1, 2, 3, 4, 5]
