"""Compilation of the C++ library, and the fallback to XLA."""

import logging
import pathlib

import jax
import jax.numpy as jnp
import pytest

from osd_jax import native
from osd_jax.models import layers


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
  """An empty folder for compiled libraries, with no library loaded."""
  monkeypatch.setattr(native, "FOLDER", str(tmp_path / "native"))
  native._loaded.cache_clear()
  yield tmp_path / "native"
  native._loaded.cache_clear()


def test_xla_is_used_without_a_compiler(unbuilt, monkeypatch):
  monkeypatch.setenv("CXX", "no-such-compiler")
  assert not native.load() and not unbuilt.exists()
  assert (
    "custom_call"
    not in jax.jit(lambda *a: layers.served_matmul(*a))
    .lower(jnp.ones((1, 8)), jnp.ones((16, 8)))
    .as_text()
  )


def test_failing_compiler_is_reported_and_leaves_no_files(
  unbuilt, monkeypatch, tmp_path, caplog
):
  broken = tmp_path / "broken-c++"
  broken.write_text("#!/bin/sh\necho 'unknown flag' >&2\nexit 1\n")
  broken.chmod(0o755)
  monkeypatch.setenv("CXX", str(broken))
  with caplog.at_level(logging.WARNING):
    assert not native.load()
  assert "broken-c++" in caplog.text and "unknown flag" in caplog.text
  assert not list(unbuilt.iterdir())


def test_unwritable_folder_is_reported(unbuilt, monkeypatch, tmp_path, caplog):
  (tmp_path / "file").write_text("")
  monkeypatch.setattr(native, "FOLDER", str(tmp_path / "file" / "native"))
  with caplog.at_level(logging.WARNING):
    assert not native.load()
  assert "uses XLA only" in caplog.text


def test_library_is_compiled_again_only_when_an_input_changes(tmp_path, monkeypatch):
  # This compiler appends a line to `runs` and writes an empty library.
  fake = tmp_path / "c++"
  fake.write_text(
    f"#!/bin/sh\necho run >> {tmp_path}/runs\nfor last; do :; done\necho > $last\n"
  )
  fake.chmod(0o755)
  runs = lambda: len(pathlib.Path(tmp_path / "runs").read_text().split())
  first = native.built(str(fake), tmp_path / "kept")
  assert native.built(str(fake), tmp_path / "kept") == first and runs() == 1
  monkeypatch.setattr(native, "_processor", lambda: "another processor")
  assert native.built(str(fake), tmp_path / "kept") != first and runs() == 2
