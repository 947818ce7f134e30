"""Sampling settings mean what they mean in transformers (`make test-hf`)."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from decoding import harness
from models.test_hf_models import made

from osd_jax.decoding import sampling
from osd_jax.engine import generation_config
from osd_jax.models.convert import hugging_face

pytestmark = pytest.mark.hf

SETTINGS = [
  {"temperature": 0.7},
  {"temperature": 1.3, "min_p": 0.2},
  {"temperature": 1.0, "repetition_penalty": 1.7},
  {"temperature": 0.8, "repetition_penalty": 0.6, "top_k": 7},
  {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
  {"temperature": 0.9, "top_p": 0.6, "min_p": 0.3, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module", autouse=True)
def transformers():
  torch = pytest.importorskip("torch", reason="`make test-hf` installs it")
  torch.set_num_threads(1)
  return pytest.importorskip("transformers", reason="`make test-hf` installs it")


def compare(logits, text, settings, expected):
  """Compares the distributions after texts [B, T] with the expected ones [B, V]."""
  ours = harness.settings_of(5, max_length=1, **settings)
  before = jnp.asarray(text, jnp.int32)
  rows = sampling.penalized(jnp.asarray(logits)[:, None], ours, before, before[:, :0])
  found = np.asarray(sampling.processed_probs(rows, ours))[:, 0]
  assert np.array_equal(found > 0, expected > 0)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distributions_equal_those_of_transformers(transformers, settings):
  """In the order in which `generate` of transformers applies its processors."""
  import torch
  from transformers.generation import logits_process as theirs

  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (5, 40)).astype(np.float32)
  text = rng.integers(0, 40, (5, 12))
  kinds = {
    "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
    "temperature": theirs.TemperatureLogitsWarper,
    "top_k": theirs.TopKLogitsWarper,
    "top_p": theirs.TopPLogitsWarper,
    "min_p": theirs.MinPLogitsWarper,
  }
  scores = torch.tensor(logits)
  for name, kind in kinds.items():
    if name in settings:
      scores = kind(settings[name])(torch.tensor(text), scores)
  expected = torch.softmax(scores, dim=-1).numpy()
  compare(logits, text, settings, expected)


PUBLISHED = [
  {"temperature": 0.7, "top_k": 5},  # no do_sample: greedy
  {"do_sample": True},  # top-k 50 of 96
  {"do_sample": True, "top_k": 64, "top_p": 0.95},
  {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
  },
  {"do_sample": True, "temperature": 1.4, "top_k": 0, "min_p": 0.05},
  {"do_sample": False, "repetition_penalty": 1.3, "temperature": 2.0},
]


@pytest.mark.parametrize("fields", PUBLISHED, ids=str)
def test_generation_config_is_read_as_in_transformers(transformers, tmp_path, fields):
  """With the processors that its `generate` makes of the same folder."""
  import torch

  model = made(transformers, "llama")
  model.save_pretrained(tmp_path)
  (tmp_path / "generation_config.json").write_text(json.dumps(fields))
  model = type(model).from_pretrained(tmp_path)
  stated = model._prepare_generation_config(None)[0]
  processors = model._get_logits_processor(stated, input_ids_seq_length=12)
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (5, 96)).astype(np.float32)
  text = rng.integers(0, 96, (5, 12))
  scores = processors(torch.tensor(text), torch.tensor(logits))
  expected = torch.softmax(scores, dim=-1).numpy()
  if not stated.do_sample:
    expected = np.eye(96)[scores.argmax(-1).numpy()]
  compare(logits, text, vars(generation_config.read(tmp_path)), expected)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("kind", ["llama", "qwen 3", "t5 1.1"])
def test_greedy_text_with_a_penalty_equals_transformers(
  transformers, tmp_path, kind, penalty, k
):
  import torch

  is_t5 = kind.startswith("t5")
  model = made(transformers, kind)
  model.save_pretrained(tmp_path)
  weights = hugging_face.load(tmp_path)
  source = np.random.default_rng(0).integers(3, 48, (1, 9)).astype(np.int32)
  theirs = model.generate(
    torch.tensor(source),
    max_new_tokens=16,
    do_sample=False,
    repetition_penalty=penalty,
    pad_token_id=0,
    use_cache=not is_t5,  # its cache needs as many decoder as encoder layers
  )[0].tolist()
  expected = theirs[1 if is_t5 else 9 :]
  settings = harness.settings_of(1, max_length=16, repetition_penalty=penalty)
  served = weights.model.prepare(weights.params)
  common = (source, source >= 0, settings, 16)
  if k:
    draft = weights.model.prepare(harness.perturbed(weights.params, 0.02))
    found = harness.speculate(weights.model, weights.model, k, served, draft, *common)
  else:
    found = harness.plain(weights.model, served, *common)
  assert harness.outputs(found) == [expected]
