"""Weights embedded in a larger shape keep their logits and have the larger sizes."""

import dataclasses

import flax.traverse_util
import jax
import numpy as np
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
def big(small):
  return embed.embedded(small, BIG)


@pytest.fixture(scope="module")
def draft(small):
  shape = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
  params = attached.build(shape, SMALL).init(jax.random.key(1))
  fingerprint = weights.identity(small, "small").fingerprint
  return weights.AttachedWeights(shape, params, fingerprint)


def is_added(name):
  return "encoder/layers_1" in name or "decoder/layers_2" in name


@pytest.mark.parametrize("fault", [None, "norms", "added layers"])
def test_embedding_keeps_logits(small, big, fault):
  """Negative controls: norms that are not corrected, noise in the added layers."""
  params = flax.traverse_util.flatten_dict(big.params, sep="/")
  for name in params:
    if fault == "norms" and name.endswith("/scale"):
      params[name] = params[name] * np.float32(np.sqrt(BIG.width / SMALL.width))
    if fault == "added layers" and is_added(name) and name.endswith(embed.WRITERS):
      assert not np.any(params[name])
      params[name] = params[name] + np.float32(0.1)
  params = flax.traverse_util.unflatten_dict(params, sep="/")
  logits = embed.logits_of(dataclasses.replace(big, params=params))
  assert embed.is_same(embed.logits_of(small), logits) == (fault is None)


def test_attached_draft_keeps_its_logits_only_if_rescaled(
  small, big, draft, monkeypatch
):
  logits = embed.logits_of(small, draft)
  moved = embed.reattached(draft, small, big)
  assert embed.is_same(logits, embed.logits_of(big, moved))
  # Negative control: the states that the draft reads have a larger scale.
  monkeypatch.setattr(embed, "growth_of", lambda config, shape: np.float32(1))
  moved = embed.reattached(draft, small, big)
  assert not embed.is_same(logits, embed.logits_of(big, moved))


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
