"""What text in and text out costs: `Server.generate` beside the bare `Slots.run`.

The shipped pair answers the same prompts, greedily and by turns, through the same
slots: once as texts through `Server.generate`, once as token ids that were encoded
before, with no text made of the answers. Both clocks are read in every turn.

  python benchmarks/bench_front_door.py [--rows 1 4] [--requests 16] [--turns 20]
      [--threads 1]
"""

import argparse
import dataclasses

import measure

from osd_jax.data import generated
from osd_jax.serving import server as server_lib
from osd_jax.serving import slots

ASKED = ">= 0.99"
TEXT, BARE = "Server.generate", "Slots.run"


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
  vocabulary = server.pair.vocabulary
  requests = [slots.Request(vocabulary.encode_with_eos(text)) for text in prompts]
  people = {
    TEXT: lambda: list(server.generate(prompts)),
    BARE: lambda: server.slots.run(requests),
  }
  answers = people[BARE]()
  tokens = sum(len(done.tokens) for done in answers)
  assert sum(len(answer.tokens) for answer in people[TEXT]()) == tokens
  times = measure.by_turns(people, turns)
  count = server.slots.config.rows
  case = f"shipped pair, K {server.slots.config.num_draft_tokens}, {count} row"
  found = []
  for clock in ("cpu", "wall"):
    common = {
      "case": case + "s" * (count > 1),
      "clock": f"{clock}, {threads} thread(s)",
    }
    for name in people:
      speed = tokens / times[name].milliseconds(clock) * 1e3
      found.append(common | {"figure": f"{name}, tokens/s", "value": speed})
    over = measure.ratio(times, BARE, TEXT, clock)
    figure = {"figure": f"{TEXT} over {BARE}, speed", "value": over, "asked": ASKED}
    found.append(common | figure)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
  parser.add_argument("--requests", type=int, default=16, help="of a turn")
  parser.add_argument("--turns", type=int, default=20)
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
