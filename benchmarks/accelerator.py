"""Decoding speed on an accelerator, and its distance from the memory bound.

Weights are random and in bfloat16. Drafts run in full and are scripted to be right with
probability alpha. All times are wall times. For each shape the program measures:

- whole greedy requests, plain and speculative, compared with Hugging Face's `generate`
  on the same card if torch finds one;
- a step without prefill, compared with the time that reading its weights and caches
  takes at the measured bandwidth;
- the cost of a draft step and of verifying n tokens, relative to a plain step;
- the number of kernels that a step launches, counted in the compiled program;
- one slice of an update.

Needs jax and osd_jax; torch and transformers are optional. Rows are written as soon as
they are measured.

  PYTHONPATH=. python benchmarks/accelerator.py [--shapes flan-t5-xl flan-t5-large]
      [--rows 1 8 32 128] [--drafted 5] [--seconds 540] [--tiny]
"""

import argparse
import dataclasses
import functools
import gc
import os
import pathlib
import time
import zlib

import contenders
import jax
import jax.numpy as jnp
import kernels
import measure
import numpy as np
import scripting

from osd_jax import base
from osd_jax.decoding import records
from osd_jax.decoding import state as state_lib
from osd_jax.distillation import losses, update
from osd_jax.engine import engine, measurement, steps
from osd_jax.models import families, shapes

NAME, CLOCK = "accelerator", "wall"
ASKED = {  # with one row
  ("flan-t5-xl", "plain over the bound"): "<= 2",
  ("flan-t5-xl", "draft step over plain step (c)"): "<= 0.15",
  ("flan-t5-xl", "speculative over plain"): ">= 2",
}
Pair = tuple[base.Model, base.Params]


def random_pair(config: shapes.T5Config, seed: int) -> Pair:
  """Returns a model with random weights in its compute type, made leaf by leaf.

  A single program that makes all of them takes minutes to compile.
  """
  model, key = families.build(config), jax.random.key(seed)

  def leaf(path, shape):
    name = path[-1].key
    if name == "scale":
      return jnp.ones(shape.shape, config.dtype)
    std = {"embedding": 1.0, "rel_embedding": 0.1}.get(name, shape.shape[0] ** -0.5)
    if path[-2].key == "query":
      std *= config.head_dim**-0.5
    number = zlib.crc32(jax.tree_util.keystr(path).encode())
    noise = _normal(shape.shape, config.dtype, jax.random.fold_in(key, number))
    return noise * jnp.asarray(std, config.dtype)

  params = jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(model.init, key))
  if not config.tied_head:
    head = params["decoder"]["logits_dense"]
    head["kernel"] = head["kernel"].at[:, base.EOS_ID].set(0.0)
  return model, params


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(shape, dtype, key):
  return jax.random.normal(key, shape, dtype)


def in_bfloat16(name: str) -> shapes.T5Config:
  return dataclasses.replace(contenders.shape(name), dtype="bfloat16")


def bandwidth(megabytes: int, turns: int = 16, repeats: int = 5) -> float:
  """Returns the best rate of a reduction over device memory, in bytes per second."""
  data = jnp.ones((megabytes * 2**20 // 4,), jnp.float32)

  @jax.jit
  def read(data, start):
    # Each iteration depends on the previous one, so that XLA cannot remove any.
    return jax.lax.fori_loop(0, turns, lambda _, x: jnp.max(data + x * 1e-3), start)

  best = float("inf")
  for repeat in range(repeats + 1):
    started = time.perf_counter()
    read(data, jnp.float32(repeat)).block_until_ready()
    if repeat:  # the first one compiles
      best = min(best, time.perf_counter() - started)
  return turns * data.nbytes / best


@dataclasses.dataclass
class Bench:
  """State shared by all measurements.

  Attributes:
    args: command-line flags.
    draft: draft model and parameters.
    speed: memory bandwidth, bytes per second.
    until: no measurement starts after this value of `time.monotonic()`.
  """

  args: argparse.Namespace
  draft: Pair
  speed: float
  until: float

  def report(self, case: str, figures: dict[str, float], asked: dict | None = None):
    """Writes rows immediately, so that an interrupted run keeps its results."""
    hardware = f"one {jax.devices()[0].device_kind}, jax {jax.__version__}"
    rows = measure.rows(case, CLOCK, figures, asked)
    measure.report(NAME, [{**row, "hardware": hardware} for row in rows])

  def late(self, what: str) -> bool:
    """Returns whether time is up; if so, prints the name of the skipped stage."""
    if time.monotonic() < self.until:
      return False
    print(f"skipped, time is up: {what}", flush=True)
    return True


def case_of(name: str, rows: int) -> str:
  return f"{name}, bfloat16, {rows} row{'s' * (rows > 1)}"


def decoders(bench: Bench, target: Pair, rows: int) -> dict:
  """Returns the decoders to time with B rows; "first" entries stop after one token."""
  args, size = bench.args, target[0].vocab_size
  sources = contenders.prompts(rows, args.source, size)
  shape = (rows, args.source, args.target)
  plain = engine.Engine(contenders.decoding(*shape, 1), *target)
  tokens = scripting.continuations(plain, sources)
  engines = {
    "plain": contenders.Ours(plain, sources),
    "plain, first": scripting.FirstTokens(plain, sources),
  }
  for drafted in args.drafted:
    config = contenders.decoding(*shape, drafted)
    alphas = [args.alpha] * rows
    decoder = scripting.speculative(
      config, target, bench.draft, sources, tokens, alphas
    )
    engines[f"K {drafted}"] = contenders.Ours(decoder, sources)
    engines[f"K {drafted}, first"] = scripting.FirstTokens(decoder, sources)
  return engines


def hugging_face(bench: Bench, name: str, rows: int):
  """Returns a call of `generate` on the same card; None, with a message, on failure."""
  try:
    answer = _generate(bench, name, rows)
    answer()
  except Exception as error:  # the comparison is optional
    print(f"not compared with Hugging Face: {error!r}", flush=True)
    return None
  return answer


def _generate(bench: Bench, name: str, rows: int):
  import rivals
  import torch

  if not torch.cuda.is_available() and not bench.args.tiny:
    raise RuntimeError("torch found no GPU")
  place = "cuda" if torch.cuda.is_available() else "cpu"
  config, args = in_bfloat16(name), bench.args
  with torch.device(place):
    model = rivals.random_model(config, config.dtype)
  sources = contenders.prompts(rows, args.source, config.vocab_size)
  batch = torch.from_numpy(sources.astype(np.int64)).to(place)

  @torch.inference_mode()
  def answer():
    return model.generate(
      batch,
      attention_mask=torch.ones_like(batch),
      do_sample=False,
      num_beams=1,
      max_new_tokens=args.target,
      eos_token_id=None,
    ).cpu()

  return answer


def serving(bench: Bench, name: str, target: Pair, rows: int) -> None:
  """Times whole requests, interleaved, and derives the time of a step."""
  competitors = decoders(bench, target, rows)
  answers = scripting.answers(competitors)
  theirs = hugging_face(bench, name, rows)
  times = measure.interleave(
    competitors | ({"Hugging Face": theirs} if theirs else {}), bench.args.turns
  )
  figures = {
    f"{label}, ms/token": times[label].milliseconds(CLOCK) / rows / bench.args.target
    for label in times
    if not label.endswith("first")
  }
  if theirs:
    figures["plain over Hugging Face"] = measure.ratio(
      times, "plain", "Hugging Face", CLOCK
    )
  step = scripting.round_ms(times, answers, "plain", "plain, first", rows, CLOCK)
  figures |= against_bound(bench, name, rows, step)
  figures |= speculation(bench, times, answers, rows, step)
  bench.report(case_of(name, rows), figures, asked_of(name, rows))


def against_bound(bench: Bench, name: str, rows: int, step: float) -> dict[str, float]:
  """Compares a plain step with the time that reading its data takes."""
  args = bench.args
  read = contenders.step_bytes(in_bfloat16(name), rows, args.source, args.target // 2)
  least = read / 2 / bench.speed * 1e3  # step_bytes counts float32; these are two bytes
  return {
    "plain step, ms": step,
    "memory bound of a step, ms": least,
    "plain over the bound": step / least,
  }


def speculation(bench: Bench, times, found, rows: int, step: float) -> dict[str, float]:
  """Returns the figures of speculative decoding for every K, and the best speedup."""
  figures = {}
  for drafted in bench.args.drafted:
    label = f"K {drafted}"
    round_ = scripting.round_ms(times, found, label, f"{label}, first", rows, CLOCK)
    figures |= {
      f"{label}, round over plain step": round_ / step,
      f"{label}, drafted tokens accepted": scripting.draft_acceptance(found[label]),
      f"{label}, over plain": measure.ratio(times, "plain", label, CLOCK),
    }
  best = max(figures[f"K {drafted}, over plain"] for drafted in bench.args.drafted)
  return figures | {"speculative over plain": best}


def asked_of(name: str, rows: int) -> dict[str, str]:
  return {
    figure: goal
    for (shape, figure), goal in ASKED.items()
    if shape == name and rows == 1
  }


def parts(bench: Bench, name: str, target: Pair, rows: int) -> None:
  """Measures c, the cost of a draft step over a plain step, as compiled loops."""
  args = bench.args
  sources = contenders.prompts(rows, args.source, target[0].vocab_size)
  config = contenders.decoding(rows, args.source, args.target, 1)
  times = measurement.measure_steps(config, (*target, *bench.draft), sources)
  bench.report(
    case_of(name, rows),
    {
      "draft step, ms": times["draft_step_ms"],
      "draft step over plain step (c)": times["cost_ratio"],
    },
    asked_of(name, rows),
  )


def verification(bench: Bench, name: str, target: Pair, rows: int) -> None:
  """Measures the cost of feeding n tokens relative to feeding one."""
  args, (model, params) = bench.args, target
  sources = contenders.prompts(rows, args.source, model.vocab_size)
  length = state_lib.buffer_length(args.target)
  served = steps.prepare(model, params)
  prefill = jax.jit(model.prefill, static_argnums=3)
  cache = prefill(served, sources, sources != base.PAD_ID, length)
  competitors = {
    f"{width}": functools.partial(_feed, model, width, served, cache)
    for width in args.widths
  }
  times = measure.interleave(competitors, args.turns)
  figures = {
    f"feeding {width}, over feeding {args.widths[0]}": measure.ratio(
      times, f"{width}", f"{args.widths[0]}", CLOCK
    )
    for width in args.widths
  }
  bench.report(case_of(name, rows), figures)


def _feed(model, width, served, cache):
  return jax.block_until_ready(
    measurement.feed(model, width, served, cache, np.int32(32))
  )


def launches(bench: Bench, name: str, target: Pair, rows: int) -> None:
  """Counts the kernels that a plain step of the target launches."""
  args = bench.args
  count = kernels.per_step(*target, rows, args.source, args.target)
  if count is None:
    print("kernels not counted: the compiled program shows no loop", flush=True)
    return
  bench.report(case_of(name, rows), {"kernels per plain step": float(count)})


def learning(bench: Bench) -> None:
  """Times one slice of an update of the draft, with float32 parameters."""
  args, rows = bench.args, bench.args.update_rows
  config = in_bfloat16(args.draft)
  model, params = contenders.random_model(config)
  key = jax.random.key(0)
  tokens = contenders.prompts(rows, args.source, config.vocab_size)
  target = contenders.prompts(rows, args.target, config.vocab_size, seed=1)
  logits = jax.random.normal(key, (*target.shape, config.vocab_size))
  batch = base.DistillationBatch(
    source=jnp.asarray(tokens),
    target=jnp.asarray(target),
    mask=jnp.ones(target.shape, bool),
    records=records.from_logits(logits, min(64, config.vocab_size)),
    weight=jnp.ones(rows, jnp.float32),
  )
  loss = losses.LossConfig("forward_kl", num_positions=0, num_tokens=0)
  settings = update.UpdateConfig(loss=loss, length_multiple=0, ema_decay=0.0)
  learner = update.init_learner(settings, params)

  def one():
    return jax.block_until_ready(update.take_slice(model, settings, learner, batch))

  times = measure.interleave({"slice": one}, max(args.turns, 2))
  case = f"{args.draft}, bfloat16, {rows} x {args.target}"
  bench.report(case, {"slice of an update, ms": times["slice"].milliseconds(CLOCK)})


def run(bench: Bench) -> None:
  """Runs all stages; those with a goal come first."""
  args = bench.args
  bench.report("the device", {"bandwidth, GB/s": bench.speed / 1e9})
  learning(bench)
  for name in args.shapes:
    target = random_pair(in_bfloat16(name), seed=0)
    alone, others = (serving, parts, launches, verification), (serving, parts)
    todo = [(stage, args.rows[0]) for stage in alone]
    todo += [(stage, rows) for rows in args.rows[1:] for stage in others]
    for stage, rows in todo:
      if bench.late(f"{stage.__name__} of {case_of(name, rows)}"):
        continue
      stage(bench, name, target, rows)
      gc.collect()
    del target
    jax.clear_caches()


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shapes", nargs="+", default=["flan-t5-xl", "flan-t5-large"])
  parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128])
  parser.add_argument("--draft", default="t5-small")
  parser.add_argument("--drafted", nargs="+", type=int, default=[5], help="K")
  parser.add_argument("--alpha", type=float, default=0.8)
  parser.add_argument(
    "--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="K + 1"
  )
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--target", type=int, default=64)
  parser.add_argument("--update_rows", type=int, default=8)
  parser.add_argument("--megabytes", type=int, default=2048)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--seconds", type=float, default=float("inf"))
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  parser.add_argument(
    "--tiny", action="store_true", help="tiny shapes, to test this program"
  )
  args = parser.parse_args()
  if args.tiny:
    args.shapes, args.draft, args.rows = ["tiny"], "tiny", [1, 2]
    args.source = args.target = 8
    args.drafted, args.widths = [3], [1, 2, 4]
    args.update_rows, args.megabytes, args.turns = 2, 16, 1
  return args


def main() -> None:
  # JAX reads this when it starts; torch needs part of the GPU memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  args = parse()
  until = time.monotonic() + args.seconds
  measure.RESULTS = args.results
  print(f"{jax.devices()}, jax {jax.__version__}", flush=True)
  draft = random_pair(in_bfloat16(args.draft), seed=1)
  run(Bench(args, draft, bandwidth(args.megabytes), until))


if __name__ == "__main__":
  main()
