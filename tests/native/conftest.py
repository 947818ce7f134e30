"""Fixtures with the C++ library, compiled for this processor and for older ones."""

import ctypes
import platform
import types

import jax
import pytest

from osd_jax import native


@pytest.fixture(params=["this processor", "most processors"])
def library(request):
  """The functions of `native`, with and without instructions of recent processors."""
  if not native.load():
    pytest.skip("no C++ compiler here")
  if request.param == "this processor":
    return native
  return request.getfixturevalue("plain_library")


@pytest.fixture(scope="session")
def plain_library(tmp_path_factory):
  """The functions of `native`, compiled for x86-64 processors of the last ten years."""
  if platform.machine() != "x86_64":
    pytest.skip("compiles for x86-64")
  with pytest.MonkeyPatch.context() as patch:
    flags = [flag.replace("=native", "=x86-64-v3") for flag in native._FLAGS]
    patch.setattr(native, "_FLAGS", tuple(flags))
    made = native.built(native._compiler(), tmp_path_factory.mktemp("native"))
  loaded = ctypes.CDLL(str(made))
  targets = {symbol: f"plain_{target}" for symbol, target in native.TARGETS.items()}
  for symbol, target in targets.items():
    capsule = jax.ffi.pycapsule(getattr(loaded, symbol))
    jax.ffi.register_ffi_target(target, capsule, platform="cpu")

  def plain(function):
    def call(*arguments):
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "TARGETS", targets)
        return function(*arguments)

    return call

  return types.SimpleNamespace(
    product=plain(native.product),
    int8_product=plain(native.int8_product),
    attention=plain(native.attention),
  )
