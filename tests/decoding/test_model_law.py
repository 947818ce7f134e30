"""Sampled outputs of whole models have the target's law with every kind of draft.

test_law.py tests tables of logits with all settings and planted faults. Here models
read a prompt. The drafts are independent or attached to the target, and are replaced
while every row is in the middle of its request.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoding import harness
from models import tiny

from osd_jax import base, testing
from osd_jax.decoding import accept, drafters, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.models import attached, eagle, families
from osd_jax.models.shapes import AttachedConfig, DraftServing, EagleConfig

pytestmark = pytest.mark.usefixtures("full_optimization")

ROWS, LENGTH, DRAFTED, VOCAB = 20_000, 3, 2, 12
THRESHOLD = 1e-6
SAMPLED = {"temperature": 1.2, "top_k": 8, "top_p": 1.0}
FAMILIES = {
  "t5": (testing.TINY_T5, testing.TINY_DRAFT),
  "llama": (testing.TINY_LLAMA, testing.TINY_LLAMA_DRAFT),
}
# Three tokens are outside its vocabulary.
HEAD = EagleConfig(
  layers=dataclasses.replace(testing.TINY_LLAMA, num_layers=1, vocab_size=VOCAB),
  draft_vocab_size=9,
  state_layers=(0, 1, 2),
)
ATTACHED = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)


def shape_of(family, draft=False):
  return dataclasses.replace(FAMILIES[family][draft], vocab_size=VOCAB)


@functools.cache
def target_of(family, kind=""):
  """The target, its parameters, and a prompt [1, S] with its mask."""
  states = "tokens" if kind != "layers" else HEAD.reads
  model = families.build(shape_of(family), "target", states=states)
  source, mask = testing.random_sources(1, 7, VOCAB, 5, model.pad_id)
  return model, tiny.random_params(model, 0), source, mask


@functools.cache
def draft_of(family, kind, seed):
  """A draft of random weights and its parameters."""
  if kind == "independent":
    model = families.build(shape_of(family, draft=True), "draft")
    return model, tiny.random_params(model, seed)
  params = target_of(family, kind)[1]
  if kind == "layers":
    model = attached.build(HEAD, shape_of(family), "head")
    frozen = eagle.frozen_of(HEAD, shape_of(family), params, {"ids": np.arange(1, 10)})
    return model, model.join(tiny.random_params(model, seed), frozen)
  shape = dataclasses.replace(ATTACHED, reads="prompt" if kind == "attached" else kind)
  model = attached.build(shape, shape_of(family), "draft")
  frozen = attached.frozen_of(shape_of(family), params, DraftServing())
  return model, model.join(tiny.random_params(model, seed), frozen)


def law(family):
  """The exact law [V] * LENGTH of the first tokens, from teacher-forced logits."""
  model, params, source, mask = target_of(family)
  every = np.stack(np.meshgrid(*[np.arange(VOCAB)] * 2, indexing="ij"), -1)
  fed = np.pad(every.reshape(-1, 2), ((0, 0), (0, 1)), constant_values=2)
  repeat = lambda array: np.repeat(array, len(fed), axis=0)
  logits = jax.jit(model.score)(params, repeat(source), repeat(mask), fed)
  logits = np.asarray(logits, np.float64).reshape(VOCAB, VOCAB, LENGTH, VOCAB)
  first = oracles.processed_probs(logits[0, 0, 0], **SAMPLED)
  found = np.zeros((VOCAB,) * LENGTH)
  for a in np.flatnonzero(first):
    second = after(a == base.EOS_ID, logits[a, 0, 1])
    for b in np.flatnonzero(second):
      ended = base.EOS_ID in (a, b)
      found[a, b] = first[a] * second[b] * after(ended, logits[a, b, 2])
  return found


def after(ended, logits):
  """The law of the next token, which is padding after an end."""
  if ended:
    return np.eye(len(logits))[base.PAD_ID]
  return oracles.processed_probs(logits, **SAMPLED)


def started(family, kind, rows, length, seed):
  """Rows of one prompt, what target and draft serve, and one row of their caches."""
  model, params, source, mask = target_of(family, kind)
  draft, draft_params = draft_of(family, kind, 1)
  served, draft_served = model.prepare(params), draft.prepare(draft_params)
  size = state_lib.buffer_length(length)
  one = harness.prefill(model, served, source, mask, size)
  read = draft.prompt_of(source, one.target_states)
  one_draft = harness.prefill(draft, draft_served, read, mask, size)
  state = state_lib.initial_state(
    model.starts(repeated(jnp.asarray(source), rows)),
    harness.settings_of(rows, max_length=length, seed=seed, **SAMPLED),
    repeated(one, rows),
    repeated(one_draft, rows),
    length,
    0,
    VOCAB,
  )
  return state, served, draft_served, one_draft


def repeated(tree, rows):
  return jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), tree)


def no_residual(right, proposal, accepted, residual, *others):
  return right(proposal, accepted, 0 * residual, *others)


RUN = harness.planted({"residual": (accept, "_recovered", None, no_residual)})


def drawn(family, kind, run, rule):
  """Tokens [ROWS, LENGTH] of one prompt; the draft is replaced after one round."""
  state, served, draft_served, _ = started(family, kind, ROWS, LENGTH, 11)
  model, draft = target_of(family)[0], draft_of(family, kind, 1)[0]
  go = functools.partial(
    harness.rounds, model, draft, DRAFTED, served, run=run, rule=rule
  )
  state = go(draft_served, state, limit=1)
  rejected = np.asarray(state.counters.drafted) > np.asarray(state.counters.accepted)
  assert 0.05 < rejected.mean() < 1  # rounds with and without a rejection occur
  other = draft.prepare(draft_of(family, kind, 2)[1])
  tokens = np.asarray(go(other, state).tokens[:, :LENGTH])
  ends = np.cumsum(tokens == base.EOS_ID, axis=1) - (tokens == base.EOS_ID)
  return np.where(ends > 0, base.PAD_ID, tokens)


def p_value(family, kind, rule, fault=None):
  counts = oracles.joint_counts(drawn(family, kind, RUN(fault), rule), VOCAB)
  return oracles.chi_square(counts, law(family))


@pytest.mark.parametrize(
  ("family", "kind", "rule"),
  [
    ("t5", "independent", "rejection"),
    ("t5", "attached", "rejection"),
    ("t5", "attached", "block"),
    ("llama", "independent", "rejection"),
    ("llama", "attached", "rejection"),
    ("llama", "tokens", "rejection"),
    ("llama", "layers", "rejection"),
    ("llama", "independent", "block"),
  ],
)
def test_law_is_the_targets_after_the_draft_is_replaced(family, kind, rule):
  assert p_value(family, kind, rule) > THRESHOLD


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_wrong_residual_fails_the_chi_square_test_of_models(rule):
  """Control: plants a wrong residual."""
  assert p_value("t5", "attached", rule, "residual") < THRESHOLD


def test_accepted_tokens_are_fed_again_with_the_states_of_the_target():
  """Otherwise the draft would go on from its own guesses of these states."""
  rows, length, drafted = 16, 12, 3
  state, served, draft_served, one_draft = started("llama", "tokens", rows, length, 3)
  model, draft = target_of("llama")[0], draft_of("llama", "tokens", 1)[0]
  go = functools.partial(harness.rounds, model, draft, drafted, served, draft_served)
  state = go(state, limit=3, until_all=False)
  running = np.asarray(state.stop_reason) == base.StopReason.RUNNING
  several = running & (np.asarray(state.counters.accepted) >= 2)
  assert several.any()
  drafter = drafters.ModelDrafter(draft)
  proposed = drafter.propose(
    draft_served, state.draft_cache, state, drafted, sampling.Purpose.DRAFT
  )[1]
  fed = state_lib.inputs_at(state, jnp.zeros(rows, jnp.int32), length)
  before = state.target_cache.token_states[:, : length - 1]
  states = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))
  _, expected = draft.decode(draft_served, fed, repeated(one_draft, rows), states)
  size = state_lib.buffer_length(length)
  known = np.arange(size)[None] <= np.asarray(state.length)[:, None]

  def apart(cache):
    found = np.abs(np.asarray(cache.self_keys[0] - expected.self_keys[0]))
    return np.max(np.where(known[:, None, :, None], found, 0.0), axis=(1, 2, 3))

  assert np.max(apart(proposed)[running]) < 1e-4
  # Control: keys of the draft's own steps are others.
  assert np.max(apart(state.draft_cache)[several]) > 1e-2
