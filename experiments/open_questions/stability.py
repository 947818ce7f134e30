"""Is the traffic stable enough? What a short log says about the gain of learning.

Streams of one to eight topics that change slowly or quickly. The first hundred requests
of each are a user's log; its measures are to predict what learning gains on the next
two hundred. The lines that predict are fitted to streams of the demo's pair. They are
checked on its streams of other topics, on streams with topics that the log does not
have, and on a target of eight topics.

  python experiments/open_questions/run.py stability    # computes the cells
  python experiments/open_questions/stability.py    # prints what predicted the gain
"""

import dataclasses
import functools
import json
import pathlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import recordings
import rich.console
import rich.table
import tuning
from setting import Answers, Cell, Setting, changed, key_of

from osd_jax import base
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.schedule import ScheduleConfig
from osd_tools import replay

FOUR = ("maths", "sql", "python", "finance")
MORE = tuple(tuning.MORE_TOPICS)  # which only the target of eight topics knows
TOPICS = (
  *((name,) for name in FOUR),
  *(("sql", "finance"), ("maths", "sql"), ("python", "finance")),
  FOUR,
)
TOPICS_OF_EIGHT = (
  *((name,) for name in MORE),
  *(("letters", "tables"), ("records", "steps")),
  *(MORE, FOUR + MORE),
)
PERIODS = (5, 25, 50, 100)
LOG, LATER = 100, 200  # requests


def stability(setting: Setting) -> Answers:
  """Yields a cell for each stream: measures of the log and the later gain."""
  for seed in range(setting.seeds):
    for names in TOPICS_OF_EIGHT if setting.name == "eight topics" else TOPICS:
      for period in PERIODS if len(names) > 1 else PERIODS[:1]:
        stream = f"{' '.join(names)}, every {period}"
        key = key_of(setting, "stability", stream, "measures", seed)
        yield key, functools.partial(measures, setting, names, period, seed)


def part_of(setting: Setting, names: Sequence[str]) -> Setting:
  """Returns the setting with the answers of some topics."""
  answers = setting.answers
  topics = [answers.names.index(name) for name in names]
  places = np.concatenate([answers.of_topic(topic) for topic in topics])
  indices = np.asarray([topics.index(topic) for topic in answers.topics[places]])
  recording = recordings.Recording(
    tuple(answers.answers(places)), indices, tuple(names)
  )
  each = min(LOG + LATER, int(np.bincount(indices).min()))
  return dataclasses.replace(setting, answers=recording, per_topic=each)


def measures(setting: Setting, names: Sequence[str], period: int, seed: int) -> Cell:
  """Returns the measures of a log, and the gain of learning after it."""
  part_setting = part_of(setting, names)
  order = part_setting.order("cyclic", seed, period)[: LOG + LATER]
  learning = changed(setting.learning, seed=seed)
  floor = part_setting.fixed(setting.pair.draft_params, order)
  online = part_setting.learned(order, learning)
  longer = part_setting.learned(order[:LOG], trained_more(learning))
  cache = replay.cache(
    setting.pair.target, part_setting.answers.answers(order), setting.drafted
  )
  log, last, later = slice(0, LOG), slice(LOG // 2, LOG), slice(LOG, None)
  per_call = lambda course, part: course.part(part).tokens_per_call(setting.drafted)
  gain = lambda course, part: per_call(course, part) - per_call(floor, part)
  topics = part_setting.answers.topics[order]
  counts = templates(part_setting.answers.answers(order[log]))
  changes = float((np.diff(topics[log]) != 0).mean())
  figures = {
    "gain_late": gain(online, later),
    "gain_at_end": gain(online, last),
    "gain_trained_more": gain(longer, last),
    "floor": per_call(floor, log),
    "floor_late": per_call(floor, later),
    "floor_overlap": float(floor.overlap[:LOG].mean()),
    "cache_overlap": float(cache.overlap[last].mean()),
    "cache_where_wrong": where_wrong(floor.part(last), cache.part(last)),
    "drift": float(abs(floor.overlap[last].mean() - floor.overlap[: LOG // 2].mean())),
    **counts,
    "changes": changes,
    "entropy_times_changes": counts["template_entropy"] * changes,
    "new_topics": float((~np.isin(topics[later], topics[log])).mean()),
  }
  return {name: round(value, 4) for name, value in figures.items()}


def trained_more(learning: LearningConfig) -> LearningConfig:
  """Returns a config that trains as much as it can at every update."""
  interval = learning.schedule.update_interval
  return changed(learning, schedule=ScheduleConfig(interval, much_to_gain=0.0))


def where_wrong(draft: replay.Course, cache: replay.Course) -> float:
  """Returns how often the cache is right where the draft is wrong."""
  pairs = zip(draft.right, cache.right, strict=True)
  right = np.concatenate([theirs[0][~ours[0]] for ours, theirs in pairs])
  return float(right.mean()) if len(right) else 0.0


def templates(rows: Sequence[base.DistillationBatch]) -> dict[str, float]:
  """Returns the number of templates of some answers, and their entropy in bits.

  A template is an answer whose tokens that the prompt has, too, are masked.
  """
  counts: Counter[tuple[int, ...]] = Counter()
  for row in rows:
    tokens = np.asarray(row.target[0])[np.asarray(row.mask[0])]
    counts[tuple(np.where(np.isin(tokens, row.source[0]), -1, tokens).tolist())] += 1
  shares = np.asarray(list(counts.values())) / len(rows)
  entropy = -float((shares * np.log2(shares)).sum())
  return {"templates": float(len(counts)), "template_entropy": entropy}


# ---- What predicts the gain?

MEASURES = (
  *("floor_overlap", "floor", "cache_overlap", "cache_where_wrong"),
  *("template_entropy", "templates", "changes", "entropy_times_changes", "drift"),
  *("gain_at_end", "gain_trained_more"),
)
AS_THEY_ARE = ("gain_at_end", "gain_trained_more")
PAIRED = (("floor_overlap", "gain_at_end"), ("floor_overlap", "entropy_times_changes"))


def errors(
  fitted: Sequence[Cell], tested: Sequence[Cell] | None = None
) -> dict[str, list[float]]:
  """Returns how far each measure was off, in tokens per call, on every tested stream.

  A line through the fitted streams predicts the gain; those of the same pair with the
  same topics are left out of it. "as it is" takes the measured gain itself, "the mean"
  no measure.

  Args:
    fitted: the streams of the lines.
    tested: the streams to predict; None for those of `fitted`.
  """
  tested = fitted if tested is None else tested
  by_name = {
    f"{name}, as it is": [abs(cell["gain_late"] - cell[name]) for cell in tested]
    for name in AS_THEY_ARE
  }
  ways = {"the mean": (), **{name: (name,) for name in MEASURES}}
  ways |= {" and ".join(names): names for names in PAIRED}
  for way, names in ways.items():
    by_name[way] = [
      abs(cell["gain_late"] - foretold(_others(fitted, cell), cell, names))
      for cell in tested
    ]
  return by_name


def _others(fitted: Sequence[Cell], cell: Cell) -> list[Cell]:
  return [one for one in fitted if _topics(one) != _topics(cell)]


def _topics(cell: Cell) -> tuple[str | None, str]:
  return cell.get("pair"), cell["stream"].partition(",")[0]


def foretold(fitted: Sequence[Cell], cell: Cell, names: Sequence[str]) -> float:
  """Returns the gain on a line through other streams, their mean without names."""
  line = coefficients(fitted, names)
  return float(line @ [1.0, *(cell[name] for name in names)])


def coefficients(fitted: Sequence[Cell], names: Sequence[str]) -> np.ndarray:
  """Returns the constant and the slope of each measure: least squares."""
  inputs = np.asarray([[1.0, *(cell[name] for name in names)] for cell in fitted])
  gains = np.asarray([cell["gain_late"] for cell in fitted])
  return np.linalg.lstsq(inputs, gains, rcond=None)[0]


def parts(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
  """Returns the streams by pair, and by whether the log has all topics."""
  groups: dict[str, list[Cell]] = {}
  for cell in cells:
    end = ", new topics come" if cell["new_topics"] else ""
    groups.setdefault(cell["pair"] + end, []).append(cell)
  return groups


def too_high(cells: Sequence[Cell], name: str, by: float = 0.1) -> int:
  """Returns the number of streams whose gain was lower than a measure said."""
  return sum(cell[name] > cell["gain_late"] + by for cell in cells)


def main() -> None:
  """Prints the streams and the errors of the measures."""
  lines = (pathlib.Path(__file__).parent / "cells.jsonl").read_text().splitlines()
  cells = [cell for cell in map(json.loads, lines) if cell["question"] == "stability"]
  console = rich.console.Console(width=200)
  columns = ("gain_late", "new_topics", *MEASURES)
  table = rich.table.Table("pair", "stream", "seeds", *columns)
  streams = dict.fromkeys((cell["pair"], cell["stream"]) for cell in cells)
  for key in streams:
    cells_of = [cell for cell in cells if (cell["pair"], cell["stream"]) == key]
    values = (f"{np.mean([cell[name] for cell in cells_of]):.2f}" for name in columns)
    table.add_row(*key, str(len(cells_of)), *values)
  console.print(table)
  groups = parts(cells)
  fitted = groups["demo"]
  off = {name: errors(fitted, group) for name, group in groups.items()}
  heads = (f"{name} ({len(group)})" for name, group in groups.items())
  table = rich.table.Table("median, largest error", *heads)
  for way in off["demo"]:
    values = (
      f"{np.median(cells_of[way]):.2f}, {max(cells_of[way]):.2f}"
      for cells_of in off.values()
    )
    table.add_row(way, *values)
  for name in AS_THEY_ARE:
    values = (str(too_high(group, name)) for group in groups.values())
    table.add_row(f"streams where {name} was .1 too high", *values)
  console.print(table)
  for name in ("floor", "floor_overlap", "gain_at_end"):
    constant, slope = coefficients(fitted, (name,))
    console.print(f"demo: gain = {constant:.2f} + {slope:.2f} * {name}")


if __name__ == "__main__":
  main()
