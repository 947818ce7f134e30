"""Parameter tree, logical axes and logits equal those of t5x.

`t5x_oracle.npz` contains a tiny T5 1.1 that t5x initialized, a batch and t5x's logits.
`t5x_param_axes.json` contains the shape and logical axes of every parameter.
"""

import json
import pathlib

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax.models import families, shapes

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
CONFIG = shapes.T5Config(
  vocab_size=64,
  width=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  num_encoder_layers=2,
  num_decoder_layers=2,
  mlp_activations=("gelu", "linear"),
  tied_head=False,
)


@pytest.fixture(scope="module")
def oracle():
  with np.load(FIXTURES / "t5x_oracle.npz") as file:
    return dict(file)


@pytest.fixture(scope="module")
def params(oracle):
  flat = {k.removeprefix("p/"): x for k, x in oracle.items() if k.startswith("p/")}
  return flax.traverse_util.unflatten_dict(flat, sep="/")


def test_tree_and_shapes_equal_t5x(params):
  ours = jax.eval_shape(families.build(CONFIG).init, jax.random.key(0))
  assert jax.tree.map(np.shape, ours) == jax.tree.map(np.shape, params)


def test_logical_axes_equal_t5x():
  axes = flax.traverse_util.flatten_dict(families.build(CONFIG).logical_axes(), sep="/")
  expected = json.loads((FIXTURES / "t5x_param_axes.json").read_text())
  assert {name: list(spec) for name, spec in axes.items()} == {
    name: names for name, (_, names) in expected.items()
  }


def run(oracle, params):
  """Returns our logits for t5x's decoder inputs."""
  model = families.build(CONFIG)
  source = jnp.asarray(oracle["in/encoder_input_tokens"])
  tokens = jnp.asarray(oracle["in/decoder_input_tokens"])
  served = model.prepare(jax.tree.map(jnp.asarray, params))
  cache = jax.jit(model.prefill, static_argnums=3)(
    served, source, source != 0, tokens.shape[1]
  )
  return np.asarray(jax.jit(model.decode)(served, tokens, cache)[0])


def test_logits_equal_t5x(oracle, params):
  assert np.any(oracle["in/encoder_input_tokens"] == 0)  # includes padding
  judged = oracle["in/decoder_target_tokens"] != 0
  assert judged.sum() > judged.size / 2
  logits = run(oracle, params)
  np.testing.assert_allclose(logits[judged], oracle["logits"][judged], atol=1e-5)


def test_shifted_relative_bias_changes_the_logits(oracle, params):
  """Negative control: a shift of the bias is detected, though its values are small."""
  table = np.roll(params["decoder"]["relpos_bias"]["rel_embedding"], 1, axis=1)
  moved = {
    **params,
    "decoder": {**params["decoder"], "relpos_bias": {"rel_embedding": table}},
  }
  judged = oracle["in/decoder_target_tokens"] != 0
  error = np.abs(run(oracle, moved) - oracle["logits"])[judged]
  assert np.max(error) > 1e-4
