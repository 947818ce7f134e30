"""Whole online runs served by replicas: every request once, whoever is lost."""

import dataclasses
import os
import signal
import sys

import numpy as np
import pytest
import tiny_online
from test_attached_runs import configured, outputs

from osd_jax import base, main, online, pairs, runs
from osd_jax.engine import replicas, requests
from osd_jax.engine.replicas import ReplicaConfig
from osd_jax.models.shapes import DraftServing

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

COUNT = tiny_online.REQUESTS


@pytest.fixture(scope="module", autouse=True)
def cluster():
  # Of GPUs and TPUs only the numbers are there, which is what Ray goes by.
  made_up = {"num_gpus": 2, "resources": {"TPU": 8}}
  ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, **made_up)
  yield
  ray.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  """The tiny target, and a draft that stands on it from nothing."""
  pair = tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))
  return dataclasses.replace(
    tiny_online.attached(pair),
    draft_serving=DraftServing(int8=True, shortlist=700),
  )


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  """Outputs of one process."""
  config = configured(pair, tmp_path_factory.mktemp("alone") / "run", compare_every=0)
  return outputs(online.run(config).path)


class Interrupted(Exception):
  """A run that ends between two steps, as a killed one does."""


def at_step(monkeypatch, number, event):
  """Does something behind a step of the replicas."""
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


def test_one_of_three_is_killed_and_nobody_notices(pair, alone, tmp_path, monkeypatch):
  """Its requests are answered by others; each is learnt from once."""
  lost, learners = [], []

  def kill(self):
    victim = max(self._replicas, key=lambda one: len(one.held))
    lost.extend(request.tag for request in victim.held.values())
    ray.kill(victim.actor)

  at_step(monkeypatch, 6, kill)
  begin = online.OnlineLoop.close
  monkeypatch.setattr(
    online.OnlineLoop,
    "close",
    lambda self, s: (learners.append(self.server.learner), begin(self, s)),
  )
  config = configured(pair, tmp_path / "run", replicas=ReplicaConfig(3))
  result = online.run(config)
  assert result.exact and lost
  assert outputs(result.path) == alone
  each_once(result.path)
  assert int(learners[0]._buffer.added) == COUNT
  (said,) = rows_of(result.path, "replica")
  assert f"its {len(lost)} requests go to other replicas" in said["said"]
  versions = [row["draft_version"] for row in rows_of(result.path, "request")]
  assert len(rows_of(result.path, "update")) > 2 and max(versions) > 1


def test_the_only_one_is_killed_and_its_successor_goes_on(
  pair, alone, tmp_path, monkeypatch
):
  """Nobody else could answer: the new one loads, hears of the newest draft, serves."""
  at_step(monkeypatch, 6, lambda self: ray.kill(self._replicas[0].actor))
  config = configured(
    pair, tmp_path / "run", replicas=ReplicaConfig(1), compare_every=0
  )
  result = online.run(config)
  assert outputs(result.path) == alone
  each_once(result.path)
  assert len(rows_of(result.path, "replica")) == 1
  versions = [row["draft_version"] for row in rows_of(result.path, "request")]
  assert versions == sorted(versions) and versions[-1] > 1


def test_one_that_dies_while_it_loads_is_replaced(pair, monkeypatch, tmp_path):
  """Of the made-up requests nothing is counted as an answer."""
  mark = str(tmp_path / "died")

  class Frail(replicas.Replica):
    def load(self):
      if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
      return super().load()

  monkeypatch.setattr(replicas, "Replica", Frail)
  found = held(pair)
  assert found.warm_up() and len(found.messages()) == 1
  (done,) = answers_of(found)
  assert len(done.tokens)


@pytest.mark.parametrize("count", [0, 1])
def test_an_interrupted_run_goes_on_with_fewer_or_none(
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
  assert len(rows_of(result.path, "data")) == 1  # it was continued, not begun


def test_rows_that_one_process_held_are_not_given_to_replicas(pair, tmp_path):
  with pytest.raises(base.InputError, match=r"ReplicaConfig\.count.*continue without"):
    held(pair).structure({"slots": [{"tag": 3}, None]})


def held(given, **devices):
  """Replicas that nothing is asked of yet."""
  config, loaded = configured(given, "nowhere"), pairs.load_pair(given)
  return replicas.Replicas(
    ReplicaConfig(1, **devices), config.decoding, given, loaded, config.partition
  )


def answers_of(found):
  """Answers of replicas to one request."""
  found.submit(requests.Request(np.asarray([5], np.int32)))
  answers = []
  while found.in_flight:
    answers += found.step()
  return answers


def test_a_replica_has_its_gpus_and_chips_to_itself(pair):
  found = held(pair, gpus=1.0, tpus=4.0)
  assert answers_of(found)
  left = ray.available_resources()
  assert (left["GPU"], left["TPU"]) == (1.0, 4.0)
  found.close()


def test_whoever_dies_again_and_again_ends_the_run(pair, monkeypatch):
  """The message names what to do; nothing hangs."""

  class Dying(replicas.Replica):
    def load(self):
      return []

    def step(self, requests, draft, expecting):
      os._exit(1)

  monkeypatch.setattr(replicas, "Replica", Dying)
  with pytest.raises(base.UserError, match="4 replicas were lost in a row"):
    answers_of(held(pair))


def test_what_replicas_raise_arrives_as_it_was(pair, monkeypatch):
  class Broken(replicas.Replica):
    def load(self):
      raise base.InputError("PairConfig.target: no such file on this host.")

  monkeypatch.setattr(replicas, "Replica", Broken)
  with pytest.raises(base.InputError, match=r"^PairConfig\.target: no such file"):
    held(pair).warm_up()


def test_a_loaded_pair_and_a_watched_request_are_refused(pair):
  loaded = pairs.load_pair(pair)
  with pytest.raises(base.InputError, match=r"expected a PairConfig"):
    held(loaded)
  watched = requests.Request(np.asarray([5], np.int32), watch=lambda tokens: None)
  with pytest.raises(base.InputError, match="stop strings or streamed text"):
    held(pair).submit(watched)


def test_sigterm_stays_whose_it_was(monkeypatch):
  """Ray takes it; a run would end without a word."""

  def other(*_):
    pass

  before = signal.signal(signal.SIGTERM, other)
  monkeypatch.setattr(ray, "is_initialized", lambda: False)
  monkeypatch.setattr(
    ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL)
  )
  try:
    assert replicas._ray() == (ray, True)
    assert signal.getsignal(signal.SIGTERM) is other
  finally:
    signal.signal(signal.SIGTERM, before)


def test_without_ray_it_says_what_to_install(pair, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  with pytest.raises(base.InputError, match=r"pip install 'osd-jax\[replicas\]'"):
    held(pair)


def test_a_schedule_that_needs_costs_is_refused_with_replicas(pair, tmp_path):
  from osd_jax.distillation.learner import LearningConfig
  from osd_jax.distillation.worth import WorthConfig

  learning = LearningConfig(schedule=WorthConfig())
  with pytest.raises(
    base.InputError, match=r"OnlineConfig\.measure_costs.*no replicas"
  ):
    dataclasses.replace(
      configured(pair, tmp_path), replicas=ReplicaConfig(2), learning=learning
    )


@pytest.mark.parametrize("field, value", [("count", -1), ("gpus", -0.5)])
def test_settings_out_of_range_are_named(field, value):
  with pytest.raises(base.InputError, match=rf"ReplicaConfig\.{field}"):
    ReplicaConfig(**{field: value})


def test_the_command_line_says_how_many(capsys):
  words = ["online", "--gin_file=runs/demo.gin", "--replicas", "2", "--dry_run"]
  assert main.main(words) == 0
  printed = capsys.readouterr().out
  assert "ReplicaConfig.count = 2" in printed
  assert "OnlineConfig.replicas = @ReplicaConfig()" in printed
