"""Matrix products and attention in C++ for decoding steps on a CPU; see `step.cc`.

The C++ code is compiled on the machine that runs it, at the first use, and cached.
Without a compiler, and on other backends, XLA computes the same functions
(`models/layers.py`), up to rounding.

This module also owns the one ambient switch of the package. Some operations have
several implementations with equal results: one that is fast on a single CPU, one for
other single devices, and one for meshes. `forms()` and `is_split()` say which one to
trace. It is not an argument,
because the operations are deep inside the models and the decoding loop, and every
function on the way would have to pass it on. The switch is a JAX user context, which is
part of the key of the compilation cache, so a function traced under one setting is
never reused under the other.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np

FOLDER = "~/.cache/osd_jax/native"
TARGETS = {
  "ProductFloat32": "osd_jax_product_float32",
  "ProductBFloat16": "osd_jax_product_bfloat16",
  "ProductInt8": "osd_jax_product_int8",
  "Widen": "osd_jax_widen",
  "Gather": "osd_jax_gather",
  "Attention": "osd_jax_attention",
}
_FOLDER = pathlib.Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
# -march=native is safe, since the library runs on the machine that compiles it.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast")
_LIBRARY = ("-fPIC", "-shared", "-w")
_TIMEOUT = 120  # seconds; compiling takes about six
_log = logging.getLogger(__name__)
_lock = threading.Lock()

PARTS = ("products", "attention", "widening")
MOST_QUERIES = 32  # more are a prefill, which XLA computes


def _processor() -> str:
  """The features of the processor from /proc/cpuinfo, or its name."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  info = [line for line in lines if line.startswith(("flags", "Features"))]
  return info[0] if info else platform.processor()


# XLA's blocked products are faster for more columns. But XLA widens bfloat16 kernels
# first, and computes padding. With vectors of 16 lanes it wins by a fifth at most.
MOST_COLUMNS = 256 if "avx512f" in _processor().split() else 32

_off = jax.make_user_context(())  # names of the disabled parts


def covers(columns: jax.Array, kernel: jax.Array) -> bool:
  """Whether `product` or `int8_product` supports columns [n, in], kernel [out, in].

  The first call compiles the library.
  """
  return (
    columns.shape[0] <= MOST_COLUMNS
    and columns.dtype == jnp.float32
    and kernel.dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
    and columns.size > 0
    and kernel.size > 0
    and _usable("products")
  )


def product(columns: jax.Array, kernel: jax.Array) -> jax.Array:
  """Multiplies columns [n, in] by a kernel [out, in], in float32: [n, out].

  A bfloat16 kernel gives the same bits as the kernel with the same values in float32,
  for half of the memory traffic. Columns of zeros stand for padding, and are skipped.
  """
  shape = (columns.shape[0], kernel.shape[0])
  name = "ProductFloat32" if kernel.dtype == jnp.float32 else "ProductBFloat16"
  return _call(name, shape, columns, kernel)


def int8_product(columns: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
  """See `layers.int8_matmul`; takes columns [n, in] float32 and returns [n, out]."""
  shape = (columns.shape[0], kernel.shape[0])
  return _call("ProductInt8", shape, columns, kernel, scale)


def widens(kernel: jax.Array, dtype: jnp.dtype) -> bool:
  """Whether `widened` can be called for a product in `dtype`."""
  types = (kernel.dtype, dtype)
  return (
    types == (jnp.bfloat16, jnp.float32) and kernel.size > 0 and _usable("widening")
  )


def widened(
  kernel: jax.Array, after: jax.Array, start: int = 0, stop: int | None = None
) -> jax.Array:
  """Widens rows of a bfloat16 kernel to float32 for a product that XLA computes.

  XLA itself converts slowly, and as soon as it can: it would hold all kernels of a
  model in float32 at once. This function waits for the array `after`, whose values are
  not used.
  """
  stop = len(kernel) if stop is None else min(stop, len(kernel))
  return _widened(kernel, jax.lax.stop_gradient(after), start, stop)


@jax.custom_jvp
def gathered(table: jax.Array, rows: jax.Array) -> jax.Array:
  """Widens the rows [...] int32 of a bfloat16 table [V, E] to float32, [..., E].

  XLA would convert the whole table, and keep it during a loop.
  """
  return _call("Gather", (*rows.shape, table.shape[1]), table, rows)


@gathered.defjvp
def _gathered_jvp(primals, tangents):
  table, rows = primals
  return gathered(table, rows), tangents[0][rows].astype(jnp.float32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _widened(kernel: jax.Array, after: jax.Array, start: int, stop: int) -> jax.Array:
  shape = (stop - start, *kernel.shape[1:])
  first = start * math.prod(kernel.shape[1:])
  return _call("Widen", shape, after, kernel, first=np.int64(first))


@_widened.defjvp
def _widened_jvp(start, stop, primals, tangents):
  rows = tangents[0][start:stop].astype(jnp.float32)
  return _widened(*primals, start, stop), rows


def attends(query: jax.Array, keys: jax.Array) -> bool:
  """Whether `attention` can be called with these arguments."""
  return (
    query.shape[1] <= MOST_QUERIES
    and (query.dtype, keys.dtype) == (jnp.float32, jnp.float32)
    and query.size > 0
    and _usable("attention")
  )


def attention(
  query: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array
) -> jax.Array:
  """Attention of a few queries [B, n, H D], with unscaled logits; returns [B, n, H D].

  Keys and values [B, H, T, D] of masked positions are not read.
  A query that may attend to no position, which stands for padding, gets zeros.
  The bias [B or 1, H or 1, n or 1, T] is very negative where masked. All are float32.
  """
  return _call("Attention", query.shape, query, keys, values, bias)


@contextlib.contextmanager
def off(*parts: str):
  """Disables some `PARTS`, by default all, so that XLA computes them instead."""
  with _off(tuple(sorted({*_off.value, *(parts or PARTS)}))):  # also inside `portable`
    yield


@contextlib.contextmanager
def portable(is_split: bool):
  """Selects the implementations for backends other than the CPU.

  `is_split`: those for a mesh, whose devices hold parts of the kernels.
  """
  with _off((*PARTS, "forms", *("split",) * is_split)):
    yield


def is_split() -> bool:
  """Whether to trace for a mesh of several devices."""
  return "split" in _off.value


def forms() -> bool:
  """Whether to trace the implementations for a single CPU; see the module's docstring.

  For example, one `dynamic_update_slice` per row is fast on a CPU, and becomes a loop
  on other backends. Sums and searches by blocks are fast on a CPU, and on a mesh they
  gather arrays that are split over devices.
  """
  return jax.default_backend() == "cpu" and "forms" not in _off.value


def _usable(part: str) -> bool:
  return jax.default_backend() == "cpu" and part not in _off.value and load()


def _call(name, shape, *arguments, **attributes):
  result = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.ffi.ffi_call(TARGETS[name], result)(*arguments, **attributes)


def load() -> bool:
  """Whether the functions can be called. The first call compiles and loads them."""
  with _lock:
    return _loaded()


@functools.cache
def _loaded() -> bool:
  compiler = _compiler()
  if compiler is None:
    _log.info(
      "No C++ compiler found. Decoding on the CPU uses XLA only, which is slower."
    )
    return False
  try:
    library = ctypes.CDLL(str(built(compiler, pathlib.Path(FOLDER).expanduser())))
    for symbol, target in TARGETS.items():
      capsule = jax.ffi.pycapsule(getattr(library, symbol))
      jax.ffi.register_ffi_target(target, capsule, platform="cpu")
  except (OSError, RuntimeError, subprocess.SubprocessError) as error:
    message = getattr(error, "stderr", "") or ""
    _log.warning(
      "step.cc could not be built with %s. Decoding on the CPU uses XLA only, which is"
      " slower. %s %s",
      compiler,
      error,
      message[-500:],
    )
    return False
  return True


def built(compiler: str, folder: pathlib.Path) -> pathlib.Path:
  """Path in a cache folder of the library for this source, compiler, JAX and CPU.

  Raises:
    OSError: the folder cannot be written, or the compiler cannot be run.
    subprocess.SubprocessError: compiling failed.
  """
  command = (compiler, *_FLAGS, *_LIBRARY)
  path = folder / f"step-{_key(command)}.so"
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    parts = (f"-I{jax.ffi.include_dir()}", str(_FOLDER / "step.cc"))
    # Compiled in the same file system, so that the rename below is atomic.
    with tempfile.TemporaryDirectory(dir=folder) as private:
      temporary = os.path.join(private, path.name)
      subprocess.run(
        (*command, *parts, "-o", temporary),
        check=True,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
      )
      os.replace(
        temporary, path
      )  # replaces an equal file if another process was faster
  return path


def _compiler() -> str | None:
  name = os.environ.get("CXX")
  names = _COMPILERS if name is None else (name,)
  return next(filter(None, map(shutil.which, names)), None)


def _key(command: tuple[str, ...]) -> str:
  """Hash of everything that the library depends on."""
  parts = (*command, jax.__version__, platform.machine(), _processor())
  sources = sorted((*_FOLDER.glob("*.cc"), *_FOLDER.glob("*.h")))
  texts = (part.encode() for part in parts)
  digest = b"\0".join((*texts, *(source.read_bytes() for source in sources)))
  return hashlib.sha256(digest).hexdigest()[:16]
