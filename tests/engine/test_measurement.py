"""Measured costs of the engine's calls, and how long the measurement takes."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_online
from engine import cases

from osd_jax import base, online, runs, sharding
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.distillation import schedule as schedule_lib
from osd_jax.distillation.learner import Learner
from osd_jax.engine import engine, measurement, steps
from osd_jax.engine.requests import AdaptiveConfig, Request
from osd_jax.engine.server import Server

BUCKET = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


def test_measuring_a_server_changes_no_state(pair, tmp_path):
  config = tiny_online.config(pair, tmp_path, rows=2)
  lines = []
  with Server(config.pair, config.decoding, config.learning) as server:
    server.seed([])
    before = np.asarray(server.learner.state()[0]["learner"].step)
    found = measurement.measure_run(server, BUCKET, True, config.sampling, lines.append)
    after = np.asarray(server.learner.state()[0]["learner"].step)
  assert after == before and len(lines) == 2 and "Measuring costs" in lines[0]
  assert (found.online.rows, found.online.num_draft_tokens) == (2, (3,))
  assert min(found.online.round_ms) > 0 and found.online.request_ms > 0
  assert min(found.draft_ms, found.step_ms, found.verify_ms, found.update_ms) > 0
  assert found.slices == 2 and found.lost_ms > 0


@pytest.fixture
def slow_model(monkeypatch):
  """A model with steps of 100 ms; returns a list with the seconds that have passed."""
  now = [0.0]

  def slow(call, ms_of):
    def timed(*arguments, **named):
      now[0] += ms_of(*arguments) / 1e3
      return call(*arguments, **named)

    return timed

  for name, ms_of in {
    "advance": lambda _, k, served, n, *rest: n * (100 + 8 * k),
    "insert": lambda *_: 120.0,
    "prefill_draft": lambda *_: 20.0,
    "catch_up": lambda *_: 15.0,
  }.items():
    monkeypatch.setattr(steps, name, slow(getattr(steps, name), ms_of))
  monkeypatch.setattr(measurement, "feed", slow(measurement.feed, lambda *_: 400.0))
  monkeypatch.setattr(measurement, "clock", lambda: now[0])
  update = Learner.try_update

  def try_update(self, slices, serve=lambda: False):
    """An update that takes 300 ms a slice, however fast this machine runs it."""
    end = now[0] + 0.3 * slices
    update(self, slices, lambda: serve() and now[0] < end)
    now[0] = max(now[0], end)

  monkeypatch.setattr(Learner, "try_update", try_update)
  return now


@pytest.mark.parametrize("candidates", [None, (0, 1, 3)])
def test_model_with_100_ms_steps_is_measured_within_10_seconds(
  pair, tmp_path, slow_model, candidates
):
  config = tiny_online.config(pair, tmp_path, rows=2)
  decoding = config.decoding
  if candidates:
    costs = (RoundCosts((1.0, 1.0, 1.0)),)
    adaptive = AdaptiveConfig(candidates=candidates, costs=costs)
    decoding = dataclasses.replace(decoding, adaptive=adaptive)
  with Server(config.pair, decoding, config.learning) as server:
    server.seed([])
    slow_model[0] = 0.0
    found = measurement.measure_run(server, BUCKET, True, config.sampling)
  assert slow_model[0] <= 10.0
  # 8 ms for each of three drafted tokens, and two slices of 300 ms per update.
  assert found.online.round_ms[-1] == pytest.approx(124.0)
  assert found.update_ms == pytest.approx(600.0)


def test_run_does_not_measure_rounds_again(pair, tmp_path, slow_model, monkeypatch):
  config = tiny_online.config(pair, tmp_path, rows=2)
  decoding = dataclasses.replace(config.decoding, adaptive=AdaptiveConfig((0, 1)))
  with Server(config.pair, decoding, config.learning) as server:
    server.warm_up()
    (bucket,) = decoding.source_lengths
    rounds, before = server.engine.measured[bucket], slow_model[0]
    costs = measurement.measure_run(server, bucket, False, config.sampling)
  assert costs.online == rounds.flat(False)
  assert slow_model[0] - before < 4.0


def engine_of(rows, buckets, **changes):
  """An engine that measures the rounds of K in (0, 1, 3)."""
  config = cases.config_of(rows, source_lengths=buckets, **changes)
  decoding = dataclasses.replace(config, adaptive=AdaptiveConfig((0, 1, 3)))
  params = cases.target_params()
  return engine.Engine(decoding, cases.TARGET, params, cases.TARGET, params)


def test_rounds_are_timed_with_one_row_and_with_all(slow_model, monkeypatch):
  """A model that takes 10 ms for each row that holds a request, and 1 ms for each K."""
  advance = steps.advance

  def by_rows(program, k, served, count, state, prices=None):
    running = int(np.sum(state.stop_reason == base.StopReason.RUNNING))
    before = slow_model[0]
    state = advance(program, k, served, count, state, prices)
    slow_model[0] = before + count * (10 * running + k) / 1e3
    return state

  monkeypatch.setattr(steps, "advance", by_rows)
  serving = engine_of(3, (6,), target_length=9)
  serving.run([Request(np.full(4, 7, np.int32), max_new_tokens=1)])
  costs = serving.measured[6]
  assert costs.rounds()[0] == pytest.approx((30, 31, 33))
  assert costs.rounds(rows=1)[0] == pytest.approx((10, 11, 13))


def test_tables_of_all_buckets_share_one_budget(slow_model):
  """Six buckets; the last ones take the tables of the nearest measured bucket."""
  buckets, lines = (4, 5, 6, 7, 8, 9), []
  serving = engine_of(2, buckets)
  serving.report = lambda line: lines.append(line) if "Measuring" in line else None
  slow_model[0] = 0.0
  serving.run([Request(np.full(n, 7, np.int32), max_new_tokens=1) for n in buckets])
  tables = serving.controller.costs
  assert len(tables) == len(buckets)
  assert 2 <= len(lines) == len(serving.measured) < len(buckets)
  assert "prompts of 4 tokens" in lines[0]
  assert tables[9] is tables[3 + len(lines)]  # the nearest one
  assert tables[4].rounds()[0, 0] == pytest.approx(100)


def worth_config(pair, folder, **changes):
  schedule = schedule_lib.WorthConfig(update_interval=3)
  return tiny_online.config(
    pair, folder, schedule=schedule, measure_costs=True, compare_every=0, **changes
  )


def test_resumed_run_keeps_its_measured_costs(pair, tmp_path, monkeypatch):
  """Measured again, they would differ, and so would the run. See `test_resume.py`."""
  measured = Costs(RoundCosts((2.0,), num_draft_tokens=(3,), rows=2), lost_ms=0.5)
  monkeypatch.setattr(measurement, "measure_run", lambda *_: measured)
  config = worth_config(pair, tmp_path / "run", warm_start=None)
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    loop = online.begin(config, directory)
    while loop.finished < 1:
      loop.step()
    loop.checkpoint()
    loop.wait()
    loop.server.close()
  monkeypatch.setattr(
    measurement, "measure_run", lambda *_: pytest.fail("measured again")
  )
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    again = online.begin(config, directory)
    assert again.server.learner.costs == measured
    again.server.close()
  rows = list(runs.read(tmp_path / "run" / "metrics.jsonl"))
  (logged,) = [row for row in rows if row["kind"] == "costs"]
  assert Costs.from_json(logged) == measured


def test_cost_schedule_without_measured_costs_is_refused(pair, tmp_path):
  with pytest.raises(ValueError, match="OnlineConfig.measure_costs: received False"):
    dataclasses.replace(worth_config(pair, tmp_path), measure_costs=False)


@pytest.mark.release
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_every_k_is_measured_on_a_mesh(pair, tmp_path):
  config = tiny_online.config(pair, tmp_path, rows=2)
  decoding = dataclasses.replace(
    config.decoding,
    num_draft_tokens=1,
    adaptive=AdaptiveConfig((0, 1, 3), (RoundCosts((1.0, 2.0, 3.0)),)),
  )
  mesh = sharding.PartitionConfig(data=2, model=2)
  with Server(config.pair, decoding, config.learning, mesh) as server:
    found = measurement.measure_run(server, BUCKET, True, config.sampling)
    assert not server.learner.runner.in_background
  # On a mesh updates run on the serving thread, so serving loses all of their time.
  assert found.lost_ms >= found.update_ms > 0
  assert found.online.num_draft_tokens == (0, 1)
  assert found.online.rows == 2 and min(found.online.round_ms) > 0
