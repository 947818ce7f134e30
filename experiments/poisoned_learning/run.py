"""Poisoned learning on the demo stream: its effect on outputs and speed, and alarms.

The shipped pair serves the demo stream while its draft learns from shuffled labels,
with 1000 times the learning rate, or from rows that contain NaN. A frozen draft and a
draft that learns normally serve the same requests for comparison. All greedy outputs,
and all sampled outputs under the coupling rule, must equal those with the frozen draft.

The shipped target is nearly certain of its tokens (top-1 probability .9995 on average
over 40 requests). At temperatures up to 1, sampling gives the same outputs as greedy
decoding, so unchanged outputs would prove nothing. Sampled requests therefore use a
high temperature, and outputs that differ from the greedy ones are counted. The
rejection rule, which only preserves the distribution, is the negative control: its
outputs should change with the draft.

  python experiments/poisoned_learning/run.py [--requests 200] [--only MODE]...
      [--temperature 2] [--gin_file runs/demo.gin] [--gin NAME=VALUE]...
      [--out runs/poisoned_learning]

Prints a table and a JSON line, and writes the same line to result.json. The exit code
is 1 if a greedy or coupled output changed, or if the control did not change either.
For a quick check: --requests 4 --only greedy.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from unittest import mock

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from osd_jax import online, pairs, runs, sharding
from osd_jax.distillation import buffer, update
from osd_jax.engine.requests import SamplingConfig
from osd_jax.main import settings

EDGE = 50  # number of requests behind "first" and "last"
NAN_EVERY = 50  # one row in this many contains NaN
MODES = ("greedy", "coupled", "rejection")
WAYS = ("frozen", "sound", "shuffled labels", "rate x 1000", "nan rows")


def shuffled_labels(vocab_size: int):
  """Patches updates to learn from permuted token ids with unchanged masses."""
  real = update.draw_update
  order = jnp.asarray(np.random.default_rng(0).permutation(vocab_size))

  def draw(*arguments):
    return tuple(
      batch.replace(
        records=batch.records.replace(
          ids=order[batch.records.ids].astype(batch.records.ids.dtype)
        )
      )
      for batch in real(*arguments)
    )

  return mock.patch.object(update, "draw_update", draw)


def nan_rows():
  """Patches the buffer so that one new row in `NAN_EVERY` contains NaN."""
  real = buffer.append

  def append(ring, batch):
    broken = jnp.where(ring.added % NAN_EVERY == NAN_EVERY // 2, jnp.nan, 0.0)
    records = batch.records.replace(log_probs=batch.records.log_probs + broken)
    return real(ring, batch.replace(records=records))

  return mock.patch.object(buffer, "append", append)


def changed(
  config: online.OnlineConfig,
  way: str,
  mode: str,
  temperature: float,
  out: pathlib.Path,
) -> online.OnlineConfig:
  """Returns the config of one run."""
  learning, optimizer = config.learning, config.learning.update.optimizer
  rate = optimizer.learning_rate * (1000 if way == "rate x 1000" else 1)
  optimizer = dataclasses.replace(optimizer, learning_rate=rate)
  learned = dataclasses.replace(learning.update, optimizer=optimizer)
  changes = {
    "learn": way != "frozen",
    "learning": dataclasses.replace(learning, update=learned),
    "compare_every": 0,
    "keep_drafts": False,
    "keep_outputs": "ids",
    "checkpoint_every": 10**9,
    "run_directory": str(out / f"{mode}_{way.replace(' ', '_')}"),
  }
  rule = "coupling" if mode == "coupled" else "rejection"
  changes["decoding"] = dataclasses.replace(config.decoding, acceptance_rule=rule)
  changes["sampling"] = SamplingConfig(
    temperature=0.0 if mode == "greedy" else temperature
  )
  return dataclasses.replace(config, **changes)


def serve(config: online.OnlineConfig, way: str):
  """Runs the stream; returns (outputs by query, rows of metrics.jsonl)."""
  directory = runs.RunDirectory.start(config.run_directory, seed=config.learning.seed)
  with contextlib.ExitStack() as patches:
    if way == "nan rows":
      patches.enter_context(nan_rows())
    loop = online.begin(config, directory)
    if way == "shuffled labels":
      patches.enter_context(shuffled_labels(loop.pair.target.vocab_size))
    while loop.finished < len(loop.source.stream):
      loop.step()
    loop.close(0.0)
  directory.finish()
  return outputs_of(directory.path), list(runs.read(directory.metrics_path))


def outputs_of(run: pathlib.Path) -> dict[int, list[int]]:
  """Returns the tokens of every answer of a run by query; it keeps ids."""
  return {row["query"]: row["output_ids"] for row in runs.read(run / "outputs.jsonl")}


def figures(rows: list[dict]) -> dict[str, object]:
  """Returns overlap and speed at both ends of the stream, and the alarms."""
  requests = [row for row in rows if row["kind"] == "request"]
  updates = [row for row in rows if row["kind"] == "update"]
  begun = [row for row in rows if row["kind"] == "alarm" and row["active"]]
  values: dict[str, object] = {}
  for end, part in (("first", requests[:EDGE]), ("last", requests[-EDGE:])):
    values[f"overlap_{end}"] = round(float(np.mean([r["overlap"] for r in part])), 3)
    calls = sum(row["target_calls"] for row in part)
    tokens = sum(row["output_tokens"] for row in part)
    values[f"tokens_per_target_call_{end}"] = round(tokens / calls, 3)
  values["skipped_steps"] = sum(row["skipped"] for row in updates)
  values["steps"] = sum(row["steps"] for row in updates)
  values["alarms"] = "; ".join(
    f"{name.replace('_', ' ')} at {finished}"
    for name, finished in {
      row["alarm"]: row["finished"] for row in reversed(begun)
    }.items()
  )
  return values


def main() -> int:
  """Runs every poison and its controls; returns exit code 1 if an output changed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--requests", type=int, default=200, help="requests per topic")
  parser.add_argument("--only", action="append", choices=MODES, help="repeatable")
  parser.add_argument("--temperature", type=float, default=2.0)
  parser.add_argument("--gin_file", default="runs/demo.gin")
  parser.add_argument("--gin", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("runs/poisoned_learning")
  )
  arguments = parser.parse_args()
  if arguments.out.exists() and any(arguments.out.iterdir()):
    parser.error(f"--out: {arguments.out} contains earlier runs; choose a new folder")
  config, _ = settings.load(
    online.OnlineConfig,
    [arguments.gin_file],
    [f"StreamConfig.requests_per_task={arguments.requests}", *arguments.gin],
  )
  # All runs share one loaded pair, so that they have the same weights even if the files
  # change, and nothing is compiled twice.
  loaded = pairs.load_pair(config.pair, sharding.make(config.partition))
  config = dataclasses.replace(config, pair=loaded)
  results = compare(
    config, arguments.only or MODES, arguments.temperature, arguments.out
  )
  table = rich.table.Table(*(name.replace("_", " ") for name in results[0]))
  for row in results:
    table.add_row(*map(str, row.values()))
  rich.console.Console(width=200).print(table)
  print(json.dumps(results))
  (arguments.out / "result.json").write_text(json.dumps(results) + "\n")
  return 0 if is_kept(results) else 1


def is_kept(results: list[dict]) -> bool:
  """Returns whether outputs stayed the same and the control changed."""
  promised = [row for row in results if row["mode"] != "rejection"]
  control = [row for row in results if row["mode"] == "rejection"]
  blind = control and not any(row["outputs_changed"] for row in control)
  if blind:
    print(
      "the control (rejection) changed no output: raise --temperature", file=sys.stderr
    )
  return not blind and not any(row["outputs_changed"] for row in promised)


def compare(
  config: online.OnlineConfig,
  modes: Sequence[str],
  temperature: float,
  out: pathlib.Path,
) -> list[dict[str, object]]:
  """Serves the stream in every mode and way of learning; returns one row for each."""
  results = []
  greedy, _ = serve(changed(config, "frozen", "greedy", 0.0, out / "reference"), "")
  for mode in modes:
    frozen: dict[int, list[int]] = {}
    for way in WAYS:
      outputs, rows = serve(changed(config, way, mode, temperature, out), way)
      frozen = frozen or outputs
      differing = sum(outputs[index] != frozen[index] for index in frozen)
      counts = {
        "outputs": len(outputs),
        "outputs_unlike_greedy": sum(outputs[i] != greedy[i] for i in greedy),
        "outputs_changed": differing,
        **figures(rows),
      }
      results.append({"mode": mode, "learning": way, **counts})
  return results


if __name__ == "__main__":
  sys.exit(main())
