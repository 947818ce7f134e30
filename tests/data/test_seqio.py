"""TFDS data sets and seqio Tasks as sources, and export of examples as a seqio Task."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import tiny_pair

from osd_jax import base
from osd_jax.data import examples
from osd_jax.data.examples import TaskConfig, TaskExamples
from osd_jax.data.vocabulary import Vocabulary

LINES = [
  json.dumps({"prompt": "How many?", "reference": "SELECT 1", "id": "own-1"}),
  json.dumps({"prompt": "naïve 東京\u0000", "reference": "a\u0000"}),
  "not json",
  json.dumps({"prompt": "no reference"}),
  # SentencePiece has two segmentations with the same score for this text.
  json.dumps({"prompt": "-------", "reference": "-------"}),
  json.dumps({"prompt": "x " * 400, "reference": "y " * 400, "id": 7}),
]


@pytest.fixture(scope="module", autouse=True)
def data_extra():
  """Imports tensorflow only in the worker that runs these tests."""
  pytest.importorskip("seqio", reason="the extra `data` is not installed")


@pytest.fixture
def jsonl_task(tmp_path) -> TaskConfig:
  (tmp_path / "q.train.jsonl").write_text("\n".join(LINES) + "\n")
  return TaskConfig("q", data_dir=str(tmp_path), pattern="q.{split}.jsonl")


@pytest.fixture(scope="module")
def tfds_task(tmp_path_factory) -> TaskConfig:
  """A TFDS data set with a blank question and with a field that is not text."""
  from osd_jax.data import seqio_source

  seqio_source.import_seqio()
  import tensorflow_datasets as tfds

  folder = str(tmp_path_factory.mktemp("tfds"))
  rows = [
    {"question": f"What is {i}?", "answer": f"It is {i}.", "level": i}
    for i in range(20)
  ]
  rows[3]["question"] = "   "
  text = tfds.features.Text()
  features = {"question": text, "answer": text, "level": np.int64}
  tfds.dataset_builders.store_as_tfds_dataset(
    name="tiny_qa",
    version="1.0.0",
    features=tfds.features.FeaturesDict(features),
    split_datasets={"train": list(enumerate(rows))},
    data_dir=folder,
  )
  return TaskConfig(
    "tiny", pattern="tfds:tiny_qa:1.0.0", data_dir=folder, preprocessor="gsm8k"
  )


def test_without_seqio_the_error_names_the_extra(monkeypatch, tfds_task, vocabulary):
  monkeypatch.setitem(sys.modules, "seqio", None)
  with pytest.raises(base.MissingExtraError, match=r"osd_jax\[data\]"):
    TaskExamples(tfds_task, vocabulary)


# ---- Sources


def test_tfds_examples_are_read_and_unusable_ones_skipped(tfds_task, vocabulary):
  found = TaskExamples(tfds_task, vocabulary)
  expected = {(f"What is {i}?", f"It is {i}.") for i in range(20) if i != 3}
  assert {(e.prompt, e.reference) for e in found.examples} == expected
  (skipped,) = found.skipped
  assert skipped.startswith("tfds.tiny_qa:1.0.0.train:")
  assert skipped.endswith(": empty: 'question' is blank")


@pytest.mark.parametrize("changes", [{"pattern": "tfds:no_set"}, {"split": "dev"}])
def test_missing_tfds_set_error_names_it_in_one_line(tfds_task, changes):
  task = dataclasses.replace(tfds_task, **changes)
  match = rf"TaskConfig\.pattern .*{'.*'.join(changes.values()).removeprefix('tfds:')}"
  with pytest.raises(base.InputError, match=match) as caught:
    list(examples.texts(task))
  assert len(str(caught.value).splitlines()) == 1


def _add_task(name: str, *preprocessors) -> None:
  """Registers a Task with seqio's byte vocabulary instead of ours."""
  import seqio
  import tensorflow as tf

  def dataset(split, shuffle_files, seed=None):
    rows = {"inputs": ["Add 1.", " ", "Add 2."], "targets": ["2", "x", "3"]}
    return tf.data.Dataset.from_tensor_slices({**rows, "level": [1, 2, 3]})

  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(dataset, splits=["test"]),
    preprocessors=list(preprocessors),
    output_features={
      key: seqio.Feature(seqio.ByteVocabulary()) for key in ("inputs", "targets")
    },
  )


def test_registered_seqio_task_can_be_read_as_a_source(vocabulary):
  import seqio

  whole = (seqio.preprocessors.tokenize, seqio.preprocessors.append_eos)
  _add_task("theirs", *whole)
  # "ids_only" has no text fields, so the ids are decoded with the Task's vocabulary.
  drop = seqio.map_over_dataset(lambda x: {k: x[k] for k in ("inputs", "targets")})
  _add_task("ids_only", *whole, drop)
  for name in ("theirs", "ids_only"):
    task = TaskConfig("t", pattern=f"seqio:{name}", split="test")
    found = TaskExamples(task, vocabulary)
    pairs = [(e.prompt, e.reference) for e in found.examples]
    assert pairs == [("Add 1.", "2"), ("Add 2.", "3")]
    assert found.skipped == [f"seqio.{name}.test:2: empty: 'prompt' is blank"]


@pytest.mark.parametrize("fields", [{"pattern": "seqio:absent"}, {"split": "dev"}])
def test_missing_seqio_task_error_names_the_field(fields):
  import seqio

  if "known" not in seqio.TaskRegistry.names():
    _add_task("known")
  with pytest.raises(base.InputError, match=r"TaskConfig\.pattern \(task 't'\)"):
    list(examples.texts(TaskConfig("t", **{"pattern": "seqio:known", **fields})))


# ---- Export


def _exported(task: TaskConfig, vocabulary: Vocabulary, name: str) -> list:
  import seqio

  from osd_tools import seqio_export

  assert seqio_export.register(task, vocabulary, name) == name
  dataset = seqio.get_mixture_or_task(name).get_dataset(
    sequence_length=None, split=task.split, shuffle=False
  )
  return list(dataset.as_numpy_iterator())


def test_exported_task_has_the_same_ids_and_texts_as_task_examples(
  jsonl_task, vocabulary, tfds_task
):
  for task in (jsonl_task, dataclasses.replace(jsonl_task, rows=2), tfds_task):
    expected = TaskExamples(task, vocabulary)
    exported = _exported(task, vocabulary, f"export_{task.name}_{task.rows}")
    assert len(exported) == len(expected) > 0
    for number, (ours, theirs) in enumerate(
      zip(expected.examples, exported, strict=True)
    ):
      prompt, reference = expected.tokens(number)
      assert theirs["inputs"].tolist() == prompt.tolist()
      assert theirs["targets"].tolist() == reference.tolist()
      assert theirs["inputs_pretokenized"].decode() == ours.prompt
      assert theirs["targets_pretokenized"].decode() == ours.reference
      assert theirs["example_id"].decode() == ours.example_id
      assert theirs["location"].decode() == ours.location


def test_exported_task_of_a_decoder_only_model_ends_only_references(
  jsonl_task, tmp_path
):
  (tmp_path / "llama").mkdir()
  path = tmp_path / "llama" / "tokenizer.model"
  path.write_bytes(tiny_pair.llama_tokenizer())
  for template in ("", "[INST] {{ messages[0]['content'] }} [/INST]"):
    vocabulary = Vocabulary.load(path, template=template)
    ours = TaskExamples(jsonl_task, vocabulary)
    exported = _exported(jsonl_task, vocabulary, f"llama{len(template)}")
    assert len(exported) == len(ours)
    for number, theirs in enumerate(exported):
      prompt, reference = ours.tokens(number)
      assert theirs["inputs"].tolist() == prompt.tolist() and prompt[-1] != 2
      assert theirs["targets"].tolist() == reference.tolist() and reference[-1] == 2


def test_exported_task_read_back_gives_the_same_examples(jsonl_task, vocabulary):
  _exported(jsonl_task, vocabulary, "there_and_back")
  back = TaskExamples(TaskConfig("q", pattern="seqio:there_and_back"), vocabulary)
  ours = TaskExamples(jsonl_task, vocabulary)
  assert back.fingerprint == ours.fingerprint and len(back) == 5


def test_exported_task_keeps_the_end_token_of_cut_prompts(jsonl_task, vocabulary):
  import seqio

  from osd_tools import seqio_export

  name = seqio_export.register(dataclasses.replace(jsonl_task, name="cut"), vocabulary)
  task = seqio.get_mixture_or_task(name)
  lengths = {"inputs": 16, "targets": 16}
  dataset = task.get_dataset(lengths, split="train", shuffle=False)
  *_, last = dataset.as_numpy_iterator()
  assert last["inputs"].tolist() == [*vocabulary.encode("x " * 400)[:15], 1]
  assert len(last["targets"]) == 16 and 1 not in last["targets"]
  feature = task.output_features["inputs"]
  assert feature.vocabulary.decode(last["inputs"].tolist()).startswith("x x")


def test_registering_a_different_task_under_the_same_name_is_refused(
  jsonl_task, vocabulary
):
  from osd_tools import seqio_export

  task = dataclasses.replace(jsonl_task, name="again")
  for _ in range(2):
    seqio_export.register(task, vocabulary)
  others = (
    (dataclasses.replace(task, rows=1), vocabulary),
    (task, Vocabulary.load(vocabulary.path, extra_ids=2)),
  )
  for other in others:
    with pytest.raises(base.InputError, match="'again' is already registered"):
      seqio_export.register(*other)
