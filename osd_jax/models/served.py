"""Served copies of models, and the base class of all models.

`prepare` copies trained parameters into the layout that decoding reads fastest. For a
draft it may also quantize them and shorten the output head (`DraftServing`).
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp

from osd_jax import base, native
from osd_jax import cache as cache_lib
from osd_jax.models import layers
from osd_jax.models.shapes import DraftServing, LlamaConfig, T5Config


class DraftHead(nn.Module):
  """The output head of a served draft: quantized, shortened, or both."""

  config: T5Config | LlamaConfig
  serving: DraftServing

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Logits [B, n, V] of x [B, n, E]; -inf for tokens outside the shortlist."""
    config, covered = self.config, self.serving.shortlist
    head = layers.output_head(config, self.serving.layout, covered, "projection")
    logits = head_logits(config, head(x))
    if not covered:
      return logits
    ids = self.param("ids", lambda key: jnp.arange(covered))
    return scatter_to_vocab(logits, ids, config.vocab_size)


class LanguageModel(nn.Module):
  """What T5 and Llama have in common: embedding, decoder and output head.

  Subclasses create `decoder` in `setup`, and define `read`, `forced`,
  `encode_for_draft` and `encoder_params`.

  Attributes:
    config: shape of the model.
    serving: run the copy that `prepare` made; None runs the trained parameters.
    states: what the cache holds for an attached draft, as in `AttachedConfig.reads` or
      `EagleConfig.state_layers`; "" for none.
    kept: layout of the decoder's kernels in the parameters.
  """

  config: T5Config | LlamaConfig
  serving: DraftServing | None = None
  states: base.States = ""
  kept: base.Layout = base.Layout.TRAINED
  is_decoder_only: ClassVar[bool] = False

  def setup(self):
    self.token_embedder = layers.Embedding(self.config)
    self.draft_head = draft_head_of(self.config, self.serving)

  @property
  def taps(self) -> tuple[int, ...]:
    """Numbers of layers whose outputs a draft reads together; () for another draft."""
    return self.states if isinstance(self.states, tuple) else ()

  def read(self, source: jax.Array, mask: jax.Array):
    """Processes prompts [B, S] for `prefill`.

    Returns:
      Per layer, keys and values [B, H, S, D]; which of them decoding may attend to,
      [B, S] bool; and the target states [B, S, E] for an attached draft.
    """
    raise NotImplementedError  # every stack has its own

  def prefill(self, source: jax.Array, mask: jax.Array, cache_length: int):
    """See `base.Model.prefill`."""
    entries, attended, states = self.read(source, mask)
    make = (
      cache_lib.KVCache.joined if self.is_decoder_only else cache_lib.KVCache.prefilled
    )
    cache = make(entries, attended, cache_length)
    if self.states:
      cache = cache.replace(target_states=layers.as_target_states(states))
    if self.states == "tokens" or self.taps:
      shape = (source.shape[0], cache_length, states.shape[-1])
      cache = cache.replace(token_states=jnp.zeros(shape, states.dtype))
    return cache

  def forced(self, source, mask, target, positions=None):
    """Decoder outputs [B, P, E] after the final norm, under teacher forcing."""
    raise NotImplementedError  # every stack has its own

  def score(self, source, mask, target, positions=None, tokens=None):
    """See `base.Model.score` and `base.Model.score_at`."""
    return self._logits(self.forced(source, mask, target, positions), tokens)

  def score_with_states(self, source, mask, target):
    """See `base.Model.score_with_states`."""
    x = self.forced(source, mask, target)
    return self._logits(x), layers.as_target_states(x)

  def decode(self, tokens: jax.Array, cache: cache_lib.KVCache):
    """See `base.Model.decode`."""
    is_token = tokens != base.NO_TOKEN
    x = jnp.where(is_token[..., None], self.token_embedder(tokens), 0)
    before = cache
    x, cache = self.decoder.step(x, cache, is_token)
    if self.states == "tokens":
      written = before.with_token_states(x).token_states
      cache = cache.replace(token_states=written)
    return self._logits(x), cache

  @staticmethod
  def model_fields(config) -> dict[str, Any]:
    """Fields of `base.Model` in which a family differs from encoder-decoders."""
    del config
    return {}

  @property
  def _layout(self) -> base.Layout:
    return self.kept if self.serving is None else self.serving.layout

  @property
  def _has_own_head(self) -> bool:
    return not self.config.tied_head and self.draft_head is None

  def _logits(self, x: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
    """Logits of decoder outputs [B, n, E] after the final norm, in float32 or more.

    If `tokens` [C] are given, returns [B, n, C]; this is not for served copies.
    """
    # T5 1.0 scales by width ** -0.5 before its tied head; for other models this is 1.
    x = x * self.config.head_scale
    if self.draft_head is not None:
      return self.draft_head(x)
    if not self.config.tied_head:
      logits = self.decoder.logits_dense(x, tokens)
    else:
      # The trained embedding is [V, E] = [out, in] already. Only the native product has
      # no gradient, so training must not use it.
      trained = self.serving is None
      product = layers.kernel_first_matmul if trained else layers.served_matmul
      logits = self.token_embedder.attend(x, product, tokens)
    return head_logits(self.config, logits)


def head_logits(config: T5Config | LlamaConfig, products: jax.Array) -> jax.Array:
  """Logits in float32 or more from the products of an output head."""
  wide = products.astype(layers.at_least_float32(products.dtype))
  return layers.soft_capped(wide, config.logit_cap)


def initializers(
  module: nn.Module, *arguments: Any, method: str = "score"
) -> dict[str, Any]:
  """The fields `init` and `logical_axes` of `base.Model`, for the trained parameters.

  Parameters get the same shapes from any arguments of the method.
  """

  def init_boxed(key):
    return module.init(key, *arguments, method=method)["params"]

  return {
    "init": lambda key: nn.unbox(init_boxed(key)),
    "logical_axes": lambda: nn.get_partition_spec(
      jax.eval_shape(init_boxed, jax.random.key(0))
    ),
  }


def scatter_to_vocab(logits: jax.Array, ids: jax.Array, size: int) -> jax.Array:
  """Expands logits [B, n, N] of increasing ids [N] to [B, n, size]; others get -inf."""
  if native.forms():
    empty = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
    return empty.at[..., ids].set(logits, unique_indices=True, indices_are_sorted=True)
  # A TPU scatters whole rows, so the vocabulary is the leading axis here. The barrier
  # keeps the layout [V, n, B] from spreading into the operations that follow.
  flat = logits.reshape(-1, logits.shape[-1])
  empty = jnp.full((size, flat.shape[0]), -jnp.inf, logits.dtype)
  filled = empty.at[ids].set(flat.T, unique_indices=True, indices_are_sorted=True)
  filled = jax.lax.optimization_barrier(filled)
  return filled.T.reshape(*logits.shape[:-1], size)


def has_draft_head(config: T5Config | LlamaConfig, serving: DraftServing) -> bool:
  """Whether a draft is served with a `DraftHead` instead of its own head."""
  return serving.int8 or 0 < serving.shortlist < config.vocab_size


def draft_head_of(
  config: T5Config | LlamaConfig, serving: DraftServing | None
) -> DraftHead | None:
  """The `DraftHead` of a served draft, or None if it keeps its own head."""
  if serving is None or not has_draft_head(config, serving):
    return None
  return DraftHead(config, serving)


def prepare(
  config: T5Config | LlamaConfig,
  serving: DraftServing,
  params: base.Params,
  shortlist: jax.Array | None = None,
  kept: base.Layout = base.Layout.TRAINED,
) -> base.Params:
  """The served copy of trained parameters; see `base.Model.prepare`.

  Parameters that keep their layout and type, such as those of an encoder, are shared
  with `params` and not copied. So are those that are stored in bfloat16. `kept` is the
  layout of the decoder's kernels in `params`.

  `shortlist` [N] int32 are the distinct tokens that the output head covers; they must
  include end-of-sequence. None takes the first N ids and all end-of-sequence tokens.
  """
  dtype = jnp.dtype(config.dtype)
  copy = jax.tree.map(lambda leaf: layers.stored(leaf, dtype), params)
  # A shallow copy, because `pop` below must not change the tree of the caller.
  decoder = dict(copy["decoder"])
  if has_draft_head(config, serving):
    dense = decoder.pop("logits_dense", None)  # absent in tied models
    kernel = copy["token_embedder"]["embedding"] if dense is None else dense["kernel"]
    vocabulary_first = dense is None or kept is not base.Layout.TRAINED
    copy["draft_head"] = draft_head(
      config, serving, kernel, vocabulary_first, shortlist
    )
  return {**copy, "decoder": for_steps(decoder, serving.layout, kept)}


def taken(params: base.Params, dtype: str, kept: base.Layout) -> base.Params:
  """Parameters of a target, from the leaves that `read_params` left as stored.

  They are in bfloat16 if that is `dtype` or the type in the file, and in float32
  otherwise. An array whose order in memory is that of `kept` is not copied; of the
  others one, or one group that is joined, exists twice at a time, because `params` is
  emptied.
  """

  def leaf(path: tuple[str, ...]) -> jax.Array:
    array = flat.pop(path)
    if kept is not base.Layout.TRAINED and is_for_steps(path):
      array = array.T
    return jax.block_until_ready(layers.stored(jax.device_put(array), jnp.dtype(dtype)))

  flat = flax.traverse_util.flatten_dict(params)
  params.clear()
  leaves = {path: leaf(path) for path in list(flat)}
  return flax.traverse_util.unflatten_dict(_packed(leaves, kept))


def draft_head(
  config: T5Config | LlamaConfig,
  serving: DraftServing,
  kernel: jax.Array,
  vocabulary_first: bool,
  shortlist: jax.Array | None,
) -> base.Params:
  """The parameters of a `DraftHead`, for a shortlist as in `prepare`.

  `kernel` is the full head, [V, E] if vocabulary_first, else [E, V].
  """
  head = {}
  if serving.shortlist:
    if shortlist is None:
      shortlist = first_tokens(serving.shortlist, config.eos_ids)
    head["ids"] = jnp.sort(shortlist)  # sorted once here, or in every step on a TPU
  head["projection"] = _head(kernel, head.get("ids"), vocabulary_first, serving.layout)
  return head


def first_tokens(count: int, ends: Sequence[int]) -> jax.Array:
  """The lowest ids, which are often the frequent ones, and all end-of-sequence ids.

  >>> first_tokens(4, (1, 9)).tolist()
  [0, 1, 2, 9]
  """
  # End-of-sequence can have a high id, as in Llama 3. A draft without it could never
  # propose the last token of an answer.
  far = [end for end in ends if end >= count][:count]
  return jnp.array([*range(count - len(far)), *far], jnp.int32)


@functools.partial(jax.jit, static_argnames=("vocabulary_first", "layout"))
def _head(kernel, ids, vocabulary_first, layout):
  kernel = kernel.T if vocabulary_first else kernel
  kernel = kernel if ids is None else kernel[:, ids]
  return _STORED[layout](kernel)


_STORED = {
  base.Layout.TRAINED: lambda kernel: {"kernel": kernel},
  base.Layout.SERVED: layers.transposed,
  base.Layout.PACKED: layers.transposed,
  base.Layout.INT8: layers.quantized,
}


def is_for_steps(path: tuple[str, ...]) -> bool:
  """Whether a parameter of a whole model is a kernel that decoding steps read."""
  # Keys and values of the source are computed by prefill, from the trained kernels.
  by_prefill = path[-3:-1] in (
    ("encoder_decoder_attention", "key"),
    ("encoder_decoder_attention", "value"),
  )
  return path[0] == "decoder" and path[-1] == "kernel" and not by_prefill


def for_steps(
  decoder: base.Params, layout: base.Layout, kept: base.Layout = base.Layout.TRAINED
) -> base.Params:
  """Stores the kernels of a decoder for steps; `kept` is their present layout."""
  if layout is kept:
    return decoder
  assert kept is not base.Layout.PACKED  # it is the last layout of any kernel
  leaves = {}
  for path, leaf in flax.traverse_util.flatten_dict(decoder).items():
    if not is_for_steps(("decoder", *path)):
      leaves[path] = leaf
      continue
    kernel = leaf.T if kept is base.Layout.SERVED else leaf
    for name, part in _STORED[layout](kernel).items():
      leaves[*path[:-1], name] = part
  return flax.traverse_util.unflatten_dict(_packed(leaves, layout, ("decoder",)))


def _packed(
  leaves: dict[tuple[str, ...], jax.Array],
  layout: base.Layout,
  within: tuple[str, ...] = (),
) -> dict[tuple[str, ...], jax.Array]:
  """Joins kernels [out, in], and their biases, as `base.Layout.PACKED` stores them."""
  if layout is not base.Layout.PACKED:
    return leaves
  for *parents, name, kind in list(leaves):
    for joined, names in base.JOINED.items():
      kernels = [(*within, *parents, part, "kernel") for part in names]
      if name == names[0] and all(map(is_for_steps, kernels)):
        parts = [leaves.pop((*parents, part, kind)) for part in names]
        # One at a time, so that a large model is never in memory twice.
        array = jax.block_until_ready(jnp.concatenate(parts))
        leaves[*parents, joined, kind] = array
  return leaves
