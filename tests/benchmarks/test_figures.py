"""The figures of docs/results.md are drawn from the committed rows."""

import re

import figures
import numpy as np
import pytest


@pytest.mark.parametrize("theme", figures.THEMES)
@pytest.mark.parametrize("name", figures.DRAWN)
def test_committed_figures_match_the_committed_rows(name, theme):
  text = (figures.FIGURES / f"{name}.{theme}.svg").read_text()
  assert f"{figures.DRAWN[name][1]} {figures.source_hash(name)}" in text, (
    "drawn from other rows: make figures"
  )


def test_pages_of_results_show_exactly_the_drawn_figures(repository):
  names = ("results.md", "real_model.md", "open_questions.md")
  pages = (repository / "docs" / name for name in names)
  page = "".join(path.read_text() for path in pages)
  shown = set(re.findall(r"figures/(\w+\.\w+)\.svg#only-(?:light|dark)", page))
  expected = {f"{name}.{theme}" for name in figures.DRAWN for theme in figures.THEMES}
  assert shown == expected and len(figures.DRAWN) <= 12


def test_drawing_is_deterministic(tmp_path):
  for path in figures.draw("learning_latency", tmp_path):
    again = path.read_text()
    assert again == (figures.draw("learning_latency", tmp_path) and path.read_text())
    assert "<text" in again and "p99" in again  # text is not converted to paths


def test_trailing_means_restart_at_a_shift():
  values = [1.0] * 30 + [0.0] * 30
  means = figures.trailing(values, [(0, "a"), (30, "b")])
  assert means[29] == 1.0 and means[35] == means[59] == 0.0
  assert np.isnan(means[[0, 4, 30, 34]]).all()  # the line has a gap at a shift


def test_time_saved_is_relative_to_the_total_of_plain_decoding():
  plain = {"cumulated_seconds": [5.0, 10.0]}
  row = {"cumulated_seconds": [4.0, 5.0], "block_ends": [100, 200]}
  places, share = figures.saved(plain, row)
  assert places == [0, 100, 200] and share.tolist() == [0, 10, 50]


def test_lines_of_the_demo_are_drawn_from_its_own_rows():
  row = {"question": "variance", "stream": "sharp", "system": "floor"}
  rows = [
    row | {"pair": pair, "tokens_per_call": value}
    for pair, value in (("demo", 3.0), ("another", 9.0), ("demo", 4.0))
  ]
  assert figures._by_stream(rows, "variance") == {"sharp": {"floor": [3.0, 4.0]}}
