"""Latency cost and gain of learning, for an update every I requests.

The shipped pair serves a shortened demo stream, once with a frozen draft and once for
each I with a draft that learns: an update every I finished requests, swapped in exactly
at request n + I. The order of the runs changes from seed to seed. Floor metering,
comparisons and checkpoints are off, so that the runs differ only in learning.

Time between tokens: every compiled call is one round (max_rounds=1), so tokens arrive
in groups of one to K + 1. The wall time of each `Loop.step` is divided evenly
among the tokens it emitted; p50 and p99 are taken over all tokens of all runs. A step
includes the work before decoding (prefill of a new request) and after it (metering of a
finished request, drawing the inputs of an update, waiting for an update that is due,
swapping it in). One row is served.

The goal is that p99 with learning exceeds p99 without by at most one slice (the median
of update_ms / steps in metrics.jsonl), or by at most 5 % for I = 4. "Tokens gained" are
the emitted tokens minus those that the frozen draft would have emitted with the same
number of target calls. "Break-even" is the first request from which the saved target
calls, at the frozen run's median time per step, outweigh the update_ms spent; inf if
the run ends before that.

  python benchmarks/bench_learning.py [--intervals 1 8 32] [--requests_per_task 50]
      [--seeds 3] [--free] [--bindings NAME=VALUE ...]
"""

import argparse
import dataclasses
import tempfile
import time

import accounts
import measure
import numpy as np
import rich.console
import rich.table

DEMO, FROZEN = "runs/demo.gin", "frozen draft"


@dataclasses.dataclass
class Run:
  """Measurements of one served stream.

  Attributes:
    seconds: wall time, including the wait for an update still running at the end.
    steps: [n] seconds of each call of `Loop.step`.
    emitted: [n] tokens that each of these calls emitted.
    requests: rows of metrics.jsonl, one per request.
    updates: rows of metrics.jsonl, one per update.
  """

  seconds: float
  steps: np.ndarray
  emitted: np.ndarray
  requests: list[dict]
  updates: list[dict]

  def gaps(self) -> np.ndarray:
    """Returns the milliseconds before each token."""
    return np.repeat(self.steps / self.emitted, self.emitted) * 1e3

  def of(self, kind: str, field: str) -> np.ndarray:
    """Returns one field of all rows of a kind, "requests" or "updates"."""
    return np.array([row[field] for row in getattr(self, kind)])

  def tokens_per_call(self) -> float:
    tokens, calls = (
      self.of("requests", name).sum() for name in ("output_tokens", "target_calls")
    )
    return tokens / calls


def configs(args: argparse.Namespace, seed: int) -> dict:
  """Returns an `OnlineConfig` for every run to compare."""
  from osd_jax import online
  from osd_jax.main import settings

  config, _ = settings.load(
    online.OnlineConfig,
    [args.gin_file],
    [
      f"StreamConfig.seed={seed}",
      f"StreamConfig.requests_per_task={args.requests_per_task}",
      *args.bindings,
    ],
  )
  config = dataclasses.replace(
    config,
    decoding=dataclasses.replace(config.decoding, rows=1, max_rounds=1),
    floor_metering=False,
    compare_every=0,
    checkpoint_every=10**9,
    learning=dataclasses.replace(config.learning, free_updates=args.free),
  )
  by_name = {FROZEN: dataclasses.replace(config, learn=False)}
  for interval in args.intervals:
    learning = config.learning
    schedule = dataclasses.replace(learning.schedule, update_interval=interval)
    by_name[f"I = {interval}"] = dataclasses.replace(
      config, learning=dataclasses.replace(learning, schedule=schedule)
    )
  return by_name


def serve(config, requests: int | None = None) -> Run:
  """Serves the stream, or its first `requests`, and times every step."""
  from osd_jax import online, runs, sharding

  sharding.make(config.partition)  # before anything else starts JAX
  with tempfile.TemporaryDirectory() as folder:
    directory = runs.RunDirectory.start(folder)
    config = dataclasses.replace(config, run_directory=folder)
    loop = online.begin(config, directory)
    last = min(requests or len(loop.source.stream), len(loop.source.stream))
    steps, emitted, before = [], [], 0
    served = loop.server.statistics  # rows may be logged some steps later
    began = time.perf_counter()
    while (answered := served.requests) < last:
      started = time.perf_counter()
      loop.step()
      steps.append(time.perf_counter() - started)
      length = in_flight(loop)
      emitted.append(length - before)
      before = 0 if served.requests > answered else length
    loop.wait()
    seconds = time.perf_counter() - began
    loop.close(seconds)
    rows = list(runs.read(directory.metrics_path))
  return Run(
    seconds,
    np.array(steps),
    np.array(emitted),
    [row for row in rows if row["kind"] == "request"],
    [row for row in rows if row["kind"] == "update"],
  )


def in_flight(loop) -> int:
  """Returns the tokens emitted by the only row, even if it has just finished."""
  arrays, _ = loop.server.engine.state()
  return int(arrays["rows"].length[0])


def break_even(learned: Run, frozen: Run) -> float:
  """Returns the number of requests after which learning has saved more than it cost."""
  calls = frozen.of("requests", "target_calls") - learned.of("requests", "target_calls")
  saved = np.cumsum(calls) * np.median(frozen.steps) * 1e3
  finished = range(1, len(saved) + 1)
  ends = learned.of("updates", "finished")
  costs = learned.of("updates", "update_ms")
  cost = [costs[ends <= n].sum() for n in finished]
  first = accounts.break_even(finished, cost, saved.tolist())
  return float("inf") if first is None else float(first)


def cost_of(runs: list[Run], frozen: list[Run]) -> dict[str, float]:
  """Returns the costs and gains of learning, as medians over the seeds."""
  pairs = list(zip(runs, frozen, strict=True))

  def median(figure) -> float:
    return float(np.median([figure(run, other) for run, other in pairs]))

  def share(run: Run, field: str) -> float:
    return run.of("updates", field).sum() / run.seconds / 1e3

  def gained(run: Run, other: Run) -> float:
    tokens, calls = (
      run.of("requests", name).sum() for name in ("output_tokens", "target_calls")
    )
    return tokens - other.tokens_per_call() * calls

  return {
    "updates": median(lambda run, _: len(run.updates)),
    "update, ms": median(lambda run, _: np.median(run.of("updates", "update_ms"))),
    "slice, ms": slice_ms(runs),
    "updates, share of wall time": median(lambda run, _: share(run, "update_ms")),
    "waiting for updates, share of wall time": median(
      lambda run, _: share(run, "wait_ms")
    ),
    "tokens gained": median(gained),
    "tokens gained, share": median(
      lambda run, other: gained(run, other) / run.emitted.sum()
    ),
    "wall time over frozen draft": median(
      lambda run, other: run.seconds / other.seconds
    ),
    "break-even, requests": median(break_even),
  }


def slice_ms(runs: list[Run]) -> float:
  """Returns the median milliseconds of a slice."""
  return float(
    np.median(
      np.concatenate(
        [run.of("updates", "update_ms") / run.of("updates", "steps") for run in runs]
      )
    )
  )


def figures(
  name: str, runs: list[Run], frozen: list[Run]
) -> dict[str, tuple[float, str]]:
  """Returns figure -> (value, goal) for one group of runs."""
  gaps = np.concatenate([run.gaps() for run in runs])
  tokens = sum(int(run.emitted.sum()) for run in runs)
  goal, costs = "", {}
  if any(run.updates for run in runs):
    costs = cost_of(runs, frozen)
    without = np.percentile(np.concatenate([run.gaps() for run in frozen]), 99)
    limit = 1.05 * without if name == "I = 4" else without + costs["slice, ms"]
    goal = f"<= {limit:.4g}"
  values = {
    "between tokens, p50, ms": (float(np.percentile(gaps, 50)), ""),
    "between tokens, p99, ms": (float(np.percentile(gaps, 99)), goal),
    "tokens/s": (tokens / sum(run.seconds for run in runs), ""),
    "tokens per target call": (
      float(np.median([run.tokens_per_call() for run in runs])),
      "",
    ),
  }
  return values | {name: (value, "") for name, value in costs.items()}


def show(found: dict[str, dict[str, tuple[float, str]]]) -> None:
  """Prints one table with a column for each group of runs."""
  table = rich.table.Table("", *found, title="cost and gain of learning")
  longest = max(found.values(), key=len)
  for figure in longest:
    cells = [
      f"{found[name][figure][0]:.4g}" if figure in found[name] else "" for name in found
    ]
    table.add_row(figure, *cells)
  rich.console.Console().print(table)


def run_all(args: argparse.Namespace) -> dict[str, list[Run]]:
  """Runs every config with every seed, after a short run that compiles."""
  results: dict[str, list[Run]] = {}
  for seed in range(args.seeds):
    competitors = configs(args, seed)
    if not seed:
      serve(competitors[FROZEN], 4)
      serve(competitors[f"I = {min(args.intervals)}"], 2 * min(args.intervals) + 4)
    names = list(competitors)
    for place in range(len(names)):
      name = names[(seed + place) % len(names)]
      results.setdefault(name, []).append(serve(competitors[name]))
  return {name: results[name] for name in competitors}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gin_file", default=DEMO)
  parser.add_argument("--intervals", nargs="+", type=int, default=[1, 8, 32])
  parser.add_argument("--requests_per_task", type=int, default=50)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--free", action="store_true", help="swap as soon as ready")
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  args = parser.parse_args()
  measure.restart(args.threads)
  runs = run_all(args)
  columns_of = {name: figures(name, runs[name], runs[FROZEN]) for name in runs}
  show(columns_of)
  other = [args.gin_file] * (args.gin_file != DEMO)
  case = ", free" * args.free + "".join(f", {x}" for x in other + args.bindings)
  clock, rows = f"wall, {args.threads} thread(s)", []
  for name, columns in columns_of.items():
    values = {figure: value for figure, (value, _) in columns.items()}
    goals = {figure: goal for figure, (_, goal) in columns.items()}
    rows += measure.rows(f"demo pair, {name}{case}", clock, values, goals)
  measure.report("learning", rows)


if __name__ == "__main__":
  main()
