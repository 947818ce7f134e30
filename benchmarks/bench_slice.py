"""What a slice of an update costs: attached and independent drafts, on equal rows.

The drafts of `make demo` learn from the same answers with their own losses, by turns:
the independent one (a small T5), and the attached one with what the target has read
kept in the buffer and with it read anew. Beside it the price of keeping: one row
appended to a ring with and without readings, as wide as the demo's target and as
flan-t5-base. One thread: CPU time; more: wall time.

  python benchmarks/bench_slice.py [--requests 40] [--threads 1] [--turns 20]
"""

import argparse

import jax
import jax.numpy as jnp
import measure

from osd_jax import online
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import update as updates
from osd_jax.main import settings
from osd_jax.serving.server import Server

INDEPENDENT, ATTACHED = "runs/demo_independent.gin", "runs/demo.gin"
ANEW = "BufferConfig.keep_reading=False"
APPENDED, KEPT, VOCAB = 100, 64, 1536
WIDTHS = {"demo": 256, "flan-t5-base": 768}
APPEND = jax.jit(replay.append, donate_argnums=0)
ASKED = {"attached, over independent": "<= 0.25"}


class Slice:
  """One slice of a draft's update, on rows of the stream it learns from."""

  def __init__(self, file: str, requests: int, *bindings: str):
    """Answers so many requests of the stream, which are what it learns from."""
    config, _ = settings.load(online.OnlineConfig, [file], list(bindings))
    server = Server(config.pair, config.decoding, config.learning, config.partition)
    stream = online.streams.QueryStream(config.stream, server.pair.vocabulary)
    prompts = [
      online.slots.Request(stream[i].tokens, config.sampling.of_request(i))
      for i in range(requests)
    ]
    answers = server.run(prompts)
    server.learner.seed(done.batch for done in answers)
    self._model, self._config = server.pair.draft, config.learning.update
    state, batch, frozen = server.learner.slice_inputs()
    self._inputs = state, updates.cut(self._config, batch), frozen
    self.rows, self.positions = batch.target.shape[0], self._inputs[1].target.shape[1]

  def __call__(self) -> None:
    jax.block_until_ready(updates.take_slice(self._model, self._config, *self._inputs))


class Ring:
  """A full buffer that rows are appended to, some with what the target has read."""

  def __init__(self, width: int, source: int = 40, target: int = 64):
    """Fills it; `width` 0 keeps no reading."""
    buffer = replay.init(replay.BufferConfig(), source, target, KEPT, VOCAB, width)
    row = jax.tree.map(
      lambda leaf: jnp.ones((1, *leaf.shape[1:]), leaf.dtype), buffer.data
    )
    reading = jnp.ones((1, source, width), jnp.bfloat16) if width else None
    self._row = row.replace(reading=reading)
    self._buffer = buffer.replace(added=jnp.int32(2 * len(buffer.data.mask)))

  def __call__(self) -> None:
    for _ in range(APPENDED):
      self._buffer = jax.block_until_ready(APPEND(self._buffer, self._row))


def slices(given: argparse.Namespace) -> dict[str, float]:
  """Milliseconds of a slice of each kind, and their ratios."""
  contenders = {
    "independent": Slice(INDEPENDENT, given.requests),
    "attached": Slice(ATTACHED, given.requests),
    "attached, read anew": Slice(ATTACHED, given.requests, ANEW),
  }
  clock = measure.clock_of(given.threads)
  times = measure.by_turns(contenders, given.turns)
  figures = {f"{name}, ms": time.milliseconds(clock) for name, time in times.items()}
  for name, made in contenders.items():
    figures[f"{name}, rows"] = float(made.rows)
    figures[f"{name}, positions"] = float(made.positions)
    if name != "independent":
      figures[f"{name}, over independent"] = measure.ratio(
        times, name, "independent", clock
      )
  return figures


def appends(given: argparse.Namespace) -> dict[str, float]:
  """Milliseconds of one row appended, without a reading and with one of each width."""
  rings = {"no reading": Ring(0)}
  rings |= {f"a reading as wide as {name}'s": Ring(n) for name, n in WIDTHS.items()}
  clock = measure.clock_of(given.threads)
  times = measure.by_turns(rings, given.turns)
  return {
    f"append, {name}, ms": time.milliseconds(clock) / APPENDED
    for name, time in times.items()
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--requests", type=int, default=40, help="that they learn from")
  parser.add_argument("--threads", type=int, default=1)
  parser.add_argument("--turns", type=int, default=20)
  given = parser.parse_args()
  measure.restart(given.threads)
  clock = measure.clock_of(given.threads)
  named = f"{clock}, {given.threads} thread(s)"
  rows = measure.rows("demo pair", named, slices(given), ASKED)
  rows += measure.rows("replay buffer of the demo", named, appends(given))
  measure.report("slice", rows)


if __name__ == "__main__":
  main()
