"""Pages of results show the committed rows."""

import re

import figures
import pytest
import write_readme


@pytest.mark.parametrize("theme", figures.THEMES)
@pytest.mark.parametrize("name", figures.DRAWN)
def test_committed_pictures_are_drawn_from_the_committed_rows(name, theme):
  text = (figures.FIGURES / f"{name}.{theme}.svg").read_text()
  assert f"{figures.DRAWN[name][1]} {figures.source_hash(name)}" in text, (
    "drawn from other rows: make figures"
  )


def test_pictures_are_drawn_the_same_again_and_every_one_is_shown(repository, tmp_path):
  first = {path.name: path.read_text() for path in figures.draw("stability", tmp_path)}
  for path in figures.draw("stability", tmp_path):
    assert path.read_text() == first[path.name]
  page = "".join(path.read_text() for path in (repository / "docs").glob("*.md"))
  expected = {f"{name}.{theme}" for name in figures.DRAWN for theme in figures.THEMES}
  assert set(re.findall(r"figures/(\w+\.\w+)\.svg#only-", page)) == expected


def test_committed_pages_show_the_committed_rows():
  rows = [
    row for x in write_readme.RESULTS.glob("*.jsonl") for row in write_readme.read(x)
  ]
  assert len(write_readme.shown_rows(rows)) == len(write_readme.SHOWN)
  page = (write_readme.HERE / "README.md").read_text()
  assert write_readme.page(write_readme.RESULTS) == page, (
    "run python benchmarks/write_readme.py"
  )
  by_machine = write_readme.by_machine(
    write_readme.read(write_readme.RESULTS / "ahead_of_time.jsonl")
  )
  text = write_readme.PAGE.read_text()
  assert write_readme.with_table(text, by_machine) == text


def test_every_result_has_a_command_one_value_and_one_commit(repository):
  lines = (repository / "experiments" / "README.md").read_text().splitlines()
  tables = [[x.strip() for x in x.strip("|").split("|")] for x in lines if x[:1] == "|"]
  rows = [row for row in tables if row[0] != "experiment" and "---" not in row[0]]
  results = [row for row in rows if len(row) == 6]
  assert len(results) > 50
  assert {row[0] for row in results} <= {row[0] for row in rows if len(row) == 4}
  for *_, value, _, commit in results:
    assert re.fullmatch(r"-?[\d,]*\.?\d+|never", value), value
    assert re.fullmatch(r"[0-9a-f]{7}", commit), commit
