"""Readers of the tokenizer files that model folders hold.

`tokenizer.json` and `vocab.json` with `merges.txt` are read with the library
tokenizers, and SentencePiece models with sentencepiece. All become a `Processor`, as do
the bytes of ByT5, which has no such file.
"""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sentencepiece

from osd_jax import base, gguf_files


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


class _TokenizersProcessor:
  """A `tokenizer.json`, read with the library tokenizers."""

  def __init__(self, tokenizer: Any, unknown: int, keep_special: bool):
    self.tokenizer, self._unknown = tokenizer, unknown
    self._skip_special = not keep_special

  def EncodeAsIds(self, text: str) -> list[int]:
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def DecodeIds(self, ids: Sequence[int]) -> str:
    return self.tokenizer.decode(list(ids), skip_special_tokens=self._skip_special)

  def IdToPiece(self, token: int) -> str:
    return self.tokenizer.id_to_token(token) or ""

  def GetPieceSize(self) -> int:
    return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

  def unk_id(self) -> int:
    return self._unknown


def read_json(
  path: pathlib.Path,
  model: bytes,
  merges: bytes,
  settings: Mapping[str, Any],
  keep_special: bool,
) -> Tokenizer:
  """Reads a `tokenizer.json`, or a `vocab.json` if there are `merges`.

  With `keep_special`, decoded texts contain special tokens.

  Raises:
    InputError: not such a file, or merges of an unknown kind of tokenizer.
    MissingExtraError: the extra "llama" is not installed.
  """
  with base.extra("llama", f"Vocabulary.path: {path}"):
    import tokenizers

  try:
    if path.name == "vocab.json":
      tokenizer = _from_merges(model, merges, settings)
    else:
      tokenizer = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
  except Exception as error:  # the library raises plain Exception
    raise base.InputError(
      f"Vocabulary.path: {path} is not a tokenizer ({error}); expected the"
      " tokenizer.json of a model folder."
    ) from error
  # The file may enable both for training; prompts are padded and cut elsewhere.
  tokenizer.no_padding()
  tokenizer.no_truncation()

  def token_id(name: str) -> int | None:
    text = token_text(settings.get(name))
    return None if text is None else tokenizer.token_to_id(text)

  ends = token_id("eos_token")
  # The post-processor adds the same tokens to every text, so those of the empty text
  # are the prefix. An end token that it adds belongs after an answer.
  prefix = tokenizer.encode("", add_special_tokens=True).ids
  prefix = tuple(token for token in prefix if token != ends)
  unknown = token_id("unk_token") or 0
  processor = _TokenizersProcessor(tokenizer, unknown, keep_special)
  return Tokenizer(processor, prefix, ends, token_id("pad_token"))


def _from_merges(vocab: bytes, merges: bytes, settings: Mapping[str, Any]) -> Any:
  """Makes Qwen2's tokenizer, which was first published without tokenizer.json."""
  if settings.get("tokenizer_class") != "Qwen2Tokenizer":
    raise ValueError(
      "vocab.json and merges.txt are read only if tokenizer_config.json names"
      " Qwen2Tokenizer"
    )
  if not merges:
    raise ValueError("there is no merges.txt next to it")
  pairs = [tuple(line.split(" ")) for line in merges.decode("utf-8").splitlines()]
  pairs = [pair for pair in pairs if len(pair) == 2 and pair[0] != "#version:"]
  made = gguf_files.byte_pairs(json.loads(vocab), pairs, gguf_files.QWEN2_WORDS)
  added = settings.get("added_tokens_decoder", {})
  for token, about in sorted(added.items(), key=lambda item: int(item[0])):
    gguf_files.add_token(made, about["content"], about.get("special", False))
    if made.token_to_id(about["content"]) != int(token):
      raise ValueError(f"{about['content']!r} cannot have the id {token}")
  return made


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
    found = self._processor.EncodeAsIds(_BREAK + text)
    if self._legacy or found[:count] != self._break:
      return self._processor.EncodeAsIds(text)
    return found[count:]

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
  named = [i for i in pieces if processor.IsControl(i) or processor.IsUnknown(i)]
  specials = {processor.IdToPiece(token): token for token in named}
  added = settings.get("added_tokens_decoder", {})
  specials |= {about["content"]: int(token) for token, about in added.items()}
  visible = {int(i) for i, about in added.items() if not about.get("special", True)}
  begins = settings.get("add_bos_token", True) and processor.bos_id() >= 0
  prefix = (processor.bos_id(),) if begins else ()
  ends = processor.eos_id() if processor.eos_id() >= 0 else None
  legacy = bool(settings.get("legacy", False))
  wrapped = _SentencePieceProcessor(processor, specials, visible, legacy)
  return Tokenizer(wrapped, prefix, ends)


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


class BytesProcessor:
  """ByT5's ids: padding, end, unknown, then 256 bytes of UTF-8, then the sentinels.

  >>> BytesProcessor(125).EncodeAsIds("ab<extra_id_0>")
  [100, 101, 259]
  """

  _NAMES = ("<pad>", "</s>", "<unk>")
  _SENTINEL = re.compile(r"(<extra_id_\d+>)")

  def __init__(self, extra_ids: int):
    first = len(self._NAMES)
    self._bytes = range(first, first + 256)
    last = self._bytes.stop
    self._sentinels = {f"<extra_id_{i}>": last + i for i in range(extra_ids)}
    self._pieces = {token: text for text, token in self._sentinels.items()}

  def EncodeAsIds(self, text: str) -> list[int]:
    ids = []
    for part in self._SENTINEL.split(text):
      if part in self._sentinels:
        ids.append(self._sentinels[part])
      else:
        ids += [byte + self._bytes.start for byte in part.encode("utf-8", "replace")]
    return ids

  def DecodeIds(self, ids: Sequence[int]) -> str:
    written = b"".join(
      bytes([token - self._bytes.start])
      if token in self._bytes
      else self._pieces.get(token, "").encode()
      for token in ids
    )
    return written.decode("utf-8", "ignore")  # an answer may be cut inside a character

  def IdToPiece(self, token: int) -> str:
    if token in self._bytes:
      return f"<0x{token - self._bytes.start:02X}>"
    return self._pieces.get(token) or "".join(self._NAMES[token : token + 1])

  def GetPieceSize(self) -> int:
    return self._bytes.stop + len(self._sentinels)

  def unk_id(self) -> int:
    return self._NAMES.index("<unk>")


def token_text(stated: Any) -> str | None:
  """Returns the text of a token, which settings give as a string or an object."""
  if isinstance(stated, Mapping):
    stated = stated.get("content")
  return stated if isinstance(stated, str) else None
