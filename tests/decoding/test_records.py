"""Records: truncated log-softmax with an exact tail, compared with a sort."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from osd_jax import base, native, testing
from osd_jax.decoding import records

VOCAB = 7


@pytest.mark.parametrize(
  ("vocab_size", "dtype"),
  [(1000, jnp.uint16), (2**16, jnp.uint16), (2**16 + 1, jnp.int32)],
)
def test_ids_are_stored_in_the_smallest_type_that_holds_them(vocab_size, dtype):
  empty = base.empty_records(2, 5, 4, vocab_size)
  assert empty.ids.dtype == dtype and empty.ids.shape == (2, 5, 4)
  logits = np.zeros((1, 1, vocab_size), np.float32)
  logits[..., -1] = 1.0
  found = records.from_logits(jnp.asarray(logits), 4)
  assert found.ids.dtype == dtype and found.ids[0, 0, 0] == vocab_size - 1


def test_no_more_tokens_are_kept_than_the_vocabulary_has():
  assert base.empty_records(2, 5, 99, VOCAB).ids.shape == (2, 5, VOCAB)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  kept=st.sampled_from([1, 3, VOCAB]),
  values=st.lists(
    st.sampled_from([-np.inf, -20.0, -1.0, 0.0, 0.5, 2.0]),
    min_size=2 * VOCAB,
    max_size=2 * VOCAB,
  ),
)
def test_record_is_the_truncated_log_softmax(kept, values):
  """Includes ties at the cut and impossible tokens; kept and tail add up to 1."""
  logits = np.array(values).reshape(1, 2, VOCAB)
  logits[..., 2] = 1.0  # at least one token is possible
  found = records.from_logits(jnp.asarray(logits, jnp.float32), kept)
  log_probs, _, tail = oracles.truncate(logits, kept)
  np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-5)
  np.testing.assert_allclose(found.tail, tail, atol=1e-6)
  with np.errstate(divide="ignore"):
    fresh = np.log(oracles.softmax(logits))
  at_ids = np.take_along_axis(fresh, np.asarray(found.ids), -1)
  np.testing.assert_allclose(found.log_probs, at_ids, atol=1e-5)
  assert all(len(set(ids)) == kept for ids in np.asarray(found.ids)[0].tolist())
  assert kept < VOCAB or (np.asarray(found.tail) == 0).all()


@pytest.mark.parametrize("kept", [1, 3, 8])
@pytest.mark.parametrize("ties", [False, True])
def test_block_search_of_large_vocabularies_equals_a_sort(kept, ties):
  """Equals a sort, except that ties at the cut may keep other entries."""
  logits = np.random.default_rng(kept).normal(size=(2, 3, 512)).astype(np.float32)
  if ties:
    logits = np.round(logits)
  logits[0, 0, 5:] = -np.inf
  logits[1, 0, :64] += 9  # the largest entries lie in two blocks
  found = jax.device_get(records.from_logits(jnp.asarray(logits), kept))
  log_probs, ids, tail = oracles.truncate(logits, kept)
  np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-5)
  np.testing.assert_allclose(found.tail, tail, atol=1e-6)
  np.testing.assert_array_equal(
    np.take_along_axis(logits, found.ids.astype(int), -1),
    np.take_along_axis(logits, ids, -1),
  )
  assert all(len(set(row)) == kept for row in found.ids.reshape(-1, kept).tolist())
  with native.portable(is_split=False):
    elsewhere = records.from_logits(jnp.asarray(logits), kept)
  if not ties:
    np.testing.assert_array_equal(found.ids, elsewhere.ids)


def test_first_of_tied_entries_is_kept():
  """Equals a sort even though the block with the largest entry comes later."""
  logits = np.zeros((1, 1, 512), np.float32)
  logits[..., [100, 101]] = 2.0, 1.0
  logits[..., 40] = 1.0  # ties with 101, in an earlier block
  found = records.from_logits(jnp.asarray(logits), 2)
  assert found.ids[0, 0].tolist() == [100, 40]
  with native.portable(is_split=False):
    assert records.from_logits(jnp.asarray(logits), 2).ids[0, 0].tolist() == [100, 40]


def test_tiny_tail_is_not_rounded_to_zero():
  """Here 1 minus the kept mass would round to 0."""
  logits = np.array([[[30.0, 0.0, 0.0, 0.0]]])
  tail = records.from_logits(jnp.asarray(logits, jnp.float32), 1).tail
  np.testing.assert_allclose(tail, 3 * np.exp(-30.0), rtol=1e-5)


def test_teacher_forced_record_t_is_the_law_of_token_t():
  """Row t of the records is the law of token t given the tokens before it."""
  table = testing.random_table(VOCAB, 4)
  # The 0 of the second row is a token, not padding, because more tokens follow it.
  tokens = np.array([[3, 5, 1, 0], [2, 0, 1, 0], [0, 0, 0, 0]], np.int32)
  source = np.array([[4, 1], [5, 1], [0, 0]], np.int32)
  batch = records.teacher_forced(
    testing.tabular_model(VOCAB), jnp.asarray(table), source, tokens, 3
  )
  np.testing.assert_array_equal(batch.mask.sum(-1), [3, 3, 0])
  np.testing.assert_array_equal(batch.weight, [1, 1, 0])
  fed = np.pad(tokens, ((0, 0), (2, 0)))
  logits = table[fed[:, :-2], fed[:, 1:-1]]
  log_probs, ids, tail = oracles.truncate(logits, 3)
  np.testing.assert_allclose(batch.records.log_probs, log_probs, atol=1e-5)
  np.testing.assert_array_equal(batch.records.ids, ids)
  np.testing.assert_allclose(batch.records.tail, tail, atol=1e-6)
