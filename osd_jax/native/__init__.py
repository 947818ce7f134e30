"""Products of a decoding step on a CPU, in C++: `products.cc` says how and why.

They are compiled where they run, at their first use, and kept; without a compiler, and
on every other backend, the products of XLA are used instead (`models/layers.py`), which
sum in another order.
"""

import contextlib

import jax
import jax.numpy as jnp

from osd_jax.native import build

MOST_COLUMNS = 8  # beyond, the blocks of XLA's products are faster than one pass

_in_use = jax.make_user_context(True)  # compiled calls know which they were traced for


def covers(columns: jax.Array, kernel: jax.Array) -> bool:
  """Whether a product is one of those here, on this machine; builds at the first call.

  Args:
    columns: [n, in].
    kernel: [out, in].
  """
  types = (columns.dtype, kernel.dtype)
  return (
      jax.default_backend() == "cpu"
      and 1 <= columns.shape[0] <= MOST_COLUMNS
      and types in ((jnp.float32, jnp.float32), (jnp.float32, jnp.int8))
      and kernel.size > 0
      and _in_use.value
      and build.load()
  )


def product(columns: jax.Array, kernel: jax.Array) -> jax.Array:
  """columns [n, in] times a kernel [out, in], all float32: [n, out]."""
  return _call("ProductFloat32", columns, kernel)


def int8_product(columns: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
  """`layers.int8_matmul` of columns [n, in], a kernel [out, in] and a scale [out]."""
  return _call("ProductInt8", columns, kernel, scale)


@contextlib.contextmanager
def off():
  """Within, XLA's products are used; for comparisons."""
  with _in_use(False):
    yield


def _call(name, columns, kernel, *scale):
  shape = (columns.shape[0], kernel.shape[0])
  call = jax.ffi.ffi_call(
      build.TARGETS[name], jax.ShapeDtypeStruct(shape, columns.dtype)
  )
  return call(columns, kernel, *scale)
