"""Draft serving with int8 kernels, a shortlist, or both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.cases import Runner

from osd_jax import testing
from osd_jax.models import families, layers, served, shapes


@pytest.mark.parametrize("columns", [1, 2, 3, 8])
def test_int8_product_has_a_relative_error_below_1_5_percent(columns):
  rng = np.random.default_rng(columns)
  kernel = rng.normal(size=(48, 64)).astype(np.float32)
  x = rng.normal(size=(columns, 64)).astype(np.float32)
  stored = layers.quantized(jnp.asarray(kernel.T))
  assert stored["kernel"].dtype == jnp.int8
  got = np.asarray(layers.int8_matmul(x, stored["kernel"], stored["scale"]))
  want = x @ kernel.T
  assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.015


def test_int8_columns_have_separate_scales():
  """A large column does not reduce the precision of the others; zeros remain zeros."""
  rng = np.random.default_rng(0)
  stored = layers.quantized(jnp.asarray(rng.normal(size=(16, 8)), jnp.float32))
  small = rng.normal(size=(1, 16)).astype(np.float32)
  mixed = np.concatenate([small, 1e6 * small, 0 * small])
  alone = layers.int8_matmul(small, stored["kernel"], stored["scale"])
  got = layers.int8_matmul(mixed, stored["kernel"], stored["scale"])
  np.testing.assert_array_equal(got[0], alone[0])
  np.testing.assert_array_equal(got[2], np.zeros(8))


def test_quantized_zeros_are_zeros_with_finite_scales():
  stored = layers.quantized(jnp.zeros((4, 6)))
  assert np.all(np.isfinite(stored["scale"])) and not np.any(stored["kernel"])


@pytest.mark.parametrize("count", [1, 3])
def test_scatter_to_vocab_fills_other_tokens_with_minus_infinity(forms, count):
  ids = np.array([0, 1, 5, 8])
  short = np.random.default_rng(0).normal(size=(2, count, 4)).astype(np.float32)
  expected = np.full((2, count, 9), -np.inf, np.float32)
  expected[..., ids] = short
  found = served.scatter_to_vocab(jnp.asarray(short), jnp.asarray(ids), 9)
  np.testing.assert_array_equal(found, expected)


def test_default_shortlist_includes_end_of_sequence():
  """Llama 3's end-of-sequence ids are above 128,000, outside the first tokens."""
  assert served.first_tokens(4, (1,)).tolist() == [0, 1, 2, 3]
  assert served.first_tokens(4, (2, 9, 7)).tolist() == [0, 1, 9, 7]
  shape = dataclasses.replace(testing.TINY_LLAMA, eos_ids=(2, 19))
  model = families.build(shape, "draft", shapes.DraftServing(shortlist=4))
  params = model.prepare(model.init(jax.random.key(0)))
  assert params["draft_head"]["ids"].tolist() == [0, 1, 2, 19]


def test_new_shortlist_does_not_recompile_prepare():
  short = Runner("t5 1.1", shapes.DraftServing(shortlist=3))
  prepare = jax.jit(short.model.prepare)
  for chosen in ([1, 2, 3], [1, 5, 9]):
    prepare(short.params, jnp.asarray(chosen))
  assert prepare._cache_size() == 1


def test_shortlist_of_the_whole_vocabulary_is_ignored():
  whole = Runner("t5 1.1", shapes.DraftServing(shortlist=64))
  assert whole.model.shortlist == 0
  assert "draft_head" not in whole.served()
