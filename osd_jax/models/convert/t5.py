"""T5, Flan-T5, mT5 and ByT5 in Hugging Face's format: fields and tensor names.

Weights of torch's linear layers are `[out, in]`, kernels here are `[in, out]`;
`relative_attention_bias` is `[buckets, H]`, `rel_embedding` is `[H, buckets]`.
"""

from collections.abc import Mapping
from typing import Any

from osd_jax import base
from osd_jax.models.convert.folders import check_field, required
from osd_jax.models.shapes import T5Config

MODEL_TYPES = ("t5", "mt5")  # a ByT5 is a "t5"; an mT5 is written as one
_SAYS = "only T5 1.0, T5 1.1, Flan-T5, mT5 and ByT5 can be converted"

# A model is written with the first name of its activations, as T5 was published.
_ACTIVATIONS = {
  "relu": ("relu",),
  "gelu_new": ("gelu",),
  "gated-relu": ("relu", "linear"),
  "gated-gelu": ("gelu", "linear"),
  "gated-gelu_new": ("gelu", "linear"),
}
_PROJECTIONS = {names: name for name, names in reversed(_ACTIVATIONS.items())}

# Fields with one supported value, which is also the default in transformers.
_FIXED = {
  "is_encoder_decoder": True,
  "layer_norm_epsilon": 1e-6,
  "pad_token_id": base.PAD_ID,
  "eos_token_id": base.EOS_ID,
  "decoder_start_token_id": base.PAD_ID,
}

_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
# Other names under which a file may hold the embedding once more.
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In old files of T5 1.0; no implementation reads it.
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
TIED_BY_DEFAULT = True  # meaning of a missing tie_word_embeddings

# Fields by their names here and in transformers.
_FIELDS = {
  "vocab_size": "vocab_size",
  "width": "d_model",
  "num_heads": "num_heads",
  "head_dim": "d_kv",
  "mlp_dim": "d_ff",
  "num_encoder_layers": "num_layers",
}
_BUCKETS = "relative_attention_num_buckets"
_MAX_DISTANCE = "relative_attention_max_distance"

_NAMES = {
  "token_embedder/embedding": EMBEDDING,
  "encoder/relpos_bias/rel_embedding": f"encoder.{_BIAS}",
  "decoder/relpos_bias/rel_embedding": f"decoder.{_BIAS}",
  "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
  "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
  "decoder/logits_dense/kernel": HEAD,
}

_LAYER_NAMES = {
  ("encoder", "pre_attention_layer_norm"): "layer.0.layer_norm",
  ("encoder", "attention"): "layer.0.SelfAttention",
  ("encoder", "pre_mlp_layer_norm"): "layer.1.layer_norm",
  ("encoder", "mlp"): "layer.1.DenseReluDense",
  ("decoder", "pre_self_attention_layer_norm"): "layer.0.layer_norm",
  ("decoder", "self_attention"): "layer.0.SelfAttention",
  ("decoder", "pre_cross_attention_layer_norm"): "layer.1.layer_norm",
  ("decoder", "encoder_decoder_attention"): "layer.1.EncDecAttention",
  ("decoder", "pre_mlp_layer_norm"): "layer.2.layer_norm",
  ("decoder", "mlp"): "layer.2.DenseReluDense",
}

_PROJECTION_NAMES = {"query": "q", "key": "k", "value": "v", "out": "o"}


def config_from(config: Mapping[str, Any]) -> T5Config:
  """The shape that a parsed `config.json` describes.

  T5 1.0 scales the decoder's output by width ** -0.5 and ties the head; T5 1.1 does
  neither. Transformers 4 distinguishes them by `tie_word_embeddings`. Transformers 5
  sets that to true for every T5 and has `scale_decoder_outputs` instead.
  """
  for field, expected in _FIXED.items():
    received = config.get(field, expected)
    received = expected if received == [expected] else received
    check_field(_SAYS, field, received, (expected,))
  is_mt5 = config["model_type"] == "mt5"
  activation = config.get("feed_forward_proj", "gated-gelu" if is_mt5 else "relu")
  check_field(_SAYS, "feed_forward_proj", activation, tuple(_ACTIVATIONS))
  fields = {ours: required(config, theirs) for ours, theirs in _FIELDS.items()}
  num_decoder_layers = config.get("num_decoder_layers")  # null means num_layers
  if num_decoder_layers is None:
    num_decoder_layers = fields["num_encoder_layers"]
  scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings"))
  return T5Config(
    num_decoder_layers=num_decoder_layers,
    mlp_activations=_ACTIVATIONS[activation],
    tied_head=scaled is not False and not is_mt5,  # no mT5 scales
    relative_buckets=config.get(_BUCKETS, 32),
    relative_max_distance=config.get(_MAX_DISTANCE, 128),
    **fields,
  )


def config_to(config: T5Config) -> dict[str, Any]:
  """The fields of `config.json` for a shape."""
  if config.mlp_activations not in _PROJECTIONS:
    raise base.InputError(
      f"convert: T5Config.mlp_activations: received {config.mlp_activations!r},"
      f" expected one of {sorted(_PROJECTIONS)}; transformers has no other T5."
    )
  return {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    **_FIXED,
    **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
    "num_decoder_layers": config.num_decoder_layers,
    _BUCKETS: config.relative_buckets,
    _MAX_DISTANCE: config.relative_max_distance,
    "feed_forward_proj": _PROJECTIONS[config.mlp_activations],
    "tie_word_embeddings": config.tied_head,  # read by transformers 4,
    "scale_decoder_outputs": config.tied_head,  # and by transformers 5
    "dropout_rate": 0.0,
    "dtype": "float32",
  }


def tensor_name(path: str, config: T5Config) -> str:
  """The name in transformers of the parameter at a path."""
  del config  # the same for every T5
  if path in _NAMES:
    return _NAMES[path]
  stack, layer, block, *rest = path.split("/")
  prefix = f"{stack}.block.{layer.removeprefix('layers_')}"
  inner = [_PROJECTION_NAMES.get(part, part) for part in rest[:-1]]
  return ".".join([prefix, _LAYER_NAMES[stack, block], *inner, "weight"])


def is_transposed(path: str) -> bool:
  """Whether transformers stores the parameter transposed."""
  return path.endswith(("/kernel", "/rel_embedding"))
