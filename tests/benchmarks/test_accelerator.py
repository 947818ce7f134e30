"""benchmarks/accelerator.py as a program, at the tiny size."""

import json
import os
import subprocess
import sys

import pytest
from conftest import xla_flags

pytestmark = pytest.mark.slow

FORBIDDEN = ("tensorflow", "seqio", "gin")
# torch is hidden, because the test checks that the comparison with it is skipped.
PROGRAM = """
import runpy, sys
sys.modules["torch"] = None
program = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_path(program, run_name="__main__")
print("forbidden:", [name for name in {names!r} if name in sys.modules])
"""


def run(repository, folder, *flags):
  program = repository / "benchmarks" / "accelerator.py"
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      PROGRAM.format(names=FORBIDDEN),
      str(program),
      "--tiny",
      "--results",
      str(folder),
      *flags,
    ],
    capture_output=True,
    text=True,
    env={
      **os.environ,
      "XLA_FLAGS": xla_flags(1),
      "PYTHONPATH": os.pathsep.join([str(program.parent), str(repository)]),
    },
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_tiny_run_measures_every_figure(repository, tmp_path):
  output = run(repository, tmp_path)
  lines = (tmp_path / "accelerator.jsonl").read_text().splitlines()
  rows = {(row["case"], row["figure"]): row for row in map(json.loads, lines)}
  alone, both = "tiny, bfloat16, 1 row", "tiny, bfloat16, 2 rows"
  assert {
    ("the device", "bandwidth, GB/s"),
    ("tiny, bfloat16, 2 x 8", "slice of an update, ms"),
    (alone, "kernels per plain step"),
    (alone, "feeding 4, over feeding 1"),
    *(
      (case, figure)
      for case in (alone, both)
      for figure in (
        "plain, ms/token",
        "plain over the bound",
        "K 3, over plain",
        "draft step over plain step (c)",
      )
    ),
  } <= rows.keys()
  assert rows[alone, "kernels per plain step"]["value"] > 20
  assert rows[alone, "feeding 1, over feeding 1"]["value"] == 1
  assert "not compared with Hugging Face" in output
  assert "forbidden: []" in output


def test_cases_beyond_the_time_limit_are_reported_and_skipped(repository, tmp_path):
  output = run(repository, tmp_path, "--seconds", "0")
  assert "skipped, time is up: serving of tiny, bfloat16, 1 row" in output
  assert "plain, ms/token" not in (tmp_path / "accelerator.jsonl").read_text()
