"""Kills `osd serve` with SIGKILL under load and restarts it, many times.

Clients send requests with unique prompts all the time. The test checks that

- every answer that a client received completely is in the journal, once, and no number
  of the journal ever changes its meaning;
- requests with learn = false are never there;
- every restart succeeds;
- at the end the learner has observed exactly the journal's answers: its count, and the
  rows of its replay buffer in their order.

  python experiments/serving_kill/run.py [--kills 50] [--seed 0]
      [--out runs/serving_kill]

The pair is tiny (tests/tiny_online.py) and a checkpoint is taken every 20 answers. On
average, one kill in four hits the start (loading, restoring, learning from the
journal), one the writing of a checkpoint, and the others any moment. Exit code 1 if
there was a fault; `result.json` has the counts.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import random
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import http_load
import numpy as np
import rich.console
import rich.table

from osd_jax import runs
from osd_jax.main import settings
from osd_serve.service import ServeConfig, Service

MOMENTS = ("start", "checkpoint", "anywhere", "anywhere")
CLIENTS = 6
PATIENCE = 60.0  # seconds to wait for a checkpoint
Tokens = tuple[int, ...]


@dataclasses.dataclass
class Tally:
  """Counts of kills, answers and faults."""

  kills: int = 0
  answers: int = 0  # received completely by a client
  in_journal: int = 0
  restarts_failed: int = 0
  lost: int = 0  # answers that the journal does not have
  doubled: int = 0  # prompts that the journal has twice
  renumbered: int = 0  # numbers that changed their meaning
  kept_in_spite_of_learn_false: int = 0
  learner_count_off_by: int = 0
  buffer_rows_unlike_the_journal: int = 0

  def faults(self) -> int:
    """Returns the total number of faults."""
    not_faults = self.kills + self.answers + self.in_journal
    return sum(dataclasses.asdict(self).values()) - not_faults


class Journal:
  """All answers that outputs.jsonl of a run directory ever had.

  Attributes:
    rows: place among the answers with tokens -> token ids of prompt and answer.
    renumbered: numbers that were seen with different contents.
  """

  def __init__(self, path: pathlib.Path):
    """Has read nothing yet."""
    self._path = path
    self.rows: dict[int, tuple[Tokens, Tokens]] = {}
    self.renumbered: set[int] = set()

  def read(self) -> None:
    """Adds what the file has now; a line that is being written counts later."""
    lines = self._path.read_text().splitlines() if self._path.exists() else []
    entries = []
    for line in lines:
      with contextlib.suppress(ValueError):
        row = json.loads(line)
        if "output_ids" in row:
          entries.append((tuple(row["prompt_ids"]), tuple(row["output_ids"])))
    for number, entry in enumerate(entries):
      if self.rows.setdefault(number, entry) != entry:
        self.renumbered.add(number)


class Clients:
  """Threads that send requests until the server is gone.

  Attributes:
    received: prompts whose answers were received completely.
    private: prompts that were sent with learn = false.
  """

  def __init__(self, seed: int):
    """Sends nothing yet."""
    self._draws, self._lock = random.Random(seed), threading.Lock()
    self._sent, self._ended = 0, threading.Event()
    self.received: set[Tokens] = set()
    self.private: set[Tokens] = set()

  @contextlib.contextmanager
  def sending(self, url: str):
    """Sends requests meanwhile."""
    self._ended.clear()
    works = [threading.Thread(target=self._work, args=(url,)) for _ in range(CLIENTS)]
    for work in works:
      work.start()
    try:
      yield
    finally:
      self._ended.set()
      for work in works:
        work.join()

  def _work(self, url: str) -> None:
    while not self._ended.is_set():
      with self._lock:
        draws, number = self._draws, self._sent
        self._sent += 1
        unique = (3 + number % 1000, 3 + number // 1000)
        prompt = (*unique, *(draws.randrange(3, 1000) for _ in range(6)))
        body = {"prompt": prompt, "temperature": 0, "stream": draws.random() < 0.5}
        pause = draws.uniform(0, 0.1)  # the learner must be able to follow
        body["learn"] = draws.random() < 0.9
        if not body["learn"]:
          self.private.add(prompt)
      reply = http_load.ask(url, body, "/v1/completions")
      if not reply.is_answered:
        return  # the server was killed
      if body["learn"]:
        self.received.add(prompt)
      self._ended.wait(pause)


def bindings_of(out: pathlib.Path) -> list[str]:
  """Saves the tiny pair; returns the settings of the server."""
  sys.path.insert(0, str(http_load.ROOT / "tests"))
  import tiny_online

  pair = tiny_online.save_lively_pair(out)
  return [
    f"PairConfig.target={pair.target!r}",
    f"PairConfig.draft={pair.draft!r}",
    "DecodingConfig.rows=2",
    "DecodingConfig.num_draft_tokens=3",
    "DecodingConfig.source_lengths=(16,)",
    "DecodingConfig.target_length=12",
    "UpdateConfig.steps_per_update=1",
    "UpdateConfig.length_multiple=6",
    "BufferConfig.capacity=8192",  # holds every answer, so that all can be compared
    "ServeConfig.checkpoint_every=20",
    f"ServeConfig.max_waiting={CLIENTS}",  # refuses nothing
    f"ServeConfig.run_directory={str(out / 'run')!r}",
  ]


class KillTest:
  """Kills and restarts a server; compares its journal with the clients' answers."""

  def __init__(self, out: pathlib.Path, seed: int):
    """Saves the pair."""
    self._out, self._draws = out, random.Random(seed)
    self._bindings = bindings_of(out)
    self._variables = {
      "JAX_COMPILATION_CACHE_DIR": str(out / "jax_cache"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # restarts compile nothing
    }
    self._run = out / "run"
    self._start_seconds = 10.0
    self.tally, self.moments = Tally(), dict.fromkeys(MOMENTS, 0)
    self.journal, self.clients = Journal(self._run / "outputs.jsonl"), Clients(seed)

  def live(self, number: int, kills: bool) -> None:
    """Starts the server and kills it, or ends it in order.

    Args:
      number: of this start, from 0.
      kills: whether it is killed.
    """
    server = http_load.Server(
      self._bindings, self._out / f"life_{number:03d}", self._variables
    )
    moment = self._draws.choice(MOMENTS) if kills else ""
    began = time.monotonic()
    try:
      if moment == "start" and number:
        self._watch(server, self._draws.uniform(0, self._start_seconds))
      else:
        server.wait_until_ready()
        self._start_seconds = time.monotonic() - began
        with self.clients.sending(server.url):
          self._load(server, moment)
          if moment:
            server.kill()
      if not moment:
        self.tally.restarts_failed += server.stop() != 0
    except RuntimeError as error:
      self.tally.restarts_failed += 1
      print(error, file=sys.stderr)
    finally:
      server.kill()
    if moment:
      self.tally.kills += 1
      self.moments[moment] += 1
    self.journal.read()

  def _load(self, server: http_load.Server, moment: str) -> None:
    """Waits until the moment of the kill."""
    end = time.monotonic() + PATIENCE
    self._watch(server, self._draws.uniform(0.2, 5.0))
    if moment == "checkpoint":
      while time.monotonic() < end and not self._writes_checkpoint():
        self._watch(server, 0.005)

  def _watch(self, server: http_load.Server, seconds: float) -> None:
    """Reads the journal again and again, so that a change is seen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
      self.journal.read()
      time.sleep(min(0.02, seconds))

  def _writes_checkpoint(self) -> bool:
    return any((self._run / "checkpoints").glob("*tmp*"))

  def compare(self) -> None:
    """Counts faults, after the server has ended in order."""
    tally, rows = self.tally, self.journal.rows
    prompts = [prompt for prompt, _ in rows.values()]
    tally.answers, tally.in_journal = len(self.clients.received), len(rows)
    tally.lost = len(self.clients.received - set(prompts))
    tally.doubled = len(prompts) - len(set(prompts))
    tally.renumbered = len(self.journal.renumbered)
    end = len(rows)
    tally.kept_in_spite_of_learn_false = len(self.clients.private & set(prompts))
    config, _ = settings.load(ServeConfig, ["runs/serve.gin"], self._bindings)
    service = Service(config, runs.RunDirectory(self._run))
    try:
      buffer = service.server.learner.state()[0]["buffer"]
      counts = service.loop.learned, int(buffer.added)
      tally.learner_count_off_by = max(abs(count - end) for count in counts)
      tally.buffer_rows_unlike_the_journal = differing(buffer, rows)
    finally:
      service.close()


def differing(buffer: Any, rows: dict[int, tuple[Tokens, Tokens]]) -> int:
  """Returns how many rows of a replay buffer are not those of the journal."""
  data, end = buffer.data, int(buffer.added)
  sources, targets, masks = map(np.asarray, (data.source, data.target, data.mask))
  count = 0
  for number in range(max(end - buffer.capacity, 0), end):
    slot = number % buffer.capacity
    prompt, answer = rows.get(number, ((), ()))
    tokens = targets[slot][masks[slot]].tolist()
    is_same = tokens == list(answer) and sources[slot, : len(prompt)].tolist() == list(
      prompt
    )
    count += not is_same
  return count


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the test; returns exit code 1 if there were faults."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--kills", type=int, default=50)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=pathlib.Path, default="runs/serving_kill")
  args = parser.parse_args(arguments)
  out = args.out.absolute()
  if (out / "run").exists():
    parser.error(f"--out: {out} contains an earlier test; choose a new folder")
  out.mkdir(parents=True, exist_ok=True)
  started, test = time.monotonic(), KillTest(out, args.seed)
  for number in range(args.kills + 1):
    test.live(number, kills=number < args.kills)
  test.compare()
  counts = dataclasses.asdict(test.tally)
  counts["seconds"] = round(time.monotonic() - started)
  counts |= {f"kills_at_{moment}": count for moment, count in test.moments.items()}
  table = rich.table.Table("count", "value")
  for name, value in counts.items():
    table.add_row(name.replace("_", " "), str(value))
  rich.console.Console().print(table)
  print(json.dumps(counts))
  (out / "result.json").write_text(json.dumps(counts) + "\n")
  return 1 if test.tally.faults() else 0


if __name__ == "__main__":
  sys.exit(main())
