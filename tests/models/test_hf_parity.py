"""Live comparison with torch and transformers on tiny random models (`make test-hf`).

Each model goes through a folder that transformers itself writes, as a user's does.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny
from models.fixtures import make_hugging_face as maker

from osd_jax.data.vocabularies import Vocabulary
from osd_jax.models import convert, layers

pytestmark = pytest.mark.hf

ASSETS = pathlib.Path(convert.__file__).parents[1] / "assets"
VOCABULARY = ASSETS / "demo_vocabulary.model"


@pytest.fixture(scope="module", autouse=True)
def transformers():
  torch = pytest.importorskip(
    "torch", reason="torch absent: `make test-hf` installs it"
  )
  torch.set_num_threads(1)  # tiny products only wait for one another
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
  return model, convert.read_hugging_face(folder), batch


def test_logits_are_torchs(pair):
  model, weights, (source, target) = pair
  logits = weights.model.score(weights.params, source, source != 0, target)
  expected = maker.outputs(model, source, target)["logits"]
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  # a head that transformers tied behind our back would be seen here
  head, shared = model.lm_head.weight, model.shared.weight
  assert (head is shared) == weights.config.tied_head


def test_greedy_text_is_torchs(pair):
  model, weights, (source, target) = pair
  expected = maker.outputs(model, source, target)["greedy"]
  found = tiny.greedy(weights, source, expected.shape[1])
  np.testing.assert_array_equal(found, expected)
  vocabulary = Vocabulary.load(VOCABULARY)
  texts = [vocabulary.decode(row) for row in found]
  assert texts == [vocabulary.decode(row) for row in expected]
  assert len(set(texts)) == len(texts)


def test_reloaded_model_is_the_same_model(pair, transformers, tmp_path):
  """Transformers reads its own folder as we do: the fixture is no special case."""
  model, weights, (source, target) = pair
  model.save_pretrained(tmp_path)
  again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
  logits = weights.model.score(weights.params, source, source != 0, target)
  np.testing.assert_allclose(
    logits, maker.outputs(again, source, target)["logits"], atol=1e-4
  )


def test_head_tied_by_transformers_5_is_read_as_it_computes(transformers, tmp_path):
  """The trap: T5 1.1 made from a config alone gets a tied head, unscaled."""
  fields = {**maker.SHAPE, **maker.FIELDS["t5_1_1"]}
  model = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields))
  model.eval().save_pretrained(tmp_path)
  assert model.lm_head.weight is model.shared.weight
  weights = convert.read_hugging_face(tmp_path)
  assert not weights.config.tied_head
  source, target = maker.ragged_batch(48, 0)
  logits = weights.model.score(weights.params, source, source != 0, target)
  expected = maker.outputs(model, source, target)["logits"]
  np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_buckets_are_transformers(bidirectional):
  import torch
  from transformers.models.t5.modeling_t5 import T5Attention

  relative = np.arange(-600, 601)
  for buckets, distance in ((32, 128), (8, 10), (16, 40)):
    expected = T5Attention._relative_position_bucket(
      torch.from_numpy(relative), bidirectional, buckets, distance
    )
    found = layers.relative_position_bucket(
      jnp.asarray(relative), bidirectional, buckets, distance
    )
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("kind", sorted(maker.SEEDS))
def test_committed_outputs_are_what_the_script_makes(kind):
  seed = maker.SEEDS[kind]
  model = maker.tiny_model(kind, seed)
  source, target = maker.ragged_batch(48, seed)
  fresh = maker.outputs(model, source, target)
  folder = pathlib.Path(maker.__file__).parent / f"hugging_face_{kind}"
  with np.load(folder / "outputs.npz") as committed:
    np.testing.assert_array_equal(committed["source"], source)
    np.testing.assert_array_equal(committed["greedy"], fresh["greedy"])
    np.testing.assert_allclose(committed["logits"], fresh["logits"], atol=1e-5)
  weights = convert.read_hugging_face(folder)
  embedding = weights.params["token_embedder"]["embedding"]
  np.testing.assert_array_equal(embedding, model.shared.weight.detach().numpy())
