"""Hugging Face folders: conversion, errors, shards, writing, and memory use.

`fixtures/make_hugging_face.py` wrote the two folders under fixtures and the recorded
outputs in them with torch and transformers.
"""

import dataclasses
import json
import pathlib
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from models import tiny

from osd_jax import assets, base
from osd_jax.data import vocabulary as vocabularies
from osd_jax.data.vocabulary import Vocabulary
from osd_jax.models import families, weights
from osd_jax.models import tensors as tensors_lib
from osd_jax.models.convert import folders, hugging_face
from osd_tools import sizes

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
KINDS = ("t5_1_0", "t5_1_1")
INDEX = "model.safetensors.index.json"


def assert_same(found, expected):
  assert found.config == expected.config
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def folder_of(kind):
  return FIXTURES / f"hugging_face_{kind}"


def copied(tmp_path, kind, fields=None, tensors=None):
  """Copies a fixture's folder, and replaces its fields or tensors."""
  folder = shutil.copytree(folder_of(kind), tmp_path / "model")
  if fields is not None:
    (folder / "config.json").write_text(json.dumps(fields))
  if tensors is not None:
    arrays = {name: jnp.asarray(x) for name, x in tensors.items()}
    safetensors.flax.save_file(arrays, folder / "model.safetensors")
  return folder


def read_raw(kind):
  """Returns the fields of config.json and all tensors of a fixture."""
  fields = json.loads((folder_of(kind) / "config.json").read_text())
  tensors = safetensors.flax.load_file(folder_of(kind) / "model.safetensors")
  return fields, {name: np.asarray(x) for name, x in tensors.items()}


def converted(tmp_path, kind, change):
  """Converts a fixture after `change` was applied to its tensors."""
  _, tensors = read_raw(kind)
  change(tensors)
  return hugging_face.load(copied(tmp_path, kind, tensors=tensors)).params


def shard(folder, count=3):
  """Splits the tensors of a folder into shards; returns tensor -> file."""
  tensors = safetensors.flax.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
  places = {name: files[i % count] for i, name in enumerate(sorted(tensors))}
  for file in files:
    held = {name: x for name, x in tensors.items() if places[name] == file}
    safetensors.flax.save_file(held, folder / file)
  write_index(folder, places)
  return places


def write_index(folder, places):
  text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
  (folder / INDEX).write_text(text)


# ---- Fields and tensors


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
def test_wrong_tensor_is_refused_by_name(tmp_path, kind, change, message):
  with pytest.raises(ValueError, match=message):
    converted(tmp_path, kind, change)


@pytest.mark.parametrize(("kind", "change"), ACCEPTED.values(), ids=ACCEPTED)
def test_copies_and_unused_tensors_are_accepted(tmp_path, kind, change):
  found = converted(tmp_path, kind, change)
  expected = hugging_face.load(folder_of(kind)).params
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_missing_head_of_a_tied_t5_1_1_is_the_embedding(tmp_path):
  """Transformers 5 ties the head of a new T5 1.1 and does not write it."""
  fields, tensors = read_raw("t5_1_1")
  del tensors["lm_head.weight"]
  assert fields["tie_word_embeddings"] and not fields["scale_decoder_outputs"]
  params = hugging_face.load(copied(tmp_path, "t5_1_1", tensors=tensors)).params
  np.testing.assert_array_equal(
    params["decoder"]["logits_dense"]["kernel"], params["token_embedder"]["embedding"].T
  )


def test_missing_head_of_an_untied_model_is_refused(tmp_path):
  fields, tensors = read_raw("t5_1_1")
  del tensors["lm_head.weight"], fields["scale_decoder_outputs"]
  fields["tie_word_embeddings"] = False
  folder = copied(tmp_path, "t5_1_1", fields, tensors)
  with pytest.raises(ValueError, match="lm_head.weight: found nothing"):
    hugging_face.load(folder)


# ---- Shards


@pytest.mark.parametrize("kind", KINDS)
def test_shards_equal_one_file(tmp_path, kind):
  whole = hugging_face.load(folder_of(kind))
  folder = copied(tmp_path, kind)
  shard(folder)
  assert_same(hugging_face.load(folder), whole)


def refusal(folder):
  """Returns the message of the error that reading the folder raises."""
  with pytest.raises(ValueError) as caught:
    hugging_face.load(folder)
  return str(caught.value)


def test_index_with_files_outside_the_folder_is_refused(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  places = shard(folder)
  name, file = sorted(places.items())[0]
  shutil.copy(folder / file, tmp_path / file)
  for path in (f"../{file}", str(tmp_path / file), f"./../{file}", 3):
    write_index(folder, {**places, name: path})
    found = refusal(folder)
    assert name in found and "other files are not opened" in found


def test_errors_in_shards_name_tensor_and_file(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  places = shard(folder)
  names = sorted(places)
  write_index(folder, {**places, names[0]: places[names[1]]})
  found = refusal(folder)
  assert names[0] in found and f"found nothing in {places[names[1]]}" in found
  write_index(folder, {n: f for n, f in places.items() if n != "shared.weight"})
  assert "shared.weight: found an unlisted copy in model-" in refusal(folder)
  write_index(folder, places)
  (folder / places[names[0]]).unlink()
  assert places[names[0]] in refusal(folder)
  for text in ("[]", "{}", '{"weight_map": []}', "{"):
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_incomplete_file_is_refused(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  # The header at the start of the file remains intact; the last values are missing.
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-40])
  assert "expected a complete safetensors file" in refusal(folder)


@pytest.mark.parametrize(
  ("file", "message"),
  [
    ("adapter_config.json", "an adapter .LoRA.*merge it into its base model"),
    ("model-Q4_K_M.gguf", "GGUF files of llama.cpp"),
    ("model_index.json", "a pipeline of diffusers"),
    ("consolidated.00.pth", "Meta's or Mistral's own format"),
    ("checkpoint", "t5x"),
    ("model.fp16.safetensors", "a variant of the tensors, fp16"),
    ("model.safetensors.index.fp16.json", "a variant of the tensors, fp16"),
    ("flax_model.msgpack", "the tensors of flax"),
    ("tf_model.h5", "the tensors of TensorFlow"),
    ("pytorch_model_fsdp_0/__0_0.distcp", "shards of FSDP"),
    ("__0_0.distcp", "shards of FSDP"),
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed"),
    ("flan/config.json", "name one of those"),
    ("README.md", "expected a model folder that transformers wrote"),
  ],
)
def test_folder_of_another_kind_is_refused_with_a_remedy(tmp_path, file, message):
  (tmp_path / file).parent.mkdir(exist_ok=True)
  (tmp_path / file).write_text("{}")
  with pytest.raises(base.InputError, match=rf"config\.json.*{message}"):
    hugging_face.load(tmp_path)
  # The configuration of a base model does not make it a whole one.
  shutil.copy(folder_of("t5_1_0") / "config.json", tmp_path)
  with pytest.raises(base.InputError, match=rf"model\.safetensors.*{message}"):
    hugging_face.load(tmp_path)


def test_all_floating_types_are_read_exactly(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  for kind in ("float16", "float64", "bfloat16"):
    held = {name: np.asarray(x).astype(jnp.dtype(kind)) for name, x in tensors.items()}
    save = safetensors.flax if kind == "bfloat16" else safetensors.numpy
    save.save_file(held, folder / "model.safetensors")
    found = hugging_face.load(folder).params["token_embedder"]["embedding"]
    np.testing.assert_array_equal(found, held["shared.weight"].astype(np.float32))
    assert found.dtype == np.float32


def test_tensor_in_two_shards_is_refused(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  places = shard(folder)
  name, file = sorted(places.items())[0]
  other = next(other for other in places.values() if other != file)
  held = safetensors.flax.load_file(folder / other)
  held[name] = safetensors.flax.load_file(folder / file)[name] + 1
  safetensors.flax.save_file(held, folder / other)
  found = refusal(folder)
  assert f"tensor {name}: found an unlisted copy in {other}" in found
  assert f"expected it in {file} only" in found


def test_index_with_a_duplicate_tensor_is_refused(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  places = sorted(shard(folder).items())
  pairs = ", ".join(f'"{name}": "{file}"' for name, file in [*places, places[0]])
  (folder / INDEX).write_text(f'{{"weight_map": {{{pairs}}}}}')
  assert f"it contains '{places[0][0]}' twice" in refusal(folder)


def test_non_finite_values_are_named_with_their_shard(tmp_path):
  folder = copied(tmp_path, "t5_1_1")
  places = shard(folder)
  name = "decoder.block.0.layer.2.DenseReluDense.wo.weight"
  held = safetensors.flax.load_file(folder / places[name])
  held[name] = held[name].at[1, 2].set(jnp.nan).at[0, 0].set(jnp.inf)
  safetensors.flax.save_file(held, folder / places[name])
  found = refusal(folder)
  assert f"{places[name]}: tensor {name}: 2 of its" in found


def test_nan_in_a_copied_embedding_is_reported_as_a_nan(tmp_path):
  _, tensors = read_raw("t5_1_0")
  broken = tensors["shared.weight"].copy()
  broken[0, 0] = np.nan
  tensors |= {"shared.weight": broken, "lm_head.weight": broken}
  folder = copied(tmp_path, "t5_1_0", tensors=tensors)
  assert "tensor shared.weight: 1 of its" in refusal(folder)


def test_pickle_is_refused(tmp_path):
  folder = copied(tmp_path, "t5_1_0")
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
  assert "save_pretrained writes safetensors" in refusal(folder)


# ---- Writing


def random_weights(tied):
  config = dataclasses.replace(
    tiny.CONFIG,
    vocab_size=44,
    num_encoder_layers=2,
    num_decoder_layers=3,
    tied_head=tied,
    mlp_activations=("relu",) if tied else ("gelu", "linear"),
  )
  params = jax.tree.map(jnp.asarray, tiny.random_params(families.build(config), seed=1))
  return weights.Weights(config, params)


@pytest.mark.parametrize("tied", [True, False])
def test_written_folder_is_read_back_exactly(tmp_path, tied):
  given = random_weights(tied)
  folder = hugging_face.write(tmp_path / "a" / "model", given)
  assert_same(hugging_face.load(folder), given)
  names = safetensors.numpy.load_file(folder / "model.safetensors").keys()
  assert ("lm_head.weight" in names) is not tied
  files = {path.name for path in folder.iterdir()}
  assert files == {"config.json", "model.safetensors"}
  assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_large_weights_are_written_in_shards_and_read_back_exactly(
  tmp_path, monkeypatch
):
  given = random_weights(False)
  whole = hugging_face.write(tmp_path / "whole", given)
  assert not list(whole.glob("*index*"))
  monkeypatch.setattr(folders, "_SHARD", 20_000)  # 20 kB instead of 5 GB
  folder = hugging_face.write(tmp_path / "shards", given)
  shards = sorted(folder.glob("*.safetensors"))
  assert len(shards) > 2 and shards[0].name.startswith("model-00001-of-")
  index = json.loads((folder / INDEX).read_text())
  parts = {path.name: safetensors.numpy.load_file(path) for path in shards}
  expected = safetensors.numpy.load_file(whole / "model.safetensors")
  assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
  assert index["weight_map"].keys() == expected.keys()
  for name, file in index["weight_map"].items():
    np.testing.assert_array_equal(parts[file][name], expected[name])
  assert_same(hugging_face.load(folder), hugging_face.load(whole))
  short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), given.params)
  again = dataclasses.replace(given, params=short)
  folder = hugging_face.write(tmp_path / "short", again)
  assert len(list(folder.glob("*.safetensors"))) > 2
  assert hugging_face.bfloat16_of(folder) == tensors_lib.flat(short).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_of_a_transformers_folder_is_exact(tmp_path, kind):
  """Every tensor keeps its name, type and bits."""
  original = folder_of(kind)
  folder = hugging_face.write(
    tmp_path / "model", hugging_face.load(original, as_stored=True)
  )
  found = safetensors.flax.load_file(folder / "model.safetensors")
  expected = safetensors.flax.load_file(original / "model.safetensors")
  assert found.keys() == expected.keys()
  for name, tensor in expected.items():
    assert found[name].dtype == tensor.dtype
    np.testing.assert_array_equal(found[name], tensor)
  theirs = json.loads((original / "config.json").read_text())
  ours = json.loads((folder / "config.json").read_text())
  # Dropout has no effect here, and `tie_word_embeddings` has
  # another meaning in transformers 4 than in 5.
  differing = {name for name in ours if name in theirs and ours[name] != theirs[name]}
  assert differing <= {"dropout_rate", "tie_word_embeddings"}


@pytest.mark.parametrize("name", sizes.SIZES)
def test_configs_of_all_published_sizes_round_trip(name):
  config = sizes.size(name)
  found = hugging_face.config_from(hugging_face.config_to(config))
  assert found == dataclasses.replace(config, embedding_std=1.0)


def test_writing_unsupported_activations_is_refused(tmp_path):
  given = random_weights(tied=True)
  config = dataclasses.replace(given.config, mlp_activations=("gelu", "gelu"))
  given = dataclasses.replace(given, config=config)
  with pytest.raises(ValueError, match="mlp_activations: received .'gelu', 'gelu'"):
    hugging_face.write(tmp_path / "m", given)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("extra_ids", [0, 100])
def test_written_tokenizer_equals_the_vocabulary(tmp_path, extra_ids):
  vocabulary = Vocabulary.load(
    assets.resolve("shipped:demo_vocabulary.model"), extra_ids
  )
  folder = hugging_face.write(
    tmp_path / "m", random_weights(True), vocabularies.tokenizer_files(vocabulary)
  )
  model = pathlib.Path(vocabulary.path).read_bytes()
  assert (folder / "spiece.model").read_bytes() == model
  again = Vocabulary.load(folder, extra_ids)
  assert again == vocabulary
  assert vocabularies.stated_extra_ids(again) == extra_ids
  assert vocabularies.stated_extra_ids(vocabulary) is None
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  assert settings["tokenizer_class"] == "T5Tokenizer"
  special = [settings[f"{name}_token"] for name in ("pad", "eos", "unk")]
  assert special == vocabulary.pieces[:3]
  sentinels = settings["additional_special_tokens"]
  assert sentinels == [f"<extra_id_{index}>" for index in range(extra_ids)]


@pytest.mark.parametrize("fault", ["tokenizer", "tensors", "disk"])
def test_failed_writes_leave_no_files(tmp_path, monkeypatch, fault):
  given, tokenizer = random_weights(False), {}
  if fault == "tokenizer":
    tokenizer = {"no/such/folder": b""}
  elif fault == "tensors":
    config = dataclasses.replace(given.config, vocab_size=45)
    given = dataclasses.replace(given, config=config)
  else:

    def full(tensors, path, metadata):
      pathlib.Path(path).write_bytes(b"half")
      raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
  with pytest.raises((ValueError, OSError)):
    hugging_face.write(tmp_path / "out" / "m", given, tokenizer)
  assert not [path for path in tmp_path.rglob("*") if path.name != "out"]


def test_nonempty_folder_is_not_overwritten(tmp_path):
  (tmp_path / "empty").mkdir()
  hugging_face.write(tmp_path / "empty", random_weights(True))
  before = (tmp_path / "empty" / "config.json").read_bytes()
  with pytest.raises(ValueError, match="is in use"):
    hugging_face.write(tmp_path / "empty", random_weights(False))
  assert (tmp_path / "empty" / "config.json").read_bytes() == before


# ---- Memory


def most_alive(monkeypatch, eager):
  """Returns the largest number of tensors in memory while a file is read."""
  alive, most, opened = [], 0, folders.open_tensors

  def watched(*arguments):
    found = opened(*arguments)
    if eager:
      return tensors_lib.of_arrays({name: read(name) for name in found.shapes})
    return dataclasses.replace(found, read=read)

  def read(name):
    nonlocal most
    array = opened(folder_of("t5_1_1")).read(name)
    alive.append(weakref.ref(array))
    most = max(most, sum(reference() is not None for reference in alive))
    return array

  monkeypatch.setattr(hugging_face, "open_tensors", watched)
  hugging_face.load(folder_of("t5_1_1"))
  return most


def test_only_one_tensor_is_in_memory_at_a_time(monkeypatch):
  """Counts tensors instead of bytes, so the result holds for models of any size."""
  assert most_alive(monkeypatch, eager=False) == 1


def test_memory_check_detects_an_eager_reader(monkeypatch):
  """Negative control: a reader that loads the whole file first."""
  assert most_alive(monkeypatch, eager=True) > 50
