"""Conversion of Hugging Face checkpoints, and errors for files that do not fit.

`fixtures/make_hugging_face.py` wrote the two folders under fixtures and the recorded
outputs in them with torch and transformers.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from models import tiny

from osd_jax.models.convert import hugging_face
from osd_tools import sizes

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
KINDS = ("t5_1_0", "t5_1_1")


def folder_of(kind):
  return FIXTURES / f"hugging_face_{kind}"


def read_raw(kind):
  """Returns the fields of config.json and all tensors of a fixture."""
  fields = json.loads((folder_of(kind) / "config.json").read_text())
  tensors = safetensors.flax.load_file(folder_of(kind) / "model.safetensors")
  return fields, {name: np.asarray(x) for name, x in tensors.items()}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
  """Converted weights, and the outputs that torch computed with the original ones."""
  weights = hugging_face.load(folder_of(request.param))
  with np.load(folder_of(request.param) / "outputs.npz") as file:
    return weights, dict(file)


def test_logits_and_greedy_tokens_equal_torch(pair):
  weights, torch = pair
  source = torch["source"]
  score = jax.jit(weights.model.score)
  logits = score(weights.params, source, source != 0, torch["target"])
  np.testing.assert_allclose(logits, torch["logits"], atol=1e-4)
  assert np.std(torch["logits"]) > 0.1
  expected = torch["greedy"]
  assert len(np.unique(expected)) > 8
  found = tiny.greedy(weights, source, expected.shape[1])
  np.testing.assert_array_equal(found, expected)


def _fields(**changes):
  """Returns the fields of flan-t5-small's config.json, with changes."""
  fields = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
  }
  return {**fields, **changes}


def test_config_of_flan_t5_small_equals_its_published_size():
  assert hugging_face.config_from(_fields()) == sizes.SIZES["flan-t5-small"]


def test_config_of_t5_small_uses_the_defaults_of_transformers():
  fields = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
  }
  assert hugging_face.config_from(fields) == sizes.SIZES["t5-small"]


@pytest.mark.parametrize(
  "changes,tied",
  [
    # transformers 4, T5 1.1
    ({"tie_word_embeddings": False, "eos_token_id": [1]}, False),
    ({"tie_word_embeddings": True}, True),  # transformers 4, T5 1.0
    ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),  # 5, 1.1
    ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True),  # 5, 1.0
  ],
)
def test_tied_head_is_read_from_files_of_transformers_4_and_5(changes, tied):
  assert hugging_face.config_from(_fields(**changes)).tied_head is tied


@pytest.mark.parametrize(
  "field,value",
  [
    ("model_type", "bart"),
    ("model_type", None),
    ("is_encoder_decoder", False),
    ("feed_forward_proj", "gelu"),  # the exact gelu; no T5 uses it
    ("feed_forward_proj", "gated-silu"),
    ("layer_norm_epsilon", 1e-5),
    ("pad_token_id", 3),
    ("eos_token_id", 2),
    ("eos_token_id", [1, 2]),
    ("decoder_start_token_id", 7),
    ("d_kv", None),
  ],
)
def test_config_of_another_model_is_refused_by_field(field, value):
  with pytest.raises(ValueError, match=f"config.json: field {field}: received"):
    hugging_face.config_from(_fields(**{field: value}))


def edited(tmp_path, kind, fields=None, tensors=None):
  """Copies a fixture's folder and replaces its fields or tensors."""
  folder = tmp_path / "model"
  shutil.copytree(folder_of(kind), folder)
  if fields is not None:
    (folder / "config.json").write_text(json.dumps(fields))
  if tensors is not None:
    arrays = {name: jnp.asarray(x) for name, x in tensors.items()}
    safetensors.flax.save_file(arrays, folder / "model.safetensors")
  return folder


@pytest.fixture
def converted(tmp_path):
  """Converts the fixture's tensors after `change` was applied to them."""

  def convert_changed(kind, change):
    _, tensors = read_raw(kind)
    change(tensors)
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    return hugging_face.load(edited(tmp_path, kind, tensors=tensors)).params

  return convert_changed


K_WEIGHT = "decoder.block.2.layer.1.EncDecAttention.k.weight"
WO_WEIGHT = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
REFUSED = {
  "missing": (
    "t5_1_0",
    lambda tensors: tensors.pop(K_WEIGHT),
    rf"{K_WEIGHT}: found nothing, expected \(12, 16\)",
  ),
  "transposed": (
    "t5_1_1",
    lambda tensors: tensors.update({WO_WEIGHT: tensors[WO_WEIGHT].T}),
    rf"{WO_WEIGHT}: found \(24, 16\), expected \(16, 24\)",
  ),
  "unexpected": (
    "t5_1_0",
    lambda tensors: tensors.update({"encoder.adapter.weight": np.zeros((2, 3))}),
    r"encoder.adapter.weight: found \(2, 3\), expected nothing",
  ),
  # The error lists five tensors and counts the others.
  "all missing": (
    "t5_1_0",
    lambda tensors: tensors.clear(),
    "and 55 more. Check that the configuration",
  ),
  "separately trained head": (
    "t5_1_0",
    lambda tensors: tensors.update({"lm_head.weight": tensors["shared.weight"] + 1}),
    "lm_head.weight: differs from shared.weight",
  ),
}
ACCEPTED = {
  # Older versions of transformers store up to four copies of the embedding.
  "copies": (
    "t5_1_1",
    lambda tensors: tensors.update(
      {name: tensors["shared.weight"].copy() for name in COPIES}
    ),
  ),
  "copies and a tied head": (
    "t5_1_0",
    lambda tensors: tensors.update(
      {name: tensors["shared.weight"].copy() for name in (*COPIES, "lm_head.weight")}
    ),
  ),
  "another name": (
    "t5_1_0",
    lambda tensors: tensors.update({COPIES[0]: tensors.pop("shared.weight")}),
  ),
  "unused": (
    "t5_1_0",
    lambda tensors: tensors.update({UNUSED: np.ones((8, 3), np.float32)}),
  ),
}


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_tensor_is_refused_by_name(converted, kind, change, message):
  with pytest.raises(ValueError, match=message):
    converted(kind, change)


@pytest.mark.parametrize(("kind", "change"), ACCEPTED.values(), ids=ACCEPTED)
def test_copies_and_unused_tensors_are_accepted(converted, kind, change):
  found, expected = converted(kind, change), converted(kind, lambda _: None)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_missing_head_of_a_tied_t5_1_1_is_the_embedding(tmp_path):
  """Transformers 5 ties the head of a new T5 1.1 and does not write it."""
  fields, tensors = read_raw("t5_1_1")
  del tensors["lm_head.weight"]
  assert fields["tie_word_embeddings"] and not fields["scale_decoder_outputs"]
  params = hugging_face.load(edited(tmp_path, "t5_1_1", tensors=tensors)).params
  np.testing.assert_array_equal(
    params["decoder"]["logits_dense"]["kernel"],
    params["token_embedder"]["embedding"].T,
  )


def test_missing_head_of_an_untied_model_is_refused(tmp_path):
  fields, tensors = read_raw("t5_1_1")
  del tensors["lm_head.weight"], fields["scale_decoder_outputs"]
  fields["tie_word_embeddings"] = False
  folder = edited(tmp_path, "t5_1_1", fields, tensors)
  with pytest.raises(ValueError, match="lm_head.weight: found nothing"):
    hugging_face.load(folder)
