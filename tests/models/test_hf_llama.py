"""Live comparison of decoder-only models with transformers (`make test-hf`).

Tiny random models of every supported kind, read from folders that transformers wrote.
"""

import dataclasses

import jax
import numpy as np
import pytest

from osd_jax import base
from osd_jax.models import layers
from osd_jax.models.convert import hugging_face

pytestmark = pytest.mark.hf

COMMON = {
  "vocab_size": 96,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "max_position_embeddings": 128,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": None,
}
LLAMA_3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,  # the prompts are longer
}
GEMMA = {
  "num_key_value_heads": 2,
  "head_dim": 16,
  "query_pre_attn_scalar": 12,
  "sliding_window": 5,  # prompts and texts are longer
  "final_logit_softcapping": 6.0,
}
GLOBAL = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
GEMMA_3 = {
  **GEMMA,
  "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
  "num_hidden_layers": 3,
  "rope_parameters": {
    "full_attention": GLOBAL,
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
  },
}
KINDS = {
  "llama": ("Llama", {}),
  "grouped heads": ("Llama", {"num_key_value_heads": 2}),
  "one head of keys": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
  "tied": ("Llama", {"tie_word_embeddings": True}),
  "biases": ("Llama", {"attention_bias": True}),
  "own head size": ("Llama", {"head_dim": 16}),
  "llama 3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA_3}),
  "linear scaling": ("Llama", {"rope_parameters": GLOBAL}),
  "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
  "qwen 2": ("Qwen2", {"num_key_value_heads": 2}),
  "qwen 2 tied": ("Qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
  "qwen 2 with windows": (
    "Qwen2",
    {
      "num_key_value_heads": 2,
      "use_sliding_window": True,
      "sliding_window": 5,
      "max_window_layers": 1,
    },
  ),
  "qwen 3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
  "gemma 2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
  "gemma 2 without caps": (
    "Gemma2",
    {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
  ),
  "gemma 3": ("Gemma3", GEMMA_3),
}
ROWS, SOURCE, TARGET = 3, 24, 8


@pytest.fixture(scope="module", autouse=True)
def transformers():
  torch = pytest.importorskip("torch", reason="`make test-hf` installs it")
  torch.set_num_threads(1)
  return pytest.importorskip("transformers", reason="`make test-hf` installs it")


def made(transformers, kind, **changes):
  """Creates a random model of a kind, with noise on biases and norms too."""
  import torch

  name, fields = KINDS[kind]
  torch.manual_seed(7)
  kind = getattr(transformers, f"{name}ForCausalLM")
  config = kind.config_class(**{**COMMON, **fields, **changes})
  config._attn_implementation = "eager"  # the only one with caps
  model = kind(config).eval()
  for label, parameter in model.named_parameters():
    spread = 0.3 if label.endswith(("norm.weight", "bias")) else 0.2
    parameter.data += spread * torch.randn_like(parameter)
  return model


@pytest.fixture(scope="module", params=KINDS)
def pair(request, transformers, tmp_path_factory):
  """The torch model and the weights that we read from its folder."""
  model = made(transformers, request.param)
  folder = tmp_path_factory.mktemp("model")
  model.save_pretrained(folder)
  return model, hugging_face.load(folder)


def prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(3, 96, count).tolist() for count in (SOURCE, 17, 5)]


def batch():
  source = np.full((ROWS, SOURCE), base.NO_TOKEN, np.int32)
  for row, prompt in enumerate(prompts()):
    source[row, : len(prompt)] = prompt
  target = np.random.default_rng(1).integers(3, 96, (ROWS, TARGET)).astype(np.int32)
  return source, target


def torch_logits(model, target):
  """Returns torch's logits of the output tokens, computed one prompt at a time."""
  import torch

  rows = []
  for prompt, text in zip(prompts(), target.tolist()):
    with torch.no_grad():
      logits = model(torch.tensor([prompt + text])).logits[0]
    rows.append(logits[len(prompt) - 1 : -1].numpy())
  return np.stack(rows)


def scored(weights):
  source, target = batch()
  model = weights.model
  return model.score(weights.params, source, model.mask(source), target), target


def greedy(weights, prompt, count):
  """Greedy decoding of one prompt, one token per call."""
  model = weights.model
  served = model.prepare(weights.params)
  source = np.asarray([prompt], np.int32)
  cache = model.prefill(served, source, model.mask(source), count)
  token, emitted = np.asarray(model.starts(source))[:, None], []
  decode = jax.jit(model.decode)
  while len(emitted) < count and (not emitted or emitted[-1] not in model.eos_ids):
    logits, cache = decode(served, token, cache)
    token = np.argmax(logits[:, -1:], axis=-1).astype(np.int32)
    emitted.append(int(token[0, 0]))
  return emitted


def test_logits_equal_torch(pair):
  model, weights = pair
  logits, target = scored(weights)
  np.testing.assert_allclose(logits, torch_logits(model, target), atol=1e-4)
  assert (model.lm_head.weight is model.model.embed_tokens.weight) == (
    weights.config.tied_head
  )


def test_greedy_text_equals_torch(pair):
  import torch

  model, weights = pair
  texts = []
  for prompt in prompts():
    with torch.no_grad():
      expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0
      )[0, len(prompt) :].tolist()
    texts.append(greedy(weights, prompt, 16))
    assert texts[-1] == expected
  assert len(set(map(tuple, texts))) == ROWS


def test_transformers_loads_written_folders(pair, transformers, tmp_path):
  _, weights = pair
  params = jax.tree.map(lambda leaf: 0.875 * leaf, weights.params)
  adapted = dataclasses.replace(weights, params=params)
  folder = hugging_face.write(tmp_path / "ours", adapted)
  loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True
  )
  assert not any(report.values()), report
  logits, target = scored(adapted)
  np.testing.assert_allclose(logits, torch_logits(loaded.eval(), target), atol=1e-4)
  loaded.save_pretrained(tmp_path / "theirs")
  again = hugging_face.load(tmp_path / "theirs")
  assert again.config == adapted.config
  jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_shards_equal_one_file(transformers, tmp_path):
  model = made(transformers, "grouped heads")
  for name, size in (("whole", "1GB"), ("shards", "20KB")):
    model.save_pretrained(tmp_path / name, max_shard_size=size)
  assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
  whole, parts = (hugging_face.load(tmp_path / name) for name in ("whole", "shards"))
  assert whole.config == parts.config
  jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)


def test_text_model_of_a_gemma_that_reads_images_is_read(transformers, tmp_path):
  text = made(transformers, "gemma 3")
  vision = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
  }
  config = transformers.Gemma3Config(
    text_config=text.config, vision_config=vision, mm_tokens_per_image=4
  )
  model = transformers.Gemma3ForConditionalGeneration(config)
  model.model.language_model.load_state_dict(text.model.state_dict())
  model.save_pretrained(tmp_path)
  weights = hugging_face.load(tmp_path)
  logits, target = scored(weights)
  np.testing.assert_allclose(logits, torch_logits(text, target), atol=1e-4)


@pytest.mark.parametrize("stored", ["bfloat16", "mixed"])
def test_transformers_loads_a_written_folder_in_its_type(
  transformers, tmp_path, stored
):
  """Without rounding: if a tensor is in float32, all are loaded in float32."""
  import torch

  made(transformers, "llama").bfloat16().save_pretrained(tmp_path / "source")
  held = hugging_face.load(tmp_path / "source", as_stored=True)
  if stored == "mixed":
    params = jax.tree.map(
      lambda x: x if x.ndim > 1 else x.astype(np.float32) + 1e-4, held.params
    )
    held = dataclasses.replace(held, params=params)
  folder = hugging_face.write(tmp_path / "ours", held)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
  wanted = {"bfloat16": torch.bfloat16, "mixed": torch.float32}[stored]
  assert {x.dtype for x in loaded.parameters()} == {wanted}
  norm = held.params["decoder"]["decoder_norm"]["scale"].astype(np.float32)
  np.testing.assert_array_equal(loaded.model.norm.weight.detach().float(), norm)


def test_eos_ids_come_from_generation_config(transformers, tmp_path):
  model = made(transformers, "llama")
  model.generation_config.eos_token_id = [2, 7, 11]
  model.save_pretrained(tmp_path)
  assert hugging_face.load(tmp_path).config.eos_ids == (2, 7, 11)


def test_embedding_scale_is_rounded_as_in_transformers(transformers, tmp_path):
  """The root of 32 is not a number of bfloat16."""
  import torch

  model = made(transformers, "gemma 3").bfloat16()
  model.save_pretrained(tmp_path)
  held = hugging_face.load(tmp_path)
  shape = dataclasses.replace(held.config, dtype="bfloat16")
  tokens = np.arange(96)[None]
  with torch.no_grad():
    expected = model.model.embed_tokens(torch.tensor(tokens)).float().numpy()
  variables = {"params": held.params["token_embedder"]}
  found = layers.Embedding(shape).apply(variables, tokens)
  np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
