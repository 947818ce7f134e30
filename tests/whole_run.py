"""A small online run on a mesh, optionally interrupted and continued on another."""

import dataclasses

import pytest
import tiny_online

from osd_jax import online, runs, sharding
from osd_jax.distillation import optimizers, update
from osd_jax.engine import engine

COUNT, INTERRUPTED = 16, 9


class Interrupted(Exception):
  """Ends a run between two steps, as a kill would."""


def serve(config, outputs, limit=10**6):
  """Runs and collects tokens by request number; interrupts after `limit` requests."""
  step = engine.Engine.step

  def noted(self):
    finished = step(self)
    outputs.update({done.request.tag: done.tokens.tolist() for done in finished})
    if len(outputs) > limit:
      raise Interrupted
    return finished

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine.Engine, "step", noted)
    online.run(config)


def run(pair, folder, mesh, interrupted_at=None, goes_on_with=None, **decoding):
  """Returns outputs in request order, and (version, loss) of each update."""
  config = tiny_online.config(pair, folder)
  config = dataclasses.replace(
    config,
    pair=pair,  # without `draft_serving`, so less is compiled
    partition=sharding.PartitionConfig(*mesh),
    stream=dataclasses.replace(config.stream, requests_per_task=COUNT // 4),
    decoding=dataclasses.replace(config.decoding, num_draft_tokens=2, **decoding),
    learning=dataclasses.replace(
      config.learning,
      update=update.UpdateConfig(
        optimizers.OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        steps_per_update=1,
        num_replay=4,
      ),
    ),
    warm_start=None,
    floor_metering=False,
    compare_every=0,
  )
  outputs = {}
  if interrupted_at is not None:
    with pytest.raises(Interrupted):
      serve(config, outputs, interrupted_at)
    assert not (folder / "draft.safetensors").exists()
  partition = sharding.PartitionConfig(*(goes_on_with or mesh))
  serve(dataclasses.replace(config, partition=partition), outputs)
  rows = runs.read(folder / "metrics.jsonl")
  return [outputs[tag] for tag in range(COUNT)], [
    (row["version"], row["loss"]) for row in rows if row["kind"] == "update"
  ]
