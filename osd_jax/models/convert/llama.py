"""Llama, Mistral, Qwen and Gemma in Hugging Face's format: fields and tensor names.

Weights of torch's linear layers are `[out, in]`, kernels here are `[in, out]`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from osd_jax import base
from osd_jax.models.convert.folders import check_field, required
from osd_jax.models.shapes import LlamaConfig, RopeScaling

_GEMMA = {
  "mlp_activations": ("gelu", "linear"),
  "post_norms": True,
  "unit_offset_norms": True,
  "scaled_embeddings": True,
}
# Features that all models of a type have.
_FEATURES: dict[str, dict[str, Any]] = {
  "llama": {},
  "mistral": {},
  "qwen2": {"attention_bias": True, "output_bias": False},
  "qwen3": {"query_key_norm": True},
  "gemma2": _GEMMA,
  "gemma3_text": {**_GEMMA, "query_key_norm": True},
}
MODEL_TYPES = tuple(_FEATURES)
_SAYS = (
  "only dense Llama, Vicuna, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3 text models can"
  " be converted"
)

# Fields that must be empty, with their meaning for the error message.
_REFUSED = {
  "quantization_config": "a quantized checkpoint",
  "num_local_experts": "a mixture of experts",
  "num_experts": "a mixture of experts",
  "mlp_bias": "feed-forward blocks with biases",
  "use_bidirectional_attention": "attention to later tokens",
}
# Defaults of fields that a configuration may leave out.
_GEMMA_DEFAULTS = {
  "num_key_value_heads": 4,
  "head_dim": 256,
  "tie_word_embeddings": True,
  "sliding_window": 4096,
  "query_pre_attn_scalar": 256,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
  "qwen3": {"head_dim": 128},
  "gemma2": {
    **_GEMMA_DEFAULTS,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
  },
  "gemma3_text": {
    **_GEMMA_DEFAULTS,
    # The files of models that also read images leave out these three.
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
  },
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"  # types of layers
# Fields that no file has.
_NOT_STORED = ("dtype", "embedding_std", "state_layer")

# Fields by their names here and in transformers.
_FIELDS = {
  "vocab_size": "vocab_size",
  "width": "hidden_size",
  "num_heads": "num_attention_heads",
  "mlp_dim": "intermediate_size",
  "num_layers": "num_hidden_layers",
}
_SCALING_FIELDS = {
  "factor": "factor",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "original_positions": "original_max_position_embeddings",
}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COPIES = ()  # other names of the embedding; that of a tied head is added
UNUSED = ("rotary_emb.inv_freq",)  # a constant that old files contain
TIED_BY_DEFAULT = False  # meaning of a missing tie_word_embeddings
_NAMES = {
  "token_embedder/embedding": EMBEDDING,
  "decoder/decoder_norm/scale": "model.norm.weight",
  "decoder/logits_dense/kernel": HEAD,
}
_LAYER_NAMES = {
  "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
  "pre_mlp_layer_norm/scale": "post_attention_layernorm.weight",
  "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
  "post_mlp_layer_norm/scale": "post_feedforward_layernorm.weight",
  "self_attention/query_norm/scale": "self_attn.q_norm.weight",
  "self_attention/key_norm/scale": "self_attn.k_norm.weight",
  "mlp/wi_0/kernel": "mlp.gate_proj.weight",
  "mlp/wi_1/kernel": "mlp.up_proj.weight",
  "mlp/wo/kernel": "mlp.down_proj.weight",
}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}


def config_from(config: Mapping[str, Any]) -> LlamaConfig:
  """The shape that a parsed `config.json` describes."""
  kind = config["model_type"]
  config = {**_DEFAULTS.get(kind, {}), **config}
  is_gemma = kind.startswith("gemma")
  # `pretraining_tp` splits matrices for bit-equal training, and changes no function.
  field = "hidden_activation" if is_gemma else "hidden_act"
  usual = "gelu_pytorch_tanh" if is_gemma else "silu"
  activation = config.get(field, usual)
  names = {"swish": "silu"}  # of the same function
  check_field(_SAYS, field, names.get(activation, activation), (usual,))
  for field, what in _REFUSED.items():
    if config.get(field):
      raise base.InputError(
        f"convert: config.json: field {field}: received {config[field]!r}, {what};"
        f" expected nothing; {_SAYS}."
      )
  fields = {ours: required(config, theirs) for ours, theirs in _FIELDS.items()}
  # Older files state no head_dim.
  fields["head_dim"] = config.get("head_dim") or fields["width"] // fields["num_heads"]
  # The name in files of the first Llama, which EAGLE's still use.
  limit = config.get("max_sequence_length")
  if limit is None or "max_position_embeddings" in config:
    limit = required(config, "max_position_embeddings")
  # Qwen2 always has biases in query, key and value, and none in the output. Its files
  # need not contain the field.
  bias = config.get("attention_bias", False) if kind != "mistral" else False
  return LlamaConfig(
    **{
      "num_kv_heads": config.get("num_key_value_heads") or fields["num_heads"],
      "tied_head": bool(config.get("tie_word_embeddings", TIED_BY_DEFAULT)),
      "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
      "attention_bias": bias,
      "output_bias": bias,
      "max_positions": limit,
      "eos_ids": _eos_ids(config),
      "windows": _windows(config),
      **fields,
      **_rope(config),
      **_FEATURES[kind],
      **(_gemma(config, fields["head_dim"]) if is_gemma else {}),
    }
  )


def _gemma(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
  scalar = float(config["query_pre_attn_scalar"])
  cap = config.get("attn_logit_softcapping") or 0.0
  if config["model_type"] == "gemma3_text":  # transformers ignores it there
    check_field(_SAYS, "attn_logit_softcapping", cap, (0.0,))
  return {
    "query_pre_attn_scalar": 0.0 if scalar == head_dim else scalar,
    "attention_cap": float(cap),
    "logit_cap": float(config.get("final_logit_softcapping") or 0.0),
  }


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
  """The end-of-sequence tokens; config.json has one or a list."""
  value = config.get("eos_token_id")
  ids: tuple[Any, ...] = tuple(value) if isinstance(value, list) else (value,)
  if not all(base.is_count(token, least=0) for token in ids):
    check_field(_SAYS, "eos_token_id", value, ("a token id, or a list of them",))
  return ids


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
  """The windows of the layers, as in `LlamaConfig`."""
  kind, window = config["model_type"], config.get("sliding_window") or 0
  is_qwen = kind.startswith("qwen")
  # The files of Qwen and Llama may hold a window that is not used.
  if kind == "llama" or (is_qwen and not config.get("use_sliding_window")):
    window = 0
  first = config.get("max_window_layers", 28) if is_qwen else 0
  every = config.get("sliding_window_pattern")  # older than layer_types
  local = [
    bool(window) and i >= first and not (every and (i + 1) % every == 0)
    for i in range(config["num_hidden_layers"])
  ]
  kinds = config.get("layer_types") or layer_types(local)
  allowed = {_GLOBAL, _LOCAL} if window else {_GLOBAL}
  check_field(_SAYS, "layer_types", set(kinds) - allowed, (set(),))
  windows = tuple(window if kind == _LOCAL else 0 for kind in kinds)
  periods = range(1, len(windows) + 1)
  repeats = lambda n: all(w == windows[i % n] for i, w in enumerate(windows))
  return windows[: next(filter(repeats, periods))]


def layer_types(is_local: Iterable[bool]) -> list[str]:
  """The types in transformers of layers with (True) or without a window."""
  return [_LOCAL if local else _GLOBAL for local in is_local]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of rotary positions; one field in the file since transformers 5."""
  fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
  own = {}
  if config["model_type"] == "gemma3_text":
    local = fields.get(_LOCAL, {})
    check_field(_SAYS, "rope_type", local.get("rope_type", "default"), ("default",))
    theta = local.get("rope_theta", config["rope_local_base_freq"])
    own["local_rope_theta"] = float(theta)
    fields = fields.get(_GLOBAL, fields)
  fields = {field: value for field, value in fields.items() if value is not None}
  own["rope_theta"] = float(fields.get("rope_theta", config.get("rope_theta", 1e4)))
  kind = fields.get("rope_type", fields.get("type", "default"))
  check_field(_SAYS, "rope_scaling.rope_type", kind, ("default", "linear", "llama3"))
  share = config.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
  check_field(_SAYS, "partial_rotary_factor", share, (None, 1.0))
  if kind == "linear":
    own["rope_factor"] = float(required(fields, "factor"))
  if kind == "llama3":
    scaling = {
      ours: required(fields, theirs) for ours, theirs in _SCALING_FIELDS.items()
    }
    own["rope_scaling"] = RopeScaling(**scaling)
  return own


def config_to(config: LlamaConfig) -> dict[str, Any]:
  """The fields of `config.json` for a shape."""
  like_file = {name: getattr(LlamaConfig(), name) for name in _NOT_STORED}
  target = dataclasses.replace(config, **like_file)
  for kind in MODEL_TYPES:
    fields = _fields_of(config, kind)
    try:
      if config_from(fields) == target:
        return fields
    except base.InputError:
      pass  # this kind has no such layers
  raise base.InputError(
    f"convert: received {config}: transformers has no such model; expected the values"
    " of a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3."
  )


def _fields_of(config: LlamaConfig, kind: str) -> dict[str, Any]:
  """The fields of `config.json` if a shape is of this kind."""
  ends = list(config.eos_ids)
  fields = {
    "architectures": [f"{kind.removesuffix('_text').title()}ForCausalLM"],
    "model_type": kind,
    **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "max_position_embeddings": config.max_positions,
    "rms_norm_eps": config.norm_epsilon,
    "attention_bias": config.attention_bias and kind != "qwen2",
    "tie_word_embeddings": config.tied_head,
    "eos_token_id": ends if len(ends) > 1 else ends[0],
    "dtype": "float32",
    **_rope_fields(config, kind),
  }
  is_local = [bool(config.window_of(i)) for i in range(config.num_layers)]
  if kind not in ("llama", "mistral"):
    fields["layer_types"] = layer_types(is_local)
  if any(is_local):
    fields["sliding_window"] = max(config.windows)
    if kind.startswith("qwen"):
      first = is_local.index(True)
      fields |= {"use_sliding_window": True, "max_window_layers": first}
  if not kind.startswith("gemma"):
    return {**fields, "hidden_act": "silu"}
  return {
    **fields,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
    "attn_logit_softcapping": config.attention_cap or None,
    "final_logit_softcapping": config.logit_cap or None,
  }


def _rope_fields(config: LlamaConfig, kind: str) -> dict[str, Any]:
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
  if config.rope_factor != 1:
    rope |= {"rope_type": "linear", "factor": config.rope_factor}
  if scaling := config.rope_scaling:
    own = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING_FIELDS.items()}
    rope |= {"rope_type": "llama3", **own}
  fields = {  # transformers 4 reads the first two
    "rope_theta": config.rope_theta,
    "rope_scaling": None if rope["rope_type"] == "default" else rope,
    "rope_parameters": rope,
  }
  if kind == "gemma3_text":
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    fields["rope_parameters"] = {_GLOBAL: rope, _LOCAL: local}
    fields["rope_local_base_freq"] = config.local_rope_theta
  return fields


def tensor_name(path: str, config: LlamaConfig) -> str:
  """The name in transformers of the parameter at a path."""
  if path in _NAMES:
    return _NAMES[path]
  _, layer, rest = path.split("/", 2)
  return f"model.layers.{layer.removeprefix('layers_')}.{part_name(rest, config)}"


def part_name(path: str, config: LlamaConfig) -> str:
  """The name in a layer of transformers of the parameter at a path in a layer."""
  if config.post_norms and path == "pre_mlp_layer_norm/scale":
    return "pre_feedforward_layernorm.weight"
  if path in _LAYER_NAMES:
    return _LAYER_NAMES[path]
  _, projection, kind = path.split("/")
  suffix = "bias" if kind == "bias" else "weight"
  return f"self_attn.{_PROJECTIONS[projection]}.{suffix}"


def is_transposed(path: str) -> bool:
  """Whether transformers stores the parameter transposed."""
  return path.endswith("/kernel")
