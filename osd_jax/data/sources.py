"""Sources: what a task reads, and its raw examples as text. Pure Python.

A `TaskConfig` names a source (JSONL files, a TFDS set, a generated topic), a
split and a preprocessor. `tasks.py` gives the same source to seqio.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from osd_jax.data import generated, jsonl
from osd_jax.data.preprocessors import PREPROCESSORS

_NAME_CHARACTERS = set(
  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:"
)
KINDS = ("jsonl", "tfds", "generated")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """One source of examples.

  Attributes:
    name: unique among the tasks of a run; letters, digits, "_", "." and ":".
    kind: "jsonl", "tfds" or "generated".
    source: label of its requests in logs and tables; "" takes the name.
    split: split of the TFDS set or generated topic; fills "{split}" in `pattern`.
    preprocessor: a key of `PREPROCESSORS`.
    data_dir: folder of the JSONL files, or TFDS's data folder ("": its default).
    pattern: jsonl only; file name or glob in `data_dir`, may hold "{split}".
    tfds_name: tfds only; name and version of the set.
    topic: generated only; one of `generated.TOPICS`.
    limit: keep the first so many usable examples; None keeps all, required for
      generated topics, which have no end.
    seed: generated only.
  """

  name: str
  kind: str = "jsonl"
  source: str = ""
  split: str = "train"
  preprocessor: str = "identity"
  data_dir: str = ""
  pattern: str = ""
  tfds_name: str = ""
  topic: str = ""
  limit: int | None = None
  seed: int = 0

  def __post_init__(self) -> None:
    if not self.name or not set(self.name.replace("_", "a")) <= _NAME_CHARACTERS:
      raise _wrong(self, "name", "letters, digits, '_', '.' or ':'")
    if self.kind not in KINDS:
      raise _wrong(self, "kind", f"one of {', '.join(KINDS)}")
    if self.preprocessor not in PREPROCESSORS:
      raise _wrong(self, "preprocessor", f"one of {', '.join(PREPROCESSORS)}")
    needed = {"jsonl": "pattern", "tfds": "tfds_name", "generated": "topic"}[self.kind]
    if not getattr(self, needed):
      raise _wrong(self, needed, f"a value, since kind is {self.kind!r}")
    if self.limit is None and self.kind == "generated":
      raise _wrong(self, "limit", "a number of examples, since topics have no end")
    if self.limit is not None and self.limit < 1:
      raise _wrong(self, "limit", "None or an integer >= 1")
    if self.kind == "generated" and self.topic not in generated.TOPICS:
      raise _wrong(self, "topic", f"one of {', '.join(generated.TOPICS)}")
    if self.kind == "generated" and self.split not in generated.SPLITS:
      raise _wrong(self, "split", f"one of {', '.join(generated.SPLITS)}")

  @property
  def label(self) -> str:
    """What tables call its requests."""
    return self.source or self.name


@dataclasses.dataclass(frozen=True)
class Text:
  """One example as text, or why it is unusable.

  Attributes:
    location: "file:line" or the like; where to look.
    row_id: the example's own `id`, else its place without the folder.
    prompt: what the target is asked.
    reference: the data set's answer, "" if it has none.
    problem: "" if usable, else "empty: ..." or "malformed: ...".
  """

  location: str
  row_id: str
  prompt: str = ""
  reference: str = ""
  problem: str = ""


def paths(task: TaskConfig) -> list[str]:
  """Returns the files of a JSONL task; ValueError if there are none."""
  pattern = task.pattern.replace("{split}", task.split)
  return jsonl.find(task.data_dir, pattern, f"task {task.name!r}")


def source_lines(task: TaskConfig) -> Iterator[jsonl.Line]:
  """Yields the raw JSON lines of a JSONL or generated task."""
  if task.kind == "generated":
    rows = generated.examples(task.topic, task.split, task.limit or 0, task.seed)
    place = f"generated.{task.topic}.{task.split}.{task.seed}"
    for number, row in enumerate(rows, 1):
      fields = {"prompt": row.prompt, "reference": row.reference}
      yield jsonl.Line(f"{place}:{number}", json.dumps(fields).encode())
    return
  yield from jsonl.lines(paths(task))


def line_text(task: TaskConfig, location: str, data: bytes) -> Text:
  """Reads one JSON line as text."""
  try:
    raw = jsonl.parse(data)
  except jsonl.UnusableRow as error:
    return _unusable(location, error)
  return raw_text(task, location, raw)


def raw_text(task: TaskConfig, location: str, raw: Mapping[str, Any]) -> Text:
  """Applies the task's preprocessor to one raw example."""
  try:
    prompt, reference = PREPROCESSORS[task.preprocessor](raw)
    for text in (prompt, reference):
      text.encode("utf-8")
  except UnicodeEncodeError as error:
    reason = f"a lone surrogate at character {error.start} is no text"
    return _unusable(location, jsonl.UnusableRow("malformed", reason))
  except KeyError as error:
    return _unusable(location, jsonl.UnusableRow("malformed", f"no field {error}"))
  except jsonl.UnusableRow as error:
    return _unusable(location, error)
  return Text(location, _row_id(location, raw), prompt, reference)


def _wrong(task: TaskConfig, field: str, expected: str) -> ValueError:
  return ValueError(
    f"TaskConfig.{field} (task {task.name!r}): received {getattr(task, field)!r},"
    f" expected {expected}."
  )


def _unusable(location: str, error: jsonl.UnusableRow) -> Text:
  return Text(location, os.path.basename(location), problem=f"{error.kind}: {error}")


def _row_id(location: str, raw: Mapping[str, Any]) -> str:
  own = raw.get("id")
  if isinstance(own, str | int) and not isinstance(own, bool):
    return str(own).encode("utf-8", "replace").decode()
  return os.path.basename(location)
