"""Generates a distillation corpus: texts and the target's distributions along them.

The texts come from one of the paper's four sampling sources. The paper calls the target
"teacher" and the draft "student"; these two words are used for nothing else.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.progress

from osd_jax import base, formats, pairs, runs, sharding
from osd_jax.data.batches import EncodedExample
from osd_jax.decoding import records
from osd_jax.engine.requests import DecodingConfig, Finished, Request, SamplingConfig
from osd_jax.engine.server import Server
from osd_jax.runs.corpus_rows import CorpusRows

STATES_BYTES = 4 * 2**30  # of a corpus, in the memory of the host
SAMPLE_SOURCES = ("teacher", "student", "mix_request", "mix_token")


class TextSource(NamedTuple):
  """Which model generates the texts."""

  # "teacher": the target; "student": the draft; "mix_request": one of the two, drawn
  # for each prompt; "mix_token": one of the two, drawn for each token.
  sample_source: str = "teacher"
  mix_share: float = 0.5  # probability of the draft in a mix
  seed: int = 0  # seed of the draws of a mix


def generate(
  source: TextSource,
  decoding: DecodingConfig,
  sampling: SamplingConfig,
  pair: pairs.Pair,
  partition: sharding.PartitionConfig,
  prompts: Sequence[EncodedExample],
  bar: rich.progress.Progress,
  folder: str = "",
) -> base.DistillationBatch:
  """Generates one row per prompt, in the order of the prompts, as numpy arrays.

  The i-th prompt that a model answers draws with seed + i. References are not used;
  `bar` shows one task for each model. The target's states of the prompts are kept if
  they fit `STATES_BYTES`; otherwise an attached draft computes them in each step.

  Rows are written to `folder` as they are made, see `CorpusRows`, and rows that it has
  are not made again. "" keeps them in memory only.

  Raises:
    InputError: the folder has rows of another corpus.
  """
  by_draft, second = _writer(source, pair, len(prompts))
  # Texts of the target come with its distributions, because decoding recorded them.
  width = pair.draft.state_width if not by_draft.any() else 0
  size = len(prompts) * decoding.source_lengths[-1] * width * 2
  keeps = 0 < size <= STATES_BYTES
  about = _made_from(source, decoding, sampling, pair, prompts) | {"states": keeps}
  rows = CorpusRows(folder, about)

  def missing(is_ours: np.ndarray) -> dict[int, Request]:
    indices = np.flatnonzero(is_ours).tolist()
    ours = requests([prompts[index] for index in indices], sampling)
    return {i: one for i, one in zip(indices, ours, strict=True) if i not in rows.rows}

  def add(index: int, row: base.DistillationBatch) -> None:
    row = row if keeps else row.replace(target_states=None)
    rows.add(index, jax.device_get(row))

  try:
    _decode(pair, decoding, partition, missing(~by_draft), add, bar)
    # Records of this decoding would be the draft's distributions. The target scores the
    # finished texts below.
    unrecorded = dataclasses.replace(decoding, record_top_k=0)
    texts: dict[int, base.DistillationBatch] = {}
    _decode(second, unrecorded, partition, missing(by_draft), texts.__setitem__, bar)
    order = sorted(texts)
    unscored = [texts[index].replace(target_states=None) for index in order]
    for index, row in zip(order, _score(pair, decoding, unscored), strict=True):
      rows.add(index, row)
  finally:
    rows.flush()  # also after an interruption
  return stack([rows.rows[index] for index in range(len(prompts))])


def _decode(
  writer: pairs.Pair,
  decoding: DecodingConfig,
  partition: sharding.PartitionConfig,
  waiting: Mapping[int, Request],
  take: Callable[[int, base.DistillationBatch], object],
  bar: rich.progress.Progress,
) -> None:
  """Answers requests plainly and hands each answer to `take`, with its index."""
  if not waiting:
    return
  # A tag is the same for all requests of a task, so requests are told apart by id.
  index_of = {id(request): index for index, request in waiting.items()}
  server = plain_server(writer, decoding, partition)
  with counting(bar, "texts", len(waiting)) as count:

    def finish(answer: Finished) -> None:
      take(index_of[id(answer.request)], answer.batch)
      count(answer)

    server.run(list(waiting.values()), finish)


def _made_from(
  source: TextSource,
  decoding: DecodingConfig,
  sampling: SamplingConfig,
  pair: pairs.Pair,
  prompts: Sequence[EncodedExample],
) -> dict[str, Any]:
  """What the rows of a corpus depend on, as JSON values."""
  models = {"target": pair.target_params}
  if source.sample_source != "teacher":
    models["draft"] = pair.draft_params
  layers = getattr(pair.draft_config, "state_layers", None)
  tokens = [prompt.tokens.astype(np.int32).tobytes() for prompt in prompts]
  return {
    "prompts": hashlib.sha256(b"".join(tokens)).hexdigest(),
    "models": runs.fingerprint(models),
    "texts": source._asdict(),
    "sampling": dataclasses.asdict(sampling),
    "lengths": [decoding.source_lengths[-1], decoding.target_length],
    "record_top_k": decoding.record_top_k,
    "token states": pair.draft.reads_tokens,
    **({} if layers is None else {"layers": list(layers)}),
  }


def _writer(
  source: TextSource, pair: pairs.Pair, count: int
) -> tuple[np.ndarray, pairs.Pair]:
  """Returns which prompts a second writer answers, [count] bool, and that writer."""
  if source.sample_source == "teacher":
    return np.zeros(count, bool), pair
  if source.sample_source == "student":
    return np.ones(count, bool), draft_alone(pair)
  return formats.tool("mixture").writer(source, pair, count)


def draft_alone(pair: pairs.Pair) -> pairs.Pair:
  """A pair whose target is the draft."""
  return dataclasses.replace(pair, target=pair.draft, target_params=pair.draft_params)


def _score(
  pair: pairs.Pair, decoding: DecodingConfig, texts: list[base.DistillationBatch]
) -> Iterator[base.DistillationBatch]:
  """Yields each text with the target's distributions along it."""
  size = decoding.rows
  for start in range(0, len(texts), size):
    part = texts[start : start + size]
    # The last part is filled up with copies, so that one shape is compiled.
    whole = stack(part + part[-1:] * (size - len(part)))
    target = records.teacher_forced(
      pair.target,
      pair.target_params,
      whole.source,
      whole.target,
      decoding.record_top_k,
      pair.draft.reads_tokens,
    )
    batch = whole.replace(records=target.records, token_states=target.token_states)
    host = jax.device_get(batch)
    for row in range(len(part)):
      yield jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], host)


@contextlib.contextmanager
def counting(
  bar: rich.progress.Progress, label: str, total: int
) -> Iterator[Callable[[Finished], None]]:
  """Adds a task to the bar and yields a function that counts one answer."""
  if bar.disable:  # its first line would come only after some time
    bar.console.print(f"{label}: 0/{total} ...", highlight=False)
  task = bar.add_task(label, total=total, figures="")
  yield lambda answer: bar.advance(task)
  bar.remove_task(task)


def plain_server(
  pair: pairs.Pair,
  decoding: DecodingConfig,
  partition: sharding.PartitionConfig,
  records: bool = True,
) -> Server:
  """A server that decodes with the target alone.

  Without `records` it is as fast as plain decoding can be: only learning needs them.
  """
  return Server(
    pair.plain(),
    dataclasses.replace(
      decoding,
      record_top_k=decoding.record_top_k if records else 0,
      # One call may decode a whole answer: no draft has to be swapped in between.
      max_rounds=decoding.target_length,
    ),
    partition=partition,
  )


def requests(
  prompts: Sequence[EncodedExample], sampling: SamplingConfig
) -> list[Request]:
  """One request per prompt, tagged with the task id; prompt i draws with seed + i."""
  return [
    Request(prompt.tokens, sampling.of_request(index), tag=prompt.task_id)
    for index, prompt in enumerate(prompts)
  ]


def reference_rows(
  pair: pairs.Pair,
  prompts: Sequence[EncodedExample],
  decoding: DecodingConfig,
  rows: int = 8,
) -> Iterator[base.DistillationBatch]:
  """Scores the prompts' references with the target (teacher forcing).

  Yields batches of `rows`. A prompt without reference makes a row of weight 0, and the
  last batch is filled up with such rows.
  """
  source_length = decoding.source_lengths[-1]
  for start in range(0, len(prompts), rows):
    pad_id = pair.target.pad_id
    source = np.full((rows, source_length), pad_id, np.int32)
    tokens = np.full((rows, decoding.target_length), pad_id, np.int32)
    for row, prompt in enumerate(prompts[start : start + rows]):
      source[row, : len(prompt.tokens)] = prompt.tokens[:source_length]
      reference = prompt.reference[: decoding.target_length]
      tokens[row, : len(reference)] = reference
    # Waits for each batch, because a mesh allows only few computations in flight.
    yield jax.block_until_ready(
      records.teacher_forced(
        pair.target,
        pair.target_params,
        source,
        tokens,
        decoding.record_top_k,
        pair.draft.reads_tokens,
      )
    )


def stack(rows: Sequence[base.DistillationBatch]) -> base.DistillationBatch:
  """Concatenates batches along the row axis."""
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
