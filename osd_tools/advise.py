"""`osd advise`: what speculation and learning would gain on a log of answers.

The log holds prompts and the target's answers in the order in which they were served.
Nothing is decoded: the target scores every answer in one pass, and the drafters are
replayed on the answers (`replay`). Times follow from costs measured on this machine.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rich.console

from osd_jax import base, certificate, corpus, pairs, runs, session
from osd_jax.costs.table import Costs
from osd_jax.data.batches import EncodedExample
from osd_jax.data.examples import TaskConfig, TaskExamples
from osd_jax.distillation.learner import LearningConfig
from osd_jax.distillation.schedule import ScheduleConfig, WorthConfig
from osd_jax.distillation.update import UpdateConfig
from osd_jax.engine import measurement
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig, SamplingConfig
from osd_jax.engine.server import DECODING, Server
from osd_jax.loop import rows as rows_lib
from osd_jax.report import progress
from osd_jax.sharding import PartitionConfig
from osd_tools import replay
from osd_tools import rows as tool_rows

CACHE_TOKENS = replay.CACHE_TOKENS
# Systems.
PLAIN, CACHE = "plain decoding", "cache"
FROZEN, LEARNED = "draft", "draft that learns"
MIXED = " + cache"  # after the name of a draft
EVERY = 4  # answers per update where the schedule made none
FOREIGN = 0.9  # share of the target's own tokens below which a log is another model's

# Updates only where they pay.
LEARNING = LearningConfig(
  update=UpdateConfig(steps_per_update=8, num_replay=8), schedule=WorthConfig()
)


@dataclasses.dataclass(frozen=True)
class AdviseConfig(base.Config):
  """One log, and the pair that would serve it.

  Attributes:
    log: prompts, with the target's answers as references, in the order of serving.
    count: answers that are replayed, from the beginning of the log.
    pair: target, draft and vocabulary.
    decoding: lengths, and `num_draft_tokens`, the largest K; one row is assumed.
    learning: how the draft would learn.
    run_directory: folder for the results.
    overwrite: remove the run in this folder and start over.
  """

  log: TaskConfig
  count: base.Count = 200
  pair: pairs.PairConfig = pairs.PairConfig()
  decoding: DecodingConfig = DECODING
  learning: LearningConfig = LEARNING
  run_directory: base.Folder = "runs/advise"
  overwrite: bool = False

  def checks(self):
    return {
      "pair": (
        pairs.can_learn(self.pair),
        "a `draft` that can be trained; the cache is replayed in any case",
      ),
      "decoding": (
        self.decoding.record_top_k >= 1 and self.decoding.rows == 1,
        "record_top_k >= 1 and rows = 1",
      ),
    }


def run(config: AdviseConfig, operative_config: str = "") -> runs.RunResult:
  """Replays every drafter on the log; an interrupted run starts over.

  `operative_config` is gin text that is stored in the run directory.
  """

  def body(config, directory, console):
    advise(config, directory, console)
    return certificate.Certificate(), ""

  return session.run(config, operative_config, config.learning.seed, body)


def advise(
  config: AdviseConfig, directory: runs.RunDirectory, console: rich.console.Console
) -> list[dict[str, Any]]:
  """Logs and returns one row per system: tokens per call and milliseconds per token."""
  # Costs of all numbers of drafted tokens are measured, and the fastest is named.
  adaptive = config.decoding.adaptive or AdaptiveConfig()
  decoding = dataclasses.replace(config.decoding, adaptive=adaptive)
  with progress.status(console, "loading target and draft"):
    serving = Server(config.pair, decoding, config.learning, PartitionConfig())
  pair = serving.pair
  examples, left_out = read_log(config, pair)
  with progress.status(console, "compiling"):
    serving.warm_up(learn=True)
  bucket = config.decoding.bucket(len(examples[0].tokens))
  costs = measurement.measure_run(
    serving, bucket, True, SamplingConfig(), console.print
  )
  with progress.status(console, "scoring the answers with the target"):
    answers = scored(pair, examples, decoding)
  drafted = max(costs.online.num_draft_tokens)
  with progress.bar(console) as bar:
    size = config.decoding.cache_tokens or CACHE_TOKENS
    courses = _courses(pair, answers, drafted, size)
    learned = functools.partial(_learned, pair, answers, costs, drafted, bar, size)
    courses |= learned(config.learning)
    forced = ""
    if not courses[LEARNED].updates:  # that says nothing about what an update gains
      schedule = ScheduleConfig(update_interval=min(EVERY, max(len(answers) // 4, 1)))
      learning = dataclasses.replace(config.learning, schedule=schedule)
      forced = untried(config.learning.schedule, schedule)
      courses |= learned(learning)
  serving.close()
  rows = [
    {"system": name, **figures(course, costs, name)} for name, course in courses.items()
  ]
  for row in rows:
    row["over_plain"] = rows[0]["ms_per_token"] / row["ms_per_token"]
  with runs.MetricsLog(directory.metrics_path) as log:
    log.truncate(0)
    log.write_all(tool_rows.Advice(**row) for row in rows)
    later = by_its_end(courses[FROZEN], courses[LEARNED], drafted)
    notes = [settings_for(rows, size), forced, later, own_share(answers), left_out]
    log.write_all(rows_lib.Note(text=text) for text in notes if text)
    log.write_all(_by_answer(courses))
  return rows


def read_log(
  config: AdviseConfig, pair: pairs.Pair
) -> tuple[list[EncodedExample], str]:
  """Reads the first answers of the log that fit, in its order.

  Returns them, and sentences about the rows that are used, left out or cut.

  Raises:
    InputError: no answer can be used.
  """
  task = TaskExamples(config.log, pair.vocabulary)
  source, target = config.decoding.source_lengths[-1], config.decoding.target_length
  answers, unfit, cut, number = [], 0, 0, 0
  for number in range(len(task)):
    prompt, answer = task.tokens(number)
    if len(prompt) > source or len(answer) < 2:  # an end-of-sequence is no answer
      unfit += 1
      continue
    cut += len(answer) > target
    answers.append(EncodedExample(prompt, 0, answer[:target]))
    if len(answers) == config.count:
      break
  if not answers:
    raise base.InputError(
      f"AdviseConfig.log: {config.log.pattern!r} has {len(task)} rows and none with an"
      f" answer and a prompt of at most {source} tokens; name the field of the answer"
      " in TaskConfig.reference, or raise DecodingConfig.source_lengths."
    )
  reasons = {
    f"{len(task.skipped)} row(s) cannot be read": len(task.skipped),
    f"{unfit} row(s) have no answer, or a prompt of more than {source} tokens": unfit,
    f"{cut} answer(s) are cut to {target} tokens": cut,
  }
  parts = [text for text, count in reasons.items() if count]
  used = f"{len(answers)} of {len(task)} answers of the log are replayed"
  if number + 1 < len(task):
    used += ", the first ones; AdviseConfig.count sets their number"
  if parts:
    used += f". Of the log: {'; '.join(parts)}"
  return answers, f"{used}."


def scored(
  pair: pairs.Pair, examples: Sequence[EncodedExample], decoding: DecodingConfig
) -> list[base.DistillationBatch]:
  """Returns every answer with the target's distributions, one row each, in numpy."""
  rows = []
  for batch in corpus.reference_rows(pair, examples, decoding):
    host = jax.device_get(batch)
    parts = range(len(host.weight))
    rows += [jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], host) for at in parts]
  return rows[: len(examples)]


def figures(course: replay.Course, costs: Costs, system: str) -> dict[str, Any]:
  """Returns the fastest K of a system, and its figures with this K.

  Plain decoding has K = 0 and the others more; a cache names its tokens in no time.
  """
  tokens, rows = course.tokens.sum(), []
  online = costs.online
  for k, round_ms in zip(online.num_draft_tokens, online.round_ms, strict=True):
    if (k == 0) != (system == PLAIN):
      continue
    calls = course.calls(k).sum() if k else tokens
    drafting_ms = k * costs.draft_ms if system == CACHE else 0.0
    spent = calls * max(round_ms - drafting_ms, 0.0)
    spent += len(course.right) * online.request_ms
    spent += course.slices * costs.lost_ms / max(costs.slices, 1)
    rows.append((float(spent / tokens), k, float(tokens / calls)))
  milliseconds, k, per_call = min(rows)
  return {
    "tokens_per_call": per_call,
    "num_draft_tokens": k,
    "ms_per_token": milliseconds,
    "updates": course.updates,
  }


def own_share(answers: Sequence[base.DistillationBatch]) -> str:
  """Says so if the answers are not the target's; "" if they are."""
  judged = [np.asarray(row.mask[0]) for row in answers]
  first = [
    np.asarray(row.records.ids[0, :, 0] == row.target[0])[mask]
    for row, mask in zip(answers, judged, strict=True)
  ]
  share = float(np.concatenate(first).mean())
  if share >= FOREIGN:
    return ""
  return (
    f"Only {share:.0%} of the log's tokens are the target's first choice. Answers of"
    " another model, or sampled ones, are harder to draft than its own greedy ones."
  )


def by_its_end(frozen: replay.Course, learned: replay.Course, drafted: int) -> str:
  """Says what learning gained in the second half of the log; "" for a single answer.

  The mean over a log counts the answers before the draft had adapted.
  """
  if not learned.updates:
    return (
      f"No update was made in {len(learned.right)} answer(s), so nothing is known about"
      " learning; advise on a longer log."
    )
  half = slice(len(learned.right) // 2, None)
  if half.start == 0:
    return ""
  ours, floor = (
    course.part(half).tokens_per_call(drafted) for course in (learned, frozen)
  )
  return (
    "In the second half of the log the draft that learns has"
    f" {ours:.2f} tokens per call with K = {drafted}, {ours - floor:+.2f} over the"
    " draft as it is. More traffic of the same kind should gain about as much; topics"
    " that the log lacks are not covered."
  )


def untried(schedule: Any, forced: ScheduleConfig) -> str:
  """Says that the schedule made no update, and which one was replayed instead."""
  return (
    f"{type(schedule).__name__} made no update on these answers. To know what learning"
    " gains, the draft that learns was replayed with an update every"
    f" {forced.update_interval} answers, whose time is counted. To learn like that, set"
    " LearningConfig.schedule = @ScheduleConfig() and ScheduleConfig.update_interval ="
    f" {forced.update_interval}."
  )


def settings_for(rows: Sequence[dict[str, Any]], size: int) -> str:
  """Names the settings of the fastest system; `size` is that of the cache."""
  best = min(rows, key=lambda row: row["ms_per_token"])
  name, k = best["system"], best["num_draft_tokens"]
  if name == PLAIN:
    return (
      "Plain decoding is the fastest here. Speculation pays with a better draft, or"
      " where a call on several tokens takes no longer than one on a single token."
    )
  settings: dict[str, Any] = {"DecodingConfig.num_draft_tokens": k}
  if name == CACHE:
    settings["PairConfig.draft"] = "cache"
  else:
    settings["OnlineConfig.learn"] = name.startswith(LEARNED)
  if name.endswith(MIXED):
    settings["DecodingConfig.cache_tokens"] = size
  lines = [f"{field} = {value!r}" for field, value in settings.items()]
  return f"The fastest is {name}. Begin with {', '.join(lines)}."


def _courses(
  pair: pairs.Pair,
  answers: Sequence[base.DistillationBatch],
  drafted: int,
  size: int,
) -> dict[str, replay.Course]:
  nothing = [np.zeros((1, int(row.mask.sum())), bool) for row in answers]
  frozen = replay.frozen(pair.draft, pair.draft_params, answers, drafted)
  return {
    PLAIN: replay.Course(np.zeros(len(answers)), tuple(nothing)),
    CACHE: replay.cache(pair.target, answers, drafted, size),
    FROZEN: frozen,
    FROZEN + MIXED: replay.mixed(pair.target, answers, frozen, size),
  }


def _learned(
  pair: pairs.Pair,
  answers: Sequence[base.DistillationBatch],
  costs: Costs,
  drafted: int,
  shown: Any,
  size: int,
  learning: LearningConfig,
) -> dict[str, replay.Course]:
  task = shown.add_task("replay", total=len(answers), figures="")
  learned = replay.learned(
    pair,
    answers,
    learning,
    drafted,
    costs=costs,
    on_answer=lambda overlap, learner: shown.advance(task),
  )
  return {
    LEARNED: learned,
    LEARNED + MIXED: replay.mixed(pair.target, answers, learned, size),
  }


def _by_answer(courses: dict[str, replay.Course]) -> list[rows_lib.Replayed]:
  """Returns a row for each answer, with the share of tokens that each system names."""
  names = (CACHE, FROZEN, LEARNED)
  shares = {name: [one[0].mean() for one in courses[name].right] for name in names}
  return [
    rows_lib.Replayed(
      answer=index, shares=dict(zip(names, map(float, values), strict=True))
    )
    for index, values in enumerate(zip(*shares.values(), strict=True))
  ]
