"""Vocabularies: text to token ids and back, shared by the target and its drafts.

The end-of-sequence tokens and the chat template of a decoder-only model come from
`tokenizer_config.json`, `generation_config.json` and `config.json` in the folder of its
tokenizer, as in transformers.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from osd_jax import base, formats
from osd_jax.base import EOS_ID, PAD_ID
from osd_jax.data import chat, tokenizers

OWN_TEMPLATE = "own"
_T5_MODEL, _JSON, _MODEL = "spiece.model", "tokenizer.json", "tokenizer.model"
_VOCAB, _MERGES = "vocab.json", "merges.txt"
_SETTINGS, _SPECIALS = "tokenizer_config.json", "special_tokens_map.json"
_ADDED = "added_tokens.json"  # of older folders
_ENDS = ("generation_config.json", "config.json")
# A folder may hold several; tokenizer.json also holds the rules that a SentencePiece
# model leaves to the code of transformers.
_TOKENIZERS = (_T5_MODEL, _JSON, _MODEL, _VOCAB)
_BYTES = "ByT5Tokenizer"  # in the settings of a model that reads bytes
# Types of the models and classes of the tokenizers of a T5. A T5Gemma has a Gemma's.
_T5_KIND = re.compile(r"(m|by)?t5(tokenizer)?(fast)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Encodes text in the form that a family of models expects. Made by `load`.

  T5's prompts end in end-of-sequence. Prompts of decoder-only models begin with the
  tokens that their tokenizer adds, and may be wrapped in a chat template.

  Two vocabularies are equal if they encode to the same ids, whatever their paths.

  Attributes:
    fingerprint: sha256 of the model's bytes and of what changes its ids.
    size: number of ids including sentinels; a model's V may be padded beyond it.
    path: the file of the model.
    extra_ids: number of T5's sentinels (`<extra_id_0>`...) after the last piece.
    processor: a SentencePiece processor, or an object with the same functions.
    pad_id: fills the end of rows; not the id of any text.
    eos_ids: ids that end a sequence; the first one is appended by `encode_with_eos`.
    is_causal: True for decoder-only models and T5Gemma, whose tokenizer is a Gemma's.
    prefix: ids before every prompt of a decoder-only model.
    chat_template: Jinja text of the chat template; "" for none.
    variables: names and values that the chat template is rendered with.
    template: applies the chat template to a prompt.
  """

  fingerprint: str
  size: int
  path: str = dataclasses.field(compare=False)
  extra_ids: int = dataclasses.field(compare=False)
  processor: tokenizers.Processor = dataclasses.field(compare=False, repr=False)
  pad_id: int = PAD_ID
  eos_ids: tuple[int, ...] = (EOS_ID,)
  is_causal: bool = False
  prefix: tuple[int, ...] = ()
  chat_template: str = ""
  variables: tuple[tuple[str, Any], ...] = ()
  # Number of ids up to the last that is not a special token; see `limited_to`.
  plain_size: int = dataclasses.field(default=0, compare=False, repr=False)
  template: Callable[[str], str] | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @classmethod
  def load(
    cls,
    path: str | os.PathLike[str],
    extra_ids: int = 0,
    template: str | None = "",
    variables: Sequence[tuple[str, Any]] = (),
  ) -> "Vocabulary":
    """Reads the vocabulary of a T5 or of a decoder-only model.

    Args:
      path: a folder with spiece.model, tokenizer.json, tokenizer.model, or vocab.json
        and merges.txt; or such a file, a GGUF file, or another SentencePiece model of a
        T5; or the folder of a ByT5, whose vocabulary are the bytes.
      extra_ids: sentinels to add to a SentencePiece model of a T5: 100 for published
        checkpoints if texts may contain sentinels, otherwise 0.
      template: chat template, only for decoder-only models. "" leaves prompts
        unchanged; "own" applies the chat template of the folder, with the prompt as the
        user's only message; None does so if the folder has one; any other text is
        itself a Jinja template.
      variables: further names and values for the chat template.

    Returns:
      The vocabulary; without a template the same object for the same unchanged files.

    Raises:
      InputError: a file is missing or cannot be read, no token ends a sequence, special
        ids of a T5 other than pad 0 and end-of-sequence 1, the folder has no chat
        template, or a setting is for the other family.
      MissingExtraError: a tokenizer.json or chat template without the extra "llama".
    """
    if not base.is_count(extra_ids, 0):
      raise base.InputError(
        f"Vocabulary.extra_ids: received {extra_ids!r}, expected an integer >= 0."
      )
    path = _tokenizer_file(pathlib.Path(path))
    names = (_SPECIALS, _SETTINGS, _ADDED, *_ENDS, _MERGES)
    try:
      # Only the tokenizer itself is required.
      others = tuple(_content(path.with_name(name)) for name in names)
      vocabulary = _build(path, path.read_bytes(), others, extra_ids)
    except OSError as error:
      raise base.InputError(
        f"Vocabulary.path: {error.filename or path} cannot be read ({error.strerror});"
        " expected a tokenizer.json or tokenizer.model, or another SentencePiece model."
      ) from error
    if template != "":
      vocabulary = _with_template(vocabulary, template, tuple(variables))
    if variables and vocabulary.template is None:
      raise base.InputError(
        f"PairConfig.template_variables: received {tuple(variables)}, but no chat"
        " template is applied; expected ()."
      )
    return vocabulary

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without end-of-sequence.

    Raises:
      InputError: a special token that the model has no embedding for.
    """
    ids = self.processor.EncodeAsIds(text)
    if ids and (token := max(ids)) >= self.size:
      raise base.InputError(
        f"encode: received the token {self.processor.IdToPiece(token)} ({token}), but"
        f" the model has {self.size} token ids; leave it out of the text."
      )
    return ids

  def limited_to(self, size: int) -> "Vocabulary":
    """The vocabulary for a model of `size` ids, as transformers combines the two.

    Special tokens beyond them, such as a padding token that was never trained, are
    refused in texts. If other tokens are beyond, the vocabulary is returned as it is.
    """
    least = max(self.plain_size, 1 + max(self.eos_ids))
    if not self.is_causal or not least <= size < self.size:
      return self
    return dataclasses.replace(self, size=size)

  def encode_with_eos(self, text: str) -> np.ndarray:
    """Returns the ids of `text` and end-of-sequence, [n + 1] int32."""
    return np.asarray([*self.encode(text), self.eos_ids[0]], np.int32)

  def encode_prompt(self, text: str) -> np.ndarray:
    """Returns the ids of a prompt in the form that its model reads, [n] int32.

    Raises:
      InputError: a conversation, without a chat template that fits it.
    """
    if self.template is None and not chat.is_plain(text):
      advice = (
        "expected a single text without a chat template; set"
        " PairConfig.chat_template, such as 'own'"
      )
      if not self.is_causal:  # it cannot have one
        advice = "but this model takes one user message; write instructions into it"
      names = [(one["role"], one.get("name", "")) for one in text.messages]
      roles = ", ".join(f"{role} {name}".strip() for role, name in names)
      raise base.InputError(
        f"encode_prompt: received a conversation of {len(text.messages)} messages"
        f" ({roles}), {advice}."
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
    count = min(len(self.prefix), length - 1)
    # A chat template may not have written the prefix.
    begins = tuple(prompt[:count]) == self.prefix[:count]
    count = count if begins else 0
    return np.concatenate([prompt[:count], prompt[count - length :]])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids` up to the first end-of-sequence.

    Padding is dropped; ids outside the vocabulary (a model's padded rows) are decoded
    as unknown.
    """
    tokens: list[int] = []
    for token in ids:
      token = int(token)
      if token in self.eos_ids:
        break
      # An answer that reached its maximum length has padding but no end-of-sequence.
      if token != self.pad_id:
        # A model's V is often rounded up, so its head can emit ids without a piece.
        tokens.append(token if 0 <= token < self.size else self.processor.unk_id())
    return self.processor.DecodeIds(tokens)

  def decode_continuation(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids` as it follows a prompt; for T5, that of `decode`.

    `decode` drops the space before the first word, as SentencePiece does.
    """
    return self._decode_within(ids) if self.is_causal else self.decode(ids)

  def _decode_within(self, ids: Iterable[int]) -> str:
    before, length = self._letter
    return self.decode([*before, *ids])[length:]

  @functools.cached_property
  def _letter(self) -> tuple[list[int], int]:
    """Ids of a text, and the number of its characters."""
    ids = self.encode("a")
    return ids, len(self.decode(ids))

  def token_bytes(self, token: int) -> bytes:
    """Returns the bytes of one token within a text; it may be a part of a character."""
    text = self._decode_within([token])
    if "\ufffd" not in text:
      return text.encode()
    return tokenizers.bytes_of(self.processor.IdToPiece(token)) or text.encode()

  @property
  def pieces(self) -> list[str]:
    """The piece of every id, in order."""
    return [self.processor.IdToPiece(i) for i in range(self.size)]

  def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
    return self


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
  """Returns the files from which transformers makes the same tokenizer, by name.

  T5Tokenizer treats every SentencePiece model as a unigram model, as T5's own is. For
  unigram models it encodes to the same ids.
  """
  path = pathlib.Path(vocabulary.path)
  if path.name in (_SETTINGS, _ENDS[1]):
    settings = {"tokenizer_class": _BYTES, "extra_ids": vocabulary.extra_ids}
    return {_SETTINGS: (json.dumps(settings, indent=2) + "\n").encode()}
  if vocabulary.is_causal or path.name == _JSON:
    names = (_JSON, _MODEL, _VOCAB, _MERGES, _SPECIALS, _SETTINGS, _ADDED, _ENDS[0])
    contents = {name: _content(path.with_name(name)) for name in (*names, chat.FILE)}
    return {name: content for name, content in contents.items() if content}
  pieces, unknown = vocabulary.pieces, vocabulary.processor.unk_id()
  settings = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": vocabulary.extra_ids,
    "clean_up_tokenization_spaces": False,  # decoding returns the text unchanged
    "pad_token": pieces[PAD_ID],
    "eos_token": pieces[EOS_ID],
    "unk_token": pieces[unknown],
    "additional_special_tokens": [
      f"<extra_id_{index}>" for index in range(vocabulary.extra_ids)
    ],
  }
  return {
    _T5_MODEL: path.read_bytes(),
    _SETTINGS: (json.dumps(settings, indent=2) + "\n").encode(),
  }


def stated_extra_ids(vocabulary: Vocabulary) -> int | None:
  """Returns `extra_ids` of the settings file next to the model, or None."""
  path = pathlib.Path(vocabulary.path).with_name(_SETTINGS)
  try:
    count = json.loads(path.read_bytes())["extra_ids"]
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return count if base.is_count(count, least=0) else None


def _tokenizer_file(path: pathlib.Path) -> pathlib.Path:
  """Returns the file of the tokenizer in a folder; other paths are returned."""
  path = formats.folder_of(path)
  if not path.is_dir():
    return path
  files = [path / name for name in _TOKENIZERS if (path / name).exists()]
  settings = [path / name for name in (_SETTINGS, _ENDS[1])]
  files += [file for file in settings if _is_of_bytes(file, _content(file))]
  if files:
    return files[0]
  hint = ""
  if (path / "tekken.json").exists():
    hint = (
      " tekken.json, the format of mistral-common, is not supported; download the"
      " tokenizer.json of the same model."
    )
  raise base.InputError(
    f"Vocabulary.path: {path} holds no tokenizer; expected one of"
    f" {', '.join(_TOKENIZERS)}, or name the vocabulary of the weights.{hint}"
  )


@functools.lru_cache(maxsize=8)  # a processor takes a few megabytes
def _build(
  path: pathlib.Path, model: bytes, others: tuple[bytes, ...], extra_ids: int
) -> Vocabulary:
  """Makes a vocabulary; a change of the `others` in the folder makes a new one."""
  if path.suffix != ".json" and path.name != _MODEL:
    return _t5_from_sentencepiece(path, model, extra_ids)
  settings = _settings(path)
  documents = [_object(path.with_name(name)) for name in _ENDS]
  if path.suffix == ".json":
    kinds = [documents[-1].get("model_type")]
    kinds += [fields.get("tokenizer_class") for fields in (settings, documents[-1])]
    is_t5 = any(_T5_KIND.fullmatch(str(kind)) for kind in kinds)
    # A T5's special tokens are its sentinels, which its spiece.model decodes as well.
    read = tokenizers.read_folder(path, keep_special=is_t5)
    if is_t5:
      return _t5_from_folder(path, model, read, extra_ids)
  else:
    read = tokenizers.read_sentencepiece(path, model, settings)
  if extra_ids:
    raise base.InputError(
      f"Vocabulary.extra_ids: received {extra_ids} with {path}, expected 0: only T5"
      " has sentinels."
    )
  eos_ids = _eos_ids(documents, read.eos_id)
  if not eos_ids:
    raise base.InputError(
      f"Vocabulary.path: {path}: no token ends a sequence; expected an eos_token in"
      f" {_SETTINGS}, or an eos_token_id in {' or '.join(_ENDS)}, in the same folder."
    )
  digest = hashlib.sha256(model)
  if path.name == _VOCAB:
    digest.update(_content(path.with_name(_MERGES)))
  # Two folders may share a model and differ in these, and then encode and stop
  # differently.
  digest.update(repr((read.prefix, eos_ids)).encode())
  return Vocabulary(
    fingerprint=digest.hexdigest(),
    size=read.processor.GetPieceSize(),
    path=str(path),
    extra_ids=0,
    processor=read.processor,
    pad_id=base.NO_TOKEN,
    eos_ids=eos_ids,
    is_causal=True,
    prefix=read.prefix,
    plain_size=read.plain_size,
  )


def _is_of_bytes(path: pathlib.Path, content: bytes) -> bool:
  return path.name in (_SETTINGS, _ENDS[1]) and f'"{_BYTES}"'.encode() in content


def _t5_from_sentencepiece(
  path: pathlib.Path, model: bytes, extra_ids: int
) -> Vocabulary:
  processor = tokenizers.sentencepiece_processor(path, model)
  if extra_ids:
    extended = _with_sentinels(model, extra_ids)
    processor = tokenizers.sentencepiece_processor(path, extended)
  _check_special_ids(path, processor.pad_id(), processor.eos_id())
  fingerprint = hashlib.sha256(model + f"|extra_ids={extra_ids}".encode()).hexdigest()
  size = processor.GetPieceSize()
  return Vocabulary(fingerprint, size, str(path), extra_ids, processor)


def _t5_from_folder(
  path: pathlib.Path, model: bytes, read: tokenizers.Tokenizer, extra_ids: int
) -> Vocabulary:
  """Makes the vocabulary of a T5 that transformers saved without spiece.model."""
  _check_special_ids(path, read.pad_id, read.eos_id)
  size = read.processor.GetPieceSize()
  pieces = map(read.processor.IdToPiece, range(size))
  count = sum(bool(re.fullmatch(r"<extra_id_\d+>", piece)) for piece in pieces)
  if extra_ids not in (0, count):
    raise base.InputError(
      f"Vocabulary.extra_ids: received {extra_ids}, but {path} holds {count} sentinels;"
      " expected that number, or 0."
    )
  if _is_of_bytes(path, model):  # settings, of which only this number matters
    model = f"bytes, {count} sentinels".encode()
  fingerprint = hashlib.sha256(model).hexdigest()
  return Vocabulary(fingerprint, size, str(path), count, read.processor)


def _with_sentinels(model: bytes, extra_ids: int) -> bytes:
  """Adds T5's sentinels after the pieces, the last one first as T5 and seqio do."""
  from sentencepiece import sentencepiece_model_pb2  # needs protobuf

  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  kind = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
  for index in reversed(range(extra_ids)):
    proto.pieces.add(piece=f"▁<extra_id_{index}>", score=0.0, type=kind)
  return proto.SerializeToString()


def _check_special_ids(path: pathlib.Path, pad: int | None, eos: int | None) -> None:
  """Checks pad 0 and end-of-sequence 1, which T5's decoder starts and stops with."""
  if (pad, eos) != (PAD_ID, EOS_ID):
    raise base.InputError(
      f"Vocabulary.path: {path} has pad id {pad} and end-of-sequence id {eos}, expected"
      f" {PAD_ID} and {EOS_ID} as in T5; train a SentencePiece model with"
      f" --pad_id={PAD_ID} --eos_id={EOS_ID} --unk_id=2 --bos_id=-1."
    )


def _with_template(
  vocabulary: Vocabulary, template: str | None, variables: tuple[tuple[str, Any], ...]
) -> Vocabulary:
  """Returns the vocabulary of a decoder-only model with a chat template."""
  path = pathlib.Path(vocabulary.path)
  if not vocabulary.is_causal:
    if template is None:
      return vocabulary
    raise base.InputError(
      f"PairConfig.chat_template: received {template[:40]!r} with {path}, the"
      " vocabulary of a T5, expected '': chat templates are for decoder-only models."
    )
  settings = _settings(path)
  own = chat.own_template(path.parent, settings)
  text = own if template in (OWN_TEMPLATE, None) else template
  if text is None and template is None:
    return vocabulary
  if text is None:
    raise base.InputError(
      f"PairConfig.chat_template: received 'own', but {path.parent} has no chat"
      " template (chat_template.jinja, or in tokenizer_config.json); give the text of"
      " a template, or '' to leave prompts unchanged."
    )
  # The names that a template may refer to. SentencePiece models may come without
  # settings; these are the family's names.
  names = {"bos_token": "<s>", "eos_token": "</s>"} if path.name == _MODEL else {}
  names |= {
    name: token
    for name, value in settings.items()
    if name.endswith("_token") and (token := tokenizers.token_text(value)) is not None
  }
  write = chat.writer(text, names | dict(variables))
  return dataclasses.replace(
    vocabulary, chat_template=text, variables=variables, template=write
  )


def _eos_ids(
  documents: Sequence[Mapping[str, Any]], own: int | None
) -> tuple[int, ...]:
  """Returns the ids that end generation, the tokenizer's own eos_token first."""
  for document in documents:
    # generation_config.json comes first: for chat models it lists the end of a turn,
    # which config.json often lacks.
    value = document.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    if ids := [token for token in values if base.is_count(token, least=0)]:
      return tuple(dict.fromkeys([own, *ids] if own in ids else ids))
  return () if own is None else (own,)


def _content(path: pathlib.Path) -> bytes:
  return path.read_bytes() if path.exists() else b""


def _settings(path: pathlib.Path) -> dict[str, Any]:
  """Returns tokenizer_config.json, completed by files of older folders."""
  settings = _object(path.with_name(_SETTINGS))
  # As in transformers, null means that a field has its default.
  stated = {name: x for name, x in settings.items() if x is not None}
  specials = _object(path.with_name(_SPECIALS))
  values = [specials.get("additional_special_tokens", []), *specials.values()]
  special = {tokenizers.token_text(x) for x in (*values[0], *values[1:])}
  added = {
    str(token): {"content": text, "special": text in special}
    for text, token in _object(path.with_name(_ADDED)).items()
  }
  return {"added_tokens_decoder": added} | specials | stated


def _object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object in a file, or {} if the file is missing or empty."""
  data = _content(path)
  if not data:
    return {}
  try:
    content = json.loads(data)
    if not isinstance(content, dict):
      raise ValueError(f"it holds a {type(content).__name__}")
  except ValueError as error:
    raise base.InputError(
      f"Vocabulary.path: {path} cannot be read ({error}); expected a JSON object."
    ) from error
  return content
