"""Live comparison with torch and transformers (`make test-hf`).

Tiny random models of every supported kind, read from folders that transformers wrote.
"""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from models import tiny
from models.fixtures import make_hugging_face as maker

from osd_jax import base
from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
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
T5GEMMA = {
  **COMMON,
  **GEMMA,
  "attn_logit_softcapping": 2.0,
  "bos_token_id": 3,
  "pad_token_id": 0,
}
T5S = {"t5 1.0": ("t5_1_0", 16), "t5 1.1": ("t5_1_1", 7)}
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
ROWS, SOURCE, TARGET = 3, 24, 12


@pytest.fixture(scope="module", autouse=True)
def transformers():
  torch = pytest.importorskip("torch", reason="`make test-hf` installs it")
  torch.set_num_threads(1)  # for tiny products, threads cost more than they save
  return pytest.importorskip("transformers", reason="`make test-hf` installs it")


def made(transformers, kind, **changes):
  """Creates a random model of a kind, with noise on biases and norms too."""
  import torch

  if kind in T5S:
    return maker.tiny_model(*T5S[kind], vocab_size=96)
  torch.manual_seed(7)
  if kind == "t5gemma":
    model_type = transformers.T5GemmaForConditionalGeneration
    config = transformers.T5GemmaConfig(
      encoder=T5GEMMA,
      decoder={**T5GEMMA, "num_hidden_layers": 3, **changes},
      vocab_size=96,
    )
  else:
    name, fields = KINDS[kind]
    model_type = getattr(transformers, f"{name}ForCausalLM")
    config = model_type.config_class(**{**COMMON, **fields, **changes})
  config._attn_implementation = "eager"  # the only one with caps
  model = model_type(config).eval()
  for label, parameter in model.named_parameters():
    spread = 0.3 if label.endswith(("norm.weight", "bias")) else 0.2
    parameter.data += spread * torch.randn_like(parameter)
  return model


@pytest.fixture(scope="module", params=[*KINDS, *T5S, "t5gemma"])
def pair(request, transformers, tmp_path_factory):
  """The torch model and the weights that we read from its folder."""
  model = made(transformers, request.param)
  folder = tmp_path_factory.mktemp("model")
  model.save_pretrained(folder)
  return model, hugging_face.load(folder)


def prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(4, 96, count).tolist() for count in (SOURCE, 17, 5)]


def sources(weights):
  source = np.full((ROWS, SOURCE), weights.model.pad_id, np.int32)
  for row, prompt in enumerate(prompts()):
    source[row, : len(prompt)] = prompt
  return source


def compare_logits(model, weights):
  """Compares with torch's logits, which are computed one prompt at a time."""
  import torch

  ours, source = weights.model, sources(weights)
  text = np.random.default_rng(1).integers(4, 96, (ROWS, TARGET)).astype(np.int32)
  found = ours.score(weights.params, source, ours.mask(source), text)
  for prompt, tokens, row in zip(prompts(), text.tolist(), found, strict=True):
    with torch.no_grad():
      if model.config.is_encoder_decoder:
        inputs = torch.tensor([[ours.start_id, *tokens[:-1]]])
        given = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": inputs}
        logits = model(**given).logits[0]
      else:
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    np.testing.assert_allclose(row, logits.numpy(), atol=1e-4)


def test_logits_equal_torch(pair):
  model, weights = pair
  compare_logits(model, weights)
  # If transformers had tied the head silently, the logits would differ.
  head = model.get_output_embeddings().weight
  tied = head is model.get_decoder().get_input_embeddings().weight
  assert tied == weights.config.tied_head


def test_greedy_text_equals_torch(pair):
  import torch

  model, weights = pair
  found = tiny.greedy(weights, sources(weights), TARGET)
  is_t5 = model.config.model_type == "t5"
  for prompt, row in zip(prompts(), found, strict=True):
    with torch.no_grad():
      whole = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=TARGET,
        do_sample=False,
        pad_token_id=0,
        use_cache=not is_t5,  # its cache needs as many decoder as encoder layers
      )[0].tolist()
    expected = whole[1 if model.config.is_encoder_decoder else len(prompt) :]
    assert row[: len(expected)].tolist() == expected and not row[len(expected) :].any()
  assert len(set(map(tuple, found))) == ROWS


def test_transformers_loads_written_folders(pair, tmp_path):
  model, weights = pair
  params = jax.tree.map(lambda leaf: 0.875 * leaf, weights.params)
  adapted = dataclasses.replace(weights, params=params)
  folder = hugging_face.write(tmp_path / "ours", adapted)
  loaded, report = type(model).from_pretrained(
    folder, output_loading_info=True, attn_implementation="eager"
  )
  assert not any(report.values()), report  # no missing, unexpected or new tensors
  compare_logits(loaded.eval(), adapted)
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
  compare_logits(text, hugging_face.load(tmp_path))


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


def test_head_tied_by_transformers_5_is_read_correctly(transformers, tmp_path):
  """A T5 1.1 that transformers 5 creates from a config has a tied, unscaled head."""
  fields = {**maker.SHAPE, **maker.FIELDS["t5_1_1"], "vocab_size": 96}
  model = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields))
  model.eval().save_pretrained(tmp_path)
  assert model.lm_head.weight is model.shared.weight
  weights = hugging_face.load(tmp_path)
  assert not weights.config.tied_head
  compare_logits(model, weights)


def test_mt5_is_read_as_a_t5_1_1(transformers, tmp_path):
  """Whatever its config says, it does not scale the output of its decoder."""
  shape = {**maker.SHAPE, "feed_forward_proj": "gated-gelu", "vocab_size": 96}
  model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**shape))
  model.eval().save_pretrained(tmp_path)
  compare_logits(model, hugging_face.load(tmp_path))


def test_stacks_of_different_shapes_are_refused(transformers, tmp_path):
  made(transformers, "t5gemma", intermediate_size=64).save_pretrained(tmp_path)
  with pytest.raises(base.InputError, match="differ in mlp_dim; only T5Gemmas"):
    hugging_face.load(tmp_path)


@pytest.mark.parametrize("extra_ids", [0, 100])
def test_tokenizer_of_a_written_folder_equals_the_vocabulary(
  transformers, tmp_path, shared_data, extra_ids
):
  made(transformers, "t5 1.0").save_pretrained(tmp_path / "theirs")
  expected = Vocabulary.load(shared_data / "tokenizers/t5", extra_ids)
  weights = hugging_face.load(tmp_path / "theirs")
  folder = hugging_face.write(tmp_path / "ours", weights, tokenizer_files(expected))
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  assert len(tokenizer) == expected.size
  for text in ("How many singers are there?", "a  b .", "SELECT x FROM t WHERE x > 3"):
    ids = expected.encode(text)
    assert tokenizer(text).input_ids == [*ids, 1]
    assert tokenizer.decode(ids) == expected.decode(ids)


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
