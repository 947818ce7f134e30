"""What a lighter served draft costs in acceptance and gains in time, on real requests.

The same draft is served in float32, in 8 bits, with an output head for some tokens only
(chosen from the records of the first requests of every topic, as the online loop does
at each swap), and both. Draft acceptance and CPU time of the requests behind them, by
turns; outputs are the same by construction, and compared.

  python benchmarks/bench_draft_serving.py [--gin_file runs/demo.gin] [--shortlist 512]
      [--requests 20] [--bindings NAME=VALUE ...]

`bench_speculative.py` has the gain on shapes where the draft's head is large.
"""

import argparse
import dataclasses
import functools

import contenders
import measure

from osd_jax import online
from osd_jax.data import streams
from osd_jax.main import settings
from osd_jax.models import t5
from osd_jax.serving import slots
from osd_jax.serving.server import Server


class Served:
  """One way of serving the pair's draft."""

  def __init__(self, config, serving, fill: int, count: int):
    """Loads the pair and seeds a buffer with answers, which chooses the shortlist."""
    pair = dataclasses.replace(config.pair, draft_serving=serving)
    self._server = Server(pair, config.decoding, config.learning)
    stream = streams.QueryStream(config.stream, self._server.pair.vocabulary)
    asked = [
      slots.Request(stream[start + place].tokens)
      for place in range(fill + count)
      for start, _ in stream.shifts()
    ]
    first = asked[: fill * len(stream.shifts())]
    self._requests = asked[len(first) :]
    self._server.seed([done.batch for done in self._server.run(first)])

  @functools.cached_property
  def found(self) -> list:
    """The answers."""
    return self._server.run(self._requests)

  @property
  def tokens(self) -> list:
    """What was emitted, request by request."""
    return [done.tokens.tolist() for done in self.found]

  @property
  def acceptance(self) -> float:
    """Accepted / drafted tokens."""
    drafted = sum(done.drafted for done in self.found)
    return sum(done.accepted for done in self.found) / drafted

  def __call__(self) -> None:
    self._server.run(self._requests)


def rows_of(given: argparse.Namespace, config) -> list[dict]:
  """Measures every way of serving."""
  ways = {
    "float32": contenders.WHOLE,
    "int8": t5.DraftServing(int8=True),
    "shortlist": t5.DraftServing(shortlist=given.shortlist),
    "both": t5.DraftServing(int8=True, shortlist=given.shortlist),
  }
  people = {
    name: Served(config, serving, given.fill, given.requests)
    for name, serving in ways.items()
  }
  whole = people["float32"]
  assert all(person.tokens == whole.tokens for person in people.values())
  times = measure.by_turns(people, given.turns)
  figures = {}
  for name, person in people.items():
    figures[f"{name} draft, draft acceptance"] = person.acceptance
    if name != "float32":
      lost = whole.acceptance - person.acceptance
      over = measure.ratio(times, name, "float32", "cpu")
      figures[f"{name} draft, lost acceptance"] = lost
      figures[f"{name} draft, time over the float32 draft's"] = over
  case = f"{given.gin_file}, shortlist {given.shortlist}"
  return measure.rows(case, "cpu, 1 thread(s)", figures)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gin_file", default="runs/demo.gin")
  parser.add_argument("--shortlist", type=int, default=512)
  parser.add_argument("--fill", type=int, default=10, help="requests of a topic")
  parser.add_argument("--requests", type=int, default=20, help="of a topic")
  parser.add_argument("--turns", type=int, default=3)
  parser.add_argument("--bindings", nargs="*", default=[], help="NAME=VALUE")
  given = parser.parse_args()
  measure.restart(1)
  config, _ = settings.load(online.OnlineConfig, [given.gin_file], given.bindings)
  measure.report("draft_serving", rows_of(given, config))


if __name__ == "__main__":
  main()
