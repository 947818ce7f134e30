"""Whole online runs, with learning, on four devices: the outputs are those of one."""

import jax
import numpy as np
import pytest
from whole_run import COUNT, INTERRUPTED, run

from osd_jax import runs
from osd_jax.costs.table import RoundCosts
from osd_jax.engine import adaptive

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures("quick_compilation"),
  pytest.mark.skipif(
    len(jax.devices()) < 4, reason="needs four devices; conftest.py fakes them"
  ),
]


@pytest.fixture(scope="module")
def alone(lively_pair, tmp_path_factory):
  """What one device serves and learns; drafting pays, and outputs vary."""
  found, updates = run(lively_pair, tmp_path_factory.mktemp("one") / "run", (1, 1))
  assert len({tuple(tokens) for tokens in found}) > COUNT // 2 and len(updates) > 2
  assert updates[-1][0] == len(updates)
  return found, updates


def test_split_by_rows_and_weights_and_continued(alone, lively_pair, tmp_path):
  found, updates = run(
    lively_pair, tmp_path / "run", (2, 2), interrupted_at=INTERRUPTED
  )
  assert found == alone[0]
  assert [version for version, _ in updates] == [version for version, _ in alone[1]]
  np.testing.assert_allclose(updates, alone[1], atol=1e-4)


@pytest.mark.parametrize("other", [(4, 1), (1, 1)], ids=str)
def test_a_run_goes_on_with_another_mesh(alone, lively_pair, tmp_path, other):
  """Where it was interrupted, with all that it had learnt."""
  found, updates = run(lively_pair, tmp_path / "run", (1, 2), INTERRUPTED, other)
  assert found == alone[0]
  assert [version for version, _ in updates] == [version for version, _ in alone[1]]
  np.testing.assert_allclose(updates, alone[1], atol=1e-4)


def test_split_by_weights_alone_with_a_k_of_its_own(alone, lively_pair, tmp_path):
  """The table makes it draft at first and decode plainly later."""
  chosen = adaptive.AdaptiveConfig(
    candidates=(0, 2), rounds_per_call=1, costs=(RoundCosts((1.0, 4.0)),)
  )
  found, updates = run(lively_pair, tmp_path / "run", (1, 4), adaptive=chosen)
  (row,) = runs.of_kind(list(runs.read(tmp_path / "run/metrics.jsonl")), "mesh")
  assert "its 2 heads" in row["said"]  # on four devices: they stay together
  assert "its 2 heads" in (tmp_path / "run/report.html").read_text()
  assert found == alone[0]
  np.testing.assert_allclose(updates[0], alone[1][0], atol=1e-4)
