"""outputs.jsonl: what a run served, one request a line."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from osd_jax import base
from osd_jax.runs import json_lines

KEPT = ("none", "text", "ids")
_IDS = ("prompt_ids", "output_ids")


@dataclasses.dataclass(frozen=True)
class Output:
  """A served request.

  Attributes:
    index: requests finished before it.
    query: its place in the stream.
    task: label of its task.
    prompt: text.
    text: of the answer, decoded.
    stop_reason: why the answer ended.
    tokens: length of the answer.
    tokens_per_target_call: of the answer.
    prompt_ids: tokens of the prompt; written if ids are kept.
    output_ids: tokens of the answer; likewise.
  """

  index: int
  query: int
  task: str
  prompt: str
  text: str
  stop_reason: str
  tokens: int
  tokens_per_target_call: float | None
  prompt_ids: Sequence[int] = ()
  output_ids: Sequence[int] = ()


class OutputsLog(json_lines.JsonLines):
  """Appends what was served to outputs.jsonl."""

  def __init__(self, path: str | Path, keep: str = "text"):
    """Opens `path` for appending, made if absent.

    Args:
      path: the file; its folder must exist.
      keep: "none" leaves the file empty, "text" keeps texts, "ids" token ids too.
    """
    if keep not in KEPT:
      raise base.InputError(
        f"outputs log: keep: received {keep!r}, expected one of"
        f" {', '.join(map(repr, KEPT))}."
      )
    super().__init__(path)
    self._keep = keep

  def write(self, output: Output) -> None:
    """Appends one answer.

    Raises:
      DiskError: it cannot be written, as on a full disk.
    """
    if self._keep == "none":
      return
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    if self._keep == "text":
      fields = {name: value for name, value in fields.items() if name not in _IDS}
    self.append(json_lines.strict(fields, "output")[0])


def samples(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The first answer of every task, one in the middle, and the last one.

  Args:
    rows: of outputs.jsonl.

  Returns:
    Rows of a table, task after task.
  """
  by_task: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    by_task.setdefault(row["task"], []).append(row)
  return [
    {
      "topic": task,
      "request": part[place]["query"],
      "prompt": _cut(part[place]["prompt"]),
      "output": _cut(part[place]["text"]),
      "ended by": part[place]["stop_reason"],
      "tokens per target call": part[place]["tokens_per_target_call"],
    }
    for task, part in by_task.items()
    for place in sorted({0, len(part) // 2, len(part) - 1})
  ]


def _cut(text: str, limit: int = 400) -> str:
  return text if len(text) <= limit else text[:limit] + " ..."
