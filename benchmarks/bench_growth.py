"""How cost grows: with output, source and vocabulary, and with the buffer's capacity.

Plain decoding of one row: a request of full length and one of a single token by turns
give the time of a step, (long - short) / (T - 1), and with the prefill that of a token.
Beside the step stands the time in which the measured bandwidth reads what a step has to
read. All points of an axis go by turns, so that a slow minute bends no curve. Buffer:
one row appended (donated, as online serving does) and one micro-batch drawn; neither
may depend on the capacity.

The number of drafts is no axis: one draft is served, versions that a run keeps are
files, and a swap replaces the served copy. One thread: CPU time; more: wall time.

  python benchmarks/bench_growth.py [--shape flan-t5-small] [--threads 1] [--turns 5]

The plot is benchmarks/results/growth.png.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import contenders
import jax
import jax.numpy as jnp
import measure
import numpy as np

from osd_jax.distillation import buffer as replay
from osd_jax.distillation import update as updates
from osd_jax.models import t5
from osd_jax.serving import slots

CALLS = 100  # of append or sample in a turn
KEPT = 64
UPDATE = updates.UpdateConfig()
APPEND = jax.jit(replay.append, donate_argnums=0)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"


@dataclasses.dataclass(frozen=True)
class Curve:
  """One figure along an axis.

  Attributes:
    axis: what grows.
    figure: what is measured, with its unit.
    points: value by place on the axis.
  """

  axis: str
  figure: str
  points: Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Shape:
  """One point of an axis: model and lengths."""

  config: t5.T5Config
  source: int
  target: int


class Ring:
  """A buffer whose ring has gone round twice."""

  def __init__(self, capacity: int, source: int, target: int, vocab_size: int):
    """Fills the buffer.

    Args:
      capacity: N.
      source: S.
      target: T.
      vocab_size: V.
    """
    self._config = replay.BufferConfig(capacity=capacity)
    buffer = replay.init(self._config, source, target, KEPT, vocab_size)
    self._row = jax.tree.map(
      lambda leaf: jnp.ones((1, *leaf.shape[1:]), leaf.dtype), buffer.data
    )
    self._buffer = buffer.replace(added=jnp.int32(2 * capacity))
    self._since = np.int32(2 * capacity - UPDATE.num_new)
    self._key = jax.random.key(0)

  def append(self) -> None:
    for _ in range(CALLS):
      self._buffer = jax.block_until_ready(APPEND(self._buffer, self._row))

  def sample(self) -> None:
    drawn_from = self._buffer, self._key, self._since
    for index in range(CALLS):
      batch = updates.draw_slice(UPDATE, self._config, *drawn_from, index)
      jax.block_until_ready(batch)


def axes(given: argparse.Namespace) -> dict[str, dict[int, Shape]]:
  """The points of every axis of decoding."""
  config = contenders.shape(given.shape)
  return {
    "output length": {n: Shape(config, given.source, n) for n in given.outputs},
    "source length": {n: Shape(config, n, given.target) for n in given.sources},
    "vocabulary": {
      n: Shape(dataclasses.replace(config, vocab_size=n), given.source, given.target)
      for n in given.vocabularies
    },
  }


def answer(decoder: slots.Slots, prompt: np.ndarray, length: int) -> None:
  """Decodes one request of that many tokens."""
  (done,) = decoder.run([slots.Request(prompt, max_length=length)])
  assert len(done.tokens) == length


def decoding_curves(
  given: argparse.Namespace, axis: str, points: Mapping[int, Shape]
) -> list[Curve]:
  """Measures one axis of decoding."""
  people = {}
  for place, shape in points.items():
    model, params = contenders.random_model(shape.config)
    config = contenders.decoding(1, shape.source, shape.target, 1)
    prompt = contenders.prompts(1, shape.source, shape.config.vocab_size)[0]
    one = functools.partial(answer, slots.Slots(config, model, params), prompt)
    people[f"{place} long"] = functools.partial(one, shape.target)
    people[f"{place} short"] = functools.partial(one, 1)
  times = measure.by_turns(people, given.turns)
  speed = measure.bandwidth(given.threads)
  step, token, bound = {}, {}, {}
  for place, shape in points.items():
    long, short = (
      getattr(times[f"{place} {kind}"], given.clock) for kind in ("long", "short")
    )
    step[place] = float(np.median(long - short)) / (shape.target - 1) * 1e3
    token[place] = float(np.median(long)) / shape.target * 1e3
    read = contenders.step_bytes(shape.config, 1, shape.source, shape.target // 2)
    bound[place] = read / speed * 1e3
  return [
    Curve(axis, "step, ms", step),
    Curve(axis, "token with its share of prefill, ms", token),
    Curve(axis, "memory bound of a step, ms", bound),
  ]


def buffer_curves(given: argparse.Namespace) -> list[Curve]:
  """Measures append and sample against the capacity."""
  size = contenders.shape(given.shape).vocab_size
  people = {}
  for capacity in given.capacities:
    ring = Ring(capacity, given.source, given.target, size)
    people[f"append {capacity}"] = ring.append
    people[f"sample {capacity}"] = ring.sample
  times = measure.by_turns(people, given.turns)
  return [
    Curve(
      "buffer capacity",
      f"{verb}, us",
      {
        n: times[f"{verb} {n}"].milliseconds(given.clock) / CALLS * 1e3
        for n in given.capacities
      },
    )
    for verb in ("append", "sample")
  ]


def rows_of(given: argparse.Namespace, curves: Sequence[Curve]) -> list[dict]:
  """The points of one axis, and how much the last is of the first."""
  figures, asked = {}, {}
  for curve in curves:
    places = list(curve.points)
    figures |= {f"{curve.figure}, at {n}": curve.points[n] for n in places}
    first, last = places[0], places[-1]
    over = f"{curve.figure.split(', ')[0]}, {last} over {first}"
    figures[over] = curve.points[last] / curve.points[first]
    asked[over] = "1" if curve.axis == "buffer capacity" else ""
  case, clock = f"{given.shape}, {curves[0].axis}", given.clock
  return measure.rows(case, f"{clock}, {given.threads} thread(s)", figures, asked)


def draw(given: argparse.Namespace, axes_: Sequence[Sequence[Curve]]) -> None:
  """Draws the curves, one panel an axis."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9.0, 6.5), layout="constrained")
  styles = ((BLUE, "-", "o"), (ORANGE, ":", "^"), (GREY, "--", "s"))
  for panel, curves in zip(figure.subplots(2, 2).flat, axes_, strict=True):
    for curve, (color, line, marker) in zip(curves, styles, strict=False):
      places, values = list(curve.points), list(curve.points.values())
      panel.plot(places, values, line, marker=marker, color=color, label=curve.figure)
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{n:,}" for n in places])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel(curves[0].axis)
    panel.grid(axis="y", color="#ECECEC")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
  figure.suptitle(f"{given.shape}, {given.clock} time, {given.threads} thread(s)")
  measure.RESULTS.mkdir(exist_ok=True)
  figure.savefig(measure.RESULTS / "growth.png", dpi=160)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  many = functools.partial(parser.add_argument, nargs="+", type=int)
  parser.add_argument("--shape", default="flan-t5-small", help="with an untied head")
  many("--outputs", default=[32, 64, 128, 256, 512])
  many("--sources", default=[32, 64, 128, 256, 512, 1024])
  many("--vocabularies", default=[1024, 8192, 32128])
  many("--capacities", default=[64, 512, 4096, 16384])
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--target", type=int, default=64)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--threads", type=int, default=1)
  given = parser.parse_args()
  measure.restart(given.threads)
  given.clock = measure.clock_of(given.threads)
  found = []
  for axis, points in axes(given).items():
    found.append(decoding_curves(given, axis, points))
    measure.report("growth", rows_of(given, found[-1]))
    jax.clear_caches()
  found.append(buffer_curves(given))
  measure.report("growth", rows_of(given, found[-1]))
  draw(given, found)


if __name__ == "__main__":
  main()
