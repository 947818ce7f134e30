"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's format: fields and tensor names.

Weights of torch's linear layers are `[out, in]`, kernels here are `[in, out]`.
"""

from collections.abc import Mapping
from typing import Any

from osd_jax import base
from osd_jax.models.convert.folders import check_field, required
from osd_jax.models.shapes import LlamaConfig, RopeScaling

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_SAYS = "only dense Llama, Vicuna, Mistral, Qwen2 and Qwen3 models can be converted"

# Fields that must be empty, with their meaning for the error message.
_REFUSED = {
  "quantization_config": "a quantised checkpoint",
  "num_local_experts": "a mixture of experts",
  "num_experts": "a mixture of experts",
  "mlp_bias": "feed-forward blocks with biases",
}
# Defaults of fields that a configuration may leave out.
_HEAD_DIMS = {"qwen3": 128}
_THETA = 10000.0

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
  "self_attention/query_norm/scale": "self_attn.q_norm.weight",
  "self_attention/key_norm/scale": "self_attn.k_norm.weight",
  "mlp/wi_0/kernel": "mlp.gate_proj.weight",
  "mlp/wi_1/kernel": "mlp.up_proj.weight",
  "mlp/wo/kernel": "mlp.down_proj.weight",
}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}


def config_from(config: Mapping[str, Any]) -> LlamaConfig:
  """The shape that a parsed `config.json` describes.

  Sliding-window attention equals full attention up to the length of the window, so the
  window becomes `max_positions`.

  Raises:
    InputError: a field is missing or describes an unsupported model.
  """
  kind = config["model_type"]
  # `pretraining_tp` splits matrices for bit-equal training, and changes no function.
  check_field(_SAYS, "hidden_act", config.get("hidden_act", "silu"), ("silu",))
  for field, what in _REFUSED.items():
    if config.get(field):
      raise base.InputError(
        f"convert: config.json: field {field}: received {config[field]!r}, {what};"
        f" expected nothing; {_SAYS}."
      )
  own = {ours: required(config, theirs) for ours, theirs in _FIELDS.items()}
  # Older files state no head_dim.
  head_dim: int = config.get("head_dim") or _HEAD_DIMS.get(kind, 0)
  head_dim = head_dim or own["width"] // own["num_heads"]
  # Qwen2 always has biases in query, key and value, and none in the output. Its files
  # need not contain the field.
  own_bias = config.get("attention_bias", False) if kind != "mistral" else False
  scaling, theta = _rope(config)
  return LlamaConfig(
    num_kv_heads=config.get("num_key_value_heads") or own["num_heads"],
    head_dim=head_dim,
    tied_head=bool(config.get("tie_word_embeddings", TIED_BY_DEFAULT)),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
    attention_bias=kind == "qwen2" or own_bias,
    output_bias=own_bias and kind != "qwen2",
    query_key_norm=kind == "qwen3",
    max_positions=_positions(config),
    eos_ids=_eos_ids(config),
    **own,
  )


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
  """The end-of-sequence tokens; config.json has one or a list."""
  stated = config.get("eos_token_id")
  ids: tuple[Any, ...] = tuple(stated) if isinstance(stated, list) else (stated,)
  if not all(base.is_count(token, least=0) for token in ids):
    check_field(_SAYS, "eos_token_id", stated, ("a token id, or a list of them",))
  return ids


def _positions(config: Mapping[str, Any]) -> int:
  """The longest sequence with full attention, in tokens."""
  # The name in files of the first Llama, which EAGLE's still use.
  limit = config.get("max_sequence_length")
  if limit is None or "max_position_embeddings" in config:
    limit = required(config, "max_position_embeddings")
  window = config.get("sliding_window")
  slides = config["model_type"] == "mistral" or config.get("use_sliding_window", False)
  # Mistral's files always mean their window; Qwen2's only with `use_sliding_window`.
  if slides and window:
    return min(limit, window)
  kinds = set(config.get("layer_types") or ())
  check_field(_SAYS, "layer_types", kinds - {"full_attention"}, (set(),))
  return limit


def _rope(config: Mapping[str, Any]) -> tuple[RopeScaling | None, float]:
  """Scaling and base of the rotary positions; one field since transformers 5."""
  stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
  stated = {field: value for field, value in stated.items() if value is not None}
  theta = float(stated.get("rope_theta", config.get("rope_theta", _THETA)))
  kind = stated.get("rope_type", stated.get("type", "default"))
  if kind == "linear" and stated.get("factor") == 1:
    kind = "default"
  check_field(_SAYS, "rope_scaling.rope_type", kind, ("default", "llama3"))
  share = config.get("partial_rotary_factor") or stated.get("partial_rotary_factor")
  check_field(_SAYS, "partial_rotary_factor", share, (None, 1.0))
  if kind == "default":
    return None, theta
  own = {ours: required(stated, theirs) for ours, theirs in _SCALING_FIELDS.items()}
  return RopeScaling(**own), theta


def config_to(config: LlamaConfig) -> dict[str, Any]:
  """The fields of `config.json` for a shape.

  Raises:
    InputError: transformers has no such model.
  """
  kind = _kind(config)
  architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
  scaling = config.rope_scaling
  rope = {"rope_type": "default", "rope_theta": config.rope_theta}
  if scaling is not None:
    own = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING_FIELDS.items()}
    rope |= {"rope_type": "llama3", **own}
  ends = list(config.eos_ids)
  return {
    "architectures": [f"{architecture}ForCausalLM"],
    "model_type": kind,
    "hidden_act": "silu",
    **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "max_position_embeddings": config.max_positions,
    "rms_norm_eps": config.norm_epsilon,
    "rope_theta": config.rope_theta,  # read by transformers 4,
    "rope_scaling": rope if scaling is not None else None,
    "rope_parameters": rope,  # and by transformers 5
    "attention_bias": config.attention_bias and kind != "qwen2",
    "tie_word_embeddings": config.tied_head,
    "eos_token_id": ends if len(ends) > 1 else ends[0],
    "dtype": "float32",
  }


def _kind(config: LlamaConfig) -> str:
  """The model type in transformers for a shape."""
  biases = config.attention_bias, config.output_bias
  if config.query_key_norm and biases[0] == biases[1]:
    return "qwen3"
  if not config.query_key_norm and biases == (True, False):
    return "qwen2"
  if not config.query_key_norm and biases[0] == biases[1]:
    return "llama"
  raise base.InputError(
    f"convert: LlamaConfig: received attention_bias {biases[0]}, output_bias"
    f" {biases[1]}, query_key_norm {config.query_key_norm}: transformers has no such"
    " model; expected the values of a Llama, Qwen2 or Qwen3."
  )


def tensor_name(path: str) -> str:
  """The name in transformers of the parameter at a path."""
  if path in _NAMES:
    return _NAMES[path]
  _, layer, rest = path.split("/", 2)
  prefix = f"model.layers.{layer.removeprefix('layers_')}"
  if rest in _LAYER_NAMES:
    return f"{prefix}.{_LAYER_NAMES[rest]}"
  _, projection, kind = rest.split("/")
  suffix = "bias" if kind == "bias" else "weight"
  return f"{prefix}.self_attn.{_PROJECTIONS[projection]}.{suffix}"


def is_transposed(path: str) -> bool:
  """Whether transformers stores the parameter transposed."""
  return path.endswith("/kernel")
