"""Embeds weights in a larger shape: equal outputs at the cost of the larger model.

The shipped pair is too small to show what learning costs and saves for a real one, and
this package has no trained pair of a real size. This script therefore embeds the
shipped weights in the shape of a published model and fills up with zeros:

- New entries of a matrix are zero, also within a head. T5 does not scale attention by
  the size of a head, so zeros there change nothing.
- A norm divides by the root of a mean over the width, which now includes zeros. The
  kernels that write to the residual stream (embedding, `out`, `wo`) are multiplied by
  sqrt(new width / old width), so that the mean keeps its ratio to the norm's epsilon.
  The scale of a norm is divided by the same factor.
- Added layers have random input kernels, and zero `out` and `wo` kernels, so that they
  add nothing.

Vocabulary, activations and the untied head stay those of the weights. The output head
covers the tokens of the weights (1,536 for the shipped ones) and not the 32,128 of a
published model, and is cheaper by that factor. When a draft learns, its added layers
start to contribute, and the new entries of old layers have no gradient. An optimizer
whose steps do not scale with the parameters changes the multiplied kernels less, in
proportion, and the norms more.

`--attached` also adapts a draft that is attached to the smaller target. It takes states
and embeddings that are larger by `growth`, so its input kernels are divided by that.

  python experiments/real_cost/embed.py flan-t5-base \\
      --attached shipped:demo_attached_draft.safetensors
  python experiments/real_cost/embed.py t5-small \\
      --weights shipped:demo_draft.safetensors

Writes files such as runs/real_cost/demo_target_as_flan-t5-base.safetensors (for an
attached draft: ..._on_flan-t5-base) for PairConfig, and for `--target`, `--draft` and
`--attached` of benchmarks/bench_whole_run.py. Prints the largest difference of logits
and the largest logit. If the difference exceeds float32 rounding, the exit code is 1
and no file is written.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import flax.traverse_util
import jax.numpy as jnp
import numpy as np

from osd_jax import assets, base, testing
from osd_jax.models import attached, shapes, tensors, weights
from osd_tools import sizes

SIZES = (
  "width",
  "num_heads",
  "head_dim",
  "mlp_dim",
  "num_encoder_layers",
  "num_decoder_layers",
)
# Parameters that write to the residual stream.
WRITERS = ("/out/kernel", "/wo/kernel", "/embedding")
# Parameters of an attached draft that take the target's states and embeddings.
READERS = (
  "inward/kernel",
  "encoder_decoder_attention/key/kernel",
  "encoder_decoder_attention/value/kernel",
)
READING_STD = 0.02  # of the input kernels of added layers
TOLERANCE = 5e-4 / 15  # difference of logits over the largest logit
ROWS, LENGTH = 4, 20  # number of compared prompts, and length of prompts and outputs


def grown(config: shapes.T5Config, name: str) -> shapes.T5Config:
  """`config` with the sizes of a published model.

  Raises:
    InputError: there is no such model, or one of its sizes is smaller.
  """
  published = sizes.size(name)
  shape = dataclasses.replace(config, **{f: getattr(published, f) for f in SIZES})
  check(config, shape, name)
  return shape


def check(config: shapes.T5Config, shape: shapes.T5Config, name: str) -> None:
  """Raises InputError if weights of one shape do not fit into another."""
  if config.tied_head:
    raise base.InputError(
      "embed: tied_head: received weights whose output head is their embedding, scaled"
      " by the width, expected an untied head; choose other weights."
    )
  for field in SIZES:
    old, new = getattr(config, field), getattr(shape, field)
    if new < old:
      raise base.InputError(
        f"embed: {field}: {name} has {new}, expected at least the {old} of the weights;"
        " choose a larger shape."
      )


def embedded(held: weights.Weights, shape: shapes.T5Config) -> weights.Weights:
  """The weights in a larger shape, with the same logits."""
  old = flax.traverse_util.flatten_dict(held.params, sep="/")
  random = np.random.default_rng(0)
  new = {}
  for name, size in weights.expected_shapes(shape).items():
    if name in old:
      leaf = padded(name, np.asarray(old[name]), held.config, shape).reshape(size)
    else:
      leaf = added(name, size, random)
    new[name] = jnp.asarray(leaf)
  params = flax.traverse_util.unflatten_dict(new, sep="/")
  notes = f"{held.notes}; in a larger shape, zeros around it".removeprefix("; ")
  return weights.Weights(shape, params, held.vocabulary, notes)


def padded(
  name: str, leaf: np.ndarray, config: shapes.T5Config, shape: shapes.T5Config
) -> np.ndarray:
  """A tensor padded with zeros; heads of attention kernels are separate axes."""
  growth = growth_of(config, shape)
  if name.endswith("/scale"):
    leaf = leaf / growth
  if name.endswith(WRITERS):
    leaf = leaf * growth
  leaf = leaf.reshape(axes(name, leaf.shape, config))
  counts = axes(name, leaf.shape, shape)
  return np.pad(leaf, [(0, new - old) for old, new in zip(leaf.shape, counts)])


def axes(name: str, like: tuple[int, ...], config: shapes.T5Config) -> tuple[int, ...]:
  """The shape of a tensor, with the heads of attention kernels on separate axes.

  Args:
    name: name of the tensor.
    like: its shape, for axes that have the same size in every model.
    config: shape of the model.
  """
  width, hidden = config.width, config.mlp_dim
  heads = (config.num_heads, config.head_dim)
  *_, module, leaf = name.split("/")
  kernels = {
    **dict.fromkeys(("query", "key", "value"), (width, *heads)),
    **dict.fromkeys(("wi", "wi_0", "wi_1"), (width, hidden)),
    "out": (*heads, width),
    "wo": (hidden, width),
    "logits_dense": (width, like[-1]),
  }
  others = {
    "scale": (width,),
    "embedding": (like[0], width),
    "rel_embedding": (config.num_heads, like[-1]),
  }
  return kernels[module] if leaf == "kernel" else others[leaf]


def added(name: str, sized: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
  """A tensor of an added layer, which adds nothing to the residual stream."""
  if name.endswith("/scale"):
    return np.ones(sized, np.float32)
  if name.endswith(WRITERS):
    return np.zeros(sized, np.float32)
  return random.normal(scale=READING_STD, size=sized).astype(np.float32)


def growth_of(config: shapes.T5Config, shape: shapes.T5Config) -> np.float32:
  """Factor on the parameters that write to the residual stream."""
  return np.float32(np.sqrt(shape.width / config.width))


def reattached(
  draft: weights.AttachedWeights, held: weights.Weights, made: weights.Weights
) -> weights.AttachedWeights:
  """Attaches a draft to the embedded version of its target."""
  growth = growth_of(held.config, made.config)
  more = made.config.width - held.config.width
  flat = tensors.flat(draft.params)
  for name, leaf in flat.items():
    if name.endswith(READERS):
      flat[name] = jnp.pad(leaf / growth, ((0, more), (0, 0)))
    elif name == "outward/kernel":
      flat[name] = jnp.pad(leaf, ((0, 0), (0, more)))
  return dataclasses.replace(
    draft,
    params=flax.traverse_util.unflatten_dict(flat, sep="/"),
    target=weights.identity(made, "").fingerprint,
    target_name=made.notes,
  )


def logits_of(
  target: weights.Weights, draft: weights.AttachedWeights | None = None
) -> np.ndarray:
  """Logits [B, T, V] of a target, or of a draft attached to it."""
  size = target.config.vocab_size
  source, mask = testing.random_sources(ROWS, LENGTH, size, seed=0)
  output, _ = testing.random_sources(ROWS, LENGTH, size, seed=1)
  model, params = target.model, target.params
  if draft is not None:
    model = attached.build(draft.config, target.config)
    params = model.join(draft.params, attached.frozen_of(target.config, params))
  return np.asarray(model.score(params, source, mask, output))


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
  """The largest difference of logits, and the largest logit of the first."""
  return float(np.abs(one - other).max()), float(np.abs(one).max())


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether logits are equal up to rounding; prints the difference."""
  largest, logit = difference(one, other)
  most = TOLERANCE * logit
  print(
    f"largest difference of logits: {largest:.2g}, largest logit: {logit:.3g}"
    f" (allowed difference: {most:.2g})"
  )
  return largest <= most  # False for NaN


def main(arguments: Sequence[str] | None = None) -> int:
  """Embeds a file of weights; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("size", help=f"one of {', '.join(sizes.SIZES)}")
  parser.add_argument("--weights", default="shipped:demo_target.safetensors")
  parser.add_argument("--attached", help="a draft that is attached to these weights")
  parser.add_argument("--out", type=pathlib.Path, default="runs/real_cost")
  args = parser.parse_args(arguments)
  path = assets.resolve(args.weights, "--weights")
  small = weights.load(path)
  big = embedded(small, grown(small.config, args.size))
  if not is_same(logits_of(small), logits_of(big)):
    return 1
  print(weights.save(args.out / f"{path.stem}_as_{args.size}.safetensors", big))
  if args.attached:
    place = assets.resolve(args.attached, "--attached")
    draft = attached.load(place, weights.identity(small, path.name))
    again = reattached(draft, small, big)
    if not is_same(logits_of(small, draft), logits_of(big, again)):
      return 1
    print(weights.save(args.out / f"{place.stem}_on_{args.size}.safetensors", again))
  return 0


if __name__ == "__main__":
  try:
    sys.exit(main())
  except base.InputError as error:
    sys.exit(str(error))
