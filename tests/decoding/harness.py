"""Helpers of the decoding tests: build prompts and states, run rounds, read outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from osd_jax import base, testing
from osd_jax.decoding import rounds as rounds_lib
from osd_jax.decoding import sampling
from osd_jax.decoding import state as state_lib
from osd_jax.models import families
from osd_jax.models.shapes import DraftServing

MANY = 10_000  # rounds; no test needs more
LIVELY = 3  # seed of the T5 target

# Tables use these shapes unless a test sets others, so each K compiles once.
TABLE_ROWS, TABLE_LENGTH = 6, 60

TARGET = families.build(testing.TINY_T5)
DRAFT = families.build(testing.TINY_DRAFT)
LLAMA = families.build(testing.TINY_LLAMA)
LLAMA_DRAFT = families.build(testing.TINY_LLAMA_DRAFT)
GEMMA = families.build(tiny.GEMMA)
T5GEMMA = families.build(tiny.T5GEMMA)
FAMILIES = {
  "t5": (TARGET, DRAFT),
  "llama": (LLAMA, LLAMA_DRAFT),
  "gemma": (GEMMA, LLAMA_DRAFT),
}


SHAPES = {TARGET: testing.TINY_T5, LLAMA: testing.TINY_LLAMA}

# A tabular model whose outputs depend on the prompt, used as target and as draft. It
# compiles in milliseconds. `test_families.py` runs T5 and Llama.
READER_VOCAB = 16
READER = testing.tabular_model(READER_VOCAB, "reader", reads_source=True)


@functools.cache
def reader_params(kind="target"):
  """Tables for `READER`: a target that sometimes ends, and drafts for it."""
  table = 2 * np.random.default_rng(5).normal(size=(READER_VOCAB,) * 3)
  noise = {"target": 0.0, "same": 0.0, "close": 0.5, "far": 1.5, "unrelated": 9.0}[kind]
  table = table + noise * np.random.default_rng(6).normal(size=table.shape)
  return jnp.asarray(table, jnp.float32)


def reader_sources(rows, length, seed):
  """Prompts of different lengths for `READER`, and their mask."""
  return testing.random_sources(rows, length, READER_VOCAB, seed)


def lighter(target, **left_out):
  """A draft of the target's shape, served with the given `DraftServing` options."""
  return families.build(SHAPES[target], "light", DraftServing(**left_out))


# These tests spend most of their time compiling. Without LLVM optimization that takes
# half as long and the programs compute the same. Tests with many samples turn it on.
QUICK = {"xla_backend_optimization_level": 0}


def jitted_rounds(quick=True):
  """A compiled `run_rounds` with its own cache, so that planted faults are traced."""
  return jax.jit(
    lambda *args: rounds_lib.run_rounds(*args),
    static_argnums=(0, 1),
    compiler_options=QUICK if quick else None,
  )


def planted(faults, quick=True):
  """Compiles `run_rounds` with faults patched in, of which a number selects one.

  A fault is (module, name in the module, attribute of that object or None, function).
  The function receives the right one as its first argument. Compiling a program for
  each fault would take most of the time of a test.

  Returns:
    A function that returns `run_rounds` with a fault of that name, or with none.
  """

  def switched(chosen, right, wrong):
    return lambda *args: jax.lax.cond(
      chosen, lambda: wrong(right, *args), lambda: right(*args)
    )

  def rounds_with_faults(number, *args):
    with pytest.MonkeyPatch.context() as patch:
      for index, (module, name, attribute, wrong) in enumerate(faults.values()):
        right = getattr(module, name)
        inner = right if attribute is None else getattr(right, attribute)
        new = switched(number == index, inner, wrong)
        if attribute is not None:
          new = Changed(right, **{attribute: new})
        patch.setattr(module, name, new)
      return rounds_lib.run_rounds(*args)

  options = QUICK if quick else None
  run = jax.jit(rounds_with_faults, static_argnums=(1, 2), compiler_options=options)
  numbers = {None: -1, **{name: index for index, name in enumerate(faults)}}
  return lambda fault=None: functools.partial(run, jnp.int32(numbers[fault]))


ROUNDS = jitted_rounds()
prefill = jax.jit(
  lambda model, served, source, mask, length: model.prefill(
    served, source, mask, length
  ),
  static_argnums=(0, 4),
)


def settings_of(rows, *, max_length, seed=0, **settings):
  """Sampling settings per row; a scalar applies to all rows, and seeds count up."""
  seed = seed + np.arange(rows) if np.ndim(seed) == 0 else seed
  arrays = sampling.make_settings(rows, max_length=max_length, seed=seed, **settings)
  return jax.tree.map(jnp.asarray, arrays)


def take(tree, rows):
  """Selects the given rows of every leaf."""
  return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], tree)


def start(
  target,
  served,
  source,
  mask,
  settings,
  length,
  draft=None,
  draft_served=None,
  record=0,
):
  """Returns prefilled rows that have emitted nothing; see `state.initial_state`."""
  size = state_lib.buffer_length(length)
  cache = prefill(target, served, source, mask, size)
  draft_cache = (
    None if draft is None else prefill(draft, draft_served, source, mask, size)
  )
  return state_lib.initial_state(
    target.starts(source),
    settings,
    cache,
    draft_cache,
    length,
    record,
    target.vocab_size,
    target.prompt_text(source),
  )


def rounds(
  target,
  draft,
  k,
  served,
  draft_served,
  state,
  *,
  limit=MANY,
  until_all=True,
  run=ROUNDS,
  rule="rejection",
):
  """Runs rounds of K = k until all rows have stopped or `limit` rounds passed.

  A call returns when any row stops. With `until_all=False` only one call is made.
  """
  spec = rounds_lib.DecodeSpec.of(target, draft, rule=rule)
  while True:
    before = int(jnp.max(state.counters.rounds))
    state = run(spec, k, served, draft_served, jnp.int32(limit), state)
    limit -= int(jnp.max(state.counters.rounds)) - before
    running = np.asarray(state.stop_reason) == base.StopReason.RUNNING
    if not until_all or limit <= 0 or not running.any():
      return state


def drafted_by(
  drafter,
  served,
  k,
  target,
  params,
  source,
  mask,
  settings,
  length,
  *,
  prices=None,
  run=ROUNDS,
  **more,
):
  """The final state of rows that a drafter drafts for; `more` is for `DecodeSpec`."""
  spec = rounds_lib.DecodeSpec(target, drafter, **more)
  state = start(target, params, source, mask, settings, length)
  size = state_lib.buffer_length(length)
  state = state.replace(draft_cache=drafter.init(served, source, None, size))
  while (np.asarray(state.stop_reason) == base.StopReason.RUNNING).any():
    state = run(spec, k, params, served, jnp.int32(MANY), state, prices)
  return state


def speculate(
  target,
  draft,
  k,
  served,
  draft_served,
  source,
  mask,
  settings,
  length,
  *,
  record=0,
  **kwargs,
):
  """Decodes prompts speculatively and returns the final state."""
  state = start(
    target, served, source, mask, settings, length, draft, draft_served, record
  )
  return rounds(target, draft, k, served, draft_served, state, **kwargs)


def plain(
  target, served, source, mask, settings, length, record=0, limit=MANY, **kwargs
):
  """Decodes prompts plainly (K = 0) and returns the final state."""
  state = start(target, served, source, mask, settings, length, record=record)
  return rounds(target, None, 0, served, None, state, limit=limit, **kwargs)


def outputs(state) -> list[list[int]]:
  """The emitted tokens of every row."""
  tokens, length = np.asarray(state.tokens), np.asarray(state.length)
  return [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]


def no_sources(rows):
  """Empty prompts, because tabular models read none."""
  return jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1), bool)


def tabular_rounds(k, target_table, draft_table, settings, length, **kwargs):
  """`speculate` for two tables of logits."""
  model = testing.tabular_model(target_table.shape[-1])
  return speculate(
    model,
    model,
    k,
    jnp.asarray(target_table),
    jnp.asarray(draft_table),
    *no_sources(settings.seed.shape[0]),
    settings,
    length,
    **kwargs,
  )


def tabular_steps(table, settings, length, **kwargs):
  """`plain` for a table of logits."""
  model = testing.tabular_model(table.shape[-1])
  return plain(
    model,
    jnp.asarray(table),
    *no_sources(settings.seed.shape[0]),
    settings,
    length,
    **kwargs,
  )


def table_settings(**settings):
  """Settings for `table_rounds`, with at most TABLE_LENGTH tokens by default."""
  return settings_of(TABLE_ROWS, **{"max_length": TABLE_LENGTH, **settings})


def table_rounds(k, target_table, draft_table, settings, **kwargs):
  """`tabular_rounds` with the usual length and full records."""
  return tabular_rounds(
    k,
    target_table,
    draft_table,
    settings,
    TABLE_LENGTH,
    record=target_table.shape[-1],
    **kwargs,
  )


def draft_acceptance(state):
  """Accepted / drafted tokens over all rows."""
  counters = state.counters
  return np.sum(counters.accepted) / max(np.sum(counters.drafted), 1)


@functools.cache
def lively_params(model, seed=LIVELY):
  """Random weights whose greedy outputs vary and sometimes end.

  Plain random weights repeat one token. A large relative position bias (T5) or strong
  attention (Llama) prevents that. The weights come from numpy because compiling `init`
  takes seconds.
  """
  rng = np.random.default_rng(seed)

  def leaf(path, like):
    *_, owner, name = (key.key for key in path)
    if name == "scale":
      one = jnp.ones(like.shape)
      if model not in (GEMMA, T5GEMMA):
        return one
      return one * {"post_self_attention_layer_norm": 9.0}.get(owner, 0.0)
    std = like.shape[0] ** -0.5 if name == "kernel" else 1.0
    if model in (LLAMA, LLAMA_DRAFT, GEMMA, T5GEMMA):
      std *= {"query": 2.0, "out": 3.0}.get(owner, 1.0)
    else:
      std = {"query": std / 4, "relpos_bias": 2.5}.get(owner, std)
    return jnp.asarray(rng.normal(0, std, like.shape), jnp.float32)

  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(leaf, shapes)


def perturbed(params, scale, seed=0):
  """The parameters plus noise, for a draft that sometimes agrees with the target."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.tree.unflatten(
    tree,
    [
      leaf * (1 + scale * jax.random.normal(key, leaf.shape))
      for leaf, key in zip(leaves, keys, strict=True)
    ],
  )


class Changed:
  """Wraps a module and replaces some of its names."""

  def __init__(self, module, **changes):
    self._module = module
    self.__dict__.update(changes)

  def __getattr__(self, name):
    return getattr(self._module, name)
