"""The served copy of a T5: kernels as decoding wants them, lighter for drafts."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.models import layers
from osd_jax.models.shapes import DraftServing, T5Config


class DraftHead(nn.Module):
  """The output head of a served draft: quantised, for some tokens only, or both.

  Attributes:
    config: the shape.
    serving: at least one of its fields is set.
  """

  config: T5Config
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
    empty = jnp.full((*x.shape[:-1], config.vocab_size), -jnp.inf, logits.dtype)
    return empty.at[..., ids].set(logits, unique_indices=True)


def has_draft_head(config: T5Config, serving: DraftServing) -> bool:
  """Whether drafts are served with a `DraftHead` in place of their own."""
  return serving.int8 or 0 < serving.shortlist < config.vocab_size


def prepare(
    config: T5Config,
    serving: DraftServing,
    params: base.Params,
    shortlist: jax.Array | None = None,
) -> base.Params:
  """The served copy: compute type, kernels transposed to `[out, in]`.

  Args:
    config: the shape.
    serving: what the copy leaves out.
    params: as trained.
    shortlist: [N] int32 distinct tokens that the output head covers, end-of-sequence
      among them; None takes the first N.

  Returns:
    Parameters of `T5(config, serving)`.
  """

  def leaf(path, value):
    value = value.astype(config.dtype)
    return value.T if path[-1].key == "kernel" else value

  found = jax.tree_util.tree_map_with_path(leaf, params)
  if has_draft_head(config, serving):
    found = _with_draft_head(config, serving, found, shortlist)
  if serving.int8:
    found["decoder"] = _quantized(found["decoder"])
  return found


def _with_draft_head(config, serving, served, shortlist):
  decoder = dict(served["decoder"])
  dense = decoder.pop("logits_dense", None)
  kernel = served["token_embedder"]["embedding"] if dense is None else dense["kernel"]
  head = {}
  if serving.shortlist:
    ids = jnp.arange(serving.shortlist) if shortlist is None else shortlist
    kernel, head["ids"] = kernel[ids], ids
  head["projection"] = layers.quantized(kernel) if serving.int8 else {"kernel": kernel}
  return {**served, "decoder": decoder, "draft_head": head}


def _quantized(decoder, within: tuple[str, ...] = ()):
  """A decoder's kernels in 8 bits, but for those that only prefill reads."""
  if "kernel" in decoder:
    prefilled = within[-2] == "encoder_decoder_attention"
    kept = prefilled and within[-1] in ("key", "value")
    return decoder if kept else layers.quantized(decoder["kernel"])
  return {
      name: _quantized(leaf, (*within, name)) if isinstance(leaf, dict) else leaf
      for name, leaf in decoder.items()
  }
