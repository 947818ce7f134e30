"""Whole loop: greedy exactness, independence of rows, records, limits, compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import harness

from osd_jax import base, testing
from osd_jax.base import EOS_ID, StopReason
from osd_jax.decoding import rounds

VOCAB, LENGTH, SOURCE, RECORD = 8, 16, 7, 8
TARGET = harness.READER
LIMITS = (16, 1, 9, 16, 12)
params_of = harness.reader_params  # target, same, close, far, unrelated


def sources(seed):
  """Five prompts of different lengths and their mask."""
  return harness.reader_sources(5, SOURCE, seed)


def run_rounds(k, state, kind="same", **kwargs):
  return harness.rounds(
    TARGET, TARGET, k, params_of(), params_of(kind), state, **kwargs
  )


# --- Greedy: token for token --------------------------------------------------------


def greedy_walk(table, limit):
  """The oracle: follows the arg max, token by token."""
  # Decoding starts after two padding tokens.
  emitted = [0, 0]
  while len(emitted) - 2 < limit and (emitted[-1] != EOS_ID or len(emitted) == 2):
    emitted.append(int(table[emitted[-2], emitted[-1]].argmax()))
  return emitted[2:]


@pytest.mark.parametrize(("k", "rows"), [(1, 6), (2, 6), (8, 6), (3, 1)])
def test_greedy_tables_follow_the_arg_max(k, rows):
  limits = np.resize([60, 1, 7, 60, 33, 59], rows)
  settings = harness.settings_of(rows, max_length=limits)
  endings = 0
  for seed in range(12):
    rng = np.random.default_rng(seed)
    # A strong dependence on the last token makes walks long; some end by themselves.
    table = rng.normal(size=(VOCAB,) * 3) - 0.5 * np.eye(VOCAB)[EOS_ID]
    draft = table + rng.normal(0, 0.5, table.shape)
    table, draft = table.astype(np.float32), draft.astype(np.float32)
    found = harness.table_rounds(k, table, draft, settings)
    expected = [greedy_walk(table, limit) for limit in limits]
    assert harness.outputs(found) == expected
    for row, output in enumerate(expected):
      ended = output[-1] == EOS_ID
      endings += ended
      reason = StopReason.EOS if ended else StopReason.LENGTH
      assert int(found.stop_reason[row]) == reason
  assert endings  # some walks end


# --- Rows are independent -----------------------------------------------------------

MIXED = {
  "temperature": np.array([0.0, 1.0, 0.7, 0.0, 1.3]),
  "top_k": np.array([0, 0, 3, 0, 0]),
  "top_p": np.array([1, 1, 1, 0.5, 0.8]),
  "min_p": np.array([0, 0.1, 0, 0, 0]),
  "repetition_penalty": np.array([1.5, 1, 1, 1, 1.2]),
  "seed": np.array([11, 12, 13, 14, 2**32 - 1]),
}


def started(order=range(5), kind="close", settings=MIXED):
  """The five requests of MIXED, in the given order."""
  source, mask = sources(3)
  order = np.asarray(order)
  settings = harness.settings_of(
    len(order),
    max_length=np.asarray(LIMITS)[order],
    **{name: values[order] for name, values in settings.items()},
  )
  return harness.start(
    TARGET,
    params_of(),
    source[order],
    mask[order],
    settings,
    LENGTH,
    TARGET,
    params_of(kind),
    RECORD,
  )


@pytest.mark.parametrize(
  "order", [[4, 3, 2, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 3, 0], [2, 4, 1, 4, 2]]
)
def test_batch_mates_and_slot_change_no_output(order):
  """Covers order, mates, their sampling, all-greedy batches and unfiltered batches."""
  alone = harness.outputs(run_rounds(3, started(), "close"))
  assert len(set(map(tuple, alone))) == 5
  found = harness.outputs(run_rounds(3, started(order), "close"))
  assert found == [alone[row] for row in order]


def test_single_rounds_equal_one_call_and_leave_stopped_rows_unchanged():
  at_once = run_rounds(3, started(), "close")
  state = started()
  saw_a_stopped_row = False
  while (np.asarray(state.stop_reason) == StopReason.RUNNING).any():
    before = state
    state = run_rounds(3, state, "close", limit=1)
    stopped = np.asarray(before.stop_reason) != StopReason.RUNNING
    saw_a_stopped_row |= stopped.any()
    check_same_rows(before, state, np.flatnonzero(stopped))
    assert (np.asarray(state.length) > np.asarray(before.length))[~stopped].all()
  assert saw_a_stopped_row
  check_same_rows(at_once, state, range(5))


def check_same_rows(expected, found, rows):
  """Compares everything valid, which excludes cache entries after `length`."""
  for row in rows:
    one, other = harness.take(expected, [row]), harness.take(found, [row])
    no_caches = lambda state: state.replace(target_cache=None, draft_cache=None)
    jax.tree.map(np.testing.assert_array_equal, no_caches(one), no_caches(other))
    for name in ("target_cache", "draft_cache"):
      a, b = getattr(one, name), getattr(other, name)
      end = int(a.length[0])
      assert end == int(b.length[0]) and int(a.shift[0]) == int(b.shift[0])
      np.testing.assert_array_equal(a.tokens[:, :end], b.tokens[:, :end])


def test_call_returns_when_any_running_row_stops():
  table = testing.random_table(VOCAB, 1)
  settings = harness.settings_of(3, max_length=[20, 6, 20], temperature=1.0)
  model = testing.tabular_model(VOCAB)
  sources = harness.no_sources(3)
  start = harness.start(model, table, *sources, settings, 20, model, table)
  call = functools.partial(
    harness.rounds, model, model, 2, table, table, until_all=False
  )
  first = call(start)
  assert np.asarray(first.stop_reason).tolist() == [0, StopReason.LENGTH, 0]
  assert np.asarray(first.counters.rounds).tolist() == [2, 2, 2]
  second = call(first)  # the row that stopped earlier does not end it
  assert np.asarray(second.length).tolist() == [20, 6, 20]
  # No row is running, so nothing changes.
  jax.tree.map(np.testing.assert_array_equal, second, call(second))


# --- Records ------------------------------------------------------------------------


def test_first_round_reads_no_token_of_an_unused_buffer():
  """A draft equal to the target is accepted, whatever the buffer held before."""
  state = started(kind="same", settings={})
  state = state.replace(tokens=jnp.full_like(state.tokens, VOCAB - 1))
  counters = run_rounds(3, state, limit=1).counters
  assert np.asarray(counters.drafted).any()
  np.testing.assert_array_equal(counters.accepted, counters.drafted)


# --- At the limit -------------------------------------------------------------------


def run_to_the_limit():
  """K = 8 with limits that the last rounds exceed."""
  target = testing.random_table(VOCAB, 8)
  settings = harness.table_settings(max_length=[60, 59, 58, 60, 4, 60])
  noise = np.random.default_rng(1).normal(0, 0.4, target.shape).astype(np.float32)
  plain = harness.tabular_steps(target, settings, harness.TABLE_LENGTH, record=VOCAB)
  return plain, harness.table_rounds(8, target, target + noise, settings)


def differences(expected, found):
  """Names the valid parts in which two final states differ."""
  wrong = []
  for row, length in enumerate(np.asarray(expected.length)):
    fed = [0, *harness.outputs(expected)[row]][:length]
    checks = {
      "tokens": harness.outputs(found)[row] == harness.outputs(expected)[row],
      "target cache": found.target_cache.tokens[row, :length].tolist() == fed,
      "draft cache": found.draft_cache.tokens[row, : length - 1].tolist() == fed[:-1],
      "records": np.allclose(
        found.records.log_probs[row, :length],
        expected.records.log_probs[row, :length],
        atol=1e-5,
      ),
    }
    wrong += [name for name, same in checks.items() if not same]
  return sorted(set(wrong))


def test_round_past_the_limit_overwrites_nothing():
  assert differences(*run_to_the_limit()) == []


def test_target_is_given_no_token_in_stopped_rows_and_after_short_proposals():
  rows = [StopReason.RUNNING, StopReason.EOS, StopReason.EMPTY, StopReason.RUNNING]
  state = started(range(4)).replace(
    stop_reason=jnp.asarray([int(reason) for reason in rows]), last_token=jnp.arange(4)
  )
  proposal = base.Proposal(jnp.full((4, 2), 7), None, lengths=jnp.asarray([1, 2, 0, 2]))
  last, proposed = rounds.inputs_of(state, proposal)
  assert last.tolist() == [0, -1, -1, 3]
  assert proposed.tokens.tolist() == [[7, -1], [-1, -1], [-1, -1], [7, 7]]
  everywhere = rounds.inputs_of(state, proposal.replace(lengths=None))[1]
  assert everywhere.tokens.tolist() == [[7, 7], [-1, -1], [-1, -1], [7, 7]]
