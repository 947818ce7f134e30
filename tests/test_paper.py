"""The paper's experiment: figures of cells with known results, and a whole run."""

import pathlib
import sys
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "paper"))

import columns

from experiments.paper import run
from osd_jax import base


def cell(rates, column="ours", seed=0):
  """A cell whose blocks of 40 requests and 400 tokens have these acceptances."""
  blocks = [[40, 400, 200, 400 * rate, 30.0] for rate in rates]
  key = dict.fromkeys(run.KEY, 1) | {"column": column, "seed": seed}
  return key | {"blocks": blocks}


def test_a_gain_has_an_interval_that_holds_it():
  rng = np.random.default_rng(0)
  static = cell(rng.normal(0.5, 0.02, 80))
  ours = cell(np.asarray(static["blocks"])[:, 3] / 400 + 0.1)
  difference, low, high = run.gain([ours], [static], run.acceptance)
  assert difference == pytest.approx(0.1, abs=1e-3)
  assert low <= difference <= high and high - low < 1e-3  # it is paired
  noise = cell(rng.normal(0.5, 0.02, 80))
  _, low, high = run.gain([noise], [static], run.acceptance)
  assert low < 0 < high
  # A seed that one of them lacks does not count.
  more = [ours, cell([0.9] * 80, seed=1)]
  assert run.gain(more, [static], run.acceptance)[0] == difference
  # Too few blocks say nothing about themselves.
  assert len(run.gain([cell([0.6] * 4)], [cell([0.5] * 4)], run.acceptance)) == 1


def test_a_system_is_compared_with_the_offline_draft_of_its_seed():
  offline = [cell([rate] * 8, "offline", seed) for seed, rate in enumerate((0.5, 0.9))]
  ours = [cell([0.6] * 8, "ours", seed) for seed in (0, 1)]
  by_column = dict.fromkeys(columns.COLUMNS, []) | {"offline": offline, "ours": ours}
  assert run.entries(ours, by_column)[-2] == "40, never"
  assert run.entries(offline, by_column)[-2] == ""


def test_the_way_to_the_offline_draft_is_counted_in_requests():
  offline = cell([0.8] * 8)
  assert run.requests_to_near(cell([0.1, 0.2, 0.7, 0.8, 0.8]), offline) == 160
  assert run.requests_to_near(cell([0.8] * 8), offline) == 40
  assert run.requests_to_near(cell([0.7] * 8), offline) is None


def test_the_sets_of_a_shift_keep_their_order_and_are_shuffled_inside():
  def phase(first):
    rows: Any = np.arange(first, first + 9)[:, None]
    return base.DistillationBatch(rows, rows, rows, rows, rows[:, 0])

  def orders(seed):
    study = columns.Study({}, Any, Any, (phase(0), phase(9)), Any, 1, pathlib.Path())
    return [int(one.weight[0]) for one in columns.Columns(study, seed).answers]

  order = orders(0)
  assert sorted(order[:9]) + sorted(order[9:]) == list(range(18)) != order
  assert order == orders(0) != orders(1)


def test_the_page_shows_every_cell():
  page = (ROOT / "docs" / "reproducing_the_paper.md").read_text()
  for one in run.read(run.CELLS):
    shown = "| {1:.2f} ({0:.2f}) |".format(*run.late(one)).replace("(0.", "(.")
    assert shown in page, one["column"]


@pytest.mark.slow
def test_the_experiment_is_computed_once_and_printed(tmp_path, monkeypatch, capsys):
  """On the demo's target, with a draft and a stream that are much too small."""
  quick = {"warm": 16, "online": 40, "chat_count": 8, "chat_steps": 8}
  monkeypatch.setattr(run, "QUICK", run.QUICK | quick | {"warm_steps": 8})
  monkeypatch.setattr(run, "QUICK_HELD_OUT", 4)
  words = ["--quick", "--folder", str(tmp_path)]
  run.main(words)
  lines = (tmp_path / "quick.jsonl").read_text()
  cells = run.read(tmp_path / "quick.jsonl")
  assert [one["column"] for one in cells] == list(columns.COLUMNS)
  by_name = {one["column"]: np.asarray(one["blocks"]) for one in cells}
  counts = {name: parts[:, :2].sum(0).tolist() for name, parts in by_name.items()}
  assert all(one == counts["cache"] for one in counts.values())  # the same answers
  assert counts["cache"][0] == 40
  slices = {one["column"]: one["slices"] for one in cells}
  # The last update of a stream serves no request.
  assert slices["ours"] == 16 and slices["as published"] == 4
  # A draft never makes the cache much worse, whatever it is worth itself.
  calls = {name: parts[:, 2].sum() for name, parts in by_name.items()}
  assert calls["cache + ours"] < 1.02 * min(calls["cache"], calls["ours"])
  shown = capsys.readouterr().out
  assert "demo, attached, sql" in shown and "sql, seed 0, cache + ours:" in shown
  run.main(words)
  assert (tmp_path / "quick.jsonl").read_text() == lines


def test_unknown_columns_and_a_missing_target_are_refused(tmp_path, capsys):
  with pytest.raises(SystemExit):
    run.main(["--quick", "--columns", "ourz", "--folder", str(tmp_path)])
  assert "--columns: invalid choice: 'ourz' (choose from" in capsys.readouterr().err
  with pytest.raises(SystemExit, match="--target: expected a folder"):
    run.main(["--folder", str(tmp_path)])
