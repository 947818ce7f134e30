"""Number of kernels that a decoding step launches, counted in its compiled program.

On an accelerator, launches rather than bytes limit the speed of a small model. Every
instruction of the loop body that computes or copies counts as one launch. A fusion
counts once; tuples and bitcasts launch nothing. A conditional counts as its greedy
branch, and an inner loop counts as one iteration.
"""

from collections import Counter

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import rounds, sampling
from osd_jax.decoding import state as state_lib
from osd_tools import hlo

FREE = (
  *("add-dependency", "after-all", "bitcast", "call", "conditional", "constant"),
  *("get-tuple-element", "opt-barrier", "parameter", "tuple", "while"),
)


def per_step(
  model: base.Model, params: base.Params, rows: int, source: int, target: int
) -> int | None:
  """Counts the launches of one plain decoding step.

  Returns None if the compiled program contains no loop.

  Args:
    model: the target.
    params: its parameters; only their shapes are used.
    rows: B.
    source: S.
    target: T.
  """

  def prefilled(params):
    tokens = jnp.ones((rows, source), jnp.int32)
    length = state_lib.buffer_length(target)
    served = model.prepare(params)
    cache = model.prefill(served, tokens, model.mask(tokens), length)
    settings = sampling.make_settings(rows, max_length=target)
    state = state_lib.initial_state(
      model.starts(tokens), settings, cache, None, target, 0, model.vocab_size
    )
    return served, state

  def steps(served, state):
    spec = rounds.DecodeSpec(model, rows=rows)
    return rounds.run_rounds(spec, 0, served, None, jnp.int32(target), state)

  shapes = jax.eval_shape(prefilled, params)
  compiled = jax.jit(steps, donate_argnums=1).lower(*shapes).compile()
  return in_loop(compiled.as_text())


def in_loop(text: str) -> int | None:
  """Counts the launches per iteration of the outer loop; the inner ones count once."""
  counts: Counter[int] = Counter()
  for operation in hlo.HloProgram(text, branch=0).operations:
    counts[min(operation.depth, 1)] += operation.name not in FREE
  return counts[1] if 1 in counts else None
