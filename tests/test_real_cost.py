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
def held():
  params = families.build(SMALL).init(jax.random.key(0))
  return weights.Weights(SMALL, params, "a vocabulary", "drawn")


@pytest.fixture(scope="module")
def made(held):
  return embed.embedded(held, BIG)


def changed(made, change):
  """The same weights with every leaf replaced by `change(name, leaf)`."""
  flat = flax.traverse_util.flatten_dict(made.params, sep="/")
  flat = {name: change(name, np.asarray(leaf)) for name, leaf in flat.items()}
  params = flax.traverse_util.unflatten_dict(flat, sep="/")
  return dataclasses.replace(made, params=params)


def is_same(held, other):
  return embed.is_same(embed.logits_of(held), embed.logits_of(other))


def is_added(name):
  return "encoder/layers_1" in name or "decoder/layers_2" in name


def test_embedding_keeps_logits(held, made):
  assert made.config == BIG and made.vocabulary == held.vocabulary
  assert jax.tree.map(np.shape, made.params) == jax.tree.map(
    np.shape, jax.eval_shape(families.build(BIG).init, jax.random.key(0))
  )
  assert is_same(held, made)


def test_logits_change_if_norms_are_not_corrected(held, made):
  """Negative control: the added zeros change the mean that a norm divides by."""
  factor = np.float32(np.sqrt(BIG.width / SMALL.width))
  scaled = lambda name, leaf: leaf * factor if name.endswith("/scale") else leaf
  assert not is_same(held, changed(made, scaled))


def test_added_layers_have_zero_output_kernels(made):
  flat = flax.traverse_util.flatten_dict(made.params, sep="/")
  kernels = {n: x for n, x in flat.items() if is_added(n) and n.endswith("kernel")}
  assert len(kernels) == 7 + 11  # kernels of an encoder layer and of a decoder layer
  written = {name for name, leaf in kernels.items() if not np.any(leaf)}
  assert written == {name for name in kernels if name.endswith(embed.WRITERS)}


def test_added_layers_are_computed(held, made):
  """Negative control: noise in their output kernels changes the logits."""
  noise = lambda name, leaf: (
    leaf + np.float32(0.1) if is_added(name) and name.endswith(embed.WRITERS) else leaf
  )
  assert not is_same(held, changed(made, noise))


@pytest.mark.parametrize("field", embed.SIZES)
def test_smaller_shape_is_refused_by_field(field, monkeypatch):
  monkeypatch.setitem(sizes.SIZES, "big", BIG)
  larger = dataclasses.replace(BIG, **{field: getattr(BIG, field) + 1})
  with pytest.raises(base.InputError, match=f"embed: {field}: big has"):
    embed.grown(larger, "big")
  assert embed.grown(BIG, "big") == BIG


def test_tied_head_is_refused():
  with pytest.raises(base.InputError, match="embed: tied_head"):
    embed.grown(dataclasses.replace(SMALL, tied_head=True), "flan-t5-small")


def test_grown_changes_sizes_only():
  """t5-small has other activations, a tied head and more tokens."""
  shape = embed.grown(testing.TINY_DRAFT, "t5-small")
  assert shape.width == 512 and shape.head_dim == 64
  for field in ("vocab_size", "mlp_activations", "tied_head", "embedding_std"):
    assert getattr(shape, field) == getattr(testing.TINY_DRAFT, field)


@pytest.fixture(scope="module")
def draft(held):
  shape = AttachedConfig(width=16, num_heads=2, head_dim=8, mlp_dim=24)
  params = attached.build(shape, SMALL).init(jax.random.key(1))
  fingerprint = weights.identity(held, "small").fingerprint
  return weights.AttachedWeights(shape, params, fingerprint)


def test_reattached_draft_keeps_its_logits(held, made, draft):
  moved = embed.reattached(draft, held, made)
  logits = embed.logits_of(held, draft)
  assert embed.is_same(logits, embed.logits_of(made, moved))
  # The draft determines these logits.
  assert not embed.is_same(logits, embed.logits_of(held))


def test_logits_change_if_the_attached_draft_is_not_rescaled(
  held, made, draft, monkeypatch
):
  """Negative control: the states that the draft reads have a larger scale."""
  logits = embed.logits_of(held, draft)
  monkeypatch.setattr(embed, "growth_of", lambda config, shape: np.float32(1))
  moved = embed.reattached(draft, held, made)
  assert not embed.is_same(logits, embed.logits_of(made, moved))


def test_command_writes_only_weights_with_equal_logits(
  held, draft, tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sizes.SIZES, "big", BIG)
  small = weights.save(tmp_path / "small.safetensors", held)
  own = weights.save(tmp_path / "own.safetensors", draft)
  command = ["big", "--weights", str(small), "--attached", str(own)]
  command += ["--out", str(tmp_path / "made")]
  assert embed.main(command) == 0
  assert capsys.readouterr().out.count("largest difference of logits") == 2
  big = weights.load(tmp_path / "made" / "small_as_big.safetensors")
  assert is_same(held, big)
  moved = tmp_path / "made" / "own_on_big.safetensors"
  attached.load(moved, weights.identity(big, "big"))
  with pytest.raises(base.InputError, match="is attached to the target"):
    attached.load(moved, weights.identity(held, "small"))
  moved.unlink()
  monkeypatch.setattr(embed, "TOLERANCE", 0.0)
  assert embed.main(command) == 1 and not moved.exists()
