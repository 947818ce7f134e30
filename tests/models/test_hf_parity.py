"""Live comparison with torch and transformers on tiny random models (`make test-hf`).

Each model is read from a folder that transformers wrote, like a user's model.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny
from models.fixtures import make_hugging_face as maker

from osd_jax import assets
from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
from osd_jax.models import t5
from osd_jax.models.convert import hugging_face

pytestmark = pytest.mark.hf

VOCABULARY = assets.resolve("shipped:demo_vocabulary.model")
FILES = tokenizer_files(Vocabulary.load(VOCABULARY))


@pytest.fixture(scope="module", autouse=True)
def transformers():
  torch = pytest.importorskip(
    "torch", reason="torch absent: `make test-hf` installs it"
  )
  torch.set_num_threads(1)  # for tiny products, threads cost more than they save
  return pytest.importorskip(
    "transformers", reason="transformers absent: `make test-hf` installs it"
  )


@pytest.fixture(
  scope="module",
  params=[("t5_1_0", 16), ("t5_1_0", 100), ("t5_1_1", 7), ("t5_1_1", 101)],
  ids=lambda param: f"{param[0]}-{param[1]}",
)
def pair(request, tmp_path_factory):
  """The torch model, its converted weights, and a batch."""
  kind, seed = request.param
  model = maker.tiny_model(kind, seed, vocab_size=1536, num_heads=5)
  folder = tmp_path_factory.mktemp(kind)
  model.save_pretrained(folder)
  batch = maker.ragged_batch(1536, seed)
  return model, hugging_face.load(folder), batch


def test_logits_equal_torch(pair):
  model, weights, (source, target) = pair
  logits = weights.model.score(weights.params, source, source != 0, target)
  expected = maker.outputs(model, source, target)["logits"]
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  # If transformers had tied the head silently, the logits would differ.
  head, shared = model.lm_head.weight, model.shared.weight
  assert (head is shared) == weights.config.tied_head


def test_greedy_text_equals_torch(pair):
  model, weights, (source, target) = pair
  expected = maker.outputs(model, source, target)["greedy"]
  found = tiny.greedy(weights, source, expected.shape[1])
  np.testing.assert_array_equal(found, expected)
  vocabulary = Vocabulary.load(VOCABULARY)
  texts = [vocabulary.decode(row) for row in found]
  assert texts == [vocabulary.decode(row) for row in expected]
  assert len(set(texts)) == len(texts)


def test_model_saved_again_by_transformers_is_read_equally(
  pair, transformers, tmp_path
):
  """Transformers and this package read the same model from a folder."""
  model, weights, (source, target) = pair
  model.save_pretrained(tmp_path)
  again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
  logits = weights.model.score(weights.params, source, source != 0, target)
  np.testing.assert_allclose(
    logits, maker.outputs(again, source, target)["logits"], atol=1e-4
  )


def test_head_tied_by_transformers_5_is_read_correctly(transformers, tmp_path):
  """A T5 1.1 that transformers 5 creates from a config has a tied, unscaled head."""
  fields = {**maker.SHAPE, **maker.FIELDS["t5_1_1"]}
  model = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields))
  model.eval().save_pretrained(tmp_path)
  assert model.lm_head.weight is model.shared.weight
  weights = hugging_face.load(tmp_path)
  assert not weights.config.tied_head
  source, target = maker.ragged_batch(48, 0)
  logits = weights.model.score(weights.params, source, source != 0, target)
  expected = maker.outputs(model, source, target)["logits"]
  np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_mt5_is_read_as_a_t5_1_1(transformers, tmp_path):
  """Whatever its config says, it does not scale the output of its decoder."""
  shape = {**maker.SHAPE, "feed_forward_proj": "gated-gelu"}
  model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**shape))
  model.eval().save_pretrained(tmp_path)
  weights = hugging_face.load(tmp_path)
  source, target = maker.ragged_batch(48, 0)
  logits = weights.model.score(weights.params, source, source != 0, target)
  expected = maker.outputs(model, source, target)
  np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
  greedy = tiny.greedy(weights, source, expected["greedy"].shape[1])
  np.testing.assert_array_equal(greedy, expected["greedy"])


def test_transformers_loads_written_folders(pair, transformers, tmp_path):
  """Logits, greedy text and all tensors are equal."""
  _, weights, (source, target) = pair
  params = jax.tree.map(lambda leaf: 0.875 * leaf, weights.params)
  adapted = dataclasses.replace(weights, params=params)
  folder = hugging_face.write(tmp_path / "ours", adapted, FILES)
  loaded, report = transformers.T5ForConditionalGeneration.from_pretrained(
    folder, output_loading_info=True
  )
  assert not any(report.values()), report  # no missing, unexpected or new tensors
  head, shared = loaded.lm_head.weight, loaded.shared.weight
  assert (head is shared) == adapted.config.tied_head
  expected = maker.outputs(loaded.eval(), source, target)
  logits = adapted.model.score(params, source, source != 0, target)
  np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
  greedy = tiny.greedy(adapted, source, expected["greedy"].shape[1])
  np.testing.assert_array_equal(greedy, expected["greedy"])
  loaded.save_pretrained(tmp_path / "theirs")
  again = hugging_face.load(tmp_path / "theirs")
  assert again.config == adapted.config
  jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.parametrize("extra_ids", [0, 100])
def test_tokenizer_of_a_written_folder_equals_the_vocabulary(
  pair, transformers, tmp_path, shared_data, extra_ids
):
  expected = Vocabulary.load(shared_data / "tokenizers/t5", extra_ids)
  folder = hugging_face.write(tmp_path / "ours", pair[1], tokenizer_files(expected))
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  assert len(tokenizer) == expected.size
  for text in ("How many singers are there?", "a  b .", "SELECT x FROM t WHERE x > 3"):
    ids = expected.encode(text)
    assert tokenizer(text).input_ids == [*ids, 1]
    assert tokenizer.decode(ids) == expected.decode(ids)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_buckets_equal_transformers(bidirectional):
  import torch
  from transformers.models.t5.modeling_t5 import T5Attention

  distances = np.arange(-600, 601)
  for buckets, distance in ((32, 128), (8, 10), (16, 40)):
    expected = T5Attention._relative_position_bucket(
      torch.from_numpy(distances), bidirectional, buckets, distance
    )
    found = t5.relative_position_bucket(
      jnp.asarray(distances), bidirectional, buckets, distance
    )
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("kind", sorted(maker.SEEDS))
def test_recorded_fixtures_are_reproducible(kind):
  seed = maker.SEEDS[kind]
  model = maker.tiny_model(kind, seed)
  source, target = maker.ragged_batch(48, seed)
  fresh = maker.outputs(model, source, target)
  folder = pathlib.Path(maker.__file__).parent / f"hugging_face_{kind}"
  with np.load(folder / "outputs.npz") as committed:
    np.testing.assert_array_equal(committed["source"], source)
    np.testing.assert_array_equal(committed["greedy"], fresh["greedy"])
    # Torch's order of summation depends on the processor; 2e-5 is the largest
    # difference measured between two processors.
    np.testing.assert_allclose(committed["logits"], fresh["logits"], atol=1e-4)
  weights = hugging_face.load(folder)
  embedding = weights.params["token_embedder"]["embedding"]
  np.testing.assert_array_equal(embedding, model.shared.weight.detach().numpy())
