"""Sources: what a task reads, and its raw examples as text. Pure Python.

A `TaskConfig` names a source (JSONL files, a TFDS set, a generated topic), a
split and a preprocessor. `tasks.py` gives the same source to seqio.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from osd_jax import base
from osd_jax.data import generated, jsonl, preprocessors
from osd_jax.data.preprocessors import PREPROCESSORS

# What a kind cannot do without.
KINDS = {"jsonl": "pattern", "tfds": "tfds_name", "generated": "topic"}


@dataclasses.dataclass(frozen=True)
class TaskConfig(base.Config):
  """One source of examples.

  >>> TaskConfig(name="ours", pattern="ours.jsonl", source="support").label
  'support'

  Attributes:
    name: unique among the tasks of a run; letters, digits, "_", "." and ":".
    kind: "jsonl", "tfds" or "generated".
    source: label of its requests in logs and tables; "" takes the name.
    split: split of the TFDS set or generated topic; fills "{split}" in `pattern`.
    preprocessor: a key of `PREPROCESSORS`.
    prompt: text of a prompt with the names of fields in braces, such as
      "summarize: {article}"; for preprocessor "identity" alone, as `reference` is.
    reference: that of a reference, "" where a field is missing.
    data_dir: folder of the JSONL files, or TFDS's data folder ("": its default).
    pattern: jsonl only; file name or glob in `data_dir`, may hold "{split}".
    tfds_name: tfds only; name and version of the set.
    topic: generated only; one of `generated.TOPICS`.
    rows: read the first so many usable examples; None reads all. Required for
      generated topics, which have no end. It cuts the data; how much of them is
      served is for `StreamConfig.requests_per_task`.
  """

  name: str
  kind: Annotated[str, base.OneOf(*KINDS)] = "jsonl"
  source: str = ""
  split: str = "train"
  preprocessor: Annotated[str, base.OneOf(*PREPROCESSORS)] = "identity"
  prompt: str = "{prompt}"
  reference: str = "{reference}"
  data_dir: str = ""
  pattern: str = ""
  tfds_name: str = ""
  topic: str = ""
  rows: base.Count | None = None

  def checks(self):
    needed, is_generated = KINDS[self.kind], self.kind == "generated"
    checks = {
      "name": (
        re.fullmatch(r"[\w.:]+", self.name, re.ASCII),
        "letters, digits, '_', '.' or ':'",
      ),
      needed: (getattr(self, needed), f"a value, since kind is {self.kind!r}"),
      **{name: self._template(name) for name in ("prompt", "reference")},
    }
    if is_generated:
      topics, splits = generated.TOPICS, generated.SPLITS
      checks |= {
        "rows": (self.rows, "an integer >= 1, since topics have no end"),
        "topic": (self.topic in topics, base.OneOf(*topics).text),
        "split": (self.split in splits, base.OneOf(*splits).text),
      }
    return checks

  @property
  def label(self) -> str:
    """What tables call its requests."""
    return self.source or self.name

  def _template(self, name: str) -> tuple[bool, str]:
    """Whether a template can be used, and what is expected of it."""
    template, default = getattr(self, name), getattr(type(self), name)
    if self.preprocessor != "identity":
      expected = f"{default!r}, since preprocessor {self.preprocessor!r} writes it"
      return template == default, expected
    try:
      named = bool(preprocessors.fields_of(template))
    except ValueError:
      named = False
    return named, f"text with names of fields in braces, such as {default!r}"


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
  """Returns the files of a JSONL task; InputError if they cannot be read."""
  pattern = task.pattern.replace("{split}", task.split)
  return jsonl.find(task.data_dir, pattern, f" (task {task.name!r})")


def source_lines(task: TaskConfig) -> Iterator[jsonl.Line]:
  """Yields the raw JSON lines of a JSONL or generated task."""
  if task.kind == "generated":
    for location, fields in generated_rows(task):
      yield jsonl.Line(location, json.dumps(fields).encode())
    return
  yield from jsonl.lines(paths(task))


def generated_rows(task: TaskConfig) -> Iterator[tuple[str, dict[str, str]]]:
  """Yields place and fields of the examples of a generated task."""
  rows = generated.examples(task.topic, task.split, task.rows or 0)
  place = f"generated.{task.topic}.{task.split}"
  for number, row in enumerate(rows, 1):
    yield f"{place}:{number}", {"prompt": row.prompt, "reference": row.reference}


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
    prompt, reference = _preprocessed(task, raw)
    (prompt + reference).encode("utf-8")
  except UnicodeEncodeError:
    reason = "a lone surrogate in prompt or reference is no text"
    return _unusable(location, jsonl.UnusableRow("malformed", reason))
  except jsonl.UnusableRow as error:
    return _unusable(location, error)
  return Text(location, _row_id(location, raw), prompt, reference)


def _preprocessed(task: TaskConfig, raw: Mapping[str, Any]) -> tuple[str, str]:
  if task.preprocessor != "identity":
    return PREPROCESSORS[task.preprocessor](raw)
  return preprocessors.identity(raw, task.prompt, task.reference)


def _unusable(location: str, error: jsonl.UnusableRow) -> Text:
  return Text(location, os.path.basename(location), problem=f"{error.kind}: {error}")


def _row_id(location: str, raw: Mapping[str, Any]) -> str:
  own = raw.get("id")
  if isinstance(own, str | int) and not isinstance(own, bool):
    return str(own).encode("utf-8", "replace").decode()
  return os.path.basename(location)
