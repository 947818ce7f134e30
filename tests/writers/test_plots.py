"""Plots show what the rows hold, nothing where they hold nothing."""

import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from writers import synthetic_run

from osd_jax.writers import plots

pytest.importorskip("matplotlib", reason="the extra [plots] is not installed")


def _png_size(path):
  data = path.read_bytes()
  assert data.startswith(b"\x89PNG\r\n\x1a\n")
  head = data[12:29]
  assert struct.unpack(">I", data[29:33])[0] == zlib.crc32(head)
  return struct.unpack(">II", head[4:12])


def test_a_full_run_gives_six_readable_pngs(tmp_path):
  paths = plots.draw_plots(synthetic_run.rows(120), tmp_path / "plots")
  assert [path.stem for path in paths] == list(plots._PLOTS)
  for path in paths:
    width, height = _png_size(path)
    assert width >= 1200 and height >= 500


def test_lines_are_the_trailing_means_of_the_rows_and_shifts_are_marked():
  rows = synthetic_run.rows(120)
  axes = plots._overlap(rows).axes[0]
  lines = {line.get_label(): line for line in axes.get_lines()}
  requests = [row for row in rows if row["kind"] == "request"]
  for name, field in (("online draft", "overlap"), ("frozen draft", "floor_overlap")):
    values = [row[field] for row in requests]
    assert lines[name].get_ydata()[-1] == pytest.approx(np.mean(values[-25:]))
  marks = [ln for ln in axes.get_lines() if len(set(ln.get_xdata())) == 1]
  assert [mark.get_xdata()[0] for mark in marks] == [29.5, 59.5, 89.5]
  assert [text.get_text() for text in axes.texts] == list(synthetic_run.TOPICS)


def test_nothing_is_drawn_of_what_was_not_measured(tmp_path):
  rows = [
    {"kind": "request", "index": i, "source": "a", "overlap": 0.5} for i in range(3)
  ]
  paths = plots.draw_plots(rows, tmp_path)
  assert [path.stem for path in paths] == ["distribution_overlap"]
  names = [t.get_text() for t in plots._overlap(rows).axes[0].get_legend().get_texts()]
  assert names == ["online draft"]
  assert plots.draw_plots([], tmp_path) == []


def test_an_outlier_does_not_flatten_the_curves_and_is_counted():
  axes = plots._milliseconds(synthetic_run.rows(200)).axes[0]
  assert axes.get_ylim()[1] < 30  # the row of 90 ms is above
  (hidden,) = re.findall(r"(\d+) dots above", axes.get_xlabel())
  assert int(hidden) >= 1


def test_skipped_updates_are_shown():
  axes = plots._loss(synthetic_run.rows(800)).axes[0]
  assert [t.get_text() for t in axes.get_legend().get_texts()] == [
    "skipped, not finite"
  ]
  assert plots._loss(synthetic_run.rows(80)).axes[0].get_legend() is None


def test_without_matplotlib_a_run_goes_on_and_says_so(tmp_path):
  code = (
    "import sys; sys.modules['matplotlib'] = None\n"
    "from osd_jax.writers import plots\n"
    "assert not plots.plots_available()\n"
    f"print(plots.draw_plots_if_available([], {str(tmp_path)!r}))\n"
    f"plots.draw_plots([], {str(tmp_path)!r})"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert out.stdout.startswith("([], 'Plots were left out: ")
  assert out.returncode == 1 and "pip install osd-jax[plots]" in out.stderr


def test_importing_the_writers_loads_no_plotting():
  code = (
    "import sys, osd_jax.writers\n"
    "print([m for m in ('matplotlib', 'tensorboardX', 'jax') if m in sys.modules])"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "[]"
