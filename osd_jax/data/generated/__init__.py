"""Four seeded grammar tasks: the embedded data of the demo, no download.

Every reference is a correct, deterministic function of its prompt: template
text, words and numbers copied in the prompt's order, and a few small facts
(sums, plural to singular, a sector's advice). Splits are decided by a hash of
the prompt, so no prompt is in two of them, whatever the seeds.
"""

import dataclasses
import hashlib
import random

from osd_jax import base
from osd_jax.data.generated import finance, maths, python, sql

_GENERATORS = {
  "maths": maths.generate,
  "sql": sql.generate,
  "python": python.generate,
  "finance": finance.generate,
}
_MAX_ATTEMPTS_PER_EXAMPLE = 200

TOPICS: tuple[str, ...] = tuple(_GENERATORS)
SPLITS: tuple[str, ...] = ("train", "eval", "stream")


@dataclasses.dataclass(frozen=True)
class Example:
  """One query with its right answer.

  Attributes:
    prompt: what the user asks.
    reference: the one right output.
    topic: one of `TOPICS`.
  """

  prompt: str
  reference: str
  topic: str


def split_of(prompt: str) -> str:
  """Returns the only split that may hold a prompt: 80 / 10 / 10 by its hash."""
  digest = hashlib.sha256(prompt.encode("utf-8")).digest()
  bucket = int.from_bytes(digest[:8], "big") % 10
  if bucket < 8:
    return "train"
  return "eval" if bucket == 8 else "stream"


def examples(topic: str, split: str, count: int, seed: int = 0) -> list[Example]:
  """Draws distinct examples of one topic from one split.

  Args:
    topic: one of `TOPICS`.
    split: one of `SPLITS`.
    count: number of examples, >= 0.
    seed: same seed, same examples; a shorter call is a prefix of a longer one.

  Returns:
    `count` examples, no prompt twice.

  Raises:
    ValueError: unknown topic or split, negative count, or more examples asked
      for than the grammar has.
  """
  _check_choice("topic", topic, TOPICS)
  _check_choice("split", split, SPLITS)
  if count < 0:
    raise base.InputError(
      f"generated.examples: count: received {count}, expected >= 0; "
      "ask for a number of examples"
    )
  rng = random.Random(f"{topic}/{split}/{seed}")
  found: dict[str, Example] = {}
  attempts = 0
  while len(found) < count:
    attempts += 1
    if attempts > _MAX_ATTEMPTS_PER_EXAMPLE * (count + 10):
      raise base.InputError(
        f"generated.examples: count: received {count}, but topic {topic!r}, "
        f"split {split!r} gave only {len(found)} distinct prompts; ask for fewer"
      )
    prompt, reference = _GENERATORS[topic](rng)
    if prompt not in found and split_of(prompt) == split:
      found[prompt] = Example(prompt, reference, topic)
  return list(found.values())


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise base.InputError(
      f"generated.examples: {field}: received {value!r}, expected one of "
      f"{', '.join(choices)}; choose one of these"
    )
