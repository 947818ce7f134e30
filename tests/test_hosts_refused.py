"""Settings that several processes cannot share are refused, because runs would hang."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_online

from osd_jax import base, pairs, runs
from osd_jax.distillation.learner import Learner, LearningConfig
from osd_jax.engine import engine, requests
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig, Request
from osd_tools import replicas

ADAPTIVE = AdaptiveConfig(candidates=(0, 1))
DECODING = DecodingConfig(
  rows=1, num_draft_tokens=1, source_lengths=(8,), target_length=4
)


@pytest.fixture(scope="module")
def loaded(lively_pair):
  return pairs.load_pair(lively_pair)


@pytest.fixture
def two(monkeypatch):
  """Pretends that there are two processes."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)


def learner(loaded):
  config = LearningConfig(free_updates=True)
  Learner(loaded.draft, loaded.draft_params, config, 8, 4, 2).runner.close()


def adaptive(loaded):
  models = loaded.target, loaded.target_params, loaded.draft, loaded.draft_params
  config = dataclasses.replace(DECODING, adaptive=ADAPTIVE)
  engine.Engine(config, *models).run([Request(np.asarray([5], np.int32))])


def test_free_updates_are_refused(loaded, two):
  with pytest.raises(base.InputError, match=r"LearningConfig\.free_updates.*several"):
    learner(loaded)


def test_adaptive_k_without_given_costs_is_refused(loaded, two):
  words = r"AdaptiveConfig\.costs.*their own measurements would differ"
  with pytest.raises(base.InputError, match=words):
    adaptive(loaded)


def cached(loaded):
  config = dataclasses.replace(DECODING, cache_tokens=256)
  models = loaded.target, loaded.target_params, loaded.draft, loaded.draft_params
  return engine.Engine(config, *models)


def test_ngram_cache_is_refused(loaded, two):
  with pytest.raises(base.InputError, match=r"cache_tokens.*256.*share no n-gram"):
    cached(loaded)


def test_remote_run_directory_is_refused(two):
  with pytest.raises(base.InputError, match=r"run_directory.*mount the bucket"):
    runs.RunDirectory.start("memory://bucket/run")


def test_replicas_are_refused(lively_pair, loaded, two):
  config = tiny_online.config(lively_pair, "nowhere")
  with pytest.raises(base.InputError, match=r"ReplicaConfig\.count.*expected 0"):
    replicas.Replicas(
      requests.ReplicaConfig(1), DECODING, lively_pair, loaded, config.partition
    )


def test_single_process_accepts_these_settings(loaded):
  """Negative control."""
  learner(loaded)
  adaptive(loaded)
  cached(loaded)
