"""Rows: the usable examples of a task as ids, through either reader.

`seqio` reads the registered Task's dataset; `plain` reads the same source with
sentencepiece alone. Both give the same rows in the same order (tested);
truncating, shuffling and mixing come after, so they cannot differ either.
"""

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import base
from osd_jax.data import tasks
from osd_jax.data.sources import TaskConfig, Text
from osd_jax.data.vocabulary import Vocabulary

READERS = ("plain", "seqio")
_REPORTED_PLACES = 100  # places that a report names of each sort
_SAID_PLACES = 3  # places that a sentence names
_PLACE = r"(.+?:\d+)(?:: \w+: (.*))?"  # file, line, why it was skipped


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One usable example; its ids are written when they are asked for.

  Of a large corpus often few rows are kept, and ids take longer than all the rest.

  Attributes:
    location: "file:line" or the like; where it was read.
    row_id: the example's own id or its place.
    prompt: text.
    reference: text, "" if the data has none.
    encode: writes the ids of prompt and reference.
  """

  location: str
  row_id: str
  prompt: str
  reference: str
  encode: Callable[[], tuple[np.ndarray, np.ndarray]]

  @property
  def source(self) -> np.ndarray:
    """[n] int32, ids of the prompt as its model is given them."""
    return self._ids[0]

  @property
  def target(self) -> np.ndarray:
    """[m] int32, ids of the reference with end-of-sequence, m >= 1."""
    return self._ids[1]

  @functools.cached_property
  def _ids(self) -> tuple[np.ndarray, np.ndarray]:
    return self.encode()


@dataclasses.dataclass(frozen=True, eq=False)
class TaskRows:
  """What one task holds.

  Attributes:
    task: its config.
    rows: the usable rows, in the order of the source.
    skipped: "file:line: reason" of every other line; reasons begin with "empty"
      (a blank line or prompt) or "malformed" (something else there).
  """

  task: TaskConfig
  rows: tuple[Row, ...]
  skipped: tuple[str, ...]

  @functools.cached_property
  def fingerprint(self) -> str:
    """Changes with any id of any row."""
    digest = hashlib.sha256()
    for row in self.rows:
      for ids in (row.source, row.target):
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()


def read(task: TaskConfig, vocabulary: Vocabulary, reader: str = "plain") -> TaskRows:
  """Reads all rows of a task.

  Args:
    task: what to read.
    vocabulary: writes the ids.
    reader: "plain" or "seqio".

  Returns:
    Its rows, and what was skipped.

  Raises:
    MissingExtraError: reader "seqio" without the extra `data`.
    InputError: missing files, or no usable line.
  """
  readers = {"seqio": _seqio_rows, "plain": _plain_rows}
  found, problems = readers[reader](task, vocabulary)
  rows = tuple(row for row in found if not _is_blank(row, vocabulary))
  skipped = (
    *(f"{text.location}: {text.problem}" for text in problems),
    *(
      f"{row.location}: empty: the prompt has no tokens"
      for row in found
      if _is_blank(row, vocabulary)
    ),
  )
  if not rows:
    raise base.InputError(
      f"TaskConfig (task {task.name!r}): no usable line; {len(skipped)} were skipped,"
      f" the first: {skipped[:3]}. Expected JSON objects, one a line, with a non-blank"
      f" prompt for preprocessor {task.preprocessor!r}; TaskConfig.prompt takes it from"
      " other fields."
    )
  return TaskRows(task, rows, skipped)


def order(task: TaskConfig, count: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the seeded order of a task's rows in one epoch, [count].

  It depends on the task's name, not on the tasks beside it.
  """
  name = int.from_bytes(hashlib.sha256(task.name.encode()).digest()[:4], "big")
  return np.random.default_rng([seed, name, epoch]).permutation(count)


def unique(configs: Iterable[TaskConfig]) -> tuple[TaskConfig, ...]:
  """Returns the different tasks in order of appearance.

  Raises:
    InputError: two different tasks of one name.
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


def report(source: str, rows: int, **places: Sequence[str]) -> dict[str, Any]:
  """Returns what was read of a task and what happened to it, json-able.

  Args:
    source: what tables call its requests.
    rows: how many can be used.
    **places: by name, places of the lines that something happened to.

  Returns:
    `source`, `rows`, the count of every name, and `places`: the first 100 of each.
  """
  told = {"source": source, "rows": rows, **dict.fromkeys(places, 0), "places": {}}
  for name, located in places.items():
    for place in located:
      note(told, name, place)
  return told


def note(told: dict[str, Any], name: str, place: str) -> None:
  """Counts one more place in a report."""
  told[name] += 1
  named = told["places"].setdefault(name, [])
  if len(named) < _REPORTED_PLACES:
    named.append(place)


def sentences(
  told: Mapping[str, dict[str, Any]],
  clauses: Mapping[str, str],
  also: Callable[[dict[str, Any]], list[str]] = lambda task: [],
) -> list[str]:
  """Says a report in words: one sentence for each task with something to say.

  Args:
    told: of every task, what `report` returned.
    clauses: what to say of a count, the number as "{count}", by its name.
    also: more clauses on a task.
  """
  found = []
  for task in told.values():
    read = task["rows"] + task["skipped"]
    every = {"skipped": f"{{count}} of {read} lines skipped", **clauses}
    parts = [
      f"{text.format(count=task[name])}: {_places(task, name)}"
      for name, text in every.items()
      if task[name]
    ]
    if parts := [*parts, *also(task)]:
      found.append(f"{task['source']}: {'; '.join(parts)}.")
  return found


def are_shares(weights: Sequence[float], count: int) -> bool:
  """Whether these are as many finite positive numbers."""
  return len(weights) == count and all(0 < share < np.inf for share in weights)


def ordinals(task_ids: np.ndarray) -> np.ndarray:
  """Returns for every step how often its task came before, [total] int64."""
  before = np.zeros(len(task_ids), np.int64)
  for task_id in np.unique(task_ids):
    same = task_ids == task_id
    before[same] = np.arange(np.sum(same))
  return before


def fingerprint(parts: Sequence[object]) -> str:
  """Digests a definition, so that a resume notices a different one."""
  return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _places(task: Mapping[str, Any], name: str) -> str:
  """The first places of a count, without their folders."""
  named = []
  for place in task["places"][name][:_SAID_PLACES]:
    line = re.fullmatch(_PLACE, place, re.DOTALL)
    location, reason = line.groups("") if line else (place, "")
    named.append(f"{os.path.basename(location)} {reason}".strip())
  more = task[name] - len(named)
  return ", ".join([*named, f"and {more} more"] if more else named)


def _is_blank(row: Row, vocabulary: Vocabulary) -> bool:
  """Whether a prompt has no tokens; with a letter or digit it has, whoever writes."""
  return not re.search(r"[A-Za-z0-9]", row.prompt) and vocabulary.is_blank(row.source)


def _plain_rows(
  task: TaskConfig, vocabulary: Vocabulary
) -> tuple[list[Row], list[Text]]:
  texts = list(tasks.texts(task))

  def ids(text):
    return (
      vocabulary.encode_prompt(text.prompt),
      vocabulary.encode_with_eos(text.reference),
    )

  found = [
    Row(
      text.location,
      text.row_id,
      text.prompt,
      text.reference,
      functools.partial(ids, text),
    )
    for text in texts
    if not text.problem
  ]
  return found, [text for text in texts if text.problem]


def _seqio_rows(
  task: TaskConfig, vocabulary: Vocabulary
) -> tuple[list[Row], list[Text]]:
  """Rows from the registered Task; skips from a scan of the same source."""
  # First, so that what is wrong with the source is said here and not by tensorflow.
  scanned = [] if task.kind == "generated" else list(tasks.texts(task))
  found = list(_task_dataset(task, vocabulary))
  if task.kind == "generated":
    return found, []
  problems = [text for text in scanned if text.problem]
  if len(scanned) - len(problems) != len(found):
    raise base.InputError(
      f"TaskConfig (task {task.name!r}): seqio gave {len(found)} rows where the source"
      f" has {len(scanned) - len(problems)}; it changed while it was read. Read again."
    )
  return found, problems


def _task_dataset(task: TaskConfig, vocabulary: Vocabulary) -> Iterator[Row]:
  name = tasks.register(task, vocabulary, tasks.registered_name(task, vocabulary))
  dataset = (
    tasks.import_seqio()
    .get_mixture_or_task(name)
    .get_dataset(sequence_length=None, split=task.split, shuffle=False)
  )
  for example in dataset.as_numpy_iterator():
    source = np.asarray(example["inputs"], np.int32)
    target = np.asarray(example["targets"], np.int32)
    yield Row(
      example["location"].decode(),
      example["row_id"].decode(),
      example["inputs_pretokenized"].decode(),
      example["targets_pretokenized"].decode(),
      functools.partial(tuple, (source, target)),
    )
