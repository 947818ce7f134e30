"""Whole online runs with replicas: each request is answered once despite failures."""

import dataclasses
import os
import signal
import sys

import numpy as np
import pytest
import tiny_online
from test_attached_runs import configured, outputs

from osd_jax import base, main, online, pairs, runs
from osd_jax.distillation import gate
from osd_jax.engine import replicas, requests
from osd_jax.engine.replicas import ReplicaConfig
from osd_jax.models.shapes import DraftServing

pytestmark = pytest.mark.slow

COUNT = tiny_online.REQUESTS


@pytest.fixture(scope="module", autouse=True)
def ray():
  library = pytest.importorskip("ray")
  # Ray schedules by these numbers; no GPU or TPU is used.
  made_up = {"num_gpus": 2, "resources": {"TPU": 8}}
  library.init(num_cpus=4, include_dashboard=False, log_to_driver=False, **made_up)
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
  begin = online.OnlineLoop.close
  monkeypatch.setattr(
    online.OnlineLoop,
    "close",
    lambda self, s: (learners.append(self.server.learner), begin(self, s)),
  )
  hasty = gate.GateConfig(error_rate=0.99, cap=1e-3, window=2)
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


def test_killed_single_replica_is_replaced(pair, alone, tmp_path, monkeypatch, ray):
  """The replacement loads the models, receives the newest draft and answers."""
  at_step(monkeypatch, 6, lambda self: ray.kill(self._replicas[0].actor))
  config = configured(
    pair, tmp_path / "run", replicas=ReplicaConfig(1), compare_every=0
  )
  result = online.run(config)
  assert outputs(result.path) == alone
  each_once(result.path)
  assert len(rows_of(result.path, "event")) == 1
  versions = [row["draft_version"] for row in rows_of(result.path, "request")]
  assert versions == sorted(versions) and versions[-1] > 1


def test_replica_that_dies_while_loading_is_replaced(pair, monkeypatch, tmp_path):
  """Answers to the requests of the warm-up are not counted."""
  mark = str(tmp_path / "died")

  class Frail(replicas.Replica):
    def load(self, *given):
      if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
      return super().load(*given)

  monkeypatch.setattr(replicas, "Replica", Frail)
  found = held(pair)
  assert found.warm_up() and len(found.messages()) == 1
  (done,) = answers_of(found)
  assert len(done.tokens)


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
    held(pair).structure({"slots": [{"tag": 3}, None]})


def held(given, **devices):
  """Replicas without requests."""
  config, loaded = configured(given, "nowhere"), pairs.load_pair(given)
  return replicas.Replicas(
    ReplicaConfig(1, **devices), config.decoding, given, loaded, config.partition
  )


def answers_of(found):
  """Answers of the replicas to one request."""
  found.submit(requests.Request(np.asarray([5], np.int32)))
  answers = []
  while found.in_flight:
    answers += found.step()
  return answers


def test_replica_reserves_its_gpus_and_tpu_chips(pair, ray):
  found = held(pair, gpus=1.0, tpus=4.0)
  assert answers_of(found)
  left = ray.available_resources()
  assert (left["GPU"], left["TPU"]) == (1.0, 4.0)
  found.close()


def test_repeated_loss_of_replicas_ends_the_run(pair, monkeypatch):
  """The error says what to do, and nothing hangs."""

  class Dying(Idle):
    def step(self, requests, draft, expecting, forgets, unseen):
      os._exit(1)

  monkeypatch.setattr(replicas, "Replica", Dying)
  with pytest.raises(base.UserError, match="4 replicas were lost in a row"):
    answers_of(held(pair))


def test_errors_of_replicas_keep_type_and_message(pair, monkeypatch):
  class Broken(replicas.Replica):
    def load(self, *given):
      raise base.InputError("PairConfig.target: no such file on this host.")

  monkeypatch.setattr(replicas, "Replica", Broken)
  with pytest.raises(base.InputError, match=r"^PairConfig\.target: no such file"):
    held(pair).warm_up()


def test_loaded_pairs_and_watched_requests_are_refused(pair, monkeypatch):
  monkeypatch.setattr(replicas, "Replica", Idle)
  loaded = pairs.load_pair(pair)
  with pytest.raises(base.InputError, match=r"expected a PairConfig"):
    held(loaded)
  watched = requests.Request(np.asarray([5], np.int32), watch=lambda tokens: None)
  with pytest.raises(base.InputError, match="stop strings or streamed text"):
    held(pair).submit(watched)


def test_starting_ray_keeps_the_sigterm_handler(monkeypatch, ray):
  """`ray.init` replaces the handler, and a run would end without a message."""

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


def test_missing_ray_error_names_the_package_to_install(pair, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  with pytest.raises(base.InputError, match=r"pip install 'osd-jax\[replicas\]'"):
    held(pair)


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


@pytest.mark.parametrize("field, value", [("count", -1), ("gpus", -0.5)])
def test_invalid_settings_are_named(field, value):
  with pytest.raises(base.InputError, match=rf"ReplicaConfig\.{field}"):
    ReplicaConfig(**{field: value})


def test_replicas_option_sets_the_count(capsys):
  words = ["online", "--gin_file=runs/demo.gin", "--replicas", "2", "--dry_run"]
  assert main.main(words) == 0
  printed = capsys.readouterr().out
  assert "ReplicaConfig.count = 2" in printed
  assert "OnlineConfig.replicas = @ReplicaConfig()" in printed
