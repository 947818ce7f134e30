"""Kernel launches counted in the text of a compiled program."""

import kernels

PROGRAM = """HloModule jit_steps, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

%greedy (p: (f32[4])) -> f32[4] {
  %p = (f32[4]{0}) parameter(0)
  %e = f32[4]{0} get-tuple-element(%p), index=0
  ROOT %f = f32[4]{0} fusion(%e), kind=kLoop, calls=%fused
}

%sampled (p: (f32[4])) -> f32[4] {
  %p = (f32[4]{0}) parameter(0)
  %e = f32[4]{0} get-tuple-element(%p), index=0
  %f = f32[4]{0} fusion(%e), kind=kLoop, calls=%fused
  ROOT %s = f32[4]{0} sort(%f), dimensions={0}, to_apply=%less
}

%captured (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %c = (f32[4]{0}, s8[64]{0}) custom-call(%p), custom_call_target="__cublas$gemm"
  %g = f32[4]{0} get-tuple-element(%c), index=0
  ROOT %k = f32[4]{0} copy(%g)
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %y = f32[4]{0} call(%x), to_apply=%captured
  %t = (f32[4]{0}) tuple(%y)
  %z = f32[4]{0} conditional(%i, %t, %t), branch_computations={%greedy, %sampled}
  ROOT %r = (s32[], /*index=1*/f32[4]{0}) tuple(%i, %z)
}

ENTRY %main (a: f32[4]) -> (s32[], f32[4]) {
  %a = f32[4]{0} parameter(0)
  %outside = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
  ROOT %w = (s32[], f32[4]{0}) while(%outside), condition=%less, body=%body
}
"""


def test_kernels_of_one_loop_iteration_are_counted():
  """Counts the product, the copy, and the fusion of the greedy branch."""
  assert kernels.in_loop(PROGRAM) == 3


def test_branches_named_true_and_false_are_counted():
  named = "true_computation=%greedy, false_computation=%sampled"
  listed = "branch_computations={%greedy, %sampled}"
  assert kernels.in_loop(PROGRAM.replace(listed, named)) == 3


def test_program_without_a_loop_returns_none():
  assert kernels.in_loop(PROGRAM.replace("while(", "custom-call(")) is None
