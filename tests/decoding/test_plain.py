"""Plain decoding equals a loop over whole-sequence calls, and stops when it should."""

import jax.numpy as jnp
import numpy as np
import oracles
from decoding import harness

from osd_jax import testing
from osd_jax.base import EOS_ID, StopReason

VOCAB = 8


def table_that_ends(seed=0):
  table = np.random.default_rng(seed).normal(size=(VOCAB,) * 3)
  return table.astype(np.float32)


def test_greedy_t5_tokens_are_the_arg_max_of_whole_sequence_scores():
  """The oracle has no cache: the arg max of `score` for every prefix."""
  target = harness.TARGET
  params = harness.lively_params(target)
  source, mask = testing.random_sources(5, 7, target.vocab_size, 0)
  limits = np.array([16, 1, 9, 16, 16])
  state = harness.plain(
    target,
    target.prepare(params),
    source,
    mask,
    harness.settings_of(5, max_length=limits),
    16,
    record=8,
  )
  logits, valid = harness.scored(target, params, source, mask, state)
  tokens = np.asarray(state.tokens)
  assert (tokens == logits.argmax(-1))[valid].all()
  assert len(set(tokens[valid].tolist())) > 8  # the outputs are not constant
  for row, output in enumerate(harness.outputs(state)):
    assert EOS_ID not in output[:-1]
    ended = output[-1] == EOS_ID
    assert ended or len(output) == limits[row]
    expected = StopReason.EOS if ended else StopReason.LENGTH
    assert state.stop_reason[row] == expected


def test_plain_decoding_makes_one_target_call_per_token():
  settings = harness.settings_of(6, max_length=[1, 2, 3, 7, 20, 20], temperature=1.0)
  state = harness.tabular_steps(table_that_ends(), settings, 20, record=VOCAB)
  np.testing.assert_array_equal(state.counters.rounds, state.length)
  assert not np.asarray(state.counters.drafted).any()
  assert not np.asarray(state.records.error).any()
  assert (np.asarray(state.length) <= np.asarray(settings.max_length)).all()


def test_plain_decoding_stops_when_a_row_stops_or_steps_run_out():
  table = testing.random_table(VOCAB, 1)
  settings = harness.settings_of(3, max_length=[9, 4, 9])
  model = testing.tabular_model(VOCAB)
  state = harness.start(model, jnp.asarray(table), *harness.no_sources(3), settings, 9)

  def lengths(state, until_all, steps):
    state = harness.rounds(
      model, None, 0, jnp.asarray(table), None, state, limit=steps, until_all=until_all
    )
    return np.asarray(state.length).tolist(), state

  assert lengths(state, False, 3)[0] == [3, 3, 3]
  found, stopped = lengths(state, False, 99)
  assert found == [4, 4, 4]
  # A row that had stopped before the call does not end it.
  found, _ = lengths(stopped, False, 99)
  assert found == [9, 4, 9]
  assert lengths(state, True, 99)[0] == [9, 4, 9]


def test_records_hold_unprocessed_distributions_under_any_sampling():
  table = table_that_ends(2)
  settings = harness.settings_of(
    4, max_length=12, temperature=[0.0, 0.3, 1.0, 2.0], top_k=[0, 2, 0, 3]
  )
  state = harness.tabular_steps(table, settings, 12, record=3)
  for row, output in enumerate(harness.outputs(state)):
    fed = [0, 0, *output]
    logits = np.array([table[fed[i], fed[i + 1]] for i in range(len(output))])
    log_probs, ids, tail = oracles.truncate(logits, 3)
    np.testing.assert_allclose(
      state.records.log_probs[row, : len(output)], log_probs, atol=1e-5
    )
    np.testing.assert_array_equal(state.records.ids[row, : len(output)], ids)
    np.testing.assert_allclose(state.records.tail[row, : len(output)], tail, atol=1e-6)
