"""The paper's mixed text sources: target and draft take turns, drawn at random."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, corpus, pairs
from osd_jax.cache import KVCache


def writer(
  source: corpus.TextSource, pair: pairs.Pair, count: int
) -> tuple[np.ndarray, pairs.Pair]:
  """Returns which prompts the second writer answers, [count] bool, and that writer.

  It is the draft for "mix_request", which draws one of the two for each prompt, and the
  token mix for "mix_token". The target answers all other prompts.
  """
  if source.sample_source == "mix_request":
    # A function of the seed and the index: a continued run makes the same texts.
    draws = np.random.default_rng([source.seed, 1]).random(count)
    return draws < source.mix_share, corpus.draft_alone(pair)
  mixed = mix(pair.target, pair.draft, source.mix_share, source.seed)
  params = {"target": pair.target_params, "draft": pair.draft_params}
  whole = dataclasses.replace(pair, target=mixed, target_params=params)
  return np.ones(count, bool), whole


@flax.struct.dataclass
class MixtureCache:
  """The caches of both models."""

  target: KVCache  # cache of the target
  draft: KVCache  # cache of the draft
  # [B] uint32; hash of the row's prompt, which seeds its random draws.
  fingerprint: jax.Array
  # [B] int32; tokens fed. It overrides the lengths of the two caches, so that rewinding
  # the mixture rewinds both.
  length: jax.Array


@functools.cache
def mix(
  target: base.Model, draft: base.Model, draft_share: float, seed: int
) -> base.Model:
  """A model that takes each next-token distribution from the target or the draft.

  Its parameters are `{"target": ..., "draft": ...}`. The draft's distribution is taken
  with probability `draft_share`. The choice at a position is a function of (seed,
  prompt, position), so that a text depends neither on its row nor on the other rows of
  the batch.
  """
  models = {"target": target, "draft": draft}

  def mixed(logits, prompts, position):
    """Selects from {"target", "draft"} -> logits [B, n, V] at positions [B, n]."""

    def from_draft(prompt, position):
      # No generator state is carried, so teacher forcing repeats decoding's choices.
      key = jax.random.fold_in(jax.random.key(seed), prompt)
      return jax.random.uniform(jax.random.fold_in(key, position)) < draft_share

    # Both models decode every token, so that both caches stay complete.
    rows = jax.vmap(jax.vmap(from_draft, in_axes=(None, 0)))(prompts, position)
    return jnp.where(rows[..., None], logits["draft"], logits["target"])

  def prefill(served, source, mask, cache_length):
    caches = {
      name: model.prefill(served[name], source, mask, cache_length)
      for name, model in models.items()
    }
    prompts = fingerprint(source, target.pad_id)
    return MixtureCache(
      fingerprint=prompts, length=jnp.zeros(prompts.shape, jnp.int32), **caches
    )

  def decode(served, tokens, cache):
    logits, caches = {}, {}
    for name, model in models.items():
      inner = getattr(cache, name).replace(length=cache.length)
      logits[name], caches[name] = model.decode(served[name], tokens, inner)
    position = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    length = cache.length + tokens.shape[1]
    logits_here = mixed(logits, cache.fingerprint, position)
    return logits_here, cache.replace(length=length, **caches)

  def score(params, source, mask, tokens):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    logits = {
      name: model.score(params[name], source, mask, tokens)
      for name, model in models.items()
    }
    return mixed(logits, fingerprint(source, target.pad_id), position)

  def prepare(params):
    return {name: model.prepare(params[name]) for name, model in models.items()}

  return base.Model(
    name=f"mixture of {target.name} and {draft.name}",
    vocab_size=target.vocab_size,
    init=lambda key: {name: model.init(key) for name, model in models.items()},
    prefill=prefill,
    decode=decode,
    score=score,
    prepare=prepare,
    logical_axes=lambda: {name: m.logical_axes() for name, m in models.items()},
    eos_ids=target.eos_ids,
    pad_id=target.pad_id,
    start=target.start,
    start_id=target.start_id,
    max_positions=target.max_positions,
  )


def fingerprint(source: jax.Array, pad_id: int = base.PAD_ID) -> jax.Array:
  """FNV-1a hash of prompts [B, S], ignoring padding; [B] uint32."""

  def add(digest, token):
    mixed = (digest ^ token.astype(jnp.uint32)) * jnp.uint32(16777619)
    return jnp.where(token == pad_id, digest, mixed), None

  start = jnp.full(source.shape[0], 2166136261, jnp.uint32)
  return jax.lax.scan(add, start, source.T)[0]
