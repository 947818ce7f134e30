"""Shapes of the published models and of the shipped pair, by name.

T5's published checkpoints have an embedding of 32,128 rows for the 32,100 ids of the
vocabulary. The Deep-Narrow "small" differs from t5-small only in its training.
"""

import dataclasses

from osd_jax import base
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import (
  LlamaConfig,
  RopeScaling,
  T5Config,
  T5GemmaConfig,
)

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


_LLAMA = LlamaConfig()
_LLAMA_SMALL = LlamaConfig(max_positions=2048, norm_epsilon=1e-6)
_LLAMA_3 = LlamaConfig(
  vocab_size=128256,
  num_kv_heads=8,
  rope_theta=500000.0,
  max_positions=131072,
  eos_ids=(128001, 128008, 128009),
)
_DEMO_LLAMA = LlamaConfig(
  vocab_size=1536, num_heads=4, num_kv_heads=4, max_positions=512, embedding_std=0.3
)
_QWEN_3 = LlamaConfig(
  vocab_size=151936,
  num_kv_heads=8,
  rope_theta=1e6,
  norm_epsilon=1e-6,
  query_key_norm=True,
  max_positions=40960,
  eos_ids=(151645, 151643),
)
_GEMMA = LlamaConfig(
  num_heads=4,
  num_kv_heads=1,
  head_dim=256,
  mlp_activations=("gelu", "linear"),
  tied_head=True,
  norm_epsilon=1e-6,
  post_norms=True,
  unit_offset_norms=True,
  scaled_embeddings=True,
)
_GEMMA_3 = dataclasses.replace(
  _GEMMA,
  vocab_size=262144,
  rope_theta=1e6,
  local_rope_theta=1e4,
  windows=(512,) * 5 + (0,),
  query_key_norm=True,
  max_positions=32768,
  eos_ids=(1, 106),
)
_GEMMA_2_2B = dataclasses.replace(
  _GEMMA,
  vocab_size=256000,
  width=2304,
  num_heads=8,
  num_kv_heads=4,
  mlp_dim=9216,
  num_layers=26,
  windows=(4096, 0),
  attention_cap=50.0,
  logit_cap=30.0,
  max_positions=8192,
  eos_ids=(1, 107),
)
_T5GEMMA_2B = T5GemmaConfig(**vars(_GEMMA_2_2B))


def _t5gemma(width: int, num_heads: int, mlp_dim: int, layers: int) -> T5GemmaConfig:
  """Returns one of the smaller sizes, which have the shapes of T5s."""
  return dataclasses.replace(
    _T5GEMMA_2B,
    head_dim=64,
    query_pre_attn_scalar=256.0,
    width=width,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    mlp_dim=mlp_dim,
    num_layers=layers,
    num_encoder_layers=layers,
  )


def _llama(like: LlamaConfig, width: int, num_heads: int, mlp_dim: int, layers: int):
  # Qwen3 has heads of 128 at every width, so H * D may differ from E.
  head_dim = 128 if like is _QWEN_3 else width // num_heads
  return dataclasses.replace(
    like,
    width=width,
    num_heads=num_heads,
    # The first two generations of Llama have no grouped-query attention at these sizes.
    num_kv_heads=num_heads if like in (_LLAMA, _LLAMA_SMALL) else like.num_kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_layers=layers,
  )


SIZES: dict[str, ModelConfig] = {
  "t5-small": _shape(_T5_1_0, 512, 8, 2048, 6),
  "t5-efficient-small": _shape(_T5_1_0, 512, 8, 2048, 6),
  "flan-t5-small": _shape(_FLAN, 512, 6, 1024, 8),
  "flan-t5-base": _shape(_FLAN, 768, 12, 2048, 12),
  "flan-t5-large": _shape(_FLAN, 1024, 16, 2816, 24),
  "flan-t5-xl": _shape(_FLAN, 2048, 32, 5120, 24),
  "flan-t5-xxl": _shape(_FLAN, 4096, 64, 10240, 24),
  "llama-68m": _llama(_LLAMA_SMALL, 768, 12, 3072, 2),
  "llama-160m": _llama(_LLAMA_SMALL, 768, 12, 3072, 12),
  "tinyllama-1.1b": dataclasses.replace(
    _llama(_LLAMA, 2048, 32, 5632, 22), num_kv_heads=4, max_positions=2048
  ),
  "vicuna-7b": _LLAMA,
  "vicuna-13b": _llama(_LLAMA, 5120, 40, 13824, 40),
  "llama-2-7b": _LLAMA,
  "llama-2-13b": _llama(_LLAMA, 5120, 40, 13824, 40),
  "llama-3.2-1b": dataclasses.replace(
    _llama(_LLAMA_3, 2048, 32, 8192, 16),
    tied_head=True,
    rope_scaling=RopeScaling(factor=32.0),
  ),
  "llama-3.1-8b": dataclasses.replace(
    _llama(_LLAMA_3, 4096, 32, 14336, 32), rope_scaling=RopeScaling()
  ),
  "qwen3-0.6b": dataclasses.replace(
    _llama(_QWEN_3, 1024, 16, 3072, 28), tied_head=True
  ),
  "qwen3-1.7b": dataclasses.replace(
    _llama(_QWEN_3, 2048, 16, 6144, 28), tied_head=True
  ),
  "qwen3-8b": _llama(_QWEN_3, 4096, 32, 12288, 36),
  "gemma-2-2b": _GEMMA_2_2B,
  "t5gemma-s-s": _t5gemma(512, 8, 1024, 8),
  "t5gemma-b-b": _t5gemma(768, 12, 2048, 12),
  "t5gemma-2b-2b": _T5GEMMA_2B,
  "gemma-3-270m": dataclasses.replace(_GEMMA_3, width=640, mlp_dim=2048, num_layers=18),
  "gemma-3-1b": dataclasses.replace(_GEMMA_3, width=1152, mlp_dim=6912, num_layers=26),
  "gemma-3-4b": dataclasses.replace(
    _GEMMA_3,
    vocab_size=262208,
    width=2560,
    num_heads=8,
    num_kv_heads=4,
    mlp_dim=10240,
    num_layers=34,
    rope_factor=8.0,
    windows=(1024,) * 5 + (0,),
    max_positions=131072,
  ),
  "demo-llama-target": dataclasses.replace(
    _DEMO_LLAMA, width=256, num_kv_heads=2, head_dim=64, mlp_dim=640, num_layers=6
  ),
  "demo-llama-draft": dataclasses.replace(
    _DEMO_LLAMA, width=128, num_kv_heads=4, head_dim=32, mlp_dim=384, num_layers=2
  ),
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

# A model of each family, for programs that are compiled ahead of time.
FAMILIES = {
  "llama": "tinyllama-1.1b",
  "qwen3": "qwen3-0.6b",
  "gemma3": "gemma-3-1b",
  "t5": "flan-t5-xl",
  "t5gemma": "t5gemma-b-b",
}


def size(name: str) -> ModelConfig:
  """Returns the T5Config or LlamaConfig of a key of `SIZES`.

  Raises:
    InputError: the name is unknown.
  """
  if name not in SIZES:
    raise base.InputError(
      f"sizes: received name {name!r}, expected one of {sorted(SIZES)}; build a"
      " T5Config or LlamaConfig for any other shape."
    )
  return SIZES[name]
