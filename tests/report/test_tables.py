"""Tables show every column and every number in full at any width."""

import io

import pytest
import rich.console

from osd_jax.report import tables

WIDE = [
  {
    "task": "generated_python",
    "draft": "adapted_draft",
    **{f"a long heading {i}": 1000.125 + i for i in range(12)},
    "nothing": None,
  }
]


def shown(table, width, title=""):
  stream = io.StringIO()
  console = rich.console.Console(file=stream, width=width)
  tables.print_table(table, console, title)
  return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_numbers_are_complete_and_lines_fit(width):
  text = shown(WIDE, width, "Speed")
  assert max(map(len, text.splitlines())) <= width
  for i in range(12):
    assert str(1000.125 + i) in text
  assert text.lstrip().startswith("Speed")


def test_columns_become_rows_if_they_do_not_fit():
  rows = [line.split() for line in shown(WIDE * 2, 80).splitlines()]
  assert ["a", "long", "heading", "3", "1003.125", "1003.125"] in rows
  assert "1003.125" in shown(WIDE, 200).splitlines()[-1]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_figures_of_many_drafts_fit_and_no_heading_is_broken(count):
  """As of `osd evaluate`: tasks and drafts with long names, on 80 columns."""
  table = [
    {
      "task": f"generated_python_{number}",
      "draft": "demo_attached_draft",
      "distribution overlap upper": 0.125,
      "draft acceptance rate": 0.25,
      "tokens per target call": 2.0 + number,
    }
    for number in range(count)
  ]
  text = shown(table, 80, "Drafts")
  assert max(map(len, text.splitlines())) <= 80
  for number in range(count):
    assert f"generated_python_{number}" in text and str(2.0 + number) in text
  words = " ".join(table[0]).split()
  assert set(words) <= set(text.split())


def test_numbers_are_right_aligned_text_left_and_none_is_a_dash():
  lines = shown([{"a": "x", "b": 1}, {"a": "long", "b": None}], 80).splitlines()
  rows = [line.rstrip() for line in lines if line.strip()][-2:]
  assert rows[0].startswith("x ") and rows[0].endswith(" 1")
  assert rows[1].startswith("long") and rows[1].endswith(" -")
  assert shown([], 80) == ""
