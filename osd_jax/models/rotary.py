"""Rotary positions: queries and keys are turned by angles that grow with the position.

Source: Su et al., 2021 (arXiv 2104.09864), in the layout of transformers' Llama: the
first half of a head's entries is turned against the second. Scaling: Llama 3.1.
"""

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax.models.shapes import LlamaConfig, RopeScaling

Rotation = tuple[jax.Array, jax.Array]  # cosines and sines, [B, n, D / 2]


def rotation(config: LlamaConfig, positions: jax.Array) -> Rotation:
  """The rotation of positions [B, n] int32, float32."""
  angles = positions[..., None].astype(jnp.float32) * frequencies(config)[None, None]
  return jnp.cos(angles), jnp.sin(angles)


def rotated(x: jax.Array, by: Rotation) -> jax.Array:
  """Turns the heads of x [B, H, n, D]; computed in float32 at least."""
  cosines, sines = (part[:, None] for part in by)
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  first, second = jnp.split(wide, 2, axis=-1)
  turned = (first * cosines - second * sines, second * cosines + first * sines)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies(config: LlamaConfig) -> np.ndarray:
  """Radians a position turns each pair of entries by, [D / 2] float32."""
  exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
  plain = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
  if config.rope_scaling is None:
    return plain
  return _stretched(plain, config.rope_scaling).astype(np.float32)


def _stretched(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  """Long waves longer by `factor`, short ones as they are, smoothly between."""
  turns = scaling.original_positions * plain / (2 * np.pi)  # in the original context
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  share = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return share * plain + (1 - share) * plain / scaling.factor
