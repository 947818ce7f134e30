"""A tiny untrained pair with the shipped vocabulary, as weights files."""

import dataclasses
from pathlib import Path

import jax

from osd_jax import assets, pairs, testing
from osd_jax.data.vocabularies import Vocabulary
from osd_jax.models import t5, weights

VOCAB_SIZE = 1536


def save_tiny_pair(folder: Path) -> pairs.PairConfig:
  """Writes `target.safetensors` and `draft.safetensors`; returns their config.

  The models are drawn, not trained: their outputs run to the length limit.
  """
  vocabulary = Vocabulary.load(assets.resolve("shipped:demo_vocabulary.model"))
  shapes = {"target": testing.TINY_T5, "draft": testing.TINY_DRAFT}
  for seed, (name, shape) in enumerate(shapes.items()):
    config = dataclasses.replace(shape, vocab_size=VOCAB_SIZE)
    params = t5.build(config).init(jax.random.key(seed))
    weights.save(
      folder / f"{name}.safetensors",
      weights.Weights(config, params, vocabulary.fingerprint, "tiny, untrained"),
    )
  return pairs.PairConfig(
    target=str(folder / "target.safetensors"),
    draft=str(folder / "draft.safetensors"),
  )
