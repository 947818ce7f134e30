"""Models with known distributions, and tiny transformers, for tests and notebooks.

They are part of the package so that you can check your own model or acceptance rule
with the tools that check this one.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.models import shapes

TINY_T5 = shapes.T5Config(
  vocab_size=64,
  width=32,
  num_heads=2,
  head_dim=16,
  mlp_dim=48,
  num_encoder_layers=1,
  num_decoder_layers=2,
  mlp_activations=("gelu", "linear"),
  tied_head=False,
)

TINY_DRAFT = dataclasses.replace(
  TINY_T5, width=16, head_dim=8, mlp_dim=24, num_decoder_layers=1
)

TINY_LLAMA = shapes.LlamaConfig(
  vocab_size=64,
  width=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  num_layers=2,
  max_positions=256,
  eos_ids=(1,),
)

TINY_LLAMA_DRAFT = dataclasses.replace(
  TINY_LLAMA, width=16, num_heads=2, num_kv_heads=1, mlp_dim=24, num_layers=1
)


@flax.struct.dataclass
class TabularCache:
  """Tokens that were fed to a tabular model."""

  tokens: jax.Array  # [B, T] int32
  length: jax.Array  # [B] int32
  # [B] int32, what the prompt adds to the context; None if it is ignored.
  shift: jax.Array | None = None


@functools.cache
def tabular_model(
  vocab_size: int, name: str = "tabular", reads_source: bool = False
) -> base.Model:
  """Returns a model that looks its logits up by the last two tokens.

  Its parameters are a table [V, V, V] float32: `table[before_last, last]` are the
  logits of the next token. With two tokens of context, a wrong rewind or a cache that
  is off by one position changes the output distribution.

  Args:
    vocab_size: V, the number of token ids.
    name: name of the model in error messages.
    reads_source: adds the sum of the prompt's tokens, modulo V, to `before_last`.
      Otherwise the prompt is ignored.
  """

  def shift_of(source, mask):
    return jnp.sum(jnp.where(mask, source, 0), axis=1) if reads_source else None

  def look_up(table, before, last, shift):
    if shift is not None:
      # Without this a test could not notice that a row was given another row's prompt.
      before = (before + shift[:, None]) % vocab_size
    return table[before, last]

  def prefill(table, source, mask, cache_length):
    del table
    rows = source.shape[0]
    return TabularCache(
      tokens=jnp.zeros((rows, cache_length), jnp.int32),
      length=jnp.zeros((rows,), jnp.int32),
      shift=shift_of(source, mask),
    )

  def decode(table, tokens, cache):
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    tokens_so_far = write(cache.tokens, tokens, cache.length)
    position = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    before = jnp.take_along_axis(tokens_so_far, jnp.maximum(position - 1, 0), axis=1)
    # The first token has no predecessor; `maximum` above only avoids the index -1.
    before = jnp.where(position == 0, base.PAD_ID, before)
    logits = look_up(table, before, tokens, cache.shift)
    return logits, cache.replace(
      tokens=tokens_so_far, length=cache.length + tokens.shape[1]
    )

  def score(table, source, mask, target):
    # Entry t is predicted from the two tokens before it; PAD_ID starts every target.
    inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
    before = jnp.pad(inputs[:, :-1], ((0, 0), (1, 0)))
    return look_up(table, before, inputs, shift_of(source, mask))

  return base.Model(
    name=name,
    vocab_size=vocab_size,
    init=lambda key: jax.random.normal(key, (vocab_size,) * 3),
    prefill=prefill,
    decode=decode,
    score=score,
    prepare=lambda table: table,
    # Split over the last axis, like the output head of a transformer.
    logical_axes=lambda: jax.sharding.PartitionSpec(None, None, "vocab"),
  )


def random_table(vocab_size: int, seed: int, *, sharpness: float = 1.0) -> np.ndarray:
  """Returns logits [V, V, V], normal with standard deviation `sharpness`."""
  rng = np.random.default_rng(seed)
  table = sharpness * rng.normal(size=(vocab_size,) * 3)
  # Outputs then have their full length, which makes counts of tokens predictable.
  table[:, :, base.EOS_ID] = -np.inf
  return table.astype(np.float32)


def random_sources(
  rows: int, length: int, vocab_size: int, seed: int, pad_id: int = base.PAD_ID
) -> tuple[np.ndarray, np.ndarray]:
  """Returns prompts [rows, length] int32 of random lengths, and their mask.

  Prompts have at least two tokens, end in end-of-sequence and are padded with `pad_id`.
  """
  rng = np.random.default_rng(seed)
  source = rng.integers(3, vocab_size, size=(rows, length)).astype(np.int32)
  for row, count in enumerate(rng.integers(2, length + 1, size=rows)):
    source[row, count - 1] = base.EOS_ID
    source[row, count:] = pad_id
  return source, source != pad_id
