"""T5 1.0, T5 1.1 and Flan-T5 as the pure functions of `base.Model`.

Source: Raffel et al., 2020 (arXiv 1910.10683) and t5x's `minimal` examples,
whose parameter tree and logical axis names are kept so that checkpoints map 1:1.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import layers


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Shape of a T5. The defaults are t5-small's (T5 1.0).

  Attributes:
    vocab_size: V, rows of the embedding (checkpoints pad 32,100 to 32,128).
    width: E.
    num_heads: H.
    head_dim: D.
    mlp_dim: inner width of the feed-forward block.
    num_encoder_layers: encoder layers.
    num_decoder_layers: L.
    mlp_activations: ("relu",) for 1.0, ("gelu", "linear") for 1.1 and Flan.
    tied_head: the output head is the embedding, scaled by width ** -0.5.
    relative_buckets: entries of the relative position bias.
    relative_max_distance: distances from here on share a bucket.
    dtype: "float32" or "bfloat16"; compute type and type of the served copy. "float64"
      is for rescoring alone and needs `jax.enable_x64`.
    embedding_std: standard deviation of the initial embedding (t5x: 1).
  """

  vocab_size: int = 32128
  width: int = 512
  num_heads: int = 8
  head_dim: int = 64
  mlp_dim: int = 2048
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  mlp_activations: tuple[str, ...] = ("relu",)
  tied_head: bool = True
  relative_buckets: int = 32
  relative_max_distance: int = 128
  dtype: str = "float32"
  embedding_std: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type == "int" or field.type is int:
        if type(value) is not int or value < 1:
          raise ValueError(
              f"T5Config.{field.name}: received {value!r}, expected an integer >= 1."
          )
    if type(self.tied_head) is not bool:
      raise ValueError(
          f"T5Config.tied_head: received {self.tied_head!r}, expected True or False."
      )
    if self.relative_buckets < 4 or self.relative_buckets % 2:
      raise ValueError(
          f"T5Config.relative_buckets: received {self.relative_buckets}, expected an"
          " even number >= 4 (the encoder halves it for both directions)."
      )
    if self.relative_max_distance <= self.relative_buckets // 2:
      raise ValueError(
          f"T5Config.relative_max_distance: received {self.relative_max_distance},"
          f" expected more than {self.relative_buckets // 2}, half of"
          " relative_buckets: those hold one distance each."
      )
    if not 0 < self.embedding_std < float("inf"):
      raise ValueError(
          f"T5Config.embedding_std: received {self.embedding_std!r}, expected a"
          " finite number > 0."
      )
    unknown = [a for a in self.mlp_activations if a not in layers.ACTIVATIONS]
    if unknown or not self.mlp_activations:
      raise ValueError(
          f"T5Config.mlp_activations: received {self.mlp_activations!r}, expected"
          f" names out of {sorted(layers.ACTIVATIONS)}."
      )
    if self.dtype not in ("float32", "bfloat16", "float64"):
      raise ValueError(
          f"T5Config.dtype: received {self.dtype!r}, expected 'float32' or 'bfloat16'."
      )


@dataclasses.dataclass(frozen=True)
class DraftServing:
  """What a served draft may leave out: only the target decides what is emitted.

  Attributes:
    int8: decoder and output head are quantised to 8 bits; the learner keeps its own.
    shortlist: N, tokens that the output head covers; others get no mass. 0 covers all.
  """

  int8: bool = False
  shortlist: int = 0

  def __post_init__(self):
    if type(self.int8) is not bool:
      raise ValueError(
          f"DraftServing.int8: received {self.int8!r}, expected True or False."
      )
    if type(self.shortlist) is not int or self.shortlist < 0:
      raise ValueError(
          f"DraftServing.shortlist: received {self.shortlist!r}, expected a number of"
          " tokens, or 0 for all."
      )

  @property
  def layout(self) -> layers.Layout:
    """Of the decoder's kernels."""
    return layers.Layout.INT8 if self.int8 else layers.Layout.SERVED


class EncoderLayer(nn.Module):
  """Pre-norm self-attention and feed-forward block of the encoder."""

  config: T5Config
  layout: layers.Layout

  @nn.compact
  def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    attention = _attention(config, self.layout, self.layout, "attention")
    h = layers.RMSNorm(dtype, name="pre_attention_layer_norm")(x)
    x = x + attention(h, *attention.keys_values(h), bias)
    h = layers.RMSNorm(dtype, name="pre_mlp_layer_norm")(x)
    return x + _mlp(config, self.layout)(h)


class Encoder(nn.Module):
  """Encoder stack."""

  config: T5Config
  layout: layers.Layout

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Encodes embedded tokens x [B, S, E] under mask [B, S] to [B, S, E]."""
    config = self.config
    positions = jnp.arange(x.shape[1])
    bias = _relative_bias(config, bidirectional=True)(positions[None], positions)
    bias = bias + layers.mask_bias(mask)[:, None, None, :]
    for index in range(config.num_encoder_layers):
      x = EncoderLayer(config, self.layout, name=f"layers_{index}")(x, bias)
    return layers.RMSNorm(jnp.dtype(config.dtype), name="encoder_norm")(x)


class DecoderLayer(nn.Module):
  """Pre-norm self-attention, cross-attention and feed-forward block.

  Attributes:
    config: the shape.
    layout: of the kernels that a step reads.
    memory_layout: of the cross-attention's keys and values, which prefill reads.
  """

  config: T5Config
  layout: layers.Layout
  memory_layout: layers.Layout

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.pre_self_attention_layer_norm = layers.RMSNorm(dtype)
    self.self_attention = _attention(config, self.layout, self.layout)
    self.pre_cross_attention_layer_norm = layers.RMSNorm(dtype)
    self.encoder_decoder_attention = _attention(
        config, self.layout, self.memory_layout
    )
    self.pre_mlp_layer_norm = layers.RMSNorm(dtype)
    self.mlp = _mlp(config, self.layout, name=None)

  def cross_keys_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(self, x, self_bias, cross, cross_bias, past=None):
    """One layer over n new positions.

    Args:
      x: [B, n, E].
      self_bias: [B or 1, H, n, T] float32.
      cross: keys and values [B, H, S, D] of the encoded source.
      cross_bias: [B, 1, 1, S] float32.
      past: None (x holds all positions: teacher forcing), or (keys, values,
        length) of the self cache, written at length before attending.

    Returns:
      [B, n, E] and the self keys and values attended to, [B, H, T, D].
    """
    h = self.pre_self_attention_layer_norm(x)
    keys, values = self.self_attention.keys_values(h)
    if past is not None:
      past_keys, past_values, length = past
      keys = cache_lib.write(past_keys, keys, length)
      values = cache_lib.write(past_values, values, length)
    x = x + self.self_attention(h, keys, values, self_bias)
    h = self.pre_cross_attention_layer_norm(x)
    x = x + self.encoder_decoder_attention(h, *cross, cross_bias)
    return x + self.mlp(self.pre_mlp_layer_norm(x)), (keys, values)


class Decoder(nn.Module):
  """Decoder stack with its output head (untied models).

  Attributes:
    config: the shape.
    layout: of the kernels that a step reads.
    memory_layout: of the cross-attention's keys and values.
    own_head: the stack has an output head.
  """

  config: T5Config
  layout: layers.Layout
  memory_layout: layers.Layout
  own_head: bool

  def setup(self):
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    self.relpos_bias = _relative_bias(config, bidirectional=False, name=None)
    self.layers = [
        DecoderLayer(config, self.layout, self.memory_layout)
        for _ in range(config.num_decoder_layers)
    ]
    self.decoder_norm = layers.RMSNorm(dtype)
    if self.own_head:
      self.logits_dense = layers.Projection(
          (config.width, config.vocab_size), ("embed", "vocab"), dtype, self.layout
      )

  def cross_keys_values(self, encoded: jax.Array):
    """Cross-attention keys and values of every layer, [B, H, S, D] each."""
    return [layer.cross_keys_values(encoded) for layer in self.layers]

  def __call__(self, x, cross, cross_mask, key_length, pasts=None, length=None):
    """Runs all layers over n new positions.

    Args:
      x: [B, n, E] embedded tokens.
      cross: per layer, keys and values [B, H, S, D].
      cross_mask: [B, S] bool.
      key_length: number of self keys T that are attended over (static).
      pasts: per layer, self keys and values [B, H, T, D], or None.
      length: [B] int32 valid self keys before this call, or None for 0.

    Returns:
      [B, n, E] after the final norm, and per layer the self keys and values.
    """
    start = jnp.zeros((1,), jnp.int32) if length is None else length
    query = start[:, None] + jnp.arange(x.shape[1])[None]
    key = jnp.arange(key_length)
    causal = key[None, None, :] <= query[:, :, None]
    self_bias = self.relpos_bias(query, key) + layers.mask_bias(causal)[:, None]
    cross_bias = layers.mask_bias(cross_mask)[:, None, None, :]
    written = []
    for index, layer in enumerate(self.layers):
      past = None if pasts is None else (*pasts[index], length)
      x, entries = layer(x, self_bias, cross[index], cross_bias, past)
      written.append(entries)
    return self.decoder_norm(x), written


class T5(nn.Module):
  """The whole model.

  Attributes:
    config: the shape.
    serving: reads the copy that `prepare` made for it; None reads what is trained.
  """

  config: T5Config
  serving: DraftServing | None = None

  def setup(self):
    config, serving = self.config, self.serving
    layout = layers.Layout.TRAINED if serving is None else layers.Layout.SERVED
    step_layout = layout if serving is None else serving.layout
    self.token_embedder = Embedding(config)
    self.encoder = Encoder(config, layout)
    own_head = not config.tied_head
    if serving is not None and _has_draft_head(config, serving):
      self.draft_head, own_head = DraftHead(config, serving), False
    self.decoder = Decoder(config, step_layout, layout, own_head)

  def prefill(self, source, mask, cache_length: int) -> cache_lib.KVCache:
    """See `base.Model.prefill`."""
    config = self.config
    cross = self.decoder.cross_keys_values(self._encode(source, mask))
    shape = (source.shape[0], config.num_heads, cache_length, config.head_dim)
    empty = functools.partial(
        cache_lib.empty_self_entries,
        config.num_decoder_layers,
        shape,
        jnp.dtype(config.dtype),
    )
    return cache_lib.KVCache(
        self_keys=empty(),
        self_values=empty(),
        cross_keys=tuple(keys for keys, _ in cross),
        cross_values=tuple(values for _, values in cross),
        cross_mask=mask,
        length=jnp.zeros((source.shape[0],), jnp.int32),
    )

  def decode(self, tokens, cache: cache_lib.KVCache):
    """See `base.Model.decode`."""
    x, written = self.decoder(
        self.token_embedder(tokens),
        list(zip(cache.cross_keys, cache.cross_values, strict=True)),
        cache.cross_mask,
        cache.self_keys[0].shape[2],
        list(zip(cache.self_keys, cache.self_values, strict=True)),
        cache.length,
    )
    cache = cache.replace(
        self_keys=tuple(keys for keys, _ in written),
        self_values=tuple(values for _, values in written),
        length=cache.length + tokens.shape[1],
    )
    return self._logits(x), cache

  def score(self, source, mask, target):
    """See `base.Model.score`."""
    cross = self.decoder.cross_keys_values(self._encode(source, mask))
    inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=base.PAD_ID)
    x, _ = self.decoder(self.token_embedder(inputs), cross, mask, target.shape[1])
    return self._logits(x)

  def _encode(self, source, mask):
    return self.encoder(self.token_embedder(source), mask)

  def _logits(self, x):
    if self.config.tied_head:
      x = x * self.config.width**-0.5
    if hasattr(self, "draft_head"):
      logits = self.draft_head(x)
    elif self.config.tied_head:
      logits = self.token_embedder.attend(x)
    else:
      logits = self.decoder.logits_dense(x)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


class Embedding(nn.Module):
  """Token embedding, and the output head of tied models."""

  config: T5Config

  def setup(self):
    config = self.config
    init = nn.with_logical_partitioning(
        nn.initializers.normal(config.embedding_std), ("vocab", "embed")
    )
    self.embedding = self.param("embedding", init, (config.vocab_size, config.width))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.embedding[tokens].astype(jnp.dtype(self.config.dtype))

  def attend(self, x: jax.Array) -> jax.Array:
    return layers.served_matmul(x, self.embedding.astype(x.dtype))


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


def _has_draft_head(config: T5Config, serving: DraftServing) -> bool:
  return serving.int8 or 0 < serving.shortlist < config.vocab_size


def _attention(
    config: T5Config,
    layout: layers.Layout,
    memory_layout: layers.Layout,
    name: str | None = None,
) -> layers.Attention:
  return layers.Attention(
      config.width,
      config.num_heads,
      config.head_dim,
      jnp.dtype(config.dtype),
      layout,
      memory_layout,
      name=name,
  )


def _mlp(
    config: T5Config, layout: layers.Layout, name: str | None = "mlp"
) -> layers.Mlp:
  return layers.Mlp(
      config.width,
      config.mlp_dim,
      config.mlp_activations,
      jnp.dtype(config.dtype),
      layout,
      name=name,
  )


def _relative_bias(
    config: T5Config, bidirectional: bool, name: str | None = "relpos_bias"
) -> layers.RelativePositionBias:
  return layers.RelativePositionBias(
      config.num_heads,
      config.relative_buckets,
      config.relative_max_distance,
      bidirectional,
      name=name,
  )


@functools.cache
def build(
    config: T5Config, name: str = "t5", serving: DraftServing = DraftServing()
) -> base.Model:
  """The functions of `base.Model` for one configuration.

  Cached, so that the same configuration gives the same (static) Model and
  nothing is compiled twice.

  Args:
    config: the shape.
    name: what error texts call it.
    serving: what its served copy leaves out; for drafts only.
  """
  if serving.shortlist >= config.vocab_size:
    serving = dataclasses.replace(serving, shortlist=0)
  training, served = T5(config), T5(config, serving)

  def init(key):
    return nn.unbox(_init_boxed(training, key))

  def apply(module, params, *args, method):
    return module.apply({"params": params}, *args, method=method)

  return base.Model(
      name=name,
      vocab_size=config.vocab_size,
      init=init,
      prefill=functools.partial(apply, served, method=T5.prefill),
      decode=functools.partial(apply, served, method=T5.decode),
      score=functools.partial(apply, training, method=T5.score),
      prepare=functools.partial(prepare, config, serving),
      logical_axes=functools.partial(_logical_axes, training),
      shortlist=serving.shortlist,
  )


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
  if _has_draft_head(config, serving):
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


def _init_boxed(module: T5, key: jax.Array):
  token = jnp.zeros((1, 1), jnp.int32)
  return module.init(key, token, token == 0, token, method=T5.score)["params"]


def _logical_axes(module: T5):
  boxed = jax.eval_shape(functools.partial(_init_boxed, module), jax.random.key(0))
  return nn.get_partition_spec(boxed)
