"""Vocabulary: ids equal SentencePiece's, and invalid models are refused by name."""

import io
import pathlib

import numpy as np
import pytest
import sentencepiece

from osd_jax.data.vocabulary import Vocabulary

TEXTS = (
  "How many singers are there?",
  "def f(a):\n    return a + 1\n",
  "12 + 30 = 42",
  "a ------- b",  # ties between segmentations of one score
  "naïve café, 東京",
  "",
  "  spaces  ",
)


def trained(path: pathlib.Path, **settings) -> pathlib.Path:
  """Trains a small model, with T5's special ids by default, and writes it to `path`."""
  ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, **settings}
  model = io.BytesIO()
  sentences = [f"{a} {b} number {n}" for a in "xyz" for b in "uvw" for n in range(50)]
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(sentences),
    model_writer=model,
    vocab_size=28,
    minloglevel=2,
    **ids,
  )
  path.write_bytes(model.getvalue())
  return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Vocabulary:
  return Vocabulary.load(trained(tmp_path_factory.mktemp("small") / "small.model"))


def test_t5_sentinels_have_their_published_ids(shared_data):
  t5 = Vocabulary.load(shared_data / "tokenizers/t5/spiece.model", extra_ids=100)
  assert t5.size == 32_100
  assert t5.encode("Hello world") == [8774, 296]
  assert t5.encode("see <extra_id_0>") == [217, 32_099]


def test_t5_ids_equal_those_of_sentencepiece(shared_data):
  """Published T5 checkpoints contain the model as spiece.model."""
  folder = shared_data / "tokenizers/t5"
  theirs = sentencepiece.SentencePieceProcessor(str(folder / "spiece.model"))
  for own in (Vocabulary.load(folder), Vocabulary.load(folder, extra_ids=100)):
    assert own.path == str(folder / "spiece.model")
    for text in TEXTS:
      ids = theirs.EncodeAsIds(text)
      assert own.encode(text) == ids and own.decode(ids) == theirs.DecodeIds(ids), text


def test_folder_without_a_model_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"Vocabulary\.path.*spiece\.model"):
    Vocabulary.load(tmp_path)


def test_decode_inverts_encode_and_stops_at_the_first_eos(vocabulary):
  text = "def f(a):\n    return a + 1"
  ids = vocabulary.encode_with_eos(text)
  assert ids.dtype == np.int32 and ids[-1] == 1 and 1 not in ids[:-1]
  assert vocabulary.decode(ids) == text
  assert vocabulary.decode([0, 0, *ids, *vocabulary.encode("more"), 0]) == text
  assert vocabulary.decode(np.asarray(vocabulary.encode(text))) == text


def test_ids_beyond_the_vocabulary_decode_as_unknown(vocabulary):
  unknown = vocabulary.decode([vocabulary.processor.unk_id()])
  assert vocabulary.decode([vocabulary.size + 7]) == unknown != ""


def test_pieces_are_in_id_order(vocabulary):
  assert len(vocabulary.pieces) == vocabulary.size
  assert vocabulary.pieces[1] == "</s>"
  ids = vocabulary.encode("revenue rose")
  spelled = "".join(vocabulary.pieces[i] for i in ids)
  assert spelled.replace("▁", " ").strip() == "revenue rose"


def test_vocabularies_compare_by_content_and_not_by_path(vocabulary, small, tmp_path):
  copy = tmp_path / "copy.model"
  copy.write_bytes(pathlib.Path(vocabulary.path).read_bytes())
  assert Vocabulary.load(copy) == vocabulary
  assert hash(Vocabulary.load(copy)) == hash(vocabulary)
  assert small != vocabulary
  assert Vocabulary.load(vocabulary.path, extra_ids=1) != vocabulary


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"\x0a" * 100])
def test_missing_or_invalid_model_file_is_refused(tmp_path, content):
  path = tmp_path / "bad.model"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=r"Vocabulary\.path.*bad\.model"):
    Vocabulary.load(path)


def test_special_ids_other_than_t5s_are_refused(tmp_path):
  path = trained(tmp_path / "llama.model", pad_id=-1, eos_id=2, unk_id=0, bos_id=1)
  with pytest.raises(ValueError, match="end-of-sequence id 2, expected 0 and 1"):
    Vocabulary.load(path)


@pytest.mark.parametrize("extra_ids", [-1, 1.5, "3"])
def test_invalid_extra_ids_are_refused(vocabulary, extra_ids):
  with pytest.raises(ValueError, match="extra_ids"):
    Vocabulary.load(vocabulary.path, extra_ids=extra_ids)
