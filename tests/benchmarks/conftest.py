"""Puts the folder of the benchmark programs on the import path."""

import sys

import jax
import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))


@pytest.fixture(autouse=True)
def rank_promotion_allowed():
  """Allows rank promotion, because the benchmark programs may use it."""
  with jax.numpy_rank_promotion("allow"):
    yield
