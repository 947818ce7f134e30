"""Two models that take turns by a coin, token by token: the paper's `mix_token`."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from osd_jax import base

_FACTOR = 16777619  # of the FNV-1a hash


@flax.struct.dataclass
class MixtureCache:
  """What both models remember.

  Attributes:
    target: the target's cache.
    draft: the draft's cache.
    fingerprint: [B] uint32; hash of the row's prompt, which its coins depend on.
    length: [B] int32; tokens fed; the caches inside follow it.
  """

  target: Any
  draft: Any
  fingerprint: jax.Array
  length: jax.Array


@functools.cache
def mix(
  target: base.Model, draft: base.Model, draft_share: float, seed: int
) -> base.Model:
  """A model whose every next token comes from the target or from the draft.

  Its parameters are `{"target": ..., "draft": ...}`. The coin of a token is a function
  of (seed, prompt, position): a text depends neither on the row it is decoded in nor
  on its batch mates.

  Args:
    target: the target model.
    draft: the draft model, with the same vocabulary.
    draft_share: probability that the draft gives a token.
    seed: of the coins.
  """
  from_draft = functools.partial(_coins, seed, draft_share)
  both = functools.partial(_both, target, draft)

  def prefill(served, source, mask, cache_length):
    return MixtureCache(
      target=target.prefill(served["target"], source, mask, cache_length),
      draft=draft.prefill(served["draft"], source, mask, cache_length),
      fingerprint=fingerprint(source, target.pad_id),
      length=jnp.zeros(source.shape[0], jnp.int32),
    )

  def decode(served, tokens, cache):
    inner = [c.replace(length=cache.length) for c in (cache.target, cache.draft)]
    target_logits, target_cache = target.decode(served["target"], tokens, inner[0])
    draft_logits, draft_cache = draft.decode(served["draft"], tokens, inner[1])
    position = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    coins = from_draft(cache.fingerprint, position)
    logits = jnp.where(coins[..., None], draft_logits, target_logits)
    length = cache.length + tokens.shape[1]
    return logits, MixtureCache(target_cache, draft_cache, cache.fingerprint, length)

  def score(params, source, mask, tokens):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    coins = from_draft(fingerprint(source, target.pad_id), position)
    target_logits = target.score(params["target"], source, mask, tokens)
    draft_logits = draft.score(params["draft"], source, mask, tokens)
    return jnp.where(coins[..., None], draft_logits, target_logits)

  return base.Model(
    name=f"mixture of {target.name} and {draft.name}",
    vocab_size=target.vocab_size,
    init=lambda key: both(lambda model, _: model.init(key)),
    prefill=prefill,
    decode=decode,
    score=score,
    prepare=lambda params: both(lambda model, name: model.prepare(params[name])),
    logical_axes=lambda: both(lambda model, _: model.logical_axes()),
    eos_ids=target.eos_ids,
    pad_id=target.pad_id,
    start=target.start,
    max_positions=target.max_positions,
  )


def fingerprint(source: jax.Array, pad_id: int = base.PAD_ID) -> jax.Array:
  """A hash of every prompt that does not depend on its padding.

  Args:
    source: [B, S] int32, padded.
    pad_id: with what.

  Returns:
    [B] uint32
  """

  def add(digest, token):
    mixed = (digest ^ token.astype(jnp.uint32)) * jnp.uint32(_FACTOR)
    return jnp.where(token == pad_id, digest, mixed), None

  start = jnp.full(source.shape[0], 2166136261, jnp.uint32)
  return jax.lax.scan(add, start, source.T)[0]


def _coins(seed: int, draft_share: float, prompt: jax.Array, position: jax.Array):
  """Whether the draft gives a token, [B, n] bool."""

  def one(prompt, position):
    key = jax.random.fold_in(jax.random.key(seed), prompt)
    return jax.random.uniform(jax.random.fold_in(key, position)) < draft_share

  return jax.vmap(lambda p, row: jax.vmap(lambda at: one(p, at))(row))(prompt, position)


def _both(target: base.Model, draft: base.Model, function: Any) -> dict[str, Any]:
  return {"target": function(target, "target"), "draft": function(draft, "draft")}
