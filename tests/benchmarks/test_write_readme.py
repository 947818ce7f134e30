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


def test_the_page_says_what_was_asked_and_whether_it_is_met(tmp_path):
  write(tmp_path, "greedy", ROWS)
  text = readme(tmp_path)
  lines = text.splitlines()
  for expected in (
    "ours over HF float32 | 0.31 | <= 0.52 | yes | cpu, 1 thread(s)",
    "speed-up | 1.7 | >= 2 | **no** | cpu, 1 thread(s)",
    "break-even, requests | never in this run |  |  | ",
  ):
    assert f"| tiny, 1 row | {expected} |" in lines
  assert "`python benchmarks/bench_greedy.py [" in text
  assert write_readme.BOUNDS["greedy"] in text


def test_the_machine_is_the_one_noted_before_the_run(tmp_path):
  write(tmp_path, "greedy", ROWS)
  write_readme.main(["--note", "--results", str(tmp_path)])
  note = tmp_path / write_readme.NOTE
  found = json.loads(note.read_text())
  assert set(found) == {"cores", "cpu", "jax", "commit", "date"}
  note.write_text(json.dumps({**found, "cpu": "an abacus", "date": "2020-02-20"}))
  assert "of an abacus, jax" in readme(tmp_path)
  assert "2020-02-20" in readme(tmp_path)


def test_a_row_keeps_the_commit_that_it_was_measured_at(tmp_path):
  later = {**ROWS[1], "commit": "abc1234"}
  note = {"cores": 2, "cpu": "x", "jax": "1", "commit": "0000000", "date": "d"}
  (tmp_path / write_readme.NOTE).write_text(json.dumps(note))
  write(tmp_path, "greedy", [ROWS[0], later])
  assert "jax 1, d, commits 0000000, abc1234." in readme(tmp_path)
  write(tmp_path, "greedy", [later])
  assert "jax 1, d, commit abc1234." in readme(tmp_path)


def test_rows_may_name_their_own_hardware(tmp_path):
  write(tmp_path, "accelerator", [{**ROWS[0], "hardware": "one card"}])
  assert "Hardware: one card, commit" in readme(tmp_path)


def test_rows_of_two_machines_are_told_apart(tmp_path):
  note = {"cores": 2, "cpu": "x", "jax": "1", "commit": "0000000", "date": "d"}
  (tmp_path / write_readme.NOTE).write_text(json.dumps(note))
  write(tmp_path, "greedy", [ROWS[0], {**ROWS[1], "cpu": "y", "commit": "1111111"}])
  expected = "2 cores of x, jax 1, d, commit 0000000; 2 cores of y, jax 1, d, commit 1"
  assert expected in readme(tmp_path)


def test_a_benchmark_without_a_program_is_still_shown(tmp_path):
  write(tmp_path, "unheard_of", ROWS)
  assert "python benchmarks/bench_unheard_of.py" in readme(tmp_path)


@pytest.mark.parametrize(
  ("value", "asked", "expected"),
  [
    (2.0, "<= 2", "yes"),
    (2.1, "<= 2, at one row", "**no**"),
    (3.0, ">= 2.5", "yes"),
    (float("inf"), "<= 1e3", "**no**"),
    (3.0, "reported", ""),
    (3.0, "", ""),
  ],
)
def test_met(value, asked, expected):
  assert write_readme.met(value, asked) == expected


def test_numbers_are_short():
  written = [write_readme.number(x) for x in (0.0, 0.00123456, 0.5, 12345.6, 3e9)]
  assert written == ["0", "0.00123", "0.5", "12,346", "3e+09"]
