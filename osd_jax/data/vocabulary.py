"""Vocabularies: text to token ids and back, shared by the target and its drafts."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import sentencepiece

from osd_jax import base
from osd_jax.base import EOS_ID, PAD_ID
from osd_jax.data import chat

FOLDER_FILE = "spiece.model"
_SETTINGS_FILE = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Encodes text in the form that a family of models expects. Made by `load`.

  T5's prompts end in end-of-sequence. Prompts of decoder-only models begin with the
  tokens that their tokenizer adds, and may be wrapped in a chat template.

  Two vocabularies are equal if they encode to the same ids, whatever their paths.

  Attributes:
    fingerprint: sha256 of the model's bytes and of `extra_ids`.
    size: number of ids including sentinels; a model's V may be padded beyond it.
    path: the file of the model.
    extra_ids: number of T5's sentinels (`<extra_id_0>`...) after the last piece.
    processor: a SentencePiece processor, or an object with the same functions.
    pad_id: fills the end of rows; not the id of any text.
    eos_ids: ids that end a sequence; the first one is appended by `encode_with_eos`.
    is_causal: True for decoder-only models.
    prefix: ids before every prompt of a decoder-only model.
    chat_template: Jinja text of the chat template; "" for none.
    template: applies the chat template to a prompt.
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
      extra_ids: sentinels to add after the pieces: 100 for T5's checkpoints if
        texts may contain sentinels, otherwise 0.

    Returns:
      The vocabulary; the same object for the same unchanged file.

    Raises:
      InputError: no such file, not a SentencePiece model, negative `extra_ids`,
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
    """Returns the ids of a prompt in the form that its model reads, [n] int32.

    Raises:
      InputError: a conversation, without a chat template that fits it.
    """
    if self.template is None and isinstance(text, chat.Conversation):
      raise base.InputError(
        f"encode_prompt: received a conversation of {len(text.messages)} messages,"
        " expected a single text without a chat template; set"
        " PairConfig.chat_template, such as 'own'."
      )
    if not self.is_causal:
      return self.encode_with_eos(text)
    if self.template is not None:  # it writes the prefix itself
      return np.asarray(self.encode(self.template(text)), np.int32)
    return np.asarray([*self.prefix, *self.encode(text)], np.int32)

  def is_blank(self, prompt: np.ndarray) -> bool:
    """Whether the ids of a prompt contain no text."""
    return len(prompt) <= (len(self.prefix) if self.is_causal else 1)

  def cut_prompt(self, prompt: np.ndarray, length: int) -> np.ndarray:
    """Cuts the ids of a prompt to `length`.

    For T5, keeps the beginning and appends end-of-sequence. For a decoder-only model,
    which continues where the prompt ends, keeps the prefix and the end.
    """
    if len(prompt) <= length:
      return prompt
    if not self.is_causal:
      return np.append(prompt[: length - 1], np.int32(EOS_ID))
    # At least one token of the text survives, so that a cut prompt is never blank.
    kept = min(len(self.prefix), length - 1)
    # A chat template may not have written the prefix.
    begins = tuple(prompt[:kept]) == self.prefix[:kept]
    kept = kept if begins else 0
    return np.concatenate([prompt[:kept], prompt[kept - length :]])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids` up to the first end-of-sequence.

    Padding is dropped; ids outside the vocabulary (a model's padded rows) are decoded
    as unknown.
    """
    kept: list[int] = []
    for token in ids:
      token = int(token)
      if token in self.eos_ids:
        break
      # An answer that reached its maximum length has padding but no end-of-sequence.
      if token != self.pad_id:
        # A model's V is often rounded up, so its head can emit ids without a piece.
        kept.append(token if 0 <= token < self.size else self.processor.unk_id())
    return self.processor.DecodeIds(kept)

  @property
  def pieces(self) -> list[str]:
    """The piece of every id, in order."""
    return [self.processor.IdToPiece(i) for i in range(self.size)]

  def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
    return self


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
  """Returns the files that `transformers.T5Tokenizer.from_pretrained` reads, by name.

  T5Tokenizer treats every SentencePiece model as a unigram model, as T5's own is. For
  unigram models it encodes to the same ids.
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
    "clean_up_tokenization_spaces": False,  # decoding returns the text unchanged
    **special,
  }
  return {
    FOLDER_FILE: _read(vocabulary.path),
    _SETTINGS_FILE: (json.dumps(settings, indent=2) + "\n").encode(),
  }


def stated_extra_ids(vocabulary: Vocabulary) -> int | None:
  """Returns `extra_ids` of the settings file next to the model, or None."""
  path = pathlib.Path(vocabulary.path).with_name(_SETTINGS_FILE)
  try:
    stated = json.loads(path.read_bytes())["extra_ids"]
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return stated if base.is_count(stated, least=0) else None


def _read(path: str) -> bytes:
  """Returns the file's bytes, or raises InputError."""
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise base.InputError(
      f"Vocabulary.path: received {path!r}, expected a readable SentencePiece"
      f" model ({error.strerror}); give the path of a .model file."
    ) from error


@functools.lru_cache(maxsize=8)
def _build(path: str, model: bytes, extra_ids: int) -> Vocabulary:
  """Makes the vocabulary; cached, because a processor takes a few megabytes."""
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
  """Adds T5's sentinels after the pieces, the last one first as T5 and seqio do."""
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
  """Checks pad 0 and end-of-sequence 1, which T5's decoder starts and stops with."""
  found = (processor.pad_id(), processor.eos_id())
  if found != (PAD_ID, EOS_ID):
    raise base.InputError(
      f"Vocabulary.path: {path!r} has pad id {found[0]} and end-of-sequence id"
      f" {found[1]}, expected {PAD_ID} and {EOS_ID} as in T5; train it with"
      f" --pad_id={PAD_ID} --eos_id={EOS_ID} --unk_id=2 --bos_id=-1."
    )
