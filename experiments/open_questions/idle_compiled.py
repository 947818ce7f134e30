"""Is there room for learning on an accelerator? Calls compiled for one, without it.

The compilers for a TPU v5e and an H100 say what a call reads and how many kernels it
has; its products say what it computes. From the published figures of the chips follows
how much arithmetic the calls of one request leave idle, and whether one training step
of the draft fits into it. Two short models are compiled and the figures continued to
all layers, because every layer adds the same.

  PYTHONPATH=.venv-aot JAX_PLATFORMS=cpu python \\
      experiments/open_questions/idle_compiled.py [--rows 1 8 32] [--drafted 7]
      [--machine v5e:2x2=4 h100:1=1] [--out FILE]
  python experiments/open_questions/idle_compiled.py --table    # prints the rows

Needs the compilers that `make test-aot` installs.
"""

# ruff: noqa: E402 (the folder was just added)
import argparse
import dataclasses
import functools
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks")]

import ahead_of_time
import jax
import measure
import rich.console
import rich.table

from osd_jax import native
from osd_jax.costs.table import expected_tokens
from osd_jax.distillation import update
from osd_jax.distillation.losses import LossConfig
from osd_tools import chips, hlo
from osd_tools.ahead_of_time import plan, programs

TARGET, LAYERS, DRAFT_LAYERS = "vicuna-7b", 32, 12  # the draft is llama-160m
SHORT = (1, 2)  # layers of the models that are compiled
ANSWER, ACCEPTANCE = 128, 0.8  # tokens of an answer; acceptance rate
STEP_ROWS = 8  # answers of a training step


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a program needs of one chip: bytes, operations, bytes moved and kernels."""

  read: float
  flops: float
  moved: float
  kernels: float

  def deeper(self, other: "Cost", layers: int) -> "Cost":
    """Returns the cost with all layers, from the costs with one and (`other`) two."""
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Cost(*(one + (layers - 1) * (two - one) for one, two in pairs))

  def seconds(self, chip: chips.Chip) -> float:
    """Returns a lower bound of its time."""
    return chip.least_seconds(self.read, self.flops, self.moved, self.kernels)

  def idle(self, chip: chips.Chip) -> float:
    """Returns the operations that the chip could do meanwhile."""
    return self.seconds(chip) * chip.flops - self.flops


@functools.cache
def cost(machine: str, rows: int, drafted: int, layers: int, program: str) -> Cost:
  """Compiles one program of two short models."""
  name, _, model = machine.partition("=")
  run = ahead_of_time.config(TARGET, int(model), rows, drafted)
  trained = update.UpdateConfig(
    loss=LossConfig("forward_kl", num_positions=0, num_tokens=0),
    num_new=STEP_ROWS,
    num_replay=0,
    length_multiple=0,
    ema_decay=0.0,
  )
  learning = dataclasses.replace(run.learning, update=trained)
  run = dataclasses.replace(run, learning=learning)
  compiled = plan.Plan(run, chips.Topology(name), layers)
  call = programs.programs(compiled)[program]
  counts = programs.compiled(compiled, call)
  with native.portable(is_split=False):
    flops = hlo.product_flops(call.traced().jaxpr) / call.chips
  read, sent_bytes = counts.arguments_gb * 1e9, counts.moved_mb * 1e6
  return Cost(read, flops, sent_bytes, counts.kernels)


def whole(machine: str, rows: int, drafted: int, program: str, layers: int) -> Cost:
  """Returns the cost of a program of a whole model."""
  one, two = (cost(machine, rows, drafted, short, program) for short in SHORT)
  return one.deeper(two, layers)


def figures(machine: str, rows: int, drafted: int) -> dict:
  """Returns the arithmetic that a request leaves idle, and that of a training step."""
  chip = chips.CHIPS[machine.partition(":")[0]]
  verification = f"verification of {drafted + 1} tokens"
  verify = whole(machine, rows, drafted, verification, LAYERS)
  # A draft step reads the same weights for few rows and for many, so that one number of
  # rows is compiled. A training step does not depend on what is served.
  draft = whole(machine, STEP_ROWS, 7, "draft step", DRAFT_LAYERS)
  step = whole(machine, STEP_ROWS, 7, "slice", DRAFT_LAYERS)
  # The calls of a request are shared by the rows.
  calls = ANSWER / expected_tokens(ACCEPTANCE, drafted) / rows
  idle = verify.idle(chip) + drafted * draft.idle(chip)
  return {
    "machine": machine,
    "rows": rows,
    "drafted": drafted,
    "verify_ms": round(1e3 * verify.seconds(chip), 3),
    "draft_ms": round(1e3 * draft.seconds(chip), 3),
    "idle_verify": round(share(verify, chip), 3),
    "idle_draft": round(share(draft, chip), 3),
    "step_gflop": round(step.flops / 1e9, 1),
    "step_ms": round(1e3 * step.seconds(chip), 3),
    "steps_per_request": round(calls * idle / step.flops, 3),
  }


def share(program: Cost, chip: chips.Chip) -> float:
  """Returns the share of a chip's arithmetic that a program leaves idle."""
  return program.idle(chip) / (program.seconds(chip) * chip.flops)


def show(rows: list[dict]) -> None:
  """Prints a table."""
  columns = [name for name in rows[0] if name not in ("commit", "target")]
  table = rich.table.Table(*columns)
  for row in rows:
    table.add_row(*(str(row[name]) for name in columns))
  rich.console.Console(width=160).print(table)


def main() -> None:
  """Compiles what the file does not have, and prints the rows."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--machine", nargs="+", default=["v5e:2x2=4", "h100:1=1"])
  parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
  parser.add_argument("--drafted", type=int, nargs="+", default=[7])
  parser.add_argument("--out", type=pathlib.Path, default=HERE / "idle_compiled.jsonl")
  parser.add_argument("--table", action="store_true", help="compile nothing")
  args = parser.parse_args()
  lines = args.out.read_text().splitlines() if args.out.exists() else []
  rows = [json.loads(line) for line in lines]
  keys = {(row["machine"], row["rows"], row["drafted"]) for row in rows}
  jax.config.update("jax_enable_compilation_cache", False)
  for machine in args.machine if not args.table else ():
    for count in args.rows:
      for drafted in args.drafted:
        if (machine, count, drafted) in keys:
          continue
        made_by = {"target": TARGET, "commit": measure.commit()}
        rows.append(figures(machine, count, drafted) | made_by)
        with args.out.open("a") as file:
          file.write(json.dumps(rows[-1]) + "\n")
  show(rows)


if __name__ == "__main__":
  main()
