"""What a decoding step computes on a CPU, in C++: `step.cc` says how and why.

It is compiled where it runs, at its first use, and kept; without a compiler, and on
every other backend, XLA computes the same instead (`models/layers.py`), summing in
another order.
"""

import contextlib

import jax
import jax.numpy as jnp

from osd_jax.native import build

MOST_COLUMNS = 32  # beyond, the blocks of XLA's products are faster

PARTS = ("products", "attention")

_off = jax.make_user_context(())  # compiled calls know what they were traced with


def covers(columns: jax.Array, kernel: jax.Array) -> bool:
  """Whether a product is computed here, on this machine; builds at the first call.

  Args:
    columns: [n, in].
    kernel: [out, in].
  """
  types = (columns.dtype, kernel.dtype)
  return (
    columns.shape[0] <= MOST_COLUMNS
    and types in ((jnp.float32, jnp.float32), (jnp.float32, jnp.int8))
    and columns.size > 0
    and kernel.size > 0
    and _usable("products")
  )


def product(columns: jax.Array, kernel: jax.Array) -> jax.Array:
  """columns [n, in] times a kernel [out, in], all float32: [n, out]."""
  shape = (columns.shape[0], kernel.shape[0])
  return _call("ProductFloat32", shape, columns, kernel)


def int8_product(columns: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
  """`layers.int8_matmul` of columns [n, in], a kernel [out, in] and a scale [out]."""
  shape = (columns.shape[0], kernel.shape[0])
  return _call("ProductInt8", shape, columns, kernel, scale)


def attends(query: jax.Array, keys: jax.Array) -> bool:
  """Whether attention is computed here, as `covers`; shapes as in `attention`."""
  return (
    query.shape[1] <= MOST_COLUMNS
    and (query.dtype, keys.dtype) == (jnp.float32, jnp.float32)
    and query.size > 0
    and _usable("attention")
  )


def attention(
  query: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array
) -> jax.Array:
  """Unscaled attention of few queries; what is masked behind the rest is not read.

  Args:
    query: [B, n, H D] float32.
    keys: [B, H, T, D] float32.
    values: [B, H, T, D] float32.
    bias: [B or 1, H or 1, n or 1, T] float32, very negative where masked.

  Returns:
    [B, n, H D]
  """
  return _call("Attention", query.shape, query, keys, values, bias)


@contextlib.contextmanager
def off(*parts: str):
  """Within, XLA computes these `PARTS`, all if none is named; for comparisons."""
  with _off(parts or PARTS):
    yield


@contextlib.contextmanager
def portable():
  """Within, XLA computes all, as on any backend: for meshes and other compilers."""
  with _off((*PARTS, "forms")):
    yield


def forms() -> bool:
  """Whether XLA is given the forms that suit a single CPU, not those for all else.

  Writing a slice a row, and sums and searches by blocks, are fast on a CPU. Elsewhere
  the one becomes a loop over rows, and the other gathers what is split over devices.
  """
  return jax.default_backend() == "cpu" and "forms" not in _off.value


def _usable(part: str) -> bool:
  return jax.default_backend() == "cpu" and part not in _off.value and build.load()


def _call(name, shape, *arguments):
  result = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.ffi.ffi_call(build.TARGETS[name], result)(*arguments)
