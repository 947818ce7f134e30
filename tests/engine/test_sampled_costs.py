"""Greedy and sampled rounds have separate cost tables."""

import dataclasses
import json

import numpy as np
import pytest
from decoding import harness
from engine import cases
from engine.test_drafting import BUCKETS, KS, make, measured_policy

from osd_jax.costs.table import RoundCosts
from osd_jax.engine import engine, measurement, steps


def test_greedy_and_sampled_rounds_are_timed_separately(monkeypatch):
  decoder, temperatures = make(policy=measured_policy()), []

  def advance(spec, num_draft_tokens, served, rounds, state):
    temperatures.append(tuple(np.asarray(state.settings.temperature).tolist()))
    return steps.advance(spec, num_draft_tokens, served, rounds, state)

  changed = harness.Changed(steps, advance=advance)
  monkeypatch.setattr(measurement, "steps", changed)
  decoder.run(cases.greedy_requests()[:1])
  counts = {t: temperatures.count(t) for t in set(temperatures)}
  assert set(counts) == {(0.0,) * 3, (1.0,) * 3}
  assert min(counts.values()) >= len(KS)


@pytest.mark.parametrize("first", ["greedy", "sampled"])
def test_sampled_batches_use_the_sampled_cost_table(first):
  """Drafting pays for all-greedy batches alone; mixed batches use the sampled table."""
  pays, never = (RoundCosts((1.0, ms, ms)) for ms in (1.01, 1e3))
  decoder = make("same", rows=2)
  decoder._controller.costs |= {(bucket, True): never for bucket in BUCKETS}
  decoder._controller.costs |= {(bucket, False): pays for bucket in BUCKETS}
  greedy = [dataclasses.replace(r, tag=None) for r in cases.greedy_requests()]
  warm = engine.SamplingConfig(temperature=1.0)
  sampled = [dataclasses.replace(r, sampling=warm, tag="sampled") for r in greedy]
  batches = {"greedy": greedy, "sampled": sampled, "mixed": [*greedy, *sampled]}
  shares = {}
  for kind in (first, *batches):  # the table is chosen in the first calls of a batch
    found = decoder.run(batches[kind])
    if kind == "mixed":
      found = [done for done in found if done.request.tag]
    calls_made = sum(done.target_calls for done in found)
    shares[kind] = sum(done.drafted for done in found) / calls_made
  assert shares["greedy"] > 1.5 and max(shares["sampled"], shares["mixed"]) < 0.5
  held = json.loads(json.dumps(decoder.state()[1]))["controller"]
  assert len(held["costs"]) == 2 * len(BUCKETS)
