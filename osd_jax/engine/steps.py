"""The compiled calls behind the slots: prefill into a row, advance all rows, read one.

Every call takes a `Program` as its static argument, `advance` K too: one compilation
per program, bucket of source lengths, kind of call and K; none for requests, settings,
versions or numbers of rounds.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, cache, native
from osd_jax.decoding import rounds, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.engine import catch_up as catch_up_lib
from osd_jax.engine import prompts as prompts_lib
from osd_jax.engine.prompts import Prompt, PromptBatch
from osd_jax.engine.requests import DecodingConfig

# What a host reads of the rows; and their settings, which every draft step asks for.
_READ = ("tokens", "length", "stop_reason", "settings", "counters")


@dataclasses.dataclass(frozen=True)
class Program:
  """What is compiled in.

  Attributes:
    config: shapes of decoding, `DecodingConfig.shapes()`.
    target: the target model.
    draft: the draft model, None for plain decoding.
    partitioner: a `partitioning.Partitioner`, None for one device.
  """

  config: DecodingConfig
  target: base.Model
  draft: base.Model | None
  partitioner: Any

  @property
  def parts(self) -> int:
    """Parts of the rows that devices of their own hold; each prefills for itself."""
    if self.partitioner is None:
      return 1
    return self.partitioner.parts(self.config.rows)

  def batches(self, given: Mapping[int, Prompt]) -> Iterator[PromptBatch]:
    """As few calls as prefill all these prompts, by slot."""
    return prompts_lib.batches(given, self.config.rows, self.parts)

  def by_part(self, function: Callable[..., Any], *trees: Any) -> Any:
    """Inside jit: a function of [rows, ...] leaves, for each part on its own."""
    if self.parts == 1:
      return function(*trees)
    return self.partitioner.by_part(function, *trees)

  def placed(self, state: state_lib.DecodeState) -> state_lib.DecodeState:
    """The rows where the partitioner wants them, inside jit."""
    if self.partitioner is None:
      return state
    return jax.lax.with_sharding_constraint(state, self.shardings(state))

  def shardings(self, state: state_lib.DecodeState) -> state_lib.DecodeState:
    """Where the rows are wanted; there is a partitioner.

    What the host reads after every call is everywhere: another host has the rest.
    """
    rows = self.partitioner.of_rows(state.replace(draft_cache=None))
    read = {name: getattr(state, name) for name in _READ}
    return rows.replace(
      draft_cache=self.partitioner.of_draft_rows(self.draft, state.draft_cache),
      **jax.tree.map(lambda _: self.partitioner.replicated, read),
    )

  def everywhere(self, tree: Any) -> Any:
    """Inside jit: small arrays, whole on every device."""
    if self.partitioner is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, self.partitioner.replicated)

  @property
  def draft_is_whole(self) -> bool:
    """Whether no draft step has to wait for another device's part."""
    draft, partitioner = self.draft, self.partitioner
    if draft is None or partitioner is None or draft.frozen:  # its head is the target's
      return False
    return partitioner.is_whole(draft)

  @contextlib.contextmanager
  def traced(self) -> Iterator[None]:
    """Where models and rounds are traced: on a mesh XLA computes all.

    It cannot split a foreign call, and would gather every kernel and cache for it.
    """
    if self.partitioner is None:
      yield
      return
    mesh = self.partitioner.mesh.abstract_mesh
    with native.portable(), jax.sharding.use_abstract_mesh(mesh):
      yield


class Served(NamedTuple):
  """Prepared parameters.

  Attributes:
    target: of the target.
    draft: of the draft, None in plain decoding.
  """

  target: base.Params
  draft: base.Params = None


def prepare(
  model: base.Model,
  params: base.Params,
  shortlist: np.ndarray | None = None,
  program: Program | None = None,
) -> base.Params:
  """The served copy of a model's parameters; see `base.Model.prepare`.

  Args:
    model: target or draft.
    params: its parameters.
    shortlist: of a draft with a short head.
    program: that will read the copy; None is one device.
  """
  with contextlib.nullcontext() if program is None else program.traced():
    return model.prepare(params, *(() if shortlist is None else (shortlist,)))


def check_target_states(
  target: base.Model, params: base.Params, draft: base.Model
) -> None:
  """Raises InputError unless the target returns the states that the draft needs."""
  if not draft.state_width:
    return
  source = jax.ShapeDtypeStruct((1, 1), jnp.int32)

  def prefilled(params, source):
    cache = target.prefill(target.prepare(params), source, target.mask(source), 1)
    return getattr(cache, "target_states", None)

  target_states = jax.eval_shape(prefilled, params, source)
  received = "nothing" if target_states is None else f"width {target_states.shape[-1]}"
  if received != f"width {draft.state_width}":
    raise base.InputError(
      f"decoding: the draft {draft.name!r} needs target states of width"
      f" {draft.state_width}; the target {target.name!r} returns"
      f" {received}. Build it with `return_states=True`, or choose another draft."
    )


@functools.partial(jax.jit, static_argnums=(0, 2))
def empty(program: Program, served: Served, bucket: int) -> state_lib.DecodeState:
  """Rows for sources of a bucket's length, all of them empty."""
  config = program.config
  source = jnp.zeros((config.rows, bucket), jnp.int32)
  settings = sampling.make_settings(config.rows, max_length=config.target_length)
  everyone = PromptBatch(source, settings, jnp.arange(config.rows))
  shapes = jax.eval_shape(functools.partial(_prefilled, program), served, everyone)
  state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  reason = jnp.full((config.rows,), int(base.StopReason.EMPTY), jnp.int32)
  return program.placed(state.replace(stop_reason=reason))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def insert(
  program: Program,
  served: Served,
  state: state_lib.DecodeState,
  prompts: PromptBatch,
) -> state_lib.DecodeState:
  """Prefills a prompt for every part of the rows and puts each into its row."""
  rows = _prefilled(program, served, prompts)
  return program.placed(_inserted(program, state, rows, prompts.slots))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def insert_undrafted(
  program: Program,
  served: Served,
  state: state_lib.DecodeState,
  prompts: PromptBatch,
) -> state_lib.DecodeState:
  """`insert` without the draft's prefill, which `prefill_draft` does if needed."""
  rows = _prefilled(dataclasses.replace(program, draft=None), served, prompts)
  others = state.replace(draft_cache=None)
  found = _inserted(program, others, rows, prompts.slots)
  return program.placed(found.replace(draft_cache=state.draft_cache))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill_draft(
  program: Program,
  served: Served,
  state: state_lib.DecodeState,
  prompts: PromptBatch,
) -> state_lib.DecodeState:
  """Prefills the draft for rows that have their prompt; none of their tokens is fed."""
  target_states, slots = None, prompts.slots
  if program.draft is not None and program.draft.state_width:
    stored = state.target_cache.target_states
    target_states = program.by_part(cache.take_row, stored, slots)
  rows = _draft_prefilled(
    program, served, _split(program, prompts.source), target_states
  )
  found = _inserted(program, state.draft_cache, rows, slots)
  return program.placed(state.replace(draft_cache=found))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def catch_up(
  program: Program, served: Served, state: state_lib.DecodeState
) -> state_lib.DecodeState:
  """Feeds the draft what it missed in plain steps."""
  assert program.draft is not None
  with program.traced():
    caught_up = catch_up_lib.catch_up(program.draft, served.draft, state)
  return program.placed(caught_up)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def advance(
  program: Program,
  num_draft_tokens: int,
  served: Served,
  max_rounds: jax.Array,
  state: state_lib.DecodeState,
) -> state_lib.DecodeState:
  """Runs rounds (K = 0: plain steps) until a row finishes or `max_rounds` passed."""
  speculation = rounds.Speculation(
    program.target,
    program.draft,
    num_draft_tokens,
    program.config.acceptance_rule,
    program.draft_is_whole,
  )
  models = served.target, served.draft
  with program.traced():
    state = rounds.run_rounds(speculation, *models, max_rounds, state)
  return program.placed(state)


@functools.partial(jax.jit, donate_argnums=0)
def stop_row(
  state: state_lib.DecodeState, slot: jax.Array, length: jax.Array, reason: jax.Array
) -> state_lib.DecodeState:
  """Ends a row's request behind its first `length` tokens."""
  return state.replace(
    length=state.length.at[slot].set(length),
    stop_reason=state.stop_reason.at[slot].set(reason),
  )


@functools.partial(jax.jit, static_argnums=0)
def read_row(
  program: Program,
  state: state_lib.DecodeState,
  source: jax.Array,
  slot: jax.Array,
) -> tuple[base.DistillationBatch, base.SamplingSettings, Any]:
  """One row: what the loss wants of it, its settings, and its figures for the host.

  One compiled call: eager operations would cost the host more than a draft step.
  """

  def take(leaf):
    return jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)

  def cut(leaf):
    return take(leaf)[:, : program.config.target_length]

  length = take(state.length)
  mask = jnp.arange(program.config.target_length)[None] < length[:, None]
  batch = base.DistillationBatch(
    source=source,
    target=jnp.where(mask, cut(state.tokens), program.target.pad_id),
    mask=mask,
    records=jax.tree.map(cut, state.records),
    weight=jnp.ones((1,), jnp.float32),
    target_states=_states_of(program, state, source.shape[1], take),
  )
  settings, reason, counters = jax.tree.map(
    take, (state.settings, state.stop_reason, state.counters)
  )
  return program.everywhere((batch, settings, (length, reason, counters)))


def _split(program: Program, source: jax.Array) -> jax.Array:
  """Sources [P, S], each where its row is."""
  if program.parts == 1:
    return source
  rows = program.partitioner.of_rows(source)
  return jax.lax.with_sharding_constraint(source, rows)


def _inserted(program: Program, tree: Any, rows: Any, slots: jax.Array) -> Any:
  """Rows [P, ...] at their slots [P] of [B, ...]; nothing where a slot is -1."""
  if program.parts == 1:
    return cache.insert_row(tree, rows, slots)

  def inserted(tree, row, slot):
    before = cache.take_row(tree, slot)
    row = jax.tree.map(lambda old, new: jnp.where(slot < 0, old, new), before, row)
    return cache.insert_row(tree, row, slot)

  return program.by_part(inserted, tree, rows, slots)


def _prefilled(
  program: Program, served: Served, prompts: PromptBatch
) -> state_lib.DecodeState:
  """Rows after prefill: both models have read the prompts; empty self caches."""
  config, source = program.config, _split(program, prompts.source)
  mask = program.target.mask(source)
  length = state_lib.buffer_length(config.target_length)
  with program.traced():
    target_cache = program.target.prefill(served.target, source, mask, length)
  draft_cache = None
  if program.draft is not None:
    target_states = target_cache.target_states if program.draft.state_width else None
    draft_cache = _draft_prefilled(program, served, source, target_states)
  return state_lib.initial_state(
    program.target.starts(source),
    prompts.settings,
    target_cache,
    draft_cache,
    config.target_length,
    config.record_top_k,
    program.target.vocab_size,
  )


def _draft_prefilled(
  program: Program, served: Served, source: jax.Array, target_states: jax.Array | None
) -> Any:
  """The draft's cache after prefill, of length 0.

  Args:
    program: with a draft.
    served: prepared parameters.
    source: [B, S] int32.
    target_states: [B, S, E], target states of the source, for an attached draft.
  """
  assert program.draft is not None
  length = state_lib.buffer_length(program.config.target_length)
  read = source if target_states is None else target_states
  with program.traced():
    mask = program.draft.mask(source)
    return program.draft.prefill(served.draft, read, mask, length)


def _states_of(program: Program, state, length: int, take) -> jax.Array | None:
  """Target states of a row, padded to `length`, for an attached draft."""
  if program.draft is None or not program.draft.state_width:
    return None
  target_states = take(state.target_cache.target_states)
  return jnp.pad(target_states, ((0, 0), (0, length - target_states.shape[1]), (0, 0)))
