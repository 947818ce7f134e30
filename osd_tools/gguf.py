"""GGUF files of llama.cpp, as folders of transformers.

The package gguf reads a file once. From its metadata come the small files of a model
folder, which are kept in a cache, so that everything else reads them as usual:

    model.gguf -> config.json, generation_config.json, tokenizer_config.json,
                  tokenizer.json or tokenizer.model
               -> tensors.json: where each tensor is, by its name in transformers

Tensors are read from the file itself, dequantized one at a time.
"""

import atexit
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from osd_jax import base
from osd_jax.models.tensors import Tensors

CACHE = "~/.cache/osd_jax/gguf"
_VERSION = 5  # of the files in the cache
_TENSORS = "tensors.json"
_CHUNK = 2**18  # elements that are dequantized at a time

# The model types of transformers, by architecture.
ARCHITECTURES = {
  "llama": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "gemma2": "gemma2",
  "gemma3": "gemma3_text",
}

# Fields of config.json, by the end of their names in the metadata.
_FIELDS = {
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_hidden_layers": "block_count",
  "num_attention_heads": "attention.head_count",
  "max_position_embeddings": "context_length",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
  "num_key_value_heads": "attention.head_count_kv",
  "head_dim": "attention.key_length",
  "rope_theta": "rope.freq_base",
  "sliding_window": "attention.sliding_window",
  "attn_logit_softcapping": "attn_logit_softcapping",
  "final_logit_softcapping": "final_logit_softcapping",
}
# Fields of generation_config.json, by their names in the metadata. The last four do not
# exist in transformers; they are passed on so that they can be refused.
_SAMPLING = {
  "temp": "temperature",
  "top_k": "top_k",
  "top_p": "top_p",
  "min_p": "min_p",
  "penalty_repeat": "repetition_penalty",
  "penalty_last_n": "penalty_last_n",
  "sequence": "sequence",
  "xtc_probability": "xtc_probability",
  "mirostat": "mirostat",
}
_NAMES = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
}
_LAYER_NAMES = {
  "attn_norm": "input_layernorm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
}
_GEMMA_NAMES = _LAYER_NAMES | {
  "ffn_norm": "pre_feedforward_layernorm",
  "post_attention_norm": "post_attention_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE = "rope_freqs.weight"  # divisors of the rotary frequencies, as in Llama 3.1

# Regular expressions that split a text into words, one after another.
_QWEN2_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2_WORDS = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
  rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
  r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_WORDS = (
  _TEKKEN_WORDS.replace(f"{_LOWER}+|", f"{_LOWER}+{_CONTRACTION}|")
  .replace(f"{_LOWER}*|", f"{_LOWER}*{_CONTRACTION}|")
  .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_DEEPSEEK3_WORDS = (
  r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
  r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_WORDS = _QWEN2_WORDS.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")


@dataclasses.dataclass(frozen=True)
class _Rule:
  """How a tokenizer of bytes splits texts, under its name in llama.cpp.

  Attributes:
    words: regular expressions.
    whole: a word that is a token stays whole, whatever the merges.
    begins: a beginning-of-text token is put before every text, unless the metadata say
      otherwise.
    composed: texts are brought into NFC first.
  """

  words: tuple[str, ...]
  whole: bool = False
  begins: bool = False
  composed: bool = False


_RULES = {
  name: rule
  for names, rule in (
    (
      "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2",
      _Rule((_QWEN2_WORDS,), composed=True),
    ),
    (
      "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
      _Rule((_LLAMA3_WORDS,), whole=True, begins=True),
    ),
    ("smaug-bpe dbrx chatglm-bpe glm4", _Rule((_LLAMA3_WORDS,))),
    (
      "smollm starcoder refact command-r codeshell exaone minerva-7b",
      _Rule((r"\p{N}", _GPT2_WORDS)),
    ),
    ("gpt-2 phi-2 mpt olmo jais trillion exaone4 a.x-4.0", _Rule((_GPT2_WORDS,))),
    ("tekken", _Rule((_TEKKEN_WORDS,), whole=True, begins=True)),
    ("gpt-4o llama4 kanana2", _Rule((_GPT4O_WORDS,))),
    (
      "deepseek-v3 hunyuan-dense",
      _Rule(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
      ),
    ),
    (
      "deepseek-coder",
      _Rule(
        (
          r"[\r\n]",
          r"\s?\p{L}+",
          r"\s?\p{P}+",
          "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
          r"\p{N}",
        )
      ),
    ),
    ("seed-coder", _Rule((_SEED_WORDS,))),
  )
  for name in names.split()
}
# Tokens that end a turn or a text by their name, as in llama.cpp.
_ENDS = (
  "<|eot_id|>",
  "<|eom_id|>",
  "<|im_end|>",
  "<|end|>",
  "<end_of_turn>",
  "<|endoftext|>",
  "<|end_of_text|>",
  "<EOT>",
  "_<EOT>",
  "<\uff5cend\u2581of\u2581sentence\uff5c>",  # of DeepSeek
)
# Metadata that would change positions or attention, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "rope.scaling.attn_factor": (1.0,),
  "attention.causal": (True,),
  "attention.max_alibi_bias": (0.0,),
  "attention.clamp_kqv": (0.0,),
  "attention.scale": (0.0,),
  "logit_scale": (0.0,),
  "embedding_scale": (0.0, 1.0),
  "residual_scale": (0.0, 1.0),
  "use_parallel_residual": (False,),
  "rope.freq_base_swa": (10000.0,),  # the only one of a Gemma 3
}

# Types of tokens in the metadata; the numbers are those of SentencePiece.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a tensor is in a file."""

  kind: str  # name of its type, such as "Q4_K"
  shape: tuple[int, ...]
  start: int  # first byte
  size: int  # number of bytes
  # Number of heads whose rows are interleaved, see `_in_halves`; 0 if none.
  heads: int = 0
  # Subtracted from the stored values; 1 for the norms of a Gemma.
  offset: float = 0.0


def folder_of(path: Path) -> Path:
  """The folder with the small files of a model, made from its metadata.

  Raises:
    InputError: the file is damaged, or holds a model that is not supported.
    MissingExtraError: the package gguf is not installed.
  """
  about = path.stat()
  key = (_VERSION, str(path.resolve()), about.st_size, about.st_mtime_ns)
  name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
  usual = Path(os.path.expanduser(CACHE))
  if (usual / name).is_dir():
    return usual / name
  cache = _writable(usual)
  if not (cache / name).is_dir():
    files = _files(path)
    folder = Path(tempfile.mkdtemp(dir=cache))
    for file, content in files.items():
      (folder / file).write_bytes(content)
    try:
      os.replace(folder, cache / name)
    except OSError:  # another process was faster
      shutil.rmtree(folder)
  return cache / name


@functools.cache
def _writable(cache: Path) -> Path:
  """Returns the cache, or a folder of this process where it cannot be written.

  Raises:
    DiskError: there is no folder for temporary files either.
  """
  try:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache):
      return cache
  except OSError:  # such as a root that is read-only, or a service without a home
    pass
  try:
    spare = Path(tempfile.mkdtemp(prefix="osd_jax_gguf_"))
  except OSError as error:
    raise base.DiskError(
      f"weights: neither {cache} nor a folder for temporary files can be written"
      f" ({error.strerror}); set HOME or TMPDIR to a folder that can."
    ) from error
  atexit.register(shutil.rmtree, spare, ignore_errors=True)
  return spare


def open_tensors(path: Path) -> Tensors:
  """Opens the tensors of a file, by their names in transformers.

  Float32 is read unchanged, float16 as float32, and everything else as bfloat16.
  Reading raises InputError if the file ends inside the tensor.
  """
  fields_of = json.loads((folder_of(path) / _TENSORS).read_text())
  places = {name: base.from_json(x, Place) for name, x in fields_of.items()}
  return Tensors(
    {name: place.shape for name, place in places.items()},
    lambda name: _read(path, name, places[name]),
    lambda name: path,
    frozenset(name for name, place in places.items() if _is_short(place)),
  )


def _is_short(tensor: Place) -> bool:
  return tensor.kind not in ("F32", "F16")


def _read(path: Path, name: str, tensor: Place) -> np.ndarray:
  dtype = np.dtype(ml_dtypes.bfloat16 if _is_short(tensor) else np.float32)
  count = int(np.prod(tensor.shape))
  # An mmap of its own: its pages are returned to the system with the tensor.
  flat = np.frombuffer(mmap.mmap(-1, max(1, count * dtype.itemsize)), dtype, count)
  values = flat.reshape(-1, tensor.shape[-1])
  row = tensor.size // len(values)  # bytes
  step = max(1, _CHUNK // tensor.shape[-1])
  with path.open("rb") as file:
    file.seek(tensor.start)
    for first in range(0, len(values), step):
      part = values[first : first + step]
      data = file.read(row * len(part))
      if len(data) < row * len(part):
        raise _damaged(path, f"it ends inside tensor {name}")
      part[...] = _dequantized(np.frombuffer(data, np.uint8), row, tensor.kind)
  if tensor.offset:
    np.subtract(flat, dtype.type(tensor.offset), out=flat)
  values = flat.reshape(tensor.shape)
  return _in_halves(values, tensor.heads) if tensor.heads else values


def _dequantized(data: np.ndarray, row: int, kind: str) -> np.ndarray:
  if kind == "BF16":
    return data.view(ml_dtypes.bfloat16).reshape(-1, row // 2)
  with base.extra("gguf", "weights: a tensor"):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

  return dequantize(data.reshape(-1, row), GGMLQuantizationType[kind])


def _in_halves(values: np.ndarray, heads: int) -> np.ndarray:
  """Rows of queries or keys in the order of transformers.

  llama.cpp rotates neighbouring components of a head, transformers one half against the
  other, so the conversion of a Llama to GGUF has interleaved the halves.
  """
  paired = values.reshape(heads, -1, 2, *values.shape[1:])
  return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def _damaged(path: Path, error: object) -> base.InputError:
  return base.InputError(
    f"weights: cannot read {path}: {error}; expected a complete GGUF file; copy or"
    " download it again."
  )


def _refused(
  path: Path, field: str, received: object, expected: str
) -> base.InputError:
  return base.InputError(
    f"weights: {path}: {field}: received {received!r}, expected {expected}; name the"
    " folder with the model's safetensors files instead, from which it was made."
  )


def _files(path: Path) -> dict[str, bytes]:
  """Reads a file; returns the content of the files in its folder."""
  with base.extra("gguf", f"weights: {path}"):
    import gguf

  try:
    reader = gguf.GGUFReader(path)
    metadata = _Metadata(path, reader.fields)
    tensors = list(reader.tensors)
  except Exception as error:  # the library raises many types
    raise _damaged(path, f"it is truncated or damaged ({error})") from error
  if (kind := metadata.get("general.type", "model")) != "model":
    raise _refused(path, "general.type", kind, "a whole model")
  architecture = metadata.required("general.architecture")
  if architecture not in ARCHITECTURES:
    raise _refused(
      path, "general.architecture", architecture, f"one of {', '.join(ARCHITECTURES)}"
    )
  if (parts := metadata.get("split.count", 1)) > 1:
    raise _refused(path, "split.count", parts, "a model in one file")
  _check_kinds(path, tensors)
  by_name = {tensor.name: tensor for tensor in tensors}
  config = _config(metadata, architecture, by_name)
  files: dict[str, Any] = {"config.json": config, **_tokenizer(metadata)}
  if sampling := _sampling(metadata):
    files["generation_config.json"] = sampling
  files[_TENSORS] = _places(path, by_name, config)
  return {
    name: content if isinstance(content, bytes) else json.dumps(content).encode()
    for name, content in files.items()
  }


class _Metadata:
  """The fields of a file."""

  def __init__(self, path: Path, fields: Mapping[str, Any]):
    self.path, self._fields = path, fields

  def get(self, name: str, default: Any = None) -> Any:
    field = self._fields.get(name)
    value = default if field is None else field.contents()
    # A float32 with few digits: 1e-6 rather than 9.999999974752427e-07.
    return float(str(np.float32(value))) if isinstance(value, float) else value

  def required(self, name: str) -> Any:
    if name not in self._fields:
      raise _refused(self.path, name, None, "a value")
    return self.get(name)


def _check_kinds(path: Path, tensors: list[Any]) -> None:
  """Checks that every type of tensor can be dequantized, before any is read."""
  from gguf.constants import GGML_QUANT_SIZES
  from gguf.quants import dequantize

  for tensor in {tensor.tensor_type: tensor for tensor in tensors}.values():
    kind = tensor.tensor_type
    try:
      dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
      expected = "a type that the package gguf dequantises"
      raise _refused(path, f"tensor {tensor.name}", kind.name, expected) from error


def _config(
  metadata: _Metadata, architecture: str, tensors: Mapping[str, Any]
) -> dict[str, Any]:
  path = metadata.path
  fields = {
    name: metadata.required(f"{architecture}.{key}") for name, key in _FIELDS.items()
  }
  for name, key in _OPTIONAL.items():
    fields[name] = metadata.get(f"{architecture}.{key}")
  if experts := metadata.get(f"{architecture}.expert_count"):
    raise _refused(path, f"{architecture}.expert_count", experts, "a dense model")
  if scaling := _stated_scaling(metadata, architecture):
    fields["rope_scaling"] = scaling
  if _ROPE in tensors:
    if scaling:
      expected = "no other scaling of rotary positions"
      raise _refused(path, _ROPE, scaling, expected)
    fields["rope_scaling"] = _rope_scaling(path, fields, tensors[_ROPE].data)
  _check_neutral(metadata, architecture, fields)
  if fields["num_hidden_layers"] in (46, 62):  # the Gemmas with 27B, as in llama.cpp
    scalar = fields["hidden_size"] // fields["num_attention_heads"]
  else:
    scalar = fields["head_dim"]
  is_gemma = architecture.startswith("gemma")
  kind = {"query_pre_attn_scalar": scalar} if is_gemma else {"hidden_act": "silu"}
  return {
    "architectures": [f"{architecture.title()}ForCausalLM"],
    "model_type": ARCHITECTURES[architecture],
    **kind,
    **{name: value for name, value in fields.items() if value is not None},
    "vocab_size": int(tensors["token_embd.weight"].shape[1])
    if "token_embd.weight" in tensors
    else len(metadata.required("tokenizer.ggml.tokens")),
    "tie_word_embeddings": "output.weight" not in tensors,
    "attention_bias": "blk.0.attn_q.bias" in tensors,
    "eos_token_id": _eos_ids(metadata),
  }


def _eos_ids(metadata: _Metadata) -> list[int]:
  """The tokens that end an answer: those that are stated, then those of known names."""
  stated = metadata.required("tokenizer.ggml.eos_token_id")
  others = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")]
  tokens = metadata.required("tokenizer.ggml.tokens")
  named = [token for token, text in enumerate(tokens) if text in _ENDS]
  ends = [stated, *(token for token in others if token is not None), *named]
  return list(dict.fromkeys(ends))


def _stated_scaling(metadata: _Metadata, architecture: str) -> dict[str, Any]:
  """The linear scaling of rotary positions that the metadata state, or {}."""
  name = f"{architecture}.rope.scaling"
  kind = metadata.get(f"{name}.type")
  # The second name is that of files before November 2023.
  old = metadata.get(f"{architecture}.rope.scale_linear", 0.0)
  factor = metadata.get(f"{name}.factor", old)
  if kind not in (None, "none", "linear"):
    raise _refused(metadata.path, f"{name}.type", kind, "none or linear")
  if kind == "linear" and not factor:
    raise _refused(metadata.path, f"{name}.factor", None, "a value")
  # As in llama.cpp, a factor without a type is linear.
  is_scaled = kind != "none" and factor not in (0, 1)
  return {"rope_type": "linear", "factor": factor} if is_scaled else {}


def _check_neutral(
  metadata: _Metadata, architecture: str, fields: Mapping[str, Any]
) -> None:
  """Refuses metadata that would change the model that is served."""
  size = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
  sizes = ("rope.dimension_count", "attention.value_length")
  for key, values in {**dict.fromkeys(sizes, (size,)), **_NEUTRAL}.items():
    value = metadata.get(f"{architecture}.{key}", values[0])
    if value not in values:
      raise _refused(metadata.path, f"{architecture}.{key}", value, str(values[0]))


def _rope_scaling(
  path: Path, fields: Mapping[str, Any], divisors: np.ndarray
) -> dict[str, Any]:
  """Recovers Llama 3.1's rope scaling from the divisors that the file stores."""
  factor, low, high, original = float(np.max(divisors)), 1.0, 4.0, 8192
  size = 2 * len(divisors)
  theta = fields["rope_theta"] or 10000.0
  waves = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
  share = np.clip((original / waves - low) / (high - low), 0, 1)
  expected = 1 / (share + (1 - share) / factor)
  if not np.allclose(divisors, expected, rtol=1e-3):
    raise _refused(path, _ROPE, factor, "the divisors of Llama 3.1")
  return {
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": low,
    "high_freq_factor": high,
    "original_max_position_embeddings": original,
  }


def _places(
  path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
  """The fields of `Place` of all tensors, by their names in transformers."""
  heads, is_gemma = config["num_attention_heads"], "gemma" in config["model_type"]
  names = _GEMMA_NAMES if is_gemma else _LAYER_NAMES
  rotated = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}
  places = {}
  for name, tensor in tensors.items():
    if name == _ROPE:
      continue
    of_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    whole = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    part = of_layer[2] if of_layer else whole[1] if whole else ""
    if of_layer and part in names:
      target = f"model.layers.{of_layer[1]}.{names[part]}.{of_layer[3]}"
    elif whole and part in _NAMES:
      target = f"{_NAMES[part]}.{whole[2]}"
    else:
      expected = "the tensors of a dense Llama, Qwen or Gemma"
      raise _refused(path, "tensor", name, expected)
    places[target] = dataclasses.asdict(
      Place(
        tensor.tensor_type.name,
        tuple(int(size) for size in reversed(tensor.shape)),
        int(tensor.data_offset),
        int(tensor.n_bytes),
        rotated.get(part, 0) if config["model_type"] == "llama" else 0,
        1.0 if is_gemma and part.endswith("norm") else 0.0,
      )
    )
  return places


def _tokenizer(metadata: _Metadata) -> dict[str, Any]:
  get = lambda name, default=None: metadata.get(f"tokenizer.ggml.{name}", default)
  tokens, kinds = metadata.required("tokenizer.ggml.tokens"), get("token_type")
  kinds = kinds or [_NORMAL] * len(tokens)
  # As in llama.cpp: some files call the end of a turn a normal token.
  kinds = [
    _CONTROL if text in _ENDS else kind
    for text, kind in zip(tokens, kinds, strict=True)
  ]
  model = metadata.required("tokenizer.ggml.model")
  rule = _RULES.get(get("pre"))
  is_usual = model == "llama" or (rule is not None and rule.begins)
  begins = get("bos_token_id") if get("add_bos_token", is_usual) else None
  if get("add_eos_token"):
    expected = "False: a prompt that ends a text is not continued"
    raise _refused(metadata.path, "tokenizer.ggml.add_eos_token", True, expected)
  make = _TOKENIZERS.get(model)
  if make is None:
    expected = " or ".join(map(repr, _TOKENIZERS))
    raise _refused(metadata.path, "tokenizer.ggml.model", model, expected)
  settings = {
    # Not that of the model type, which would replace the rules in tokenizer.json.
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": begins is not None,
    "chat_template": metadata.get("tokenizer.chat_template"),
    "added_tokens_decoder": {
      str(token): {"content": text, "special": kind == _CONTROL}
      for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
      if kind in (_CONTROL, _USER)
    },
  }
  for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
    if (token := get(f"{key}_token_id")) is not None:
      settings[f"{name}_token"] = tokens[token]
  return {
    **make(metadata, tokens, kinds, begins),
    "tokenizer_config.json": settings,
  }


def _sampling(metadata: _Metadata) -> dict[str, Any]:
  """The fields of generation_config.json that say how to sample, if any does."""
  fields = {
    field: value
    for name, field in _SAMPLING.items()
    if (value := metadata.get(f"general.sampling.{name}")) is not None
  }
  if not fields:
    return {}
  # There is no do_sample; llama.cpp is greedy at a temperature of 0.
  states_any = not fields.keys().isdisjoint(("temperature", "top_k", "top_p", "min_p"))
  return {"do_sample": states_any and fields.get("temperature") != 0, **fields}


def _byte_pairs(
  metadata: _Metadata, tokens: list[str], kinds: list[int], begins: int | None
) -> dict[str, Any]:
  """The tokenizer.json of a tokenizer of bytes with merges; see `_RULES`."""
  name = metadata.get("tokenizer.ggml.pre", "")
  if name not in _RULES:
    expected = f"one of {', '.join(_RULES)}"
    raise _refused(metadata.path, "tokenizer.ggml.pre", name, expected)
  rule = _RULES[name]
  with base.extra("llama", "Vocabulary.path: a tokenizer of bytes"):
    import tokenizers

  # Added tokens, too, or they would get the next free ids.
  vocabulary = {
    text: token
    for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind in (_NORMAL, _CONTROL, _USER)
  }
  merges = [tuple(m.split(" ")) for m in metadata.required("tokenizer.ggml.merges")]
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocabulary, merges, ignore_merges=rule.whole)
  )
  if rule.composed:
    tokenizer.normalizer = tokenizers.normalizers.NFC()
  tokenizer.pre_tokenizer = _splitter(rule)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  for text, kind in zip(tokens, kinds, strict=True):
    if kind in (_CONTROL, _USER):
      special = kind == _CONTROL
      added = tokenizers.AddedToken(text, special=special, normalized=False)
      tokenizer.add_tokens([added])
  if begins is not None:
    first = tokens[begins]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"{first} $A", special_tokens=[(first, begins)]
    )
  return {"tokenizer.json": tokenizer.to_str().encode()}


def _splitter(rule: _Rule) -> Any:
  """Splits a text into words of bytes."""
  from tokenizers import Regex, pre_tokenizers

  parts = [pre_tokenizers.Split(Regex(words), "isolated") for words in rule.words]
  as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([*parts, as_bytes])


def _sentence_pieces(
  metadata: _Metadata, tokens: list[str], kinds: list[int], begins: int | None
) -> dict[str, Any]:
  """The tokenizer.model of a Llama 1 or 2, or a Gemma."""
  del begins  # `add_bos_token` in tokenizer_config.json says it
  from sentencepiece import sentencepiece_model_pb2  # needs protobuf

  proto = sentencepiece_model_pb2.ModelProto()
  scores = metadata.required("tokenizer.ggml.scores")
  unknown = metadata.get("tokenizer.ggml.unknown_token_id")
  for token, (text, score) in enumerate(zip(tokens, scores, strict=True)):
    # Gemma's files call the unknown token a control token.
    kind = _UNKNOWN if token == unknown else kinds[token]
    proto.pieces.add(piece=text, score=score, type=kind)
  trained = proto.trainer_spec
  trained.model_type = sentencepiece_model_pb2.TrainerSpec.ModelType.BPE
  trained.vocab_size, trained.byte_fallback = len(tokens), True
  for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown")):
    token = metadata.get(f"tokenizer.ggml.{key}_token_id")
    setattr(trained, f"{name}_id", -1 if token is None else token)
    if token is not None:  # SentencePiece finds it by its text
      setattr(trained, f"{name}_piece", tokens[token])
  trained.pad_id = -1
  rules = proto.normalizer_spec
  rules.name, rules.remove_extra_whitespaces = "identity", False
  rules.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
  return {"tokenizer.model": proto.SerializeToString()}


_TOKENIZERS: dict[str, Callable[..., dict[str, Any]]] = {
  "gpt2": _byte_pairs,
  "llama": _sentence_pieces,
}
