"""Settings that several processes cannot share are refused, because runs would hang."""

import dataclasses

import jax
import numpy as np
import pytest

from osd_jax import base, pairs, runs, sharding
from osd_jax.distillation.learner import Learner, LearningConfig
from osd_jax.engine import engine, requests
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig, Request
from osd_tools import replicas

DECODING = DecodingConfig(
  rows=1, num_draft_tokens=1, source_lengths=(8,), target_length=4
)


@pytest.fixture(scope="module")
def loaded(lively_pair):
  return pairs.load_pair(lively_pair)


def learner(loaded):
  config = LearningConfig(free_updates=True)
  Learner(loaded.draft, loaded.draft_params, config, 8, 4, 2).runner.close()


def decoding(**changes):
  """Serves one request with these settings."""

  def serve(loaded):
    models = loaded.target, loaded.target_params, loaded.draft, loaded.draft_params
    config = dataclasses.replace(DECODING, **changes)
    engine.Engine(config, *models).run([Request(np.asarray([5], np.int32))])

  return serve


def of_replicas(loaded):
  mesh = sharding.PartitionConfig()
  replicas.Replicas(
    requests.ReplicaConfig(1), DECODING, pairs.PairConfig(), loaded, mesh
  )


ADAPTIVE = AdaptiveConfig(candidates=(0, 1))
SHARED = {  # what one process accepts
  r"LearningConfig\.free_updates.*several": learner,
  r"AdaptiveConfig\.costs.*their own measurements": decoding(adaptive=ADAPTIVE),
  r"cache_tokens.*256.*share no n-gram": decoding(cache_tokens=256),
}
REFUSED = SHARED | {
  r"run_directory.*mount the bucket": (
    lambda _: runs.RunDirectory.start("memory://bucket/run")
  ),
  r"ReplicaConfig\.count.*expected 0": of_replicas,
}


@pytest.mark.parametrize("message", REFUSED)
def test_setting_is_refused_with_two_processes(loaded, monkeypatch, message):
  if message in SHARED:  # negative control
    SHARED[message](loaded)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(base.InputError, match=message):
    REFUSED[message](loaded)
