"""The shipped weights in the shape of a published T5: equal outputs at its cost.

The shipped pair is too small to show what learning costs and saves for a real one, and
this package has no trained pair of a real size. `PairConfig.target =
"padded:flan-t5-base"` therefore puts the shipped target into the shape of flan-t5-base
and fills up with zeros:

- New entries of a matrix are zero, also within a head. T5 does not scale attention by
  the size of a head, so zeros there change nothing.
- A norm divides by the root of a mean over the width, which now includes zeros. The
  kernels that write to the residual stream (embedding, `out`, `wo`) are multiplied by
  sqrt(new width / old width), so that the mean keeps its ratio to the norm's epsilon.
  The scale of a norm is divided by the same factor.
- Added layers have random input kernels, and zero `out` and `wo` kernels, so that they
  add nothing. They take as long as trained layers, since products do not skip zeros.

Vocabulary, activations and the untied head stay those of the weights. The output head
covers the 1,536 tokens of the shipped vocabulary and not the 32,128 of a published
model, and is cheaper by that factor. All parameters are in float32, as the published
ones are. When an independent draft learns, its added layers start to contribute, and
the new entries of old layers have no gradient. An optimizer whose steps do not scale
with the parameters changes the multiplied kernels less, in proportion, and the norms
more.
"""

import dataclasses
from pathlib import Path

import flax.traverse_util
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.models import attached, shapes, tensors, weights
from osd_jax.models.families import ModelConfig
from osd_tools import sizes

SIZES = (
  *("width", "num_heads", "head_dim", "mlp_dim"),
  *("num_encoder_layers", "num_decoder_layers"),
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


@dataclasses.dataclass(frozen=True)
class Reader:
  """Reads a weights file of a T5 in a larger shape; see `weights` for the functions."""

  size: str  # name of a published T5

  def load(self, path: Path, as_stored: bool = False) -> weights.Weights:
    """Reads weights and pads them, always in float32."""
    del as_stored  # the factors would be rounded in bfloat16
    small = weights.load(path)
    return padded_weights(small, padded_shape(small.config, self.size))

  def shape_of(self, path: Path) -> shapes.T5Config:
    """The larger shape; reads no tensors."""
    return padded_shape(weights.shape_of(path), self.size)

  def bfloat16_of(self, path: Path) -> frozenset[str]:
    """Always empty: all parameters are in float32."""
    del path
    return frozenset()


def padded_shape(config: object, name: str) -> shapes.T5Config:
  """`config` with the sizes of a published T5.

  Raises:
    InputError: there is no such T5, or one of its sizes is smaller.
  """
  choices = [key for key, x in sizes.SIZES.items() if isinstance(x, shapes.T5Config)]
  if name not in choices:
    raise base.InputError(
      f"padded: received the size {name!r}, expected one of {choices}."
    )
  assert isinstance(config, shapes.T5Config)  # as all shipped weights
  published = {field: getattr(sizes.SIZES[name], field) for field in SIZES}
  if config.tied_head:
    raise base.InputError(
      "padded: tied_head: received weights whose output head is their embedding, scaled"
      " by the width, expected an untied head; choose other weights."
    )
  for field, new in published.items():
    if new < (old := getattr(config, field)):
      raise base.InputError(
        f"padded: {field}: {name} has {new}, expected at least the {old} of the"
        " weights; choose a larger size."
      )
  return dataclasses.replace(config, **published)


def padded_weights(small: weights.Weights, shape: shapes.T5Config) -> weights.Weights:
  """The weights in a larger shape, with the same logits."""
  old = flax.traverse_util.flatten_dict(small.params, sep="/")
  random = np.random.default_rng(0)
  new = {}
  for name, size in weights.expected_shapes(shape).items():
    if name in old:
      leaf = _padded(name, np.asarray(old[name]), small.config, shape).reshape(size)
    else:
      leaf = _added(name, size, random)
    new[name] = jnp.asarray(leaf)
  params = flax.traverse_util.unflatten_dict(new, sep="/")
  notes = f"{small.notes}; padded with zeros to a larger shape".removeprefix("; ")
  return weights.Weights(shape, params, small.vocabulary, notes)


def attached_draft(
  path: Path, small: weights.Weights, target: weights.Identity
) -> weights.AttachedWeights:
  """Reads a draft that is attached to `small`, and attaches it to its padded target.

  It takes states and embeddings that are larger by a factor, so its input kernels are
  divided by that.
  """
  draft = attached.load(path, weights.identity(small, "the shipped target"))
  growth = _growth(small.config, target.config)
  more = target.config.width - small.config.width
  flat = tensors.flat(draft.params)
  for name, leaf in flat.items():
    if name.endswith(READERS):
      flat[name] = jnp.pad(leaf / growth, ((0, more), (0, 0)))
    elif name == "outward/kernel":
      flat[name] = jnp.pad(leaf, ((0, 0), (0, more)))
  return dataclasses.replace(
    draft,
    params=flax.traverse_util.unflatten_dict(flat, sep="/"),
    target=target.fingerprint,
    target_name=target.name,
    target_sizes=target.sizes,
  )


def _padded(
  name: str, leaf: np.ndarray, config: ModelConfig, shape: ModelConfig
) -> np.ndarray:
  """A tensor padded with zeros; heads of attention kernels are separate axes."""
  growth = _growth(config, shape)
  if name.endswith("/scale"):
    leaf = leaf / growth
  if name.endswith(WRITERS):
    leaf = leaf * growth
  leaf = leaf.reshape(_axes(name, leaf.shape, config))
  counts = _axes(name, leaf.shape, shape)
  return np.pad(leaf, [(0, new - old) for old, new in zip(leaf.shape, counts)])


def _axes(name: str, like: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
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


def _added(name: str, size: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
  """A tensor of an added layer, which adds nothing to the residual stream."""
  if name.endswith("/scale"):
    return np.ones(size, np.float32)
  if name.endswith(WRITERS):
    return np.zeros(size, np.float32)
  return np.float32(READING_STD) * random.standard_normal(size, np.float32)


def _growth(config: ModelConfig, shape: ModelConfig) -> np.float32:
  """Factor on the parameters that write to the residual stream."""
  return np.float32(np.sqrt(shape.width / config.width))
