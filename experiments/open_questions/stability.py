"""Is the traffic stable enough? What a short log says about the gain of learning.

Streams of one to four topics that change slowly or quickly. The first hundred requests
of each are a user's log; its measures are to predict what learning gains on the next
two hundred.

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
from setting import Answers, Cell, Setting, changed, key_of

from osd_jax import base, replay
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.schedule import ScheduleConfig

TOPICS = (
  *(("maths",), ("sql",), ("python",), ("finance",)),
  *(("sql", "finance"), ("maths", "sql"), ("python", "finance")),
  ("maths", "sql", "python", "finance"),
)
PERIODS = (5, 50)
LOG, LATER = 100, 200  # requests


def stability(setting: Setting) -> Answers:
  """Yields a cell for each stream: measures of the log, and what came after it."""
  for seed in range(setting.seeds):
    for names in TOPICS:
      for period in PERIODS if len(names) > 1 else PERIODS[:1]:
        stream = f"{' '.join(names)}, every {period}"
        key = key_of(setting, "stability", stream, "measures", seed)
        yield key, functools.partial(measures, setting, names, period, seed)


def part_of(setting: Setting, names: Sequence[str]) -> Setting:
  """Returns the setting with the answers of some topics."""
  answers = setting.answers
  topics = [answers.names.index(name) for name in names]
  places = np.concatenate([answers.of_topic(topic) for topic in topics])
  own = np.asarray([topics.index(topic) for topic in answers.topics[places]])
  chosen = recordings.Recording(tuple(answers.answers(places)), own, tuple(names))
  each = -(-(LOG + LATER) // len(names))
  return dataclasses.replace(setting, answers=chosen, per_topic=each)


def measures(setting: Setting, names: Sequence[str], period: int, seed: int) -> Cell:
  """Returns the measures of a log, and the gain of learning after it."""
  own = part_of(setting, names)
  order = own.order("cyclic", seed, period)[: LOG + LATER]
  learning = changed(setting.learning, seed=seed)
  floor = own.fixed(setting.pair.draft_params, order)
  online = own.learned(order, learning)
  longer = own.learned(order[:LOG], trained_more(learning))
  cache = replay.cache(setting.pair.target, own.answers.answers(order), setting.drafted)
  log, last, later = slice(0, LOG), slice(LOG // 2, LOG), slice(LOG, None)
  per_call = lambda course, part: course.part(part).tokens_per_call(setting.drafted)
  gain = lambda course, part: per_call(course, part) - per_call(floor, part)
  found = {
    "gain_late": gain(online, later),
    "gain_at_end": gain(online, last),
    "gain_trained_more": gain(longer, last),
    "floor": per_call(floor, log),
    "floor_late": per_call(floor, later),
    "floor_overlap": float(floor.overlap[:LOG].mean()),
    "cache_overlap": float(cache.overlap[last].mean()),
    "cache_where_wrong": where_wrong(floor.part(last), cache.part(last)),
    **templates(own.answers.answers(order[:LOG])),
    "changes": float((np.diff(own.answers.topics[order[:LOG]]) != 0).mean()),
  }
  return {name: round(value, 4) for name, value in found.items()}


def trained_more(learning: LearningConfig) -> LearningConfig:
  """Returns a config that trains as much as it can at every update, without pauses."""
  interval = learning.schedule.update_interval
  return changed(learning, schedule=ScheduleConfig(interval, pause=False))


def where_wrong(draft: replay.Course, cache: replay.Course) -> float:
  """Returns how often the cache is right where the draft is wrong."""
  pairs = zip(draft.right, cache.right, strict=True)
  found = np.concatenate([theirs[0][~ours[0]] for ours, theirs in pairs])
  return float(found.mean()) if len(found) else 0.0


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
  *("floor_overlap", "cache_overlap", "cache_where_wrong", "template_entropy"),
  *("templates", "changes", "gain_at_end", "gain_trained_more"),
)


def errors(cells: Sequence[Cell]) -> dict[str, list[float]]:
  """Returns how far each measure was off, in tokens per call, on every held-out stream.

  A line through the other streams predicts the gain. Streams of the same topics are
  held out together. "as it is" takes the measured gain itself, "the mean" no measure.
  """
  gains = np.asarray([cell["gain_late"] for cell in cells])
  groups = [cell["stream"].partition(",")[0] for cell in cells]
  found = {
    f"{name}, as it is": np.abs(gains - [cell[name] for cell in cells]).tolist()
    for name in ("gain_at_end", "gain_trained_more")
  }
  for name in ("the mean", *MEASURES):
    values = np.asarray([cell.get(name, 0.0) for cell in cells], float)
    inputs = np.stack([np.ones_like(values), values], 1)
    found[name] = []
    for row, group in enumerate(groups):
      others = np.asarray([one != group for one in groups])
      line = np.linalg.lstsq(inputs[others], gains[others], rcond=None)[0]
      found[name].append(float(abs(inputs[row] @ line - gains[row])))
  return found


def main() -> None:
  """Prints the cells and the errors of the measures."""
  lines = (pathlib.Path(__file__).parent / "cells.jsonl").read_text().splitlines()
  cells = [cell for cell in map(json.loads, lines) if cell["question"] == "stability"]
  console = rich.console.Console(width=160)
  columns = ("gain_late", *MEASURES)
  table = rich.table.Table("stream", "seed", *columns)
  for cell in cells:
    values = (str(cell[name]) for name in columns)
    table.add_row(cell["stream"], str(cell["seed"]), *values)
  console.print(table)
  table = rich.table.Table("measure", "median error", "largest")
  for name, off in errors(cells).items():
    table.add_row(name, f"{np.median(off):.2f}", f"{max(off):.2f}")
  console.print(table)


if __name__ == "__main__":
  main()
