"""The tables of benchmarks/README.md."""

import json

import pytest
import write_readme

ROWS = [
  {
    "benchmark": "greedy",
    "case": "tiny, 1 row",
    "figure": "ours over HF float32",
    "value": 0.31,
    "asked": "<= 0.52",
    "clock": "cpu, 1 thread(s)",
  },
  {
    "benchmark": "greedy",
    "case": "tiny, 1 row",
    "figure": "speed-up",
    "value": 1.7,
    "asked": ">= 2",
    "clock": "cpu, 1 thread(s)",
  },
  {
    "benchmark": "greedy",
    "case": "tiny, 1 row",
    "figure": "break-even, requests",
    "value": float("inf"),
  },
]


def write(folder, name, rows):
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / f"{name}.jsonl").write_text(text)


def readme(folder):
  output = folder / "README.md"
  write_readme.main(["--results", str(folder), "--output", str(output)])
  return output.read_text()


def noted(folder, **changes):
  """Writes the note of a machine; returns how tables of its rows are introduced."""
  note = {"cores": 2, "cpu": "x", "jax": "1", "commit": "0000000", "date": "d"}
  note.update(changes)
  (folder / write_readme.NOTE).write_text(json.dumps(note))
  return f"2 cores of {note['cpu']}, jax 1, {note['date']}, commit {note['commit']}"


def tables_of(text):
  """(the line that introduces it, its rows) of every table of a page."""
  lines, found = text.splitlines(), []
  for place, line in enumerate(lines):
    if line.startswith("|---"):
      count = next(i for i, other in enumerate(lines[place + 1 :]) if other[:1] != "|")
      found.append((lines[place - 3], lines[place + 1 : place + 1 + count]))
  return found


def test_the_page_says_what_was_asked_and_what_was_got(tmp_path):
  write(tmp_path, "greedy", ROWS)
  text = readme(tmp_path)
  lines = text.splitlines()
  for expected in (
    "ours over HF float32 | 0.31 (<= 0.52: met)",
    "speed-up | 1.7 (>= 2: **missed**)",
    "break-even, requests | never in this run",
  ):
    assert f"| {expected} |" in lines
  assert "`python benchmarks/bench_greedy.py [" in text
  assert write_readme.BOUNDS["greedy"] in text


def test_what_was_missed_comes_first_and_what_was_not_asked_for_not_at_all(tmp_path):
  write(tmp_path, "greedy", ROWS)
  (_, missed), (_, met), *_ = tables_of(readme(tmp_path))
  named = "| [greedy](#greedy) | tiny, 1 row | "
  clock = " | cpu, 1 thread(s) |"
  assert missed == [f"{named}speed-up | >= 2 | 1.7 | **missed**{clock}"]
  assert met == [f"{named}ours over HF float32 | <= 0.52 | 0.31 | met{clock}"]


def test_a_value_that_cannot_be_is_never_met(tmp_path):
  share = {**ROWS[0], "figure": "records, share of a round", "value": -0.07}
  seconds = {**ROWS[0], "figure": "compiling prepare, s", "value": -1.0, "asked": ""}
  write(tmp_path, "greedy", [share, seconds])
  text = readme(tmp_path)
  assert "records, share of a round | <= 0.52 | within noise | within noise |" in text
  assert "| records, share of a round | within noise |" in text
  assert "| compiling prepare, s | within noise |" in text
  assert "| -1 |" not in text and "-0.07" not in text and "| met |" not in text


def test_what_may_be_negative_is_shown(tmp_path):
  """Negative control: not everything below zero is noise."""
  lost = {**ROWS[0], "figure": "lost acceptance", "value": -0.07}
  write(tmp_path, "greedy", [lost])
  assert "lost acceptance | <= 0.52 | -0.07 | met |" in readme(tmp_path)


def test_the_machine_is_the_one_noted_before_the_run(tmp_path):
  write(tmp_path, "greedy", ROWS)
  write_readme.main(["--note", "--results", str(tmp_path)])
  note = json.loads((tmp_path / write_readme.NOTE).read_text())
  assert set(note) == {"cores", "cpu", "jax", "commit", "date"}
  introduced = noted(tmp_path, cpu="an abacus", date="2020-02-20")
  assert all(line.startswith(introduced) for line, _ in tables_of(readme(tmp_path)))


@pytest.mark.parametrize("other", [{"cpu": "y"}, {"commit": "1111111"}])
def test_rows_of_two_machines_or_commits_are_never_in_one_table(tmp_path, other):
  introduced = noted(tmp_path)
  write(tmp_path, "greedy", [*ROWS, *({**row, **other} for row in ROWS)])
  found = tables_of(readme(tmp_path))
  assert len(found) == 8  # missed, met, and all by clock, of both
  ours = sorted(line.startswith(introduced) for line, _ in found)
  assert ours == [False] * 4 + [True] * 4
  assert all(len(rows) == len(set(rows)) for _, rows in found)


def test_rows_of_one_run_are_in_one_table(tmp_path):
  """Negative control of the test above."""
  noted(tmp_path)
  write(tmp_path, "greedy", [*ROWS, *ROWS])
  assert len(tables_of(readme(tmp_path))) == 4  # missed, met, and all by clock


def test_cases_are_columns_and_what_they_say_alike_stands_above(tmp_path):
  introduced = noted(tmp_path)
  rows = [
    {"case": f"tiny, K 3, {count} rows", "figure": figure, "value": count * share}
    for count in (1, 2)
    for figure, share in (("plain, ms", 1.5), ("round, ms", 2.25), ("rest, ms", 0.5))
  ]
  write(tmp_path, "batching", rows)
  text = readme(tmp_path)
  assert f"{introduced}; tiny, K 3:\n\n| figure | 1 rows | 2 rows |" in text
  assert "| round, ms | 2.25 | 4.5 |" in text
  more = [{**row, "case": f"{row['case']}, {more}"} for row in rows for more in "abc"]
  write(tmp_path, "batching", more)  # more cases than figures: turned round
  text = readme(tmp_path)
  assert "| case | plain, ms | round, ms | rest, ms |" in text
  assert "| 2 rows, c | 3 | 4.5 | 1 |" in text


def test_rows_may_name_their_own_hardware(tmp_path):
  write(tmp_path, "accelerator", [{**ROWS[0], "hardware": "one card"}])
  assert "\none card, commit" in readme(tmp_path)


def test_a_benchmark_without_a_program_is_still_shown(tmp_path):
  write(tmp_path, "unheard_of", ROWS)
  assert "python benchmarks/bench_unheard_of.py" in readme(tmp_path)


@pytest.mark.parametrize(
  ("value", "asked", "expected"),
  [
    (2.0, "<= 2", write_readme.MET),
    (2.1, "<= 2, at one row", write_readme.MISSED),
    (3.0, ">= 2.5", write_readme.MET),
    (float("inf"), "<= 1e3", write_readme.MISSED),
    (float("nan"), "<= 1e3", write_readme.NOISE),
    (-0.01, "<= 2", write_readme.NOISE),
    (0.0, "0", write_readme.MET),
    (1.0, "0", write_readme.MISSED),
    (1.09, "1", write_readme.MET),
    (1.11, "1", write_readme.MISSED),
    (3.0, "reported", ""),
    (3.0, "", ""),
  ],
)
def test_verdict(value, asked, expected):
  row = {"figure": "a share", "value": value, "asked": asked}
  assert write_readme.verdict(row) == expected


def test_numbers_are_short():
  written = [write_readme.number(x) for x in (0.0, 0.00123456, 0.5, 12345.6, 3e9)]
  assert written == ["0", "0.00123", "0.5", "12,346", "3e+09"]


def test_the_page_of_results_has_the_table_of_the_rows():
  made = write_readme.by_machine(
    write_readme.read(write_readme.RESULTS / "ahead_of_time.jsonl")
  )
  text = write_readme.PAGE.read_text()
  assert write_readme.with_table(text, made) == text
  with pytest.raises(ValueError, match="the page has no"):
    write_readme.with_table("no marks", made)


def test_a_machine_is_a_row_and_a_pair_a_column():
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
