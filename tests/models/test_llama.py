"""Decoder-only models: scores equal a numpy model, and configs are checked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import cases
from models.cases import CLOSE, ROWS, Runner

from osd_jax import base
from osd_jax.models import llama
from osd_jax.models.convert import hugging_face
from osd_tools import sizes


@pytest.fixture(scope="module", params=cases.LLAMAS)
def runner(request):
  return Runner(request.param)


# ---- A numpy model: one sequence, no cache, loops over heads


def rms(x, scale, epsilon):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def rotated(x, config, window):
  """Applies rotary embeddings to x [n, D] at positions 0..n - 1.

  Pairs of features are multiplied as complex numbers by exp(i * position * frequency).
  """
  half = config.head_dim // 2
  is_local = window and config.local_rope_theta
  theta = config.local_rope_theta if is_local else config.rope_theta
  waves = theta ** (-np.arange(half) / half)
  if not is_local:
    waves /= config.rope_factor
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


def capped(logits, cap):
  return np.tanh(logits / cap) * cap if cap else logits


def activated(x, name):
  if name == "silu":
    return x / (1 + np.exp(-x))
  return x / 2 * (1 + np.tanh((x + 0.044715 * x**3) * np.sqrt(2 / np.pi)))


def linear(params, x):
  return x @ np.asarray(params["kernel"], np.float64) + np.asarray(
    params.get("bias", 0)
  )


def oracle(config, params, tokens):
  """Returns the logits [n, V] after each token of one sequence, in float64."""
  table = np.asarray(params["token_embedder"]["embedding"], np.float64)
  decoder, x, size = params["decoder"], table[tokens], config.head_dim
  if config.scaled_embeddings:
    x = x * np.sqrt(config.width)

  def normed(params, x):
    scale = np.asarray(params["scale"], np.float64) + config.unit_offset_norms
    return rms(x, scale, config.norm_epsilon)

  after = lambda params, x: normed(params, x) if params else x
  later, earlier = np.indices((len(tokens),) * 2)
  for index in range(config.num_layers):
    layer = decoder[f"layers_{index}"]
    attention = layer["self_attention"]
    window = config.windows[index % len(config.windows)]
    hidden = (earlier > later) | (window > 0) & (later - earlier >= window)
    h = normed(layer["pre_self_attention_layer_norm"], x)
    query, key, value = (linear(attention[n], h) for n in ("query", "key", "value"))
    contexts = []
    for head in range(config.num_heads):
      shared = head // config.queries_per_head
      q = query[:, head * size : (head + 1) * size]
      k, v = (part[:, shared * size : (shared + 1) * size] for part in (key, value))
      if config.query_key_norm:
        q, k = normed(attention["query_norm"], q), normed(attention["key_norm"], k)
      logits = rotated(q, config, window) @ rotated(k, config, window).T
      logits /= np.sqrt(config.query_pre_attn_scalar or size)
      logits = np.where(hidden, -np.inf, capped(logits, config.attention_cap))
      weights = np.exp(logits - logits.max(axis=1, keepdims=True))
      contexts.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    result = linear(attention["out"], np.concatenate(contexts, axis=1))
    x = x + after(layer.get("post_self_attention_layer_norm"), result)
    h = normed(layer["pre_mlp_layer_norm"], x)
    gate = activated(linear(layer["mlp"]["wi_0"], h), config.mlp_activations[0])
    result = linear(layer["mlp"]["wo"], gate * linear(layer["mlp"]["wi_1"], h))
    x = x + after(layer.get("post_mlp_layer_norm"), result)
  x = normed(decoder["decoder_norm"], x)
  logits = x @ table.T if config.tied_head else linear(decoder["logits_dense"], x)
  return capped(logits, config.logit_cap)


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
  "changes, match",
  [
    ({"model_type": "gpt2"}, "model_type: received 'gpt2'"),
    ({"hidden_act": "gelu"}, "hidden_act: received 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"mlp_bias": True}, "mlp_bias.*biases"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type.*'yarn'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"eos_token_id": None}, "eos_token_id"),
    ({"hidden_size": None}, "hidden_size: received nothing"),
    ({"max_position_embeddings": None}, "max_position_embeddings"),
    ({"rope_scaling": {"type": "linear"}}, "factor: received nothing"),
    ({"use_bidirectional_attention": True}, "attention to later tokens"),
  ],
)
def test_unsupported_fields_of_config_json_are_refused(changes, match):
  fields = hugging_face.config_to(cases.LLAMA)
  fields.pop("rope_parameters")
  assert hugging_face.config_from(fields) == cases.LLAMA
  with pytest.raises(base.InputError, match=match):
    hugging_face.config_from({**fields, **changes})


def test_windows_of_config_json_are_those_of_transformers():
  llama = hugging_face.config_to(cases.LLAMA)
  read = lambda **fields: (
    hugging_face.config_from(
      {**llama, "num_hidden_layers": 4, "sliding_window": 32, **fields}
    ).windows
  )
  assert read(model_type="mistral") == (32,)
  assert read(model_type="mistral", sliding_window=None) == (0,)
  # A Qwen ignores `sliding_window` unless `use_sliding_window` is set.
  slides = {"use_sliding_window": True, "max_window_layers": 3}
  assert read(model_type="qwen2") == read(**slides, model_type="llama") == (0,)
  assert read(**slides, model_type="qwen2") == (0, 0, 0, 32)
  gemma = {"hidden_activation": "gelu_pytorch_tanh"}
  assert read(model_type="gemma2", **gemma) == (32, 0)
  assert read(model_type="gemma3_text", **gemma) == (32,)
  assert read(model_type="gemma3_text", sliding_window_pattern=3) == (32, 32, 0)


def test_published_gemma_3_4b_is_read_without_its_vision():
  text = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
  }
  whole = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
  assert hugging_face.config_from(whole) == sizes.size("gemma-3-4b")


def test_shapes_that_transformers_does_not_have_are_not_written():
  for changes in ({"attention_cap": 3.0}, {"windows": (3, 4)}):
    with pytest.raises(base.InputError, match="transformers has no such model"):
      hugging_face.config_to(dataclasses.replace(cases.LLAMA, **changes))
