"""Prices of calls, what they promise, and what learning has saved by them."""

import dataclasses
import json
import threading
import types

import jax
import numpy as np
import pytest
import tiny_online
from report import synthetic_run

from osd_jax import online, runs, sharding
from osd_jax.costs.table import RoundCosts
from osd_jax.distillation import worth
from osd_jax.engine import engine, steps
from osd_jax.engine.server import Server
from osd_jax.measuring import operations, prediction, prices, savings
from osd_jax.report import pages

PLAIN = prices.CallPrices(1, (0,), (4.0,), 5.0)
ONLINE = prices.CallPrices(1, (7,), (11.0,), 10.0)
PRICES = prices.Prices(
  PLAIN,
  ONLINE,
  ONLINE,
  draft_ms=0.5,
  step_ms=4.0,
  verify_ms=7.0,
  slice_ms=20.0,
  slices=6,
  slowdown=1.25,
  hidden=0.5,
  flops=operations.Flops(1e6, 1e5, 1e4, 1e7),
)


def request(**changes):
  row = {
    "kind": "request",
    "index": 0,
    "query": 0,
    "source": "maths",
    "target_calls": 10,
    "drafted": 70,
    "output_tokens": 30,
    "acceptance_rate": 0.8,
    "floor_acceptance_rate": 0.5,
    "decode_ms": 10.0 + 110.0,
  }
  return {**row, **changes}


UPDATE = {"kind": "update", "steps": 6, "skipped": 0}


def test_half_an_update_is_hidden_where_rounds_slow_down_by_a_quarter():
  # 5 / 4 of the time for 400 ms: 80 ms of serving are lost, of 160 that it takes alone
  assert prices.hidden_share(1.25, 160.0, 400.0) == pytest.approx(0.5)
  assert prices.hidden_share(1.0, 160.0, 160.0) == 1.0
  assert prices.hidden_share(2.0, 160.0, 320.0) == 0.0  # one core for both
  assert prices.hidden_share(9.0, 160.0, 900.0) == 0.0
  assert prices.hidden_share(1.0, 160.0, 160.0, 40.0) == 0.75  # serving draws and swaps


def test_what_slows_a_third_of_the_turns_counts_and_a_hiccup_does_not():
  turns = np.where(np.arange(30) % 3 == 0, 10.0, 4.0)
  assert prices.usual(turns) == pytest.approx(5.75, abs=0.3)
  assert np.median(turns) == 4.0  # would have promised too much
  turns[7] = 1000.0
  assert prices.usual(turns) < 6.5
  assert prices.usual([3.0, 5.0]) == 4.0


def test_prices_survive_json_and_price_the_schedule():
  fields = json.loads(json.dumps(dataclasses.asdict(PRICES)))
  assert prices.Prices.from_json({"kind": "prices", **fields}) == PRICES
  assert PRICES.lost_ms == 60.0 == PRICES.update_costs().lost_ms
  bare = dataclasses.replace(PRICES, flops=None)
  assert prices.Prices.from_json(dataclasses.asdict(bare)) == bare


def test_rounds_between_two_ks_cost_what_lies_between():
  adaptive = prices.CallPrices(1, (0, 3, 7), (4.0, 7.0, 11.0), 0.0)
  assert adaptive.at(1.5) == pytest.approx(5.5) and adaptive.at(7) == 11.0


def test_a_prediction_is_tokens_over_time():
  seen = prediction.Seen(request_tokens=30)
  assert prediction.predict(PLAIN, seen) == pytest.approx(30e3 / (5 + 120))
  slowed = dataclasses.replace(seen, busy=0.5)
  assert prediction.predict(PLAIN, slowed, 1.5) == pytest.approx(30e3 / (125 * 1.25))
  drafted = prediction.Seen(30, tokens_a_round=3, num_draft_tokens=7, lost_ms=30.0)
  assert prediction.predict(ONLINE, drafted) == pytest.approx(30e3 / (10 + 110 + 30))
  both = dataclasses.replace(ONLINE, rows=2)
  assert prediction.predict(both, drafted) == pytest.approx(30e3 / (10 + 55 + 30))


def compared(**changes):
  return request(
    plain_ms_per_token=125 / 30,
    floor_ms_per_token=(10 + 15 * 11) / 30,
    floor_tokens_per_target_call=2.0,
    learner_busy=False,
    **changes,
  )


def test_the_table_says_how_far_prediction_and_measurement_lie_apart():
  table = prediction.table(PRICES, [compared(), request(query=1)])
  assert [line["decoding"] for line in table] == ["plain", "frozen", "online"]
  assert [line["apart"] for line in table] == ["+0.0%"] * 3
  slower = [request(decode_ms=240.0), UPDATE]
  (line,) = prediction.table(PRICES, slower)
  # 180 ms are predicted, since an update takes 60 ms from the one request there is.
  assert line["apart"] == f"{240 / 180 - 1:+.1%}"


def test_operations_are_counted_by_what_ran():
  text = prediction.operations(PRICES, [request(), UPDATE])
  serving = 1e6 + 80 * 1e5 + 70 * 1e4
  assert f"learning {6e7:.2g} (6e+07 an update)" in text
  assert f"serving {serving:.2g}" in text
  assert not prediction.operations(PRICES, [request()])


def test_savings_are_the_frozen_drafts_rounds_less_ours_less_learning():
  state = savings.observe(PRICES, savings.Savings(), "request", request())
  tokens = [sum(rate**i for i in range(8)) for rate in (0.8, 0.5)]
  frozen = 110 * tokens[0] / tokens[1]
  assert state.saved_ms == pytest.approx(frozen - 110)
  assert state.even_since == 1
  state = savings.observe(PRICES, state, "update", UPDATE)
  state = savings.observe(PRICES, state, "update", UPDATE)
  assert state.saved_ms == pytest.approx(frozen - 110 - 120)
  assert state.fields()["saved_seconds"] == pytest.approx(state.saved_ms / 1e3)
  state = savings.observe(PRICES, state, "request", request())
  assert state.even_since == 1  # 0.06 s more than learning took
  assert "learning took 0.1 s from serving and saved" in state.sentence()


def test_a_draft_that_gains_nothing_only_costs():
  same = request(floor_acceptance_rate=0.8)
  state = savings.of_rows(
    [{"kind": "prices", **dataclasses.asdict(PRICES)}, same, UPDATE, same]
  )
  assert state is not None and state.saved_ms == pytest.approx(-60.0)
  assert state.even_since is None and "it has not paid yet" in state.sentence()


def test_without_a_frozen_draft_nothing_is_said_of_savings():
  row = {**request(), "floor_acceptance_rate": None}
  state = savings.observe(PRICES, savings.Savings(), "request", row)
  assert not state.fields() and not state.sentence()
  assert savings.of_rows([row]) is None


def test_a_page_of_a_priced_run_says_what_learning_saved():
  rows = synthetic_run.rows(100)
  priced = [{"kind": "prices", **dataclasses.asdict(PRICES)}, *rows]
  for row in priced:
    if "floor_ms_per_token" in row:
      row["floor_tokens_per_target_call"] = 2.0
  page = pages.page(priced)
  predicted = page.tables["Predicted and measured"]
  assert [row["decoding"] for row in predicted] == ["plain", "frozen", "online"]
  assert any("By the prices, learning took" in text for text in page.sentences)
  unpriced = pages.page(rows)
  assert "Predicted and measured" not in unpriced.tables


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


def test_calls_of_a_server_are_timed_and_nothing_changes(pair, tmp_path):
  config = tiny_online.config(pair, tmp_path, rows=2)
  with Server(config.pair, config.decoding, config.learning) as server:
    server.seed([])
    before = np.asarray(server.learner.slice_inputs()[0].step)
    made = prices.measure(server, np.array([5, 9, 7, 1], np.int32), learn=True)
    threads = [thread.name for thread in threading.enumerate()]
    after, *_ = server.learner.slice_inputs()
  assert (made.plain.rows, made.frozen.rows, made.online.rows) == (1, 1, 2)
  assert made.plain.num_draft_tokens == (0,) and made.online.num_draft_tokens == (3,)
  times = (made.plain, made.frozen, made.online)
  assert all(min(way.round_ms) > 0 and way.request_ms > 0 for way in times)
  assert min(made.draft_ms, made.step_ms, made.verify_ms, made.slice_ms) > 0
  assert made.slices == 2 and 0 <= made.hidden <= 1 <= made.slowdown
  assert after.step == before and not [name for name in threads if "_again" in name]
  assert made.flops is not None and made.flops.target_token > made.flops.draft_token
  assert made.flops.slice > made.flops.draft_token


def test_rounds_are_priced_as_the_stream_is_sampled(pair, tmp_path, monkeypatch):
  config = tiny_online.config(pair, tmp_path, prices=True)
  sampled = dataclasses.replace(config, sampling=engine.SamplingConfig(temperature=0.7))
  for run_config, expected in ((config, 0.0), (sampled, 0.7)):
    found = set()

    def advance(program, num_draft_tokens, served, rounds, state, found=found):
      found.update(np.asarray(state.settings.temperature).tolist())
      return steps.advance(program, num_draft_tokens, served, rounds, state)

    changed = types.SimpleNamespace(**{**vars(steps), "advance": advance})
    monkeypatch.setattr(prices, "calls", changed)
    folder = tmp_path / str(expected)
    run_config = dataclasses.replace(run_config, run_directory=str(folder))
    with runs.RunDirectory.start(run_config.run_directory, run_config) as directory:
      loop = online.OnlineLoop(run_config, directory)
      loop.leave()
      loop.server.close()
    assert found == {np.float32(expected)}


def run(config):
  path = online.run(config).path
  return path, list(runs.read(path / "metrics.jsonl"))


def timeless(rows, kind):
  times = ("_ms", "_ms_per_token", "_seconds")
  return [
    {name: value for name, value in row.items() if not name.endswith(times)}
    for row in rows
    if row["kind"] == kind
  ]


def worth_config(pair, folder, **changes):
  schedule = worth.WorthConfig(update_interval=3)
  return tiny_online.config(
    pair, folder, schedule=schedule, prices=True, floor_metering=True, **changes
  )


def test_a_run_by_measured_prices_goes_on_with_them_after_an_interruption(
  pair, tmp_path, monkeypatch
):
  config = worth_config(pair, tmp_path / "run")
  with runs.RunDirectory.start(config.run_directory, config) as directory:
    loop = online.OnlineLoop(config, directory)
    while loop.finished < 12:
      loop.step()
    loop.leave()
    loop.server.close()
  measured = prices.measure
  monkeypatch.setattr(prices, "measure", lambda *_: pytest.fail("measured anew"))
  path, rows = run(config)
  priced = [row for row in rows if row["kind"] == "prices"]
  assert len(priced) == 1
  monkeypatch.setattr(prices, "measure", lambda *_: prices.Prices.from_json(priced[0]))
  whole = dataclasses.replace(config, run_directory=str(tmp_path / "whole"))
  _, others = run(whole)
  assert prices.measure is not measured
  for kind in ("request", "update", "alarm"):
    assert timeless(rows, kind) == timeless(others, kind)
  saved = [
    [r["saved_seconds"] for r in part if r["kind"] == "request"]
    for part in (rows, others)
  ]
  assert saved[0] == saved[1] and len(timeless(rows, "update"))
  page = (path / "report.html").read_text()
  assert "Predicted and measured" in page and "Prices of this machine" in page


def test_a_schedule_that_goes_by_prices_needs_some(pair, tmp_path):
  with pytest.raises(ValueError, match="OnlineConfig.prices: received False"):
    dataclasses.replace(worth_config(pair, tmp_path), prices=False)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_every_k_is_priced_on_a_mesh_too(pair, tmp_path, quick_compilation):
  config = tiny_online.config(pair, tmp_path, rows=2)
  decoding = dataclasses.replace(
    config.decoding,
    num_draft_tokens=1,
    adaptive=engine.AdaptiveConfig(costs=(RoundCosts((1.0, 2.0, 3.0, 4.0, 5.0)),)),
  )
  mesh = sharding.PartitionConfig(data=2, model=2)
  with Server(config.pair, decoding, config.learning, mesh) as server:
    made = prices.measure(server, np.array([5, 9, 7, 1], np.int32), learn=True)
    assert not server.learner.in_background  # so that nothing of an update is hidden
  assert (made.hidden, made.slowdown) == (0.0, 1.0) and made.lost_ms > 0
  assert made.online.num_draft_tokens == made.frozen.num_draft_tokens == (0, 1)
  assert made.online.rows == 2 and min(made.online.round_ms) > 0
  costs = made.update_costs()
  assert costs.num_draft_tokens == (0, 1) and costs.update_ms > 0
