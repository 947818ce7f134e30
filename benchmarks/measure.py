"""How the benchmarks measure: threads fixed, contenders by turns, bounds in the run.

Every program begins with `restart`, so that all contenders have the same threads and
the same allocator, then hands its contenders to `by_turns` and its rows to `report`.
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
  """Starts this program anew with that many threads, unless it has been already.

  Threads of XLA and of torch are fixed before either is imported, memory comes in huge
  pages, and with one thread the process stays on one core.
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
  """What one contender took, turn by turn.

  Attributes:
    cpu: [turns] seconds of CPU time of the whole process.
    wall: [turns] seconds.
  """

  cpu: np.ndarray
  wall: np.ndarray

  def milliseconds(self, clock: str) -> float:
    """Median milliseconds of a turn by one of the clocks, "cpu" or "wall"."""
    return float(np.median(getattr(self, clock)) * 1e3)


def by_turns(
  contenders: Mapping[str, Callable[[], object]], turns: int
) -> dict[str, Times]:
  """Lets contenders do the same work by turns, each beginning equally often.

  Args:
    contenders: by name; each does one unit of work and waits for its result.
    turns: of each, after one that warms up and is not counted.
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
  """Median over the turns of one contender's time over another's, turn for turn."""
  return float(np.median(getattr(times[over], clock) / getattr(times[under], clock)))


def clock_of(threads: int) -> str:
  """CPU time of one thread is its own; of several only wall time says what passed."""
  return "cpu" if threads == 1 else "wall"


def rows(
  case: str,
  clock: str,
  figures: Mapping[str, float],
  asked: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:
  """What `report` takes: a row a figure, with what is asked of it."""
  common, asked = {"case": case, "clock": clock}, asked or {}
  return [
    common | {"figure": name, "value": value, "asked": asked.get(name, "")}
    for name, value in figures.items()
  ]


def bandwidth(threads: int, megabytes: int = 512, repeats: int = 20) -> float:
  """Bytes a second that this many threads read from memory, the best of the repeats."""
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


def report(benchmark: str, measured: Sequence[Mapping[str, Any]]) -> None:
  """Prints rows as JSON lines and as a table; keeps those of the newest run.

  Args:
    benchmark: name of the program and of its file of results.
    measured: of `rows`, a line each. `case`, `figure`, `value`, `asked` and `clock` go
      into benchmarks/README.md; rows with the same `case`, `figure` and `clock` replace
      those of an earlier run.
  """
  console = rich.console.Console()
  run = {"benchmark": benchmark, **provenance()}
  measured = [{**run, **row} for row in measured]
  for row in measured:
    console.print(json.dumps(row), soft_wrap=True, highlight=False)
  table = rich.table.Table("case", "figure", "value", "asked", title=benchmark)
  for row in measured:
    value, asked = row["value"], row.get("asked", "")
    table.add_row(row["case"], row["figure"], f"{value:.4g}", str(asked))
  console.print(table)
  RESULTS.mkdir(exist_ok=True)
  path = RESULTS / f"{benchmark}.jsonl"
  kept = {_key(row): row for row in _read(path)}
  kept |= {_key(row): row for row in measured}
  path.write_text("".join(json.dumps(row) + "\n" for row in kept.values()))


def commit() -> str:
  """What is measured; "-dirty" if files other than results differ from it."""

  def git(*arguments: str) -> subprocess.CompletedProcess:
    command = ("git", "-C", str(FOLDER), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)

  named = git("rev-parse", "--short", "HEAD")
  if named.returncode:
    return "unknown"
  code = (":/", ":(exclude)results", ":(exclude)README.md")
  changed = git("diff", "--quiet", "HEAD", "--", *code).returncode
  return named.stdout.strip() + "-dirty" * bool(changed)


def provenance() -> dict[str, Any]:
  """This machine, as far as figures depend on it, and the code."""
  return {
    "cores": os.cpu_count() or 1,
    "cpu": cpu_model(),
    "jax": importlib.metadata.version("jax"),
    "commit": commit(),
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
  }


def cpu_model() -> str:
  """As the kernel calls it."""
  path = pathlib.Path("/proc/cpuinfo")
  text = path.read_text() if path.exists() else ""
  found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
  return found.group(1).strip() if found else "an unnamed processor"


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
  return tuple(str(row.get(name, "")) for name in ("case", "figure", "clock"))


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
  lines = path.read_text().splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]
