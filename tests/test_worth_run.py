"""A whole run whose updates are launched where they pay, set by gin and interrupted."""

import dataclasses

import pytest
import tiny_online

from osd_jax import online, runs
from osd_jax.distillation import worth
from osd_jax.main import settings

pytestmark = pytest.mark.slow

TIMES = ("_ms", "_ms_per_token", "_seconds")


def load(pair, folder):
  bindings = [
    f"PairConfig.target='{pair.target}'",
    f"PairConfig.draft='{pair.draft}'",
    f"OnlineConfig.run_directory='{folder}'",
    "OnlineConfig.compare_every=0",
  ]
  files = ["testing/tiny_worth.gin"]
  return settings.load(online.OnlineConfig, files, bindings)[0]


def timeless(path, kind):
  return [
    {name: value for name, value in row.items() if not name.endswith(TIMES)}
    for row in runs.read(path / "metrics.jsonl")
    if row["kind"] == kind
  ]


def test_by_given_costs_an_interrupted_run_ends_as_a_whole_one(tmp_path):
  pair = tiny_online.save_lively_pair(tmp_path)
  config = load(pair, tmp_path / "run")
  schedule = config.learning.schedule
  assert isinstance(schedule, worth.WorthConfig) and schedule.costs.update_ms == 1.0
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    loop = online.OnlineLoop(config, directory)
    while loop.finished < 7:
      loop.step()
    loop.leave()
    loop.server.close()
  resumed = online.run(config).path
  whole = online.run(load(pair, tmp_path / "whole")).path
  assert timeless(resumed, "request") == timeless(whole, "request")
  assert timeless(resumed, "update") == timeless(whole, "update")
  assert len(timeless(whole, "update")) >= 2
  assert not timeless(whole, "prices")

  costs = dataclasses.replace(schedule.costs, update_ms=1e6)  # more than it can gain
  dear = dataclasses.replace(schedule, costs=costs)
  learning = dataclasses.replace(config.learning, schedule=dear)
  path = str(tmp_path / "dear")
  never = dataclasses.replace(config, learning=learning, run_directory=path)
  assert not timeless(online.run(never).path, "update")
