"""`osd certify`, `evaluate` and `generate` give the same results on any mesh."""

import jax
import pytest
import tiny_online

from osd_jax import evaluate, runs, sharding
from osd_jax import main as cli
from osd_jax.data.batches import BatchConfig
from osd_jax.engine.requests import DecodingConfig

MESHES = [("t5", (2, 2)), ("llama", (1, 4))]
DECODING = DecodingConfig(
  rows=4,
  num_draft_tokens=2,
  source_lengths=(tiny_online.SOURCE,),
  target_length=6,
  record_top_k=8,
)

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    len(jax.devices()) < 4, reason="needs four devices; conftest.py fakes them"
  ),
]


def asked(pair, folder, mesh):
  """Fields of both configs."""
  tasks = tiny_online.tasks("eval", 2)
  return {
    "prompts": BatchConfig(tasks=tasks, source_length=tiny_online.SOURCE),
    "count": 5,
    "pair": pair,
    "decoding": DECODING,
    "run_directory": str(folder / "run"),
    "partition": sharding.PartitionConfig(*mesh),
  }


def rows_of(path, kind):
  return [row for row in runs.read(path / "metrics.jsonl") if row["kind"] == kind]


@pytest.mark.parametrize(("family", "mesh"), MESHES, ids=str)
def test_certificate_on_a_mesh_is_exact(tmp_path, family, mesh):
  config = evaluate.CertifyConfig(
    **asked(tiny_online.save_lively_pair(tmp_path, family), tmp_path, mesh),
    num_draft_tokens=(2,),
    rows=(4,),
    drafts=("pair",),
  )
  made = evaluate.certify(config)
  assert made.exact
  (found,) = rows_of(made.path, "certificate")
  assert found["outputs"] == found["equal"] == 5 and found["tokens"] > 5


def test_evaluation_on_a_mesh_matches_one_device(lively_pair, tmp_path):
  alone, found = (
    rows_of(
      evaluate.run(
        evaluate.EvaluateConfig(
          **asked(lively_pair, tmp_path / str(mesh), mesh), speed_requests=0
        )
      ).path,
      "draft",
    )
    for mesh in ((1, 1), (2, 2))
  )
  assert len(found) == len(alone) > 0
  for row, expected in zip(found, alone, strict=True):
    assert row.keys() == expected.keys()
    figures = {n: v for n, v in expected.items() if isinstance(v, float)}
    assert figures and {n: row[n] for n in figures} == pytest.approx(figures, abs=1e-4)


def test_generate_prints_the_same_texts_on_a_mesh(unprepared, capsys, tmp_path):
  (tmp_path / "prompts.txt").write_text("add 2 and 3\nlist all singers\n")

  def printed(mesh):
    words = [f"--gin.PartitionConfig.{n}={v}" for n, v in zip(("data", "model"), mesh)]
    asked = ["--file", str(tmp_path / "prompts.txt"), "--max_new_tokens", "8"]
    assert cli.main(["generate", *asked, *words]) == 0
    return capsys.readouterr().out

  alone = printed((1, 1))
  assert len(alone.splitlines()) == 2
  assert printed((2, 2)) == alone
  # Negative control: the option is used.
  assert cli.main(["generate", "x", "--gin.PartitionConfig.data=64"]) == 2
