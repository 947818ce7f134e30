"""EAGLE's form of an attached draft, which continues from the target's states."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from osd_jax.models import layers

FAR = 128  # all distances of at least this share a bias


class States(nn.Module):
  """One layer that maps a token and the state before it to the next state.

      token        z_i      z_i+1       z_i+2
      state before s_i-1    e_i         e_i+1     s: the target's, e: its own
      output       e_i      e_i+1       e_i+2     the head maps these to tokens

  A draft that starts at i has the target's states of all earlier tokens. From its
  second step on it has only its own states. All steps are computed for every position
  at once, as in the training of EAGLE-3. Sources: arXiv 2401.15077, arXiv 2503.01840.

  Attributes:
    states: E, width of the target's states.
    width: width of the layer.
    num_heads: H.
    head_dim: D.
    mlp_dim: inner width of the feed-forward block.
  """

  states: int
  width: int
  num_heads: int
  head_dim: int
  mlp_dim: int

  def setup(self):
    inner = self.num_heads * self.head_dim
    self.inward = nn.Dense(self.width, use_bias=False)
    self.query, self.key, self.value = (
      nn.Dense(inner, use_bias=False) for _ in range(3)
    )
    self.out = nn.Dense(self.width, use_bias=False)
    self.norm, self.mlp_norm, self.last_norm = (nn.RMSNorm() for _ in range(3))
    self.gate, self.up = (nn.Dense(self.mlp_dim, use_bias=False) for _ in range(2))
    self.down = nn.Dense(self.width, use_bias=False)
    self.outward = nn.Dense(self.states, use_bias=False)
    shape = (self.num_heads, FAR)
    self.distances = self.param("distances", nn.initializers.zeros_init(), shape)

  def __call__(self, embedded, before, positions, mask, first: int, steps: int):
    """Outputs of the first `steps` steps of a draft.

    Args:
      embedded: [B, S + T, E], the target's embeddings of the tokens.
      before: [B, S + T, E], the target's state before each token.
      positions: [B, S + T] int32.
      mask: [B, S + T] bool; slots with a token.
      first: S, number of prompt slots.
      steps: N.

    Returns:
      N states [B, T, E]. The state of step n at position t belongs to a draft that
      started at t - n; it is undefined for t < n.
    """
    whole = self._inputs(embedded, before)
    from_target = self._keys_values(whole)  # of the target's states
    embedded, outputs, previous = embedded[:, first:], [], []
    x = whole[:, first:]
    for step in range(steps):
      if step:
        x = self._inputs(embedded, later(outputs[-1], 1))
        previous.append(self._keys_values(x))
      x = x + self._attended(x, from_target, previous, positions, mask, first)
      h = self.mlp_norm(x)
      x = x + self.down(nn.gelu(self.gate(h)) * self.up(h))
      outputs.append(self.outward(self.last_norm(x)))
    return outputs

  def _inputs(self, embedded, before):
    return self.inward(
      jnp.concatenate([*map(layers.normalized, (embedded, before))], -1)
    )

  def _keys_values(self, x):
    h = self.norm(x)
    return self._split(self.key(h)), self._split(self.value(h))

  def _attended(self, x, given, own, positions, mask, first):
    """Attends to the target's states before a draft, and to the draft's own steps."""
    steps, count = len(own), x.shape[1]
    query = self._split(self.query(self.norm(x))) * self.head_dim**-0.5
    apart = positions[:, first:, None] - positions[:, None]
    # A draft that is at step `steps` started that many positions earlier.
    slots = jnp.arange(positions.shape[1])
    before = slots[None] <= (first + jnp.arange(count) - steps)[:, None]
    bias = self.distances[:, jnp.clip(apart, 0, FAR - 1)].swapaxes(0, 1)
    visible = mask[:, None, None] & before[None, None]
    logits = jnp.einsum("bhtd,bhsd->bhts", query, given[0]) + bias
    logits, values = [jnp.where(visible, logits, -1e9)], []
    for index, (keys, their_values) in enumerate(own):
      ago = steps - 1 - index  # distance to the position of that step
      product = jnp.sum(query * later(keys, ago, axis=2), axis=-1, keepdims=True)
      logits.append(product + self.distances[None, :, None, ago : ago + 1])
      values.append(later(their_values, ago, axis=2))
    weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1)
    source_length = mask.shape[1]
    context = jnp.einsum("bhts,bhsd->bhtd", weights[..., :source_length], given[1])
    for index, their_values in enumerate(values):
      context += (
        weights[..., source_length + index : source_length + index + 1] * their_values
      )
    return self.out(context.swapaxes(1, 2).reshape(*x.shape[:2], -1))

  def _split(self, x):
    heads = x.reshape(*x.shape[:2], self.num_heads, self.head_dim)
    return heads.swapaxes(1, 2)


def later(x: jax.Array, places: int, axis: int = 1) -> jax.Array:
  """Shifts x by `places` to later positions and fills with zeros."""
  padding = [(0, 0)] * x.ndim
  padding[axis] = (places, 0)
  return jax.lax.slice_in_dim(jnp.pad(x, padding), 0, x.shape[axis], axis=axis)
