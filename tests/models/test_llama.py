"""Decoder-only models: decoding and scoring equal a numpy model for any padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import base, native, testing
from osd_jax.models import convert, families, llama
from osd_jax.models.shapes import DraftServing, LlamaConfig, RopeScaling

ROWS, SOURCE, TARGET, ROOM = 3, 7, 9, 4
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
PLAIN = testing.TINY_LLAMA
SCALED = RopeScaling(factor=4.0, original_positions=64)
SHAPES = {
  "grouped": PLAIN,
  "ungrouped": dataclasses.replace(PLAIN, num_kv_heads=4),
  "tied": dataclasses.replace(PLAIN, tied_head=True),
  "qwen2": dataclasses.replace(PLAIN, attention_bias=True),
  # The large epsilon makes a difference if it is not passed to every norm.
  "qwen3": dataclasses.replace(PLAIN, query_key_norm=True, norm_epsilon=1e-3),
  "all biases": dataclasses.replace(PLAIN, attention_bias=True, output_bias=True),
  "scaled": dataclasses.replace(PLAIN, rope_scaling=SCALED, rope_theta=500.0),
}

score = jax.jit(lambda model, *a: model.score(*a), static_argnums=0)
score_at = jax.jit(lambda model, *a: model.score_at(*a), static_argnums=0)
decode = jax.jit(lambda model, *a: model.decode(*a), static_argnums=0)
prefill = jax.jit(lambda model, *a: model.prefill(*a), static_argnums=(0, 4))


def random_params(model, seed=0):
  """Returns noisy parameters, so that each of them affects the logits."""
  rng = np.random.default_rng(seed)

  def leaf(path, like):
    name = path[-1].key
    noise = rng.normal(size=like.shape).astype(np.float32)
    if name == "scale":
      return 1 + 0.3 * noise
    return noise * like.shape[0] ** -0.5 if name == "kernel" else noise

  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(leaf, shapes)


class Runner:
  """A model and a batch of prompts of different lengths with target tokens."""

  def __init__(self, config, serving=None):
    self.config, self.model = (
      config,
      families.build(config, serving=serving or DraftServing()),
    )
    self.params = random_params(self.model)
    self.source, self.mask = testing.random_sources(ROWS, SOURCE, 64, 1, base.NO_TOKEN)
    tokens = np.random.default_rng(2).integers(2, 64, (ROWS, TARGET))
    self.target = tokens.astype(np.int32)

  def score(self, source=None):
    source = self.source if source is None else source
    mask = self.model.mask(source)
    return np.asarray(score(self.model, self.params, source, mask, self.target))

  def fed(self):
    """Inputs of decoding: the prompt's last token, then all targets but the last."""
    last = [row[keep][-1] for row, keep in zip(self.source, self.mask)]
    return np.concatenate([np.array(last)[:, None], self.target[:, :-1]], axis=1)

  def feed(self, stride, fed=None, source=None):
    source = self.source if source is None else source
    served = self.model.prepare(self.params)
    mask = self.model.mask(source)
    cache = prefill(self.model, served, source, mask, TARGET + ROOM)
    fed, rows = self.fed() if fed is None else fed, []
    for start in range(0, TARGET, stride):
      part = jnp.asarray(fed[:, start : start + stride], jnp.int32)
      logits, cache = decode(self.model, served, part, cache)
      rows.append(logits)
    return np.concatenate(rows, axis=1), cache


@pytest.fixture(scope="module", params=SHAPES)
def runner(request):
  return Runner(SHAPES[request.param])


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
  found = runner.score()
  for row, keep in enumerate(runner.mask):
    prompt = runner.source[row][keep]
    tokens = np.concatenate([prompt, runner.target[row]])
    expected = oracle(runner.config, runner.params, tokens)
    expected = expected[len(prompt) - 1 : -1]
    np.testing.assert_allclose(found[row], expected, rtol=1e-3, atol=1e-3)


# ---- Decoding


@pytest.mark.parametrize("stride", [1, 2, TARGET])
def test_decoding_equals_teacher_forcing(runner, stride):
  logits, cache = runner.feed(stride)
  np.testing.assert_allclose(logits, runner.score(), **CLOSE)
  np.testing.assert_array_equal(cache.length, [TARGET] * ROWS)
  assert logits.dtype == np.float32


def test_native_code_does_not_change_decoding(runner):
  logits, _ = runner.feed(2)
  with native.portable():
    portable, _ = Runner(runner.config).feed(2)
  np.testing.assert_allclose(logits, portable, **CLOSE)


def test_shifted_inputs_change_the_logits(runner):
  """Negative control: every row changes if inputs are shifted by one position."""
  logits, _ = runner.feed(1, fed=runner.target)
  apart = np.max(np.abs(logits - runner.score()), axis=2)
  assert np.mean(apart > 0.1) > 0.9


def test_padding_on_either_side_does_not_change_logits(runner):
  left = np.full_like(runner.source, base.NO_TOKEN)
  wider = np.full((ROWS, SOURCE + 5), base.NO_TOKEN, np.int32)
  for row, keep in enumerate(runner.mask):
    prompt = runner.source[row][keep]
    left[row, SOURCE - len(prompt) :] = prompt
    wider[row, 2 : 2 + len(prompt)] = prompt
  for source in (left, wider):
    np.testing.assert_allclose(runner.score(source), runner.score(), **CLOSE)
    np.testing.assert_allclose(
      runner.feed(2, source=source)[0], runner.score(), **CLOSE
    )
  # Negative control: another prompt changes the scores.
  changed = np.where(runner.mask, (runner.source + 7) % 64, base.NO_TOKEN)
  assert np.max(np.abs(runner.score(changed) - runner.score())) > 0.1


@pytest.mark.parametrize("chunk", [3, 4])
def test_chunked_prefill_equals_whole_prefill(runner, chunk, monkeypatch):
  whole, cache = runner.feed(2)
  # Another `max_positions` gives another model, so the new CHUNK is traced.
  shape = dataclasses.replace(runner.config, max_positions=100 + chunk)
  monkeypatch.setattr(llama, "CHUNK", chunk)
  other = Runner(shape)
  arguments = (other.model.prepare(other.params), other.source, other.mask, 13)
  text = prefill.lower(other.model, *arguments).as_text()
  # Chunks run in a loop, and no tensor has the size of all attention weights.
  assert "while" in text and f"x{SOURCE}x{SOURCE}xf32" not in text
  by_chunks, kept = other.feed(2)
  np.testing.assert_allclose(by_chunks, whole, **CLOSE)
  np.testing.assert_array_equal(kept.cross_mask, cache.cross_mask)


def test_score_at_selects_from_score(runner):
  positions, tokens = jnp.asarray([[5, 0], [2, 3], [1, 1]]), jnp.asarray([60, 1, 7])
  arguments = (runner.params, runner.source, runner.mask, runner.target)
  part = score_at(runner.model, *arguments, positions, tokens)
  whole = runner.score()[np.arange(ROWS)[:, None], positions][..., tokens]
  np.testing.assert_allclose(part, whole, **CLOSE)


@pytest.mark.parametrize(
  "serving",
  [DraftServing(int8=True), DraftServing(shortlist=40), DraftServing(True, 40)],
  ids=["int8", "shortlist", "both"],
)
def test_approximate_serving_is_close_to_exact_scores(runner, serving):
  served, expected = Runner(runner.config, serving).feed(1)[0], runner.score()
  covered = serving.shortlist or 64
  assert np.all(np.isneginf(served[..., covered:]))
  apart = np.abs(served - expected)[..., :covered]
  assert np.mean(apart) < (0.15 * np.std(expected) if serving.int8 else 1e-4)


def test_bfloat16_is_close_to_float32(runner):
  half = Runner(dataclasses.replace(runner.config, dtype="bfloat16"))
  apart = np.abs(half.feed(2)[0] - runner.score())
  assert 0 < np.mean(apart) < 0.1 * np.std(runner.score())


def test_first_input_is_the_last_token_of_the_prompt(runner):
  np.testing.assert_array_equal(runner.model.starts(runner.source), runner.fed()[:, 0])
  kept = llama.without_last(jnp.asarray(runner.mask))
  np.testing.assert_array_equal(kept.sum(1), runner.mask.sum(1) - 1)


def test_prompt_of_one_token_can_be_decoded():
  one = Runner(PLAIN)
  one.source = np.full((ROWS, 4), base.NO_TOKEN, np.int32)
  one.source[:, 0] = [5, 6, 7]
  one.mask = one.model.mask(one.source)
  np.testing.assert_allclose(one.feed(3)[0], one.score(), **CLOSE)


def test_rope_scaling_divides_only_low_frequencies():
  config = SHAPES["scaled"]
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
    dataclasses.replace(PLAIN, **{field: value})


def test_invalid_rope_scaling_error_names_the_field():
  with pytest.raises(base.InputError, match=r"RopeScaling.high_freq_factor"):
    RopeScaling(low_freq_factor=4.0)


def test_config_round_trips_through_json():
  import json

  config = SHAPES["scaled"]
  again = LlamaConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
  assert again == config


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
  fields = convert.config_to_hugging_face(testing.TINY_LLAMA)
  fields.pop("rope_parameters")
  assert convert.config_from_hugging_face(fields) == testing.TINY_LLAMA
  with pytest.raises(base.InputError, match=match):
    convert.config_from_hugging_face({**fields, **changes})


def test_sliding_window_limits_max_positions():
  fields = convert.config_to_hugging_face(testing.TINY_LLAMA)
  window = {"sliding_window": 32}
  mistral = {**fields, "model_type": "mistral", **window}
  assert convert.config_from_hugging_face(mistral).max_positions == 32
  # Qwen 2 ignores `sliding_window` unless `use_sliding_window` is set.
  qwen = {**fields, "model_type": "qwen2", **window}
  assert convert.config_from_hugging_face(qwen).max_positions == 256
