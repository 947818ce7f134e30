"""Startup time: compiling the speculative loop, cold and from the disk cache.

Pairs of child processes share a compilation cache in a temporary folder. The first
finds it empty, the second finds what the first wrote. Each child times its imports, the
creation of random weights (reading weights from a file is not measured here) and the
first token: making the served copies, compiling every call and answering one request of
one token. Then it repeats the last part with everything compiled; the difference is
compile time. Finally it counts the compilations during requests of mixed lengths, seeds
and temperatures with swaps of the draft in between. Records are kept, as in online
serving. All times are wall times.

  python benchmarks/bench_compile.py [--target flan-t5-large] [--draft t5-small]
      [--threads 2] [--turns 3] [--keep_from 0.1]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from unittest import mock

import contenders
import jax
import jax.numpy as jnp
import measure
import numpy as np

from osd_jax import base
from osd_jax.engine import engine, steps
from osd_jax.engine.requests import DecodingConfig, Request, SamplingConfig
from osd_jax.models import families

CALLS = ("prepare", "empty", "insert", "advance", "read_row")
COMPILED = "/jax/core/compile/backend_compile_duration"  # includes reading the cache
PROCESSES = ("first process", "second process")

# Goals by pair, process and figure.
LOOP, FIRST = "compiling the loop (advance), s", "weights in memory to first token, s"
LATER = "compilations after warm-up"
ASKED = {
  ("flan-t5-large", "t5-small", PROCESSES[0], LOOP): 15,
  ("flan-t5-large", "t5-small", PROCESSES[1], FIRST): 3,
}


class Compilations:
  """Counts and times the backend's compilations inside a `with` block."""

  def __enter__(self):
    self.count, self.seconds = 0, 0.0
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *_):
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event, seconds, **_):
    self.count += event == COMPILED
    self.seconds += seconds * (event == COMPILED)


class Stopwatch:
  """Sums the seconds of each compiled call inside a `with` block."""

  def __enter__(self):
    self.seconds = dict.fromkeys(CALLS, 0.0)
    timed = {name: self._timed(name, getattr(steps, name)) for name in CALLS}
    self._patch = mock.patch.multiple(steps, **timed)
    self._patch.start()
    return self

  def __exit__(self, *_):
    self._patch.stop()

  def _timed(self, name, call):
    def timed(*arguments, **options):
      started = time.perf_counter()
      result = jax.block_until_ready(call(*arguments, **options))
      self.seconds[name] += time.perf_counter() - started
      return result

    return timed


def cheap_model(name: str, seed: int = 0) -> tuple[base.Model, base.Params]:
  """Returns a model whose weights repeat one block of random numbers."""
  model = families.build(contenders.shape(name))
  block = 0.05 * np.random.default_rng(seed).standard_normal(2**20 + 1, np.float32)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  params = jax.tree.map(
    lambda leaf: jnp.asarray(np.resize(block, leaf.shape), leaf.dtype), shapes
  )
  return model, jax.block_until_ready(params)


def first_token(config: DecodingConfig, *pair) -> tuple[float, dict[str, float]]:
  """Returns the seconds from loaded weights to the first token, in all and by call."""
  prompt = contenders.prompts(1, config.source_lengths[-1], pair[0].vocab_size)[0]
  with Stopwatch() as watch:
    started = time.perf_counter()
    decoder = engine.Engine(config, *pair)
    (answer,) = decoder.run([Request(prompt, max_new_tokens=1)])
    seconds = time.perf_counter() - started
  assert len(answer.tokens) == 1
  return seconds, watch.seconds


def compiled_later(config: DecodingConfig, pair, other: base.Params) -> int:
  """Counts compilations after warm-up, over varied requests and drafts."""
  decoder = engine.Engine(config, *pair)
  decoder.warm_up()
  source, target = config.source_lengths[-1], config.target_length
  prompts = contenders.prompts(8, source, pair[0].vocab_size)
  with Compilations() as compilations:
    for index, prompt in enumerate(prompts):
      sampling = SamplingConfig(
        temperature=(0.0, 0.5, 1.0)[index % 3],
        top_k=(0, 20)[index % 2],
        top_p=(1.0, 0.9)[index % 2],
        seed=index,
      )
      length = 1 + (5 * index) % min(target, 12)
      cut = prompt[: max(2, source - 7 * index)]
      decoder.submit(Request(cut, sampling, max_new_tokens=length))
      decoder.step()
      decoder.swap((other, pair[3])[index % 2], index)
    while decoder.in_flight:
      decoder.step()
  return compilations.count


def child(args: argparse.Namespace) -> dict[str, float]:
  """Returns the figures of one process; its imports are already done."""
  values = {"imports, s": time.time() - args.started}
  started = time.perf_counter()
  pair = (*cheap_model(args.target), *cheap_model(args.draft))
  values["making the weights, s"] = time.perf_counter() - started
  config = DecodingConfig(
    num_draft_tokens=args.drafted,
    source_lengths=(args.source,),
    target_length=args.length,
    record_top_k=args.kept,
  )
  with Compilations() as compilations:
    values[FIRST], spent = first_token(config, *pair)
  again, running = first_token(config, *pair)
  compiling = {name: spent[name] - running[name] for name in CALLS}
  values[LOOP] = compiling.pop("advance")
  for name, seconds in compiling.items():
    values[f"compiling {name}, s"] = seconds
  values["compiling all calls, s"] = values[LOOP] + sum(compiling.values())
  values["of that XLA or the cache, s"] = compilations.seconds
  values["first token once compiled, s"] = again
  values["of that the served copies, s"] = running["prepare"]
  values["compilations up to first token"] = compilations.count
  values[LATER] = compiled_later(config, pair, cheap_model(args.draft, 1)[1])
  return values


def start(folder: str, keep_from: float) -> dict[str, float]:
  """Runs a child process with the same arguments and the given compilation cache."""
  environment = {
    **os.environ,
    "JAX_COMPILATION_CACHE_DIR": folder,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(keep_from),
  }
  command = [sys.executable, *sys.argv, "--started", repr(time.time())]
  run = subprocess.run(
    command, env=environment, stdout=subprocess.PIPE, text=True, check=True
  )
  return json.loads(run.stdout.splitlines()[-1])


def rows_of(args: argparse.Namespace) -> list[dict]:
  """Measures pairs of processes.

  Figures are medians over the repetitions; for later compilations it is the maximum.
  """
  turns = {process: [] for process in PROCESSES}
  for _ in range(args.turns):
    with tempfile.TemporaryDirectory() as folder:
      for process in PROCESSES:
        turns[process].append(start(folder, args.keep_from))
  rows = []
  for process in PROCESSES:
    figures, goals = {}, {LATER: "0"}
    for figure in turns[process][0]:
      values = [turn[figure] for turn in turns[process]]
      figures[figure] = float(max(values) if figure == LATER else np.median(values))
      if limit := ASKED.get((args.target, args.draft, process, figure)):
        goals[figure] = f"<= {limit}"
    case = f"{args.target} + {args.draft}, {process}"
    rows += measure.rows(case, f"wall, {args.threads} thread(s)", figures, goals)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--target", default="flan-t5-large")
  parser.add_argument("--draft", default="t5-small")
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--length", type=int, default=64, help="output tokens")
  parser.add_argument("--drafted", type=int, default=3, help="K")
  parser.add_argument("--kept", type=int, default=64, help="top-k entries in a record")
  parser.add_argument("--turns", type=int, default=3)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument(
    "--keep_from",
    type=float,
    default=0.1,
    help="compilations that take at least this many seconds are cached on disk; the"
    " default is that of `osd`",
  )
  parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # a child
  args = parser.parse_args()
  measure.restart(args.threads)
  if args.started is None:
    measure.report("compile", rows_of(args))
  else:
    print(json.dumps(child(args)))


if __name__ == "__main__":
  main()
