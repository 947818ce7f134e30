"""The served copy of a model: kernels as decoding wants them, lighter for drafts."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base, native
from osd_jax.models import layers
from osd_jax.models.shapes import DraftServing, LlamaConfig, T5Config


class DraftHead(nn.Module):
  """The output head of a served draft: quantised, for some tokens only, or both.

  Attributes:
    config: the shape.
    serving: at least one of its fields is set.
  """

  config: T5Config | LlamaConfig
  serving: DraftServing

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Logits [B, n, V] of x [B, n, E]; -inf for tokens outside the shortlist."""
    config, covered = self.config, self.serving.shortlist
    logits = layers.Projection(
      (config.width, covered or config.vocab_size),
      ("embed", "vocab"),
      jnp.dtype(config.dtype),
      self.serving.layout,
      name="projection",
    )(x)
    if not covered:
      return logits
    ids = self.param("ids", lambda key: jnp.arange(covered))
    return scatter_to_vocab(logits, ids, config.vocab_size)


def scatter_to_vocab(logits: jax.Array, ids: jax.Array, size: int) -> jax.Array:
  """Logits [B, n, V] of some tokens' [B, n, N]; -inf for the others.

  Args:
    logits: [B, n, N].
    ids: [N] int32, rising.
    size: V.
  """
  if native.forms():
    empty = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
    return empty.at[..., ids].set(logits, unique_indices=True, indices_are_sorted=True)
  # A TPU writes whole rows, and would go on with rows of the vocabulary [V, n, B].
  flat = logits.reshape(-1, logits.shape[-1])
  empty = jnp.full((size, flat.shape[0]), -jnp.inf, logits.dtype)
  filled = empty.at[ids].set(flat.T, unique_indices=True, indices_are_sorted=True)
  filled = jax.lax.optimization_barrier(filled)
  return filled.T.reshape(*logits.shape[:-1], size)


def has_draft_head(config: T5Config | LlamaConfig, serving: DraftServing) -> bool:
  """Whether drafts are served with a `DraftHead` in place of their own."""
  return serving.int8 or 0 < serving.shortlist < config.vocab_size


def draft_head_of(
  config: T5Config | LlamaConfig, serving: DraftServing | None
) -> DraftHead | None:
  """The head of a served draft, None where it keeps its own."""
  if serving is None or not has_draft_head(config, serving):
    return None
  return DraftHead(config, serving)


def prepare(
  config: T5Config | LlamaConfig,
  serving: DraftServing,
  params: base.Params,
  shortlist: jax.Array | None = None,
) -> base.Params:
  """The served copy: compute type, kernels as the backend's steps read them best.

  What decoding reads as it was trained (the encoder, most of all) is not copied: those
  leaves are the given ones.

  Args:
    config: the shape.
    serving: what the copy leaves out.
    params: as trained.
    shortlist: [N] int32 distinct tokens that the output head covers, end-of-sequence
      among them; None takes the first N, and what ends a sequence.

  Returns:
    Parameters of the model with that serving.
  """
  dtype = jnp.dtype(config.dtype)
  copy = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
  decoder = dict(copy["decoder"])
  if has_draft_head(config, serving):
    dense = decoder.pop("logits_dense", None)
    kernel = copy["token_embedder"]["embedding"] if dense is None else dense["kernel"]
    copy["draft_head"] = draft_head(config, serving, kernel, dense is None, shortlist)
  return {**copy, "decoder": for_steps(decoder, serving)}


def draft_head(
  config: T5Config | LlamaConfig,
  serving: DraftServing,
  kernel: jax.Array,
  vocabulary_first: bool,
  shortlist: jax.Array | None,
) -> base.Params:
  """The parameters of a `DraftHead`.

  Args:
    config: the shape whose head it is.
    serving: what the head leaves out.
    kernel: the whole head, [E, V].
    vocabulary_first: it is [V, E] instead.
    shortlist: see `prepare`.
  """
  head = {}
  if serving.shortlist:
    if shortlist is None:
      shortlist = first_tokens(serving.shortlist, config.eos_ids)
    ids = jnp.sort(shortlist)
    head["ids"] = ids  # in order: a TPU would sort them at every step
  head["projection"] = _head(kernel, head.get("ids"), vocabulary_first, serving.layout)
  return head


def first_tokens(count: int, ends: Sequence[int]) -> jax.Array:
  """[count] int32; the lowest ids, which are frequent ones, and what ends a sequence.

  >>> first_tokens(4, (1, 9)).tolist()
  [0, 1, 2, 9]
  """
  far = [end for end in ends if end >= count][:count]
  return jnp.array([*range(count - len(far)), *far], jnp.int32)


@functools.partial(jax.jit, static_argnames=("vocabulary_first", "layout"))
def _head(kernel, ids, vocabulary_first, layout):
  kernel = kernel.T if vocabulary_first else kernel
  kernel = kernel if ids is None else kernel[:, ids]
  return _STORED[layout](kernel)


_STORED = {
  layers.Layout.TRAINED: lambda kernel: {"kernel": kernel},
  layers.Layout.SERVED: layers.transposed,
  layers.Layout.INT8: layers.quantized,
}


def for_steps(
  decoder: base.Params, serving: DraftServing, within: tuple[str, ...] = ()
) -> base.Params:
  """A decoder's kernels as steps read them; but for those that only prefill reads.

  Args:
    decoder: a tree of parameters.
    serving: says how kernels are stored.
    within: names of the trees around it.
  """
  stored = _STORED[serving.layout]
  if "kernel" in decoder:
    prefilled = within[-2:] in (
      ("encoder_decoder_attention", "key"),
      ("encoder_decoder_attention", "value"),
    )
    return decoder if prefilled else {**decoder, **stored(decoder["kernel"])}
  return {
    name: for_steps(inner, serving, (*within, name))
    if isinstance(inner, dict)
    else inner
    for name, inner in decoder.items()
  }
