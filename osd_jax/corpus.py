"""Prompts answered in bulk: the target's texts with its distributions.

Used wherever answers are wanted and not served: offline distillation, warm starts of
the buffer, held-out sets.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from osd_jax import base
from osd_jax.data import batches as data_batches
from osd_jax.data.vocabularies import Vocabulary
from osd_jax.decoding import records
from osd_jax.measuring import metrics
from osd_jax.serving import slots


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
  """One prompt of a corpus.

  Attributes:
    tokens: [n] int32 with end-of-sequence.
    task_id: place of its task in the config.
    reference: [m] int32 with end-of-sequence unless cut; empty if there is none.
  """

  tokens: np.ndarray
  task_id: int
  reference: np.ndarray


def prompts(
  config: data_batches.BatchConfig, vocabulary: Vocabulary, count: int | None = None
) -> list[Prompt]:
  """Reads the prompts of a corpus, each once and in the order of its first epoch.

  Args:
    config: tasks and lengths; batch_size does not matter.
    vocabulary: writes the ids.
    count: how many at most, None for all.
  """
  stream = data_batches.batches(
    dataclasses.replace(config, batch_size=1, require_reference=False), vocabulary
  )
  count = min(stream.rows_per_epoch, count or stream.rows_per_epoch)
  return [_prompt(stream[index]) for index in range(count)]


def _prompt(batch: data_batches.Batch) -> Prompt:
  """The only row of a batch."""
  reference = batch.target[0][batch.target[0] != base.PAD_ID]
  if reference.tolist() == [base.EOS_ID]:
    reference = reference[:0]  # the data had none
  return Prompt(
    tokens=batch.source[0][batch.source[0] != base.PAD_ID],
    task_id=int(batch.task_id[0]),
    reference=reference,
  )


def answer(
  decoder: slots.Slots,
  found: Sequence[Prompt],
  sampling: slots.SamplingConfig,
  on_finished: Callable[[slots.Finished], None] = lambda finished: None,
) -> list[slots.Finished]:
  """Decodes all prompts; results in their order.

  Args:
    decoder: plain or speculative slots, with nothing in flight.
    found: the prompts.
    sampling: the i-th prompt draws with its seed + i.
    on_finished: called as each one finishes, for progress.
  """
  requests = [
    slots.Request(
      tokens=prompt.tokens,
      sampling=dataclasses.replace(sampling, seed=sampling.seed + index),
      tag=prompt.task_id,
    )
    for index, prompt in enumerate(found)
  ]
  for request in requests:
    decoder.submit(request)
  finished: dict[int, slots.Finished] = {}
  while decoder.in_flight:
    for done in decoder.step():
      on_finished(done)
      finished[id(done.request)] = done
  return [finished[id(request)] for request in requests]


def reference_rows(
  target: base.Model,
  params: base.Params,
  found: Sequence[Prompt],
  config: slots.DecodingConfig,
  rows: int = 8,
) -> Iterator[base.DistillationBatch]:
  """The target's distributions along the references of prompts, teacher-forced.

  Args:
    target: the target.
    params: its parameters.
    found: prompts; those without reference get weight 0.
    config: lengths and k of the rows.
    rows: R of each batch; the last one is filled up with rows of weight 0.

  Yields:
    Batches of R rows.
  """
  source_length = config.source_lengths[-1]
  for start in range(0, len(found), rows):
    source = np.zeros((rows, source_length), np.int32)
    tokens = np.zeros((rows, config.target_length), np.int32)
    for row, prompt in enumerate(found[start : start + rows]):
      source[row, : len(prompt.tokens)] = prompt.tokens[:source_length]
      reference = prompt.reference[: config.target_length]
      tokens[row, : len(reference)] = reference
    yield records.teacher_forced(target, params, source, tokens, config.record_top_k)


def stack(rows: Sequence[base.DistillationBatch]) -> base.DistillationBatch:
  """One batch of all rows."""
  return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)


def mean_agreement(
  draft: base.Model,
  params: base.Params,
  answers: Sequence[slots.Finished],
  rows: int = 16,
) -> dict[int, dict[str, float]]:
  """Agreement of a draft with answered prompts, per task and averaged by request.

  Args:
    draft: the draft.
    params: its parameters.
    answers: what the target wrote, with records.
    rows: prompts per forward pass.

  Returns:
    task id -> distribution_overlap, its upper bound, acceptance_rate, requests.
  """
  values: dict[int, list[tuple[float, float, float]]] = {}
  for start in range(0, len(answers), rows):
    part = list(answers[start : start + rows])
    filled = part + [part[-1]] * (rows - len(part))  # one shape, compiled once
    batch = stack([done.batch for done in filled])
    settings = jax.tree.map(
      lambda *leaves: jnp.concatenate(leaves), *[done.settings for done in filled]
    )
    found = jax.device_get(metrics.agreement(draft, params, batch, settings))
    for index, done in enumerate(part):
      row = (
        float(found.distribution_overlap[index]),
        float(found.distribution_overlap_upper[index]),
        float(found.acceptance_rate[index]),
      )
      values.setdefault(int(done.request.tag), []).append(row)
  return {
    task_id: {
      "requests": len(rows_),
      "distribution_overlap": float(np.mean([row[0] for row in rows_])),
      "distribution_overlap_upper": float(np.mean([row[1] for row in rows_])),
      "acceptance_rate": float(np.mean([row[2] for row in rows_])),
    }
    for task_id, rows_ in sorted(values.items())
  }
