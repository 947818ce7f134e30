"""Shapes of models refuse impossible fields by name, with what was expected."""

import dataclasses

import pytest

from osd_jax import base, testing
from osd_jax.models import shapes

FIELDS = [
  (testing.TINY_T5, "vocab_size", 0, "an integer >= 1"),
  (testing.TINY_T5, "width", 3.5, "int"),
  (testing.TINY_T5, "num_heads", True, "int"),
  (
    testing.TINY_T5,
    "mlp_activations",
    ("swish",),
    "at least one name; .*one of 'relu'",
  ),
  (testing.TINY_T5, "mlp_activations", (), "at least one name"),
  (testing.TINY_T5, "tied_head", "no", "bool"),
  (testing.TINY_T5, "relative_buckets", 7, "an even number >= 4"),
  (shapes.T5Config(), "relative_max_distance", 16, "more than 16"),
  (testing.TINY_T5, "dtype", "float16", "one of 'float32', 'bfloat16'"),
  (testing.TINY_T5, "embedding_std", float("nan"), "a number > 0"),
  (testing.TINY_LLAMA, "num_kv_heads", 3, ""),
  (testing.TINY_LLAMA, "head_dim", 7, ""),
  (testing.TINY_LLAMA, "eos_ids", (), ""),
  (testing.TINY_LLAMA, "eos_ids", (64,), ""),
  (testing.TINY_LLAMA, "state_layer", 3, ""),
  (testing.TINY_LLAMA, "rope_theta", 0.0, ""),
  (testing.TINY_LLAMA, "windows", (), ""),
  (shapes.RopeScaling(), "low_freq_factor", 4.0, ""),
  (shapes.AttachedConfig(), "num_layers", 0, ""),
  (shapes.AttachedConfig(), "mlp_activations", ("tanh",), ""),
  (shapes.DraftServing(), "int8", 1, ""),
  (shapes.DraftServing(), "shortlist", 1, ""),
  (shapes.DraftServing(), "shortlist", 2.5, ""),
]


@pytest.mark.parametrize(("shape", "field", "value", "expected"), FIELDS)
def test_error_names_field_and_expectation(shape, field, value, expected):
  name = type(shape).__name__
  named = (
    r"RopeScaling\.high_freq_factor" if name == "RopeScaling" else rf"{name}\.{field}"
  )
  with pytest.raises(base.InputError, match=rf"{named}: .*{expected}"):
    dataclasses.replace(shape, **{field: value})
