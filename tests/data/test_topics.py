"""The demo topics: correct answers, disjoint splits, shipped files, vocabulary."""

import ast
import gzip
import pathlib
import re
import sqlite3
import sys

import pytest
import sentencepiece

from osd_jax import assets, base
from osd_jax.data import examples

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / "experiments" / "shipped_pair"
sys.path.insert(0, str(_FOLDER))
import make_topics  # noqa: E402
import topics  # noqa: E402
from topics import python, sql  # noqa: E402

_SAMPLES = 2000


@pytest.fixture(scope="module")
def vocabulary() -> sentencepiece.SentencePieceProcessor:
  path = _ROOT / "osd_jax" / "assets" / "demo_vocabulary.model"
  return sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="module")
def samples() -> dict[str, list[topics.Example]]:
  return {
    topic: topics.generate(topic, "eval", _SAMPLES, seed=7) for topic in topics.TOPICS
  }


def _wrong_equations(text: str) -> list[str]:
  wrong = []
  for left, sign, right, result in re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", text):
    a, b = int(left), int(right)
    if {"+": a + b, "-": a - b, "*": a * b}[sign] != int(result):
      wrong.append(f"{left} {sign} {right} = {result}")
  return wrong


def test_maths_equations_are_correct_and_end_with_the_answer(samples):
  assert _wrong_equations("3 + 4 = 8, so 2 * 5 = 10") == ["3 + 4 = 8"]
  for example in samples["maths"]:
    assert _wrong_equations(example.reference) == [], example
    results = re.findall(r"= (\d+)", example.reference)
    assert example.reference.endswith(f"The answer is {results[-1]}."), example
    assert 1 <= len(results) <= 2


def test_every_sql_reference_is_valid(samples):
  database = sqlite3.connect(":memory:")
  for table, (text, numbers) in sql.SCHEMA.items():
    database.execute(f"CREATE TABLE {table} ({', '.join((*text, *numbers))})")
  for example in samples["sql"]:
    database.execute(example.reference)
  # Negative control: SQLite refuses a column that the table does not have.
  with pytest.raises(sqlite3.OperationalError):
    database.execute("SELECT salary FROM clients;")


_DATA, _OTHER = [5, 40, 12, 97, 61, 40, 3], [1, 2, 3]


def _expected(request: str):
  """Returns the pattern that matches the request and the result that it asks for.

  The results are written independently of the grammar that generates the topic.
  """
  numbers = [int(word) for word in re.findall(r"\d+", request)]
  n, m = numbers[0], numbers[-1]
  meanings = {
    "that adds \\d+ to every": [x + n for x in _DATA],
    "multiplies every": [n * x for x in _DATA],
    "keeps every": list(filter(lambda x: x > n, _DATA)),
    "drops every": list(filter(lambda x: not x > n, _DATA)),
    "counts every": len([x for x in _DATA if x < n]),
    "sums every": sum(x for x in _DATA if x > n),
    "finds the first": next((x for x in _DATA if x > n), m),
    "if any": n in _DATA,
    "if every": min(_DATA) >= n,
    "\\d+ largest": sorted(_DATA)[::-1][:n],
    "\\d+ smallest": sorted(_DATA)[:n],
    "caps every": [x if x < n else n for x in _DATA],
    "the mean": sum(_DATA) / len(_DATA),
    "largest of": sorted(_DATA)[-1],
    "that joins": (_DATA + _OTHER)[:n],
    "in pairs": [_DATA[i] + _OTHER[i] + n for i in range(3)],
    "replaces every": [m if x == n else x for x in _DATA],
    "labels each": ["high" if x > n else "low" for x in _DATA],
  }
  (meaning,) = [key for key in meanings if re.search(key, request)]
  return meaning, meanings[meaning]


def test_python_functions_compute_the_requested_result(samples):
  seen = set()
  for example in samples["python"]:
    name, arguments = re.search(r"(\w+_\w+)\(([\w, ]+)\)", example.prompt).groups()
    function = ast.parse(example.reference).body[0]
    assert (function.name, [arg.arg for arg in function.args.args]) == (
      name,
      arguments.split(", "),
    )
    scope = {}
    exec(example.reference, scope)
    given = [list(_DATA), list(_OTHER)][: len(function.args.args)]
    meaning, expected = _expected(example.prompt)
    assert scope[name](*given) == expected, example
    seen.add(meaning)
  assert len(seen) == len(python._PATTERNS) >= 15


def test_finance_figures_add_up(samples):
  kinds = set()
  for example in samples["finance"]:
    given = [int(number) for number in re.findall(r"\d+", example.prompt)]
    numbers = [int(number) for number in re.findall(r"\d+", example.reference)]
    if "from" in example.prompt or "forecast" in example.prompt:
      kinds.add("difference")
      assert numbers == [abs(given[0] - given[1]), *given], example
      rising = given[1] > given[0] if "from" in example.prompt else given[0] > given[1]
      assert rising == bool(re.search(" rose | beat ", example.prompt)), example
    elif "total" in example.reference:
      kinds.add("total")
      assert numbers == [*given, sum(given)], example
    else:
      kinds.add("copy")
      assert numbers == given, example
  assert kinds == {"difference", "total", "copy"}


def test_splits_are_disjoint_and_about_80_10_10():
  for topic in topics.TOPICS:
    prompts = {
      split: {e.prompt for e in topics.generate(topic, split, 1000, seed)}
      for split, seed in zip(topics.SPLITS, (0, 1, 2), strict=True)
    }
    assert not prompts["train"] & prompts["eval"]
    assert not prompts["train"] & prompts["stream"]
    assert not prompts["eval"] & prompts["stream"]
  drawn = [topics.split_of(f"prompt {i}") for i in range(5000)]
  assert abs(drawn.count("train") / 5000 - 0.8) < 0.03
  assert abs(drawn.count("eval") / 5000 - 0.1) < 0.03


def test_vocabulary_has_t5_special_ids_and_single_token_numbers(vocabulary):
  assert vocabulary.vocab_size() == 1536
  assert (vocabulary.pad_id(), vocabulary.eos_id(), vocabulary.unk_id()) == (0, 1, 2)
  assert vocabulary.bos_id() == -1
  assert vocabulary.id_to_piece(1) == "</s>"
  # Numbers below 100 are single tokens, with and without a space before them.
  for number in range(100):
    assert len(vocabulary.encode(str(number))) == 1
    assert len(vocabulary.encode(f"is {number}.")) == len(vocabulary.encode("is ."))
  assert len(vocabulary.encode("is 100.")) > len(vocabulary.encode("is 10."))


def test_vocabulary_is_lossless_on_generated_and_foreign_text(samples, vocabulary):
  texts = [e.prompt for topic in samples.values() for e in topic]
  texts += [e.reference for topic in samples.values() for e in topic]
  texts += ["a  b\n\n        c 1234\tß 漢字 🙂", "    indented\n"]
  for text in texts:
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert vocabulary.unk_id() not in ids


def _shipped(topic: str, split: str) -> bytes:
  path = assets.resolve(f"{examples.TOPICS_DIR}/{topic}.{split}.jsonl.gz")
  return gzip.decompress(path.read_bytes())


@pytest.mark.parametrize("topic", topics.TOPICS)
def test_shipped_files_equal_the_generated_ones(topic):
  for split, count in (("train", 4000), ("eval", 1200), ("stream", 400)):
    found = topics.generate(topic, split, count)
    assert _shipped(topic, split) == make_topics.to_lines(found)


def test_shipped_topics_are_read_by_name():
  assert examples.TOPICS == topics.TOPICS
  found = examples.topic_examples("sql", "eval", 30)
  expected = topics.generate("sql", "eval", 30)
  assert [(e.prompt, e.reference) for e in found] == [
    (e.prompt, e.reference) for e in expected
  ]
  with pytest.raises(base.InputError, match="count: received 401, .* has 400"):
    examples.topic_examples("sql", "stream", 401)
  with pytest.raises(base.InputError, match="TaskConfig.pattern.*poems"):
    examples.topic_examples("poems", "train", 1)


@pytest.mark.slow  # generates 60,000 examples of each topic
def test_shipped_seen_split_equals_the_generated_one():
  for topic in topics.TOPICS:
    assert _shipped(topic, "seen") == make_topics.to_lines(make_topics.seen(topic))
