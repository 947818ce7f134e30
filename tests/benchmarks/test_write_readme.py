"""benchmarks/README.md and the table of accelerators in docs/results.md."""

import json

import pytest
import write_readme

BENCHMARK, CASE, FIGURE, CLOCK = write_readme.SHOWN[0]
ROW = {
  "benchmark": BENCHMARK,
  "case": CASE,
  "figure": FIGURE,
  "clock": CLOCK,
  "value": 0.31,
  "asked": "<= 0.52",
}


def page(folder, rows):
  """Writes the page for `rows` from an invented machine and returns its text."""
  note = {"cores": 2, "cpu": "abacus", "jax": "1", "commit": "0000000", "date": "d"}
  (folder / write_readme.NOTE).write_text(json.dumps(note))
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / f"{BENCHMARK}.jsonl").write_text(text)
  output = folder / "README.md"
  write_readme.main(["--results", str(folder), "--output", str(output)])
  return output.read_text()


def test_page_shows_value_goal_verdict_and_origin(tmp_path):
  text = page(tmp_path, [ROW])
  assert f"| {FIGURE} | <= 0.52 | 0.31 | met | 2 cores, abacus, 0000000 |" in text


def test_page_shows_the_newest_row_and_only_chosen_figures(tmp_path):
  rows = [ROW, {**ROW, "value": 0.6}, {**ROW, "figure": "another figure"}]
  text = page(tmp_path, rows)
  assert "| 0.6 | **missed** |" in text and "0.31" not in text
  assert "another figure" not in text


def test_page_lists_every_program_and_fits_two_screens(tmp_path):
  text = page(tmp_path, [ROW])
  assert all(
    f"bench_{name}.py" in text or f"{name}.py" in text for name in write_readme.BOUNDS
  )
  assert len(text.splitlines()) < 80


def test_committed_page_shows_the_committed_rows():
  rows = [
    row
    for path in write_readme.RESULTS.glob("*.jsonl")
    for row in write_readme.read(path)
  ]
  assert len(write_readme.shown_rows(rows)) == len(write_readme.SHOWN)
  assert (
    write_readme.page(write_readme.RESULTS)
    == (write_readme.HERE / "README.md").read_text()
  ), "run python benchmarks/write_readme.py"


def test_note_contains_machine_and_commit(tmp_path):
  write_readme.main(["--note", "--results", str(tmp_path)])
  note = json.loads((tmp_path / write_readme.NOTE).read_text())
  assert set(note) == {"cores", "cpu", "jax", "commit", "date"}


@pytest.mark.parametrize(
  ("value", "asked", "expected"),
  [
    (2.0, "<= 2", "met"),
    (2.1, "<= 2, at one row", "**missed**"),
    (3.0, ">= 2.5", "met"),
    (float("inf"), "<= 1e3", "**missed**"),
    (float("nan"), "<= 1e3", ""),
    (0.0, "0", "met"),
    (1.0, "0", "**missed**"),
    # A goal without a comparison sign allows a difference of 10 %.
    (1.09, "1", "met"),
    (1.11, "1", "**missed**"),
    (3.0, "reported", ""),
    (3.0, "", ""),
  ],
)
def test_verdict_compares_the_value_with_the_goal(value, asked, expected):
  assert write_readme.verdict({"value": value, "asked": asked}) == expected


def test_results_page_contains_the_table_of_the_committed_rows():
  made = write_readme.by_machine(
    write_readme.read(write_readme.RESULTS / "ahead_of_time.jsonl")
  )
  text = write_readme.PAGE.read_text()
  assert write_readme.with_table(text, made) == text
  with pytest.raises(ValueError, match="the page has no"):
    write_readme.with_table("no marks", made)


def test_accelerator_table_has_a_row_per_machine_and_a_column_per_pair():
  names = (
    "needed, GB a chip",
    "of a chip's, GB",
    "plain tokens/s, at most",
    "frozen tokens/s at 0.8, at most",
  )

  def cell(case, *values):
    pairs = zip(names, values, strict=False)
    return [{"case": case, "figure": name, "value": value} for name, value in pairs]

  made = write_readme.by_machine(
    cell("small, v5e:2x2=1", 3.0, 16.0, 1234.5, 2000.0)
    + cell("large, v5e:2x2=1", 25.3, 16.0)
    + cell("large, h100:1=1", 25.3, 80.0, 10.0, 20.0)
  )
  assert made.splitlines() == [
    "| machine | large | small |",
    "|---|---|---|",
    "| v5e:2x2=1 | 25.3 GB of 16: does not fit | 1,234 / 2,000 |",
    "| h100:1=1 | 10 / 20 |  |",
  ]
