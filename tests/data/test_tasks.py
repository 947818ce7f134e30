"""Tasks are registered with seqio once, and both readers give the same rows."""

import dataclasses
import json
import string
import subprocess
import sys

import numpy as np
import pytest

from osd_jax import base
from osd_jax.data import generated, rows, tasks
from osd_jax.data.sources import TaskConfig
from osd_jax.data.vocabulary import Vocabulary

LINES = [
  json.dumps({"prompt": "How many?", "reference": "SELECT 1", "id": "own-1"}),
  json.dumps({"prompt": "naïve 東京\u0000", "reference": "a\u0000"}),
  "",
  "not json",
  json.dumps({"prompt": "no reference"}),
  json.dumps({"prompt": b"\\ud800".decode("unicode_escape")}),
  json.dumps({"prompt": "x " * 400, "reference": "y " * 400, "id": 7}),
]


@pytest.fixture(scope="module")
def vocabulary(repository) -> Vocabulary:
  return Vocabulary.load(repository / "osd_jax/assets/demo_vocabulary.model")


@pytest.fixture
def jsonl_task(tmp_path) -> TaskConfig:
  (tmp_path / "q.train.jsonl").write_text("\n".join(LINES) + "\n")
  return TaskConfig("q", data_dir=str(tmp_path), pattern="q.{split}.jsonl")


def run_python(code):
  return subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


@pytest.fixture
def count_encoded(monkeypatch):
  """The prompts that were encoded since."""
  encode, seen = Vocabulary.encode_prompt, []

  def counted(self, text):
    seen.append(text)
    return encode(self, text)

  monkeypatch.setattr(Vocabulary, "encode_prompt", counted)
  return seen


def test_ids_are_written_when_they_are_asked_for(jsonl_task, vocabulary, count_encoded):
  found = rows.read(jsonl_task, vocabulary)
  assert not count_encoded
  row = found.rows[0]
  assert row.source.tolist() == vocabulary.encode_with_eos(row.prompt).tolist()
  assert row.target.tolist() == vocabulary.encode_with_eos(row.reference).tolist()
  assert count_encoded == [row.prompt]  # once


def test_a_letter_or_digit_is_a_token_and_what_has_none_is_looked_at(
  tmp_path, vocabulary, count_encoded
):
  assert not any(
    vocabulary.is_blank(vocabulary.encode_prompt(sign))
    for sign in string.ascii_letters + string.digits
  )
  del count_encoded[:]
  prompts = ["\u200b", "?", "a"]  # a space of no width is no token
  lines = [json.dumps({"prompt": prompt, "reference": ""}) for prompt in prompts]
  (tmp_path / "p.jsonl").write_text("\n".join(lines))
  found = rows.read(TaskConfig("p", pattern=str(tmp_path / "p.jsonl")), vocabulary)
  assert "a" not in count_encoded and "?" in count_encoded
  assert [row.prompt for row in found.rows] == [
    prompt
    for prompt in prompts
    if not vocabulary.is_blank(vocabulary.encode_prompt(prompt))
  ]


def test_seqio_is_imported_without_a_word():
  done = run_python(
    "import sys; from osd_jax.data import tasks; tasks.import_seqio();"
    "print('heard', file=sys.stderr)"
  )
  assert done.stderr.strip() == "heard"


def test_what_a_failing_import_wrote_is_shown():
  done = run_python(
    "import os; from osd_jax.data import tasks\n"
    "with tasks._silent_stderr():\n  os.write(2, b'the cause'); raise OSError"
  )
  assert "the cause" in done.stderr and "OSError" in done.stderr


@pytest.fixture(scope="module")
def tfds_task(tmp_path_factory) -> TaskConfig:
  """A TFDS set built on the spot, with fields that are no text."""
  tasks.import_seqio()
  import tensorflow_datasets as tfds

  folder = str(tmp_path_factory.mktemp("tfds"))
  examples = [
    {"question": f"What is {i}?", "answer": f"It is {i}.", "level": i}
    for i in range(20)
  ]
  examples[3]["question"] = "   "
  tfds.dataset_builders.store_as_tfds_dataset(
    name="tiny_qa",
    version="1.0.0",
    features=tfds.features.FeaturesDict(
      {
        "question": tfds.features.Text(),
        "answer": tfds.features.Text(),
        "level": np.int64,
      }
    ),
    split_datasets={"train": list(enumerate(examples))},
    data_dir=folder,
  )
  return TaskConfig(
    "tiny",
    kind="tfds",
    tfds_name="tiny_qa:1.0.0",
    data_dir=folder,
    preprocessor="gsm8k",
  )


def _as_values(found: rows.TaskRows) -> list:
  return [
    (r.row_id, r.prompt, r.reference, r.source.tolist(), r.target.tolist())
    for r in found.rows
  ]


def _generated(**changes) -> TaskConfig:
  fields = {"kind": "generated", "topic": "sql", "split": "eval", "rows": 30}
  return TaskConfig("generated", **{**fields, **changes})


def _assert_readers_agree(task: TaskConfig, vocabulary: Vocabulary) -> rows.TaskRows:
  plain = rows.read(task, vocabulary, "plain")
  seqio = rows.read(task, vocabulary, "seqio")
  assert _as_values(plain) == _as_values(seqio)
  assert plain.skipped == seqio.skipped
  assert [r.location for r in plain.rows] == [r.location for r in seqio.rows]
  assert plain.fingerprint == seqio.fingerprint
  for row in plain.rows:
    assert row.source.dtype == row.target.dtype == np.int32
    assert row.source.tolist() == [*vocabulary.encode(row.prompt), 1]
  return plain


@pytest.mark.parametrize("limit", [None, 2, 3])
def test_readers_agree_on_jsonl(jsonl_task, vocabulary, limit):
  task = dataclasses.replace(jsonl_task, rows=limit)
  found = _assert_readers_agree(task, vocabulary)
  assert len(found.rows) == (limit or 4)
  if limit is None:
    assert [row.row_id for row in found.rows] == [
      "own-1",
      "q.train.jsonl:2",
      "q.train.jsonl:5",
      "7",
    ]
    assert "q.train.jsonl:3: empty: blank line" in found.skipped[0]
    assert "q.train.jsonl:4: malformed: not JSON" in found.skipped[1]
    assert "q.train.jsonl:6: malformed: a lone surrogate" in found.skipped[2]
    assert len(found.skipped) == 3


def test_readers_agree_on_generated_topics(vocabulary):
  found = _assert_readers_agree(_generated(), vocabulary)
  expected = generated.examples("sql", "eval", 30, 0)
  assert [row.prompt for row in found.rows] == [e.prompt for e in expected]
  assert [row.reference for row in found.rows] == [e.reference for e in expected]
  other = rows.read(_generated(split="train"), vocabulary, "plain")
  assert other.fingerprint != found.fingerprint


def test_readers_agree_on_tfds(tfds_task, vocabulary):
  found = _assert_readers_agree(tfds_task, vocabulary)
  expected = {(f"What is {i}?", f"It is {i}.") for i in range(20) if i != 3}
  assert {(row.prompt, row.reference) for row in found.rows} == expected
  assert [":".join(place.split(":")[-2:]) for place in found.skipped] == [
    " empty: 'question' is blank"
  ]


def test_readers_agree_on_templates(tfds_task, vocabulary):
  task = dataclasses.replace(
    tfds_task,
    name="templates",
    preprocessor="identity",
    prompt="answer: {question}",
    reference="{answer} {{sure}}",
  )
  found = _assert_readers_agree(task, vocabulary)
  expected = {(f"answer: What is {i}?", f"It is {i}. {{sure}}") for i in range(20)}
  missing = {("answer: What is 3?", "It is 3. {sure}")}
  assert {(row.prompt, row.reference) for row in found.rows} == expected - missing
  assert len(found.skipped) == 1 and "'question' is blank" in found.skipped[0]


def test_readers_agree_on_real_data(shared_data, repository):
  t5 = Vocabulary.load(shared_data / "tokenizers/t5/spiece.model")
  for name in ("python", "finance_10k"):
    task = TaskConfig(
      f"real_{name}",
      data_dir=str(shared_data),
      pattern=f"{name}.{{split}}.jsonl",
      split="eval",
      preprocessor=name,
    )
    assert len(_assert_readers_agree(task, t5).rows) > 900


def test_the_registered_task_is_an_ordinary_seqio_task(jsonl_task, vocabulary):
  import seqio

  task = dataclasses.replace(jsonl_task, name="ordinary")
  assert tasks.register(task, vocabulary) == "ordinary"
  dataset = seqio.get_mixture_or_task("ordinary").get_dataset(
    sequence_length={"inputs": 16, "targets": 16}, split="train", shuffle=False
  )
  examples = list(dataset.as_numpy_iterator())
  assert len(examples) == 4
  whole = vocabulary.encode("x " * 400)
  long = examples[-1]
  assert long["inputs"].tolist() == [*whole[:15], 1], "a cut prompt keeps its end"
  assert len(long["targets"]) == 16 and 1 not in long["targets"]
  assert examples[0]["targets"].tolist() == [*vocabulary.encode("SELECT 1"), 1]
  assert examples[0]["inputs_pretokenized"] == b"How many?"
  assert examples[0]["row_id"] == b"own-1"


def test_registering_again_is_fine_and_another_definition_is_not(
  jsonl_task, vocabulary
):
  task = dataclasses.replace(jsonl_task, name="again")
  tasks.register(task, vocabulary)
  tasks.register(task, vocabulary)
  with pytest.raises(ValueError, match="'again' already stands for another"):
    tasks.register(dataclasses.replace(task, rows=1), vocabulary)
  other = Vocabulary.load(vocabulary.path, extra_ids=2)
  with pytest.raises(ValueError, match="'again' already stands for another"):
    tasks.register(task, other)
  assert len(rows.read(dataclasses.replace(task, rows=1), vocabulary).rows) == 1


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"name": ""}, "TaskConfig.name"),
    ({"name": "a b"}, "TaskConfig.name"),
    ({"kind": "csv"}, "TaskConfig.kind"),
    ({"preprocessor": "nope"}, "TaskConfig.preprocessor.*gsm8k"),
    ({"pattern": ""}, "TaskConfig.pattern.*kind is 'jsonl'"),
    ({"kind": "tfds"}, "TaskConfig.tfds_name"),
    ({"kind": "generated"}, "TaskConfig.topic"),
    ({"kind": "generated", "topic": "sql"}, "TaskConfig.rows"),
    ({"kind": "generated", "topic": "poems", "rows": 1}, "TaskConfig.topic"),
    (
      {"kind": "generated", "topic": "sql", "rows": 1, "split": "x"},
      "TaskConfig.split",
    ),
    ({"rows": 0}, "TaskConfig.rows"),
    ({"rows": 1.5}, "TaskConfig.rows.*int"),
    ({"rows": "3"}, "TaskConfig.rows"),
    ({"pattern": 3}, "TaskConfig.pattern.*str"),
    ({"prompt": "question"}, "TaskConfig.prompt.*'question'.*in braces"),
    ({"prompt": "{question"}, "TaskConfig.prompt.*in braces"),
    ({"reference": ""}, "TaskConfig.reference.*in braces"),
    ({"prompt": None}, "TaskConfig.prompt.*str"),
    (
      {"preprocessor": "gsm8k", "prompt": "{question}"},
      "TaskConfig.prompt.*'{prompt}'.*preprocessor 'gsm8k'",
    ),
    ({"name": "ä"}, "TaskConfig.name"),
  ],
)
def test_bad_configs_are_refused_by_field(fields, message):
  with pytest.raises(ValueError, match=message):
    TaskConfig(**{"name": "a", "pattern": "a.jsonl", **fields})


@pytest.mark.parametrize("reader", rows.READERS)
def test_missing_files_are_named(tmp_path, vocabulary, reader):
  (tmp_path / "b.jsonl").write_text("{}")
  task = TaskConfig("absent", data_dir=str(tmp_path), pattern="a.*")
  refused = lambda task, match: _assert_refused(task, vocabulary, reader, match)
  refused(task, r"TaskConfig\.pattern .*'absent'.*'a\.\*'.*b\.jsonl")
  for folder in (tmp_path / "nowhere", tmp_path / "b.jsonl"):
    refused(
      dataclasses.replace(task, data_dir=str(folder)),
      rf"TaskConfig\.data_dir .*{folder.name}.*expected a readable folder",
    )


def _assert_refused(task, vocabulary, reader, match):
  with pytest.raises(base.InputError, match=match) as caught:
    rows.read(task, vocabulary, reader)
  assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("reader", rows.READERS)
@pytest.mark.parametrize("kind", ["folder", "link", "binary"])
def test_what_cannot_be_read_is_named_with_its_setting(
  tmp_path, vocabulary, reader, kind
):
  path, match = tmp_path / "x.jsonl", r"TaskConfig\.pattern .*x\.jsonl cannot"
  if kind == "folder":
    path.mkdir()
  elif kind == "link":
    path.symlink_to(path)
  else:
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    match = r"TaskConfig .*no usable line.*x\.jsonl:1: malformed: not UTF-8"
  task = TaskConfig(f"bad_{kind}", data_dir=str(tmp_path), pattern="x.jsonl")
  _assert_refused(task, vocabulary, reader, match)


def test_patterns_that_match_nothing_are_named(tmp_path, vocabulary):
  for pattern in ("[", "**/", "a\0b", "../nowhere"):
    task = TaskConfig("odd", data_dir=str(tmp_path), pattern=pattern)
    _assert_refused(task, vocabulary, "plain", r"TaskConfig\.(pattern|data_dir) ")


@pytest.mark.parametrize("changes", [{"tfds_name": "no such set"}, {"split": "dev"}])
def test_a_tfds_set_that_is_not_there_is_named(tfds_task, vocabulary, changes):
  task = dataclasses.replace(tfds_task, **changes)
  match = rf"TaskConfig\.tfds_name .*{'.*'.join(changes.values())}"
  for reader in rows.READERS:
    _assert_refused(task, vocabulary, reader, match)


def test_several_files_are_read_in_sorted_order(tmp_path, vocabulary):
  for part in "ba":
    (tmp_path / f"{part}.jsonl").write_text(json.dumps({"prompt": f"file {part}"}))
  task = TaskConfig("files", data_dir=str(tmp_path), pattern="*.jsonl")
  found = _assert_readers_agree(task, vocabulary)
  assert [row.prompt for row in found.rows] == ["file a", "file b"]


def test_without_seqio_the_error_names_the_extra_and_the_other_reader(
  monkeypatch, vocabulary
):
  monkeypatch.setitem(sys.modules, "seqio", None)
  with pytest.raises(ImportError, match=r"osd-jax\[data\].*reader='plain'"):
    rows.read(_generated(), vocabulary, "seqio")
  assert len(rows.read(_generated(), vocabulary, "plain").rows) == 30
