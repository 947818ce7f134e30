"""Every family loads from a folder laid out as its publisher lays it out.

The names of files, the kinds of tokenizers and the fields of JSON files are those of
the published folders; only sizes, texts and weights are small.
"""

import json

import jax
import pytest
import tiny_pair
from data import test_vocabulary

from osd_jax import pairs
from osd_jax.models import families, weights
from osd_jax.models.convert import hugging_face

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

PROMPT = "the rain"
TURN = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<e>{% endfor %}"
SIZES = {
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "use_cache": True,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.53.0",
}
T5_SIZES = {
  "is_encoder_decoder": True,
  "d_model": 16,
  "d_kv": 8,
  "d_ff": 24,
  "num_heads": 2,
  "num_layers": 2,
  "num_decoder_layers": 2,
  "dropout_rate": 0.1,
  "layer_norm_epsilon": 1e-06,
  "initializer_factor": 1.0,
  "relative_attention_num_buckets": 32,
  "pad_token_id": 0,
  "eos_token_id": 1,
  "decoder_start_token_id": 0,
  "use_cache": True,
}
GEMMA = {
  **SIZES,
  "attention_bias": False,
  "head_dim": 8,
  "hidden_activation": "gelu_pytorch_tanh",
  "query_pre_attn_scalar": 8,
  "sliding_window": 8,
  "bos_token_id": 2,
  "eos_token_id": [1, 6],
  "pad_token_id": 0,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


# ---- Tokenizers; each returns the files, and the settings in tokenizer_config.json


def of_bytes(*names: str, begins: bool) -> dict[str, bytes]:
  """As in Llama 3 and Qwen: bytes with merges, special tokens last."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  words = {word: i for i, word in enumerate([*alphabet, "th", "the", "Ġr"])}
  merges = [("t", "h"), ("th", "e"), ("Ġ", "r")]
  made = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(
    [tokenizers.AddedToken(name, special=True, normalized=False) for name in names]
  )
  if begins:
    first = [(names[0], made.token_to_id(names[0]))]
    made.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"{names[0]} $A", special_tokens=first
    )
  return {"tokenizer.json": made.to_str().encode()}


def of_gemma() -> dict[str, bytes]:
  """As in Gemma: pieces with a fallback to bytes."""
  names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
  names += ["<start_of_turn>", "<end_of_turn>"]
  pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the"]
  words = [*names, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      {word: i for i, word in enumerate(words)},
      [("t", "h"), ("th", "e")],
      unk_token="<unk>",
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
  made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
  made.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("▁", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single="<bos> $A", special_tokens=[("<bos>", 2)]
  )
  made.add_special_tokens(names)
  special = {"bos_token": {"content": "<bos>"}, "eos_token": {"content": "<eos>"}}
  return {
    "tokenizer.json": made.to_str().encode(),
    "special_tokens_map.json": json.dumps(special).encode(),
  }


def of_llama_2() -> dict[str, bytes]:
  special = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}
  return {
    "tokenizer.model": tiny_pair.llama_tokenizer(),
    "special_tokens_map.json": json.dumps(special).encode(),
  }


def of_t5(tmp_path) -> dict[str, bytes]:
  model = test_vocabulary.trained(tmp_path / "spiece.model").read_bytes()
  return {"spiece.model": model}


def settings(kind: str, ends: str, **others) -> dict:
  return {
    "tokenizer_class": kind,
    "eos_token": ends,
    "model_max_length": 1000000000000000019884624838656,
    "clean_up_tokenization_spaces": False,
    **others,
  }


GEMMA_SETTINGS = settings(
  "GemmaTokenizer",
  "<eos>",
  add_bos_token=True,
  add_eos_token=False,
  bos_token="<bos>",
  pad_token="<pad>",
  unk_token="<unk>",
  spaces_between_special_tokens=False,
  use_default_system_prompt=False,
)
GEMMA_ENDS = {"bos_token_id": 2, "eos_token_id": [1, 6], "pad_token_id": 0}
T5GEMMA_STACK = {**GEMMA, **CAPS, "model_type": "t5_gemma_module", "vocab_size": 300}
T5_SETTINGS = settings("T5Tokenizer", "</s>", extra_ids=2, pad_token="<pad>")
LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Files of the tokenizer, tokenizer_config.json, generation_config.json, config.json;
# then the ids before and after the text of a prompt, and those that end an answer.
PUBLISHED = {
  "t5 1.0": (
    "t5",
    T5_SETTINGS,
    {},
    {"model_type": "t5", "feed_forward_proj": "relu", "n_positions": 512},
    ((), (1,), (1,)),
  ),
  "flan-t5": (
    "t5",
    T5_SETTINGS,
    {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    {
      "model_type": "t5",
      "feed_forward_proj": "gated-gelu",
      "dense_act_fn": "gelu_new",
      "is_gated_act": True,
      "tie_word_embeddings": False,
    },
    ((), (1,), (1,)),
  ),
  "mt5": (
    "t5",
    {},
    {},
    {
      "model_type": "mt5",
      "feed_forward_proj": "gated-gelu",
      "tie_word_embeddings": False,
      "tokenizer_class": "T5Tokenizer",
    },
    ((), (1,), (1,)),
  ),
  "byt5": (
    "bytes",
    settings("ByT5Tokenizer", "</s>", extra_ids=125, pad_token="<pad>"),
    {},
    {
      "model_type": "t5",
      "vocab_size": 384,
      "feed_forward_proj": "gated-gelu",
      "tie_word_embeddings": False,
      "tokenizer_class": "ByT5Tokenizer",
    },
    ((), (1,), (1,)),
  ),
  "llama 2": (
    "llama 2",
    settings(
      "LlamaTokenizer",
      "</s>",
      add_bos_token=True,
      add_eos_token=False,
      bos_token="<s>",
      legacy=False,
      unk_token="<unk>",
    ),
    {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 0.6},
    {
      **SIZES,
      "model_type": "llama",
      "hidden_act": "silu",
      "pretraining_tp": 1,
      "rope_scaling": None,
      "tie_word_embeddings": False,
      "bos_token_id": 1,
      "eos_token_id": 2,
    },
    ((1,), (), (2,)),
  ),
  "mistral": (
    "llama 2",
    settings("LlamaTokenizer", "</s>", bos_token="<s>", legacy=False),
    {"bos_token_id": 1, "eos_token_id": 2},
    {
      **SIZES,
      "model_type": "mistral",
      "hidden_act": "silu",
      "sliding_window": None,
      "tie_word_embeddings": False,
      "bos_token_id": 1,
      "eos_token_id": 2,
    },
    ((1,), (), (2,)),
  ),
  "llama 3": (
    LLAMA_3,
    settings(
      "PreTrainedTokenizerFast",
      "<|eot_id|>",
      bos_token="<|begin_of_text|>",
      model_input_names=["input_ids", "attention_mask"],
    ),
    {"bos_token_id": 259, "eos_token_id": [260, 261, 262], "top_p": 0.9},
    {
      **SIZES,
      "model_type": "llama",
      "hidden_act": "silu",
      "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_type": "llama3",
      },
      "tie_word_embeddings": True,
      "bos_token_id": 259,
      "eos_token_id": [260, 261, 262],
    },
    ((259,), (), (262, 260, 261)),
  ),
  "qwen 2.5": (
    QWEN,
    settings(
      "Qwen2Tokenizer",
      "<|im_end|>",
      add_bos_token=False,
      bos_token=None,
      pad_token="<|endoftext|>",
      errors="replace",
      split_special_tokens=False,
      unk_token=None,
    ),
    {"bos_token_id": 259, "eos_token_id": [261, 259], "repetition_penalty": 1.0},
    {
      **SIZES,
      "model_type": "qwen2",
      "hidden_act": "silu",
      "max_window_layers": 2,
      "sliding_window": 64,
      "use_sliding_window": False,
      "tie_word_embeddings": True,
      "bos_token_id": 259,
      "eos_token_id": 261,
    },
    ((), (), (261, 259)),
  ),
  "qwen 3": (
    QWEN,
    settings("Qwen2Tokenizer", "<|im_end|>", add_bos_token=False),
    {"eos_token_id": [261, 259], "temperature": 0.6},
    {
      **SIZES,
      "model_type": "qwen3",
      "hidden_act": "silu",
      "head_dim": 8,
      "attention_bias": False,
      "max_window_layers": 2,
      "sliding_window": None,
      "use_sliding_window": False,
      "rope_scaling": None,
      "tie_word_embeddings": True,
      "eos_token_id": 261,
    },
    ((), (), (261, 259)),
  ),
  "gemma 2": (
    "gemma",
    GEMMA_SETTINGS,
    {**GEMMA_ENDS, "cache_implementation": "hybrid"},
    {
      **GEMMA,
      **CAPS,
      "model_type": "gemma2",
      "hidden_act": "gelu_pytorch_tanh",
      "cache_implementation": "hybrid",
    },
    ((2,), (), (1, 6)),
  ),
  "gemma 3": (
    "gemma",
    {**GEMMA_SETTINGS, "image_token": "<image_soft_token>", "sp_model_kwargs": None},
    {**GEMMA_ENDS, "cache_implementation": "hybrid", "top_k": 64},
    {
      **GEMMA,
      "model_type": "gemma3_text",
      "attn_logit_softcapping": None,
      "final_logit_softcapping": None,
      "cache_implementation": "hybrid",
      "rope_local_base_freq": 10000,
      "rope_scaling": None,
      "sliding_window_pattern": 6,
    },
    ((2,), (), (1, 6)),
  ),
  "t5gemma": (
    "gemma",
    GEMMA_SETTINGS,
    {**GEMMA_ENDS, "cache_implementation": "hybrid"},
    {
      "model_type": "t5gemma",
      "is_encoder_decoder": True,
      "encoder": T5GEMMA_STACK,
      "decoder": {
        **T5GEMMA_STACK,
        "is_decoder": True,
        "cross_attention_hidden_size": 16,
      },
      "dropout_rate": 0.0,
      "classifier_dropout_rate": 0.0,
      "eos_token_id": [1, 6],
      "pad_token_id": 0,
      "torch_dtype": "bfloat16",
    },
    ((2,), (), (1, 6)),
  ),
}


def files_of(kind, tmp_path) -> dict[str, bytes]:
  if isinstance(kind, tuple):
    return of_bytes(*kind, begins=kind is LLAMA_3)
  if kind == "t5":
    return of_t5(tmp_path)
  return {"gemma": of_gemma, "llama 2": of_llama_2, "bytes": dict}[kind]()


@pytest.mark.parametrize("name", PUBLISHED)
def test_family_loads_from_a_folder_as_it_is_published(tmp_path, name):
  kind, about, sampling, config, (prefix, suffix, ends) = PUBLISHED[name]
  files = files_of(kind, tmp_path)
  is_t5 = kind in ("t5", "bytes")
  if is_t5:
    config = {"vocab_size": 40, **T5_SIZES, **config}
  else:
    about = {**about, "chat_template": TURN}
  size = tiny_pair.VOCAB_SIZE if kind == "llama 2" else 300
  config = {"vocab_size": size, **config}
  shape = hugging_face.config_from(config)
  params = jax.jit(families.build(shape).init)(jax.random.key(0))
  texts = {"tokenizer_config.json": about, "generation_config.json": sampling}
  files |= {
    file: json.dumps(fields).encode() for file, fields in texts.items() if fields
  }
  folder = hugging_face.write(tmp_path / "model", weights.Weights(shape, params), files)
  (folder / "config.json").write_text(json.dumps(config))
  load = lambda **changes: pairs.load_pair(
    pairs.PairConfig(target=str(folder), draft="cache", **changes)
  )
  pair = load(chat_template="")
  own = pair.vocabulary
  assert pair.target.name and own.eos_ids == ends
  text = own.encode(PROMPT)
  assert own.encode_prompt(PROMPT).tolist() == [*prefix, *text, *suffix]
  assert own.decode([*text, ends[-1], text[0]]).strip() == own.decode(text).strip()
  if not is_t5:
    assert own.decode(text).strip() == PROMPT
    assert load().vocabulary.template(PROMPT) == f"<s>user: {PROMPT}<e>"
