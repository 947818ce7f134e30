"""Systems to measure: models of published shapes with random weights, and prompts."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.engine import engine
from osd_jax.engine.requests import DecodingConfig, Finished, Request
from osd_jax.models import families, shapes
from osd_jax.models.families import ModelConfig
from osd_tools import sizes

WHOLE = shapes.DraftServing()  # the full draft: no shortlist, no 8 bits
TINY = shapes.T5Config(
  vocab_size=256,
  width=32,
  num_heads=2,
  head_dim=16,
  mlp_dim=64,
  num_encoder_layers=2,
  num_decoder_layers=2,
  mlp_activations=("gelu", "linear"),
  tied_head=False,
)


def shape(name: str) -> ModelConfig:
  """Returns a published shape, or the tiny shape that tests use."""
  return TINY if name == "tiny" else sizes.size(name)


def random_model(
  config: ModelConfig, seed: int = 0, serving: shapes.DraftServing = WHOLE
) -> tuple[base.Model, base.Params]:
  """Returns a model with random weights that never emits end-of-sequence.

  Args:
    config: shape of the model.
    seed: seed of the weights.
    serving: how a draft is served, for example with a shortlist.
  """
  model = families.build(config, "random", serving)
  params = jax.jit(model.init)(jax.random.key(seed))
  # Among many random logits, a logit of 0 is never the largest.
  ends = np.asarray(model.eos_ids)
  if not config.tied_head:
    head = params["decoder"]["logits_dense"]
    head["kernel"] = head["kernel"].at[:, ends].set(0.0)
  elif not isinstance(config, shapes.T5Config):
    table = params["token_embedder"]
    table["embedding"] = table["embedding"].at[ends].set(0.0)
  return model, params


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> np.ndarray:
  """Returns random prompts [count, length] int32 without special tokens."""
  rng = np.random.default_rng(seed)
  return rng.integers(3, vocab_size, (count, length)).astype(np.int32)


def step_bytes(config: ModelConfig, rows: int, source: int, target: int) -> int:
  """Returns the bytes that one float32 decoding step has to read.

  Counts decoder weights, output head and key/value caches. Leaves out the embedding,
  since a step reads only one of its rows, and the kernels of T5's cross-attention keys
  and values, which only prefill uses.

  Args:
    config: shape of the model.
    rows: B; caches are per row.
    source: S.
    target: mean number of self-attention entries.
  """
  joined = config.num_heads * config.head_dim
  if not isinstance(config, shapes.T5Config):
    of_keys = config.num_kv_heads * config.head_dim
    layer = config.width * (2 * joined + 2 * of_keys + 3 * config.mlp_dim)
    caches = rows * 2 * of_keys * (source + target)
    return 4 * (config.num_layers * (layer + caches) + config.width * config.vocab_size)
  attention = 6 * config.width * joined  # self q, k, v, o; cross q, o
  mlp = (len(config.mlp_activations) + 1) * config.width * config.mlp_dim
  head = config.width * config.vocab_size
  caches = rows * 2 * joined * (source + target)
  layers = config.num_decoder_layers
  return 4 * (layers * (attention + mlp + caches) + head)


@flax.struct.dataclass
class Scripts:
  """Parameters of a scripted draft.

  Attributes:
    params: parameters of the draft that runs in full.
    sources: [N, S] int32 prompts, padded.
    tokens: [N, T] int32 tokens to draft for each prompt.
  """

  params: Any
  sources: jax.Array
  tokens: jax.Array


@flax.struct.dataclass
class ScriptedCache:
  """The draft's cache and the script of each row.

  Attributes:
    inner: the draft's own cache.
    script: [B, T] int32.
    length: [B] int32.
  """

  inner: Any
  script: jax.Array
  length: jax.Array


@functools.cache
def scripted(draft: base.Model) -> base.Model:
  """Returns a draft whose most likely token is always the scripted one.

  The draft runs in full, head included; then the scripted token of the position gets
  the largest logit. Its params are `Scripts`.
  """

  def prefill(served, source, mask, cache_length):
    width = source.shape[1]
    same = jnp.all(served.sources[None, :, :width] == source[:, None], axis=-1)
    inner = draft.prefill(served.params, source, mask, cache_length)
    return ScriptedCache(inner, served.tokens[jnp.argmax(same, -1)], inner.length)

  def decode(served, tokens, cache):
    logits, inner = draft.decode(
      served.params, tokens, cache.inner.replace(length=cache.length)
    )
    last = cache.script.shape[1] - 1
    at = jnp.minimum(cache.length[:, None] + jnp.arange(tokens.shape[1])[None], last)
    token = jnp.take_along_axis(cache.script, at, axis=1)[..., None]
    top = jnp.max(logits, axis=-1, keepdims=True) + 1.0
    logits = jnp.put_along_axis(logits, token, top, axis=-1, inplace=False)
    return logits, ScriptedCache(inner, cache.script, inner.length)

  return dataclasses.replace(
    draft,
    name=f"scripted {draft.name}",
    prefill=prefill,
    decode=decode,
    prepare=lambda scripts, *shortlist: scripts.replace(
      params=draft.prepare(scripts.params, *shortlist)
    ),
  )


def corrupted(
  tokens: np.ndarray, alpha: float, vocab_size: int, seed: int = 0
) -> np.ndarray:
  """Replaces each token of a continuation with probability 1 - alpha.

  Args:
    tokens: [N, T] int32, the target's own greedy continuation.
    alpha: probability that a token stays right.
    vocab_size: V.
    seed: seed of the choice; the same for all systems that are compared.
  """
  rng = np.random.default_rng(seed)
  wrong = rng.random(tokens.shape) >= alpha
  other = 3 + (tokens - 3 + rng.integers(1, vocab_size - 3, tokens.shape)) % (
    vocab_size - 3
  )
  return np.where(wrong, other, tokens).astype(np.int32)


class Ours:
  """Requests of one shape, answered by osd_jax.

  Attributes:
    tokens: output tokens per call.
  """

  def __init__(self, decoder: engine.Engine, sources: np.ndarray):
    """Answers all `sources` [N, S] at each call."""
    self._decoder = decoder
    self._requests = [Request(tokens=source) for source in sources]
    self.tokens = len(sources) * decoder.config.target_length

  def __call__(self) -> list[Finished]:
    answers = self._decoder.run(self._requests)
    assert sum(len(answer.tokens) for answer in answers) == self.tokens
    return answers


def decoding(rows: int, source: int, target: int, drafted: int) -> DecodingConfig:
  """Returns a decoding config without records."""
  return DecodingConfig(
    rows=rows,
    num_draft_tokens=drafted,
    source_lengths=(source,),
    target_length=target,
    record_top_k=0,
    max_rounds=target,
  )
