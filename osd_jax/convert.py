"""Converts weights between this package's format, Hugging Face's and t5x's."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import rich.console

from osd_jax import assets, base, formats, pairs, runs
from osd_jax.data.vocabulary import Vocabulary, tokenizer_files
from osd_jax.models import attached, weights
from osd_jax.models.convert import eagle as heads
from osd_jax.models.convert import folders, hugging_face
from osd_jax.models.families import ModelConfig
from osd_jax.models.shapes import EagleConfig, T5Config

_HUGGING_FACE, _T5X, _OSD = "hugging_face", "t5x", "osd"
_HEAD, _OSD_HEAD = "EAGLE-3 head", "draft"
_HEAD_KINDS = heads.SPECULATORS, heads.SPECFORGE


@dataclasses.dataclass(frozen=True)
class ConvertConfig(base.Config):
  """One conversion.

  Attributes:
    source: a transformers folder, a GGUF file, a t5x folder (checkpoint_STEP), a folder
      with an EAGLE-3 head, or a weights file of this package.
    output: file to write, or a folder unless `output_kind` is "osd".
    output_kind: "osd" or "hugging_face"; "speculators" or "specforge" for an EAGLE-3
      head.
    model: shape of the model; required for t5x, whose checkpoints do not store it, and
      for an EAGLE-3 head that does not say which layers of its target it reads: the
      target's shape.
    vocabulary: vocabulary of the weights, see `PairConfig.vocabulary`; "" if unknown.
      A weights file stores its fingerprint, a transformers folder its tokenizer.
    extra_ids: sentinels after the pieces of the vocabulary, see `Vocabulary.load`.
  """

  source: base.Path
  output: base.Path
  output_kind: Annotated[str, base.OneOf(_OSD, _HUGGING_FACE, *_HEAD_KINDS)] = _OSD
  model: ModelConfig | None = None
  vocabulary: str = ""
  extra_ids: base.CountOrZero = 0


def run(config: ConvertConfig, operative_config: str = "") -> runs.RunResult:
  """Converts weights; the output is written completely or not at all.

  Tensors in bfloat16 stay so, and all others are written in float32.

  `operative_config` is not used, but every command takes it.

  Returns:
    The file or folder that was written.

  Raises:
    ValueError: the source cannot be read, or its tensors, its shape and the vocabulary
      do not fit together.
  """
  to_folder = config.output_kind != _OSD
  # Checked first: converting a large model takes minutes.
  kind = "new folder" if to_folder else "file"
  runs.check_output("ConvertConfig.output", config.output, kind)
  source = assets.resolve(config.source, "ConvertConfig.source")
  kind = _kind_of(source)
  if kind in (_HEAD, _OSD_HEAD) or config.output_kind in _HEAD_KINDS:
    output = _convert_head(config, source, kind)
    _say(f"{kind} {source} -> {config.output_kind} {output}")
    return runs.RunResult(output)
  model = _READERS[kind](config, source)
  # A given shape is only a check here: these formats store their own.
  if config.model is not None and kind != _T5X:
    _check_model(config, model.config)
  tokenizer: dict[str, bytes] = {}
  if config.vocabulary:
    path = assets.resolve(config.vocabulary, "ConvertConfig.vocabulary")
    vocabulary = Vocabulary.load(path, config.extra_ids)
    pairs.check_vocabulary(config, "source", model, vocabulary)
    # With the fingerprint, loading can refuse another vocabulary of the same size.
    model = dataclasses.replace(model, vocabulary=vocabulary.fingerprint)
    tokenizer = tokenizer_files(vocabulary)
  if to_folder:
    output = hugging_face.write(config.output, model, tokenizer)
  else:
    output = weights.save(config.output, model, storage="as held")
  _say(f"{kind} {source} -> {config.output_kind} {output}")
  if to_folder and not tokenizer:
    _say("no tokenizer is written, as ConvertConfig.vocabulary is empty")
  return runs.RunResult(output)


def _say(text: str) -> None:
  rich.console.Console(stderr=True).print(text, highlight=False)


_READERS: dict[str, Callable[[ConvertConfig, Path], weights.Weights]] = {
  _HUGGING_FACE: lambda config, source: hugging_face.load(source, as_stored=True),
  _T5X: lambda config, source: formats.tool(_T5X).read(source, _shape(config)),
  _OSD: lambda config, source: weights.load(source, as_stored=True),
}


def _convert_head(config: ConvertConfig, source: Path, kind: str) -> Path:
  """Converts an EAGLE-3 head from a folder or file of this package, or to one."""
  if kind == _HEAD:
    head = heads.load(source, config.model)
  else:
    head = attached.read(source) if kind == _OSD_HEAD else None
  if head is None or not isinstance(head.config, EagleConfig):
    raise base.InputError(
      f"ConvertConfig.source: {source} holds no EAGLE-3 head, and output_kind"
      f" {config.output_kind!r} is for one; expected a folder of speculators or"
      " SpecForge, or a draft that was learned from one."
    )
  if config.output_kind == _HUGGING_FACE:
    raise base.InputError(
      f"ConvertConfig.output_kind: received {_HUGGING_FACE!r} for an EAGLE-3 head,"
      f" expected one of {', '.join(map(repr, (*_HEAD_KINDS, _OSD)))}."
    )
  if config.output_kind == _OSD:
    return weights.save(config.output, head)
  return heads.write(config.output, head, config.output_kind)


def _kind_of(source: Path) -> str:
  if formats.reader_of(source):
    return _HUGGING_FACE
  if source.is_dir() and heads.is_head(source):
    return _HEAD
  if source.is_file():
    is_draft = weights.is_attached(source)
    is_head = is_draft and isinstance(weights.shape_of(source), EagleConfig)
    return _OSD_HEAD if is_head else _OSD
  if (source / "config.json").is_file():
    return _HUGGING_FACE
  if (source / "checkpoint").is_file() or (source / "state").is_dir():
    return _T5X
  content = "does not exist"
  if source.is_dir():
    names = sorted(path.name for path in source.iterdir())
    content = f"holds {', '.join(names[:5]) or 'nothing'}"
    if advice := folders.kind_of(source):
      raise base.InputError(f"ConvertConfig.source: {source}: {advice}.")
  raise base.InputError(
    f"ConvertConfig.source: received {source}, which {content}; expected a folder with"
    " config.json (transformers), checkpoint or state (t5x's checkpoint_STEP), or a"
    " weights file."
  )


def _shape(config: ConvertConfig) -> T5Config:
  """The model's shape from the config; a t5x checkpoint does not store it."""
  if not isinstance(config.model, T5Config):
    raise base.InputError(
      f"ConvertConfig.model: received {config.model} for {config.source}, expected a"
      " T5Config, because a t5x checkpoint does not store its shape; include one of"
      " models/ and bind ConvertConfig.model = @T5Config()."
    )
  return config.model


def _check_model(config: ConvertConfig, shape: ModelConfig) -> None:
  # embedding_std only matters for initialization, and no format stores it.
  if dataclasses.replace(shape, embedding_std=1.0) != dataclasses.replace(
    config.model or shape, embedding_std=1.0
  ):
    raise base.InputError(
      f"ConvertConfig.model: received {config.model}, but {config.source} has the"
      f" shape {shape}; leave ConvertConfig.model unset."
    )
