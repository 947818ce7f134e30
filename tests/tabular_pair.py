"""A pair of tabular models, which needs no weights files and compiles quickly."""

import jax.numpy as jnp
import numpy as np

from osd_jax import base, pairs, testing
from osd_jax.data.batches import EncodedExample

VOCAB_SIZE = 12
SOURCE_LENGTH, TARGET_LENGTH = 6, 10


def make(sharpness: float = 2.0) -> pairs.Pair:
  """Target and draft use different tables; neither ends before the length limit."""
  tables = [
    jnp.asarray(testing.random_table(VOCAB_SIZE, seed, sharpness=sharpness))
    for seed in (0, 1)
  ]
  for place, table in enumerate(tables):
    tables[place] = table.at[..., base.PAD_ID].set(-1e9)  # never emitted
  return pairs.Pair(
    target=testing.tabular_model(VOCAB_SIZE, "target"),
    target_params=tables[0],
    rescoring_target=testing.tabular_model(VOCAB_SIZE, "target"),
    draft=testing.tabular_model(VOCAB_SIZE, "draft"),
    draft_params=tables[1],
    draft_config=None,
    vocabulary=None,
  )


def prompts(count: int) -> list[EncodedExample]:
  """Different prompts of different lengths, alternately of task 0 and task 1."""
  source, mask = testing.random_sources(count, SOURCE_LENGTH, VOCAB_SIZE, seed=3)
  return [
    EncodedExample(source[row][mask[row]], row % 2, np.asarray([5, 6, 1], np.int32))
    for row in range(count)
  ]
