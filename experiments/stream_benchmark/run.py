"""A benchmark of streams: how well does a server's draft follow its traffic?

The traces are fixed: prompts of the four topics that ship with osd_jax, in orders with
and without shifts, one request at a time, greedy. They can be sent to every server with
OpenAI's chat completions whose answers carry `metrics.speculative_decoding`, the field
of vLLM that `osd serve` has too. docs/stream_benchmark.md defines the figures.

  python experiments/stream_benchmark/run.py    # our own systems
  python experiments/stream_benchmark/run.py --url http://127.0.0.1:8000 --name ours
  python experiments/stream_benchmark/run.py --write sharp > sharp.jsonl
  python experiments/stream_benchmark/run.py --table    # prints the results in --out

Every run of a system on a trace is one JSON file in `--out`. The same command skips the
files that exist.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import http_load
import measure
import numpy as np
import rich.console
import rich.table

from osd_jax import metrics
from osd_jax.data import examples, streams

VERSION = 1  # results of different versions must not be compared
SEED = 0
# Name of a trace -> kind of schedule and its settings.
TRACES: dict[str, tuple[str, dict[str, int]]] = {
  "sharp": ("sharp", {}),
  "gradual": ("gradual", {}),
  "returns": ("cyclic", {"period": 50}),
  "quick": ("cyclic", {"period": 5}),
  "bursty": ("bursty", {}),
  "mixture": ("mixture", {}),
}
PER_TOPIC = 100
# System -> settings of `osd serve`; "oracle" is added by --oracle.
FROZEN = "ServeConfig.learn=False"
FLOOR, ORACLE = "frozen", "oracle"
SYSTEMS = {
  FLOOR: (FROZEN,),
  "cache": ("PairConfig.draft='cache'",),
  "online": (),
  "online + cache": ("DecodingConfig.cache_tokens=65536",),
}
SHARED = ("DecodingConfig.rows=1",)  # requests come one at a time
RECENT = 10  # requests of a moving mean
STRETCH = 100  # requests of the worst stretch
NEAR = 0.9  # of the oracle's tokens per call


@dataclasses.dataclass(frozen=True)
class Query:
  """One request of a trace."""

  topic: str
  prompt: str


def trace(name: str, per_topic: int = PER_TOPIC, seed: int = SEED) -> list[Query]:
  """Returns the requests of a trace, in their order; no prompt occurs twice."""
  kind, settings = TRACES[name]
  rng = np.random.default_rng([VERSION, seed])
  counts = np.full(len(examples.TOPICS), per_topic)
  entries = streams.SCHEDULES[kind](counts, rng, **settings)
  prompts = [
    [one.prompt for one in examples.topic_examples(topic, "stream", per_topic)]
    for topic in examples.TOPICS
  ]
  places = zip(entries, examples.ordinals(entries), strict=True)
  return [Query(examples.TOPICS[topic], prompts[topic][nth]) for topic, nth in places]


def shifts(topics: Sequence[str], least: int = RECENT) -> list[tuple[int, int]]:
  """Returns (begin, end) of each stretch of a topic, but the first.

  A stretch shorter than `least` requests says nothing about recovery: it is left out.

  >>> shifts(["a", "a", "b", "b", "b", "c"], least=2)
  [(2, 5)]
  """
  begins = [i for i in range(1, len(topics)) if topics[i] != topics[i - 1]]
  ends = [*begins, len(topics)][1:]
  return [(a, b) for a, b in zip(begins, ends, strict=True) if b - a >= least]


# ---- Runs


def measured(url: str, name: str, trace_name: str, queries: Sequence[Query]) -> dict:
  """Sends a trace to a server and returns the result.

  Raises:
    RuntimeError: a request failed, or its answer has no acceptance.
  """
  rows = []
  for query in queries:
    body = {"messages": [{"role": "user", "content": query.prompt}], "temperature": 0}
    reply = http_load.ask(url, body)
    if not reply.is_answered:
      raise RuntimeError(f"status {reply.status} from {url}: {reply.body or 'no body'}")
    calls = calls_of(reply.body)
    milliseconds = round(1e3 * (reply.ended - reply.due), 2)
    rows.append([query.topic, reply.tokens, calls, milliseconds])
  return {
    "benchmark": f"osd_jax streams {VERSION}",
    "system": name,
    "trace": trace_name,
    "columns": ["topic", "tokens", "target calls", "milliseconds"],
    "requests": rows,
    "server": json.loads(http_load.send(url, "GET", "/version")[1]),
    **measure.provenance(),
  }


def calls_of(body: Mapping[str, Any]) -> int:
  """Returns the target calls of an answer: its verifications, or one for each token."""
  metrics_of = (body.get("metrics") or {}).get("speculative_decoding")
  if metrics_of is None:
    raise RuntimeError(
      "the answer has no metrics.speculative_decoding, expected vLLM's field with"
      " num_spec_steps; start the server so that it reports acceptance."
    )
  return metrics_of["num_spec_steps"] or body["usage"]["completion_tokens"]


def run(args: argparse.Namespace) -> None:
  """Measures what `--out` does not have yet."""
  systems = {name: SYSTEMS[name] for name in args.systems}
  if args.oracle:
    path = str(args.oracle.resolve())
    systems[ORACLE] = (FROZEN, f"PairConfig.draft={path!r}")
  names = [args.name] if args.url else list(systems)
  args.out.mkdir(parents=True, exist_ok=True)
  for trace_name in args.traces:
    queries = trace(trace_name, args.per_topic)
    for name in names:
      path = args.out / f"{trace_name}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
      if path.exists():
        continue
      began = time.perf_counter()
      if args.url:
        result = measured(args.url, name, trace_name, queries)
      else:
        with (
          tempfile.TemporaryDirectory() as folder,
          http_load.Server([*SHARED, *systems[name]], pathlib.Path(folder)) as server,
        ):
          result = measured(server.url, name, trace_name, queries)
      path.write_text(json.dumps(result) + "\n")
      seconds = time.perf_counter() - began
      print(
        f"{trace_name}, {name}: {len(queries)} requests, {seconds:.0f} s", flush=True
      )


# ---- Figures


def figures(
  result: Mapping[str, Any],
  floor: Mapping[str, Any] | None = None,
  oracle: Mapping[str, Any] | None = None,
) -> dict[str, float]:
  """Returns the figures of a run, see docs/stream_benchmark.md.

  Args:
    result: the run.
    floor: the run of the draft that does not learn, on the same trace.
    oracle: the run of a draft that knows all topics, on the same trace.
  """
  topics, tokens, calls, spent = (np.asarray(c) for c in zip(*result["requests"]))
  values = {
    "tokens per call": tokens.sum() / calls.sum(),
    "ms per token": spent.sum() / tokens.sum(),
  }
  stretches = shifts(topics.tolist())
  if floor is not None and len(calls) >= STRETCH:
    window = np.ones(STRETCH)
    theirs = np.asarray([row[2] for row in floor["requests"]])
    ratios = np.convolve(theirs, window, "valid") / np.convolve(calls, window, "valid")
    values["worst stretch over floor"] = ratios.min()
  if oracle is not None and stretches:
    best = np.asarray([row[1:3] for row in oracle["requests"]])
    reached = (tokens / calls) / (best[:, 0] / best[:, 1])
    counts = [
      metrics.recovery_requests(list(reached[a:b]), 1.0, RECENT, NEAR) or b - a
      for a, b in stretches
    ]
    values["requests to recover"] = float(np.median(counts))
  lost = [
    mean_of(tokens, calls, before) / mean_of(tokens, calls, after)
    for before, after in returns(topics.tolist(), stretches)
  ]
  if lost:
    values["kept at a return"] = 1 / float(np.exp(np.mean(np.log(lost))))
  return {name: round(float(value), 4) for name, value in values.items()}


def returns(
  topics: Sequence[str], stretches: Sequence[tuple[int, int]]
) -> list[tuple[slice, slice]]:
  """Returns the last requests of a topic, and its first ones when it comes again."""
  pairs, ended = [], {topics[0]: stretches[0][0] if stretches else 0}
  for begin, end in stretches:
    topic = topics[begin]
    if ended.get(topic, 0) >= RECENT:
      last = ended[topic]
      pairs.append((slice(last - RECENT, last), slice(begin, begin + RECENT)))
    ended[topic] = end
  return pairs


def mean_of(tokens: np.ndarray, calls: np.ndarray, part: slice) -> float:
  """Returns the tokens per call of some requests."""
  return float(tokens[part].sum() / calls[part].sum())


def show(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Prints a table for each figure; returns its rows, one for each run."""
  results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
  by_key = {(one["trace"], one["system"]): one for one in results}
  rows = [
    {"trace": trace_name, "system": system}
    | figures(one, by_key.get((trace_name, FLOOR)), by_key.get((trace_name, ORACLE)))
    for (trace_name, system), one in by_key.items()
  ]
  console = rich.console.Console(width=120)
  names = list(dict.fromkeys(row["trace"] for row in rows))
  for figure in dict.fromkeys(name for row in rows for name in row):
    if figure in ("trace", "system"):
      continue
    table = rich.table.Table(figure, *names)
    for system in dict.fromkeys(row["system"] for row in rows):
      by_trace = {row["trace"]: row for row in rows if row["system"] == system}
      values = [by_trace.get(name, {}).get(figure) for name in names]
      table.add_row(system, *("" if v is None else f"{v:.3g}" for v in values))
    console.print(table)
  return rows


def options() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--traces", nargs="+", choices=tuple(TRACES), default=[*TRACES])
  parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS], default=[*SYSTEMS])
  parser.add_argument(
    "--oracle", type=pathlib.Path, help="a draft that knows all topics"
  )
  parser.add_argument("--url", default="", help="a running server")
  parser.add_argument("--name", default="other", help="of the system at --url")
  parser.add_argument("--per_topic", type=int, default=PER_TOPIC)
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("runs/stream_benchmark")
  )
  parser.add_argument("--write", choices=tuple(TRACES), help="print a trace and stop")
  parser.add_argument("--table", action="store_true", help="measure nothing")
  return parser


def main() -> None:
  args = options().parse_args()
  if args.write:
    for query in trace(args.write, args.per_topic):
      print(json.dumps(dataclasses.asdict(query), ensure_ascii=False))
    return
  if not args.table:
    run(args)
  show(args.out)


if __name__ == "__main__":
  main()
