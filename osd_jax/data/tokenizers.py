"""Tokenizers of decoder-only models: `tokenizer.json` or a SentencePiece model.

The end-of-sequence tokens and the chat template come from `tokenizer_config.json`,
`generation_config.json` and `config.json` in the same folder, as in transformers.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import sentencepiece

from osd_jax import base
from osd_jax.data import chat
from osd_jax.data.vocabulary import FOLDER_FILE, Vocabulary

OWN_TEMPLATE = "own"
_JSON, _MODEL = "tokenizer.json", "tokenizer.model"
_SETTINGS = "tokenizer_config.json"
_ENDS = ("generation_config.json", "config.json")


class Processor(Protocol):
  """The methods of a SentencePiece processor that `Vocabulary` uses."""

  def EncodeAsIds(self, text: str) -> list[int]: ...
  def DecodeIds(self, ids: Sequence[int]) -> str: ...
  def IdToPiece(self, token: int) -> str: ...
  def GetPieceSize(self) -> int: ...
  def unk_id(self) -> int: ...


def holds_one(path: pathlib.Path) -> bool:
  """Whether a path is the tokenizer of a decoder-only model, or a folder with one."""
  if path.is_dir():
    return any((path / name).exists() for name in (_JSON, _MODEL))
  return path.name in (_JSON, _MODEL)


def load_any(
  path: str | os.PathLike[str], extra_ids: int = 0, template: str = ""
) -> Vocabulary:
  """Loads the vocabulary of a T5 or the tokenizer of a decoder-only model.

  Args:
    path: see `Vocabulary.load` and `load`; a folder with both is read as a T5's.
    extra_ids: number of sentinels, only for T5.
    template: chat template, only for decoder-only models.

  Raises:
    InputError: the files cannot be read, or a setting is for the other family.
  """
  path = pathlib.Path(path)
  if (path / FOLDER_FILE).exists() or not holds_one(path):
    if template:
      raise base.InputError(
        f"PairConfig.chat_template: received {template[:40]!r} with {path}, the"
        " vocabulary of a T5, expected '': chat templates are for decoder-only models."
      )
    return Vocabulary.load(path, extra_ids)
  if extra_ids:
    raise base.InputError(
      f"Vocabulary.extra_ids: received {extra_ids} with {path}, expected 0: only T5"
      " has sentinels."
    )
  return load(path, template)


def load(path: pathlib.Path, template: str = "") -> Vocabulary:
  """Loads the tokenizer of a decoder-only model.

  Args:
    path: a folder in transformers' format, or a `tokenizer.json` or `tokenizer.model`.
    template: "" leaves prompts unchanged; "own" applies the chat template of the
      folder, with the prompt as the user's only message; any other text is itself a
      Jinja template.

  Returns:
    The vocabulary; the same object for the same unchanged files.

  Raises:
    InputError: a file is missing or cannot be read, no token ends a sequence, or the
      folder has no chat template.
    MissingExtraError: a `tokenizer.json` or chat template without the extra "llama".
  """
  if path.is_dir():
    # tokenizer.json is preferred: it also holds the rules that a SentencePiece model
    # leaves to the code of transformers.
    path = next(path / name for name in (_JSON, _MODEL) if (path / name).exists())
  files = (path, *(path.with_name(name) for name in (_SETTINGS, *_ENDS)))
  try:
    model, *others = files
    # Only the model itself is required.
    contents = tuple(file.read_bytes() if file.exists() else b"" for file in others)
    contents = (model.read_bytes(), *contents)
  except OSError as error:
    raise base.InputError(
      f"Vocabulary.path: {file_of(error, path)} cannot be read ({error.strerror});"
      " expected a tokenizer.json or tokenizer.model."
    ) from error
  vocabulary = _build(path, contents)
  if not template:
    return vocabulary
  settings = _object(contents[1], files[1])
  own = chat.own_template(path.parent, settings)
  text = own if template == OWN_TEMPLATE else template
  if text is None:
    raise base.InputError(
      f"PairConfig.chat_template: received 'own', but {path.parent} has no chat"
      " template (chat_template.jinja, or in tokenizer_config.json); give the text of"
      " a template, or '' to leave prompts unchanged."
    )
  write = chat.writer(text, _special_tokens(settings, path))
  return dataclasses.replace(vocabulary, chat_template=text, template=write)


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
  """Returns the tokenizer's files in a model folder, by name."""
  folder = pathlib.Path(vocabulary.path).parent
  names = (_JSON, _MODEL, _SETTINGS, _ENDS[0], chat.FILE)
  return {
    name: (folder / name).read_bytes() for name in names if (folder / name).exists()
  }


def file_of(error: OSError, otherwise: pathlib.Path) -> str:
  """Returns the file name in an OSError, or `otherwise`."""
  return str(error.filename or otherwise)


@functools.lru_cache(maxsize=8)
def _build(path: pathlib.Path, contents: tuple[bytes, ...]) -> Vocabulary:
  model, stated, *ends = contents
  settings = _object(stated, path.with_name(_SETTINGS))
  read = _from_json if path.suffix == ".json" else _from_sentencepiece
  processor, prefix, own_end = read(path, model, settings)
  documents = [
    _object(data, path.with_name(name)) for name, data in zip(_ENDS, ends, strict=True)
  ]
  eos_ids = _eos_ids(documents, own_end)
  if not eos_ids:
    raise base.InputError(
      f"Vocabulary.path: {path}: no token ends a sequence; expected an eos_token in"
      f" {_SETTINGS}, or an eos_token_id in {' or '.join(_ENDS)}, in the same folder."
    )
  digest = hashlib.sha256(model)
  # Two folders may share a model and differ in these, and then encode and stop
  # differently.
  digest.update(repr((prefix, eos_ids)).encode())
  return Vocabulary(
    fingerprint=digest.hexdigest(),
    size=processor.GetPieceSize(),
    path=str(path),
    extra_ids=0,
    processor=processor,  # pyright: ignore[reportArgumentType]
    pad_id=base.NO_TOKEN,
    eos_ids=eos_ids,
    is_causal=True,
    prefix=prefix,
  )


def _eos_ids(
  documents: Sequence[Mapping[str, Any]], own: int | None
) -> tuple[int, ...]:
  """Returns the ids that end generation, the tokenizer's own eos_token first."""
  for document in documents:
    # generation_config.json comes first: for chat models it lists the end of a turn,
    # which config.json often lacks.
    stated = stated_eos_ids(document)
    if stated:
      first = [own] if own is not None and own in stated else []
      return tuple(dict.fromkeys([*first, *stated]))
  return () if own is None else (own,)


def stated_eos_ids(document: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns `eos_token_id` of a config.json or generation_config.json as a tuple."""
  stated = document.get("eos_token_id")
  ids = stated if isinstance(stated, list) else [stated]
  return tuple(int(token) for token in ids if base.is_count(token, least=0))  # pyright: ignore[reportArgumentType]


class _TokenizersProcessor:
  """A `tokenizer.json`, read with the library tokenizers."""

  def __init__(self, tokenizer: Any, unknown: int):
    self.tokenizer, self._unknown = tokenizer, unknown

  def EncodeAsIds(self, text: str) -> list[int]:
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def DecodeIds(self, ids: Sequence[int]) -> str:
    return self.tokenizer.decode(list(ids), skip_special_tokens=True)

  def IdToPiece(self, token: int) -> str:
    return self.tokenizer.id_to_token(token) or ""

  def GetPieceSize(self) -> int:
    return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

  def unk_id(self) -> int:
    return self._unknown


def _from_json(
  path: pathlib.Path, model: bytes, settings: Mapping[str, Any]
) -> tuple[Processor, tuple[int, ...], int | None]:
  """Returns processor, prompt prefix and end-of-sequence id of a `tokenizer.json`."""
  try:
    import tokenizers
  except ImportError as error:
    raise base.MissingExtraError(
      f"Vocabulary.path: {path} needs the library tokenizers; install the extra"
      " (pip install 'osd-jax[llama]')."
    ) from error
  try:
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
    text = _token_text(settings.get(name))
    return None if text is None else tokenizer.token_to_id(text)

  ends = token_id("eos_token")
  # The post-processor adds the same tokens to every text, so those of the empty text
  # are the prefix. An end token that it adds belongs after an answer.
  prefix = tokenizer.encode("", add_special_tokens=True).ids
  prefix = tuple(token for token in prefix if token != ends)
  unknown = token_id("unk_token")
  return _TokenizersProcessor(tokenizer, unknown or 0), prefix, ends


_BREAK = "\n"  # encoded as a byte, which is never merged with the following text


class _SentencePieceProcessor:
  """A SentencePiece model that also encodes the names of its control pieces.

  SentencePiece adds a space at the beginning of a prompt. After a control piece no
  space is added, except with transformers' setting `legacy`.
  """

  def __init__(
    self,
    processor: sentencepiece.SentencePieceProcessor,
    specials: dict[str, int],
    legacy: bool,
  ):
    self._processor, self._legacy, self._specials = processor, legacy, specials
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
    return self._processor.DecodeIds([i for i in ids if i not in self._names])

  def IdToPiece(self, token: int) -> str:
    return self._names.get(token) or self._processor.IdToPiece(token)

  def GetPieceSize(self) -> int:
    return max([self._processor.GetPieceSize() - 1, *self._names]) + 1

  def unk_id(self) -> int:
    return self._processor.unk_id()


def _from_sentencepiece(
  path: pathlib.Path, model: bytes, settings: Mapping[str, Any]
) -> tuple[Processor, tuple[int, ...], int | None]:
  """Returns processor, prompt prefix and end-of-sequence id of a `tokenizer.model`."""
  processor = sentencepiece.SentencePieceProcessor()
  try:
    if not model:
      raise RuntimeError("the file is empty")
    processor.LoadFromSerializedProto(model)
  except Exception as error:  # sentencepiece and protobuf raise many kinds
    raise base.InputError(
      f"Vocabulary.path: {path} is not a SentencePiece model ({error}); expected the"
      " tokenizer.model of a decoder-only model."
    ) from error
  pieces = range(processor.GetPieceSize())
  named = [i for i in pieces if processor.IsControl(i) or processor.IsUnknown(i)]
  specials = {processor.IdToPiece(token): token for token in named}
  added = settings.get("added_tokens_decoder", {})
  specials |= {about["content"]: int(token) for token, about in added.items()}
  begins = settings.get("add_bos_token", True) and processor.bos_id() >= 0
  prefix = (processor.bos_id(),) if begins else ()
  ends = processor.eos_id() if processor.eos_id() >= 0 else None
  legacy = bool(settings.get("legacy", False))
  return _SentencePieceProcessor(processor, specials, legacy), prefix, ends


def _special_tokens(settings: Mapping[str, Any], path: pathlib.Path) -> dict[str, str]:
  """Returns bos_token, eos_token and similar texts that a chat template may use."""
  named = {
    name: text
    for name, value in settings.items()
    if name.endswith("_token") and (text := _token_text(value)) is not None
  }
  # SentencePiece models may come without settings; these are the family's names.
  if path.suffix != ".json":
    named = {"bos_token": "<s>", "eos_token": "</s>", **named}
  return named


def _token_text(stated: Any) -> str | None:
  """Returns the text of a token, which settings give as a string or an object."""
  if isinstance(stated, Mapping):
    stated = stated.get("content")
  return stated if isinstance(stated, str) else None


def _object(data: bytes, path: pathlib.Path) -> dict[str, Any]:
  """Parses a JSON object; the file may be missing, which gives {}."""
  if not data:
    return {}
  try:
    found = json.loads(data)
    if not isinstance(found, dict):
      raise ValueError(f"it holds a {type(found).__name__}")
  except ValueError as error:
    raise base.InputError(
      f"Vocabulary.path: {path} cannot be read ({error}); expected a JSON object."
    ) from error
  return found
