"""Soaks `osd serve`: many requests of every kind, and nothing lost, wrong or growing.

The server learns from its traffic while clients send complete requests (streamed and
whole), requests that they leave in the middle, bad requests and sampled ones. In the
second half the topics change. The test checks that

- every request has the answer that it must have: none is lost, and greedy answers equal
  those of plain decoding, which this program computes before;
- bad requests have an error of the client (status 4xx) with a message;
- drafts were swapped meanwhile (otherwise nothing was tested);
- the server's memory is flat: its median in the last twentieth of the requests exceeds
  that at 20 % by 2 % at most;
- no program was compiled after the start (JAX_LOG_COMPILES);
- the server ends in order, with exit code 0.

It also reports, without judging them, the pauses between the pieces of streams: at
swaps of the draft and elsewhere. A piece comes after every compiled call, so the median
pause elsewhere is the time of a call and of the prefills before it. The client shares
the machine with the server, so pauses include its own delays.

  python experiments/serving_soak/run.py [--requests 10000] [--clients 16]
      [--prompts 100] [--seed 0] [--bindings NAME=VALUE ...] [--out runs/serving_soak]

Exit code 1 if a promise is broken; `result.json` has the counts.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import http_load
import numpy as np
import rich.console
import rich.table

from osd_jax.data import examples
from osd_jax.engine.server import Server
from osd_jax.main import settings
from osd_serve.service import ServeConfig

BEFORE, AFTER = ("maths", "sql"), ("python", "finance")
COMPLETE, LEFT, BAD, SAMPLED = "complete", "left", "bad", "sampled"
SHARES = {COMPLETE: 0.7, LEFT: 0.12, BAD: 0.1, SAMPLED: 0.08}
COMPLETIONS = "/v1/completions"
BAD_BODIES = (
  b'{"prompt": "a", ',
  b'{"prompt": "a", "max_tokens": 0}',
  b'{"prompt": "a", "max_tokens": 100000}',
  b'{"prompt": "a", "temperature": "hot"}',
  b'{"prompt": "a", "temprature": 1}',
  b'{"prompt": "a", "n": 100000}',
  b'{"prompt": ["a", 1]}',
  b'{"messages": []}',
  json.dumps({"prompt": "word " * 1000}).encode(),
  b" " * (2**20 + 1),
)
MEMORY_SAMPLES = 100
POLL_SECONDS = 0.02  # between two looks at the version of the draft
DROPPED = re.compile(r"^osd:records_dropped\S* (\S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt and the answer of plain decoding for every number of tokens."""

  text: str
  answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Work:
  """One request.

  Attributes:
    kind: a key of `SHARES`.
    prompt: what is asked.
    is_streamed: the answer comes in pieces.
    limit: `max_tokens`, or None.
    number: chooses the bad body, or after how many pieces the client leaves.
  """

  kind: str
  prompt: Prompt
  is_streamed: bool
  limit: int | None
  number: int


def prompts_of(
  topics: Sequence[str], count: int, bindings: Sequence[str]
) -> list[Prompt]:
  """Returns prompts of some topics with the target's own greedy answers."""
  config, _ = settings.load(ServeConfig, ["runs/serve.gin"], list(bindings))
  texts_of = [
    [example.prompt for example in examples.topic_examples(topic, "stream", count)]
    for topic in topics
  ]
  texts = list(itertools.chain(*zip(*texts_of, strict=True)))[:count]
  with Server(config.pair, config.decoding) as whole:
    pair = whole.pair
  with Server(pair.plain(), config.decoding) as plain:
    answers = plain.generate(texts, ordered=True)
    decode = pair.vocabulary.decode
    return [
      Prompt(
        text,
        tuple(decode(answer.tokens[:n]) for n in range(len(answer.tokens) + 1)),
      )
      for text, answer in zip(texts, answers, strict=True)
    ]


def plan(
  before: Sequence[Prompt], after: Sequence[Prompt], count: int, seed: int
) -> list[Work]:
  """Returns the requests in the order in which they are sent."""
  draws = random.Random(seed)
  kinds = draws.choices(list(SHARES), list(SHARES.values()), k=count)
  return [
    Work(
      kind,
      draws.choice(before if place < count // 2 else after),
      kind == LEFT or draws.random() < 0.5,
      draws.randint(1, 24) if draws.random() < 0.2 else None,
      draws.randrange(10**6),
    )
    for place, kind in enumerate(kinds)
  ]


def body_of(work: Work) -> dict[str, Any]:
  """Returns the parameters of a request that is not bad."""
  body = {"prompt": work.prompt.text, "temperature": 0, "stream": work.is_streamed}
  if work.kind == SAMPLED:
    body |= {"temperature": 0.8, "seed": work.number}
  return body | ({"max_tokens": work.limit} if work.limit else {})


def verdict(
  url: str,
  work: Work,
  note: Callable[[http_load.Reply], object] = lambda reply: None,
) -> str:
  """Sends a request; returns a description of its fault, "" if there was none.

  Args:
    url: address of the server.
    work: the request.
    note: called with the reply, unless the request is a bad one.
  """
  if work.kind == BAD:
    body = BAD_BODIES[work.number % len(BAD_BODIES)]
    try:
      status, text = http_load.send(url, "POST", COMPLETIONS, body)
      is_refused = 400 <= status < 500 and json.loads(text)["error"]["message"]
    except (OSError, ValueError, KeyError) as error:
      return f"lost: bad request {body[:40]!r}: {error!r}"
    return "" if is_refused else f"wrong: bad request {body[:40]!r}: {status}"
  leave_after = work.number % 3 if work.kind == LEFT else None
  body = body_of(work)
  reply = http_load.ask(url, body, COMPLETIONS, leave_after=leave_after)
  note(reply)
  answers = work.prompt.answers
  if work.kind == LEFT:
    is_right = reply.status in (0, 200) and answers[-1].startswith(reply.text)
    return "" if is_right else f"wrong: {body}: {reply}"
  if not reply.is_answered:
    return f"lost: {body}: {reply}"
  limit = len(answers) - 1 if work.limit is None else work.limit
  if work.kind == COMPLETE and reply.text != answers[min(limit, len(answers) - 1)]:
    return f"wrong: {body}: {reply.text!r}, not {answers[-1]!r}"
  return ""


class Swaps:
  """Notes when the server swapped its draft, by looking often, while it is entered.

  Attributes:
    seen: clocks between which each swap happened, in order.
  """

  def __init__(self, server: http_load.Server):
    """Does not look yet."""
    self._server, self.seen = server, []
    self._ended, self._thread = threading.Event(), threading.Thread(target=self._watch)

  def __enter__(self) -> "Swaps":
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._ended.set()
    self._thread.join()

  def _watch(self) -> None:
    last, before = None, time.perf_counter()
    while not self._ended.wait(POLL_SECONDS):
      start = time.perf_counter()
      version = json.loads(self._server.get("/live"))["draft_version"]
      if last is not None and version != last:
        self.seen.append((before, time.perf_counter()))
      last, before = version, start


def pauses(
  streams: Iterable[Sequence[float]], swaps: Sequence[tuple[float, float]]
) -> dict[str, float]:
  """Returns the pauses between pieces of streams, in milliseconds.

  Args:
    streams: clocks of the pieces of each stream.
    swaps: clocks between which each swap happened, in order.
  """
  pairs = itertools.chain.from_iterable(map(itertools.pairwise, streams))
  begun, ended = np.array(list(pairs), np.float64).reshape(-1, 2).T
  starts, ends = np.array(swaps, np.float64).reshape(-1, 2).T
  first = np.searchsorted(ends, begun)  # the first swap that is not over
  is_near = np.append(starts, np.inf)[first] < ended
  milliseconds = 1e3 * (ended - begun)
  values: dict[str, float] = {}
  for name, some in (
    ("at swaps", milliseconds[is_near]),
    ("elsewhere", milliseconds[~is_near]),
  ):
    values[f"pauses {name}"] = len(some)
    if len(some):
      values[f"pause {name}, p99, ms"] = round(float(np.percentile(some, 99)), 1)
      values[f"pause {name}, median, ms"] = round(float(np.median(some)), 1)
  return values


class Soak:
  """Sends the requests of a plan and notes what happens."""

  def __init__(self, server: http_load.Server, works: Sequence[Work]):
    """Sends nothing yet."""
    self._server, self._works = server, works
    self._coming, self._lock = iter(works), threading.Lock()
    self.sent: collections.Counter[str] = collections.Counter()
    self.faults: list[str] = []
    self.memory: list[int] = []  # bytes, `MEMORY_SAMPLES` times
    self.streams: list[list[float]] = []  # clocks of the pieces

  def run(self, clients: int) -> None:
    """Sends all requests from some clients."""
    http_load.in_threads([self._work] * clients)

  def _work(self) -> None:
    every = max(len(self._works) // MEMORY_SAMPLES, 1)
    while True:
      with self._lock:
        work = next(self._coming, None)
      if work is None:
        return
      fault = verdict(self._server.url, work, self._note)
      with self._lock:
        self.sent[work.kind] += 1
        if fault:
          self.faults.append(fault)
          print(fault, file=sys.stderr)
        if self.sent.total() % every == 0:
          self.memory.append(self._server.resident_bytes())

  def _note(self, reply: http_load.Reply) -> None:
    if len(reply.pieces) > 1:
      self.streams.append(reply.pieces)

  def growth(self) -> float:
    """Returns the memory at the end over that at 20 %, minus 1."""
    parts = np.array_split(np.array(self.memory, np.float64), 20)
    return float(np.median(parts[-1]) / np.median(parts[3]) - 1)


def soaked(args: argparse.Namespace, works: Sequence[Work]) -> dict[str, Any]:
  """Runs the server under load and returns all counts."""
  run_directory = f"ServeConfig.run_directory={str(args.out / 'run')!r}"
  # Refuses nothing: a client that has left keeps its place until the server notices.
  queue = f"ServeConfig.max_waiting={2 * args.clients}"
  server = http_load.Server(
    [run_directory, queue, *args.bindings], args.out, {"JAX_LOG_COMPILES": "1"}
  )
  with server:
    started, soak, swaps = time.monotonic(), Soak(server, works), Swaps(server)
    with swaps:
      soak.run(args.clients)
    seconds = time.monotonic() - started
    live = json.loads(server.get("/live"))
    dropped = DROPPED.search(server.get("/metrics"))
    code = server.stop()
  compiled = server.compiled_after_start()
  for name, count in collections.Counter(compiled).items():
    print(f"compiled after the start: {name}, {count} times", file=sys.stderr)
  return {
    **{f"requests, {kind}": soak.sent[kind] for kind in SHARES},
    "lost": sum(fault.startswith("lost") for fault in soak.faults),
    "wrong": sum(fault.startswith("wrong") for fault in soak.faults),
    "swaps of the draft": live["draft_version"],
    "learning failed": int(bool(live["learning_failure"])),
    "answers that the learner dropped": int(float(dropped[1])) if dropped else 0,
    "memory at the end, MB": round(soak.memory[-1] / 1e6),
    "memory growth": round(soak.growth(), 4),
    "compilations": len(compiled),
    "exit code": code,
    "seconds": round(seconds),
    **pauses(soak.streams, swaps.seen),
    "memory, MB": [round(size / 1e6) for size in soak.memory],
  }


def is_kept(found: dict[str, Any]) -> bool:
  """Returns whether all promises were kept."""
  zero = ("lost", "wrong", "learning failed", "compilations", "exit code")
  is_flat = found["memory growth"] <= 0.02
  return is_flat and found["swaps of the draft"] > 0 and not any(map(found.get, zero))


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the test; returns exit code 1 if a promise was broken."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--requests", type=int, default=10_000)
  parser.add_argument("--clients", type=int, default=16)
  parser.add_argument("--prompts", type=int, default=100, help="before and after")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  parser.add_argument("--out", type=pathlib.Path, default="runs/serving_soak")
  args = parser.parse_args(arguments)
  args.out = args.out.absolute()
  if (args.out / "run").exists():
    parser.error(f"--out: {args.out} contains an earlier test; choose a new folder")
  args.out.mkdir(parents=True, exist_ok=True)
  before, after = (
    prompts_of(topics, args.prompts, args.bindings) for topics in (BEFORE, AFTER)
  )
  counts = soaked(args, plan(before, after, args.requests, args.seed))
  table = rich.table.Table("count", "value")
  for name, value in counts.items():
    if not isinstance(value, list):
      table.add_row(name, str(value))
  rich.console.Console().print(table)
  print(json.dumps(counts))
  (args.out / "result.json").write_text(json.dumps(counts) + "\n")
  return 0 if is_kept(counts) else 1


if __name__ == "__main__":
  sys.exit(main())
