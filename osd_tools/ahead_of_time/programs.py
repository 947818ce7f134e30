"""Compiles the programs of a run and counts what the compiled code contains."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import native
from osd_jax.decoding import sampling
from osd_jax.decoding.rounds import DecodeSpec
from osd_jax.distillation import buffer as buffer_lib
from osd_jax.distillation import update
from osd_jax.engine import steps
from osd_jax.engine.steps import PromptBatch
from osd_tools import hlo
from osd_tools.ahead_of_time.plan import Plan, bytes_of
from osd_tools.rows import Made

KERNELS = ("fusion", "custom-call", "convolution", "dot", "reduce", "sort", "scatter")


class Lowering(NamedTuple):
  """A jitted call that can be traced and compiled.

  Attributes:
    traced: returns a `jax.stages.Traced`.
    depth: number of loops around the repeated part: 1 for rounds, 0 elsewhere.
    untouched: arguments of which the call reads or writes only a few rows.
    chips: number of chips that share the matrix products.
    branch: the branch of each `jax.lax.cond` that is counted; greedy rows take 0.
  """

  traced: Callable[[], Any]
  depth: int = 0
  untouched: Any = None
  chips: int = 1
  branch: int = 0


def programs(plan: Plan) -> dict[str, Lowering]:
  """Returns every program of the run by name."""
  adaptive = plan.run.decoding.adaptive
  most = plan.run.decoding.num_draft_tokens
  data, model = plan.partitioner.mesh.shape.values()
  # A draft that is whole on every chip uses only the data axis: the chips of the model
  # axis repeat the same products.
  drafting = data if plan.partitioner.is_whole(plan.draft) else data * model
  # Each part of the rows prefills one prompt at a time.
  prefilling = plan.spec.parts * model
  # Every K is a program of its own, unless rounds choose how much to draft.
  drafted = adaptive.candidates if adaptive and not plan.spec.widths else (most,)
  rounds = {
    f"round, K = {k}": Lowering(
      functools.partial(_advance, plan, plan.spec.greedy, k), 1
    )
    for k in drafted
    if k <= most
  }
  sampled = functools.partial(_advance, plan, plan.spec, most)
  serving = {
    "prefill": Lowering(functools.partial(_prefill, plan), chips=prefilling),
    **_of_chunks(plan),
    "insertion": Lowering(functools.partial(_put, plan), untouched=plan.state),
    **rounds,
    f"sampled round, K = {most}": Lowering(sampled, 1, branch=1),
    "read": Lowering(functools.partial(_read, plan), untouched=plan.state),
    "plain step": Lowering(
      functools.partial(_feed, plan, "target", 1), chips=data * model
    ),
    f"verification of {most + 1} tokens": Lowering(
      functools.partial(_feed, plan, "target", most + 1), chips=data * model
    ),
    **(_of_an_adaptive_k(plan) if adaptive else {}),
    "draft step": Lowering(functools.partial(_feed, plan, "draft", 1), chips=drafting),
    "swap": Lowering(functools.partial(_swap, plan)),
  }
  learning = {
    "append": Lowering(functools.partial(_append, plan), untouched=plan.buffer),
    "draw": Lowering(functools.partial(_draw, plan), untouched=plan.buffer),
    "slice": Lowering(functools.partial(_slice, plan)),
  }
  return {**serving, **(learning if plan.run.learn else {})}


class RefusedError(Exception):
  """A compiler refuses a program, for example because it needs too much memory."""


def compiled(plan: Plan, program: Lowering) -> Made:
  """Compiles a program for the plan's topology.

  Raises:
    RefusedError: the program does not fit into memory, or the compiler fails.
  """
  # The C++ kernels exist only on this machine's CPU; a topology needs XLA's own.
  with native.portable(plan.is_split):
    traced = program.traced()
    lowered = traced.lower()
    started = time.perf_counter()
    try:
      made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      raise RefusedError(_reason(error)) from None
    seconds = time.perf_counter() - started
  counts = hlo.HloProgram(made.as_text(), branch=program.branch)
  memory, costs = made.memory_analysis(), made.cost_analysis() or {}
  within = counts.count(program.depth)
  collectives = [x for x in counts.of(*hlo.COLLECTIVES) if x.depth >= program.depth]
  bytes_moved = sum(x.bytes for x in collectives)
  read = memory.argument_size_in_bytes
  kernels = sum(within[name] for name in KERNELS)
  cycles = sum(x.cycles for x in counts.operations if x.depth == program.depth)
  least = over_bound = None
  # Rounds have no bound: the number of their iterations is not known.
  if not program.depth:
    chip, flops = plan.topology.chip, hlo.product_flops(traced.jaxpr) / program.chips
    # Arguments of which only a few rows are touched are not read from memory.
    read_whole = read - bytes_of(program.untouched)
    least = chip.least_seconds(read_whole, flops, bytes_moved, kernels) * 1e3
    over_bound = cycles / chip.cycles_to_read(read_whole) if cycles else None
  accessed = costs.get("bytes accessed")
  return Made(
    compile_s=seconds,
    kernels=kernels,
    inner_loops=within["while"],
    copies=within["copy"],
    sorts=sum(x.depth >= program.depth for x in counts.of("sort")),
    collectives=sum(x.depth == program.depth for x in collectives),
    inner_collectives=sum(x.depth > program.depth for x in collectives),
    moved_mb=bytes_moved / 1e6,
    foreign_calls=counts.foreign_calls,
    arguments_gb=read / 1e9,
    temporaries_gb=memory.temp_size_in_bytes / 1e9,
    in_place_gb=memory.alias_size_in_bytes / 1e9,
    read_again=None if accessed is None or program.depth else accessed / read,
    least_ms=least,
    cycles=cycles or None,
    over_bound=over_bound,
  )


def _reason(error: Exception) -> str:
  """What a compiler's error says, without the program that it quotes."""
  message = str(error).splitlines()[0].partition(", metadata=")[0]
  kind, _, text = message.partition(": ")
  if kind == "RESOURCE_EXHAUSTED":
    return f"does not fit, according to the compiler: {text}"
  return f"is refused by the compiler, which says: {message}"


def _of_an_adaptive_k(plan: Plan) -> dict[str, Lowering]:
  """Returns the programs of a draft that is idle while decoding is plain."""
  resting, prompts = plan.spec.resting, _prompts(plan)
  arguments = plan.spec, plan.served, plan.state
  parts, model = plan.spec.parts, plan.partitioner.mesh.shape["model"]
  drafting = parts if plan.partitioner.is_whole(plan.draft) else parts * model

  def put() -> Any:
    rows = _rows(resting, plan, prompts)
    return steps.put_undrafted.trace(plan.spec, plan.state, rows, prompts.slots)

  return {
    "prefill of the target alone": Lowering(
      lambda: steps.prefill.trace(
        resting, plan.served, prompts, _caches(plan, resting)
      ),
      chips=parts * model,
    ),
    "insertion of the target alone": Lowering(put, untouched=plan.state),
    "prefill of the draft alone": Lowering(
      lambda: steps.prefill_draft.trace(*arguments, prompts),
      untouched=plan.state,
      chips=drafting,
    ),
    "catch up": Lowering(lambda: steps.catch_up.trace(*arguments), 1),
  }


def _prompts(plan: Plan) -> PromptBatch:
  """Returns one prompt of the longest bucket for every part of the rows."""
  config, parts = plan.run.decoding, plan.spec.parts
  settings = sampling.make_settings(parts, max_length=config.target_length)
  source = np.zeros((parts, config.source_lengths[-1]), np.int32)
  return jax.tree.map(
    lambda leaf: plan.everywhere(leaf.shape, leaf.dtype),
    PromptBatch(source, settings, np.zeros(parts, np.int32)),
  )


def _prefill(plan: Plan) -> Any:
  arguments = plan.served, _prompts(plan), _caches(plan, plan.spec)
  return steps.prefill.trace(plan.spec, *arguments)


def _caches(plan: Plan, spec: DecodeSpec) -> list[Any] | None:
  """Shapes and shardings of the caches of prompts that are read in chunks, if any."""
  source = _prompts(plan).source
  if not 0 < spec.prefill_chunk < source.shape[1]:
    return None
  shapes = jax.eval_shape(functools.partial(steps.unread, spec), plan.served, source)
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    shapes,
    steps.places(spec, shapes),
  )


def _of_chunks(plan: Plan) -> dict[str, Lowering]:
  """Returns the program that reads a chunk of a long prompt, if there is one."""
  if not (caches := _caches(plan, plan.spec)):
    return {}

  def read() -> Any:
    arguments = plan.served, caches, _prompts(plan).source, plan.scalar()
    return steps.read_chunk.trace(plan.spec, *arguments)

  chips = plan.spec.parts * plan.partitioner.mesh.shape["model"]
  return {"prefill of a chunk": Lowering(read, chips=chips)}


def _put(plan: Plan) -> Any:
  prompts = _prompts(plan)
  rows = _rows(plan.spec, plan, prompts)
  return steps.put.trace(plan.spec, plan.state, rows, prompts.slots)


def _rows(spec: DecodeSpec, plan: Plan, prompts: PromptBatch) -> Any:
  """Shapes and shardings of prefilled rows."""
  rows = jax.eval_shape(functools.partial(steps.prefill, spec), plan.served, prompts)
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    rows,
    spec.shardings(rows),
  )


def _advance(plan: Plan, spec: DecodeSpec, drafted: int) -> Any:
  largest, prices = steps.exactly(spec, drafted)
  if prices is not None:
    prices = plan.everywhere(prices.shape, prices.dtype)
  arguments = plan.served, plan.scalar(), plan.state, prices
  return steps.advance.trace(spec, largest, *arguments)


def _read(plan: Plan) -> Any:
  bucket = plan.run.decoding.source_lengths[-1]
  source = plan.everywhere((1, bucket), jnp.int32)
  return steps.read_row.trace(plan.spec, plan.state, source, plan.scalar())


def _feed(plan: Plan, who: str, width: int) -> Any:
  """Traces one call of a model on `width` tokens per row, followed by an arg max."""
  model = getattr(plan, who)
  served, cache = plan.served.target, plan.state.target_cache
  if who == "draft":
    served, cache = plan.draft_served, plan.state.draft_cache
    cache = getattr(cache, "draft", cache)  # in a mixture
  tokens = plan.everywhere((plan.spec.rows, width), jnp.int32)

  def feed(served, tokens, cache):
    with plan.spec.traced():
      logits, cache = model.decode(served, tokens, cache)
      # With the arg max, since returning the logits would write [B, n, V] that no real
      # step writes to memory.
      return sampling.arg_max(logits), cache

  return jax.jit(feed, donate_argnums=2).trace(served, tokens, cache)


def _swap(plan: Plan) -> Any:
  def prepare(params):
    with plan.spec.traced():
      return plan.draft.prepare(params)

  return jax.jit(prepare).trace(plan.draft.join(plan.draft_params, plan.frozen))


def _append(plan: Plan) -> Any:
  batch = plan.batch(1)
  return jax.jit(buffer_lib.append, donate_argnums=0).trace(plan.buffer, batch)


def _draw(plan: Plan) -> Any:
  learning = plan.run.learning
  key = jax.eval_shape(lambda: jax.random.key(0))
  key = plan.everywhere(key.shape, key.dtype)
  return update.draw_slice.trace(
    learning.update, learning.buffer, plan.buffer, key, plan.scalar(), plan.scalar()
  )


def _slice(plan: Plan) -> Any:
  config = plan.run.learning.update
  batch = plan.batch(config.num_new + config.num_replay)
  return update.take_slice.trace(plan.draft, config, plan.learner, batch, plan.frozen)
