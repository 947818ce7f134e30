"""Fuzzed JSONL files: every line is a row or is skipped, counted and named."""

import json
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from osd_jax import base
from osd_jax.data import jsonl, rows
from osd_jax.data.preprocessors import PREPROCESSORS
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabulary import Vocabulary

EXAMPLES = hypothesis.settings(
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
  lambda text: json.dumps({"prompt": f"ask {text}", "reference": "say"}).encode(),
  TEXTS,
)
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
  """A good line with bytes taken out, put in or cut off."""
  line = bytearray(draw(GOOD))
  for _ in range(draw(st.integers(1, 3))):
    place = draw(st.integers(0, len(line)))
    length = draw(st.integers(0, 3))
    line[place : place + length] = draw(st.binary(max_size=3))
  return bytes(line)


def one_line(data: bytes) -> bytes:
  return data.replace(b"\n", b" ")


LINES = st.one_of(
  GOOD,
  OBJECTS.map(lambda value: json.dumps(value).encode()),
  VALUES.map(lambda value: json.dumps(value).encode()),
  damaged(),
  st.binary(max_size=20),
  BOMBS,
).map(one_line)


@pytest.fixture(scope="module")
def vocabulary(repository) -> Vocabulary:
  return Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")


def is_good(line: bytes) -> bool:
  """Whether a line surely is a row, whatever `jsonl` thinks."""
  try:
    raw = json.loads(line.decode("utf-8"))
    texts = [raw["prompt"], raw.get("reference") or ""]
    return all(t.encode("utf-8") is not None for t in texts) and texts[0].isalnum()
  except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
    return False


def read(folder, lines, vocabulary, preprocessor="identity"):
  path = folder / "a.jsonl"
  path.write_bytes(b"\n".join(lines))
  task = TaskConfig(
    "a", data_dir=str(folder), pattern="a.jsonl", preprocessor=preprocessor
  )
  return path, rows.read(task, vocabulary, "plain")


@EXAMPLES
@hypothesis.given(
  lines=st.lists(LINES, min_size=1, max_size=6),
  preprocessor=st.sampled_from(sorted(PREPROCESSORS)),
)
def test_every_line_is_a_row_or_skipped_and_named(
  tmp_path, vocabulary, lines, preprocessor
):
  lines = [*lines, b"{}"]  # so that the file does not end in a line feed
  try:
    path, found = read(tmp_path, lines, vocabulary, preprocessor)
  except ValueError as error:  # nothing usable at all: file and line are named
    assert type(error) is base.InputError
    assert f"{len(lines)} were skipped" in str(error)
    assert re.search(rf"{tmp_path}/a\.jsonl:1: \w", str(error))
    assert preprocessor != "identity" or not any(map(is_good, lines))
    return
  assert len(found.rows) + len(found.skipped) == len(lines)
  for place in found.skipped:
    number = int(re.match(rf"{path}:(\d+): (empty|malformed): .", place)[1])
    assert 1 <= number <= len(lines)
    assert preprocessor != "identity" or not is_good(lines[number - 1])
  for row in found.rows:
    assert len(row.source) > 1 and row.prompt.strip()


@EXAMPLES
@hypothesis.given(bad=st.lists(LINES, max_size=4), good=GOOD, at=st.integers(0, 4))
def test_a_good_line_survives_its_neighbours(tmp_path, vocabulary, bad, good, at):
  lines = [*bad[:at], good, *bad[at:], b"{}"]
  _, found = read(tmp_path, lines, vocabulary)
  assert json.loads(good)["prompt"] in [row.prompt for row in found.rows]


@EXAMPLES
@hypothesis.given(line=LINES)
def test_a_line_is_an_object_or_says_why_not(line):
  try:
    assert isinstance(jsonl.parse(line), dict)
  except jsonl.UnusableRow as error:
    assert error.kind in ("empty", "malformed") and str(error)


def test_damage_does_occur():
  """Negative control: the drawn lines hold good ones and bad ones of both kinds."""
  for kind in ("good", "empty", "malformed"):

    def is_kind(line, kind=kind):
      try:
        jsonl.parse(line)
      except jsonl.UnusableRow as error:
        return error.kind == kind
      return kind == "good"

    hypothesis.find(LINES, is_kind, settings=EXAMPLES)
