"""Parses compiled programs and counts their operations, loop by loop.

The text of a program is `jax.stages.Compiled.as_text()`: a list of computations. One of
them is the entry; loops, conditionals and calls refer to the others.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\d\-]*)\(")
_CALLED = re.compile(
  r"(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)"
  r"|branch_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation of a program.

  Attributes:
    name: "fusion", "copy", "all-reduce", ... An asynchronous pair counts once, under
      its name without "-start". Only "copy-start" keeps its name, because it prefetches
      from one memory to another and does not block.
    bytes: bytes of the result on one device.
    depth: number of loops around the operation.
    line: the compiler's text.
  """

  name: str
  bytes: int
  depth: int
  line: str

  @property
  def cycles(self) -> int:
    """Returns the estimate of a TPU's compiler, or 0 from other compilers."""
    match = re.search(r'"estimated_cycles":"(\d+)"', self.line)
    return int(match.group(1)) if match else 0


class HloProgram:
  """The operations of a compiled program."""

  def __init__(self, text: str, branch: int | None = None):
    """Parses the text of a program.

    Args:
      text: the result of `Compiled.as_text()`.
      branch: the branch that every conditional takes; 0 is the false branch of
        `jax.lax.cond`, which greedy rows take. None counts all branches.
    """
    self._branch = branch
    self._computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
      head = re.match(r"(ENTRY )?%?([\w.\-]+)\s.*\{$", line)
      if head and not line.startswith((" ", "HloModule")):
        name = head.group(2)
        self._computations[name] = []
        # The entry computation may be anywhere in the text, usually last.
        entry = name if head.group(1) else entry
      elif name:
        self._computations[name].append(line)
    self.operations = list(self._walk(entry, 0))

  def count(self, depth: int) -> Counter[str]:
    """Counts operations by name that are inside exactly `depth` loops."""
    return Counter(
      operation.name for operation in self.operations if operation.depth == depth
    )

  def of(self, *names: str) -> list[Operation]:
    """Returns the operations that have any of the given names."""
    return [operation for operation in self.operations if operation.name in names]

  @property
  def foreign_calls(self) -> int:
    """Returns the number of calls through XLA's foreign function interface."""
    return sum("ffi" in call.line for call in self.of("custom-call"))

  def _walk(self, name: str, depth: int) -> Iterator[Operation]:
    for line in self._computations.get(name, ()):
      match = _OPERATION.match(line)
      if not match:
        continue
      result, operation = match.groups()
      # The matching "-start" has been counted.
      if operation.endswith("-done"):
        continue
      if operation != "copy-start":
        operation = operation.removesuffix("-start")
      yield Operation(operation, bytes_of(result), depth, line)
      # Loop bodies are one level deeper; branches and calls stay on the same level.
      if operation == "while":
        # The condition of the loop is not walked, since it only reads small arrays.
        body = re.search(r"body=%?([\w.\-]+)", line)
        yield from self._walk(body.group(1) if body else "", depth + 1)
      elif operation in ("conditional", "call"):
        for called in self._called(line):
          yield from self._walk(called, depth)

  def _called(self, line: str) -> list[str]:
    """Returns the computations that a conditional or a call runs."""
    called = [
      name.strip().lstrip("%")
      for one, several in _CALLED.findall(line)
      for name in ([one] if one else several.split(","))
    ]
    if len(called) < 2 or self._branch is None:
      return called
    by_name = "false_computation" in line  # here, the true branch comes first
    return [called[-1 - self._branch] if by_name else called[self._branch]]


def bytes_of(result: str) -> int:
  """Returns the bytes of a result, an array or a tuple, as XLA writes it."""
  return sum(
    _BYTES.get(dtype, int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz") or 32) // 8)
    * math.prod(int(size) for size in dims.split(",") if size)
    for dtype, dims in _SHAPE.findall(result)
  )


def dimensions(result: str) -> list[str]:
  """Returns every dimension of a result's arrays, as XLA writes them."""
  return [
    size for _, dims in _SHAPE.findall(result) for size in dims.split(",") if size
  ]


def product_flops(jaxpr: Any) -> float:
  """Returns the floating-point operations of a jaxpr's matrix products, on all devices.

  Counts the most expensive branch of a cond, and one iteration of an unbounded loop.

  Args:
    jaxpr: `jax.stages.Traced.jaxpr`, or one nested in it.
  """
  total = 0.0
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
      (contracted, _), _ = params["dimension_numbers"]
      left, out = equation.invars[0].aval, equation.outvars[0].aval
      inner = math.prod(left.shape[axis] for axis in contracted)
      total += 2.0 * math.prod(out.shape) * inner
    parts = [product_flops(part) for part in _within(params)]
    if parts:
      # A scan states its length. A while loop does not, and counts once.
      total += max(parts) if name == "cond" else params.get("length", 1) * sum(parts)
  return total


def _within(params: Mapping[str, Any]) -> Iterator[Any]:
  """Yields the jaxprs nested in an equation."""
  for value in params.values():
    for part in value if isinstance(value, tuple | list) else (value,):
      if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
        yield part
