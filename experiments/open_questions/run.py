"""Open questions of online speculative decoding, answered on recorded answers.

Every system meets the same answers in the same order, see `osd_tools.replay`. A cell is
one system on one stream with one seed. It is written to `--out` when it is finished,
and the same command skips what is there.

    how_often    how often should the draft be updated, at equal training?
    variance     what if the topic changes quickly?
    forgetting   what does the draft forget, and what does replay buy?
    routing      what do several drafts gain over one?
    gkd          which divergence, which texts, which positions? (gkd.py)
    static       how much data makes a static draft as good as one that learns online?
    shifts       what would a detector of shifts gain that is never wrong?
    targets      what happens when the target is tuned and replaced? (targets.py)
    stability    what does a short log say about the gain? (stability.py)
    frequent     which tokens does distillation teach? (frequent.py)
    mixing       what does a draft distilled on two topics gain on each? (mixing.py)
    bigger       is a bigger static draft better at equal compute? (bigger.py)
    well_trained what does learning add to a draft that knows the topics already?

The pair is the demo's with its attached draft; with the independent one, as in the
paper (`--independent`; only this one can write texts, for `gkd`); the attached one with
a target that was tuned on four more topics (`--eight`); or
Qwen2.5-Coder-0.5B-Instruct with its shipped draft, which has no offline ceiling (and so
no `static`), on questions like those that it was distilled on, or on others
(`--new_sets`).

  python experiments/open_questions/run.py QUESTION... [--seeds 3] [--per_topic 200]
  python experiments/open_questions/run.py gkd --independent
      [--folder runs/open_questions_independent]
  python experiments/open_questions/run.py stability forgetting --eight --seeds 1
      [--folder runs/open_questions_eight]
  python experiments/open_questions/run.py well_trained --qwen FOLDER
      [--data ../shared/data] [--folder runs/open_questions_qwen]
  python experiments/open_questions/run.py how_often forgetting --qwen FOLDER --new_sets
      [--folder runs/open_questions_qwen_new]
  python experiments/open_questions/run.py --table    # prints the cells
"""

# ruff: noqa: E402 (the folders were just added)
import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import measure
import numpy as np
import orders
import recordings
import rich.console
import rich.table
import tuning
from bigger import bigger
from frequent import frequent
from gkd import gkd
from mixing import mixing
from setting import (
  KEY,
  Answers,
  Cell,
  Setting,
  cells_of,
  changed,
  distilled,
  held_out,
  key_of,
  rivals,
)
from stability import stability
from targets import targets

from osd_jax import base, corpus, metrics, offline, online, pairs, sharding
from osd_jax.costs.table import Costs
from osd_jax.data.batches import BatchConfig, read_corpus
from osd_jax.data.examples import TaskConfig
from osd_jax.distillation.gate import GateConfig
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.schedule import Request, ScheduleConfig
from osd_jax.engine import measurement
from osd_jax.engine.server import Server
from osd_jax.main import settings
from osd_tools import replay

INTERVALS = (1, 2, 4, 8, 32, 128, 500)
KINDS = ("sharp", "mixture", "cyclic")
PERIODS = (5, 25, 100)
HELD_OUT = 100  # prompts of each topic


@dataclasses.dataclass(frozen=True)
class Every:
  """A schedule with a fixed interval and a fixed number of slices per request.

  >>> schedule = Every(2, 3)
  >>> state, first = schedule.update(schedule.init(), Request(0.5, 9, 99))
  >>> first, schedule.update(state, Request(0.5, 9, 99))[1]
  (0, 6)

  Attributes:
    update_interval: I.
    slices: per request.
  """

  update_interval: int
  slices: int = 1
  needs_costs = False

  @dataclasses.dataclass(frozen=True)
  class State:
    """Requests so far."""

    finished: int = 0
    paused: bool = False

  def init(self) -> State:
    """See `Schedule.init`."""
    return self.State()

  def update(
    self, state: State, request: Request, costs: Costs | None = None
  ) -> tuple[State, int]:
    """See `Schedule.update`."""
    del request, costs
    finished = state.finished + 1
    due = finished % self.update_interval == 0
    return self.State(finished), self.slices * self.update_interval if due else 0


# ---- The questions: each yields (key of a cell, function that computes it)


def how_often(setting: Setting) -> Answers:
  """Updates every I requests, with one slice for each request in any case."""
  for seed in range(setting.seeds):
    for kind in KINDS:
      order = setting.order(kind, seed)
      floor = setting.fixed(setting.pair.draft_params, order)
      systems = dict(rivals(setting, order, floor))
      plans = {f"I = {interval}": Every(interval) for interval in INTERVALS}
      # All use one number of slices, so that an update is compiled only once.
      at_interval = changed(setting.learning, update__steps_per_update=max(INTERVALS))
      learnings = {
        name: changed(at_interval, schedule=plan) for name, plan in plans.items()
      }
      learnings["as the demo"] = setting.learning
      learnings["by worth"] = setting.by_worth
      for name, learning in learnings.items():
        learning = changed(learning, seed=seed)
        systems[name] = lambda learning=learning, order=order: setting.learned(
          order, learning
        )
      yield from cells_of(setting, "how_often", kind, seed, systems, floor)


def variance(setting: Setting) -> Answers:
  """Topics that change every few requests, and whenever the draft has adapted."""
  for seed in range(setting.seeds):
    default = changed(setting.learning, seed=seed)
    ways = {"online": default, "online, gated": changed(default, gate=GateConfig())}
    for period in (*PERIODS, setting.per_topic):
      order = setting.order("cyclic", seed, period)
      floor = setting.fixed(setting.pair.draft_params, order)
      systems = dict(rivals(setting, order, floor))
      for name, learning in ways.items():
        systems[name] = lambda learning=learning, order=order: setting.learned(
          order, learning
        )
      systems["best in hindsight"] = lambda order=order, default=default: in_hindsight(
        setting, order, default
      )
      name = f"every {period} requests"
      yield from cells_of(setting, "variance", name, seed, systems, floor)
    for name, learning in ways.items():
      key = key_of(setting, "variance", "adversary", name, seed)
      yield (
        key,
        lambda learning=learning, seed=seed: adversarial(setting, learning, seed),
      )


def adversarial(setting: Setting, learning: LearningConfig, seed: int) -> Cell:
  """Returns the figures of a stream that changes when this draft has adapted."""
  length = len(setting.answers.names) * setting.per_topic
  stream = orders.Adversary(setting.answers, length, seed)
  note = lambda overlap, learner: stream.overlaps.append(overlap)
  course = setting.learned(stream, learning, on_answer=note)
  floor = setting.fixed(setting.pair.draft_params, stream.order)
  rival = {"floor_tokens_per_call": round(floor.tokens_per_call(setting.drafted), 4)}
  return setting.figures(course, floor) | rival


def kept_drafts(
  setting: Setting, order: np.ndarray, learning: LearningConfig, every: int
) -> tuple[replay.Course, list[base.Params]]:
  """Returns a course, and the draft each time that a fixed number of answers passed."""
  drafts, answered = [], itertools.count(1)

  def note(overlap, learner):
    del overlap
    if next(answered) % every == 0:
      drafts.append(learner.serving)

  return setting.learned(order, learning, on_answer=note), drafts


def in_hindsight(
  setting: Setting, order: np.ndarray, learning: LearningConfig
) -> replay.Course:
  """Returns the course of the best draft among those that learning passed through."""
  _, drafts = kept_drafts(setting, order, learning, 100)
  courses = [setting.fixed(one, order) for one in (setting.pair.draft_params, *drafts)]
  return min(courses, key=lambda course: course.calls(setting.drafted).sum())


MEMORIES = {
  "all, half-life 800 (default)": {},
  "default, averaged longer": {"update__ema_decay": 0.99},
  "new answers only": {"update__num_new": 16, "update__num_replay": 0},
  "the last 100": {"buffer__capacity": 100, "buffer__recency_half_life": None},
  "the last 400": {"buffer__capacity": 400, "buffer__recency_half_life": None},
  "all, equally often": {"buffer__recency_half_life": None},
}


def forgetting(setting: Setting) -> Answers:
  """Topics one after another, twice; held-out overlap of each after every stretch."""
  half = setting.per_topic // 2
  for seed in range(setting.seeds):
    order = setting.order("cyclic", seed, half)
    for name, changes in MEMORIES.items():
      learning = changed(setting.learning, seed=seed, **changes)

      def figures(learning=learning, order=order):
        course, drafts = kept_drafts(setting, order, learning, half)
        matrix = [held_out(setting, params) for params in drafts]
        floor = setting.fixed(setting.pair.draft_params, order)
        return setting.figures(course, floor) | {
          "matrix": np.round(matrix, 4).tolist(),
          "forgotten": round(forgotten(np.asarray(matrix)), 4),
        }

      yield key_of(setting, "forgetting", "cyclic, twice", name, seed), figures


def forgotten(matrix: np.ndarray) -> float:
  """Returns the largest loss of a topic's overlap after a stretch of its own.

  >>> forgotten(np.array([[0.5, 0.2], [0.4, 0.6], [0.7, 0.5], [0.7, 0.8]]))
  0.1

  Args:
    matrix: [stretches, topics] held-out overlap after every stretch; the stretches
      take the topics in turn.
  """
  topics, lost = matrix.shape[1], [0.0]
  for end in range(len(matrix)):
    topic = end % topics
    # Until the topic's next stretch begins, or the stream ends.
    later = matrix[end : end + topics, topic]
    lost.append(float(later[0] - later.min()))
  return round(max(lost), 10)


def routing(setting: Setting) -> Answers:
  """One draft for all topics, or one for each, which learns from its topic alone.

  Requests are routed by their true topic, so this is the most that routing can gain.
  """
  for seed in range(setting.seeds):
    learning = changed(setting.learning, seed=seed)
    for kind in ("sharp", "mixture"):
      order = setting.order(kind, seed)
      floor = setting.fixed(setting.pair.draft_params, order)

      def routed(order=order, learning=learning):
        topics = setting.answers.topics[order]
        parts = [order[topics == topic] for topic in np.unique(topics)]
        courses = [setting.learned(part, learning) for part in parts]
        return merged(courses, parts, order)

      systems = {
        "floor": lambda floor=floor: floor,
        "one draft": lambda order=order, learning=learning: setting.learned(
          order, learning
        ),
        "one draft for each topic": routed,
      }
      yield from cells_of(setting, "routing", kind, seed, systems, floor)


def merged(
  courses: Sequence[replay.Course], parts: Sequence[np.ndarray], order: np.ndarray
) -> replay.Course:
  """Merges the courses of several drafts that each served a part of a stream."""
  at = np.argsort([list(order).index(place) for part in parts for place in part])
  right, bins = (
    [one for course in courses for one in getattr(course, name)]
    for name in ("right", "bins")
  )
  return replay.Course(
    np.concatenate([course.overlap for course in courses])[at],
    tuple(right[place] for place in at),
    tuple(bins[place] for place in at),
    sum(course.updates for course in courses),
    sum(course.slices for course in courses),
  )


SHARES = (0.1, 0.3, 1.0)


def static(setting: Setting) -> Answers:
  """Drafts distilled on a share of the training prompts, next to one that learns."""
  for seed in range(setting.seeds):
    order = setting.order("sharp", seed)
    floor = setting.fixed(setting.pair.draft_params, order)
    systems = dict(rivals(setting, order, floor))
    learning = changed(setting.learning, seed=seed)
    systems["online"] = lambda learning=learning, order=order: setting.learned(
      order, learning
    )
    for share in SHARES:

      def course(share=share, order=order, seed=seed):
        folder = setting.out / "static" / f"{share}_{seed}"
        rows = round(600 * share)
        distilled(setting, folder, 2000, rows, [f"SamplingConfig.seed={seed}"])
        params = setting.pair.load_draft(str(folder / "draft.safetensors"))
        return setting.fixed(params, order)

      systems[f"distilled on {share:.0%}"] = course
    yield from cells_of(setting, "static", "sharp", seed, systems, floor)


@dataclasses.dataclass(frozen=True)
class Told:
  """The demo's schedule, with more updates of a fixed size after every shift.

  Attributes:
    plan: the schedule at other times.
    usual: slices of its longest update.
    begins: requests at which a new topic begins.
    slices: of each update after a shift; 0 only forgets the overlaps before it.
    update_interval: requests between updates.
  """

  plan: ScheduleConfig
  usual: int
  begins: tuple[int, ...]
  slices: int
  update_interval: int
  needs_costs = False

  def init(self) -> Any:
    """See `Schedule.init`."""
    return self.plan.init()

  def update(
    self, state: Any, request: Request, costs: Costs | None = None
  ) -> tuple[Any, int]:
    """See `Schedule.update`."""
    if state.finished in self.begins:
      state = dataclasses.replace(state, recent=())
    state, slices = self.plan.update(state, request._replace(slices=self.usual), costs)
    since = [state.finished - place for place in self.begins if place < state.finished]
    is_due = bool(since) and min(since) <= AFTER_SHIFT and self.slices > 0
    if not is_due:
      return state, slices
    due = min(since) % self.update_interval == 0
    return state, self.slices if due else 0


AFTER_SHIFT = 50  # requests in which a schedule that was told of a shift trains more
# Way -> slices of an update after a shift, and requests between these updates.
TOLD = {"told": (0, 4), "told, 32 slices": (32, 4), "told, 16 slices twice": (16, 2)}


def shifts(setting: Setting) -> Answers:
  """Schedules that know every shift and then train more, or just continue."""
  for seed in range(setting.seeds):
    order = setting.order("sharp", seed)
    topics = setting.answers.topics[order]
    begins = tuple(np.flatnonzero(np.diff(topics)) + 1)
    floor = setting.fixed(setting.pair.draft_params, order)
    ceiling = setting.fixed(setting.ceiling, order)
    default = changed(setting.learning, seed=seed)
    most = max(slices for slices, _ in TOLD.values())
    ways = {"not told": default}
    for name, (slices, interval) in TOLD.items():
      usual = default.update.steps_per_update
      plan = Told(default.schedule, usual, begins, slices, interval)
      ways[name] = changed(default, schedule=plan, update__steps_per_update=most)
    for name, learning in ways.items():
      compute = functools.partial(
        after_shifts, setting, order, learning, begins, floor, ceiling
      )
      yield key_of(setting, "shifts", "sharp", name, seed), compute


def after_shifts(
  setting: Setting,
  order: np.ndarray,
  learning: LearningConfig,
  begins: Sequence[int],
  floor: replay.Course,
  ceiling: replay.Course,
) -> Cell:
  """Returns the figures of a stream, with the mean requests to recover from a shift."""
  course = setting.learned(order, learning)
  counts = [
    recovered(course.overlap[a:b], ceiling.overlap[a:b])
    for a, b in zip(begins, (*begins[1:], len(order)), strict=True)
  ]
  return setting.figures(course, floor) | {"recovery": float(np.mean(counts))}


def recovered(own: np.ndarray, ceiling: np.ndarray) -> int:
  """Returns the requests until overlap is near the ceiling's; all if it never is."""
  count = metrics.recovery_requests(own.tolist(), float(ceiling.mean()), window=10)
  return count or len(own)


LEARNED_MORE = {
  "online": {},
  "online, a quarter of the rate": {"update__optimizer__learning_rate": 1e-4},
  "online, a tenth of the rate": {"update__optimizer__learning_rate": 4e-5},
  "online, averaged longer": {"update__ema_decay": 0.99},
  "online, gated": {"gate": GateConfig()},
}
SHORT_AVERAGE = 0.9  # `ema_decay` of those that do not say it


def well_trained(setting: Setting) -> Answers:
  """A draft that was distilled on the topics before, with and without learning."""
  for seed in range(setting.seeds):
    for kind in ("mixture", "sharp"):
      order = setting.order(kind, seed)
      floor = setting.fixed(setting.pair.draft_params, order)
      systems = dict(rivals(setting, order, floor))
      for name, changes in LEARNED_MORE.items():
        changes = {"update__ema_decay": SHORT_AVERAGE} | changes
        learning = changed(setting.learning, seed=seed, **changes)
        systems[name] = lambda learning=learning, order=order: setting.learned(
          order, learning
        )
      yield from cells_of(setting, "well_trained", kind, seed, systems, floor)


QUESTIONS = {
  function.__name__: function
  for function in (
    *(how_often, variance, forgetting, routing),
    *(gkd, static, shifts, well_trained, targets, stability, frequent),
    *(mixing, bigger),
  )
}


# ---- The pairs


def demo(args: argparse.Namespace) -> Setting:
  """Loads the shipped pair and distils its offline ceiling."""
  end = "_independent" if args.independent else ""
  config, _ = settings.load(online.OnlineConfig, [f"runs/demo{end}.gin"], [])
  ceiling, _ = settings.load(
    offline.OfflineConfig,
    ["experiments/demo_ceiling.gin"],
    [f"GENERATED_EVAL_ROWS={HELD_OUT}"],
  )
  prompts = dataclasses.replace(
    ceiling.evaluation, tasks=config.stream.tasks, limit_rows=None
  )
  setting = made(args, f"demo{end}", config, prompts, ceiling.evaluation, (40,))
  output = args.folder / "ceiling"
  distilled(setting, output, args.ceiling_steps, 600, [])
  best = setting.pair.load_draft(str(output / "draft.safetensors"))
  return dataclasses.replace(setting, ceiling=best)


def eight(args: argparse.Namespace) -> Setting:
  """Tunes the demo's target on four more topics; the shipped draft knows only four."""
  config, _ = settings.load(online.OnlineConfig, ["runs/demo.gin"], [])
  texts, _ = settings.load(offline.OfflineConfig, ["experiments/demo_ceiling.gin"], [])
  topics = {
    split: tuning.eight_topics(args.folder / "topics", split, count)
    for split, count in (("train", 3000), ("eval", HELD_OUT), ("stream", 400))
  }
  path = args.folder / "target.safetensors"
  target = tuning.tuned(path, topics["train"], topics["eval"], EIGHT_STEPS)
  config = dataclasses.replace(config, pair=tuning.with_target(config.pair, target))
  prompts, others = (
    dataclasses.replace(texts.evaluation, tasks=tuple(topics[split]), limit_rows=None)
    for split in ("stream", "eval")
  )
  return made(args, "eight topics", config, prompts, others, (40,))


EIGHT_STEPS = 250  # of tuning


def qwen(args: argparse.Namespace) -> Setting:
  """Loads Qwen2.5-Coder-0.5B-Instruct with its shipped draft, and real queries."""
  shared = [
    f"QWEN={str(args.qwen)!r}",
    f"DATA_DIR={str(args.data)!r}",
    f"PairConfig.draft={QWEN_DRAFT!r}",
    "PairConfig.sibling_draft=True",
    "UpdateConfig.ema_decay=0.99",
  ]
  config, _ = settings.load(online.OnlineConfig, ["experiments/qwen.gin"], shared)
  texts, _ = settings.load(
    offline.OfflineConfig, ["experiments/qwen_draft.gin"], shared
  )
  # The draft was distilled on prompts of the train split, so none of these was seen.
  prompts = dataclasses.replace(texts.evaluation, limit_rows=args.per_topic)
  others = dataclasses.replace(prompts, limit_rows=1)  # no question of these needs more
  name = "qwen"
  if args.new_sets:
    name = "qwen, new sets"
    prompts = dataclasses.replace(prompts, tasks=new_sets(args.data, "eval"))
    others = dataclasses.replace(
      prompts, tasks=new_sets(args.data, "train"), limit_rows=8
    )
  return made(args, name, config, prompts, others, config.decoding.source_lengths)


# Sets that the shipped draft was not distilled on: files, and what is asked.
NEW_SETS = {
  "commands": ("lang_tldr", "Write the examples of this tldr page.\n{prompt}"),
  "programs": ("mbpp", "{prompt}"),
  "money": ("finance_fiqa", "{prompt}"),
  "maths in German": ("gsm8k", "Antworte auf Deutsch. {prompt}"),
}


def new_sets(data: pathlib.Path, split: str) -> tuple[TaskConfig, ...]:
  """Returns the tasks of `NEW_SETS`."""
  return tuple(
    TaskConfig(
      name=files,
      source=name,
      prompt=prompt,
      data_dir=str(data),
      pattern=f"{files}.{split}.jsonl",
    )
    for name, (files, prompt) in NEW_SETS.items()
  )


QWEN_DRAFT = "shipped:qwen2_5_coder_0_5b_draft.safetensors"


def made(
  args: argparse.Namespace,
  name: str,
  config: online.OnlineConfig,
  asked: BatchConfig,
  held_out: BatchConfig,
  source_lengths: tuple[int, ...],
) -> Setting:
  """Loads a pair; records its answers and measures its costs once.

  Args:
    args: options of the command line.
    name: of the pair.
    config: a run of it.
    asked: prompts of the streams.
    held_out: prompts that nothing learns from.
    source_lengths: of the recorded answers.
  """
  loaded = pairs.load_pair(config.pair, sharding.make(config.partition))
  wide = dataclasses.replace(config.decoding, source_lengths=source_lengths[-1:])

  def recorded(part: str, prompts: BatchConfig) -> recordings.Recording:
    names = [task.label for task in prompts.tasks]
    return recordings.load_or_record(
      args.folder / f"{part}.pickle",
      lambda: recordings.record(
        loaded, read_corpus(prompts, loaded.vocabulary), names, wide
      ),
    )

  rows = []
  if config.warm_start is not None:
    prompts = read_corpus(config.warm_start, loaded.vocabulary)
    rows = list(corpus.reference_rows(loaded, prompts, wide))
  return Setting(
    name=name,
    pair=loaded,
    files=config.pair,
    decoding=wide,
    answers=recorded("stream", asked),
    held_out=recorded("held_out", held_out),
    seen=rows,
    learning=config.learning,
    costs=measured_costs(args.folder / "costs.json", loaded, config),
    drafted=config.decoding.num_draft_tokens,
    ceiling=None,
    out=args.folder,
    per_topic=args.per_topic,
    seeds=args.seeds,
  )


def measured_costs(
  path: pathlib.Path, pair: pairs.Pair, config: online.OnlineConfig
) -> Costs:
  """Returns the costs of this machine; measures and writes them the first time."""
  if not path.exists():
    learning = changed(
      config.learning, update__steps_per_update=8, update__num_replay=8
    )
    server = Server(pair, config.decoding, learning, config.partition)
    server.warm_up(learn=True)
    bucket = config.decoding.source_lengths[-1]
    costs = measurement.measure_run(server, bucket, True, config.sampling, print)
    server.close()
    path.write_text(json.dumps(dataclasses.asdict(costs)) + "\n")
  return Costs.from_json(json.loads(path.read_text()))


def main() -> None:
  """Answers the questions of the command line, or prints the stored cells."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, []])
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--per_topic", type=int, default=100, help="answers of a topic")
  parser.add_argument("--ceiling_steps", type=int, default=2000)
  parser.add_argument("--out", type=pathlib.Path, default=HERE / "cells.jsonl")
  parser.add_argument(
    "--folder", type=pathlib.Path, default=pathlib.Path("runs/open_questions")
  )
  parser.add_argument("--independent", action="store_true", help="draft of the demo")
  parser.add_argument("--eight", action="store_true", help="a target of eight topics")
  parser.add_argument("--qwen", type=pathlib.Path, help="folder of transformers")
  parser.add_argument("--new_sets", action="store_true", help="with --qwen")
  parser.add_argument(
    "--data", type=pathlib.Path, default=pathlib.Path("../shared/data")
  )
  parser.add_argument("--table", action="store_true")
  args = parser.parse_args()
  if args.new_sets and not args.qwen:
    parser.error("--new_sets: expected --qwen FOLDER too, whose pair has such sets")
  if not args.table:
    args.folder.mkdir(parents=True, exist_ok=True)
    made_by = {"commit": measure.commit()}  # of the code that was loaded
    pair = qwen if args.qwen else eight if args.eight else demo
    setting = pair(args)
    for name in args.questions or QUESTIONS:
      answer(args.out, QUESTIONS[name](setting), made_by)
  show(measure.read(args.out))


def answer(path: pathlib.Path, cells: Answers, made_by: Cell) -> None:
  """Computes the cells that the file does not have, and adds each to it."""
  keys = [{name: cell.get(name) for name in KEY} for cell in measure.read(path)]
  for key, figures in cells:
    if key in keys:
      continue
    started = time.perf_counter()
    cell = key | figures() | made_by
    with path.open("a") as file:
      file.write(json.dumps(cell) + "\n")
    print(*key.values(), f"{time.perf_counter() - started:.0f} s", flush=True)


def means(cells: list[Cell], question: str, field: str) -> dict[str, dict[str, list]]:
  """Returns system -> stream -> values of a field or a topic, one of each seed."""
  values: dict[str, dict[str, list]] = {}
  for cell in cells:
    value = cell.get(field, cell.get("by_topic", {}).get(field))
    if cell["question"] == question and value is not None:
      streams = values.setdefault(cell["system"], {})
      streams.setdefault(cell["stream"], []).append(value)
  return values


FIELDS = (
  *("tokens_per_call", "slices", "overlap", "worst_stretch", "forgotten"),
  *("recovery", "before", "at_first", "at_end", "share", "recall", "precision"),
  *("held_out", "products", "steps", "maths", "sql", "python", "finance"),
)


def spent(cells: list[Cell], costs: Costs) -> dict[str, dict[str, list]]:
  """Returns system -> stream -> time of calls and updates, the floor's calls = 1.

  Args:
    cells: of one pair; those of `how_often` are used.
    costs: milliseconds of a call with the largest K, and that serving loses to a slice.
  """
  call, slice_ms = costs.online.round_ms[-1], costs.lost_ms / max(costs.slices, 1)
  rows = [cell for cell in cells if cell["question"] == "how_often"]
  floors = {
    (cell["stream"], cell["seed"]): cell["calls"] * call
    for cell in rows
    if cell["system"] == "floor"
  }
  shares: dict[str, dict[str, list]] = {}
  for cell in rows:
    milliseconds = cell["calls"] * call + cell["slices"] * slice_ms
    streams = shares.setdefault(cell["system"], {})
    share = milliseconds / floors[cell["stream"], cell["seed"]]
    streams.setdefault(cell["stream"], []).append(share)
  return shares


def show(cells: list[Cell]) -> None:
  """Prints a table for each question and figure: means over the seeds."""
  pairs_of = dict.fromkeys(cell["pair"] for cell in cells)
  for pair, question, field in itertools.product(pairs_of, QUESTIONS, FIELDS):
    shares = means([cell for cell in cells if cell["pair"] == pair], question, field)
    show_table(f"{question}, {pair}", field.replace("_", " "), shares)
  costs = Costs.from_json(json.loads((HERE / "costs.json").read_text()))
  shares = spent([cell for cell in cells if cell["pair"] == "demo"], costs)
  show_table("how_often, demo, costs.json", "time over floor", shares)


def show_table(title: str, field: str, found: dict[str, dict[str, list]]) -> None:
  """Prints one table; nothing if it is empty."""
  if not found:
    return
  streams = list(dict.fromkeys(name for row in found.values() for name in row))
  table = rich.table.Table(field, *streams, title=title)
  for system, row in found.items():
    values = (row.get(name) for name in streams)
    table.add_row(
      system,
      *(f"{np.mean(v):.3f} ±{np.std(v):.3f}" if v else "" for v in values),
    )
  rich.console.Console(width=160).print(table)


if __name__ == "__main__":
  main()
