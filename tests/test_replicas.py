"""Whole online runs with replicas: each request is answered once despite failures."""

import dataclasses

import numpy as np
import pytest
import tiny_online
from test_attached_runs import configured, outputs

from osd_jax import base, main, online, pairs, runs
from osd_jax.distillation import gate
from osd_jax.engine import requests
from osd_jax.engine.requests import ReplicaConfig
from osd_jax.loop import loop
from osd_jax.models.shapes import DraftServing
from osd_tools import replicas

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hasty_gate")]

COUNT = tiny_online.REQUESTS


@pytest.fixture(scope="module", autouse=True)
def ray():
  library = pytest.importorskip("ray")
  library.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
  yield library
  library.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  """The tiny target with a new attached draft."""
  pair = tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))
  return dataclasses.replace(
    tiny_online.attached(pair),
    draft_serving=DraftServing(int8=True, shortlist=700),
  )


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  """Outputs of a run without replicas."""
  config = configured(pair, tmp_path_factory.mktemp("alone") / "run", compare_every=0)
  return outputs(online.run(config).path)


class Interrupted(Exception):
  """Ends a run between two steps, like a kill."""


def at_step(monkeypatch, number, event):
  """Calls `event` after the given step of the replicas."""
  step, seen = replicas.Replicas.step, []

  def counted(self):
    finished = step(self)
    seen.append(finished)
    if len(seen) == number:
      event(self)
    return finished

  monkeypatch.setattr(replicas.Replicas, "step", counted)


def rows_of(path, kind):
  return [row for row in runs.read(path / "metrics.jsonl") if row["kind"] == kind]


def each_once(path):
  answered = [row["query"] for row in rows_of(path, "request")]
  assert sorted(answered) == list(range(COUNT))
  assert [row["index"] for row in rows_of(path, "request")] == list(range(COUNT))


def test_killing_one_of_three_replicas_changes_no_output(
  pair, alone, tmp_path, monkeypatch, ray
):
  """Other replicas answer its requests, and each request is learnt from once."""
  lost, learners = [], []

  def kill(self):
    victim = max(self._replicas, key=lambda one: len(one.held))
    lost.extend(request.tag for request in victim.held.values())
    ray.kill(victim.actor)

  at_step(monkeypatch, 6, kill)
  begin = loop.Loop.close
  monkeypatch.setattr(
    loop.Loop,
    "close",
    lambda self, s: (learners.append(self.server.learner), begin(self, s)),
  )
  hasty = gate.GateConfig(error_rate=0.99)
  config = configured(pair, tmp_path / "run", replicas=ReplicaConfig(3))
  learning = dataclasses.replace(config.learning, gate=hasty)
  config = dataclasses.replace(config, learning=learning)
  result = online.run(config)
  assert result.exact and lost
  assert outputs(result.path) == alone
  each_once(result.path)
  assert int(learners[0]._buffer.added) == COUNT
  (message,) = rows_of(result.path, "event")
  assert f"its {len(lost)} requests go to other replicas" in message["text"]
  versions = [row["draft_version"] for row in rows_of(result.path, "request")]
  assert len(rows_of(result.path, "update")) > 2 and max(versions) > 1
  assert rows_of(result.path, "gate")[0]["name"] == "promoted"


@pytest.mark.parametrize("count", [0, 1])
def test_interrupted_run_continues_with_fewer_or_no_replicas(
  pair, alone, tmp_path, monkeypatch, count
):
  def interrupt(self):
    raise Interrupted

  config = configured(
    pair, tmp_path / "run", replicas=ReplicaConfig(2), compare_every=0
  )
  with monkeypatch.context() as patch, pytest.raises(Interrupted):
    at_step(patch, 12, interrupt)
    online.run(config)
  before = len(rows_of(tmp_path / "run", "request"))
  assert 0 < before < COUNT
  result = online.run(dataclasses.replace(config, replicas=ReplicaConfig(count)))
  assert outputs(result.path) == alone
  each_once(result.path)
  assert len(rows_of(result.path, "data")) == 1  # the run was continued, not restarted


class Idle(replicas.Replica):
  """Loads no models, for tests in which nothing is answered."""

  def load(self, *given):
    return []


def test_rows_in_flight_of_one_process_cannot_continue_in_replicas(pair, monkeypatch):
  monkeypatch.setattr(replicas, "Replica", Idle)
  with pytest.raises(base.InputError, match=r"ReplicaConfig\.count.*continue without"):
    idle(pair).structure({"slots": [{"tag": 3}, None]})


def idle(given):
  """Replicas without requests."""
  config, loaded = configured(given, "nowhere"), pairs.load_pair(given)
  return ReplicaConfig(1).engine(config.decoding, given, loaded, config.partition)


def test_loaded_pairs_and_watched_requests_are_refused(pair, monkeypatch):
  monkeypatch.setattr(replicas, "Replica", Idle)
  loaded = pairs.load_pair(pair)
  with pytest.raises(base.InputError, match=r"expected a PairConfig"):
    idle(loaded)
  watched = requests.Request(np.asarray([5], np.int32), watch=lambda tokens: None)
  with pytest.raises(base.InputError, match="stop strings or streamed text"):
    idle(pair).submit(watched)


def test_schedule_that_needs_costs_is_refused_with_replicas(pair, tmp_path):
  from osd_jax.distillation.learner import LearningConfig
  from osd_jax.distillation.schedule import WorthConfig

  learning = LearningConfig(schedule=WorthConfig())
  with pytest.raises(
    base.InputError, match=r"OnlineConfig\.measure_costs.*no replicas"
  ):
    dataclasses.replace(
      configured(pair, tmp_path), replicas=ReplicaConfig(2), learning=learning
    )


def test_replicas_option_sets_the_count(capsys):
  words = ["online", "--gin_file=runs/demo.gin", "--replicas", "2", "--dry_run"]
  assert main.main(words) == 0
  printed = capsys.readouterr().out
  assert "ReplicaConfig.count = 2" in printed
  assert "OnlineConfig.replicas = @ReplicaConfig()" in printed
