"""Plots show the values of the rows, and omit values that were not measured."""

import dataclasses
import re
from xml.etree import ElementTree

import made_rows
import numpy as np
import pytest
from report import synthetic_run

from osd_jax.loop import rows as rows_lib
from osd_jax.report import plots

pytest.importorskip("matplotlib", reason="the extra [plots] is not installed")

SERVED = list(plots.PLOTS)[:6]  # the plots of an online run
overlap = plots.PLOTS["distribution_overlap"][0]


def names(drawn):
  return [plot.path.stem for plot in drawn]


def legend(axes):
  (shown,) = axes.figure.legends
  return [text.get_text() for text in shown.get_texts()]


def lines(axes):
  return {line.get_label(): line for line in axes.get_lines()}


def requests(rows):
  return rows_lib.of(rows_lib.Request, rows)


def test_full_run_gives_svgs_that_are_readable_on_a_phone(tmp_path):
  drawn, _ = plots.draw_plots(synthetic_run.rows(120), tmp_path / "plots")
  assert names(drawn) == SERVED
  for plot in drawn:
    root = ElementTree.fromstring(plot.path.read_text())
    width = float(root.attrib["viewBox"].split()[2])
    sizes = re.findall(r"font-size: ([\d.]+)px", plot.path.read_text())
    # At the 370 pixels of a phone, no label is smaller than 9 pixels.
    assert sizes and min(map(float, sizes)) * 370 / width > 9
    assert plot.caption


def test_same_rows_give_the_same_files_and_ids_differ_between_plots(tmp_path):
  first, _ = plots.draw_plots(synthetic_run.rows(60), tmp_path / "a")
  second, _ = plots.draw_plots(synthetic_run.rows(60), tmp_path / "b")
  texts = [plot.path.read_text() for plot in first]
  assert texts == [plot.path.read_text() for plot in second]
  used = [set(re.findall(r"url\(#(\w+)\)", text)) for text in texts]
  assert used[0] and not used[0] & used[1]


def test_dots_of_a_short_run_are_larger():
  short, long = (overlap(synthetic_run.rows(count)) for count in (40, 400))
  sizes = [
    [
      line.get_markersize()
      for line in figure.axes[0].get_lines()
      if line.get_marker() == "."
    ]
    for figure in (short, long)
  ]
  assert min(sizes[0]) >= 2 * max(sizes[1])


def test_overlap_plot_shows_trailing_means_and_shifts():
  rows = synthetic_run.rows(120)
  axes = overlap(rows).axes[0]
  for name, field in (("online draft", "overlap"), ("frozen draft", "floor_overlap")):
    values = [getattr(row, field) for row in requests(rows)]
    assert lines(axes)[name].get_ydata()[-1] == pytest.approx(np.mean(values[-25:]))
  marks = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]
  # Each of the four topics has 30 of the 120 requests.
  assert [mark.get_xdata()[0] for mark in marks] == [29.5, 59.5, 89.5]
  assert [text.get_text() for text in axes.texts] == list(synthetic_run.TOPICS)


def test_trailing_mean_restarts_at_a_shift():
  """The trailing mean restarts, so the last topic does not affect the next one."""
  rows = [
    made_rows.request(i, source="ab"[i >= 40], overlap=level)
    for i, level in enumerate([0.9] * 40 + [0.3] * 40)
  ]
  means = lines(overlap(rows).axes[0])["online draft"].get_ydata()
  assert set(np.round(means[np.isfinite(means)], 6)) == {0.9, 0.3}
  assert np.isnan(means[40])  # the line is interrupted between the topics


def test_pauses_are_shaded_and_interrupt_the_loss_line():
  rows = synthetic_run.rows(200)
  axes = plots.update_loss(rows).axes[0]
  spans = list(axes.patches)
  assert len(spans) == len(synthetic_run.TOPICS)  # one pause per topic
  assert "learning paused" in legend(axes)
  (line,) = (
    line
    for line in axes.get_lines()
    if line.get_linestyle() == "-" and len(line.get_xdata()) > 5
  )
  x = np.asarray(line.get_xdata())
  for span in spans:
    left, right = span.get_x(), span.get_x() + span.get_width()
    assert not np.any((x[:-1] < left) & (x[1:] > right))
  without = [dataclasses.replace(row, paused=False) for row in requests(rows)]
  assert not overlap(without).axes[0].patches


def test_every_topic_has_its_own_panel():
  figure = plots.per_position(synthetic_run.rows(200))
  titles = [axes.get_title() for axes in figure.axes]
  assert titles == list(synthetic_run.TOPICS)


TRAINED = [
  rows_lib.Step(step=20, loss=2.0, skipped=0),
  rows_lib.Step(step=40, loss=np.nan, skipped=1),
  rows_lib.Evaluation(step=0, tasks={"sql": {"exact_match": 0.1}}),
  rows_lib.Evaluation(step=40, tasks={"sql": {"exact_match": 0.4}}),
]
MEASURED = [
  made_rows.draft("first", 0.4),
  made_rows.draft("new", 0.6),
  made_rows.speed(),
]


@pytest.mark.parametrize(
  ("rows", "expected"),
  [
    (TRAINED, ["training_loss", "held_out"]),
    (MEASURED, ["drafts", "speeds"]),
    ([], []),
  ],
)
def test_other_commands_have_their_own_plots(tmp_path, rows, expected):
  assert names(plots.draw_plots(rows, tmp_path)[0]) == expected


def test_bars_and_lines_show_the_values_of_the_rows():
  heights = [bars[0].get_height() for bars in plots.drafts(MEASURED).axes[0].containers]
  assert heights == [0.4, 0.6]
  line = plots.held_out(TRAINED).axes[0].get_lines()[0]
  np.testing.assert_allclose(line.get_ydata(), [0.1, 0.4])


def test_comparison_draws_every_run_and_marks_the_topics(tmp_path):
  runs = {name: synthetic_run.rows(80, seed) for seed, name in enumerate("ab")}
  assert names(plots.draw_comparison(runs, tmp_path)[0]) == list(plots.COMPARED)
  for draw, _ in plots.COMPARED.values():
    axes = draw(runs).axes[0]
    bottom, top = axes.get_ylim()
    for line in (lines(axes)["a"], lines(axes)["b"]):  # no line leaves the axes
      assert bottom <= np.nanmin(line.get_ydata()) <= np.nanmax(line.get_ydata()) <= top
    assert legend(axes) == ["a", "b"] and not axes.patches
    assert [text.get_text() for text in axes.texts] == list(synthetic_run.TOPICS)


def test_unmeasured_values_are_not_drawn(tmp_path):
  rows = [made_rows.request(i) for i in range(3)]
  drawn = names(plots.draw_plots(rows, tmp_path)[0])
  assert "distribution_overlap" in drawn and not {"time_saved", "update_loss"} & {
    *drawn
  }
  assert legend(overlap(rows).axes[0]) == ["online draft"]


def test_outliers_are_cut_off_and_counted():
  axes = plots.milliseconds(synthetic_run.rows(200)).axes[0]
  assert axes.get_ylim()[1] < 30  # the row of 90 ms is above
  (hidden,) = re.findall(r"(\d+) dots above", axes.get_xlabel())
  assert int(hidden) >= 1


def test_skipped_updates_are_marked():
  axes = plots.update_loss(synthetic_run.rows(800)).axes[0]
  assert "skipped, not finite" in legend(axes)
  axes = plots.update_loss(synthetic_run.rows(80)).axes[0]
  assert "skipped, not finite" not in legend(axes)


def test_saved_time_is_drawn_against_both_rivals():
  rows = [
    dataclasses.replace(row, saved_plain_seconds=2 * row.saved_seconds)
    for row in requests(synthetic_run.rows(120))
  ]
  found = lines(plots.saved(rows).axes[0])
  frozen, plain = (
    found[f"against {rival}"].get_ydata()
    for rival in ("the frozen draft", "plain decoding")
  )
  assert frozen.tolist() == [row.saved_seconds for row in rows]
  assert (plain == 2 * frozen).all()
  unpriced = [dataclasses.replace(row, saved_seconds=None) for row in rows]
  assert plots.saved(unpriced) is None
