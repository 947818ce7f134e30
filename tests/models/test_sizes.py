"""Named shapes have the parameter counts that were published; nothing is allocated."""

import math

import jax
import pytest

from osd_jax.models import sizes, t5


def count(config):
  shapes = jax.eval_shape(t5.build(config).init, jax.random.key(0))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


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
    ("demo-target", 10.4e6, 3),
    ("demo-draft", 1.1e6, 2),
  ],
)
def test_parameter_counts_are_the_published_ones(name, published, digits):
  assert float(f"{count(sizes.SIZES[name]):.{digits - 1}e}") == published


def test_no_two_flan_sizes_are_alike():
  flan = [config for name, config in sizes.SIZES.items() if name.startswith("flan")]
  assert len(set(flan)) == len(flan) == 5


def test_the_shipped_pair_shares_its_vocabulary():
  target, draft = sizes.size("demo-target"), sizes.size("demo-draft")
  assert target.vocab_size == draft.vocab_size == 1536


def test_unknown_size_is_named_with_the_known_ones():
  with pytest.raises(ValueError, match="sizes: received name 't6'.*flan-t5-xl"):
    sizes.size("t6")
