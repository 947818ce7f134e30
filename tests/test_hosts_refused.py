"""What several processes cannot do together is refused by name, before it hangs."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_online

from osd_jax import base, pairs, runs
from osd_jax.distillation.learner import Learner, LearningConfig
from osd_jax.engine import engine, replicas

ADAPTIVE = engine.AdaptiveConfig(candidates=(0, 1))
DECODING = engine.DecodingConfig(
  rows=1, num_draft_tokens=1, source_lengths=(8,), target_length=4
)


@pytest.fixture(scope="module")
def loaded(lively_pair):
  return pairs.load_pair(lively_pair)


@pytest.fixture
def two(monkeypatch):
  """As if another process were there."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)


def learner(loaded):
  config = LearningConfig(free_updates=True)
  Learner(loaded.draft, loaded.draft_params, config, 8, 4, 2).close()


def adaptive(loaded):
  models = loaded.target, loaded.target_params, loaded.draft, loaded.draft_params
  config = dataclasses.replace(DECODING, adaptive=ADAPTIVE)
  engine.Engine(config, *models).run([engine.Request(np.asarray([5], np.int32))])


def test_updates_that_are_swapped_in_when_they_are_ready(loaded, two):
  with pytest.raises(base.InputError, match=r"LearningConfig\.free_updates.*several"):
    learner(loaded)


def test_a_k_chosen_by_costs_that_each_would_measure(loaded, two):
  with pytest.raises(base.InputError, match=r"AdaptiveConfig\.costs.*each would"):
    adaptive(loaded)


def test_a_run_directory_at_an_address(two):
  with pytest.raises(base.InputError, match=r"run_directory.*mount the bucket"):
    runs.RunDirectory.start("memory://bucket/run")


def test_replicas(lively_pair, loaded, two):
  config = tiny_online.config(lively_pair, "nowhere")
  with pytest.raises(base.InputError, match=r"ReplicaConfig\.count.*expected 0"):
    replicas.Replicas(
      replicas.ReplicaConfig(1), DECODING, lively_pair, loaded, config.partition
    )


def test_one_process_may(loaded):
  """Control of the tests above."""
  learner(loaded)
  adaptive(loaded)
