"""Readers of the tokenizer files that model folders hold; all return a `Processor`.

SentencePiece models are read with sentencepiece: transformers 5 converts them with
merges in another order, and then encodes texts with two spaces in a row differently.
transformers reads everything else, such as `tokenizer.json` or the bytes of ByT5.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sentencepiece

from osd_jax import base


class Processor(Protocol):
  """The methods of a SentencePiece processor that `Vocabulary` uses."""

  def EncodeAsIds(self, text: str, /) -> list[int]: ...
  def DecodeIds(self, ids: Sequence[int], /) -> str: ...
  def IdToPiece(self, token: int, /) -> str: ...
  def GetPieceSize(self) -> int: ...
  def unk_id(self) -> int: ...


class Tokenizer(NamedTuple):
  """What a tokenizer's files state."""

  processor: Processor  # encodes and decodes
  prefix: tuple[int, ...] = ()  # ids that it puts before every text
  eos_id: int | None = None  # its end-of-sequence token, if it has one
  pad_id: int | None = None  # its padding token, if it has one
  plain_size: int = 0  # number of ids up to the last that is not a special token


class _TransformersProcessor:
  """A tokenizer of transformers."""

  def __init__(self, tokenizer: Any, keep_special: bool):
    self._tokenizer, self._skip_special = tokenizer, not keep_special

  def EncodeAsIds(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False)

  def DecodeIds(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(
      list(ids),
      skip_special_tokens=self._skip_special,
      clean_up_tokenization_spaces=False,
    )

  def IdToPiece(self, token: int) -> str:
    return self._tokenizer.convert_ids_to_tokens(token) or ""

  def GetPieceSize(self) -> int:
    return max(self._tokenizer.get_vocab().values()) + 1

  def unk_id(self) -> int:
    return self._tokenizer.unk_token_id or 0


def transformers() -> Any:
  """Imports transformers, which takes a second and is only needed by some models."""
  # It would warn that models need torch.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  return transformers


def read_folder(path: pathlib.Path, keep_special: bool) -> Tokenizer:
  """Reads the tokenizer of a folder as transformers does, without torch.

  `path` is a file in it, for error messages. With `keep_special`, decoded texts contain
  special tokens.

  Raises:
    InputError: transformers cannot read the folder.
    MissingExtraError: the extra "llama" is not installed.
  """
  with base.extra("llama", f"Vocabulary.path: {path}"):
    library = transformers()
  try:
    tokenizer = library.AutoTokenizer.from_pretrained(
      path.parent,
      local_files_only=True,
      trust_remote_code=False,
      model_max_length=10**9,  # prompts are cut elsewhere
    )
  except Exception as error:  # the libraries raise many types
    # All lines: the first may be "Class validation error for validator ...:".
    reason = " ".join((str(error) or repr(error)).split())[:400]
    raise base.InputError(
      f"Vocabulary.path: {path} or the config.json next to it cannot be read"
      f" ({reason}); expected the tokenizer of a model folder."
    ) from error
  end = tokenizer.eos_token_id
  # Those of the empty text are added to every text. An end token that the tokenizer
  # adds belongs after an answer.
  prefix = tuple(token for token in tokenizer.encode("") if token != end)
  processor = _TransformersProcessor(tokenizer, keep_special)
  special = set(tokenizer.all_special_ids)
  plain_size = 1 + max({*tokenizer.get_vocab().values()} - special, default=-1)
  return Tokenizer(processor, prefix, end, tokenizer.pad_token_id, plain_size)


_BREAK = "\n"  # encoded as a byte, which is never merged with the following text
_SPACE = "▁"  # how pieces write a space


class _SentencePieceProcessor:
  """A SentencePiece model that also encodes the names of control and added tokens.

  SentencePiece adds a space at the beginning of a prompt. After a control piece no
  space is added, except with transformers' setting `legacy`. Answers keep `visible`
  added tokens, as with transformers' `skip_special_tokens=True`.
  """

  def __init__(
    self,
    processor: sentencepiece.SentencePieceProcessor,
    specials: dict[str, int],
    visible: set[int],
    legacy: bool,
  ):
    self._processor, self._legacy, self._specials = processor, legacy, specials
    self._visible = visible
    self._break = processor.EncodeAsIds(_BREAK)
    self._names = {token: text for text, token in specials.items()}
    # Otherwise the alternation would match a name that is a prefix of another.
    longest_first = sorted(specials, key=len, reverse=True)
    self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

  def EncodeAsIds(self, text: str) -> list[int]:
    ids = []
    for part in self._split.split(text):
      if part in self._specials:
        ids.append(self._specials[part])
      elif part:
        ids += self._after_special(part) if ids else self._processor.EncodeAsIds(part)
    return ids

  def _after_special(self, text: str) -> list[int]:
    """Returns the ids of a text that follows a special token."""
    # Encoding after a line break avoids the initial space; its ids are then removed.
    count = len(self._break)
    ids = self._processor.EncodeAsIds(_BREAK + text)
    if self._legacy or ids[:count] != self._break:
      return self._processor.EncodeAsIds(text)
    return ids[count:]

  def DecodeIds(self, ids: Sequence[int]) -> str:
    text, run = "", []
    for token in ids:
      if token not in self._names:
        run.append(token)
      elif token in self._visible:
        text += self._decode_run(run, not text) + self._names[token]
        run = []
    return text + self._decode_run(run, not text)

  def _decode_run(self, ids: list[int], is_first: bool) -> str:
    """Decodes ids without added tokens; only a text's beginning loses its space."""
    has_space = bool(ids) and self._processor.IdToPiece(ids[0]).startswith(_SPACE)
    gap = "" if is_first or not has_space else " "
    return gap + self._processor.DecodeIds(ids)

  def IdToPiece(self, token: int) -> str:
    return self._names.get(token) or self._processor.IdToPiece(token)

  def GetPieceSize(self) -> int:
    return max([self._processor.GetPieceSize() - 1, *self._names]) + 1

  def unk_id(self) -> int:
    return self._processor.unk_id()


def read_sentencepiece(
  path: pathlib.Path, model: bytes, settings: Mapping[str, Any]
) -> Tokenizer:
  """Reads the `tokenizer.model` of a decoder-only model."""
  processor = sentencepiece_processor(path, model)
  pieces = range(processor.GetPieceSize())
  is_special = lambda token: processor.IsControl(token) or processor.IsUnknown(token)
  specials = {processor.IdToPiece(token): token for token in filter(is_special, pieces)}
  added = settings.get("added_tokens_decoder", {})
  specials |= {about["content"]: int(token) for token, about in added.items()}
  visible = {int(i) for i, about in added.items() if not about.get("special", True)}
  begins = settings.get("add_bos_token", True) and processor.bos_id() >= 0
  prefix = (processor.bos_id(),) if begins else ()
  ends = processor.eos_id() if processor.eos_id() >= 0 else None
  legacy = bool(settings.get("legacy", False))
  wrapped = _SentencePieceProcessor(processor, specials, visible, legacy)
  return Tokenizer(
    wrapped, prefix, ends, plain_size=1 + max([len(pieces) - 1, *visible])
  )


def sentencepiece_processor(
  path: pathlib.Path, model: bytes
) -> sentencepiece.SentencePieceProcessor:
  """Returns the processor of a SentencePiece model, or raises InputError."""
  processor = sentencepiece.SentencePieceProcessor()
  try:
    if not model:
      raise RuntimeError("the file is empty")
    processor.LoadFromSerializedProto(model)
  except Exception as error:  # sentencepiece and protobuf raise many kinds
    raise base.InputError(
      f"Vocabulary.path: {path} is not a SentencePiece model ({error}); expected a"
      " file made by sentencepiece's trainer."
    ) from error
  return processor


@functools.cache
def _letters() -> dict[str, int]:
  """GPT-2's letters of bytes, which make up the pieces of tokenizers of its kind.

  Bytes without a visible letter in Latin-1 have the letters after it, in their order.
  """
  visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (byte for byte in range(256) if byte not in visible)
  letters = {chr(256 + place): byte for place, byte in enumerate(others)}
  return letters | {chr(byte): byte for byte in visible}


def bytes_of(piece: str) -> bytes:
  """Returns the bytes of a piece that is a part of a character; b"" if it is a text.

  SentencePiece writes "<0xF0>", GPT-2 a letter per byte, ByT5 the letter with its code.
  """
  if hexadecimal := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
    return bytes.fromhex(hexadecimal[1])
  codes = [_letters().get(letter, ord(letter)) for letter in piece]
  return bytes(codes) if max(codes, default=256) < 256 else b""


def token_text(value: Any) -> str | None:
  """Returns the text of a token, which settings give as a string or an object."""
  if isinstance(value, Mapping):
    value = value.get("content")
  return value if isinstance(value, str) else None
