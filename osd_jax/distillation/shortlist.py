"""Which tokens a served draft's output head covers: the likeliest of the recent stream.

Exactness does not depend on the choice: the draft gives the other tokens no mass, and
the recovered token comes from the whole vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from osd_jax import base
from osd_jax.distillation import buffer as replay

LOOKED_AT = 16  # recorded tokens of a position; the others have hardly any mass


def of_stream(model: base.Model, buffer: replay.ReplayBuffer) -> np.ndarray | None:
  """The shortlist of a draft for the rows of the buffer.

  Args:
    model: the draft.
    buffer: N rows.

  Returns:
    [N] int32; None if the draft covers the whole vocabulary.
  """
  if not model.shortlist:
    return None
  return np.asarray(likeliest(buffer, model.vocab_size, model.shortlist, model.eos_ids))


@functools.partial(jax.jit, static_argnames=("vocab_size", "size", "eos_ids"))
def likeliest(
  buffer: replay.ReplayBuffer,
  vocab_size: int,
  size: int,
  eos_ids: tuple[int, ...] = (base.EOS_ID,),
) -> Int[Array, " size"]:
  """The tokens to which the target gave most mass in the rows of the buffer.

  Of every position the `LOOKED_AT` likeliest tokens count: serving waits for this.
  End-of-sequence is always among them. Tokens that the target has not thought of fill
  what is left, lowest ids first: SentencePiece orders them by frequency.

  Args:
    buffer: N rows.
    vocab_size: V (static).
    size: tokens to choose, at most V (static).
    eos_ids: tokens that end a sequence (static).

  Returns:
    [size] int32, distinct, in ascending order.
  """
  records, rows = buffer.data.records, buffer.data.weight
  counted = buffer.data.mask & (rows[:, None] > 0)
  ids, log_probs = records.ids[..., :LOOKED_AT], records.log_probs[..., :LOOKED_AT]
  mass = jnp.where(counted[..., None], jnp.exp(log_probs), 0.0)
  expected = jnp.zeros(vocab_size, jnp.float32)
  expected = expected.at[ids.astype(jnp.int32)].add(mass)
  expected = expected.at[np.asarray(eos_ids)].set(jnp.inf)
  # top_k takes the lower of two equal entries first.
  _, chosen = jax.lax.top_k(expected, size)
  return jnp.sort(chosen).astype(jnp.int32)
