"""The prompts of the paper's four sets and of generic chats, encoded for a target."""

import dataclasses
import pathlib
from collections.abc import Sequence

from osd_jax.data.batches import BatchConfig, EncodedExample, read_corpus
from osd_jax.data.examples import TaskConfig
from osd_jax.data.vocabulary import Vocabulary

DATA = pathlib.Path("../shared/data")
# The paper's sets and the prompts of its scripts. FiQA stands for its finance set,
# which is made of FiQA and Alpaca.
PAPER = {
  "spider": (
    "Could you translate the following question into SQL. Please only generate SQL,"
    " don't include explanation in the answer. {prompt}"
  ),
  "gsm8k": "{prompt}",
  "python": "Please generate code based on the following doc:\n{prompt}",
  "finance_fiqa": "{prompt}",
}
GENERIC = ("dolly", "arena", "alpaca")  # chats that the first drafts are distilled on
WARM, ONLINE = 800, 4000  # prompts of each set: seen before the stream, and served
GENERIC_ROWS = 1000  # of each
PART = 400  # prompts of a set that are recorded together
HELD_OUT_ROWS = 70  # of each generic set, never learned from
# Name -> number of prompts.
COUNTS = (
  dict.fromkeys(GENERIC, GENERIC_ROWS)
  | {f"{name}.eval": HELD_OUT_ROWS for name in GENERIC}
  | dict.fromkeys(PAPER, WARM + ONLINE)
)
SOURCE_LENGTH, TARGET_LENGTH = 160, 64


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Prompts of one set, in the order of its stream.

  Attributes:
    name: of the set.
    examples: none is longer than `SOURCE_LENGTH`.
  """

  name: str
  examples: Sequence[EncodedExample]


def read(data: pathlib.Path, vocabulary: Vocabulary, name: str) -> Prompts:
  """Returns the prompts of a set in a seeded order; "NAME.eval" are held out.

  A set of the paper goes on with the prompts of its other split if one is too short.
  """
  files, _, split = name.partition(".")
  prompts: dict[bytes, EncodedExample] = {}  # no prompt twice
  for part in [split] if split else ["train", "eval"][: 1 + (files in PAPER)]:
    task = TaskConfig(
      name=f"{files}_{part}",
      prompt=PAPER.get(files, "{prompt}"),
      data_dir=str(data),
      pattern=f"{files}.{part}.jsonl",
    )
    for one in read_corpus(BatchConfig((task,), source_length=4096), vocabulary):
      if len(one.tokens) <= SOURCE_LENGTH:
        prompts.setdefault(one.tokens.tobytes(), one)
    if len(prompts) >= COUNTS[name]:
      break
  else:
    raise SystemExit(
      f"{data}: {name} has {len(prompts)} usable prompts, expected {COUNTS[name]}"
    )
  return Prompts(name, list(prompts.values())[: COUNTS[name]])
