"""Measuring: fixed threads, interleaved systems, bandwidth, and stored results.

Every program starts with `restart`, so that all systems run with the same threads and
the same allocator. Then `interleave` times the systems and `report` stores the rows.
"""

import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.table

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
_MARK = "OSD_BENCH_THREADS"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"  # weights in 2 MiB pages: fewer TLB misses


def restart(threads: int) -> None:
  """Restarts this program with the given number of threads, unless already done.

  The restart fixes the threads of XLA and torch before either is imported and enables
  huge pages. The process is pinned to as many cores as it has threads.
  """
  if os.environ.get(_MARK) == str(threads):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:threads])
    return
  eigen = "false" if threads == 1 else "true"
  flags = os.environ.get("XLA_FLAGS", "")
  environment = {
    **os.environ,
    _MARK: str(threads),
    "XLA_FLAGS": f"{flags} --xla_cpu_multi_thread_eigen={eigen}".strip(),
    "OMP_NUM_THREADS": str(threads),
    "MKL_NUM_THREADS": str(threads),
    "GLIBC_TUNABLES": _HUGE_PAGES,
  }
  os.execve(sys.executable, [sys.executable, *sys.argv], environment)


@dataclasses.dataclass(frozen=True)
class Times:
  """Times of one system, one entry per repetition.

  Attributes:
    cpu: [turns] seconds of CPU time of the whole process.
    wall: [turns] seconds of wall time.
  """

  cpu: np.ndarray
  wall: np.ndarray

  def milliseconds(self, clock: str) -> float:
    """Returns the median milliseconds per repetition; clock is "cpu" or "wall"."""
    return float(np.median(getattr(self, clock)) * 1e3)


def interleave(
  contenders: Mapping[str, Callable[[], object]], turns: int
) -> dict[str, Times]:
  """Times systems that do the same work, interleaved.

  The system that goes first changes from repetition to repetition.

  Args:
    contenders: name -> function that does one unit of work and waits for its result.
    turns: repetitions, after one uncounted repetition that warms up.
  """
  names = list(contenders)
  cpu: dict[str, list[float]] = {name: [] for name in names}
  wall: dict[str, list[float]] = {name: [] for name in names}
  for turn in range(turns + 1):
    gc.collect()
    for place in range(len(names)):
      name = names[(turn + place) % len(names)]
      began, started = time.process_time(), time.perf_counter()
      contenders[name]()
      if turn:
        cpu[name].append(time.process_time() - began)
        wall[name].append(time.perf_counter() - started)
  return {name: Times(np.array(cpu[name]), np.array(wall[name])) for name in names}


def ratio(times: Mapping[str, Times], over: str, under: str, clock: str) -> float:
  """Returns the median, over repetitions, of one system's time over another's."""
  return float(np.median(getattr(times[over], clock) / getattr(times[under], clock)))


def clock_of(threads: int) -> str:
  """Returns "cpu" for one thread; with several, CPU time is not elapsed time."""
  return "cpu" if threads == 1 else "wall"


def rows(
  case: str,
  clock: str,
  figures: Mapping[str, float],
  goals: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:
  """Returns one row per figure, with its goal if there is one, for `report`."""
  common, goals = {"case": case, "clock": clock}, goals or {}
  return [
    common | {"figure": name, "value": value, "asked": goals.get(name, "")}
    for name, value in figures.items()
  ]


def bandwidth(threads: int, megabytes: int = 512, repeats: int = 20) -> float:
  """Returns the best memory read rate of this many threads, in bytes per second."""
  data = np.ones(megabytes * 2**20 // 4, np.float32)
  parts = np.array_split(data, threads)
  best = float("inf")
  for _ in range(repeats):
    readers = [threading.Thread(target=np.max, args=(part,)) for part in parts]
    started = time.perf_counter()
    for reader in readers:
      reader.start()
    for reader in readers:
      reader.join()
    best = min(best, time.perf_counter() - started)
  return data.nbytes / best


def report(benchmark: str, rows: Sequence[Mapping[str, Any]]) -> None:
  """Prints rows as JSON lines and as a table, and stores them.

  Args:
    benchmark: name of the benchmark and of its results file.
    measured: rows as returned by `rows`. They replace stored rows with the same `case`,
      `figure` and `clock`.
  """
  console = rich.console.Console()
  run = {"benchmark": benchmark, **provenance()}
  rows = [{**run, **row} for row in rows]
  for row in rows:
    console.print(json.dumps(row), soft_wrap=True, highlight=False)
  table = rich.table.Table("case", "figure", "value", "asked", title=benchmark)
  for row in rows:
    value, goal = row["value"], row.get("asked", "")
    table.add_row(row["case"], row["figure"], f"{value:.4g}", str(goal))
  console.print(table)
  RESULTS.mkdir(exist_ok=True)
  path = RESULTS / f"{benchmark}.jsonl"
  by_key = {_key(row): row for row in read(path)}
  by_key |= {_key(row): row for row in rows}
  path.write_text("".join(json.dumps(row) + "\n" for row in by_key.values()))


def commit() -> str:
  """Returns the commit, with "-dirty" if files other than results have changed."""

  def git(*arguments: str) -> subprocess.CompletedProcess:
    command = ("git", "-C", str(FOLDER), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)

  head = git("rev-parse", "--short", "HEAD")
  if head.returncode:
    return "unknown"
  code = (":/", ":(exclude)results", ":(exclude)README.md")
  changed = git("diff", "--quiet", "HEAD", "--", *code).returncode
  return head.stdout.strip() + "-dirty" * bool(changed)


def provenance() -> dict[str, Any]:
  """Returns what figures depend on: machine, jax version, commit and date."""
  return {
    "cores": os.cpu_count() or 1,
    "cpu": cpu_model(),
    "jax": importlib.metadata.version("jax"),
    "commit": commit(),
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
  }


def cpu_model() -> str:
  """Returns the name of the processor in /proc/cpuinfo."""
  path = pathlib.Path("/proc/cpuinfo")
  text = path.read_text() if path.exists() else ""
  match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
  return match.group(1).strip() if match else "an unnamed processor"


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
  return tuple(str(row.get(name, "")) for name in ("case", "figure", "clock"))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a file of JSON lines; an empty list without the file."""
  lines = path.read_text().splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]
