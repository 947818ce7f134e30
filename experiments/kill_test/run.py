"""Kills an online run with SIGKILL at random moments and restarts it, many times.

The test checks that every restart succeeds, that no stored state is unreadable, and
that a killed run leaves exactly the same results as an uninterrupted one, bit for bit:
each request once, the updates, the alarms and the adapted draft.

  python experiments/kill_test/run.py [--kills 200] [--seed 0]
      [--draft independent] [--out runs/kill_test]

The run is `osd online` with the tiny pair (tests/tiny_online.py: 24 requests, an update
every 4, a checkpoint every 5). It is killed and restarted until it finishes; then a new
run starts, until the number of kills is reached. On average, one kill in four hits the
start (imports, restoring), one hits the writing of a checkpoint, and the others hit any
moment.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import rich.console
import rich.table
import safetensors.numpy

from osd_jax import runs

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tests" / "tiny_online.py"
# Endings of fields that depend on the clock.
TIMES = ("_ms", "_ms_per_token", "_seconds", "ahead_since")
PATIENCE = 900  # seconds to wait for progress of a process
DRAFTS = ("independent", "attached")
MOMENTS = ("start", "checkpoint", "anywhere", "anywhere")


@dataclasses.dataclass
class Tally:
  """Counts of kills, runs and faults."""

  kills: int = 0
  runs: int = 0
  restarts_failed: int = 0
  unreadable_states: int = 0
  lost_or_doubled_requests: int = 0
  differing_histories: int = 0
  differing_drafts: int = 0

  def faults(self) -> int:
    """Returns the total number of faults."""
    return sum(dataclasses.asdict(self).values()) - self.kills - self.runs


def start(out: pathlib.Path, draft: str, run: pathlib.Path) -> subprocess.Popen:
  """Starts the run as a process; its output goes to a log next to its directory."""
  paths = [str(REPOSITORY), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
  environment = {
    "JAX_COMPILATION_CACHE_DIR": str(out / "jax_cache"),
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # restarts compile nothing
  }
  command = [sys.executable, str(SCRIPT), str(out), str(run), draft]
  with open(run.with_suffix(".log"), "ab") as log:
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def requests_in(run: pathlib.Path) -> int:
  """Returns the number of requests that a run has logged so far."""
  log = run / "metrics.jsonl"
  return log.read_bytes().count(b'"kind": "request"') if log.exists() else 0


def writes_checkpoint(run: pathlib.Path) -> bool:
  """Returns whether a checkpoint is being written."""
  return any((run / "checkpoints").glob("*tmp*"))


def wait_until(process: subprocess.Popen, holds) -> None:
  """Waits for a condition or the end of the process, for at most `PATIENCE`."""
  end = time.monotonic() + PATIENCE
  while process.poll() is None and not holds():
    if time.monotonic() > end:
      raise RuntimeError(f"kill test: no progress for {PATIENCE} seconds")
    time.sleep(0.001)


def kill(process: subprocess.Popen, run: pathlib.Path, rng: random.Random) -> str:
  """Kills a process at a random moment.

  Returns the kind of moment, "" if the process ended before it.
  """
  moment, begun = rng.choice(MOMENTS), time.monotonic()
  try:
    if moment == "start":
      seconds = rng.uniform(0, 10)
      wait_until(process, lambda: time.monotonic() - begun > seconds)
    elif moment == "checkpoint":
      wait_until(process, lambda: writes_checkpoint(run))
      time.sleep(rng.uniform(0, 0.05))
    else:
      # A restart first truncates the log; start counting after that.
      size = requests_in(run)
      wait_until(process, lambda: requests_in(run) != size or size == 0)
      count = requests_in(run) + rng.randint(0, 8)
      wait_until(process, lambda: requests_in(run) >= count)
      time.sleep(rng.uniform(0, 0.03))
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
  return moment if process.returncode == -signal.SIGKILL else ""


def timeless(run: pathlib.Path, kind: str) -> list[dict]:
  """Returns the rows of a kind without the fields that depend on the clock."""
  return [
    {name: value for name, value in row.items() if not name.endswith(TIMES)}
    for row in runs.read(run / "metrics.jsonl")
    if row["kind"] == kind
  ]


def is_readable(run: pathlib.Path) -> bool:
  """Returns whether the log can be parsed and no checkpoint was found damaged."""
  try:
    timeless(run, "request") if (run / "metrics.jsonl").exists() else []
  except ValueError:
    return False
  return not any((run / "checkpoints").glob("unused_*"))


def same_draft(run: pathlib.Path, whole: pathlib.Path) -> bool:
  """Returns whether two runs left bit-identical drafts."""
  one, other = (
    safetensors.numpy.load_file(path / "draft.safetensors") for path in (run, whole)
  )
  return one.keys() == other.keys() and all(
    np.array_equal(one[name], other[name]) for name in one
  )


def compare(run: pathlib.Path, whole: pathlib.Path, tally: Tally) -> None:
  """Counts differences between a killed run and the uninterrupted one."""
  queries = sorted(row["query"] for row in timeless(run, "request"))
  expected = sorted(row["query"] for row in timeless(whole, "request"))
  tally.lost_or_doubled_requests += queries != expected
  kinds = ("request", "update", "alarm")
  tally.differing_histories += any(
    timeless(run, kind) != timeless(whole, kind) for kind in kinds
  )
  tally.differing_drafts += not same_draft(run, whole)


def survive(
  out: pathlib.Path, draft: str, whole: pathlib.Path, kills: int, rng: random.Random
) -> tuple[Tally, dict[str, int]]:
  """Kills and restarts until `kills` is reached and the last run has finished."""
  tally, moments = Tally(), dict.fromkeys(MOMENTS, 0)
  while tally.kills < kills:
    run = out / f"killed_{tally.runs:03d}"
    code = None
    while code is None:
      process = start(out, draft, run)
      if tally.kills < kills:
        moment = kill(process, run, rng)
      else:
        moment = ""
        process.wait(PATIENCE)
      if moment:
        tally.kills += 1
        moments[moment] += 1
        tally.unreadable_states += not is_readable(run)
      else:
        code = process.returncode
    tally.runs += 1
    if code:
      tally.restarts_failed += 1
      print(run.with_suffix(".log").read_text()[-2000:], file=sys.stderr)
    else:
      tally.unreadable_states += not is_readable(run)
      compare(run, whole, tally)
  return tally, moments


def main() -> int:
  """Runs the test; returns exit code 1 if there were faults."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0])
  parser.add_argument("--out", type=pathlib.Path, default="runs/kill_test")
  arguments = parser.parse_args()
  out = arguments.out.absolute()
  if list(out.glob("killed_*")) or (out / "whole").exists():
    parser.error(f"--out: {out} contains an earlier test; choose a new folder")
  out.mkdir(parents=True, exist_ok=True)
  sys.path.insert(0, str(SCRIPT.parent))
  import tiny_online

  tiny_online.save_lively_pair(out)
  started, whole = time.monotonic(), out / "whole"
  if start(out, arguments.draft, whole).wait(PATIENCE):
    print(whole.with_suffix(".log").read_text()[-2000:], file=sys.stderr)
    return 1
  rng = random.Random(arguments.seed)
  tally, moments = survive(out, arguments.draft, whole, arguments.kills, rng)
  counts = {**dataclasses.asdict(tally), "seconds": round(time.monotonic() - started)}
  counts |= {f"kills_at_{moment}": count for moment, count in moments.items()}
  table = rich.table.Table("count", "value")
  for name, value in counts.items():
    table.add_row(name.replace("_", " "), str(value))
  rich.console.Console().print(table)
  print(json.dumps(counts))
  (out / "result.json").write_text(json.dumps(counts) + "\n")
  return 1 if tally.faults() else 0


if __name__ == "__main__":
  sys.exit(main())
