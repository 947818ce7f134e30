"""Scripted drafts are accepted with the given probability and do not change outputs."""

import dataclasses

import contenders
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafted_tokens_are_accepted_with_probability_alpha(dtype):
  config = dataclasses.replace(contenders.TINY, dtype=dtype)
  target = contenders.random_model(config)
  draft = contenders.random_model(
    dataclasses.replace(config, num_decoder_layers=1), seed=1
  )
  decoding = contenders.decoding(ROWS, SOURCE, LENGTH, K)
  sources = contenders.prompts(EACH * len(ALPHAS), SOURCE, config.vocab_size)
  requests = [Request(tokens=source) for source in sources]
  plain = scripting.continuations(engine.Engine(decoding, *target), sources)
  decoder = scripting.speculative(
    decoding, target, draft, sources, plain, np.repeat(ALPHAS, EACH)
  )
  answers = decoder.run(requests)
  if dtype == "float32":
    np.testing.assert_array_equal(plain, [answer.tokens for answer in answers])
  rates = []
  for start, alpha in zip(range(0, len(answers), EACH), ALPHAS, strict=True):
    group = answers[start : start + EACH]
    rates.append(scripting.draft_acceptance(group))
    # This tolerance allows for a request's last round, which LENGTH cuts short.
    per_call = EACH * LENGTH / sum(answer.target_calls for answer in group)
    assert per_call == pytest.approx(expected_tokens(alpha, K), rel=0.12)
  np.testing.assert_allclose(rates, ALPHAS, atol=TOLERANCE)
  # Negative control: acceptance comes from the script, not from the draft.
  unscripted = engine.Engine(decoding, *target, *draft).run(requests[:EACH])
  assert scripting.draft_acceptance(unscripted) < 0.2
