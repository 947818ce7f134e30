"""Examples of a task, as text and as token ids.

A `TaskConfig` names one source: files (on this machine, in a bucket or shipped with the
package), a TFDS data set, or a registered seqio Task. All of them give a mapping of
fields, which two templates turn into a prompt and a reference.

No example can stop a run: an unusable one is skipped, counted and reported with its
file and line.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from osd_jax import assets, base, remote
from osd_jax.data import chat, files, preprocessors, seqio_source
from osd_jax.data.preprocessors import PREPROCESSORS, UnusableExample
from osd_jax.data.vocabulary import Vocabulary

# The demo's topics, shipped as NAME.SPLIT.jsonl.gz. experiments/shipped_pair has their
# generators, which write any number of examples.
TOPICS = ("maths", "sql", "python", "finance")
TOPICS_DIR = "shipped:topics"

# What `osd generate` reads from a file.
_PROMPT = "{prompt|question|text}"
_MESSAGES = ("messages", "conversations")  # fields with a list of chat messages
TFDS, SEQIO = "tfds:", "seqio:"
_MAX_REPORTED_PLACES = 100  # for each count in a report
_MAX_NAMED_PLACES = 3  # for each count in a sentence
_PLACE = r"(.+?:\d+)(?:: \w+: (.*))?"  # location, kind, reason


@dataclasses.dataclass(frozen=True)
class TaskConfig(base.Config):
  """One source of examples.

  >>> TaskConfig(name="ours", pattern="ours.jsonl", source="support").label
  'support'

  Attributes:
    name: unique among the tasks of a run; letters, digits, "_", "." and ":".
    source: label of its requests in logs and tables; "" uses the name.
    split: replaces "{split}" in `pattern`; the split of a TFDS set or seqio Task.
    preprocessor: the templates of a published data set, a key of `PREPROCESSORS`.
    prompt: template of the prompt, with field names in braces, such as
      "summarize: {article}"; "" uses the preprocessor's.
    reference: template of the reference, which is "" if a field is missing; "" uses
      the preprocessor's. It is used instead of the last of a row's chat messages.
    data_dir: folder of the files, "shipped:topics" for the demo's, or TFDS's data
      folder ("": its default).
    pattern: file name or glob of JSONL, JSON, CSV, Parquet or text files in `data_dir`,
      or of folders that `save_to_disk` of the library datasets wrote;
      "tfds:NAME:VERSION" for a TFDS data set, such as "tfds:gsm8k:1.0.0"; or
      "seqio:NAME" for a registered seqio Task or Mixture. The text features of a Task
      are its fields; its inputs and targets are also called `prompt` and `reference`.
    rows: reads the first `rows` usable examples; None reads all. To serve only part
      of the data, set `StreamConfig.requests_per_task`.
  """

  name: str
  source: str = ""
  split: str = "train"
  preprocessor: Annotated[str, base.OneOf(*PREPROCESSORS)] = "identity"
  prompt: str = ""
  reference: str = ""
  data_dir: str = ""
  pattern: base.Path = ""
  rows: base.Count | None = None

  def checks(self):
    return {
      "name": (
        re.fullmatch(r"[\w.:]+", self.name, re.ASCII),
        "letters, digits, '_', '.' or ':'",
      ),
      **{
        name: (
          preprocessors.is_template(getattr(self, name)),
          "text with names of fields in braces, such as '{question}'",
        )
        for name in ("prompt", "reference")
        if getattr(self, name)
      },
    }

  @property
  def label(self) -> str:
    """The name of its requests in logs and tables."""
    return self.source or self.name

  @property
  def templates(self) -> tuple[str, str]:
    """The templates of the prompt and of the reference."""
    prompt, reference = PREPROCESSORS[self.preprocessor]
    return self.prompt or prompt, self.reference or reference


@dataclasses.dataclass(frozen=True)
class Example:
  """One usable example as text."""

  location: str  # "file:line", or "name of the data set:number"
  example_id: str  # the example's own field `id`, or its location without the folder
  prompt: str  # the text that the target answers
  reference: str = ""  # the data set's own answer; "" if it has none


def topic_task(topic: str, split: str = "train", rows: int | None = None) -> TaskConfig:
  """Returns the task of one of the demo's `TOPICS`.

  The splits are "train", "eval", "stream", and "seen", the part of the train split that
  warms up the demo's learner. `rows=None` reads all shipped examples.
  """
  return TaskConfig(
    f"generated_{topic}",  # seeds the order, so stored results depend on it
    source=topic,
    data_dir=TOPICS_DIR,
    pattern=f"{topic}.{{split}}.jsonl.gz",
    split=split,
    rows=rows,
  )


def topic_examples(topic: str, split: str, count: int) -> list[Example]:
  """Returns the first `count` examples of one of the demo's topics."""
  first = list(texts(topic_task(topic, split, count)))
  if len(first) < count:
    raise base.InputError(
      f"topic_examples: count: received {count}, but {topic}.{split} has {len(first)}"
      " examples. experiments/shipped_pair/make_topics.py writes more."
    )
  return first


def texts(task: TaskConfig, skipped: list[str] | None = None) -> Iterator[Example]:
  """Yields the usable examples of a task, at most `rows`, in the order of the source.

  "location: kind: reason" of every unusable example is appended to `skipped`.

  Raises:
    InputError: the files or the data set cannot be read.
    MissingExtraError: a source that needs an extra which is not installed.
  """
  # `rows` counts usable examples, so that a bad line in the data does not change how
  # many examples a run gets.
  usable = 0
  for location, raw in _rows(task):
    # Checked before the next example is parsed: an endless or remote source is not read
    # further than needed.
    if usable == task.rows:
      return
    try:
      example = _example(task.templates, location, raw)
    except UnusableExample as error:
      if skipped is not None:
        skipped.append(f"{location}: {error.kind}: {error}")
      continue
    usable += 1
    yield example


def read_prompts(
  path: str, setting: str
) -> Iterator[tuple[int, str | UnusableExample]]:
  """Yields (line number, prompt) for each row of a file, or (line number, fault).

  The file is read by `files.read`; errors name the setting with its path. The fault of
  a blank line has the kind "empty".

  Raises:
    InputError: the file cannot be read, or no row has a prompt.
    MissingExtraError: the format needs a library that is absent.
  """
  usable, faults = 0, []
  for number, raw in files.read(path, setting):
    try:
      yield number, _example((_PROMPT, ""), f"{path}:{number}", raw).prompt
      usable += 1
    except UnusableExample as fault:
      yield number, fault
      faults = faults or [f"; row {number}: {fault}"]
  if not usable:
    reason = "".join([f"no prompt for {_PROMPT!r}", *faults])
    hint = files.looks_like(path)
    raise base.InputError(f"{setting}: {path} has {reason}. {hint}".strip())


class TaskExamples:
  """The usable examples of a task, in the order of the source.

  Attributes:
    task: its config.
    examples: the usable ones.
    skipped: "location: kind: reason" of each unusable one; kind is "empty" (a blank
      line or prompt) or "malformed".
  """

  def __init__(self, task: TaskConfig, vocabulary: Vocabulary):
    """Reads the whole task; token ids are computed when they are needed.

    Raises as `texts`; a source without a usable example is an InputError.
    """
    self.task, self._vocabulary = task, vocabulary
    self.examples: list[Example] = []
    self.skipped: list[str] = []
    self._tokens: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for example in texts(task, self.skipped):
      if fault := self._fault(example.prompt):
        self.skipped.append(f"{example.location}: {fault}")
      else:
        self.examples.append(example)
    if not self.examples:
      raise _no_usable_row(task, self.skipped)

  def __len__(self) -> int:
    return len(self.examples)

  def tokens(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of one example.

    They are computed at the first call: often few examples of a large corpus are kept,
    and tokenization takes longer than reading.

    Returns:
      Prompt, [n] int32 in the form that the models read; and reference, [m] int32 with
      end-of-sequence, m >= 1.
    """
    if number not in self._tokens:
      example = self.examples[number]
      self._tokens[number] = (
        self._vocabulary.encode_prompt(example.prompt),
        self._vocabulary.encode_with_eos(example.reference),
      )
    return self._tokens[number]

  def longer_than(self, limit: int, part: int, numbers: Iterable[int]) -> list[str]:
    """Returns the locations of the examples `numbers` that have more tokens.

    `part` is 0 for prompts and 1 for references.
    """
    return [
      self.examples[number].location
      for number in numbers
      if len(self.tokens(number)[part]) > limit
    ]

  @functools.cached_property
  def fingerprint(self) -> str:
    """A digest of all texts and of how they are encoded, which give all token ids."""
    own = self._vocabulary
    # A template may write today's date, so one prompt is encoded, too.
    encoded = own.encode_prompt("Hello").tolist()
    encodes = (own.fingerprint, own.chat_template, own.variables, encoded)
    digest = hashlib.sha256(repr(encodes).encode())
    for example in self.examples:
      # A conversation is more than its text: its messages have roles.
      messages = getattr(example.prompt, "messages", ())
      parts = (str(example.prompt), example.reference, messages)
      digest.update(repr(parts).encode())
    return digest.hexdigest()

  def _fault(self, prompt: str) -> str:
    """Says why the vocabulary cannot encode a prompt, or returns ""."""
    # A text of characters that the tokenizer removes has no tokens. A letter or digit
    # always has one, so most prompts need not be encoded here.
    is_conversation = isinstance(prompt, chat.Conversation)
    if re.search(r"[A-Za-z0-9]", prompt) and not is_conversation:
      return ""
    try:
      ids = self._vocabulary.encode_prompt(prompt)
    except base.InputError as error:
      return f"malformed: {error}"
    return "empty: the prompt has no tokens" if self._vocabulary.is_blank(ids) else ""


def _no_usable_row(task: TaskConfig, skipped: list[str]) -> base.InputError:
  first = f", the first: {skipped[0]}" if skipped else ""
  is_files = not task.pattern.startswith((TFDS, SEQIO))
  hints = map(files.looks_like, find_files(task)) if is_files else ()
  return base.InputError(
    f"TaskConfig (task {task.name!r}): no usable line; {len(skipped)} were"
    f" skipped{first}. Expected the fields of {task.templates[0]!r} in every row;"
    f" TaskConfig.prompt reads other fields. {next(filter(None, hints), '')}".strip()
  )


# ---- Sources


def find_files(task: TaskConfig) -> list[str]:
  """Returns the files of a task in sorted order; InputError if it has no files."""
  whose = f" (task {task.name!r})"
  pattern = task.pattern.replace("{split}", task.split)
  folder, setting = task.data_dir, f"TaskConfig.data_dir{whose}"
  if folder.startswith(assets.PREFIX):
    folder = str(assets.resolve(folder, setting))
  if remote.is_remote(folder):
    names: list[str] = []
    paths = [
      str(remote.fetched(address, setting))
      for address in remote.matching(folder, pattern, setting)
    ]
  else:
    try:
      names = sorted(os.listdir(folder or "."))
      # Sorted, because the order of the examples, and with it a whole run, would
      # otherwise depend on the file system.
      paths = sorted(glob.glob(os.path.join(folder, pattern)))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the pattern
      raise base.InputError(
        f"{setting}: received {folder!r}, expected a readable folder ({error}); give"
        " the folder of the files."
      ) from error
  if not paths:
    there = f"; it holds {names[:20]}" if names else ""
    raise base.InputError(
      f"TaskConfig.pattern{whose}: received {pattern!r}, which no file in"
      f" {folder or '.'!r} matches{there}. Correct the pattern, the split or data_dir."
    )
  return paths


def _rows(task: TaskConfig) -> Iterator[tuple[str, files.Row]]:
  """Yields (location, row) for every row of a task."""
  setting = f"TaskConfig.pattern (task {task.name!r})"
  if task.pattern.startswith(TFDS):
    name = task.pattern.removeprefix(TFDS)
    yield from seqio_source.tfds_examples(setting, name, task.split, task.data_dir)
  elif task.pattern.startswith(SEQIO):
    name = task.pattern.removeprefix(SEQIO)
    yield from seqio_source.task_examples(setting, name, task.split)
  else:
    for path in find_files(task):
      for number, row in files.read(path, setting):
        yield f"{path}:{number}", row


def _example(templates: tuple[str, str], location: str, raw: files.Row) -> Example:
  """Fills the templates of the prompt and the reference."""
  if isinstance(raw, UnusableExample):
    raise raw
  messages = _messages(raw) if templates[0] in ("{prompt}", _PROMPT) else None
  reference = preprocessors.fill_reference(templates[1], raw)
  if messages is None:
    prompt = preprocessors.fill_prompt(templates[0], raw)
  else:
    prompt, answer = chat.split_messages(messages)
    reference = reference or answer
  try:
    # JSON may escape half of a surrogate pair ("\ud83d"). Python decodes it, but
    # neither the tokenizers nor the logs can encode it.
    (prompt + reference).encode("utf-8")
  except UnicodeEncodeError as error:
    reason = "prompt or reference holds a lone surrogate, which is not text"
    raise UnusableExample("malformed", reason) from error
  # True is an int in Python but not an id.
  own_id = raw.get("id")
  if isinstance(own_id, bool) or not isinstance(own_id, str | int):
    own_id = os.path.basename(location)
  example_id = str(own_id).encode("utf-8", "replace").decode()
  return Example(location, example_id, prompt, reference)


def _messages(raw: Mapping[str, Any]) -> Any:
  """Returns the chat messages of a row, or None if its prompt is a text."""
  prompt, answer = raw.get("prompt"), raw.get("completion")
  if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):  # TRL's
    messages = prompt + (answer if isinstance(answer, list) else [])
  elif prompt is None:
    fields = (raw[name] for name in _MESSAGES if raw.get(name) is not None)
    messages = next(fields, None)
  else:
    return None
  if messages is not None and (tools := raw.get("tools") or raw.get("functions")):
    reason = f"a conversation with tools ({len(tools)}), which are not supported"
    raise UnusableExample("malformed", reason)
  return messages


# ---- What streams and batches share


def unique_tasks(configs: Iterable[TaskConfig]) -> tuple[TaskConfig, ...]:
  """Returns the different tasks in order of appearance.

  Two different tasks of the same name are an InputError.
  """
  tasks = tuple(dict.fromkeys(configs))
  names = [task.name for task in tasks]
  repeated = sorted({name for name in names if names.count(name) > 1})
  if repeated:
    raise base.InputError(
      f"TaskConfig.name: two different tasks of one run are called {repeated}; give"
      " each its own name (requests may share a `source` label)."
    )
  return tasks


def order(task: TaskConfig, count: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the shuffled order of a task's examples in one epoch, [count].

  It depends on the task's name but not on the other tasks of the run, so adding a task
  does not reorder the others.
  """
  # `hash` of a text differs between processes, so it cannot seed a reproducible order.
  name = int.from_bytes(hashlib.sha256(task.name.encode()).digest()[:4], "big")
  return np.random.default_rng([seed, name, epoch]).permutation(count)


def ordinals(task_ids: np.ndarray) -> np.ndarray:
  """Returns how often each entry occurred earlier in the array, [total] int64.

  >>> ordinals(np.array([0, 0, 1, 0])).tolist()
  [0, 1, 0, 2]
  """
  before = np.zeros(len(task_ids), np.int64)
  for task_id in np.unique(task_ids):
    same = task_ids == task_id
    before[same] = np.arange(np.sum(same))
  return before


def report(source: str, rows: int, **places: Sequence[str]) -> dict[str, Any]:
  """Returns the counts of a task's examples, ready for JSON.

  Tables list the task's requests as `source`; `rows` examples are usable. `places` are,
  for each name of a count, the locations of the examples counted. The first 100 of each
  are kept under "places".
  """
  account = {"source": source, "rows": rows, **dict.fromkeys(places, 0), "places": {}}
  for name, located in places.items():
    for place in located:
      add_to_report(account, name, place)
  return account


def add_to_report(account: dict[str, Any], name: str, place: str) -> None:
  """Increments one count of a report."""
  account[name] += 1
  places = account["places"].setdefault(name, [])
  # A file of the wrong format has an error in every line; the report names the first.
  if len(places) < _MAX_REPORTED_PLACES:
    places.append(place)


def sentences(
  reports: Mapping[str, dict[str, Any]],
  clauses: Mapping[str, str],
  more_clauses: Callable[[dict[str, Any]], list[str]] = lambda account: [],
) -> list[str]:
  """Writes one sentence for each task with skipped, cut or missing examples.

  `reports` are those of `report`. `clauses` are, by name of the count, texts with
  "{count}" and with "(s)" of plurals. `more_clauses` returns further ones for a report.
  """
  texts = []
  for account in reports.values():
    lines = account["rows"] + account["skipped"]
    every = {"skipped": f"{{count}} of {lines} lines skipped", **clauses}
    parts = []
    for name, text in every.items():
      if count := account[name]:
        message = text.format(count=count).replace("(s)", "" if count == 1 else "s")
        parts.append(f"{message}: {_first_places(account, name)}")
    if parts := [*parts, *more_clauses(account)]:
      texts.append(f"{account['source']}: {'; '.join(parts)}.")
  return texts


def _first_places(account: Mapping[str, Any], name: str) -> str:
  """Names the first places of a count, without their folders."""
  places = []
  for place in account["places"][name][:_MAX_NAMED_PLACES]:
    line = re.fullmatch(_PLACE, place, re.DOTALL)
    location, reason = line.groups("") if line else (place, "")
    places.append(f"{os.path.basename(location)} {reason}".strip())
  more = account[name] - len(places)
  return ", ".join([*places, f"and {more} more"] if more else places)
