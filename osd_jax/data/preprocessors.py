"""Raw example -> (prompt text, reference text), in pure Python.

The paper's T5 runs used no instruction, its decoder-only runs did: a set that
has both comes under two names, `spider` and `spider_instruction`. Field names
are those of the project's JSONL files (`prompt`, `reference`, finance_10k's
`context`) or, failing these, those of the set's TFDS or original files.
"""

import string
from collections.abc import Callable, Mapping
from typing import Any

from osd_jax.data.jsonl import UnusableRow

Preprocessor = Callable[[Mapping[str, Any]], tuple[str, str]]

SPIDER_INSTRUCTION = (
  "Could you translate the following question into SQL. Please only generate SQL,"
  " don't include explanation in the answer. "
)
PYTHON_INSTRUCTION = "Please generate code based on the following doc:\n"
MBPP_INSTRUCTION = (
  " Please only include Python code in your answer, don't include any explanation."
)


def text_field(raw: Mapping[str, Any], *names: str) -> str:
  """Returns the first of the named fields that is there.

  Args:
    raw: the example.
    *names: fields, best first.

  Returns:
    Its text, with at least one character that is not white space.

  Raises:
    UnusableRow: no such field, not a string, or blank.
  """
  for name in names:
    if name in raw:
      value = raw[name]
      if not isinstance(value, str):
        raise UnusableRow(
          "malformed", f"{name!r} is {type(value).__name__}, expected a string"
        )
      if not value.strip():
        raise UnusableRow("empty", f"{name!r} is blank")
      return value
  raise UnusableRow("malformed", f"no field {' or '.join(map(repr, names))}")


def reference_field(raw: Mapping[str, Any], *names: str) -> str:
  """Like `text_field`, but "" where the field is missing, null or blank."""
  for name in names:
    value = raw.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
      continue
    return text_field(raw, name)
  return ""


def fields_of(template: str) -> tuple[str, ...]:
  """Returns the fields that a template names.

  Args:
    template: text with fields in braces, "{{" and "}}" for braces.

  Raises:
    ValueError: a brace without its other, or more than a name between two.
  """
  return tuple(name for _, name in _pieces(template) if name is not None)


def prompt_of(raw: Mapping[str, Any], template: str) -> str:
  """Returns a template with the fields of an example; see `text_field`."""
  found = ""
  for literal, name in _pieces(template):
    found += literal + ("" if name is None else text_field(raw, name))
  return found


def reference_of(raw: Mapping[str, Any], template: str) -> str:
  """Like `prompt_of`, but "" where a field is missing, null or blank."""
  if all(reference_field(raw, name) for name in fields_of(template)):
    return prompt_of(raw, template)
  return ""


def _pieces(template: str) -> list[tuple[str, str | None]]:
  """Text, and the field behind it if there is one."""
  pieces = []
  for literal, name, form, conversion in string.Formatter().parse(template):
    if name == "" or form or conversion:
      raise ValueError("expected the name of a field between braces, and nothing else")
    pieces.append((literal, name))
  return pieces


def identity(
  raw: Mapping[str, Any], prompt: str = "{prompt}", reference: str = "{reference}"
) -> tuple[str, str]:
  """`prompt` and `reference` as they stand, or what templates make of other fields."""
  return prompt_of(raw, prompt), reference_of(raw, reference)


def spider(raw: Mapping[str, Any]) -> tuple[str, str]:
  """The question without its schema, as in the paper, and the query."""
  return text_field(raw, "prompt", "question"), reference_field(
    raw, "reference", "query"
  )


def spider_instruction(raw: Mapping[str, Any]) -> tuple[str, str]:
  """The paper's instruction before the question."""
  prompt, reference = spider(raw)
  return SPIDER_INSTRUCTION + prompt, reference


def python(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Docstring and function (CodeSearchNet Python)."""
  return text_field(raw, "prompt", "func_documentation_string"), reference_field(
    raw, "reference", "func_code_string"
  )


def python_instruction(raw: Mapping[str, Any]) -> tuple[str, str]:
  """The paper's instruction before the docstring."""
  prompt, reference = python(raw)
  return PYTHON_INSTRUCTION + prompt, reference


def mbpp(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Task text and code."""
  return text_field(raw, "prompt", "text"), reference_field(raw, "reference", "code")


def mbpp_instruction(raw: Mapping[str, Any]) -> tuple[str, str]:
  """The paper's instruction after the task text."""
  prompt, reference = mbpp(raw)
  return prompt + MBPP_INSTRUCTION, reference


def gsm8k(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Question and worked answer; the paper adds nothing."""
  return text_field(raw, "prompt", "question"), reference_field(
    raw, "reference", "answer"
  )


def finance(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Instruction and answer; the paper adds nothing."""
  return text_field(raw, "prompt", "instruction"), reference_field(
    raw, "reference", "output"
  )


def finance_10k(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Question with the passage that answers it, in T5's own reading format."""
  question = text_field(raw, "prompt", "question")
  context = text_field(raw, "context")
  reference = reference_field(raw, "reference", "answer")
  return f"question: {question} context: {context}", reference


def cnn_dailymail(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Article and highlights, with T5's prefix."""
  article = text_field(raw, "prompt", "article")
  return "summarize: " + article, reference_field(raw, "reference", "highlights")


def xsum(raw: Mapping[str, Any]) -> tuple[str, str]:
  """Document and summary, with T5's prefix."""
  document = text_field(raw, "prompt", "document")
  return "summarize: " + document, reference_field(raw, "reference", "summary")


PREPROCESSORS: dict[str, Preprocessor] = {
  "identity": identity,
  "spider": spider,
  "spider_instruction": spider_instruction,
  "python": python,
  "python_instruction": python_instruction,
  "mbpp": mbpp,
  "mbpp_instruction": mbpp_instruction,
  "gsm8k": gsm8k,
  "finance": finance,
  "finance_10k": finance_10k,
  "cnn_dailymail": cnn_dailymail,
  "xsum": xsum,
}
