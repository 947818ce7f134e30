"""Programs compiled for TPUs and GPUs, without either machine.

Every property has a negative control, usually the same check of a program with a
fault. The control of foreign calls is in tests/native/test_products.py.
`make test-aot` installs the compilers and runs these tests.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny_online
from jax.sharding import NamedSharding, PartitionSpec

from osd_jax import native, pairs, sharding
from osd_jax.decoding import sampling
from osd_jax.distillation import optimizers, update
from osd_jax.engine import steps
from osd_jax.engine.requests import DecodingConfig
from osd_jax.models import layers, llama, served
from osd_jax.models.shapes import EagleConfig
from osd_tools import chips, hlo, sizes
from osd_tools.ahead_of_time import plan as plan_lib
from osd_tools.ahead_of_time import programs

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("full_optimization")]

LAYERS, ROWS, DRAFTED = 2, 8, 5
VERIFICATION = f"verification of {DRAFTED + 1} tokens"
WIDE = pairs.PairConfig(target="flan-t5-xl", draft="t5-small", dtype="bfloat16")
CAUSAL = pairs.PairConfig(target="vicuna-7b", draft="llama-160m", dtype="bfloat16")
DECODING = DecodingConfig(
  rows=ROWS, num_draft_tokens=DRAFTED, source_lengths=(512,), target_length=128
)
ONE_ROW = pairs.PairConfig(target="qwen3-0.6b", draft="attached", dtype="bfloat16")
ALONE = dataclasses.replace(DECODING, rows=1, source_lengths=(128,))
TENSOR_PARALLEL = sharding.PartitionConfig(data=1, model=4)
GRID = sharding.PartitionConfig(data=2, model=2)
ONE = sharding.PartitionConfig()


@pytest.fixture(scope="module", autouse=True)
def compilation_cache_off():
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", True)


def plan(topology, mesh, pair=WIDE, layers=LAYERS, decoding=DECODING):
  run = tiny_online.config(pair, "nowhere")
  run = dataclasses.replace(run, decoding=decoding, partition=mesh)
  return plan_lib.Plan(run, chips.Topology(topology), layers)


@functools.cache
def wide(topology, mesh, pair=WIDE, whole_draft=sharding.WHOLE_DRAFT):
  limited = functools.partial(sharding.Partitioner, whole_draft=whole_draft)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, "Partitioner", limited)
    return plan(topology, mesh, pair)


def round_of(found, record_top_k=64) -> Any:
  """Compiles a call of decoding rounds."""
  spec = dataclasses.replace(found.spec.greedy, record_top_k=record_top_k)
  state = found.state if record_top_k else found.state.replace(records=None)
  arguments = (found.served, found.scalar(), state)
  with native.portable(is_split=False):
    return steps.advance.lower(spec, DRAFTED, *arguments).compile()


def greedy_round(
  topology, mesh, record_top_k=64, pair=WIDE, whole_draft=sharding.WHOLE_DRAFT
):
  """Returns the operations of a compiled call of greedy rounds."""
  # All arguments by position, so that equal calls have one key in the cache.
  return compiled_round(topology, mesh, record_top_k, pair, whole_draft)[1]


@functools.cache
def compiled_round(topology, mesh, record_top_k, pair, whole_draft):
  made = round_of(wide(topology, mesh, pair, whole_draft), record_top_k)
  return made, hlo.HloProgram(made.as_text(), branch=0)


@contextlib.contextmanager
def forms_of_a_cpu():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(native, "forms", lambda: True)
    jax.clear_caches()  # functions that are already traced have the other forms
    yield
  jax.clear_caches()


def inner_loops(program):
  return [found for found in program.of("while") if found.depth >= 1]


@pytest.mark.parametrize(
  "topology, mesh, pair, loops",
  [
    ("v5e:2x2", TENSOR_PARALLEL, WIDE, 1),
    ("v5e:2x2", TENSOR_PARALLEL, CAUSAL, 1),
    ("h100:1", ONE, WIDE, 0),
  ],
  ids=["t5", "llama", "t5 on a GPU"],
)
def test_greedy_round_loops_at_most_over_draft_steps(topology, mesh, pair, loops):
  """It has no branches and never sorts; the control is the round of sampled rows."""
  program = greedy_round(topology, mesh, 0, pair)
  assert len(inner_loops(program)) == loops
  assert not program.of("sort", "conditional")
  if loops == 0:
    found = wide(topology, mesh, pair)
    sampled = programs.programs(found)[f"sampled round, K = {DRAFTED}"]
    with native.portable(is_split=False):
      text = sampled.traced().lower().compile().as_text()
    assert hlo.HloProgram(text, branch=0).of("conditional")


@pytest.mark.parametrize("pair", [WIDE, CAUSAL], ids=["t5", "llama"])
def test_recording_sorts_only_for_top_k(pair):
  recorded = greedy_round("v5e:2x2", TENSOR_PARALLEL, pair=pair).of("sort")
  assert recorded and all("top_k" in found.line for found in recorded)


def test_cpu_forms_loop_over_rows():
  with forms_of_a_cpu():
    found = plan("v5e:2x2", TENSOR_PARALLEL)
    program = hlo.HloProgram(round_of(found, 0).as_text(), branch=0)
  assert len(inner_loops(program)) > 1


def round_with_split_draft():
  """Compiles a round on TENSOR_PARALLEL with a draft that is sharded as well."""
  return greedy_round("v5e:2x2", TENSOR_PARALLEL, whole_draft=0)


@pytest.mark.parametrize(
  "mesh, pair, width, blocks",
  [(TENSOR_PARALLEL, WIDE, 2048, 3), (GRID, WIDE, 2048, 3), (GRID, CAUSAL, 4096, 2)],
  ids=["1 x 4", "2 x 2", "2 x 2, llama"],
)
def test_only_sub_block_sums_and_scalars_are_communicated(mesh, pair, width, blocks):
  """The only large sums are one per sub-block and one of the embedding.

  The arg max and the records need only a few scalars per position.
  """
  program = greedy_round("v5e:2x2", mesh, pair=pair)
  assert not program.of("all-to-all", "collective-permute")
  activations = ROWS // mesh.data * (DRAFTED + 1) * width * 4  # float32 at most
  sums = sums_of(program)
  large = [found for found in sums if found.bytes > activations / 4]
  assert len(large) == blocks * LAYERS + 1
  assert max(found.bytes for found in sums) <= activations
  assert len(sums) <= len(large) + 6
  candidates = ROWS // mesh.data * (DRAFTED + 1) * mesh.model * 64
  # Gathers outside the loop (depth 0) only replicate what the host reads.
  gathers = [found for found in program.of("all-gather") if found.depth]
  assert len(gathers) == 2
  assert max(gather.bytes for gather in gathers) <= 2 * 4 * candidates


def sums_of(program):
  return [found for found in program.of("all-reduce") if found.depth]


def test_sharded_draft_communicates_more_often():
  """Negative control of the number of sums."""
  few = sums_of(greedy_round("v5e:2x2", TENSOR_PARALLEL))
  assert len(sums_of(round_with_split_draft())) > len(few) + 6


def test_drafting_has_no_collectives():
  def within_drafting(program):
    return [x for x in program.of(*hlo.COLLECTIVES) if x.depth > 1]

  assert not within_drafting(greedy_round("v5e:2x2", TENSOR_PARALLEL))
  assert within_drafting(round_with_split_draft())


def test_caches_are_sharded_by_head_and_not_gathered():
  found = wide("v5e:2x2", TENSOR_PARALLEL)
  keys = found.state.target_cache.self_keys[0]
  assert keys.sharding.shard_shape(keys.shape)[1] == keys.shape[1] // 4
  cache = plan_lib.bytes_of(keys) * 4
  gathers = greedy_round("v5e:2x2", TENSOR_PARALLEL).of("all-gather")
  assert max(gather.bytes for gather in gathers) < cache / 4
  whole = NamedSharding(keys.sharding.mesh, PartitionSpec())
  control = jax.jit(lambda x: x, out_shardings=whole).lower(keys).compile()
  gathers = hlo.HloProgram(control.as_text()).of("all-gather")
  assert max(gather.bytes for gather in gathers) >= cache


@pytest.mark.parametrize("pair", [WIDE, CAUSAL], ids=["t5", "llama"])
def test_each_part_of_a_mesh_prefills_one_prompt(pair):
  """Two parts prefill two prompts in the time of one, and no cache is communicated."""
  found, more = prefilled(ROWS, pair)
  sums = found.of("all-reduce")
  source, width = DECODING.source_lengths[0], {WIDE: 2048, CAUSAL: 4096}[pair]
  assert max(x.bytes for x in sums) <= source * width * 4  # activations of one prompt
  assert not found.of("all-to-all", "collective-permute")
  inserted, _ = prefilled(ROWS, pair, "insertion")
  assert not inserted.of("all-to-all", "collective-permute")
  moved = [*found.of("all-gather")], [*inserted.of("all-gather", "all-reduce")]
  for operations in moved:
    read_by_host = 8 * ROWS * 200 * 4  # of the rows, in bytes
    assert sum(x.bytes for x in operations) <= read_by_host
  # An odd number of rows cannot be divided, so each call prefills one prompt.
  control, one = prefilled(ROWS - 1, pair)
  assert 0.9 < more["flops"] / one["flops"] < 1.2
  assert not found.of("while")


def prefilled(rows, pair, name="prefill"):
  """Compiles a program for `rows` rows on GRID; returns its operations and costs."""
  decoding = dataclasses.replace(DECODING, rows=rows)
  found = plan("v5e:2x2", GRID, pair, decoding=decoding)
  with native.portable(is_split=False):
    made = programs.programs(found)[name].traced().lower().compile()
  assert found.spec.parts == (2 if rows % 2 == 0 else 1)
  return hlo.HloProgram(made.as_text(), branch=0), made.cost_analysis()


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
def test_rows_are_updated_in_place(topology):
  mesh = ONE if topology == "h100:1" else TENSOR_PARALLEL
  found = wide(topology, mesh)
  held = plan_lib.bytes_of(found.state)
  made, _ = compiled_round(topology, mesh, 64, WIDE, sharding.WHOLE_DRAFT)
  assert made.memory_analysis().alias_size_in_bytes >= held

  def kept(served, rounds, state):
    return steps.advance(found.spec, DRAFTED, served, rounds, state)

  with native.portable(is_split=False):
    control = jax.jit(kept).lower(found.served, found.scalar(), found.state).compile()
  assert control.memory_analysis().alias_size_in_bytes == 0


@pytest.mark.parametrize("pair", [WIDE, CAUSAL], ids=["t5", "llama"])
def test_one_token_step_is_not_slower_than_several(pair, monkeypatch):
  """Compares the compiler's estimates; the control attends with a single query."""
  step = program_of(pair, "plain step").cycles
  assert step < 1.05 * program_of(pair, VERIFICATION).cycles
  monkeypatch.setattr(layers, "never_alone", lambda attend, *args: attend(*args))
  jax.clear_caches()
  alone = program_of.__wrapped__(pair, "plain step").cycles
  jax.clear_caches()
  assert step < 0.9 * alone


@functools.cache
def program_of(pair, name):
  """Compiles a program of a run; `__wrapped__` does so again."""
  found = plan("v5e:2x2", TENSOR_PARALLEL, pair)
  return programs.compiled(found, programs.programs(found)[name])


def test_attention_output_is_projected_without_a_copy(monkeypatch):
  """The control joins the heads first, which costs two copies per layer."""
  found = program_of(WIDE, VERIFICATION).copies
  monkeypatch.setattr(layers, "HeadsProjection", Joined)
  jax.clear_caches()
  joined = program_of.__wrapped__(WIDE, VERIFICATION).copies
  jax.clear_caches()
  assert joined >= found + 2 * LAYERS


class Joined(layers.Projection):
  """Transposes the heads of a position together before the projection."""

  def _product(self, x, outputs):
    rows, heads, count, size = x.shape
    joined = jnp.transpose(x, (0, 2, 1, 3)).reshape(rows, count, heads * size)
    return super()._product(joined, outputs)


def test_tpu_finds_a_threshold_in_the_fastest_number_of_passes(monkeypatch):
  """Of the passes over the vocabulary that top-k and top-p need, for 64 rows."""
  place = jax.sharding.SingleDeviceSharding(chips.Topology("v5e:2x2").devices()[0])
  shapes = [
    jax.ShapeDtypeStruct((64, 1, size), dtype, sharding=place)
    for size, dtype in ((151_936, jnp.uint32), (151_936, jnp.float32), (1, jnp.float32))
  ]

  def cycles(bits):
    monkeypatch.setitem(sampling._BITS_OF_A_PASS, "tpu", bits)
    with native.portable(is_split=False):
      traced = jax.jit(lambda *x: sampling._least_rank(*x)).trace(*shapes)
    program = hlo.HloProgram(traced.lower().compile().as_text())
    return sum(x.cycles * (32 // bits) ** x.depth for x in program.operations)

  chosen = sampling._BITS_OF_A_PASS["tpu"]
  assert cycles(chosen) == min(cycles(bits) for bits in (1, 2, 4))


def test_shortlist_logits_are_scattered_by_vocabulary_rows(monkeypatch):
  """The control scatters along the last axis, which is slower on a TPU."""

  def scattered(logits, ids, size):
    empty = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
    return empty.at[..., ids].set(logits)

  def cycles(program):
    return sum(x.cycles for x in program.operations)

  found = cycles(greedy_round("v5e:2x2", TENSOR_PARALLEL))
  monkeypatch.setattr(served, "scatter_to_vocab", scattered)
  jax.clear_caches()
  control = round_of(plan("v5e:2x2", TENSOR_PARALLEL))
  jax.clear_caches()
  assert found < 0.8 * cycles(hlo.HloProgram(control.as_text(), branch=0))


# A decoder layer in a plain step of one row; they should only fall. Kernels on an H100,
# and cycles over those of reading the layer's weights and caches, on v5e and v6e.
KERNELS = {"llama": 15, "qwen3": 15, "gemma3": 20, "t5": 18, "t5gemma": 22}
CYCLES = {
  "llama": (0.6, 1.0),
  "qwen3": (1.2, 1.9),
  "gemma3": (0.9, 1.6),
  "t5": (0.5, 0.7),
  "t5gemma": (2.7, 4.6),
}


@pytest.mark.parametrize("family", KERNELS)
def test_gpu_runs_few_kernels_per_layer(family):
  """Temporaries as large as a kernel would be a copy of it."""
  less, more = plain_steps("h100:1", family)
  assert 0 < more.kernels - less.kernels <= KERNELS[family]
  assert more.temporaries_gb < 2e-3


@pytest.mark.parametrize("family", CYCLES)
def test_tpu_reads_a_layer_at_little_more_than_its_bandwidth(family):
  """The control is in `test_one_column_is_not_slower_than_two_on_a_tpu`."""
  values = [over_bytes(topology, family) for topology in ("v5e:2x2", "v6e:2x2")]
  assert all(0 < x <= most for x, most in zip(values, CYCLES[family], strict=True))


def over_bytes(topology, family):
  less, more = plain_steps(topology, family)
  read = 1e9 * (more.arguments_gb - less.arguments_gb)
  least = chips.Topology(topology).chip.cycles_to_read(read)
  return (more.cycles - less.cycles) / least


@pytest.mark.parametrize("name", ["plain step", VERIFICATION])
def test_step_of_one_row_on_a_gpu_moves_no_cache(name, monkeypatch):
  """The control multiplies queries by keys, for which XLA transposes all keys."""
  assert not moved_caches(name)

  def queries_first(query, keys):
    return jnp.einsum("bhgnd,bhtd->bhgnt", query, keys).astype(jnp.float32)

  monkeypatch.setattr(layers, "attention_logits", queries_first)
  jax.clear_caches()
  assert moved_caches(name)
  jax.clear_caches()


def moved_caches(name):
  """Copies, transpositions and concatenations as large as the keys of a layer."""
  found = plan("h100:1", ONE, ONE_ROW, decoding=ALONE)
  size = plan_lib.bytes_of(found.state.target_cache.self_keys[0])
  with native.portable(is_split=False):
    text = programs.programs(found)[name].traced().lower().compile().as_text()
  of_whole_arrays = re.compile(r"%\S*(copy|transpose|concatenate)\S* = ")
  return [
    operation
    for operation in hlo.HloProgram(text, branch=0).operations
    if of_whole_arrays.search(operation.line) and operation.bytes >= size
  ]


def test_gpu_runs_more_kernels_with_the_code_for_a_cpu():
  """Negative control."""
  with forms_of_a_cpu():
    less, more = plain_steps.__wrapped__("h100:1", "t5")
  assert more.kernels - less.kernels > KERNELS["t5"]


@functools.cache
def plain_steps(topology, family):
  """Compiles plain steps of one row, with `LAYERS` layers and with one more."""
  pair = dataclasses.replace(ONE_ROW, target=sizes.FAMILIES[family])
  depths = (plan(topology, ONE, pair, n, ALONE) for n in (LAYERS, LAYERS + 1))
  return [programs.compiled(x, programs.programs(x)["plain step"]) for x in depths]


def test_one_column_is_not_slower_than_two_on_a_tpu(monkeypatch):
  """Every product of a step of one row; the control multiplies a single column."""
  decoding = dataclasses.replace(ALONE, num_draft_tokens=1)
  found = plan("v5e:2x2", ONE, ONE_ROW, decoding=decoding)
  two = programs.compiled(found, programs.programs(found)["verification of 2 tokens"])
  step, _ = plain_steps("v5e:2x2", "qwen3")
  assert step.cycles < 1.05 * two.cycles
  monkeypatch.setattr(
    layers, "_never_one_column", lambda multiply, *args: multiply(*args)
  )
  monkeypatch.setattr(f"{__name__}.plain_steps", plain_steps.__wrapped__)
  jax.clear_caches()
  assert over_bytes("v5e:2x2", "qwen3") > 2 * CYCLES["qwen3"][0]
  jax.clear_caches()


@pytest.mark.parametrize(
  ("target", "drafted"), [("qwen3-0.6b", 5), ("gemma-3-1b", 5), ("tinyllama-1.1b", 2)]
)
def test_one_row_whose_heads_share_keys_compiles_for_a_gpu(target, drafted):
  program = of_shared_keys(target, drafted)[f"round, K = {drafted}"]
  with native.portable(is_split=False):
    assert program.traced().lower().compile().as_text()


def of_shared_keys(target, drafted):
  pair = dataclasses.replace(ONE_ROW, target=target)
  decoding = dataclasses.replace(DECODING, rows=1, num_draft_tokens=drafted)
  return programs.programs(plan("h100:1", ONE, pair, decoding=decoding))


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
@pytest.mark.parametrize("family", ["qwen3", "t5", "t5gemma"])
def test_long_prompt_needs_no_array_of_all_attention_weights(family, topology):
  """All temporaries together take less than such an array, [H, S, S] in bfloat16."""
  temporaries, weights = of_long_prompt(family, topology)
  assert 0 < temporaries < weights


@pytest.mark.parametrize("family", ["qwen3", "t5", "t5gemma"])
def test_long_prompt_at_once_needs_all_attention_weights(family, monkeypatch):
  """Negative control."""
  monkeypatch.setattr(layers, "BLOCK", 2**20)
  monkeypatch.setattr(llama, "CHUNK", 2**20)
  jax.clear_caches()
  temporaries, weights = of_long_prompt(family, "h100:1")
  jax.clear_caches()
  assert temporaries > weights


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
def test_chunk_of_a_long_prompt_is_written_in_place(topology):
  program, weights = long_prompt(
    "qwen3", topology, "prefill of a chunk", prefill_chunk=512
  )
  assert program.temporaries_gb < weights / 4
  keys = 2 * LAYERS * 8 * 128 * 8192 * 2  # and values, in bytes
  assert program.in_place_gb > keys / 1e9
  # Control: a whole prefill has no cache to write to.
  whole, _ = long_prompt("qwen3", topology, "prefill")
  assert whole.in_place_gb < keys / 1e9


def of_long_prompt(family, topology):
  """Temporaries of a prefill of 8,192 tokens, and the attention weights of a layer."""
  program, weights = long_prompt(family, topology, "prefill")
  return program.temporaries_gb, weights


def long_prompt(family, topology, name, **changes):
  """Compiles a program of 8,192 tokens; also returns GB of a layer's weights."""
  pair, length = dataclasses.replace(ONE_ROW, target=sizes.FAMILIES[family]), 8192
  decoding = dataclasses.replace(ALONE, source_lengths=(length,), **changes)
  found = plan(topology, ONE, pair, LAYERS, decoding)
  weights = sizes.size(pair.target).num_heads * length**2 * 2  # bytes
  return programs.compiled(found, programs.programs(found)[name]), weights / 1e9


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
def test_every_program_of_the_shipped_pair_compiles(topology):
  """This includes the programs of learning; none of them calls native CPU code."""
  decoding = dataclasses.replace(DECODING, rows=1, source_lengths=(64,))
  found = plan(topology, ONE, pairs.PairConfig(), 0, decoding)
  listed = programs.programs(found)
  assert {"slice", "draw", "append", "swap", "prefill"} < set(listed)
  for name, program in listed.items():
    made = programs.compiled(found, program)
    # Writing a prefilled row into the others is nothing but copies.
    assert made.copies if name == "insertion" else made.kernels, name
    assert not made.foreign_calls, name
    assert not made.collectives, name
    assert bool(made.over_bound) == bool(made.cycles and "round" not in name), name


def test_update_slice_of_a_replicated_draft_has_no_collectives():
  """A replicated draft is updated without communication."""
  found = wide("v5e:2x2", TENSOR_PARALLEL)
  config = update.UpdateConfig(optimizers.OptimizerConfig(), num_new=1, num_replay=0)
  run = dataclasses.replace(
    found.run, learning=dataclasses.replace(found.run.learning, update=config)
  )
  small = plan_lib.Plan(run, chips.Topology("v5e:2x2"), 1)
  made = programs.compiled(small, programs.programs(small)["slice"])
  assert made.kernels and not made.collectives


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
def test_programs_of_an_eagle_head_compile(topology):
  """It reads three layers of its target and covers a part of the vocabulary."""
  head = EagleConfig(
    layers=dataclasses.replace(sizes.size("qwen3-0.6b"), num_layers=1),
    state_layers=(0, 1, 2),
  )
  pair = dataclasses.replace(ONE_ROW, attached=head)
  found = plan(topology, ONE, pair, decoding=ALONE)
  for name in (f"round, K = {DRAFTED}", "prefill", "slice"):
    assert programs.compiled(found, programs.programs(found)[name])
