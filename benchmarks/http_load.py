"""`osd serve` as a process, its clients, and traces of requests.

    with Server(bindings, folder) as server:
      replies = closed_loop(server.url, bodies, clients=8)
      replies = open_loop(server.url, bodies, arrivals("bursty", 100, 5.0, seed=0))

Clients are threads. A reply has the clock at which every piece of text came in.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
TRACES = ("steady", "bursty", "diurnal")
READY = re.compile(r"^serving .* at (http://\S+)$", re.MULTILINE)
COMPILED = re.compile(r"^Finished XLA compilation of (.+?) in ", re.MULTILINE)
START_SECONDS = 900  # a first start compiles everything
MAX_CLIENTS = 256
_RUN = "import sys; from osd_jax.main import main; sys.exit(main())"


class Server:
  """A server process on a free port of this machine.

  Attributes:
    log: file with the output of the process.
    process: the process.
    url: its address; "" until it answers.
  """

  def __init__(
    self,
    bindings: Sequence[str],
    folder: pathlib.Path,
    variables: Mapping[str, str] = types.MappingProxyType({}),
    gin_file: str = "runs/serve.gin",
  ):
    """Starts the process; `wait_until_ready` waits until it answers.

    Args:
      bindings: settings, such as "ServeConfig.learn=False".
      folder: for the log; created if needed.
      variables: environment variables; JAX_LOG_COMPILES=1 makes the log name every
        program that is compiled.
      gin_file: further settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    self.log, self.url = folder / "server.log", ""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= variables
    settings = ["ServeConfig.port=0", *bindings]
    flags = [f"--gin_file={gin_file}", *(f"--gin.{one}" for one in settings)]
    command = [sys.executable, "-c", _RUN, "serve", *flags]
    with open(self.log, "wb") as log:
      self.process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, cwd=folder
      )

  def __enter__(self) -> "Server":
    try:
      self.wait_until_ready()
    except BaseException:
      self.kill()
      raise
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()

  def wait_until_ready(self) -> None:
    """Waits until the server answers.

    Raises:
      RuntimeError: it has ended, or is not ready in time; with the end of its log.
    """
    end = time.monotonic() + START_SECONDS
    while not (match := READY.search(self.text())):
      if self.process.poll() is not None or time.monotonic() > end:
        raise RuntimeError(f"the server did not start:\n{self.text()[-2000:]}")
      time.sleep(0.02)
    self.url = match[1]

  def text(self) -> str:
    """Returns what the process has printed so far."""
    return self.log.read_text(errors="replace")

  def compiled_after_start(self) -> list[str]:
    """Returns the names of the programs that were compiled since it was ready."""
    _, _, after = self.text().partition(f" at {self.url}\n")
    return COMPILED.findall(after)

  def resident_bytes(self) -> int:
    """Returns the memory of the process that is in RAM."""
    status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
    match = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024

  def cpu_seconds(self) -> float:
    """Returns the CPU time of the process."""
    stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

  def wait_until_idle(self, timeout: float = 60.0) -> None:
    """Waits until the process uses less than a tenth of a core: no update runs."""
    end, step = time.monotonic() + timeout, 0.3
    before = self.cpu_seconds()
    while time.monotonic() < end:
      time.sleep(step)
      now = self.cpu_seconds()
      if now - before < 0.1 * step:
        return
      before = now

  def get(self, path: str) -> str:
    """Returns the body at a path."""
    return send(self.url, "GET", path)[1]

  def stop(self, timeout: float = 120.0) -> int:
    """Ends the process with SIGTERM; returns its exit code."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGTERM)
    try:
      return self.process.wait(timeout)
    except subprocess.TimeoutExpired:
      self.kill()
      return -signal.SIGKILL

  def kill(self) -> None:
    """Ends the process with SIGKILL."""
    self.process.kill()
    self.process.wait()


@dataclasses.dataclass
class Reply:
  """What a client saw of one request.

  Attributes:
    due: clock at which the request was due; it was sent then or a little later.
    status: HTTP status; 0 if the connection broke before the answer was complete.
    pieces: clock at which each piece of text came in.
    ended: clock at the end of the body.
    text: the answer so far.
    body: the last object with a usage, or the error.
    retry_after: whether the answer said when to try again.
  """

  due: float
  status: int = 0
  pieces: list[float] = dataclasses.field(default_factory=list)
  ended: float = 0.0
  text: str = ""
  body: dict[str, Any] = dataclasses.field(default_factory=dict)
  retry_after: bool = False

  @property
  def is_answered(self) -> bool:
    """Whether the whole answer came in."""
    return self.status == 200

  @property
  def tokens(self) -> int:
    """Emitted tokens."""
    return self.body.get("usage", {}).get("completion_tokens", 0)


def send(url: str, verb: str, path: str, body: bytes = b"") -> tuple[int, str]:
  """Sends a raw request; returns status and body."""
  with contextlib.closing(_connected(url)) as connection:
    connection.request(verb, path, body or None, JSON)
    response = connection.getresponse()
    return response.status, response.read().decode()


def ask(
  url: str,
  body: Mapping[str, Any],
  path: str = CHAT,
  due: float | None = None,
  leave_after: int | None = None,
) -> Reply:
  """Sends a request on a new connection and reads the answer.

  Args:
    url: address of the server.
    body: parameters.
    path: completions of a chat or of a text.
    due: clock at which it was due; None means now.
    leave_after: closes the connection after this many pieces of text.
  """
  reply = Reply(time.perf_counter() if due is None else due)
  with contextlib.closing(_connected(url)) as connection:
    try:
      connection.request("POST", path, json.dumps(body), JSON)
      response = connection.getresponse()
      reply.retry_after = response.getheader("Retry-After") is not None
      if body.get("stream") and response.status == 200:
        reply.status = 200 if _read_events(response, reply, leave_after) else 0
      else:
        reply.body = json.loads(response.read())
        reply.status = response.status
        reply.text = "".join(map(_text, reply.body.get("choices", ())))
    except (OSError, http.client.HTTPException, ValueError):
      reply.status = 0
  reply.ended = time.perf_counter()
  return reply


def _connected(url: str, timeout: float = 300.0) -> http.client.HTTPConnection:
  address = urllib.parse.urlsplit(url)
  assert address.hostname and address.port
  return http.client.HTTPConnection(address.hostname, address.port, timeout=timeout)


def _read_events(
  response: http.client.HTTPResponse, reply: Reply, leave_after: int | None
) -> bool:
  """Reads server-sent events; returns whether they were complete."""
  is_whole, has_ended = True, False
  while leave_after is None or len(reply.pieces) < leave_after:
    line = response.readline()
    if not line:
      return is_whole and has_ended  # the server of transformers sends no [DONE]
    if not line.startswith(b"data: "):
      continue
    if line.startswith(b"data: [DONE]"):
      response.read()
      return is_whole
    event = json.loads(line[len(b"data: ") :])
    is_whole = is_whole and "error" not in event
    if "usage" in event or "error" in event:
      reply.body = event
    choices = event.get("choices", ())
    has_ended = has_ended or any(choice.get("finish_reason") for choice in choices)
    if piece := "".join(map(_text, choices)):
      reply.pieces.append(time.perf_counter())
      reply.text += piece
  return False


def _text(choice: Mapping[str, Any]) -> str:
  """Returns the text of a choice or of a piece of one."""
  part = choice.get("delta") or choice.get("message") or choice
  return part.get("text") or part.get("content") or ""


def streamed(prompt: str, **fields: Any) -> dict[str, Any]:
  """Returns the body of a greedy chat request that is streamed."""
  message = {"role": "user", "content": prompt}
  options = {"stream": True, "stream_options": {"include_usage": True}}
  return {"messages": [message], "temperature": 0, **options, **fields}


def closed_loop(
  url: str, bodies: Sequence[Mapping[str, Any]], clients: int
) -> list[Reply]:
  """Sends requests from clients that each wait for their answer; returns replies."""
  replies: list[Any] = [None] * len(bodies)
  coming, lock = iter(range(len(bodies))), threading.Lock()

  def work() -> None:
    while True:
      with lock:
        place = next(coming, None)
      if place is None:
        return
      replies[place] = ask(url, bodies[place])

  in_threads([work] * clients)
  return replies


def open_loop(
  url: str, bodies: Sequence[Mapping[str, Any]], times: Iterable[float]
) -> list[Reply]:
  """Sends request i at times[i] seconds from now, however many are unanswered."""
  start, futures = time.perf_counter() + 0.1, []
  with ThreadPoolExecutor(min(len(bodies), MAX_CLIENTS)) as pool:
    for body, after in zip(bodies, times, strict=True):
      time.sleep(max(start + after - time.perf_counter(), 0))
      futures.append(pool.submit(ask, url, body, due=start + after))
  return [future.result() for future in futures]


def in_threads(works: Sequence[Callable[[], object]]) -> None:
  """Runs functions at the same time; raises the first error."""
  with ThreadPoolExecutor(len(works)) as pool:
    for future in [pool.submit(work) for work in works]:
      future.result()


def arrivals(trace: str, count: int, rate: float, seed: int) -> np.ndarray:
  """Returns the times of `count` requests with a mean rate, [count] seconds.

  Args:
    trace: "steady" is a Poisson process; "bursty" has gamma-distributed gaps with a
      standard deviation of twice their mean; "diurnal" is a Poisson process whose rate
      swings by 80 % around its mean, once in the whole trace.
    count: number of requests.
    rate: mean requests per second.
    seed: of the draws.
  """
  draws = np.random.default_rng(seed)
  shape = 0.25 if trace == "bursty" else 1.0
  passed = np.cumsum(draws.gamma(shape, 1 / shape, count)) / rate
  if trace != "diurnal":
    return passed
  day = count / rate
  clock = np.linspace(0, 2 * day, 4096)
  # The integral of the rate 1 - .8 cos(2 pi t / day), with its lowest point at night.
  grown = clock - 0.8 * day / (2 * np.pi) * np.sin(2 * np.pi * clock / day)
  return np.interp(passed, grown, clock)
