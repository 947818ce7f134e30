"""`osd serve` under load: latency and throughput, with and without learning.

Every system is a server process of its own. All get the same requests, block by block
in turns; before the next system begins, the program waits until the one before it has
ended its updates. Answers are streamed and greedy.

    plain      no draft
    frozen     the draft does not learn
    cache      drafts from an n-gram cache
    online     the draft learns
    bare       `Server.generate` in this process, with the draft frozen: what the engine
               does without HTTP, queue and streaming
    peer       another server with OpenAI's API that runs already, at --peer

Every case has prompts of its own. Clients of a closed loop wait for their answer before
they send the next request. Traces are open loops: requests arrive at times that do not
depend on the answers, at --load times the capacity of the slowest system, which is
measured first.

    time to first token   from the arrival of a request to its first piece of text
    inter-token latency   (last piece - first piece) / (tokens - 1), as AIPerf has it;
                          answers that came in one piece have none
    pause                 between two pieces of text of an answer
    latency               from the arrival of a request to the end of its answer

Updates that go on after the last answer of a block are not counted; bench_whole_run
counts them.

`--overload 4` sends four times the capacity, and the capacity itself for comparison,
with the default `ServeConfig.max_waiting`. All other cases have a queue in which no
request is refused. The capacity is what a closed loop of as many clients as there are
rows and places in the queue is answered, up to 16.

  python benchmarks/bench_serving.py [--requests 200] [--turns 5]
      [--clients 1 2 4 8 16] [--traces steady bursty diurnal] [--load .7]
      [--systems plain frozen cache online] [--overload 4] [--model FOLDER]
      [--gin_file FILE] [--bindings NAME=VALUE ...] [--prompts FILE ...]
      [--peer URL --peer_model NAME] [--threads 2]
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import http_load
import measure
import numpy as np
import rich.console
import rich.table

from osd_jax import base
from osd_jax.data import examples
from osd_jax.engine import server as engine_server
from osd_jax.main import settings
from osd_serve.service import ServeConfig

BARE, PEER = "bare", "peer"
FROZEN = "ServeConfig.learn=False"
# `osd serve` has no setting for decoding without a draft. Requests that must not draft
# are decoded plainly where K may be 0.
UNDRAFTED = {"speculative": False, "learn": False}
PLAIN = "plain"
SERVE = "runs/serve.gin"
# System -> settings of its server.
SYSTEMS = {
  PLAIN: (
    FROZEN,
    "DecodingConfig.num_draft_tokens=1",
    "AdaptiveConfig.candidates=(0, 1)",
    "DecodingConfig.adaptive=@AdaptiveConfig()",
  ),
  "frozen": (FROZEN,),
  "cache": ("PairConfig.draft='cache'",),
  "online": (),
}
WARM_UP = 32  # requests before the capacity is measured
FULL = 16  # most clients of the closed loop that measures it
LONG_QUEUE = "ServeConfig.max_waiting=64"  # so that bursts are not refused
OVERHEAD_CLIENTS = 8
TIMES = ("time to first token", "inter-token latency", "pause", "latency")
COUNTS = ("tokens/s", "requests/s", "refused", "failed")
Replies = Sequence[http_load.Reply]
Bodies = Sequence[Mapping[str, Any]]
Send = Callable[[str, Bodies], Replies]


def prompts_of(count: int, seed: int) -> list[str]:
  """Returns prompts of the four generated topics, mixed."""
  draws = random.Random(seed)
  tasks = [examples.topic_task(topic, "stream") for topic in examples.TOPICS]
  texts = [example.prompt for task in tasks for example in examples.texts(task)]
  draws.shuffle(texts)
  return [texts[place % len(texts)] for place in range(count)]


def prompts_in(paths: Sequence[pathlib.Path], start: int, count: int) -> list[str]:
  """Returns prompts of files of JSON lines, one of each file in turn."""
  files = [path.read_text().splitlines() for path in paths]
  lines = itertools.chain.from_iterable(zip(*files, strict=False))
  some = itertools.islice(lines, start, start + count)
  return [json.loads(line)["prompt"] for line in some]


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
  """Returns p50 and p99 in milliseconds; nan without a value."""
  values = np.percentile(seconds, [50, 99]) * 1e3 if len(seconds) else [np.nan] * 2
  return {f"{name} p{p}, ms": float(x) for p, x in zip((50, 99), values, strict=True)}


def figures_of(replies: Replies, seconds: float) -> dict[str, float]:
  """Returns the figures of the replies that came in within some seconds."""
  answered = [reply for reply in replies if reply.is_answered]
  several = [reply for reply in answered if len(reply.pieces) > 1]
  pauses = [pause for reply in several for pause in np.diff(reply.pieces)]
  spans = [(r.pieces[-1] - r.pieces[0]) / (r.tokens - 1) for r in several]
  firsts = [reply.pieces[0] - reply.due for reply in answered if reply.pieces]
  latencies = [reply.ended - reply.due for reply in answered]
  times = dict(zip(TIMES, (firsts, spans, pauses, latencies), strict=True))
  return {
    **{key: x for kind in TIMES for key, x in percentiles(kind, times[kind]).items()},
    "tokens/s": sum(reply.tokens for reply in answered) / seconds,
    "requests/s": len(answered) / seconds,
    "refused": sum(reply.status == 429 for reply in replies),
    "failed": sum(reply.status not in (200, 429) for reply in replies),
  }


class Measured:
  """Replies and times of one system, block by block."""

  def __init__(self):
    """Holds nothing yet."""
    self.replies: list[http_load.Reply] = []
    self.seconds: list[float] = []
    self.tokens: list[int] = []

  def add(self, replies: Replies, tokens: int, seconds: float) -> None:
    """Adds a block."""
    self.replies += replies
    self.tokens.append(tokens)
    self.seconds.append(seconds)

  @property
  def speeds(self) -> np.ndarray:
    """[blocks] tokens per second."""
    return np.array(self.tokens) / np.array(self.seconds)

  def figures(self) -> dict[str, float]:
    """Returns the figures of all blocks together."""
    return figures_of(self.replies, sum(self.seconds))


def paced(
  url: str, bodies: Bodies, trace: str, rate: float, seed: int
) -> list[http_load.Reply]:
  """Sends requests at the times of a trace."""
  times = http_load.arrivals(trace, len(bodies), rate, seed)
  return http_load.open_loop(url, bodies, times)


@dataclasses.dataclass
class Peer:
  """A server that this program has not started.

  Attributes:
    url: its address.
    model: what its requests name.
  """

  url: str
  model: str

  def wait_until_idle(self) -> None:
    """Returns at once: it does not learn."""


@dataclasses.dataclass
class System:
  """A system and its server."""

  name: str
  server: http_load.Server | Peer

  def serve(self, send: Send, bodies: Bodies) -> tuple[Replies, float]:
    """Returns replies, and the seconds from the first arrival to the last answer."""
    if self.name == PLAIN:
      bodies = [{**body, **UNDRAFTED} for body in bodies]
    if isinstance(self.server, Peer):
      bodies = [{**body, "model": self.server.model} for body in bodies]
    replies = send(self.server.url, bodies)
    began = min(reply.due for reply in replies)
    seconds = max(reply.ended for reply in replies) - began
    self.server.wait_until_idle()
    return replies, seconds

  def warm_up(self, bodies: Bodies) -> None:
    """Sends up to a quarter of the requests."""
    few = bodies[: min(WARM_UP, -(-len(bodies) // 4))]
    self.serve(functools.partial(http_load.closed_loop, clients=4), few)

  def capacity(self, bodies: Bodies, clients: int) -> float:
    """Returns the requests that it answers per second."""
    send = functools.partial(http_load.closed_loop, clients=clients)
    return figures_of(*self.serve(send, bodies))["requests/s"]


def in_turns(
  systems: Mapping[str, System],
  blocks: Sequence[Bodies],
  send: Send,
  bare: "Bare | None" = None,
) -> dict[str, Measured]:
  """Sends every block to every system; the first system changes from block to block."""
  names = [*systems, *([BARE] if bare else [])]
  results = {name: Measured() for name in names}
  for turn, block in enumerate(blocks):
    for place in range(len(names)):
      name = names[(turn + place) % len(names)]
      if bare and name == BARE:
        results[name].add([], *bare.run(block))
      else:
        replies, seconds = systems[name].serve(send, block)
        results[name].add(replies, sum(reply.tokens for reply in replies), seconds)
  return results


class Bare:
  """The engine without a server around it."""

  def __init__(self, bindings: Sequence[str], gin_file: str):
    """Loads the pair and compiles every call."""
    config = config_of([*bindings, *SYSTEMS["frozen"]], gin_file)
    self._server = engine_server.Server(
      config.pair, config.decoding, config.learning, config.partition
    )
    self._server.warm_up()

  def run(self, block: Bodies) -> tuple[int, float]:
    """Answers the prompts of a block; returns tokens and seconds."""
    prompts = [body["messages"][0]["content"] for body in block]
    began = time.perf_counter()
    tokens = sum(len(answer.tokens) for answer in self._server.generate(prompts))
    return tokens, time.perf_counter() - began

  def close(self) -> None:
    """Frees it."""
    self._server.close()


def config_of(bindings: Sequence[str], gin_file: str = SERVE) -> ServeConfig:
  """Returns the settings of a server."""
  return settings.load(ServeConfig, [gin_file], list(bindings))[0]


def bindings_of(args: argparse.Namespace) -> list[str]:
  """Returns the settings that all systems share."""
  target = [f"PairConfig.target={args.model!r}"] if args.model else []
  return [*target, *args.bindings]


def rows_of(
  case: str, clock: str, measured: Mapping[str, Measured]
) -> list[dict[str, Any]]:
  """Returns the rows of one case: figures of each system, and ratios of pairs."""
  values, goals = {}, {}
  for name, one in measured.items():
    figures = one.figures() if one.replies else {"tokens/s": np.median(one.speeds)}
    values |= {f"{name}, {figure}": value for figure, value in figures.items()}
  if {"frozen", "online"} <= measured.keys():
    for figure in ("inter-token latency p99, ms", "pause p99, ms"):
      name = f"online over frozen, {figure.removesuffix(', ms')}"
      ours = values[f"online, {figure}"]
      values[name], goals[name] = ours / values[f"frozen, {figure}"], "<= 1.1"
  if {"frozen", BARE} <= measured.keys():
    ratios = measured["frozen"].speeds / measured[BARE].speeds
    name = "overhead over the bare engine, tokens/s"
    values[name], goals[name] = 1 - float(np.median(ratios)), "<= 0.05"
  return measure.rows(case, clock, values, goals)


def print_table(case: str, measured: Mapping[str, Measured]) -> None:
  """Prints a case with one line per system; times are p50 / p99 in ms."""
  table = rich.table.Table("system", *TIMES, *COUNTS, title=case)
  for name, one in measured.items():
    if one.replies:
      figures = one.figures()
      times = [[figures[f"{kind} p{p}, ms"] for p in (50, 99)] for kind in TIMES]
      cells = [" / ".join(f"{ms:,.1f}" for ms in pair) for pair in times]
      table.add_row(name, *cells, *(f"{figures[count]:.4g}" for count in COUNTS))
    else:
      speed = f"{np.median(one.speeds):.4g}"
      table.add_row(name, *("" for _ in TIMES), speed)
  rich.console.Console(width=120).print(table)


def overload(
  system: System, bodies: Bodies, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, str]]:
  """Sends the capacity and several times as much; returns figures and goals."""
  config = config_of(bindings_of(args), args.gin_file)
  clients = min(config.decoding.rows + config.places, FULL)  # more would be refused
  system.warm_up(bodies)
  values, capacity = {}, system.capacity(bodies, clients)
  for name, times in (("full load", 1.0), ("overload", args.overload)):
    count = int(len(bodies) * times)  # both take equally long
    requests = [bodies[place % len(bodies)] for place in range(count)]
    send = functools.partial(
      paced, trace="steady", rate=times * capacity, seed=args.seed
    )
    replies, seconds = system.serve(send, requests)
    values |= {f"{name}, {k}": v for k, v in figures_of(replies, seconds).items()}
    refused = [reply for reply in replies if reply.status == 429]
    silent = sum(not reply.retry_after for reply in refused)
    values[f"{name}, refused without Retry-After"] = silent
  ratio = "overload over full load, latency p99"
  values[ratio] = (
    values["overload, latency p99, ms"] / values["full load, latency p99, ms"]
  )
  goals = {ratio: "<= 2", "overload, failed": "0"}
  return values, goals | {"overload, refused without Retry-After": "0"}


def bodies_of(args: argparse.Namespace, case: int) -> list[dict[str, Any]]:
  """Returns the requests of a case; each has its own, because a cache remembers."""
  limit = {"max_tokens": args.max_tokens} if args.max_tokens else {}
  texts = (
    prompts_in(args.prompts, case * args.requests, args.requests)
    if args.prompts
    else prompts_of(args.requests, args.seed + case)
  )
  return [http_load.streamed(text, **limit) for text in texts]


def cases(args: argparse.Namespace, slowest: float) -> Iterator[tuple[str, Send, bool]]:
  """Yields the name of each case, its clients, and whether the bare engine runs too."""
  for clients in args.clients:
    send = functools.partial(http_load.closed_loop, clients=clients)
    name = f"{clients} client{'s' * (clients > 1)}"
    yield name, send, clients == OVERHEAD_CLIENTS
  for trace in args.traces:
    rate = args.load * slowest
    send = functools.partial(paced, trace=trace, rate=rate, seed=args.seed)
    yield f"{trace} at {args.load:g} of the capacity", send, False


def run(args: argparse.Namespace, folder: pathlib.Path) -> None:
  """Starts the servers and measures every case."""
  shared, clock = bindings_of(args), f"wall, {args.threads} thread(s)"
  if not args.overload:
    shared = [LONG_QUEUE, *shared]
  pair = pathlib.Path(args.model).name if args.model else "shipped pair"
  setting = ", ".join([pair, *args.bindings])
  with contextlib.ExitStack() as stack:
    systems = {}
    for name in args.systems:
      started = http_load.Server(
        [*shared, *SYSTEMS[name]], folder / name, gin_file=args.gin_file
      )
      systems[name] = System(name, stack.enter_context(started))
    others = bodies_of(args, 0)
    if args.overload:
      name = args.systems[-1]
      results = overload(systems[name], others, args)
      case = f"{setting}, {name}, {args.overload:g} times the capacity"
      measure.report("serving", measure.rows(case, clock, *results))
      return
    if args.peer:
      systems[PEER] = System(PEER, Peer(args.peer, args.peer_model))
    for system in systems.values():
      system.warm_up(others)
    slowest = 0.0
    if args.traces:
      slowest = min(system.capacity(others, FULL) for system in systems.values())
    bare = None
    if OVERHEAD_CLIENTS in args.clients:
      bare = Bare(shared, args.gin_file)
    for case, (name, send, with_bare) in enumerate(cases(args, slowest), 1):
      bodies = bodies_of(args, case)
      blocks = [bodies[turn :: args.turns] for turn in range(args.turns)]
      results = in_turns(systems, blocks, send, bare if with_bare else None)
      measure.report("serving", rows_of(f"{setting}, {name}", clock, results))
      print_table(f"{setting}, {name}", results)


def options() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--requests", type=int, default=200, help="of every case")
  parser.add_argument("--turns", type=int, default=5, help="blocks of every case")
  parser.add_argument("--clients", type=int, nargs="*", default=[1, 2, 4, 8, 16])
  parser.add_argument(
    "--traces", nargs="*", choices=http_load.TRACES, default=http_load.TRACES
  )
  parser.add_argument("--load", type=float, default=0.7)
  parser.add_argument(
    "--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS)
  )
  parser.add_argument("--overload", type=float, default=0, metavar="TIMES")
  parser.add_argument("--model", default="", help="target, a folder of transformers")
  parser.add_argument("--max_tokens", type=int, default=0, help="0: no limit")
  parser.add_argument("--gin_file", default=SERVE)
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  parser.add_argument("--prompts", nargs="*", type=pathlib.Path, help="JSON lines")
  parser.add_argument("--peer", default="", help="address of another server")
  parser.add_argument("--peer_model", default="", help="its name of the model")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  return parser


def main() -> None:
  args = options().parse_args()
  measure.restart(args.threads)
  measure.RESULTS = args.results
  with tempfile.TemporaryDirectory() as folder:
    run(args, pathlib.Path(folder))


if __name__ == "__main__":
  try:
    main()
  except base.InputError as error:
    sys.exit(str(error))
