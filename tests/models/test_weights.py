"""Weights files: round trips, and errors for files that cannot be read."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax

from osd_jax import base
from osd_jax.models import families, t5, weights

CONFIG = t5.T5Config(
  vocab_size=11,
  width=6,
  num_heads=3,
  head_dim=2,
  mlp_dim=5,
  num_encoder_layers=1,
  num_decoder_layers=2,
  mlp_activations=("gelu", "linear"),
  tied_head=False,
  embedding_std=0.3,
)


def random_params(config, seed):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(families.build(config).init, jax.random.key(0))
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def saved():
  return weights.Weights(CONFIG, random_params(CONFIG, 0), "abc", "made by a test")


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_float32_round_trip_is_exact(saved, tmp_path):
  path = weights.save(tmp_path / "new" / "folder" / "target.safetensors", saved)
  loaded = weights.load(path)
  assert_same(loaded.params, saved.params)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(loaded.params))
  for field in ("config", "vocabulary", "notes"):
    assert getattr(loaded, field) == getattr(saved, field)
  assert loaded.model is saved.model  # so jitted functions are not compiled again


def test_saved_file_permissions_follow_the_umask(saved, tmp_path):
  before = os.umask(0o022)
  try:
    path = weights.save(tmp_path / "a.safetensors", saved)
  finally:
    os.umask(before)
  assert path.stat().st_mode & 0o777 == 0o644


def test_bfloat16_storage_rounds_to_nearest(saved, tmp_path):
  full = weights.save(tmp_path / "full.safetensors", saved)
  half = weights.save(tmp_path / "half.safetensors", saved, storage="bfloat16")
  loaded = weights.load(half).params
  rounded = jax.tree.map(
    lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), saved.params
  )
  assert_same(loaded, rounded)
  assert any(
    np.any(a != b)
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(saved.params))
  )
  # bfloat16 takes two bytes less per value; the headers have nearly the same size.
  tensors = sum(x.size for x in jax.tree.leaves(saved.params))
  assert full.stat().st_size - half.stat().st_size == pytest.approx(2 * tensors, abs=64)


def test_unknown_storage_is_refused_without_writing_a_file(saved, tmp_path):
  with pytest.raises(ValueError, match="storage: received 'float16'"):
    weights.save(tmp_path / "new" / "x.safetensors", saved, storage="float16")
  assert not list(tmp_path.iterdir())


def test_failed_save_keeps_the_old_file_and_leaves_no_partial_file(
  saved, tmp_path, monkeypatch
):
  path = weights.save(tmp_path / "x.safetensors", saved)
  before = path.read_bytes()

  def disk_full(tensors, filename, metadata):
    del tensors, metadata
    filename.write_bytes(b"half of a")
    raise OSError("no space left on device")

  monkeypatch.setattr(safetensors.flax, "save_file", disk_full)
  with pytest.raises(OSError, match="no space"):
    weights.save(path, dataclasses.replace(saved, notes="newer"))
  assert list(tmp_path.iterdir()) == [path]
  assert path.read_bytes() == before


def test_missing_file_is_named(tmp_path):
  with pytest.raises(ValueError, match=r"cannot read .*absent\.saf"):
    weights.load(tmp_path / "absent.safetensors")


def test_invalid_safetensors_file_is_named(tmp_path):
  path = tmp_path / "text.safetensors"
  path.write_text("not tensors at all")
  with pytest.raises(ValueError, match=r"cannot read .*text\.safetensors"):
    weights.load(path)


def rewrite(path, saved, change_metadata=None, change_tensors=None):
  """Saves `saved` with a changed header or changed tensors; returns the path."""
  weights.save(path, saved)
  with safetensors.safe_open(path, framework="flax") as file:
    metadata = file.metadata()
    tensors = {name: file.get_tensor(name) for name in file.keys()}
  (change_metadata or (lambda _: None))(metadata)
  (change_tensors or (lambda _: None))(tensors)
  safetensors.flax.save_file(tensors, path, metadata=metadata)
  return path


def test_file_of_another_format_is_refused(saved, tmp_path):
  path = rewrite(
    tmp_path / "x.safetensors", saved, lambda header: header.update(format="pt")
  )
  with pytest.raises(ValueError, match="has format 'pt', expected 'osd_jax.t5'"):
    weights.load(path)


@pytest.mark.parametrize(
  "config,named",
  [
    (json.dumps({"colour": 3}), "colour"),
    (json.dumps({"width": 0}), "T5Config.width"),
    ("{", "config in the header"),
  ],
)
def test_invalid_config_in_the_header_is_named(saved, tmp_path, config, named):
  path = rewrite(
    tmp_path / "x.safetensors", saved, lambda header: header.update(config=config)
  )
  with pytest.raises(ValueError, match=named):
    weights.load(path)


def test_parameter_of_another_shape_is_named_with_both_shapes(saved, tmp_path):
  name = "decoder/layers_1/mlp/wo/kernel"

  def cut(tensors):
    tensors[name] = tensors[name][:, :-1]

  path = rewrite(tmp_path / "x.safetensors", saved, change_tensors=cut)
  with pytest.raises(ValueError, match=rf"{name}: found \(5, 5\), expected \(5, 6\)"):
    weights.load(path)


def test_missing_and_unexpected_parameters_are_named(saved, tmp_path):
  path = rewrite(
    tmp_path / "x.safetensors",
    saved,
    change_tensors=lambda tensors: tensors.pop("encoder/encoder_norm/scale"),
  )
  with pytest.raises(ValueError, match="encoder_norm/scale: found nothing"):
    weights.load(path)
  path = rewrite(
    tmp_path / "x.safetensors",
    saved,
    change_tensors=lambda tensors: tensors.update(extra=jnp.zeros(2)),
  )
  with pytest.raises(ValueError, match=r"extra: found \(2,\), expected nothing"):
    weights.load(path)


KERNEL = "decoder/layers_1/mlp/wo/kernel"


def replaced(value):
  """Returns a function that writes `value` into one element of KERNEL."""

  def change(tensors):
    tensors[KERNEL] = tensors[KERNEL].at[0, 1].set(value)

  return change


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_non_finite_values_are_named_with_their_file(saved, tmp_path, value):
  path = rewrite(tmp_path / "x.safetensors", saved, change_tensors=replaced(value))
  with pytest.raises(
    base.InputError, match=rf"x\.safetensors: tensor {KERNEL}: 1 of its 30 values are"
  ):
    weights.load(path)


def test_large_finite_values_are_accepted(saved, tmp_path):
  """Negative control: the check examines values, not their sum, which overflows."""

  def change(tensors):
    tensors[KERNEL] = jnp.full_like(tensors[KERNEL], 3e38)

  path = rewrite(tmp_path / "x.safetensors", saved, change_tensors=change)
  assert np.all(weights.load(path).params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"])


@pytest.mark.parametrize("kind", [jnp.int32, jnp.int8, jnp.bool_])
def test_integer_tensors_are_refused(saved, tmp_path, kind):
  path = rewrite(
    tmp_path / "x.safetensors",
    saved,
    change_tensors=lambda tensors: tensors.update({KERNEL: jnp.ones((5, 6), kind)}),
  )
  with pytest.raises(
    base.InputError, match=rf"tensor {KERNEL}: found .*floating-point"
  ):
    weights.load(path)


def test_duplicate_names_in_the_header_are_refused(saved, tmp_path):
  path = weights.save(tmp_path / "x.safetensors", saved)
  data = path.read_bytes()
  length = int.from_bytes(data[:8], "little")
  twice, once = (f"decoder/layers_{i}/mlp/wo/kernel".encode() for i in (0, 1))
  path.write_bytes(
    data[:8] + data[8 : 8 + length].replace(once, twice) + data[8 + length :]
  )
  with pytest.raises(base.InputError, match=r"cannot read .*x\.safetensors"):
    weights.load(path)
