"""Shapes of the published models and of the shipped pair, by name.

Published shapes are those of the checkpoints, whose embedding has 32,128 rows for
the 32,100 ids of T5's vocabulary. The Deep-Narrow "small" differs from t5-small in
its training only.
"""

import dataclasses

from osd_jax import base
from osd_jax.models.t5 import T5Config

_T5_1_0 = T5Config()
_FLAN = T5Config(mlp_activations=("gelu", "linear"), tied_head=False)
_DEMO = dataclasses.replace(_FLAN, vocab_size=1536, num_heads=4, embedding_std=0.3)


def _shape(
  like: T5Config,
  width: int,
  num_heads: int,
  mlp_dim: int,
  num_layers: int,
) -> T5Config:
  return dataclasses.replace(
    like,
    width=width,
    num_heads=num_heads,
    mlp_dim=mlp_dim,
    num_encoder_layers=num_layers,
    num_decoder_layers=num_layers,
  )


SIZES: dict[str, T5Config] = {
  "t5-small": _shape(_T5_1_0, 512, 8, 2048, 6),
  "t5-efficient-small": _shape(_T5_1_0, 512, 8, 2048, 6),
  "flan-t5-small": _shape(_FLAN, 512, 6, 1024, 8),
  "flan-t5-base": _shape(_FLAN, 768, 12, 2048, 12),
  "flan-t5-large": _shape(_FLAN, 1024, 16, 2816, 24),
  "flan-t5-xl": _shape(_FLAN, 2048, 32, 5120, 24),
  "flan-t5-xxl": _shape(_FLAN, 4096, 64, 10240, 24),
  "demo-target": dataclasses.replace(
    _DEMO,
    width=256,
    head_dim=64,
    mlp_dim=640,
    num_encoder_layers=2,
    num_decoder_layers=8,
  ),
  "demo-draft": dataclasses.replace(
    _DEMO,
    width=128,
    head_dim=32,
    mlp_dim=384,
    num_encoder_layers=2,
    num_decoder_layers=1,
  ),
}


def size(name: str) -> T5Config:
  """The shape called `name`.

  Args:
    name: a key of `SIZES`.

  Returns:
    Its T5Config.

  Raises:
    ValueError: no such name.
  """
  if name not in SIZES:
    raise base.InputError(
      f"sizes: received name {name!r}, expected one of {sorted(SIZES)}; build a"
      " T5Config for any other shape."
    )
  return SIZES[name]
