"""What text in and text out costs: `Server.generate` beside the bare `Slots.run`.

The shipped pair answers the same prompts, greedily and by turns, through the same
slots: once as texts through `Server.generate`, once as token ids that were encoded
before, with no text made of the answers. CPU time counts, wall time stands beside it.

Where other work shares the machine, compiled calls vary by more than one per cent. So
what is not in them (a turn's wall time less the milliseconds of its answers) is
compared too: what the front door adds to it, turn for turn, over the bare turn.

  python benchmarks/bench_front_door.py [--rows 1 4] [--requests 8] [--turns 40]
      [--threads 1]
"""

import argparse
import dataclasses
import time

import measure
import numpy as np

from osd_jax.data import generated
from osd_jax.serving import server as server_lib
from osd_jax.serving import slots

TEXT, BARE = "Server.generate", "Slots.run"
OVER, ADDED = f"{TEXT} over {BARE}, speed", "added outside the calls, share"
ASKED = {"cpu": {OVER: ">= 0.99"}, "wall": {ADDED: "<= 0.01"}}


class Way:
  """One way of answering.

  Attributes:
    tokens: emitted in a turn.
    outside: milliseconds of every turn that no compiled call took.
  """

  def __init__(self, answer):
    """Answers once, which compiles."""
    self._answer = answer
    self.tokens = sum(len(done.tokens) for done in answer())
    self.outside: list[float] = []

  def __call__(self) -> None:
    started = time.perf_counter()
    answers = list(self._answer())
    spent = (time.perf_counter() - started) * 1e3
    self.outside.append(spent - sum(done.milliseconds for done in answers))


def held_out(requests: int) -> list[str]:
  """Held-out prompts, one of each topic after another."""
  each = -(-requests // len(generated.TOPICS))
  topics = [generated.examples(topic, "eval", each) for topic in generated.TOPICS]
  prompts = [example.prompt for turn in zip(*topics, strict=True) for example in turn]
  return prompts[:requests]


def rows_of(
  server: server_lib.Server, prompts: list[str], turns: int, threads: int
) -> list[dict]:
  """Measures one server."""
  encode = server.pair.vocabulary.encode_with_eos
  requests = [slots.Request(encode(prompt)) for prompt in prompts]
  people = {
    TEXT: Way(lambda: server.generate(prompts)),
    BARE: Way(lambda: server.slots.run(requests)),
  }
  assert people[TEXT].tokens == people[BARE].tokens
  times = measure.by_turns(people, turns)
  config = server.slots.config
  plural = "s" * (config.rows > 1)
  case = f"shipped pair, K {config.num_draft_tokens}, {config.rows} row{plural}"
  found = []
  for clock in ("cpu", "wall"):
    figures = {
      f"{name}, tokens/s": way.tokens / times[name].milliseconds(clock) * 1e3
      for name, way in people.items()
    }
    figures[OVER] = measure.ratio(times, BARE, TEXT, clock)
    if clock == "wall":
      figures[ADDED] = added(people, times[BARE].wall)
    found += measure.rows(case, f"{clock}, {threads} thread(s)", figures, ASKED[clock])
  return found


def added(people: dict[str, Way], seconds: np.ndarray) -> float:
  """Median over the turns of what text adds outside the calls, over a bare turn."""
  text, bare = (np.array(people[name].outside) for name in (TEXT, BARE))
  return float(np.median((text - bare)[-len(seconds) :] / (seconds * 1e3)))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
  parser.add_argument("--requests", type=int, default=8, help="of a turn")
  parser.add_argument("--turns", type=int, default=40)
  parser.add_argument("--threads", type=int, default=1)
  given = parser.parse_args()
  measure.restart(given.threads)
  for rows in given.rows:
    decoding = dataclasses.replace(server_lib.DECODING, rows=rows, num_draft_tokens=7)
    with server_lib.Server(decoding=decoding) as server:
      found = rows_of(server, held_out(given.requests), given.turns, given.threads)
    measure.report("front_door", found)


if __name__ == "__main__":
  main()
