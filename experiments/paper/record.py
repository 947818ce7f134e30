"""Records a target's greedy answers to the paper's sets, once for every replay.

A greedy answer depends on the target alone, so all drafts are compared on the same
answers. `--rows_folder` gets them with the target's distributions and states, which
replays read (.3 MB each). The same command continues where it stopped, and a larger
`--count` extends a recording.

  python experiments/paper/record.py --target FOLDER [--name smollm2_135m]
      [--data ../shared/data] [--rows_folder runs/paper/rows] [--rows 16]
      [--sets spider] [--count 4800]
"""

import argparse
import pathlib
import sys
import time

import jax
import rich.progress
import sets

from osd_jax import base, corpus, pairs, sharding
from osd_jax.engine.requests import DecodingConfig, SamplingConfig
from osd_jax.models.shapes import AttachedConfig, EagleConfig

ROWS = pathlib.Path("runs/paper/rows")
# Small enough that a draft step costs little next to a target of 135 M parameters.
DRAFT = AttachedConfig(width=256, num_heads=4, head_dim=64, mlp_dim=768, reads="tokens")


def load(target: str, shape: AttachedConfig | EagleConfig = DRAFT) -> pairs.Pair:
  """Loads a target with a new attached draft."""
  config = pairs.PairConfig(target=target, draft=pairs.ATTACHED, attached=shape)
  return pairs.load_pair(config, sharding.make())


def rows_of(
  pair: pairs.Pair,
  prompts: sets.Prompts,
  folder: pathlib.Path | None,
  count: int,
  rows: int = 16,
) -> base.DistillationBatch:
  """Returns the answers to the first prompts; records the parts that are missing.

  Without a folder, all parts are missing, and none is written.
  """
  decoding = DecodingConfig(
    rows=rows,
    source_lengths=(sets.SOURCE_LENGTH,),
    target_length=sets.TARGET_LENGTH,
  )
  parts = []
  with rich.progress.Progress(disable=not sys.stdout.isatty()) as bar:
    for start in range(0, count, sets.PART):
      part = corpus.generate(
        corpus.TextSource(),
        decoding,
        SamplingConfig(),
        pair,
        sharding.PartitionConfig(),
        prompts.examples[start : start + sets.PART],
        bar,
        str(folder / f"{prompts.name}_{start:05d}") if folder else "",
      )
      parts.append(part)
  return jax.tree.map(lambda leaf: leaf[:count], corpus.stack(parts))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--target", required=True)
  parser.add_argument("--name", default="smollm2_135m")
  parser.add_argument("--data", type=pathlib.Path, default=sets.DATA)
  parser.add_argument("--rows_folder", type=pathlib.Path, default=ROWS)
  parser.add_argument("--rows", type=int, default=16)
  names = list(sets.COUNTS)
  parser.add_argument("--sets", nargs="*", choices=names, default=names)
  parser.add_argument("--count", type=int, help="prompts of each set, the first ones")
  args = parser.parse_args()
  pair = load(args.target)
  for name in args.sets:
    count = min(args.count or sets.COUNTS[name], sets.COUNTS[name])
    prompts = sets.read(args.data, pair.vocabulary, name)
    start = time.perf_counter()
    rows = rows_of(pair, prompts, args.rows_folder / args.name, count, args.rows)
    seconds = time.perf_counter() - start
    tokens = int(rows.mask.sum())
    print(f"{name}: {count} answers, {tokens} tokens, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
  main()
