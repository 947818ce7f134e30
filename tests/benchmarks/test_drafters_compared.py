"""experiments/drafters: its oracle counts the calls of the systems that ran."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_online

from experiments.drafters import run
from osd_jax import pairs

REQUESTS, K = 24, 3


@pytest.mark.slow
def test_oracle_counts_the_calls_of_the_systems_that_ran(lively_pair, tmp_path):
  """The draft is the target with noise: it is often right, not always."""
  pair = pairs.load_pair(lively_pair)
  leaves, shape = jax.tree.flatten(pair.target_params)
  rng = np.random.default_rng(0)
  noisy = [leaf * (1 + 0.1 * rng.normal(size=leaf.shape)) for leaf in leaves]
  noisy = [leaf.astype(np.float32) for leaf in noisy]
  pair = pair.with_draft(pair.target, jax.tree.unflatten(shape, noisy))
  config = tiny_online.config(pair, "unused", rows=1, keep_drafts=False)
  config = dataclasses.replace(config, warm_start=None)

  names = ("plain", "frozen", "cache", "online + cache")
  cells, answers = {}, []
  for name, figures, system in run.one_by_one(names, pair, config, REQUESTS):
    cells[name] = figures["per_request"]
    answers = answers or system.answers  # of plain decoding
  lengths = [[tokens for tokens, _ in cell] for cell in cells.values()]
  assert all(other == lengths[0] for other in lengths)
  calls = {name: [count for _, count in cell] for name, cell in cells.items()}
  draft = (pair.draft, pair.draft_params)
  counts = run.oracle.choose(pair.target, draft, answers, K, run.CACHE)
  assert counts["cache"] == calls["cache"] and counts["draft"] == calls["frozen"]
  assert sum(counts[run.ORACLE]) < min(sum(counts["draft"]), sum(counts["cache"]))
  # Negative control: another K needs other calls.
  other = run.oracle.choose(pair.target, draft, answers, K - 1, run.CACHE)
  assert other["draft"] != calls["frozen"]
