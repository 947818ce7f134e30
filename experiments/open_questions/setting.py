"""What the questions share: a pair with recorded answers, and the cells of systems."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orders
import recordings

from osd_jax import base, offline, pairs
from osd_jax.costs.table import Costs
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.schedule import WorthConfig
from osd_jax.engine.requests import DecodingConfig
from osd_jax.main import settings
from osd_tools import replay

Cell = dict[str, Any]
Answers = Iterable[tuple[Cell, Any]]
KEY = ("pair", "question", "stream", "system", "seed", "per_topic")
WORST = 100  # requests of the worst stretch


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all questions share.

  Attributes:
    name: of the pair, in the cells.
    pair: target and draft.
    files: where the pair comes from.
    decoding: lengths of the recorded answers.
    answers: recorded answers, for streams.
    held_out: recorded answers that nothing learns from.
    seen: rows that fill the buffer.
    learning: the default of the pair.
    costs: of this machine.
    drafted: K.
    ceiling: parameters of a draft that was distilled offline on all topics, or None.
    out: folder of runs.
    per_topic: answers of each topic in a stream.
    seeds: number of streams.
  """

  name: str
  pair: pairs.Pair
  files: pairs.PairConfig
  decoding: DecodingConfig
  answers: recordings.Recording
  held_out: recordings.Recording
  seen: list[base.DistillationBatch]
  learning: LearningConfig
  costs: Costs
  drafted: int
  ceiling: base.Params | None
  out: pathlib.Path
  per_topic: int
  seeds: int

  def order(self, kind: str, seed: int, period: int = 50) -> np.ndarray:
    """Returns a stream."""
    return orders.order(self.answers, kind, self.per_topic, seed, period)

  @property
  def by_worth(self) -> LearningConfig:
    """Updates where they pay, as in runs/demo_by_worth.gin."""
    plan = WorthConfig(costs=self.costs, trial_share=0.03)
    smaller = {"update__steps_per_update": 8, "update__num_replay": 8}
    return changed(self.learning, schedule=plan, **smaller)

  def learned(
    self, order: Iterable[int], learning: LearningConfig, **more: Any
  ) -> replay.Course:
    """Replays a stream with a draft that learns."""
    answers = (self.answers.rows[place] for place in order)
    return replay.learned(
      self.pair, answers, learning, self.drafted, self.seen, self.costs, **more
    )

  def fixed(self, params: base.Params, order: Sequence[int]) -> replay.Course:
    """Replays a stream with a draft that does not learn."""
    answers = self.answers.answers(order)
    return replay.frozen(self.pair.draft, params, answers, self.drafted)

  def figures(self, course: replay.Course, floor: replay.Course) -> Cell:
    """Returns the figures of a cell."""
    gain = course.overlap - floor.overlap
    width = min(WORST, len(gain))
    means = np.convolve(gain, np.full(width, 1 / width), "valid")
    # The gain in the first third, in its second half, and in the rest.
    third = len(gain) // 3
    parts = {
      "gain_early": slice(0, third),
      "gain_at_end": slice(third // 2, third),
      "gain_late": slice(third, None),
    }
    gains = {
      name: round(
        course.part(part).tokens_per_call(self.drafted)
        - floor.part(part).tokens_per_call(self.drafted),
        4,
      )
      for name, part in parts.items()
    }
    return {
      **gains,
      "tokens_per_call": round(course.tokens_per_call(self.drafted), 4),
      "overlap": round(float(course.overlap.mean()), 4),
      "worst_stretch": round(float(means.min()), 4),
      "requests": len(course.right),
      "tokens": int(course.tokens.sum()),
      "calls": int(course.calls(self.drafted).sum()),
      "updates": course.updates,
      "slices": course.slices,
    }


def changed(config: Any, **changes: Any) -> Any:
  """Returns a config with fields replaced; `a__b` is field b of field a."""
  for name, value in changes.items():
    first, _, rest = name.partition("__")
    if rest:
      value = changed(getattr(config, first), **{rest: value})
    config = dataclasses.replace(config, **{first: value})
  return config


def key_of(
  setting: Setting, question: str, stream: str, system: str, seed: int
) -> Cell:
  values = (setting.name, question, stream, system, seed, setting.per_topic)
  return dict(zip(KEY, values, strict=True))


def cells_of(
  setting: Setting,
  question: str,
  stream: str,
  seed: int,
  systems: Mapping[str, Any],
  floor: replay.Course,
) -> Answers:
  """Yields the cells of some systems on one stream."""
  for name, course in systems.items():
    key = key_of(setting, question, stream, name, seed)
    yield key, lambda course=course: setting.figures(course(), floor)


def rivals(setting: Setting, order: np.ndarray, floor: replay.Course) -> Iterator:
  """Yields the systems that every stream has: floor, cache and offline ceiling."""
  yield "floor", lambda: floor
  yield (
    "cache",
    lambda: replay.cache(
      setting.pair.target, setting.answers.answers(order), setting.drafted
    ),
  )
  if setting.ceiling is not None:
    yield "offline ceiling", lambda: setting.fixed(setting.ceiling, order)


def held_out(setting: Setting, params: base.Params) -> list[float]:
  """Returns the held-out overlap of a draft on each topic."""
  recording = setting.held_out
  by_topic = map(recording.of_topic, range(len(recording.names)))
  courses = [
    replay.frozen(setting.pair.draft, params, recording.answers(places), 1)
    for places in by_topic
  ]
  return [float(course.overlap.mean()) for course in courses]


def distilled(
  setting: Setting, folder: pathlib.Path, steps: int, rows: int, bindings: list[str]
) -> Cell:
  """Distils the draft offline; returns its held-out overlap on each topic."""
  output = folder / "draft.safetensors"
  config, text = settings.load(
    offline.OfflineConfig,
    ["experiments/demo_ceiling.gin"],
    [
      f"GENERATED_TRAIN_ROWS={rows}",
      f"OfflineConfig.output={str(output)!r}",
      f"OfflineConfig.run_directory={str(folder / 'run')!r}",
      f"OfflineConfig.steps={steps}",
      f"PairConfig.draft={setting.files.draft!r}",
      f"OptimizerConfig.total_steps={steps}",
      f"OfflineConfig.evaluate_every={steps}",
      "evaluation/BatchConfig.limit_rows=8",
      *bindings,
    ],
  )
  if not output.exists():
    folder.mkdir(parents=True, exist_ok=True)
    offline.run(config, text)
  overlaps = held_out(setting, setting.pair.load_draft(str(output)))
  by_topic = dict(zip(setting.held_out.names, np.round(overlaps, 4), strict=True))
  return {"overlap": round(float(np.mean(overlaps)), 4), "by_topic": by_topic}
