"""Operations counted in the text of a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from osd_tools import hlo

TEXT = """
HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%inner (p.0: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.0 = (s32[], f32[4]{0}) parameter(0)
  %a = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %a)
}

%outer (p.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %w = (s32[], f32[4]{0}) while(%q), condition=%c, body=%inner
  %g = (bf16[2,3]{1,0}, bf16[4,3]{1,0}) all-gather-start(%b), dimensions={0}
  %h = bf16[4,3]{1,0} all-gather-done(%g)
  %c2 = f32[4]{0} conditional(%n, %l, %r), branch_computations={%one, %two}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %a)
}

%one (p: f32[4]) -> f32[4] {
  ROOT %s = f32[4]{0} sort(%p), dimensions={0}
}

%two (p: f32[4]) -> f32[4] {
  ROOT %k = f32[4]{0} copy(%p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %v = (s32[], f32[4]{0}) while(%t), condition=%c, body=%outer
  ROOT %f = f32[4]{0} fusion(%v), kind=kLoop, calls=%one
}
"""


def test_operations_are_counted_by_loop_depth():
  program = hlo.HloProgram(TEXT)
  assert program.count(0) == {"while": 1, "fusion": 1}
  inside = program.count(1)
  expected = {"while": 1, "all-gather": 1, "conditional": 1, "sort": 1, "copy": 1}
  assert inside == expected | {"tuple": 1}
  assert program.count(2) == {"parameter": 1, "all-reduce": 1, "tuple": 1}


def test_only_the_chosen_branch_is_counted():
  assert hlo.HloProgram(TEXT, branch=0).count(1)["copy"] == 0
  assert hlo.HloProgram(TEXT, branch=0).count(1)["sort"] == 1
  assert hlo.HloProgram(TEXT, branch=1).count(1)["copy"] == 1
  by_name = TEXT.replace(
    "branch_computations={%one, %two}", "true_computation=%one, false_computation=%two"
  )
  assert hlo.HloProgram(by_name, branch=0).count(1)["copy"] == 1
  assert hlo.HloProgram(by_name, branch=1).count(1)["sort"] == 1


def test_asynchronous_copy_is_not_counted_as_a_copy():
  counts = hlo.HloProgram(TEXT.replace(" copy(", " copy-start(")).count(1)
  assert (counts["copy-start"], counts["copy"]) == (1, 0)


def test_bytes_include_every_part_of_a_tuple():
  (gather,) = hlo.HloProgram(TEXT).of("all-gather")
  assert gather.bytes == 2 * (2 * 3 + 4 * 3) and gather.depth == 1
  assert hlo.bytes_of("(s32[], f32[4]{0}, u8[3], pred[2])") == 4 + 16 + 3 + 2
  assert hlo.dimensions("(s32[], f32[4,16]{1,0})") == ["4", "16"]


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_program_compiled_on_this_machine_is_parsed():
  mesh = Mesh(np.asarray(jax.devices()[:4]), ("model",))
  split = NamedSharding(mesh, PartitionSpec("model"))
  whole = NamedSharding(mesh, PartitionSpec())

  def loop(x):
    def step(_, carry):
      return carry + jnp.sum(x * carry)

    return jax.lax.fori_loop(0, 5, step, jnp.float32(1))

  made = jax.jit(loop, in_shardings=split, out_shardings=whole)
  text = made.lower(jnp.ones(64)).compile().as_text()
  reduced = hlo.HloProgram(text).of("all-reduce")
  assert [found.bytes for found in reduced] == [4] and reduced[0].depth == 1
