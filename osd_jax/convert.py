"""Converts weights between this package's format, Hugging Face's and t5x's."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import rich.console

from osd_jax import assets, base, writers
from osd_jax.data.vocabularies import Vocabulary
from osd_jax.models import convert, t5, weights

_HUGGING_FACE, _T5X, _OSD = "hugging_face", "t5x", "osd"


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
  """One conversion.

  Attributes:
    source: a folder of transformers, a folder of t5x (checkpoint_STEP), or weights of
      this package.
    output: file to write, or folder where `output_kind` is "hugging_face".
    kind: of the source: "hugging_face", "t5x", "osd", or "auto" to see by its files.
    output_kind: "osd" or "hugging_face".
    model: shape of the source; t5x's checkpoints do not say it, others do.
    vocabulary: SentencePiece model of the weights, or a folder that holds spiece.model;
      "" if unknown. Stored as a fingerprint, or as a file beside Hugging Face's.
    extra_ids: sentinels behind its pieces, see `Vocabulary.load`.
    allow_torch_bin: read pytorch_model.bin, a pickle, where there is nothing else.
  """

  source: str
  output: str
  kind: str = "auto"
  output_kind: str = _OSD
  model: t5.T5Config | None = None
  vocabulary: str = ""
  extra_ids: int = 0
  allow_torch_bin: bool = False

  def __post_init__(self):
    choices = {
      "kind": ("auto", _HUGGING_FACE, _T5X, _OSD),
      "output_kind": (_OSD, _HUGGING_FACE),
    }
    for name, known in choices.items():
      if getattr(self, name) not in known:
        raise base.InputError(
          f"ConvertConfig.{name}: received {getattr(self, name)!r}, expected one of"
          f" {', '.join(map(repr, known))}."
        )
    for name in ("source", "output"):
      if not getattr(self, name):
        raise base.InputError(f"ConvertConfig.{name}: received '', expected a path.")
    if self.kind == _T5X and self.model is None:
      raise _no_model(self)


def run(config: ConvertConfig, operative_config: str = "") -> writers.RunResult:
  """Reads, checks and writes; what is written appears complete or not at all.

  Args:
    config: the conversion.
    operative_config: text of the settings; kept nowhere.

  Returns:
    The file or folder that was written.

  Raises:
    ValueError: the source cannot be read, or its tensors, its shape and the vocabulary
      do not belong together.
  """
  if config.output_kind == _OSD:
    writers.check_output("ConvertConfig.output", config.output)
  source = assets.resolve(config.source)
  kind = _kind_of(source) if config.kind == "auto" else config.kind
  found = _READERS[kind](config, source)
  if config.model is not None and kind != _T5X:
    _check_model(config, found.config)
  found = _with_vocabulary(config, found)
  if config.output_kind == _HUGGING_FACE:
    path = Vocabulary.load(_path(config)).path if config.vocabulary else None
    written = convert.write_hugging_face(config.output, found, path)
  else:
    written = weights.save(config.output, found)
  console = rich.console.Console(stderr=True)
  console.print(f"{kind} {source} -> {config.output_kind} {written}", highlight=False)
  return writers.RunResult(written)


def _read_t5x(config: ConvertConfig, source: Path) -> weights.Weights:
  if config.model is None:
    raise _no_model(config)
  return convert.read_t5x(source, config.model)


_READERS: dict[str, Callable[[ConvertConfig, Path], weights.Weights]] = {
  _HUGGING_FACE: lambda config, source: convert.read_hugging_face(
    source, config.allow_torch_bin
  ),
  _T5X: _read_t5x,
  _OSD: lambda config, source: weights.load(source),
}


def _kind_of(source: Path) -> str:
  if source.is_file():
    return _OSD
  if (source / "config.json").is_file():
    return _HUGGING_FACE
  if (source / "checkpoint").is_file() or (source / "state").is_dir():
    return _T5X
  found = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
  raise base.InputError(
    f"ConvertConfig.source: received {source}, which holds"
    f" {', '.join(found[:5]) or 'nothing'}; expected a folder with config.json"
    " (transformers), checkpoint or state (t5x's checkpoint_STEP), or a weights file."
  )


def _no_model(config: ConvertConfig) -> base.InputError:
  return base.InputError(
    f"ConvertConfig.model: received None for {config.source}, expected a T5Config:"
    " t5x's checkpoints do not say their shape; include one of models/ and bind"
    " ConvertConfig.model = @T5Config()."
  )


def _check_model(config: ConvertConfig, found: t5.T5Config) -> None:
  if dataclasses.replace(found, embedding_std=1.0) != dataclasses.replace(
    config.model or found, embedding_std=1.0
  ):
    raise base.InputError(
      f"ConvertConfig.model: received {config.model}, but {config.source} is of"
      f" shape {found}; leave the model out."
    )


def _path(config: ConvertConfig) -> Path:
  return assets.resolve(config.vocabulary)


def _with_vocabulary(config: ConvertConfig, found: weights.Weights) -> weights.Weights:
  """The weights with the vocabulary's fingerprint, if it can be theirs."""
  if not config.vocabulary:
    return found
  vocabulary = Vocabulary.load(_path(config), config.extra_ids)
  if found.vocabulary not in ("", vocabulary.fingerprint):
    raise base.InputError(
      f"ConvertConfig.vocabulary: received {config.vocabulary} with extra_ids"
      f" {config.extra_ids} (fingerprint {vocabulary.fingerprint[:12]}), but"
      f" {config.source} was trained with {found.vocabulary[:12]}; name that one."
    )
  if found.config.vocab_size < vocabulary.size:
    raise base.InputError(
      f"ConvertConfig.vocabulary: {config.vocabulary} has {vocabulary.size} ids,"
      f" expected at most the {found.config.vocab_size} of {config.source}."
    )
  return dataclasses.replace(found, vocabulary=vocabulary.fingerprint)
