"""Number of kernels that a decoding step launches, counted in its compiled program.

On an accelerator, launches rather than bytes limit the speed of a small model. Every
instruction of the loop body that computes or copies counts as one launch. A fusion
counts once; tuples and bitcasts launch nothing. A conditional counts as its branch with
the fewest launches (the greedy branch), and an inner loop counts as one iteration.
"""

import re

import jax
import jax.numpy as jnp

from osd_jax import base
from osd_jax.decoding import rounds, sampling
from osd_jax.decoding import state as state_lib

FREE = {
  "add-dependency",
  "after-all",
  "async-done",
  "bitcast",
  "call",
  "conditional",
  "constant",
  "copy-done",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "tuple",
  "while",
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = .*?[\s)]([a-z][a-z0-9-]*)\(")
_CALLED = {  # attributes that name computations with their own launches
  "while": r"body=%?([\w.-]+)",
  "call": r"to_apply=%?([\w.-]+)",
  "conditional": r"(?:branch_computations=\{|true_computation=)([^}]*)",
}


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
  """Counts the launches per iteration of the largest loop in a compiled program."""
  computations = _parse(text)
  bodies = [
    name
    for lines in computations.values()
    for opcode, called in lines
    if opcode == "while"
    for name in called
  ]
  return max((_launches(computations, name) for name in bodies), default=None)


Computations = dict[str, list[tuple[str, list[str]]]]


def _parse(text: str) -> Computations:
  """Returns computation -> (opcode, called computations) of each instruction."""
  found: Computations = {}
  inside: list[tuple[str, list[str]]] = []
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      inside = found.setdefault(header.group(1), [])
    elif instruction := _INSTRUCTION.match(line):
      opcode = instruction.group(1)
      inside.append((opcode, _called(opcode, line)))
  return found


def _called(opcode: str, line: str) -> list[str]:
  found = re.search(_CALLED[opcode], line) if opcode in _CALLED else None
  if not found:
    return []
  if opcode == "conditional" and "true_computation" in line:
    return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", line)
  return re.findall(r"[\w.-]+", found.group(1))


def _launches(computations: Computations, name: str) -> int:
  total = 0
  for opcode, called in computations.get(name, []):
    if called:
      total += min(_launches(computations, inner) for inner in called)
    else:
      total += opcode not in FREE
  return total
