"""T5: what its layers read and share, its precision, and errors in its config."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import cases
from models.cases import CLOSE, Runner

from osd_jax import native
from osd_jax.models import families

CONFIG, TIED = cases.T5S["t5 1.1"], cases.T5S["t5 1.0"]


@pytest.fixture(scope="module")
def untied():
  return Runner("t5 1.1")


def test_masked_source_tokens_are_not_read(untied):
  masked = np.where(untied.mask, untied.source, 9)
  found = untied.score(masked, untied.mask)
  np.testing.assert_allclose(found, untied.forced, **CLOSE)
  # Negative control: padding that is not masked changes the logits.
  read = untied.score(mask=np.ones_like(untied.mask))
  assert np.max(np.abs(read - untied.forced)) > 1e-2


def test_decoding_needs_no_encoder_or_cross_attention_projections(untied):
  """Decoding works without these parameters, because only prefill uses them."""
  served = {name: x for name, x in untied.served().items() if name != "encoder"}
  decoder = dict(served["decoder"])
  for index in range(CONFIG.num_decoder_layers):
    layer = dict(decoder[f"layers_{index}"])
    attention = layer["encoder_decoder_attention"]
    layer["encoder_decoder_attention"] = {
      name: attention[name] for name in ("query", "out")
    }
    decoder[f"layers_{index}"] = layer
  cache = untied.start()
  served["decoder"] = decoder
  logits, after = cases.decode(untied.model, served, untied.fed[:, :2], cache)
  np.testing.assert_allclose(logits, untied.forced[:, :2], **CLOSE)
  for field in ("cross_keys", "cross_values", "cross_mask"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(after, field), getattr(cache, field)
    )


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
  params = untied.params
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
