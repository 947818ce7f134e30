"""The tables of experiments/README.md have one value and one commit per row."""

import re

import pytest

COMMIT = re.compile(r"[0-9a-f]{7}")
VALUE = re.compile(r"-?[\d,]*\.?\d+|never")
ALL = "| rules | coupling, T = 1 | | .712 | | 208bef6 |"


def cells(line):
  return [cell.strip() for cell in line.strip().strip("|").split("|")]


def has_one_value_and_commit(line):
  """Returns whether a row of results has one value and one commit."""
  *_, got, _, commit = cells(line)
  return bool(VALUE.fullmatch(got) and COMMIT.fullmatch(commit))


def test_every_row_has_one_value_and_one_commit(repository):
  lines = (repository / "experiments" / "README.md").read_text().splitlines()
  rows = [line for line in lines if line.startswith("|") and len(cells(line)) == 6]
  results = [row for row in rows if not row.startswith(("| experiment |", "|---"))]
  assert len(results) > 50
  assert [row for row in results if not has_one_value_and_commit(row)] == []
  commands = {cells(line)[0] for line in lines if len(cells(line)) == 4}
  assert {cells(row)[0] for row in results} <= commands


@pytest.mark.parametrize(
  ("old", "new"), [(".712", ".712 (before: .719)"), ("208bef6", "208bef6, b3d1533")]
)
def test_rows_with_two_values_or_commits_are_detected(old, new):
  """Negative control of the test above."""
  assert has_one_value_and_commit(ALL) and not has_one_value_and_commit(
    ALL.replace(old, new)
  )
