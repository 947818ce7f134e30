"""T5Gemma in Hugging Face's format: fields and tensor names.

Encoder and decoder are described like two Gemma 2 models.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from osd_jax import base
from osd_jax.models.convert import llama
from osd_jax.models.convert.folders import check_field
from osd_jax.models.shapes import LlamaConfig, T5GemmaConfig

MODEL_TYPES = ("t5gemma",)
_SAYS = "only T5Gemmas whose encoder and decoder have layers of one shape are supported"

EMBEDDING, HEAD = "model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"
COPIES, UNUSED = (), ()
TIED_BY_DEFAULT = True
_NAMES = {
  "token_embedder/embedding": EMBEDDING,
  "encoder/token_embedder/embedding": "model.encoder.embed_tokens.weight",
  "encoder/encoder_norm/scale": "model.encoder.norm.weight",
  "decoder/decoder_norm/scale": "model.decoder.norm.weight",
  "decoder/logits_dense/kernel": HEAD,
}
# Parts of a layer that have other names than in a Gemma 2.
_LAYER_NAMES = {
  "pre_self_attention_layer_norm": "pre_self_attn_layernorm",
  "post_self_attention_layer_norm": "post_self_attn_layernorm",
  "pre_cross_attention_layer_norm": "pre_cross_attn_layernorm",
  "post_cross_attention_layer_norm": "post_cross_attn_layernorm",
}


def config_from(config: Mapping[str, Any]) -> T5GemmaConfig:
  """The shape that a parsed `config.json` describes."""
  tied = bool(config.get("tie_word_embeddings", TIED_BY_DEFAULT))
  encoder, decoder = (
    llama.config_from(
      {"eos_token_id": 1, **config.get(part, {}), "model_type": "gemma2"}
    )
    for part in ("encoder", "decoder")
  )
  fields = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)}
  shared = fields.keys() - {"num_layers", "eos_ids"}
  if differing := sorted(x for x in shared if getattr(encoder, x) != fields[x]):
    raise base.InputError(
      f"convert: config.json: encoder and decoder differ in {', '.join(differing)};"
      f" {_SAYS}."
    )
  ends = config.get("eos_token_id")
  if ends is not None:
    fields["eos_ids"] = tuple(ends) if isinstance(ends, list) else (ends,)
  start = config.get("decoder_start_token_id", config.get("bos_token_id", 2))
  return T5GemmaConfig(
    **{**fields, "tied_head": tied},
    num_encoder_layers=encoder.num_layers,
    start_id=start,
  )


def config_to(config: T5GemmaConfig) -> dict[str, Any]:
  """The fields of `config.json` for a shape."""
  fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(LlamaConfig)}
  decoder = llama.config_to(LlamaConfig(**fields))
  check_field(_SAYS, "model_type", decoder["model_type"], ("gemma2",))
  del decoder["architectures"], decoder["dtype"]
  decoder |= {"model_type": "t5_gemma_module", "bos_token_id": config.start_id}
  encoder = {**decoder, "num_hidden_layers": config.num_encoder_layers}
  is_local = [bool(config.window_of(i)) for i in range(config.num_encoder_layers)]
  encoder["layer_types"] = llama.layer_types(is_local)
  return {
    "architectures": ["T5GemmaForConditionalGeneration"],
    "model_type": "t5gemma",
    "is_encoder_decoder": True,
    "encoder": encoder,
    "decoder": decoder,
    "vocab_size": config.vocab_size,
    "tie_word_embeddings": config.tied_head,
    "bos_token_id": config.start_id,
    "decoder_start_token_id": config.start_id,
    "eos_token_id": decoder["eos_token_id"],
    "dtype": "float32",
  }


def tensor_name(path: str, config: T5GemmaConfig) -> str:
  """The name in transformers of the parameter at a path."""
  if path in _NAMES:
    return _NAMES[path]
  stack, layer, part, *rest = path.split("/")
  prefix = f"model.{stack}.layers.{layer.removeprefix('layers_')}"
  if part in _LAYER_NAMES:
    return f"{prefix}.{_LAYER_NAMES[part]}.weight"
  inner = "/".join([part.replace("encoder_decoder", "self"), *rest])
  name = llama.part_name(inner, config)
  if part == "encoder_decoder_attention":
    name = name.replace("self_attn", "cross_attn")
  return f"{prefix}.{name}"


is_transposed = llama.is_transposed
