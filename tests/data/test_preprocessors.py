"""Templates write the prompts of the paper; optional fields and references."""

import pytest

from osd_jax.data.preprocessors import (
  PREPROCESSORS,
  UnusableExample,
  fill_prompt,
  fill_reference,
  is_template,
)

EXAMPLE = {"prompt": "a question", "reference": "an answer", "context": "a passage"}

PROMPTS = {
  "spider_instruction": (
    "Could you translate the following question into SQL. Please only generate"
    " SQL, don't include explanation in the answer. a question"
  ),
  "python_instruction": (
    "Please generate code based on the following doc:\na question"
  ),
  "mbpp_instruction": (
    "a question Please only include Python code in your answer, don't include any"
    " explanation."
  ),
  "finance_10k": "question: a question context: a passage",
  "cnn_dailymail": "summarize: a question",
  "xsum": "summarize: a question",
}


@pytest.mark.parametrize("name", sorted(PREPROCESSORS))
def test_preprocessor_writes_the_expected_prompt_and_reference(name):
  prompt, reference = PREPROCESSORS[name]
  assert fill_prompt(prompt, EXAMPLE) == PROMPTS.get(name, "a question")
  assert fill_reference(reference, EXAMPLE) == "an answer"
  with pytest.raises(UnusableExample, match=r"no field 'prompt'.* among 'reference'"):
    fill_prompt(prompt, {"reference": "an answer", "context": "a passage"})


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
  prompt, reference = PREPROCESSORS[name]
  assert fill_prompt(prompt, raw) == "q"
  assert fill_reference(reference, {"reference": None, **raw}) == "a"


@pytest.mark.parametrize(
  ("template", "expected"),
  [
    ("answer: {question}", "answer: why?"),
    ("{question} {{json}} {a b}{question}", "why? {json} two wordswhy?"),
    ("{über}\n", "ü\n"),
    ("{turns[1]}", "second"),
    ("{absent|question}", "why?"),
    ("{question}\n{empty}", "why?\n"),  # as in Alpaca, whose `input` may be empty
    ("{null}{question}", "why?"),
  ],
)
def test_prompt_template_reads_any_field(template, expected):
  raw = {"question": "why?", "a b": "two words", "über": "ü", "empty": "", "null": None}
  assert fill_prompt(template, {**raw, "turns": ["first", "second"]}) == expected


@pytest.mark.parametrize(
  ("template", "kind", "reason"),
  [
    ("{empty}", "empty", "'empty' is blank"),
    ("summarize: {null}", "empty", "'null' is blank"),
    ("{empty}\n{null}", "empty", "'empty' and 'null' are blank"),
    ("{number}", "malformed", r"'number' \(int\): expected a string"),
    ("{turns}", "malformed", r"'turns' \(a list; '\{turns\[0\]\}' is its first item"),
    ("{turns[7]}", "empty", r"'turns\[7\]' is blank"),
    ("{a}", "malformed", r"no field 'a' among 'empty', 'null' .*'\{turns\[0\]\}' is"),
  ],
)
def test_unusable_example_is_empty_or_malformed(template, kind, reason):
  raw = {"empty": " \n", "null": None, "number": 7, "turns": ["first"]}
  with pytest.raises(UnusableExample, match=reason) as caught:
    fill_prompt(template, raw)
  assert caught.value.kind == kind


@pytest.mark.parametrize(
  ("value", "written"),
  [
    ("2", "1 + 1 = 2"),
    (2, "1 + 1 = 2"),
    (0.5, "1 + 1 = 0.5"),
    *((value, "") for value in (None, " ", [2], {"a": 1}, True, float("nan"))),
  ],
)
def test_reference_of_any_value_is_text_or_absent(value, written):
  raw = {"steps": "1 + 1", "answer": value}
  assert fill_reference("{steps} = {answer}", raw) == written
  assert fill_reference("{steps} = {missing}", raw) == ""


@pytest.mark.parametrize("template", ["{", "}", "{}", "a {b", "{a!r}", "{a:3}", "text"])
def test_texts_that_are_no_templates_are_recognized(template):
  assert not is_template(template) and is_template("{question}")
