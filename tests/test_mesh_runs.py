"""Whole online runs, with learning, on four devices: the outputs are those of one."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_online

from osd_jax import online, partitioning, writers
from osd_jax.distillation import optimizers, update
from osd_jax.serving import adaptive, slots

COUNT, INTERRUPTED = 16, 9

pytestmark = [
  pytest.mark.usefixtures("quick_compilation"),
  pytest.mark.skipif(
    len(jax.devices()) < 4, reason="needs four devices; conftest.py fakes them"
  ),
]


class Interrupted(Exception):
  """A run that ends between two steps, as a killed one does."""


def serve(config, outputs, limit=10**6):
  """Runs, noting tokens by number of the request; breaks off behind `limit` of them."""
  step = slots.Slots.step

  def noted(self):
    finished = step(self)
    outputs.update({done.request.tag: done.tokens.tolist() for done in finished})
    if len(outputs) > limit:
      raise Interrupted
    return finished

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(slots.Slots, "step", noted)
    online.run(config)


def run(pair, folder, mesh, interrupted_at=None, goes_on_with=None, **decoding):
  """Outputs of the requests, in order, and the rows of the updates."""
  config = tiny_online.config(pair, folder)
  config = dataclasses.replace(
    config,
    pair=pair,  # the whole draft: fewer programs
    partition=partitioning.PartitionConfig(*mesh),
    stream=dataclasses.replace(config.stream, requests_per_task=COUNT // 4),
    decoding=dataclasses.replace(config.decoding, num_draft_tokens=2, **decoding),
    learning=dataclasses.replace(
      config.learning,
      update=update.UpdateConfig(
        optimizers.OptimizerConfig(learning_rate=1e-2), steps_per_update=1
      ),
    ),
    warm_start=None,
    floor_metering=False,
    compare_every=0,
  )
  outputs = {}
  if interrupted_at is not None:
    with pytest.raises(Interrupted):
      serve(config, outputs, interrupted_at)
    assert not (folder / "draft.safetensors").exists()
  partition = partitioning.PartitionConfig(*(goes_on_with or mesh))
  serve(dataclasses.replace(config, partition=partition), outputs)
  rows = writers.read(folder / "metrics.jsonl")
  return [outputs[tag] for tag in range(COUNT)], [
    (row["version"], row["loss"]) for row in rows if row["kind"] == "update"
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
    candidates=(0, 2), rounds_per_call=1, costs=(adaptive.RoundCosts((1.0, 4.0)),)
  )
  found, updates = run(lively_pair, tmp_path / "run", (1, 4), adaptive=chosen)
  (row,) = writers.of_kind(list(writers.read(tmp_path / "run/metrics.jsonl")), "mesh")
  assert "its 2 heads" in row["said"]  # on four devices: they stay together
  assert "its 2 heads" in (tmp_path / "run/report.html").read_text()
  assert found == alone[0]
  np.testing.assert_allclose(updates[0], alone[1][0], atol=1e-4)
