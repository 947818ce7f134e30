"""Compiles `step.cc` for this machine and registers its functions with JAX."""

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading

import jax

FOLDER = "~/.cache/osd_jax/native"
TARGETS = {
  "ProductFloat32": "osd_jax_product_float32",
  "ProductInt8": "osd_jax_product_int8",
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
    said = getattr(error, "stderr", "") or ""
    _log.warning(
      "step.cc could not be built with %s. Decoding on the CPU uses XLA only, which is"
      " slower. %s %s",
      compiler,
      error,
      said[-500:],
    )
    return False
  return True


def built(compiler: str, folder: pathlib.Path) -> pathlib.Path:
  """Path of the library for this source, compiler, JAX and processor.

  Args:
    compiler: command that runs the compiler.
    folder: cache of compiled libraries.

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
      made = os.path.join(private, path.name)
      subprocess.run(
        (*command, *parts, "-o", made),
        check=True,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
      )
      os.replace(made, path)  # replaces an equal file if another process was faster
  return path


def _compiler() -> str | None:
  named = os.environ.get("CXX")
  for name in (named,) if named is not None else _COMPILERS:
    found = shutil.which(name)
    if found:
      return found
  return None


def _key(command: tuple[str, ...]) -> str:
  """Hash of everything that the library depends on."""
  parts = (*command, jax.__version__, platform.machine(), _processor())
  sources = sorted((*_FOLDER.glob("*.cc"), *_FOLDER.glob("*.h")))
  texts = (part.encode() for part in parts)
  found = b"\0".join((*texts, *(source.read_bytes() for source in sources)))
  return hashlib.sha256(found).hexdigest()[:16]


def _processor() -> str:
  """The features of the processor from /proc/cpuinfo, or its name."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  told = [line for line in lines if line.startswith(("flags", "Features"))]
  return told[0] if told else platform.processor()
