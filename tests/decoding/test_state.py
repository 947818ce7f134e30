"""Appending a round equals an oracle that keeps a list of tokens."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import base, testing
from osd_jax.base import EOS_ID, StopReason
from osd_jax.decoding import records
from osd_jax.decoding import state as state_lib

ROWS, LENGTH, VOCAB = 4, 10, 7


@functools.partial(jax.jit, static_argnums=4)
def append(state, acceptance, verification, proposal, ends):
  found = records.from_logits(verification.logits, state.records.ids.shape[-1])
  judgement = state_lib.Judgement.of(acceptance, verification, found)
  return state_lib.append(state, judgement, proposal, ends)


def filled_state(rng, length, reason, max_length):
  """Rows in the middle of decoding, with data in every buffer."""
  slots = state_lib.buffer_length(LENGTH)

  def cache():
    return testing.TabularCache(
      jnp.asarray(rng.integers(2, VOCAB, (ROWS, slots)), jnp.int32),
      jnp.asarray(length + 3, jnp.int32),  # as the calls of the round leave it
    )

  state = state_lib.initial_state(
    jnp.zeros(ROWS, jnp.int32),
    harness.settings_of(ROWS, max_length=max_length),
    cache(),
    cache(),
    LENGTH,
    VOCAB,
    VOCAB,
  )
  return state.replace(
    tokens=jnp.asarray(rng.integers(2, VOCAB, (ROWS, slots)), jnp.int32),
    length=jnp.asarray(length, jnp.int32),
    last_token=jnp.asarray(rng.integers(2, VOCAB, ROWS), jnp.int32),
    stop_reason=jnp.asarray(reason, jnp.int32),
    records=jax.tree.map(
      lambda leaf: jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype),
      state.records,
    ),
  )


def emitted_by(tokens, accepted, room, ends=(EOS_ID,)):
  """The oracle: the tokens of the round that one running row keeps."""
  kept = []
  for token in tokens[: accepted + 1]:
    if len(kept) == room:
      break
    kept.append(int(token))
    if token in ends:
      break
  return kept


def a_round(data, k):
  """A random round over rows of any length: running, stopped or empty."""
  ints = lambda low, high: st.lists(
    st.integers(low, high), min_size=ROWS, max_size=ROWS
  )
  max_length = np.array(data.draw(ints(1, LENGTH)))
  left = np.array(data.draw(ints(0, LENGTH)))
  length = np.maximum(max_length - left, 0)
  reason = np.array(data.draw(ints(0, 3)))
  reason = np.where((reason == 0) & (length == max_length), StopReason.LENGTH, reason)
  accepted = np.array(data.draw(ints(0, k)))
  token = st.sampled_from([0, EOS_ID, 2, 3, 4, 5, 6])
  tokens = np.array(
    [data.draw(st.lists(token, min_size=k + 1, max_size=k + 1)) for _ in range(ROWS)]
  )
  rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
  state = filled_state(rng, length, reason, max_length)
  logits = jnp.asarray(rng.normal(size=(ROWS, k + 1, VOCAB)), jnp.float32)
  acceptance = base.Acceptance(
    jnp.asarray(tokens, jnp.int32), jnp.asarray(accepted, jnp.int32)
  )
  return state, acceptance, base.Verification(logits)


@pytest.mark.parametrize(("k", "ends"), [(1, (EOS_ID,)), (8, (EOS_ID,)), (5, (4, 2))])
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_append_equals_the_oracle(k, ends, data):
  """With one end-of-sequence token, or several that do not include 1."""
  before, acceptance, verification = a_round(data, k)
  proposal = base.Proposal(acceptance.tokens[:, :k], None)
  after = append(before, acceptance, verification, proposal, ends)
  before, acceptance, verification, after = jax.device_get(
    (before, acceptance, verification, after)
  )
  for row in range(ROWS):
    if before.stop_reason[row] != StopReason.RUNNING:
      check_untouched(before, after, row)
    else:
      check_appended(before, acceptance, verification, after, row, k, ends)


def check_untouched(before, after, row):
  length = int(before.length[row])
  assert int(after.target_cache.length[row]) == length
  same = lambda a, b: np.testing.assert_array_equal(a[row], b[row])
  unrewound = lambda state: state.replace(target_cache=None, draft_cache=None)
  jax.tree.map(same, unrewound(before), unrewound(after))


def check_appended(before, acceptance, verification, after, row, k, ends):
  start, limit = int(before.length[row]), int(before.settings.max_length[row])
  accepted = int(acceptance.accepted[row])
  tokens = np.asarray(acceptance.tokens[row])
  kept = emitted_by(tokens, accepted, limit - start, ends)
  end = start + len(kept)
  assert int(after.length[row]) == end <= limit
  assert int(after.last_token[row]) == kept[-1]
  assert int(after.target_cache.length[row]) == end

  expected = StopReason.LENGTH if end == limit else StopReason.RUNNING
  expected = StopReason.EOS if kept[-1] in ends else expected
  assert int(after.stop_reason[row]) == expected

  np.testing.assert_array_equal(
    after.tokens[row, :end], [*before.tokens[row, :start].tolist(), *kept]
  )
  check_records(before, verification, after, row, start, end, accepted, k)

  counters = after.counters
  judged, passed = min(len(kept), k), min(len(kept), accepted)
  assert int(counters.rounds[row]) == 1
  assert int(counters.drafted[row]) == judged
  assert int(counters.accepted[row]) == passed
  np.testing.assert_array_equal(
    counters.accepted_per_position[row], np.arange(state_lib.MAX_DRAFT_TOKENS) < passed
  )


def check_records(before, verification, after, row, start, end, accepted, k):
  earlier = jax.tree.map(lambda leaf: np.asarray(leaf[row, :start]), before.records)
  now = jax.tree.map(lambda leaf: np.asarray(leaf[row, :start]), after.records)
  jax.tree.map(np.testing.assert_array_equal, earlier, now)
  log_probs, ids, _ = oracles.truncate(
    np.asarray(verification.logits[row, : end - start]), VOCAB
  )
  new = jax.tree.map(lambda leaf: np.asarray(leaf[row, start:end]), after.records)
  np.testing.assert_allclose(new.log_probs, log_probs, atol=1e-5)
  np.testing.assert_array_equal(new.ids, ids)
  offsets = np.arange(end - start)
  np.testing.assert_array_equal(new.error, (offsets == accepted) & (offsets < k))


def test_new_row_is_running_and_limited_by_the_buffer():
  state = state_lib.initial_state(
    jnp.zeros(2, jnp.int32),
    harness.settings_of(2, max_length=[3, 99]),
    None,
    None,
    LENGTH,
    0,
    VOCAB,
  )
  assert (np.asarray(state.stop_reason) == StopReason.RUNNING).all()
  assert np.asarray(state.settings.max_length).tolist() == [3, LENGTH]
  assert state.records is None
  assert (np.asarray(state.last_token) == base.PAD_ID).all()
  leaves = jax.tree.leaves(state)
  assert all(leaf.shape[0] == 2 for leaf in leaves)


def test_every_stop_reason_has_a_description():
  assert len({reason.message for reason in StopReason}) == len(StopReason)
