"""Requests of all kinds for a server under test, and checks of what came back.

The tests use a tiny pair; the prompts are the questions of the generated topics.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from osd_jax.data import examples

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 60  # max_tokens
PATIENCE = 600  # seconds to wait for a start
# Kinds of requests, with their weights.
KINDS = {"greedy": 8, "stream": 5, "sampled": 3, "left": 3, "bad": 1}
BAD = (
  {"prompt": ""},
  {"prompt": "word " * 500},
  {"prompt": "a", "max_tokens": 10**6},
  {"prompt": "a", "temperature": "warm"},
  {"prompt": "a", "tools": [{}]},
)


def questions(count: int) -> list[str]:
  """Returns prompts: topics 1 and 2 in the first half, 3 and 4 in the second."""
  halves = []
  for topics in (examples.TOPICS[:2], examples.TOPICS[2:]):
    texts = [
      [one.prompt for one in examples.topic_examples(topic, "stream", 400)]
      for topic in topics
    ]
    mixed = itertools.cycle(itertools.chain.from_iterable(zip(*texts, strict=False)))
    halves += itertools.islice(mixed, (count + 1) // 2)
  return halves[:count]


class Client:
  """Sends requests of all kinds from several threads and counts what came back.

  Attributes:
    tally: number of requests by result; "wrong" and "failed" must not be there.
    received: whole answers that the draft learns from.
  """

  def __init__(self, url: str, right: dict[str, str], seed: int = 0):
    """Sends to `url`; `right` holds the greedy answers."""
    self._url, self._right, self._seed = url, right, seed
    self.tally: collections.Counter[str] = collections.Counter()
    self.received = 0
    self._lock = threading.Lock()

  def run(self, texts: Sequence[str], clients: int, kinds: dict[str, int]) -> None:
    """Sends one request per text; each of `clients` waits for its answer."""
    waiting = iter(enumerate(texts))

    def work() -> None:
      with httpx2.Client(base_url=self._url, timeout=120) as http:
        while True:
          with self._lock:
            index, text = next(waiting, (0, None))
          if text is None:
            return
          draw = random.Random(f"{self._seed} {index}")
          (kind,) = draw.choices(list(kinds), list(kinds.values()))
          result = self._ask(http, kind, text, draw)
          with self._lock:
            self.tally[result] += 1

    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
      for done in [threads.submit(work) for _ in range(clients)]:
        done.result()

  def _ask(self, http: Any, kind: str, text: str, draw: random.Random) -> str:
    body = {"prompt": text, "max_tokens": LIMIT, "temperature": 0}
    if kind == "bad":
      answer = http.post("/v1/completions", json=draw.choice(BAD))
      return "refused" if answer.status_code == 400 else "failed"
    if kind in ("stream", "left"):
      return self._streamed(http, body, kind == "left")
    if kind == "sampled":
      body |= {"temperature": 1.0, "seed": draw.randrange(2**31), "top_p": 0.9}
    answer = http.post("/v1/completions", json=body)
    if answer.status_code == 429:
      return "queue full"
    if answer.status_code != 200:
      return "failed"
    found = answer.json()
    with self._lock:
      self.received += 1
    if kind == "sampled":
      return "sampled"
    return self._judged(text, found["choices"][0]["text"])

  def _streamed(self, http: Any, body: dict[str, Any], leaves: bool) -> str:
    pieces, ended = [], False
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as lines:
      if lines.status_code != 200:
        return "queue full" if lines.status_code == 429 else "failed"
      for line in lines.iter_lines():
        ended |= line == "data: [DONE]"
        if line and not ended:
          pieces.append(json.loads(line.removeprefix("data: ")))
          if leaves:
            return "left"
    if not ended or "error" in pieces[-1]:
      return "failed"
    with self._lock:
      self.received += 1
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    return self._judged(body["prompt"], text)

  def _judged(self, prompt: str, text: str) -> str:
    if not self._right:
      return "answered"
    return "right" if text == self._right[prompt] else "wrong"


def start(out: pathlib.Path, *bindings: str) -> tuple[subprocess.Popen, str]:
  """Starts `osd serve` on a free port; returns the process and its address."""
  log = out / "server.log"
  program = "import sys; from osd_jax.main import main; sys.exit(main())"
  command = [sys.executable, "-c", program, "serve", "--gin.ServeConfig.port=0"]
  command += [f"--gin.{binding}" for binding in bindings]
  paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
  with open(log, "w") as file:
    process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
  deadline = time.monotonic() + PATIENCE
  while "serving osd at " not in (text := log.read_text()):
    if process.poll() is not None or time.monotonic() > deadline:
      raise RuntimeError(f"osd serve did not start:\n{text[-2000:]}")
    time.sleep(0.2)
  return process, text.partition("serving osd at ")[2].split()[0]


def metric(url: str, name: str) -> float:
  """Reads one metric; labels are ignored."""
  for line in httpx2.get(f"{url}/metrics").text.splitlines():
    if line.split("{")[0].split(" ")[0] == name:
      return float(line.rsplit(" ", 1)[1])
  raise KeyError(name)


def live(url: str) -> dict[str, Any]:
  """Reads the numbers of the live page."""
  return httpx2.get(f"{url}/live").json()


def soak(
  url: str, count: int, clients: int, right: dict[str, str], texts: Sequence[str]
) -> dict[str, Any]:
  """Sends `count` requests of all kinds; returns what the server and clients saw."""
  client = Client(url, right)
  compiled = metric(url, "osd:compilations_total")
  fifth = count // 5
  client.run(texts[:fifth], clients, KINDS)
  early = metric(url, "process_resident_memory_bytes")
  client.run(texts[fifth:count], clients, KINDS)
  late, seen = metric(url, "process_resident_memory_bytes"), live(url)
  return {
    "requests": count,
    **{name: client.tally[name] for name in ("right", "wrong", "failed")},
    "others": {
      name: number
      for name, number in client.tally.items()
      if name not in ("right", "wrong", "failed")
    },
    "memory_growth": round(late / early - 1, 4),
    "compilations": int(metric(url, "osd:compilations_total") - compiled),
    "draft_version": seen["draft_version"],
    "tokens_per_target_call": round(seen["tokens_per_target_call"] or 0, 3),
    "in_flight_at_the_end": seen["running"] + seen["waiting"],
  }


def kill(out: pathlib.Path, kills: int, bindings: Sequence[str]) -> dict[str, Any]:
  """Kills a learning server under load; returns lost and doubled records."""
  run = f"ServeConfig.run_directory={str(out / 'killed')!r}"
  settings = (run, "ServeConfig.checkpoint_every=20", *bindings)
  draw, clients, faults, received, unsure = random.Random(0), 4, 0, 0, 0
  for number in range(kills + 1):
    process, url = start(out, *settings)
    learned = live(url)["learned"]
    if not received <= learned <= received + unsure:
      faults += 1
    # Answers that no client received, but that had been written, are known now.
    received, unsure = learned, clients
    if number == kills:
      process.send_signal(signal.SIGTERM)
      process.wait(120)
      break
    timer = threading.Timer(draw.uniform(0.1, 6), process.kill)
    timer.start()
    client = Client(url, {}, number)
    with contextlib.suppress(httpx2.TransportError):
      client.run(questions(2000), clients, {"greedy": 1, "sampled": 1})
    process.wait(60)
    timer.join()
    received += client.received
  return {"kills": kills, "faults": faults, "learned": received}
