"""Shapes of every family and draft form, and a runner that scores and decodes them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from models import tiny

from osd_jax import testing
from osd_jax.models import attached, eagle, families
from osd_jax.models.shapes import (
  EXACT_SERVING,
  AttachedConfig,
  EagleConfig,
  RopeScaling,
)

ROWS, SOURCE, TARGET, ROOM = 3, 7, 6, 4
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
LLAMA = testing.TINY_LLAMA
DRAFT = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
HEAD = EagleConfig(
  layers=dataclasses.replace(LLAMA, num_layers=1),
  draft_vocab_size=64,
  state_layers=(0, 1, 2),
  state_norm="joined",
)
SCALED = RopeScaling(factor=4.0, original_positions=64)
LLAMAS = {
  "llama": dataclasses.replace(LLAMA, rope_scaling=SCALED, rope_theta=500.0),
  "qwen2": dataclasses.replace(
    LLAMA, num_kv_heads=4, attention_bias=True, tied_head=True
  ),
  # The large epsilon makes a difference if it is not passed to every norm.
  "qwen3": dataclasses.replace(
    LLAMA, query_key_norm=True, norm_epsilon=1e-3, attention_bias=True, output_bias=True
  ),
  "gemma": tiny.GEMMA,
  # Without a cap on attention logits, the native attention computes its windows.
  "gemma 3": dataclasses.replace(tiny.GEMMA, windows=(0, 3), attention_cap=0.0),
}
T5S = {
  "t5 1.1": tiny.CONFIG,
  "t5 1.0": dataclasses.replace(
    tiny.CONFIG, mlp_activations=("relu",), tied_head=True, num_decoder_layers=1
  ),
}
ALONE = {**T5S, **LLAMAS, "t5gemma": tiny.T5GEMMA}
# (shape of the target, shape of the draft)
ATTACHED = {
  "attached to t5": (testing.TINY_T5, DRAFT),
  "attached to tied t5": (
    dataclasses.replace(testing.TINY_T5, tied_head=True),
    dataclasses.replace(DRAFT, num_layers=2),
  ),
  "attached to t5gemma": (tiny.T5GEMMA, DRAFT),
  "attached to llama": (dataclasses.replace(LLAMA, logit_cap=2.0), DRAFT),
  "attached to a first layer": (
    dataclasses.replace(LLAMA, tied_head=True, state_layer=1),
    DRAFT,
  ),
  "reads the tokens of t5": (
    testing.TINY_T5,
    dataclasses.replace(DRAFT, num_layers=2, reads="tokens"),
  ),
  "reads the tokens of llama": (LLAMA, dataclasses.replace(DRAFT, reads="tokens")),
  "eagle of llama": (LLAMA, HEAD),
  "eagle of qwen3": (
    dataclasses.replace(LLAMA, num_layers=3),
    dataclasses.replace(
      HEAD,
      layers=dataclasses.replace(HEAD.layers, query_key_norm=True, num_layers=2),
      state_layers=(1, 3),
      norm_before_residual=True,
      state_norm="each",
      norm_output=True,
    ),
  ),
}
CASES = [*ALONE, *ATTACHED]

score_at = jax.jit(lambda model, *a, **k: model.score_at(*a, **k), static_argnums=0)
decode = jax.jit(lambda model, *a: model.decode(*a), static_argnums=0)
prefill = jax.jit(lambda model, *a: model.prefill(*a), static_argnums=(0, 4))


class Runner:
  """A model with noisy parameters and a batch of prompts and texts.

  Attributes:
    shape: shape of the model, or of the target of an attached draft.
    target: the target of an attached draft, or the model itself.
    model: the model that is scored and decoded.
  """

  def __init__(self, name, serving=EXACT_SERVING, **changes):
    shape, draft = ATTACHED[name] if name in ATTACHED else (ALONE[name], None)
    self.shape = dataclasses.replace(shape, **changes)
    self.is_attached = draft is not None
    if self.is_attached:
      self.target = families.build(self.shape, "target", states=draft.reads)
      self.target_params = _noisy(self.target, 0)
      self.model = attached.build(draft, self.shape, "draft", serving)
      frozen = frozen_of(draft, self.shape, self.target_params, serving)
      self.params = self.model.join(_noisy(self.model, 1), frozen)
    else:
      self.target = self.model = families.build(self.shape, serving=serving)
      self.target_params = self.params = _noisy(self.model, 0)
    self.source, self.mask = testing.random_sources(
      ROWS, SOURCE, 64, seed=1, pad_id=self.model.pad_id
    )
    text = np.random.default_rng(2).integers(2, 64, (ROWS, TARGET))
    self.text = text.astype(np.int32)

  @property
  def close(self):
    """Tolerances after another sum in a target that rounds its states to bfloat16."""
    return {"rtol": 2e-2, "atol": 5e-2} if self.is_attached else CLOSE

  @property
  def fed(self):
    """The inputs of decoding: the first input, then the text but its last token."""
    first = np.asarray(self.target.starts(jnp.asarray(self.source)))
    return np.concatenate([first[:, None], self.text[:, :-1]], axis=1)

  def target_states(self, source=None):
    source = self.source if source is None else source
    served = self.target.prepare(self.target_params)
    mask = self.model.mask(source)
    return prefill(self.target, served, source, mask, 4).target_states

  def score(
    self, source=None, mask=None, text=None, params=None, at=(None, None), **states
  ):
    """Logits of the texts, at (positions, tokens) if they are given."""
    source = self.source if source is None else source
    mask = self.model.mask(source) if mask is None else mask
    text = self.text if text is None else text
    if self.is_attached:
      states.setdefault("target_states", self.target_states(source))
    if self.model.reads_tokens:
      states.setdefault("token_states", self.token_states)
    params = self.params if params is None else params
    return np.asarray(score_at(self.model, params, source, mask, text, *at, **states))

  @functools.cached_property
  def token_states(self):
    """The target's states before the tokens of the texts."""
    given = (self.target_params, self.source, self.mask, self.text)
    return jax.jit(self.target.score_with_states)(*given)[1]

  def states_at(self, at, rows=slice(None)):
    """The states that `decode` takes with some inputs, as arguments."""
    if not self.model.reads_tokens:
      return ()
    first = np.zeros_like(np.asarray(self.token_states[:, :1], np.float32))
    before = np.concatenate([first, self.token_states[:, :-1]], axis=1)
    return (before[rows, at],)

  @functools.cached_property
  def forced(self):
    """Teacher-forced logits [B, T, V] of the texts."""
    return self.score()

  def served(self, *shortlist):
    return self.model.prepare(self.params, *shortlist)

  def start(self, source=None, served=None):
    """The cache after prefill."""
    source = self.source if source is None else source
    states = self.target_states(source) if self.is_attached else None
    read = self.model.prompt_of(source, states)
    served = self.served() if served is None else served
    mask = self.model.mask(source)
    return prefill(self.model, served, read, mask, TARGET + ROOM)

  def feed(self, stride, source=None, served=None, fed=None):
    """Feeds `stride` tokens per call; returns logits [B, T, V] and the cache."""
    served = self.served() if served is None else served
    cache, fed, rows = self.start(source, served), self.fed if fed is None else fed, []
    for start in range(0, TARGET, stride):
      part = fed[:, start : start + stride]
      states = self.states_at(slice(start, start + stride))
      logits, cache = decode(self.model, served, part, cache, *states)
      rows.append(logits)
    return np.concatenate(rows, axis=1), cache


def frozen_of(draft, shape, target_params, serving=EXACT_SERVING):
  """The target's part of an attached draft."""
  if isinstance(draft, EagleConfig):
    return eagle.frozen_of(draft, shape, target_params, {})
  return attached.frozen_of(shape, target_params, serving)


def _noisy(model, seed):
  return jax.tree.map(jnp.asarray, tiny.random_params(model, seed))
