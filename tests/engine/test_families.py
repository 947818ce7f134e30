"""T5 and Llama in the engine: one run of each kind of drafting per family."""

import dataclasses
import functools

import jax
import numpy as np
import oracles
import pytest
from compilations import Compilations
from decoding import harness
from engine import cases

from osd_jax import testing
from osd_jax.base import EOS_ID
from osd_jax.costs.table import RoundCosts
from osd_jax.engine import engine
from osd_jax.engine.requests import (
  AdaptiveConfig,
  DecodingConfig,
  Request,
  SamplingConfig,
)

VOCAB, LENGTH, K = 64, 12, 3
BUCKETS = (6, 10)
LIMITS = (None, 1, 7, None, 3, 12)
PENALTIES = (1.0, 1.0, 1.8, 1.0, 1.0, 1.4)  # more than B requests: rows are reused
TABLE = RoundCosts((1.0, 1.3, 1.6), chunk_ms=0.3, prefill_ms=0.5)
POLICY = AdaptiveConfig(candidates=(0, 1, 3), costs=(TABLE,))
CONFIG = DecodingConfig(
  rows=3,
  num_draft_tokens=K,
  source_lengths=BUCKETS,
  target_length=LENGTH,
  record_top_k=VOCAB,
  max_rounds=2,
)
TARGETS = {name: target for name, (target, _) in harness.FAMILIES.items()}
FAMILY = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def requests(target):
  sources = testing.random_sources(len(LIMITS), BUCKETS[-1], VOCAB, 0, target.pad_id)
  return [
    Request(row[keep], SamplingConfig(repetition_penalty=penalty), max_new_tokens=limit)
    for row, keep, limit, penalty in zip(*sources, LIMITS, PENALTIES, strict=True)
  ]


@functools.cache
def score():
  return jax.jit(lambda model, *args: model.score(*args), static_argnums=0)


@functools.cache
def expected(target):
  """Greedy outputs from one whole forward pass per token, without caches."""
  found, params = [], harness.lively_params(target)
  for request in requests(target):
    source = np.full((1, BUCKETS[-1]), target.pad_id, np.int32)
    source[0, : len(request.tokens)] = request.tokens
    written: list[int] = []
    while len(written) < (request.max_new_tokens or LENGTH) and EOS_ID not in written:
      text = np.zeros((1, LENGTH), np.int32)
      text[0, : len(written)] = written
      logits = score()(target, params, source, target.mask(source), text)
      is_causal = target.start is not None
      before = request.tokens.tolist() if is_causal else [target.start_id]
      row = oracles.processed_probs(
        logits[0, len(written)],
        0.0,
        repetition_penalty=request.sampling.repetition_penalty,
        text=[*before, *written],
      )
      written.append(int(row.argmax()))
    found.append(written)
  return found


def run(target, config=CONFIG, draft=None, params=None, cycle=None):
  own = harness.lively_params(target)
  params = own if params is None else params
  served = engine.Engine(config, target, own, draft or target, params)
  if cycle is not None:
    cases.Scheduled(served, cycle)
  return served.run(requests(target))


def tokens(found):
  return [done.tokens.tolist() for done in found]


def accepted_share(found):
  """Accepted / drafted tokens of the draft itself."""
  drafted = sum(done.drafted - done.drafted_by_cache for done in found)
  assert drafted > 5
  return sum(done.accepted - done.accepted_by_cache for done in found) / drafted


@FAMILY
def test_greedy_output_equals_plain_decoding_with_any_draft(target):
  draft = dict(harness.FAMILIES.values())[target]
  far = harness.perturbed(harness.lively_params(target), 0.5)
  assert len(set(map(tuple, expected(target)))) > 3
  assert tokens(run(target, params=far)) == expected(target)
  other = run(target, draft=draft, params=harness.lively_params(draft))
  assert tokens(other) == expected(target)
  same = run(target)
  assert tokens(same) == expected(target) and accepted_share(same) == 1.0
  records = same[0].batch.records
  kept = np.asarray(records.log_probs)[0, : len(same[0].tokens)]
  np.testing.assert_allclose(np.exp(kept).sum(-1), 1, atol=1e-4)


MIXED = dataclasses.replace(
  TABLE, round_ms=(((TABLE.round_ms,),), (((1.0, 1.1, 1.2),),))
)
CACHED = dataclasses.replace(POLICY, costs=(MIXED,))


@FAMILY
@pytest.mark.parametrize(
  "changes",
  [{"adaptive": POLICY}, {"adaptive": CACHED, "cache_tokens": 256}],
  ids=["plain", "cache"],
)
def test_draft_equal_to_the_target_is_fully_accepted_after_pauses(target, changes):
  """Meanwhile the target decodes plainly, or with the n-gram cache alone."""
  config = dataclasses.replace(CONFIG, source_lengths=BUCKETS[1:], **changes)
  found = run(target, config, cycle=(0, 0, 3, 0, 3))
  assert tokens(found) == expected(target) and accepted_share(found) == 1.0


def test_decoder_may_start_with_another_token_than_padding():
  target = harness.T5GEMMA
  found = run(target)
  assert tokens(found) == expected(target) and accepted_share(found) == 1.0
  assert len(set(map(tuple, expected(target)))) > 3


# --- A draft served with approximations (T5) ------------------------------------------


def light_draft(**left_out):
  """The target as its own draft, served with the given `DraftServing` options."""
  target, params = harness.TARGET, harness.lively_params(harness.TARGET)
  model = harness.lighter(target, **left_out)
  config = dataclasses.replace(CONFIG, rows=2, source_lengths=BUCKETS[1:])
  return engine.Engine(config, target, params, model, params)


def covered():
  return np.unique(np.concatenate([*expected(harness.TARGET), [EOS_ID]]))


def test_tokens_covered_by_a_shortlist_are_accepted():
  """A swap without a shortlist keeps the current one."""
  size, others = len(covered()), np.setdiff1d(np.arange(VOCAB), covered())
  assert size <= len(others)
  params = harness.lively_params(harness.TARGET)
  served, rates = light_draft(shortlist=size), []
  served.warm_up()
  with Compilations() as made:
    for version, chosen in enumerate([covered(), None, others[:size]]):
      served.swap(params, version, chosen)
      found = served.run(requests(harness.TARGET))
      assert tokens(found) == expected(harness.TARGET)
      rates.append(accepted_share(found))
      made.count *= version > 0  # the first run compiles
  assert rates[:2] == [1.0, 1.0] and rates[2] < 0.2
  assert not made.count  # new shortlists compile nothing


def test_shortlist_of_another_length_is_refused():
  with pytest.raises(ValueError, match="shortlist of 3 tokens, expected 8"):
    light_draft(shortlist=8).swap(
      harness.lively_params(harness.TARGET), 1, np.arange(3)
    )
