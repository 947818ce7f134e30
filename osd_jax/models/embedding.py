"""Tokens to vectors, and vectors to logits: the two ends of every model."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax.models import layers
from osd_jax.models.shapes import LlamaConfig, T5Config


class Embedding(nn.Module):
  """Token embedding, and the output head of tied models."""

  config: T5Config | LlamaConfig

  def setup(self):
    config = self.config
    init = nn.with_logical_partitioning(
      nn.initializers.normal(config.embedding_std), ("vocab", "embed")
    )
    self.embedding = self.param("embedding", init, (config.vocab_size, config.width))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """[B, n, E] of tokens [B, n]."""
    return self.embedding[tokens].astype(jnp.dtype(self.config.dtype))

  def attend(self, x: jax.Array, product, tokens=None) -> jax.Array:
    """Logits [B, n, V] of x [B, n, E], or of some tokens."""
    kernel = self.embedding if tokens is None else self.embedding[tokens]
    return product(x, kernel.astype(x.dtype))


def logits_of(
  x: jax.Array,
  embedder: Embedding,
  dense: layers.Projection | None,
  draft_head: Any,
  trained: bool,
  tokens: jax.Array | None = None,
) -> jax.Array:
  """Logits [B, n, V] of x [B, n, E], float32 at least.

  Args:
    x: after the final norm.
    embedder: of the model.
    dense: its own output head; None: the embedding is the head.
    draft_head: a `served.DraftHead` in their place, or None.
    trained: kernels lie as they were trained.
    tokens: [C] int32, logits of these alone; only of trained kernels.
  """
  if draft_head is not None:
    logits = draft_head(x)
  elif dense is not None:
    logits = dense(x, tokens)
  else:
    product = layers.kernel_first_matmul if trained else layers.served_matmul
    logits = embedder.attend(x, product, tokens)
  return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def as_target_states(states: jax.Array) -> jax.Array:
  """What an attached draft is given: serving and training read the same bits."""
  return jax.lax.optimization_barrier(states).astype(jnp.bfloat16)
