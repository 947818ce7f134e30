"""The cost of learning: time and memory of an update step, and recording the target.

Step: our update learns from the 64 largest entries of every target row. The torch
float32 update learns from the same rows stored in full, with the same forward KL,
clipping and AdamW. The two run interleaved. With one thread the time is CPU time, with
more it is wall time.

Memory: each system runs alone in a child process. Reported are the peak of the whole
process, its growth since before the weights were created (which includes memory left
over from compiling), and for ours the memory that the compiler states for a step.

Records: bytes per token, and the share of a speculative round spent on taking them.
The share is measured in two ways: the same requests are decoded with and without
records, interleaved, and the truncation of a round's rows is timed alone.

  python benchmarks/bench_update.py [--shape t5-small] [--served flan-t5-base]
      [--rows 8] [--threads 1] [--turns 10]
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable

import contenders
import jax
import jax.numpy as jnp
import measure
import numpy as np

from osd_jax import base
from osd_jax.decoding import records
from osd_jax.distillation import buffer as replay
from osd_jax.distillation import update as updates
from osd_jax.distillation.losses import LossConfig
from osd_jax.distillation.optimizers import OptimizerConfig
from osd_jax.engine import engine

CONFIG = updates.UpdateConfig(  # AdamW, forward KL at all positions
  OptimizerConfig(query_multiplier=1.0, warmup_steps=0),
  LossConfig("forward_kl", num_positions=0, num_tokens=0),
  num_replay=4,
  length_multiple=0,
  ema_decay=0.0,
)
BETAS, EPS = (0.9, 0.999), 1e-8  # defaults of optax.adamw
MEMORY_STEPS = 3
ASKED = {  # keys are the first and last part of a figure's name
  ("step, ours", "over torch float32"): "<= 0.85",
  ("memory, ours", "GB"): "<= 1.7",
  ("record", "bytes/token"): "<= 400",
  ("records, share of a round", ""): "<= 0.01",
  ("truncating", "share of a round"): "<= 0.01",
}


@dataclasses.dataclass(frozen=True)
class Rows:
  """Training data.

  Attributes:
    source: [R, S] int32.
    target: [R, T] int32.
    logits: [R, T, V] float32, logits of the teacher.
  """

  source: np.ndarray
  target: np.ndarray
  logits: np.ndarray


def rows_to_learn(args: argparse.Namespace) -> Rows:
  """Returns random texts with random teacher logits."""
  size = contenders.shape(args.shape).vocab_size
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((args.rows, args.target, size), np.float32)
  return Rows(
    source=contenders.prompts(args.rows, args.source, size),
    target=contenders.prompts(args.rows, args.target, size, seed=1),
    logits=3 * logits,
  )


class Ours:
  """Update steps of osd_jax."""

  def __init__(self, args: argparse.Namespace, rows: Rows):
    """Stores the teacher's largest entries; `start` creates the weights."""
    self._shape = contenders.shape(args.shape)
    top_k = min(args.kept, self._shape.vocab_size)
    count = len(rows.source)
    self._batch = base.DistillationBatch(
      source=jnp.asarray(rows.source),
      target=jnp.asarray(rows.target),
      mask=jnp.ones(rows.target.shape, bool),
      records=jax.jit(records.from_logits, static_argnums=1)(rows.logits, top_k),
      weight=jnp.ones((count,), jnp.float32),
    )
    jax.block_until_ready(self._batch)

  def start(self) -> "Ours":
    """Creates the weights and the optimizer state."""
    self._model, params = contenders.random_model(self._shape)
    self._learner = updates.init_learner(CONFIG, params)
    return self

  def __call__(self) -> None:
    self._learner, metrics = updates.take_slice(
      self._model, CONFIG, self._learner, self._batch
    )
    jax.block_until_ready(self._learner)
    assert bool(metrics.finite), metrics

  def needed(self) -> float:
    """Returns the gigabytes of a step's arguments, results and temporaries.

    The numbers are those of the compiler's memory analysis.
    """
    step = updates.take_slice.lower(self._model, CONFIG, self._learner, self._batch)
    memory = step.compile().memory_analysis()
    sizes = (
      memory.argument_size_in_bytes,
      memory.output_size_in_bytes,
      memory.temp_size_in_bytes,
    )
    return sum(sizes) / 1e9


class Torch:
  """The same steps in torch float32, with full teacher logits."""

  def __init__(self, args: argparse.Namespace, rows: Rows):
    """Stores the teacher's logits; `start` creates the weights."""
    import torch

    self._torch, self._shape = torch, contenders.shape(args.shape)
    start = np.zeros_like(rows.target[:, :1])
    inputs = np.concatenate([start, rows.target[:, :-1]], axis=1)
    self._source = torch.from_numpy(rows.source.astype(np.int64))
    self._inputs = torch.from_numpy(inputs.astype(np.int64))
    self._logits = torch.from_numpy(rows.logits)

  def start(self) -> "Torch":
    """Creates the weights and a fused AdamW, torch's fastest variant."""
    import rivals

    self._model = rivals.random_model(self._shape).train()
    self._optimizer = self._torch.optim.AdamW(
      self._model.parameters(),
      lr=CONFIG.optimizer.learning_rate,
      betas=BETAS,
      eps=EPS,
      weight_decay=0.0,
      fused=True,
    )
    return self

  def __call__(self) -> None:
    torch = self._torch
    output = self._model(
      input_ids=self._source,
      attention_mask=torch.ones_like(self._source),
      decoder_input_ids=self._inputs,
      use_cache=False,
    )
    draft = torch.log_softmax(output.logits, -1).flatten(0, 1)
    target = torch.log_softmax(self._logits, -1).flatten(0, 1)
    loss = torch.nn.functional.kl_div(
      draft, target, log_target=True, reduction="batchmean"
    )
    self._optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self._model.parameters(), CONFIG.optimizer.clip_norm)
    self._optimizer.step()
    assert np.isfinite(loss.item())


CONTENDERS: dict[str, Callable] = {"ours": Ours, "torch float32": Torch}


def step_figures(args: argparse.Namespace) -> dict[str, float]:
  """Times both update steps, interleaved."""
  rows = rows_to_learn(args)
  competitors = {name: make(args, rows).start() for name, make in CONTENDERS.items()}
  times = measure.interleave(competitors, args.turns)
  values = {
    f"step, {name}, ms": times[name].milliseconds(args.clock) for name in competitors
  }
  over = measure.ratio(times, "ours", "torch float32", args.clock)
  return values | {"step, ours over torch float32": over}


def memory_figures() -> dict[str, float]:
  """Measures the memory of each system in its own process."""
  values = {}
  for name in CONTENDERS:
    command = [sys.executable, *sys.argv, "--only", name]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(run.stdout.splitlines()[-1])
    values |= {f"memory, {name}, {figure}": figures[figure] for figure in figures}
  return values


def only(args: argparse.Namespace) -> dict[str, float]:
  """Runs a few steps of one system and returns the memory of this process."""
  contender = CONTENDERS[args.only](args, rows_to_learn(args))
  before = resident("VmRSS")
  contender.start()
  for _ in range(MEMORY_STEPS):
    contender()
  peak = resident("VmHWM")
  values = {"peak, GB": peak, "peak over before the weights, GB": peak - before}
  if args.only == "ours":
    values["needed by a step, GB"] = contender.needed()
  return values


def resident(field: str) -> float:
  """Returns this process's resident memory in GB: current (VmRSS) or peak (VmHWM)."""
  with open("/proc/self/status") as file:
    fields = dict(line.split(":", 1) for line in file)
  return int(fields[field].split()[0]) * 1024 / 1e9


def record_rows(args: argparse.Namespace) -> list[dict]:
  """Measures the bytes of a record and the time that recording takes."""
  competitors = served(args)
  rounds = sum(answer.target_calls for answer in competitors["without"]())
  assert rounds == sum(answer.target_calls for answer in competitors["with"]())
  times = measure.interleave(competitors, args.turns)
  without = times["without"].milliseconds(args.clock) / rounds
  alone, size = truncation(args), contenders.shape(args.served).vocab_size
  share = measure.ratio(times, "with", "without", args.clock) - 1
  figures = {
    "record, bytes/token": replay.record_bytes_per_token(args.kept, size),
    "round without records, ms": without,
    "records, share of a round, by turns": share,
    "truncating a round's rows alone, ms": alone,
    "truncating alone, share of a round": alone / without,
  }
  case = f"{args.served} + scripted {args.shape}, K={args.drafted}"
  return rows_of(args, case, figures)


def served(args: argparse.Namespace) -> dict[str, contenders.Ours]:
  """Returns two decoders of the same requests, with and without records."""
  shape = contenders.shape(args.served)
  sources = contenders.prompts(1, args.source, shape.vocab_size)
  model, params = contenders.random_model(shape)
  lengths = (1, args.source, args.target)
  plain = engine.Engine(contenders.decoding(*lengths, 1), model, params)
  (answer,) = contenders.Ours(plain, sources)()
  script = contenders.corrupted(answer.tokens[None], args.alpha, shape.vocab_size)
  draft, draft_params = contenders.random_model(contenders.shape(args.shape), 1)
  scripts = contenders.Scripts(draft_params, jnp.asarray(sources), jnp.asarray(script))
  config = contenders.decoding(*lengths, args.drafted)
  pair = (model, params, contenders.scripted(draft), scripts)
  return {
    name: contenders.Ours(
      engine.Engine(dataclasses.replace(config, record_top_k=top_k), *pair), sources
    )
    for name, top_k in (("without", 0), ("with", args.kept))
  }


def rows_of(args: argparse.Namespace, case: str, figures: dict) -> list[dict]:
  """Returns rows of the figures with their goals."""
  goals = {
    figure: limit
    for figure in figures
    for (first, last), limit in ASKED.items()
    if figure.startswith(first) and figure.endswith(last)
  }
  return measure.rows(case, f"{args.clock}, {args.threads} thread(s)", figures, goals)


def truncation(args: argparse.Namespace, repeats: int = 50) -> float:
  """Returns the milliseconds that truncating the target rows of one round takes."""
  size = contenders.shape(args.served).vocab_size
  rng = np.random.default_rng(0)
  shape = (1, args.drafted + 1, size)
  logits = jnp.asarray(rng.standard_normal(shape, np.float32))
  truncate = jax.jit(records.from_logits, static_argnums=1)

  def rounds():
    for _ in range(repeats):
      jax.block_until_ready(truncate(logits, min(args.kept, size)))

  times = measure.interleave({"alone": rounds}, args.turns)
  return times["alone"].milliseconds(args.clock) / repeats


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shape", default="t5-small", help="the draft that learns")
  parser.add_argument("--served", default="flan-t5-base", help="target of the rounds")
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--source", type=int, default=64)
  parser.add_argument("--target", type=int, default=64)
  parser.add_argument("--kept", type=int, default=64, help="top-k entries in a record")
  parser.add_argument("--drafted", type=int, default=3, help="K")
  parser.add_argument("--alpha", type=float, default=0.7, help="synthetic acceptance")
  parser.add_argument("--turns", type=int, default=10)
  parser.add_argument("--threads", type=int, default=1)
  parser.add_argument("--only", choices=list(CONTENDERS), help=argparse.SUPPRESS)
  args = parser.parse_args()
  measure.restart(args.threads)
  args.clock = measure.clock_of(args.threads)
  if args.only is not None:
    print(json.dumps(only(args)))
    return
  case = f"{args.shape}, {args.rows} x {args.target} targets"
  figures = memory_figures() | step_figures(args)
  measure.report("update", rows_of(args, case, figures))
  jax.clear_caches()
  measure.report("update", record_rows(args))


if __name__ == "__main__":
  main()
