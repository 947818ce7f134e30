"""EAGLE-3 heads: drafts that read several layers of a decoder-only target.

    target states after several layers -> fc -----------> |
    tokens -> embedding --------------------------------> | side by side
                                                          v
                     layers over prompt and answer -> norm -> head -> draft vocabulary

The head is a small decoder over the whole text. Each of its inputs is a token and the
state before it: the target's, s, through `fc`, up to the token that the target emitted
last, and its own outputs, e, from there on. The first token of a text has no state
before it, and is left out, unless it is the only one of the prompt.

    token          t1   t2   t3 | t4   t5   d6   d7     t5 was emitted last
    state before   s0   s1   s2 | s3   s4   e5   e6     | the prompt ends at t4
    output         -    -    -  | e4   e5   e6   e7     the head maps e5 to d6

Its own head covers a draft vocabulary, a subset of the target's tokens. It is trained
on its first steps after every position, like other drafts that read states (see
`attached.py`). `convert/eagle.py` reads the formats in which heads are exchanged.
Source: Li et al., 2025, EAGLE-3 (arXiv 2503.01840).
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax import cache as cache_lib
from osd_jax.models import families, layers, llama, served
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import DraftServing, EagleConfig, LlamaConfig

# A token outside the draft vocabulary has exp(-MISSING) of the probability of all
# tokens in it when a head is trained or scored. The loss must be finite there.
MISSING = 30.0


class FirstLayer(llama.Layer):
  """The first layer of a head, whose attention reads token and state side by side."""

  norm_before_residual: bool = False
  attention_inputs = 2

  def setup(self):
    super().setup()
    self.state_layer_norm = llama.norm(self.config)

  def inputs_of(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `llama.Layer`, for embedded tokens and states x [B, n, 2E]."""
    embedded, states = jnp.split(x, 2, axis=-1)
    normed = self.state_layer_norm(states)
    pair = [self.pre_self_attention_layer_norm(embedded), normed]
    residual = normed if self.norm_before_residual else states
    return jnp.concatenate(pair, axis=-1), residual


class Decoder(llama.Decoder):
  """The layers of a head, the final norm, and the head over the draft vocabulary."""

  norm_before_residual: bool = False

  def setup(self):
    config, layout = self.config, self.layout
    rest = [llama.Layer(config, layout) for _ in range(config.num_layers - 1)]
    self.layers = [FirstLayer(config, layout, self.norm_before_residual), *rest]
    self.decoder_norm = llama.norm(config)
    self.logits_dense = layers.output_head(config, layout)

  def _advanced(self, x, at, bias, cache, **memories):
    """`step` without the final norm; see `llama.Decoder`."""
    pasts = [(*kept, cache.length) for kept in zip(cache.self_keys, cache.self_values)]
    by = llama.rotations(self.config, at)
    states, entries = llama.through(
      self.layers, self.config, x, by, bias, pasts, **memories
    )
    return states[-1], cache.advanced(entries, x.shape[1])

  def after(self, x, prompt, mask, earlier):
    """A step from every position of a text, like `t5.Decoder.after`.

    Args:
      x: [B, T, 2E], the inputs.
      prompt: per layer, keys and values [B, KV heads, S, D] of the prompt.
      mask: [B, S] bool, the tokens of the prompt that may be attended to.
      earlier: what this method returned as second value in each step before.

    Returns:
      [B, T, E] before the final norm, and the keys and values of every layer.
    """
    length, step = x.shape[1], len(earlier)
    places = jnp.arange(length)
    ago = places[:, None] - places[None]
    blocks = [ago >= step, *(ago == step - later for later in range(1, step + 1))]
    blocks = jnp.broadcast_to(
      jnp.concatenate(blocks, axis=-1), (len(x), length, (step + 1) * length)
    )
    prefix = jnp.broadcast_to(mask[:, None], (len(x), length, mask.shape[1]))
    bias = layers.mask_bias(jnp.concatenate([prefix, blocks], axis=-1))[:, None]
    at = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None] + places[None]
    by, entries = llama.rotations(self.config, at)[0], []
    for index, layer in enumerate(self.layers):
      before = [prompt[index], *(entries_of[index] for entries_of in earlier)]
      arguments = (x, by, bias, None, None, before)
      x, new = layers.traced_once(layer, type(layer).__call__, *arguments)
      entries.append(new)
    return x, entries


class Eagle(nn.Module):
  """A head; with `serving` it runs the copy that `prepare` made."""

  config: EagleConfig
  target: LlamaConfig
  serving: DraftServing | None = None

  def setup(self):
    inner, config = self.config.decoder(self.target), self.config
    layout = base.Layout.TRAINED if self.serving is None else self.serving.layout
    dtype, epsilon = jnp.dtype(inner.dtype), inner.norm_epsilon
    width = len(config.state_layers) * self.target.width
    self.fc = layers.Projection((width, inner.width), ("embed", "embed"), dtype, layout)
    if config.state_norm == "joined":
      self.joined_norm = layers.RMSNorm(dtype, epsilon)
    if config.state_norm == "each":
      self.state_norms = [layers.RMSNorm(dtype, epsilon) for _ in config.state_layers]
    self.decoder = Decoder(
      inner, layout, own_head=True, norm_before_residual=config.norm_before_residual
    )

  def prefill(self, frozen, prompt, mask, cache_length: int) -> cache_lib.KVCache:
    """See `base.Model.prefill`; takes prompts [B, S] and states [B, S, layers * E]."""
    source, states = prompt
    entries, attended, newest = self._read(frozen, source, states, mask)
    cache = cache_lib.KVCache.joined(entries, attended, cache_length)
    shape = (len(source), 1, self.config.layers.width)
    outputs = jnp.zeros(shape, jnp.dtype(self.target.dtype))
    return cache.replace(target_states=newest, token_states=outputs)

  def decode(self, frozen, tokens, cache: cache_lib.KVCache, states=None):
    """See `base.Model.decode` and `base.Model.reads_tokens`."""
    before = cache.token_states
    if states is not None:
      # The state before the first input is that of a token of the prompt.
      slot = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
      newest = jnp.asarray(cache.target_states)
      before = self._fused(jnp.where(slot[..., None] == 0, newest, states))
    is_token = tokens != base.NO_TOKEN
    x = jnp.where(is_token[..., None], self._inputs(frozen, tokens, before), 0)
    x, cache = self.decoder.step(x, cache, is_token)
    normed, outputs = self._outputs(x)
    logits = self._wide(self.decoder.logits_dense(normed))
    if "ids" in frozen:
      logits = served.scatter_to_vocab(logits, frozen["ids"], self.target.vocab_size)
    return logits, cache.replace(token_states=outputs)

  def score_steps(
    self,
    frozen,
    prompt,
    mask,
    inputs,
    positions=None,
    tokens=None,
    token_states=None,
    steps: int = 1,
  ):
    """See `base.Model.score_steps`; `inputs` are decoder inputs, not targets."""
    assert token_states is not None
    source, states = prompt
    read, attended, newest = self._read(frozen, source, states, mask)
    known = jnp.concatenate([newest, token_states[:, :-1]], axis=1)
    before, logits, entries = self._fused(known), [], []
    for _ in range(steps):
      x = self._inputs(frozen, inputs, before)
      x, new = self.decoder.after(x, read, attended, entries)
      entries.append(new)
      normed, outputs = self._outputs(x)
      before = shifted(outputs)
      if positions is not None:
        normed = jnp.take_along_axis(normed, positions[..., None], axis=1)
      logits.append(self._scores(frozen, normed, tokens))
    return jnp.stack(logits)

  def _read(self, frozen, source, states, mask):
    """Reads prompts with all but their last token, which is fed to decoding.

    Returns:
      Per layer, keys and values [B, KV heads, S, D]; which of them may be attended to,
      [B, S] bool; and the target's state before the last token, [B, 1, layers * E].
    """
    states, known = shifted(states), llama.without_first(mask)
    x = self._inputs(frozen, source, self._fused(states))
    entries, _ = self.decoder.prefill(jnp.where(known[..., None], x, 0), known)
    last = mask & ~llama.without_last(mask)
    # A prompt of one token has no state before it.
    newest = jnp.sum(jnp.where((last & known)[..., None], states, 0), axis=1)
    return entries, llama.without_last(known), newest[:, None]

  def _fused(self, states):
    """The head's view [B, n, E] of the target's states [B, n, layers * E]."""
    states = states.astype(jnp.dtype(self.target.dtype))
    if self.config.state_norm == "joined":
      states = self.joined_norm(states)
    if self.config.state_norm == "each":
      parts = jnp.split(states, len(self.config.state_layers), axis=-1)
      parts = [norm(part) for norm, part in zip(self.state_norms, parts, strict=True)]
      states = jnp.concatenate(parts, axis=-1)
    return self.fc(states)

  def _inputs(self, frozen, tokens, before):
    dtype = jnp.dtype(self.target.dtype)
    embedded = layers.rows_of(frozen["embedding"], tokens, dtype)
    return jnp.concatenate([embedded, before.astype(dtype)], axis=-1)

  def _outputs(self, x):
    """Outputs for the head, and the states before the tokens of the next step."""
    normed = self.decoder.decoder_norm(x)
    return normed, normed if self.config.norm_output else x

  def _wide(self, logits):
    return logits.astype(layers.at_least_float32(logits.dtype))

  def _scores(self, frozen, x, tokens):
    """Finite logits [B, n, V], or [B, n, C] if tokens [C] are given."""
    head = self.decoder.logits_dense
    if "ids" not in frozen:
      return self._wide(head(x, tokens))
    ids = frozen["ids"]
    place = jnp.full(self.target.vocab_size, -1, jnp.int32)
    place = place.at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
    if tokens is None:
      logits = self._wide(head(x))[..., jnp.maximum(place, 0)]
    else:
      place = place[tokens]
      logits = self._wide(head(x, jnp.maximum(place, 0)))
    covered = place >= 0
    # If no token is covered, all are equal.
    logits = jnp.where(covered, logits, jnp.where(jnp.any(covered), -jnp.inf, 0.0))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.where(covered, logits, total - MISSING)


def shifted(states: jax.Array) -> jax.Array:
  """The states [B, n, E] before each token, from those after it."""
  return jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def frozen_of(
  config: EagleConfig,
  target: ModelConfig,
  params: base.Params,
  own: base.Params,
) -> base.Params:
  """The parameters of a head that are not trained, from the target's params.

  `own` are those of the head's file: "embedding" [V, E] if it is not the target's, and
  "ids" [draft vocabulary] int32, increasing, if that is not the whole vocabulary.
  """
  embedding = own.get("embedding", params["token_embedder"]["embedding"])
  dtype = jnp.dtype(target.dtype)
  frozen = {
    "embedding": layers.stored(jnp.asarray(embedding), dtype),
    "encoder": families.encoder_params(target, params, config.state_layers),
  }
  if "ids" in own:
    frozen["ids"] = jnp.asarray(own["ids"], jnp.int32)
  return frozen


def init_arguments(config: EagleConfig, target: ModelConfig) -> tuple[Any, ...]:
  """Arguments of `Eagle.score_steps` for `served.initializers`."""
  token = np.zeros((1, 1), np.int32)
  states = np.zeros((1, 1, len(config.state_layers) * target.width), np.float32)
  table = np.zeros((2, config.layers.width), jnp.dtype(target.dtype))
  return ({"embedding": table}, (token, states), token == 0, token, None, None, states)


def expected_shapes(
  config: EagleConfig, target: LlamaConfig
) -> dict[str, tensors_lib.Shape]:
  """Path -> shape of the trained parameters."""
  module, arguments = Eagle(config, target), init_arguments(config, target)
  init = served.initializers(module, *arguments, method="score_steps")["init"]
  return tensors_lib.shapes(jax.eval_shape(init, jax.random.key(0)))


def first_ids(config: EagleConfig, ends: Sequence[int]) -> np.ndarray | None:
  """The draft vocabulary of a new head: the lowest ids and the ends of a sequence.

  None if it covers all tokens.
  """
  count = config.draft_vocab_size
  if count == config.layers.vocab_size:
    return None
  return np.sort(np.asarray(served.first_tokens(count, ends)))


def begun(
  config: EagleConfig, target: Any, params: base.Params, ids: np.ndarray | None
) -> base.Params:
  """A new head that starts from the target's output head, if both have one width.

  `target` are the weights of the target, with the parameters as `read_params` returns
  them, and `params` random ones of the head. A random output head would have to learn
  the vocabulary first.
  """
  dense = target.params["decoder"].get("logits_dense")
  table = target.params["token_embedder"]["embedding"]
  rows = table if dense is None else dense["kernel"].T
  if rows.shape[1] != config.layers.width:
    return params
  kernel = jnp.asarray(rows if ids is None else rows[ids], jnp.float32).T
  scale = target.params["decoder"]["decoder_norm"]["scale"]
  scale = jnp.asarray(scale, jnp.float32) + target.config.unit_offset_norms
  norms = {"decoder_norm": {"scale": scale}, "logits_dense": {"kernel": kernel}}
  return {**params, "decoder": {**params["decoder"], **norms}}
