"""Decoder-only models: scores equal a numpy model, and configs are checked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import cases
from models.cases import CLOSE, ROWS, Runner

from osd_jax import base
from osd_jax.models import convert, llama
from osd_jax.models.shapes import RopeScaling


@pytest.fixture(scope="module", params=cases.LLAMAS)
def runner(request):
  return Runner(request.param)


# ---- A numpy model: one sequence, no cache, loops over heads


def rms(x, scale, epsilon):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def rotated(x, config):
  """Applies rotary embeddings to x [n, D] at positions 0..n - 1.

  Pairs of features are multiplied as complex numbers by exp(i * position * frequency).
  """
  half = config.head_dim // 2
  waves = config.rope_theta ** (-np.arange(half) / half)
  if scaling := config.rope_scaling:
    for index, wave in enumerate(waves):
      length = 2 * np.pi / wave
      if length > scaling.original_positions / scaling.low_freq_factor:
        waves[index] = wave / scaling.factor
      elif length >= scaling.original_positions / scaling.high_freq_factor:
        smooth = scaling.original_positions / length - scaling.low_freq_factor
        smooth /= scaling.high_freq_factor - scaling.low_freq_factor
        waves[index] = (1 - smooth) * wave / scaling.factor + smooth * wave
  pairs = x[:, :half] + 1j * x[:, half:]
  pairs = pairs * np.exp(1j * np.arange(len(x))[:, None] * waves)
  return np.concatenate([pairs.real, pairs.imag], axis=1)


def linear(params, x):
  return x @ np.asarray(params["kernel"], np.float64) + np.asarray(
    params.get("bias", 0)
  )


def oracle(config, params, tokens):
  """Returns the logits [n, V] after each token of one sequence, in float64."""
  table = np.asarray(params["token_embedder"]["embedding"], np.float64)
  decoder, x, size = params["decoder"], table[tokens], config.head_dim
  epsilon = config.norm_epsilon
  for index in range(config.num_layers):
    layer = decoder[f"layers_{index}"]
    attention = layer["self_attention"]
    h = rms(x, layer["pre_self_attention_layer_norm"]["scale"], epsilon)
    query, key, value = (linear(attention[n], h) for n in ("query", "key", "value"))
    contexts = []
    for head in range(config.num_heads):
      shared = head // config.queries_per_head
      q = query[:, head * size : (head + 1) * size]
      k, v = (part[:, shared * size : (shared + 1) * size] for part in (key, value))
      if config.query_key_norm:
        q = rms(q, attention["query_norm"]["scale"], epsilon)
        k = rms(k, attention["key_norm"]["scale"], epsilon)
      logits = rotated(q, config) @ rotated(k, config).T / np.sqrt(size)
      logits[np.triu_indices(len(tokens), 1)] = -np.inf
      weights = np.exp(logits - logits.max(axis=1, keepdims=True))
      contexts.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    x = x + linear(attention["out"], np.concatenate(contexts, axis=1))
    h = rms(x, layer["pre_mlp_layer_norm"]["scale"], epsilon)
    gate = linear(layer["mlp"]["wi_0"], h)
    inner = gate / (1 + np.exp(-gate)) * linear(layer["mlp"]["wi_1"], h)
    x = x + linear(layer["mlp"]["wo"], inner)
  x = rms(x, decoder["decoder_norm"]["scale"], epsilon)
  return x @ table.T if config.tied_head else linear(decoder["logits_dense"], x)


def test_scores_equal_the_numpy_model(runner):
  found = runner.forced
  for row, keep in enumerate(runner.mask):
    prompt = runner.source[row][keep]
    tokens = np.concatenate([prompt, runner.text[row]])
    expected = oracle(runner.shape, jax.device_get(runner.params), tokens)
    expected = expected[len(prompt) - 1 : -1]
    np.testing.assert_allclose(found[row], expected, rtol=1e-3, atol=1e-3)


def test_first_input_is_the_last_token_of_the_prompt(runner):
  last = [row[keep][-1] for row, keep in zip(runner.source, runner.mask)]
  np.testing.assert_array_equal(runner.fed[:, 0], last)
  kept = llama.without_last(jnp.asarray(runner.mask))
  np.testing.assert_array_equal(kept.sum(1), runner.mask.sum(1) - 1)


def test_prompt_of_one_token_can_be_decoded():
  one = Runner("qwen2")
  one.source = np.full((ROWS, 4), base.NO_TOKEN, np.int32)
  one.source[:, 0] = [5, 6, 7]
  one.mask = one.model.mask(one.source)
  np.testing.assert_allclose(one.feed(4)[0], one.forced, **CLOSE)


def test_rope_scaling_divides_only_low_frequencies():
  config = cases.LLAMAS["llama"]
  plain = llama.frequencies(dataclasses.replace(config, rope_scaling=None))
  ratio = plain / llama.frequencies(config)
  assert ratio[0] == 1 and ratio[-1] == pytest.approx(4.0)
  assert np.all(np.diff(ratio) >= 0) and len(set(ratio.round(3))) > 2


@pytest.mark.parametrize(
  "field, value",
  [
    ("num_kv_heads", 3),
    ("head_dim", 7),
    ("eos_ids", ()),
    ("eos_ids", (64,)),
    ("state_layer", 3),
    ("rope_theta", 0.0),
    ("width", 0),
    ("max_positions", 0),
  ],
)
def test_invalid_config_error_names_the_field(field, value):
  with pytest.raises(base.InputError, match=f"LlamaConfig.{field}"):
    dataclasses.replace(cases.LLAMA, **{field: value})


def test_invalid_rope_scaling_error_names_the_field():
  with pytest.raises(base.InputError, match=r"RopeScaling.high_freq_factor"):
    RopeScaling(low_freq_factor=4.0)


@pytest.mark.parametrize(
  "changes, match",
  [
    ({"model_type": "gpt2"}, "model_type: received 'gpt2'"),
    ({"hidden_act": "gelu"}, "hidden_act: received 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"mlp_bias": True}, "mlp_bias.*biases"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type.*'yarn'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"eos_token_id": None}, "eos_token_id"),
    ({"hidden_size": None}, "hidden_size: received nothing"),
  ],
)
def test_unsupported_fields_of_config_json_are_refused(changes, match):
  fields = convert.config_to_hugging_face(cases.LLAMA)
  fields.pop("rope_parameters")
  assert convert.config_from_hugging_face(fields) == cases.LLAMA
  with pytest.raises(base.InputError, match=match):
    convert.config_from_hugging_face({**fields, **changes})


def test_sliding_window_limits_max_positions():
  fields = convert.config_to_hugging_face(cases.LLAMA)
  window = {"sliding_window": 32}
  mistral = {**fields, "model_type": "mistral", **window}
  assert convert.config_from_hugging_face(mistral).max_positions == 32
  # Qwen 2 ignores `sliding_window` unless `use_sliding_window` is set.
  qwen = {**fields, "model_type": "qwen2", **window}
  assert convert.config_from_hugging_face(qwen).max_positions == 256
