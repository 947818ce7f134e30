"""Targets that are tuned from the demo's: on one topic in another style, or on more."""

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable, Iterable, Sequence

from osd_jax.data import examples
from osd_jax.data.examples import TaskConfig
from osd_jax.main import settings
from osd_jax.pairs import PairConfig
from osd_tools import pretrain

Pairs = Iterable[tuple[str, str]]  # prompts and references


def task(folder: pathlib.Path, name: str, split: str, lines: Pairs) -> TaskConfig:
  """Writes examples to a file; returns the task that reads it."""
  folder.mkdir(parents=True, exist_ok=True)
  rows = [{"prompt": prompt, "reference": reference} for prompt, reference in lines]
  file = folder / f"{name}.{split}.jsonl"
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return TaskConfig(
    f"tuned_{name}",
    source=name,
    data_dir=str(folder),
    pattern=f"{name}.{{split}}.jsonl",
    split=split,
  )


def tuned(
  output: pathlib.Path,
  train: Sequence[TaskConfig],
  evaluation: Sequence[TaskConfig],
  steps: int,
) -> pathlib.Path:
  """Trains the demo's target on other tasks, once; returns the file of its weights."""
  if output.exists():
    return output
  config, text = settings.load(
    pretrain.PretrainConfig,
    ["experiments/shipped_target.gin"],
    [
      f"STEPS={steps}",
      "PretrainConfig.start='shipped:demo_target.safetensors'",
      f"PretrainConfig.output={str(output)!r}",
      f"PretrainConfig.run_directory={str(output.with_suffix(''))!r}",
      f"PretrainConfig.evaluate_every={steps}",
      "PretrainConfig.evaluation_batches=4",
      "OptimizerConfig.learning_rate=3e-4",
      "OptimizerConfig.warmup_steps=20",
    ],
  )
  data = dataclasses.replace(config.data, tasks=tuple(train))
  held_out = dataclasses.replace(config.evaluation, tasks=tuple(evaluation))
  pretrain.run(dataclasses.replace(config, data=data, evaluation=held_out), text)
  return output


def with_target(files: PairConfig, target: pathlib.Path) -> PairConfig:
  """Returns a pair with the same draft and a target that was tuned from its own."""
  draft = files.named("draft")  # the default depends on the target
  return dataclasses.replace(files, target=str(target), draft=draft, sibling_draft=True)


def in_small_letters(folder: pathlib.Path, topic: str, split: str) -> TaskConfig:
  """Returns the task of a shipped topic whose answers have small letters only."""
  count = 4000 if split == "train" else 64
  rows = examples.topic_examples(topic, split, count)
  lines = ((row.prompt, row.reference.lower()) for row in rows)
  return task(folder, topic, split, lines)


# ---- Four more topics, made of words that the demo's vocabulary has

NAMES = ("Maria", "Tom", "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Paul")
CITIES = ("Oslo", "Paris", "Rome", "Lima", "Tokyo", "Madrid", "Berlin", "Cairo")
MONTHS = ("January", "March", "April", "May", "June", "July", "October", "December")
BRANDS = ("Nova", "Delta", "Orion", "Atlas", "Vega", "Zenith", "Polar", "Apex")
SUBJECTS = ("physics", "history", "biology", "music", "chemistry", "art")


def letters(rng: random.Random) -> tuple[str, str]:
  """Draws an invitation."""
  host, guest = rng.sample(NAMES, 2)
  city, month, day = rng.choice(CITIES), rng.choice(MONTHS), rng.randint(1, 28)
  event = rng.choice(("concert", "game", "market", "film", "party", "fair"))
  return (
    f"Invite {guest} to the {event} in {city} on {month} {day}, from {host}.",
    f"{guest}, will you join the {event} with me? It is on {month} {day} in {city}."
    f" I have the tickets for both of us. Yours, {host}",
  )


def records(rng: random.Random) -> tuple[str, str]:
  """Draws a record in JSON."""
  name, city = rng.choice(NAMES), rng.choice(CITIES)
  subject, age, grade = rng.choice(SUBJECTS), rng.randint(18, 80), rng.randint(1, 99)
  kind = rng.choice(("student", "teacher"))
  return (
    f"Record of the {kind} {name}: {city}, {subject}, age {age}, {grade} hours.",
    f'{{"{kind}": {{"name": "{name}", "age": {age}}}, "city": "{city}",'
    f' "subject": "{subject}", "hours": {grade}}}',
  )


def tables(rng: random.Random) -> tuple[str, str]:
  """Draws a table with its total."""
  names = rng.sample(BRANDS, 3)
  values = [rng.randint(1, 30) for _ in names]
  values_text = ", ".join(f"{name} {n}" for name, n in zip(names, values, strict=True))
  unit = rng.choice(("price", "weight", "speed"))
  rows = "\n".join(f"| {name} | {n} |" for name, n in zip(names, values, strict=True))
  return (
    f"Table of {unit}: {values_text}.",
    f"| brand | {unit} |\n{rows}\n| total | {sum(values)} |",
  )


def steps(rng: random.Random) -> tuple[str, str]:
  """Draws a number that is counted up in equal steps."""
  first, step, (begin, end) = (
    rng.randint(1, 40),
    rng.randint(1, 9),
    rng.sample(CITIES, 2),
  )
  stops = [first + step * n for n in range(6)]
  text = "; ".join(f"{n}: {stop}" for n, stop in enumerate(stops, 1))
  return (
    f"The bus from {begin} to {end} has 6 stops from {first} on, every {step} minutes.",
    f"Stops to {end} are at {text}. It takes {5 * step} minutes in all.",
  )


MORE_TOPICS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
  function.__name__: function for function in (letters, records, tables, steps)
}


def drawn(name: str, split: str, count: int) -> list[tuple[str, str]]:
  """Draws examples of one of `MORE_TOPICS`; no prompt is in two splits."""
  rng = random.Random(f"{name}/more")
  answers: dict[str, str] = {}
  sizes = {"train": 3000, "eval": 200, "stream": 400}
  while len(answers) < sum(sizes.values()):
    answers.setdefault(*MORE_TOPICS[name](rng))
  rows, begins = list(answers.items()), 0
  for part, size in sizes.items():
    if part == split:
      return rows[begins : begins + min(count, size)]
    begins += size
  raise ValueError(f"split: received {split!r}, expected one of {', '.join(sizes)}")


def eight_topics(folder: pathlib.Path, split: str, count: int) -> list[TaskConfig]:
  """Returns the tasks of the demo's topics and of four more."""
  more = [task(folder, name, split, drawn(name, split, count)) for name in MORE_TOPICS]
  return [
    *(examples.topic_task(topic, split, count) for topic in examples.TOPICS),
    *more,
  ]
