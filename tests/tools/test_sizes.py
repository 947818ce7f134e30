"""Named model sizes have the published parameter counts (no memory is allocated)."""

import dataclasses
import math
import re

import jax
import pytest

from osd_jax.models import families
from osd_tools import sizes


def count(config):
  """Extrapolates from one and two layers, because all layers have the same shapes."""

  def parameters(**layers):
    model = families.build(dataclasses.replace(config, **layers), "model")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))

  stacks = [field for field in vars(config) if re.fullmatch("num.*_layers", field)]
  ones = dict.fromkeys(stacks, 1)
  one = parameters(**ones)
  return one + sum(
    (getattr(config, stack) - 1) * (parameters(**ones | {stack: 2}) - one)
    for stack in stacks
  )


# `digits` is the number of significant digits of the published count.
@pytest.mark.parametrize(
  "name,published,digits",
  [
    ("t5-small", 60.5e6, 3),
    ("t5-efficient-small", 60.5e6, 3),
    ("flan-t5-small", 77e6, 2),
    ("flan-t5-base", 250e6, 2),
    ("flan-t5-large", 780e6, 2),
    ("flan-t5-xl", 3e9, 1),
    ("flan-t5-xxl", 11e9, 2),
    ("llama-68m", 68e6, 2),
    ("llama-160m", 162e6, 3),
    ("tinyllama-1.1b", 1.1e9, 2),
    ("llama-2-7b", 6.74e9, 3),
    ("llama-2-13b", 13e9, 3),
    ("vicuna-7b", 6.74e9, 3),
    ("vicuna-13b", 13e9, 3),
    ("llama-3.2-1b", 1.24e9, 3),
    ("llama-3.1-8b", 8.03e9, 3),
    ("qwen3-0.6b", 0.6e9, 1),
    ("qwen3-1.7b", 1.7e9, 2),
    ("qwen3-8b", 8.2e9, 2),
    ("gemma-2-2b", 2.6e9, 2),
    ("t5gemma-s-s", 312517632, 9),
    ("t5gemma-b-b", 591490560, 9),
    ("t5gemma-2b-2b", 5.6e9, 2),
    ("gemma-3-270m", 268e6, 3),
    ("gemma-3-1b", 1.0e9, 2),
    ("gemma-3-4b", 3.9e9, 2),
    ("demo-target", 10.4e6, 3),
    ("demo-draft", 1.1e6, 2),
  ],
)
def test_parameter_counts_equal_the_published_counts(name, published, digits):
  assert float(f"{count(sizes.SIZES[name]):.{digits - 1}e}") == published


def test_sizes_of_a_family_differ_and_the_shipped_pair_shares_a_vocabulary():
  flan = [config for name, config in sizes.SIZES.items() if name.startswith("flan")]
  assert len(set(flan)) == len(flan) == 5
  target, draft = sizes.size("demo-target"), sizes.size("demo-draft")
  assert target.vocab_size == draft.vocab_size == 1536


def test_error_for_unknown_size_lists_known_sizes():
  with pytest.raises(ValueError, match="sizes: received name 't6'.*flan-t5-xl"):
    sizes.size("t6")
