"""How far a perfect choice between the draft and the cache would go.

Works on recorded greedy answers: at every position, each source is asked for the token
after the true text before it. A drafted token can only be accepted after such a text,
so the number of target calls follows from the positions where a source is right.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.decoding import ngrams
from osd_jax.engine.requests import Finished


def calls(right: np.ndarray, drafted: int) -> int:
  """Returns the target calls of one answer.

  Args:
    right: [n] bool; whether the source names the answer's token at a position.
    drafted: K.
  """
  place = count = 0
  while place < len(right):
    ahead = right[place : place + drafted]
    place += len(ahead) if ahead.all() else int(np.argmin(ahead))
    place, count = place + 1, count + 1
  return count


def choose(
  target: base.Model,
  draft: tuple[base.Model, base.Params],
  answers: Sequence[Finished],
  drafted: int,
  size: int,
) -> dict[str, list[int]]:
  """Returns the target calls of every answer for the draft, the cache and the oracle.

  Args:
    target: the model that answered, greedily.
    draft: model and parameters; they stay as they are.
    answers: in the order in which the cache saw them.
    drafted: K.
    size: tokens of served answers that the cache keeps.
  """
  cache, params = ngrams.build(target, size), ngrams.empty(size)
  counts: dict[str, list[int]] = {"draft": [], "cache": [], "oracle of choice": []}
  for answer in answers:
    source, emitted = jnp.asarray(answer.batch.source), jnp.asarray(answer.batch.target)
    count = len(answer.tokens)
    right = {
      "draft": _right(*draft, source, emitted)[:count],
      "cache": _right(cache, params, source, emitted)[:count],
    }
    right["oracle of choice"] = right["draft"] | right["cache"]
    for name, where in right.items():
      counts[name].append(calls(where, drafted))
    params = _absorbed(cache, params, source, emitted[0], jnp.int32(count))
  return counts


def _right(model, params, source, emitted) -> np.ndarray:
  return np.asarray(_named(model, params, source, emitted) == emitted)[0]


@functools.partial(jax.jit, static_argnums=0)
def _named(model, params, source, emitted):
  logits = model.score(params, source, model.mask(source), emitted)
  return jnp.argmax(logits, axis=-1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _absorbed(model, params, source, emitted, length):
  return model.absorb(params, source, emitted, length)
