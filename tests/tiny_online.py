"""A small online run, shared by many tests.

As a script, with arguments PAIR_FOLDER RUN_DIRECTORY, it is the process that
`test_resume` kills.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import tiny_pair

from osd_jax import online, pairs
from osd_jax.data import batches, examples, streams
from osd_jax.distillation import buffer, learner, losses, optimizers, schedule, update
from osd_jax.engine.requests import DecodingConfig
from osd_jax.models import shapes, weights
from osd_jax.models.shapes import AttachedConfig, EagleConfig

REQUESTS, INTERVAL, SOURCE, LENGTH, CHECKPOINT = 24, 4, 40, 12, 5
SHAPE = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
SERVING = shapes.DraftServing(int8=True, shortlist=700)  # half of the vocabulary


def save_lively_pair(folder: Path, family: str = "t5") -> pairs.PairConfig:
  """Saves the tiny pair with a target whose outputs differ between prompts.

  An untrained target would repeat one token. A large relative bias (T5), or attention
  that outweighs the residual stream (Llama), prevents that.
  """
  pair = tiny_pair.save_tiny_pair(folder, family)
  found = weights.load(pair.target)

  def leaf(path, value):
    names = {key.key for key in path}
    if family == "llama":
      return value * (3 if "out" in names else 2 if "query" in names else 1)
    return value * 10 if "rel_embedding" in names else value

  params = jax.tree_util.tree_map_with_path(leaf, found.params)
  weights.save(pair.target, dataclasses.replace(found, params=params))
  return pair


def attached(pair: pairs.PairConfig) -> pairs.PairConfig:
  """The same target with an attached draft of random parameters."""
  return dataclasses.replace(pair, draft=pairs.ATTACHED, attached=SHAPE)


def with_head(pair: pairs.PairConfig) -> pairs.PairConfig:
  """The same target, a Llama, with a new EAGLE-3 head."""
  shape = weights.shape_of(pair.target)
  head = EagleConfig(
    layers=dataclasses.replace(shape, num_layers=1),
    draft_vocab_size=900,
    state_layers=(0, 1, shape.num_layers),
  )
  return dataclasses.replace(pair, draft=pairs.ATTACHED, attached=head)


def tasks(split: str, limit: int) -> tuple[examples.TaskConfig, ...]:
  """The four generated topics."""
  return tuple(examples.topic_task(topic, split, limit) for topic in examples.TOPICS)


def config(
  pair: pairs.PairConfig | pairs.Pair,
  run_directory: Path,
  rows: int = 2,
  **changes: Any,
) -> online.OnlineConfig:
  """24 requests in four topics, an update every 4, a checkpoint every 5."""
  stream_tasks = tasks("stream", 12)
  made = online.OnlineConfig(
    stream=streams.StreamConfig(
      tasks=stream_tasks,
      requests_per_task=REQUESTS // len(stream_tasks),
      source_length=SOURCE,
    ),
    pair=pair
    if isinstance(pair, pairs.Pair)
    else dataclasses.replace(pair, draft_serving=SERVING),
    decoding=DecodingConfig(
      rows=rows, num_draft_tokens=3, source_lengths=(SOURCE,), target_length=LENGTH
    ),
    learning=learner.LearningConfig(
      buffer=buffer.BufferConfig(capacity=32, recency_half_life=None),
      update=update.UpdateConfig(
        optimizer=optimizers.OptimizerConfig(
          learning_rate=1e-2, query_multiplier=1.0, warmup_steps=0
        ),
        loss=losses.LossConfig("forward_kl", num_positions=0, num_tokens=0),
        steps_per_update=2,
        num_replay=4,
        length_multiple=LENGTH // 2,
        ema_decay=0.5,
      ),
      schedule=schedule.ScheduleConfig(update_interval=INTERVAL, much_to_gain=0.0),
    ),
    warm_start=batches.BatchConfig(
      tasks=tasks("train", 3), source_length=SOURCE, target_length=LENGTH
    ),
    compare_every=8,
    measure_costs=False,
    checkpoint_every=CHECKPOINT,
    keep_drafts=True,
    run_directory=str(run_directory),
  )
  learning = {
    name: changes.pop(name)
    for name in [field.name for field in dataclasses.fields(made.learning)]
    if name in changes
  }
  learning = dataclasses.replace(made.learning, **learning)
  return dataclasses.replace(made, learning=learning, **changes)


if __name__ == "__main__":
  folder, directory, *kind = sys.argv[1:]
  files = {n: str(Path(folder) / f"{n}.safetensors") for n in ("target", "draft")}
  pair = pairs.PairConfig(**files)
  if kind == ["attached"]:
    pair = attached(pair)
  online.run(config(pair, Path(directory)))
