"""Weights embedded in a larger shape keep their logits and have the larger sizes."""

import dataclasses

import jax
import pytest

from experiments.real_cost import embed
from osd_jax import base, testing
from osd_jax.models import attached, families, weights
from osd_jax.models.shapes import AttachedConfig
from osd_tools import sizes

SMALL = testing.TINY_T5
BIG = dataclasses.replace(
  SMALL, width=48, num_heads=3, head_dim=24, mlp_dim=80,
  num_encoder_layers=2, num_decoder_layers=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
  params = families.build(SMALL).init(jax.random.key(0))
  return weights.Weights(SMALL, params, "a vocabulary", "random")


@pytest.fixture(scope="module")
def draft(small):
  shape = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
  params = attached.build(shape, SMALL).init(jax.random.key(1))
  fingerprint = weights.identity(small, "small").fingerprint
  return weights.AttachedWeights(shape, params, fingerprint)


def test_command_writes_only_weights_with_equal_logits(
  small, draft, tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sizes.SIZES, "big", BIG)
  files = [weights.save(tmp_path / "small.safetensors", small)]
  files.append(weights.save(tmp_path / "draft.safetensors", draft))
  command = ["big", "--weights", str(files[0]), "--attached", str(files[1])]
  command += ["--out", str(tmp_path / "out")]
  assert embed.main(command) == 0
  assert capsys.readouterr().out.count("largest difference of logits") == 2
  big = weights.load(tmp_path / "out" / "small_as_big.safetensors")
  assert big.config == BIG and big.vocabulary == small.vocabulary
  moved = tmp_path / "out" / "draft_on_big.safetensors"
  attached.load(moved, weights.identity(big, "big"))
  with pytest.raises(base.InputError, match="is attached to the target"):
    attached.load(moved, weights.identity(small, "small"))
  moved.unlink()
  monkeypatch.setattr(embed, "TOLERANCE", 0.0)
  assert embed.main(command) == 1 and not moved.exists()
