"""The import hook of conftest.py checks annotated shapes, but only in tests."""

import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

from osd_jax.decoding import sampling
from osd_jax.distillation import losses


def drawn(rows, seeds, dtype=jnp.uint32):
  return sampling.draw(
    jnp.ones((rows, 4)),
    jnp.zeros((seeds,), dtype),
    jnp.zeros((rows,), jnp.int32),
    sampling.Purpose.EMIT,
  )


def test_wrong_shapes_and_dtypes_are_refused():
  assert drawn(2, 2).shape == (2,)
  for arguments in ((2, 3), (2, 2, jnp.int32)):
    with pytest.raises(jaxtyping.TypeCheckError, match="seed"):
      drawn(*arguments)
  rows = jnp.zeros((2, 5))
  with pytest.raises(jaxtyping.TypeCheckError, match="draft"):
    losses.forward_kl(rows, rows[:, :4])


def test_import_outside_tests_checks_no_shapes():
  code = (
    "import sys, osd_jax.decoding.sampling as s;"
    "assert 'beartype' not in sys.modules and not hasattr(s.draw, '__wrapped__')"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
