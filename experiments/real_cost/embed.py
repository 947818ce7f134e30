"""Weights in a larger shape: outputs stay, a step costs what the larger model costs.

The shipped pair is so small that what learning costs and saves says little of a real
one; no trained pair of a real size comes with this package. So the shipped weights are
laid into the shape of a published model, zeros around them:

- A matrix that grows is zero where it is new, within every head too: T5 does not scale
  attention by the size of a head, so that zeros there change nothing.
- A norm divides by the root of a mean over the width, in which new zeros count. What
  is written (embedding, `out`, `wo`) is multiplied by sqrt(new width / old width), so
  that the mean beside the norm's epsilon stays, and a norm's scale by the inverse.
- Added layers read at random and write nothing: their `out` and `wo` kernels are zero.

What is no size stays the weights' own: vocabulary, activations, an untied head. The
output head therefore covers the tokens of the weights (1,536 for the shipped ones),
not the 32,128 of a published model, and costs that much less. In a draft that learns
added layers begin to write, and what is new in old layers has no gradient; an optimizer
whose steps do not grow with the parameters moves what was multiplied by less, and norms
by more.

A draft that is attached to the smaller target is attached to the larger one with
`--attached`: it reads `growth` times what it read, and its kernels are divided by that.

  python experiments/real_cost/embed.py flan-t5-base \\
      --attached shipped:demo_attached_draft.safetensors
  python experiments/real_cost/embed.py t5-small \\
      --weights shipped:demo_draft.safetensors

Writes runs/real_cost/demo_target_as_flan-t5-base.safetensors and likewise (an attached
draft: ..._on_flan-t5-base), which PairConfig takes, and `--target`, `--draft` and
`--attached` of benchmarks/bench_whole_run.py. Prints the largest difference of logits
beside the largest logit; where float32 does not explain it, the code is 1 and the file
is not written.
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
from osd_jax.models import attached, t5, tensors, weights
from osd_tools import sizes

SIZES = (
  "width",
  "num_heads",
  "head_dim",
  "mlp_dim",
  "num_encoder_layers",
  "num_decoder_layers",
)
# What adds to the residual stream.
WRITERS = ("/out/kernel", "/wo/kernel", "/embedding")
# What of an attached draft reads the target's vectors.
READERS = (
  "inward/kernel",
  "encoder_decoder_attention/key/kernel",
  "encoder_decoder_attention/value/kernel",
)
READING_STD = 0.02  # of what added layers read with
TOLERANCE = 5e-4 / 15  # difference of logits over the largest logit
ROWS, LENGTH = 4, 20  # prompts, and tokens of prompts and outputs, that are compared


def grown(config: t5.T5Config, name: str) -> t5.T5Config:
  """The sizes of a published model; all else as in `config`.

  Raises:
    InputError: no such model, or it is smaller somewhere.
  """
  published = sizes.size(name)
  shape = dataclasses.replace(config, **{f: getattr(published, f) for f in SIZES})
  check(config, shape, name)
  return shape


def check(config: t5.T5Config, shape: t5.T5Config, name: str) -> None:
  """Raises InputError where weights of one shape do not fit into another."""
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


def embedded(held: weights.Weights, shape: t5.T5Config) -> weights.Weights:
  """The weights in a larger shape, with the same logits."""
  old = flax.traverse_util.flatten_dict(held.params, sep="/")
  random = np.random.default_rng(0)
  new = {}
  for name, sized in tensors.expected_shapes(shape).items():
    if name in old:
      leaf = padded(name, np.asarray(old[name]), held.config, shape).reshape(sized)
    else:
      leaf = added(name, sized, random)
    new[name] = jnp.asarray(leaf)
  params = flax.traverse_util.unflatten_dict(new, sep="/")
  notes = f"{held.notes}; in a larger shape, zeros around it".removeprefix("; ")
  return weights.Weights(shape, params, held.vocabulary, notes)


def padded(
  name: str, leaf: np.ndarray, config: t5.T5Config, shape: t5.T5Config
) -> np.ndarray:
  """A tensor with zeros around it; an attention's kernel with its heads apart."""
  growth = growth_of(config, shape)
  if name.endswith("/scale"):
    leaf = leaf / growth
  if name.endswith(WRITERS):
    leaf = leaf * growth
  leaf = leaf.reshape(axes(name, leaf.shape, config))
  wanted = axes(name, leaf.shape, shape)
  return np.pad(leaf, [(0, new - old) for old, new in zip(leaf.shape, wanted)])


def axes(name: str, like: tuple[int, ...], config: t5.T5Config) -> tuple[int, ...]:
  """The axes of a tensor of a model, heads apart from what is within one.

  Args:
    name: of the tensor.
    like: its shape, for axes that are the same in every model.
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
  """A tensor of an added layer, which reads and writes nothing."""
  if name.endswith("/scale"):
    return np.ones(sized, np.float32)
  if name.endswith(WRITERS):
    return np.zeros(sized, np.float32)
  return random.normal(scale=READING_STD, size=sized).astype(np.float32)


def growth_of(config: t5.T5Config, shape: t5.T5Config) -> np.float32:
  """What is written is multiplied by this."""
  return np.float32(np.sqrt(shape.width / config.width))


def reattached(
  draft: weights.AttachedWeights, held: weights.Weights, made: weights.Weights
) -> weights.AttachedWeights:
  """A draft that is attached to a target, attached to the same one made larger."""
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
  """Logits [B, T, V] of a target, or of a draft that is attached to it."""
  size = target.config.vocab_size
  source, mask = testing.random_sources(ROWS, LENGTH, size, seed=0)
  output, _ = testing.random_sources(ROWS, LENGTH, size, seed=1)
  model, params = target.model, target.params
  if draft is not None:
    model = attached.build(draft.config, target.config)
    params = model.join(draft.params, attached.frozen_of(target.config, params))
  return np.asarray(model.score(params, source, mask, output))


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
  """The largest difference of logits, and the largest of the first."""
  return float(np.abs(one - other).max()), float(np.abs(one).max())


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether logits are the same but for rounding; says so."""
  largest, logit = difference(one, other)
  bound = TOLERANCE * logit
  print(
    f"largest difference of logits: {largest:.2g}, largest logit: {logit:.3g} (asked:"
    f" at most {bound:.2g})"
  )
  return largest <= bound  # not if NaN


def main(arguments: Sequence[str] | None = None) -> int:
  """Embeds a file of weights; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("size", help=f"one of {', '.join(sizes.SIZES)}")
  parser.add_argument("--weights", default="shipped:demo_target.safetensors")
  parser.add_argument("--attached", help="a draft that is attached to these weights")
  parser.add_argument("--out", type=pathlib.Path, default="runs/real_cost")
  given = parser.parse_args(arguments)
  path = assets.resolve(given.weights, "--weights")
  held = weights.load(path)
  made = embedded(held, grown(held.config, given.size))
  if not is_same(logits_of(held), logits_of(made)):
    return 1
  print(weights.save(given.out / f"{path.stem}_as_{given.size}.safetensors", made))
  if given.attached:
    place = assets.resolve(given.attached, "--attached")
    draft = weights.load_attached(place, weights.identity(held, path.name))
    again = reattached(draft, held, made)
    if not is_same(logits_of(held, draft), logits_of(made, again)):
      return 1
    print(weights.save(given.out / f"{place.stem}_on_{given.size}.safetensors", again))
  return 0


if __name__ == "__main__":
  try:
    sys.exit(main())
  except base.InputError as error:
    sys.exit(str(error))
