"""Writes examples of the demo's topics as JSONL files.

To write the files that ship with the package:

  python experiments/shipped_pair/make_topics.py --train 4000 \\
      --out osd_jax/assets/topics

To write the full training data of the shipped models, for
gin_configs/experiments/shipped_*.gin:

  python experiments/shipped_pair/make_topics.py --out runs/topics
"""

import argparse
import gzip
import json
import pathlib
from collections.abc import Iterable

import topics

from osd_jax.data import examples

TRAINED_ON = 60_000  # train examples of each topic for the shipped target
# Number of these examples that warm up the learner of the demo: a seeded sample of the
# examples that the shipped drafts were trained on (gin_configs/runs/demo.gin).
SEEN = {"maths": 100, "sql": 25, "python": 100, "finance": 25}


def seen(topic: str) -> list[topics.Example]:
  """Returns the examples of the split "seen" of one topic, in their train order."""
  train = topics.generate(topic, "train", TRAINED_ON)
  task = examples.TaskConfig(f"generated_{topic}", pattern="any")  # its name is a seed
  order = examples.order(task, TRAINED_ON, seed=0, epoch=0)[: SEEN[topic]]
  return [train[number] for number in sorted(order)]


def to_lines(found: Iterable[topics.Example]) -> bytes:
  """Returns the examples as JSON lines."""
  lines = (
    json.dumps({"prompt": example.prompt, "reference": example.reference}) + "\n"
    for example in found
  )
  return "".join(lines).encode()


def main() -> None:
  """Writes one file for each topic and split."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder")
  parser.add_argument(
    "--train", type=int, default=TRAINED_ON, help="train examples per topic"
  )
  parser.add_argument("--eval", type=int, default=1200)
  parser.add_argument("--stream", type=int, default=400)
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  for topic in topics.TOPICS:
    splits = {
      split: topics.generate(topic, split, getattr(args, split))
      for split in topics.SPLITS
    }
    for split, rows in {**splits, "seen": seen(topic)}.items():
      # Without a time stamp the same examples give identical files.
      data = gzip.compress(to_lines(rows), mtime=0)
      (args.out / f"{topic}.{split}.jsonl.gz").write_bytes(data)
      print(f"{topic}.{split}: {len(rows)} examples, {len(data)} bytes")


if __name__ == "__main__":
  main()
