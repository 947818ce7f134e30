"""Generators of the demo's four topics: seeded grammars, no download.

Every reference is a correct, deterministic function of its prompt: template text, words
and numbers copied in the prompt's order, and a few small facts (sums, the singular of a
plural, the advice for a sector). The split of an example is a hash of its prompt, so no
prompt is in two splits, whatever the seeds.
"""

import dataclasses
import hashlib
import random

from osd_jax import base

from . import finance, maths, python, sql

GENERATORS = {
  "maths": maths.generate,
  "sql": sql.generate,
  "python": python.generate,
  "finance": finance.generate,
}
_MAX_ATTEMPTS_PER_EXAMPLE = 200

TOPICS: tuple[str, ...] = tuple(GENERATORS)
SPLITS: tuple[str, ...] = ("train", "eval", "stream")


@dataclasses.dataclass(frozen=True)
class Example:
  """A prompt with its only correct answer."""

  prompt: str
  reference: str
  topic: str


def split_of(prompt: str) -> str:
  """Returns the split of a prompt: 80 / 10 / 10 by its hash."""
  digest = hashlib.sha256(prompt.encode("utf-8")).digest()
  bucket = int.from_bytes(digest[:8], "big") % 10
  if bucket < 8:
    return "train"
  return "eval" if bucket == 8 else "stream"


def generate(topic: str, split: str, count: int, seed: int = 0) -> list[Example]:
  """Draws distinct examples of one topic from one split.

  Args:
    topic: one of `TOPICS`.
    split: one of `SPLITS`.
    count: number of examples, >= 0.
    seed: same seed, same examples; a shorter call returns a prefix of a longer one.

  Returns:
    `count` examples with different prompts.

  Raises:
    InputError: unknown topic or split, negative count, or more examples than the
      grammar can make.
  """
  _check_choice("topic", topic, TOPICS)
  _check_choice("split", split, SPLITS)
  if count < 0:
    raise base.InputError(
      f"topics.generate: count: received {count}, expected >= 0; "
      "give a number of examples"
    )
  rng = random.Random(f"{topic}/{split}/{seed}")
  rows: dict[str, Example] = {}
  attempts = 0
  while len(rows) < count:
    attempts += 1
    if attempts > _MAX_ATTEMPTS_PER_EXAMPLE * (count + 10):
      raise base.InputError(
        f"topics.generate: count: received {count}, but topic {topic!r}, "
        f"split {split!r} gave only {len(rows)} distinct prompts; give a lower count"
      )
    prompt, reference = GENERATORS[topic](rng)
    if prompt not in rows and split_of(prompt) == split:
      rows[prompt] = Example(prompt, reference, topic)
  return list(rows.values())


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise base.InputError(
      f"topics.generate: {field}: received {value!r}, expected one of "
      f"{', '.join(choices)}; choose one of these"
    )
