"""Live comparison of T5Gemma with transformers (`make test-hf`)."""

import dataclasses

import jax
import numpy as np
import pytest

from osd_jax import base
from osd_jax.models.convert import hugging_face

pytestmark = pytest.mark.hf

STACK = {
  "vocab_size": 96,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "query_pre_attn_scalar": 12,
  "sliding_window": 5,  # prompts and texts are longer
  "attn_logit_softcapping": 2.0,
  "final_logit_softcapping": 6.0,
  "max_position_embeddings": 128,
  "bos_token_id": 3,
  "eos_token_id": 2,
}
LENGTHS, TARGET = (16, 9, 4), 12


@pytest.fixture(scope="module")
def transformers():
  torch = pytest.importorskip("torch", reason="`make test-hf` installs it")
  torch.set_num_threads(1)
  return pytest.importorskip("transformers", reason="`make test-hf` installs it")


def made(transformers, **changes):
  """Creates a random model, with noise on norms too."""
  import torch

  torch.manual_seed(7)
  config = transformers.T5GemmaConfig(
    encoder={**STACK, "num_hidden_layers": 2},
    decoder={**STACK, **changes},
    vocab_size=96,
    attn_implementation="eager",
  )
  model = transformers.T5GemmaForConditionalGeneration(config).eval()
  for label, parameter in model.named_parameters():
    spread = 0.3 if label.endswith("norm.weight") else 0.2
    parameter.data += spread * torch.randn_like(parameter)
  return model


@pytest.fixture(scope="module")
def pair(transformers, tmp_path_factory):
  """The torch model and the weights that we read from its folder."""
  model, folder = made(transformers), tmp_path_factory.mktemp("model")
  model.save_pretrained(folder)
  return model, hugging_face.load(folder)


def prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(4, 96, count).tolist() for count in LENGTHS]


def compare_logits(model, weights):
  import torch

  text = np.random.default_rng(1).integers(4, 96, (len(LENGTHS), TARGET))
  source = np.full((len(LENGTHS), max(LENGTHS)), base.NO_TOKEN, np.int32)
  for row, prompt in enumerate(prompts()):
    source[row, : len(prompt)] = prompt
  ours = weights.model
  found = ours.score(weights.params, source, ours.mask(source), text.astype(np.int32))
  for row, prompt in enumerate(prompts()):
    inputs = torch.tensor([[3, *text[row, :-1].tolist()]])
    with torch.no_grad():
      logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=inputs).logits
    np.testing.assert_allclose(found[row], logits[0].numpy(), atol=1e-4)


def test_logits_equal_torch(pair):
  compare_logits(*pair)


def test_greedy_text_equals_torch(pair):
  import torch

  model, weights = pair
  ours, served = weights.model, weights.model.prepare(weights.params)
  decode, texts = jax.jit(ours.decode), []
  for prompt in prompts():
    source = np.asarray([prompt], np.int32)
    cache = ours.prefill(served, source, ours.mask(source), TARGET)
    token, written = np.asarray(ours.starts(source))[:, None], []
    while len(written) < TARGET and (not written or written[-1] not in ours.eos_ids):
      logits, cache = decode(served, token, cache)
      token = np.argmax(logits[:, -1:], axis=-1).astype(np.int32)
      written.append(int(token[0, 0]))
    with torch.no_grad():
      expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=TARGET, do_sample=False
      )[0, 1:].tolist()
    assert written == expected
    texts.append(tuple(written))
  assert len(set(texts)) == len(texts)


def test_transformers_loads_written_folders(pair, transformers, tmp_path):
  _, weights = pair
  params = jax.tree.map(lambda leaf: 0.875 * leaf, weights.params)
  adapted = dataclasses.replace(weights, params=params)
  folder = hugging_face.write(tmp_path / "ours", adapted)
  loaded, report = transformers.T5GemmaForConditionalGeneration.from_pretrained(
    folder, output_loading_info=True, attn_implementation="eager"
  )
  assert not any(report.values()), report
  compare_logits(loaded.eval(), adapted)
  loaded.save_pretrained(tmp_path / "theirs")
  again = hugging_face.load(tmp_path / "theirs")
  assert again.config == adapted.config
  jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_stacks_of_different_shapes_are_refused(transformers, tmp_path):
  made(transformers, intermediate_size=64).save_pretrained(tmp_path)
  with pytest.raises(base.InputError, match="differ in mlp_dim; only T5Gemmas"):
    hugging_face.load(tmp_path)
