"""The compiled calls of an engine, and the grouping of prompts for prefilling.

Every call takes a `DecodeSpec` as its static argument, `advance` also K. So there is
one compilation per spec, bucket of prompt lengths, kind of call and K, and none for new
requests, settings, draft versions or numbers of rounds.

On a mesh, each part of the "data" axis prefills a prompt of its own, for a row that it
holds, so that only the sums of split weights travel between devices:

    data = 4, eight rows      part     0      1      2      3
                              rows    0 1    2 3    4 5    6 7
    free                                1    2 3             7
    prompts a, b, c                     a    b               c      one call
    prompt d                                   d                    the next one

One device is one part, and prefills one prompt at a time.
"""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base, cache
from osd_jax.decoding import rounds, sampling
from osd_jax.decoding import state as state_lib
from osd_jax.decoding.rounds import DecodeSpec

# A call that can prefill several prompts waits until one in this many rows is free, as
# long as every free row has a prompt.
_PATIENCE = 8


class PaddedPrompt(NamedTuple):
  """A request's prompt as arrays of one row.

  Attributes:
    source: [1, S] int32, padded to the longest bucket.
    settings: [1] sampling.
  """

  source: np.ndarray
  settings: base.SamplingSettings


class PromptBatch(NamedTuple):
  """The prompts of one prefill call; P parts.

  Attributes:
    source: [P, S] int32.
    settings: [P] sampling.
    slots: [P] int32; for each part, which of its rows takes the prompt. -1: none does,
      and the result for this part is dropped.
  """

  source: Any  # numpy on the host, a tracer inside a call
  settings: base.SamplingSettings
  slots: Any


def first_free_slots(free: Sequence[int], rows: int, parts: int) -> list[int]:
  """Returns the first free row of each part, ascending."""
  first = {slot * parts // rows: slot for slot in reversed(free)}
  return sorted(first.values())


def defer_prefill(free: int, waiting: int, rows: int, parts: int) -> bool:
  """Returns whether to go on decoding until one call can prefill more prompts.

  No row decodes during a prefill, which takes as long for one prompt as for one prompt
  in every part. So if there is a prompt for every free row, up to an eighth of the rows
  may stay empty for a while.

  Args:
    free: number of rows without a request.
    waiting: number of prompts that wait for a row.
    rows: number of rows, free or not.
    parts: number of parts, each of which prefills one prompt at a time.
  """
  return parts > 1 and waiting >= free and free * _PATIENCE < rows


def prefill_batches(
  prompts: Mapping[int, PaddedPrompt], bucket: int, rows: int, parts: int
) -> Iterator[PromptBatch]:
  """Yields the fewest calls that prefill prompts, given by slot, in a bucket."""
  waiting: Collection[int] = sorted(prompts)
  while waiting:
    slots = first_free_slots(waiting, rows, parts)
    yield _batch({slot: prompts[slot] for slot in slots}, bucket, rows, parts)
    waiting = [slot for slot in waiting if slot not in slots]


def _batch(
  prompts: Mapping[int, PaddedPrompt], bucket: int, rows: int, parts: int
) -> PromptBatch:
  """Returns one call's prompts, at most one for each part."""
  if parts == 1:
    ((slot, (source, settings)),) = prompts.items()
    return PromptBatch(source[:, :bucket], settings, np.asarray([slot], np.int32))
  size, any_prompt = rows // parts, next(iter(prompts.values()))
  by_part = {slot // size: (slot % size, prompt) for slot, prompt in prompts.items()}
  # Every part computes, so a part without a prompt of its own repeats another's.
  by_slot = [by_part.get(part, (-1, any_prompt)) for part in range(parts)]
  source, settings = jax.tree.map(
    lambda *leaves: np.concatenate(leaves), *(prompt for _, prompt in by_slot)
  )
  slots = np.asarray([slot for slot, _ in by_slot], np.int32)
  return PromptBatch(source[:, :bucket], settings, slots)


class Served(NamedTuple):
  """Prepared parameters.

  Attributes:
    target: the target's.
    draft: the draft's, None in plain decoding.
  """

  target: base.Params
  draft: base.Params = None


def prepare(
  model: base.Model,
  params: base.Params,
  shortlist: np.ndarray | None = None,
  spec: DecodeSpec | None = None,
) -> base.Params:
  """Returns the served copy of a model's parameters; see `base.Model.prepare`.

  Args:
    model: the target or the draft.
    params: its trained parameters; they are not changed.
    shortlist: [N] int32, for a draft with a short head.
    spec: description of the calls that read the copy; None for one device.
  """
  with contextlib.nullcontext() if spec is None else spec.traced():
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
    return [getattr(cache, name, None) for name in ("target_states", "token_states")]

  # Only shapes are computed, so the check is free.
  shapes = jax.eval_shape(prefilled, params, source)
  reads = "tokens" if draft.reads_tokens else "prompt"
  for states in shapes if draft.reads_tokens else shapes[:1]:
    received = "nothing" if states is None else f"width {states.shape[-1]}"
    if received != f"width {draft.state_width}":
      raise base.InputError(
        f"decoding: the draft {draft.name!r} needs target states of width"
        f" {draft.state_width}; the target {target.name!r} returns"
        f" {received}. Build it with `states={reads!r}`, or choose another draft."
      )


@functools.partial(jax.jit, static_argnums=(0, 2))
def empty(spec: DecodeSpec, served: Served, bucket: int) -> state_lib.DecodeState:
  """Returns empty rows for prompts of a bucket's length."""
  source = jnp.zeros((spec.rows, bucket), jnp.int32)
  settings = sampling.make_settings(spec.rows, max_length=spec.target_length)
  prompts = PromptBatch(source, settings, jnp.arange(spec.rows))
  # Zeros of the right shapes are enough: empty rows run in every call, but their
  # results are dropped. A real prefill would cost a forward pass.
  shapes = jax.eval_shape(functools.partial(_prefilled, spec), served, prompts)
  state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  reason = jnp.full((spec.rows,), int(base.StopReason.EMPTY), jnp.int32)
  return spec.place(state.replace(stop_reason=reason))


def chunk_starts(spec: DecodeSpec, source: np.ndarray) -> list[int]:
  """Returns where the chunks of prompts [P, S] begin; [] if they are read at once."""
  size, length = spec.prefill_chunk, source.shape[1]
  if not size or length <= size:
    return []
  # Prompts end in padding, of which chunks are left out. The last chunk may begin
  # within the one before, which changes nothing.
  end = int(np.max(np.nonzero(spec.target.mask(source))[1])) + 1
  return [min(start, length - size) for start in range(0, end, size)]


@functools.partial(jax.jit, static_argnums=0)
def unread(spec: DecodeSpec, served: Served, source: jax.Array) -> list[Any]:
  """Returns caches for prompts [P, S] of which no chunk has been read.

  They are the target's, and that of a draft model that reads prompts in chunks.
  """
  length = state_lib.buffer_length(spec.target_length)
  with spec.traced():
    shapes = [
      jax.eval_shape(
        lambda params, model=model: model.prefill(
          params, source, model.mask(source), length
        ),
        params,
      )
      for model, params in _readers(spec, served)
    ]
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  return _placed(spec, zeros)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def read_chunk(
  spec: DecodeSpec,
  served: Served,
  caches: list[Any],
  source: jax.Array,
  start: jax.Array,
) -> list[Any]:
  """Lets the models read a chunk of prompts [P, S], from place `start` [] on."""
  source, size, longer = _split(spec, source), spec.prefill_chunk, []
  with spec.traced():
    for (model, params), old in zip(_readers(spec, served), caches, strict=True):
      assert model.extend is not None
      new = model.extend(params, source, model.mask(source), old, start, size)
      longer.append(new)
  return _placed(spec, longer)


def _readers(spec: DecodeSpec, served: Served) -> list[tuple[base.Model, base.Params]]:
  """The models that read prompts in chunks, with their parameters; the target first."""
  drafter = spec.drafter
  of_draft = [] if drafter is None else drafter.reader(served.draft)
  return [(spec.target, served.target), *of_draft]


def places(spec: DecodeSpec, caches: list[Any]) -> list[Any]:
  """Returns the shardings of caches that `unread` returned; needs a partitioner."""
  of_draft = functools.partial(spec.partitioner.of_draft_rows, spec.draft)
  return [spec.partitioner.of_rows(caches[0]), *map(of_draft, caches[1:])]


def _placed(spec: DecodeSpec, caches: list[Any]) -> list[Any]:
  if spec.partitioner is None:
    return caches
  return jax.lax.with_sharding_constraint(caches, places(spec, caches))


def _read(spec: DecodeSpec, served: Served, source: np.ndarray) -> list[Any] | None:
  """Reads prompts chunk by chunk; returns None if they are short."""
  caches = None
  for start in chunk_starts(spec, source):
    caches = unread(spec, served, source) if caches is None else caches
    caches = read_chunk(spec, served, caches, source, np.int32(start))
  return caches


@functools.partial(jax.jit, static_argnums=(0, 3))
def resize(
  spec: DecodeSpec, served: Served, state: state_lib.DecodeState, bucket: int
) -> state_lib.DecodeState:
  """Cuts or pads the prompts and caches of all rows to a bucket.

  Every prompt in flight must fit. Nothing is computed again, because prompts end in
  padding: a cache holds nothing there that is not masked.
  """
  shapes = jax.eval_shape(lambda: empty(spec, served, bucket))
  fitted = lambda leaf, like: _fitted(leaf, like.shape)
  return spec.place(jax.tree.map(fitted, state, shapes))


def _fitted(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Cuts or pads an array at the end of each axis; integers are tokens."""
  if leaf.shape == shape:
    return leaf  # jit copies no input that it returns
  leaf = leaf[tuple(slice(size) for size in shape)]
  spare = [(0, size - has) for size, has in zip(shape, leaf.shape, strict=True)]
  fill = base.NO_TOKEN if jnp.issubdtype(leaf.dtype, jnp.integer) else 0
  return jnp.pad(leaf, spare, constant_values=fill)


def insert(
  spec: DecodeSpec,
  served: Served,
  state: state_lib.DecodeState,
  prompts: PromptBatch,
  caches: list[Any] | None = None,
) -> state_lib.DecodeState:
  """Prefills target and draft, and puts each prompt into its row.

  Prompts may be padded less than those of the rows, because the arithmetic of a prefill
  grows with the length. So there are two calls, and the second one alone is compiled
  for every pair of buckets.

  `caches` are those of long prompts whose chunks have been read; None reads them now.
  """
  caches = caches or _read(spec, served, prompts.source)
  return put(spec, state, prefill(spec, served, prompts, caches), prompts.slots)


def insert_undrafted(
  spec: DecodeSpec,
  served: Served,
  state: state_lib.DecodeState,
  prompts: PromptBatch,
  caches: list[Any] | None = None,
) -> state_lib.DecodeState:
  """`insert` without the draft's prefill, which `prefill_draft` does if needed."""
  caches = caches or _read(spec.resting, served, prompts.source)
  rows = prefill(spec.resting, served, prompts, caches)
  return put_undrafted(spec, state, rows, prompts.slots)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def prefill(
  spec: DecodeSpec,
  served: Served,
  prompts: PromptBatch,
  caches: list[Any] | None = None,
) -> state_lib.DecodeState:
  """The first half of `insert`: rows [P, ...] that hold the prompts.

  With `caches` of read prompts it only does what is left.
  """
  return spec.place(_prefilled(spec, served, prompts, caches))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def put(
  spec: DecodeSpec,
  state: state_lib.DecodeState,
  rows: state_lib.DecodeState,
  slots: jax.Array,
) -> state_lib.DecodeState:
  """The second half of `insert`."""
  return spec.place(_inserted(spec, state, rows, slots))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def put_undrafted(
  spec: DecodeSpec,
  state: state_lib.DecodeState,
  rows: state_lib.DecodeState,
  slots: jax.Array,
) -> state_lib.DecodeState:
  # The draft's cache of this row becomes stale. `prefill_draft` replaces it before the
  # draft reads it.
  old = state.draft_cache
  others = None if rows.draft_cache is None else old.replace(draft=None)
  inserted = _inserted(spec, state.replace(draft_cache=others), rows, slots)
  if others is not None:
    old = inserted.draft_cache.replace(draft=old.draft)
  return spec.place(inserted.replace(draft_cache=old))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill_draft(
  spec: DecodeSpec,
  served: Served,
  state: state_lib.DecodeState,
  prompts: PromptBatch,
) -> state_lib.DecodeState:
  """Prefills the draft for rows that the target has prefilled, without their output.

  The prompts are padded like those of the rows.
  """
  target_states, slots = None, prompts.slots
  if spec.draft is not None and spec.draft.state_width:
    all_states = state.target_cache.target_states
    target_states = spec.by_part(cache.take_row, all_states, slots)
  rows = _draft_prefilled(spec, served, _split(spec, prompts.source), target_states)
  draft_cache = _inserted(spec, state.draft_cache, rows, slots)
  return spec.place(state.replace(draft_cache=draft_cache))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def catch_up(
  spec: DecodeSpec, served: Served, state: state_lib.DecodeState
) -> state_lib.DecodeState:
  """Lets the drafter see the tokens of plain steps; see `ModelDrafter.catch_up`."""
  assert spec.drafter is not None
  with spec.traced():
    draft_cache = spec.drafter.catch_up(served.draft, state.draft_cache, state)
  return spec.place(state.replace(draft_cache=draft_cache))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def advance(
  spec: DecodeSpec,
  num_draft_tokens: int,
  served: Served,
  max_rounds: jax.Array,
  state: state_lib.DecodeState,
  prices: jax.Array | None = None,
) -> state_lib.DecodeState:
  """Runs rounds (K = 0: plain steps) until a row finishes or `max_rounds` passed."""
  with spec.traced():
    state = rounds.run_rounds(
      spec, num_draft_tokens, *served, max_rounds, state, prices
    )
  return spec.place(state)


def compile_drafting(
  spec: DecodeSpec, num_draft_tokens: int, served: Served, state: state_lib.DecodeState
) -> None:
  """Compiles the calls that draft; of the arrays, only shapes and types are used."""
  served, state = jax.eval_shape(lambda *arrays: arrays, served, state)
  prices = jax.ShapeDtypeStruct((num_draft_tokens,), jnp.float32)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  for one in dict.fromkeys(map(spec.for_rows, (False, True))):
    advance.lower(one, num_draft_tokens, served, count, state, prices).compile()
  catch_up.lower(spec, served, state).compile()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def reseed(
  spec: DecodeSpec, state: state_lib.DecodeState, seed: jax.Array
) -> state_lib.DecodeState:
  """Lets the rows draw with other seeds [B] from here on."""
  return spec.place(state.replace(settings=state.settings.replace(seed=seed)))


def exactly(spec: DecodeSpec, num_draft_tokens: int) -> tuple[int, np.ndarray | None]:
  """Returns K and prices of a call whose rounds all draft this many tokens."""
  if not num_draft_tokens or not spec.widths:
    return num_draft_tokens, None
  largest = spec.widths[-1]
  is_drafted = np.arange(largest) < num_draft_tokens
  return largest, np.where(is_drafted, 0.0, np.inf).astype(np.float32)


@functools.partial(jax.jit, donate_argnums=0)
def stop_row(
  state: state_lib.DecodeState, slot: jax.Array, length: jax.Array, reason: jax.Array
) -> state_lib.DecodeState:
  """Ends a row's request after its first `length` tokens."""
  return state.replace(
    length=state.length.at[slot].set(length),
    stop_reason=state.stop_reason.at[slot].set(reason),
  )


@functools.partial(jax.jit, static_argnums=0)
def read_row(
  spec: DecodeSpec,
  state: state_lib.DecodeState,
  source: jax.Array,
  slot: jax.Array,
) -> tuple[base.DistillationBatch, base.SamplingSettings, Any]:
  """Returns a row for the loss, its settings, and its counters for the host.

  One compiled call: eager operations would cost the host more than a draft step.
  """

  def take(leaf):
    return jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)

  def cut(leaf):
    return take(leaf)[:, : spec.target_length]

  length = take(state.length)
  mask = jnp.arange(spec.target_length)[None] < length[:, None]
  batch = base.DistillationBatch(
    source=source,
    # Slots after the length may hold tokens of a round that were not emitted.
    target=jnp.where(mask, cut(state.tokens), spec.target.pad_id),
    mask=mask,
    records=jax.tree.map(cut, state.records),
    weight=jnp.ones((1,), jnp.float32),
    target_states=_stored_states(state, source.shape[1], take),
    token_states=_token_states(state, cut),
  )
  settings, reason, counters = jax.tree.map(
    take, (state.settings, state.stop_reason, state.counters)
  )
  return spec.replicate((batch, settings, (length, reason, counters)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def absorb(
  spec: DecodeSpec,
  memory: Any,
  draft_cache: Any,
  batch: base.DistillationBatch,
  length: jax.Array,
  slot: jax.Array,
  is_stale: jax.Array,
  salt: jax.Array,
) -> Any:
  """Lets the drafter learn from a finished row; see `ModelDrafter.absorb`.

  Args:
    spec: static description of decoding.
    memory: what the drafter has learned so far.
    draft_cache: the drafter's state of all rows; None for a row of another engine.
    batch: the row that `read_row` returned.
    length: [1] int32, its number of tokens.
    slot: [] int32, the row.
    is_stale: [] bool, whether `draft_cache` holds an earlier request of the row.
    salt: [2] uint32, the salt of the answer.
  """
  assert spec.drafter is not None
  row = None
  if draft_cache is not None:
    row = jax.tree.map(
      lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0), draft_cache
    )
    row = row.replace(length=jnp.where(is_stale, 0, row.length))
  answer = batch.source, batch.target[0], length[0], salt
  return spec.drafter.absorb(memory, row, *answer)


def _split(spec: DecodeSpec, source: jax.Array) -> jax.Array:
  """Places sources [P, S] on the devices that hold their rows."""
  if not spec.is_split:
    return source
  return jax.lax.with_sharding_constraint(source, spec.partitioner.of_rows(source))


def _inserted(spec: DecodeSpec, tree: Any, rows: Any, slots: jax.Array) -> Any:
  """Writes rows [P, ...] at their slots [P] of [B, ...]; a slot of -1 is skipped.

  What is stored of a prompt may be shorter than in `tree`; it is padded.
  """
  rows = jax.tree.map(
    lambda many, few: _fitted(few, (len(few), *many.shape[1:])), tree, rows
  )
  if spec.parts == 1:
    return cache.insert_row(tree, rows, slots)

  def inserted(tree, row, slot):
    # A part without a prompt writes its old row back, since every part runs the call.
    # Slot -1 reads some valid row, whose content is kept.
    before = cache.take_row(tree, slot)
    row = jax.tree.map(lambda old, new: jnp.where(slot < 0, old, new), before, row)
    return cache.insert_row(tree, row, slot)

  return spec.by_part(inserted, tree, rows, slots)


def _prefilled(
  spec: DecodeSpec,
  served: Served,
  prompts: PromptBatch,
  caches: list[Any] | None = None,
) -> state_lib.DecodeState:
  """Returns rows whose prompts both models have read, without any output."""
  source = _split(spec, prompts.source)
  if caches:
    target_cache, *of_draft = caches
  else:
    length, of_draft = state_lib.buffer_length(spec.target_length), []
    with spec.traced():
      mask = spec.target.mask(source)
      target_cache = spec.target.prefill(served.target, source, mask, length)
  draft_cache = None
  if spec.draft is not None:
    target_states = target_cache.target_states if spec.draft.state_width else None
    arguments = (source, target_states, *of_draft)
    draft_cache = _draft_prefilled(spec, served, *arguments)
  state = state_lib.initial_state(
    spec.target.starts(source),
    prompts.settings,
    target_cache,
    draft_cache,
    spec.target_length,
    spec.record_top_k,
    spec.target.vocab_size,
    spec.target.prompt_text(source),
  )
  broken = jnp.int32(int(base.StopReason.NOT_FINITE))
  finite = _is_finite(target_cache)
  return state.replace(stop_reason=jnp.where(finite, state.stop_reason, broken))


def _is_finite(target_cache: Any) -> jax.Array:
  """Whether all that the target stored of each prompt is finite, [B].

  Normalisation turns activations that overflow into zeros, so logits can be finite
  although the target is broken.
  """
  leaves = jax.tree.leaves(target_cache)
  floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
  sums = [jnp.sum(leaf, axis=range(1, leaf.ndim)) for leaf in floats]
  return jnp.isfinite(sum(sums))


def _draft_prefilled(
  spec: DecodeSpec,
  served: Served,
  source: jax.Array,
  target_states: jax.Array | None,
  read: Any = None,
) -> Any:
  """Returns the drafter's state after prefill; see `ModelDrafter.init`."""
  assert spec.drafter is not None
  length = state_lib.buffer_length(spec.target_length)
  with spec.traced():
    return spec.drafter.init(served.draft, source, target_states, length, read)


def _token_states(state: state_lib.DecodeState, cut) -> jax.Array | None:
  """Returns the target's state before each token, if its cache holds them."""
  states = getattr(state.target_cache, "token_states", None)
  return None if states is None else cut(states).astype(jnp.bfloat16)


def _stored_states(state: state_lib.DecodeState, length: int, take) -> jax.Array | None:
  """Returns a row's target states, if its cache has any, padded to `length`."""
  states = getattr(state.target_cache, "target_states", None)
  if states is None:
    return None
  states = take(states)
  return jnp.pad(states, ((0, 0), (0, length - states.shape[1]), (0, 0)))
