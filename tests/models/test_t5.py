"""T5: cached decoding equals teacher forcing for any stride, padding and rewind."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny

from osd_jax import native, testing
from osd_jax.models import families

ROWS, SOURCE, TARGET, ROOM = 3, 7, 6, 4
CONFIG = tiny.CONFIG
# CONFIG has the form of T5 1.1; this one has ReLU and a tied head, like T5 1.0.
TIED = dataclasses.replace(
  CONFIG, mlp_activations=("relu",), tied_head=True, num_decoder_layers=1
)
SAME = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)


class Runner:
  """A tiny model, its parameters and its jitted functions."""

  def __init__(self, config):
    self.model = families.build(config)
    self.params = tiny.random_params(config, 0)
    self.served = self.model.prepare(jax.tree.map(jnp.asarray, self.params))
    self.prefill = jax.jit(self.model.prefill, static_argnums=3)
    self.decode = jax.jit(self.model.decode)
    self.score = jax.jit(self.model.score)

  def start(self, batch):
    return self.prefill(self.served, batch.source, batch.mask, TARGET + ROOM)

  def feed(self, batch, stride):
    """Feeds `stride` target tokens per call; returns logits [B, T, V] and the cache."""
    cache, pieces = self.start(batch), []
    for start in range(0, TARGET, stride):
      tokens = batch.fed[:, start : start + stride]
      logits, cache = self.decode(self.served, tokens, cache)
      pieces.append(logits)
    return np.concatenate(pieces, axis=1), cache


@dataclasses.dataclass(frozen=True)
class Batch:
  source: np.ndarray
  mask: np.ndarray
  target: np.ndarray

  @property
  def fed(self):
    """The decoder's inputs that predict `target`: the target shifted by one."""
    return np.pad(self.target[:, :-1], ((0, 0), (1, 0)))


@pytest.fixture(scope="module")
def untied():
  return Runner(CONFIG)


@pytest.fixture(scope="module")
def batch():
  source, mask = testing.random_sources(ROWS, SOURCE, CONFIG.vocab_size, seed=1)
  target = np.random.default_rng(2).integers(2, CONFIG.vocab_size, (ROWS, TARGET))
  return Batch(source, mask, target.astype(np.int32))


@pytest.fixture(scope="module")
def forced(untied, batch):
  """Teacher-forced logits [B, T, V]."""
  return np.asarray(untied.score(untied.params, batch.source, batch.mask, batch.target))


@pytest.mark.parametrize("stride", [1, 2, TARGET])
def test_decoding_equals_teacher_forcing(untied, batch, forced, stride):
  logits, cache = untied.feed(batch, stride)
  SAME(logits, forced)
  np.testing.assert_array_equal(cache.length, [TARGET] * ROWS)
  assert logits.dtype == forced.dtype == np.float32


def test_decoding_equals_teacher_forcing_with_a_tied_head_and_relu(batch):
  tied = Runner(TIED)
  forced = tied.score(tied.params, batch.source, batch.mask, batch.target)
  SAME(tied.feed(batch, 2)[0], forced)


def test_tied_head_equals_the_scaled_embedding(batch):
  tied = Runner(TIED)
  untied_config = dataclasses.replace(TIED, tied_head=False)
  head = tied.params["token_embedder"]["embedding"].T * TIED.width**-0.5
  params = {
    **tied.params,
    "decoder": {**tied.params["decoder"], "logits_dense": {"kernel": head}},
  }
  model = families.build(untied_config)
  args = batch.source, batch.mask, batch.target
  SAME(jax.jit(model.score)(params, *args), tied.score(tied.params, *args))


def test_rewound_rows_continue_at_their_own_offsets(untied, batch, forced):
  _, cache = untied.feed(batch, 1)
  length = np.array([1, 4, 3], np.int32)
  rows = np.arange(ROWS)[:, None]
  at = length[:, None] + np.arange(2)
  rewound = cache.replace(length=jnp.asarray(length))
  logits, after = untied.decode(untied.served, batch.fed[rows, at], rewound)
  SAME(logits, forced[rows, at])
  np.testing.assert_array_equal(after.length, length + 2)
  # Negative control: the same tokens one position later get other logits.
  late = cache.replace(length=jnp.asarray(length + 1))
  other, _ = untied.decode(untied.served, batch.fed[rows, at], late)
  assert np.all(np.max(np.abs(other - logits), axis=(1, 2)) > 1e-2)


def test_cache_entries_beyond_length_are_not_read(untied, batch, forced):
  _, cache = untied.feed(batch, 1)
  length = jnp.full((ROWS,), 2, jnp.int32)
  stale = jnp.arange(TARGET + ROOM)[None, None, :, None] >= 2
  overwrite = lambda entries: tuple(jnp.where(stale, 1e3, x) for x in entries)
  changed = cache.replace(
    self_keys=overwrite(cache.self_keys),
    self_values=overwrite(cache.self_values),
    length=length,
  )
  logits, _ = untied.decode(untied.served, batch.fed[:, 2:4], changed)
  SAME(logits, forced[:, 2:4])


def test_source_padding_does_not_change_logits(untied, batch, forced):
  wide = np.pad(batch.source, ((0, 0), (0, 5)))
  SAME(untied.score(untied.params, wide, wide != 0, batch.target), forced)
  masked = np.where(batch.mask, batch.source, 9)
  SAME(untied.score(untied.params, masked, batch.mask, batch.target), forced)
  # Negative control: padding that is not masked changes the logits.
  every = np.ones_like(batch.mask)
  read = untied.score(untied.params, batch.source, every, batch.target)
  assert np.max(np.abs(read - forced)) > 1e-2


def test_rows_are_independent(untied, batch, forced):
  order = np.array([2, 0, 1])
  swapped = untied.score(
    untied.params, batch.source[order], batch.mask[order], batch.target[order]
  )
  SAME(swapped, forced[order])


def test_logits_do_not_depend_on_later_tokens(untied, batch, forced):
  target = batch.target.copy()
  target[:, 3] = 3 + (target[:, 3] + 7) % 50
  changed = untied.score(untied.params, batch.source, batch.mask, target)
  SAME(changed[:, :4], forced[:, :4])
  assert np.all(np.max(np.abs(changed[:, 4] - forced[:, 4]), axis=-1) > 1e-3)


def test_decoding_needs_no_encoder_or_cross_attention_projections(
  untied, batch, forced
):
  """Decoding works without these parameters, because only prefill uses them."""
  served = {name: x for name, x in untied.served.items() if name != "encoder"}
  decoder = dict(served["decoder"])
  for index in range(CONFIG.num_decoder_layers):
    layer = dict(decoder[f"layers_{index}"])
    attention = layer["encoder_decoder_attention"]
    layer["encoder_decoder_attention"] = {
      name: attention[name] for name in ("query", "out")
    }
    decoder[f"layers_{index}"] = layer
  cache = untied.start(batch)
  logits, after = untied.decode({**served, "decoder": decoder}, batch.fed[:, :2], cache)
  SAME(logits, forced[:, :2])
  for field in ("cross_keys", "cross_values", "cross_mask"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(after, field), getattr(cache, field)
    )


def test_jitted_decoding_equals_eager_decoding(untied, batch):
  cache = untied.start(batch)
  jitted, jitted_cache = untied.decode(untied.served, batch.fed[:, :2], cache)
  plain, plain_cache = untied.model.decode(untied.served, batch.fed[:, :2], cache)
  SAME(plain, jitted)
  jax.tree.map(SAME, plain_cache, jitted_cache)


def test_bfloat16_is_close_to_float32(untied, batch, forced):
  half = Runner(dataclasses.replace(CONFIG, dtype="bfloat16"))
  logits, cache = half.feed(batch, 2)
  assert logits.dtype == np.float32
  assert {x.dtype for x in cache.self_keys + cache.cross_values} == {
    jnp.dtype("bfloat16")
  }
  assert {x.dtype for x in jax.tree.leaves(half.served)} == {jnp.dtype("bfloat16")}
  error = np.abs(logits - forced)
  assert 1e-4 < np.mean(error) < 0.03 * np.std(forced)


def _call(config, name):
  """Returns a function of a new model and the shapes of its arguments."""
  model = families.build(config)
  params = jax.eval_shape(model.init, jax.random.key(0))
  served = jax.eval_shape(model.prepare, params)
  tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
  mask = jax.ShapeDtypeStruct((2, 3), jnp.bool_)
  prefill = lambda *args: model.prefill(*args, 8)
  cache = jax.eval_shape(prefill, served, tokens, mask)
  return {
    "prefill": (prefill, served, tokens, mask),
    "decode": (model.decode, served, tokens, cache),
    "score": (model.score, params, tokens, mask, tokens),
  }[name]


def _dots(config, name):
  """Returns the lines of a lowered function that contain a dot product."""
  function, *args = _call(config, name)
  # On CPUs full precision is the default. This selects the default of GPUs and TPUs.
  with native.off(), jax.default_matmul_precision("default"):
    text = jax.jit(function).lower(*args).as_text()
  return [line for line in text.splitlines() if re.search(r"\bdot_general\b", line)]


@pytest.mark.parametrize("name", ["prefill", "decode", "score"])
def test_float32_products_use_full_precision(name):
  for config in (CONFIG, TIED):
    full = _dots(config, name)
    # Each dot product states the precision of both operands.
    assert len(full) > 8 and all(line.count("HIGHEST") == 2 for line in full)
  half = _dots(dataclasses.replace(CONFIG, dtype="bfloat16"), name)
  assert len(half) > 8 and not any("HIGHEST" in line for line in half)


def test_prepare_transposes_decoding_kernels_and_copies_nothing_else(untied):
  params = jax.tree.map(jnp.asarray, untied.params)
  transposed = []

  def check(path, served, param):
    names = [entry.key for entry in path]
    prefilled = "encoder_decoder_attention" in names and names[-2] in ("key", "value")
    if names[0] == "decoder" and names[-1] == "kernel" and not prefilled:
      transposed.append(names)
      np.testing.assert_array_equal(served, param.T)
    else:
      assert served is param, names

  served = untied.model.prepare(params)
  jax.tree_util.tree_map_with_path(check, served, params)
  # Per layer: 4 kernels of self-attention, query and output of cross-attention, and
  # the MLP. The head is one more.
  mlp = len(CONFIG.mlp_activations) + 1
  assert len(transposed) == CONFIG.num_decoder_layers * (4 + 2 + mlp) + 1


@pytest.mark.parametrize("name", ["prefill", "decode", "score"])
def test_layers_share_one_trace(name):
  """The number of traced functions does not grow with the number of layers."""
  traced = []
  for depth in (2, 5):
    config = dataclasses.replace(
      CONFIG, num_encoder_layers=depth, num_decoder_layers=depth
    )
    function, *args = _call(config, name)
    jaxpr = jax.make_jaxpr(function)(*args)
    inner = [e.params["jaxpr"] for e in jaxpr.eqns if e.params.get("name") == "_call"]
    assert len(inner) >= depth
    traced.append(len({id(found) for found in inner}))
  assert traced[0] == traced[1] <= 3


def test_logical_axes_match_parameter_ranks(untied):
  axes = untied.model.logical_axes()
  jax.tree.map(
    lambda param, names: np.testing.assert_equal(len(names), np.ndim(param)),
    untied.params,
    axes,
  )


def test_init_draws_unit_embeddings_that_depend_on_the_key():
  model = families.build(testing.TINY_DRAFT)
  params = jax.jit(model.init)(jax.random.key(0))
  again = jax.jit(model.init)(jax.random.key(1))
  expected = jax.eval_shape(model.init, jax.random.key(0))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
  embedding = lambda tree: tree["token_embedder"]["embedding"]
  assert np.std(embedding(params)) == pytest.approx(1.0, rel=0.1)
  assert not np.array_equal(embedding(params), embedding(again))


def test_equal_configs_give_the_same_model_object():
  twin = dataclasses.replace(CONFIG)
  assert families.build(CONFIG) is families.build(twin)
  assert families.build(CONFIG) is not families.build(TIED)


def test_config_with_a_list_of_activations_is_hashable():
  config = dataclasses.replace(CONFIG, mlp_activations=["gelu", "linear"])
  assert config == CONFIG and hash(config) == hash(CONFIG)


@pytest.mark.parametrize(
  "field,value,expected",
  [
    ("vocab_size", 0, "an integer >= 1"),
    ("width", 3.5, "int"),
    ("num_heads", True, "int"),
    ("num_decoder_layers", -1, "an integer >= 1"),
    ("mlp_activations", ("swish",), "at least one name; .*one of 'relu'"),
    ("mlp_activations", (), "at least one name"),
    ("tied_head", "no", "bool"),
    ("relative_buckets", 7, "an even number >= 4"),
    ("relative_max_distance", 4, "more than 4"),
    ("dtype", "float16", "one of 'float32', 'bfloat16'"),
    ("embedding_std", 0.0, "a number > 0"),
    ("embedding_std", float("nan"), "a number > 0"),
  ],
)
def test_invalid_field_error_names_field_and_expectation(field, value, expected):
  with pytest.raises(ValueError, match=rf"T5Config\.{field}: .*{expected}"):
    dataclasses.replace(CONFIG, **{field: value})
