"""Checkpoints of other libraries: Hugging Face's T5 1.0, T5 1.1 and Flan-T5.

A tensor of a torch linear layer is `[out, in]`, a kernel here is `[in, out]`;
`relative_attention_bias` is `[buckets, H]`, `rel_embedding` is `[H, buckets]`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from osd_jax import base
from osd_jax.models import t5
from osd_jax.models.weights import Weights

_ACTIVATIONS = {
    "relu": ("relu",),
    "gelu_new": ("gelu",),
    "gated-relu": ("relu", "linear"),
    "gated-gelu": ("gelu", "linear"),
    "gated-gelu_new": ("gelu", "linear"),
}

# What this code takes for granted: value, and the library's default where a
# configuration may leave the field out.
_FIXED = {
    "model_type": ("t5", None),
    "is_encoder_decoder": (True, True),
    "layer_norm_epsilon": (1e-6, 1e-6),
    "pad_token_id": (base.PAD_ID, base.PAD_ID),
    "eos_token_id": (base.EOS_ID, base.EOS_ID),
    "decoder_start_token_id": (base.PAD_ID, base.PAD_ID),
}

_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_EMBEDDING = "shared.weight"
_HEAD = "lm_head.weight"
# Other names under which a file may hold the embedding once more.
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In old files of T5 1.0; no implementation reads it.
_UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

_NAMES = {
    "token_embedder/embedding": _EMBEDDING,
    "encoder/relpos_bias/rel_embedding": f"encoder.{_BIAS}",
    "decoder/relpos_bias/rel_embedding": f"decoder.{_BIAS}",
    "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
    "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
    "decoder/logits_dense/kernel": _HEAD,
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


def config_from_hugging_face(config: Mapping[str, Any]) -> t5.T5Config:
  """The shape that a Hugging Face `config.json` describes.

  T5 1.0 scales the decoder's output by width ** -0.5 and ties the head; T5 1.1
  does neither. Files of transformers 4 say so by `tie_word_embeddings`; those of
  transformers 5 call every model tied and have `scale_decoder_outputs` instead.

  Args:
    config: the parsed file.

  Returns:
    The T5Config, float32.

  Raises:
    ValueError: a field is missing or describes a model that is not T5 1.0 or 1.1.
  """
  for field, (expected, default) in _FIXED.items():
    received = config.get(field)
    received = default if received is None else received
    _check(field, expected if received == [expected] else received, (expected,))
  activation = config.get("feed_forward_proj", "relu")
  _check("feed_forward_proj", activation, tuple(_ACTIVATIONS))
  num_layers = _required(config, "num_layers")
  num_decoder_layers = config.get("num_decoder_layers")
  return t5.T5Config(
      vocab_size=_required(config, "vocab_size"),
      width=_required(config, "d_model"),
      num_heads=_required(config, "num_heads"),
      head_dim=_required(config, "d_kv"),
      mlp_dim=_required(config, "d_ff"),
      num_encoder_layers=num_layers,
      num_decoder_layers=(
          num_layers if num_decoder_layers is None else num_decoder_layers
      ),
      mlp_activations=_ACTIVATIONS[activation],
      tied_head=_scaled(config),
      relative_buckets=config.get("relative_attention_num_buckets", 32),
      relative_max_distance=config.get("relative_attention_max_distance", 128),
  )


def params_from_hugging_face(
    tensors: Mapping[str, np.ndarray], config: t5.T5Config
) -> base.Params:
  """Hugging Face's tensors as t5x's parameter tree.

  Args:
    tensors: name -> array of any floating type.
    config: the model's shape; `tied_head` decides whether `lm_head.weight` is a
      parameter or a copy of the embedding.

  Returns:
    The tree, float32.

  Raises:
    ValueError: tensors are missing, of another shape, unexpected, or copies of the
      embedding that differ from it.
  """
  tensors = _without_copies(tensors, config.tied_head)
  shapes = jax.eval_shape(t5.build(config).init, jax.random.key(0))
  expected = flax.traverse_util.flatten_dict(shapes, sep="/")
  names = {path: _hugging_face_name(path) for path in expected}
  _check_tensors(
      tensors,
      {names[path]: _file_shape(path, x.shape) for path, x in expected.items()},
  )
  params = {
      path: jnp.asarray(_turn(path, np.asarray(tensors[name])), jnp.float32)
      for path, name in names.items()
  }
  return flax.traverse_util.unflatten_dict(params, sep="/")


def read_hugging_face(folder: str | Path) -> Weights:
  """Reads a model folder that transformers wrote.

  Args:
    folder: holds `config.json` and one `model.safetensors`.

  Returns:
    Weights with float32 parameters; the vocabulary's fingerprint is unknown.

  Raises:
    ValueError: a file is missing or cannot be read, or describes a model that is
      not T5 1.0 or T5 1.1.
  """
  folder = Path(folder)
  fields = _read_config(folder / "config.json")
  tensors = _read_tensors(folder / "model.safetensors")
  config = config_from_hugging_face(fields)
  # Transformers 5 makes T5 1.1 with the embedding as its unscaled head, and then
  # writes no head.
  shares = not config.tied_head and fields.get("tie_word_embeddings", True)
  if shares and _HEAD not in tensors and _EMBEDDING in tensors:
    tensors[_HEAD] = tensors[_EMBEDDING]
  notes = f"converted from the Hugging Face folder {folder.name}"
  return Weights(config, params_from_hugging_face(tensors, config), notes=notes)


def _required(config: Mapping[str, Any], field: str) -> Any:
  if field not in config:
    raise ValueError(
        f"convert: config.json: field {field}: received nothing, expected an"
        " integer; check that the folder holds a T5."
    )
  return config[field]


def _check(field: str, received: Any, expected: tuple[Any, ...]) -> None:
  if received not in expected:
    wanted = " or ".join(repr(value) for value in expected)
    raise ValueError(
        f"convert: config.json: field {field}: received {received!r}, expected"
        f" {wanted}; only T5 1.0, T5 1.1 and Flan-T5 can be converted."
    )


def _scaled(config: Mapping[str, Any]) -> bool:
  scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings"))
  return scaled is not False


def _hugging_face_name(path: str) -> str:
  if path in _NAMES:
    return _NAMES[path]
  stack, layer, block, *rest = path.split("/")
  prefix = f"{stack}.block.{layer.removeprefix('layers_')}"
  inner = [_PROJECTION_NAMES.get(part, part) for part in rest[:-1]]
  return ".".join([prefix, _LAYER_NAMES[stack, block], *inner, "weight"])


def _turned(path: str) -> bool:
  return path.endswith(("/kernel", "/rel_embedding"))


def _turn(path: str, tensor: np.ndarray) -> np.ndarray:
  return tensor.T if _turned(path) else tensor


def _file_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(shape[::-1] if _turned(path) else shape)


def _without_copies(
    tensors: Mapping[str, np.ndarray], tied_head: bool
) -> dict[str, np.ndarray]:
  """Keeps the embedding under one name, whichever names the file gives it."""
  aliases = (*_COPIES, _HEAD) if tied_head else _COPIES
  kept = {name: x for name, x in tensors.items() if name not in (*aliases, *_UNUSED)}
  for alias in aliases:
    if alias not in tensors:
      continue
    first = kept.setdefault(_EMBEDDING, tensors[alias])
    if first is not tensors[alias] and not np.array_equal(first, tensors[alias]):
      raise ValueError(
          f"convert: tensor {alias}: differs from {_EMBEDDING}, expected a copy of"
          " it in this model; if the head was trained apart, set both"
          " tie_word_embeddings and scale_decoder_outputs to false in config.json."
      )
  return kept


def _check_tensors(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]
) -> None:
  found = {name: tuple(x.shape) for name, x in tensors.items()}
  wrong = [
      f"{name}: found {found.get(name, 'nothing')}, expected"
      f" {expected.get(name, 'nothing')}"
      for name in sorted(expected.keys() | found.keys())
      if expected.get(name) != found.get(name)
  ]
  if wrong:
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    raise ValueError(
        f"convert: tensors do not fit the configuration: {'; '.join(wrong[:5])}"
        f"{more}. Check that config.json and the tensors belong to one model."
    )


def _read_config(path: Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(
        f"convert: cannot read {path}: {error}; expected a model folder that"
        " transformers wrote."
    ) from error


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
  try:
    # flax's reader, because numpy's knows no bfloat16
    with safetensors.safe_open(path, framework="flax") as file:
      return {name: np.asarray(file.get_tensor(name)) for name in file.keys()}
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
        f"convert: cannot read {path}: {error}; expected all tensors in this one"
        " file (join a sharded or .bin checkpoint with save_pretrained and a large"
        " max_shard_size)."
    ) from error
