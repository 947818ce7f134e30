"""Which prompts are prefilled together: one for every part of a mesh that has rows.

Every part of the mesh's "data" axis reads a prompt of its own, for a row that it holds,
so that nothing but the weights' own sums goes from one device to another:

    data = 4, eight rows      part     0      1      2      3
                              rows    0 1    2 3    4 5    6 7
    free                                1    2 3             7
    prompts a, b, c                     a    b               c      one call
    prompt d                                   d                    the next one

One device is one part, and reads one prompt after the other.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from osd_jax import base
from osd_jax.engine.requests import DecodingConfig, Request

_PATIENCE = 8  # a mesh waits until one row in so many is free, if prompts wait for all


class Prompt(NamedTuple):
  """What a row is given.

  Attributes:
    source: [1, S] int32.
    settings: [1] sampling.
  """

  source: np.ndarray
  settings: base.SamplingSettings


class PromptBatch(NamedTuple):
  """What one call prefills; P parts.

  Attributes:
    source: [P, S] int32.
    settings: [P] sampling.
    slots: [P] int32; of the rows of a part, the one that takes its prompt; -1: none
      does, and what is computed for it is dropped.
  """

  source: Any  # of numpy on the host, traced in a call
  settings: base.SamplingSettings
  slots: Any


def pad_prompt(
  request: Request, config: DecodingConfig, pad_id: int, bucket: int | None = None
) -> Prompt:
  """What a row is given of a request.

  Args:
    request: that comes into it.
    config: shapes.
    pad_id: what follows its tokens.
    bucket: S; None takes the longest.
  """
  limit = request.max_length
  source = np.full((1, bucket or config.source_lengths[-1]), pad_id, np.int32)
  source[0, : len(request.tokens)] = request.tokens
  settings = request.sampling.settings(config.target_length if limit is None else limit)
  return Prompt(source, settings)


def first_free_slots(free: Sequence[int], rows: int, parts: int) -> list[int]:
  """Of the free rows, the first one of each part; ascending."""
  first = {slot * parts // rows: slot for slot in reversed(free)}
  return sorted(first.values())


def defer_prefill(free: int, waiting: int, rows: int, parts: int) -> bool:
  """Whether decoding should go on until one call can prefill more prompts.

  All rows stand still while prompts are read, which takes as long for one prompt as for
  one in every part. So where there is a prompt for every free row, some rows are left
  empty for a while; never more than an eighth of them.

  Args:
    free: rows without a request.
    waiting: prompts.
    rows: of all parts.
    parts: that read a prompt each at a time.
  """
  return parts > 1 and waiting >= free and free * _PATIENCE < rows


def batches(
  prompts: Mapping[int, Prompt], rows: int, parts: int
) -> Iterator[PromptBatch]:
  """As few calls as prefill all prompts, by slot."""
  left: Collection[int] = sorted(prompts)
  while left:
    taken = first_free_slots(left, rows, parts)
    yield _batch({slot: prompts[slot] for slot in taken}, rows, parts)
    left = [slot for slot in left if slot not in taken]


def _batch(prompts: Mapping[int, Prompt], rows: int, parts: int) -> PromptBatch:
  """One call's prompts, by slot; at most one for each part."""
  if parts == 1:
    ((slot, (source, settings)),) = prompts.items()
    return PromptBatch(source, settings, np.asarray([slot], np.int32))
  size, any_prompt = rows // parts, next(iter(prompts.values()))
  of_part = {slot // size: (slot % size, prompt) for slot, prompt in prompts.items()}
  taken = [of_part.get(part, (-1, any_prompt)) for part in range(parts)]
  source, settings = jax.tree.map(
    lambda *leaves: np.concatenate(leaves), *(prompt for _, prompt in taken)
  )
  return PromptBatch(source, settings, np.asarray([at for at, _ in taken], np.int32))
