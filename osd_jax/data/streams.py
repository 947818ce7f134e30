"""Query streams: which task asks next, and what it asks.

The whole schedule is a function of the config (so of its seed) and of the sizes of
the tasks, and the n-th query of a task is a function of n: a query is found from its
index alone, so a stream resumes from one number. `of_prompts` makes a stream of
whatever prompts a caller has.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from osd_jax import base
from osd_jax.data import arrivals, rows
from osd_jax.data.arrivals import StreamConfig
from osd_jax.data.vocabulary import Vocabulary

__all__ = [
  "PromptStream",
  "Query",
  "QueryStream",
  "Stream",
  "StreamConfig",
  "of_prompts",
]

_HELD = 2**16  # queries of a caller's own that stay in memory: more than are in flight


@dataclasses.dataclass(frozen=True, eq=False)
class Query:
  """One request of a stream.

  Attributes:
    index: its place in the stream, from 0.
    task: label of its task.
    task_id: number of its task, in order of first appearance in the config.
    prompt: text.
    reference: the data's answer, "" if it has none; the target does not see it.
    tokens: [n] int32, n <= source_length, ends in end-of-sequence.
    row_id: the example's own id, or its place in the data.
  """

  index: int
  task: str
  task_id: int
  prompt: str
  reference: str
  tokens: np.ndarray
  row_id: str


class Stream(Protocol):
  """What is served: queries by their place. `QueryStream` and `PromptStream` are two.

  Attributes:
    total: how many there are, for progress; None where only the end will tell.
  """

  @property
  def total(self) -> int | None: ...

  def __getitem__(self, index: int) -> Query:
    """Returns the query at a place; IndexError behind the last one.

    Asked for in order, and again while the answer is not there.
    """
    ...

  def shifts(self) -> list[tuple[int, str]]:
    """Returns (index, label) where a new segment starts, the first included."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns what `restore` of the same stream needs, json-able."""
    ...

  def restore(self, state: dict[str, Any]) -> None:
    """Makes the same queries available as when `state` was taken, or raises."""
    ...

  def report(self) -> dict[str, Any]:
    """Returns what was read and what happened to it, by task, json-able."""
    ...

  def sentences(self) -> list[str]:
    """Says the report in words, but for what went as anyone would expect."""
    ...


class QueryStream:
  """The queries of a config: `stream[index]`, or one after another in a loop.

  A task that runs out of rows starts over, in a new order if shuffled.
  """

  def __init__(self, config: StreamConfig, vocabulary: Vocabulary):
    """Reads every task.

    Args:
      config: the stream.
      vocabulary: writes the ids.

    Raises:
      MissingExtraError: reader "seqio" without the extra `data`.
      InputError: missing files, or a task without a usable line.
    """
    self.config, self._vocabulary = config, vocabulary
    tasks = rows.unique(config.tasks)
    self._held = [rows.read(task, vocabulary, config.reader) for task in tasks]
    numbers = [tasks.index(task) for task in config.tasks]
    sizes = tuple(len(self._held[number].rows) for number in numbers)
    self._entries = arrivals.schedule(config, sizes)
    self._task_ids = np.asarray(numbers, np.int32)[self._entries]
    self._ordinals = rows.ordinals(self._task_ids)

  @property
  def total(self) -> int:
    """How many queries there are."""
    return len(self)

  def __len__(self) -> int:
    return len(self._task_ids)

  def __getitem__(self, index: int) -> Query:
    if not 0 <= index < len(self):
      raise IndexError(f"query {index} of a stream of {len(self)}")
    task_id = int(self._task_ids[index])
    held = self._held[task_id]
    row = held.rows[self._row_number(task_id, int(self._ordinals[index]))]
    return Query(
      index=index,
      task=held.task.label,
      task_id=task_id,
      prompt=row.prompt,
      reference=row.reference,
      tokens=self._vocabulary.cut_prompt(row.source, self.config.source_length),
      row_id=row.row_id,
    )

  def __iter__(self) -> Iterator[Query]:
    return map(self.__getitem__, range(len(self)))

  def shifts(self) -> list[tuple[int, str]]:
    """Returns (index, label) where a new segment starts, the first included.

    A gradual shift is named at its middle; a mixture is one segment without a
    label of its own.
    """
    if self.config.kind == "mixture":
      return [(0, "mixture")]
    entries = self._entries
    if self.config.kind == "gradual":
      entries = np.sort(entries)
    starts = np.flatnonzero(np.diff(entries, prepend=-1))
    return [(int(i), self.config.tasks[entries[i]].label) for i in starts]

  def state(self) -> dict[str, Any]:
    """Returns what `restore` needs, json-able."""
    return {"fingerprint": self._fingerprint}

  def restore(self, state: dict[str, Any]) -> None:
    """Checks that these are the queries that `state` was taken of.

    Raises:
      InputError: another stream's state, or the data changed.
    """
    if state.get("fingerprint") != self._fingerprint:
      raise _another_stream(state, self.state())

  def report(self) -> dict[str, Any]:
    """Returns what was read and what happens to it, json-able.

    Returns:
      For every task's name what `rows.report` says: `rows` read, `skipped`,
      `cut` (prompts longer than `source_length`); and `served`, queries of it.
    """
    longest = self.config.source_length
    served = np.bincount(self._task_ids, minlength=len(self._held))
    return {
      held.task.name: {
        **rows.report(
          held.task.label,
          len(held.rows),
          skipped=held.skipped,
          cut=[row.location for row in held.rows if len(row.source) > longest],
        ),
        "served": int(served[task_id]),
      }
      for task_id, held in enumerate(self._held)
    }

  def sentences(self) -> list[str]:
    """The report in words: one sentence for each task with something to say."""
    cut = _cut(self.config.source_length)
    return rows.sentences(self.report(), {"cut": cut}, _repeats)

  def _row_number(self, task_id: int, ordinal: int) -> int:
    epoch, place = divmod(ordinal, len(self._held[task_id].rows))
    return int(self._order(task_id, epoch)[place]) if self.config.shuffle else place

  @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the run)
  def _order(self, task_id: int, epoch: int) -> np.ndarray:
    held = self._held[task_id]
    return rows.order(held.task, len(held.rows), self.config.seed, epoch)

  @functools.cached_property
  def _fingerprint(self) -> str:
    held = [(part.task.name, part.fingerprint) for part in self._held]
    config = self.config
    return rows.fingerprint(
      (held, self._task_ids.tolist(), config.seed, config.shuffle, config.source_length)
    )


class PromptStream:
  """A caller's own prompts, read as they are served. Made by `of_prompts`."""

  def __init__(
    self,
    prompts: Iterable[str | None],
    vocabulary: Vocabulary,
    label: str,
    source_length: int,
  ):
    """See `of_prompts`."""
    self.total = len(prompts) if isinstance(prompts, Sequence) else None
    self._prompts, self._vocabulary = iter(prompts), vocabulary
    self._label, self._longest = label, source_length
    self._held: dict[int, Query] = {}
    self._read, self._digest = 0, hashlib.sha256()
    self._report = rows.report(label, 0, skipped=(), cut=())

  def __getitem__(self, index: int) -> Query:
    while self._report["rows"] <= index:
      self._read_one()
    if index not in self._held:
      raise IndexError(f"query {index} is not held (any more)")
    return self._held[index]

  def shifts(self) -> list[tuple[int, str]]:
    """Returns the one segment that there is."""
    return [(0, self._label)]

  def state(self) -> dict[str, Any]:
    """Returns how many prompts were read, and what they were."""
    return {"read": self._read, "fingerprint": self._digest.hexdigest()[:16]}

  def restore(self, state: dict[str, Any]) -> None:
    """Reads the prompts once more that had been read.

    Raises:
      InputError: these are others, or fewer.
    """
    try:
      while self._read < state["read"]:
        self._read_one()
    except IndexError as error:
      raise _another_stream(state, self.state()) from error
    if self.state() != state:
      raise _another_stream(state, self.state())

  def report(self) -> dict[str, Any]:
    """Returns what was read so far, as `QueryStream.report` does."""
    return {self._label: {**self._report, "served": self._report["rows"]}}

  def sentences(self) -> list[str]:
    """The report in words."""
    return rows.sentences(self.report(), {"cut": _cut(self._longest)})

  def _read_one(self) -> None:
    """Takes one more prompt, which is the next query unless it is blank."""
    index = self._report["rows"]
    prompt = next((one for one in self._prompts if one is not None), None)
    if prompt is None:
      raise IndexError(f"the stream has ended after {index} queries")
    self._read += 1
    if not isinstance(prompt, str):
      raise base.InputError(
        f"of_prompts: prompts: received {prompt!r} as number {self._read}, expected"
        " text."
      )
    text = prompt.encode("utf-8", "replace").decode()  # lone surrogates are no text
    self._digest.update(f"{len(text)}:{text}".encode())
    place = f"{self._label}:{self._read}"
    tokens = self._vocabulary.encode_prompt(text)
    if self._vocabulary.is_blank(tokens) or not text.strip():
      rows.note(self._report, "skipped", f"{place}: empty: the prompt is blank")
      return
    if len(tokens) > self._longest:
      rows.note(self._report, "cut", place)
    self._report["rows"] += 1
    cut = self._vocabulary.cut_prompt(tokens, self._longest)
    self._held[index] = Query(index, self._label, 0, text, "", cut, place)
    self._held.pop(index - _HELD, None)


def make(
  config: StreamConfig | Callable[[Vocabulary], Stream], vocabulary: Vocabulary
) -> Stream:
  """The stream that a config describes, or that a function makes."""
  if isinstance(config, StreamConfig):
    return QueryStream(config, vocabulary)
  return config(vocabulary)


def of_prompts(
  prompts: Iterable[str | None],
  vocabulary: Vocabulary,
  label: str = "own",
  source_length: int = 64,
) -> PromptStream:
  """Makes a stream of a caller's own prompts: a list, a generator, a queue's `get`.

  They are read as they are served, so they may be without end. A run that is
  continued reads them once more from the first on.

  Args:
    prompts: texts; blank ones are skipped and counted. None says that at present
      nothing waits, and the next one is asked for.
    vocabulary: writes the ids.
    label: what tables call these requests.
    source_length: longest prompt in tokens, end-of-sequence included.

  Raises:
    InputError: `prompts` is one text, or a setting is no length.
  """
  if isinstance(prompts, str) or not isinstance(prompts, Iterable):
    raise base.InputError(
      f"of_prompts: prompts: received {prompts!r}, expected an iterable of texts."
    )
  if not base.is_count(source_length, 2):
    raise base.InputError(
      f"of_prompts: source_length: received {source_length!r}, expected at least 2."
    )
  return PromptStream(prompts, vocabulary, label, source_length)


def _cut(source_length: int) -> str:
  return f"{{count}} prompts cut to {source_length} tokens"


def _repeats(task: dict[str, Any]) -> list[str]:
  """The clause on prompts that are served again, or not at all."""
  served, there = task["served"], task["rows"]
  if served < there:
    return [f"{served} of {there} prompts are served"]
  turns, rest = divmod(served, there)
  often = f"{turns} or {turns + 1}" if rest else f"{turns}"
  return [f"each of {there} prompts is served {often} times"] if served > there else []


def _another_stream(state: dict[str, Any], expected: dict[str, Any]) -> base.InputError:
  return base.InputError(
    f"stream: received the state {state}, expected {expected}: it is of another stream"
    " config, vocabulary or data. Resume with what the run began with."
  )
