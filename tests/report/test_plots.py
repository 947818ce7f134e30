"""Plots show the values of the rows, and omit values that were not measured."""

import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from report import synthetic_run

from osd_jax.report import plots

pytest.importorskip("matplotlib", reason="the extra [plots] is not installed")


def _png_size(path):
  data = path.read_bytes()
  assert data.startswith(b"\x89PNG\r\n\x1a\n")
  head = data[12:29]
  assert struct.unpack(">I", data[29:33])[0] == zlib.crc32(head)
  return struct.unpack(">II", head[4:12])


SERVED = list(plots.PLOTS)[:9]  # the plots of an online run


def test_full_run_gives_valid_pngs(tmp_path):
  paths = plots.draw_plots(synthetic_run.rows(120), tmp_path / "plots")
  assert [path.stem for path in paths] == SERVED
  for path in paths:
    width, height = _png_size(path)
    assert width >= 1200 and height >= 500


def test_overlap_plot_shows_trailing_means_and_shifts():
  rows = synthetic_run.rows(120)
  axes = plots.overlap(rows).axes[0]
  lines = {line.get_label(): line for line in axes.get_lines()}
  requests = [row for row in rows if row["kind"] == "request"]
  for name, field in (("online draft", "overlap"), ("frozen draft", "floor_overlap")):
    values = [row[field] for row in requests]
    assert lines[name].get_ydata()[-1] == pytest.approx(np.mean(values[-25:]))
  marks = [ln for ln in axes.get_lines() if len(set(ln.get_xdata())) == 1]
  # Each of the four topics has 30 of the 120 requests.
  assert [mark.get_xdata()[0] for mark in marks] == [29.5, 59.5, 89.5]
  assert [text.get_text() for text in axes.texts] == list(synthetic_run.TOPICS)


def legend(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


def online_line(axes):
  (line,) = (ln for ln in axes.get_lines() if ln.get_label() == "online draft")
  return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_trailing_mean_restarts_at_a_shift():
  """The trailing mean restarts, so the last topic does not affect the next one."""
  rows = [
    {
      "kind": "request",
      "index": i,
      "source": "a" if i < 40 else "b",
      "overlap": 0.9 if i < 40 else 0.3,
    }
    for i in range(80)
  ]
  _, means = online_line(plots.overlap(rows).axes[0])
  assert set(np.round(means[np.isfinite(means)], 6)) == {0.9, 0.3}
  gap = np.flatnonzero(np.isnan(means))
  assert 40 in gap  # the line is interrupted between the topics


def test_pauses_are_shaded_and_interrupt_the_loss_line():
  rows = synthetic_run.rows(200)
  figure = plots.update_loss(rows)
  spans = list(figure.axes[0].patches)
  assert len(spans) == len(synthetic_run.TOPICS)  # one pause per topic
  assert "learning paused" in legend(figure.axes[0])
  (line,) = (
    ln
    for ln in figure.axes[0].get_lines()
    if ln.get_linestyle() == "-" and len(ln.get_xdata()) > 5
  )
  x = np.asarray(line.get_xdata())
  for span in spans:
    left, right = span.get_x(), span.get_x() + span.get_width()
    inside = np.flatnonzero((x[:-1] < left) & (x[1:] > right))
    assert not len(inside)  # the line is interrupted during a pause
  without = [{**row, "paused": False} for row in rows]
  assert not plots.overlap(without).axes[0].patches


def test_latency_bars_are_percentiles_of_the_requests():
  rows = synthetic_run.rows(200)
  plain = [r["online_ms_per_token"] for r in rows if "online_ms_per_token" in r]
  figure = plots.latency(rows)
  heights = [bar.get_height() for bar in figure.axes[0].containers[-1]]
  np.testing.assert_allclose(heights, np.percentile(plain, [50, 95, 99]))


def test_every_topic_has_its_own_panel():
  figure = plots.per_position(synthetic_run.rows(200))
  titles = [axes.get_title() for axes in figure.axes]
  assert titles == list(synthetic_run.TOPICS)


def test_shares_of_rounds_sum_to_one():
  figure = plots.rounds(synthetic_run.rows(80))
  for bars in figure.axes[0].containers:
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)


TRAINED = [
  {"kind": "step", "step": 20, "loss": 2.0, "skipped": 0},
  {"kind": "step", "step": 40, "loss": None, "skipped": 1},
  {"kind": "evaluation", "step": 0, "tasks": {"sql": {"exact_match": 0.1}}},
  {"kind": "evaluation", "step": 40, "tasks": {"sql": {"exact_match": 0.4}}},
]
MEASURED = [
  {"kind": "draft", "task": "sql", "draft": "first", "distribution_overlap": 0.4},
  {"kind": "draft", "task": "sql", "draft": "new", "distribution_overlap": 0.6},
  {"kind": "speed", "rows": 1, "draft": "first", "speed_up": 1.2},
  {
    "kind": "certificate",
    "draft": "new",
    "outputs": 4,
    "equal": 3,
    "near_ties": 1,
    "passed": False,
  },
]


@pytest.mark.parametrize(
  ("rows", "names"),
  [
    (TRAINED, ["training_loss", "held_out"]),
    (MEASURED, ["drafts", "speeds", "certificate"]),
  ],
)
def test_other_commands_have_their_own_plots(tmp_path, rows, names):
  paths = plots.draw_plots(rows, tmp_path)
  assert [path.stem for path in paths] == names


def test_bars_and_lines_show_the_values_of_the_rows():
  heights = [bars[0].get_height() for bars in plots.drafts(MEASURED).axes[0].containers]
  assert heights == [0.4, 0.6]
  texts = [t.get_text() for t in plots.certificate(MEASURED).axes[0].texts]
  assert texts == ["3 of 4, 1 near ties  NOT EXACT"]
  line = plots.held_out(TRAINED).axes[0].get_lines()[0]
  np.testing.assert_allclose(line.get_ydata(), [0.1, 0.4])


def test_comparison_draws_every_run_in_every_panel(tmp_path):
  runs = {name: synthetic_run.rows(80, seed) for seed, name in enumerate("ab")}
  path = plots.draw_comparison(runs, tmp_path / "c.png")
  assert _png_size(path)[0] >= 1200
  figure = plots._comparison(runs)
  assert [len(axes.get_lines()) for axes in figure.axes] == [2, 2, 2]


def test_unmeasured_values_are_not_drawn(tmp_path):
  rows = [
    {"kind": "request", "index": i, "source": "a", "overlap": 0.5} for i in range(3)
  ]
  paths = plots.draw_plots(rows, tmp_path)
  assert [path.stem for path in paths] == ["distribution_overlap"]
  names = [t.get_text() for t in plots.overlap(rows).axes[0].get_legend().get_texts()]
  assert names == ["online draft"]
  assert plots.draw_plots([], tmp_path) == []


def test_outliers_are_cut_off_and_counted():
  axes = plots.milliseconds(synthetic_run.rows(200)).axes[0]
  assert axes.get_ylim()[1] < 30  # the row of 90 ms is above
  (hidden,) = re.findall(r"(\d+) dots above", axes.get_xlabel())
  assert int(hidden) >= 1


def test_skipped_updates_are_marked():
  axes = plots.update_loss(synthetic_run.rows(800)).axes[0]
  assert "skipped, not finite" in legend(axes)
  assert "skipped, not finite" not in legend(
    plots.update_loss(synthetic_run.rows(80)).axes[0]
  )


def test_run_without_matplotlib_continues_with_a_note(tmp_path):
  code = (
    "import sys; sys.modules['matplotlib'] = None\n"
    "from osd_jax.report import plots\n"
    f"print(plots.draw_plots_if_available([], {str(tmp_path)!r}))\n"
    f"plots.draw_plots([], {str(tmp_path)!r})"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert out.stdout.startswith("([], 'Plots were left out: ")
  assert out.returncode == 1 and "pip install osd-jax[plots]" in out.stderr


def test_importing_runs_and_report_loads_no_plotting_library():
  code = (
    "import sys, osd_jax.report.page, osd_jax.runs\n"
    "print([m for m in ('matplotlib', 'tensorboardX') if m in sys.modules])"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "[]"


def test_saved_time_is_drawn_with_a_line_at_zero():
  rows = synthetic_run.rows(120)
  axes = plots.saved(rows).axes[0]
  zero, saved = axes.get_lines()[-2:]
  assert set(zero.get_ydata()) == {0.0}
  requests = [row["saved_seconds"] for row in rows if row["kind"] == "request"]
  assert saved.get_ydata().tolist() == requests
  unpriced = [{**row, "saved_seconds": None} for row in rows]
  assert plots.saved(unpriced) is None


COMPILED = [
  {"kind": "memory", "what": "target", "gigabytes_a_chip": 12.0},
  {"kind": "memory", "what": "caches and rows", "gigabytes_a_chip": 8.5},
  {"kind": "fits", "needed_gb": 20.5, "memory_gb": 16.0, "advice": "less"},
  *(
    {
      "kind": "estimate",
      "acceptance": rate,
      "plain_tokens_s": 100.0,
      "frozen_tokens_s": 100 * (1 + rate),
      "online_tokens_s": 90 * (1 + rate),
    }
    for rate in (0.5, 0.9)
  ),
]


def test_compiled_run_has_plots_of_memory_and_speed(tmp_path):
  paths = plots.draw_plots(COMPILED, tmp_path)
  assert [path.stem for path in paths] == ["memory_of_a_chip", "tokens_per_second"]
  (axes,) = plots.chip_memory(COMPILED).axes
  assert [bar.get_width() for bar in axes.patches] == [12.0, 8.5]
  assert [line.get_xdata()[0] for line in axes.get_lines()] == [16.0]  # does not fit
  (axes,) = plots.chip_speeds(COMPILED).axes
  assert [list(line.get_ydata()) for line in axes.get_lines()][2] == [100.0, 100.0]
  assert legend(axes) == ["online", "frozen", "plain"]


def test_memory_limit_is_drawn_only_if_the_program_does_not_fit():
  """The line of a chip far larger than the program would make the bars tiny."""
  fits = {"kind": "fits", "needed_gb": 20.5, "memory_gb": 80.0, "advice": ""}
  rows = [row for row in COMPILED if row["kind"] == "memory"] + [fits]
  assert not plots.chip_memory(rows).axes[0].get_lines()
  assert plots.chip_speeds(rows) is None
