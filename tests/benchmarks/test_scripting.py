"""Scripted drafts are accepted with the given probability and do not change outputs."""

import dataclasses
import functools
import types

import bench_batching
import contenders
import measure
import numpy as np
import pytest
import scripting

from osd_jax.costs.table import expected_tokens
from osd_jax.engine import engine
from osd_jax.engine.requests import Request

ROWS, SOURCE, LENGTH, K = 4, 8, 48, 3
EACH = 12  # prompts per alpha
ALPHAS = (0.0, 0.5, 0.8, 1.0)
TOLERANCE = 0.08  # four standard deviations of a mean of 500 draws


def models(dtype="float32"):
  config = dataclasses.replace(contenders.TINY, dtype=dtype)
  draft = dataclasses.replace(config, num_decoder_layers=1)
  return contenders.random_model(config), contenders.random_model(draft, seed=1)


@functools.cache
def served(dtype="float32"):
  """Returns the outputs of plain decoding and of the scripted pair.

  Each alpha applies to EACH consecutive prompts.
  """
  target, draft = models(dtype)
  config = contenders.decoding(ROWS, SOURCE, LENGTH, K)
  sources = contenders.prompts(EACH * len(ALPHAS), SOURCE, target[0].vocab_size)
  plain = scripting.continuations(engine.Engine(config, *target), sources)
  decoder = scripting.speculative(
    config, target, draft, sources, plain, np.repeat(ALPHAS, EACH)
  )
  found = decoder.run([Request(tokens=source) for source in sources])
  return plain, found


def of(alpha, dtype="float32"):
  start = ALPHAS.index(alpha) * EACH
  return served(dtype)[1][start : start + EACH]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_drafted_tokens_are_accepted_with_probability_alpha(alpha, dtype):
  found = of(alpha, dtype)
  assert scripting.draft_acceptance(found) == pytest.approx(alpha, abs=TOLERANCE)
  # This tolerance allows for a request's last round, which LENGTH cuts short.
  per_call = EACH * LENGTH / sum(done.target_calls for done in found)
  assert per_call == pytest.approx(expected_tokens(alpha, K), rel=0.12)


def test_measured_acceptance_distinguishes_the_alphas():
  """Negative control: the tolerance above is smaller than the steps of alpha."""
  for alpha, other in zip(ALPHAS, ALPHAS[1:], strict=False):
    assert abs(scripting.draft_acceptance(of(alpha)) - other) > TOLERANCE


def test_outputs_equal_plain_decoding():
  plain, found = served()
  np.testing.assert_array_equal(plain, [done.tokens for done in found])


def test_draft_without_a_script_is_rarely_accepted():
  """Negative control: acceptance comes from the script, not from the draft."""
  target, draft = models()
  config = contenders.decoding(ROWS, SOURCE, LENGTH, K)
  decoder = engine.Engine(config, *target, *draft)
  sources = contenders.prompts(EACH, SOURCE, target[0].vocab_size)
  found = decoder.run([Request(tokens=source) for source in sources])
  assert scripting.draft_acceptance(found) < 0.2


def answered(*target_calls):
  return [types.SimpleNamespace(target_calls=calls) for calls in target_calls]


def test_rounds_are_counted_for_rows_that_take_the_next_request():
  assert scripting.rounds(answered(5, 2, 4), rows=2) == 6
  assert scripting.rounds(answered(5, 2, 4), rows=1) == 11
  assert scripting.rounds(answered(5, 2, 4), rows=3) == 5


def test_round_time_excludes_first_tokens():
  times = {
    "whole": measure.Times(np.full(3, 1.0), np.full(3, 2.0)),
    "first": measure.Times(np.full(3, 0.1), np.full(3, 0.2)),
  }
  found = {"whole": answered(4, 6, 3), "first": answered(1, 1, 1)}
  milliseconds = scripting.round_ms(times, found, "whole", "first", 2, "cpu")
  assert milliseconds == pytest.approx(900 / (7 - 2))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_break_even_inverts_the_closed_form(alpha):
  cost = expected_tokens(alpha, K)
  assert bench_batching.break_even(cost, K) == pytest.approx(alpha)


def test_break_even_is_1_where_no_draft_pays():
  assert bench_batching.break_even(K + 2.0, K) == pytest.approx(1)
