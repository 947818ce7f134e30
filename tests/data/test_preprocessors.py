"""Preprocessors write the prompts of the paper and refuse values that are not text."""

import pytest

from osd_jax.data.preprocessors import (
  PREPROCESSORS,
  UnusableExample,
  fields_of,
  identity,
)

EXAMPLE = {"prompt": "a question", "reference": "an answer", "context": "a passage"}

PROMPTS = {
  "identity": "a question",
  "spider": "a question",
  "spider_instruction": (
    "Could you translate the following question into SQL. Please only generate"
    " SQL, don't include explanation in the answer. a question"
  ),
  "python": "a question",
  "python_instruction": (
    "Please generate code based on the following doc:\na question"
  ),
  "mbpp": "a question",
  "mbpp_instruction": (
    "a question Please only include Python code in your answer, don't include any"
    " explanation."
  ),
  "gsm8k": "a question",
  "finance": "a question",
  "finance_10k": "question: a question context: a passage",
  "cnn_dailymail": "summarize: a question",
  "xsum": "summarize: a question",
}


def test_prompts_above_cover_every_preprocessor():
  assert set(PROMPTS) == set(PREPROCESSORS)


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_preprocessor_writes_the_expected_prompt_and_reference(name):
  assert PREPROCESSORS[name](EXAMPLE) == (PROMPTS[name], "an answer")


@pytest.mark.parametrize("name", sorted(PROMPTS))
@pytest.mark.parametrize(
  ("change", "kind"),
  [
    ({"prompt": " \n"}, "empty"),
    ({"prompt": ""}, "empty"),
    ({"prompt": 7}, "malformed"),
    ({"prompt": None}, "malformed"),
    ({"prompt": ["a"]}, "malformed"),
    ({"reference": {"a": 1}}, "malformed"),
  ],
)
def test_unusable_example_is_empty_or_malformed(name, change, kind):
  with pytest.raises(UnusableExample) as caught:
    PREPROCESSORS[name]({**EXAMPLE, **change})
  assert caught.value.kind == kind


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_example_without_a_prompt_is_refused(name):
  with pytest.raises(UnusableExample, match="no field 'prompt'"):
    PREPROCESSORS[name]({"reference": "an answer", "context": "a passage"})


@pytest.mark.parametrize("missing", [{}, {"reference": None}, {"reference": "  "}])
def test_missing_reference_becomes_empty_text(missing):
  assert PREPROCESSORS["gsm8k"]({"prompt": "q", **missing}) == ("q", "")


def test_finance_10k_requires_a_context():
  with pytest.raises(UnusableExample, match="no field 'context'"):
    PREPROCESSORS["finance_10k"]({"prompt": "q", "reference": "a"})


@pytest.mark.parametrize(
  ("name", "raw"),
  [
    ("gsm8k", {"question": "q", "answer": "a"}),
    ("spider", {"question": "q", "query": "a"}),
    ("mbpp", {"text": "q", "code": "a"}),
    ("finance", {"instruction": "q", "output": "a"}),
    ("python", {"func_documentation_string": "q", "func_code_string": "a"}),
  ],
)
def test_field_names_of_published_data_sets_are_accepted(name, raw):
  assert PREPROCESSORS[name](raw) == ("q", "a")


@pytest.mark.parametrize(
  ("prompt", "expected"),
  [
    ("{question}", "why?"),
    ("answer: {question}", "answer: why?"),
    ("{question} {{json}} {a b}{question}", "why? {json} two wordswhy?"),
    ("{über}\n", "ü\n"),
  ],
)
def test_prompt_template_reads_any_field(prompt, expected):
  raw = {"question": "why?", "a b": "two words", "über": "ü"}
  assert identity(raw, prompt) == (expected, "")


@pytest.mark.parametrize(
  ("raw", "written"),
  [
    ({"steps": "1 + 1", "answer": "2"}, "1 + 1 = 2"),
    ({"steps": "1 + 1"}, ""),
    ({"steps": None, "answer": "2"}, ""),
    ({"steps": " ", "answer": "2"}, ""),
  ],
)
def test_reference_is_empty_unless_every_template_field_has_text(raw, written):
  found = identity({"prompt": "a", **raw}, reference="{steps} = {answer}")
  assert found == ("a", written)


@pytest.mark.parametrize("value", [7, "", " ", None, ["a"], {"a": "b"}])
def test_template_fields_must_be_text(value):
  with pytest.raises(UnusableExample, match="'question'"):
    identity({"question": value}, "{question}")


def test_error_names_a_template_field_missing_from_the_example():
  with pytest.raises(UnusableExample, match="no field 'question'"):
    identity({"prompt": "a"}, "answer: {question}")


@pytest.mark.parametrize("template", ["{", "}", "{}", "a {b", "{a!r}", "{a:3}", "{a}}"])
def test_malformed_templates_are_refused(template):
  with pytest.raises(ValueError):
    fields_of(template)
