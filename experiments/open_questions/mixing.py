"""Distills static drafts on mixes of two topics (appendix A.4 of the paper).

The first draft barely knows either topic. Every mix has as many texts and as many
steps, so that what one topic gets is taken from the other.
"""

import functools

from setting import Answers, Cell, Setting, distilled, key_of

MIXED = ("sql", "finance")
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)  # of the first topic
TEXTS = (60, 600)
STEPS, SHIPPED = 2000, 4000  # examples of a topic in the package


def mixing(setting: Setting) -> Answers:
  """Yields a cell for each share and number of texts."""
  for seed in range(setting.seeds):
    for texts in TEXTS:
      for share in SHARES:
        name = f"{share:.0%} {MIXED[0]}, {1 - share:.0%} {MIXED[1]}"
        key = key_of(setting, "mixing", f"{texts} texts", name, seed)
        yield key, functools.partial(mixed, setting, texts, share, seed)


def mixed(setting: Setting, texts: int, share: float, seed: int) -> Cell:
  """Distils a draft on a mix; returns its held-out overlap on every topic."""
  folder = setting.out / "mixing" / f"{texts}_{share}_{seed}"
  return distilled(setting, folder, STEPS, SHIPPED, bindings(texts, share, seed))


def bindings(texts: int, share: float, seed: int) -> list[str]:
  """Returns the settings of a mix; a topic without texts is left out."""
  first = round(texts * share)
  counts = dict(zip(MIXED, (first, texts - first), strict=True))
  positive = {topic: count for topic, count in counts.items() if count}
  tasks = "".join(f"@{topic}/train/TaskConfig(), " for topic in positive)
  return [
    f"corpus/BatchConfig.tasks=({tasks})",
    f"corpus/BatchConfig.limit_rows={tuple(positive.values())}",
    f"corpus/BatchConfig.seed={seed}",
    f"SamplingConfig.seed={seed}",
  ]
