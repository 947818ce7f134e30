"""Rows: the usable examples of a task as ids, through either reader.

`seqio` reads the registered Task's dataset; `plain` reads the same source with
sentencepiece alone. Both give the same rows in the same order (tested);
truncating, shuffling and mixing come after, so they cannot differ either.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from osd_jax import base
from osd_jax.base import EOS_ID
from osd_jax.data import tasks
from osd_jax.data.sources import TaskConfig, Text
from osd_jax.data.vocabularies import Vocabulary

READERS = ("seqio", "plain")
_NAMED_PLACES = 10  # places of skipped rows that a report names


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One usable example.

  Attributes:
    row_id: the example's own id or its place.
    prompt: text.
    reference: text, "" if the data has none.
    source: [n] int32, ids of the prompt with end-of-sequence, n >= 2.
    target: [m] int32, ids of the reference with end-of-sequence, m >= 1.
  """

  row_id: str
  prompt: str
  reference: str
  source: np.ndarray
  target: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TaskRows:
  """What one task holds.

  Attributes:
    task: its config.
    rows: the usable rows, in the order of the source.
    skipped_empty: blank lines and prompts.
    skipped_malformed: lines that hold something else.
    skipped_at: "file:line: reason" of the first few.
  """

  task: TaskConfig
  rows: tuple[Row, ...]
  skipped_empty: int
  skipped_malformed: int
  skipped_at: tuple[str, ...]

  @functools.cached_property
  def fingerprint(self) -> str:
    """Changes with any id of any row."""
    digest = hashlib.sha256()
    for row in self.rows:
      for ids in (row.source, row.target):
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()


def read(task: TaskConfig, vocabulary: Vocabulary, reader: str = "seqio") -> TaskRows:
  """Reads all rows of a task.

  Args:
    task: what to read.
    vocabulary: writes the ids.
    reader: "seqio" or "plain".

  Returns:
    Its rows, and what was skipped.

  Raises:
    ImportError: reader "seqio" without the extra `data`.
    ValueError: missing files, or no usable line.
  """
  check_reader("rows.read", reader)
  if reader == "seqio":
    found, problems = _seqio_rows(task, vocabulary)
  else:
    found, problems = _plain_rows(task, vocabulary)
  rows = []
  for location, row in found:
    if len(row.source) > 1:
      rows.append(row)
    else:
      no_tokens = "empty: the prompt has no tokens"
      problems.append(Text(location, row.row_id, problem=no_tokens))
  skipped_at = tuple(f"{text.location}: {text.problem}" for text in problems)
  if not rows:
    raise base.InputError(
      f"task {task.name!r}: no usable line; {len(problems)} were skipped,"
      f" the first: {skipped_at[:3]}. Expected JSON objects with a non-blank"
      f" prompt for preprocessor {task.preprocessor!r}."
    )
  empty = sum(text.problem.startswith("empty") for text in problems)
  return TaskRows(
    task,
    tuple(rows),
    skipped_empty=empty,
    skipped_malformed=len(problems) - empty,
    skipped_at=skipped_at[:_NAMED_PLACES],
  )


def check_reader(owner: str, reader: str) -> None:
  """Raises ValueError unless `reader` is one of `READERS`."""
  if reader not in READERS:
    raise base.InputError(
      f"{owner}: reader: received {reader!r}, expected one of {', '.join(READERS)}."
    )


def truncate_source(source: np.ndarray, length: int) -> np.ndarray:
  """Cuts a prompt's ids to `length`, keeping end-of-sequence at the end."""
  if len(source) <= length:
    return source
  return np.append(source[: length - 1], np.int32(EOS_ID))


def order(task: TaskConfig, count: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the seeded order of a task's rows in one epoch, [count].

  It depends on the task's name, not on the tasks beside it.
  """
  name = int.from_bytes(hashlib.sha256(task.name.encode()).digest()[:4], "big")
  return np.random.default_rng([seed, name, epoch]).permutation(count)


def unique(configs: Iterable[TaskConfig]) -> tuple[TaskConfig, ...]:
  """Returns the different tasks in order of appearance.

  Raises:
    ValueError: two different tasks of one name.
  """
  found = tuple(dict.fromkeys(configs))
  names = [task.name for task in found]
  doubled = sorted({name for name in names if names.count(name) > 1})
  if doubled:
    raise base.InputError(
      f"TaskConfig.name: {doubled} stands for two different tasks of one run;"
      " give each its own name (requests may share a `source` label)."
    )
  return found


def skip_report(task_rows: TaskRows) -> dict[str, object]:
  """Returns what was read and skipped, json-able."""
  return {
    "source": task_rows.task.label,
    "rows": len(task_rows.rows),
    "skipped_empty": task_rows.skipped_empty,
    "skipped_malformed": task_rows.skipped_malformed,
    "skipped_at": list(task_rows.skipped_at),
  }


def fingerprint(parts: Sequence[object]) -> str:
  """Digests a definition, so that a resume notices a different one."""
  return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _plain_rows(
  task: TaskConfig, vocabulary: Vocabulary
) -> tuple[list[tuple[str, Row]], list[Text]]:
  found, problems = [], []
  for text in tasks.texts(task):
    if text.problem:
      problems.append(text)
      continue
    source = vocabulary.encode_with_eos(text.prompt)
    target = vocabulary.encode_with_eos(text.reference)
    row = Row(text.row_id, text.prompt, text.reference, source, target)
    found.append((text.location, row))
  return found, problems


def _seqio_rows(
  task: TaskConfig, vocabulary: Vocabulary
) -> tuple[list[tuple[str, Row]], list[Text]]:
  """Rows from the registered Task; skips from a scan of the same source."""
  found = list(_task_dataset(task, vocabulary))
  if task.kind == "generated":
    return found, []
  scanned = list(tasks.texts(task))
  problems = [text for text in scanned if text.problem]
  if len(scanned) - len(problems) != len(found):
    raise base.InputError(
      f"task {task.name!r}: seqio gave {len(found)} rows where the source has"
      f" {len(scanned) - len(problems)}; it changed while it was read. Read again."
    )
  return found, problems


def _task_dataset(
  task: TaskConfig, vocabulary: Vocabulary
) -> Iterator[tuple[str, Row]]:
  seqio = tasks.import_seqio()
  name = tasks.register(task, vocabulary, tasks.registered_name(task, vocabulary))
  dataset = seqio.get_mixture_or_task(name).get_dataset(
    sequence_length=None, split=task.split, shuffle=False
  )
  for example in dataset.as_numpy_iterator():
    yield (
      example["location"].decode(),
      Row(
        example["row_id"].decode(),
        example["inputs_pretokenized"].decode(),
        example["targets_pretokenized"].decode(),
        np.asarray(example["inputs"], np.int32),
        np.asarray(example["targets"], np.int32),
      ),
    )
