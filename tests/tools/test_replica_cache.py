"""Replicas share the n-gram cache. They run in this process here, without Ray."""

import dataclasses
import itertools
import types

import numpy as np
import pytest
import tiny_online

from osd_jax import pairs
from osd_jax.engine.requests import (
  DecodingConfig,
  ReplicaConfig,
  Request,
  SamplingConfig,
)
from osd_jax.engine.server import Server
from osd_tools import replicas

DECODING = DecodingConfig(
  source_lengths=(tiny_online.SOURCE,),
  target_length=12,
  acceptance_rule="coupling",
  cache_tokens=1024,
)


class Inline:
  """The part of Ray that `Replicas` calls; remote calls run at once."""

  exceptions = types.SimpleNamespace(RayActorError=OSError, RayTaskError=KeyError)

  def __init__(self):
    self._results, self._numbers = {}, itertools.count()

  def remote(self, kind):
    def make():
      made = kind()
      calls = {name: self._remote(getattr(made, name)) for name in ("load", "step")}
      return types.SimpleNamespace(**calls)

    return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=make))

  def _remote(self, method):
    def call(*arguments):
      number = next(self._numbers)
      self._results[number] = method(*arguments)
      return number

    return types.SimpleNamespace(remote=call)

  def wait(self, references, num_returns):
    return references[:num_returns], references[num_returns:]

  def get(self, reference):
    return self._results.pop(reference)

  def put(self, value):
    return value

  def kill(self, actor):
    pass


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  found = tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))
  return dataclasses.replace(found, draft=pairs.CACHE)


@pytest.fixture
def server(pair, monkeypatch):
  """Two replicas with one row each."""
  monkeypatch.setattr(replicas, "_ray", lambda: (Inline(), False))
  with Server(pair, DECODING, engine=ReplicaConfig(2).engine) as made:
    made.warm_up()
    yield made


def requests(server, count, **changes):
  """The same request several times."""
  prompt = server.pair.vocabulary.encode_prompt("max of all rows")
  sampling = SamplingConfig(temperature=1.0, seed=3)
  return [Request(prompt, sampling, **changes) for _ in range(count)]


def calls(server, count, **changes):
  return [done.target_calls for done in server.run(requests(server, count, **changes))]


def test_answers_are_shared_and_forgotten_by_all_replicas(server):
  """Two requests at a time go to both replicas."""
  (first,) = calls(server, 1)
  assert max(calls(server, 2)) < first
  server.clear_cache()
  assert calls(server, 2) == [first] * 2
  (plain,) = Server(server.pair.plain(), DECODING).run(requests(server, 1))
  (found,) = server.run(requests(server, 1))
  np.testing.assert_array_equal(found.tokens, plain.tokens)


def test_answers_that_must_not_be_remembered_are_not_shared(server):
  """Control: without sharing the second replica has not seen the first answer."""
  (first,) = calls(server, 1, remember=False)
  assert calls(server, 2, remember=False) == [first] * 2


def test_shared_answers_keep_their_salt(server):
  (first,) = calls(server, 1, cache_salt=7)
  assert calls(server, 2, cache_salt=8) == [first] * 2
  assert max(calls(server, 2, cache_salt=7)) < first


def test_replica_that_is_replaced_starts_with_an_empty_cache(server):
  (first,) = calls(server, 1)
  for replica in server.engine._replicas:
    server.engine._restart(replica)
  server.warm_up()
  assert calls(server, 2) == [first] * 2
