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
from models import tiny

from osd_jax import base, testing
from osd_jax.models import families, shapes, tensors, weights

CONFIG = shapes.T5Config(
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


@pytest.mark.parametrize(
  "config",
  [
    shapes.T5Config(num_encoder_layers=2, num_decoder_layers=5, tied_head=False),
    shapes.LlamaConfig(num_layers=12, state_layer=7, windows=(4, 0)),
    shapes.T5GemmaConfig(num_encoder_layers=3, num_layers=2),
  ],
)
def test_expected_shapes_are_those_of_all_layers(config):
  whole = jax.eval_shape(families.build(config).init, jax.random.key(0))
  assert weights.expected_shapes(config) == tensors.shapes(whole)


def test_saved_file_permissions_follow_the_umask(saved, tmp_path):
  before = os.umask(0o022)
  try:
    path = weights.save(tmp_path / "a.safetensors", saved)
  finally:
    os.umask(before)
  assert path.stat().st_mode & 0o777 == 0o644


def test_a_link_stays_and_its_file_is_replaced(saved, tmp_path):
  link = tmp_path / "newest.safetensors"
  link.symlink_to("a.safetensors")
  weights.save(link, saved)
  assert link.is_symlink()
  assert_same(weights.load(tmp_path / "a.safetensors").params, saved.params)


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


OTHER_FILES = {
  b"not tensors at all": "cannot read .*copy or download it again",
  b"GGUF\x03\x00\x00\x00": "is a GGUF file of llama.cpp, expected a safetensors file",
  b"PK\x03\x04 and so on": "is a zip file, as torch.save writes it.*save_pretrained",
  b"version https://git-lfs.github.com/spec/v1\n": "Git LFS pointer.*git lfs pull",
  b"<!DOCTYPE html>": "is a web page.*download the file itself",
  b'{"model_type": "llama"}': "is JSON.*name a safetensors file",
}


@pytest.mark.parametrize("content", OTHER_FILES)
def test_file_of_another_kind_is_refused_with_a_remedy(tmp_path, content):
  path = tmp_path / "x.safetensors"
  path.write_bytes(content)
  with pytest.raises(base.InputError, match=OTHER_FILES[content]) as caught:
    weights.load(path)
  assert str(path) in str(caught.value)
  path.unlink()
  with pytest.raises(base.InputError, match=r"x\.saf\S* is not a file; check the path"):
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


KERNEL = "decoder/layers_1/mlp/wo/kernel"


def with_value(value):
  """Writes `value` into one element of KERNEL."""
  return lambda tensors: tensors.update({KERNEL: tensors[KERNEL].at[0, 1].set(value)})


HEADERS = {
  "another format": ({"format": "pt"}, "has format 'pt'.*their config.json"),
  "unknown field": ({"config": '{"color": 3}'}, "color"),
  "invalid field": ({"config": '{"width": 0}'}, "T5Config.width"),
  "no JSON": ({"config": "{"}, "config in the header"),
}
TENSORS = {
  "shape": (
    lambda tensors: tensors.update({KERNEL: tensors[KERNEL][:, :-1]}),
    rf"{KERNEL}: found \(5, 5\), expected \(5, 6\)",
  ),
  "missing": (
    lambda tensors: tensors.pop("encoder/encoder_norm/scale"),
    "encoder_norm/scale: found nothing",
  ),
  "unexpected": (
    lambda tensors: tensors.update(extra=jnp.zeros(2)),
    r"extra: found \(2,\), expected nothing",
  ),
  **{
    f"{kind.__name__} tensor": (
      lambda tensors, kind=kind: tensors.update({KERNEL: jnp.ones((5, 6), kind)}),
      rf"tensor {KERNEL}: found .*floating-point",
    )
    for kind in (jnp.int8, jnp.bool_)
  },
  **{
    f"value {value}": (
      with_value(value),
      rf"x\.safetensors: tensor {KERNEL}: 1 of its 30 values are",
    )
    for value in (np.nan, -np.inf)
  },
}


@pytest.mark.parametrize(("change", "message"), HEADERS.values(), ids=HEADERS)
def test_wrong_header_is_refused(saved, tmp_path, change, message):
  path = tmp_path / "x.safetensors"
  rewrite(path, saved, change_metadata=lambda header: header.update(change))
  with pytest.raises(base.InputError, match=message):
    weights.load(path)


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS)
def test_wrong_tensor_is_refused_by_name(saved, tmp_path, change, message):
  path = rewrite(tmp_path / "x.safetensors", saved, change_tensors=change)
  with pytest.raises(base.InputError, match=message):
    weights.load(path)


def test_large_finite_values_are_accepted(saved, tmp_path):
  """Negative control: the check examines values, not their sum, which overflows."""

  def change(tensors):
    tensors[KERNEL] = jnp.full_like(tensors[KERNEL], 3e38)

  path = rewrite(tmp_path / "x.safetensors", saved, change_tensors=change)
  assert np.all(weights.load(path).params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"])


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


def test_fields_added_later_are_stored_only_if_they_are_used(tmp_path):
  """Their defaults do not change the fingerprint of a target."""
  for config in (testing.TINY_LLAMA, tiny.GEMMA):
    held = weights.Weights(config, random_params(config, 0))
    path = weights.save(tmp_path / "model.safetensors", held)
    assert weights.load(path).config == config
    with safetensors.safe_open(path, "numpy") as file:
      stored = json.loads(file.metadata()["config"])
    assert ("windows" in stored) == (config is tiny.GEMMA)
  llama = dataclasses.replace(testing.TINY_LLAMA, num_layers=1)
  held = weights.Weights(llama, random_params(llama, 0))
  assert weights.identity(held, "a").fingerprint == (
    "796b6e00c344817aceb711e41ecb55eb0d37f9e9a708acb7738ed28a5cd47058"
  )
