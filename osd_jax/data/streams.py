"""Query streams: the task and the prompt of every request of a run.

The schedule is a function of the config (including its seed) and of the number of
examples in each task, and the n-th query of a task is a function of n. So a query is
found from its index alone, and a run resumes from one number. `of_prompts` makes a
stream of a caller's own prompts.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Protocol

import numpy as np

from osd_jax import base
from osd_jax.data import examples
from osd_jax.data.examples import TaskConfig, TaskExamples
from osd_jax.data.vocabulary import Vocabulary

KINDS = ("sharp", "gradual", "mixture", "cyclic", "bursty")
_GRADUAL_WIDTH = 100  # queries over which one task replaces another in "gradual"
_PERIOD = 50  # consecutive queries of a task in "cyclic"
_MEAN_BURST = 8.0  # mean length of a run of one task in "bursty", in queries
# Queries that a `PromptStream` keeps in memory: more than can be in flight.
_MAX_KEPT = 2**16


@dataclasses.dataclass(frozen=True)
class StreamConfig(base.Config):
  """A stream of queries: how many come from each task, and in which order.

  >>> StreamConfig(tasks=(TaskConfig(name="ours", pattern="ours.jsonl"),)).kind
  'sharp'

  Attributes:
    tasks: in order of appearance; a task may occur more than once.
    kind: one of `KINDS`: "sharp" (one task after the other), "gradual" (the next task's
      share rises linearly over 100 queries around each boundary), "mixture" (tasks
      mixed at random), "cyclic" (50 queries of a task, then the next, repeatedly),
      "bursty" (runs of random length, 8 queries on average).
    requests_per_task: queries of each entry of `tasks`. A task with fewer examples
      starts over; of a task with more, only a part is served. None serves every
      example once, so `TaskConfig.rows` gives the shares of a mixture.
    seed: of the schedule and of the shuffling.
    source_length: longest prompt in tokens, including end-of-sequence.
    shuffle: a seeded order, different in each pass over a task; False keeps the order
      of the source.
  """

  tasks: tuple[TaskConfig, ...]
  kind: Annotated[str, base.OneOf(*KINDS)] = "sharp"
  requests_per_task: base.Count | None = None
  seed: base.CountOrZero = 0
  source_length: Annotated[int, base.AtLeast(2)] = 64
  shuffle: bool = True

  def checks(self):
    examples.unique_tasks(self.tasks)  # raises if two different tasks have one name
    least = 2 if self.kind in ("cyclic", "bursty") else 1
    expected = f"at least {least} TaskConfig for kind {self.kind!r}"
    return {"tasks": (len(self.tasks) >= least, expected)}


# ---- Schedules: which entry of StreamConfig.tasks each query comes from


def schedule(config: StreamConfig, sizes: Sequence[int]) -> np.ndarray:
  """Returns for every query the index of its entry in `config.tasks`, [total] int32.

  `sizes` are the numbers of examples of the entries.
  """
  per_task = config.requests_per_task
  counts = np.asarray([per_task or size for size in sizes])
  rng = np.random.default_rng([config.seed, 0])
  return SCHEDULES[config.kind](counts, rng).astype(np.int32)


def _sharp(counts: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
  """Returns all queries of the first entry, then those of the second, and so on."""
  del rng  # all schedules have the same arguments
  return np.repeat(np.arange(len(counts)), counts)


def _gradual(
  counts: np.ndarray, rng: np.random.Generator, width: int = _GRADUAL_WIDTH
) -> np.ndarray:
  """Moves every query by up to half the width, which makes each share a linear ramp."""
  entries = _sharp(counts)
  # A wider ramp would reach past a whole task, and mix the tasks before and after it.
  width = min(width, counts.min())
  offset = width * (rng.random(len(entries)) - 0.5)
  return entries[np.argsort(np.arange(len(entries)) + offset)]


def _cyclic(
  counts: np.ndarray, rng: np.random.Generator, period: int = _PERIOD
) -> np.ndarray:
  """Sorts queries by cycle, then by entry; an entry without queries left is skipped."""
  entries = _sharp(counts)
  return entries[np.lexsort((entries, examples.ordinals(entries) // period))]


def _bursty(
  counts: np.ndarray, rng: np.random.Generator, mean: float = _MEAN_BURST
) -> np.ndarray:
  """Ends a run with probability 1 / mean, and draws another entry with queries left."""
  remaining, entries = counts.copy(), np.empty(counts.sum(), np.int64)
  # Drawn for all steps at once: the numbers of a step do not depend on the branches
  # that earlier steps took.
  ends, draws = rng.random((2, len(entries)))
  current = int(rng.integers(len(counts)))
  for step in range(len(entries)):
    # Only entries with queries left: at the end of the stream a single one remains, and
    # its run cannot end.
    others = [entry for entry in np.flatnonzero(remaining) if entry != current]
    if remaining[current] == 0 or others and step and ends[step] < 1 / mean:
      current = others[int(draws[step] * len(others))]
    entries[step] = current
    remaining[current] -= 1
  return entries


SCHEDULES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
  "sharp": _sharp,
  "gradual": _gradual,
  "mixture": lambda counts, rng: rng.permutation(_sharp(counts)),
  "cyclic": _cyclic,
  "bursty": _bursty,
}


# ---- Streams


@dataclasses.dataclass(frozen=True, eq=False)
class Query:
  """One request of a stream.

  Attributes:
    index: its position in the stream, starting at 0.
    task: label of its task.
    task_id: number of its task, in order of first appearance in the config.
    prompt: text.
    reference: the data set's own answer, "" if it has none; no model reads it.
    tokens: [n] int32, the prompt's ids, n <= source_length.
    row_id: the example's own id, or its location.
  """

  index: int
  task: str
  task_id: int
  prompt: str
  reference: str
  tokens: np.ndarray
  row_id: str


class Stream(Protocol):
  """Queries by their index; `QueryStream` and `PromptStream` implement it."""

  @property
  def total(self) -> int | None:
    """The number of queries, or None if it is unknown."""
    ...

  def __getitem__(self, index: int) -> Query:
    """Returns the query at `index`, or raises IndexError after the last one.

    Callers read queries in order, and may read one again until it has been answered.
    """
    ...

  def shifts(self) -> list[tuple[int, str]]:
    """Returns (index, label) of the start of every segment, including the first."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns what `restore` of the same stream needs, JSON-able."""
    ...

  def restore(self, state: dict[str, Any]) -> None:
    """Makes the same queries available as when `state` was taken.

    Raises:
      InputError: the state belongs to other queries.
    """
    ...

  def report(self) -> dict[str, Any]:
    """Returns `examples.report` by name of the task, with `served` queries."""
    ...

  def sentences(self) -> list[str]:
    """Returns one sentence for each task with skipped, cut or repeated prompts."""
    ...


class QueryStream:
  """The queries of a config, read by index or in a loop.

  A task that runs out of examples starts over, in a new order if `shuffle` is set.
  """

  def __init__(self, config: StreamConfig, vocabulary: Vocabulary):
    """Reads every task; raises as `TaskExamples`."""
    self.config, self._vocabulary = config, vocabulary
    tasks = examples.unique_tasks(config.tasks)
    self._tasks = [TaskExamples(task, vocabulary) for task in tasks]
    task_ids = [tasks.index(task) for task in config.tasks]
    self._entries = schedule(config, [len(self._tasks[i]) for i in task_ids])
    self._task_ids = np.asarray(task_ids, np.int32)[self._entries]
    self._ordinals = examples.ordinals(self._task_ids)

  @property
  def total(self) -> int:
    return len(self)

  def __len__(self) -> int:
    return len(self._task_ids)

  def __getitem__(self, index: int) -> Query:
    if not 0 <= index < len(self):
      raise IndexError(f"query {index} of a stream of {len(self)}")
    task_id = int(self._task_ids[index])
    read = self._tasks[task_id]
    number = self._example_number(task_id, int(self._ordinals[index]))
    example, (tokens, _) = read.examples[number], read.tokens(number)
    return Query(
      index=index,
      task=read.task.label,
      task_id=task_id,
      prompt=example.prompt,
      reference=example.reference,
      tokens=self._vocabulary.cut_prompt(tokens, self.config.source_length),
      row_id=example.example_id,
    )

  def __iter__(self) -> Iterator[Query]:
    return map(self.__getitem__, range(len(self)))

  def shifts(self) -> list[tuple[int, str]]:
    if self.config.kind == "mixture":
      return [(0, "mixture")]
    entries = self._entries
    # A gradual shift is reported at its middle: sorting gives the schedule without the
    # ramps, whose boundaries are their middles.
    if self.config.kind == "gradual":
      entries = np.sort(entries)
    starts = np.flatnonzero(np.diff(entries, prepend=-1))
    return [(int(i), self.config.tasks[entries[i]].label) for i in starts]

  def state(self) -> dict[str, Any]:
    return {"fingerprint": self._fingerprint}

  def restore(self, state: dict[str, Any]) -> None:
    if state.get("fingerprint") != self._fingerprint:
      raise _wrong_state(state, self.state())

  def report(self) -> dict[str, Any]:
    longest = self.config.source_length
    served = np.bincount(self._task_ids, minlength=len(self._tasks))
    accounts = {}
    for task_id, read in enumerate(self._tasks):
      # Of a large file often few prompts are served, and only these are encoded.
      ordinals = range(min(served[task_id], len(read)))
      numbers = sorted(self._example_number(task_id, ordinal) for ordinal in ordinals)
      places = {"skipped": read.skipped, "cut": read.longer_than(longest, 0, numbers)}
      account = examples.report(read.task.label, len(read), **places)
      accounts[read.task.name] = {**account, "served": int(served[task_id])}
    return accounts

  def sentences(self) -> list[str]:
    cut = _cut_clause(self.config.source_length)
    return examples.sentences(self.report(), {"cut": cut}, _repetition_clause)

  def _example_number(self, task_id: int, ordinal: int) -> int:
    epoch, place = divmod(ordinal, len(self._tasks[task_id]))
    return int(self._order(task_id, epoch)[place]) if self.config.shuffle else place

  @functools.lru_cache(maxsize=64)  # noqa: B019 (a stream lives as long as its run)
  def _order(self, task_id: int, epoch: int) -> np.ndarray:
    read = self._tasks[task_id]
    return examples.order(read.task, len(read), self.config.seed, epoch)

  @functools.cached_property
  def _fingerprint(self) -> str:
    config = self.config
    # Everything that decides which query has which index. A changed file, vocabulary or
    # seed must not continue another run's stream.
    parts = (
      [(read.task.name, read.fingerprint) for read in self._tasks],
      self._task_ids.tolist(),
      config.seed,
      config.shuffle,
      config.source_length,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class PromptStream:
  """A caller's own prompts, read while they are served. Made by `of_prompts`."""

  def __init__(
    self,
    prompts: Iterable[str | None],
    vocabulary: Vocabulary,
    label: str,
    source_length: int,
  ):
    self.total = len(prompts) if isinstance(prompts, Sequence) else None
    self._prompts, self._vocabulary = iter(prompts), vocabulary
    self._label, self._longest = label, source_length
    self._kept: dict[int, Query] = {}
    self._read, self._digest = 0, hashlib.sha256()
    self._report = examples.report(label, 0, skipped=(), cut=())

  def __getitem__(self, index: int) -> Query:
    while self._report["rows"] <= index:
      self._read_one()
    if index not in self._kept:
      raise IndexError(f"query {index} is no longer in memory")
    return self._kept[index]

  def shifts(self) -> list[tuple[int, str]]:
    return [(0, self._label)]

  def state(self) -> dict[str, Any]:
    return {"read": self._read, "fingerprint": self._digest.hexdigest()[:16]}

  def restore(self, state: dict[str, Any]) -> None:
    try:
      # Prompts cannot be skipped, so those that were read are read again.
      while self._read < state["read"]:
        self._read_one()
    except IndexError as error:
      raise _wrong_state(state, self.state()) from error
    if self.state() != state:
      raise _wrong_state(state, self.state())

  def report(self) -> dict[str, Any]:
    return {self._label: {**self._report, "served": self._report["rows"]}}

  def sentences(self) -> list[str]:
    return examples.sentences(self.report(), {"cut": _cut_clause(self._longest)})

  def _read_one(self) -> None:
    """Reads one more prompt, which becomes the next query unless it is blank."""
    index = self._report["rows"]
    prompt = next((one for one in self._prompts if one is not None), None)
    if prompt is None:
      raise IndexError(f"the stream has ended after {index} queries")
    self._read += 1
    if not isinstance(prompt, str):
      raise base.InputError(
        f"of_prompts: prompts: prompt {self._read} is {prompt!r}, expected text."
      )
    # Lone surrogates become "?": they cannot be encoded, and one bad prompt must not
    # end a service.
    text = prompt.encode("utf-8", "replace").decode()
    # Skipped prompts count too: a resumed run must read the same sequence to reach the
    # same place.
    self._digest.update(f"{len(text)}:{text}".encode())
    place = f"{self._label}:{self._read}"
    tokens = self._vocabulary.encode_prompt(text)
    if self._vocabulary.is_blank(tokens) or not text.strip():
      skipped = f"{place}: empty: the prompt is blank"
      examples.add_to_report(self._report, "skipped", skipped)
      return
    if len(tokens) > self._longest:
      examples.add_to_report(self._report, "cut", place)
    self._report["rows"] += 1
    cut = self._vocabulary.cut_prompt(tokens, self._longest)
    self._kept[index] = Query(index, self._label, 0, text, "", cut, place)
    # Only requests in flight are read again after a resumption, so older prompts can be
    # dropped. An endless stream would otherwise fill the memory.
    self._kept.pop(index - _MAX_KEPT, None)


def make(
  config: StreamConfig | Callable[[Vocabulary], Stream], vocabulary: Vocabulary
) -> Stream:
  """Returns the stream of a config, or calls a function that makes one."""
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

  Prompts are read while they are served, so the iterable may be infinite. A run that is
  resumed reads them again from the first.

  Args:
    prompts: texts; blank ones are skipped and counted. None means that no prompt is
      waiting at the moment, and the next one is read.
    vocabulary: encodes the prompts as their model reads them.
    label: the name of these requests in tables.
    source_length: longest prompt in tokens, including end-of-sequence.

  Raises:
    InputError: `prompts` is a single text, or `source_length` is less than 2.
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


def _cut_clause(source_length: int) -> str:
  return f"{{count}} prompt(s) cut to {source_length} tokens"


def _repetition_clause(account: dict[str, Any]) -> list[str]:
  """Says how often prompts are repeated, or how many are not served."""
  served, available = account["served"], account["rows"]
  if served < available:
    return [f"{served} of {available} prompts are served"]
  turns, rest = divmod(served, available)
  often = f"{turns} or {turns + 1}" if rest else f"{turns}"
  if served > available:
    return [f"each of {available} prompts is served {often} times"]
  return []


def _wrong_state(state: dict[str, Any], expected: dict[str, Any]) -> base.InputError:
  return base.InputError(
    f"stream: received the state {state}, expected {expected}: it belongs to another"
    " stream config, vocabulary or data. Resume with the settings and data with which"
    " the run began."
  )
