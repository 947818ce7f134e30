"""A learner to save in checkpoint tests, and a bitwise comparison."""

from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from osd_jax import runs


@flax.struct.dataclass
class Learner:
  params: dict
  opt_state: optax.OptState
  version: jax.Array


def learner(seed: int = 0) -> Learner:
  params = {
    "encoder": {
      "layers_0": {"kernel": jax.random.normal(jax.random.key(seed), (5, 7))}
    },
    "rel": jnp.full((3,), 2.5, jnp.bfloat16),
  }
  state = optax.adamw(1e-3).init(params)
  return Learner(params, state, jnp.int32(seed))


def opened(path: Path, **kwargs) -> runs.Checkpointer:
  return runs.Checkpointer(path, **kwargs)


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def same_bits(left, right) -> bool:
  same = jax.tree.map(
    lambda a, b: (
      a.dtype == b.dtype
      and a.shape == b.shape
      and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    ),
    left,
    right,
  )
  return all(jax.tree.leaves(same))
