"""Templates that turn the fields of one example into a prompt and a reference.

A template is text with names of fields in braces, such as "summarize: {article}".
"{prompt|question}" is the first of the two fields that exists, and "{turns[0]}" the
first item of a list. Fields are called `prompt` and `reference` (and `context` in
finance_10k) in this project's JSONL files; the other names are those of the published
sets.

The paper's T5 runs used no instruction and its decoder-only runs did, so a data set
that needs both has two entries, such as `spider` and `spider_instruction`.
"""

import math
import re
import string
from collections.abc import Mapping
from typing import Any, Literal

SPIDER_INSTRUCTION = (
  "Could you translate the following question into SQL. Please only generate SQL,"
  " don't include explanation in the answer. "
)
PYTHON_INSTRUCTION = "Please generate code based on the following doc:\n"
MBPP_INSTRUCTION = (
  " Please only include Python code in your answer, don't include any explanation."
)

_MAX_NAMED_FIELDS = 8  # in the error about a missing one
_QUESTION, _DOC = "{prompt|question}", "{prompt|func_documentation_string}"
_QUERY, _CODE = "{reference|query}", "{reference|func_code_string}"

# Templates of the prompt and of the reference.
PREPROCESSORS: dict[str, tuple[str, str]] = {
  "identity": ("{prompt}", "{reference}"),
  # The question without its schema, as in the paper, and the query.
  "spider": (_QUESTION, _QUERY),
  "spider_instruction": (SPIDER_INSTRUCTION + _QUESTION, _QUERY),
  # Docstring and function (CodeSearchNet Python).
  "python": (_DOC, _CODE),
  "python_instruction": (PYTHON_INSTRUCTION + _DOC, _CODE),
  "mbpp": ("{prompt|text}", "{reference|code}"),
  "mbpp_instruction": ("{prompt|text}" + MBPP_INSTRUCTION, "{reference|code}"),
  # For gsm8k and finance the paper adds no instruction.
  "gsm8k": (_QUESTION, "{reference|answer}"),
  "finance": ("{prompt|instruction}", "{reference|output}"),
  # T5's own format for questions about a passage.
  "finance_10k": (f"question: {_QUESTION} context: {{context}}", "{reference|answer}"),
  # T5's own prefix for summaries.
  "cnn_dailymail": ("summarize: {prompt|article}", "{reference|highlights}"),
  "xsum": ("summarize: {prompt|document}", "{reference|summary}"),
}


class UnusableExample(ValueError):
  """Raised for an example that cannot be used; the text says why.

  Attributes:
    kind: "empty" if the line or prompt is blank, otherwise "malformed".
  """

  def __init__(self, kind: Literal["empty", "malformed"], reason: str):
    super().__init__(reason)
    self.kind = kind


def fill_prompt(template: str, raw: Mapping[str, Any]) -> str:
  """Returns a template filled with the fields of an example.

  Fields may be blank or null, but not all of them.

  Raises:
    UnusableExample: all fields are blank, or one is missing or not text.
  """
  filled, values = "", {}
  for literal, names in split(template):
    filled += literal
    if names is not None:
      values[_existing(raw, names)] = text = _text(raw, names)
      filled += text
  if not any(text.strip() for text in values.values()):
    blank = " and ".join(map(repr, values))
    raise UnusableExample(
      "empty", f"{blank} {'is' if len(values) == 1 else 'are'} blank"
    )
  return filled


def fill_reference(template: str, raw: Mapping[str, Any]) -> str:
  """Returns the filled template, or "" if a field is neither text nor a number.

  References are optional, so none of their values makes an example unusable.
  """
  filled = ""
  for literal, names in split(template):
    filled += literal
    if names is not None:
      values = (_value(raw, name) for name in names.split("|"))
      text = next(filter(None, map(_as_text, values)), "")
      if not text:
        return ""
      filled += text
  return filled


def split(template: str) -> list[tuple[str, str | None]]:
  """Splits a template into pairs of text and the name that follows it, if any.

  Unbalanced braces, or something other than a name between two, are a ValueError.
  """
  pieces = []
  for literal, name, form, conversion in string.Formatter().parse(template):
    if name == "" or form or conversion:
      raise ValueError("expected the name of a field between braces, and nothing else")
    pieces.append((literal, name))
  return pieces


def is_template(text: str) -> bool:
  """Whether a text is a template with at least one field."""
  try:
    return any(names is not None for _, names in split(text))
  except ValueError:
    return False


def _value(raw: Mapping[str, Any], name: str) -> Any:
  """Returns a field, or an item of a list for a name such as "turns[0]"."""
  item = re.fullmatch(r"(.+)\[(\d+)\]", name)
  if name in raw:
    return raw[name]
  if not item:
    return None
  items, place = raw.get(item[1]), int(item[2])
  if isinstance(items, list | tuple) and place < len(items):
    return items[place]
  return None


def _existing(raw: Mapping[str, Any], names: str) -> str | None:
  """Returns the first of "first|second" that is a field of an example."""
  every = names.split("|")
  return next((name for name in every if name.partition("[")[0] in raw), None)


def _text(raw: Mapping[str, Any], names: str) -> str:
  """Returns the text of the first field that exists; "" for null."""
  name = _existing(raw, names)
  if name is None:
    expected = " or ".join(map(repr, names.split("|")))
    there = ", ".join(_describe(raw, name) for name in list(raw)[:_MAX_NAMED_FIELDS])
    raise UnusableExample("malformed", f"no field {expected} among {there or 'none'}")
  value = _value(raw, name)
  if value is None or isinstance(value, str):
    return value or ""
  raise UnusableExample("malformed", f"{_describe(raw, name)}: expected a string")


def _describe(raw: Mapping[str, Any], name: str) -> str:
  """Names a field, and its type unless it is text."""
  kind = type(raw.get(name)).__name__
  if kind == "list":
    kind = f"a list; '{{{name}[0]}}' is its first item"
  return repr(name) if kind == "str" else f"{name!r} ({kind})"


def _as_text(value: Any) -> str:
  """Returns a text or the digits of a number, and "" for anything else."""
  if isinstance(value, str):
    return value if value.strip() else ""
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return str(value) if is_number and math.isfinite(value) else ""
