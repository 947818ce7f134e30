"""SentencePiece vocabularies: one object shared by the target and its drafts.

Needs `sentencepiece` only. `as_seqio` gives the same vocabulary to seqio, which
must write the same ids (tested), whichever of the two reads a stream.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import sentencepiece

from osd_jax import base
from osd_jax.base import EOS_ID, PAD_ID

FOLDER_FILE = "spiece.model"
_SETTINGS_FILE = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Text to ids and back, as a family of models is used to it. Made by `load`.

  T5's prompts end in end-of-sequence. Those of decoder-only models begin with what
  their tokenizer puts there, and may be put into a chat template before.

  Two vocabularies are equal when they write the same ids, wherever they lie.

  Attributes:
    fingerprint: sha256 of the model's bytes and of `extra_ids`.
    size: number of ids, sentinels included; a model's V may be padded beyond.
    path: where the model was read.
    extra_ids: number of T5's sentinels (`<extra_id_0>`...) after the last piece.
    processor: a SentencePiece processor, or what has the same functions.
    pad_id: what rows of ids are filled up with; no id of a text.
    eos_ids: ids that end a sequence, the first one written.
    is_causal: of decoder-only models.
    prefix: ids before every prompt of a decoder-only model.
    chat_template: text of the template that prompts are put into; "" for none.
    template: does so.
  """

  fingerprint: str
  size: int
  path: str = dataclasses.field(compare=False)
  extra_ids: int = dataclasses.field(compare=False)
  processor: sentencepiece.SentencePieceProcessor = dataclasses.field(
    compare=False, repr=False
  )
  pad_id: int = PAD_ID
  eos_ids: tuple[int, ...] = (EOS_ID,)
  is_causal: bool = False
  prefix: tuple[int, ...] = ()
  chat_template: str = ""
  template: Callable[[str], str] | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @classmethod
  def load(cls, path: str | os.PathLike[str], extra_ids: int = 0) -> "Vocabulary":
    """Reads a SentencePiece model.

    Args:
      path: the `.model` file, or a folder with a `spiece.model`, as published
        checkpoints have.
      extra_ids: sentinels to add behind the pieces; 100 for T5's checkpoints
        where text may hold sentinels, 0 otherwise.

    Returns:
      The vocabulary; the same object for the same unchanged file.

    Raises:
      ValueError: no such file, not a SentencePiece model, negative `extra_ids`,
        or special ids other than pad 0 and end-of-sequence 1.
    """
    if not isinstance(extra_ids, int) or extra_ids < 0:
      raise base.InputError(
        f"Vocabulary.extra_ids: received {extra_ids!r}, expected an integer >= 0."
      )
    path = os.fspath(path)
    if os.path.isdir(path):
      path = os.path.join(path, FOLDER_FILE)
    return _build(path, _read(path), extra_ids)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without end-of-sequence."""
    return self.processor.EncodeAsIds(text)

  def encode_with_eos(self, text: str) -> np.ndarray:
    """Returns the ids of `text` and end-of-sequence, [n + 1] int32."""
    return np.asarray([*self.encode(text), self.eos_ids[0]], np.int32)

  def encode_prompt(self, text: str) -> np.ndarray:
    """Returns the ids of a prompt as its model is given them, [n] int32."""
    if not self.is_causal:
      return self.encode_with_eos(text)
    if self.template is not None:  # it writes its own beginning
      return np.asarray(self.encode(self.template(text)), np.int32)
    return np.asarray([*self.prefix, *self.encode(text)], np.int32)

  def is_blank(self, prompt: np.ndarray) -> bool:
    """Whether the ids of a prompt hold no text."""
    return len(prompt) <= (len(self.prefix) if self.is_causal else 1)

  def cut_prompt(self, prompt: np.ndarray, length: int) -> np.ndarray:
    """Cuts the ids of a prompt to `length`.

    T5 keeps the beginning, and end-of-sequence at the end; a decoder-only model, which
    writes on where the prompt ends, keeps the end and the prefix.
    """
    if len(prompt) <= length:
      return prompt
    if not self.is_causal:
      return np.append(prompt[: length - 1], np.int32(EOS_ID))
    kept = min(len(self.prefix), length - 1)
    begins = tuple(prompt[:kept]) == self.prefix[:kept]
    kept = kept if begins else 0
    return np.concatenate([prompt[:kept], prompt[kept - length :]])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids` up to the first end-of-sequence.

    Args:
      ids: token ids; padding is dropped, ids beyond `size` (a model's padded
        rows) read as unknown.

    Returns:
      The text.
    """
    kept: list[int] = []
    for token in ids:
      token = int(token)
      if token in self.eos_ids:
        break
      if token != self.pad_id:
        kept.append(token if 0 <= token < self.size else self.processor.unk_id())
    return self.processor.DecodeIds(kept)

  @property
  def pieces(self) -> list[str]:
    """The piece of every id, in id order."""
    return [self.processor.IdToPiece(i) for i in range(self.size)]

  def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
    return self


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
  """Name -> content of what `transformers.T5Tokenizer.from_pretrained` reads.

  It takes every model for a unigram model as T5's own; of those it writes the same ids.
  """
  pieces, unknown = vocabulary.pieces, vocabulary.processor.unk_id()
  special = {
    "pad_token": pieces[PAD_ID],
    "eos_token": pieces[EOS_ID],
    "unk_token": pieces[unknown],
    "additional_special_tokens": [
      f"<extra_id_{index}>" for index in range(vocabulary.extra_ids)
    ],
  }
  settings = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": vocabulary.extra_ids,
    "clean_up_tokenization_spaces": False,  # text comes back as it was
    **special,
  }
  return {
    FOLDER_FILE: _read(vocabulary.path),
    _SETTINGS_FILE: (json.dumps(settings, indent=2) + "\n").encode(),
  }


def stated_extra_ids(vocabulary: Vocabulary) -> int | None:
  """Sentinels that the tokenizer's settings beside the model ask for, if they do."""
  path = pathlib.Path(vocabulary.path).with_name(_SETTINGS_FILE)
  try:
    stated = json.loads(path.read_bytes())["extra_ids"]
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return stated if base.is_count(stated, least=0) else None


def as_seqio(vocabulary: Vocabulary, is_prompt: bool = False) -> Any:
  """Returns the same vocabulary as a `seqio.Vocabulary`.

  Its `encode_tf` calls the same SentencePiece library as `encode`: the copy
  inside tensorflow-text breaks ties between segmentations of one score otherwise
  ("-------" is one such text), so that training and serving would differ.

  Args:
    vocabulary: what to hand over; its file must still be there.
    is_prompt: write prompts, where those of a decoder-only model differ from texts.

  Returns:
    The seqio vocabulary.

  Raises:
    ImportError: seqio is not installed.
    ValueError: the file changed since it was loaded.
  """
  if vocabulary.is_causal:
    return _causal_seqio_class()(vocabulary, is_prompt)
  if Vocabulary.load(vocabulary.path, vocabulary.extra_ids) != vocabulary:
    raise base.InputError(
      f"Vocabulary.path: {vocabulary.path} was loaded with fingerprint"
      f" {vocabulary.fingerprint[:12]} and has changed since; load it again."
    )
  return _seqio_class()(vocabulary.path, vocabulary.extra_ids)


@functools.cache
def _seqio_class() -> Any:
  import seqio

  class SentencePieceVocabulary(seqio.SentencePieceVocabulary):
    """seqio's, with one SentencePiece library for both of its ways."""

    def _encode_tf(self, s: Any) -> Any:
      return _in_tensorflow(self._encode, s)

  return SentencePieceVocabulary


@functools.cache
def _causal_seqio_class() -> Any:
  import seqio
  import tensorflow as tf

  class CausalVocabulary(seqio.Vocabulary):
    """A decoder-only model's: prompts begin with a prefix, nothing ends them."""

    def __init__(self, vocabulary: Vocabulary, is_prompt: bool):
      super().__init__()
      self.vocabulary = vocabulary
      self._write = vocabulary.encode_prompt if is_prompt else vocabulary.encode

    @property
    def bos_id(self) -> int | None:
      return None

    @property
    def eos_id(self) -> int:
      return self.vocabulary.eos_ids[0]

    @property
    def unk_id(self) -> int | None:
      return self.vocabulary.processor.unk_id()

    @property
    def _base_vocab_size(self) -> int:
      return self.vocabulary.size

    def _encode(self, s: str) -> list[int]:
      return [int(token) for token in self._write(s)]

    def _decode(self, ids: Iterable[int]) -> str:
      return self.vocabulary.decode(ids)

    def _encode_tf(self, s: Any) -> Any:
      return _in_tensorflow(self._encode, s)

    def _decode_tf(self, ids: Any) -> Any:
      return tf.numpy_function(lambda row: self.decode(row).encode(), [ids], tf.string)

  return CausalVocabulary


def _in_tensorflow(encode: Callable[[str], Sequence[int]], text: Any) -> Any:
  """The ids [n] of a text that is a tensor."""
  import tensorflow as tf

  def encoded(text: bytes | np.ndarray) -> np.ndarray:
    plain = text if isinstance(text, bytes) else text.item()
    return np.asarray(encode(plain.decode("utf-8")), np.int32)

  ids = tf.numpy_function(encoded, [text], tf.int32)
  ids.set_shape([None])
  return ids


def _read(path: str) -> bytes:
  """Returns the file's bytes, or a ValueError that says what is wrong."""
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise base.InputError(
      f"Vocabulary.path: received {path!r}, expected a readable SentencePiece"
      f" model ({error.strerror}); give the path of a .model file."
    ) from error


@functools.lru_cache(maxsize=8)
def _build(path: str, model: bytes, extra_ids: int) -> Vocabulary:
  """Makes the vocabulary; cached, for a processor holds a few megabytes."""
  processor = sentencepiece.SentencePieceProcessor()
  try:
    if not model:
      raise RuntimeError("the file is empty")
    processor.LoadFromSerializedProto(_with_sentinels(model, extra_ids))
  except Exception as error:  # sentencepiece and protobuf raise many kinds
    raise base.InputError(
      f"Vocabulary.path: {path!r} is not a SentencePiece model ({error});"
      " expected a file made by sentencepiece's trainer."
    ) from error
  _check_special_ids(path, processor)
  digest = hashlib.sha256(model + f"|extra_ids={extra_ids}".encode()).hexdigest()
  return Vocabulary(digest, processor.GetPieceSize(), path, extra_ids, processor)


def _with_sentinels(model: bytes, extra_ids: int) -> bytes:
  """Adds T5's sentinels behind the pieces, last first as T5 and seqio do."""
  if not extra_ids:
    return model
  from sentencepiece import sentencepiece_model_pb2  # needs protobuf

  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  kind = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
  for index in reversed(range(extra_ids)):
    proto.pieces.add(piece=f"▁<extra_id_{index}>", score=0.0, type=kind)
  return proto.SerializeToString()


def _check_special_ids(
  path: str, processor: sentencepiece.SentencePieceProcessor
) -> None:
  """Every decoder here starts with pad 0 and stops at end-of-sequence 1."""
  found = (processor.pad_id(), processor.eos_id())
  if found != (PAD_ID, EOS_ID):
    raise base.InputError(
      f"Vocabulary.path: {path!r} has pad id {found[0]} and end-of-sequence id"
      f" {found[1]}, expected {PAD_ID} and {EOS_ID} as in T5; train it with"
      f" --pad_id={PAD_ID} --eos_id={EOS_ID} --unk_id=2 --bos_id=-1."
    )
