"""Finished requests whose target has given logits."""

import jax.numpy as jnp
import numpy as np
import oracles

from osd_jax import base


def records_of(logits, k, error=False):
  """Records [R, T, k] of target logits [R, T, V]."""
  log_probs, ids, tail = oracles.truncate(logits, k)
  return base.Records(
    log_probs=jnp.asarray(log_probs, jnp.float32),
    ids=jnp.asarray(ids, jnp.uint16),
    tail=jnp.asarray(tail, jnp.float32),
    error=jnp.asarray(np.broadcast_to(error, tail.shape)),
  )


def batch_of(records, source=None, target=None, mask=None, weight=None):
  """The batch of these records; everything else is 1 unless it is given."""
  rows, length = records.tail.shape

  def array(values, shape, dtype):
    return jnp.asarray(np.ones(shape) if values is None else values, dtype)

  return base.DistillationBatch(
    source=array(source, (rows, 2), jnp.int32),
    target=array(target, (rows, length), jnp.int32),
    mask=array(mask, (rows, length), bool),
    records=records,
    weight=array(weight, rows, jnp.float32),
  )
