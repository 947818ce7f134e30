"""The systems that are compared, each a course over the same recorded answers."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from osd_jax import base, offline, pairs
from osd_jax.distillation import update as updates
from osd_jax.distillation.buffer import BufferConfig
from osd_jax.distillation.learner import Learner, LearningConfig
from osd_jax.distillation.losses import LossConfig
from osd_jax.distillation.optimizers import OptimizerConfig
from osd_jax.distillation.schedule import ScheduleConfig
from osd_jax.distillation.update import UpdateConfig
from osd_jax.models.shapes import LlamaConfig
from osd_tools import replay

DRAFTED = 5  # K, the paper's

# As the paper's scripts train a decoder-only draft: one step for every 8 requests, on
# these alone, at the positions of errors.
PUBLISHED = LearningConfig(
  buffer=BufferConfig(capacity=8, recency_half_life=None),
  update=UpdateConfig(
    optimizer=OptimizerConfig(learning_rate=1e-4, clip_norm=None, warmup_steps=0),
    loss=LossConfig("forward_kl", positions="error", num_positions=0, num_tokens=0),
    steps_per_update=1,
    num_new=8,
    num_replay=0,
    ema_decay=0.0,
  ),
  schedule=ScheduleConfig(update_interval=8, much_to_gain=0.0),
)
# One slice for every other request, half of its rows replayed.
OURS = LearningConfig(
  buffer=BufferConfig(capacity=512, recency_half_life=200.0),
  update=UpdateConfig(
    optimizer=OptimizerConfig(learning_rate=4e-4),
    loss=LossConfig("forward_kl", num_positions=16, num_tokens=512, num_negatives=256),
    steps_per_update=4,
    num_new=4,
    num_replay=4,
    length_multiple=32,
  ),
  schedule=ScheduleConfig(update_interval=8, much_to_gain=0.0),
)
STEP_ROWS = 16  # answers in a step of offline distillation


@dataclasses.dataclass(frozen=True)
class Study:
  """A pair, and the answers of its target to one set.

  Attributes:
    settings: what its cells have in common.
    pair: its draft was distilled on generic chats alone.
    warm: answers that a static draft is distilled on.
    phases: answers of the stream, those of one phase before those of the next.
    held_out: answers to generic chats that nothing learns from.
    steps: of the distillation of a static draft.
    drafts: folder of distilled drafts.
  """

  settings: dict[str, Any]
  pair: pairs.Pair
  warm: base.DistillationBatch
  phases: tuple[base.DistillationBatch, ...]
  held_out: base.DistillationBatch
  steps: int
  drafts: pathlib.Path


def query_multiplier(pair: pairs.Pair) -> float:
  """Returns the factor for a draft's optimizer: only Llamas scale their attention."""
  scales = isinstance(pair.draft_config, LlamaConfig)
  return 1.0 if scales else pair.draft.head_dim**-0.5


def distilled(
  pair: pairs.Pair,
  start: base.Params,
  rows: base.DistillationBatch,
  steps: int,
  path: pathlib.Path,
  seed: int = 0,
) -> base.Params:
  """Distils a draft on answers, once; its file is read the next time."""
  if path.exists():
    return pair.load_draft(str(path))
  config = UpdateConfig(
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      query_multiplier=query_multiplier(pair),
      warmup_steps=min(30, steps // 4),
      schedule="trapezoid",
      total_steps=steps,
    ),
    loss=LossConfig("forward_kl", num_positions=24, num_tokens=1024, num_negatives=512),
    num_new=0,
    num_replay=STEP_ROWS,
    ema_decay=0.0,
  )
  trained, frozen = pair.draft.split(start)
  learner = updates.init_learner(config, trained)
  for step in range(steps):
    order = offline.shuffled(len(rows.weight), step * STEP_ROWS, STEP_ROWS, seed)
    batch = jax.tree.map(lambda leaf, at=order: leaf[at], rows)
    learner, metrics = updates.take_slice(pair.draft, config, learner, batch, frozen)
    if step % 50 == 49 or step == steps - 1:
      loss = float(metrics.loss)
      print(f"{path.stem}: step {step + 1} of {steps}, loss {loss:.3f}", flush=True)
  params = pair.draft.join(learner.served, frozen)
  path.parent.mkdir(parents=True, exist_ok=True)
  pair.save_draft(path, params, f"{steps} steps on {len(rows.weight)} answers")
  return pair.load_draft(str(path))


@dataclasses.dataclass(frozen=True)
class Result:
  """The course of a system, and its draft at the end of the stream."""

  course: replay.Course
  params: base.Params | None = None


class Columns:
  """The systems on one stream; those that others build on are computed once."""

  def __init__(self, study: Study, seed: int):
    """`seed` gives the order of the answers of a phase, and seeds the learner."""
    self.study, self._seed = study, seed
    self._pair = study.pair
    rng = np.random.default_rng([seed, 11])
    self.answers = [
      row(phase, int(place))
      for phase in study.phases
      for place in rng.permutation(len(phase.weight))
    ]
    self._results: dict[str, Result] = {}

  def result(self, name: str) -> Result:
    """Returns the result of the column `name`."""
    if name not in self._results:
      self._results[name] = COLUMNS[name](self)
    return self._results[name]

  def _frozen(self, params: base.Params) -> Result:
    course = replay.frozen(self._pair.draft, params, self.answers, DRAFTED)
    return Result(course, params)

  def generic(self) -> Result:
    """The draft before it has seen the set."""
    return self._frozen(self._pair.draft_params)

  def static(self) -> Result:
    """Distilled on the answers before the stream, then frozen."""
    study = self.study
    path = study.drafts / "static.safetensors"
    params = distilled(
      self._pair, self._pair.draft_params, study.warm, study.steps, path
    )
    return self._frozen(params)

  def offline(self) -> Result:
    """Distilled on the first three quarters of the stream; counts on the last one."""
    return self._offline("offline", self.answers[: len(self.answers) * 3 // 4])

  def offline_on_all(self) -> Result:
    """Distilled on the whole stream that it is asked about: out of reach for others."""
    return self._offline("offline_on_all", self.answers)

  def _offline(self, name: str, seen: list[base.DistillationBatch]) -> Result:
    rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *seen)
    path = self.study.drafts / f"{name}_{self._seed}.safetensors"
    # As many rows as a draft that learns from these answers trains on.
    slices = len(seen) * OURS.update.steps_per_update // OURS.schedule.update_interval
    trained = slices * (OURS.update.num_new + OURS.update.num_replay)
    steps = max(trained // STEP_ROWS, self.study.steps)
    params = distilled(self._pair, self._pair.draft_params, rows, steps, path)
    return self._frozen(params)

  def learning(self, config: LearningConfig) -> LearningConfig:
    """Returns a config for this pair's draft and the seed of these columns."""
    optimizer = dataclasses.replace(
      config.update.optimizer, query_multiplier=query_multiplier(self._pair)
    )
    update = dataclasses.replace(config.update, optimizer=optimizer)
    return dataclasses.replace(config, update=update, seed=self._seed)

  def learned(
    self, config: LearningConfig, start: str = "generic", is_guarded: bool = True
  ) -> Result:
    """A draft that learns from the stream; see `replay.learned` for `is_guarded`.

    `start` is the column of a draft that does not learn, where it begins.
    """
    params = self._pair.draft_params
    if start != "generic":
      params = self.result(start).params
    newest: list[Learner] = []

    def note(overlap: float, learner: Learner) -> None:
      del overlap
      newest[:] = [learner]

    learning = self.learning(config)
    course = replay.learned(
      dataclasses.replace(self._pair, draft_params=params),
      self.answers,
      learning,
      DRAFTED,
      on_answer=note,
      is_guarded=is_guarded,
    )
    return Result(course, newest[0].serving)

  def cache(self) -> Result:
    """The n-gram cache alone."""
    return Result(replay.cache(self._pair.target, self.answers, DRAFTED))

  def mixed(self, name: str) -> Result:
    """A draft mixed with the n-gram cache."""
    alone = self.result(name)
    course = replay.mixed(self._pair.target, self.answers, alone.course)
    return Result(course, alone.params)


COLUMNS: Mapping[str, Callable[[Columns], Result]] = {
  "generic": Columns.generic,
  "static": Columns.static,
  "as published": lambda columns: columns.learned(PUBLISHED, is_guarded=False),
  "ours": lambda columns: columns.learned(OURS),
  "static, then ours": lambda columns: columns.learned(OURS, "static"),
  "ours, unguarded": lambda columns: columns.learned(OURS, is_guarded=False),
  "static, then ours, unguarded": lambda columns: columns.learned(
    OURS, "static", is_guarded=False
  ),
  "offline": Columns.offline,
  "offline on all": Columns.offline_on_all,
  "cache": Columns.cache,
  "cache + generic": lambda columns: columns.mixed("generic"),
  "cache + static": lambda columns: columns.mixed("static"),
  "cache + ours": lambda columns: columns.mixed("ours"),
  "cache + static, then ours": lambda columns: columns.mixed("static, then ours"),
}


def row(rows: base.DistillationBatch, place: int) -> base.DistillationBatch:
  """Returns one answer of many."""
  return jax.tree.map(lambda leaf: leaf[place : place + 1], rows)
