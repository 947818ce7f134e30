"""Milliseconds of one fixed program by version of jax, and ratios between versions.

A random Llama decodes one row in float32, with a prompt of 64 tokens: plain steps, and
verifications of 6 tokens, with our C++ code and with XLA alone. Each interpreter builds
the program in a process of its own. Then the processes take turns. Ratios are to the
first interpreter. On a busy machine they differ by up to a fifth between runs of 7
turns, so repeat what looks like a change, with more turns.

  PYTHONPATH=. python benchmarks/versions.py [--turns 15] [--threads 1]
      [--pythons .venv-lowest/bin/python .venv/bin/python .venv-newest/bin/python]

`make test-versions` creates the environments of the lowest and the newest jax that
pyproject.toml allows.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import measure
import numpy as np

PROMPT, ANSWER, STEPS = 64, 64, 16
WIDTHS = {"plain step": 1, "verification of 6 tokens": 6}


def programs(shape: str) -> dict[str, Callable[[], object]]:
  """Returns compiled loops of `STEPS` steps by name."""
  import contenders
  import jax

  from osd_jax import native
  from osd_jax.decoding import state
  from osd_jax.engine import measurement, steps

  model, params = contenders.random_model(contenders.shape(shape))
  source = contenders.prompts(1, PROMPT, model.vocab_size)
  prefill = jax.jit(model.prefill, static_argnums=3)
  loops = {}

  def loop(mode, width, served, cache):
    with mode():
      fed = measurement.feed(model, width, served, cache, np.int32(STEPS))
      return jax.block_until_ready(fed)

  for suffix, mode in (("", contextlib.nullcontext), (", XLA alone", native.off)):
    with mode():
      served = steps.prepare(model, params)
      length = state.buffer_length(ANSWER)
      cache = prefill(served, source, model.mask(source), length)
    for name, width in WIDTHS.items():
      loops[name + suffix] = functools.partial(loop, mode, width, served, cache)
      loops[name + suffix]()  # compiles
  return loops


def answer(args: argparse.Namespace) -> None:
  """Prints the version of jax and, for each line of input, milliseconds per step."""
  import jax

  loops = programs(args.shape)
  clock = time.process_time if args.threads == 1 else time.perf_counter
  print(json.dumps(jax.__version__), flush=True)
  for _ in sys.stdin:
    milliseconds = {}
    for name, loop in loops.items():
      started = clock()
      loop()
      milliseconds[name] = (clock() - started) / STEPS * 1e3
    print(json.dumps(milliseconds), flush=True)


class Interpreter:
  """A process that runs `answer` under one Python.

  Attributes:
    jax: its version of jax.
    turns: milliseconds per step by name, one entry per turn.
  """

  def __init__(self, python: str, args: argparse.Namespace):
    command = [python, __file__, "--answer", "--shape", args.shape]
    command += ["--threads", str(args.threads)]
    pipe = subprocess.PIPE
    self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    self.jax: str = self._read()
    self.turns: list[dict[str, float]] = []

  def measure(self) -> None:
    """Takes a turn."""
    print(file=self._process.stdin, flush=True)
    self.turns.append(self._read())

  def _read(self):
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f"{self._process.args[0]} has ended; its message is above.")
    return json.loads(line)

  def times(self, name: str) -> np.ndarray:
    """Returns the milliseconds of each turn [turns], without the first."""
    return np.array([turn[name] for turn in self.turns[1:]])


def main() -> None:
  """Measures every interpreter and stores a row per figure."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--pythons", nargs="+", default=[sys.executable])
  parser.add_argument("--shape", default="llama-160m")
  parser.add_argument("--turns", type=int, default=15)
  parser.add_argument("--threads", type=int, default=1)
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.answer:
    answer(args)
    return
  measure.restart(args.threads)
  measure.RESULTS = args.results
  interpreters = [Interpreter(python, args) for python in args.pythons]
  for turn in range(args.turns + 1):
    first = turn % len(interpreters)
    for interpreter in interpreters[first:] + interpreters[:first]:
      interpreter.measure()
  base = interpreters[0]
  clock = f"{measure.clock_of(args.threads)}, {args.threads} thread(s)"
  for interpreter in interpreters:
    figures = {}
    for name in base.turns[0]:
      times = interpreter.times(name)
      figures[f"{name}, ms"] = float(np.median(times))
      if interpreter is not base:
        ratios = times / base.times(name)
        figures[f"{name}, over jax {base.jax}"] = float(np.median(ratios))
    rows = measure.rows(f"{args.shape}, jax {interpreter.jax}", clock, figures)
    measure.report("versions", [{**row, "jax": interpreter.jax} for row in rows])


if __name__ == "__main__":
  main()
