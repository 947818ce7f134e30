"""Repetition penalties: greedy outputs equal a loop over whole-sequence scores."""

import numpy as np
import oracles
import pytest
from decoding import harness

from osd_jax import testing

LENGTH, PENALTY = 16, np.array([1.0, 1.2, 2.0, 0.6, 5.0], np.float32)


@pytest.mark.parametrize("family", harness.FAMILIES)
def test_greedy_outputs_are_the_arg_max_of_penalized_scores(family):
  """The prompt counts for a decoder-only model; a T5 starts with token 0."""
  target, _ = harness.FAMILIES[family]
  params = harness.lively_params(target)
  source, mask = testing.random_sources(5, 7, target.vocab_size, 0, target.pad_id)

  def decoded(penalty):
    settings = harness.settings_of(5, max_length=LENGTH, repetition_penalty=penalty)
    return harness.plain(target, target.prepare(params), source, mask, settings, LENGTH)

  state = decoded(PENALTY)
  logits, _ = harness.scored(target, params, source, mask, state)
  for row, output in enumerate(harness.outputs(state)):
    text = [0] if target.start is None else source[row][mask[row]].tolist()
    for position, token in enumerate(output):
      expected = oracles.processed_probs(
        logits[row, position],
        0.0,
        repetition_penalty=PENALTY[row],
        text=[*text, *output[:position]],
      )
      assert token == expected.argmax()
  plain = harness.outputs(decoded(np.ones(5)))
  changed = [a != b for a, b in zip(harness.outputs(state), plain, strict=True)]
  assert not changed[0] and sum(changed) > 2
