"""Errors of invalid decoding configs name the field. test_base.py tests the types."""

import dataclasses

import pytest

from osd_jax import base
from osd_jax.costs.table import Costs, RoundCosts
from osd_jax.engine.requests import AdaptiveConfig, DecodingConfig, SamplingConfig

COSTS = RoundCosts((4.0, 7.0, 11.0), num_draft_tokens=(0, 3, 7))
TWO_KS = RoundCosts((1.0, 2.0))
TOO_MANY_COSTS = AdaptiveConfig(candidates=(0, 1), costs=(TWO_KS,) * 3)
VALID = {
  SamplingConfig(): {
    "temperature": [-0.1, float("nan"), 1e-50],  # 1e-50 would be greedy in float32
    "top_p": [0.0, 1.5, 1e-50],  # 1e-50 would leave no mass in float32
    "seed": [-1, 2**32, 1.5],
  },
  DecodingConfig(rows=8): {
    "num_draft_tokens": [0, 17],
    "acceptance_rule": ["greedy"],
    "source_lengths": [(), (1, 8), (8, 4)],
    "adaptive": [AdaptiveConfig(candidates=(0, 11)), TOO_MANY_COSTS],
    "prefill_rows": [3],
    "cache_tokens": [1000],
  },
  AdaptiveConfig(): {
    "candidates": [(), (0,), (1, 3), (0, 3, 1), (0, 3, 3), (0, 17)],
    "costs": [(TWO_KS,)],
  },
  COSTS: {
    "round_ms": [
      *((), (0.0, 1.0, 2.0), ("a", 1.0, 2.0)),
      *(((1.0, 2.0, 3.0), (1.0,)), ((1.0, 2.0, 3.0),) * 3),
    ],
    "num_draft_tokens": [(0, 3)],
  },
  Costs(COSTS): {"lost_ms": [-1.0], "online": [RoundCosts((1.0,))]},
}


@pytest.mark.parametrize(
  ("config", "field", "value"),
  [
    (config, field, value)
    for config, fields in VALID.items()
    for field, values in fields.items()
    for value in values
  ],
)
def test_error_of_an_invalid_config_names_the_field(config, field, value):
  with pytest.raises(base.InputError, match=rf"{type(config).__name__}\.{field}: rec"):
    dataclasses.replace(config, **{field: value})
