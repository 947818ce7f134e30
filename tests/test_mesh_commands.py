"""`osd certify`, `evaluate` and `generate` on a mesh say what one device says."""

import dataclasses

import jax
import pytest
import tiny_online

import osd_jax
from osd_jax import certify, evaluate, partitioning, writers
from osd_jax.data.batches import BatchConfig
from osd_jax.serving import slots

MESHES = [(4, 1), (2, 2), (1, 4)]
DECODING = slots.DecodingConfig(
  rows=4,
  num_draft_tokens=2,
  source_lengths=(tiny_online.SOURCE,),
  target_length=6,
  record_top_k=8,
)

pytestmark = pytest.mark.skipif(
  len(jax.devices()) < 4, reason="needs four devices; conftest.py fakes them"
)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """A mesh's programs are many and run little."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tiny_online.save_lively_pair(tmp_path_factory.mktemp("pair"))


def prompts(count):
  tasks = tiny_online.tasks("eval", count)
  return BatchConfig(tasks=tasks, source_length=tiny_online.SOURCE, reader="plain")


def rows_of(path, kind):
  return [row for row in writers.read(path / "metrics.jsonl") if row["kind"] == kind]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_certificate(pair, tmp_path, mesh):
  config = certify.CertifyConfig(
    prompts=prompts(2),
    count=5,
    pair=pair,
    decoding=DECODING,
    num_draft_tokens=(2,),
    rows=(4,),
    drafts=("pair",),
    run_directory=str(tmp_path / "run"),
    partition=partitioning.PartitionConfig(*mesh),
  )
  made = certify.run(config)
  assert made.exact
  (found,) = rows_of(made.path, "certificate")
  assert found["outputs"] == found["equal"] == 5 and found["tokens"] > 5


def evaluated(pair, folder, mesh):
  config = evaluate.EvaluateConfig(
    prompts=prompts(2),
    count=5,
    pair=pair,
    decoding=DECODING,
    speed_requests=0,
    run_directory=str(folder),
    partition=partitioning.PartitionConfig(*mesh),
  )
  return rows_of(evaluate.run(config).path, "draft")


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
  return evaluated(pair, tmp_path_factory.mktemp("one") / "run", (1, 1))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_evaluation(alone, pair, tmp_path, mesh):
  found = evaluated(pair, tmp_path / "run", mesh)
  assert len(found) == len(alone) > 0
  for row, expected in zip(found, alone, strict=True):
    assert row.keys() == expected.keys()
    figures = {n: v for n, v in expected.items() if isinstance(v, float)}
    assert figures and {n: row[n] for n in figures} == pytest.approx(figures, abs=1e-4)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_texts(pair, mesh):
  asked = ["add 2 and 3", "list all singers", "def f(x):"]

  def texts(mesh):
    partition = partitioning.PartitionConfig(*mesh)
    decoding = dataclasses.replace(DECODING, rows=2)
    with osd_jax.Server(pair, decoding, partition=partition) as server:
      return [answer.text for answer in server.generate(asked)]

  assert texts(mesh) == texts((1, 1))
