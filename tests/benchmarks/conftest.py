"""The benchmarks are programs beside the package: found by path, run as they are."""

import sys

import jax
import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))


@pytest.fixture(autouse=True)
def as_the_programs_run():
  """What the package is held to in tests is no rule for the programs."""
  with jax.numpy_rank_promotion("allow"):
    yield
