"""Reading examples: configs, files, lazy encoding, and lines with arbitrary content."""

import dataclasses
import json
import re
import string

import hypothesis
import hypothesis.strategies as st
import pytest

from osd_jax import base
from osd_jax.data import files
from osd_jax.data.examples import TaskConfig, TaskExamples
from osd_jax.data.preprocessors import PREPROCESSORS, UnusableExample
from osd_jax.data.vocabulary import Vocabulary

LINES_OF_ALL_KINDS = [
  json.dumps({"prompt": "How many?", "reference": "SELECT 1", "id": "own-1"}),
  json.dumps({"prompt": "naïve 東京\u0000", "reference": "a\u0000"}),
  "",
  "not json",
  json.dumps({"prompt": "no reference"}),
  json.dumps({"prompt": b"\\ud800".decode("unicode_escape")}),
  json.dumps({"prompt": "x " * 400, "reference": "y " * 400, "id": 7}),
]


@pytest.fixture
def jsonl_task(tmp_path) -> TaskConfig:
  (tmp_path / "q.train.jsonl").write_text("\n".join(LINES_OF_ALL_KINDS) + "\n")
  return TaskConfig("q", data_dir=str(tmp_path), pattern="q.{split}.jsonl")


@pytest.fixture
def encoded(monkeypatch):
  """A list that receives every prompt encoded during the test."""
  encode, seen = Vocabulary.encode_prompt, []

  def recorded(self, text):
    seen.append(text)
    return encode(self, text)

  monkeypatch.setattr(Vocabulary, "encode_prompt", recorded)
  return seen


def test_prompts_are_encoded_once_and_only_on_demand(jsonl_task, vocabulary, encoded):
  found = TaskExamples(jsonl_task, vocabulary)
  assert not encoded
  example = found.examples[0]
  for _ in range(2):
    prompt, reference = found.tokens(0)
  assert prompt.tolist() == vocabulary.encode_with_eos(example.prompt).tolist()
  assert reference.tolist() == vocabulary.encode_with_eos(example.reference).tolist()
  assert encoded == [example.prompt]


def test_prompts_without_tokens_are_skipped(tmp_path, vocabulary, encoded):
  # A prompt with an ASCII letter or digit always has tokens, so reading the file skips
  # encoding it; other prompts must be encoded to find out.
  assert not any(
    vocabulary.is_blank(vocabulary.encode_prompt(sign))
    for sign in string.ascii_letters + string.digits
  )
  del encoded[:]
  prompts = ["\u200b", "?", "a"]  # a zero-width space has no tokens
  lines = [json.dumps({"prompt": prompt, "reference": ""}) for prompt in prompts]
  (tmp_path / "p.jsonl").write_text("\n".join(lines))
  task = TaskConfig("p", pattern=str(tmp_path / "p.jsonl"))
  found = TaskExamples(task, vocabulary).examples
  assert "a" not in encoded and "?" in encoded
  assert [example.prompt for example in found] == [
    prompt
    for prompt in prompts
    if not vocabulary.is_blank(vocabulary.encode_prompt(prompt))
  ]


@pytest.mark.parametrize("limit", [None, 2, 3])
def test_usable_lines_are_read_and_skipped_ones_reported(jsonl_task, vocabulary, limit):
  task = dataclasses.replace(jsonl_task, rows=limit)
  found = TaskExamples(task, vocabulary)
  ids = ["own-1", "q.train.jsonl:2", "q.train.jsonl:5", "7"]
  assert [example.example_id for example in found.examples] == ids[:limit]
  if limit is None:
    assert [place.partition("q.train.jsonl:")[2] for place in found.skipped] == [
      "3: empty: blank line",
      "4: malformed: not JSON: Expecting value: line 1 column 1 (char 0)",
      "6: malformed: prompt or reference holds a lone surrogate, which is not text",
    ]


def test_fingerprint_depends_on_the_ids(jsonl_task, vocabulary):
  fewer = dataclasses.replace(jsonl_task, rows=3)
  one, same, other = (
    TaskExamples(task, vocabulary).fingerprint
    for task in (jsonl_task, jsonl_task, fewer)
  )
  assert one == same != other


def test_fingerprint_depends_on_what_the_chat_template_writes(jsonl_task, vocabulary):
  """Also on a date, which a template reads from the clock."""

  def fingerprint(written, variables=()):
    changed = dataclasses.replace(
      vocabulary,
      is_causal=True,
      chat_template="the same text",
      variables=variables,
      template=lambda prompt: f"{written} {prompt}",
    )
    return TaskExamples(jsonl_task, changed).fingerprint

  today = fingerprint("Today is Monday.")
  assert today == fingerprint("Today is Monday.")
  assert today != fingerprint("Today is Tuesday.")
  assert today != fingerprint("Today is Monday.", (("thinks", False),))


def test_published_data_sets_can_be_read(shared_data):
  t5 = Vocabulary.load(shared_data / "tokenizers/t5/spiece.model")
  for name in ("python", "finance_10k"):
    task = TaskConfig(
      f"real_{name}",
      data_dir=str(shared_data),
      pattern=f"{name}.{{split}}.jsonl",
      split="eval",
      preprocessor=name,
    )
    assert len(TaskExamples(task, t5)) > 900


def _assert_refused(task, vocabulary, match):
  with pytest.raises(base.InputError, match=match) as caught:
    TaskExamples(task, vocabulary)
  assert len(str(caught.value).splitlines()) == 1


def test_error_names_missing_files_and_folders(tmp_path, vocabulary):
  (tmp_path / "b.jsonl").write_text("{}")
  task = TaskConfig("absent", data_dir=str(tmp_path), pattern="a.*")
  match = r"TaskConfig\.pattern .*'absent'.*'a\.\*'.*b\.jsonl"
  _assert_refused(task, vocabulary, match)
  for folder in (tmp_path / "nowhere", tmp_path / "b.jsonl"):
    _assert_refused(
      dataclasses.replace(task, data_dir=str(folder)),
      vocabulary,
      rf"TaskConfig\.data_dir .*{folder.name}.*expected a readable folder",
    )
  shipped = dataclasses.replace(task, data_dir="shipped:nothing")
  _assert_refused(shipped, vocabulary, r"TaskConfig\.data_dir .*'shipped:nothing'")


def test_error_names_an_unreadable_file_and_its_setting(tmp_path, vocabulary):
  path = tmp_path / "x.jsonl"
  path.symlink_to(path)  # a loop
  task = TaskConfig("bad", data_dir=str(tmp_path), pattern="x.jsonl")
  _assert_refused(task, vocabulary, r"TaskConfig\.pattern .*x\.jsonl cannot")


@pytest.mark.parametrize("pattern", ["[", "**/", "a\0b", "../nowhere"])
def test_error_names_a_pattern_without_matches(tmp_path, vocabulary, pattern):
  task = TaskConfig("odd", data_dir=str(tmp_path), pattern=pattern)
  _assert_refused(task, vocabulary, r"TaskConfig\.(pattern|data_dir) ")


def test_several_files_are_read_in_sorted_order(tmp_path, vocabulary):
  for part in "ba":
    (tmp_path / f"{part}.jsonl").write_text(json.dumps({"prompt": f"file {part}"}))
  found = TaskExamples(TaskConfig("f", pattern=str(tmp_path / "*.jsonl")), vocabulary)
  assert [example.prompt for example in found.examples] == ["file a", "file b"]


# ---- Lines with arbitrary content (property tests)

SETTINGS = hypothesis.settings(
  max_examples=100,
  deadline=None,
  derandomize=True,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
FIELDS = ("prompt", "reference", "question", "query", "context", "text", "id")

TEXTS = st.text(max_size=12)
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
  lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
  max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS), TEXTS | VALUES, max_size=4)
GOOD = st.builds(
  lambda text: json.dumps({"prompt": f"ask {text}", "reference": "say"}).encode(), TEXTS
)
# Lines that exceed limits of the JSON parser, break encodings or repeat keys.
BOMBS = st.sampled_from(
  [
    b"[" * 100_000,
    b'{"prompt": ' * 5_000,
    b"9" * 5_000,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "id": "\\udfff"}',
    b'{"prompt": "a", "reference": "\\ud83d"}',
    b'{"prompt": "\\u0000"}',
    b'{"prompt": NaN}',
    b"\xef\xbb\xbf",
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "a"} {"prompt": "b"}',
    b'{"prompt": "a", "prompt": 1}',
    b"\r",
    b"\x0b \x0c",
  ]
)


@st.composite
def damaged(draw):
  """A good line with up to three places removed, replaced or filled with bytes."""
  line = bytearray(draw(GOOD))
  for _ in range(draw(st.integers(1, 3))):
    place = draw(st.integers(0, len(line)))
    length = draw(st.integers(0, 3))
    line[place : place + length] = draw(st.binary(max_size=3))
  return bytes(line)


LINES = st.one_of(
  GOOD,
  OBJECTS.map(lambda value: json.dumps(value).encode()),
  VALUES.map(lambda value: json.dumps(value).encode()),
  damaged(),
  st.binary(max_size=20),
  BOMBS,
).map(lambda line: line.replace(b"\n", b" "))


def is_good(line: bytes) -> bool:
  """Returns True only for usable lines, without calling the code under test."""
  try:
    raw = json.loads(line.decode("utf-8"))
    texts = [raw["prompt"], raw.get("reference") or ""]
    return all(t.encode("utf-8") is not None for t in texts) and texts[0].isalnum()
  except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
    return False


@SETTINGS
@hypothesis.given(
  lines=st.lists(LINES, min_size=1, max_size=6),
  preprocessor=st.sampled_from(sorted(PREPROCESSORS)),
)
def test_every_line_is_read_or_reported_as_skipped(
  tmp_path, vocabulary, lines, preprocessor
):
  # The reader drops an empty last line, which would make the counts differ.
  lines, path = [*lines, b"{}"], tmp_path / "a.jsonl"
  path.write_bytes(b"\n".join(lines))
  task = TaskConfig("a", pattern=str(path), preprocessor=preprocessor)
  try:
    found = TaskExamples(task, vocabulary)
  except ValueError as error:  # no line was usable; the error names file and line
    assert type(error) is base.InputError
    assert f"{len(lines)} were skipped" in str(error)
    assert re.search(rf"{tmp_path}/a\.jsonl:1: \w", str(error))
    assert preprocessor != "identity" or not any(map(is_good, lines))
    return
  assert len(found) + len(found.skipped) == len(lines)
  for place in found.skipped:
    number = int(re.match(rf"{path}:(\d+): (empty|malformed): .", place)[1])
    assert 1 <= number <= len(lines)
    assert preprocessor != "identity" or not is_good(lines[number - 1])
  for number, example in enumerate(found.examples):
    assert len(found.tokens(number)[0]) > 1 and example.prompt.strip()


def test_drawn_lines_include_good_and_bad_ones():
  """Negative control: the tests above see lines of every kind."""
  for kind in ("good", "empty", "malformed"):

    def is_kind(line, kind=kind):
      try:
        files.parse_line(line)
      except UnusableExample as error:
        return error.kind == kind
      return kind == "good"

    hypothesis.find(LINES, is_kind, settings=SETTINGS)
