"""A server on a free port of this machine, in a thread, on a tiny pair."""

import contextlib
import dataclasses
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from osd_jax.distillation.schedule import ScheduleConfig
from osd_jax.engine.requests import DecodingConfig
from osd_jax.runs import RunDirectory
from osd_serve import app
from osd_serve.service import LEARNING, ServeConfig, Service

DECODING = DecodingConfig(
  rows=2, num_draft_tokens=3, source_lengths=(48,), target_length=24
)
QUICK = dataclasses.replace(LEARNING, schedule=ScheduleConfig(update_interval=4))
TEXTS = [f"How many hotels are there with rating above {n}?" for n in range(40, 46)]


class Gate:
  """Lets the engine step only when it is told to."""

  def __init__(self, service: Service):
    self._engine, self._step = service.server.engine, service.server.engine.step
    self._permits = threading.Semaphore(0)
    self._engine.step = self._wait

  def _wait(self):
    self._permits.acquire()
    return self._step()

  def step(self, times: int = 1):
    for _ in range(times):
      self._permits.release()

  def open(self):
    self._engine.step = self._step
    self.step(1000)


@dataclasses.dataclass
class Running:
  """A server that runs, and a client of it."""

  service: Service
  client: httpx2.Client
  url: str

  def post(self, path: str, **fields: Any):
    return self.client.post(path, json=fields)

  def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
    """Returns the body of a greedy completion that must succeed."""
    answer = self.post("/v1/completions", prompt=prompt, temperature=0, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()

  def text(self, prompt: Any, **fields: Any) -> str:
    (choice,) = self.complete(prompt, **fields)["choices"]
    return choice["text"]

  def metrics(self) -> dict[str, float]:
    """Returns all metrics by name and labels, without those that all have."""
    lines = self.client.get("/metrics").text.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    common = re.compile('engine="0",|model_name="osd"')
    return {common.sub("", name): float(value) for name, value in found}

  def wait_for(self, holds):
    """Waits until a condition on the service holds."""
    deadline = time.monotonic() + 30
    while not holds(self.service):
      assert time.monotonic() < deadline, self.service.scheduler.load
      time.sleep(0.002)


@contextlib.contextmanager
def running(pair: Any, directory: Path | None = None, token: str = "", **changes: Any):
  """Runs a server; its ports and threads are gone after the block."""
  config = ServeConfig(
    pair=pair, decoding=DECODING, learning=QUICK, shutdown_seconds=20.0
  )
  run = None if directory is None else RunDirectory(directory)
  service = Service(dataclasses.replace(config, **changes), run)
  listening = socket.create_server(("127.0.0.1", 0))
  server = uvicorn.Server(
    uvicorn.Config(app.make(service, token), log_level="warning", access_log=False)
  )
  thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
  thread.start()
  url = f"http://127.0.0.1:{listening.getsockname()[1]}"
  headers = {"Authorization": f"Bearer {token}"} if token else {}
  try:
    with httpx2.Client(base_url=url, timeout=60, headers=headers) as client:
      yield Running(service, client, url)
  finally:
    server.should_exit = True
    thread.join(60)
    service.close()
