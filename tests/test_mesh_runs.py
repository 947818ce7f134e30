"""Whole online runs with learning: four devices give the outputs of one.

MESHES has the mesh of a run and the one on which it continues.
"""

import jax
import numpy as np
import pytest
import tiny_online
from whole_run import COUNT, INTERRUPTED, run

from osd_jax import runs
from osd_jax.costs.table import RoundCosts
from osd_jax.engine.requests import AdaptiveConfig

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    len(jax.devices()) < 4, reason="needs four devices; conftest.py fakes them"
  ),
]


MESHES = {"t5": ((2, 2), (4, 1)), "llama": ((1, 4), (1, 1))}


@pytest.fixture(scope="module", params=MESHES)
def family(request):
  return request.param


@pytest.fixture(scope="module")
def pair(family, tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  """Outputs and updates of one device."""
  found, updates = run(pair, tmp_path_factory.mktemp("one") / "run", (1, 1))
  assert len({tuple(tokens) for tokens in found}) > COUNT // 2 and len(updates) > 2
  assert updates[-1][0] == len(updates)
  return found, updates


def test_run_continues_on_another_mesh(alone, pair, family, tmp_path):
  """Including everything that it has learned; Llama's two KV heads are replicated."""
  mesh, other = MESHES[family]
  outputs, updates = run(pair, tmp_path / "run", mesh, INTERRUPTED, other)
  assert outputs == alone[0]
  assert [version for version, _ in updates] == [version for version, _ in alone[1]]
  np.testing.assert_allclose(updates, alone[1], atol=1e-4)


@pytest.mark.release
@pytest.mark.parametrize("family", ["t5"], indirect=True)
def test_adaptive_k_with_split_weights_matches_one_device(alone, pair, tmp_path):
  """With these costs it drafts at first and decodes plainly later."""
  chosen = AdaptiveConfig(candidates=(0, 2), costs=(RoundCosts((1.0, 4.0)),))
  found, updates = run(pair, tmp_path / "run", (1, 4), adaptive=chosen)
  (row,) = runs.of_kind(list(runs.read(tmp_path / "run/metrics.jsonl")), "event")
  assert "its 2 heads" in row["text"]  # which cannot be split over four devices
  assert "its 2 heads" in (tmp_path / "run/report.html").read_text()
  assert found == alone[0]
  np.testing.assert_allclose(updates[0], alone[1][0], atol=1e-4)
