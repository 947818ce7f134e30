"""Replicas answer each request once, despite failures, and share the n-gram cache.

One test kills a process of Ray. In the others, replicas run in this process.
"""

import contextlib
import dataclasses
import itertools
import types

import numpy as np
import pytest
import tiny_online
from test_attached_runs import configured, outputs

from osd_jax import base, main, online, pairs, runs
from osd_jax.distillation import gate
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.schedule import WorthConfig
from osd_jax.engine.requests import (
  DecodingConfig,
  ReplicaConfig,
  Request,
  SamplingConfig,
)
from osd_jax.engine.server import Server
from osd_jax.models.shapes import DraftServing
from osd_tools import replicas

COUNT = tiny_online.REQUESTS
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


@pytest.fixture
def inline(monkeypatch):
  monkeypatch.setattr(replicas, "_ray", lambda: (Inline(), False))


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


# --- The n-gram cache


@pytest.fixture
def server(lively, inline):
  """Two replicas with one row each."""
  pair = dataclasses.replace(lively, draft=pairs.CACHE)
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


def test_shared_answers_keep_their_salt_and_are_forgotten_by_all_replicas(server):
  """Two requests at a time go to both replicas."""
  # Control: an answer that must not be remembered helps nobody.
  (first,) = calls(server, 1, remember=False)
  assert calls(server, 2, remember=False) == [first] * 2
  calls(server, 1, cache_salt=7)
  assert calls(server, 2, cache_salt=8) == [first] * 2
  assert max(calls(server, 2, cache_salt=7)) < first
  server.clear_cache()
  assert calls(server, 2, cache_salt=7) == [first] * 2
  (plain,) = Server(server.pair.plain(), DECODING).run(requests(server, 1))
  (answer,) = server.run(requests(server, 1))
  np.testing.assert_array_equal(answer.tokens, plain.tokens)
  for replica in server.engine._replicas:  # their replacements start with empty caches
    server.engine._restart(replica)
  server.warm_up()
  assert calls(server, 2) == [first] * 2


# --- Whole runs


@pytest.fixture(scope="module")
def pair(lively):
  """The tiny target with a new attached draft."""
  return dataclasses.replace(
    tiny_online.attached(lively), draft_serving=DraftServing(int8=True, shortlist=700)
  )


def with_gate(config_of_gate, *arguments, **changes):
  config = configured(*arguments, **changes)
  learning = dataclasses.replace(config.learning, gate=config_of_gate)
  return dataclasses.replace(config, learning=learning)


@contextlib.contextmanager
def begun(config):
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    yield online.begin(config, directory)


def rows_of(path, kind):
  return [row for row in runs.read(path / "metrics.jsonl") if row["kind"] == kind]


def each_once(path):
  rows = rows_of(path, "request")
  assert sorted(row["query"] for row in rows) == list(range(COUNT))
  assert [row["index"] for row in rows] == list(range(COUNT))


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  """Outputs of a run without replicas."""
  config = configured(pair, tmp_path_factory.mktemp("alone") / "run")
  return outputs(online.run(config).path)


@pytest.mark.slow
def test_killing_a_replica_changes_no_output(pair, alone, tmp_path):
  """The other one answers its requests, and each request is learned from once."""
  ray, lost, path = pytest.importorskip("ray"), [], tmp_path / "run"
  config = with_gate(None, pair, path, replicas=ReplicaConfig(2), compare_every=6)
  with begun(config) as loop:
    while loop.step() is not None:
      if loop.finished >= 6 and not lost:
        victim = max(loop.server.engine._replicas, key=lambda one: len(one.held))
        lost.extend(victim.held)
        ray.kill(victim.actor)
    assert int(loop.server.learner.state()[0]["buffer"].added) == COUNT
    loop.close(0.0)
  assert lost and outputs(path) == alone
  each_once(path)
  *_, message = rows_of(path, "event")
  assert f"its {len(lost)} requests go to other replicas" in message["text"]
  rows = rows_of(path, "request")
  assert all(row["certificate"]["equal"] for row in rows if "certificate" in row)
  assert len(rows_of(path, "update")) > 2
  assert max(row["draft_version"] for row in rows) > 1


@pytest.mark.release
def test_interrupted_run_continues_with_fewer_and_without_replicas(
  pair, alone, tmp_path, inline, hasty_gate
):
  path, hasty = tmp_path / "run", gate.GateConfig(error_rate=0.99)
  config = with_gate(hasty, pair, path)
  for count, until in ((2, 8), (1, 16)):
    with begun(dataclasses.replace(config, replicas=ReplicaConfig(count))) as loop:
      while loop.finished < until:
        loop.step()
      loop.wait()  # this process goes on, so nothing may write any more
    assert until <= len(rows_of(path, "request")) < COUNT
  online.run(config)
  assert outputs(path) == alone
  each_once(path)
  assert rows_of(path, "gate")[0]["name"] == "promoted"
  assert len(rows_of(path, "data")) == 1  # continued, not restarted


# --- What is refused


class Idle(replicas.Replica):
  """Loads no models, for tests in which nothing is answered."""

  def load(self, *given):
    return []


def test_requests_that_replicas_cannot_serve_are_refused(pair, inline, monkeypatch):
  monkeypatch.setattr(replicas, "Replica", Idle)
  config, loaded = configured(pair, "nowhere"), pairs.load_pair(pair)

  def idle(given):
    return ReplicaConfig(1).engine(config.decoding, given, loaded, config.partition)

  # Rows in flight of a run in one process.
  with pytest.raises(base.InputError, match=r"ReplicaConfig\.count.*continue without"):
    idle(pair).structure({"slots": [{"tag": 3}, None]})
  with pytest.raises(base.InputError, match=r"expected a PairConfig"):
    idle(loaded)
  watched = Request(np.asarray([5], np.int32), watch=lambda tokens: None)
  with pytest.raises(base.InputError, match="stop strings or streamed text"):
    idle(pair).submit(watched)


def test_schedule_that_needs_costs_is_refused(pair):
  with pytest.raises(base.InputError, match=r"OnlineConfig\.measure_costs.*no replica"):
    dataclasses.replace(
      configured(pair, "nowhere"),
      replicas=ReplicaConfig(2),
      learning=LearningConfig(schedule=WorthConfig()),
    )


def test_replicas_option_sets_the_count(capsys):
  words = ["online", "--gin_file=runs/demo.gin", "--replicas", "2", "--dry_run"]
  assert main.main(words) == 0
  printed = capsys.readouterr().out
  assert "ReplicaConfig.count = 2" in printed
  assert "OnlineConfig.replicas = @ReplicaConfig()" in printed
