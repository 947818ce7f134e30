"""What the TPU's own compiler makes of serving, without a TPU.

`advance`, the call that drafts, verifies and accepts until a row ends, is compiled for
a named topology, with weights and caches split as `PartitionConfig` splits them. Of one
round: kernels, inner loops, copies, sorts, collectives with their bytes; of the call:
compile time and memory of one chip. Nothing runs, so that nothing here is a speed.

Needs the compiler: an environment of its own with `pip install 'jax[tpu]' flax optax`.

  python benchmarks/ahead_of_time.py [--topology v5e:2x2] [--mesh 1 4] [--rows 8]
      [--target flan-t5-xl] [--draft t5-small] [--drafted 5] [--layers N]
"""

import argparse
import dataclasses
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from osd_jax import base, native, partitioning
from osd_jax.measuring import compiled
from osd_jax.models import sizes, t5
from osd_jax.serving import calls, slots

ASKED = {  # of flan-t5-xl with t5-small, 8 rows, 4 chips
  "inner loops a round": "<= 8",
  "copies a round": "<= 60",
  "compile, s": "<= 60",
  "caches of the target, GB a chip": "<= 0.35",
  "gathers of a cache": "<= 0",
}


def abstract(model: base.Model, shardings: Any) -> base.Params:
  """Shapes of a model's served parameters in bfloat16, and where they lie."""

  def placed(shape, sharding):
    dtype = jnp.bfloat16 if shape.dtype == jnp.float32 else shape.dtype
    return jax.ShapeDtypeStruct(shape.shape, dtype, sharding=sharding)

  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = jax.tree.map(placed, shapes, shardings)
  prepare = jax.jit(model.prepare)
  shardings = prepare.lower(params).compile().output_shardings
  served = jax.eval_shape(model.prepare, params)
  return jax.tree.map(placed, served, shardings)


def lowered(given: argparse.Namespace) -> tuple[Any, Any]:
  """`advance` for the topology, not compiled yet, and the state it takes."""
  data, model = given.mesh
  chips = topologies.get_topology_desc(
    platform="tpu", topology_name=given.topology
  ).devices
  grid = np.asarray(chips[: data * model]).reshape(data, model)
  mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  partitioner = partitioning.Partitioner(mesh)
  target, draft = (
    t5.build(shape_of(name, given.layers), name) for name in (given.target, given.draft)
  )
  config = slots.DecodingConfig(
    rows=given.rows,
    source_lengths=(given.source,),
    target_length=given.length,
    num_draft_tokens=given.drafted,
  )
  program = calls.Program(config.shapes(), target, draft, partitioner)
  served = calls.Served(
    abstract(target, partitioner.params(target)),
    abstract(draft, partitioner.draft_params(draft)),
  )
  state = jax.eval_shape(lambda s: calls.empty(program, s, given.source), served)
  state = jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    state,
    program.shardings(state),
  )
  rounds = jax.ShapeDtypeStruct((), jnp.int32)
  return calls.advance.lower(program, given.drafted, served, rounds, state), state


def shape_of(name: str, layers: int | None) -> t5.T5Config:
  """A published shape in bfloat16, cut to so many layers if a number is given."""
  shape = dataclasses.replace(sizes.size(name), dtype="bfloat16")
  if layers is None:
    return shape
  return dataclasses.replace(
    shape, num_encoder_layers=layers, num_decoder_layers=layers
  )


def cache_bytes(state: Any) -> int:
  """Bytes of the target's keys and values on one chip."""
  cache = state.target_cache
  arrays = (cache.self_keys, cache.self_values, cache.cross_keys, cache.cross_values)
  return sum(
    int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(arrays)
  )


def figures(program: compiled.Program, state: Any, memory: Any) -> dict[str, float]:
  """What is reported of a compiled call; a round is what stands in its outer loop."""
  inside, gigabyte = program.count(1), 1e9
  collectives = [x for x in program.of(*compiled.COLLECTIVES) if x.depth >= 1]
  smallest = min(leaf.size for leaf in state.target_cache.self_keys)
  shard = smallest // state.target_cache.self_keys[0].sharding.mesh.shape["data"]
  gathers = [
    x for x in program.of("all-gather") if x.bytes >= 2 * shard and is_cache(x, state)
  ]
  return {
    "kernels a round, without those of drafting": inside["fusion"],
    "inner loops a round": inside["while"],
    "copies a round": inside["copy"],
    "fetched ahead a round": inside["copy-start"],
    "sorts": len(program.of("sort")),
    "all-reduces a round, without drafting": inside["all-reduce"],
    "all-gathers a round, without drafting": inside["all-gather"],
    "collectives inside of inner loops": sum(x.depth > 1 for x in collectives),
    "moved by collectives a round, MB": sum(x.bytes for x in collectives) / 1e6,
    "gathers of a cache": len(gathers),
    "foreign calls": sum("ffi" in x.line for x in program.of("custom-call")),
    "caches of the target, GB a chip": cache_bytes(state) / gigabyte,
    "arguments, GB a chip": memory.argument_size_in_bytes / gigabyte,
    "temporaries, GB a chip": memory.temp_size_in_bytes / gigabyte,
    "given back in place, GB a chip": memory.alias_size_in_bytes / gigabyte,
  }


def is_cache(operation: compiled.Operation, state: Any) -> bool:
  """Whether a result has the positions and the size of a head of some cache."""
  cache = state.target_cache
  lengths = {leaf.shape[2] for leaf in (cache.self_keys[0], cache.cross_keys[0])}
  result = operation.line.split(" all-gather")[0]
  dims = {int(n) for n in compiled.dimensions(result)}
  return cache.self_keys[0].shape[3] in dims and bool(lengths & dims)


def options() -> argparse.ArgumentParser:
  """The command line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--topology", default="v5e:2x2")
  parser.add_argument("--mesh", type=int, nargs=2, default=(1, 4))
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--target", default="flan-t5-xl")
  parser.add_argument("--draft", default="t5-small")
  parser.add_argument("--drafted", type=int, default=5, help="K")
  parser.add_argument("--layers", type=int, help="of both models, to be quick")
  parser.add_argument("--source", type=int, default=512)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--text", type=pathlib.Path, help="keeps the compiled text")
  parser.add_argument("--results", type=pathlib.Path, default=measure.RESULTS)
  return parser


def main() -> None:
  given = options().parse_args()
  measure.RESULTS = given.results
  with native.portable():  # it would be asked for: computations run on a CPU here
    started = time.perf_counter()
    call, state = lowered(given)
    traced = time.perf_counter()
    made = call.compile()
    seconds = time.perf_counter() - traced
  text = made.as_text()
  if given.text:
    given.text.write_text(text)
  greedy = compiled.Program(text, branch=0)
  found = figures(greedy, state, made.memory_analysis())
  found = {"trace, s": traced - started, "compile, s": seconds} | found
  data, model = given.mesh
  case = f"{given.topology}, mesh {data} x {model}, {given.target} + {given.draft}"
  case += f", {given.rows} rows, K {given.drafted}"
  case += f", {given.layers} layers" if given.layers else ""
  measure.report("ahead_of_time", measure.rows(case, "compiled only", found, ASKED))


if __name__ == "__main__":
  main()
