"""Comparison requests: served plainly and with the floor draft, at random places."""

import dataclasses

import numpy as np
import pytest
import tabular_pair
from decoding import harness

from osd_jax import sharding, testing
from osd_jax.base import EOS_ID
from osd_jax.engine import engine
from osd_jax.engine.requests import DecodingConfig, Request
from osd_jax.loop import meter as meter_lib
from osd_jax.models import families, shapes

VOCAB = testing.TINY_T5.vocab_size


@pytest.fixture(scope="module")
def params():
  return harness.lively_params(harness.TARGET)


def light_draft(size):
  return families.build(
    testing.TINY_T5, "light draft", shapes.DraftServing(shortlist=size)
  )


def config():
  return DecodingConfig(
    num_draft_tokens=3, source_lengths=(6,), target_length=12, record_top_k=4
  )


def test_floor_draft_uses_the_shortlist_of_the_online_draft(params):
  """Both drafts have the target's weights, so only their shortlists can differ."""
  request = Request(np.array([5, 9, 7, EOS_ID]))
  plain = engine.Engine(config(), harness.TARGET, params).run([request])[0]
  covered = np.unique([*plain.tokens, EOS_ID])
  others = np.setdiff1d(np.arange(VOCAB), covered)
  chosen = np.concatenate([covered, others])[: len(covered) + 1].astype(np.int32)
  draft = light_draft(len(chosen))
  pair = dataclasses.replace(
    tabular_pair.make(),
    target=harness.TARGET,
    target_params=params,
    draft=draft,
    draft_params=params,
  )
  online = engine.Engine(config(), harness.TARGET, params, draft, params)
  online.swap(params, 1, chosen)
  done = online.run([request])[0]
  rivals = meter_lib.Rivals(pair, config(), sharding.PartitionConfig())
  first = np.arange(draft.shortlist, dtype=np.int32)
  _, unlike = rivals.serve(done, first)
  plain, alike = rivals.serve(done, online.shortlist)

  assert plain.tokens.tolist() == done.tokens.tolist()
  assert alike.accepted / alike.drafted == done.accepted / done.drafted == 1.0
  # Negative control: the default shortlist lacks tokens of the output.
  assert unlike.accepted < unlike.drafted


def meter(compare_every, seed=0):
  return meter_lib.Meter(
    tabular_pair.make(),
    config(),
    floor_every=1,
    compare_every=compare_every,
    partition=sharding.PartitionConfig(),
    seed=seed,
  )


def test_compared_requests_are_spread_evenly_over_all_places():
  """A fixed place in every 4 would always coincide with updates every 8 requests."""
  first, other, resumed = meter(4), meter(4, seed=1), meter(4)
  compared = np.array([first.compares(index) for index in range(8000)])
  for place in range(8):
    assert compared[place::8].mean() == pytest.approx(0.25, abs=0.05)
  blocks = compared.reshape(-1, 4).sum(axis=1)
  assert (blocks == 1).all()  # one in each block of four
  again = [resumed.compares(index) for index in range(4000, 4100)]
  assert again == compared[4000:4100].tolist()  # a resumed run compares the same
  assert [other.compares(index) for index in range(100)] != compared[:100].tolist()
  assert not meter(0).compares(0) and meter(1).compares(5)
