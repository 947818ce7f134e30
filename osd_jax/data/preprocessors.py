"""Preprocessors: the fields of one example -> (prompt text, reference text).

The paper's T5 runs used no instruction and its decoder-only runs did, so a data set
that needs both has two names, such as `spider` and `spider_instruction`. Fields are
called `prompt` and `reference` (and `context` in finance_10k), as in this project's
JSONL files; if those are missing, the field names of the published set are tried.
"""

import string
from collections.abc import Callable, Mapping
from typing import Any, Literal

Preprocessor = Callable[[Mapping[str, Any]], tuple[str, str]]

SPIDER_INSTRUCTION = (
  "Could you translate the following question into SQL. Please only generate SQL,"
  " don't include explanation in the answer. "
)
PYTHON_INSTRUCTION = "Please generate code based on the following doc:\n"
MBPP_INSTRUCTION = (
  " Please only include Python code in your answer, don't include any explanation."
)


class UnusableExample(ValueError):
  """Raised for an example that cannot be used; the text says why.

  Attributes:
    kind: "empty" if the line or prompt is blank, otherwise "malformed".
  """

  def __init__(self, kind: Literal["empty", "malformed"], reason: str):
    super().__init__(reason)
    self.kind = kind


def text_field(raw: Mapping[str, Any], *names: str) -> str:
  """Returns the text of the first of the named fields that exists.

  Raises:
    UnusableExample: none of the fields exists, or the first one that does is blank or
      not a string.
  """
  for name in names:
    if name in raw:
      value = raw[name]
      if not isinstance(value, str):
        raise UnusableExample(
          "malformed", f"{name!r} is {type(value).__name__}, expected a string"
        )
      if not value.strip():
        raise UnusableExample("empty", f"{name!r} is blank")
      return value
  raise UnusableExample("malformed", f"no field {' or '.join(map(repr, names))}")


def reference_field(raw: Mapping[str, Any], *names: str) -> str:
  """Like `text_field`, but returns "" if the field is missing, null or blank."""
  for name in names:
    value = raw.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
      continue
    return text_field(raw, name)
  return ""


def fields_of(template: str) -> tuple[str, ...]:
  """Returns the field names in a template such as "summarize: {article}".

  Raises:
    ValueError: unbalanced braces, or something other than a name between two.
  """
  return tuple(name for _, name in _pieces(template) if name is not None)


def fill_template(raw: Mapping[str, Any], template: str) -> str:
  """Returns the template with the fields of an example; see `text_field`."""
  pieces = [
    literal + ("" if name is None else text_field(raw, name))
    for literal, name in _pieces(template)
  ]
  return "".join(pieces)


def _pieces(template: str) -> list[tuple[str, str | None]]:
  """Splits a template into pairs of text and the field that follows it, if any."""
  pieces = []
  for literal, name, form, conversion in string.Formatter().parse(template):
    if name == "" or form or conversion:
      raise ValueError("expected the name of a field between braces, and nothing else")
    pieces.append((literal, name))
  return pieces


def identity(
  raw: Mapping[str, Any], prompt: str = "{prompt}", reference: str = "{reference}"
) -> tuple[str, str]:
  """Fills two templates; by default returns the fields `prompt` and `reference`.

  The reference is "" if one of its fields is missing, null or blank.
  """
  has_reference = all(reference_field(raw, name) for name in fields_of(reference))
  return (
    fill_template(raw, prompt),
    fill_template(raw, reference) if has_reference else "",
  )


def finance_10k(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Returns the question with its passage, in T5's own reading format, and answer."""
  question = text_field(raw, "prompt", "question")
  context = text_field(raw, "context")
  reference = reference_field(raw, "reference", "answer")
  return f"question: {question} context: {context}", reference


def _published(
  prompt: str, reference: str, before: str = "", after: str = ""
) -> Preprocessor:
  """Reads two fields of a published set; may add text around the prompt."""

  def preprocess(raw: Mapping[str, Any]) -> tuple[str, str]:
    text = text_field(raw, "prompt", prompt)
    return before + text + after, reference_field(raw, "reference", reference)

  return preprocess


PREPROCESSORS: dict[str, Preprocessor] = {
  "identity": identity,
  # The question without its schema, as in the paper, and the query.
  "spider": _published("question", "query"),
  "spider_instruction": _published("question", "query", before=SPIDER_INSTRUCTION),
  # Docstring and function (CodeSearchNet Python).
  "python": _published("func_documentation_string", "func_code_string"),
  "python_instruction": _published(
    "func_documentation_string", "func_code_string", before=PYTHON_INSTRUCTION
  ),
  "mbpp": _published("text", "code"),
  "mbpp_instruction": _published("text", "code", after=MBPP_INSTRUCTION),
  # For gsm8k and finance the paper adds no instruction.
  "gsm8k": _published("question", "answer"),
  "finance": _published("instruction", "output"),
  "finance_10k": finance_10k,
  # T5's own prefix for summaries.
  "cnn_dailymail": _published("article", "highlights", before="summarize: "),
  "xsum": _published("document", "summary", before="summarize: "),
}
