"""A tiny T5 and a tiny Gemma config, noisy parameters for it, and greedy decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax.models.shapes import T5GemmaConfig
from osd_jax.testing import TINY_LLAMA, TINY_T5

# The few buckets and the short maximal distance let short sequences use every bucket.
CONFIG = dataclasses.replace(TINY_T5, relative_buckets=8, relative_max_distance=6)

# Gemma 3's features and Gemma 2's caps; prompts and texts are longer than the window.
GEMMA = dataclasses.replace(
  TINY_LLAMA,
  mlp_activations=("gelu", "linear"),
  tied_head=True,
  rope_theta=500.0,
  rope_factor=4.0,
  local_rope_theta=50.0,
  windows=(3, 0),
  query_key_norm=True,
  query_pre_attn_scalar=3.0,
  attention_cap=3.0,
  logit_cap=8.0,
  post_norms=True,
  unit_offset_norms=True,
  scaled_embeddings=True,
)

T5GEMMA = T5GemmaConfig(
  **{**vars(GEMMA), "windows": (2, 0), "query_key_norm": False, "num_layers": 3},
  num_encoder_layers=2,
  start_id=5,
)


def random_params(model, seed):
  """Random numpy parameters, so that each of them affects the logits."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(model.init, jax.random.key(0))

  def leaf(path, shape):
    noise = rng.normal(size=shape.shape).astype(np.float32)
    name = path[-1].key
    if name == "scale":
      return 1 + 0.3 * noise
    return noise * shape.shape[0] ** -0.5 if name == "kernel" else noise

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def greedy(weights, source, count):
  """Decodes prompts [B, S] greedily, one token per call.

  Returns:
    Token ids [B, count], 0 after end-of-sequence.
  """
  model = weights.model
  served, mask = model.prepare(weights.params), model.mask(source)
  decode = jax.jit(model.decode)
  cache = jax.jit(model.prefill, static_argnums=3)(served, source, mask, count)
  token, emitted = np.asarray(model.starts(jnp.asarray(source)))[:, None], []
  for _ in range(count):
    logits, cache = decode(served, token, cache)
    token = np.argmax(logits[:, -1:], axis=-1).astype(np.int32)
    emitted.append(token)
  tokens = np.concatenate(emitted, axis=1)
  ends = np.isin(tokens, model.eos_ids)
  return np.where(np.cumsum(ends, axis=1) - ends > 0, 0, tokens)
